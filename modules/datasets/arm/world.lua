--- The world of the arm: exact and simple. Joints turn by what an action says, within a limit; fingers close on what
-- is between them and carry it; what they touch from the side moves along the table and moves what it meets; what is
-- let go falls onto what is below. Angles are integers, and everything else follows by sums, products, quotients and
-- roots of IEEE 754, so that an episode is the same on every machine.
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"

local M = {}

M.block = 96            -- side of a block
M.bowl = { width = 168, height = 74, inside = 132, bottom = 16 }
M.drawer = { front = 846, height = 124, reach = 150, handle = 36, open = 110 }
M.right = 1000          -- where the table ends for what is pushed

local wide, thick, finger, tall = 68, 8, 18, 90 -- fingers: half their distance when open; half a finger; closed; height
local floor = kinematics.table

local World = {}
World.__index = World

--- A world of objects: { kind = "block", "bowl", "mat", "target" or "drawer", x, y (of the middle of its lower side),
-- colour ...}; joints at rest.
---@param objects table[]
---@param q? integer[] the joints
function M.new(objects, q)
  arguments.expect("datasets.arm.world.new", "objects", objects, "a list")
  local self = setmetatable({ objects = objects, q = q or kinematics.inverse(360, 560), grip = 0, held = nil,
    steps = 0 }, World)
  self.elbow, self.wrist, self.tip = kinematics.forward(self.q)
  return self
end

--- Half the distance of the fingers: `wide` when open, less by what the grip (0 to 4) is; around what they hold.
function World:spread()
  if self.held then return self.held.kind == "drawer" and finger or M.block / 2 + thick end
  return wide + (finger - wide) * self.grip / 4
end

--- Where the handle of a drawer is.
function M.handle(drawer) return M.drawer.front - drawer.open - M.drawer.handle, drawer.y + M.drawer.height / 2 end

local function is_solid(o) return o.kind == "block" or o.kind == "bowl" end
local function half_of(o) return (o.kind == "bowl" and M.bowl.width or M.block) / 2 end
local function height_of(o) return o.kind == "bowl" and M.bowl.height or M.block end

-- What a block rests on at x: the height, and the object (nil: the table).
local function support(self, block)
  local best, under = floor, nil
  for _, o in ipairs(self.objects) do
    if o ~= block and o ~= self.held and is_solid(o) and o.inside ~= block then
      local away = math.abs(block.x - o.x)
      if o.kind == "bowl" then
        if away < M.bowl.width / 2 and floor + M.bowl.bottom > best and block.y >= floor + M.bowl.bottom - 1 then
          best, under = floor + M.bowl.bottom, o
        end
      elseif away < M.block and o.y + M.block > best and block.y >= o.y + M.block / 2 then
        best, under = o.y + M.block, o
      end
    end
  end
  return best, under
end

-- Moves an object along the table, and what it meets.
local function shove(self, object, to, depth)
  local direction = to > object.x and 1 or -1
  local half = half_of(object)
  local moved = math.max(kinematics.base.x + 110, math.min(M.right - half, to)) - object.x
  object.x = object.x + moved
  for _, o in ipairs(self.objects) do
    if o.on == object or o.within == object then o.x = o.x + moved end
    if o ~= object and o ~= self.held and is_solid(o) and o.within ~= object and o.on ~= object
      and object.within ~= o and object.on ~= o and depth < 6 then
      local gap = half + half_of(o)
      local overlaps = object.y < o.y + height_of(o) and o.y < object.y + height_of(object)
      if overlaps and math.abs(o.x - object.x) < gap then shove(self, o, object.x + direction * gap, depth + 1) end
    end
  end
end

-- Whether fingers whose tips are at height y can touch an object from the side.
local function is_beside(o, y) return y < o.y + height_of(o) - 6 and o.y < y + tall end

-- What the fingers touch from the side moves out of their way, to the side that they come from however fast. `before`:
-- where the hand was.
local function push(self, before)
  local spread, tip = self:spread(), self.tip
  for side = -1, 1, 2 do
    local x = tip.x + side * spread
    for _, o in ipairs(self.objects) do
      if is_solid(o) and not o.within and is_beside(o, tip.y) then
        local gap, away = half_of(o) + thick, o.x - x
        if is_beside(o, before.y) then
          local was = o.x - before.x - side * before.spread
          if (was > 0) ~= (away > 0) or math.abs(away) < gap then shove(self, o, x + (was > 0 and gap or -gap), 0) end
        elseif math.abs(away) < gap then -- it came from above
          shove(self, o, x + (away > 0 and gap or -gap), 0)
        end
      end
    end
  end
end

