--- DualFast (Yu et al. 2025, "DualFast: Dual-Speedup Framework for Fast Sampling of Diffusion Models"): the network's
-- own error grows towards low noise, so what it said at an earlier, noisier step corrects what it says now, without a
-- further evaluation. Around any solver, with e(s) the noise predicted in this step and e(r) that of an earlier one:
--
--     e = (1 + c) e(s) - c e(r)
--
-- goes on into the solver's step in the place of e(s); c falls linearly to 0 at the last step. The clean sample follows
-- from the mixed noise, and solvers of higher order take their differences of what was mixed.
--
-- With r the step before, the two come together as steps get shorter and the limit is that of the solver. With r the
-- first step they do not: the limit is another path, which is nearer to the data only as far as the network errs so.
local ty = require "tycho"
local dpm = require "tycho.diffusion.solver.dpm"
local predictions = require "tycho.diffusion.prediction"

local DualFast = {}
DualFast.__index = DualFast

--- options: base (solver.dpmpp_2m(): what makes the step; solvers that evaluate more than once in it mix at its
-- beginning), c (0.5: its first value, which falls linearly to 0; or a function of the step, from 1, and of the number
-- of steps), from ("first": e(r) is that of the first step; "previous": that of the step before).
local function new(options)
  local who = "solver.dualfast"
  local self = ty.nn.options(who, options, { base = ty.nn.none, c = 0.5, from = "first" },
    { base = "a table", c = false, from = '"first" or "previous"' })
  self.base = self.base or dpm()
  if type(self.base.step) ~= "function" then
    error(("%s: base: expected a value of diffusion.solver, got a table without step"):format(who), 2)
  end
  if type(self.c) ~= "function" and not (type(self.c) == "number" and math.abs(self.c) < math.huge) then
    error(("%s: c: expected a finite number or a function, got %s"):format(who, tostring(self.c)), 2)
  end
  return setmetatable(self, DualFast)
end

function DualFast:start(run) return { base = self.base.start and self.base:start(run) or {} } end

local function weight(self, run)
  local step, steps = run.step, #run.points - 1
  if type(self.c) == "function" then return self.c(step, steps) end
  return steps > 1 and self.c * (steps - step) / (steps - 1) or 0
end

function DualFast:step(prediction, to, run, state)
  local earlier, c = state.earlier, weight(self, run)
  if not earlier or self.from == "previous" then state.earlier = ty.keep(prediction:as "epsilon") end
  if earlier and c ~= 0 then
    local e = prediction:as "epsilon"
    prediction = predictions.new("epsilon", prediction.x, e + (e - earlier) * c, prediction.point, prediction.data)
    if run.clip then prediction = prediction:with_sample(run.clip(prediction:as "sample", prediction.point)) end
  end
  return self.base:step(prediction, to, run, state.base)
end

return new
