-- The order of an update whose subgroups alternate between the host and the device, as data: what
-- offload.deep_opt_states does and what simulate() times are this one list. And a model of rates that says how many
-- subgroups the device should take: both sides are to be done at the same time. Maurya et al. 2024, "Deep Optimizer
-- States: Towards Scalable Training of Transformer Models Using Interleaved Offloading", whose performance model has
-- the same rates; the formula here follows from what an element has to be moved and stepped, with moves and steps that
-- overlap, and takes strides that are no whole numbers.
local arguments = require "tycho.arguments"

local M = {}

-- Bytes of an element: parameter and two moments in f32, and what a half-precision parameter takes.
local state_bytes, half_bytes = 12, 2

local kinds = { host = "a number > 0", convert = "a number > 0", device = "a number > 0", up = "a number > 0",
  down = "a number > 0" }

--- Rates of a machine: elements a second that the host steps, that it converts to half precision and that the device
-- steps; bytes a second of the link to the device and from it, each way of its own.
---@alias InterleaveRates { host: number, convert: number, device: number, up: number, down: number }

local function check_rates(who, rates)
  arguments.expect(who, "rates", rates, "a table")
  for name, words in pairs(kinds) do arguments.expect(who, "rates." .. name, rates[name], words) end
  return rates
end

--- Seconds of an element of a long update of which the device takes the share `part`, by the model: whatever of the
-- processors and of the two ways of the link has the most to do.
---@param part number  in [0, 1]
---@param rates InterleaveRates
---@return number seconds
function M.predict(part, rates)
  arguments.expect("offload.interleave.predict", "part", part, "a number in [0, 1]")
  check_rates("offload.interleave.predict", rates)
  local host = (1 - part) * (1 / rates.host + 1 / rates.convert)
  local up = (part * state_bytes + (1 - part) * half_bytes) / rates.up
  return math.max(host, up, part * state_bytes / rates.down, part / rates.device)
end

--- Every how manieth subgroup the device should step: with that many the host is done with its own when the link has
-- moved the states of the device's, or when the device has stepped them. math.huge: none; 1: all.
---@param rates InterleaveRates
---@return number every
function M.stride(rates)
  check_rates("offload.interleave.stride", rates)
  local host, half = 1 / rates.host + 1 / rates.convert, half_bytes / rates.up
  if host <= half then return math.huge end
  -- (1 - part) * host against the way up, the way down and the device.
  local part = math.min(1, (host - half) / (host - half + state_bytes / rates.up),
    host / (host + state_bytes / rates.down), host / (host + 1 / rates.device))
  return 1 / part
end

--- Which of `count` subgroups the device steps: the first of every `every`, which need not be a whole number.
---@param count integer
---@param every number  1 or more; math.huge: none
---@return boolean[]
function M.places(count, every)
  arguments.expect("offload.interleave.places", "count", count, "an integer >= 0")
  arguments.expect("offload.interleave.places", "every", every, "a number >= 1")
  local on_device = {}
  for i = 1, count do on_device[i] = every < math.huge and math.ceil(i / every) > math.ceil((i - 1) / every) end
  return on_device
end

