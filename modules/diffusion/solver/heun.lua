--- Heun's method, of second order: two evaluations a step, but for one that ends in the clean sample, where there is
-- nothing left to predict (Karras et al. 2022, algorithm 1).
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"

local Heun = {}
Heun.__index = Heun

--- options: frame (the schedule's; "noise" or "flow").
local function new(options)
  return setmetatable(ty.nn.options("solver.heun", options, { frame = ty.nn.none }), Heun)
end

function Heun:step(prediction, to, run)
  local frame = frames.get("solver.heun", self.frame, run.schedule)
  local x, from = prediction.x, prediction.point
  local here = prediction:as(frame.kind)
  local euler = frames.move(frame, x, here, from, to)
  if to.sigma == 0 then return euler end
  local there = run:predict(euler, to):as(frame.kind)
  return frames.move(frame, x, (here + there) / 2, from, to)
end

return new
