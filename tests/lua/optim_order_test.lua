-- optim.order_effects: the recorded order gives the recorded parameters; estimates are exact where the expansion is (a
-- loss without a second derivative; a quadratic that the trajectory spans), and better by an order with each term.
local here = (arg and arg[0]:match ".*/" or "tests/lua/")
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local function leaf(list) return ty.tensor(list, { dtype = "f64" }):requires_grad_() end
local function adam(p) return optim.Adam(p, { lr = 0.02, beta2 = 0.9 }) end
local function sgd(p) return optim.SGD(p, { lr = 0.05, momentum = 0.5 }) end

local function values(list)
  local all = {}
  for _, p in ipairs(list) do for _, v in ipairs(p:detach():flatten():tolist()) do all[#all + 1] = v end end
  return all
end

local function distance(a, b)
  local sum = 0
  for i, v in ipairs(a) do sum = sum + (v - b[i]) ^ 2 end
  return math.sqrt(sum)
end

-- Batches of a small network.
local function network(seed)
  ty.manual_seed(seed or 0)
  local model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
  local batches = {}
  for i = 1, 5 do batches[i] = { x = ty.randn(8, 4), y = ty.randn(8, 2) } end
  return model, function(i) return nn.mse_loss(model(batches[i].x), batches[i].y) end
end

check.test("the recorded order gives the recorded parameters, to the last bit", function()
  for _, make in ipairs { adam, sgd } do
    for _, options in ipairs { {}, { terms = 1 }, { terms = 0 }, { every = 2 }, { dimensions = 7 }, { every = 3,
      dimensions = 5 } } do
      local model, loss = network()
      options.optimizer = make
      local effects = optim.order_effects(model, options)
      local twin, theirs = network()
      local optimizer, losses = make(twin:parameters()), {}
      for i = 1, 5 do
        local l = theirs(i)
        optimizer:step(l)
        losses[i] = l:item()
      end
      check.equal(effects:record(5, loss), losses)
      check.equal(values(model:parameters()), values(twin:parameters()))
      effects:estimate { 1, 2, 3, 4, 5 }
      check.equal(values(model:parameters()), values(twin:parameters()))
      effects:retrain { 1, 2, 3, 4, 5 }
      check.equal(values(model:parameters()), values(twin:parameters()))
      check.equal(model:parameters()[1].grad, nil)
    end
  end
end)

check.test("retrain is training in that order", function()
  local model, loss = network()
  local effects = optim.order_effects(model, { optimizer = adam })
  effects:record(5, loss)
  effects:retrain { 4, 1, 5, 2, 3 }
  local twin, theirs = network()
  local optimizer = adam(twin:parameters())
  for _, i in ipairs { 4, 1, 5, 2, 3 } do optimizer:step(theirs(i)) end
  check.equal(values(model:parameters()), values(twin:parameters()))
end)

check.test("each: what a measure says after orders, by training and by estimate; none at all is the start", function()
  local model, loss = network()
  local before = values(model:parameters())
  local effects = optim.order_effects(model, { optimizer = sgd })
  effects:record(5, loss)
  local function measure() return loss(1):item() end
  local truth, seconds = effects:each({ { 1, 2, 3, 4, 5 }, { 5, 4, 3, 2, 1 } }, measure, "retrain")
  effects:retrain { 5, 4, 3, 2, 1 }
  check.equal({ #truth, truth[2], seconds > 0 }, { 2, measure(), true })
  check.close(effects:each({ { 1, 2, 3, 4, 5 } }, measure)[1], truth[1], 1e-7)
  effects:estimate {}
  check.equal(values(model:parameters()), before)
  check.fails(function() effects:each({}, measure) end, "OrderEffects:each: orders: expected at least one, got none")
  check.fails(function() effects:each({ { 1 } }, measure, "guess") end, 'how: expected "estimate" or "retrain" or nil')
end)

check.test("exact without a second derivative, for Adam too", function()
  local slopes = { { 1, -2 }, { 0.5, 3 }, { -1, 0.2 }, { 2, 2 } }
  for terms = 0, 2 do
    local p = leaf { 0.3, 0.4 }
    local effects = optim.order_effects({ p }, { optimizer = adam, terms = terms })
    effects:record(4, function(i) return (p * ty.tensor(slopes[i], { dtype = "f64" })):sum() end)
    effects:estimate { 3, 1, 4, 2 }
    local got = values { p }
    effects:retrain { 3, 1, 4, 2 }
    check.ok(distance(got, values { p }) < 1e-14)
  end
end)

check.test("exact for quadratics whose trajectory spans the parameters, whatever of it is kept", function()
  ty.manual_seed(1)
  local curvatures, centres = {}, {}
  for i = 1, 8 do
    local a = ty.randn({ 3, 3 }, { dtype = "f64" })
    curvatures[i], centres[i] = a:matmul(a:transpose(0, 1)), ty.randn({ 3 }, { dtype = "f64" })
  end
  local order = { 5, 3, 8, 6, 1, 7, 2, 4 }
  local errors = {}
  for _, o in ipairs { { terms = 2 }, { terms = 1 }, { terms = 0 }, { terms = 2, every = 2 } } do
    local p = leaf { 1, -1, 0.5 }
    local effects = optim.order_effects({ p }, { optimizer = sgd, terms = o.terms, every = o.every, damping = 1e-13 })
    effects:record(8, function(i)
      local d = p - centres[i]
      return (d * curvatures[i]:matmul(d)):sum() / 2
    end)
    effects:estimate(order)
    local got = values { p }
    effects:retrain(order)
    errors[#errors + 1] = distance(got, values { p })
  end
  check.ok(errors[1] < 1e-7, "two terms: " .. errors[1])
  check.ok(errors[4] < 1e-7, "from every second step: " .. errors[4])
  check.ok(errors[2] > 1e-3 and errors[3] > 1e-3, "fewer terms are not exact")
end)

check.test("two swapped batches: an error of second order in the rate without expansion, of third with it", function()
  local function error_at(rate, terms)
    ty.manual_seed(2)
    local w = ty.randn({ 4, 3 }, { dtype = "f64" }):requires_grad_()
    local batches = {}
    for i = 1, 4 do
      batches[i] = { x = ty.randn({ 6, 4 }, { dtype = "f64" }), y = ty.randn({ 6, 3 }, { dtype = "f64" }) }
    end
    local effects = optim.order_effects({ w }, { terms = terms, damping = 1e-12,
      optimizer = function(p) return optim.SGD(p, { lr = rate }) end })
    effects:record(4, function(i) return (batches[i].x:matmul(w):tanh() - batches[i].y):square():sum() end)
    effects:estimate { 2, 1, 3, 4 }
    local got = values { w }
    effects:retrain { 2, 1, 3, 4 }
    return distance(got, values { w })
  end
  local none, full = error_at(2e-4, 0) / error_at(1e-4, 0), error_at(2e-4, 2) / error_at(1e-4, 2)
  check.ok(none > 3.5 and none < 4.5, ("without: %g"):format(none))
  check.ok(full > 7 and full < 9, ("with: %g"):format(full))
end)

check.test("the projection keeps vectors in the mean, and costs what it says", function()
  local model, loss = network()
  local size = 0
  for _, p in ipairs(model:parameters()) do size = size + p:numel() end
  local whole = optim.order_effects(model, { optimizer = sgd })
  whole:record(5, loss)
  check.equal(whole.passes, 5 + 5 * 4)
  check.equal(whole.bytes, 4 * size * (5 + 1 + 5 + 20))
  whole:estimate { 5, 4, 3, 2, 1 }
  local wanted = values(model:parameters())
  local mean, count = nil, 60
  local single
  for seed = 1, count do
    local m, l = network()
    local effects = optim.order_effects(m, { optimizer = sgd, dimensions = 16, seed = seed, terms = 1 })
    effects:record(5, l)
    check.equal(effects.bytes, 4 * size * (5 + 1 + 5) + 4 * 16 * 20)
    effects:estimate { 5, 4, 3, 2, 1 }
    local got = values(m:parameters())
    mean = mean or {}
    for i, v in ipairs(got) do mean[i] = (mean[i] or 0) + v / count end
    single = (single or 0) + distance(got, wanted) / count
  end
  local m, l = network()
  local first = optim.order_effects(m, { optimizer = sgd, terms = 1 })
  first:record(5, l)
  first:estimate { 5, 4, 3, 2, 1 }
  -- SGD is linear in gradients: without a bias the mean of 60 lies a seventh as far away as one does.
  check.ok(distance(mean, values(m:parameters())) < single / 3)
end)

check.test("mistakes", function()
  local model, loss = network()
  check.fails(function() optim.order_effects(model) end, "order_effects: optimizer: expected a function that makes one")
  check.fails(function() optim.order_effects(model, { optimizer = adam, terms = 3 }) end,
    "terms: expected an integer in [0, 2], got 3")
  check.fails(function() optim.order_effects({ ty.ones(2) }, { optimizer = adam }) end, "that requires gradients")
  local effects = optim.order_effects(model, { optimizer = adam })
  check.fails(function() effects:estimate { 1 } end, "OrderEffects:estimate: nothing is recorded; record() first")
  check.fails(function() effects:record(0, loss) end, "OrderEffects:record: count: expected an integer >= 1, got 0")
  effects:record(3, loss)
  check.fails(function() effects:retrain { 1, 4 } end, "order: expected batches from 1 to 3, got 4 at position 2")
  check.fails(function() effects:record(2, function() return 1 end) end, "loss(1): expected a tensor, got 1")
end)

check.finish()
