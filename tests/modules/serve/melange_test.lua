-- Packing against all packings there are; rates of GPUs by hand; allocations.
local here = arg and arg[0]:match ".*/" or "tests/modules/serve/"
local check = dofile(here .. "../../lua/check.lua")
local serve = require "tycho.serve"

local test, equal, near, ok, fails = check.test, check.equal, check.close, check.ok, check.fails
local packing, melange = serve.packing, serve.melange

-- The cheapest of all packings.
local function all(problem)
  local kinds, pieces, load, best = #problem.costs, problem.pieces, {}, math.huge
  for j = 1, kinds do load[j] = 0 end
  local function go(b, left, j)
    if b > #pieces then
      local cost = 0
      for k = 1, kinds do cost = cost + problem.costs[k] * math.ceil(load[k] - 1e-9) end
      best = math.min(best, cost)
    elseif j > kinds then
      if left == 0 then go(b + 1, pieces[b + 1] and pieces[b + 1].count, 1) end
    else
      local one = pieces[b].loads[j]
      for n = 0, one ~= math.huge and left or 0 do
        local more = n > 0 and n * one or 0
        load[j] = load[j] + more
        go(b, left - n, j + 1)
        load[j] = load[j] - more
      end
    end
  end
  go(1, pieces[1] and pieces[1].count, 1)
  return best
end

local state = 12345
local function draw()
  state = (state * 1103515245 + 12345) % 2147483648
  return state / 2147483648
end

test("packings are the cheapest of all", function()
  for _ = 1, 300 do
    local problem = { costs = {}, pieces = {} }
    local kinds = 1 + math.floor(3 * draw())
    for j = 1, kinds do problem.costs[j] = 0.5 + 3.5 * draw() end
    for b = 1, 1 + math.floor(4 * draw()) do
      local loads = {}
      for j = 1, kinds do loads[j] = draw() < 0.15 and math.huge or 1.2 * draw() ^ 3 end
      loads[1 + math.floor(kinds * draw())] = 0.7 * draw()
      problem.pieces[b] = { loads = loads, count = 1 + math.floor(4 * draw()) }
    end
    local got = packing(problem)
    near(got.cost, all(problem), 1e-9)
    ok(got.proven)
    near(got.bound, got.cost, 1e-9)
    -- It is one: every piece is somewhere where it can be, and machines hold what they get.
    for j = 1, kinds do
      local load = 0
      for b, piece in ipairs(problem.pieces) do
        local n = got.counts[b][j]
        if n > 0 then load = load + n * piece.loads[j] end
      end
      ok(load <= got.machines[j] + 1e-6)
    end
    for b, piece in ipairs(problem.pieces) do
      local n = 0
      for j = 1, kinds do n = n + got.counts[b][j] end
      equal(n, piece.count)
    end
  end
end)

test("packings at the edges", function()
  equal(packing { costs = { 1 }, pieces = {} }.cost, 0)
  equal(packing { costs = { 1, 2 }, pieces = { { loads = { math.huge, false }, count = 1 } } }, nil)
  equal(packing { costs = { 3 }, pieces = { { loads = { 0.5 }, count = 2 } } }.machines[1], 1)
  equal(packing { costs = { 3 }, pieces = { { loads = { 0.5 }, count = 3 } } }.cost, 6)
  local capped = packing { costs = { 1, 1.7 }, nodes = 1, pieces = { { loads = { 0.7, 0.4 }, count = 3 },
    { loads = { 0.3, 0.5 }, count = 3 } } }
  ok(capped.bound <= capped.cost and capped.nodes == 1)
  fails(function() packing { costs = {}, pieces = {} } end, "costs: expected at least one")
  fails(function() packing { costs = { 1 }, pieces = { { loads = { -1 }, count = 1 } } } end, "loads%[1%]: expected")
end)

