-- Factors of channels: where they may go, that a model gives what it gave; SmoothQuant; AWQ; HQQ.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local second_order = dofile(check.root .. "tests/modules/second_order.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local awq, hqq = require "tycho.quant.awq", require "tycho.quant.hqq"
local grids = require "tycho.quant.grids"

local function randomize(model)
  for name, p in model:named_parameters() do
    if p.ndim >= 2 then p:detach():normal_(0, 0.15) end
    if name:find "norm" or name:find "ln_" then
      p:detach():uniform_(0.5, 1.5)
      if name:find "weight" then p:detach():narrow(0, 0, 2):mul_(12) end -- a few channels are far larger
    end
  end
  return model
end

local function llama(kv)
  ty.manual_seed(3)
  return randomize(llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = kv or 4, max_position_embeddings = 32 })
end

local function gpt2()
  ty.manual_seed(3)
  return randomize(llm.GPT2 { vocabulary = 40, context = 32, width = 32, layers = 2, heads = 4 })
end

local function batches()
  local data = {}
  for i = 1, 3 do data[i] = { tokens = ty.randint(0, 40, { 1, 30 }) } end
  return data
end

local function distance(model, original, data)
  return ty.no_grad(function() return (model(data[1].tokens) - original(data[1].tokens)):square():mean():item() end)
end

-- Which module takes the factors of each layer, by the layer's last name, in the first block.
local function places(model)
  local found = {}
  for _, layer in ipairs(quant.smooth(model, batches())) do
    if layer.name:find("%.0%.") then found[layer.name:match "[^.]+$"] = layer.before end
  end
  return found
end

check.test("where factors go is found by trying", function()
  check.equal(places(llama()), { q_proj = "input_layernorm", k_proj = "input_layernorm", v_proj = "input_layernorm",
    o_proj = "self_attn.v_proj", gate_proj = "post_attention_layernorm", up_proj = "post_attention_layernorm",
    down_proj = "mlp.up_proj" })
  -- With fewer heads of values than of queries nothing before the output takes one factor for each channel.
  check.equal(places(llama(2)).o_proj, nil)
  -- In GPT-2 there is an activation between the layers of the MLP, and queries, keys and values are one layer.
  check.equal(places(gpt2()), { c_attn = "ln_1", c_fc = "ln_2" })
  local model = gpt2()
  check.equal(quant.smooth(model, batches()).left, { "h.0.attn.c_proj", "h.0.mlp.c_proj",
    "h.1.attn.c_proj", "h.1.mlp.c_proj" })
end)

check.test("SmoothQuant: the model is what it was, inputs and columns are by the formula", function()
  for _, make in ipairs { llama, gpt2 } do
    local original, model, data = make(), make(), batches()
    local scale = ty.no_grad(function() return original(data[1].tokens):square():mean():item() end)
    quant.smooth(model, data, { strength = 0.7 })
    check.ok(distance(model, original, data) < 1e-9 * scale, distance(model, original, data) / scale)
  end
  -- The largest input of channel i is largest_i / s_i with s_i = largest_i^a / column_i^(1 - a).
  local original, model, data = llama(), llama(), batches()
  quant.smooth(model, data, { strength = 0.7 })
  local function seen(m)
    local layer, largest = m.model.layers[1].mlp.gate_proj, nil
    local remove = layer:register_forward_pre_hook(function(_, x)
      local found = ty.norm(x:flatten(0, -2), math.huge, 0)
      largest = largest and ty.maximum(largest, found) or found
    end)
    ty.no_grad(function() for _, batch in ipairs(data) do m(batch.tokens) end end)
    remove()
    return largest
  end
  local mlp = original.model.layers[1].mlp
  local columns = ty.maximum(ty.norm(mlp.gate_proj.weight:detach(), math.huge, 0),
    ty.norm(mlp.up_proj.weight:detach(), math.huge, 0))
  local before = seen(original)
  check.close(seen(model):tolist(), (before / (before:pow(0.7) / columns:pow(0.3))):tolist(), 1e-4)
end)

