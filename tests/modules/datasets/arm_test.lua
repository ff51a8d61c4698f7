-- The arm: its geometry, its world, the expert, episodes, environments.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local kinematics = require "tycho.datasets.arm.kinematics"
local random = require "tycho.datasets.random"
local tasks = require "tycho.datasets.arm.tasks"
local world = require "tycho.datasets.arm.world"

local arm = datasets.arm
local floor = kinematics.table

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h = -0x340d631b7bdddcdb
  for _, byte in ipairs { ty.io.to_bytes(tensor):byte(1, 65536) } do h = (h ~ byte) * 0x100000001b3 end
  return ("%016x"):format(h)
end

check.test("the tip is where the angles say, by the C library's sines", function()
  local r = random.new(1, "test", 0)
  for _ = 1, 200 do
    local q = { r:integer(-6000, 6000), r:integer(-9000, 9000), r:integer(-9000, 9000) }
    local x, y, angle = kinematics.base.x, kinematics.base.y, 0
    for i = 1, 3 do
      angle = angle + q[i] / 4096
      x, y = x + kinematics.links[i] * math.cos(angle), y + kinematics.links[i] * math.sin(angle)
    end
    local _, _, tip = kinematics.forward(q)
    check.close(tip.x, x, 1e-9)
    check.close(tip.y, y, 1e-9)
  end
end)

check.test("inverse kinematics: the hand points down where it was asked to be", function()
  for x = 260, 860, 25 do
    for y = floor + 10, floor + 300, 29 do
      if kinematics.reaches(x, y) then
        local elbow, wrist, tip = kinematics.forward(kinematics.inverse(x, y))
        check.ok(math.abs(tip.x - x) < 0.5 and math.abs(tip.y - y) < 0.5, ("%d %d"):format(x, y))
        check.ok(math.abs(wrist.x - tip.x) < 0.1 and elbow.y > wrist.y - 400)
      end
    end
  end
  check.ok(kinematics.reaches(800, floor + 40) and not kinematics.reaches(860, floor + 380))
  local _, wrist = kinematics.forward(kinematics.inverse(5000, 300)) -- too far: stretched towards it
  check.ok(wrist.x > 800 and wrist.x < 900)
end)

-- ---- the world ----

local function block(x, y) return { kind = "block", x = x, y = y or floor, colour = 1, width = world.block } end

local function still(w, steps)
  for _ = 1, steps do w:step { 0, 0, 0, 0 } end
end

-- Moves the hand straight to a place, `speed` a step.
local function go(w, x, y, hand, speed)
  local from, steps = w.tip, math.ceil(math.max(math.abs(x - w.tip.x), math.abs(y - w.tip.y)) / (speed or 14))
  for k = 1, steps do
    local share = k / steps
    local want, action = kinematics.inverse(from.x + (x - from.x) * share, from.y + (y - from.y) * share), {}
    for i = 1, 3 do
      action[i] = (want[i] - w.q[i]) / 4096
      assert(math.abs(action[i]) <= 0.1)
    end
    action[4] = hand or 0
    w:step(action)
  end
end

check.test("what is let go falls: onto the table, onto a block, over its edge, into a bowl", function()
  local alone, on, over = block(300, 500), block(500, 500), block(700 + 60, 500)
  local bowl = { kind = "bowl", x = 900, y = floor, colour = 1, width = world.bowl.width }
  local inside = block(900 + 70, 500)
  local w = world.new({ alone, block(520), on, block(700), over, bowl, inside }, kinematics.inverse(400, 800))
  still(w, 30)
  check.equal({ alone.y, alone.x, on.y, on.x }, { floor, 300, floor + world.block, 500 })
  check.ok(on.on and not alone.on)
  still(w, 10)
  check.equal({ over.y, over.x, over.on }, { floor, 700 + world.block, nil })
  check.equal({ inside.within, inside.x }, { bowl, 900 + (world.bowl.inside - world.block) / 2 })
  check.equal(inside.y, floor + world.bowl.bottom)
end)

check.test("joints turn by at most 0.1, in 4096ths; what is no number turns nothing", function()
  local w = world.new({}, kinematics.inverse(500, 500))
  local before = table.move(w.q, 1, 3, 1, {})
  w:step { 5, -5, 0.00037, 0 }
  check.equal({ w.q[1] - before[1], w.q[2] - before[2], w.q[3] - before[3] }, { 409, -409, 2 })
  w:step { 0 / 0, math.huge, -math.huge, 0 / 0 }
  check.equal({ w.q[1] - before[1], w.q[2] - before[2], w.q[3] - before[3] }, { 409, 0, -407 })
  check.equal(w.steps, 2)
end)

check.test("the table stops the hand", function()
  local w = world.new({}, kinematics.inverse(500, 400))
  for _ = 1, 60 do w:step { -0.05, 0, 0, 0 } end
  check.ok(w.tip.y >= floor + 4)
end)

