-- Key poses of the arm's demonstrations, ways to them, trials of policies.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

local arm = datasets.arm
local poses = arm.poses

check.test("key poses of a way that turns, stops and closes", function()
  -- Through the environment's own geometry: to the right, down, and there the hand closes.
  local actions, states = {}, {}
  local env = arm.env {}
  env:begin(0)
  local state = env.world:state()
  local from = env.world.tip
  local goals = { { x = from.x + 120, y = from.y, hand = -1 }, { x = from.x + 120, y = from.y - 160, hand = -1 },
    { x = from.x + 120, y = from.y - 160, hand = 1 } }
  for _, goal in ipairs(goals) do
    for _, action in ipairs(poses.way(state, goal):tolist()) do
      states[#states + 1], actions[#actions + 1] = env.world:state(), action
      env:advance(action)
    end
    state = env.world:state()
  end
  local found = poses.of(ty.tensor(states, { dtype = "f32" }), ty.tensor(actions, { dtype = "f32" }))
  check.equal(#found, 3)
  for i, pose in ipairs(found) do
    check.close({ pose.x, pose.y }, { goals[i].x, goals[i].y }, 3)
    check.equal(pose.hand, goals[i].hand)
  end
  check.equal(found[3].step, #actions)
  check.equal(state[4], 1) -- closed at the end of the way
end)

check.test("a way is within the joints' limits, ends where it should, and is cut at its longest", function()
  local env = arm.env {}
  env:begin(3)
  local way = poses.way(env.world:state(), { x = 700, y = 260, hand = 1 })
  check.ok(way:narrow(1, 0, 3):abs():max():item() <= 409.5 / 4096)
  for _, action in ipairs(way:tolist()) do env:advance(action) end
  check.close({ env.world.tip.x, env.world.tip.y, env.world:state()[4] }, { 700, 260, 1 }, 2)
  check.equal(poses.way(env.world:state(), { x = 300, y = 500, hand = -1 }, 3).shape, { 3, 4 })
  check.equal(poses.way(env.world:state(), { x = 700, y = 260, hand = 1 }).shape, { 1, 4 }) -- it is there
end)

check.test("the expert's key poses, reached by straight ways, do every task", function()
  local set = datasets.load("arm", { fields = { "states", "actions" }, split = "validation" })
  local plans = {}
  local result = arm.trial(function(seen)
    local list = {}
    for i, episode in ipairs(seen.episodes) do
      local plan = plans[episode]
      if not plan then
        local item = set:get(episode)
        plan = { at = 0, poses = poses.of(item.states, item.actions) }
        plans[episode] = plan
      end
      plan.at = math.min(plan.at + 1, #plan.poses)
      list[i] = poses.way(seen.states:select(0, i - 1), plan.poses[plan.at])
    end
    return list
  end, { episodes = 60, size = 32, strips = 2 })
  check.close(result.success, 1, 1e-9)
  check.equal(result.by_kind, { reach = 1, push = 1, place = 1, stack = 1, open = 1 })
  check.ok(result.looks < 8 and result.steps > 10)
  check.equal(#result.strips, 2)
  local shape = result.strips[1].shape
  check.equal({ shape[2], shape[3], shape[4] }, { 3, 32, 32 })
  local film = arm.film(result.strips, shape[1] + 1)
  check.equal(film.shape, { 2 * (shape[1] + 1), 3, 32, 32 })
  check.ok(film:narrow(0, 0, shape[1]):eq(result.strips[1]):all():item())
  check.ok(film:select(0, shape[1]):eq(255):all():item(), "white after its end")
  check.fails(function() arm.film {} end, "datasets.arm.film: strips: expected at least one, got none")
end)

check.test("what is seen has the states of the look before", function()
  local last = {}
  arm.trial(function(seen)
    local now, before = seen.states:tolist(), seen.before:tolist()
    for i, episode in ipairs(seen.episodes) do
      check.equal(before[i], last[episode] or now[i])
      last[episode] = now[i]
    end
    return ty.ones(#seen.episodes, 2, 4)
  end, { episodes = 3, size = 32, looks = 3 })
  check.equal(#last, 2) -- episodes count from 0
end)

check.test("a policy that does nothing does nothing; episodes are the same every time; looks end them", function()
  local seen
  local result = arm.trial(function(s)
    seen = seen or ty.keep(s.images:clone())
    return ty.zeros(#s.tasks, 1, 4)
  end, { episodes = 10, size = 32, looks = 4, change = function(images) return 255 - images end })
  check.close({ result.success, result.looks, result.steps }, { 0, 4, 4 }, 1e-9)
  local env = arm.env { split = "validation", size = 32 }
  check.ok((255 - env:reset(0).image:to "i64"):eq(seen:select(0, 0):to "i64"):all():item())
end)

check.test("examples: what is seen at each pose, and the next one", function()
  local found = arm.examples { episodes = 5, size = 32, between = 0 }
  local set = datasets.load("arm", { size = 32 })
  local at = 0
  for i = 0, 4 do
    local item, env = set:get(i), arm.env { size = 32 }
    local step, actions = 0, item.actions:tolist()
    env:begin(i)
    for _, pose in ipairs(poses.of(item.states, item.actions)) do
      if env:success() then break end -- what comes then nobody looks at
      check.equal(found.images:select(0, at):flatten():tolist(), item.images:select(0, step):flatten():tolist())
      check.equal(found.states:select(0, at):tolist(), item.states:select(0, step):tolist())
      local x, y = poses.from_picture(table.unpack(found.targets:select(0, at):tolist()))
      check.close({ x, y }, { pose.x, pose.y }, 1e-3)
      check.equal(found.hands:tolist()[at + 1], pose.hand > 0 and 1 or 0)
      check.equal(found.tasks[at + 1], item.task)
      for k = step + 1, pose.step do env:advance(actions[k]) end
      at, step = at + 1, pose.step
    end
  end
  check.equal(found.images.shape[1], at)
  check.equal({ found.starts.shape[1], found.starts:tolist()[6] }, { 6, at })
  check.ok(arm.examples { episodes = 5, size = 32 }.images.shape[1] > at)
end)

check.test("what is refused", function()
  check.fails(function() poses.of(ty.ones(3), ty.ones(3, 4)) end, "poses.of: states: expected [t, 4]")
  check.fails(function() poses.of(ty.ones(3, 4), ty.ones(2, 4)) end, "expected as many as states, 3, got 2")
  check.fails(function() poses.way({ 1, 2, 3 }, { x = 1, y = 2, hand = 1 }) end, "state: expected 4 numbers, got 3")
  check.fails(function() poses.way({ 0, 0, 0, 0 }, { x = 1, y = 2 }) end, "pose.hand: expected a finite number")
  check.fails(function() arm.trial(function() return ty.ones(1, 4) end, { episodes = 2 }) end,
    "act: expected actions [2, k, 4]")
  check.fails(function() arm.trial(function() return { ty.ones(1, 4) } end, { episodes = 2 }) end,
    "a list of 2 tensors")
  check.fails(function() arm.trial(print, { episodes = 0 }) end, "episodes: expected an integer >= 1")
  check.fails(function() arm.examples { between = -1 } end, "datasets.arm.examples: between")
end)

check.finish()
