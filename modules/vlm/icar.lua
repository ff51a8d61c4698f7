--- ICAR: simple pictures leave the encoder early, complex ones go all the way, and both meet the same texts.
-- Williams-Lekuona and Cosma 2025, "Image Complexity-Aware Adaptive Retrieval for Efficient Vision-Language Models".
--
--     local model = vlm.icar.EarlyExit(clip, { layer = 3 })
--     vlm.icar.fit(model, loader, { steps = 200 })                            -- both paths against the same texts
--     local scores = vlm.icar.complexity(rater(pictures))                     -- of any classifier of levels
--     local features = model:route(pictures, scores, vlm.icar.threshold(scores, 0.5))
--
-- The exit after a layer has a norm and a projection of its own, which begin as those of the whole tower. A gallery of
-- features of both depths then is one gallery: texts are embedded once, and nothing is ranked twice. Complexity is
-- rated before the picture is encoded, by a small classifier of levels of complexity; the paper's is a ConvNeXt, here
-- it is whatever gives logits.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local contrastive = require "tycho.vlm.contrastive"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local MOST = 100 -- of the scale, as in CLIP

--- A CLIPModel whose pictures may leave after a layer.
---@class EarlyExit: Module
---@field clip CLIPModel
---@field layer integer
local EarlyExit = nn.module "EarlyExit"
M.EarlyExit = EarlyExit

--- options: layer (after which pictures leave, from 1 to one before the last). The model is changed by training, not
-- copied.
---@param clip CLIPModel
---@param options {layer: integer}
function EarlyExit:init(clip, options)
  local who = "vlm.icar.EarlyExit"
  contrastive.check_model(who, clip)
  local o = arguments.read(who, options, { layer = none }, { layer = "an integer >= 1" })
  local tower = clip.vision_model
  local count = tower and #tower.encoder.layers or 0
  if count == 0 then fail("%s: clip: expected a CLIPModel, got %s", who, arguments.describe(clip)) end
  if o.layer == nil or o.layer >= count then
    fail("%s: layer: expected an integer in [1, %d], got %s", who, count - 1, arguments.describe(o.layer))
  end
  self.clip, self.layer = clip, math.tointeger(o.layer)
  self.norm, self.projection = tower.post_layernorm:clone(), clip.visual_projection:clone()
end

local function left(self, states) return self.projection(self.norm(states:select(1, 0))) end

--- Features [n, projection_dim] of pictures [n, channels, height, width]. path: "full", "early": nothing behind the
-- exit is computed, or "both": those of the whole tower, then those of the exit, in one pass.
---@param pictures Tensor
---@param path? string  ("full")
---@return Tensor features
---@return Tensor? early
function EarlyExit:image_features(pictures, path)
  expect("EarlyExit:image_features", "path", path, '"full" or "early" or "both" or nil')
  local tower = self.clip.vision_model
  if path == "early" then return left(self, (tower:run(pictures, { layer = self.layer }, false))) end
  local states, pooled = tower:run(pictures, { layer = self.layer }, true)
  local full = self.clip.visual_projection(pooled)
  if path ~= "both" then return full end
  return full, left(self, states)
end

--- Features [n, projection_dim] of texts, tokens i64 [n, t]; options as of CLIPModel.
---@param tokens Tensor
---@param options? {mask?: Tensor}
---@return Tensor features
function EarlyExit:text_features(tokens, options) return self.clip:text_features(tokens, options) end

