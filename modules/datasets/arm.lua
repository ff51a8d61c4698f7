--- A robot arm at a table, seen from the side: three joints and a gripper, five tasks in words, a simulator that is the
-- same on every machine, an expert. As data, whole episodes of the expert; as an environment, what policies are judged
-- in. Item i depends on (seed, split, i) alone, to the last byte. The page is datasets/arm/README.md.
--
--     local set = datasets.load "arm"
--     local episode = set:get(0)    -- { images = u8 [t, 3, 64, 64], states, actions = f32 [t, 4], task = "open ..." }
--     local env = datasets.arm.env { split = "held_out" }
--     local seen = env:reset(0)     -- { image = u8 [3, 64, 64], state = f32 [4], task = "..." }
--     repeat local done; seen, done = env:step(policy(seen)) until done
--     print(env:success())
local ty = require "tycho"
local arguments = require "tycho.arguments"
local items = require "tycho.datasets.items"
local chunks = require "tycho.datasets.arm.chunks"
local expert = require "tycho.datasets.arm.expert"
local picture = require "tycho.datasets.arm.picture"
local random = require "tycho.datasets.random"
local tasks = require "tycho.datasets.arm.tasks"
local world = require "tycho.datasets.arm.world"

local M = {}

--- The tasks: reach, push, place, stack, open.
M.kinds = tasks.kinds
--- Steps after which an episode ends, done or not.
M.limit = 120
--- Items of an epoch of each split.
M.lengths = { training = 10000, validation = 500, held_out = 500 }

-- The generator of a part of episode i.
local function generator(o, part, i) return random.new(o.seed, ("arm %s %s"):format(part, o.split), i) end

