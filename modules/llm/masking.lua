--- The objective of masked language models: some tokens are hidden, and the encoder tells what they were. Devlin et al.
-- 2019, "BERT: Pre-training of Deep Bidirectional Transformers".
--
--     local inputs, labels = llm.masking.mask(tokens, { mask = 103, vocabulary = 30522 })
--     local loss = bert:loss(inputs, labels)
--     llm.masking.fit(bert, rows, { mask = 103, vocabulary = 30522, steps = 1000, lr = 1e-3 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local none = arguments.none
local defaults = { mask = none, vocabulary = none, share = 0.15, hidden = 0.8, random = 0.1, skip = none }
local kinds = { mask = "an integer >= 0", vocabulary = "an integer >= 1", share = "a number in [0, 1]",
  hidden = "a number in [0, 1]", random = "a number in [0, 1]", skip = "a tensor" }

local function read(who, options)
  local o = arguments.read(who, options, defaults, kinds)
  expect(who, "mask", o.mask, kinds.mask)
  expect(who, "vocabulary", o.vocabulary, kinds.vocabulary)
  if o.hidden + o.random > 1 + 1e-12 then
    fail("%s: hidden and random: expected a sum of at most 1, got %g", who, o.hidden + o.random)
  end
  return o
end

--- Chooses tokens at random and hides them. options: mask (the token that stands for a hidden one), vocabulary (random
-- tokens are below it), share (0.15: of the tokens are asked for), hidden (0.8: of these become the mask), random (0.1:
-- become another token; the rest stay as they are), skip (bool, shaped like tokens: never asked for, such as padding).
---@param tokens Tensor i64, any shape
---@param options table
---@return Tensor inputs  shaped like tokens
---@return Tensor labels  the tokens that are asked for, -100 elsewhere
function M.mask(tokens, options)
  local who = "llm.masking.mask"
  expect(who, "tokens", tokens, "a tensor")
  if tokens.dtype ~= "i64" then fail("%s: tokens: expected i64, got %s", who, tokens.dtype) end
  local o = read(who, options)
  return ty.no_grad(function()
    local on = { device = tokens.device }
    local asked = ty.rand(tokens.shape, on):lt(o.share)
    if o.skip then asked = asked:logical_and(o.skip:logical_not()) end
    local how = ty.rand(tokens.shape, on)
    local others = ty.randint(0, o.vocabulary, tokens.shape, on)
    local inputs = ty.where(asked:logical_and(how:lt(o.hidden)), ty.full_like(tokens, o.mask), tokens)
    inputs = ty.where(asked:logical_and(how:ge(o.hidden)):logical_and(how:lt(o.hidden + o.random)), others, inputs)
    return inputs, ty.where(asked, tokens, ty.full_like(tokens, -100))
  end)
end

--- A long text's tokens as rows of a length; what does not fill the last one is left out.
---@param tokens Tensor   [n], integers
---@param length integer
---@return Tensor i64 [n // length, length]
function M.rows(tokens, length)
  local who = "llm.masking.rows"
  expect(who, "tokens", tokens, "a tensor")
  expect(who, "length", length, "an integer >= 1")
  if tokens.ndim ~= 1 or tokens.shape[1] < length then
    fail("%s: tokens: expected at least %d in one dimension, got %s", who, length, arguments.describe(tokens))
  end
  local n = tokens.shape[1] // length
  return tokens:narrow(0, 0, n * length):to("i64"):reshape(n, length)
end

--- The mean loss of a masked language model over rows of tokens, each masked once, by the seed. options: those of
-- mask(), and batch (32 rows at a time), seed (0).
---@param model LanguageModel
---@param rows Tensor i64 [n, t]
---@param options table
---@return {loss: number, tokens: integer}  nats a token, and how many were asked for
function M.evaluate(model, rows, options)
  local who = "llm.masking.evaluate"
  expect(who, "model", model, "a module")
  expect(who, "rows", rows, "a tensor")
  expect(who, "options", options, "a table")
  local given, batch, seed = {}, options.batch or 32, options.seed or 0
  for key, value in pairs(options) do if key ~= "batch" and key ~= "seed" then given[key] = value end end
  expect(who, "batch", batch, "an integer >= 1")
  expect(who, "seed", seed, "an integer")
  read(who, given)
  local was_training, before, sum, count = model.training, ty.rng_state(), 0.0, 0
  model:eval()
  ty.manual_seed(seed)
  for from = 0, rows.shape[1] - 1, batch do
    ty.scope(function()
      local inputs, labels = M.mask(rows:narrow(0, from, math.min(batch, rows.shape[1] - from)), given)
      local asked = labels:ne(-100):to("i64"):sum():item()
      if asked > 0 then
        sum = sum + ty.no_grad(function() return model:loss(inputs, labels) end):item() * asked
        count = count + asked
      end
    end)
  end
  model:train(was_training)
  ty.rng_state(before)
  if count == 0 then fail("%s: rows: expected some tokens to be asked for, got none", who) end
  return { loss = sum / count, tokens = count }
end

--- Trains a masked language model on rows of tokens, which come in a random order and are masked anew each time.
-- options: those of mask() but skip, and steps, lr (1e-3), batch (32), warmup (a tenth of the steps), weight_decay
-- (0.01), clip_norm (1), seed (0: of the order; masks come from the generator).
---@param model LanguageModel
---@param rows Tensor i64 [n, t]
---@param options table
---@return number[] losses  of the steps
function M.fit(model, rows, options)
  local who = "llm.masking.fit"
  expect(who, "model", model, "a module")
  expect(who, "rows", rows, "a tensor")
  local o = arguments.read(who, options, { mask = none, vocabulary = none, share = 0.15, hidden = 0.8, random = 0.1,
    steps = none, lr = 1e-3, batch = 32, warmup = none, weight_decay = 0.01, clip_norm = 1, seed = 0 },
    { mask = kinds.mask, vocabulary = kinds.vocabulary, share = kinds.share, hidden = kinds.hidden,
    random = kinds.random, steps = "an integer >= 0", lr = "a finite number >= 0", batch = "an integer >= 1",
    warmup = "an integer >= 0", seed = "an integer" })
  expect(who, "steps", o.steps, "an integer >= 0")
  local masking = read(who, { mask = o.mask, vocabulary = o.vocabulary, share = o.share, hidden = o.hidden,
    random = o.random })
  local optimizer = ty.optim.AdamW(model, { lr = o.lr, weight_decay = o.weight_decay, clip_norm = o.clip_norm,
    schedule = ty.optim.linear { steps = math.max(1, o.steps), warmup = o.warmup or o.steps // 10 } })
  local loader = ty.data.DataLoader(ty.data.TensorDataset { rows = rows }, { batch_size = o.batch, shuffle = true,
    seed = o.seed, drop_last = rows.shape[1] >= o.batch })
  local losses, was_training = {}, model.training
  model:train()
  for step = 1, o.steps do
    ty.scope(function()
      local loss = model:loss(M.mask(loader:next().rows, masking))
      losses[step] = loss:item()
      if losses[step] == losses[step] then optimizer:step(loss) end -- a batch where nothing was asked for has no mean
    end)
  end
  model:train(was_training)
  return losses
end

return M
