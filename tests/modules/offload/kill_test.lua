-- An offloaded run that is killed at 100 random moments, with things on every tier: each time the next run goes on
-- from the last checkpoint, bit for bit as a run in memory that nobody killed, and nothing is left behind that it trips
-- over.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"

local kills = tonumber(arg and arg[1]) or 100

-- What child and parent share.
local text = [[
  local ty = require "tycho"
  local nn = ty.nn
  local M = {}
  function M.make()
    ty.manual_seed(3)
    local model = nn.Sequential(nn.Linear(48, 96), nn.Tanh())
    for _ = 1, 3 do model:append(nn.Linear(96, 96)):append(nn.Tanh()) end
    model:append(nn.Linear(96, 8))
    return model, ty.optim.AdamW(model, { lr = 3e-3 })
  end
  function M.loss(model) -- of the default generator, whose state is the checkpoint's
    local x, y = ty.randn(16, 48), ty.randint(0, 8, { 16 })
    return nn.cross_entropy(model(x), y)
  end
  return M
]]
local shared = scratch.spit("shared.lua", text)
local child = scratch.spit("child.lua", ([[
  local ty = require "tycho"
  local offload = require "tycho.offload"
  local shared = dofile(%q)
  local place, folder, path, began = arg[1], arg[2], arg[3], arg[4]
  local model, optimizer = shared.make()
  local plan = { moments = place, activations = place, gradients = place == "host" and "file" or "host",
    parameters = place == "host" and "file" or "host", file = folder, smallest = 1024, in_flight = 8192 }
  local engine = offload.engine(model, optimizer, plan)
  local losses = {}
  if ty.train.has_checkpoint(path) then
    losses = engine:load(path, { model = model, optimizer = optimizer }).losses
  end
  io.open(began, "w"):close()
  while true do
    for _ = 1, 3 do losses[#losses + 1] = engine:step(shared.loss, model) end
    engine:save(path, { model = model, optimizer = optimizer, losses = losses })
  end
]]):format(shared))

local tiers, path = scratch.file "tiers", scratch.file "run"
ty.io.mkdir(tiers)

-- The run in memory, as far as it is wanted.
local common = dofile(shared)
local model, optimizer = common.make()
local losses, states, rng = {}, {}, ty.rng_state()
local function reach(step)
  ty.rng_state(rng)
  while #losses < step do
    ty.scope(function()
      local loss = common.loss(model)
      losses[#losses + 1] = loss:item()
      optimizer:step(loss)
    end)
    local copy = {}
    for i, p in ipairs(model:parameters()) do copy[i] = ty.keep(p:detach():clone()) end
    states[#losses] = copy
  end
  rng = ty.rng_state()
end

check.test(("killed at %d random moments"):format(kills), function()
  local seed = os.time()
  math.randomseed(seed)
  local began, killed, reached, within, pace = scratch.file "began", 0, 0, { partial = 0, previous = 0 }, 0.1
  for i = 1, kills do
    os.remove(began)
    local place = i % 2 == 0 and "host" or "file"
    -- Most fall while it trains and saves, which a loaded machine is slow to come to; some while it begins.
    local waiting = ("while [ ! -e '%s' ] && kill -0 $child 2>/dev/null; do sleep 0.01; done"):format(began)
    local run = table.concat { ("exec 2>'%s'; "):format(scratch.file "errors"),
      ("'%s' '%s' %s '%s' '%s' '%s' & child=$!; "):format(arg[-1] or "tycho", child, place, tiers, path, began),
      i % 10 ~= 0 and waiting .. "; " or "", ("sleep %.4f; kill -9 $child; wait $child"):format(pace * math.random()) }
    local _, how, code = os.execute(run)
    check.equal({ how, code }, { "exit", 137 }, "it was killed, and did not end by itself: " ..
      ty.io.read(scratch.file "errors"))
    killed = killed + 1
    check.equal(ty.io.listdir(tiers), {}, "nothing is left in the folder of the tier")
    for name in pairs(within) do if ty.io.exists(path .. "." .. name) then within[name] = within[name] + 1 end end
    if not ty.train.has_checkpoint(path) then
      pace = 1.5 * pace
    else
      local other, theirs = common.make()
      local values = ty.train.load_checkpoint(path, { model = other, optimizer = theirs }, { rng = false })
      local step = #values.losses
      check.ok(step >= reached and step % 3 == 0, ("step %d after %d"):format(step, reached))
      pace = math.max(0.02, pace * (step > reached and 0.95 or 1.1)) -- so that most runs come to some checkpoints
      if step > reached then
        reached = step
        reach(step)
        check.equal(values.losses, { table.unpack(losses, 1, step) }, "losses to step " .. step)
        check.equal(theirs.steps, step)
        for k, p in ipairs(other:parameters()) do
          check.ok(p:equal(states[step][k]), ("parameter %d at step %d"):format(k, step))
        end
      end
    end
  end
  check.equal(killed, kills)
  check.ok(reached > kills // 2, ("%d steps were reached, seed %d"):format(reached, seed))
  print(("  %d kills, %d steps, %d within a write of a checkpoint, %d between its renames"):format(killed, reached,
    within.partial, within.previous))
end)

check.finish()
