--- Erased Stable Diffusion: the network learns to say of the concept what it used to say without it, pushed away from
-- the concept by its own guidance turned round:
--
--     target = e_null - eta (e_concept - e_null)      of the network as it was
--
-- at noisy samples that the network, as it is by then, draws of the concept up to a random time. What is said of x_t is
-- linear in every kind of prediction, so that this holds for velocities as for noise. Gandikota et al. 2023, "Erasing
-- Concepts from Diffusion Models", equation 7; ESD-x trains cross-attention alone.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"
local tuning = require "tycho.diffusion.unlearn.tuning"

-- The network's samples for a condition up to a random step, and the point reached.
local function partly(painter, network, condition, null, o)
  local sampler = painter.process:sampler { guidance = o.start_guidance, steps = o.sampling_steps }
  local n, config = conditions.tensors(condition)[1][2].shape[1], painter.autoencoder.config
  local rows, columns = painter:default_size()
  local last = ty.randint(0, o.sampling_steps, {}):item()
  local shape, points = { n, config.latent_channels, rows, columns }, sampler:points()
  if last == 0 then
    return ty.randn(shape, { device = painter:device() }) * painter.process.schedule:noise_scale(points[1]), points[1]
  end
  local x = sampler:sample(network, shape, { condition = condition, null = null,
    on_step = function(step) return step < last end })
  return x, points[last + 1]
end

--- Makes a painter's network forget. options: eta (1: how far it is pushed away), part ("cross"; "no_cross" for what is
-- not an artist's style, "all", "cross_keys"), steps (40), batch (8), lr (1e-3), seed, sampling_steps (8) and
-- start_guidance (3) of the samples that it learns at, every and look (look(step, report), called every so many steps).
---@param painter TextToImage
---@param task UnlearnTask
---@param options? table
---@return UnlearnReport
return function(painter, task, options)
  tuning.check("unlearn.esd", painter, task)
  local o = tuning.options("unlearn.esd", options, { eta = 1.0, sampling_steps = 8, start_guidance = 3.0 },
    { eta = "a finite number", sampling_steps = "an integer >= 1", start_guidance = "a finite number" })
  local frozen, null = painter.network:clone():requires_grad_(false):eval(), painter:null ""
  local forget = tuning.conditions(painter, task.forget)
  return tuning.train("esd", painter, o, function(network)
    local condition = forget(ty.randint(0, #task.forget, { o.batch }))
    local x, point = partly(painter, network, condition, null, o)
    local t = ty.full({ o.batch }, point.time, { device = x.device })
    local target = ty.no_grad(function()
      local nothing = conditions.null(network, condition, null)
      local both = frozen(ty.concat({ x, x }, 0), ty.concat({ t, t }, 0), conditions.concat { condition, nothing })
      local with, without = both:narrow(0, 0, o.batch), both:narrow(0, o.batch, o.batch)
      return without - (with - without) * o.eta
    end)
    return ty.mse_loss(network(x, t, condition), target)
  end)
end
