-- nn.attention: heads split and joined, contexts, masks, groups, dropout; beside sums written out in f64.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local function off(a, b) return (a - b):abs():max():item() end

-- Softmax and products, one head and one query after the other. sees(i, j): whether query i sees key j; both count
-- positions from 0, queries are the last.
local function reference(q, k, v, heads, kv_heads, scale, sees, added, softcap)
  local b, t, s = q.shape[1], q.shape[2], k.shape[2]
  local d, dv = q.shape[3] // heads, v.shape[3] // kv_heads
  local y = ty.zeros({ b, t, heads * dv }, { dtype = "f64" })
  for row = 0, b - 1 do
    for h = 0, heads - 1 do
      local g = h // (heads // kv_heads)
      local keys, values = k:select(0, row):narrow(1, g * d, d), v:select(0, row):narrow(1, g * dv, dv)
      for i = 0, t - 1 do
        local query = q:select(0, row):select(0, i):narrow(0, h * d, d)
        local scores = ty.matmul(keys, query) * scale
        if softcap then scores = (scores / softcap):tanh() * softcap end
        if added then scores = scores + added:select(0, row):select(0, h):select(0, i) end
        local list, any = scores:tolist(), false
        for j = 0, s - 1 do
          if sees and not sees(i + s - t, j, row) then list[j + 1] = -math.huge else any = true end
        end
        if any then
          local weights = ty.tensor(list, { dtype = "f64" }):softmax(0)
          y:select(0, row):select(0, i):narrow(0, h * dv, dv):copy_(ty.matmul(weights, values))
        end
      end
    end
  end
  return y
end

local cu = ty.tensor({ 0, 2, 2, 6 }, { dtype = "i64" })
local function sequence(i) return i < 2 and 1 or 3 end

local padding = ty.tensor({ { 0, 0, 1, 1, 1, 1 }, { 1, 1, 1, 1, 1, 1 } }):to "bool"

local cases = {
  plain = {},
  grouped = { kv_heads = 2 },
  causal = { causal = true, sees = function(i, j) return j <= i end },
  ["a context"] = { s = 9 },
  ["queries are the last"] = { s = 9, causal = true, sees = function(i, j) return j <= i end },
  window = { causal = true, window = 2, sees = function(i, j) return j <= i and i - j <= 2 end },
  ["window on both sides"] = { window = 1, sees = function(i, j) return math.abs(i - j) <= 1 end },
  scale = { scale = 0.3 },
  padded = { mask = padding:unsqueeze(1):unsqueeze(1), sees = function(_, j, row) return row > 0 or j >= 2 end },
  ["padded and causal"] = { mask = padding:unsqueeze(1):unsqueeze(1), causal = true,
    sees = function(i, j, row) return j <= i and (row > 0 or j >= 2) end },
  added = { mask = ty.randn({ 2, 4, 6, 6 }, { dtype = "f64" }) },
  ["capped and added"] = { mask = ty.randn({ 2, 4, 6, 6 }, { dtype = "f64" }), softcap = 0.7 },
  packed = { b = 1, cu_seqlens = cu, sees = function(i, j) return sequence(i) == sequence(j) end },
  ["packed, causal, grouped, with a window"] = { b = 1, cu_seqlens = cu, kv_heads = 2, causal = true, window = 1,
    sees = function(i, j) return sequence(i) == sequence(j) and j <= i and i - j <= 1 end },
}

for name, case in pairs(cases) do
  check.test(name, function()
    ty.manual_seed(1)
    local b, t, s, heads, d, dv = case.b or 2, 6, case.s or 6, 4, 8, 5
    local kv = case.kv_heads or heads
    local function make(...) return ty.randn({ ... }, { dtype = "f64" }):requires_grad_() end
    local q, k, v = make(b, t, heads * d), make(b, s, kv * d), make(b, s, kv * dv)
    local options = { heads = heads, kv_heads = case.kv_heads, causal = case.causal, window = case.window,
      scale = case.scale, mask = case.mask, cu_seqlens = case.cu_seqlens, softcap = case.softcap }
    local weight = ty.randn({ b, t, heads * dv }, { dtype = "f64" })
    local function run(dropout)
      options.dropout = dropout
      for _, x in ipairs { q, k, v } do x:set_grad() end
      local y = nn.attention(q, k, v, options)
      ;(y * weight):sum():backward()
      return { y:detach(), q.grad, k.grad, v.grad }
    end
    local added = case.mask and case.mask.dtype ~= "bool" and case.mask or nil
    local want = reference(q:detach(), k:detach(), v:detach(), heads, kv, case.scale or d ^ -0.5, case.sees, added,
      case.softcap)
    local got = run()
    check.ok(off(got[1], want) < 1e-12, ("values are off by %g"):format(off(got[1], want)))
    -- With next to no dropout the composition is the op: values and gradients.
    for i, x in ipairs(run(1e-12)) do
      check.ok(off(x, got[i]) < 2e-6, ("%d with dropout is off by %g"):format(i, off(x, got[i])))
    end
    local split = nn.attention(nn.split_heads(q, heads), nn.split_heads(k, kv), nn.split_heads(v, kv),
      { causal = case.causal, window = case.window, scale = case.scale, mask = case.mask,
        cu_seqlens = case.cu_seqlens, softcap = case.softcap })
    check.equal(off(split, got[1]), 0.0, "what comes by heads")
  end)
