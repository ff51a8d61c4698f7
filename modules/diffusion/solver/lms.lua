--- A linear multistep method of order up to 4, one evaluation a step: the derivative is a polynomial through this and
-- the last evaluations, integrated exactly (Adams and Bashforth, for steps of any lengths), as k-diffusion's LMS.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local lagrange = require "tycho.diffusion.solver.lagrange"

local LMS = {}
LMS.__index = LMS

--- options: order (4), frame (the schedule's; "noise" or "flow").
local function new(options)
  return setmetatable(ty.nn.options("solver.lms", options, { order = 4, frame = ty.nn.none },
    { order = "an integer in [1, 4]", frame = "a string" }), LMS)
end

function LMS:start() return { past = {} } end -- luacheck: ignore 212

function LMS:step(prediction, to, run, state)
  local frame = frames.get("solver.lms", self.frame, run.schedule)
  local from, past = prediction.point, state.past
  if frame.place(from) == frame.place(to) then return prediction.x end
  table.insert(past, 1, { d = ty.keep(prediction:as(frame.kind)), place = frame.place(from) })
  past[self.order + 1] = nil
  local h, places, mean = frame.place(to) - past[1].place, {}, nil
  for j, entry in ipairs(past) do places[j] = entry.place - past[1].place end
  for j, entry in ipairs(past) do
    local part = entry.d * (lagrange.integral(lagrange.polynomial(places, j), h) / h)
    mean = mean and mean + part or part
  end
  return frames.move(frame, prediction.x, mean, from, to)
end

return new
