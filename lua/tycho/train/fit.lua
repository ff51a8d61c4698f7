--- The training loop that the fits of all domains are made of: an optimizer with its schedule, evaluation every so many
-- steps, an average of the weights, a log, and checkpoints from which a run goes on bit for bit.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local none = arguments.none

-- AdamW whose decay is for matrices alone, as GPT-3's training has it: norms and biases are left where they are.
local function default_optimizer(model, o)
  local matrices, rest, groups = {}, {}, {}
  for _, p in ipairs(model:parameters()) do
    if p.requires_grad then table.insert(p.ndim >= 2 and matrices or rest, p) end
  end
  if #matrices > 0 then groups[1] = { params = matrices, weight_decay = o.weight_decay } end
  if #rest > 0 then groups[#groups + 1] = { params = rest, weight_decay = 0 } end
  return ty.optim.AdamW(groups, { lr = o.lr, beta2 = o.beta2, clip_norm = o.clip_norm, schedule = o.schedule,
    ema = o.ema })
end

-- The optimizer of the options, and whether it moves the average itself.
local function optimizer(model, o, ema)
  local schedule = o.schedule or ty.optim.cosine { steps = math.max(1, o.steps), -- no step needs a schedule, either
    warmup = math.min(o.warmup, o.steps // 4), final = o.final }
  if o.optimizer then
    return o.optimizer(model, { lr = o.lr, schedule = schedule, clip_norm = o.clip_norm }), false
  end
  return default_optimizer(model, { lr = o.lr, beta2 = o.beta2, clip_norm = o.clip_norm, schedule = schedule,
    weight_decay = o.weight_decay, ema = ema }), ema ~= nil
end

local defaults = { steps = 0, loss = none, backward = none, lr = 1e-3, warmup = 50, final = 0.1, schedule = none,
  weight_decay = 0.1, beta2 = 0.95, clip_norm = 1.0, optimizer = none, average = 0.0, every = 0, evaluate = none,
  folder = none, save_every = 200, resume = false, pause = none, log = none, title = "training", quiet = false }

local kinds = { steps = "an integer >= 0", loss = "a function", backward = "a function", lr = "a finite number >= 0",
  warmup = "an integer >= 0", final = "a number in [0, 1]", weight_decay = "a finite number >= 0",
  beta2 = "a number in [0, 1)", clip_norm = "a number >= 0", average = "a number in [0, 1)", optimizer = "a function",
  every = "an integer >= 0", evaluate = "a function", folder = "a string", save_every = "an integer > 0",
  resume = 'a boolean or "auto"', pause = "an integer >= 0", log = "a string", schedule = "a function or a table" }

-- The gradients of a batch's loss, and the numbers for the log.
local function plain_backward(loss_of)
  return function(model, next_batch, averaged)
    local loss, values = loss_of(model, next_batch(), averaged)
    loss:backward()
    values = values or {}
    values.loss = loss
    return values
  end
end

--- Trains a model on the batches of a loader, or on those that a function gives, called for each. options:
--   steps (0 leaves the model as it is)
--   loss (a function of the model, a batch and, with `average`, the averaged model, which some methods learn
--   from: the loss, and optionally further numbers for the log), or
--   backward (a function of the model, next(), which gives batches, and the averaged model: adds the gradients of a
--   step, returns numbers for the log with `loss` among them)
--   lr (1e-3), warmup (50 steps, at most a quarter), final (0.1: the share of lr at the end of the cosine), schedule
--   (one of ty.optim in place of the cosine), weight_decay (0.1, of matrices), beta2 (0.95), clip_norm (1)
--   optimizer (a function of the model and { lr, schedule, clip_norm } that makes one in place of AdamW)
--   average (0; the decay of a moving average of the weights, 0.999 say: it is evaluated, and returned)
--   every (0: steps between calls of evaluate(step, model), which returns numbers for the log), evaluate
--   folder (where checkpoints go), save_every (200), resume (false; true: go on from the checkpoint there, bit for bit
--   as if there had been no break, an error where there is none; "auto": start anew there and say so; what a function
--   that gives batches has counted is not in a checkpoint), pause (the step after which to stop and save; the schedule
--   is still that of `steps`)
--   log (folder of metrics.jsonl, which a resumed run continues and `tycho watch` shows), title, quiet
-- Returns the loss of every step, and the model with the averaged weights (without an average, the model itself).
---@param model Module
---@param loader DataLoader|fun(): any
---@param options table
---@return number[] losses
---@return Module averaged
local function fit(model, loader, options)
  local who = "train.fit"
  arguments.expect(who, "model", model, "a module")
  local draws = type(loader) == "function"
  if not draws and (type(loader) ~= "table" or type(loader.next) ~= "function") then
    arguments.fail("%s: loader: expected a DataLoader or a function, got %s", who, arguments.describe(loader))
  end
  local o = arguments.read(who, options, defaults, kinds)
  if (o.loss == nil) == (o.backward == nil) then
    arguments.fail("%s: expected one of the options loss and backward, got %s", who, o.loss and "both" or "none")
  end
  if o.resume and not o.folder then arguments.fail("%s: resume needs the folder of the checkpoint", who) end
  local ema = o.average > 0 and ty.optim.EMA(model, { decay = o.average }) or nil
  local opt, moves_average = optimizer(model, o, ema)
  local backward = o.backward or plain_backward(o.loss)
  local parts = { model = model, optimizer = opt, loader = not draws and loader or nil, average = ema }
  local losses, start = {}, 0
  local saved = o.resume and ty.train.resume_checkpoint(o.folder, parts, o.resume)
  if saved then losses, start = saved.losses:tolist(), saved.step end
  local last = math.min(o.pause or o.steps, o.steps)
  local logger = o.log and ty.train.Logger(o.log, { resume = start })
  if logger then
    logger:about { steps = o.steps, stop = last < o.steps and last or nil, start = start, title = o.title, options = o }
  end
  local next_batch = draws and loader or function() return loader:next() end
  model:train()
  opt:zero_grad() -- gradients that were left from before are none of the first step
  for step, _, log in ty.train.steps(nil, last, { start = start, title = o.title, quiet = o.quiet,
    logger = logger }) do
    local values = backward(model, next_batch, ema and ema.model)
    if ty.is_tensor(values.loss) then values.loss = values.loss:item() end
    losses[step], values.rate = values.loss, opt:rate()
    values.norm = opt:step()
    opt:zero_grad()
    if ema and not moves_average then ema:update() end
    if o.evaluate and o.every > 0 and (step % o.every == 0 or step == last) then
      for name, value in pairs(o.evaluate(step, ema and ema.model or model)) do values[name] = value end
      model:train()
    end
    log(values)
    if o.folder and (step % o.save_every == 0 or step == last) then
      parts.step, parts.losses = step, ty.tensor(losses, { dtype = "f64" })
      ty.train.save_checkpoint(o.folder, parts)
    end
  end
  if logger then logger:close() end
  return losses, ema and ema.model or model
end

return fit
