-- Placement on machines with several networks: which network a group uses, who is where, and steps as ranks' clocks
-- have them.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local dist = require "tycho.dist"

local test, equal, near, ok, fails = check.test, check.equal, check.close, check.ok, check.fails
local placement, costs, plans = dist.placement, dist.costs, dist.plans

local function cluster(devices)
  return costs.cluster { flops = 1e12, memory = 1e12, bandwidth = 1e13, tiers = {
    { size = devices, latency = 1e-6, bandwidth = 1e11 }, { latency = 1e-5, bandwidth = 1e9 } } }
end

local networks = { infiniband = { latency = 1e-6, bandwidth = 8e9 }, roce = { latency = 2e-6, bandwidth = 4e9 },
  ethernet = { latency = 1e-5, bandwidth = 2e8 } }

local function machines_of(nodes, devices)
  return placement.machines { nodes = nodes, networks = networks, cluster = cluster(devices or 2) }
end

local model = costs.transformer { layers = 8, hidden = 64, heads = 4, vocabulary = 512, length = 32 }

test("groups use the fastest network that their machines share", function()
  local m = machines_of { "infiniband", "infiniband", "roce", "ethernet" }
  equal(m:network { 0, 1 }, "inside")
  equal(m:network { 0, 2 }, "infiniband")
  equal(m:network { 0, 4 }, "ethernet")
  equal(m:network { 4, 5 }, "inside")
  equal(m:network { 5, 6 }, "ethernet")
  fails(function() m:network { 8 } end, "devices: expected less than 8, got 8")
  fails(function() machines_of { "token ring" } end, "nodes%[1%]: expected one of the networks, got token ring")
end)

test("stages come on machines of one network, the fastest first", function()
  local m = machines_of { "roce", "infiniband", "ethernet", "infiniband", "roce", "infiniband" }
  local where = placement.by_network(m, { pipeline = 3, data = 4 })
  -- InfiniBand's first two machines, RoCE's two, and what is left.
  equal(table.concat(where, " "), "2 3 6 7 0 1 8 9 10 11 4 5")
  local got = placement.step(model, m, { pipeline = 3, data = 4, sequences = 16 }, where)
  ok(got.networks[1].infiniband and not got.networks[2].infiniband and got.networks[2].roce)
  ok(got.networks[3].ethernet)
  equal(table.concat(placement.in_order(m, { pipeline = 3, data = 4 }), " "), "0 1 2 3 4 5 6 7 8 9 10 11")
  fails(function() placement.in_order(m, { pipeline = 5 }) end, "plan: expected tensor %* pipeline %* data of 12")
end)

