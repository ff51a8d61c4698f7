-- offload.trial: the losses of the steps, what the engine moved, the budget and its end, mistakes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

local function setup()
  ty.manual_seed(4)
  local model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
  return model, optim.AdamW(model, { lr = 1e-2 })
end

local function loss_of(model, i)
  ty.manual_seed(i)
  return model(ty.randn(8, 64)):square():mean()
end

check.test("losses, bytes and seconds", function()
  local model, optimizer = setup()
  local plain = offload.trial(4, function(i)
    local loss = loss_of(model, i)
    optimizer:step(loss)
    return loss:item()
  end)
  local again, steps = setup()
  for i = 1, 4 do
    local loss = loss_of(again, i)
    check.equal(plain.losses[i], loss:item())
    steps:step(loss)
  end
  check.equal(#plain.losses, 4)
  check.equal({ plain.moved, plain.step, plain.waited }, {})

  local other, theirs = setup()
  local engine = offload.engine(other, theirs, { moments = "file", file = scratch.folder, smallest = 512 })
  local totals, seen = {}, {}
  local got = offload.trial(4, function(i) return engine:step(loss_of, other, i) end, { engine = engine,
    watch = function(i, loss, seconds)
      totals[i], seen[i] = engine:stats().file.moved, loss
      check.ok(seconds > 0)
    end })
  check.equal(got.losses, plain.losses)
  check.equal(seen, plain.losses)
  check.equal(got.moved, totals[4])
  check.equal(got.step, (totals[4] - totals[1]) / 3)
  check.ok(got.step > 0, got.step)
  check.close(got.waited, engine:stats().waited / 4, 1e-12)
  -- What was moved before does not count again.
  check.equal(offload.trial(2, function(i) return engine:step(loss_of, other, i) end, { engine = engine }).moved,
    engine:stats().file.moved - totals[4])
  engine:close()
end)

check.test("seconds are a mean without the first, the peak is of the steps", function()
  local _ = ty.zeros(4 << 20)
  local times = {}
  local got = offload.trial(3, function(i)
    local since, x = ty.system.clock(), ty.zeros(1 << 18)
    while ty.system.clock() - since < (i == 1 and 0.05 or 0.01) do x:sum() end
    return i
  end, { watch = function(i, _, seconds) times[i] = seconds end })
  check.equal(got.losses, { 1, 2, 3 })
  check.ok(times[1] >= 0.05 and times[2] >= 0.01 and times[3] >= 0.01)
  check.equal(got.seconds, (times[2] + times[3]) / 2)
  check.ok(got.peak >= 17 << 20, got.peak)
end)

check.test("a budget lasts as long as the steps, whatever comes of them", function()
  local before = ty.memory.stats().budget
  local limit = ty.memory.stats().live + (8 << 20)
  local function large() return ty.zeros(4 << 20):sum():item() end
  check.fails(function() offload.trial(2, large, { budget = limit }) end, "budget")
  check.equal(ty.memory.stats().budget, before)
  local inside
  check.equal(offload.trial(2, function(i)
    inside = ty.memory.stats().budget
    return i
  end, { budget = limit }).losses, { 1, 2 })
  check.equal({ inside, ty.memory.stats().budget }, { limit, before })
end)

check.test("mistakes", function()
  local function one() return 1 end
  check.fails(function() offload.trial(1, one) end, "offload.trial: steps: expected an integer >= 2, got 1")
  check.fails(function() offload.trial(2, 3) end, "offload.trial: step: expected a function, got 3")
  check.fails(function() offload.trial(2, type, { engine = {} }) end, "engine: expected one of offload.engine, got ")
  check.fails(function() offload.trial(2, one, { budget = 0 }) end, "budget: expected an integer >= 1, got 0")
  check.fails(function() offload.trial(2, function() end) end, "what step gives: expected a number, got nil")
end)

check.finish()