--- The update in the order in which it is asked for. Each entry has what (fetch: states of a subgroup to the device;
-- step: it is stepped there; flush: its states come back; host: it is stepped on the host; send: its half-precision
-- parameters go to the device; ready: the model may be computed with), group, slot (of the device's buffers) and after:
-- names of other entries, "step 3", that have to be over. An entry that no entry of this update has before it waits for
-- that of the last update. Besides, entries of one kind are done in their order, and after "host" comes nothing that is
-- asked for behind it. "backward" is the pass that made the gradients, "landed 3" the copy of subgroup 3's to the host.
---@param on_device boolean[]
---@param slots integer  subgroups whose states are on the device at a time
---@return table[]
function M.schedule(on_device, slots)
  arguments.expect("offload.interleave.schedule", "on_device", on_device, "a list")
  arguments.expect("offload.interleave.schedule", "slots", slots, "an integer >= 1")
  local list, order, last_in = {}, {}, {}
  for i, yes in ipairs(on_device) do if yes then order[#order + 1] = i end end
  slots = math.min(slots, #order)
  local function slot_of(n) return (n - 1) % slots + 1 end
  for n, group in ipairs(order) do last_in[slot_of(n)] = group end
  local function add(what, group, after, slot)
    list[#list + 1] = { what = what, group = group, after = after, slot = slot }
  end
  local function fetch(n)
    local group = order[n]
    if not group then return end
    local before = order[n - slots] or last_in[slot_of(n)]
    add("fetch", group, before == group and { "flush " .. group } or { "flush " .. before, "flush " .. group },
      slot_of(n))
  end
  for n = 1, slots do fetch(n) end
  local at, last = 0, {}
  for i, yes in ipairs(on_device) do
    if yes then
      at = at + 1
      add("step", i, { "backward", "fetch " .. i }, slot_of(at))
      add("flush", i, { "step " .. i }, slot_of(at))
      fetch(at + slots)
    else
      add("host", i, { "landed " .. i })
      add("send", i, { "backward" })
    end
    last[i] = (yes and "step " or "send ") .. i
  end
  add("ready", 0, last)
  return list
end

local resources = { fetch = "up", send = "up", step = "device", flush = "down", host = "host", ready = "host" }

local function seconds_of(what, n, rates)
  if what == "host" then return n / rates.host + n / rates.convert end
  if what == "step" then return n / rates.device end
  if what == "fetch" then return n * state_bytes / rates.up end
  if what == "send" then return n * half_bytes / rates.up end
  return what == "flush" and n * state_bytes / rates.down or 0.0
end

--- Seconds of an update, when all gradients are there and nothing else goes on. Kinds of entries that share the way up
-- take turns there, whichever can begin first.
---@param schedule table[]  of schedule()
---@param elements integer[]  of each subgroup
---@param rates InterleaveRates
---@return number seconds
---@return table[] events  { what, group, row, from, to }
function M.simulate(schedule, elements, rates)
  arguments.expect("offload.interleave.simulate", "schedule", schedule, "a list")
  arguments.expect("offload.interleave.simulate", "elements", elements, "a list of numbers")
  for i, entry in ipairs(schedule) do
    if type(entry) ~= "table" or not resources[entry.what] or type(entry.after) ~= "table" then
      arguments.fail("offload.interleave.simulate: schedule: expected what schedule() returns, got %s as element %d",
        arguments.describe(entry), i)
    end
  end
  check_rates("offload.interleave.simulate", rates)
  local queues, issued, left, issued_after = {}, {}, #schedule, nil
  for _, entry in ipairs(schedule) do
    local needs = { issued_after }
    for _, name in ipairs(entry.after) do if issued[name] then needs[#needs + 1] = name end end
    local queue = queues[entry.what] or { first = 1 }
    queues[entry.what] = queue
    queue[#queue + 1] = { entry = entry, needs = needs }
    local name = entry.what .. " " .. entry.group
    issued[name] = true
    if entry.what == "host" then issued_after = name end
  end
  local done, free, events, last = {}, {}, {}, 0.0
  -- When the first entry of a queue can begin; nil while it waits for one that has no time yet.
  local function start(what, head)
    local from = math.max(free[what] or 0.0, free[resources[what]] or 0.0)
    for _, name in ipairs(head.needs) do
      if not done[name] then return nil end
      from = math.max(from, done[name])
    end
    return from
  end
  while left > 0 do
    local best, from
    for what, queue in pairs(queues) do
      local t = queue[queue.first] and start(what, queue[queue.first])
      if t and (not from or t < from or t == from and what < best) then best, from = what, t end
    end
    local queue = queues[best]
    local entry = queue[queue.first].entry
    local to = from + seconds_of(entry.what, elements[entry.group] or 0, rates)
    queue.first, left = queue.first + 1, left - 1
    done[entry.what .. " " .. entry.group], free[best], free[resources[best]] = to, to, to
    last = math.max(last, to)
    events[#events + 1] = { what = entry.what, group = entry.group, row = resources[best], from = from, to = to }
  end
  return last, events
end

return M
