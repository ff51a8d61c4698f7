--- Training of a learner until its validation gets no better, and what that took.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local defaults = { epochs = 100, patience = 10, batch = 64, seed = 0, augment = arguments.none,
  watch = arguments.none, last = false, device = "cpu" }
local kinds = { epochs = "an integer >= 1", patience = "an integer >= 1", batch = "an integer >= 1",
  seed = "an integer", augment = "a function", watch = "a function" }

--- Trains on batches of a set, drawn anew each epoch, and keeps the weights that were best on another. options: epochs
-- (100), patience (10: epochs without a better accuracy after which it ends), batch (64), seed (0), augment(x) (what a
-- batch is made into), watch(epoch, accuracy, losses) (called after each epoch), last (false; true: all epochs, and the
-- weights of the last, where what is learnt from changes), device ("cpu": whose energy is counted
-- besides that of the processors). Returns epochs, best (of these), accuracy (of the best), and energy, a reading of
-- ty.energy over all of it, validation included; the learner has the best weights.
---@param learner Learner
---@param training { x: Tensor, label: Tensor }
---@param validation { x: Tensor, label: Tensor }
---@param options? table
---@return { epochs: integer, best: integer, accuracy: number, energy: EnergyReading }
return function(learner, training, validation, options)
  local who = "local.fit"
  arguments.expect(who, "learner", learner, "a table")
  arguments.expect(who, "learner.model", learner.model, "a module")
  arguments.expect(who, "learner.step", learner.step, "a function")
  for name, set in pairs { training = training or false, validation = validation or false } do
    arguments.expect(who, name, set, "a table")
    arguments.expect(who, name .. ".x", set.x, "a tensor")
    arguments.expect(who, name .. ".label", set.label, "a tensor")
  end
  local o = arguments.read(who, options, defaults, kinds)
  local n = training.label.shape[1]
  if not n or n == 0 then
    arguments.fail("%s: training.label: expected i64 [n] with n > 0, got %s", who,
      arguments.describe(training.label))
  end
  ty.manual_seed(o.seed)
  learner.model:train()
  local meter = ty.energy.meter { device = o.device }
  local found, kept = { epochs = 0, best = 0, accuracy = -1 }, nil
  for epoch = 1, o.epochs do
    local order, sums = ty.randperm(n, { device = training.x.device }), {}
    for start = 0, n - 1, o.batch do
      ty.scope(function()
        local rows = order:narrow(0, start, math.min(o.batch, n - start))
        local x = training.x:index_select(0, rows)
        if o.augment then x = o.augment(x) end
        for i, loss in ipairs(learner:step(x, training.label:index_select(0, rows))) do
          sums[i] = (sums[i] or 0) + loss * rows.shape[1] / n
        end
      end)
    end
    local accuracy = learner:accuracy(validation)
    found.epochs = epoch
    if o.watch then o.watch(epoch, accuracy, sums) end
    if o.last or accuracy > found.accuracy then
      found.accuracy, found.best, kept = accuracy, epoch, {}
      for name, tensor in pairs(learner.model:state_dict()) do kept[name] = tensor:detach():clone() end
    elseif epoch - found.best >= o.patience then
      break
    end
  end
  found.energy = meter:read()
  learner.model:load_state_dict(kept)
  return found
end
