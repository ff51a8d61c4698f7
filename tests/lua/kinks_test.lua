-- Gradients at kinks and values at the ends of the range, on every device there is. What PyTorch 2 gives, where nothing
-- else is said.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn
local devices = ty.cuda.count() > 0 and { "cpu", "cuda" } or { "cpu" }

local function on_each(name, body)
  for _, device in ipairs(devices) do
    check.test(name .. " on " .. device, function()
      body(function(values, dtype) return ty.tensor(values, { dtype = dtype or "f32", device = device }) end)
    end)
  end
end

-- Gradients of f(...) for its tensors as lists, and, for `twice`, of 1 g[0] + 2 g[1] + ... as well.
local function gradients(f, inputs, twice)
  for i, x in ipairs(inputs) do inputs[i] = x:detach():requires_grad_() end
  local y = f(table.unpack(inputs))
  local grads = ty.grad(y:sum(), inputs, { create_graph = twice })
  local first, total = {}, nil
  for i, g in ipairs(grads) do
    first[i] = g:detach():tolist()
    if twice then
      local term = (g * ty.arange(1, g:numel() + 1):to { dtype = g.dtype, device = g.device }:reshape(g.shape)):sum()
      total = total and total + term or term
    end
  end
  if not twice then return first end
  local second = {}
  local grads2 = total.requires_grad and ty.grad(total, inputs) or {}
  for i, x in ipairs(inputs) do second[i] = (grads2[i] or ty.zeros_like(x)):detach():tolist() end
  return first, second
end

on_each("norm where it is 0, and where an element is", function(tensor)
  local inf = math.huge
  local at = { -- of { 0, 3, -4 }
    [0] = { 0, 0, 0 }, [0.5] = { 0, 2.154700517654419, -1.866025447845459 }, [1] = { 0, 1, -1 },
    [1.5] = { 0, 0.7329565286636353, -0.8463453054428101 }, [2] = { 0, 0.6, -0.8 },
    [3] = { 0, 0.4448513388633728, -0.7908468246459961 }, [inf] = { 0, 0, -1 }, [-inf] = { 0, 0, 0 },
    [-1] = { 0, 0, 0 },
  }
  for p, want in pairs(at) do
    local norm = function(x) return x:norm(p) end
    check.close(gradients(norm, { tensor { 0, 0, 0 } })[1], { 0, 0, 0 }, 0, "zeros, p = " .. p)
    check.close(gradients(norm, { tensor { 0, 3, -4 } })[1], want, 1e-6, "p = " .. p)
    check.close(gradients(norm, { tensor { 0, 0, 0 } }, true), { { 0, 0, 0 } }, 0, "recorded, p = " .. p)
  end
  local first, second = gradients(function(x) return x:norm() end, { tensor { 0, 3, -4 } }, true)
  check.close(first[1], { 0, 0.6, -0.8 }, 1e-6)
  check.close(second[1], { 0.2, 0.544, 0.408 }, 1e-6)
  local _, flat = gradients(function(x) return x:norm() end, { tensor { 0, 0, 0 } }, true)
  check.close(flat[1], { 0, 0, 0 }, 0) -- NaN in PyTorch
end)

on_each("normalize and cosine_similarity of a row of zeros", function(tensor)
  local weights = tensor { { 0, 1, 2 }, { 3, 4, 5 } }
  local rows = tensor { { 0, 0, 0 }, { 1, 2, 2 } }
  local grads = gradients(function(x) return nn.normalize(x) * weights end, { rows })
  check.close(grads[1][1], { 0, 1e12, 2e12 }, 1e6)
  check.close(grads[1][2], { 2 / 9, -2 / 9, 1 / 9 }, 1e-6)
  local x, y = tensor { 0, 0, 0 }, tensor { 1, 2, 2 }
  grads = gradients(nn.cosine_similarity, { x, y })
  check.close(grads[1], { 1e8 / 3, 2e8 / 3, 2e8 / 3 }, 10)
  check.close(grads[2], { 0, 0, 0 }, 0)
  check.close(gradients(nn.cosine_similarity, { x, x:clone() }), { { 0, 0, 0 }, { 0, 0, 0 } }, 0)
end)

on_each("std of equal elements", function(tensor)
  local rows = tensor { { 1, 1, 1 }, { 1, 2, 4 } }
  local first, second = gradients(function(x) return x:std(1) end, { rows }, true)
  local want = { { 0, 0, 0 }, { -0.4364357590675354, -0.10910891741514206, 0.5455447435379028 } }
  check.close(first[1], want, 1e-6)
  -- The weights of the second derivative are 4, 5 and 6 here.
  check.close(second[1], { { 0, 0, 0 }, { -0.04676094651222229, 0.07014136016368866, -0.02338072657585144 } }, 1e-6)
  check.close(gradients(function(x) return x:std(1) end, { rows })[1], want, 1e-6)
  check.close(gradients(function(x) return x:std() end, { tensor { 0.1, 0.1, 0.1 } })[1], { 0, 0, 0 }, 0)
  check.close(gradients(function(x) return x:std { correction = 0 } end, { tensor { 3 } })[1], { 0 }, 0)
end)

