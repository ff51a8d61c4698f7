--- Singlestep solvers in l = ln(alpha / sigma): the points are taken in groups of up to three, and each group is one
-- step of order 2 or 3 from its first point, with evaluations at the points between. Lu et al. 2022, "DPM-Solver++",
-- algorithm 1, and "DPM-Solver", algorithms 1 and 2.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local lambda = require "tycho.diffusion.solver.lambda"

local Single = {}
Single.__index = Single

--- options: order (2), of ("sample": DPM-Solver++; "epsilon": DPM-Solver), rule ("midpoint" or "heun"), lower_final
-- (true: the last group is as short as it has to be, and the last step of first order; so is any step to the clean
-- sample).
local function new(options)
  return setmetatable(ty.nn.options("solver.dpm_single", options, { order = 2, of = "sample", rule = "midpoint",
    lower_final = true }, { order = "1 or 2 or 3", of = '"sample" or "epsilon"', rule = '"midpoint" or "heun"' }),
    Single)
end

-- How many evaluations of its group each step has: 1, 2, 1, 2 ... for order 2.
local function orders(self, steps)
  local order, list = self.order, {}
  for i = 1, steps do list[i] = (i - 1) % order + 1 end
  if self.lower_final and order > 1 then
    local rest = steps % order
    if rest == 0 then -- the last group in two
      list[steps] = 1
      if order == 3 and steps >= 3 then list[steps - 2], list[steps - 1] = 1, 2 end
    end
  end
  return list
end

function Single:start(run) return { orders = orders(self, #run.points - 1), group = {} } end

-- As in solver.dpm, from the group's first point: what the prediction's change adds.
local function change(self, group, s)
  local scale, z, first = s.scale, s.z, group[1]
  local last = group[#group]
  local slope = (last.m - first.m) / ((last.l - first.l) / s.h)
  if #group == 2 and self.rule == "midpoint" then return slope * (s.first / 2) end
  local weight = scale * ((math.exp(z) - 1) / z - 1)
  if #group == 2 or self.rule == "midpoint" then return slope * weight end
  local r0, r1 = (last.l - first.l) / s.h, (group[2].l - first.l) / s.h
  local other = (group[2].m - first.m) / r1
  local straight, bend = (other * r0 - slope * r1) / (r0 - r1), (slope - other) * (2 / (r0 - r1))
  return straight * weight + bend * (scale * ((math.exp(z) - 1 - z) / z ^ 2 - 0.5))
end

function Single:step(prediction, to, run, state)
  local from, group = prediction.point, state.group
  local order = to.sigma == 0 and 1 or math.min(state.orders[run.step] or 1, #group + 1)
  if from.alpha == 0 then return frames.from_noise(prediction, to) end
  if order == 1 then
    group = { x = ty.keep(prediction.x), point = from }
    state.group = group
  end
  local m = prediction:as(self.of)
  group[#group + 1] = { m = ty.keep(m), l = lambda.at(from) }
  local s = lambda.step(self.of, group.point, to)
  if s.h == 0 then return prediction.x end
  local x = group.x * s.ratio - group[1].m * s.first
  return #group > 1 and x - change(self, group, s) or x
end

return new
