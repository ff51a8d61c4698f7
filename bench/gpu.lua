--- Everything to know about a GPU in one command: the op tests and the tests of whole models on it, then the
-- benchmarks, interleaved with PyTorch where `python3 -c "import torch"` works, each against the limit measured in the
-- same run (bytes over the bandwidth of a copy, operations over the rate of a large product).
--
--     bin/tycho bench/gpu.lua            where the bundle is unpacked; in the source tree ./run bench/gpu.lua
--     bin/tycho bench/gpu.lua gemm conv  the items whose names begin so, without the tests
--     options: --budget SECONDS (480)  --only tests|ops|models  --list  --no-peer  --no-save
--              --tiny (every item once in a small size, unjudged: what can be tried on the emulated device)
--
-- What was measured is in bench/results/<gpu>.json as soon as it is known: a run that is stopped leaves that. What
-- hangs or crashes is reported and left behind. bench/items/cuda has the items, in the form that the head of
-- bench/run.lua tells; each file returns a function of lib/on.lua. PyTorch is compiled for whole models only, while the
-- tests run. The last column has the peak of memory, ours:PyTorch's, after the verdict.
local root = arg[0]:match "^(.*)/bench/[^/]*$" or "."
_G.arg = { [0] = root .. "/bench/gpu.lua", table.unpack(arg) } -- what lib/ finds its files by
package.path = root .. "/?.lua;" .. package.path

local ty = require "tycho"
io.stdout:setvbuf "line"
local began = ty.system.clock()

