--- The process of bench/gpu.lua that measures: item after item, the most telling first, each noted before it begins, so
-- that the process that watches can tell what hung or crashed and start another one behind it.
local ty = require "tycho"
local measure = require "bench.lib.measure"
local report = require "bench.lib.report"
local Peer = require "bench.lib.peer"

local worker = {}

-- In this order, until a share of the time is used; what was left out then comes at the end.
local stages = {
  { only = "ops", until_share = 0.55, groups = { "gemm", "attention", "memory_bound", "optimizer", "overhead" } },
  { only = "models", until_share = 0.85, groups = { "models" } },
  { only = "ops", until_share = 1, groups = { "conv", "scan_sort", "embedding", "copies" } },
}

local most = { ops = 4, models = 40 } -- seconds of an item, after which no further round begins
worker.patience = { ops = 45, models = 150 } -- seconds, after which an item that has not ended hangs

--- The items that are wanted: a list of { item =, only =, until_share = }. uncompiled: groups of the peer that are not
-- to be compiled.
function worker.plan(on, names, only, uncompiled)
  local plan = {}
  for _, stage in ipairs(stages) do
    for _, group in ipairs(not (only and only ~= stage.only) and stage.groups or {}) do
      for _, item in ipairs(require("bench.items.cuda." .. group)(on)) do
        item.group, item.name = group, group .. "/" .. item.name
        item.eager = stage.only ~= "models" or uncompiled[item.peer.group]
        local wanted = #names == 0
        for _, prefix in ipairs(names) do wanted = wanted or item.name:sub(1, #prefix) == prefix end
        if wanted then plan[#plan + 1] = { item = item, only = stage.only, until_share = stage.until_share } end
      end
    end
  end
  return plan
end

--- What a worker has noted: { name = "began", "done", "failed" or "late" }, and the name of the last one that began.
function worker.progress(path)
  local states, last = {}, nil
  local file <close> = io.open(path)
  for line in file and file:lines() or function() end do
    local state, name = line:match "^(%l+) (.*)"
    states[name] = state
    if state == "began" then last = name end
  end
  return states, last
end

-- Whether a side or a mode failed, which is noted in the result and does not stop a run that counts.
local function incomplete(result)
  for _, value in pairs(result.modes or {}) do
    if type(value) == "string" then return true end
  end
  return result.peer_error ~= nil
end

--- Measures the plan. o: on, machine (of report), progress (a file), seconds, began (when the first worker did), peer,
-- parent (the process that watches). Returns nothing: the results are in the machine's file, the states in `progress`.
function worker.run(plan, o)
  local states = worker.progress(o.progress)
  local notes <close> = assert(io.open(o.progress, "a"))
  local function note(state, name)
    notes:write(state, " ", name, "\n")
    notes:flush()
  end
  local options = { on = o.on, rounds = o.on.tiny and 1 or 5, target = o.on.tiny and 1e-4 or 0.03, peer = o.peer }
  local run = { limits = {}, peers = {}, items = {}, errors = {} }

  local peer
  local function start()
    peer = o.peer and Peer.start(ty.threads(), o.on.tiny and "any" or "cuda") or nil
    if peer then run.peers.pytorch = peer.about end
  end
  start()
  run.limits["1"] = o.on.limits.all(peer)
  report.gpu_limits(run.limits["1"], peer)
  report.head()

  local function one(entry)
    local item = entry.item
    options.most = o.on.tiny and 0 or most[entry.only]
    note("began", item.name)
    local ok, result = xpcall(measure.item, debug.traceback, item, 1, peer, options)
    if ok then
      report.judge(item, result, not o.on.tiny)
      report.line(item, result)
      run.items[item.name] = { ["1"] = result }
      report.save(o.machine, run) -- what there is, should the run be stopped
    else
      run.errors[item.name] = result
      report.save(o.machine, run)
      print(("%-38s error: %s"):format(item.name, result:match "^[^\n]*"))
    end
    note(ok and not (o.on.tiny and incomplete(result)) and "done" or "failed", item.name)
    if not ok and not pcall(ty.cuda.synchronize) and not pcall(ty.cuda.synchronize) then os.exit(75, true) end
    if peer and peer.gone then
      peer:stop()
      start()
    end
  end

  local left_out = {}
  local function pass(list, share_of)
    for _, entry in ipairs(list) do
      if not ty.io.exists("/proc/" .. o.parent) then os.exit(1) end
      if not states[entry.item.name] then
        if ty.system.clock() - o.began > share_of(entry) * o.seconds then
          left_out[#left_out + 1] = entry
        else
          one(entry)
        end
      end
    end
  end
  pass(plan, function(entry) return entry.until_share end)
  local again = left_out
  left_out = {}
  pass(again, function() return 1 end)
  for _, entry in ipairs(left_out) do note("late", entry.item.name) end
  if peer then peer:stop() end
end

return worker
