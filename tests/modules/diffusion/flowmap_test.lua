-- Flow maps: the map of a Gaussian in closed form has no error by any condition, derivatives are those of finite
-- differences in networks of all kinds, gradients pass where they should and nowhere else.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, models = require "tycho.diffusion", require "tycho.models"

local FlowMap = diffusion.FlowMap
local F64 = { dtype = "f64" }

local function column(t, x) return t:reshape(x.shape[1], 1) end

-- v_{s,t} for data N(mean, deviation^2) in every dimension: a point keeps its quantile, with the standard deviation
-- q(t)^2 = ((1 - t) deviation)^2 + t^2. The quotient of differences of q is multiplied out: it has no 0 / 0 at s = t.
local function gaussian(mean, deviation)
  local c = deviation ^ 2
  local function q(t) return (c * (1 - t):square() + t:square()):sqrt() end
  return function(x, s, t)
    local rate = ((c + 1) * (s + t) - 2 * c) / ((q(s) + q(t)) * q(s))
    return column(rate, x) * (x - column((1 - s) * mean, x)) - mean
  end
end

local kinds = { { kind = "lagrangian" }, { kind = "progressive" }, { kind = "eulerian" },
  { kind = "eulerian", stop = "velocity" }, { kind = "eulerian", stop = "derivatives" } }

local function name_of(o) return o.kind .. (o.stop and " " .. o.stop or "") end

local function batch_of(n, features)
  local a, b = ty.rand({ n }, F64), ty.rand({ n }, F64)
  local s, t = ty.maximum(a, b), ty.minimum(a, b)
  return { x = ty.randn({ n, features }, F64) * 2, s = s, t = t, u = t + (s - t) * ty.rand({ n }, F64) }
end

check.test("the map of a Gaussian has no error by any of the conditions, another map has", function()
  ty.manual_seed(1)
  local batch = batch_of(50, 3)
  for _, o in ipairs(kinds) do
    local right = FlowMap.errors(gaussian(0.7, 0.5), batch, o):max():item()
    check.ok(right < 1e-20, ("%s: %g"):format(name_of(o), right))
    local v = gaussian(0.7, 0.5)
    local wrong = FlowMap.errors(function(x, s, t) return v(x, s, t) + column(0.1 * (s - t), x) end, batch, o)
    check.ok(wrong:mean():item() > 1e-4, ("%s: %g of a map that is not"):format(name_of(o), wrong:mean():item()))
  end
end)

-- A module around a function, for FlowMap:loss.
local function module_of(fn)
  local Class = ty.nn.module "Exact"
  function Class:init()
    self.t_embedder = ty.nn.Linear(1, 1)
    self.parameter_of_none = ty.zeros({ 1 }, F64):requires_grad_()
  end
  function Class:forward(...) return fn(...) end
  return Class()
end

check.test("data of one point: the loss is 0, on the diagonal and off it", function()
  ty.manual_seed(2)
  local map = FlowMap(module_of(function() end), { scale = 1 }):to "f64"
  local exact = gaussian(0.7, 0)
  map.forward = function(_, x, s, t) return exact(x, s, t) end
  for _, o in ipairs(kinds) do
    o = { kind = o.kind, stop = o.stop, share = 0.5, balance = false }
    local loss, errors = map:loss(ty.full({ 40, 2 }, 0.7, F64), {}, o)
    check.ok(loss:item() < 1e-18, ("%s: %g"):format(name_of(o), loss:item()))
    check.ok(errors.diagonal < 1e-18 and errors.rest < 1e-18)
  end
  -- A normal distribution: on the diagonal what is left is the variance of the velocity given the point.
  map.forward = function(_, x, s, t) return gaussian(0.7, 0.5)(x, s, t) end
  local times = ty.full({ 40000 }, 0.4, F64)
  local _, errors = map:loss(ty.randn({ 40000, 1 }, F64) * 0.5 + 0.7, {}, { share = 1, times = times })
  local slope = (-0.25 * 0.6 + 0.4) / (0.25 * 0.36 + 0.16)
  local left = 1 + 0.25 - slope ^ 2 * (0.25 * 0.36 + 0.16)
  check.ok(math.abs(errors.diagonal / left - 1) < 0.03, ("%g, expected %g"):format(errors.diagonal, left))
end)

