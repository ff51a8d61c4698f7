-- Experts on two processors: caches evict as their rules say, the schedule is near the best there is and never worse
-- than a plain one, a recorded trace is what the routers say, and the simulated time adds up.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local models = require "tycho.models"

local function random(seed)
  local state = seed
  return function(n)
    state = (state * 1103515245 + 12345) % (1 << 31)
    return (state >> 8) % n
  end
end

local function held(cache)
  local list = {}
  for e in pairs(cache.held) do list[#list + 1] = e end
  table.sort(list)
  return table.concat(list, " ")
end

check.test("what caches evict", function()
  local function cache(rule)
    return offload.expert_cache { experts = 4, slots = 2, rule = rule, alpha = 0.5, top = 2 }
  end
  local loads = { { 1, 0, 0, 0 }, { 1, 0, 0, 0 }, { 0, 1, 0, 0 } }
  local scores = { { 0.6, 0.3, 0.05, 0.05 }, { 0.6, 0.1, 0.2, 0.1 }, { 0.1, 0.5, 0.1, 0.3 } }
  local gone = {}
  for _, rule in ipairs { "lru", "lfu", "score" } do
    local c = cache(rule)
    check.equal(held(c), "1 2")
    for i = 1, 3 do c:see(loads[i], scores[i]) end
    gone[rule] = c:insert(3)
    if rule == "score" then
      -- 0.5 of the top two, and half of what was: by hand.
      check.close(c.score[1], 0.225, 1e-12)
      check.close(c.score[2], 0.5 * 0.5 + 0.25 * 0 + 0.125 * 0.3, 1e-12)
      check.close(c.score[3], 0.25 * 0.2, 1e-12)
      check.close(c.score[4], 0.5 * 0.3, 1e-12)
    end
  end
  check.equal(gone, { lru = 1, lfu = 2, score = 1 })
  local c = cache "lru"
  check.equal({ c:insert(1), held(c) }, { nil, "1 2" }) -- it is there
  c = cache "lru"
  check.equal(c:insert(3, { [1] = true }), 2) -- 1 is busy
  check.equal(c:insert(4, { [1] = true, [3] = true }), 1) -- all are
  local none = offload.expert_cache { experts = 4, slots = 0 }
  check.equal({ none:insert(2), held(none) }, { nil, "" })
end)

local rates = { host_base = 1, host_token = 0.5, device_base = 0.2, device_token = 0.05, link = 2, dense = 0.5 }

-- The best of all ways to place the experts; what is fetched comes in any order.
local function best(load, have, r)
  local active = {}
  for e, n in ipairs(load) do if n > 0 then active[#active + 1] = e end end
  local least = math.huge
  for set = 0, (1 << #active) - 1 do
    local dev, host, fetched = 0, 0, {}
    for i, e in ipairs(active) do
      if set >> (i - 1) & 1 == 1 then host = host + r.host_base + r.host_token * load[e]
      elseif have[e] then dev = dev + r.device_base + r.device_token * load[e]
      else fetched[#fetched + 1] = e end
    end
    table.sort(fetched, function(a, b) return load[a] > load[b] end) -- the longest first is best
    local link = 0
    for _, e in ipairs(fetched) do
      link = link + r.link
      dev = math.max(dev, link) + r.device_base + r.device_token * load[e]
    end
    least = math.min(least, math.max(dev, host))
  end
  return least
end

check.test("the schedule against all there are", function()
  local next = random(7)
  local sum, count, worst = 0, 0, 1
  for _ = 1, 300 do
    local load, have = {}, {}
    for e = 1, 8 do
      load[e] = next(3) == 0 and 0 or next(20)
      have[e] = next(2) == 0 or nil
    end
    local seconds, place = offload.schedule_experts(load, have, rates)
    local least = best(load, have, rates)
    for e, n in ipairs(load) do check.ok((place[e] ~= nil) == (n > 0)) end
    check.ok(seconds >= least - 1e-9)
    check.ok(seconds <= offload.schedule_experts(load, have, rates, "fetch") + 1e-9)
    check.ok(seconds <= offload.schedule_experts(load, have, rates, "host") + 1e-9)
    if least > 0 then sum, count, worst = sum + seconds / least, count + 1, math.max(worst, seconds / least) end
  end
  check.ok(sum / count < 1.05 and worst < 1.6, ("%.3f in the mean, %.3f at worst"):format(sum / count, worst))
end)

check.test("schedules by hand", function()
  local load = { 4, 1, 0, 2 }
  local seconds, place, link = offload.schedule_experts(load, { true }, rates, "fetch")
  check.close(seconds, 2 + 2 + 0.2 + 0.05, 1e-12) -- 4 is fetched first, 2 arrives at 4
  check.equal({ place[1], place[2], place[3], place[4], link }, { "device", "device", nil, "device", 4.0 })
  check.close(offload.schedule_experts(load, { true }, rates, "host"), 1.5 + 2, 1e-12)
  check.close(offload.schedule_experts({ 3 }, { true }, rates), 0.35, 1e-12)
  -- One is brought while the host computes the other.
  seconds, place = offload.schedule_experts({ 10, 1 }, {}, rates)
  check.close(seconds, 2 + 0.2 + 0.5, 1e-12)
  check.equal({ place[1], place[2] }, { "device", "host" })
  check.equal((offload.schedule_experts({ 0, 0 }, {}, rates)), 0.0)
end)

local function mixture()
  ty.manual_seed(3)
  return models.Mixtral { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 3,
    num_attention_heads = 2, num_key_value_heads = 2, num_local_experts = 4, num_experts_per_tok = 2,
    max_position_embeddings = 32 }
end

check.test("a trace is what the routers say", function()
  local model = mixture()
  local tokens = ty.randint(0, 40, { 1, 12 })
  local trace = offload.record_routing(model, tokens, { prompt = 5, ahead = 2 })
  check.equal({ trace.experts, trace.chosen, #trace.steps, trace.steps[1].tokens, trace.steps[2].tokens },
    { 4, 2, 8, 5, 1 })
  local record = {}
  ty.no_grad(function() model(tokens, { record = record }) end)
  local last
  for l = 1, 3 do
    local counts = record[l].experts:narrow(0, 0, 5):flatten():one_hot(4):sum(0):tolist()
    check.equal(trace.steps[1].layers[l].load, counts)
    for t = 5, 11 do
      local entry = trace.steps[t - 3].layers[l]
      check.equal(entry.load, record[l].experts:narrow(0, t, 1):flatten():one_hot(4):sum(0):tolist())
      for e, share in ipairs(entry.score) do check.close(share, record[l].shares[{ t, e - 1 }]:item(), 1e-6) end
    end
    last = trace.steps[2].layers[l]
    check.equal(#last.ahead, math.min(2, 3 - l))
    for _, ahead in ipairs(last.ahead) do
      local sum = 0
      for _, n in ipairs(ahead.load) do sum = sum + n end
      check.equal(sum, 2)
    end
  end
  -- The prompt alone routes its tokens the same: nothing looks ahead.
  local short = offload.record_routing(model, tokens:narrow(1, 0, 5), { prompt = 5 })
  for l = 1, 3 do check.equal(short.steps[1].layers[l].load, trace.steps[1].layers[l].load) end
end)

-- A trace of one layer and two, by hand.
local function made(list)
  local steps = {}
  for i, load in ipairs(list) do
    local score = {}
    for e, n in ipairs(load) do score[e] = n / 2 end
    steps[i] = { tokens = 1, layers = { { load = load, score = score, ahead = {} } } }
  end
  return { experts = #list[1], chosen = 2, steps = steps }
end

check.test("hits, misses and seconds", function()
  local trace = made { { 1, 1, 0, 0 }, { 0, 1, 1, 0 }, { 1, 0, 1, 0 }, { 0, 0, 1, 1 } }
  local seen = offload.simulate_experts(trace, { rates = rates, slots = 2, rule = "lru", kind = "fetch" })
  -- Held 1 2; 3 comes for 1; 1 comes for 2; 4 comes for 1.
  check.equal({ seen.hits, seen.misses, seen.fetched, seen.prefetched }, { 5, 3, 3, 0 })
  check.close(seen.seconds, 4 * 0.5 + 0.5 + 3 * 2.25, 1e-9)
  check.close(seen.hit_rate, 5 / 8, 1e-12)
  local all = offload.simulate_experts(trace, { rates = rates, slots = 4 })
  check.equal({ all.misses, all.hit_rate }, { 0, 1.0 })
  check.close(all.seconds, 4 * (0.5 + 0.5), 1e-9)
  local none = offload.simulate_experts(trace, { rates = rates, slots = 0, kind = "host" })
  check.equal({ none.hits, none.fetched }, { 0, 0 })
  check.close(none.seconds, 4 * (3 + 0.5), 1e-9)
end)

check.test("what is foretold is brought while the link is free", function()
  local steps = {}
  for i = 1, 4 do
    local there = i % 2 == 1 and { 1, 0, 0, 0 } or { 0, 0, 0, 1 }
    steps[i] = { tokens = 1, layers = {
      { load = { 1, 0, 0, 0 }, score = { 1, 0, 0, 0 }, ahead = { { load = there, score = there } } },
      { load = there, score = there, ahead = {} },
    } }
  end
  local trace = { experts = 4, chosen = 1, steps = steps }
  local slow = { host_base = 5, host_token = 0, device_base = 0.1, device_token = 0, link = 1, dense = 2 }
  local function run(prefetch)
    return offload.simulate_experts(trace, { rates = slow, slots = 1, rule = "lru", kind = "fetch",
      prefetch = prefetch })
  end
  local without, with = run(false), run(true)
  check.equal({ without.misses, with.misses }, { 3, 0 })
  check.equal({ with.prefetched, with.fetched }, { 3, 0 })
  check.close(without.seconds - with.seconds, 3 * 1, 1e-9)
end)

check.test("mistakes", function()
  check.fails(function() offload.expert_cache { experts = 4 } end, "offload.expert_cache: slots")
  check.fails(function() offload.expert_cache { experts = 4, slots = 2, rule = "mru" } end, "rule")
  check.fails(function() offload.expert_cache({ experts = 4, slots = 2 }):see({ 1 }, { 1 }) end, "ExpertCache:see")
  check.fails(function() offload.expert_cache({ experts = 4, slots = 2 }):insert(5) end, "at most 4, got 5")
  check.fails(function() offload.schedule_experts({ 1 }, {}, { host_base = 1 }) end, "rates.host_token")
  check.fails(function() offload.schedule_experts({ 1 }, {}, rates, "both") end, "kind")
  check.fails(function() offload.simulate_experts({}, {}) end, "offload.simulate_experts: trace")
  check.fails(function() offload.record_routing(ty.nn.Linear(2, 2), ty.zeros({ 1, 3 }, { dtype = "i64" })) end,
    "offload.record_routing: model: expected layers of experts")
  check.fails(function() offload.record_routing(mixture(), ty.zeros({ 2, 3 }, { dtype = "i64" })) end,
    "offload.record_routing: tokens")
end)

check.finish()
