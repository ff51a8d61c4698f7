--- Multistep solvers in l = ln(alpha / sigma), one evaluation a step: DPM-Solver++ (Lu et al. 2022, "DPM-Solver++",
-- algorithm 2), which predicts the clean sample, and DPM-Solver (Lu et al. 2022, "DPM-Solver"), which predicts the
-- noise; orders 1 to 3; for the ODE, and for the SDE that adds fresh noise in every step (the same paper, appendix).
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local lambda = require "tycho.diffusion.solver.lambda"

local DPM = {}
DPM.__index = DPM

local SHORT = 15 -- steps: runs with fewer end in lower orders, where asked for

--- options: order (2); of ("sample": DPM-Solver++; "epsilon": DPM-Solver); sde (false: no fresh noise); rule of the
-- second order ("midpoint" or "heun"); lower_final (false; true: the last steps of runs below 15 are of lower order),
-- euler_final (false; true: the last step is of first order in any run); a step to the clean sample always is. third:
-- "full", or "half" as the published code has it, which gives the second difference half the weight that it has in
-- Taylor's series, and so converges with order 2 (smaller errors than order = 2 all the same).
local function new(options)
  local who = "solver.dpm"
  local self = ty.nn.options(who, options, { order = 2, of = "sample", sde = false, rule = "midpoint",
    lower_final = false, euler_final = false, third = "full" }, { third = '"full" or "half"', order = "1 or 2 or 3",
    of = '"sample" or "epsilon"',
    rule = '"midpoint" or "heun"' })
  return setmetatable(self, DPM)
end

function DPM:start() return { past = {} } end -- luacheck: ignore 212

-- The order of this step, by what is known and by how many steps are left.
local function order_of(self, state, to, run)
  local order = math.min(self.order, #state.past)
  if to.sigma == 0 then return 1 end
  if self.lower_final or self.euler_final then
    local left, short = #run.points - run.step, #run.points - 1 < SHORT
    if left == 1 and (self.euler_final or short) then return 1 end
    if left == 2 and self.lower_final and short then return math.min(order, 2) end
  end
  return order
end

-- The prediction's first derivative in l times the step's length, and half its second times the square of that: D1 and
-- D2 of the papers.
local function differences(past, h, order)
  local a, b, c = past[1], past[2], past[3]
  local r = (a.l - b.l) / h
  local first = (a.m - b.m) / r
  if order == 2 then return first end
  local s = (b.l - c.l) / h
  local bend = (first - (b.m - c.m) / s) / (r + s)
  return first + bend * r, bend
end

function DPM:step(prediction, to, run, state)
  local from = prediction.point
  if self.of == "epsilon" then
    if self.sde and to.sigma == 0 then return prediction:as "sample" * to.alpha end -- its noise would not end there
    if from.alpha == 0 then
      if not self.sde then return frames.from_noise(prediction, to) end
      return prediction:as "sample" * to.alpha + run:noise(prediction.x) * to.sigma -- nothing of x is left
    end
  end
  local m = prediction:as(self.of)
  if lambda.at(from) == lambda.at(to) then return prediction.x end
  table.insert(state.past, 1, { m = ty.keep(m), l = lambda.at(from) })
  state.past[self.order + 1] = nil
  local order, s = order_of(self, state, to, run), lambda.step(self.of, from, to)
  local data = self.of == "sample"
  local z, ratio, scale, first = s.z, s.ratio, s.scale, s.first
  if self.sde then
    if data then
      z, ratio = 2 * z, ratio * math.exp(-s.h)
      first = scale * (math.exp(z) - 1)
    else
      scale, first = 2 * scale, 2 * first
    end
  end
  local x = prediction.x * ratio - m * first
  if order >= 2 then
    local d1, d2 = differences(state.past, s.h, order)
    if order == 2 and self.rule == "midpoint" then
      x = x - d1 * (first / 2)
    else
      x = x - d1 * (scale * ((math.exp(z) - 1) / z - 1))
    end
    if d2 then
      local weight = self.third == "full" and 2 or 1
      x = x - d2 * (weight * scale * ((math.exp(z) - 1 - z) / z ^ 2 - 0.5))
    end
  end
  if not self.sde or to.sigma == 0 then return x end
  local variance = data and 1 - math.exp(-2 * s.h) or math.exp(2 * s.h) - 1
  return x + run:noise(x) * (to.sigma * math.sqrt(math.max(0, variance)))
end

return new