-- Networks with weights that are not 0 anywhere.
local function networks()
  ty.manual_seed(3)
  local list = {
    TimeMLP = { models.TimeMLP { features = 64, width = 12, depth = 2, classes = 10, places = 2 },
      { labels = ty.tensor { 1, 2 } } },
    DiT = { diffusion.DiT { width = 16, depth = 1, heads = 2, classes = 10 }, { labels = ty.tensor { 1, 2 } } },
    UNet = { diffusion.UNet { levels = { 8, { channels = 16, attention = true } }, classes = 10 },
      { labels = ty.tensor { 1, 2 } } },
    SD3 = { models.SD3Transformer2DModel { sample_size = 8, patch_size = 2, in_channels = 1, out_channels = 1,
      num_layers = 2, attention_head_dim = 8, num_attention_heads = 2, caption_projection_dim = 16,
      joint_attention_dim = 6, pooled_projection_dim = 5, pos_embed_max_size = 8, qk_norm = "rms_norm" },
      { text = { embeddings = ty.randn({ 2, 3, 6 }, F64), pooled = ty.randn({ 2, 5 }, F64) } } },
  }
  for _, entry in pairs(list) do
    entry[1]:to "f64"
    entry[1]:eval()
    for _, p in ipairs(entry[1]:parameters()) do p:detach():add_(ty.randn(p.shape, F64) * 0.1) end
  end
  return list
end

