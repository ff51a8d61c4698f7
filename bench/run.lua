--- The benchmarks: every item on Tycho, on its peers and against the physical limit, in interleaved rounds of one run.
--
--     ./run bench                        everything (an hour)
--     ./run bench gemm conv/resnet       the items whose names begin so
--     ./run bench --show [NAME ...]      the table of what was saved last on a CPU like this one
--     ./run bench --of amd-epyc [NAME ...]   the same of another machine in bench/results
--     options: --help  --list  --quick (fewer rounds)  --threads 1,2  --rounds N  --no-peer  --no-save
--              --eager (the peer without torch.compile, which takes long to compile: for a first look)
--              --processor (one thread, times of the processor, without limits and verdicts: for a machine that others
--              use as well; what is saved says so)
--
-- A group of items is a file of bench/items/: a list of
--   { name, setup = function(threads) -> function or { mode = function }, peer = { work, arguments },
--     work = { kind = amount } (lib/limits.lua), bars = { peer, limit, most }, threads = { ... } }
-- or, for what runs in processes of its own, sample and peer_sample = function() -> number, least, unit = "MB"
-- where the better of several modes counts, on both sides. The peer's twin is bench/peer/<group>.py.
local root = arg[0]:match "^(.*)/bench/[^/]*$" or "."
_G.arg = { [0] = root .. "/bench/run.lua", table.unpack(arg) } -- what lib/ finds its files by
package.path = root .. "/?.lua;" .. package.path

local ty = require "tycho"
local command_line = require "bench.lib.command_line"
local stop, wanted = command_line.stop, command_line.wanted