check.test("AWQ: the factors are the best of the exponents, and 0 is among them", function()
  ty.manual_seed(5)
  local x = (second_order.inputs(200, 24, "f64")) * ty.linspace(0.1, 6, 24, { dtype = "f64" })
  local moment, w = ty.matmul(x:transpose(0, 1), x), ty.randn(16, 24, { dtype = "f64" })
  local size, o = x:abs():mean(0), { bits = 3, group = 0, symmetric = false, mse = false }
  local s, alpha, least, plain = awq.search({ w }, moment, size, o)
  local function off(by)
    local q = grids.nearest(w * by, o) / by
    return ty.matmul(x, (q - w):transpose(0, 1)):square():sum():item()
  end
  local best, at = math.huge, nil
  for i = 0, 19 do
    local by = size:to("f32"):pow(i / 20)
    by = (by / math.sqrt(by:max():item() * by:min():item())):to("f64"):unsqueeze(0)
    if off(by) < best then best, at = off(by), i / 20 end
  end
  check.close(alpha, at, 1e-12)
  check.close(least, best, 1e-6 * best)
  check.close(off(s:to("f64"):unsqueeze(0)), best, 1e-6 * best)
  check.close(plain, off(ty.ones(1, 24, { dtype = "f64" })), 1e-6 * plain)
  check.ok(least < 0.8 * plain, least / plain)
end)

check.test("AWQ: ranges of groups are cut where that loses less", function()
  ty.manual_seed(6)
  local x, moment = second_order.inputs(300, 16, "f64")
  local w = ty.randn(6, 16, { dtype = "f64" })
  local o = { bits = 2, group = 8, symmetric = false, mse = false }
  local cut = awq.clip(w, moment, o)
  local function off(value, row, group)
    local e = (value - w):select(0, row):narrow(0, group * 8, 8)
    return ty.matmul(x:narrow(1, group * 8, 8), e):square():sum():item()
  end
  local fewer = 0
  for row = 0, 5 do
    for group = 0, 1 do
      local best = math.huge
      for i = 0, 9 do
        local part = w:select(0, row):narrow(0, group * 8, 8)
        local limit = part:abs():max():item() * (1 - i / 20)
        local tried = w:clone()
        tried:select(0, row):narrow(0, group * 8, 8):copy_(part:clamp(-limit, limit))
        best = math.min(best, off(grids.nearest(tried, o), row, group))
      end
      local mine = off(grids.nearest(cut, o), row, group)
      check.close(mine, best, 1e-9 * best)
      if mine < off(grids.nearest(w, o), row, group) then fewer = fewer + 1 end
    end
  end
  check.ok(fewer >= 6, fewer)
  check.equal(awq.clip(w:narrow(1, 0, 12), moment:narrow(0, 0, 12):narrow(1, 0, 12), o):tolist(),
    w:narrow(1, 0, 12):tolist())
end)

