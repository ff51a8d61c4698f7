--- Training video models over grids: many coarse clips at once first, few fine ones last, each step with about the same
-- work. Wu et al. 2020, "A Multigrid Method for Efficiently Training Video Models"; shares of epochs and rates as in
-- the authors' program (facebookresearch/SlowFast).
--
--     local plan = multigrid.schedule { frames = 16, size = 32, batch = 8, steps = 1000, milestones = { 500, 800 } }
--     multigrid.fit(model, clips, plan, { lr = 0.1 })
--
-- The long cycle goes from few frames of small pictures to the whole clip, within each stage of the rate; the short
-- cycle changes the size from step to step, half, 1 / sqrt 2 and whole in turn. Where a clip has fewer numbers, the
-- batch has more clips. The rate grows with the batch of the long cycle, and batch norms see groups of one size.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local classify = require "tycho.vision.classify"
local sub_batch_norm = require "tycho.vision.sub_batch_norm"

local none = arguments.none
local M = {}

-- ---- the schedule ----

--- What a step is to train on.
---@class Grid
---@field batch integer   clips
---@field frames integer
---@field size integer    height and width
---@field rate number     factor of the learning rate
---@field groups integer  of clips, for the statistics of batch norms
---@field stage integer   of the rate, from 1

--- The grids of all steps, of multigrid.schedule and multigrid.fixed. #schedule are the steps.
---@class MultigridSchedule
---@field phases table[]  { steps, frames, rate, groups, stage, grids: the short cycle } each
---@field clips integer   that all steps see
local Schedule = {}
Schedule.__index = Schedule
Schedule.__name = "MultigridSchedule"

function Schedule:__len() return self.steps end

