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

--- The loss of a batch { tokens, targets, cu_seqlens, longest } of tycho.llm.data.Packed or a data set of texts: mean
-- nats per token that counts.
---@param model LanguageModel
---@param batch table
---@return Tensor loss
function M.loss(model, batch)
  check_model("llm.train.loss", model)
  arguments.expect("llm.train.loss", "batch", batch, "a table")
  return loss_of(model, batch)
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

--- Trains a model on a dataset of tycho.llm.data.Packed. options: those of train.fit but loss, and
--   batch (rows at a time, 8), accumulate (batches of a step, 1), seed (0)
--   checkpoint (false: gradient checkpointing), device
-- Returns the loss of every step.
---@param model LanguageModel
---@param dataset PackedDataset
---@param options table
---@return number[] losses
function M.fit(model, dataset, options)
  local own, rest = { batch = 8, accumulate = 1, seed = 0, checkpoint = false, device = arguments.none },
    { title = "language model" }
  arguments.expect("llm.train.fit", "options", options, "a table")
  local given = {}
  for key, value in pairs(options) do
    if own[key] ~= nil then given[key] = value else rest[key] = value end
  end
  local o = arguments.read("llm.train.fit", given, own, { batch = "an integer >= 1", accumulate = "an integer >= 1",
    seed = "an integer", device = "a string" })
  check_model("llm.train.fit", model)
  local loader = ty.data.DataLoader(dataset, { batch_size = o.batch, shuffle = true, seed = o.seed, device = o.device })
  rest.backward = function(_, next_batch)
    local batches = {}
    for i = 1, o.accumulate do batches[i] = next_batch() end
    return { loss = M.backward(model, batches, { checkpoint = o.checkpoint }) }
  end
  return ty.train.fit(model, loader, rest)
end

return M