end

check.test("weights are dropped and the rest scaled", function()
  ty.manual_seed(2)
  local q, ones = ty.zeros(1, 200, 4), ty.ones(1, 200, 4)
  local y = nn.attention(q, q, ones, { heads = 1, causal = true, dropout = 0.25 })
  check.close(y[":, 100:"]:mean():item(), 1, 0.03)
  check.ok(y[":, 100:"]:std():item() > 0.01, "sums of what is left differ")
  check.equal(nn.attention(q, q, ones, { heads = 1, dropout = 1 }):abs():max():item(), 0.0, "all of them")
end)

check.test("heads are split and joined", function()
  local x = ty.randn(2, 3, 8)
  local y = nn.split_heads(x, 4)
  check.equal(y.shape, { 2, 4, 3, 2 })
  check.equal(y[1][2][0]:tolist(), x[1][0]["4:6"]:tolist())
  check.equal(nn.join_heads(y):tolist(), x:tolist())
end)

check.test("mistakes", function()
  local x = ty.zeros(2, 3, 8)
  local function fails(text, ...)
    local given = table.pack(...)
    check.fails(function() nn.attention(table.unpack(given, 1, given.n)) end, text)
  end
  fails("attention: q: expected [b, t, heads * d] with the option heads, or [b, heads, t, d], got a tensor [2, 3, 8] "
    .. "with heads = nil", x, x, x)
  fails("attention: q: expected [b, t, heads * d]", x, x, x, { heads = 3 })
  fails("attention: k: expected [b, t, heads * d]", x, nil, x, { heads = 2 })
  fails("attention: v: expected", x, x, ty.zeros(8), { heads = 2 })
  fails("attention: no option 'head'; there are: causal, cu_seqlens, dropout", x, x, x, { head = 2 })
  fails("attention: heads: expected an integer >= 1, got \"2\"", x, x, x, { heads = "2" })
  fails("attention: options: expected a table, got 3", x, x, x, 3)
  check.fails(function() nn.split_heads(ty.zeros(3), 2) end, "split_heads: x: expected a tensor of 3 dimensions")
  check.fails(function() nn.join_heads(x) end, "join_heads: x: expected a tensor of 4 dimensions")
end)


check.test("the ops written out give what the ops give", function()
  local unfused = nn.unfused
  local function values(...) return ty.randn({ ... }, { dtype = "f64" }) end
  local q, k, v, bias = values(2, 4, 5, 3), values(2, 2, 7, 3), values(2, 2, 7, 6), values(1, 4, 5, 7)
  local begins = ty.tensor({ 0, 3, 7 }, { dtype = "i64" })
  for _, o in ipairs { {}, { causal = true }, { window = 2, sinks = 1 }, { causal = true, cu_seqlens = begins },
    { causal = true, softcap = 0.8 } } do
    local want = ty.scaled_dot_product_attention(q, k, v, bias, o)
    check.ok(off(unfused.attention(q, k, v, bias, o), want) < 1e-12)
    local seen = bias:gt(0):logical_or(ty.eye(5, 7, { dtype = "f64" }):flip { 0, 1 }:gt(0)) -- each its own position
    want = ty.scaled_dot_product_attention(q, k, v, seen, o)
    check.ok(off(unfused.attention(q, k, v, seen, o), want) < 1e-12)
  end
  local g = (values(2, 4, 5, 3)):log_sigmoid()
  local keys, wide = values(2, 4, 5, 3), values(2, 4, 5, 2)
  local y, state = unfused.gated_linear_attention(q, keys, wide, g)
  local want, last = ty.gated_linear_attention(q, keys, wide, g)
  check.ok(off(y, want) < 1e-12 and off(state, last) < 1e-12)
  for cell, gates in pairs { lstm = 4, gru = 3, slstm = 4 } do
    local x, weight = values(6, 3, 2 * gates * 4), values(2, gates * 4, 4)
    local states = ty.recurrence(x, weight, { cell = cell })
    check.ok(off(unfused.recurrence(x, weight, { cell = cell }), states) < 1e-12, cell)
    check.fails(function() unfused.recurrence(x, weight:transpose(1, 2), { cell = cell }) end, "weight: expected [")
  end
  for _, taps in ipairs { 5, 700 } do
    local x, kernel = values(2, 3, 600), values(3, taps)
    check.ok(off(unfused.long_conv(x, kernel), ty.long_conv(x, kernel)) < 1e-12)
    check.ok(off(unfused.long_conv(x, kernel, 4), ty.long_conv(x, kernel, 4)) < 1e-12)
  end
  check.fails(function() unfused.long_conv(1, q) end, "unfused.long_conv: x: expected a tensor [.., c, t], got 1")
  check.fails(function() unfused.recurrence(q, k, { cell = "rnn" }) end, 'cell: expected "lstm" or "gru" or "slstm"')
  check.fails(function() unfused.attention(q, k) end, "unfused.attention: v: expected a tensor [b, h, t, d], got nil")
  check.fails(function() unfused.attention(q, k, v, nil, { windo = 2 }) end, "no option 'windo'")
  check.fails(function() unfused.gated_linear_attention(q, k, v, 1) end, "g: expected a tensor [b, h, t, d], got 1")
end)

check.finish()
