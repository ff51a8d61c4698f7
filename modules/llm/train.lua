--- Training of language models on packed batches (tycho.llm.data): accumulated gradients, evaluation, and the loop with
-- its checkpoints. Schedules, optimizers, loaders and checkpoint folders are those of the library.
local ty = require "tycho"

local arguments = require "tycho.arguments"
local M = {}

local function check_model(who, model)
  if not arguments.is_module(model) or not model.loss then
    arguments.fail("%s: model: expected a language model, got %s", who, arguments.describe(model))
  end
end

local function loss_of(model, batch, checkpoint)
  return model:loss(batch.tokens, batch.targets, { cu_seqlens = batch.cu_seqlens, longest = batch.longest,
    checkpoint = checkpoint })
end

--- Adds the gradients of the mean loss over all tokens of several batches: those of one batch that has them all. A
-- batch counts by its tokens, not as one of so many. options: checkpoint (true: layers run again in the backward pass).
---@param model LanguageModel
---@param batches table[]
---@param options? {checkpoint?: boolean}
---@return number loss     nats per token
---@return integer tokens  that counted
function M.backward(model, batches, options)
  local total, loss = 0, 0.0
  options = arguments.read("llm.train.backward", options, { checkpoint = false })
  check_model("llm.train.backward", model)
  arguments.expect("llm.train.backward", "batches", batches, "a list of tables")
  for i, batch in ipairs(batches) do
    total = total + arguments.expect("llm.train.backward", ("count of batch %d"):format(i), batch.count,
      "an integer >= 0")
  end
  if total == 0 then error("llm.train: no token of the batches counts", 2) end
  for _, batch in ipairs(batches) do
    if batch.count > 0 then -- the mean over no tokens is no number
      local part = loss_of(model, batch, options.checkpoint) * (batch.count / total)
      part:backward()
      loss = loss + part:item()
    end
  end
  return loss, total
end

--- The loss over a whole dataset of tycho.llm.data.Packed, each token once. options: batch (rows at a time, 8), bytes
-- (of the text that the tokens stand for), device. Returns loss (nats per token), perplexity, tokens, and with bytes
-- also bits_per_byte, which does not depend on the tokenizer.
---@param model LanguageModel
---@param dataset PackedDataset
---@param options? {batch?: integer, bytes?: integer, device?: string}
---@return {loss: number, perplexity: number, tokens: integer, bits_per_byte?: number}
function M.evaluate(model, dataset, options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.train.evaluate", options, { batch = 8, bytes = none, device = none },
    { batch = "an integer >= 1", bytes = "an integer >= 1", device = "a string" })
  check_model("llm.train.evaluate", model)
  local loader = ty.data.DataLoader(dataset, { batch_size = o.batch, device = o.device })
  local was_training, sum, tokens = model.training, 0.0, 0
  model:eval()
  for batch in loader() do
    ty.scope(function()
      ty.no_grad(function()
        if batch.count > 0 then sum = sum + loss_of(model, batch):item() * batch.count end
      end)
    end)
    tokens = tokens + batch.count
  end
  model:train(was_training)
  if tokens == 0 then error("llm.train.evaluate: the dataset has no token that follows another", 2) end
  local loss = sum / tokens
  return { loss = loss, perplexity = math.exp(loss), tokens = tokens,
    bits_per_byte = o.bytes and sum / math.log(2) / o.bytes or nil }
end

-- AdamW whose decay is for matrices alone, as GPT-3's training has it: norms and biases are left where they are.
local function optimizer(model, o)
  local schedule = ty.optim.cosine { steps = o.steps, warmup = math.min(o.warmup, o.steps // 4), final = o.final }
  if o.optimizer then return o.optimizer(model, { lr = o.lr, schedule = schedule, clip_norm = o.clip_norm }) end
  local matrices, rest = {}, {}
  for _, p in ipairs(model:parameters()) do table.insert(p.ndim >= 2 and matrices or rest, p) end
  local groups = { { params = matrices, weight_decay = o.weight_decay } }
  if #rest > 0 then groups[2] = { params = rest, weight_decay = 0 } end
  return ty.optim.AdamW(groups, { lr = o.lr, beta2 = o.beta2, clip_norm = o.clip_norm,
    schedule = schedule })
end

--- Trains a model on a dataset of tycho.llm.data.Packed. options:
--   steps, batch (rows at a time, 8), accumulate (batches of a step, 1), seed (0)
--   lr (1e-3), warmup (50 steps, at most a quarter), final (0.1: the share of lr at the end of the cosine),
--   weight_decay (0.1), beta2 (0.95), clip_norm (1)
--   optimizer (a function of the model and { lr, schedule, clip_norm } that makes one in place of AdamW)
--   checkpoint (false: gradient checkpointing), device
--   every (0: steps between calls of evaluate(step), which returns numbers for the log), evaluate
--   folder (where checkpoints go), save_every (200), resume (false; true: go on from the checkpoint there, bit for bit
--   as if there had been no break, an error where there is none; "auto": start anew there and say so), pause (the step
--   after which to stop and save; the schedule is still that of `steps`)
--   log (folder of metrics.jsonl, which a resumed run continues), title, quiet
-- Returns the loss of every step.
---@param model LanguageModel
---@param dataset PackedDataset
---@param options table
---@return number[] losses
function M.fit(model, dataset, options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.train.fit", options, { steps = 0, batch = 8, accumulate = 1, seed = 0, lr = 1e-3,
    warmup = 50, final = 0.1, weight_decay = 0.1, beta2 = 0.95, clip_norm = 1.0, checkpoint = false, device = none,
    every = 0, evaluate = none, folder = none, save_every = 200, resume = false, pause = none, log = none,
    optimizer = none, title = "language model", quiet = false },
    { resume = 'a boolean or "auto"' })
  if not math.tointeger(o.accumulate) or o.accumulate < 1 then
    error("llm.train.fit: accumulate must be a positive integer, got " .. tostring(o.accumulate), 2)
  end
  local opt = optimizer(model, o)
  local loader = ty.data.DataLoader(dataset, { batch_size = o.batch, shuffle = true, seed = o.seed, device = o.device })
  local parts = { model = model, optimizer = opt, loader = loader }
  local losses, start = {}, 0
  if o.resume and not o.folder then error("llm.train.fit: resume needs the folder of the checkpoint", 2) end
  local saved = o.resume and ty.train.resume_checkpoint(o.folder, parts, o.resume)
  if saved then losses, start = saved.losses:tolist(), saved.step end
  local last = math.min(o.pause or o.steps, o.steps)
  local logger = o.log and ty.train.Logger(o.log, { resume = start })
  model:train()
  for step, _, log in ty.train.steps(nil, last, { start = start, title = o.title, quiet = o.quiet,
    logger = logger }) do
    local batches = {}
    for i = 1, o.accumulate do batches[i] = loader:next() end
    losses[step] = M.backward(model, batches, { checkpoint = o.checkpoint })
    local values = { loss = losses[step], rate = opt:rate() }
    values.norm = opt:step()
    opt:zero_grad()
    if o.evaluate and o.every > 0 and (step % o.every == 0 or step == last) then
      for name, value in pairs(o.evaluate(step)) do values[name] = value end
    end
    log(values)
    if o.folder and (step % o.save_every == 0 or step == last) then
      parts.step, parts.losses = step, ty.tensor(losses, { dtype = "f64" })
      ty.train.save_checkpoint(o.folder, parts)
    end
  end
  if logger then logger:close() end
  return losses
end

return M
