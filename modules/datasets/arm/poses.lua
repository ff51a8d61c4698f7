--- Key poses: a demonstration as the few places at which the hand turns or closes, and the way from one to the next by
-- inverse kinematics. Policies that say where to go next, and leave the way to a planner, are trained and rolled out
-- with them (key frames of Shridhar et al. 2023, "Perceiver-Actor", section 3.2).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"
local picture = require "tycho.datasets.arm.picture"
local random = require "tycho.datasets.random"

local M = {}

local turn = math.cos(0.3) -- of two steps' directions: what lies below is another way
local still = 4            -- a step that is shorter is none
local near = 30            -- a pose that is nearer to the one before is no way of its own

local function tip_of(q)
  local _, _, tip = kinematics.forward(q)
  return tip
end

local function angles(state) -- joints of a state in the world's integers
  local q = {}
  for i = 1, 3 do q[i] = math.floor(state[i] * kinematics.radian + 0.5) | 0 end
  return q
end

local function check(who, name, x)
  arguments.expect(who, name, x, "a tensor")
  if x.ndim ~= 2 or x.shape[2] ~= 4 or x.shape[1] < 1 then
    arguments.fail("%s: %s: expected [t, 4], got %s", who, name, arguments.describe(x))
  end
end

--- The key poses of a demonstration, in their order: a list of { x, y (of the tip, in 1024ths of the picture's side),
-- hand (1 closed, -1 open), step }. A way ends where the hand is told otherwise, where the tip stops, or where it turns
-- by more than 0.3 radians; what is within 30 of the pose before, with the hand as it was, is left out; step: how many
-- actions were done then, so that states[step] is what is seen there.
---@param states Tensor  f32 [t, 4] of an episode
---@param actions Tensor  f32 [t, 4]
---@return {x: number, y: number, hand: integer, step: integer}[]
function M.of(states, actions)
  check("datasets.arm.poses.of", "states", states)
  check("datasets.arm.poses.of", "actions", actions)
  if states.shape[1] ~= actions.shape[1] then
    arguments.fail("datasets.arm.poses.of: actions: expected as many as states, %d, got %d", states.shape[1],
      actions.shape[1])
  end
  states, actions = states:tolist(), actions:tolist()
  local tips, last = {}, angles(states[#states])
  for k, state in ipairs(states) do tips[k] = tip_of(angles(state)) end
  for i = 1, 3 do last[i] = last[i] + (math.floor(actions[#actions][i] * kinematics.radian + 0.5) | 0) end
  tips[#tips + 1] = tip_of(last)
  local poses, before = {}, nil
  local function add(step, hand)
    local tip, p = tips[step + 1], poses[#poses] or { x = tips[1].x, y = tips[1].y, hand = hand }
    if p.hand == hand and (p.x - tip.x) ^ 2 + (p.y - tip.y) ^ 2 < near * near then return end
    poses[#poses + 1] = { x = tip.x, y = tip.y, hand = hand, step = step }
  end
  for k, action in ipairs(actions) do
    local dx, dy = tips[k + 1].x - tips[k].x, tips[k + 1].y - tips[k].y
    local length, hand = math.sqrt(dx * dx + dy * dy), action[4] > 0 and 1 or -1
    local moves = length >= still
    if before and (hand ~= before.hand or moves ~= before.moves
      or moves and (dx * before.dx + dy * before.dy) / (length * before.length) < turn) then
      add(k - 1, before.hand)
    end
    before = { dx = dx, dy = dy, length = length, hand = hand, moves = moves }
  end
  add(#actions, before.hand)
  return poses
end

--- The actions that bring the hand from a state straight to a pose, 40 1024ths a step, and close or open it there:
-- f32 [k, 4] with k from 1 to `most`. A pose out of reach is approached as far as the arm goes.
---@param state number[]|Tensor  four numbers, as the environment shows it
---@param pose {x: number, y: number, hand: number}
---@param most? integer  (60)
---@return Tensor actions
function M.way(state, pose, most)
  if ty.is_tensor(state) then state = state:flatten():tolist() end
  arguments.expect("datasets.arm.poses.way", "state", state, "a list of numbers")
  arguments.expect("datasets.arm.poses.way", "pose", pose, "a table")
  for _, key in ipairs { "x", "y", "hand" } do
    arguments.expect("datasets.arm.poses.way", "pose." .. key, pose[key], "a finite number")
  end
  most = most or 60
  arguments.expect("datasets.arm.poses.way", "most", most, "an integer >= 1")
  if #state ~= 4 then arguments.fail("datasets.arm.poses.way: state: expected 4 numbers, got %d", #state) end
  local q, list, hand = angles(state), {}, pose.hand > 0 and 1 or -1
  local grip, at = math.floor(state[4] * 4 + 0.5), tip_of(q)
  local place = { x = at.x, y = at.y }
  local function put(a, b, c)
    table.move({ a / kinematics.radian, b / kinematics.radian, c / kinematics.radian, hand }, 1, 4, #list + 1, list)
    grip = math.max(0, math.min(4, grip + hand))
  end
  while #list < 4 * most do
    local dx, dy = pose.x - place.x, pose.y - place.y
    local far = math.sqrt(dx * dx + dy * dy)
    local share = far > 40 and 40 / far or 1
    local want, slow = kinematics.inverse(place.x + dx * share, place.y + dy * share), 1
    for i = 1, 3 do slow = math.max(slow, math.abs(want[i] - q[i]) / kinematics.limit) end
    local step = {}
    for i = 1, 3 do
      step[i] = math.floor((want[i] - q[i]) / slow + 0.5) | 0
      q[i] = q[i] + step[i]
    end
    put(step[1], step[2], step[3])
    place.x, place.y = place.x + dx * share / slow, place.y + dy * share / slow
    if share == 1 and slow == 1 then break end
  end
  while grip ~= (hand > 0 and 4 or 0) and #list < 4 * most do put(0, 0, 0) end
  return ty.tensor(list, { dtype = "f32" }):reshape(-1, 4)
end

--- Places of the picture as networks have them: from (x, y) in 1024ths of its side, y up, to [-1, 1], y down.
---@param x number
---@param y number
function M.to_picture(x, y)
  arguments.expect("datasets.arm.poses.to_picture", "x", x, "a number")
  arguments.expect("datasets.arm.poses.to_picture", "y", y, "a number")
  return x / 512 - 1, 1 - y / 512
end

--- The inverse of to_picture.
---@param x number
---@param y number
function M.from_picture(x, y)
  arguments.expect("datasets.arm.poses.from_picture", "x", x, "a number")
  arguments.expect("datasets.arm.poses.from_picture", "y", y, "a number")
  return (x + 1) * 512, (1 - y) * 512
end

--- What datasets.arm.examples does. What is seen at key poses of the expert's episodes, and where its hand goes next: {
-- images u8 [n, 3, size, size], states f32 [n, 4], tasks (a list of words), targets f32 [n, 2] in [-1, 1], hands f32
-- [n]: 1 closed, 0 open, starts i64 [episodes + 1]: the first row of each }. options: split ("training"), episodes
-- (100), first (0), tasks (kinds; all five), size (64), seed (0), between (1: further steps of each way, at random).
---@param arm table  datasets.arm
---@param options? table
---@return table
function M.examples(arm, options)
  local who, none = "datasets.arm.examples", arguments.none
  arguments.expect(who, "arm", arm, "a table")
  arguments.expect(who, "arm.env", arm.env, "a function")
  local o = arguments.read(who, options, { split = "training", episodes = 100, first = 0, tasks = none, size = 64,
    seed = 0, between = 1 }, { split = "a string", episodes = "an integer >= 1", first = "an integer >= 0",
    tasks = "a list of strings", size = "32 or 64 or 128", seed = "an integer", between = "an integer >= 0" })
  local env = arm.env { split = o.split, seed = o.seed, size = o.size, tasks = o.tasks }
  local painter, r = picture.painter(o.size), random.new(o.seed, "poses", o.first)
  local seen, tasks, targets, hands, starts = {}, {}, {}, {}, { 0 }
  for i = o.first, o.first + o.episodes - 1 do
    env:begin(i)
    local next_action, states, actions = env:expert(), {}, {}
    for action in next_action do
      states[#states + 1], actions[#actions + 1] = env.world:state(), action
      env:advance(action)
    end
    local wanted, from = {}, 0
    for _, pose in ipairs(M.of(ty.tensor(states, { dtype = "f32" }), ty.tensor(actions, { dtype = "f32" }))) do
      wanted[from] = pose
      for _ = 1, o.between do wanted[r:integer(from, pose.step - 1)] = pose end
      from = pose.step
    end
    env:begin(i)
    for step = 0, from - 1 do
      local pose = wanted[step]
      if env:success() then break end -- nobody looks any more
      if pose then
        painter:add(env.world, env.task.look)
        table.move(states[step + 1], 1, 4, #seen + 1, seen)
        tasks[#tasks + 1] = env.task.text
        targets[2 * #tasks - 1], targets[2 * #tasks] = M.to_picture(pose.x, pose.y)
        hands[#tasks] = pose.hand > 0 and 1 or 0
      end
      env:advance(actions[step + 1])
    end
    if #tasks > starts[#starts] then starts[#starts + 1] = #tasks end
  end
  return { images = painter:pictures(), states = ty.tensor(seen, { dtype = "f32" }):reshape(-1, 4), tasks = tasks,
    targets = ty.tensor(targets, { dtype = "f32" }):reshape(-1, 2), hands = ty.tensor(hands, { dtype = "f32" }),
    starts = ty.tensor(starts, { dtype = "i64" }) }
end

return M
