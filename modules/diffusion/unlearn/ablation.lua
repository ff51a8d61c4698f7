--- Concept ablation: what the network says of the concept becomes what it says of an anchor, the prompt with something
-- else in the concept's place:
--
--     | e(x_t, concept) - stopgrad e(x_t, anchor) |^2
--
-- at noisy pictures of the anchor that the network drew before. Kumari et al. 2023, "Ablating Concepts in Text-to-Image
-- Diffusion Models", equation 5 (model-based), which trains cross-attention's keys and values, or more.
local ty = require "tycho"
local tuning = require "tycho.diffusion.unlearn.tuning"

--- Makes a painter's network forget. options: part ("cross_keys"; "cross", "all"), steps (40), batch (8), lr (1e-3),
-- seed, every, look.
---@param painter TextToImage
---@param task UnlearnTask
---@param options? table
---@return UnlearnReport
return function(painter, task, options)
  tuning.check("unlearn.ablation", painter, task)
  local o = tuning.options("unlearn.ablation", options, { part = "cross_keys" })
  local forget, anchor = tuning.conditions(painter, task.forget), tuning.conditions(painter, task.anchor)
  if o.steps > 0 then tuning.pictures(painter, task, "anchor") end
  return tuning.train("ablation", painter, o, function(network)
    local x0, at = tuning.some(painter, task, "anchor", o.batch)
    local noisy = painter.process.objective:noisy(x0)
    -- The network itself teaches: what it says of the anchor is not trained.
    local target = ty.no_grad(function() return tuning.say(painter, network, noisy, anchor(at)) end)
    return ty.mse_loss(tuning.say(painter, network, noisy, forget(at)), target)
  end)
end
