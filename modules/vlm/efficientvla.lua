--- A policy that sees, reads and draws actions by diffusion, with less work and without training. Yang et al. 2025,
-- "EfficientVLA: Training-Free Acceleration and Compression for Vision-Language-Action Models" (arXiv 2506.10100),
-- section 3. Three parts, each of which may stand alone:
--
-- - layers of the decoder that hardly turn what they get are deleted: I_l = 1 - mean cos(x_l, x_l+1), over all tokens
--   of some observations (equation 3), the least important first;
-- - of the picture's tokens a few go on: the `key` ones that the text attends to most, and then as many as the budget
--   has, a share of them by attention, the others by how far they are from the key ones, 1 - cos (section 3.3);
-- - the head's attention and feed-forward outputs are computed every `interval` steps of denoising and added as they
--   were in the steps between (section 3.4).
--
--     local importance = vlm.efficientvla.importance(model, observation)
--     local fast = vlm.efficientvla.apply(model, { layers = vlm.efficientvla.kept(importance, 2), tokens = 16,
--       interval = 5 })
--     fast:encode(observation); fast:denoise(x, t, condition)       -- as the model's
--
-- What is left out is not computed. Tokens keep the positions that they had.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"

local nn, layers = ty.nn, models.layers
local M = {}

local function check_model(who, model)
  arguments.expect(who, "model", model, "a module")
  if not model.language_model or not model.action_head or not model.see then
    arguments.fail("%s: model: expected a policy such as models.ActionModel, got %s", who, arguments.describe(model))
  end
end

--- How much each layer of the decoder turns what goes through it: 1 - the mean cosine of its input and output, over
-- tokens and samples of an observation.
---@param model ActionModel
---@param observation table
---@return number[]
function M.importance(model, observation)
  local who = "efficientvla.importance"
  check_model(who, model)
  arguments.expect(who, "observation", observation, "a table")
  return ty.no_grad(function()
    local x = model:embed(observation)
    local all, at = model.language_model.model.layers, model:turns(x)
    at.taps = {}
    for i = 1, #all do at.taps[i] = true end
    layers.through(all, x, at)
    local list = {}
    for i = 1, #all do
      local y = at.taps[i]
      local cosine = (x * y):sum(-1) / (x:square():sum(-1) * y:square():sum(-1)):sqrt():clamp(1e-12)
      list[i] = 1 - cosine:mean():item()
      x = y
    end
    return list
  end)
end

