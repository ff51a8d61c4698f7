--- Momentum self-distillation with accumulated contrast: a large batch of contrast in the memory of a small one. Pham
-- et al. 2025, "Boosting Medical Vision-Language Pretraining via Momentum Self-Distillation under Limited Computing
-- Resources"; soft targets and queues as Li et al. 2021, "Align before Fuse" (ALBEF), have them, whose weight 0.4 is
-- the default here.
--
--     vlm.msd.fit(clip, loader, { steps = 500, cycle = 8 })    -- 8 batches of the loader are one step
--
-- Averaging the gradients of small batches leaves contrast small: each picture meets the texts of its own batch. Here
-- momentum copies of the towers, which need no gradient, embed all batches of a cycle first; then each batch's
-- pictures and texts, with a graph, are compared with the keys of the whole cycle, and of a queue of earlier ones.
-- Memory is that of one batch and of the keys. What a picture is to find is softened by what the momentum towers find.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local contrastive = require "tycho.vlm.contrastive"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local MOST = 100 -- of the scale, as in CLIP

-- ---- keys of earlier cycles ----

--- The last keys of pictures and of texts, oldest first out.
---@class KeyQueue
---@field size integer      pairs that it holds at most
---@field image? Tensor     [n, d], nil while it is empty
---@field text? Tensor      [n, d]
local KeyQueue = {}
KeyQueue.__index = KeyQueue
KeyQueue.__name = "KeyQueue"

--- An empty queue for `size` pairs of keys.
---@param size integer
---@return KeyQueue
function M.queue(size)
  expect("vlm.msd.queue", "size", size, "an integer >= 1")
  return setmetatable({ size = math.tointeger(size) }, KeyQueue)
end

local function matrix(x) return ty.is_tensor(x) and x.ndim == 2 and x:numel() > 0 end

--- Adds keys of pictures and their texts, [n, d] each; the oldest ones leave.
---@param image Tensor
---@param text Tensor
function KeyQueue:push(image, text)
  local who = "KeyQueue:push"
  if not matrix(image) or not matrix(text) or image.shape[1] ~= text.shape[1] or image.shape[2] ~= text.shape[2] then
    fail("%s: expected image and text [n, d] alike, got %s and %s", who, arguments.describe(image),
      arguments.describe(text))
  elseif self.image and self.image.shape[2] ~= image.shape[2] then
    fail("%s: image: expected keys of %d numbers, as those that it has, got %d", who, self.image.shape[2],
      image.shape[2])
  end
  ty.no_grad(function()
    for name, keys in pairs { image = image, text = text } do
      if self[name] then keys = ty.concat({ self[name], keys }, 0) end
      local extra = math.max(0, keys.shape[1] - self.size)
      self[name] = ty.keep(keys:narrow(0, extra, keys.shape[1] - extra):detach():clone())
    end
  end)
end

-- ---- one cycle ----

--- What queries are to find among keys: [n, keys], alpha times the momentum towers' own distribution, softmax of their
-- similarities, and 1 - alpha times the own key. query, key: the momentum towers' unit features [n, d], [keys, d];
-- first: the key that is the first query's own; the others' follow.
---@param query Tensor
---@param key Tensor
---@param scale number|Tensor
---@param alpha number
---@param first? integer  (0)
---@return Tensor
function M.targets(query, key, scale, alpha, first)
  local who = "vlm.msd.targets"
  expect(who, "query", query, "a tensor")
  expect(who, "key", key, "a tensor")
  expect(who, "scale", scale, "a tensor or a finite number")
  expect(who, "alpha", alpha, "a number in [0, 1]")
  first = expect(who, "first", first == nil and 0 or first, "an integer >= 0")
  if not matrix(query) or not matrix(key) or query.shape[2] ~= key.shape[2]
    or first + query.shape[1] > key.shape[1] then
    fail("%s: expected query [n, d] and key [%d + n or more, d], got %s and %s", who, first,
      arguments.describe(query), arguments.describe(key))
  end
  return ty.no_grad(function()
    local own = ty.arange(first, first + query.shape[1], { device = key.device }):one_hot(key.shape[1]):to(key.dtype)
    if alpha == 0 then return own end
    return (query:matmul(key:transpose(0, 1)) * scale):softmax(1) * alpha + own * (1 - alpha)
  end)
end

-- Unit features of a batch's pictures and texts.
local function features(model, batch)
  return nn.normalize(model:image_features(batch.pictures)),
    nn.normalize(model:text_features(batch.tokens, { mask = batch.mask }))
end

local function scale_of(model) return model.logit_scale:exp():clamp(nil, MOST) end

local defaults = { alpha = 0.4, queue = none }
local kinds = { alpha = "a number in [0, 1]", queue = "a table" }