check.test("fingers push, and what they push does", function()
  local near, far = block(500), block(640)
  local w = world.new({ near, far }, kinematics.inverse(380, floor + 300))
  w.grip = 4
  go(w, 380, floor + 30, 1)
  check.equal({ near.x, far.x }, { 500, 640 })
  go(w, 600, floor + 30, 1)
  check.close(near.x, 600 + 18 + 8 + 48, 0.6)
  check.close(far.x - near.x, world.block, 1e-9)
  local one = block(500) -- from its right
  w = world.new({ one }, kinematics.inverse(640, floor + 40))
  w.grip = 4
  go(w, 330, floor + 40, 1, 25)
  check.ok(one.x < 330 - 60, one.x)
end)

check.test("fingers close on a block, carry it, and let it go", function()
  local b = block(500)
  local w = world.new({ b }, kinematics.inverse(507, floor + 200))
  go(w, 507, floor + 30)
  check.equal(b.x, 500)
  for _ = 1, 4 do w:step { 0, 0, 0, 1 } end
  check.equal(w.held, b)
  go(w, 700, floor + 250, 1)
  check.close(b.x, w.tip.x, 1e-9)
  check.ok(b.y > floor + 200)
  check.close(w:state()[4], 1, 0)
  for _ = 1, 20 do w:step { 0, 0, 0, -1 } end
  check.equal({ w.held, b.y }, { nil, floor })
  -- a block with another one on it is not drawn out, one that is not between the fingers is not held
  local low, high = block(500), block(500, floor + world.block)
  w = world.new({ low, high }, kinematics.inverse(500, floor + 400))
  still(w, 2)
  go(w, 440, floor + 300)
  for _ = 1, 4 do w:step { 0, 0, 0, 1 } end
  check.equal(w.held, nil)
end)

-- ---- the expert and its episodes ----

check.test("the expert does what it is asked to, in every task and split; nobody does by standing still", function()
  for _, split in ipairs { "training", "held_out" } do
    for _, kind in ipairs(arm.kinds) do
      local set = arm.load { split = split, tasks = { kind }, fields = { "success", "states", "kind" } }
      local env = arm.env { split = split, tasks = { kind }, size = 32 }
      local done = 0
      for i = 0, 99 do
        local item = set:get(i)
        if item.success then done = done + 1 end
        check.ok(item.kind == kind and item.states.shape[1] < arm.limit)
      end
      check.ok(done >= 98, ("%s %s: %d of 100"):format(split, kind, done))
      for i = 0, 9 do
        env:reset(i)
        still(env.world, 20)
        check.ok(not env:success(), kind)
      end
    end
  end
end)

