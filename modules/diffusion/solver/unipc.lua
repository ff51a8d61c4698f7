--- UniPC (Zhao et al. 2023, "UniPC: A Unified Predictor-Corrector Framework"), one evaluation a step: a multistep
-- predictor, and a corrector that goes over the step before with the prediction made at its end. Orders 1 to 3, each
-- one more with the corrector; in l = ln(alpha / sigma), on predictions of the clean sample or of the noise.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local lambda = require "tycho.diffusion.solver.lambda"

local UniPC = {}
UniPC.__index = UniPC

--- options: order (2); of ("sample" or "epsilon"); weight, the function B(h) of section 3.1 ("bh2": e^h - 1; "bh1": h);
-- lower_final (true: order falls to 1 towards the end); uncorrected ({}: steps, from 1, whose result is not corrected).
local function new(options)
  local self = ty.nn.options("solver.unipc", options, { order = 2, of = "sample", weight = "bh2", lower_final = true,
    uncorrected = {} }, { order = "1 or 2 or 3", of = '"sample" or "epsilon"', weight = '"bh1" or "bh2"',
    uncorrected = "a list of integers" })
  self.skips = {}
  for _, step in ipairs(self.uncorrected) do self.skips[step] = true end
  return setmetatable(self, UniPC)
end

function UniPC:start() return { past = {} } end -- luacheck: ignore 212

-- Weights w of the differences at the places r: for i = 1, 2, ... sum_j r_j^(i-1) w_j = i! z phi_(i+1)(z) / B (theorem
-- 3.1 there), where phi_1 = (e^z - 1) / z and phi_(i+1) = (phi_i - 1 / i!) / z.
local function weights(places, z, b)
  local rows, right, factorial = {}, {}, 1
  local phi = (math.exp(z) - 1) / z - 1
  for i = 1, #places do
    rows[i] = {}
    for j, r in ipairs(places) do rows[i][j] = r ^ (i - 1) end
    right[i] = phi * factorial / b
    factorial = factorial * (i + 1)
    phi = phi / z - 1 / factorial
  end
  return ty.solve(ty.tensor(rows, { dtype = "f64" }), ty.tensor(right, { dtype = "f64" })):tolist()
end

-- x at `to` from x at past[1], by the predictions of the past and, of the corrector, by the one at `to`.
local function move(self, x, past, to, order, there)
  local now = past[1]
  local s = lambda.step(self.of, now.point, to)
  x = x * s.ratio - now.m * s.first
  if order == 1 and not there then return x end
  local b, places, change = self.weight == "bh1" and s.z or math.exp(s.z) - 1, {}, nil
  for i = 1, order - 1 do places[i] = (past[i + 1].l - now.l) / s.h end
  if there then places[order] = 1 end
  local w = #places == 1 and { 0.5 } or weights(places, s.z, b) -- of one place, either half is of the same order
  for i, place in ipairs(places) do
    local d = ((there and i == order and there or past[i + 1].m) - now.m) * (w[i] / place)
    change = change and change + d or d
  end
  return x - change * (s.scale * b)
end

function UniPC:step(prediction, to, run, state)
  if prediction.point.alpha == 0 and self.of == "epsilon" then return frames.from_noise(prediction, to) end
  local from, x, m = prediction.point, prediction.x, prediction:as(self.of)
  local past, before = state.past, state.before
  if before and not self.skips[run.step - 1] and past[1].l > -math.huge then
    x = move(self, before.x, past, from, before.order, m)
  end
  if lambda.at(from) == lambda.at(to) then return x end
  table.insert(past, 1, { m = ty.keep(m), l = lambda.at(from), point = from })
  past[self.order + 1] = nil
  local order = 0 -- a step from where there is no signal tells nothing of how the prediction changes
  while order < #past and (order == 0 or past[order + 1].l > -math.huge) do order = order + 1 end
  if self.lower_final then order = math.min(order, #run.points - run.step) end
  if to.sigma == 0 then order = 1 end
  state.before = { x = ty.keep(x), order = order }
  return move(self, x, past, to, order)
end

return new
