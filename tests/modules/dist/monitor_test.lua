-- The monitor of collectives: faults are named by what ranks noted, a healthy job raises no alarm, and a job that was
-- started again goes on bit for bit.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails
local work = dist.workload.open { length = 8, width = 32, layers = 1, rows = 8, chapters = 20, vocabulary = 300 }
local root = os.tmpname()
os.remove(root)

local runs = 0
-- A supervised training with faults: found, losses, weights, how often steps were done.
local function train(faults, options)
  runs = runs + 1
  local o = { folder = ("%s-%d"):format(root, runs), steps = 24, every = 8, batch = 12, step_seconds = 0.1,
    jitter = 0.05, faults = faults, losses = ty.zeros(24), runs = ty.zeros(24) }
  for key, value in pairs(options or {}) do o[key] = value end
  local results, found = dist.monitor.supervise({ "a", "b", "c", "d", "e", "f" }, function(...)
    return require("tycho.dist").monitored_training(...)
  end, { ranks = 4, timeout = 20 }, work, o)
  return found, o.losses:tolist(), results[1], o.runs:tolist()
end

local _, losses, weights = train {}

test("a healthy job has no alarm", function()
  local found, again, same, counts = train({}, { jitter = 0.1 })
  equal(found, {})
  equal(again, losses, "times change no numbers")
  equal(same:equal(weights), true)
  equal(math.max(table.unpack(counts)), 1)
end)

test("each fault is named, and the job goes on bit for bit from the checkpoint before it", function()
  for _, case in ipairs {
    { "slow", { kind = "slow", machine = "c", step = 3, seconds = 0.08 }, 0 },
    { "dead", { kind = "dead", machine = "a", step = 12 }, 3 },
    { "dead", { kind = "stopped", machine = "d", step = 9 }, 0 },
    { "dead", { kind = "dead", machine = "b", step = 1 }, 0 },
    { "hung", { kind = "hung", machine = "b", step = 15 }, 6 },
    { "link", { kind = "link", machine = "b", other = "d", step = 2, seconds = 0.5 }, 0 },
  } do
    local kind, fault, again = table.unpack(case)
    local found, own, end_weights, counts = train { fault }
    equal(#found, 1, fault.kind)
    if found[1] then
      equal({ found[1].kind, found[1].machine, found[1].other }, { kind, fault.machine, fault.other })
    end
    equal(own, losses, fault.kind)
    equal(end_weights:equal(weights), true, fault.kind)
    local repeated = 0
    for _, n in ipairs(counts) do repeated = repeated + n - 1 end
    equal(repeated <= again, true, ("%s: %d steps again"):format(fault.kind, repeated))
  end
end)

test("several one after the other; without spare machines with a rank less; until none is left", function()
  local found, own = train { { kind = "dead", machine = "a", step = 5 }, { kind = "dead", machine = "e", step = 12 } }
  equal({ #found, found[1].machine, found[2].machine }, { 2, "a", "e" })
  equal(own, losses)
  local all = {}
  for i, name in ipairs { "a", "b", "e" } do all[i] = { kind = "dead", machine = name, step = 4 * i } end
  local fewer
  found, own, fewer = train(all)
  equal({ #found, found[3].machine }, { 3, "e" })
  equal(own[24] == losses[24], false, "three ranks share the rows")
  near((fewer - weights):abs():max():item(), 0, 2e-3, "and train as four")
end)

test("what is nobody's fault is raised", function()
  fails(function()
    dist.monitor.supervise({ 1, 2 }, function(group)
      group:all_reduce(ty.ones(1))
      error "a mistake"
    end)
  end, "a mistake")
  fails(function()
    dist.monitor.supervise({ 1 }, function() error "a mistake" end)
  end, "a mistake")
end)

test("collectives right after one another, and a board smaller than the job", function()
  local _, found = dist.monitor.supervise({ 1, 2, 3, 4 }, function(group, watch, machine)
    for step = 1, 60 do
      group:advance(machine == 2 and step > 20 and 1.5 or 1)
      for _ = 1, 3 do group:all_reduce(ty.ones(2)) end
      if step % 20 == 0 then watch:check() end
    end
  end, { ranks = 3 })
  equal({ #found, found[1] and found[1].kind, found[1] and found[1].machine }, { 1, "slow", 2 })
end)

test("arguments", function()
  fails(function() dist.monitor.board(0) end, "dist.monitor.board: ranks: expected an integer >= 1")
  fails(function() dist.monitor.diagnose {} end, "board: expected what dist.monitor.board gives")
  fails(function() dist.monitor.watch(3, {}) end, "group: expected a group, got 3")
  fails(function() dist.monitor.supervise({}, print) end, "machines: expected at least one")
  fails(function()
    dist.run(2, function(g) require("tycho.dist").monitor.watch(g, require("tycho.dist").monitor.board(3)) end)
  end, "expected one for 2 ranks, got one for 3")
  fails(function() dist.monitored_training(3) end, "group: expected a group, got 3")
end)

os.execute(("rm -rf '%s-'*"):format(root))
check.finish()