--- The layers, in their order, that stay when the `count` least important ones are deleted.
---@param importance number[]
---@param count integer
---@return integer[]
function M.kept(importance, count)
  local who = "efficientvla.kept"
  arguments.expect(who, "importance", importance, "a list of numbers")
  arguments.expect(who, "count", count, "an integer >= 0")
  if count >= #importance then
    arguments.fail("%s: count: expected less than the %d layers, got %d", who, #importance, count)
  end
  local order = {}
  for i in ipairs(importance) do order[i] = i end
  table.sort(order, function(a, b)
    if importance[a] ~= importance[b] then return importance[a] < importance[b] end
    return a < b
  end)
  local list = table.move(order, count + 1, #order, 1, {})
  table.sort(list)
  return list
end

--- How relevant each token of the picture is to what is asked: the attention that the tokens behind the picture (words
-- that are no padding, joints, query) give it in a layer, summed over heads and tokens and scaled to [0, 1] in each
-- row.
---@param model ActionModel
---@param layer Module  of the decoder
---@param x Tensor      what the layer gets, [n, t, hidden]
---@param words Tensor  i64 [n, phrase]
---@return Tensor [n, places]
function M.relevance(model, layer, x, words)
  local who = "efficientvla.relevance"
  check_model(who, model)
  arguments.expect(who, "layer", layer, "a module")
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "words", words, "a tensor")
  local attention, at = layer.self_attn, model:turns(x)
  local n, t = x.shape[1], x.shape[2]
  local places = model.places
  local asking = t - places
  local y = layer.input_layernorm(x)
  local q = nn.split_heads(attention.q_proj(y:narrow(1, places, asking)), attention.heads)
  local k = nn.split_heads(attention.k_proj(y), attention.kv_heads)
  q = ty.rotary(q, at.cos:narrow(0, places, asking), at.sin:narrow(0, places, asking), false)
  k = ty.rotary(k, at.cos, at.sin, false)
  if attention.kv_heads < attention.heads then k = k:repeat_interleave(attention.heads // attention.kv_heads, 1) end
  local scores = q:matmul(k:transpose(2, 3)) * (1 / math.sqrt(q.shape[4]))
  -- None sees what follows it.
  local rows = ty.arange(places, t, { device = x.device }):reshape(asking, 1)
  local hidden = ty.arange(t, { device = x.device }):reshape(1, t):gt(rows)
  local weights = scores:masked_fill(hidden, -1e30):softmax(-1):narrow(3, 0, places):sum { 1 } -- [n, asking, places]
  local there = ty.concat({ words:ne(0), ty.ones({ n, asking - words.shape[2] }, { dtype = "bool",
    device = x.device }) }, 1)
  local sum = (weights * there:to(weights.dtype):unsqueeze(-1)):sum { 1 }
  local low, high = sum:min({ 1 }, true), sum:max({ 1 }, true)
  return (sum - low) / (high - low):clamp(1e-12)
end

-- A 1 for each chosen place: the `count` largest of scores [n, places], where taken [n, places] is 0.
local function largest(scores, taken, count)
  local order = (scores - taken * 1e9):argsort(1, true):narrow(1, 0, count)
  return ty.zeros(scores.shape, { device = scores.device }):scatter(1, order, ty.ones(order.shape,
    { device = scores.device }))
end

--- Which tokens of a picture go on: i64 [n, tokens], in their order. The `key` of the highest relevance [n, places];
-- then of the rest floor(share * rest) by relevance, and the others by 1 - the largest cosine with a key one, of what
-- the tower made of them [n, places, hidden].
---@param seen Tensor
---@param relevance Tensor
---@param options { tokens: integer, key?: integer, share?: number }  key (4), share (0.5)
---@return Tensor
function M.choose(seen, relevance, options)
  local who = "efficientvla.choose"
  arguments.expect(who, "seen", seen, "a tensor")
  arguments.expect(who, "relevance", relevance, "a tensor")
  local o = arguments.read(who, options, { tokens = arguments.none, key = 4, share = 0.5 }, {
    tokens = "an integer >= 1", key = "an integer >= 1", share = "a number in [0, 1]" })
  if relevance.ndim ~= 2 or seen.ndim ~= 3 or seen.shape[1] ~= relevance.shape[1]
    or seen.shape[2] ~= relevance.shape[2] then
    arguments.fail("%s: expected seen [n, places, hidden] and relevance [n, places], got %s and %s", who,
      arguments.describe(seen), arguments.describe(relevance))
  end
  local places = relevance.shape[2]
  if not o.tokens or o.tokens > places then
    arguments.fail("%s: tokens: expected an integer in [1, %d], got %s", who, places, arguments.describe(o.tokens))
  end
  local key = math.min(o.key, o.tokens)
  local taken = largest(relevance, ty.zeros_like(relevance), key)
  local rest = o.tokens - key
  local related = math.floor(o.share * rest + 1e-9)
  local first = taken
  if related > 0 then taken = taken + largest(relevance, taken, related) end
  if rest > related then
    local unit = seen / seen:square():sum({ -1 }, true):sqrt():clamp(1e-12)
    local at = first:argsort(1, true):narrow(1, 0, key):unsqueeze(-1):expand(seen.shape[1], key, seen.shape[3])
    local near = unit:matmul(unit:gather(1, at):transpose(1, 2)):max(2) -- to the nearest key one
    taken = taken + largest(1 - near, taken, rest - related)
  end
  return (taken:argsort(1, true):narrow(1, 0, o.tokens):sort(1))
end

-- ---- the policy ----

--- A policy with less work: encode and denoise, as the model it was made of.
---@class EfficientPolicy
---@field model ActionModel
local Fast = {}
Fast.__index = Fast
Fast.__name = "EfficientPolicy"

--- A policy that computes less than the model, whose weights it shares. options: layers (the numbers of those that
-- stay; all), tokens (of the picture that go on; all), key (4), share (0.5), interval (1: steps of denoising for which
-- the head's layers are computed once), choose (a function of what the tower made of the picture [n, places, hidden]
-- and the relevance, that gives places i64 [n, tokens]; in place of the rule).
---@param model ActionModel
---@param options? table
---@return EfficientPolicy
function M.apply(model, options)
  local who, none = "efficientvla.apply", arguments.none
  check_model(who, model)
  local o = arguments.read(who, options, { layers = none, tokens = none, key = 4, share = 0.5, interval = 1,
    choose = none }, { layers = "a list of integers", tokens = "an integer >= 1", key = "an integer >= 1",
    share = "a number in [0, 1]", interval = "an integer >= 1", choose = "a function" })
  local all, list = model.language_model.model.layers, {}
  if not o.layers then
    o.layers = {}
    for i = 1, #all do o.layers[i] = i end
  end
  if #o.layers == 0 then arguments.fail("%s: layers: expected at least one, got none", who) end
  for i, number in ipairs(o.layers) do
    if number < 1 or number > #all or i > 1 and number <= o.layers[i - 1] then
      arguments.fail("%s: layers: expected rising numbers from 1 to %d, got %d as number %d", who, #all, number, i)
    end
    list[i] = all[number]
  end
  if o.tokens and o.tokens > model.places then
    arguments.fail("%s: tokens: expected at most the %d places of a picture, got %d", who, model.places, o.tokens)
  end
  return setmetatable({ model = model, list = list, layers = o.layers, tokens = o.tokens or model.places, key = o.key,
    share = o.share, interval = o.interval, chooser = o.choose }, Fast)
end

--- The device of the model.
function Fast:device() return self.model:device() end

--- The condition of actions: { query [n, hidden], places (i64 [n, tokens] of the picture that went on; nil: all) }.
---@param observation table  as of ActionModel:embed
---@return table
function Fast:encode(observation)
  arguments.expect("EfficientPolicy:encode", "observation", observation, "a table")
  local model = self.model
  local x = model:embed(observation)
  if self.tokens == model.places then return { query = model:decode(x, { list = self.list }) } end
  local n, t, width = x.shape[1], x.shape[2], x.shape[3]
  local seen = x:narrow(1, 0, model.places)
  local chosen
  if self.chooser then
    chosen = self.chooser(seen, self.tokens)
  else
    chosen = M.choose(seen, M.relevance(model, self.list[1], x, observation.words),
      { tokens = self.tokens, key = self.key, share = self.share })
  end
  local behind = ty.arange(model.places, t, { device = x.device }):expand(n, t - model.places)
  local positions = ty.concat({ chosen, behind }, 1)
  x = x:gather(1, positions:unsqueeze(-1):expand(n, positions.shape[2], width))
  return { query = model:decode(x, { list = self.list, positions = positions }), places = chosen }
end

--- Clean actions by noised ones, as of the model. Calls with the same condition are steps of one run.
---@param x Tensor
---@param t Tensor
---@param condition table
---@return Tensor
function Fast:denoise(x, t, condition)
  arguments.expect("EfficientPolicy:denoise", "x", x, "a tensor")
  arguments.expect("EfficientPolicy:denoise", "t", t, "a tensor")
  arguments.expect("EfficientPolicy:denoise", "condition", condition, "a table")
  if self.interval == 1 then return self.model:denoise(x, t, condition) end
  local head = self.model.action_head
  local h = head:embed(x, t, self.model.repeated(condition.query, x.shape[1]))
  local call = condition.calls or 0
  condition.calls = call + 1
  if call % self.interval == 0 then
    local added
    for _, layer in ipairs(head.layers) do
      local attended = layer:attend(h)
      h = h + attended
      local fed = layer:feed(h)
      h = h + fed
      added = added and added + attended + fed or attended + fed
    end
    condition.added = ty.keep(added)
    return head:read(h)
  end
  return head:read(h + condition.added)
end

-- ---- what it costs ----

--- Floating-point operations of one action, from shapes: { tower, decoder, choice, head, all }. Products, convolutions
-- and attention count, 2 for a multiplication and an addition, attention as if all pairs were computed. options: those
-- of apply (layers, tokens, interval), steps (10, of denoising).
---@param model ActionModel
---@param options? table
---@return table
function M.cost(model, options)
  local who, none = "efficientvla.cost", arguments.none
  check_model(who, model)
  local o = arguments.read(who, options, { layers = none, tokens = none, key = 4, share = 0.5, interval = 1,
    choose = none, steps = 10 }, { layers = "a list of integers", tokens = "an integer >= 1", key = "an integer >= 1",
    interval = "an integer >= 1", choose = "a function", steps = "an integer >= 1" })
  local c, text = model.config, model.language_model.config
  local count = o.layers and #o.layers or text.num_hidden_layers
  local tokens, behind = o.tokens or model.places, c.phrase_length + 2
  local w, inner = text.hidden_size, text.intermediate_size
  local heads, kv = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
  local fine, channels, half = 4 * model.places, c.tower_channels, c.patch_size // 2 + 2
  local result = { choice = 0 }
  result.tower = 2 * (fine * channels * (half * half * c.num_channels + 9 * channels) + model.places * 4 * channels * w
    + w * 2 * channels + (2 * c.state_size - 1) * w)
  local t = tokens + behind
  local weights = w * (2 * heads + 2 * kv + 3 * inner)
  -- The last layer has one query.
  result.decoder = (count - 1) * (2 * t * weights + 4 * heads * t * t)
    + 2 * t * 2 * w * kv + 2 * (weights - 2 * w * kv) + 4 * heads * t
  if tokens < model.places and not o.choose then
    result.choice = 2 * w * (behind * heads + (model.places + behind) * kv)
      + 2 * heads * behind * (model.places + behind) + 2 * model.places * math.min(o.key, tokens) * w
  end
  local hw, h = c.head_hidden_size, c.horizon
  local whole = math.ceil(o.steps / o.interval)
  result.head = whole * c.head_layers * (2 * h * 12 * hw * hw + 4 * h * h * hw)
    + o.steps * 2 * (2 * h * c.action_size * hw + 64 * hw + hw * hw + w * hw)
  result.all = result.tower + result.decoder + result.choice + result.head
  return result
end

return M
