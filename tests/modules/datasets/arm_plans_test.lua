-- Demonstrations as plans: what is seen is what the environment shows, waypoints are those of the expert, and following
-- them does the tasks.
local here = arg and arg[0]:match ".*/" or "tests/modules/datasets/"
local check = dofile(here .. "../../lua/check.lua")
local arm = require("tycho.datasets").arm

local EPISODES = 5 -- a task of each kind

check.test("all steps of episodes: pictures, states, words, and the waypoints to go", function()
  local found = arm.plans { episodes = EPISODES, looks = 1000, stray = 0, horizon = 3 }
  local env, row = arm.env(), 0
  for i = 0, EPISODES - 1 do
    local seen = env:reset(i)
    local next_action, waypoints = env:expert()
    for action in next_action do
      if env:success() then break end
      local way, at = waypoints()
      check.ok(found.images:select(0, row):eq(seen.image):all():item())
      check.equal(found.states:select(0, row):tolist(), seen.state:tolist())
      check.equal(found.tasks[row + 1], seen.task)
      local plan = found.plans:select(0, row):tolist()
      local x, y = arm.poses.from_picture(plan[1][1], plan[1][2])
      -- The waypoint that the expert goes to, or the next where it is there and waits.
      local p, q = way[at], way[at + 1] or way[at]
      local first = math.abs(x - p.x) + math.abs(y - p.y) < 0.01 and plan[1][3] == p.hand
      local second = math.abs(x - q.x) + math.abs(y - q.y) < 0.01 and plan[1][3] == q.hand
      check.ok(first or second, "a waypoint that is not the expert's")
      seen = env:step(action)
      row = row + 1
    end
  end
  check.equal(found.images.shape[1], row)
end)

check.test("what was seen before", function()
  local found = arm.plans { episodes = 2, looks = 1000, stray = 0, back = 4 }
  local n = found.images.shape[1]
  check.equal(found.before.shape, found.images.shape)
  -- All steps are there, in their order: 4 rows earlier, or the first of the episode.
  local first = 0
  for row = 0, n - 1 do
    if row > 0 and found.tasks[row + 1] ~= found.tasks[row] then first = row end
    local from = math.max(first, row - 4)
    check.ok(found.before:select(0, row):eq(found.images:select(0, from)):all():item())
    check.equal(found.states_before:select(0, row):tolist(), found.states:select(0, from):tolist())
  end
end)

check.test("the named things are where they are drawn", function()
  local found = arm.plans { episodes = 10, looks = 1, stray = 0, tasks = { "reach" } }
  for i = 0, 9 do
    check.equal(found.places:select(0, i):select(0, 0):tolist(), { 2, 2 })
    local env = arm.env { tasks = { "reach" } }
    env:begin(i)
    local x, y = arm.poses.from_picture(table.unpack(found.places:select(0, i):select(0, 1):tolist()))
    check.close({ x, y }, { env.task.goal.x, env.task.goal.y }, 1e-3)
  end
end)

check.test("the way by waypoints does every task", function()
  local ways = {}
  local result = arm.trial(function(seen)
    local list = {}
    for i, episode in ipairs(seen.episodes) do
      if not ways[episode] then
        local env = arm.env { split = "validation" }
        env:begin(episode)
        local _, waypoints = env:expert()
        ways[episode] = { at = 0, way = (waypoints()) }
      end
      local w = ways[episode]
      w.at = math.min(w.at + 1, #w.way)
      list[i] = arm.poses.way(seen.states:select(0, i - 1), w.way[w.at])
    end
    return list
  end, { episodes = 25, looks = 16 })
  check.ok(result.success >= 0.9, ("%.2f"):format(result.success))
end)

check.test("wrong arguments", function()
  check.fails(function() arm.plans { horizon = 0 } end, "horizon: expected an integer in [1, 1000], got 0")
  check.fails(function() arm.plans { tasks = { "dance" } } end, 'there is no "dance"')
end)

check.finish()
