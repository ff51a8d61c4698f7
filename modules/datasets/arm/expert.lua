--- The expert: goes through waypoints of the hand, straight from one to the next with the hand pointing down, and turns
-- the joints as inverse kinematics says. Heights, speeds and ways around differ by chance, so that demonstrations show
-- several ways of doing the same.
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"
local world = require "tycho.datasets.arm.world"

local M = {}

local floor = kinematics.table

-- A waypoint: where, and the hand: 1 closed, -1 open; `wait`: steps there.
local function to(x, y, hand, wait) return { x = x, y = y, hand = hand, wait = wait or 0 } end

local plan = {}

function plan.reach(w, task, random)
  local goal, way = task.goal, {}
  if random:integer(0, 1) == 0 then way[1] = to((w.tip.x + goal.x) / 2, goal.y + random:integer(0, 120), -1) end
  way[#way + 1] = to(goal.x, goal.y, -1, 2)
  return way
end

function plan.push(w, task, random)
  local o, goal = task.object, task.goal
  local direction = goal.x > o.x and 1 or -1
  -- closed fingers reach 18 + 8 to a side, the block 48
  local start, stop = o.x - direction * random:integer(88, 100), goal.x - direction * 74
  local height, high = floor + random:integer(18, 46), floor + random:integer(150, 230)
  if start < 250 then start = 250 end
  return { to((w.tip.x + start) / 2, high + 60, 1), to(start, high, 1), to(start, height, 1), to(stop, height, 1, 1),
    to(stop - direction * 20, height, 1), to(stop - direction * 30, high, 1) }
end

local function pick(o, random, high)
  local x, y = o.x, o.y + random:integer(24, 40)
  return { to(x, high, -1), to(x, y, -1, 1), to(x, y, 1, 3) }
end

function plan.place(_, task, random)
  local high = floor + random:integer(210, 290)
  local way = pick(task.object, random, high)
  local x = task.goal.x + random:integer(-8, 8)
  for _, p in ipairs { to(task.object.x, high, 1), to(x, high, 1), to(x, floor + random:integer(110, 130), 1, 1),
    to(x, floor + 120, -1, 3), to(x, high, -1) } do way[#way + 1] = p end
  return way
end

function plan.stack(_, task, random)
  local high = floor + random:integer(230, 290)
  local way = pick(task.object, random, high)
  local grip = way[2].y - task.object.y
  local x, y = task.goal.x + random:integer(-6, 6), task.goal.y + world.block + grip + 5
  for _, p in ipairs { to(task.object.x, high, 1), to(x, high, 1), to(x, y, 1, 2), to(x, y, -1, 3), to(x, high, -1) } do
    way[#way + 1] = p
  end
  return way
end

function plan.open(_, task, random)
  local x, y = world.handle(task.object)
  local high = math.min(y + random:integer(60, 130), floor + 300)
  local pull = world.drawer.open + random:integer(12, 30)
  return { to(x - random:integer(60, 160), high, -1), to(x, high - 20, -1), to(x, y, -1, 1), to(x, y, 1, 3),
    to(x - pull, y, 1, 2) }
end

--- An expert for a task in a world that has just begun: call it for the next action; nil when the way is at its end.
-- The second result says which waypoints { x, y, hand, wait } there are, and the number of that it goes to.
---@param w table the world
---@param task table
---@param random table datasets.random
---@return fun(): number[]? next_action
---@return fun(): table[], integer waypoints
function M.new(w, task, random)
  arguments.expect("datasets.arm.expert.new", "w", w, "a table")
  arguments.expect("datasets.arm.expert.new", "task", task, "a table")
  arguments.expect("datasets.arm.expert.new", "random", random, "a table")
  local way, speed = plan[task.kind](w, task, random), random:integer(34, 46)
  local at, waited, place = 1, 0, { x = w.tip.x, y = w.tip.y }
  return function()
    local p = way[at]
    if not p then return nil end
    local dx, dy = p.x - place.x, p.y - place.y
    local far = math.sqrt(dx * dx + dy * dy)
    local share = far > speed and speed / far or 1
    local x, y = place.x + dx * share, place.y + dy * share
    local want, action = kinematics.inverse(x, y), {}
    local slow = 1 -- all joints slow down together where one would be too fast
    for i = 1, 3 do slow = math.max(slow, math.abs(want[i] - w.q[i]) / kinematics.limit) end
    for i = 1, 3 do action[i] = math.floor((want[i] - w.q[i]) / slow + 0.5) / kinematics.radian end
    if slow == 1 then
      place.x, place.y = x, y
      if share == 1 then
        waited = waited + 1
        if waited > p.wait then at, waited = at + 1, 0 end
      end
    else
      place.x, place.y = place.x + (x - place.x) / slow, place.y + (y - place.y) / slow
    end
    action[4] = p.hand
    return action
  end, function() return way, at end
end

return M