check.test("derivatives by time and place are finite differences, in all networks; so are their gradients", function()
  for name, entry in pairs(networks()) do
    local network, condition = entry[1], entry[2]
    local map = FlowMap(network, { scale = 5, width = 8, waves = 8 }):to "f64"
    for _, p in ipairs(map.span:parameters()) do p:detach():add_(ty.randn(p.shape, F64) * 0.1) end
    local x, t, s = ty.randn({ 2, 1, 8, 8 }, F64), ty.tensor({ 0.3, 0.6 }, F64), ty.tensor({ 0.7, 0.8 }, F64)
    local dx, dt, ds = ty.randn(x.shape, F64), ty.tensor({ 1, -0.5 }, F64), ty.tensor({ 0.3, 2 }, F64)
    local function f(...)
      local at, from, to = ...
      return map:jump(at, from, to, condition)
    end
    local _, slope = ty.jvp(f, { x, s, t }, { dx, ds, dt }, { create_graph = true })
    local h = 1e-5
    local by_steps = (f(x + dx * h, s + ds * h, t + dt * h) - f(x - dx * h, s - ds * h, t - dt * h)) * (0.5 / h)
    local off = (slope - by_steps):abs():max():item() / slope:abs():max():item()
    check.ok(off < 1e-7, ("%s: jvp by %g"):format(name, off))
    slope:square():sum():backward()
    local got, want, rows = 0.0, 0.0, {}
    for _, p in ipairs(map:parameters()) do
      if p.grad then
        local direction = ty.randn(p.shape, F64)
        got = got + (p.grad * direction):sum():item()
        rows[#rows + 1] = { p, direction }
      end
    end
    for _, side in ipairs { 1, -1 } do
      for _, row in ipairs(rows) do row[1]:detach():add_(row[2] * (side * h)) end
      local _, moved = ty.jvp(f, { x, s, t }, { dx, ds, dt })
      want = want + side * moved:square():sum():item() / (2 * h)
      for _, row in ipairs(rows) do row[1]:detach():add_(row[2] * (-side * h)) end
    end
    check.ok(#rows > 5 and math.abs(got - want) < 1e-5 * math.abs(want), ("%s: %g, %g"):format(name, got, want))
  end
end)

check.test("the loss's gradient is that of the condition with its teacher held", function()
  ty.manual_seed(4)
  local map = FlowMap(models.TimeMLP { features = 2, width = 8, depth = 1, waves = 8 }, { scale = 3, width = 4,
    waves = 4 }):to "f64"
  for _, p in ipairs(map:parameters()) do p:detach():add_(ty.randn(p.shape, F64) * 0.3) end
  local held, x0, noise = map:clone(), ty.randn({ 6, 2 }, F64), ty.randn({ 6, 2 }, F64)
  local batch = batch_of(6, 2)
  for _, o in ipairs(kinds) do
    if o.stop ~= "velocity" and o.stop ~= "derivatives" then
      local function loss()
        return (map:loss(x0, {}, { kind = o.kind, share = 0, s = batch.s, t = batch.t, u = batch.u, noise = noise,
          teacher = held, balance = true }))
      end
      map:zero_grad()
      loss():backward()
      local got, want, rows = 0.0, 0.0, {}
      for _, p in ipairs(map:parameters()) do
        if p.grad then
          rows[#rows + 1] = { p, ty.randn(p.shape, F64) }
          got = got + (p.grad * rows[#rows][2]):sum():item()
        end
      end
      if o.kind == "lagrangian" then
        -- The place where the teacher is asked is held as well: it moves with the map in a finite difference.
        check.ok(got == got and #rows > 0)
      else
        for _, side in ipairs { 1, -1 } do
          for _, row in ipairs(rows) do row[1]:detach():add_(row[2] * (side * 1e-5)) end
          want = want + side * loss():item() / 2e-5
          for _, row in ipairs(rows) do row[1]:detach():add_(row[2] * (-side * 1e-5)) end
        end
        check.ok(math.abs(got - want) < 1e-6 * math.abs(want) + 1e-9, ("%s: %g, %g"):format(o.kind, got, want))
      end
      for _, p in ipairs(held:parameters()) do check.ok(p.grad == nil) end
    end
  end
  -- Lagrangian: as a difference with the target made beforehand.
  map:zero_grad()
  local s, t, x = batch.s, batch.t, batch.x
  local function slope()
    local _, d = ty.jvp(function(to) return map:jump(x, s, to) end, t, ty.ones_like(t), { create_graph = true })
    return d
  end
  local target = ty.no_grad(function() return map(map:jump(x, s, t), t, t) end)
  FlowMap.errors(map, batch, { kind = "lagrangian" }):sum():backward()
  local p = map.network.linear.weight
  local got = p.grad:detach():clone()
  map:zero_grad()
  ;((slope() - target):square():mean { 1 }):sum():backward()
  check.close(p.grad:tolist(), got:tolist(), 1e-10)
end)

check.test("a wrapped network begins as what it was; jumps of no length stay; Euler's steps; unwrapping", function()
  ty.manual_seed(5)
  local network = diffusion.DiT { width = 16, depth = 1, heads = 2, classes = 10 }
  for _, p in ipairs(network:parameters()) do p:detach():add_(ty.randn(p.shape) * 0.1) end
  local x, condition = ty.randn(4, 1, 8, 8), { labels = ty.tensor { 1, 2, 3, 10 } }
  local want = network(x, ty.full({ 4 }, 400), condition)
  local map = FlowMap(network)
  local s, t = ty.full({ 4 }, 0.4), ty.full({ 4 }, 0.1)
  check.ok(map(x, s, t, condition):eq(want):all():item())
  for _, p in ipairs(map.span:parameters()) do p:detach():add_(ty.randn(p.shape) * 0.1) end
  check.ok(not map(x, s, t, condition):eq(want):all():item())
  check.ok(map:jump(x, s, s, condition):eq(x):all():item())
  check.ok(network(x, ty.full({ 4 }, 400), condition):eq(want):all():item(), "by itself the network is what it was")
  local two = map:sample({ 4, 1, 8, 8 }, { steps = 2, noise = x, condition = condition })
  local half, one = ty.full({ 4 }, 0.5), ty.ones(4)
  local by_hand = map:jump(map:jump(x, one, half, condition), half, ty.zeros(4), condition)
  check.close(two:flatten():tolist(), by_hand:flatten():tolist(), 1e-5)
  local euler = map:sample({ 4, 1, 8, 8 }, { steps = 2, noise = x, condition = condition, euler = true })
  local there = x - map(x, one, one, condition) * 0.5
  check.close(euler:flatten():tolist(), (there - map(there, half, half, condition) * 0.5):flatten():tolist(), 1e-5)
  local copy = map:clone()
  check.ok(copy(x, s, t, condition):eq(map(x, s, t, condition)):all():item(), "copies have a second time of their own")
  copy.span.fc2.bias:detach():add_(1)
  check.ok(not copy(x, s, t, condition):eq(map(x, s, t, condition)):all():item())
  check.ok(rawequal(map:unwrap(), network))
  check.equal(getmetatable(network.t_embedder).__name, "TimestepEmbedder")
end)

check.test("what is refused", function()
  local map = FlowMap(models.TimeMLP { width = 8, depth = 1 }, { scale = 10 })
  check.fails(function() FlowMap(ty.nn.Linear(2, 2)) end, "FlowMap: network: expected one with a module t_embedder")
  check.fails(function() FlowMap(models.TimeMLP(), { embedder = "x" }) end, "embedder: expected the name of a module")
  check.fails(function() FlowMap(3) end, "FlowMap: network: expected a module, got 3")
  check.fails(function() map:loss(ty.ones(4, 2), {}, { kind = "other" }) end, 'kind: expected "lagrangian" or')
  check.fails(function() map:loss(ty.ones(4, 2), { labels = ty.ones(3) }) end, "condition.labels: expected [4, ...]")
  check.fails(function() map:loss(3) end, "FlowMap:loss: x0: expected a tensor, got 3")
  check.fails(function() map:sample({ 4, 2 }, { steps = 0 }) end, "steps: expected an integer >= 1, got 0")
  check.fails(function() FlowMap.errors(map, { x = ty.ones(1, 2), s = ty.ones(1), t = ty.ones(1) },
    { kind = "progressive" }) end, "batch.u: expected a tensor, got nil")
  check.fails(function() models.TimeMLP { classes = 3 } (ty.ones(2, 2), ty.ones(2)) end,
    "TimeMLP: condition.labels: expected a tensor, got nil")
  check.fails(function() models.TimeMLP() (ty.ones(2, 3), ty.ones(2)) end, "TimeMLP: x: expected [n, ...] of 2 numbers")
end)

check.finish()
