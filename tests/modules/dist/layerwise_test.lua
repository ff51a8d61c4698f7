-- Layers that are each divided in their own way: training as of one rank; plans against all others.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local dist = require "tycho.dist"

local test, equal, near, ok, fails = check.test, check.equal, check.close, check.ok, check.fails
local layer_plans, costs = dist.layer_plans, dist.costs

local work = dist.workload.open { length = 16, width = 32, layers = 3, heads = 4, rows = 8, vocabulary = 257,
  chapters = 12, config = { tie_word_embeddings = false } }

local function all(s) return { s, s, s, s, s } end
local function blocks(s, ends) return { ends, s, s, s, ends } end

test("training by any strategy is that of one rank", function()
  local one = dist.layer_trial.measure(work, 1, { { layers = all {} } }, { rows = 8, steps = 4 })[1]
  local by_ranks = {
    [2] = { { layers = all { data = 2 } }, { layers = all { data = 2, again = true } },
      { layers = all { data = 2, sharded = true } }, { layers = blocks({ tensor = 2 }, { data = 2 }) },
      { layers = blocks({ tensor = 2, again = true }, { data = 2, sharded = true }) },
      { layers = all {}, pipeline = 2, micro_batches = 4 } },
    [4] = { { layers = blocks({ tensor = 2, data = 2, first = "data", sharded = true }, { data = 4 }) },
      { layers = { { data = 4 }, { tensor = 4 }, { tensor = 2, data = 2, first = "data" }, { data = 4, sharded = true },
        { data = 4, sharded = true } } },
      { pipeline = 2, micro_batches = 4, parts = { { 1, 3 }, { 4, 5 } }, layers = { { data = 2 }, { tensor = 2 },
        { data = 2, sharded = true }, { tensor = 2, again = true }, { data = 2, sharded = true } } } },
  }
  for ranks, plans in pairs(by_ranks) do
    for i, got in ipairs(dist.layer_trial.measure(work, ranks, plans, { rows = 8, steps = 4 })) do
      for step = 1, 4 do near(got.losses[step] / one.losses[step], 1, 1e-6, ("%d ranks, plan %d"):format(ranks, i)) end
    end
  end
end)

test("gradients are those of one rank", function()
  local function gradients(group, of, layers)
    local d = require "tycho.dist"
    local training = d.layerwise.new(group, d.workload.model(of, 1), { layers = layers })
    local share = 8 // training.group.size
    local rows = d.workload.rows(of, 1, 1, share * training.group.rank, share)
    training:backward(rows:narrow(1, 0, 16):contiguous(), rows:narrow(1, 1, 16):contiguous())
    local list = {}
    for i, layer in ipairs(training.layers) do
      for j, p in ipairs(layer.flat and {} or layer.inner:parameters()) do list[i .. " " .. j] = p.grad:clone() end
    end
    return list
  end
  local want = dist.run(1, gradients, nil, work, all {})[1]
  for _, rank in ipairs(dist.run(4, gradients, nil, work, { { data = 4 }, { tensor = 2, data = 2 }, { data = 4,
    again = true }, { tensor = 4, again = true }, { data = 4, sharded = true } })) do
    local count = 0
    for key, g in pairs(rank) do
      local w = want[key]
      if g:numel() == w:numel() then -- what no other rank has another part of
        count = count + 1
        ok((g - w):abs():max():item() < 1e-6 + 1e-4 * w:abs():max():item(), key)
      end
    end
    ok(count >= 10, count)
  end
end)

test("sharded layers keep a part of their states and no more", function()
  local got = dist.layer_trial.measure(work, 4, { { layers = all { data = 4 } }, { layers = all { data = 4,
    sharded = true } } }, { rows = 8, steps = 3 })
  local parameters = dist.workload.model(work, 0):count_parameters()
  local saved = got[1].bytes - got[2].bytes
  ok(saved > 0.4 * 16 * parameters, ("%d of %d saved"):format(saved, 16 * parameters))
end)

