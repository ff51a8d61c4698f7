-- Checkpoints of what is away: within the memory that training takes, into other plans and into memory; what a program
-- changes between steps is kept; what does not fit or cannot be written is one error, and training goes on.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

local function make(width, depth)
  ty.manual_seed(5)
  local model = nn.Sequential(nn.Linear(24, width), nn.Tanh())
  for _ = 1, depth or 4 do model:append(nn.Linear(width, width)):append(nn.Tanh()) end
  model:append(nn.Linear(width, 4))
  return model, optim.AdamW(model, { lr = 1e-2 })
end

local function loss_of(model, i)
  ty.manual_seed(50 + i)
  return nn.cross_entropy(model(ty.randn(8, 24)), ty.randint(0, 4, { 8 }))
end

local function plan(place, more)
  local all = { parameters = place, gradients = place, moments = place, activations = place, file = scratch.folder,
    smallest = 512, in_flight = 8192 }
  for key, value in pairs(more or {}) do all[key] = value end
  return all
end

-- Losses of steps in memory, with what `between` does after each.
local function plain(steps, between)
  local model, optimizer = make(32)
  local losses = {}
  for i = 1, steps do
    ty.scope(function()
      local loss = loss_of(model, i)
      optimizer:step(loss)
      losses[i] = loss:item()
    end)
    if between then between(model, optimizer, i) end
  end
  return losses, model, optimizer
end

check.test("saved from any plan, loaded into any plan and into memory", function()
  local losses = plain(5)
  local paths = {}
  for _, place in ipairs { "file", "host", "device" } do
    local model, optimizer = make(32)
    local engine = offload.engine(model, optimizer, plan(place))
    for i = 1, 3 do engine:step(loss_of, model, i) end
    paths[#paths + 1] = scratch.file("from_" .. place)
    engine:save(paths[#paths], { model = model, optimizer = optimizer, note = "three steps" })
    check.equal(engine:step(loss_of, model, 4), losses[4], "it goes on after saving")
    engine:close()
  end
  local kept = ty.io.read(paths[1] .. "/model.safetensors")
  for _, path in ipairs(paths) do
    check.ok(ty.io.read(path .. "/model.safetensors") == kept, "the same file, whatever the plan")
    for _, place in ipairs { "file", "host", "device" } do
      local model, optimizer = make(32)
      for _, p in ipairs(model:parameters()) do ty.no_grad(function() p:zero_() end) end
      local engine = offload.engine(model, optimizer, plan(place))
      if place == "host" then engine:step(loss_of, model, 9) end -- it has moments of its own already
      check.equal(engine:load(path, { model = model, optimizer = optimizer }).note, "three steps")
      if place ~= "device" then
        check.equal({ #engine:cells "parameters", #engine:cells "moments" }, { 0, 0 }, "all is away")
      end
      check.equal({ engine:step(loss_of, model, 4), (engine:step(loss_of, model, 5)) }, { losses[4], losses[5] }, place)
      engine:close()
    end
    local model, optimizer = make(32)
    ty.train.load_checkpoint(path, { model = model, optimizer = optimizer })
    for i = 4, 5 do
      local loss = loss_of(model, i)
      optimizer:step(loss)
      check.equal(loss:item(), losses[i], "in memory")
    end
  end
end)

check.test("a checkpoint takes no more of the device than training does", function()
  local model, optimizer = make(256, 8)
  local engine = offload.engine(model, optimizer, plan("file", { in_flight = 1 << 18 }))
  engine:step(loss_of, model, 1)
  local function most(fn)
    collectgarbage()
    collectgarbage()
    local before = ty.memory.stats().live
    ty.memory.reset_peak()
    fn()
    return ty.memory.stats().peak - before
  end
  local path = scratch.file "large"
  local step = most(function() engine:step(loss_of, model, 2) end)
  local save = most(function() engine:save(path, { model = model, optimizer = optimizer }) end)
  local load = most(function() engine:load(path, { model = model, optimizer = optimizer }) end)
  local whole = 3 * 4 * model:count_parameters()
  check.ok(save < step and save < whole / 8, ("%d bytes of %d, a step %d"):format(save, whole, step))
  check.ok(load < 1.2 * step and load < whole / 2, ("%d bytes of %d, a step %d"):format(load, whole, step))
  engine:close { discard = true }
  engine:close()
end)

check.test("what the program changes between steps counts", function()
  -- A layer in the first window, one far from it, a moment; in place, and by an op that reads first.
  local function between(model, optimizer)
    ty.no_grad(function()
      model[1].weight:mul_(0.5)
      model[9].weight:add_(model[7].weight * 0.125)
      model[11].weight:copy_(model[11].weight:flip { 0 })
      optimizer.state[model[3].weight].exp_avg:zero_()
    end)
  end
  local losses, wanted = plain(4, between)
  for _, place in ipairs { "file", "host" } do
    for _, policy in ipairs { "superpipeline", "fuyou", "horizon" } do
      local model, optimizer = make(32)
      local engine = offload.engine(model, optimizer, plan(place, { gradients = policy == "fuyou" and "device" or place,
        policy = offload[policy]() }))
      for i = 1, 4 do
        check.equal(engine:step(loss_of, model, i), losses[i], ("%s, %s: step %d"):format(place, policy, i))
        between(model, optimizer)
      end
      engine:close()
      for k, p in ipairs(model:parameters()) do
        check.ok(p:equal(wanted:parameters()[k]), ("%s, %s: parameter %d"):format(place, policy, k))
      end
    end
  end
end)

check.test("what does not fit or cannot be written", function()
  local model, optimizer = make(32)
  local engine = offload.engine(model, optimizer, plan "file")
  local losses = plain(3)
  engine:step(loss_of, model, 1)
  local path = scratch.file "whole"
  engine:save(path, { model = model, optimizer = optimizer })
  check.fails(function() engine:save("/proc/nowhere/run", { model = model }) end, "cannot make the directory")
  check.fails(function() engine:save(path, { model = model, ["no name"] = 1 }) end, "is no name for a part")
  check.fails(function() engine:load(scratch.file "nothing", { model = model }) end, "checkpoint: there is none at")
  check.fails(function() engine:save(7, {}) end, "path: expected a string, got 7")
  check.equal(engine:step(loss_of, model, 2), losses[2])
  engine:settle(true) -- what is on its way would be handed over
  engine.stores.file.tier:inject("error", 1, 1)
  check.fails(function() engine:save(path, { model = model, optimizer = optimizer }) end, "Input/output error")
  engine.stores.file.tier:inject("error", 1, 0)
  check.equal(engine:step(loss_of, model, 3), losses[3], "it goes on")
  local other = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 4))
  local theirs = optim.AdamW(other, { lr = 1e-2 })
  local second = offload.engine(other, theirs, plan "file")
  local free = second:stats().file.most
  check.fails(function() second:load(path, { model = other }) end, "does not fit the module")
  check.fails(function() second:load(path, { optimizer = theirs }) end, "has 12 parameters, the optimizer 4")
  check.equal(second.stores.file.used, free, "no place is lost")
  check.ok(second:step(loss_of, other, 1) > 0)
  second:close()
  engine:close()
  check.fails(function() offload.engine(make(32), nil, { parameters = "host" }):close { keep = true } end, "keep")
end)

check.finish()
