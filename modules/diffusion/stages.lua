--- Sampling in stages of different sizes: Tian et al. 2025, "Training-free Diffusion Acceleration with Bottleneck
-- Sampling". A few steps at full size make the layout, those in the middle run at a low size, where a step costs less,
-- and the last at full size again make the details.
--
--     local part = diffusion.stages.part { stages = {
--       { steps = 4, from = 1, to = 0.8 },
--       { steps = 8, from = 0.85, to = 0.35, scale = 0.5 },
--       { steps = 4, from = 0.6, shift = 1.5 },
--     } }
--     diffusion.Sampler { schedule = schedule, predict = "flow", parts = { part } }:sample(model, shape)
--
-- At each change the clean sample as it is predicted is brought to the next size and gets fresh noise, that of the next
-- stage's first point, which is noisier than where the last stage stopped: what resizing did to the fine parts is under
-- that noise and is drawn anew. The solver begins anew too. The points of the sampler's own spacing are not used.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local WHO = "stages.part"
local M = {}

--- A share of the way from clean (0) to noise (1), moved towards noise: s u / (1 + (s - 1) u). The shift 1 / s takes it
-- back. Esser et al. 2024, section 5.3.2: pictures of m times as many pixels ask for the shift sqrt(m).
---@param u number
---@param s number
---@return number
function M.shift(u, s)
  expect("stages.shift", "u", u, "a number in [0, 1]")
  expect("stages.shift", "s", s, "a finite number > 0")
  return s * u / (1 + (s - 1) * u)
end

local own = { steps = arguments.none, from = arguments.none, to = 0, scale = 1, shift = 1, fresh = true }
local kinds = { steps = "an integer >= 1", from = "a number in [0, 1]", to = "a number in [0, 1]",
  scale = "a finite number > 0", shift = "a finite number > 0", fresh = "a boolean" }

local function read_stages(list)
  local stages = {}
  for i, given in ipairs(list) do
    local who = ("%s: stages[%d]"):format(WHO, i)
    local stage = arguments.read(who, given, own, kinds)
    stage.from = stage.from or i == 1 and 1 or nil
    if not stage.steps then fail("%s: steps: expected an integer >= 1, got nil", who) end
    if not stage.from then fail("%s: from: expected a number in [0, 1], got nil", who) end
    if stage.from <= stage.to then fail("%s: to: expected less than from, %g, got %g", who, stage.from, stage.to) end
    if i < #list and stage.to == 0 then fail("%s: to: expected a number above 0 before the last, got 0", who) end
    if i == #list and stage.to ~= 0 then fail("%s: to: expected 0 of the last, got %g", who, stage.to) end
    local before = stages[i - 1]
    if before and not stage.fresh and before.scale ~= stage.scale then
      fail("%s: fresh: expected true where the size changes, got false", who)
    end
    stages[i] = stage
  end
  if #stages == 0 then fail("%s: stages: expected at least one, got none", WHO) end
  return stages
end

-- Points at which the network is called in a stage. Before the last one the last of them is at `to`.
local function points_of(stage, schedule, last)
  local points, gaps = {}, last and stage.steps or math.max(1, stage.steps - 1)
  for i = 0, stage.steps - 1 do
    local u = stage.from + (stage.to - stage.from) * i / gaps
    points[i + 1] = schedule:point(schedule:from_unit(stage.shift == 1 and u or M.shift(u, stage.shift)))
  end
  return points
end

local function resize(x, rows, columns)
  if x.shape[3] == rows and x.shape[4] == columns then return x end
  return x:interpolate({ rows, columns }, nil, "bicubic", false, rows < x.shape[3])
end

local Stages = {}
Stages.__index = Stages

--- A part of a sampler. options: stages, a list of { steps, from and to (shares of the way to noise, before the shift:
-- the first begins at 1, the last ends at 0), scale (1: its size, of the size that sampling begins with), shift (1),
-- fresh (true; false: the step into it is the solver's, as it would be without stages) }; resize (bicubic, of the clean
-- sample itself: a function of it, rows and columns), keep (false: the run keeps the clean samples at each change, see
-- stages.changes).
---@param options table
---@return table part
function M.part(options)
  local o = arguments.read(WHO, options, { stages = arguments.none, resize = resize, keep = false },
    { stages = "a list of tables", resize = "a function" })
  expect(WHO, "stages", o.stages, "a list of tables")
  o.stages = read_stages(o.stages)
  return setmetatable(o, Stages)
end

function Stages:start(run)
  local points, entry = {}, {}
  for i, stage in ipairs(self.stages) do
    if i > 1 then entry[#points] = stage end -- the step that leads into it
    for _, point in ipairs(points_of(stage, run.schedule, i == #self.stages)) do points[#points + 1] = point end
  end
  points[#points + 1] = run.schedule:clean()
  run.points = points
  return { entry = entry, changes = {} }
end

function Stages:advance(run, next, prediction, to)
  local state, x = run.state[self], prediction.x
  if x.ndim ~= 4 then
    fail("%s: expected samples [n, channels, rows, columns], got %s", WHO, arguments.describe(x))
  end
  state.rows, state.columns = state.rows or x.shape[3], state.columns or x.shape[4]
  local stage = state.entry[run.step]
  if not stage or not stage.fresh then return next(prediction, to) end
  local x0 = prediction:as "sample"
  local resized = self.resize(x0, math.floor(state.rows * stage.scale + 0.5),
    math.floor(state.columns * stage.scale + 0.5))
  if self.keep then
    table.insert(state.changes, { step = run.step, before = ty.keep(x0:clone()), after = ty.keep(resized:clone()) })
  end
  run.state[run.solver] = run.solver.start and run.solver:start(run) or {}
  return resized * to.alpha + run:noise(resized) * to.sigma
end

--- What a run of a part with keep = true noted: for each change the step, and the clean samples before and after
-- resizing.
---@param part table
---@param run Run
---@return { step: integer, before: Tensor, after: Tensor }[]
function M.changes(part, run)
  expect("stages.changes", "run", run, "a table")
  local state = type(run.state) == "table" and run.state[part]
  if not state then fail("stages.changes: run: expected a run of a sampler with this part, got another") end
  return state.changes
end

return M