--- Adds the gradients of one cycle: every batch's queries against the momentum keys of all batches, and of the queue.
-- teacher: the momentum towers, or the model itself. batches: a list of { pictures, tokens, mask }. options: alpha
-- (0.4: the share of soft targets; 0: one's own partner alone), queue (of vlm.msd.queue, which takes the new keys).
-- Returns the loss, the mean over all queries. Without queue and soft targets, and with the model as its own teacher,
-- that is the contrastive loss of the whole cycle as one batch, and its gradient that through the queries alone.
---@param model CLIPModel
---@param teacher CLIPModel
---@param batches table[]
---@param options? {alpha?: number, queue?: KeyQueue}
---@return number loss
function M.backward(model, teacher, batches, options)
  local who = "vlm.msd.backward"
  contrastive.check_model(who, model)
  expect(who, "teacher", teacher, "a module")
  contrastive.check_model(who, teacher)
  contrastive.check_batches(who, batches)
  local o = arguments.read(who, options, defaults, kinds)
  if o.queue and getmetatable(o.queue) ~= KeyQueue then
    fail("%s: queue: expected one of vlm.msd.queue, got %s", who, arguments.describe(o.queue))
  end
  local images, texts, keys = {}, {}, {}
  ty.no_grad(function()
    for i, batch in ipairs(batches) do images[i], texts[i] = ty.scope(features, teacher, batch) end
    keys.image, keys.text = ty.concat(images, 0), ty.concat(texts, 0)
  end)
  local fresh = { image = keys.image, text = keys.text }
  if o.queue and o.queue.image then
    for name, tensor in pairs(fresh) do keys[name] = ty.concat({ tensor, o.queue[name] }, 0) end
  end
  local count, start, sum = fresh.image.shape[1], 0, 0.0
  for i, batch in ipairs(batches) do
    sum = sum + ty.scope(function()
      local image, text = features(model, batch)
      local scale, soft = scale_of(model), ty.no_grad(scale_of, teacher)
      -- One direction: queries of one kind, which are to find keys of the other as the teacher's queries do.
      local function find(query, guide, key)
        local wanted = M.targets(guide, key, soft, o.alpha, start)
        return ty.cross_entropy(query:matmul(key:transpose(0, 1)) * scale, wanted, nil, -100, 0, "sum")
      end
      local loss = (find(image, images[i], keys.text) + find(text, texts[i], keys.image)) * (0.5 / count)
      loss:backward()
      return loss:item()
    end)
    start = start + images[i].shape[1]
  end
  if o.queue then o.queue:push(fresh.image, fresh.text) end
  return sum
end

-- ---- training ----

local own_defaults = { cycle = 8, momentum = 0.995, alpha = 0.4, ramp = 0, queue = 0, inputs = none }
local own_kinds = { cycle = "an integer >= 1", momentum = "a number in [0, 1)", alpha = "a number in [0, 1]",
  ramp = "an integer >= 0", queue = "an integer >= 0", inputs = "a function" }

--- Trains a CLIPModel so: a step takes `cycle` batches of the loader. The momentum towers are the average that
-- train.fit keeps, so that checkpoints have them; a queue begins empty when a run is resumed. options: those of
-- train.fit but average, and cycle (8), momentum (0.995; 0: the model is its own teacher), alpha (0.4), ramp (0: steps
-- over which alpha grows from 0), queue (0: pairs of keys of earlier steps), inputs (as of vlm.fit_contrastive).
-- Returns the losses, and the model of the momentum towers.
---@param model CLIPModel
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return Module momentum
function M.fit(model, loader, options)
  local who = "vlm.msd.fit"
  contrastive.check_model(who, model)
  expect(who, "options", options, "a table")
  local own, rest = {}, { title = "momentum self-distillation" }
  for key, value in pairs(options) do
    if own_defaults[key] ~= nil then own[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, own, own_defaults, own_kinds)
  if rest.average ~= nil then fail("%s: average: expected nil: momentum is the average here", who) end
  rest.average = o.momentum
  local queue, done = o.queue > 0 and M.queue(o.queue) or nil, 0
  local next_batches = contrastive.cycles(o.cycle, o.inputs)
  function rest.backward(network, next_batch, averaged)
    ty.no_grad(function() network.logit_scale:clamp_(nil, math.log(MOST)) end)
    local alpha = o.alpha * (o.ramp > 0 and math.min(1, done / o.ramp) or 1)
    done = done + 1
    return { loss = M.backward(network, averaged or network, next_batches(next_batch), { alpha = alpha,
      queue = queue }) }
  end
  return ty.train.fit(model, loader, rest)
end

return M
