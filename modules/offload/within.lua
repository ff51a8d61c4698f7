-- A policy whose optimizer steps a unit as soon as its gradients are whole, within the backward pass and on nothing
-- older: its moments come while the unit's own backward pass runs and go while the next one's does, its gradients need
-- no place of their own. What Fuyou does, and ZeRO-Infinity on request.

--- Makes a policy such as superpipeline's step so. prefetch: moments are read before they are wanted.
---@param policy table
---@param prefetch boolean
---@return table policy
return function(policy, prefetch)
  local before_backward = policy.before_backward
  policy.updates_within = true

  function policy.before_backward(engine, unit, at)
    before_backward(engine, unit, at)
    if prefetch then engine:fetch_update(unit) end
  end

  function policy.gradients(engine, unit) engine:update(unit) end

  function policy.after_backward(engine)
    for _, unit in ipairs(engine.units) do engine:update(unit) end
    engine:keep {}
  end

  return policy
end
