--- The zoo's policy of the toy arm: how it is trained from the expert's episodes, and how it acts.
--
--     local model = zoo.load "arm-policy"
--     local result = datasets.arm.trial(zoo.arm.acts(model), zoo.arm.rules { episodes = 200 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"

local nn = ty.nn
local M = {}

local function check_model(who, model)
  arguments.expect(who, "model", model, "a module")
  if type(model.config) ~= "table" or not model.action_head or not model.language_model then
    arguments.fail("%s: model: expected a models.ActionModel, got %s", who, arguments.describe(model))
  end
end

--- How many noise levels the diffusion of actions has in training, and steps of DDIM in acting.
M.levels, M.steps = 100, 10

--- The process that draws plans: the network says what the clean plan is.
---@return Process
function M.process()
  return diffusion.DDPM { steps = M.levels, predict = "sample", drop = 0, clip = 1 }
end

--- The words of a model, which number texts.
---@param model ActionModel
---@return table words
function M.words(model)
  check_model("zoo.arm.words", model)
  return diffusion.policy.words(model.config.words)
end

--- The words of the first `count` training episodes of all tasks, in the order of the alphabet.
---@param count integer
---@return string[]
function M.vocabulary(count)
  arguments.expect("zoo.arm.vocabulary", "count", count, "an integer in [1, 10000]")
  local env, texts, list = datasets.arm.env(), {}, {}
  for i = 0, count - 1 do
    env:begin(i)
    texts[i + 1] = env.task.text
  end
  for word, number in pairs(diffusion.policy.words(texts).number) do list[number - 1] = word end
  return list
end

--- Pictures u8 as a model gets them.
---@param images Tensor
---@param device? string
---@return Tensor
function M.pictures(images, device)
  arguments.expect("zoo.arm.pictures", "images", images, "a tensor")
  return images:to({ device = device or images.device }):to "f32" / 127.5 - 1
end

--- What a model gets of what is seen: { images (u8), states, tasks (a list) } as numbers on its device.
---@param model ActionModel
---@param seen table
---@return {images: Tensor, words: Tensor, states: Tensor}
function M.observation(model, seen)
  check_model("zoo.arm.observation", model)
  arguments.expect("zoo.arm.observation", "seen", seen, "a table")
  local to = { device = model:device() }
  return { images = M.pictures(seen.images, to.device), states = seen.states:to(to),
    words = M.words(model):encode(seen.tasks, model.config.phrase_length):to(to) }
end

-- ---- training ----

-- A model in training: it also says in which place of the picture the named thing and the goal are, and where in that
-- place, by what the tower sees alone. The simulator knows.
local Student = nn.module "ArmStudent"

function Student:init(model)
  self.model = model
  self.finder = nn.Linear(model.language_model.config.hidden_size, 6)
end

-- The loss of places [n, 2, 2] in [-1, 1] (2: none) by what is seen [n, side * side, width].
function Student:find(seen, places)
  local n, cells = seen.shape[1], seen.shape[2]
  local side = math.tointeger(cells ^ 0.5)
  local found = self.finder(seen)
  local grid = ((places + 1) * (side / 2)):clamp(0, side - 0.001)
  local cell = grid:floor()
  local number = (cell:select(2, 1) * side + cell:select(2, 0)):to "i64" -- [n, 2]
  local there = places:select(2, 0):lt(1.5)
  local label = ty.where(there, number, -100):to "i64"
  local loss = nn.cross_entropy(found:narrow(2, 0, 2):transpose(1, 2):reshape(2 * n, cells), label:flatten())
  local offsets = found:narrow(2, 2, 4):reshape(n, cells, 2, 2)
  local index = number:reshape(n, 1, 2, 1):expand(n, 1, 2, 2)
  local off = (offsets:gather(1, index):squeeze(1) - (grid - cell - 0.5)):square():sum(-1)
  return loss + (off * there:to "f32"):mean() * 4
end

--- Trains a model on the expert's episodes, drawn as they are needed. options: first (500: steps in which the tower
-- alone learns where things are), steps (4000), batch (32; 64 in the first), lr (1e-3: the peak; warmed up, then along
-- a cosine; twice that in the first), samples (4: noised plans of each look), tasks (kinds), seed (0), pool (1500:
-- episodes of which batches are drawn at a time), looks (8: of an episode), finder (0.5: weight of the loss of places),
-- drop (0.15: how often a layer of the decoder but the first and the last is left out in a step: Fan et al. 2020,
-- "Reducing Transformer Depth on Demand with Structured Dropout"), evaluate (a function of the step and the model,
-- called every `every` steps), every (1000). Returns { loss, finder: means of the last tenth; seconds of a step }.
---@param model ActionModel
---@param options? table
---@return table report
function M.train(model, options)
  local who = "zoo.arm.train"
  check_model(who, model)
  local none = arguments.none
  local o = arguments.read(who, options, { first = 500, steps = 4000, batch = 32, lr = 1e-3, samples = 4,
    tasks = none, seed = 0, pool = 1500, looks = 8, finder = 0.5, drop = 0.15, evaluate = none, every = 1000 }, {
    first = "an integer >= 0", steps = "an integer >= 1",
    batch = "an integer >= 1", lr = "a number > 0", samples = "an integer >= 1", tasks = "a list of strings",
    seed = "an integer", pool = "an integer >= 1", looks = "an integer >= 1", finder = "a number >= 0",
    drop = "a number in [0, 1)", evaluate = "a function", every = "an integer >= 1" })
  ty.manual_seed(o.seed)
  local student = Student(model):to(model:device()):train()
  local process, words, device = M.process(), M.words(model), model:device()
  local function optimizer_of(lr, steps)
    return ty.optim.AdamW(student:parameters(), { lr = lr, weight_decay = 0.01, clip_norm = 1,
      schedule = ty.optim.cosine { steps = steps, warmup = math.min(200, steps // 10) } })
  end
  local all = model.language_model.model.layers
  local report, counted = { loss = 0, finder = 0 }, 0
  local pool, at, order, episode = nil, 0, nil, 0
  local function draw(size)
    if not pool or at + size > pool.images.shape[1] then
      pool = datasets.arm.plans { episodes = o.pool, first = episode, tasks = o.tasks, looks = o.looks,
        size = model.config.image_size, horizon = model.config.horizon, seed = o.seed }
      pool.words = words:encode(pool.tasks, model.config.phrase_length)
      for _, key in ipairs { "images", "states", "plans", "places", "words" } do ty.keep(pool[key]) end
      episode, at, order = episode + o.pool, 0, ty.keep(ty.randperm(pool.images.shape[1]))
    end
    local rows, batch = order:narrow(0, at, size), {}
    for _, key in ipairs { "images", "states", "plans", "places", "words" } do
      batch[key] = pool[key]:index_select(0, rows):to { device = device }
    end
    at = at + size
    return batch
  end
  if o.first > 0 then
    local optimizer = optimizer_of(2 * o.lr, o.first)
    for step, _, log in ty.train.steps(nil, o.first, { title = "arm's tower" }) do
      local batch = draw(2 * o.batch)
      local loss = student:find(model:see(M.pictures(batch.images), batch.words), batch.places)
      optimizer:step(loss)
      if step % 50 == 0 then log { loss = loss:item() } end
    end
  end
  local optimizer, began = optimizer_of(o.lr, o.steps), os.clock()
  for step, _, log in ty.train.steps(nil, o.steps, { title = "arm" }) do
    local batch = draw(o.batch)
    local images = M.pictures(batch.images)
    local seen = model:see(images, batch.words)
    local list = {}
    for i, layer in ipairs(all) do
      if i == 1 or i == #all or ty.rand(1):item() >= o.drop then list[#list + 1] = layer end
    end
    local query = model:decode(model:embed { images = images, words = batch.words, states = batch.states, seen = seen },
      { list = list })
    local network = { encode = function() return { query = query } end,
      denoise = function(_, x, t, condition) return model:denoise(x, t, condition) end }
    local loss = diffusion.policy.loss(process, network, {}, batch.plans, { samples = o.samples })
    local found = o.finder > 0 and student:find(seen, batch.places) or loss * 0
    optimizer:step(loss + found * o.finder)
    if step > o.steps - math.max(1, o.steps // 10) then
      counted, report.loss, report.finder = counted + 1, report.loss + loss:item(), report.finder + found:item()
    end
    if step % 50 == 0 then log { loss = loss:item(), finder = found:item() } end
    if o.evaluate and step % o.every == 0 then
      o.evaluate(step, model:eval())
      student:train()
      ty.manual_seed(o.seed) -- whatever it drew
    end
  end
  report.seconds, report.loss, report.finder = (os.clock() - began) / o.steps, report.loss / counted,
    report.finder / counted
  model:eval()
  return report
end

--- Trains a model further, with what train() takes, and leaves it with the mean of its weights before and after: what a
-- stretch with many layers left out teaches, without all that it costs. Izmailov et al. 2018, "Averaging Weights Leads
-- to Wider Optima and Better Generalization".
---@param model ActionModel
---@param options? table
---@return table report
function M.settle(model, options)
  check_model("zoo.arm.settle", model)
  local before, mean = {}, {}
  for name, t in pairs(model:state_dict()) do before[name] = t:detach():clone() end
  local report = M.train(model, options)
  for name, t in pairs(model:state_dict()) do mean[name] = before[name] * 0.5 + t:detach() * 0.5 end
  model:load_state_dict(mean)
  return report
end

-- ---- acting ----

--- Steps of a way that are done before the next look, at most.
M.stride = 8

--- The options of datasets.arm.trial for this policy, with those that are given.
---@param options? table
---@return table
function M.rules(options)
  arguments.expect("zoo.arm.rules", "options", options, "a table or nil")
  local rules = { looks = 40 }
  for key, value in pairs(options or {}) do rules[key] = value end
  return rules
end

--- The actions [k, 4] from states [n, 4] to the first waypoints of plans [n, horizon, 3], a list.
---@param states Tensor
---@param plans Tensor
---@return Tensor[]
function M.ways(states, plans)
  arguments.expect("zoo.arm.ways", "states", states, "a tensor")
  arguments.expect("zoo.arm.ways", "plans", plans, "a tensor")
  if plans.ndim ~= 3 or plans.shape[3] ~= 3 or plans.shape[2] < 1 or states.ndim ~= 2 or states.shape[2] ~= 4
    or states.shape[1] ~= plans.shape[1] then
    arguments.fail("zoo.arm.ways: expected states [n, 4] and plans [n, horizon, 3], got %s and %s",
      arguments.describe(states), arguments.describe(plans))
  end
  local list = {}
  for i, p in ipairs(plans:select(1, 0):to("cpu"):tolist()) do
    local x, y = datasets.arm.poses.from_picture(p[1], p[2])
    list[i] = datasets.arm.poses.way(states:select(0, i - 1), { x = x, y = y, hand = p[3] > 0 and 1 or -1 }, M.stride)
  end
  return list
end

--- Plans [n, horizon, 3] for what a model gets of what is seen (observation()), and their condition. network: with
-- encode and denoise; the model itself. options: steps (10), seeds (of the noise, one each).
---@param model ActionModel
---@param network? table
---@param observation table
---@param options? table
---@return Tensor plans
---@return table condition
function M.draw(model, network, observation, options)
  local who = "zoo.arm.draw"
  check_model(who, model)
  arguments.expect(who, "network", network, "a table or nil")
  arguments.expect(who, "observation", observation, "a table")
  local o = arguments.read(who, options, { steps = M.steps, seeds = arguments.none }, { steps = "an integer >= 1",
    seeds = "a list of integers" })
  return diffusion.policy.draw(M.process(), network or model, observation, { model.config.horizon,
    model.config.action_size }, { steps = o.steps, seeds = o.seeds })
end

--- What datasets.arm.trial asks for. Noise depends on episode and look alone, so that two policies that see the same
-- draw the same. network: with encode and denoise; the model itself, or what a method made of it. options: steps (10,
-- of DDIM), seed (0), watch (a function of what is seen, the plans and their condition).
---@param model ActionModel
---@param network? table
---@param options? table
---@return fun(seen: table): Tensor[]
function M.acts(model, network, options)
  local who, none = "zoo.arm.acts", arguments.none
  check_model(who, model)
  arguments.expect(who, "network", network, "a table or nil")
  local o = arguments.read(who, options, { steps = M.steps, seed = 0, watch = none }, { steps = "an integer >= 1",
    seed = "an integer", watch = "a function" })
  local looks = 0
  return function(seen)
    looks = looks + 1
    local seeds = {}
    for i, episode in ipairs(seen.episodes) do seeds[i] = (o.seed * 1000 + looks) * 100000 + episode end
    local observation = M.observation(model, seen)
    observation.episodes = seen.episodes
    local plans, condition = M.draw(model, network, observation, { steps = o.steps, seeds = seeds })
    if o.watch then o.watch(seen, plans, condition) end
    return M.ways(seen.states, plans)
  end
end

-- ---- pairs of looks ----

--- Batches of looks at training episodes and of what was seen a stride before: a function of the step, for
-- vlm.token_cache.fit. Each is { now, before (observations), plans }. options: episodes (400: that they come from),
-- seed (0), tasks (kinds), batch (16).
---@param model ActionModel
---@param options? table
---@return fun(step: integer): table
function M.pairs(model, options)
  local who = "zoo.arm.pairs"
  check_model(who, model)
  local o = arguments.read(who, options, { episodes = 400, seed = 0, tasks = arguments.none, batch = 16 }, {
    episodes = "an integer >= 1", seed = "an integer", tasks = "a list of strings", batch = "an integer >= 1" })
  local pool = datasets.arm.plans { episodes = o.episodes, seed = o.seed, tasks = o.tasks, looks = 4, back = M.stride,
    size = model.config.image_size, horizon = model.config.horizon }
  pool.words = M.words(model):encode(pool.tasks, model.config.phrase_length)
  return function()
    local rows = ty.randint(0, pool.images.shape[1], { o.batch })
    local function take(name) return pool[name]:index_select(0, rows):to { device = model:device() } end
    local words = take "words"
    return { now = { images = M.pictures(take "images"), words = words, states = take "states" },
      before = { images = M.pictures(take "before"), words = words, states = take "states_before" },
      plans = take "plans" }
  end
end

--- The loss that the policy was trained with, of plans of a batch under a query's state: for vlm.token_cache.fit.
---@param model ActionModel
---@return fun(query: Tensor, batch: table): Tensor
function M.imitation(model)
  check_model("zoo.arm.imitation", model)
  local process = M.process()
  return function(query, batch)
    local network = { encode = function() return { query = query } end,
      denoise = function(_, x, t, condition) return model:denoise(x, t, condition) end }
    return (diffusion.policy.loss(process, network, {}, batch.plans, { samples = 4 }))
  end
end

--- The cosine that a share of the picture's tokens exceeds, of what the tower makes of them and made a stride before.
---@param model ActionModel
---@param pairs_of fun(step: integer): table  of pairs()
---@param share number
---@param batches? integer  (8)
---@return number
function M.similar_above(model, pairs_of, share, batches)
  local who = "zoo.arm.similar_above"
  check_model(who, model)
  arguments.expect(who, "pairs_of", pairs_of, "a function")
  arguments.expect(who, "share", share, "a number in [0, 1]")
  return ty.no_grad(function()
    local list = {}
    for step = 1, batches or 8 do
      local batch = pairs_of(step)
      local a = model:see(batch.now.images, batch.now.words)
      local b = model:see(batch.before.images, batch.before.words)
      list[step] = ((a * b):sum(-1) / (a:square():sum(-1) * b:square():sum(-1)):sqrt():clamp(1e-12)):flatten()
    end
    local sorted = ty.concat(list, 0):sort(0, true)
    return sorted:select(0, math.min(sorted.shape[1] - 1, math.floor(share * sorted.shape[1]))):item()
  end)
end

-- ---- looking at it ----

--- A picture [3, h, w] in which places of a square grid are as bright as lit, f32 [places], says: dark at 0.
---@param picture Tensor
---@param lit Tensor
---@return Tensor
function M.shaded(picture, lit)
  local who = "zoo.arm.shaded"
  arguments.expect(who, "picture", picture, "a tensor")
  arguments.expect(who, "lit", lit, "a tensor")
  local side = math.tointeger((lit.ndim == 1 and lit.shape[1] or 0) ^ 0.5)
  if picture.ndim ~= 3 or not side or side == 0 then
    arguments.fail("%s: expected a picture [3, h, w] and lit [places] of a square grid, got %s and %s", who,
      arguments.describe(picture), arguments.describe(lit))
  end
  local map = ty.interpolate(lit:reshape(1, 1, side, side), { picture.shape[2], picture.shape[3] }, 0, "nearest")
  return picture * (map:squeeze(0) * 0.75 + 0.25)
end

--- Keeps what an episode saw, with a mark where its plan goes next: for `watch` of acts(). film: a table that gets a
-- list of pictures u8 [3, size, size] for each of the first `count` episodes that come, and lists these as film.order,
-- which begins as {}. paint: a function of a picture
-- f32 [3, size, size] and its row, which is called before the mark is made.
---@param film table
---@param seen table
---@param plans Tensor
---@param count integer
---@param paint? fun(picture: Tensor, row: integer): Tensor
function M.film(film, seen, plans, count, paint)
  arguments.expect("zoo.arm.film", "film", film, "a table")
  arguments.expect("zoo.arm.film", "seen", seen, "a table")
  arguments.expect("zoo.arm.film", "plans", plans, "a tensor")
  arguments.expect("zoo.arm.film", "count", count, "an integer >= 1")
  local size, next_points = seen.images.shape[4], plans:select(1, 0):to("cpu"):tolist()
  for i, episode in ipairs(seen.episodes) do
    if not film[episode] and #film.order < count then
      film[episode] = {}
      table.insert(film.order, episode)
    end
    if film[episode] then
      local picture = seen.images:select(0, i - 1):to "f32"
      picture = paint and paint(picture, i) or picture:clone()
      local x, y = ((next_points[i][1] + 1) * size / 2) // 1 | 0, ((next_points[i][2] + 1) * size / 2) // 1 | 0
      local colour = next_points[i][3] > 0 and { 255, 0, 255 } or { 255, 255, 255 }
      for away = -2, 2 do
        for _, at in ipairs { { x + away, y }, { x, y + away } } do
          if at[1] >= 0 and at[1] < size and at[2] >= 0 and at[2] < size then
            for c = 1, 3 do picture:select(0, c - 1):select(0, at[2]):narrow(0, at[1], 1):fill_(colour[c]) end
          end
        end
      end
      table.insert(film[episode], ty.keep(picture:to "u8"))
    end
  end
end

--- What film() kept as pictures u8 [episodes * columns, 3, size, size], an episode a row, white where it is over.
---@param film table
---@param columns integer
---@return Tensor
function M.strips(film, columns)
  arguments.expect("zoo.arm.strips", "film", film, "a table")
  arguments.expect("zoo.arm.strips", "columns", columns, "an integer >= 1")
  if type(film.order) ~= "table" or #film.order == 0 then
    arguments.fail("zoo.arm.strips: film: expected one that film() filled, got %s", arguments.describe(film))
  end
  local list = {}
  for _, episode in ipairs(film.order) do
    for k = 1, columns do list[#list + 1] = film[episode][k] or ty.full_like(film[episode][1], 255) end
  end
  return ty.stack(list, 0)
end

return M
