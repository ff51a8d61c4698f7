--- Training pictures and texts to meet in one space. Radford et al. 2021, "Learning Transferable Visual Models From
-- Natural Language Supervision"; van den Oord et al. 2018, "Representation Learning with Contrastive Predictive
-- Coding".
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect = arguments.expect
local M = {}

local MOST = 100 -- the scale of the similarities goes no further, as in CLIP

--- The symmetric loss of pictures and texts that belong together, row by row: the mean of the cross entropy of finding
-- each picture's text among all texts and each text's picture among all pictures. image, text [n, d] (of any length:
-- cosines count); scale: what the cosines are multiplied by, a number or a tensor, at most 100. Returns the loss and
-- the logits [n, n], a row for each picture.
---@param image Tensor
---@param text Tensor
---@param scale number|Tensor
---@return Tensor loss
---@return Tensor logits
function M.loss(image, text, scale)
  local who = "vlm.contrastive_loss"
  expect(who, "image", image, "a tensor")
  expect(who, "text", text, "a tensor")
  if image.ndim ~= 2 or image:numel() == 0 or table.concat(image.shape, " ") ~= table.concat(text.shape, " ") then
    arguments.fail("%s: expected image and text [n, d] alike, got %s and %s", who, arguments.describe(image),
      arguments.describe(text))
  end
  if ty.is_tensor(scale) then
    scale = scale:clamp(nil, MOST)
  else
    scale = math.min(expect(who, "scale", scale, "a tensor or a finite number"), MOST)
  end
  local logits = nn.normalize(image):matmul(nn.normalize(text):transpose(0, 1)) * scale
  local own = ty.arange(image.shape[1], { device = image.device })
  return (nn.cross_entropy(logits, own) + nn.cross_entropy(logits:transpose(0, 1), own)) * 0.5, logits
end

-- The sum of -log sigmoid(z (t <x, y> + b)) of some pictures and all texts; first: the number of the first picture.
local function piece(image, text, owner, scale, bias, first)
  local logits = image:matmul(text:transpose(0, 1)) * scale + bias
  local rows = ty.arange(image.shape[1], { device = image.device }) + first
  local own = rows:unsqueeze(1):eq(owner:unsqueeze(0)):to(logits.dtype)
  return ty.bce_with_logits(logits, own, nil, nil, "sum")
end

--- As sigmoid_loss(), with the name of the function that errors are to name.
---@param who string
function M.sigmoid(who, image, text, scale, bias, options)
  expect(who, "image", image, "a tensor")
  expect(who, "text", text, "a tensor")
  if image.ndim ~= 2 or text.ndim ~= 2 or image.shape[2] ~= text.shape[2] or image:numel() == 0 or text:numel() == 0
  then
    arguments.fail("%s: expected image [n, d] and text [m, d], got %s and %s", who, arguments.describe(image),
      arguments.describe(text))
  end
  expect(who, "scale", scale, "a tensor or a finite number")
  expect(who, "bias", bias, "a tensor or a finite number")
  local o = arguments.read(who, options, { owner = arguments.none, chunk = arguments.none },
    { owner = "a tensor", chunk = "an integer >= 1" })
  local n, m, owner = image.shape[1], text.shape[1], o.owner
  if owner == nil then
    if n ~= m then arguments.fail("%s: owner: expected i64 [%d] where there are %d pictures, got nil", who, m, n) end
    owner = ty.arange(m, { device = image.device })
  elseif owner.ndim ~= 1 or owner.shape[1] ~= m or owner.dtype ~= "i64" then
    arguments.fail("%s: owner: expected i64 [%d], got %s", who, m, arguments.describe(owner))
  end
  image, text = nn.normalize(image), nn.normalize(text)
  local chunk = math.min(o.chunk or n, n)
  if chunk == n then return piece(image, text, owner, scale, bias, 0) / n end
  local sum
  for first = 0, n - 1, chunk do
    local part = ty.checkpoint(piece, image:narrow(0, first, math.min(chunk, n - first)), text, owner, scale, bias,
      first)
    sum = sum and sum + part or part
  end
  return sum / n
end