on_each("atan2 at the origin and far from it", function(tensor)
  local grads = gradients(ty.atan2, { tensor { 0, -0.0, 0, 1 }, tensor { 0, 0, -0.0, 0 } })
  check.close(grads, { { 0, 0, 0, 0 }, { 0, 0, 0, -1 } }, 0)
  local first, second = gradients(ty.atan2, { tensor { 0 }, tensor { 0 } }, true)
  check.close({ first, second }, { { { 0 }, { 0 } }, { { 0 }, { 0 } } }, 0)
  -- y / (x^2 + y^2), whose squares are out of range; PyTorch gives 0 and infinities.
  grads = gradients(ty.atan2, { tensor { 1e30, 3e-20 }, tensor { 1e30, 4e-20 } })
  check.close({ grads[1][1] * 1e30, grads[2][1] * 1e30 }, { 0.5, -0.5 }, 1e-6)
  check.close({ grads[1][2] * 1e-20, grads[2][2] * 1e-20 }, { 0.16, -0.12 }, 1e-6)
end)

on_each("cross entropy of no rows", function(tensor)
  local logits, target = tensor { { 1, 2, 3 }, { 0.5, -1, 0 } }, tensor({ -100, -100 }, "i64")
  local zeros = { { 0, 0, 0 }, { 0, 0, 0 } }
  local weight = tensor { { 1, 0, 2 }, { 0, 1, 1 }, { 1, 1, 0 } }
  for _, reduction in ipairs { "mean", "sum" } do
    local ways = {
      function(x) return ty.cross_entropy(x, target, { reduction = reduction }) end,
      function(x) return ty.cross_entropy(x, target, { reduction = reduction, label_smoothing = 0.1 }) end,
      function(x) return ty.nll_loss(x, target, { reduction = reduction }) end,
      function(x) return ty.linear_cross_entropy(x, weight, target, { reduction = reduction }) end,
    }
    for i, way in ipairs(ways) do
      local name = reduction .. ", way " .. i
      check.close(gradients(way, { logits })[1], zeros, 0, name)
      if i ~= 3 then -- nll_loss is linear
        local first, second = gradients(way, { logits }, true)
        check.close({ first[1], second[1] }, { zeros, zeros }, 0, name .. ", recorded")
      end
    end
  end
  check.equal(tostring(ty.cross_entropy(logits, target):item()):match "nan" ~= nil, true, "the mean of none")
end)

on_each("halves of any size have norms", function(tensor)
  local function each(list) return list:to "f32":tolist() end
  local x = tensor({ 300, 400 }, "f16")
  check.equal(x:norm():item(), 500)
  check.close(each(nn.normalize(x)), { 0.6, 0.8 }, 1e-3)
  check.equal(each(nn.normalize(tensor({ 0, 0 }, "f16"))), { 0, 0 }) -- NaN in PyTorch, whose eps is 0 in f16
  check.equal(nn.cosine_similarity(x, x):item(), 1)
  check.equal(nn.cosine_similarity(x * 0, x):item(), 0)
  check.close(each(tensor({ 6e4, -6e4 }, "f16"):std { correction = 0 }), 60000, 32)
  check.close(gradients(function(v) return v:norm() end, { tensor({ 3e4, 4e4 }, "f16") })[1], { 0.6, 0.8 }, 1e-3)
  check.close(gradients(function(v) return v:std() end, { tensor({ -3e4, 3e4 }, "f16") })[1],
    { -0.70710678, 0.70710678 }, 1e-3)
  for _, scale in ipairs { 1e-30, 1e30 } do
    for _, dtype in ipairs { "bf16", "f32" } do
      local few = tensor({ 3 * scale, -4 * scale, 12 * scale }, dtype):to "f64" / scale -- as the dtype has them
      local many = tensor({ 3 * scale, -4 * scale, 12 * scale }, dtype):expand(600, 3)
      local function relative(y) return y:to "f64" / scale end
      local tolerance = dtype == "bf16" and 0.05 or 1e-5
      for _, p in ipairs { 2, 3, 0.5, -1 } do
        check.close(relative(many:norm(p, 1)):select(0, 7):item(), few:norm(p):item(),
          tolerance * few:norm(p):item(), dtype .. " p = " .. p)
      end
      check.close(relative(many:norm(2, 0)):tolist(), (few:abs() * math.sqrt(600)):tolist(), 20 * tolerance)
      check.close(relative(many:std(1)):select(0, 7):item(), few:std():item(), tolerance * 8)
      check.close(relative(many:transpose(0, 1):contiguous():std(0)):select(0, 7):item(), few:std():item(),
        tolerance * 8)
      check.close(relative(many:std()):item(), few:expand(600, 3):std():item(), tolerance * 8)
    end
  end
end)

check.finish()