check.test("items", function()
  for _, size in ipairs { 32, 64, 128 } do
    local item = arm.load({ size = size }):get(7)
    local t = item.images.shape[1]
    check.equal(item.images.shape, { t, 3, size, size })
    check.equal({ item.states.shape[1], item.actions.shape[1], item.states.dtype, item.images.dtype },
      { t, t, "f32", "u8" })
    check.ok(item.actions:narrow(1, 0, 3):abs():max():item() <= 0.1)
    check.equal(item.kind, "place") -- the kinds take turns
  end
  check.equal({ #arm.load(), #arm.load { split = "validation" } }, { 10000, 500 })
end)

check.test("the same bytes for every number of threads, alone and among others", function()
  local before = ty.threads()
  for _, threads in ipairs { 1, 2 } do
    ty.set_threads(threads)
    local set = arm.load { seed = 3 }
    local batch = set:batch(ty.tensor { 9, 4 })
    check.equal({ hash(batch.images[2]), hash(batch.states[2]), hash(batch.actions[2]), batch.task[2] },
      { "fd623ce97f3f9701", "6ca15444107c704d", "f64b719d76e9b344", "open the upper yellow drawer" })
    local alone = set:get(9)
    check.ok(alone.images:eq(batch.images[1]):all():item())
    check.ok(alone.actions:eq(batch.actions[1]):all():item())
  end
  ty.set_threads(before)
end)

check.test("an episode's actions played in the environment give the episode", function()
  local set, env = arm.load { split = "validation" }, arm.env { split = "validation" }
  for i = 0, 4 do
    local item = set:get(i)
    local seen = env:reset(i)
    check.equal(seen.task, item.task)
    for t = 0, item.images.shape[1] - 1 do
      check.ok(seen.image:eq(item.images:select(0, t)):all():item(), t)
      check.ok(seen.state:eq(item.states:select(0, t)):all():item(), t)
      seen = env:step(item.actions:select(0, t))
    end
    check.equal(env:success(), item.success)
  end
end)

check.test("environments together are environments alone", function()
  local envs, other = {}, arm.env()
  for k = 1, 3 do
    envs[k] = arm.env()
    envs[k]:reset(k)
  end
  local seen = arm.observe(envs)
  check.equal({ #seen.tasks, seen.images.shape[1], seen.states.shape[2] }, { 3, 3, 4 })
  local actions = ty.tensor { { 0.05, 0, 0, 1 }, { 0, -0.1, 0.02, -1 }, { 0.01, 0.01, 0.01, 0 } }
  for _ = 1, 3 do seen = arm.observe(envs, actions) end
  other:reset(2)
  local alone
  for _ = 1, 3 do alone = other:step(actions:select(0, 1)) end
  check.ok(alone.image:eq(seen.images:select(0, 1)):all():item())
  check.ok(alone.state:eq(seen.states:select(0, 1)):all():item())
  -- what is over stands still
  local env = arm.env()
  env:reset(0)
  for _ = 1, arm.limit do env.world:step { 0, 0, 0, 0 } end
  check.ok(env:done() and not env:success())
  local before = env.world:state()
  arm.observe({ env }, ty.tensor { { 0.1, 0, 0, 0 } })
  check.equal(env.world:state(), before)
end)

check.test("the environment's expert", function()
  local env = arm.env { tasks = { "stack" } }
  local seen, done, _ = env:reset(5), false, nil
  check.ok(seen.task:find "block")
  local next_action = env:expert()
  while not done do
    _, done = env:step(next_action())
  end
  check.ok(env:success())
  check.fails(function() env:expert() end, "call reset first")
end)

check.test("pairs and phrasings of held_out are in no other split", function()
  local seen = {}
  for _, split in ipairs { "training", "validation", "held_out" } do
    local set = arm.load { split = split, fields = { "kind", "pair", "phrase" } }
    for i = 0, 499 do
      local item = set:get(i)
      local held_out = tasks.is_held_out(item.kind, item.pair[1], item.pair[2])
      check.equal(held_out, split == "held_out")
      seen[split == "held_out"] = seen[split == "held_out"] or {}
      seen[split == "held_out"][item.kind .. item.phrase] = true
    end
  end
  local phrases = 0
  for phrase in pairs(seen[false]) do check.ok(not seen[true][phrase], phrase) end
  for phrase in pairs(seen[true]) do
    check.ok(not seen[false][phrase], phrase)
    phrases = phrases + 1
  end
  check.equal(phrases, 10)
  local all, some = 0, 0 -- of pairs of colours
  for a = 1, 6 do
    for b = 1, 6 do
      if a ~= b then
        all = all + 1
        if tasks.is_held_out("place", a, b) then some = some + 1 end
      end
    end
  end
  check.ok(some / all > 0.1 and some / all < 0.3, some / all)
  for _, kind in ipairs { "place", "stack", "push" } do -- every colour is seen in both roles
    for a = 1, 6 do
      local first, second = false, false
      for b = 1, 6 do
        if a ~= b then
          first = first or not tasks.is_held_out(kind, a, b)
          second = second or not tasks.is_held_out(kind, b, a)
        end
      end
      check.ok(first and second)
    end
  end
end)

check.test("pictures show the arm and the task's colours", function()
  local item = arm.load({ tasks = { "place" } }):get(1)
  local first, last = item.images:select(0, 0), item.images:select(0, item.images.shape[1] - 1)
  check.ok(first:to("f32"):std():item() > 30)
  check.ok(not first:eq(last):all():item())
end)

check.test("a sheet and a page", function()
  local path = os.tmpname() .. ".png"
  check.equal(datasets.show("arm", { path = path, count = 2, columns = 3, size = 32 }), path)
  os.remove(path)
  local info = datasets.info "arm"
  check.ok(info.licence and info.splits.training and info.splits.validation and info.splits.held_out)
end)

check.test("errors", function()
  check.fails(function() arm.load { split = "test" } end, 'datasets.arm: split: there is no "test"')
  check.fails(function() arm.env { tasks = { "jump" } } end, 'datasets.arm.env: tasks: there is no "jump"')
  check.fails(function() arm.load { tasks = {} } end, "tasks: expected at least one, got none")
  check.fails(function() arm.load { size = 48 } end, "size: expected 32 or 64 or 128, got 48")
  check.fails(function() arm.load { fields = { "image" } } end, 'fields: there is no "image"')
  check.fails(function() arm.load({ length = 2 }):get(2) end, "ArmEpisodes:get: i: expected 0 to 1, got 2")
  local env = arm.env()
  check.fails(function() env:step { 0, 0, 0, 0 } end, "call reset first")
  check.fails(function() env:reset(-1) end, "i: expected an integer >= 0")
  env:reset(0)
  check.fails(function() env:step { 0, 0, 0 } end, "action: expected 4 numbers, got 3")
  check.fails(function() env:step "left" end, "action: expected a list of numbers or a tensor")
  check.fails(function() arm.observe {} end, "envs: expected at least one, got none")
  check.fails(function() arm.observe({ env }, ty.zeros(2, 4)) end, "actions: expected [1, 4], got a tensor [2, 4]")
  check.fails(function() arm.observe { arm.env() } end, "expected environments that have begun")
end)

check.finish()
