--- Euler's method, of first order: one evaluation a step.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"

local Euler = {}
Euler.__index = Euler

--- options: frame (the schedule's; "noise" or "flow").
local function new(options)
  return setmetatable(ty.nn.options("solver.euler", options, { frame = ty.nn.none }), Euler)
end

function Euler:step(prediction, to, run)
  local frame = frames.get("solver.euler", self.frame, run.schedule)
  return frames.move(frame, prediction.x, prediction:as(frame.kind), prediction.point, to)
end

return new
