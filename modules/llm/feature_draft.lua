--- A draft that reads the large model's own states, for generate() with draft: a few decoder layers, which get for each
-- position the large model's features there and the embedding of the token that follows, and predict the features one
-- place on, whose logits are the draft's. It reuses the large model's embedding and head. Li et al. 2024, "EAGLE:
-- Speculative Sampling Requires Rethinking Feature Uncertainty"; with fusion = "gate" a gate mixes the two for each
-- element in place of a linear layer, and the head is deeper than one layer. Zhang et al. 2025, "Dovetail: A CPU/GPU
-- Heterogeneous Speculative Decoding for LLM inference", and its code: the draft is on another device, tokens and
-- features are all that moves.
--
--     local draft = llm.FeatureDraft(model, { layers = 3 })
--     draft:fit(model, loader, { steps = 200 })          -- on the text that the model was trained on
--     model:generate({ prompt }, 100, { temperature = 0, draft = draft:to "cuda", draft_tokens = 5 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.models.layers"

local nn = ty.nn

--- A draft of a decoder.
---@class FeatureDraft: Module
---@field taps integer[]  numbers of the large model's layers whose streams are features, besides its last hidden state
local FeatureDraft = nn.module "FeatureDraft"

-- The large model's parameter whose copy one of the body's begins as: layers are its first ones and, if there are two
-- or more, its last. Such a model without the layers between is a language model already, if a poor one.
local function source_name(name, own, count)
  return (name:gsub("%f[%a]layers%.(%d+)", function(i)
    i = math.tointeger(tonumber(i))
    return ("layers.%d"):format(own > 1 and i == own - 1 and count - 1 or i)
  end))
end

-- Fusing begins as the tokens' embeddings alone: what of the features helps is learnt.
local function begin_fusion(self, width)
  local embedding = self.body.model.embed_tokens.weight
  if self.fusion == "linear" then
    self.joined.weight:zero_():narrow(1, self.joined.weight.shape[2] - width, width):copy_(ty.eye(width))
    return
  end
  self.feature.weight:zero_()
  self.gate.weight:zero_()
  -- Half of x goes through the gate, and silu(x) is about x / 2 near 0.
  self.token.weight:copy_(ty.eye(width) * (4 * embedding:square():mean():sqrt():item()))
end

--- options: layers (3), fusion ("gate", or "linear" as EAGLE has it), taps ({}: numbers of layers, from 1, whose
-- streams are features, too). The model is a decoder whose weights are not packed.
---@param model LanguageModel
---@param options? { layers?: integer, fusion?: string, taps?: integer[] }
function FeatureDraft:init(model, options)
  local who = "FeatureDraft"
  local body = arguments.is_module(model) and model.model
  local count = arguments.is_module(body) and body.layers and #body.layers
  if not (count and model.family) then
    arguments.fail("%s: model: expected a decoder, got %s", who, arguments.describe(model))
  end
  local o = arguments.read(who, options, { layers = 3, fusion = "gate", taps = {} },
    { layers = ("an integer in [1, %d]"):format(count), fusion = '"gate" or "linear"', taps = "a list of integers" })
  for _, tap in ipairs(o.taps) do arguments.expect(who, "taps", tap, ("an integer in [1, %d]"):format(count)) end
  local config = {}
  for key, value in pairs(model.config.given) do config[key] = value end
  config.num_hidden_layers = o.layers
  self.body, self.fusion, self.taps = getmetatable(model)(config), o.fusion, o.taps
  local width = config.hidden_size
  local given, wide = {}, (1 + #o.taps) * width
  for name, p in model:named_parameters() do given[name] = p end
  ty.no_grad(function()
    for name, p in self.body:named_parameters() do
      p:copy_(given[source_name(name, o.layers, count)])
      if name:find "embed_tokens" or name:find "lm_head" then p:requires_grad_(false) end
    end
  end)
  if o.fusion == "gate" then
    self.token_norm = nn.RMSNorm(width, { eps = config.rms_norm_eps })
    self.feature, self.token = layers.linear(wide, width), layers.linear(width, width)
    self.gate = layers.linear(2 * width, width)
  else
    self.joined = layers.linear(wide + width, width, true)
  end
  ty.no_grad(begin_fusion, self, width)
  if #o.taps > 0 then self.others = layers.linear(width, #o.taps * width) end
end

--- Features of tokens i64 [n, t]: those of the taps, to norm 1 of an element each, and the last hidden state, [n, t,
-- (1 + taps) * hidden]; and that state alone. options: those of model:hidden().
---@param model LanguageModel
---@param tokens Tensor
---@param options? table
---@return Tensor features
---@return Tensor hidden
function FeatureDraft:observe(model, tokens, options)
  local taps, given, list = {}, {}, {}
  for key, value in pairs(options or {}) do given[key] = value end
  for _, tap in ipairs(self.taps) do taps[tap] = true end
  given.taps = taps
  local hidden = model:hidden(tokens, given)
  if #self.taps == 0 then return hidden, hidden end
  for i, tap in ipairs(self.taps) do list[i] = ty.rms_norm(taps[tap]) end
  list[#list + 1] = hidden
  return ty.concat(list, -1), hidden
end

-- What the layers get of features and of the tokens one place on.
local function fuse(self, features, tokens)
  local e = self.body:embed(tokens)
  if self.fusion == "linear" then return self.joined(ty.concat({ features, e }, -1)) end
  local f, t = self.feature(features), self.token(self.token_norm(e)):silu()
  return t + self.gate(ty.concat({ f, t }, -1)):sigmoid() * (f - t)
end

--- Features [n, t, wide] and the tokens i64 [n, t] one place on: what the features one place on are taken to be, and
-- the hidden state among them, whose head() are the logits of the token two places on. options: cache, last, as of a
-- decoder.
---@return Tensor features
---@return Tensor hidden
function FeatureDraft:forward(features, tokens, options)
  local given = { embeddings = fuse(self, features, tokens) }
  for key, value in pairs(options or {}) do given[key] = value end
  local hidden = self.body:hidden(tokens, given)
  if not self.others then return hidden, hidden end
  return ty.concat({ self.others(hidden), hidden }, -1), hidden
end

--- Logits of hidden states, by the large model's head.
function FeatureDraft:head(hidden) return self.body:head(hidden) end

--- The loss of a batch: smooth L1 of the features and, times `weight`, the cross entropy to the large model's own
-- probabilities. With passes = 2 the draft goes over the batch once more with the features that it predicted in the
-- first pass, as it does when it drafts a second token; the losses are averaged.
---@param tokens Tensor    i64 [n, t]
---@param features Tensor  of observe() on these
---@param hidden Tensor    likewise
---@param o { weight: number, passes: integer, noise: number }
---@return Tensor loss
---@return Tensor agreed  share of places at which the most likely token of the first pass is the large model's
function FeatureDraft:loss(tokens, features, hidden, o)
  local t, total, agreed = tokens.shape[2], 0, nil
  local input = features
  if o.noise > 0 then input = input + (ty.rand_like(input) - 0.5) * (2 * o.noise) end
  for pass = 1, o.passes do
    -- Positions pass - 1 to t - 2 of the text; what is wanted are those one place on.
    local n = t - pass
    local predicted, state = self(input:narrow(1, 0, n), tokens:narrow(1, pass, n))
    local wanted = self:head(hidden:narrow(1, pass, n)):flatten(0, 1):detach()
    local logits = self:head(state):flatten(0, 1)
    local entropy = -(wanted:softmax(-1) * logits:log_softmax(-1)):sum(-1):mean()
    total = total + (nn.smooth_l1_loss(predicted, features:narrow(1, pass, n)) + entropy * o.weight) * (1 / o.passes)
    agreed = agreed or ty.no_grad(function() return logits:argmax(-1):eq(wanted:argmax(-1)):to("f32"):mean() end)
    input = predicted:detach()
  end
  return total, agreed
end

--- Trains the draft beside a model that stays as it is. loader: batches with tokens i64 [n, t] and, where they are
-- known already, the features and hidden of observe(). options: those of train.fit but loss, and weight (1; 0.1 in the
-- papers), passes (1), noise (0.1: features get as much more or less, evenly drawn). Returns the loss of every step.
---@param model LanguageModel
---@param loader table
---@param options table
---@return number[] losses
function FeatureDraft:fit(model, loader, options)
  local own, rest = { weight = 1, passes = 1, noise = 0.1 }, { title = "feature draft" }
  local given = {}
  arguments.expect("FeatureDraft:fit", "options", options, "a table")
  for key, value in pairs(options) do
    if own[key] then given[key] = value else rest[key] = value end
  end
  local o = arguments.read("FeatureDraft:fit", given, own, { weight = "a number >= 0", passes = "an integer >= 1",
    noise = "a number >= 0" })
  function rest.loss(_, batch)
    local features, hidden = batch.features, batch.hidden
    if not features then features, hidden = ty.no_grad(self.observe, self, model, batch.tokens) end
    local loss, agreed = self:loss(batch.tokens, features, hidden, o)
    return loss, { agreed = agreed }
  end
  return ty.train.fit(self, loader, rest)
end

-- ---- drafting: what tycho.llm.speculative asks of a draft ----

local Drafter = {}
Drafter.__index = Drafter

--- What drafts behind one text. room: tokens of it.
function FeatureDraft:drafter(model, room)
  if model.config.hidden_size ~= self.body.config.hidden_size then
    error(("generate: the draft is of a model of width %d, this one has %d"):format(self.body.config.hidden_size,
      model.config.hidden_size), 0)
  end
  return setmetatable({ draft = self, cache = self.body:cache { room = room }, sure = 0,
    device = self.body.model.norm.weight.device }, Drafter)
end

--- The large model's pass over the tokens that it had not seen.
function Drafter:run(model, tokens, cache)
  self.seen = nil
  local features, hidden = self.draft:observe(model, tokens, { cache = cache })
  self.seen = ty.keep(features)
  return hidden
end

--- Of the tokens of the last run() the first `count` stay.
function Drafter:keep(count)
  local seen = self.seen:narrow(1, 0, count):to { device = self.device }
  self.features, self.seen = ty.keep(ty.no_grad(seen.clone, seen)), nil
end

--- Up to `count` drafted tokens behind the sequence, appended by choose(logits), which returns one; none before the
-- large model has seen anything.
function Drafter:propose(sequence, count, choose)
  if not self.features then return end
  local draft, cache, device = self.draft, self.cache, self.device
  cache:truncate(self.sure)
  local features, first = self.features, self.sure + 2
  self.sure = #sequence - 1
  for _ = 1, count do
    local tokens = ty.tensor({ table.move(sequence, first, #sequence, 1, {}) }, { dtype = "i64", device = device })
    local token
    features, token = ty.scope(function()
      local predicted, hidden = draft(features, tokens, { cache = cache, last = 1 })
      return predicted, choose(draft:head(hidden:flatten(0, 1)))
    end)
    first = #sequence + 1
    sequence[first] = token
  end
  if count == 0 then self.sure = first - 2 end
end

return FeatureDraft