--- Features [n, projection_dim] of length 1 of pictures, each by the path that its score asks for: below the threshold
-- the early one. Returns the features, in the order of the pictures, and how many left early.
---@param pictures Tensor
---@param scores Tensor     [n], of vlm.icar.complexity
---@param threshold number
---@return Tensor features
---@return integer early
function EarlyExit:route(pictures, scores, threshold)
  local who = "EarlyExit:route"
  expect(who, "pictures", pictures, "a tensor")
  expect(who, "scores", scores, "a tensor")
  expect(who, "threshold", threshold, "a number")
  if pictures.ndim ~= 4 or scores.ndim ~= 1 or scores.shape[1] ~= pictures.shape[1] or scores:numel() == 0 then
    fail("%s: expected pictures [n, channels, height, width] and scores [n], got %s and %s", who,
      arguments.describe(pictures), arguments.describe(scores))
  end
  local n, device = pictures.shape[1], pictures.device
  local order = scores:lt(threshold):to("i64"):argsort(0, true):to { device = device } -- those that leave come first
  local early = scores:lt(threshold):to("i64"):sum():item()
  local parts = {}
  for _, some in ipairs { { 0, early, "early" }, { early, n - early, "full" } } do
    if some[2] > 0 then
      local at = order:narrow(0, some[1], some[2])
      -- All of them by one path need no gathering.
      local taken = some[2] == n and pictures or pictures:index_select(0, at)
      parts[#parts + 1] = nn.normalize((self:image_features(taken, some[3])))
      if some[2] == n then return parts[1], early end
    end
  end
  return ty.concat(parts, 0):index_select(0, order:argsort(0)), early
end

--- Similarities of pictures and texts, by the whole tower, as CLIPModel has them.
function EarlyExit:forward(tokens, options) return self.clip(tokens, options) end

--- Complexity [n] from 0 to 1 of a rater's logits [n, levels]: the mean level under the softmax, the levels being
-- evenly spaced from simple to complex. Rating as classification is the paper's choice.
---@param logits Tensor
---@return Tensor
function M.complexity(logits)
  expect("vlm.icar.complexity", "logits", logits, "a tensor")
  if logits.ndim ~= 2 or logits.shape[2] < 2 or logits:numel() == 0 then
    fail("vlm.icar.complexity: logits: expected [n, 2 levels or more], got %s", arguments.describe(logits))
  end
  local levels = ty.arange(logits.shape[2], { device = logits.device }):to(logits.dtype) / (logits.shape[2] - 1)
  return (logits:softmax(1) * levels):sum(1)
end

--- The threshold at which a share of the pictures with such scores leaves early: halfway between two scores.
---@param scores Tensor  [n]
---@param share number   in [0, 1]
---@return number
function M.threshold(scores, share)
  local who = "vlm.icar.threshold"
  expect(who, "scores", scores, "a tensor")
  expect(who, "share", share, "a number in [0, 1]")
  if scores.ndim ~= 1 or scores:numel() == 0 then
    fail("%s: scores: expected [n], got %s", who, arguments.describe(scores))
  end
  local sorted = scores:sort():tolist()
  local count = math.floor(share * #sorted + 0.5)
  if count == 0 then return -math.huge elseif count == #sorted then return math.huge end
  return (sorted[count] + sorted[count + 1]) / 2
end

--- The loss of dual-path training: the contrastive loss of the whole tower's features with the texts', and `weight`
-- times that of the exit's with the same texts'. The paper's abstract names no weight; 1 here.
---@param model EarlyExit
---@param pictures Tensor
---@param text Tensor      features [n, d] of the pictures' texts
---@param weight? number   (1)
---@return Tensor loss
---@return Tensor full     the loss of each path
---@return Tensor early
function M.loss(model, pictures, text, weight)
  local who = "vlm.icar.loss"
  expect(who, "model", model, "a module")
  if getmetatable(model) ~= EarlyExit then
    fail("%s: model: expected an EarlyExit, got %s", who, arguments.describe(model))
  end
  expect(who, "text", text, "a tensor")
  weight = expect(who, "weight", weight == nil and 1 or weight, "a finite number >= 0")
  local scale = model.clip.logit_scale:exp()
  local full, early = model:image_features(pictures, "both")
  local one, other = contrastive.loss(full, text, scale), contrastive.loss(early, text, scale)
  return one + other * weight, one, other
end

local defaults = { weight = 1, inputs = none, exit_rate = 1, weight_decay = 0.1, beta2 = 0.95 }
local kinds = { weight = "a finite number >= 0", inputs = "a function", exit_rate = "a finite number > 0",
  weight_decay = "a finite number >= 0", beta2 = "a number in [0, 1)" }

-- AdamW as train.fit makes it, with decay of matrices alone, and the exit's own rate.
local function optimizer_of(o)
  return function(model, given)
    local groups = {}
    for name, p in model:named_parameters() do
      if p.requires_grad then
        local exit, matrix = name:find "^norm%." or name:find "^projection%.", p.ndim >= 2
        local key = (exit and "exit" or "tower") .. (matrix and " matrix" or "")
        if not groups[key] then
          groups[key] = { params = {}, lr = given.lr * (exit and o.exit_rate or 1),
            weight_decay = matrix and o.weight_decay or 0 }
          groups[#groups + 1] = groups[key]
        end
        table.insert(groups[key].params, p)
      end
    end
    local list = table.move(groups, 1, #groups, 1, {})
    return ty.optim.AdamW(list, { lr = given.lr, beta2 = o.beta2, clip_norm = given.clip_norm,
      schedule = given.schedule })
  end
end

--- Trains both paths of a model on batches of pictures and texts. options: those of train.fit, weight (1: of the early
-- path's loss), exit_rate (1: by how much the exit, which is new, learns faster than the towers), and inputs (as of
-- vlm.fit_contrastive; in place of tokens it may give features of texts [n, d] in floating point, of a text tower that
-- stays as it is, and so need not run). Returns what train.fit returns.
---@param model EarlyExit
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return Module averaged
function M.fit(model, loader, options)
  local who = "vlm.icar.fit"
  expect(who, "model", model, "a module")
  if getmetatable(model) ~= EarlyExit then
    fail("%s: model: expected an EarlyExit, got %s", who, arguments.describe(model))
  end
  expect(who, "options", options, "a table")
  local own, rest = {}, { title = "early exit" }
  for key, value in pairs(options) do
    if defaults[key] ~= nil or key == "inputs" then own[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, own, defaults, kinds)
  rest.optimizer = rest.optimizer or optimizer_of(o)
  local next_batch = contrastive.cycles(1, o.inputs)
  function rest.loss(network, batch)
    batch = next_batch(function() return batch end)[1]
    ty.no_grad(function() network.clip.logit_scale:clamp_(nil, math.log(MOST)) end)
    local text = batch.tokens
    if text.dtype == "i64" then text = network:text_features(text, { mask = batch.mask }) end
    local loss, full, early = M.loss(network, batch.pictures, text, o.weight)
    return loss, { full = full, early = early }
  end
  return ty.train.fit(model, loader, rest)
end

return M
