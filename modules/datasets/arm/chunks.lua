--- Demonstrations as chunks of actions, and the geometry of what is seen.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"
local picture = require "tycho.datasets.arm.picture"
local random = require "tycho.datasets.random"
local world = require "tycho.datasets.arm.world"

local M = {}

local none = arguments.none

--- What is in front at a place, from the back to the front: the room, the table, what is fixed (cabinet, mat), things,
-- the arm.
M.layers = { "room", "table", "fixed", "things", "arm" }

-- The distance of (x, y) to the line from a to b.
local function to_line(x, y, a, b)
  local dx, dy = b.x - a.x, b.y - a.y
  local along = math.max(0, math.min(1, ((x - a.x) * dx + (y - a.y) * dy) / (dx * dx + dy * dy)))
  return math.sqrt((x - a.x - along * dx) ^ 2 + (y - a.y - along * dy) ^ 2)
end

local function front_at(w, x, y)
  local base = kinematics.base
  if to_line(x, y, base, w.elbow) < 36 or to_line(x, y, w.elbow, w.wrist) < 30
    or to_line(x, y, w.wrist, w.tip) < 30 then
    return 4
  end
  local found = y < kinematics.table and 1 or 0
  for _, o in ipairs(w.objects) do
    if o.kind == "block" or o.kind == "bowl" then
      local half, high = (o.kind == "bowl" and world.bowl.width or world.block) / 2,
        o.kind == "bowl" and world.bowl.height or world.block
      if math.abs(x - o.x) < half and y > o.y and y < o.y + high then found = 3 end
    elseif o.kind == "target" then
      if math.abs(x - o.x) < 52 and math.abs(y - o.y) < 52 then found = 3 end
    elseif o.kind == "drawer" then
      if x > world.drawer.front - o.open - world.drawer.handle and y > o.y and y < o.y + world.drawer.height then
        found = math.max(found, 2)
      end
    elseif math.abs(x - o.x) < o.width / 2 and math.abs(y - kinematics.table + 14) < 40 then
      found = math.max(found, 2)
    end
  end
  return found
end

-- The 64 places of a picture and its key points, appended to lists.
local function look_at(w, front, points)
  for row = 0, 7 do
    for column = 0, 7 do front[#front + 1] = front_at(w, column * 128 + 64, 1024 - row * 128 - 64) end
  end
  for _, p in ipairs { w.elbow, w.wrist, w.tip } do
    points[#points + 1], points[#points + 2] = p.x / 512 - 1, 1 - p.y / 512
  end
end

--- What datasets.arm.chunks does.
---@param arm table  datasets.arm
---@param options? table
---@return table
function M.examples(arm, options)
  local who = "datasets.arm.chunks"
  arguments.expect(who, "arm", arm, "a table")
  arguments.expect(who, "arm.env", arm.env, "a function")
  local o = arguments.read(who, options, { split = "training", episodes = 100, first = 0, tasks = none, size = 64,
    seed = 0, looks = 8, horizon = 8, back = 4, geometry = false }, { split = "a string", episodes = "an integer >= 1",
    first = "an integer >= 0", tasks = "a list of strings", size = "32 or 64 or 128", seed = "an integer",
    looks = "an integer >= 1", horizon = "an integer in [1, 1000]", back = "an integer >= 0" })
  local env = arm.env { split = o.split, seed = o.seed, size = o.size, tasks = o.tasks }
  local painter, r = picture.painter(o.size), random.new(o.seed, "chunks", o.first)
  local states, tasks, actions, front, points = {}, {}, {}, {}, {}
  for i = o.first, o.first + o.episodes - 1 do
    env:begin(i)
    local next_action, seen, done = env:expert(), {}, {}
    for action in next_action do
      if env:success() then break end
      seen[#seen + 1], done[#done + 1] = env.world:state(), action
      env:advance(action)
    end
    local wanted = {}
    if o.looks >= #done then
      for step = 1, #done do wanted[step] = true end
    else
      for _ = 1, o.looks do wanted[r:integer(1, #done)] = true end
    end
    env:begin(i)
    for step = 1, #done do
      if wanted[step] then
        painter:add(env.world, env.task.look)
        table.move(seen[math.max(1, step - o.back)], 1, 4, #states + 1, states)
        table.move(seen[step], 1, 4, #states + 1, states)
        tasks[#tasks + 1] = env.task.text
        for k = step, step + o.horizon - 1 do
          local action = done[k] or { 0, 0, 0, done[#done][4] }
          for j = 1, 3 do actions[#actions + 1] = action[j] * kinematics.radian / kinematics.limit end
          actions[#actions + 1] = action[4]
        end
        if o.geometry then look_at(env.world, front, points) end
      end
      env:advance(done[step])
    end
  end
  local n = #tasks
  local result = { images = painter:pictures(), tasks = tasks,
    states = ty.tensor(states, { dtype = "f32" }):reshape(n, 8),
    actions = ty.tensor(actions, { dtype = "f32" }):reshape(n, o.horizon, 4) }
  if o.geometry then
    result.front = ty.tensor(front, { dtype = "i64" }):reshape(n, 8, 8)
    result.points = ty.tensor(points, { dtype = "f32" }):reshape(n, 6)
  end
  return result
end

--- What datasets.arm.actions does: actions f32 [n, horizon, 4] on the CPU, where the arm is.
---@param chunk Tensor
---@return Tensor
function M.actions(chunk)
  arguments.expect("datasets.arm.actions", "chunk", chunk, "a tensor")
  if chunk.ndim ~= 3 or chunk.shape[3] ~= 4 then
    arguments.fail("datasets.arm.actions: chunk: expected [n, horizon, 4], got %s", arguments.describe(chunk))
  end
  local scale = ty.tensor({ 1, 1, 1, kinematics.radian / kinematics.limit }, { dtype = "f32" })
    * (kinematics.limit / kinematics.radian)
  return chunk:to { dtype = "f32", device = "cpu" } * scale
end

return M
