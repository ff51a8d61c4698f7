--- The loop of sampling, for all methods: schedule, spacing, solver, guidance and parts are values that it puts
-- together.
--
--     local sampler = diffusion.Sampler { schedule = diffusion.schedule.flow(), predict = "flow",
--       solver = diffusion.solver.heun(), guidance = diffusion.guidance.classifier_free { scale = 3 }, steps = 20 }
--     local pictures = sampler:sample(model, { 16, 1, 8, 8 }, { condition = { labels = labels } })
--
-- A part is a table that stands around one or more of the stages, and never copies the loop:
--
--     start(self, run)                         returns the part's state for this run: run.state[part]
--     call(self, run, next, request)           around a call of the network; next(request) returns its output.
--                                              request: x (the branches one after the other), point, branches (their
--                                              names), condition; samples, where it is for some of them alone (see
--                                              cache/samples.lua)
--     predict(self, run, next, x, point)       around a guided prediction, which next(x, point) makes
--     advance(self, run, next, prediction, to) around the solver's step: next(prediction, to) returns x at `to`. x may
--                                              change its size here, and the points after `to` may change
--     finish(self, run, x)                     after the last step
--
-- Every step is a scope: tensors that a part keeps over steps are taken out of it with ty.keep.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"
local guidances = require "tycho.diffusion.guidance"
local new_run = require "tycho.diffusion.run"
local seeds = require "tycho.diffusion.seeds"
local predictions = require "tycho.diffusion.prediction"
local solvers = require "tycho.diffusion.solver"
local spacings = require "tycho.diffusion.spacing"

local none = ty.nn.none

---@class Sampler
local Sampler = {}
Sampler.__index = Sampler

local function read_clip(clip)
  if not clip then return nil end
  if type(clip) == "function" then return clip end
  if type(clip) == "number" and clip > 0 then
    return function(x0) return x0:clamp(-clip, clip) end
  end
  error(("Sampler: clip: expected false, a number above 0 or a function, got %s"):format(tostring(clip)), 4)
end

--- options: schedule; predict (what the network predicts: "epsilon", "v", "sample", "flow", "edm"), data (0.5, for
-- edm); solver (solver.ddim()); guidance (none; a number: classifier-free with that scale); spacing
-- (spacing.trailing()), steps (50); clip (false; a number: the clean sample's estimate is cut to that range around 0;
-- or a function of it and the point); parts ({}).
---@return Sampler
local function new(options)
  local o = ty.nn.options("Sampler", options, { schedule = none, predict = "epsilon", data = 0.5,
    solver = solvers.ddim(), guidance = none, spacing = spacings.trailing(), steps = 50, clip = false, parts = {} },
    { clip = false }) -- false, a number or a function
  if type(o.schedule) ~= "table" then
    error("Sampler: schedule: expected a schedule such as diffusion.schedule.flow(), got " .. type(o.schedule), 2)
  end
  predictions.check("Sampler", "predict", o.predict)
  if type(o.solver) ~= "table" or not o.solver.step then
    error("Sampler: solver: expected a value of diffusion.solver, got " .. tostring(o.solver), 2)
  end
  if type(o.spacing) ~= "function" then
    error("Sampler: spacing: expected a value of diffusion.spacing, got " .. tostring(o.spacing), 2)
  end
  o.guidance = guidances.read("Sampler", o.guidance)
  o.clip = read_clip(o.clip)
  return setmetatable(o, Sampler)
end

--- The points that sampling visits, from noise to clean.
---@return Point[]
function Sampler:points() return self.spacing(self.schedule, self.steps) end

local function device_of(model) return type(model) == "table" and model.device and model:device() or "cpu" end

-- The branches that guidance may ask for. The null condition is made when it is first wanted: not every model has one.
local function branches_of(model, o)
  local branches = { condition = o.condition }
  for name, condition in pairs(o.branches or {}) do branches[name] = condition end
  return setmetatable(branches, { __index = function(self, name)
    if name ~= "null" then return nil end
    local null = ty.keep(conditions.null(model, o.condition, o.null, o.keep))
    rawset(self, name, null)
    return null
  end })
end

-- What a run begins with: see Sampler:sample.
local function begin(self, who, model, shape, options)
  local o = ty.nn.options(who, options, { condition = {}, null = none, keep = none, branches = none,
    noise = none, x = none, seeds = none, fresh = none, points = none, on_step = none },
    { seeds = "a list of integers", fresh = "a function", on_step = "a function" })
  local seeded
  if o.seeds then
    if #o.seeds ~= shape[1] then
      error(("%s: seeds: expected %d, one for each sample, got %d"):format(who, shape[1], #o.seeds), 3)
    end
    seeded = seeds.noise(o.seeds)
  end
  conditions.check(who, o.condition)
  conditions.check_batch(who, o.condition, shape[1])
  return ty.no_grad(function()
    local run = new_run { model = model, schedule = self.schedule, kind = self.predict, data = self.data,
      guidance = self.guidance, solver = self.solver, clip = self.clip, points = o.points or self:points(),
      condition = o.condition, branches = branches_of(model, o), parts = self.parts, fresh = o.fresh or seeded }
    local x = o.x
    if not x then
      local device = device_of(model)
      x = o.noise or seeded and seeded(0, ty.empty(shape, { device = device })) or ty.randn(shape, { device = device })
      local scale = self.schedule:noise_scale(run.points[1])
      if scale ~= 1 then x = x * scale end
    end
    return run, x, o.on_step
  end)
end

--- Samples of `shape`, by steps from noise. Also returns the run: how often the network was called, what parts noted.
-- options: condition ({}), null and keep (see condition.null), branches (further conditions by name, for guidance.sum),
-- noise (standard noise of that shape to begin with), x (the sample at the first point itself, in the place of noise),
-- seeds (one for each sample: its noise, at the beginning and in every step, depends on it alone and not on the batch),
-- fresh (the noise of the solver's steps: a function (draw, x), draw from 1, that gives standard noise like x), points
-- (instead of those of the spacing), on_step(i, x, run), called after each step, from 1; what it returns as false ends
-- the run there.
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param shape integer[]
---@param options? table
---@return Tensor samples, Run run
function Sampler:sample(model, shape, options)
  local run, x, on_step = begin(self, "Sampler.sample", model, shape, options)
  return ty.no_grad(function()
    -- A part may change the points to come, so their number is asked for anew.
    while run.step + 1 < #run.points do
      run.step = run.step + 1
      local before = x
      x = ty.scope(function()
        return run:advance(run:predict(before, run.points[run.step]), run.points[run.step + 1])
      end)
      if on_step and on_step(run.step, x, run) == false then break end
    end
    for _, part in ipairs(self.parts) do
      if part.finish then part:finish(run, x) end
    end
    return x, run
  end)
end

--- The beginning of sample() alone: the run before its first step, and the sample there. Whoever takes the steps calls
-- run:predict and run:advance, as sample() does, and counts run.step up: ranks do, which wait for each other between
-- the two. options: those of sample() but for on_step.
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param shape integer[]
---@param options? table
---@return Run run
---@return Tensor x
function Sampler:begin(model, shape, options)
  local run, x = begin(self, "Sampler.begin", model, shape, options)
  return run, x
end

return new
