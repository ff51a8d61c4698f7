--- Demonstrations as plans: what is seen at a step, and the waypoints of the expert that are still to go. Policies that
-- draw a few waypoints and have the arm moved by inverse kinematics (datasets.arm.poses.way) are trained with them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local picture = require "tycho.datasets.arm.picture"
local poses = require "tycho.datasets.arm.poses"
local random = require "tycho.datasets.random"
local world = require "tycho.datasets.arm.world"

local M = {}

local near = 10 -- a waypoint that is nearer, with the hand as it should be, is done

-- The middle of a thing in the picture; 2, 2 for none.
local function middle(o)
  if not o then return 2, 2 end
  if o.kind == "target" then return poses.to_picture(o.x, o.y) end
  if o.kind == "drawer" then return poses.to_picture(world.handle(o)) end
  return poses.to_picture(o.x, o.y + (o.kind == "mat" and 0 or o.kind == "bowl" and world.bowl.height / 2
    or world.block / 2))
end

-- The first waypoint that is not done where the world stands.
local function current(w, way, at)
  local p = way[at]
  if p and at < #way and (w.tip.x - p.x) ^ 2 + (w.tip.y - p.y) ^ 2 < near * near
    and w.grip == (p.hand > 0 and 4 or 0) then
    return at + 1
  end
  return math.min(at, #way)
end

--- What datasets.arm.plans does.
---@param arm table  datasets.arm
---@param options? table
---@return table
function M.examples(arm, options)
  local who, none = "datasets.arm.plans", arguments.none
  arguments.expect(who, "arm", arm, "a table")
  arguments.expect(who, "arm.env", arm.env, "a function")
  local o = arguments.read(who, options, { split = "training", episodes = 100, first = 0, tasks = none, size = 64,
    seed = 0, looks = 8, horizon = 4, back = 0, stray = 0.05 }, { split = "a string", episodes = "an integer >= 1",
    first = "an integer >= 0", tasks = "a list of strings", size = "32 or 64 or 128", seed = "an integer",
    looks = "an integer >= 1", horizon = "an integer in [1, 1000]", back = "an integer >= 0",
    stray = "a number >= 0" })
  local env = arm.env { split = o.split, seed = o.seed, size = o.size, tasks = o.tasks }
  local painter, before = picture.painter(o.size), o.back > 0 and picture.painter(o.size) or nil
  local r = random.new(o.seed, "plans", o.first)
  local states, earlier, tasks, plans, places = {}, {}, {}, {}, {}
  local function off() return r:integer(-1000, 1000) / 1000 * o.stray end
  for i = o.first, o.first + o.episodes - 1 do
    -- Once to see how long it is and what is done, and once more to look at some of it.
    local actions = {}
    env:begin(i)
    local next_action, waypoints = env:expert()
    local todo = {}
    for action in next_action do
      if env:success() then break end
      local way, at = waypoints()
      if o.stray > 0 and r:integer(1, 3) == 1 then
        action = { action[1] + off(), action[2] + off(), action[3] + off(), action[4] }
      end
      actions[#actions + 1], todo[#actions + 1] = action, { way, at }
      env:advance(action)
    end
    local wanted = {}
    for step = 1, #actions do wanted[step] = step end
    if #actions > o.looks then
      r:shuffle(wanted)
      for step = #actions, o.looks + 1, -1 do wanted[step] = nil end
    end
    local chosen = {}
    for _, step in ipairs(wanted) do chosen[step] = true end
    local function replay(visit)
      env:begin(i)
      for step = 1, #actions do
        visit(step)
        env:advance(actions[step])
      end
    end
    if before then
      local seen = {}
      for step in pairs(chosen) do
        local at = math.max(1, step - o.back)
        seen[at] = seen[at] or {}
        table.insert(seen[at], step)
      end
      -- In the order of the steps that they belong to: steps at the front share the first picture.
      replay(function(step)
        table.sort(seen[step] or {})
        for _ = 1, #(seen[step] or {}) do
          before:add(env.world, env.task.look)
          table.move(env.world:state(), 1, 4, #earlier + 1, earlier)
        end
      end)
    end
    replay(function(step)
      if not chosen[step] then return end
      painter:add(env.world, env.task.look)
      table.move(env.world:state(), 1, 4, #states + 1, states)
      tasks[#tasks + 1] = env.task.text
      local way = todo[step][1]
      local at = current(env.world, way, todo[step][2])
      for k = at, at + o.horizon - 1 do
        local p = way[math.min(k, #way)]
        local x, y = poses.to_picture(p.x, p.y)
        table.move({ x, y, p.hand }, 1, 3, #plans + 1, plans)
      end
      local ax, ay = middle(env.task.object)
      local bx, by = middle(env.task.goal)
      table.move({ ax, ay, bx, by }, 1, 4, #places + 1, places)
    end)
  end
  local n = #tasks
  local function tensor(list, ...) return ty.tensor(list, { dtype = "f32" }):reshape(n, ...) end
  return { images = painter:pictures(), states = tensor(states, 4), tasks = tasks, plans = tensor(plans, o.horizon, 3),
    places = tensor(places, 2, 2), before = before and before:pictures(),
    states_before = before and tensor(earlier, 4) }
end

return M