-- The task of episode i: the kinds take turns.
local function task_of(o, i)
  local kind = o.tasks[i % #o.tasks + 1]
  return tasks.draw(generator(o, "task", i), kind, o.split == "held_out")
end

local none = arguments.none
local shared = { split = "training", seed = 0, size = 64, tasks = none }
local shared_kinds = { split = "a string", seed = "an integer", size = "32 or 64 or 128", tasks = "a list of strings" }

-- Options that sets and environments share, checked.
local function check_options(who, o)
  if not M.lengths[o.split] then
    arguments.fail("%s: split: there is no \"%s\"%s", who, o.split, ty.core.nearest(o.split, M.lengths))
  end
  local known = {}
  for _, kind in ipairs(M.kinds) do known[kind] = true end
  o.tasks = o.tasks or M.kinds
  for _, kind in ipairs(o.tasks) do
    if not known[kind] then
      arguments.fail("%s: tasks: there is no \"%s\"%s", who, kind, ty.core.nearest(kind, known))
    end
  end
  if #o.tasks == 0 then arguments.fail("%s: tasks: expected at least one, got none", who) end
  o.seed = math.tointeger(o.seed)
  return o
end

-- ---- episodes ----

--- A data set of demonstrations: items are episodes of the scripted expert.
---@class ArmEpisodes
local Episodes = ty.data.class "ArmEpisodes"

function Episodes:describe()
  return ("of %d x %d (%s, seed %d)"):format(self.o.size, self.o.size, self.o.split, self.o.seed)
end

-- The expert's episode i; its pictures go to the painter, if there is one.
local function play(o, i, painter)
  local task = task_of(o, i)
  local w = world.new(task.objects, task.q)
  local next_action = expert.new(w, task, generator(o, "expert", i))
  local states, actions, steps = {}, {}, 0
  while steps < M.limit do
    local action = next_action()
    if not action then break end
    table.move(w:state(), 1, 4, 4 * steps + 1, states)
    table.move(action, 1, 4, 4 * steps + 1, actions)
    if painter then painter:add(w, task.look) end
    w:step(action)
    steps = steps + 1
  end
  return task, steps, states, actions, w:succeeds(task)
end

local makers = {
  images = function(_, p) return p.images end,
  states = function(_, p) return ty.tensor(p.states, { dtype = "f32" }):reshape(p.steps, 4) end,
  actions = function(_, p) return ty.tensor(p.actions, { dtype = "f32" }):reshape(p.steps, 4) end,
  task = function(_, p) return p.task.text end,
  kind = function(_, p) return p.task.kind end,
  pair = function(_, p) return p.task.pair end,
  phrase = function(_, p) return p.task.phrase end,
  success = function(_, p) return p.success end,
}

local function batch_of(self, positions)
  local result, plays = {}, {}
  local painter = self.drawn and picture.painter(self.o.size) or nil
  for k, i in ipairs(positions) do
    local task, steps, states, actions, success = play(self.o, i, painter)
    plays[k] = { task = task, steps = steps, states = states, actions = actions, success = success }
  end
  if painter and #plays > 0 then
    local images, at = painter:pictures(), 0
    for _, p in ipairs(plays) do
      p.images = images:narrow(0, at, p.steps)
      if #plays > 1 then p.images = p.images:clone() end
      at = at + p.steps
    end
  end
  for _, field in ipairs(self.fields) do
    result[field] = {}
    for k, p in ipairs(plays) do result[field][k] = makers[field](self, p) end
  end
  return result
end

--- The episodes at `positions`, a list for each field: their lengths differ. Their pictures are drawn by one call.
---@param positions integer[]|Tensor
function Episodes:batch(positions)
  return batch_of(self, items.positions("ArmEpisodes:batch", positions, self.size))
end

--- Episode i: { images, states, actions, task ... }. Picture and state t are what is seen before action t.
---@param i integer
function Episodes:get(i)
  local item = {}
  for field, list in pairs(batch_of(self, items.position("ArmEpisodes:get", i, self.size))) do item[field] = list[1] end
  return item
end

--- datasets.load("arm", options). options: split ("training", "validation", "held_out"), seed (0), size (64 pixels a
-- side; 32, 128), length (episodes of an epoch), tasks (kinds of M.kinds, which take turns), fields: images u8 [t, 3,
-- size, size]; states f32 [t, 4], three joints in radians and how far the hand is closed; actions f32 [t, 4], turns of
-- the joints, at most 0.1, and the hand, 1 to close and -1 to open; task, the words; kind; pair and phrase, of what is
-- held out; success, whether the expert did it.
---@param options? table
---@return ArmEpisodes
function M.load(options)
  local defaults, kinds = { length = none, fields = { "images", "states", "actions", "task", "kind", "success" } },
    { length = "an integer >= 0", fields = "a list of strings" }
  for key, value in pairs(shared) do defaults[key] = value end
  for key, value in pairs(shared_kinds) do kinds[key] = value end
  local o = check_options("datasets.arm", arguments.read("datasets.arm", options, defaults, kinds))
  local drawn = false
  for _, field in ipairs(o.fields) do
    if not makers[field] then
      arguments.fail("datasets.arm: fields: there is no \"%s\"%s", field, ty.core.nearest(field, makers))
    end
    drawn = drawn or field == "images"
  end
  return setmetatable({ size = o.length or M.lengths[o.split], o = o, fields = o.fields, drawn = drawn }, Episodes)
end

-- ---- the environment ----

--- A robot arm in a simulated world, one episode at a time: env:reset(), then env:step(action) until it is done.
---@class ArmEnv
local Env = {}
Env.__index = Env
Env.__name = "ArmEnv"

--- An environment: reset(i) begins episode i, step(action) does one step. options: split, seed, size, tasks as those of
-- datasets.load "arm", whose episode i begins as that of the environment does.
---@param options? {split: string, seed: integer, size: integer, tasks: string[]}
---@return ArmEnv
function M.env(options)
  return setmetatable(check_options("datasets.arm.env", arguments.read("datasets.arm.env", options, shared,
    shared_kinds)), Env)
end

--- What policies are given: image u8 [3, size, size], state f32 [4], task (words).
function Env:observe()
  if not self.world then arguments.fail("ArmEnv:observe: expected an episode that has begun: call reset first") end
  return { image = picture.draw({ self.world }, { self.task.look }, self.size):squeeze(0),
    state = ty.tensor(self.world:state(), { dtype = "f32" }), task = self.task.text }
end

--- Begins episode i without drawing it.
---@param i integer
function Env:begin(i)
  arguments.expect("ArmEnv:begin", "i", i, "an integer >= 0")
  self.index = math.tointeger(i)
  self.task = task_of(self, self.index)
  self.world = world.new(self.task.objects, self.task.q)
end

--- Begins episode i; returns the first observation.
---@param i integer
---@return {image: Tensor, state: Tensor, task: string}
function Env:reset(i)
  arguments.expect("ArmEnv:reset", "i", i, "an integer >= 0")
  self:begin(i)
  return self:observe()
end

local function advance(self, action, who)
  if not self.world then arguments.fail("%s: expected an episode that has begun: call reset first", who) end
  if ty.is_tensor(action) then action = action:flatten():tolist() end
  arguments.expect(who, "action", action, "a list of numbers or a tensor")
  if #action ~= 4 then arguments.fail("%s: action: expected 4 numbers, got %d", who, #action) end
  self.world:step(action)
end

--- Does an action: a list or tensor of four numbers, the turns of the joints in radians and the hand. Returns the next
-- observation and whether the episode is over: the task is done, or 120 steps were.
---@param action number[]|Tensor
---@return {image: Tensor, state: Tensor, task: string}
---@return boolean done
function Env:step(action)
  advance(self, action, "ArmEnv:step")
  return self:observe(), self:done()
end

--- Does an action, as step does, without drawing what comes of it.
---@param action number[]|Tensor
function Env:advance(action) advance(self, action, "ArmEnv:advance") end

--- Whether the task is done.
---@return boolean
function Env:success() return self.world ~= nil and self.world:succeeds(self.task) end

--- Whether the episode is over.
---@return boolean
function Env:done() return self.world ~= nil and (self.world.steps >= M.limit or self:success()) end

--- An expert for the episode that has just begun: a function that gives the next action, nil at its end, and one that
-- gives its waypoints { x, y, hand, wait } and the number of that it goes to.
---@return fun(): number[]? next_action
---@return fun(): table[], integer waypoints
function Env:expert()
  if not self.world or self.world.steps > 0 then
    arguments.fail("ArmEnv:expert: expected an episode that has just begun: call reset first")
  end
  return expert.new(self.world, self.task, generator(self, "expert", self.index))
end

--- Observations of several environments at once: images u8 [n, 3, size, size], states f32 [n, 4], tasks (a list).
-- With actions, f32 [n, 4], those that are not over do a step before.
---@param envs ArmEnv[] of one size
---@param actions? Tensor
---@return {images: Tensor, states: Tensor, tasks: string[]}
function M.observe(envs, actions)
  arguments.expect("datasets.arm.observe", "envs", envs, "a list")
  if #envs == 0 then arguments.fail("datasets.arm.observe: envs: expected at least one, got none") end
  local worlds, looks, states, words = {}, {}, {}, {}
  if actions ~= nil then
    arguments.expect("datasets.arm.observe", "actions", actions, "a tensor")
    if #actions.shape ~= 2 or actions.shape[1] ~= #envs or actions.shape[2] ~= 4 then
      arguments.fail("datasets.arm.observe: actions: expected [%d, 4], got %s", #envs, arguments.describe(actions))
    end
    actions = actions:tolist()
  end
  for k, env in ipairs(envs) do
    if getmetatable(env) ~= Env or not env.world then
      arguments.fail("datasets.arm.observe: envs: expected environments that have begun, got %s as element %d",
        arguments.describe(env), k)
    end
    if actions and not env:done() then advance(env, actions[k], "datasets.arm.observe") end
    worlds[k], looks[k], words[k] = env.world, env.task.look, env.task.text
    table.move(env.world:state(), 1, 4, 4 * k - 3, states)
  end
  return { images = picture.draw(worlds, looks, envs[1].size), tasks = words,
    states = ty.tensor(states, { dtype = "f32" }):reshape(#envs, 4) }
end

--- Demonstrations as key poses, and ways to them: see datasets.arm.poses.
M.poses = require "tycho.datasets.arm.poses"

--- What is seen at key poses of the expert's episodes, and where its hand goes next: { images u8 [n, 3, size, size],
-- states f32 [n, 4], tasks (a list of words), targets f32 [n, 2] in [-1, 1], hands f32 [n]: 1 closed, 0 open, starts
-- i64 [episodes + 1]: the first row of each }. options: split ("training"), episodes (100), first (0), tasks (kinds;
-- all five), size (64), seed (0), between (1: further steps of each way, at random).
---@param options? table
---@return table
function M.examples(options) return M.poses.examples(M, options) end

--- What is seen at steps of the expert's episodes, and the waypoints that are still to go: { images u8 [n, 3, size,
-- size], states f32 [n, 4], tasks (a list), plans f32 [n, horizon, 3]: x and y in [-1, 1], y down, and the hand, 1
-- closed or -1 open, places f32 [n, 2, 2]: where the thing that is moved and its goal are (2, 2: there is none) }. With
-- `back` also before u8 [n, 3, size, size] and states_before f32 [n, 4], seen so many steps earlier, or at the first.
-- options: split ("training"), episodes (100), first (0), tasks (kinds; all five), size (64), seed (0), looks (8:
-- steps of an episode), horizon (4), back (0: without), stray (0.05: radians by which joints are off at times, so that
-- ways back to the plan are seen as well; the plan is that of the episode all the same).
---@param options? table
---@return table
function M.plans(options) return require("tycho.datasets.arm.plans").examples(M, options) end

--- What is seen at up to `looks` (8) steps of each of the expert's episodes, and what it does then: { images u8 [n, 3,
-- size, size], states f32 [n, 8] (of `back` = 4 steps before, and now), tasks (a list), actions f32 [n, horizon, 4] in
-- [-1, 1] }; with geometry also front i64 [n, 8, 8] (which of arm.layers is in front at a place) and points f32 [n, 6]
-- (elbow, wrist and tip, x and y in [-1, 1], y down). options: split ("training"), episodes (100), first (0), tasks,
-- size (64), seed (0), looks, horizon (8), back, geometry (false).
---@param options? table
---@return table
function M.chunks(options) return chunks.examples(M, options) end