local o = { budget = 480, peer = true, save = true, names = {}, uncompiled = {} }
do
  local i = 1
  local function value()
    i = i + 1
    return arg[i] or error("bench: " .. arg[i - 1] .. " wants a value", 0)
  end
  while arg[i] do
    local word = arg[i]
    if word == "--list" then o.list = true
    elseif word == "--tiny" then o.tiny, o.save = true, false
    elseif word == "--no-peer" then o.peer = false
    elseif word == "--no-save" then o.save = false
    elseif word == "--only" then o.only = value()
    elseif word == "--budget" then o.budget = tonumber(value()) or error("bench: --budget wants seconds", 0)
    elseif word == "--uncompiled" then o.uncompiled[value()] = true -- these three are for the worker
    elseif word == "--worker" then o.began = tonumber(value())
    elseif word == "--parent" then o.parent = value()
    elseif word:sub(1, 1) == "-" then error("bench: unknown option " .. word, 0)
    else o.names[#o.names + 1] = word end
    i = i + 1
  end
end
if o.only and not ({ tests = true, ops = true, models = true })[o.only] then
  error("bench: --only takes tests, ops or models", 0)
end

local count, why = ty.cuda.count()
if count == 0 and not o.list then error("bench: no GPU: " .. why, 0) end

local report = require "bench.lib.report"
local worker = require "bench.lib.gpu_worker"
local on = require "bench.lib.on"(o.tiny)
local plan = worker.plan(on, o.names, o.only, o.uncompiled)
if o.list then
  for _, entry in ipairs(plan) do print(entry.item.name) end
  return
end

local folder = root .. "/build/bench/gpu"
ty.io.mkdir(folder)
local progress = folder .. "/progress"
local name = ty.cuda.describe(0)
local short = name:match("^[^,]*"):gsub("[^%w]+", "-"):lower()
local machine = { kind = "gpu", name = name,
  path = o.save and ("%s/bench/results/%s.json"):format(root, short) or folder .. "/results.json" }

if o.began then
  return worker.run(plan, { on = on, machine = machine, progress = progress, seconds = o.budget, began = o.began,
    peer = o.peer, parent = o.parent })
end

-- ---- from here on the process that watches: it touches no GPU ----

local jobs = require "bench.lib.jobs"
local tests = require "bench.lib.gpu_tests"
local Peer = require "bench.lib.peer"

local function left() return o.budget - (ty.system.clock() - began) end

local function output(command)
  local pipe <close> = assert(io.popen(command))
  return (pipe:read "a":gsub("%s+$", ""))
end

local program = output(("readlink /proc/%d/exe"):format(ty.system.pid()))
local peer_device = o.tiny and "any" or "cuda"
local python = o.peer and Peer.python(peer_device) or nil
print(("%s; %s"):format(name, python and "the peer is PyTorch" or "no peer: limits only"))

-- Both at once: the tests, and compiling the peer's models.
local share = 0.35 * o.budget
local warm = {}
local unfinished = Peer.compiled .. "/unfinished" -- compilers that were stopped leave broken files
if ty.io.exists(unfinished) then os.execute(("rm -rf '%s'"):format(Peer.compiled)) end
if python then
  for _, entry in ipairs(plan) do
    local peer = entry.item.peer
    if peer and peer.group then
      local command = ("exec %s '%s' '%s/bench/peer/warm.py' %s %s '%s'"):format(Peer.environment(nil, "cuda"),
        python, root, peer_device, peer.group, ty.io.json_encode(peer[2]))
      ty.io.mkdir(Peer.compiled)
      assert(io.open(unfinished, "w")):close()
      warm[peer.group] = jobs.start(command, share, folder .. "/warm-" .. peer.group)
    end
  end
end
local tested
if #o.names == 0 and (not o.only or o.only == "tests") then
  -- A few tests show how it is done; all of them are entries of ctest on the emulated device.
  local some = o.tiny and { "add", "softmax", "sum" } or nil
  tested = tests.run(root, program, folder, o.only and left() or share, some,
    o.tiny and "tests/lua/grad_scaler_test.lua" or nil)
  tests.report(tested)
  report.save(machine, { tests = tested })
end
local uncompiled, stopped = "", false
for group, job in pairs(warm) do
  while not job:ended() and ty.system.clock() - began < share do ty.system.sleep(0.05) end
  if job:ended() ~= 0 then
    job:stop()
    stopped = stopped or not job:ended() or job:ended() == 124
    uncompiled = uncompiled .. " --uncompiled " .. group
    print(("peer: %s is not compiled: %s"):format(group, job:ended() and job:ended() ~= 124
      and job:output():gsub("%s+$", ""):match "[^\n]*$" or "it takes too long"))
  end
end
if not stopped then os.remove(unfinished) end

-- The worker, and another one after each that was lost.
os.remove(progress)
local stage_of = {}
for _, entry in ipairs(plan) do stage_of[entry.item.name] = entry.only end
local options = (o.tiny and " --tiny" or "") .. (o.save and "" or " --no-save") .. (python and "" or " --no-peer")
  .. (o.only and " --only " .. o.only or "") .. uncompiled
local environment = python and ("env TYCHO_PEER_PYTHON='%s' "):format(python) or ""
for _, prefix in ipairs(o.names) do options = options .. (" '%s'"):format(prefix) end

local start = ty.system.clock()
for _ = 1, #plan > 0 and 8 or 0 do
  local most = left() - 4 -- what the report takes, and ending
  if most < 5 then break end
  local command = ("exec %s'%s' '%s/bench/gpu.lua' --worker %.3f --parent %d --budget %.0f%s"):format(environment,
    program, root, start, ty.system.pid(), o.budget - (start - began) - 10, options)
  local job = jobs.start(command, most, folder .. "/worker")
  local hung
  while not job:ended() do
    ty.system.sleep(0.05)
    io.stdout:write(job:news())
    io.stdout:flush()
    local _, item = worker.progress(progress)
    local patience = worker.patience[item and stage_of[item] or "models"]
    if not hung and ty.system.clock() - job.moved > patience then
      hung = true
      job:stop()
    end
  end
  io.stdout:write(job:news())
  local states, last = worker.progress(progress)
  if job.status == 0 then break end
  if last and states[last] == "began" then
    print(("%-38s %s"):format(last, hung and "hangs" or left() < 6 and "was stopped: the time is up"
      or "crashed (status " .. job.status .. ")"))
  elseif not last then
    break -- it does not start at all
  end
end

-- What it comes to.
local states = worker.progress(progress)
local saved = report.load(machine)
local missed, counted, bad = {}, { done = 0, failed = 0, began = 0, late = 0 }, {}
for _, entry in ipairs(plan) do
  local item = entry.item
  local state = states[item.name] or "late"
  counted[state] = counted[state] + 1
  if state == "began" or state == "failed" then bad[#bad + 1] = item.name end
  local result = state == "done" and saved.items[item.name] and saved.items[item.name]["1"]
  if result and not o.tiny and not report.judge(item, result, true) then
    missed[#missed + 1] = { name = item.name, result = result }
  end
end
report.missed(missed)
if #bad > 0 then print("did not end: " .. table.concat(bad, ", ")) end
print(("%d of %d items measured, %d not reached; %.0f s; written: %s"):format(counted.done, #plan, counted.late,
  ty.system.clock() - began, machine.path))
local green = not tested or tested.failed == 0 and tested.finished
os.exit(green and #missed == 0 and #bad == 0 and (not o.tiny or counted.late == 0), true)
