-- Mixtures of experts of flows, held against what a perfect network says of a mixture of Gaussians: the marginal flow,
-- by finite differences of its density; weights; few experts for each sample; a router that learns them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails
local experts = diffusion.experts

-- Parts of the data, each of some Gaussians in the plane: weight, mean, standard deviation.
local parts = {
  { { 0.2, { -1.5, 0.3 }, 0.3 }, { 0.1, { -0.8, 1.2 }, 0.2 } },
  { { 0.3, { 1.2, 0.9 }, 0.4 } },
  { { 0.25, { 0.4, -1.3 }, 0.25 }, { 0.15, { 1.6, -0.9 }, 0.5 } },
}

-- The density of x = (1 - t) x0 + t e where x0 comes from some Gaussians, each with its weight.
local function density(list, x, y, t)
  local p = 0
  for _, g in ipairs(list) do
    local v = (1 - t) ^ 2 * g[3] ^ 2 + t ^ 2
    local dx, dy = x - (1 - t) * g[2][1], y - (1 - t) * g[2][2]
    p = p + g[1] * math.exp(-(dx * dx + dy * dy) / (2 * v)) / (2 * math.pi * v)
  end
  return p
end
local all = {}
for _, list in ipairs(parts) do for _, g in ipairs(list) do all[#all + 1] = g end end

-- The flow E[e - x0 | x] at a place, from the density alone: E[e | x] = -t grad log p, and x = (1 - t) x0 + t e.
local function flow_by_differences(list, x, y, t)
  local h, v = 1e-4, {}
  local function slope(dx, dy)
    return (math.log(density(list, x + dx * h, y + dy * h, t)) - math.log(density(list, x - dx * h, y - dy * h, t)))
      / (2 * h)
  end
  for i, s in ipairs { slope(1, 0), slope(0, 1) } do
    local e = -t * s
    v[i] = e - ((i == 1 and x or y) - t * e) / (1 - t)
  end
  return v
end

-- A perfect network of some of the data: E[e - x0 | x] from the means of its Gaussians given x.
local function perfect(list)
  return function(x, time)
    local t = (time / 1000):reshape(-1, 1)
    local log, flows = {}, {}
    for k, g in ipairs(list) do
      local mean = ty.tensor({ g[2] }, { dtype = "f64" })
      local v = (1 - t):square() * g[3] ^ 2 + t:square()
      local off = x - (1 - t) * mean
      log[k] = off:square():sum(1, true) / v * -0.5 - v:log() + math.log(g[1])
      local x0 = mean + (1 - t) * g[3] ^ 2 / v * off
      flows[k] = t / v * off - x0
    end
    local p = ty.concat(log, 1):softmax(1)
    local sum
    for k, v in ipairs(flows) do
      local part = v * p:narrow(1, k - 1, 1)
      sum = sum and sum + part or part
    end
    return sum
  end
end

-- A perfect router: how likely a sample comes from each part.
local function perfect_router(x, time)
  local rows, t, at = {}, (time / 1000):tolist(), x:to("f64"):tolist()
  for i, p in ipairs(at) do
    rows[i] = {}
    for k, list in ipairs(parts) do rows[i][k] = math.log(density(list, p[1], p[2], t[i])) end
  end
  return ty.tensor(rows, { dtype = "f64" })
end

local networks = {}
for k, list in ipairs(parts) do networks[k] = perfect(list) end

test("perfect experts with a perfect router are the flow of all the data", function()
  ty.manual_seed(1)
  local model = experts.mixture(networks, perfect_router)
  local x, t = ty.randn({ 40, 2 }, { dtype = "f64" }) * 1.5, ty.rand({ 40 }, { dtype = "f64" }) * 900 + 50
  local got, whole = model(x, t), perfect(all)(x, t)
  for i = 0, 39 do
    local at, time = x[i]:tolist(), t[i]:item() / 1000
    near(got[i]:tolist(), flow_by_differences(all, at[1], at[2], time), 1e-5)
    for k, list in ipairs(parts) do
      near(networks[k](x:narrow(0, i, 1), t:narrow(0, i, 1))[0]:tolist(), flow_by_differences(list, at[1],
        at[2], time), 1e-5)
    end
  end
  near(got:tolist(), whole:tolist(), 1e-10)
  near(model:weights(x, t):sum(1):tolist(), ty.ones({ 40 }, { dtype = "f64" }):tolist(), 1e-12)
  equal(model.evaluated, { 40, 40, 40 })
  -- And so are samples.
  local process = diffusion.Flow { drop = 0 }
  local noise = ty.randn({ 50, 2 }, { dtype = "f64" })
  local a = process:sample(model, { 50, 2 }, { noise = noise, steps = 8 })
  local b = process:sample(perfect(all), { 50, 2 }, { noise = noise, steps = 8 })
  near(a:tolist(), b:tolist(), 1e-6) -- times of samplers are f32
end)

test("few experts: the likeliest alone are asked, and their weights divided by their sum", function()
  ty.manual_seed(2)
  local x, t = ty.randn({ 60, 2 }, { dtype = "f64" }) * 1.5, ty.rand({ 60 }, { dtype = "f64" }) * 900 + 50
  local p = perfect_router(x, t):softmax(1):tolist()
  for top = 1, 3 do
    local model = experts.mixture(networks, perfect_router, { top = top })
    local got, want = model(x, t):tolist(), {}
    local each = {}
    for k = 1, 3 do each[k] = networks[k](x, t):tolist() end
    for i = 1, 60 do
      local order = { 1, 2, 3 }
      table.sort(order, function(a, b) return p[i][a] > p[i][b] end)
      local sum, v = 0, { 0, 0 }
      for r = 1, top do sum = sum + p[i][order[r]] end
      for r = 1, top do
        for d = 1, 2 do v[d] = v[d] + p[i][order[r]] / sum * each[order[r]][i][d] end
      end
      want[i] = v
    end
    near(got, want, 1e-9, "top " .. top)
    equal(model.evaluated[1] + model.evaluated[2] + model.evaluated[3], 60 * top)
  end
  -- Conditions go with their samples.
  local labelled = function(h, _, condition) return h * 0 + condition.labels:reshape(-1, 1):to "f64" end
  local model = experts.mixture({ labelled, labelled, labelled }, perfect_router, { top = 1 })
  local labels = ty.arange(60, { dtype = "i64" })
  equal(model(x, t, { labels = labels }):select(1, 0):tolist(), labels:to("f64"):tolist())
end)

local function draw(n, seed)
  ty.manual_seed(seed)
  local x, from = {}, {}
  for i = 1, n do
    local u, k, g = ty.rand(1):item(), nil, nil
    for part, list in ipairs(parts) do
      for _, one in ipairs(list) do
        if not g then
          u = u - one[1]
          if u <= 0 or one == all[#all] then k, g = part, one end
        end
      end
    end
    local e = ty.randn(2):tolist()
    x[i], from[i] = { g[2][1] + g[3] * e[1], g[2][2] + g[3] * e[2] }, k - 1
  end
  return ty.tensor(x), ty.tensor(from, { dtype = "i64" })
end

test("a router learns the weights, and its loss is that of a perfect one then", function()
  local x0, from = draw(2000, 3)
  local process = diffusion.Flow { drop = 0, times = diffusion.times.uniform() }
  ty.manual_seed(4)
  local router = experts.train_router(process, models.TimeMLP { width = 32, depth = 1, outputs = 3, waves = 16 }, x0,
    from, { steps = 250, lr = 1e-2 })
  local x1, from1 = draw(1500, 5)
  local t, noise = ty.rand(1500) * 0.98 + 0.01, ty.randn(1500, 2)
  local given = { t = t, noise = noise }
  local learnt = experts.router_loss(process, router, x1, from1, nil, given):item()
  local best = experts.router_loss(process, function(x, time)
    return perfect_router(x, time):to "f32"
  end, x1, from1, nil, given):item()
  local knows_nothing = 0
  for _, list in ipairs(parts) do
    local w = 0
    for _, g in ipairs(list) do w = w + g[1] end
    knows_nothing = knows_nothing - w * math.log(w)
  end
  check.ok(best < 0.8 * knows_nothing, ("%.4f of %.4f"):format(best, knows_nothing))
  check.ok(learnt < best + 0.05 and learnt > best - 0.02, ("%.4f, perfect %.4f"):format(learnt, best))
  local noisy = process.objective:noisy(x1, t, noise)
  local time = process.schedule:network_time(t)
  local off = (router(noisy.x, time):softmax(1):to "f64" - perfect_router(noisy.x, time):softmax(1)):abs():mean():item()
  check.ok(off < 0.05, "weights are off by " .. off)
end)

test("the loss of a network over samples: perfect experts with a perfect router have the least", function()
  local x0 = draw(500, 6)
  local process = diffusion.Flow { drop = 0 }
  local function f32(network)
    return function(x, t) return network(x:to "f64", t:to "f64"):to "f32" end
  end
  local best = experts.held_out_loss(process, f32(experts.mixture(networks, perfect_router)), x0)
  near(best, experts.held_out_loss(process, f32(perfect(all)), x0), 1e-5)
  for _, other in ipairs { networks[1], networks[2], function(x) return x * 0 end,
    experts.mixture(networks, function(x) return ty.zeros({ x.shape[1], 3 }, { dtype = "f64" }) end) } do
    check.ok(experts.held_out_loss(process, f32(other), x0) > best + 0.01)
  end
end)

test("principal components", function()
  ty.manual_seed(8)
  local directions = ty.randn(3, 20)
  local pictures = (ty.randn(200, 3) * ty.tensor { 3, 2, 1 }):matmul(directions):reshape(200, 1, 4, 5) + 0.5
  local exact = diffusion.principal(pictures, 3)
  near(exact.kept, 1, 1e-5)
  local latents = exact:encode(pictures)
  equal(latents.shape, { 200, 3 })
  near(latents:square():mean():item(), 1, 1e-4)
  near(exact:decode(latents):tolist(), pictures:tolist(), 1e-3)
  -- What is left out is the variance of what it cannot say.
  local fewer = diffusion.principal(pictures, 1)
  local left = (fewer:decode(fewer:encode(pictures)) - pictures):square():mean():item()
  local flat = pictures:flatten(1)
  local variance = (flat - flat:mean({ 0 }, true)):square():mean():item()
  near(left / variance, 1 - fewer.kept, 1e-4)
end)

test("digits that are moved about", function()
  local set = datasets.digits.moved { split = "held_out", first = 3, count = 5, copies = 4, size = 12, seed = 1 }
  local batch = set:batch(ty.arange(20))
  equal(batch.image.shape, { 20, 1, 12, 12 })
  local source = datasets.load("digits", { split = "held_out" })
  for i = 0, 19 do
    equal(batch.label[i]:item(), source:get(3 + i // 4).label:item())
    local ink = (batch.image[i] + 1):sum():item()
    check.ok(ink > 5, "there is a digit")
  end
  check.ok(batch.image:min():item() >= -1.001 and batch.image:max():item() <= 1.001)
  -- A digit of its own size is where it was put, as it was.
  local same = datasets.digits.moved { split = "held_out", count = 1, copies = 6, least = 8, most = 8, size = 9 }
  local want = source:get(0).image
  for i = 0, 5 do
    local page, found = same:get(i).image, false
    for y = 0, 1 do
      for x = 0, 1 do
        local cut = page:narrow(1, y, 8):narrow(2, x, 8)
        found = found or (cut - want):abs():max():item() < 1e-5
      end
    end
    equal(found, true)
  end
  equal(set:get(7).image:tolist(), datasets.digits.moved({ split = "held_out", first = 3, count = 5, copies = 4,
    seed = 1 }):get(7).image:tolist())
end)

test("arguments", function()
  fails(function() experts.mixture({}, perfect_router) end, "experts: expected at least one, got none")
  fails(function() experts.mixture(networks, 3) end, "router: expected a function")
  fails(function() experts.mixture(networks, perfect_router, { top = 4 }) end, "top: expected at most the 3 experts")
  fails(function() experts.mixture({ networks[1] }, perfect_router)(ty.ones({ 2, 2 }, { dtype = "f64" }),
    ty.ones({ 2 }, { dtype = "f64" }) * 500) end, "router: expected logits [2, 1], got")
  fails(function() experts.router_loss(3, perfect_router, ty.ones(2, 2), ty.zeros(2)) end, "process: expected")
  fails(function() experts.held_out_loss({}, perfect_router, ty.ones(2, 2)) end, "process: expected one such as")
  fails(function() experts.train_router({}, 3, ty.ones(2, 2), ty.zeros(2)) end, "router: expected a module")
  fails(function() diffusion.principal(ty.ones(4, 2), 3) end, "pictures: expected [n, ...] of at least 3 numbers")
  fails(function() datasets.digits.moved { size = 6 } end, "most: expected one of 7 to 6, got 10")
  fails(function() datasets.digits.moved { first = 1437 } end, "count: expected digits of the 1437")
end)

test("samples by part", function()
  local x = ty.arange(10):to("f32"):reshape(5, 2)
  local divided = diffusion.experts.divide(x, ty.tensor { 1, 0, 1, 2, 1 }, 4)
  equal(divided[1]:tolist(), { { 2, 3 } })
  equal(divided[2]:tolist(), { { 0, 1 }, { 4, 5 }, { 8, 9 } })
  equal({ divided[3]:tolist(), divided[4].shape[1], #divided }, { { { 6, 7 } }, 0, 4 })
  fails(function() diffusion.experts.divide(x, ty.tensor { 1, 0 }, 2) end,
    "diffusion.experts.divide: parts: expected one for each row of x0, a tensor [5, 2], got a tensor [2]")
end)

check.finish()
