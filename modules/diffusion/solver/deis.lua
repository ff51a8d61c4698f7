--- DEIS (Zhang and Chen 2023, "Fast Sampling of Diffusion Models with Exponential Integrator", the kind tAB-DEIS), one
-- evaluation a step: the noise is a polynomial in ln(sigma / alpha) through this and the last evaluations, and x /
-- alpha is integrated over sigma / alpha exactly. Orders 1 to 3.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local lagrange = require "tycho.diffusion.solver.lagrange"

local DEIS = {}
DEIS.__index = DEIS

local SHORT = 15 -- steps: runs with fewer end in lower orders, where asked for

--- options: order (2), lower_final (false; true: the last steps of runs below 15 are of lower order).
local function new(options)
  return setmetatable(ty.nn.options("solver.deis", options, { order = 2, lower_final = false },
    { order = "1 or 2 or 3" }), DEIS)
end

function DEIS:start() return { past = {} } end -- luacheck: ignore 212

function DEIS:step(prediction, to, run, state)
  local from, past = prediction.point, state.past
  if from.alpha == 0 then return frames.from_noise(prediction, to) end
  local ratio = from.sigma / from.alpha
  table.insert(past, 1, { e = ty.keep(prediction:as "epsilon"), u = math.log(ratio) })
  past[self.order + 1] = nil
  local order, left = #past, run.points and #run.points - run.step
  if self.lower_final and #run.points - 1 < SHORT then order = math.min(order, left) end
  local change = to.sigma / to.alpha - ratio
  if to.sigma == 0 or order == 1 or change == 0 then
    return frames.move(frames.noise, prediction.x, past[1].e, from, to)
  end
  local h, places, mean = math.log(to.sigma / to.alpha) - past[1].u, {}, nil
  for j = 1, order do places[j] = past[j].u - past[1].u end
  for j = 1, order do
    local part = past[j].e * (ratio * lagrange.integral_exp(lagrange.polynomial(places, j), h) / change)
    mean = mean and mean + part or part
  end
  return frames.move(frames.noise, prediction.x, mean, from, to)
end

return new