--- The sigmoid loss of pictures [n, d] and texts [m, d] (cosines count): the sum over all pairs of -log sigmoid(z (t
-- <x_i, y_j> + b)), z = 1 where text j is one of picture i's and else -1, over n. Zhai et al. 2023, "Sigmoid Loss for
-- Language Image Pre-Training". scale and bias: t and b, numbers or tensors. options: owner (i64 [m]: the picture that
-- each text is of; by default text j is of picture j), chunk (pictures at a time, whose similarities are computed again
-- in the backward pass and never stand in memory all at once; by default all).
---@param image Tensor
---@param text Tensor
---@param scale number|Tensor
---@param bias number|Tensor
---@param options? {owner?: Tensor, chunk?: integer}
---@return Tensor loss
function M.sigmoid_loss(image, text, scale, bias, options)
  return M.sigmoid("vlm.sigmoid_loss", image, text, scale, bias, options)
end

-- The loss of features by a model's scale and bias: kind "softmax" or "sigmoid", by default the one with the bias where
-- the model has one, as SigLIP does.
local function loss_of(who, model, kind, image, text)
  if kind == "softmax" or not kind and not model.logit_bias then return M.loss(image, text, model.logit_scale:exp()) end
  return M.sigmoid(who, image, text, model.logit_scale:exp(), model.logit_bias)
end

local loss_kinds = { loss = '"softmax" or "sigmoid"' }

local function check_loss(who, model, kind)
  if kind == "sigmoid" and not ty.is_tensor(model.logit_bias) then
    arguments.fail("%s: loss: expected softmax of a model without logit_bias, got sigmoid", who)
  end
end

-- Pictures, tokens, mask and sizes of a batch, by the names that data sets give them.
local function inputs_of(batch)
  return batch.pictures or batch.image, batch.tokens, batch.mask, batch.sizes
end

-- Features of the pictures and of the texts of a batch.
local function features_of(model, batch)
  return model:image_features(batch.pictures, batch.sizes and { sizes = batch.sizes } or nil),
    model:text_features(batch.tokens, { mask = batch.mask })
end

--- An error of the function `who` unless the model has what CLIPModel has.
function M.check_model(who, model)
  expect(who, "model", model, "a module")
  if not (model.image_features and model.text_features and ty.is_tensor(model.logit_scale)) then
    arguments.fail("%s: model: expected a CLIPModel (image_features, text_features, logit_scale), got %s", who,
      arguments.describe(model))
  end
end

--- Adds the gradients of the symmetric loss of several small batches taken as one large batch, to the digit of
-- rounding, in the memory of a small one: features of all are computed without a graph, the loss is differentiated
-- with respect to them, and each batch is run again to carry that to the weights. Gao et al. 2021, "Scaling Deep
-- Contrastive Learning Batch Size under Memory Limited Setup". batches: a list of { pictures, tokens, mask, sizes (of
-- pictures in patches) }. options: loss ("softmax" or "sigmoid"; by default the latter of models with a logit_bias).
-- Returns the loss of the whole.
---@param model CLIPModel
---@param batches table[]
---@param options? {loss?: string}
---@return number loss
function M.cached_backward(model, batches, options)
  local who = "vlm.cached_backward"
  M.check_model(who, model)
  M.check_batches(who, batches)
  local o = arguments.read(who, options, { loss = arguments.none }, loss_kinds)
  check_loss(who, model, o.loss)
  local images, texts, states = {}, {}, {}
  ty.no_grad(function()
    for i, batch in ipairs(batches) do
      states[i] = ty.rng_state()
      images[i], texts[i] = ty.scope(features_of, model, batch)
    end
  end)
  local image = ty.concat(images, 0):detach():requires_grad_()
  local text = ty.concat(texts, 0):detach():requires_grad_()
  local loss = loss_of(who, model, o.loss, image, text)
  loss:backward()
  local start, after = 0, ty.rng_state()
  for i, batch in ipairs(batches) do
    local rows = images[i].shape[1]
    ty.scope(function()
      ty.rng_state(states[i]) -- dropout falls as it did
      local a, b = features_of(model, batch)
      local carried = (a * image.grad:narrow(0, start, rows)):sum() + (b * text.grad:narrow(0, start, rows)):sum()
      carried:backward()
    end)
    start = start + rows
  end
  ty.rng_state(after)
  return loss:item()
end

--- Adds the mean gradient of the symmetric losses of several small batches, each contrasted in itself: plain gradient
-- accumulation, to compare with. options: as of cached_backward(). Returns the mean loss.
---@param model CLIPModel
---@param batches table[]  of { pictures, tokens, mask, sizes }
---@param options? {loss?: string}
---@return number loss
function M.accumulated_backward(model, batches, options)
  local who, sum = "vlm.accumulated_backward", 0
  M.check_model(who, model)
  M.check_batches(who, batches)
  local o = arguments.read(who, options, { loss = arguments.none }, loss_kinds)
  check_loss(who, model, o.loss)
  for _, batch in ipairs(batches) do
    sum = sum + ty.scope(function()
      local loss = loss_of(who, model, o.loss, features_of(model, batch)) / #batches
      loss:backward()
      return loss:item()
    end)
  end
  return sum
