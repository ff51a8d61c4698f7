-- SSDTrain: what ops keep for the backward pass goes to the disk while the forward pass goes on, and comes back while
-- the backward pass of the unit before runs. Wu et al. 2024, "SSDTrain: An Activation Offloading Framework to SSDs for
-- Faster Large Language Model Training". The engine knows a storage by its memory and version, so that it is written
-- once and parameters never, and hands over what is still in memory; the policy says whose activations stay.
local arguments = require "tycho.arguments"
local superpipeline = require "tycho.offload.superpipeline"

--- A policy for offload.engine, for a plan with activations = "file". options:
--   keep     the last units of the forward pass, which are the first of the backward pass, keep theirs (1)
--   ahead    units whose activations are read before they are wanted (1)
--   smallest bytes of a storage below which it stays in memory (65536): a disk is slow with little
-- The paper searches by a measured step how many units can be written in time; here `keep` is given.
---@param options? {keep?: integer, ahead?: integer, smallest?: integer}
---@return table policy
return function(options)
  local o = arguments.read("offload.ssdtrain", options, { keep = 1, ahead = 1, smallest = 65536 },
    { keep = "an integer >= 0", ahead = "an integer >= 0", smallest = "an integer >= 0" })
  local policy = superpipeline { window = 2, ahead = 1 }
  local before_backward = policy.before_backward

  --- Whether what unit number `at` keeps stays on the device.
  function policy.keeps(engine, _, at, nbytes)
    return nbytes < o.smallest or engine.length ~= nil and at > engine.length - o.keep
  end

  function policy.before_backward(engine, unit, at)
    before_backward(engine, unit, at)
    for distance = 1, o.ahead do engine.saved:fetch(at - distance) end
  end

  return policy
end
