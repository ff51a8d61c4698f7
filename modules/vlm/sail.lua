--- SAIL: two frozen encoders, one of pictures and one of texts, brought into one space by a light head on each. Zhang
-- et al. 2025, "Assessing and Learning Alignment of Unimodal Vision and Language Models".
--
--     local image = vlm.embed(#pictures, function(start, rows) return encode(start, rows) end)   -- once, frozen
--     local text = vlm.embed(...)                            -- [n, width], or [n, k, width] of k captions each
--     local aligned = vlm.sail.Alignment { image = 192, text = 256, dim = 128 }
--     vlm.sail.fit(aligned, image, text, { steps = 500, batch = 1024 })
--     vlm.zero_shot(aligned:image_features(image), aligned:text_features(prompts), labels)
--
-- The encoders are not part of the model: features are computed once, and a batch of heads alone may be large. The loss
-- is the sigmoid loss of SigLIP, in which every pair of picture and text is a question of its own, so that it is
-- computed in pieces, and a picture may have several right texts. With kind = "linear" the same is the paper's
-- alignment probing: how well two spaces can be aligned by linear maps. That k-NN tells this better than a linear
-- probe does is the paper's finding; knn() is for that.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local contrastive = require "tycho.vlm.contrastive"
local retrieval = require "tycho.vlm.retrieval"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local parameter = require("tycho.nn.options").parameter
local M = {}

-- ---- the heads ----

-- The gated-linear head: W3 (relu(W1 x) * (W2 x)), of normed features.
local Gated = nn.module "SailGatedHead"

function Gated:init(inputs, width, outputs)
  self.norm = nn.LayerNorm(inputs)
  self.gate, self.value = nn.Linear(inputs, width), nn.Linear(inputs, width)
  self.out = nn.Linear(width, outputs)
end

function Gated:forward(x)
  x = self.norm(x)
  return self.out(self.gate(x):relu() * self.value(x))
end

-- Alignment probing: one linear layer.
local Linear = nn.module "SailLinearHead"

function Linear:init(inputs, _, outputs)
  self.norm = nn.LayerNorm(inputs)
  self.out = nn.Linear(inputs, outputs)
end

function Linear:forward(x) return self.out(self.norm(x)) end

--- A head for features of pictures and one for those of texts, with the scale and the bias of the sigmoid loss.
---@class SailAlignment: Module
---@field logit_scale Tensor  the logarithm of t
---@field logit_bias Tensor   b
local Alignment = nn.module "SailAlignment"
M.Alignment = Alignment

--- options: image and text (widths of the encoders' features), dim (of the common space, 128), width (of the gated
-- layers, 4 times dim), kind ("glu"; "linear": alignment probing), scale (10) and bias (-10), with which t and b begin.
---@param options table
function Alignment:init(options)
  local who = "vlm.sail.Alignment"
  local o = arguments.read(who, options, { image = none, text = none, dim = 128, width = none, kind = "glu", scale = 10,
    bias = -10 }, { image = "an integer >= 1", text = "an integer >= 1", dim = "an integer >= 1",
    width = "an integer >= 1", kind = '"glu" or "linear"', scale = "a finite number > 0", bias = "a finite number" })
  expect(who, "image", o.image, "an integer >= 1")
  expect(who, "text", o.text, "an integer >= 1")
  local Head, width = o.kind == "glu" and Gated or Linear, o.width or 4 * o.dim
  self.widths = { image = o.image, text = o.text }
  self.image_head, self.text_head = Head(o.image, width, o.dim), Head(o.text, width, o.dim)
  self.logit_scale = parameter({}, function(t) t:fill_(math.log(o.scale)) end)
  self.logit_bias = parameter({}, function(t) t:fill_(o.bias) end)
end

local function aligned(self, x, side)
  if not ty.is_tensor(x) or x.ndim ~= 2 or x.shape[2] ~= self.widths[side] then
    fail("SailAlignment: %s: expected features [n, %d], got %s", side, self.widths[side], arguments.describe(x))
  end
  return nn.normalize(self[side .. "_head"](x))
end

--- Features [n, dim] of length 1 of pictures, from the frozen encoder's [n, image].
---@param x Tensor
---@return Tensor
function Alignment:image_features(x) return aligned(self, x, "image") end

--- Features [n, dim] of length 1 of texts, from the frozen encoder's [n, text].
---@param x Tensor
---@return Tensor
function Alignment:text_features(x) return aligned(self, x, "text") end

--- Similarities t <x_i, y_j> + b [pictures, texts] of the encoders' features.
---@param image Tensor
---@param text Tensor
---@return Tensor logits
function Alignment:forward(image, text)
  return self:image_features(image):matmul(self:text_features(text):transpose(0, 1)) * self.logit_scale:exp()
    + self.logit_bias
end

-- ---- the loss ----

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
function M.loss(image, text, scale, bias, options)
  return contrastive.sigmoid("vlm.sail.loss", image, text, scale, bias, options)
end

-- ---- training ----

local defaults = { batch = 1024, seed = 0, loss = "sigmoid", chunk = none }
local kinds = { batch = "an integer >= 2", seed = "an integer", loss = '"sigmoid" or "softmax"',
  chunk = "an integer >= 1" }

-- Features of a batch of texts [n, k, width] as [n * k, width], and the picture of each.
local function with_owners(text)
  if text.ndim == 2 then return text, ty.arange(text.shape[1], { device = text.device }) end
  local n, k = text.shape[1], text.shape[2]
  local owner = ty.arange(n, { device = text.device }):unsqueeze(1):expand(n, k):reshape(n * k)
  return text:reshape(n * k, text.shape[3]), owner
end

--- Trains the heads on features of pictures [n, image] and of their texts [n, text], or [n, k, text] where each picture
-- has k of them, which are all right. options: those of train.fit (steps, lr, ...; weight_decay 1e-4 here), and batch
-- (1024: pictures of a step), seed (0: of their order), loss ("sigmoid"; "softmax": CLIP's, of each picture's first
-- text), chunk (of the sigmoid loss). Returns what train.fit returns.
---@param model SailAlignment
---@param image Tensor
---@param text Tensor
---@param options table
---@return number[] losses
---@return Module averaged
function M.fit(model, image, text, options)
  local who = "vlm.sail.fit"
  expect(who, "model", model, "a module")
  if not (model.image_head and model.logit_bias) then
    fail("%s: model: expected a SailAlignment, got %s", who, arguments.describe(model))
  end
  expect(who, "image", image, "a tensor")
  expect(who, "text", text, "a tensor")
  if image.ndim ~= 2 or (text.ndim ~= 2 and text.ndim ~= 3) or image:numel() == 0 or image.shape[1] ~= text.shape[1]
  then
    fail("%s: expected image [n, d] and text [n, e] or [n, k, e], got %s and %s", who, arguments.describe(image),
      arguments.describe(text))
  end
  expect(who, "options", options, "a table")
  local own, rest = {}, { title = "alignment", weight_decay = 1e-4 }
  for key, value in pairs(options) do
    if defaults[key] ~= nil then own[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, own, defaults, kinds)
  local set = ty.data.TensorDataset { image = image, text = text }
  local loader = ty.data.DataLoader(set, { batch_size = math.min(o.batch, image.shape[1]), shuffle = true,
    seed = o.seed, drop_last = true, device = model:device() })
  function rest.loss(network, batch)
    local scale = network.logit_scale:exp()
    if o.loss == "softmax" then
      local first = batch.text.ndim == 3 and batch.text:select(1, 0) or batch.text
      return (contrastive.loss(network:image_features(batch.image), network:text_features(first), scale))
    end
    local texts, owner = with_owners(batch.text)
    return M.loss(network:image_features(batch.image), network:text_features(texts), scale, network.logit_bias,
      { owner = owner, chunk = o.chunk })
  end
  return ty.train.fit(model, loader, rest)
end

--- New heads for features, trained with a seed, in evaluation mode. options: kind ("glu" or "linear"), dim, seed (0),
-- device ("cpu"), and those of fit().
---@param image Tensor  [n, d]
---@param text Tensor   [n, e] or [n, k, e]
---@param options table
---@return SailAlignment
function M.aligned(image, text, options)
  local who = "vlm.sail.aligned"
  expect(who, "image", image, "a tensor")
  expect(who, "text", text, "a tensor")
  expect(who, "options", options, "a table")
  local own, rest = { image = image.shape[image.ndim], text = text.shape[text.ndim] }, {}
  for key, value in pairs(options) do
    if key == "kind" or key == "dim" then own[key] = value elseif key ~= "device" then rest[key] = value end
  end
  ty.manual_seed(expect(who, "seed", options.seed, "an integer or nil") or 0)
  local model = nn.with_defaults({ device = expect(who, "device", options.device, "a string or nil") or "cpu" },
    function() return M.Alignment(own) end)
  M.fit(model, image, text, rest)
  return model:eval()
end

-- ---- classes by their names ----

--- Features of what names classes, of each prompt's texts apart: for zero_shot() with one alignment after another.
---@param names string[]
---@param read fun(texts: string[]): Tensor  features [names, e] of texts, before alignment
---@param prompts? string[]  with %s for the name (vlm.prompts)
---@return Tensor[]
function M.prompts(names, read, prompts)
  local who = "vlm.sail.prompts"
  expect(who, "names", names, "a list of strings")
  expect(who, "read", read, "a function")
  prompts = expect(who, "prompts", prompts == nil and retrieval.prompts or prompts, "a list of strings")
  local list = {}
  for i, prompt in ipairs(prompts) do
    local texts = {}
    for k, name in ipairs(names) do texts[k] = prompt:format(name) end
    list[i] = expect(who, "what read gives", read(texts), "a tensor")
  end
  return list
end

--- The share of pictures whose class is found by the aligned features of its prompts, summed; and the classes found.
---@param model SailAlignment
---@param prompts Tensor[]  of prompts()
---@param image Tensor      features [n, d]
---@param labels Tensor     i64 [n]
---@return number accuracy
---@return Tensor found
function M.zero_shot(model, prompts, image, labels)
  local who = "vlm.sail.zero_shot"
  expect(who, "model", model, "a module")
  expect(who, "prompts", prompts, "a list of tensors")
  if #prompts == 0 then fail("%s: prompts: expected at least one, got none", who) end
  return ty.no_grad(function()
    local sum = model:text_features(prompts[1])
    for i = 2, #prompts do sum = sum + model:text_features(prompts[i]) end
    return retrieval.zero_shot(model:image_features(image), sum, labels)
  end)
end

-- ---- features of texts ----

--- A text's features by a language model: the mean of its last states over the text's tokens. Texts of like length are
-- read together; the result is in their order.
---@param model LanguageModel
---@param tokenizer Tokenizer
---@param texts string[]
---@return Tensor [texts, width]
function M.read(model, tokenizer, texts)
  local who = "vlm.sail.read"
  expect(who, "model", model, "a module")
  if type(tokenizer) ~= "table" and type(tokenizer) ~= "userdata" or ty.is_tensor(tokenizer)
    or not tokenizer.encode_batch then
    fail("%s: tokenizer: expected one with encode_batch(), got %s", who, arguments.describe(tokenizer))
  end
  expect(who, "texts", texts, "a list of strings")
  if #texts == 0 then fail("%s: texts: expected at least one, got none", who) end
  local order, place, device = {}, {}, model:device()
  for i = 1, #texts do order[i] = i end
  table.sort(order, function(a, b) return #texts[a] < #texts[b] or #texts[a] == #texts[b] and a < b end)
  for k, i in ipairs(order) do place[i] = k - 1 end
  local features = retrieval.embed(#texts, function(start, count)
    local some = {}
    for k = 1, count do some[k] = texts[order[start + k]] end
    local tokens, mask = tokenizer:encode_batch(some, { pad_id = 0 })
    mask = mask:to { dtype = "f32", device = device }:unsqueeze(2)
    return (model:hidden(tokens:to { device = device }) * mask):sum(1) / mask:sum(1)
  end)
  return features:index_select(0, ty.tensor(place):to { device = device })
end

-- ---- what encoders are assessed by ----

--- The class token joined with the mean of the patches, as the paper takes a vision transformer's features: hidden
-- states [n, 1 + patches, d] to [n, 2 d]. first: false where there is no class token; then the mean is joined with the
-- largest of each feature.
---@param states Tensor
---@param first? boolean  (true)
---@return Tensor
function M.joined(states, first)
  local who = "vlm.sail.joined"
  expect(who, "states", states, "a tensor")
  expect(who, "first", first, "a boolean or nil")
  if states.ndim ~= 3 or states:numel() == 0 or first ~= false and states.shape[2] < 2 then
    fail("%s: states: expected [n, 1 + patches, d], got %s", who, arguments.describe(states))
  end
  if first == false then return ty.concat({ states:mean(1), states:max(1) }, -1) end
  return ty.concat({ states:select(1, 0), states:narrow(1, 1, states.shape[2] - 1):mean(1) }, -1)
end

-- Checks what the two assessments take.
local function check_labelled(who, known, classes, features, labels)
  for i, x in ipairs(table.pack(known or false, classes or false, features or false, labels or false)) do
    expect(who, ({ "known", "classes", "features", "labels" })[i], x or nil, "a tensor")
  end
  if known.ndim ~= 2 or features.ndim ~= 2 or known.shape[2] ~= features.shape[2] or classes.ndim ~= 1
    or labels.ndim ~= 1 or classes.shape[1] ~= known.shape[1] or labels.shape[1] ~= features.shape[1]
    or classes.dtype ~= "i64" or labels.dtype ~= "i64" or known:numel() == 0 or features:numel() == 0 then
    fail("%s: expected known [m, d], classes i64 [m], features [n, d] and labels i64 [n], got %s, %s, %s and %s", who,
      arguments.describe(known), arguments.describe(classes), arguments.describe(features), arguments.describe(labels))
  elseif math.min(classes:min():item(), labels:min():item()) < 0 then
    fail("%s: expected classes and labels from 0 on, got %d", who, math.min(classes:min():item(), labels:min():item()))
  end
  return math.max(classes:max():item(), labels:max():item()) + 1
end

--- Accuracy of k nearest neighbours by cosine: the class of each of `features` [n, d] by the votes of its k nearest
-- among `known` [m, d], whose classes are i64 [m], each vote weighted by exp(cosine / 0.07) as Wu et al. 2018 have it.
---@param known Tensor
---@param classes Tensor   i64 [m]
---@param features Tensor
---@param labels Tensor    i64 [n]
---@param k? integer       (20)
---@return number accuracy
function M.knn(known, classes, features, labels, k)
  local who = "vlm.sail.knn"
  local count = check_labelled(who, known, classes, features, labels)
  k = expect(who, "k", k == nil and 20 or k, "an integer >= 1")
  return ty.no_grad(ty.scope, function()
    local cosines = nn.normalize(features):matmul(nn.normalize(known):transpose(0, 1))
    local near, at = cosines:topk(math.min(k, known.shape[1]))
    local votes = ty.zeros({ features.shape[1], count }, { dtype = near.dtype, device = near.device })
    local found = classes:index_select(0, at:flatten()):reshape(table.unpack(at.shape))
    votes = votes:scatter_add(1, found, ((near - 1) / 0.07):exp())
    return votes:argmax(1):eq(labels):to("f32"):mean():item()
  end)
end

--- Accuracy of a linear probe, by ridge regression to one-hot classes, in closed form and in f64: what k-NN is compared
-- with as a forecast of alignment. Features are centred and scaled by those of `known`.
---@param known Tensor
---@param classes Tensor   i64 [m]
---@param features Tensor
---@param labels Tensor    i64 [n]
---@param ridge? number    (1e-2: of the number of rows)
---@return number accuracy
function M.linear_probe(known, classes, features, labels, ridge)
  local who = "vlm.sail.linear_probe"
  local count = check_labelled(who, known, classes, features, labels)
  ridge = expect(who, "ridge", ridge == nil and 1e-2 or ridge, "a finite number > 0")
  return ty.no_grad(ty.scope, function()
    local x = known:to "f64"
    local mean = x:mean(0, true)
    local scale = (x - mean):square():mean(0, true):sqrt() + 1e-6
    local function with_one(y)
      y = (y:to "f64" - mean) / scale
      return ty.concat({ y, ty.ones({ y.shape[1], 1 }, { dtype = "f64", device = y.device }) }, 1)
    end
    x = with_one(known)
    local target = ty.one_hot(classes, count):to "f64"
    local gram = x:transpose(0, 1):matmul(x)
    gram = gram + ty.eye(gram.shape[1], { dtype = "f64", device = gram.device }) * (ridge * x.shape[1])
    local weight = ty.solve(gram, x:transpose(0, 1):matmul(target))
    return with_one(features):matmul(weight):argmax(1):eq(labels):to("f32"):mean():item()
  end)
end

return M