end

--- An error of the function `who` unless `batches` is a list of { pictures, tokens, mask? } with tensors.
function M.check_batches(who, batches)
  expect(who, "batches", batches, "a list of tables")
  if #batches == 0 then arguments.fail("%s: batches: expected at least one, got none", who) end
  for i, batch in ipairs(batches) do
    if not ty.is_tensor(batch.pictures) or not ty.is_tensor(batch.tokens)
      or batch.mask ~= nil and not ty.is_tensor(batch.mask) then
      arguments.fail("%s: batches: expected pictures, tokens and perhaps mask, got %s, %s and %s in batch %d", who,
        arguments.describe(batch.pictures), arguments.describe(batch.tokens), arguments.describe(batch.mask), i)
    end
  end
end

--- A function of train.fit's next() that gives the batches of a cycle, as a list of { pictures, tokens, mask, sizes }.
---@param count integer     batches of a cycle
---@param inputs? function  of a batch: pictures, tokens, mask, sizes; by default its fields of these names (or image)
---@return fun(next: function): table[]
function M.cycles(count, inputs)
  local who = "vlm.cycles"
  expect(who, "count", count, "an integer > 0")
  expect(who, "inputs", inputs, "a function or nil")
  inputs = inputs or inputs_of
  return function(next_batch)
    local list = {}
    for i = 1, count do
      local pictures, tokens, mask, sizes = inputs(next_batch())
      list[i] = { pictures = pictures, tokens = tokens, mask = mask, sizes = sizes }
    end
    M.check_batches(who, list)
    return list
  end
end

--- Trains a CLIPModel or a SiglipModel on batches of pictures and texts that belong together: by the symmetric loss,
-- with the logarithm of the scale learnt and kept at most log 100, or by the sigmoid loss, with the bias learnt too.
-- The optimizer, schedule, average, evaluation and checkpoints are those of train.fit, whose options are taken; and
--   loss       "softmax" or "sigmoid"; by default the latter of models with a logit_bias, as SigLIP's have
--   inputs     a function of a batch that returns pictures, tokens, mask (nil: none) and of pictures in patches sizes;
--              by default its fields pictures (or image), tokens, mask and sizes
--   checkpoint (false: gradient checkpointing)
-- Returns what train.fit returns. The log has the accuracy of finding pictures' texts in the batch.
---@param model CLIPModel
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return Module averaged
function M.fit(model, loader, options)
  local who = "vlm.fit_contrastive"
  M.check_model(who, model)
  expect(who, "options", options, "a table")
  local own = { inputs = options.inputs, checkpoint = options.checkpoint, loss = options.loss }
  local rest = { title = "contrastive" }
  for key, value in pairs(options) do
    if own[key] == nil then rest[key] = value end
  end
  local o = arguments.read(who, own, { inputs = arguments.none, checkpoint = false, loss = arguments.none },
    { inputs = "a function", loss = loss_kinds.loss })
  check_loss(who, model, o.loss)
  local softmax = o.loss == "softmax" or not o.loss and not model.logit_bias
  local inputs = o.inputs or inputs_of
  function rest.loss(network, batch)
    local pictures, tokens, mask, sizes = inputs(batch)
    if not ty.is_tensor(pictures) or not ty.is_tensor(tokens) then
      arguments.fail("%s: inputs: expected pictures and tokens of a batch, got %s and %s", who,
        arguments.describe(pictures), arguments.describe(tokens))
    end
    if softmax then ty.no_grad(function() network.logit_scale:clamp_(nil, math.log(MOST)) end) end
    local image = network:image_features(pictures, { checkpoint = o.checkpoint, sizes = sizes })
    local text = network:text_features(tokens, { mask = mask, checkpoint = o.checkpoint })
    local loss, logits = loss_of(who, network, softmax and "softmax" or "sigmoid", image, text)
    logits = logits or ty.no_grad(function()
      return nn.normalize(image):matmul(nn.normalize(text):transpose(0, 1))
    end)
    local own_row = ty.arange(logits.shape[1], { device = logits.device })
    return loss, { accuracy = logits:argmax(1):eq(own_row):to("f32"):mean(), scale = network.logit_scale:exp() }
  end
  return ty.train.fit(model, loader, rest)
end

return M
