-- Horizon-LM: the host has the model, the device is where it passes through. Two units have their parameters there, one
-- that computes and one that comes; each keeps its inputs alone, which leave too, and is computed again in the backward
-- pass; gradients leave as soon as they are whole; the optimizer steps unit by unit where the moments are. What is on
-- the device is bounded by two units, whatever the depth. Yuan et al. 2026, "Horizon-LM: A RAM-Centric Architecture for
-- LLM Training".
local arguments = require "tycho.arguments"
local superpipeline = require "tycho.offload.superpipeline"

--- A policy for offload.engine, for a plan with all four kinds on "host" (or "file"). options: ahead (1: units loaded
-- before they are wanted; 0: none, each is waited for).
---@param options? {ahead?: integer}
---@return table policy
return function(options)
  local o = arguments.read("offload.horizon", options, { ahead = 1 }, { ahead = "an integer >= 0" })
  local policy = superpipeline { window = 1 + o.ahead, ahead = o.ahead }

  --- Whether unit number `at` is computed again in place of what it would keep.
  function policy.recomputes() return true end

  return policy
end
