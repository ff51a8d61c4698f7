-- Tensors of all ranks: forms and what changing them costs, every op in every form against one rank, gradients.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, close, fails = check.test, check.equal, check.close, check.fails

test("from every form to every other: values, and bytes as the table of costs says", function()
  for ranks = 2, 4, 2 do
    local got = dist.run(ranks, function(group)
      local d = require "tycho.dist"
      local axis, value = d.global.axes(group), ty.arange(8 * 4 * 12):to("f32"):reshape(8, 4, 12)
      local forms, out = { "S(0)", "S(1)", "S(2)", "B", "P" }, {}
      for _, from in ipairs(forms) do
        for _, to in ipairs(forms) do
          local x, before = axis:tensor(value, { from }), group:traffic().bytes
          local y = x:to { to }
          local sent = group:traffic().bytes - before
          out[from .. " " .. to] = { sent, y.sbp[1] == to and y:whole():equal(value), y.part:numel() }
        end
      end
      return out
    end)
    for pair, first in pairs(got[1]) do
      local from, to = pair:match "^(%S+) (%S+)$"
      local bytes = 0
      for rank = 1, ranks do
        bytes = bytes + got[rank][pair][1]
        equal(got[rank][pair][2], true, ("%s -> %s on %d ranks"):format(from, to, ranks))
      end
      equal(bytes, dist.boxing.cost(from, to, ranks, 8 * 4 * 12 * 4) // 1 | 0, ("%s -> %s, bytes"):format(from, to))
      equal(first[3], to:find "S" and 384 // ranks or 384)
    end
  end
end)

-- Ops of f64 tensors, called with global tensors or, through `alone`, with plain ones; what each has to be.
local function ops()
  local function by(name) return function(x, ...) return x[name](x, ...) end end
  return {
    { "relu", { { 4, 6 } }, by "relu", function(x) return x:relu() end },
    { "silu", { { 4, 6 } }, by "silu", function(x) return x:silu() end },
    { "gelu", { { 4, 6 } }, by "gelu", function(x) return x:gelu() end },
    { "scale", { { 4, 6 } }, function(x) return x:scale(-3) end, function(x) return x * -3 end },
    { "softmax", { { 4, 6 } }, by "softmax", function(x) return x:softmax(-1) end },
    { "softmax of the first", { { 4, 6 } }, function(x) return x:softmax(0) end, function(x) return x:softmax(0) end },
    { "transpose", { { 4, 2, 6 } }, function(x) return x:transpose(0, -1) end,
      function(x) return x:transpose(0, 2) end },
    { "unflatten", { { 4, 8, 2 } }, function(x) return x:unflatten(1, 4) end,
      function(x) return x:unflatten(1, { 4, 2 }) end },
    { "flatten", { { 2, 4, 2 } }, function(x) return x:flatten(0) end, function(x) return x:flatten(0, 1) end },
    { "sum", { { 4, 6, 2 } }, function(x) return x:sum(1) end, function(x) return x:sum(1) end },
    { "rms_norm", { { 4, 6 }, { 6 } }, by "rms_norm", function(x, w) return x:rms_norm({ 6 }, w, 1e-6) end },
    { "add", { { 4, 6 }, { 4, 6 } }, by "add", function(x, y) return x + y end },
    { "mul", { { 4, 6 }, { 4, 6 } }, by "mul", function(x, y) return x * y end },
    { "linear", { { 2, 4, 6 }, { 8, 6 } }, by "linear", function(x, w) return ty.linear(x, w) end },
    { "matmul", { { 2, 4, 6 }, { 2, 6, 8 } }, by "matmul", function(x, y) return x:matmul(y) end },
    { "attention", { { 2, 4, 6, 4 }, { 2, 4, 6, 4 }, { 2, 4, 6, 4 } }, by "attention",
      function(q, k, v) return ty.scaled_dot_product_attention(q, k, v, nil, true) end },
  }
end

-- Of an op with arguments in all forms: value and gradients from one rank, and how far the ranks' are away.
local function worst_of(group, index, sizes)
  local t = require "tycho"
  local axes = require("tycho.dist").global.axes(group, sizes)
  local entry = ops()[index]
  local forms, shapes = { "B" }, entry[2]
  for d = 0, #shapes[1] - 1 do forms[#forms + 1] = ("S(%d)"):format(d) end
  local worst, tried = 0, 0
  local function try(list)
    t.manual_seed(7)
    local values, globals, leaves = {}, {}, {}
    for k, shape in ipairs(shapes) do
      values[k] = t.randn(shape, { dtype = "f64" })
      local ok, x = pcall(axes.parameter, axes, values[k], list[k])
      if not ok then return end -- a form that does not fit
      globals[k], leaves[k] = x, values[k]:clone():requires_grad_()
    end
    local want = entry[4](table.unpack(leaves))
    local weight = t.randn(want.shape, { dtype = "f64" });
    (want * weight):sum():backward()
    local got = entry[3](table.unpack(globals))
    local as = {} -- what is linear stays partial
    for i, form in ipairs(got.sbp) do as[i] = form == "P" and "B" or form end
    local loss = got:mul(axes:tensor(weight, as))
    while #loss.shape > 0 do loss = loss:sum(0) end
    loss:backward(globals)
    worst = math.max(worst, (got:whole() - want):abs():max():item())
    for k, x in ipairs(globals) do
      local grad = setmetatable({ axes = axes, shape = x.shape, sbp = x.sbp, part = x.part.grad }, getmetatable(x))
      worst = math.max(worst, (grad:whole() - leaves[k].grad):abs():max():item())
    end
    tried = tried + 1
  end
  local function combine(list)
    if #list == #shapes then return try(list) end
    for _, form in ipairs(forms) do
      if #axes.groups == 1 then
        list[#list + 1] = { form }
        combine(list)
        list[#list] = nil
      else
        for _, other in ipairs(#list == 0 and forms or { "B" }) do
          list[#list + 1] = { form, other }
          combine(list)
          list[#list] = nil
        end
      end
    end
  end
  combine {}
  return { worst, tried }
end

test("every op in every form, and its gradients", function()
  for index, entry in ipairs(ops()) do
    local got = dist.run(2, worst_of, nil, index)
    equal(got[1][1] < 1e-12 and got[2][1] < 1e-12, true, entry[1] .. ": " .. got[1][1])
    equal(got[1][2] >= 3, true, entry[1])
  end
  for _, index in ipairs { 7, 11, 14, 16 } do
    local got = dist.run(4, worst_of, nil, index, { 2, 2 })
    equal(got[3][1] < 1e-12, true, ops()[index][1] .. " on two axes: " .. got[3][1])
    equal(got[1][2] >= 9, true)
  end
end)

test("embedding and cross entropy", function()
  local function run(group)
    local t, d = require "tycho", require "tycho.dist"
    local axis, out = d.global.axes(group), {}
    t.manual_seed(3)
    local table_, ids = t.randn(8, 4, { dtype = "f64" }), t.randint(0, 8, { 6 })
    for _, forms in ipairs { { "B", "B" }, { "S(0)", "B" }, { "B", "S(0)" }, { "B", "S(1)" }, { "S(0)", "S(0)" } } do
      local w = axis:parameter(table_, { forms[2] })
      local x = axis:tensor(ids, { forms[1] }):embedding(w)
      local loss = x:linear(axis:tensor(table_, { "B" })):cross_entropy(axis:tensor(ids, { "S(0)" }))
      loss:backward { w }
      local grad = setmetatable({ axes = axis, shape = w.shape, sbp = w.sbp, part = w.part.grad }, getmetatable(w))
      out[#out + 1] = { loss:whole():item(), grad:whole():sum(0):tolist() }
    end
    return out
  end
  local one, two = dist.run(1, run), dist.run(2, run)
  close(two[1], one[1], 1e-12)
  close(two[2], one[1], 1e-12)
  for i = 2, 5 do close(one[1][i], one[1][1], 1e-12) end
end)

test("the cheapest form is taken", function()
  local got = dist.run(2, function(group)
    local d = require "tycho.dist"
    local axis = d.global.axes(group)
    local x, w = ty.ones(4, 6), ty.ones(2, 6)
    local function form(fx, fw) return axis:tensor(x, { fx }):linear(axis:tensor(w, { fw })).sbp[1] end
    local forms = { form("S(0)", "B"), form("B", "S(0)"), form("S(1)", "S(1)"), form("B", "B"), form("P", "B") }
    local before = group:traffic().bytes
    local few = axis:tensor(ty.ones(100, 6), { "S(0)" }):linear(axis:tensor(w, { "S(0)" }))
    return { forms, few.sbp[1], group:traffic().bytes - before }
  end)
  equal(got[1], { { "S(0)", "S(1)", "P", "B", "P" }, "S(0)", 24 }, "the weight goes, not the input")
end)

test("arguments", function()
  local function alone(fn, text)
    fails(function()
      dist.run(2, function(group) fn(require("tycho.dist").global.axes(group)) end)
    end, text)
  end
  alone(function(a) a:tensor(ty.ones(3, 2), { "S(0)" }) end, "S(0) of [3, 2] cannot be divided by 2 ranks")
  alone(function(a) a:tensor(ty.ones(4), { "S(1)" }) end, "expected a split of one of the 1 dimensions")
  alone(function(a) a:tensor(ty.ones(4), { "X" }) end, 'expected "S(d)", "B" or "P"')
  alone(function(a) a:tensor(ty.ones(4), { "B", "B" }) end, "expected 1 forms, one for each axis, got 2")
  alone(function(a) a:parameter(ty.ones(4), { "P" }) end, "a parameter is split or broadcast")
  alone(function(a) a:tensor(ty.ones(4, 2), { "B" }):linear(ty.ones(2, 2)) end, "GlobalTensor:linear: weight: expected")
  alone(function(a) a:tensor(ty.ones(4, 2), { "B" }):sum(2) end, "dim: expected one of the 2 dimensions")
  alone(function(a) a:tensor(ty.ones(4, 2), { "B" }):backward {} end, "loss: expected one number")
  fails(function()
    dist.run(4, function(group)
      require("tycho.dist").global.axes(group, { 2, 2 }):tensor(ty.ones(4, 4), { "S(0)", "S(0)" })
    end)
  end, "dimension 0 is split along two axes")
  fails(function() dist.run(4, function(g) require("tycho.dist").global.axes(g, { 2, 3 }) end) end,
    "sizes: expected 4 ranks together, got 2 x 3")
  alone(function(a) a:tensor(ty.ones(4), { "B" }).relu(3) end, "relu: x: expected a tensor of all ranks, got 3")
end)

check.finish()
