--- One item at one number of threads, or on a GPU: rounds of limit, ours, peer; medians and spread of each.
local ty = require "tycho"

local clock, sleep = ty.system.clock, ty.system.sleep
local measure = {}

--- From now on times are those of the processor, for one thread on a machine that others use as well: what these take
-- away does not count, though what they do to caches and memory does.
function measure.processor() clock = os.clock end

--- { median, min, max } of a list of numbers.
function measure.summary(list)
  if #list == 0 then return nil end
  return { median = ty.stats.median(list), min = math.min(table.unpack(list)), max = math.max(table.unpack(list)) }
end

-- Seconds per call, after an eighth of the calls to warm up: while the other side ran, caches were filled with other
-- things, and a virtual machine's host may have taken back what lay idle. wait(): until a GPU is done.
local function run(fn, n, wait)
  for _ = 1, math.max(1, n // 8) do fn() end
  wait()
  local start = clock()
  for _ = 1, n do fn() end
  wait()
  return (clock() - start) / n
end

-- Calls that fill `target` seconds.
local function calibrate(fn, target, wait)
  local n = 1
  run(fn, n, wait)
  while true do
    local seconds = run(fn, n, wait)
    if seconds * n > target / 4 or n >= 1 << 24 then return math.max(1, math.floor(target / seconds + 0.5)), seconds end
    n = n * 4
  end
end

-- Seconds that `work` takes at these rates; nil where one is not known.
local function seconds_of(work, rates)
  local sum = 0
  for kind, amount in pairs(work) do
    if not rates[kind] then return nil end
    sum = sum + amount / rates[kind] * 1e-9
  end
  return sum
end

-- Waits until our own idle threads have stopped spinning.
local function settle()
  local native = require "bench.lib.native"
  for _ = 1, 200 do
    local before = native.cpu()
    sleep(0.004)
    if native.cpu() - before < 0.0004 then return end
  end
end

-- Processor seconds used by all programs since the start of the machine, in ticks of 10 ms.
local function busy()
  local file <close> = io.open "/proc/stat"
  local sum, i = 0, 0
  for value in (file and file:read "l" or ""):gmatch "%d+" do
    i = i + 1
    if i ~= 4 and i ~= 5 and i <= 8 then sum = sum + tonumber(value) end -- neither idle nor waiting
  end
  return sum / 100
end

-- Runs a round; returns the share of one processor that other programs had meanwhile.
local function watched(round, peer)
  local native = require "bench.lib.native"
  local pid = peer and peer.pid
  local function used() return native.cpu() + (pid and native.cpu(pid) or 0) end
  local all, own, start = busy(), used(), clock()
  round()
  all, own, start = busy() - all, used() - own, clock() - start
  return math.max(0, all - own - 0.03) / start
end

-- The modes of one side in the order of their speed, from a short trial of each.
local function trial(modes, time)
  local trials, order = {}, {}
  for _, mode in ipairs(modes) do
    local seconds, err = time(mode)
    if seconds then
      trials[mode] = math.min(seconds, time(mode) or math.huge)
      order[#order + 1] = mode
    else
      trials[mode] = err
    end
  end
  table.sort(order, function(a, b) return trials[a] < trials[b] end)
  return order[1], trials
end

-- An item that runs processes of its own: sample() and peer_sample() return a number each, nil where there is none.
local function processes(item, rounds, with_peer, result)
  local ours, others = {}, {}
  for _ = 1, rounds do
    ours[#ours + 1] = item.sample()
    others[#others + 1] = with_peer and item.peer_sample() or nil
  end
  result.ours, result.peer = measure.summary(ours), measure.summary(others)
  if not result.ours then error("the process failed", 0) end
  result.ratio = result.peer and result.peer.median / result.ours.median
  if item.least then result.limit, result.share = item.least, item.least / result.ours.median end
  return result
end

-- On a CPU the other side's threads must have stopped, and rounds that other programs disturbed are thrown away and
-- repeated, up to three for each that counts. Returns how many were disturbed, and how many of these count all the same
-- because there was no end of them.
local function rounds_on_cpu(rounds, round, peer, ours, others)
  local spare, disturbed, kept = 2 * rounds, 0, 0
  for _ = 1, rounds do
    local mark = #ours
    while watched(round, peer) > 0.05 do
      disturbed = disturbed + 1
      if spare == 0 then
        kept = kept + 1
        break
      end
      spare = spare - 1
      ours[mark + 1], others[mark + 1] = nil, nil
    end
  end
  return disturbed > 0 and disturbed or nil, kept > 0 and kept or nil
end

-- The kinds of a result's limits whose rate, the best of its rounds, is far below what the head of the report found:
-- the probe was in the way of something, and a share of its limit would be flattered.
local function collapsed(rates, known)
  local list = {}
  for kind, rate in pairs(rates) do
    if known and known[kind] and rate < 0.8 * known[kind] then list[#list + 1] = kind end
  end
  table.sort(list)
  return #list > 0 and list or nil
end

local function nothing() end

--- Measures `item` with `threads` threads. options: rounds, target (seconds of a sample), rates (limits of that number
-- of threads, as the head of the report found them), processor (after measure.processor()); for a GPU on (lib/on.lua)
-- and most (seconds, after which no further round begins). Returns a result: ours = { median, min, max, mode }, peer
-- the same or nil, limit (seconds), rates, modes of both sides, ratio, share; on a GPU peak and peer_peak, the most
-- bytes that tensors took.
function measure.item(item, threads, peer, options)
  local on = options.on
  local limits = on and on.limits or require "bench.lib.limits"
  local wait = on and on.wait or nothing
  local still = on and nothing or settle -- before the other side's turn
  if not on then ty.set_threads(threads) end
  ty.manual_seed(0)
  local target = item.target and not (on and on.tiny) and item.target or options.target
  local rounds = math.min(options.rounds, item.rounds or options.rounds)
  local result = { threads = threads, processor = options.processor }
  if item.sample then return processes(item, rounds, options.peer, result) end

  local began = clock()
  if on then on.begin(item) end
  local own = item.setup(threads)
  if type(own) == "function" then own = { eager = own } end
  local names, counts = {}, {}
  for mode in pairs(own) do names[#names + 1] = mode end
  table.sort(names)

  local function time_own(mode)
    local seconds
    if not counts[mode] then counts[mode], seconds = calibrate(own[mode], target, wait) end
    return seconds or run(own[mode], counts[mode], wait)
  end

  -- One mode that fails, such as a compiled one, leaves the others.
  local function try_own(mode)
    local ok, seconds = pcall(time_own, mode)
    return ok and seconds or nil, seconds
  end

  local theirs
  local function time_peer(mode)
    local answer, err = peer:ask { ["do"] = "sample", mode = mode, target = target, processor = options.processor }
    if answer and mode == theirs then result.peer_peak = answer.peak end
    return answer and answer.seconds, err
  end

  if peer and not on then peer:settle() end
  local mine, trials = trial(names, #names > 1 and try_own or time_own)
  if not mine then error(trials[names[1]], 0) end
  result.modes = #names > 1 and trials or nil
  if peer and item.peer then
    still()
    local answer, err = peer:ask { ["do"] = "prepare", group = item.peer.group or item.group, work = item.peer[1],
      args = item.peer[2], tf32 = item.tf32, without = (options.eager or item.eager) and "compile" or nil }
    if answer then
      theirs, result.peer_modes = trial(answer.modes, time_peer)
      if not theirs then result.peer_error = "no mode ran: " .. tostring(select(2, next(result.peer_modes))) end
    else
      result.peer_error = err
    end
  end
  if on then
    for _, mode in ipairs(names) do
      if mode ~= mine then own[mode] = nil end
    end
    result.peak = on.peak_of(function() run(own[mine], 1, wait) end)
  end
  local ours, others, rates = {}, {}, {}
  local function round()
    if peer and not on then peer:settle() end
    if item.work and not options.processor then
      still()
      for kind, rate in pairs(limits.sample(item.work, threads, peer)) do
        rates[kind] = math.max(rates[kind] or 0, rate) -- what disturbs a limit makes it low, never high
      end
    end
    ours[#ours + 1] = time_own(mine)
    if theirs then
      still()
      others[#others + 1] = time_peer(theirs)
    end
  end
  if on or options.processor then
    for i = 1, rounds do
      if i > 1 and clock() - began > (options.most or math.huge) then break end
      round()
    end
  else
    result.disturbed, result.kept = rounds_on_cpu(rounds, round, peer, ours, others)
  end
  if peer then peer:ask { ["do"] = "drop" } end

  result.ours, result.peer = measure.summary(ours), measure.summary(others)
  result.ours.mode = mine
  if result.peer then
    result.peer.mode = theirs
    result.peer.bound = peer.bound
    result.ratio = result.peer.median / result.ours.median
  end
  result.limit = item.work and not options.processor and seconds_of(item.work, rates) or nil
  if result.limit then
    result.share = result.limit / result.ours.median
    result.peer_share = result.peer and result.limit / result.peer.median
    result.rates, result.collapsed = rates, collapsed(rates, options.rates)
  end
  return result
end

return measure