check.test("AWQ on models: nearer than rounding, on plain grids and packed", function()
  for name, make in pairs { llama = llama, gpt2 = gpt2 } do
    local original, data = make(), batches()
    for _, o in ipairs { { bits = 3, group = 16 }, { bits = 4 }, name == "llama" and { format = "q4_0" } or nil } do
      if o.format then o.skip = { "down_proj" } end -- its rows are no whole blocks
      local model, plainly = original:clone(), original:clone()
      local report = quant.awq(model, data, o)
      check.equal(#report, name == "gpt2" and 8 or o.format and 12 or 14)
      check.ok(report.bits > 3 and report.bits < 5, report.bits)
      quant.round(plainly, o)
      local mine, theirs = distance(model, original, data), distance(plainly, original, data)
      check.ok(mine < theirs, ("%s: %g %g"):format(name, mine, theirs))
      if o.format then check.equal(model.model.layers[1].mlp.up_proj.weight.dtype, "q4_0") end
    end
  end
end)

-- The paper's half-quadratic steps for one group, with plain numbers.
local function plain_hqq(w, bits)
  local most, low, high = (1 << bits) - 1, math.huge, -math.huge
  for _, x in ipairs(w) do low, high = math.min(low, x), math.max(high, x) end
  local scale = most / (high - low)
  local zero, beta, least, best = -low * scale, 10, math.huge, nil
  local function round(x) -- to even
    local f = math.floor(x)
    local d = x - f
    if d > 0.5 or d == 0.5 and f % 2 == 1 then return f + 1 end
    return f
  end
  if bits == 4 then zero = round(zero) end
  for _ = 1, 20 do
    local q, sum, total = {}, 0, 0
    for i, x in ipairs(w) do
      q[i] = math.min(math.max(round(x * scale + zero), 0), most)
      sum = sum + math.abs(x - (q[i] - zero) / scale) / #w
    end
    if sum >= least then break end
    least, best = sum, {}
    for i in ipairs(w) do best[i] = (q[i] - zero) / scale end
    for i, x in ipairs(w) do
      local e = x - (q[i] - zero) / scale
      local size = math.max(0, math.abs(e) - math.max(math.abs(e), 1e-30) ^ -0.3 / beta)
      total = total + q[i] - (x - (e < 0 and -size or size)) * scale
    end
    zero, beta = total / #w, beta * 1.01
  end
  return best
end

check.test("HQQ: values are those of the paper's steps", function()
  ty.manual_seed(7)
  for _, bits in ipairs { 2, 3, 4 } do
    local w = ty.randn(1, 48, { dtype = "f64" }):pow(3)
    check.close(hqq.solve(w, bits):flatten():tolist(), plain_hqq(w:flatten():tolist(), bits), 1e-9)
  end
  -- A group of equal values has no range.
  check.close(hqq.solve(ty.full({ 2, 8 }, 0.3), 4):tolist(), ty.full({ 2, 8 }, 0.3):tolist(), 1e-4)
end)

check.test("AWQ: factors of the package autoawq; no more lost, and less than with its other rule of factors", function()
  local f = ty.io.load_npz(check.root .. "tests/fixtures/awq.npz")
  local function moment_of(x) return ty.matmul(x:transpose(0, 1):to "f64", x:to "f64") end
  for _, bits in ipairs { 4, 3 } do
    local o = { bits = bits, group = 32, symmetric = false, mse = false }
    local s = awq.search({ f.w }, moment_of(f.x), f.x:abs():mean(0), o)
    check.close(s:tolist(), f["scales_" .. bits]:tolist(), 1e-4)
    local moved = f.w * s
    local cut = awq.clip(moved, moment_of(f.x / s), o)
    local function off(w)
      return ty.matmul(f.x, (grids.nearest(w, o) / s - f.w):transpose(0, 1)):square():mean():item()
    end
    check.close(off(moved), f["plain_" .. bits]:item(), 1e-3)
    -- Of a range cut on both sides zero lies between two codes, where the last bit decides which it gets.
    local theirs = f["clipped_" .. bits]:item()
    check.ok(off(cut) <= 1.03 * theirs, ("%g, theirs %g"):format(off(cut), theirs))
    check.ok(off(cut) < f[("clipped_%d_duo"):format(bits)]:item(), "the package's default")
  end
end)

check.test("HQQ: the values of the package hqq", function()
  local f = ty.io.load_npz(check.root .. "tests/fixtures/hqq.npz")
  for _, bits in ipairs { 8, 4, 3, 2 } do
    local ours, theirs = hqq.solve(f.w:reshape(-1, 64), bits):reshape(f.w.shape), f["values_" .. bits]
    local a, b = (ours - f.w):abs():mean():item(), (theirs - f.w):abs():mean():item()
    check.ok(a <= b * (1 + 1e-5), ("%d bits: off by %g, theirs by %g"):format(bits, a, b))
    check.close(ours:tolist(), theirs:tolist(), 1e-5)
  end
end)

check.test("HQQ on models: never more wrong than the first zeros, nearer than rounding at 2 bits", function()
  local original, data = llama(), batches()
  local model, plainly = original:clone(), original:clone()
  local report = quant.hqq(model, { bits = 2, group = 16 })
  check.equal({ #report, report.bits }, { 14, 4.0 })
  for _, layer in ipairs(report) do check.ok(layer.after <= layer.before, layer.name) end
  quant.round(plainly, { bits = 2, group = 16 })
  check.ok(distance(model, original, data) < distance(plainly, original, data))
end)

check.test("wrong arguments, the model as before", function()
  local model = llama()
  local before = model.model.layers[1].mlp.up_proj.weight:tolist()
  check.fails(function() quant.hqq(model, { group = 31 }) end, "quant.hqq: group: expected a divisor of the 32 inputs")
  check.fails(function() quant.hqq(model, { bits = 9 }) end, "quant.hqq: bits: expected an integer in %[1, 8%]")
  check.fails(function() quant.awq(model, batches(), { bits = 5 }) end, "quant.awq: bits: expected 2, 3, 4 or 8")
  check.fails(function() quant.awq(model, batches(), { format = "q4_k" }) end, "which does not divide the 32 inputs")
  check.fails(function() quant.awq(model, 5) end, "quant.awq: data: expected a dataset")
  check.fails(function() quant.smooth(model, batches(), { strength = 2 }) end, "smooth: strength: expected a number")
  model.model.layers[2].mlp.up_proj.weight:detach():fill_(0 / 0)
  check.fails(function() quant.hqq(model, { group = 16 }) end, "a weight is not finite")
  check.equal(model.model.layers[1].mlp.up_proj.weight:tolist(), before)
end)

check.finish()