--- Chunks of actions [n, horizon, 4] in [-1, 1], as policies draw them, as the environment takes them.
M.actions = chunks.actions

--- What may be in front at a place, from the back to the front.
M.layers = chunks.layers

--- Lets a policy act in the same 200 episodes every time, all at once: { success (share), by_kind, episodes (booleans),
-- steps, looks (means), strips }. act(seen) gets images u8 [n, 3, size, size], states f32 [n, 4], before (the states
-- at the last look, at the first one the same), tasks (a list), episodes and worlds of those that go on, and returns
-- what each does up to its next look: [n, k, 4] or a list of [k, 4]. options: split ("validation"), episodes (200),
-- first (0), tasks, size (64), seed (0), looks (120: after so many an episode is over), strips (0: of how many episodes
-- the pictures are kept), change (a function of the pictures).
---@param act fun(seen: table): Tensor|Tensor[]
---@param options? table
---@return table
function M.trial(act, options) return require("tycho.datasets.arm.trial").run(M, act, options) end

--- The strips of a trial as rows of `columns` (8) pictures for ty.plot.grid, u8 [strips * columns, 3, size, size]: the
-- first ones of each, white after its end.
---@param strips Tensor[]
---@param columns? integer
---@return Tensor
function M.film(strips, columns) return require("tycho.datasets.arm.sheet").film(strips, columns) end

--- Draws episodes into a PNG file, each a strip of its pictures with its words. datasets.show "arm" calls it; options:
-- path, split, count (episodes), columns (pictures of a strip), seed, size.
---@param options? table
---@return string path
function M.show(options) return require("tycho.datasets.arm.sheet").write(M, options) end

return M
