--- Experts on two processors: what is cached runs on the device, the rest on the host or is fetched. Zhong et al. 2025,
-- "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference". Time is simulated, from rates
-- that were measured or are assumed: offload.simulate_experts follows a recorded trace (offload.record_routing).
local arguments = require "tycho.arguments"
local expert_cache = require "tycho.offload.expert_cache"

local M = {}

local rate_names = { "host_base", "host_token", "device_base", "device_token", "link", "dense" }

local function check_rates(who, rates)
  arguments.expect(who, "rates", rates, "a table")
  for _, name in ipairs(rate_names) do
    arguments.expect(who, "rates." .. name, rates[name], "a finite number >= 0")
  end
end

local function host(rates, n) return rates.host_base + rates.host_token * n end
local function device(rates, n) return rates.device_base + rates.device_token * n end

-- Experts that have tokens, those with more first.
local function active(load)
  local list = {}
  for e, n in ipairs(load) do if n > 0 then list[#list + 1] = e end end
  table.sort(list, function(a, b)
    if load[a] ~= load[b] then return load[a] > load[b] end
    return a < b
  end)
  return list
end

-- When all is done, with each expert where `place` says: the device runs what it has first, then what arrives.
local function finish(load, held, rates, place, order, from)
  local on_device, on_host, link = 0, 0, from
  for _, e in ipairs(order) do
    if place[e] == "device" and held[e] then on_device = on_device + device(rates, load[e]) end
  end
  for _, e in ipairs(order) do
    if place[e] == "host" then on_host = on_host + host(rates, load[e])
    elseif not held[e] then
      link = link + rates.link
      on_device = math.max(on_device, link) + device(rates, load[e])
    end
  end
  return math.max(on_device, on_host), link
end

-- Queues of device, host and link, whichever would finish something first: the device takes cached experts, large ones
-- first; the host what is not cached, small ones first, then small cached ones; the link brings what is not cached,
-- large ones first.
local function greedy(load, held, rates, order, from)
  local place, cached, away = {}, {}, {}
  for _, e in ipairs(order) do table.insert(held[e] and cached or away, e) end
  local on_device, on_host, link = 0, 0, from
  while #cached + #away > 0 do
    local run = cached[1] and on_device + device(rates, load[cached[1]]) or math.huge
    local small = #away > 0 and away or cached
    local by_host = on_host + host(rates, load[small[#small]])
    local waiting = on_device
    for _, e in ipairs(cached) do waiting = waiting + device(rates, load[e]) end
    local brought = away[1] and math.max(link + rates.link, waiting) + device(rates, load[away[1]]) or math.huge
    if brought <= by_host and #away > 0 and brought <= run then
      local e = table.remove(away, 1)
      place[e], link = "device", link + rates.link
      on_device = math.max(on_device, link) + device(rates, load[e])
    elseif run <= by_host then
      local e = table.remove(cached, 1)
      place[e], on_device = "device", run
    else
      local e = table.remove(small)
      place[e], on_host = "host", by_host
    end
  end
  return place
end

local kinds = { hybrid = true, fetch = true, host = true }

--- Where the experts of a layer run. load: tokens by expert; held: which are on the device (true by number from 1);
-- rates: seconds, host_base + host_token * n for an expert with n tokens on the host, device_base and device_token
-- likewise, link to bring an expert, dense for the rest of a layer. kind:
--   "hybrid"  queues of device, host and link (see above), or one of the two below where that is sooner
--   "fetch"   what is not there is fetched
--   "host"    what is not there runs on the host
-- from (0): when the link is free. Returns seconds until all is done, the place of each expert ("device" or "host"),
-- and when the link is free again.
---@param load integer[]
---@param held table<integer, boolean>
---@param rates table
---@param kind? string  ("hybrid")
---@param from? number
---@return number seconds
---@return table<integer, string> place
---@return number link
function M.schedule(load, held, rates, kind, from)
  local who = "offload.schedule_experts"
  arguments.expect(who, "load", load, "a list of integers")
  arguments.expect(who, "held", held, "a table")
  check_rates(who, rates)
  kind = arguments.expect(who, "kind", kind, "a string or nil") or "hybrid"
  from = arguments.expect(who, "from", from, "a finite number >= 0 or nil") or 0
  if not kinds[kind] then
    arguments.fail('%s: kind: expected "hybrid", "fetch" or "host", got %s', who, arguments.describe(kind))
  end
  local order, best, soonest, free = active(load), nil, math.huge, from
  local function try(place)
    local seconds, link = finish(load, held, rates, place, order, from)
    if seconds < soonest then best, soonest, free = place, seconds, link end
  end
  if kind == "hybrid" then try(greedy(load, held, rates, order, from)) end
  for _, plain in ipairs { "fetch", "host" } do
    if kind == "hybrid" or kind == plain then
      local place = {}
      for _, e in ipairs(order) do place[e] = (held[e] or plain == "fetch") and "device" or "host" end
      try(place)
    end
  end
  return soonest, best or {}, free
end

-- The expert of the next layers whose presence would save most, in the place of the one that would go for it, by what
-- this layer's input foretells; nil where none would save anything.
local function most_wanted(entry, l, caches, rates, kind)
  local best, most = nil, 0
  for j, ahead in ipairs(entry.ahead) do
    local cache = caches[l + j]
    local without = M.schedule(ahead.load, cache.held, rates, kind)
    for e, n in ipairs(ahead.load) do
      if n > 0 and not cache.held[e] then
        local held = {}
        for other in pairs(cache.held) do held[other] = true end
        local gone = cache:least()
        if gone then held[gone] = nil end
        held[e] = true
        local gain = without - M.schedule(ahead.load, held, rates, kind)
        if gain > most then best, most = { layer = l + j, expert = e, left = rates.link }, gain end
      end
    end
  end
  return best
end

--- Follows a trace through caches, schedule and prefetching. What a layer fetched stays, for what its rule evicts. The
-- link is busy with one expert at a time; while it has nothing to fetch that is wanted now, it brings what would save
-- most in the next layers, and what it has not finished goes on when it is free again. options:
--   rates      seconds: see offload.schedule_experts
--   slots      experts of each layer on the device
--   rule       of the caches ("score": see offload.expert_cache), with alpha and top
--   kind       of schedule ("hybrid")
--   prefetch   whether the next layers' experts are brought while the link is free (false)
-- Returns seconds, the prompt's and the other tokens' apart (prompt, decode), hits and misses (of experts that were
-- wanted, those that were there when their layer began) and their hit_rate, and how many experts were fetched when they
-- were wanted and brought before (fetched, prefetched).
---@param trace table
---@param options table
---@return { seconds: number, prompt: number, decode: number, hits: integer, misses: integer, hit_rate: number,
---  fetched: integer, prefetched: integer }
function M.simulate(trace, options)
  local who = "offload.simulate_experts"
  if type(trace) ~= "table" or type(trace.steps) ~= "table" or #trace.steps == 0 then
    arguments.fail("%s: trace: expected what offload.record_routing returns, got %s", who, arguments.describe(trace))
  end
  arguments.expect(who, "options", options, "a table")
  local o = arguments.read(who, options, { rates = arguments.none, slots = arguments.none, rule = "score", alpha = 0.5,
    top = arguments.none, kind = "hybrid", prefetch = false }, { rates = "a table", slots = "an integer >= 0",
    rule = "a string", alpha = "a number in [0, 1]", top = "an integer >= 1", kind = "a string",
    prefetch = "a boolean" })
  check_rates(who, o.rates)
  local caches = {}
  for l = 1, #trace.steps[1].layers do
    caches[l] = expert_cache { experts = trace.experts, slots = o.slots, rule = o.rule, alpha = o.alpha,
      top = o.top or 2 * trace.chosen }
  end
  local seen = { prompt = 0.0, decode = 0.0, hits = 0, misses = 0, fetched = 0, prefetched = 0 }
  local coming
  -- The link is free for so long.
  local function idle(seconds, entry, l)
    while o.prefetch and seconds > 0 do
      coming = coming or most_wanted(entry, l, caches, o.rates, o.kind)
      if not coming then return end
      local part = math.min(seconds, coming.left)
      coming.left, seconds = coming.left - part, seconds - part
      if coming.left <= 0 then
        caches[coming.layer]:insert(coming.expert)
        seen.prefetched, coming = seen.prefetched + 1, nil
      end
    end
  end
  for i, step in ipairs(trace.steps) do
    local total = 0.0
    for l, entry in ipairs(step.layers) do
      local cache, busy = caches[l], {}
      if coming and coming.layer == l and (entry.load[coming.expert] == 0 or cache.held[coming.expert]) then
        coming = nil -- foretold and not wanted
      end
      for e, n in ipairs(entry.load) do
        if n > 0 then
          busy[e] = true
          local name = cache.held[e] and "hits" or "misses"
          seen[name] = seen[name] + 1
        end
      end
      local seconds, place, link = M.schedule(entry.load, cache.held, o.rates, o.kind)
      cache:see(entry.load, entry.score)
      for e, where in pairs(place) do
        if where == "device" and not cache.held[e] then
          cache:insert(e, busy)
          seen.fetched = seen.fetched + 1
          if coming and coming.layer == l and coming.expert == e then coming = nil end
        end
      end
      idle(math.max(0, seconds - link) + o.rates.dense, entry, l)
      total = total + seconds + o.rates.dense
    end
    local phase = i == 1 and step.tokens > 1 and "prompt" or "decode"
    seen[phase] = seen[phase] + total
  end
  seen.seconds = seen.prompt + seen.decode
  seen.hit_rate = seen.hits / math.max(1, seen.hits + seen.misses)
  return seen
end

return M