test("what cannot be divided is refused", function()
  local function refused(plan, pattern)
    fails(function()
      dist.run(2, function(group, of, what)
        local d = require "tycho.dist"
        d.layerwise.new(group, d.workload.model(of, 1), what)
      end, nil, work, plan)
    end, pattern)
  end
  refused({ layers = { {} } }, "layers: expected 5 strategies, got 1")
  refused({ layers = all {} }, "expected tensor %* data of 2")
  refused({ layers = all { tensor = 2 } }, "expected 1 for the embedding and the head")
  refused({ layers = all { sharded = true }, pipeline = 2 }, "sharded: expected data of at least 2")
end)

test("a tree of strategies", function()
  local function count(ranks, tensor) return #layer_plans.strategies(ranks, tensor) end
  equal(count(1), 2)
  equal(count(2), 5) -- data and matrices, plain or again; data sharded
  equal(count(4), 11) -- data 3, both in two orders 6, matrices 2
  equal(count(8), 17)
  equal(count(4, false), 3)
end)

-- Layers that take and keep what chance has them take and keep.
local function drawn(layers, seed)
  local state = seed
  local function draw(low, high)
    state = (state * 1103515245 + 12345) % 2147483648
    return low + (high - low) * state / 2147483648
  end
  local profile = { rows = 8, optimizer = 1e-9, copying = 1e-9, exchange = 2e-5, action = { 1e-5, 3e-5 }, layers = {} }
  for i = 1, layers do
    local heavy, f, ways = draw(0.2, 3), draw(0.5e-3, 2e-3), {}
    for _, ranks in ipairs { 1, 2, 4 } do
      for _, s in ipairs(layer_plans.strategies(ranks, i > 1)) do
        local t, factor, kept, working = s.tensor, 2, 3e5, 0
        if s.again then factor, kept, working = 3, 2e4, 3e5 end
        if s.sharded then factor, working = 3.2, 6e5 end
        ways[layer_plans.key(s)] = { forward = { 1e-4, f / t }, backward = { 2e-4, factor * f / t }, kept = kept / t,
          output = 2e4, working = { working, 3e4 }, parameters = math.floor(heavy * 1e5) // t }
      end
    end
    profile.layers[i] = { sums = 2, output = 2e4, ways = ways }
  end
  return profile
end

local cluster = costs.cluster { flops = 1, memory = 1, bandwidth = 1, tiers = {
  { size = 2, latency = 1e-5, bandwidth = 5e9 }, { latency = 1e-4, bandwidth = 1e9 } } }

test("the search finds the best of all combinations within the memory", function()
  for seed = 1, 4 do
    local profile = drawn(3, seed)
    local strategies = layer_plans.strategies(4)
    local ends = layer_plans.strategies(4, false)
    for _, memory in ipairs { math.huge, 9e6, 5e6, 3.5e6 } do
      local best = math.huge
      for _, a in ipairs(ends) do
        for _, b in ipairs(strategies) do
          for _, c in ipairs(strategies) do
            for _, micro in ipairs { 1, 2 } do
              local seconds, bytes = layer_plans.estimate(profile, cluster, 4, { layers = { a, b, c },
                micro_batches = micro })
              if bytes <= memory then best = math.min(best, seconds) end
            end
          end
        end
      end
      local found = layer_plans.search(profile, cluster, { ranks = 4, memory = memory, pipelines = { 1 },
        micro_batches = { 1, 2 } })
      if best == math.huge then
        equal(#found, 0)
      else
        near(found[1].seconds / best, 1, 1e-9, ("seed %d, %g bytes"):format(seed, memory))
        ok(found[1].bytes <= memory)
      end
    end
  end
end)

test("more memory is never slower, and fewer strategies are never faster", function()
  local profile, last = drawn(5, 7), math.huge
  for _, memory in ipairs { 4e6, 6e6, 1e7, math.huge } do
    local found = layer_plans.search(profile, cluster, { ranks = 4, memory = memory })
    if found[1] then
      ok(found[1].seconds <= last * (1 + 1e-9))
      last = found[1].seconds
      local fewer = layer_plans.search(profile, cluster, { ranks = 4, memory = memory,
        allow = function(s) return s.tensor == 1 end })
      ok(not fewer[1] or fewer[1].seconds >= found[1].seconds * (1 - 1e-9))
    end
  end
  ok(last < math.huge)
end)

check.finish()
