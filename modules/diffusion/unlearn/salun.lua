--- Saliency unlearning: only the weights that the concept weighs on most may change, and they learn to say of the
-- concept what is said of something else, while the rest is trained on as before:
--
--     mask = | gradient of the loss at pictures of the concept | among the largest
--     loss = | e(x_t, concept) - stopgrad e(x_t, anchor) |^2 + alpha |e(x_t, kept) - target|^2,   x_t of the concept
--
-- Fan et al. 2024, "SalUn: Empowering Machine Unlearning via Gradient-Based Weight Saliency in Both Image
-- Classification and Generation", equations 4 and 7.
local ty = require "tycho"
local tuning = require "tycho.diffusion.unlearn.tuning"

-- By name, 1 where the gradient of the loss at the concept's pictures, summed over batches, is among the share that is
-- largest.
local function saliency(painter, task, o, forget)
  local names, weights = tuning.chosen("unlearn.salun", painter.network, o.part)
  local asked = {}
  for _, name in ipairs(names) do
    asked[name] = weights[name].requires_grad
    weights[name]:requires_grad_(true)
  end
  painter.network:zero_grad()
  local objective = painter.process.objective
  for _ = 1, o.saliency_batches do
    local x0, at = tuning.some(painter, task, "forget", o.batch)
    local noisy = objective:noisy(x0)
    ty.mse_loss(tuning.say(painter, painter.network, noisy, forget(at)), tuning.target(objective, x0, noisy)):backward()
  end
  local list = {}
  for i, name in ipairs(names) do
    local grad = weights[name].grad
    list[i] = (grad and grad:abs() or ty.zeros_like(weights[name])):detach():flatten()
  end
  local all = ty.concat(list, 0)
  local count = math.max(1, math.floor(o.share * all:numel() + 0.5))
  local least = all:sort(0, true):select(0, count - 1):item()
  local masks = {}
  for i, name in ipairs(names) do
    masks[name] = ty.keep(list[i]:ge(least):to(list[i].dtype):reshape(weights[name].shape))
    weights[name]:requires_grad_(asked[name])
  end
  painter.network:zero_grad()
  return masks
end

--- Makes a painter's network forget. options: share (0.5: of the weights, that may change), saliency_batches (8), alpha
-- (1), part ("all"; "cross", "no_cross"), steps (40), batch (8), lr (1e-3), seed, every, look. The report has the
-- masks.
---@param painter TextToImage
---@param task UnlearnTask
---@param options? table
---@return UnlearnReport
return function(painter, task, options)
  tuning.check("unlearn.salun", painter, task)
  local o = tuning.options("unlearn.salun", options, { part = "all", share = 0.5, alpha = 1.0, saliency_batches = 8 },
    { share = "a number in (0, 1]", alpha = "a finite number >= 0", saliency_batches = "an integer >= 1" })
  local forget, anchor = tuning.conditions(painter, task.forget), tuning.conditions(painter, task.anchor)
  local retain, masks = tuning.conditions(painter, task.retain), {}
  if o.steps > 0 then
    for _, part in ipairs { "forget", "retain" } do tuning.pictures(painter, task, part) end
    masks = ty.data.with_seed(o.seed, function() return saliency(painter, task, o, forget) end)
  end
  local objective = painter.process.objective
  local report = tuning.train("salun", painter, o, function(network)
    local x0, at = tuning.some(painter, task, "forget", o.batch)
    local noisy = objective:noisy(x0)
    local target = ty.no_grad(function() return tuning.say(painter, network, noisy, anchor(at)) end)
    local loss = ty.mse_loss(tuning.say(painter, network, noisy, forget(at)), target)
    if o.alpha == 0 then return loss end
    local kept, which = tuning.some(painter, task, "retain", o.batch)
    local other = objective:noisy(kept)
    return loss + ty.mse_loss(tuning.say(painter, network, other, retain(which)),
      tuning.target(objective, kept, other)) * o.alpha
  end, masks)
  report.masks = masks
  return report
end