test("a GPU's rate", function()
  local gpu = melange.gpus.A100
  local rate, batch = melange.rate(gpu, 100, 100)
  -- By hand: 256 sequences, 13.48 GB of weights and half a megabyte a token at 0.9 of 2039 GB/s, or 13.48 Gflop each
  -- at half of 312 Tflop/s; 1 ms and 0.4 ms each; 2.56 prompts of 100 tokens and 2 ms.
  equal(batch, 256)
  local step = math.max((2 * 6.74e9 + 256 * 150 * 524288) / (0.9 * 2039e9), 2 * 6.74e9 * 256 / (0.5 * 312e12))
  local prompt = (2 * 6.74e9 * 100 + 2 * 32 * 4096 * 1e4) / (0.5 * 312e12) + 2e-3
  near(rate, 256 / (100 * (step + 1e-3 + 256 * 4e-4 + 2.56 * prompt)), 1e-9)
  local slower = melange.rate(gpu, 100, 100, 0.04)
  ok(slower > 0 and slower < rate)
  equal(melange.rate(melange.gpus.L4, 16000, 2000), 0) -- does not fit
  equal(melange.rate(melange.gpus.L4, 100, 100, 0.04), 0) -- reading the weights takes longer
  local before = math.huge
  for _, input in ipairs(melange.inputs) do
    local now = melange.rate(gpu, input, 100)
    ok(now < before)
    before = now
  end
end)

test("requests and buckets", function()
  for _, kind in ipairs { "chat", "documents", "mixed" } do
    local requests = melange.requests(kind, 500, 3)
    local rates, sum = melange.rates(requests, 7), 0
    for _, bucket in ipairs(rates) do sum = sum + bucket.rate end
    near(sum, 7, 1e-9)
    equal(#requests, 500)
  end
  local rates = melange.rates({ { 25, 25 }, { 26, 25 }, { 24, 30 }, { 20000, 1 } }, 4)
  equal(#rates, 4)
  equal(rates[1].input .. " " .. rates[1].output, "25 25")
  equal(rates[4].input, 16000)
end)

test("allocations are cheaper than any kind alone, and serve in time", function()
  local requests = melange.requests("mixed", 800, 1)
  for _, within in ipairs { 0.12, 0.04 } do
    for _, rate in ipairs { 1, 6 } do
      local rates = melange.rates(requests, rate)
      local best = melange.allocate(rates, { within = within, slices = 4, nodes = 500 })
      for _, cost in pairs(melange.single(rates, { within = within })) do ok(best.cost <= cost + 1e-9) end
      ok(best.cost <= melange.greedy(rates, { within = within }) + 1e-9)
      local cost = 0
      for name, n in pairs(best.machines) do cost = cost + n * melange.gpus[name].cost end
      near(cost, best.cost, 1e-9)
      for _, shares in ipairs(best.shares) do
        local sum = 0
        for _, share in pairs(shares) do sum = sum + share end
        near(sum, 1, 1e-9)
      end
      local played = melange.simulate(best, { seconds = 20, requests = requests })
      ok(played.within > 0.97 and played.count > 0, played.within)
    end
  end
  -- One kind alone is the least that one kind can be.
  local rates = melange.rates(requests, 6)
  local one = melange.allocate(rates, { within = 0.12, gpus = { A100 = melange.gpus.A100 } })
  equal(one.cost, melange.single(rates, { within = 0.12 }).A100)
  equal(melange.allocate({ { input = 16000, output = 2000, rate = 1 } }, { gpus = { L4 = melange.gpus.L4 } }), nil)
  -- A machine that gets more than it can take is late.
  local crowded = melange.allocate(melange.rates(requests, 2), { within = 0.12 })
  for _, bucket in ipairs(crowded.rates) do bucket.rate = 40 * bucket.rate end
  ok(melange.simulate(crowded, { seconds = 20, requests = requests }).mean
    > melange.simulate(melange.allocate(melange.rates(requests, 2), { within = 0.12 }),
      { seconds = 20, requests = requests }).mean)
end)

check.finish()