test("placements by chance are permutations, of whole machines or of groups", function()
  local m = machines_of({ "roce", "infiniband", "roce", "infiniband" }, 4)
  for seed = 1, 5 do
    for _, unit in ipairs { "machine", "group" } do
      local list = placement.random(m, { tensor = 2, pipeline = 2, data = 4 }, seed, unit)
      local seen = {}
      for i, device in ipairs(list) do
        equal(seen[device], nil)
        seen[device] = true
        local block = unit == "machine" and 4 or 2
        if (i - 1) % block > 0 then equal(device, list[i - 1] + 1) end
      end
      equal(#list, 16)
    end
  end
end)

test("a step on machines of one network is that of dist.plans", function()
  local m = machines_of({ "infiniband", "infiniband", "infiniband", "infiniband" }, 2)
  local same = costs.cluster { flops = 1e12, memory = 1e12, bandwidth = 1e13, tiers = {
    { size = 2, latency = 1e-6, bandwidth = 1e11 }, { latency = 1e-6, bandwidth = 8e9, shared = true } } }
  local plan = { tensor = 2, data = 4, sequences = 256, zero = 1 }
  local got = placement.step(model, m, plan, placement.in_order(m, plan))
  local want = plans.step(model, same, plan)
  near(got.seconds / (want.seconds - want.parts.optimizer), 1, 0.02)
  local hidden = placement.step(model, m, plan, placement.in_order(m, plan), { overlap = true })
  ok(hidden.seconds < got.seconds)
end)

-- Two stages of two ranks each, which compute for so many seconds: by ranks' clocks, and played through.
test("a step is what ranks' clocks say", function()
  local forward, backward, micro, bytes = { 0.3, 0.2 }, { 0.5, 0.4 }, 4, 8000
  local link = { latency = 0.05, bandwidth = 1e5 }
  local got = dist.run(4, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local grid = d.grid(group, { pipeline = 2, data = 2 })
    local stage, other = grid.at.pipeline + 1, 1 - grid.at.pipeline
    local x = t.zeros(bytes // 4)
    group:barrier()
    local from = group:clock()
    for _, action in ipairs(d.schedule.one_f_one_b(2, micro)[stage]) do
      local is_forward = action.kind == "forward"
      local comes, goes = stage == 2, stage == 1
      if not is_forward then comes, goes = goes, comes end
      if comes then grid.pipeline:receive(other, is_forward and 0 or 1) end
      group:advance((is_forward and forward or backward)[stage])
      if goes then grid.pipeline:send(x, other, is_forward and 0 or 1) end
    end
    local ended = group:clock()
    grid.data:all_reduce(x)
    return { ended - from, group:clock() - ended }
  end, { latency = link.latency, bandwidth = link.bandwidth })
  local played = dist.schedule.simulate(dist.schedule.one_f_one_b(2, micro),
    { forward = forward, backward = backward, message = costs.message(bytes, link) })
  for stage = 1, 2 do
    local rows = played.rows[stage]
    near(got[2 * stage - 1][1] / rows[#rows].to, 1, 0.03)
  end
  near(got[1][2] / costs.seconds("all_reduce", 2, bytes, link), 1, 0.05)
end)

test("layers move to where they cost less", function()
  local m = machines_of({ "infiniband", "infiniband", "ethernet", "ethernet" }, 2)
  local big = costs.transformer { layers = 12, hidden = 256, heads = 4, vocabulary = 64, length = 64 }
  local plan = { pipeline = 2, data = 4, sequences = 64, micro = 1, balance = "layers" }
  local where = placement.by_network(m, plan)
  local layers = placement.partition(big, m, plan, where)
  equal(layers[1] + layers[2], 12)
  ok(layers[1] > layers[2], table.concat(layers, " "))
  local best = math.huge
  for first = 1, 11 do
    best = math.min(best, placement.step(big, m, plan, where, { layers = { first, 12 - first } }).seconds)
  end
  near(placement.step(big, m, plan, where, { layers = layers }).seconds / best, 1, 1e-9)
end)

test("placed by networks is no slower than any order of machines", function()
  local m = machines_of({ "infiniband", "roce", "infiniband", "roce" }, 2)
  local big = costs.transformer { layers = 8, hidden = 256, heads = 4, vocabulary = 64, length = 64 }
  local plan = { pipeline = 2, data = 4, sequences = 64 }
  local ours = placement.step(big, m, plan, placement.by_network(m, plan)).seconds
  local orders, best, worst = { 0, 1, 2, 3 }, math.huge, 0
  local function all(n)
    if n > 4 then
      local list = {}
      for _, node in ipairs(orders) do
        list[#list + 1] = 2 * node
        list[#list + 1] = 2 * node + 1
      end
      local seconds = placement.step(big, m, plan, list).seconds
      best, worst = math.min(best, seconds), math.max(worst, seconds)
      return
    end
    for i = n, 4 do
      orders[n], orders[i] = orders[i], orders[n]
      all(n + 1)
      orders[n], orders[i] = orders[i], orders[n]
    end
  end
  all(1)
  near(ours / best, 1, 1e-9)
  ok(worst > 1.5 * best)
end)

check.finish()
