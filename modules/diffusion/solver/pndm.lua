--- Pseudo numerical methods (Liu et al. 2022, "Pseudo Numerical Methods for Diffusion Models on Manifolds"): the linear
-- multistep method of Adams and Bashforth with the weights of equal steps, order 4, where each step moves as DDIM does.
-- It begins by three steps of Runge and Kutta (four evaluations each), or (runge_kutta = false; PLMS, as Stable
-- Diffusion has it) by one step of two evaluations and lower orders after it.
local ty = require "tycho"
local frames = require "tycho.diffusion.solver.frame"
local predictions = require "tycho.diffusion.prediction"

local PNDM = {}
PNDM.__index = PNDM

-- Weights of this evaluation and those before it, by how many there are.
local adams = { { 1 }, { 3 / 2, -1 / 2 }, { 23 / 12, -16 / 12, 5 / 12 }, { 55 / 24, -59 / 24, 37 / 24, -9 / 24 } }

--- options: runge_kutta (false), frame (the schedule's; "noise" or "flow"), mean: of what evaluations are averaged
-- ("frame": what the frame integrates; "output": what the network predicts, as diffusers has it, which for networks
-- that predict v is off by more).
local function new(options)
  return setmetatable(ty.nn.options("solver.pndm", options,
    { runge_kutta = false, frame = ty.nn.none, mean = "frame" },
    { frame = "a string", mean = '"frame" or "output"' }), PNDM)
end

function PNDM:start() return { past = {} } end -- luacheck: ignore 212

local function weighted(outputs, weights)
  local sum
  for i, weight in ipairs(weights) do sum = sum and sum + outputs[i] * weight or outputs[i] * weight end
  return sum
end

-- The point in the middle of a step; whole times stay whole.
local function middle(schedule, from, to)
  local t = (from.t + to.t) / 2
  return schedule:point(schedule.steps and math.floor(t) or t)
end

function PNDM:step(prediction, to, run, state)
  local frame = frames.get("solver.pndm", self.frame, run.schedule)
  local x, from, past = prediction.x, prediction.point, state.past
  local kind = self.mean == "output" and prediction.kind or frame.kind
  local here = prediction:as(kind)
  local function move(output, target)
    return frames.move(frame, x, predictions.convert(kind, frame.kind, x, output, from.alpha, from.sigma), from, target)
  end
  local function ask(y, point) return run:predict(y, point):as(kind) end
  table.insert(past, 1, ty.keep(here))
  past[5] = nil
  local first = #past == 1
  if to.sigma == 0 then return move(weighted(past, adams[#past]), to) end
  if self.runge_kutta and #past < 4 then
    local half = middle(run.schedule, from, to)
    local second = ask(move(here, half), half)
    local third = ask(move(second, half), half)
    local fourth = ask(move(third, to), to)
    return move(weighted({ here, second, third, fourth }, { 1 / 6, 1 / 3, 1 / 3, 1 / 6 }), to)
  end
  if first then return move((here + ask(move(here, to), to)) / 2, to) end
  return move(weighted(past, adams[#past]), to)
end

return new
