-- An op of your own: forward and backward written in Lua, checked against finite differences.
--
--   tycho examples/custom_op.lua
--
-- squared_distances(a, b) gives |a_i - b_j|^2 for the rows of a [n, d] and b [m, d]. Written as (a_i - b_j)^2 summed
-- over d it would need a tensor of n * m * d numbers, and so would its gradient; the rules below never make one.

local ty = require "tycho"

local squared_distances = ty.custom_op {
  name = "squared_distances",

  forward = function(ctx, a, b)
    ctx:save(a, b) -- for backward
    return a:square():sum({ 1 }, { keepdim = true }) + b:square():sum { 1 } - 2 * a:matmul(b:transpose())
  end,

  -- g is the gradient for the result; one gradient per tensor argument goes back. Since these are differentiable ops
  -- again, second derivatives come for free.
  backward = function(ctx, g)
    local a, b = ctx:saved()
    local da = 2 * (g:sum({ 1 }, { keepdim = true }) * a - g:matmul(b))
    local db = 2 * (g:sum({ 0 }):unsqueeze(1) * b - g:transpose():matmul(a))
    return da, db
  end,
}

-- ---- is it right? A number from the op and from its derivatives, moved by a little, must change as they say ----

-- The largest difference between the gradient that ty.grad gives for each of `inputs` and central differences of f.
local function largest_error(f, inputs)
  local step, worst = 1e-5, 0.0
  for _, x in ipairs(inputs) do x:requires_grad_() end
  local grads = ty.grad(f(), inputs)
  for k, x in ipairs(inputs) do
    local memory = x:detach():reshape(-1) -- the same numbers: writing here moves x
    local slopes = grads[k]:reshape(-1):tolist()
    for i = 0, x:numel() - 1 do
      local before = memory[i]:item()
      memory[i] = before + step
      local above = f():item()
      memory[i] = before - step
      local below = f():item()
      memory[i] = before
      worst = math.max(worst, math.abs((above - below) / (2 * step) - slopes[i + 1]))
    end
  end
  return worst
end

ty.manual_seed(3)
local a, b = ty.randn({ 4, 3 }, { dtype = "f64" }), ty.randn({ 5, 3 }, { dtype = "f64" })
local weight = ty.randn({ 4, 5 }, { dtype = "f64" })

local function first() return (squared_distances(a, b):square() * weight):sum() end
local function second() -- a number made of the first derivatives
  local grads = ty.grad(first(), { a, b }, { create_graph = true })
  return grads[1]:square():sum() + (grads[2] * 3):sum()
end

local error1, error2 = largest_error(first, { a, b }), largest_error(second, { a, b })
print(string.format("largest error of the gradient        %.2e", error1))
print(string.format("largest error of second derivatives  %.2e", error2))

-- ---- and it is used like any op: three centres look for three clouds of points ----

local truth = ty.tensor({ { -4, 0 }, { 4, 1 }, { 0, 5 } }, { dtype = "f32" })
local points = truth:index_select(0, ty.arange(300) % 3) + ty.randn(300, 2) * 0.5
local centres = ty.tensor({ { -1, 2 }, { 1, 2 }, { 0, 3 } }, { dtype = "f32" }):requires_grad_()

for _ = 1, 200 do
  ty.scope(function()
    local loss = -squared_distances(points, centres):neg():logsumexp({ 1 }):mean()
    local grad = ty.grad(loss, { centres })[1]
    ty.no_grad(function() centres:sub_(grad * 0.2) end)
  end)
end
local miss = squared_distances(truth, centres):detach():min({ 1 }):sqrt():max():item()
print(string.format("farthest cloud centre is %.2f from the nearest centre found", miss))

os.exit(error1 < 1e-6 and error2 < 1e-5 and miss < 0.3, true)
