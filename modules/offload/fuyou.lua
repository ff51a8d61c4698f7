-- Fuyou: the disk is one of the resources that are kept busy. The optimizer steps a unit as soon as its gradients are
-- whole, within the backward pass and on nothing older (no stale update), while the moments of the next unit are read
-- and those of the last one written; what a unit keeps for its backward pass is swapped out or computed again, by a
-- model of the step's time that the first step measures. Liao et al. 2024, "Adding NVMe SSDs to Enable and Accelerate
-- 100B Model Fine-tuning on a Single GPU".
local arguments = require "tycho.arguments"
local superpipeline = require "tycho.offload.superpipeline"
local within = require "tycho.offload.within"

local M = {}

--- The seconds of a step by the model: forward and backward pass take as long as computing or the disk, whichever is
-- the slower; what is computed again lengthens the backward pass, what is swapped is written in the one and read in the
-- other.
---@param units {seconds: number, bytes: number}[]  of the forward pass of each, and what it keeps
---@param again table<integer, boolean>  those that are computed again, by position
---@param o {forward: number, backward: number, out: number, back: number, write: number, read: number}  seconds of
-- computing in either pass; seconds of the disk in either pass besides activations; bytes a second
---@return number seconds
function M.predict(units, again, o)
  local swapped, repeated = 0, 0
  for i, unit in ipairs(units) do
    if again[i] then repeated = repeated + unit.seconds else swapped = swapped + unit.bytes end
  end
  return math.max(o.forward, o.out + swapped / o.write) + math.max(o.backward + repeated, o.back + swapped / o.read)
end

--- Which units are computed again: those that cost the least time for each byte that is then not moved come first, as
-- many of them as make the predicted step shortest.
---@param units {seconds: number, bytes: number}[]
---@param o table  of predict()
---@return table<integer, boolean> again
---@return number seconds
function M.choose(units, o)
  local order = {}
  for i, unit in ipairs(units) do if unit.bytes > 0 then order[#order + 1] = i end end
  table.sort(order, function(a, b)
    local x, y = units[a].seconds * units[b].bytes, units[b].seconds * units[a].bytes
    if x ~= y then return x < y end
    return a < b
  end)
  local again, best, count = {}, M.predict(units, {}, o), 0
  for n, i in ipairs(order) do
    again[i] = true
    local seconds = M.predict(units, again, o)
    if seconds < best then best, count = seconds, n end
  end
  local chosen = {}
  for n = 1, count do chosen[order[n]] = true end
  return chosen, best
end

-- What the first step has measured.
local function plan_activations(engine, o, measured)
  local store = engine.stores[engine.plan.activations]
  if not store then return {} end
  local write, read = store:probe(o.probe)
  local units, forward = {}, 0
  for at, unit in ipairs(engine.order) do
    units[at] = { seconds = unit.seconds or 0, bytes = measured.bytes[at] or 0 }
    forward = forward + units[at].seconds
  end
  local parameters, moments = 0, 0
  for _, unit in ipairs(engine.units) do
    for _, cell in ipairs(unit.cells) do parameters = parameters + cell.nbytes end
    for _, p in ipairs(unit.params) do
      for _, cell in pairs(engine.of[p].moments) do moments = moments + cell.nbytes end
    end
  end
  return M.choose(units, { forward = forward, backward = measured.backward, write = write, read = read,
    out = parameters / read, back = (parameters + moments) / read + (parameters + moments) / write })
end

--- A policy for offload.engine, for a plan with parameters, moments and activations on "file". options:
--   window, ahead  of superpipeline (2, 1)
--   activations    "model" (by the model of the step's time), "swap" or "again" (all units)
--   probe          bytes by which the disk's speed is measured (8 MiB)
-- An optimizer with clip_norm is refused: the norm of all gradients is not there when the first unit steps.
---@param options? table
---@return table policy
function M.policy(options)
  local o = arguments.read("offload.fuyou", options, { window = 2, ahead = 1, activations = "model", probe = 8 << 20 },
    { window = "an integer >= 1", ahead = "an integer >= 0", activations = '"model" or "swap" or "again"',
      probe = "an integer >= 4096" })
  local policy = within(superpipeline { window = o.window, ahead = o.ahead }, o.ahead > 0)
  local before_backward, after_backward = policy.before_backward, policy.after_backward
  local measured = { bytes = {} }

  --- Whether unit number `at` is computed again in place of being swapped.
  function policy.recomputes(_, _, at)
    if o.activations == "again" then return true end
    return policy.again ~= nil and policy.again[at] == true
  end

  function policy.before_backward(engine, unit, at)
    if not policy.again then
      for number = 1, engine.length do
        measured.bytes[number] = math.max(measured.bytes[number] or 0, engine.saved:bytes(number))
      end
      measured.waited = measured.waited or engine.counters.waited
    end
    before_backward(engine, unit, at)
  end

  function policy.after_backward(engine)
    after_backward(engine)
    if not policy.again and o.activations == "model" then
      local waited = engine.counters.waited - (measured.waited or 0)
      measured.backward = math.max(0, engine.backward_seconds - waited)
      policy.again, policy.predicted = plan_activations(engine, o, measured)
    end
  end

  return policy
end

return M