function Schedule:__tostring()
  local lines = { ("%d steps, %d clips"):format(self.steps, self.clips) }
  for _, phase in ipairs(self.phases) do
    local shapes = {}
    for i, g in ipairs(phase.grids) do shapes[i] = ("%d x %d x %d^2"):format(g.batch, g.frames, g.size) end
    lines[#lines + 1] = ("%6d steps at rate %.3g of %s"):format(phase.steps, phase.rate, table.concat(shapes, ", "))
  end
  return table.concat(lines, "\n")
end

local function seal(phases, warmup)
  local self = setmetatable({ phases = phases, steps = 0, clips = 0, warmup = warmup }, Schedule)
  for _, phase in ipairs(phases) do
    phase.first = self.steps
    self.steps = self.steps + phase.steps
    for step = phase.first, self.steps - 1 do
      self.clips = self.clips + phase.grids[step % #phase.grids + 1].batch
    end
  end
  return self
end

--- The grid of a step, from 0; after the last, its grid goes on.
---@param step integer
---@return Grid
function Schedule:at(step)
  arguments.expect("MultigridSchedule:at", "step", step, "an integer >= 0")
  local phase = self.phases[1]
  for _, one in ipairs(self.phases) do
    if one.first <= step and one.steps > 0 then phase = one end
  end
  local grid = phase.grids[step % #phase.grids + 1]
  local up = step < self.warmup and (step + 1) / self.warmup or 1
  return { batch = grid.batch, frames = grid.frames, size = grid.size, rate = up * phase.rate, groups = phase.groups,
    stage = phase.stage }
end

--- The factor of the learning rate by the number of steps done: an optimizer's `schedule`.
---@return fun(step: integer): number
function Schedule:rate()
  return function(step) return self:at(step).rate end
end

--- The shapes that occur: { batch, frames, size, steps } each, in the order of their first step.
---@return table[]
function Schedule:shapes()
  local list, known = {}, {}
  for step = 0, self.steps - 1 do
    local g = self:at(step)
    local key = ("%d %d %d"):format(g.batch, g.frames, g.size)
    if not known[key] then
      known[key] = { batch = g.batch, frames = g.frames, size = g.size, steps = 0 }
      list[#list + 1] = known[key]
    end
    known[key].steps = known[key].steps + 1
  end
  return list
end

local shared = { frames = none, size = none, batch = none, steps = none, milestones = {}, gamma = 0.1, warmup = 0 }
local kinds = { frames = "an integer >= 1", size = "an integer >= 1", batch = "an integer >= 1",
  steps = "an integer >= 1", milestones = "a list of integers >= 1", gamma = "a number in [0, 1]",
  warmup = "an integer >= 0", long = "a list of pairs of numbers", short = "a list of numbers",
  epochs = "a finite number > 0", group = "an integer >= 1", multiple = "an integer >= 1" }

local function read(who, options, defaults)
  local all = {}
  for _, list in ipairs { shared, defaults } do for key, value in pairs(list) do all[key] = value end end
  local o = arguments.read(who, options, all, kinds)
  for _, name in ipairs { "frames", "size", "batch", "steps" } do arguments.expect(who, name, o[name], kinds[name]) end
  local before = 0
  for i, milestone in ipairs(o.milestones) do
    if milestone <= before or milestone >= o.steps then
      arguments.fail("%s: milestones[%d]: expected more than %d and less than the %d steps, got %d", who, i, before,
        o.steps, milestone)
    end
    before = milestone
  end
  return o
end

--- The schedule that a multigrid one is compared with: one shape, and the rate times gamma at each milestone. options:
-- frames, size, batch, steps, milestones ({}), gamma (0.1), warmup (0: steps over which the rate rises).
---@param options table
---@return MultigridSchedule
function M.fixed(options)
  local o = read("multigrid.fixed", options, {})
  local phases, before = {}, 0
  for stage = 1, #o.milestones + 1 do
    local now = o.milestones[stage] or o.steps
    phases[stage] = { steps = now - before, rate = o.gamma ^ (stage - 1), groups = 1, stage = stage,
      grids = { { batch = o.batch, frames = o.frames, size = o.size } } }
    before = now
  end
  return seal(phases, o.warmup)
end

-- The short cycle on a grid of the long one: batches as many times as the whole clip has more numbers.
local function short_cycle(o, time, space)
  local frames, grids, sum = math.max(1, math.floor(o.frames * time + 0.5)), {}, 0.0
  local shares = table.move(o.short, 1, #o.short, 1, {})
  shares[#shares + 1] = space
  for i, share in ipairs(shares) do
    share = math.min(share, space)
    local side = math.floor(o.size * share / o.multiple + 0.5) * o.multiple
    local more = math.max(1, math.floor(o.frames / (frames * share ^ 2) + 0.5))
    grids[i] = { batch = more * o.batch, frames = frames, size = math.max(o.multiple, side), more = more }
    sum = sum + more
  end
  return grids, sum / #grids
end

--- A multigrid schedule in place of multigrid.fixed with the same frames, size, batch, steps and milestones. Each stage
-- but the last goes once through the long cycle, with as many steps on each of its grids; the last one is for tuning
-- on whole clips, with the rate of the stage before for half of its steps. options besides these:
--   long      shares of frames and of size ({ { 1/4, sqrt 1/2 }, { 1/2, sqrt 1/2 }, { 1/2, 1 }, { 1, 1 } })
--   short     shares of size that come before the long cycle's own in the short cycle ({ 1/2, sqrt 1/2 })
--   epochs    times as many clips as the fixed schedule sees (1.5)
--   group     clips by whose statistics batch norms go (batch)
--   multiple  sizes are multiples of it (1)
---@param options table
---@return MultigridSchedule
function M.schedule(options)
  local who, half = "multigrid.schedule", math.sqrt(0.5)
  local o = read(who, options, { long = { { 0.25, half }, { 0.5, half }, { 0.5, 1 }, { 1, 1 } }, short = { 0.5, half },
    epochs = 1.5, group = none, multiple = 1 })
  if #o.milestones == 0 then
    arguments.fail("%s: milestones: expected at least one, after which comes the last stage, got none", who)
  elseif #o.long == 0 then
    arguments.fail("%s: long: expected at least one pair, got none", who)
  end
  local group = o.group or o.batch
  if o.batch % group ~= 0 then
    arguments.fail("%s: group: expected a divisor of the batch, %d, got %d", who, o.batch, group)
  end
  local cycle, sum = {}, 0.0
  for i, shares in ipairs(o.long) do
    for k = 1, 2 do arguments.expect(who, ("long[%d][%d]"):format(i, k), shares[k], "a number in (0, 1]") end
    local grids, average = short_cycle(o, shares[1], shares[2])
    local own = grids[#grids]
    cycle[i] = { grids = grids, average = average, more = own.more, groups = own.more * o.batch // group }
    sum = sum + average
  end
  -- Steps are counted as if the fixed schedule's were 1 each, and drawn out in the end.
  local last = o.milestones[#o.milestones]
  local saving = sum / #cycle -- steps of the fixed schedule for one of ours
  local tuning = (o.steps - last) / saving
  local clips = last + tuning * cycle[#cycle].average
  local stretch = o.epochs * o.steps / clips
  local phases, total, done = {}, 0.0, 0
  local function add(steps, one, stage, rate)
    total = total + steps * stretch
    local now = math.floor(total + 0.5)
    phases[#phases + 1] = { steps = now - done, rate = rate, groups = one.groups, stage = stage, grids = one.grids }
    done = now
  end
  local before = 0
  for stage, milestone in ipairs(o.milestones) do
    for _, one in ipairs(cycle) do
      add((milestone - before) / sum, one, stage, o.gamma ^ (stage - 1) * one.more)
    end
    before = milestone
  end
  local whole, stage = cycle[#cycle], #o.milestones + 1
  add(tuning / 2, whole, stage, o.gamma ^ (stage - 2) * whole.more)
  add(tuning / 2, whole, stage, o.gamma ^ (stage - 1) * whole.more)
  return seal(phases, o.warmup)
end

-- ---- clips on a grid ----

--- Clips of so many frames and of this size, as networks take them: video u8 or float [n, frames, c, h, w] to f32 [n,
-- c, frames, size, size] of about -1 to 1 (u8; float stays as it is). Frames are evenly spaced over the whole clip;
-- pictures are averaged down. options: random (false: from a frame in the middle of the first ones; true: from a drawn
-- one, for each clip another), center (false; true: less the clip's mean, channel by channel: what is behind all that
-- moves is then near 0).
---@param video Tensor
---@param grid { frames: integer, size: integer }
---@param options? { random?: boolean, center?: boolean }
---@return Tensor
function M.resample(video, grid, options)
  local who = "multigrid.resample"
  local o = arguments.read(who, options, { random = false, center = false })
  arguments.expect(who, "video", video, "a tensor")
  arguments.expect(who, "grid", grid, "a table")
  if video.ndim ~= 5 then
    arguments.fail("%s: video: expected [n, frames, c, h, w], got %s", who, arguments.describe(video))
  end
  local n, all, c, h, w = table.unpack(video.shape)
  local frames, size = grid.frames, grid.size
  if frames > all or size > h or size > w then
    arguments.fail("%s: grid: expected at most %d frames of %d x %d, got %d of %d x %d", who, all, h, w, frames, size,
      size)
  end
  if frames < all then
    local stride, list = all // frames, {}
    local spare = all - (frames - 1) * stride
    local first = o.random and ty.randint(0, spare, { n }):tolist()
    for i = 0, n - 1 do
      local at = first and first[i + 1] or (spare - 1) // 2
      for t = 0, frames - 1 do list[#list + 1] = i * all + at + t * stride end
    end
    video = video:reshape(n * all, c, h, w):index_select(0, ty.tensor(list, { dtype = "i64" }):to(video.device))
  end
  video = video:reshape(n * frames, c, h, w)
  if not video:is_floating_point() then video = video:to "f32" * (1 / 127.5) - 1 end
  if size < h or size < w then
    video = ty.interpolate(video, { size = { size, size }, mode = "bilinear", antialias = true })
  end
  video = video:reshape(n, frames, c, size, size):transpose(1, 2):contiguous()
  return o.center and video - video:mean({ 2, 3, 4 }, { keepdim = true }) or video
end

--- Batches of a schedule, for train.fit: made by multigrid.loader.
---@class MultigridLoader
---@field step integer  the next one, from 0
local Loader = {}
Loader.__index = Loader
Loader.__name = "MultigridLoader"

local function check_schedule(who, schedule)
  if getmetatable(schedule) ~= Schedule then
    arguments.fail("%s: schedule: expected one of multigrid.schedule, got %s", who, arguments.describe(schedule))
  end
end

local function check_dataset(who, dataset)
  if type(dataset) ~= "table" or type(dataset.batch) ~= "function" then
    arguments.fail("%s: dataset: expected a data set of clips, got %s", who, arguments.describe(dataset))
  end
end

--- A loader that gives every step the batch of its grid: { image, label, grid }, image f32 [n, c, frames, size, size].
-- Clips come in an order that is drawn anew for every epoch. options: seed (0), video and label (the fields' names,
-- "video" and "label"), center (false, see resample), device (none: where the data set's batches are).
---@param dataset table  of clips [frames, c, h, w]
---@param schedule MultigridSchedule
---@param options? table
---@return MultigridLoader
function M.loader(dataset, schedule, options)
  local who = "multigrid.loader"
  local o = arguments.read(who, options, { seed = 0, video = "video", label = "label", center = false,
    device = none },
    { seed = "an integer", device = "a string" })
  check_dataset(who, dataset)
  check_schedule(who, schedule)
  o.dataset, o.schedule, o.step, o.position = dataset, schedule, 0, 0
  return setmetatable(o, Loader)
end

-- Positions of the next n clips, i64 [n], over the end of epochs.
local function take(self, n)
  local size, parts = #self.dataset, {}
  while n > 0 do
    local epoch, at = self.position // size, self.position % size
    if self.epoch ~= epoch then
      self.order = ty.data.with_seed(2 * (self.seed ~ (epoch << 32)), function() return ty.keep(ty.randperm(size)) end)
      self.epoch = epoch
    end
    local count = math.min(n, size - at)
    parts[#parts + 1] = self.order:narrow(0, at, count)
    n, self.position = n - count, self.position + count
  end
  return #parts == 1 and parts[1] or ty.concat(parts, 0)
end

--- The batch of the next step.
---@return { image: Tensor, label: Tensor, grid: Grid }
function Loader:next()
  local grid = self.schedule:at(self.step)
  local batch = self.dataset:batch(take(self, grid.batch))
  for _, name in ipairs { self.video, self.label } do
    if not ty.is_tensor(batch[name]) then
      arguments.fail("MultigridLoader: expected a tensor in the field '%s' of a batch, got %s", name,
        arguments.describe(batch[name]))
    end
  end
  local image = ty.data.with_seed(2 * (self.seed ~ (self.step << 32)) + 1, function()
    return M.resample(batch[self.video], grid, { random = true, center = self.center })
  end)
  self.step = self.step + 1
  local label = batch[self.label]
  if self.device then image, label = image:to { device = self.device }, label:to { device = self.device } end
  return { image = image, label = label, grid = grid }
end

--- Where the loader stands.
function Loader:state_dict() return { step = self.step, position = self.position, seed = self.seed } end

--- Goes to where a loader with the same data set and schedule stood.
---@param state { step: integer, position: integer, seed: integer }
function Loader:load_state_dict(state)
  local who = "MultigridLoader:load_state_dict"
  arguments.expect(who, "state", state, "a table")
  for _, name in ipairs { "step", "position" } do arguments.expect(who, name, state[name], "an integer >= 0") end
  arguments.expect(who, "seed", state.seed, "an integer")
  self.step, self.position, self.seed, self.epoch = state.step, state.position, state.seed, nil
end

-- ---- training ----

local own = { lr = 0.1, momentum = 0.9, weight_decay = 1e-4, smoothing = 0.0, seed = 0, video = "video",
  label = "label", center = false }
local own_kinds = { lr = "a finite number > 0", momentum = "a number in [0, 1)", weight_decay = "a finite number >= 0",
  smoothing = "a number in [0, 1)", seed = "an integer" }

--- Trains a classifier of clips along a schedule, by SGD with momentum, whose rate follows the schedule; batch norms
-- get its groups and are what they were afterwards. options: lr (0.1, of the whole clips' batch), momentum (0.9),
-- weight_decay (1e-4), smoothing (0, of labels), seed (0), video and label (names of fields), center (false, see
-- resample), and those of train.fit.
---@param model Module
---@param dataset table  of clips [frames, c, h, w] and labels
---@param schedule MultigridSchedule
---@param options? table
---@return number[] losses
function M.fit(model, dataset, schedule, options)
  local who = "multigrid.fit"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "options", options, "a table or nil")
  local given, rest = {}, { title = "clips", clip_norm = 0 }
  for key, value in pairs(options or {}) do
    if own[key] ~= nil then given[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, given, own, own_kinds)
  local loader = M.loader(dataset, schedule, { seed = o.seed, video = o.video, label = o.label,
    center = o.center, device = model:device() })
  sub_batch_norm.wrap(model)
  rest.lr, rest.steps, rest.schedule = o.lr, #schedule, schedule:rate()
  rest.optimizer = rest.optimizer or function(network, with)
    with.momentum, with.weight_decay, with.nesterov = o.momentum, o.weight_decay, o.momentum > 0
    return ty.optim.SGD(network:parameters(), with)
  end
  function rest.loss(network, batch)
    sub_batch_norm.groups(network, batch.grid.groups)
    return classify.classifier_loss(network(batch.image), batch.label, o.smoothing)
  end
  local ok, losses = pcall(ty.train.fit, model, loader, rest)
  sub_batch_norm.unwrap(model)
  if not ok then arguments.raise(losses) end
  model:eval()
  return losses
end

--- Share of a data set's clips whose label is predicted, at this grid, 64 at a time.
---@param model Module
---@param dataset table
---@param grid { frames: integer, size: integer }
---@param options? { video?: string, label?: string, center?: boolean }
---@return number accuracy  in [0, 1]
function M.accuracy(model, dataset, grid, options)
  local who = "multigrid.accuracy"
  local o = arguments.read(who, options, { video = "video", label = "label", center = false })
  check_dataset(who, dataset)
  local right, size = 0, #dataset
  for start = 0, size - 1, 64 do
    ty.scope(function()
      local batch = dataset:batch(ty.arange(start, math.min(size, start + 64)))
      local labels = classify.predict(model, M.resample(batch[o.video], grid, { center = o.center }))
      right = right + labels:eq(batch[o.label]):to("i64"):sum():item()
    end)
  end
  return right / size
end

--- Floating-point operations of all steps of a schedule, forward, backward and update, of a model that `make` makes:
-- counted on the meta device, one step of each shape.
---@param schedule MultigridSchedule
---@param make fun(): Module
---@param channels? integer  of a frame (3)
---@return number
function M.flops(schedule, make, channels)
  check_schedule("multigrid.flops", schedule)
  arguments.expect("multigrid.flops", "make", make, "a function")
  local sum = 0.0
  for _, shape in ipairs(schedule:shapes()) do
    local seen = ty.profile.foresee(function(device)
      local model = ty.nn.with_defaults({ device = device }, make)
      local opt = ty.optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
      local image = ty.zeros({ shape.batch, channels or 3, shape.frames, shape.size, shape.size }, { device = device })
      local label = ty.zeros({ shape.batch }, { dtype = "i64", device = device })
      opt:step(classify.classifier_loss(model(image), label))
    end)
    sum = sum + shape.steps * seen.flops
  end
  return sum
end

return M
