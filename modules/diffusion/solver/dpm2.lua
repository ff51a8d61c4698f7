--- DPM-Solver-2 as k-diffusion has it (Karras et al. 2022, algorithm 2, without the noise): the derivative in the
-- middle of the step, which is that of ln(sigma / alpha). Of second order, two evaluations a step; a step to the clean
-- sample is Euler's.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"

local DPM2 = {}
DPM2.__index = DPM2

local function new(options) return setmetatable(ty.nn.options("solver.dpm2", options, {}), DPM2) end

function DPM2:step(prediction, to, run) -- luacheck: ignore 212
  local x, from, frame = prediction.x, prediction.point, frames.noise
  if from.alpha == 0 then return frames.from_noise(prediction, to) end
  local here = prediction:as "epsilon"
  if to.sigma == 0 then return frames.move(frame, x, here, from, to) end
  local middle = run.schedule:point_at(math.sqrt(frame.place(from) * frame.place(to)))
  local there = run:predict(frames.move(frame, x, here, from, middle), middle):as "epsilon"
  return frames.move(frame, x, there, from, to)
end

return new
