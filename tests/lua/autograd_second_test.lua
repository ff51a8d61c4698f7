-- Derivatives of derivatives against differences.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local function leaf(values) return ty.tensor(values, { dtype = "f64" }):requires_grad_() end

-- ty.grad as a list, whatever form its results have.
local function grad(loss, inputs, options)
  local g = table.pack(ty.grad(loss, inputs, options))
  if type(g[1]) == "table" then return g[1] end
  return g
end

-- Derivatives of f(list of numbers) -> number by central differences.
local function differences(f, x, h)
  local d = {}
  for i = 1, #x do
    local up, down = table.move(x, 1, #x, 1, {}), table.move(x, 1, #x, 1, {})
    up[i], down[i] = x[i] + h, x[i] - h
    d[i] = (f(up) - f(down)) / (2 * h)
  end
  return d
end

local function mlp(x, w1, b1, w2) return ty.matmul((ty.matmul(x, w1) + b1):tanh(), w2) end

local function random(seed, ...)
  ty.manual_seed(seed)
  return ty.randn(..., { dtype = "f64" })
end

local function flat(list)
  local all = {}
  for _, t in ipairs(list) do
    for _, v in ipairs(t:reshape(-1):tolist()) do all[#all + 1] = v end
  end
  return all
end

local function unflat(values, like)
  local list, at = {}, 0
  for i, t in ipairs(like) do
    local part = table.move(values, at + 1, at + t:numel(), 1, {})
    list[i] = ty.tensor(part, { dtype = "f64" }):reshape(t.shape):requires_grad_()
    at = at + t:numel()
  end
  return list
end

local function parameters()
  local list = { random(1, { 3, 4 }), random(2, { 4 }), random(3, { 4, 1 }) }
  for _, p in ipairs(list) do p:requires_grad_() end
  return list
end

check.test("a gradient penalty (WGAN-GP) against differences", function()
  local x = random(7, { 5, 3 })
  local function penalty(p)
    local input = x:clone():requires_grad_()
    local score = mlp(input, table.unpack(p)):sum()
    local g = grad(score, { input }, { create_graph = true })[1]
    return ((g:square():sum { 1 } + 1e-12):sqrt() - 1):square():mean()
  end
  local p = parameters()
  local g = flat(grad(penalty(p), p, { allow_unused = true }))
  local want = differences(function(v) return penalty(unflat(v, p)):item() end, flat(p), 1e-5)
  check.close(g, want, 1e-6)
end)

check.test("a Hessian-vector product of an MLP against differences", function()
  local x, t = random(8, { 6, 3 }), random(9, { 6, 1 })
  local function loss(p) return (mlp(x, table.unpack(p)) - t):square():mean() end
  local p = parameters()
  local v = { random(11, { 3, 4 }), random(12, { 4 }), random(13, { 4, 1 }) }
  local g = grad(loss(p), p, { create_graph = true })
  local inner
  for i = 1, 3 do
    local part = (g[i] * v[i]):sum()
    inner = inner and inner + part or part
  end
  local hv = flat(grad(inner, p))
  local base, direction, h = flat(p), flat(v), 1e-5
  local function gradient_at(step)
    local moved = {}
    for i = 1, #base do moved[i] = base[i] + step * direction[i] end
    local q = unflat(moved, p)
    return flat(grad(loss(q), q))
  end
  local up, down, want = gradient_at(h), gradient_at(-h), {}
  for i = 1, #base do want[i] = (up[i] - down[i]) / (2 * h) end
  check.close(hv, want, 1e-6)
end)

check.test("a MAML step against differences", function()
  local xs, ts = random(20, { 4, 3 }), random(21, { 4, 1 })
  local xq, tq = random(22, { 4, 3 }), random(23, { 4, 1 })
  local function outer(p)
    local inner = (mlp(xs, table.unpack(p)) - ts):square():mean()
    local g = grad(inner, p, { create_graph = true })
    local adapted = {}
    for i = 1, 3 do adapted[i] = p[i] - g[i] * 0.1 end
    return (mlp(xq, table.unpack(adapted)) - tq):square():mean()
  end
  local p = parameters()
  local g = flat(grad(outer(p), p))
  local want = differences(function(v) return outer(unflat(v, p)):item() end, flat(p), 1e-5)
  check.close(g, want, 1e-6)
end)

check.test("third derivatives", function()
  local x = leaf { 1.3 }
  local y = (x ^ 5):sum()
  for _ = 1, 3 do y = grad(y, { x }, { create_graph = true })[1]:sum() end
  check.close(y:item(), 60 * 1.3 ^ 2, 1e-9)
  local z = x:sin():sum()
  for _ = 1, 4 do z = grad(z, { x }, { create_graph = true })[1]:sum() end
  check.close(z:item(), math.sin(1.3), 1e-12)
end)

check.test("backward with create_graph makes .grad differentiable", function()
  local x = leaf { 2 }
  local y = (x ^ 3):sum()
  y:backward { create_graph = true }
  check.equal(x.grad.requires_grad, true)
  local g = grad(x.grad:sum(), { x })[1]
  check.close(g:item(), 12)
  x:set_grad() -- a leaf whose gradient has a history that leads back to it keeps itself alive
end)

check.finish()