local function grasp(self)
  local tip = self.tip
  for _, o in ipairs(self.objects) do
    if o.kind == "block" and math.abs(o.x - tip.x) < 30 and tip.y < o.y + M.block - 8 and tip.y > o.y - 30 then
      local covered = false
      for _, other in ipairs(self.objects) do covered = covered or other.on == o end
      if not covered then
        self.held, o.on, o.within = o, nil, nil
        self.offset = o.y - tip.y
        return
      end
    elseif o.kind == "drawer" then
      local x, y = M.handle(o)
      if math.abs(x - tip.x) < 26 and math.abs(y - tip.y) < 30 then
        self.held = o
        self.offset = x - tip.x
        return
      end
    end
  end
end

local function carry(self)
  local o, tip = self.held, self.tip
  if o.kind == "drawer" then
    o.open = math.max(0, math.min(M.drawer.reach, M.drawer.front - M.drawer.handle - (tip.x + self.offset)))
    local x, y = M.handle(o)
    if math.abs(x - tip.x) > 60 or math.abs(y - tip.y) > 60 then self.held = nil end -- it slips off
    return
  end
  o.x, o.y = tip.x, tip.y + self.offset
  if o.y < floor then o.y = floor end
end

local function fall(self)
  for _, o in ipairs(self.objects) do
    if o.kind == "block" and o ~= self.held then
      local height, under = support(self, o)
      if o.y > height then
        o.speed = (o.speed or 0) + 14
        o.y = math.max(height, o.y - o.speed)
      end
      if o.y <= height then
        o.y, o.speed, o.on, o.within = height, 0, nil, nil
        if under and under.kind == "bowl" then
          local room = (M.bowl.inside - M.block) / 2
          o.within = under
          o.x = math.max(under.x - room, math.min(under.x + room, o.x)) -- it slides in from the rim
        elseif under then
          if math.abs(o.x - under.x) < M.block / 2 then
            o.on = under
          else -- over the edge, down to its side
            shove(self, o, under.x + (o.x >= under.x and 1 or -1) * M.block, 0)
          end
        end
      end
    end
  end
end

local function limited(value, most)
  if value ~= value then return 0 end
  value = math.max(-most, math.min(most, value))
  return math.floor(value + 0.5) | 0
end

--- A step. action: three turns of the joints in radians, of which 0.1 are done at most, and the hand: above 0 it
-- closes, below it opens. Turns are rounded to 4096ths of a radian.
---@param action number[]
function World:step(action)
  arguments.expect("World:step", "action", action, "a list of numbers")
  if #action ~= 4 then arguments.fail("World:step: action: expected 4 numbers, got %d", #action) end
  for i = 1, 3 do self.q[i] = self.q[i] + limited(action[i] * kinematics.radian, kinematics.limit) end
  local before = { x = self.tip.x, y = self.tip.y, spread = self:spread() }
  self.elbow, self.wrist, self.tip = kinematics.forward(self.q)
  if self.tip.y < floor + 4 then -- the table stops the hand, the joints stay
    for i = 1, 3 do self.q[i] = self.q[i] - limited(action[i] * kinematics.radian, kinematics.limit) end
    self.elbow, self.wrist, self.tip = kinematics.forward(self.q)
  end
  local grip = self.grip
  if action[4] > 0 then grip = math.min(4, grip + 1) elseif action[4] < 0 then grip = math.max(0, grip - 1) end
  if self.held and grip < 2 then self.held = nil end
  self.grip = grip
  if self.held then carry(self) else
    if action[4] > 0 and grip >= 2 then grasp(self) end
    if not self.held then push(self, before) end
  end
  fall(self)
  self.steps = self.steps + 1
end

--- Joints in radians and how far the hand is closed (0 to 1).
---@return number[]
function World:state()
  local q = self.q
  return { q[1] / kinematics.radian, q[2] / kinematics.radian, q[3] / kinematics.radian, self.grip / 4 }
end

local done = {}

function done.reach(self, task)
  local dx, dy = self.tip.x - task.goal.x, self.tip.y - task.goal.y
  return dx * dx + dy * dy < 28 * 28
end
function done.push(self, task)
  local o = task.object
  return self.held ~= o and not o.within and o.y <= floor and math.abs(o.x - task.goal.x) < 32
end
function done.place(self, task) return self.held ~= task.object and task.object.within == task.goal end
function done.stack(self, task) return self.held ~= task.object and task.object.on == task.goal end
function done.open(_, task) return task.object.open >= M.drawer.open end

--- Whether the task is done now.
---@param task table see datasets.arm.tasks
function World:succeeds(task)
  arguments.expect("World:succeeds", "task", task, "a table")
  return done[task.kind](self, task)
end

return M
