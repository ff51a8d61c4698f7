-- Formulas of costs against what they stand for: clocks of ranks, parameters of networks, operations that a profile
-- counts, schedules that are played through, and plans that are all tried.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local models = require "tycho.models"

local test, equal, near, ok, fails = check.test, check.equal, check.close, check.ok, check.fails
local costs, plans, schedule = dist.costs, dist.plans, dist.schedule

test("collectives take what clocks of ranks say", function()
  local link = { latency = 0.25, bandwidth = 1e5 }
  for _, n in ipairs { 1, 2, 3, 4 } do
    local got = dist.run(n, function(group)
      local t = require "tycho"
      local times = {}
      local function time(name, fn)
        group:barrier()
        local from = group:clock()
        fn()
        times[name] = group:clock() - from
      end
      local x = t.zeros(24000)
      time("all_reduce", function() group:all_reduce(x) end)
      time("all_gather", function() group:all_gather(x:narrow(0, 0, 24000 // group.size)) end)
      time("reduce_scatter", function() group:reduce_scatter(x) end)
      time("broadcast", function() group:broadcast(x) end)
      time("all_to_all", function() group:all_to_all(x) end)
      time("barrier", function() group:barrier() end)
      return times
    end, link)[1]
    for name, seconds in pairs(got) do
      near(seconds, costs.seconds(name, n, 96000, link), 0.02, name)
    end
  end
  -- By hand: each of 4 sends 3 quarters twice, in 6 turns.
  near(costs.seconds("all_reduce", 4, 8e5, { latency = 1, bandwidth = 1e5 }), 2 * 0.75 * 8 + 6, 1e-12)
  near(costs.message(1e5, link), 1.25, 1e-12)
end)

test("links of a ring", function()
  local cluster = costs.cluster { flops = 1, memory = 1, bandwidth = 1, tiers = {
    { size = 2, latency = 1, bandwidth = 100 }, { size = 8, latency = 2, bandwidth = 10 },
    { latency = 3, bandwidth = 40, shared = true } } }
  equal(cluster:link { 0, 1 }.bandwidth, 100)
  equal(cluster:link { 1, 2 }.bandwidth, 10)
  equal(cluster:link({ 0, 1, 2, 3, 4, 5, 6, 7 }).latency, 2)
  equal(cluster:link { 0, 8, 16 }.bandwidth, 5) -- eight such rings leave a node
  equal(cluster:link { 0, 4, 8, 12 }.bandwidth, 10) -- four
  equal(cluster:link { 5 }.latency, 1)
  fails(function() cluster:link {} end, "members: expected at least one")
  fails(function() costs.cluster { flops = 1, memory = 1, bandwidth = 1, tiers = {
    { size = 4, latency = 0, bandwidth = 1 }, { size = 6, latency = 0, bandwidth = 1 },
    { latency = 0, bandwidth = 1 } } } end, "tiers%[2%].size: expected a multiple of 4")
end)

test("products in tiles", function()
  local options = { flops = 1e6, memory = 1, bandwidth = 1e9, efficiency = 0.5, units = 3, tile = 10, launch = 2,
    tiers = { { latency = 0, bandwidth = 1 } } }
  local cluster = costs.cluster(options)
  -- 3 * 2 tiles on 3 processors: two rounds; 25 columns are as dear as 30.
  near(cluster:product(25, 20, 7), 2 * 7 * 100 * 2 * 3 / 0.5e6 + 2, 1e-12)
  near(cluster:product(5, 5, 7, 4), 2 * 7 * 100 * 2 * 3 / 0.5e6 + 2, 1e-12)
  options.bandwidth = 10
  near(costs.cluster(options):product(25, 20, 7), 2 * (25 * 7 + 7 * 20 + 25 * 20) / 10 + 2, 1e-12)
end)

test("parameters and operations are those of networks", function()
  local sizes = { vocab_size = 320, hidden_size = 64, num_hidden_layers = 3, num_attention_heads = 4,
    num_key_value_heads = 2, intermediate_size = 176, tie_word_embeddings = true, max_position_embeddings = 32 }
  local llama = models.Llama(sizes)
  local model = costs.transformer { layers = 3, hidden = 64, heads = 4, key_value_heads = 2, inner = 176, gated = true,
    vocabulary = 320, length = 32 }
  equal(model:parameters(), llama:count_parameters() - 64) -- the last norm
  local tokens = ty.zeros({ 2, 32 }, { dtype = "i64" })
  local seen = ty.no_grad(ty.profile, function() return llama(tokens) end, { limits = { flops = 1, bandwidth = 1 } })
  local products = 0
  for _, event in ipairs(seen.events) do
    if event.op:find "linear" or event.op:find "matmul" or event.op:find "attention" then
      products = products + event.flops
    end
  end
  ok(math.abs(products / (model:flops(2) / 3) - 1) < 0.05, ("%g of %g"):format(products, model:flops(2) / 3))
  -- Narayanan et al.: 96 B s l h^2 (1 + s / 6h + V / 16lh), with layers that run forwards twice.
  local gpt = costs.transformer { layers = 72, hidden = 14336, heads = 64, vocabulary = 250880 }
  local b, s, l, h, v = 2048, 2048, 72, 14336, 250880
  near(gpt:flops(b, true) / (96.0 * b * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))), 1, 1e-12)
  near(gpt:parameters() / (12 * l * h * h * (1 + 13 / (12 * h)) + v * h), 1, 1e-12)
end)

test("activations", function()
  local model = costs.transformer { layers = 2, hidden = 64, heads = 4, length = 16, vocabulary = 100 }
  -- Korthikanti et al.: s b h (34 + 5 a s / h), s b h (10 + 24 / t + 5 a s / (h t)), 2 s b h.
  near(model:activations(3), 3 * 16 * 64 * (34 + 5 * 4 * 16 / 64), 1e-9)
  near(model:activations(3, { tensor = 2 }), 3 * 16 * 64 * (10 + 12 + 5 * 4 * 16 / 128), 1e-9)
  near(model:activations(3, { fused = true }), 3 * 16 * 64 * 34, 1e-9)
  near(model:activations(3, { tensor = 4, recompute = true }), 2 * 3 * 16 * 64, 1e-9)
end)

local function cluster_of(options)
  local o = { flops = 1e12, memory = 1e12, bandwidth = 1e14, tiers = { { latency = 0, bandwidth = 1e15 } } }
  for key, value in pairs(options or {}) do o[key] = value end
  return costs.cluster(o)
end

test("a step is what its schedule takes", function()
  local model = costs.transformer { layers = 12, hidden = 256, heads = 8, vocabulary = 1000, length = 128 }
  for _, p in ipairs { 1, 2, 4 } do
    for _, m in ipairs { 4, 8 } do
      local cluster = cluster_of()
      local got = plans.step(model, cluster, { pipeline = p, sequences = m })
      local layer = plans.step(costs.transformer { layers = 1, hidden = 256, heads = 8, vocabulary = 1, length = 128 },
        cluster, { sequences = 1 }).parts.layers
      local with_head = plans.step(costs.transformer { layers = 1, hidden = 256, heads = 8, vocabulary = 1000,
        length = 128 }, cluster, { sequences = 1 }).parts.layers
      local forward, backward = {}, {}
      for i = 1, p do
        local all = got.stages[i] * layer + (i == p and with_head - layer or 0)
        forward[i], backward[i] = all / 4, 3 * all / 4
      end
      local played = schedule.simulate(schedule.one_f_one_b(p, m), { forward = forward, backward = backward })
      near((got.parts.layers + got.parts.bubble) / played.seconds, 1, 1e-2)
    end
  end
end)

test("stages, bytes and what does not fit", function()
  local model = costs.transformer { layers = 10, hidden = 64, heads = 4, vocabulary = 1000, length = 16 }
  equal(table.concat(plans.step(model, cluster_of(), { pipeline = 4, sequences = 8 }).stages, " "), "3 3 3 1")
  equal(table.concat(plans.step(model, cluster_of(), { pipeline = 4, sequences = 8, balance = "embeddings" }).stages,
    " "), "2 3 3 2")
  local one = plans.step(model, cluster_of(), { sequences = 8, zero = 0 })
  equal(one.bytes.weights + one.bytes.gradients + one.bytes.optimizer, 16 * model:parameters())
  local four = plans.step(model, cluster_of(), { data = 4, sequences = 8, zero = 1 })
  equal(four.bytes.optimizer, 3 * model:parameters())
  ok(plans.step(model, cluster_of { memory = one.bytes.total }, { sequences = 8, zero = 0 }).fits)
  ok(not plans.step(model, cluster_of { memory = one.bytes.total - 1 }, { sequences = 8, zero = 0 }).fits)
  fails(function() plans.step(model, cluster_of(), { tensor = 3 }) end, "tensor: expected a divisor of the 4 heads")
  fails(function() plans.step(model, cluster_of(), { data = 3, sequences = 4 }) end, "sequences: expected a multiple")
  fails(function() plans.step(model, cluster_of(), { pipeline = 11 }) end, "pipeline: expected at most 10")
end)

test("the search finds the best of all plans", function()
  local model = costs.transformer { layers = 6, hidden = 64, heads = 4, vocabulary = 1000, length = 32 }
  local cluster = cluster_of { memory = 3e6, tiers = { { size = 4, latency = 1e-6, bandwidth = 1e10 },
    { latency = 1e-5, bandwidth = 1e9 } } }
  local found, tried = plans.search(model, cluster, { devices = 12, sequences = 24, micro = { 1, 2 } })
  local best, count = math.huge, 0
  for t = 1, 8 do
    for p = 1, 6 do
      for d = 1, 12 do
        for _, micro in ipairs { 1, 2 } do
          for zero = 0, 1 do
            if t * p * d == 12 and 4 % t == 0 and 24 % (d * micro) == 0 then
              count = count + 1
              local got = plans.step(model, cluster, { tensor = t, pipeline = p, data = d, micro = micro,
                sequences = 24, zero = zero })
              if got.fits then best = math.min(best, got.seconds) end
            end
          end
        end
      end
    end
  end
  equal(tried, count)
  ok(#found > 3 and #found < tried, #found)
  equal(found[1].seconds, best)
end)

test("unknown numbers of a cluster are found again", function()
  local truth = cluster_of { efficiency = 0.6, launch = 3e-5, tiers = { { size = 4, latency = 1e-6, bandwidth = 4e9 },
    { latency = 1e-6, bandwidth = 1e9 } } }
  local sheet = cluster_of { tiers = { { size = 4, latency = 1e-6, bandwidth = 1e10 },
    { latency = 1e-6, bandwidth = 2e9 } } }
  local rows = {}
  for _, hidden in ipairs { 256, 1024, 2048 } do
    local model = costs.transformer { layers = 4, hidden = hidden, heads = 8, length = 256 }
    for _, plan in ipairs { { 1, 1, 1 }, { 4, 1, 1 }, { 1, 1, 8 }, { 2, 2, 2 } } do
      local p = { tensor = plan[1], pipeline = plan[2], data = plan[3], sequences = 16 }
      rows[#rows + 1] = { model = model, plan = p, flops = plans.step(model, truth, p).flops }
    end
  end
  local got, off = plans.fit(sheet, rows)
  ok(off < 0.02, off)
  near(got.efficiency, 0.6, 0.02)
  near(got.tiers[1].bandwidth / 4e9, 1, 0.25)
end)

test("pairs in order, and what was published", function()
  local share, pairs_of = plans.agreement({ 1, 2, 3, 9 }, { 10, 20, 20.1, 5 }, { "a", "a", "a", "b" })
  equal(share, 1)
  equal(pairs_of, 2)
  equal(plans.agreement({ 3, 2, 1 }, { 10, 20, 30 }, { 1, 1, 1 }), 0)
  equal(#dist.published.selene(), 10)
  equal(#dist.published.frontier(), 3)
  for _, row in ipairs(dist.published.jean_zay()) do
    local p = row.plan
    equal(p.tensor * p.pipeline * p.data, 384)
  end
  -- A row whose speed the log says as well: 14336 wide, 120.85 s, 133.40 Tflop/s.
  for _, row in ipairs(dist.published.jean_zay()) do
    if row.day == 23 and row.model.hidden == 14336 and row.plan.pipeline == 6 then
      near(row.flops / 1e12, 133.4, 0.1)
    end
  end
end)

test("schedules of unlike ranks and messages on their way", function()
  -- Two ranks, one micro-batch: 1 + 5 + 2, and back 6 + 5 + 3.
  local got = schedule.simulate(schedule.gpipe(2, 1), { forward = { 1, 2 }, backward = { 3, 6 }, message = { 5, 0 } })
  equal(got.seconds, 1 + 5 + 2 + 6 + 5 + 3)
  got = schedule.simulate(schedule.gpipe(2, 2), { forward = { 1, 4 }, backward = 0, message = 0 })
  equal(got.seconds, 9)
  fails(function() schedule.simulate(schedule.gpipe(2, 1), { forward = { 1 } }) end, "forward: expected a number, or")
end)

check.finish()
