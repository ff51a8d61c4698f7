--- Forget-Me-Not, attention resteering: at noisy pictures of the concept the maps of cross-attention to the concept's
-- tokens are made small,
--
--     loss = | A |,  A: attention to the concept's tokens, of all heads, places and layers, as one vector
--
-- Zhang et al. 2023, "Forget-Me-Not: Learning to Forget in Text-to-Image Diffusion Models", section 3.2.
local cross = require "tycho.diffusion.attention.cross"
local tuning = require "tycho.diffusion.unlearn.tuning"

--- Makes a painter's network forget. options: part ("cross"; "all"), steps (40), batch (8), lr (1e-3), seed, every,
-- look.
---@param painter TextToImage
---@param task UnlearnTask
---@param options? table
---@return UnlearnReport
return function(painter, task, options)
  tuning.check("unlearn.forget_me_not", painter, task)
  local o = tuning.options("unlearn.forget_me_not", options, {})
  local forget, state = tuning.conditions(painter, task.forget), { seen = {} }
  if o.steps > 0 then tuning.pictures(painter, task, "forget") end
  return cross.with(painter.network, state, function()
    return tuning.train("forget_me_not", painter, o, function(network)
      local x0, at = tuning.some(painter, task, "forget", o.batch)
      state.positions, state.seen = task.positions:index_select(0, at):to { device = x0.device }, {}
      tuning.say(painter, network, painter.process.objective:noisy(x0), forget(at))
      local sum = 0
      for _, shares in ipairs(state.seen) do sum = sum + shares:square():sum() end
      state.positions, state.seen = nil, {}
      return (sum + 1e-12):sqrt()
    end)
  end)
end