local groups = {} -- every file of bench/items/
for _, file in ipairs(ty.io.listdir(root .. "/bench/items")) do groups[#groups + 1] = file:match "^([%w_]+)%.lua$" end
table.sort(groups)

local names, options = {}, { rounds = 7, target = 0.04, peer = true, save = true }
local i = 1
while arg[i] do
  local word = arg[i]
  local function value()
    i = i + 1
    return arg[i] or stop("%s: expected a value, got none", word)
  end
  if word == "--help" or word == "-h" then command_line.help(arg[0])
  elseif word == "--list" then options.list = true
  elseif word == "--show" then options.show = true
  elseif word == "--quick" then options.rounds, options.target, options.quick = 3, 0.02, true
  elseif word == "--eager" then options.eager = true
  elseif word == "--processor" then options.processor, options.threads = true, { 1 }
  elseif word == "--no-peer" then options.peer = false
  elseif word == "--no-save" then options.save = false
  elseif word == "--of" then options.of, options.show = value(), true
  elseif word == "--rounds" then options.rounds = math.max(1, math.tointeger(tonumber(value())) or 1)
  elseif word == "--threads" then
    options.threads = {}
    for n in value():gmatch "%d+" do table.insert(options.threads, math.tointeger(tonumber(n))) end
  elseif word:sub(1, 1) == "-" then stop("unknown option %s", word)
  else names[#names + 1] = word end
  i = i + 1
end

local all = ty.cpu().threads
local thread_counts = options.threads or (all > 1 and { 1, all } or { 1 })

-- Work by number of threads: a peer is started for each, since what it compiles is made for one number.
local plan, found = {}, 0
for _, group in ipairs(groups) do
  if #names == 0 or table.concat(names, " "):find(group, 1, true) then
    local list = require("bench.items." .. group)
    for _, item in ipairs(list) do
      item.group, item.name = group, group .. "/" .. item.name
      if wanted(names, item.name) then
        found = found + 1
        local counts, matches = item.threads or thread_counts, {}
        for _, n in ipairs(counts) do
          local asked = not options.threads
          for _, m in ipairs(thread_counts) do asked = asked or m == n end
          if asked then matches[#matches + 1] = n end
        end
        for _, n in ipairs(matches) do
          local judged = not options.processor and n == math.max(table.unpack(counts)) and (item.threads or n == all)
          plan[#plan + 1] = { item = item, threads = n, means = list.means, judged = judged and true or false }
        end
      end
    end
  end
end
if options.list then
  local last
  for _, entry in ipairs(plan) do
    if entry.item.name ~= last then print(entry.item.name) end
    last = entry.item.name
  end
  return
end
if found == 0 then stop "nothing is named so; --list shows the names" end
local report = require "bench.lib.report"
local missed, means, mean_bars = {}, {}, {}

-- Judges a result, prints its line and notes it for what is said at the end.
local function take(entry, result)
  local item = entry.item
  if not report.judge(item, result, entry.judged) then missed[#missed + 1] = { name = item.name, result = result } end
  report.line(item, result)
  local bar = entry.means and entry.means[item.mean]
  if bar and entry.judged and result.ratio then
    means[item.mean], mean_bars[item.mean] = means[item.mean] or {}, bar
    table.insert(means[item.mean], result.ratio)
  end
end

local function finish()
  local below = report.means(means, mean_bars)
  report.missed(missed)
  return #missed == 0 and not below
end

if options.show then
  local machine = report.this_cpu(root, options.of)
  if not ty.io.exists(machine.path) then
    local known = {}
    for _, file in ipairs(ty.io.listdir(root .. "/bench/results")) do known[#known + 1] = file:match "^(.*)%.json$" end
    table.sort(known)
    stop("nothing is saved for %s; --of NAME shows another machine's: %s", machine.name, table.concat(known, ", "))
  end
  local saved = report.load(machine)
  for _, threads in ipairs(thread_counts) do
    if saved.limits[tostring(threads)] then report.limits(saved.limits[tostring(threads)], threads) end
  end
  report.head()
  for _, entry in ipairs(plan) do
    local results = saved.items[entry.item.name]
    local result = results and results[tostring(entry.threads)]
    if result then take(entry, result) end
  end
  os.exit(finish(), true)
end

local native = require "bench.lib.native"
local limits = require "bench.lib.limits"
local measure = require "bench.lib.measure"
local Peer = require "bench.lib.peer"

if options.processor then measure.processor() end
if options.peer and not Peer.python() then print "no peer: bench/peers.sh makes its environment" end

local run, machine = { limits = {}, peers = {}, items = {} }, report.this_cpu(root)

local function measure_group(group, threads, entries)
  local peer = options.peer and Peer.start(threads) or nil
  if peer then
    if not run.peers.pytorch then report.peer(peer.about) end
    run.peers.pytorch = peer.about
  end
  for _, entry in ipairs(entries) do
    local item = entry.item
    if item.skip and item.skip() then
      print(("%-38s %s"):format(item.name, item.skip()))
    else
      options.rates = run.limits[tostring(threads)]
      local ok, result = xpcall(measure.item, debug.traceback, item, threads, peer, options)
      if ok then
        take(entry, result)
        run.items[item.name] = run.items[item.name] or {}
        run.items[item.name][tostring(threads)] = result
        if options.save then report.save(machine, run) end -- what there is, should the run be stopped
      else
        print(("%-38s error: %s"):format(item.name, result))
      end
    end
    collectgarbage()
  end
  if peer then peer:stop() end
end

for _, threads in ipairs(options.processor and {} or thread_counts) do
  local rates = limits.all(threads)
  run.limits[tostring(threads)] = rates
  report.limits(rates, threads)
end
report.head()

local began = native.wall()
local at = 1
while plan[at] do
  -- The entries of one group, one number of threads after the other.
  local group, by_threads, order = plan[at].item.group, {}, {}
  while plan[at] and plan[at].item.group == group do
    local threads = plan[at].threads
    if not by_threads[threads] then
      by_threads[threads] = {}
      order[#order + 1] = threads
    end
    table.insert(by_threads[threads], plan[at])
    at = at + 1
  end
  for _, threads in ipairs(order) do measure_group(group, threads, by_threads[threads]) end
end

local passed = finish()
print(("%.0f s"):format(native.wall() - began))
if options.save then print("written: " .. machine.path) end
os.exit(passed, true)
