--- Decoders that judge a text, or each of its tokens, in place of going on with it: the body of a family with one
-- output for each label. transformers has them as LlamaForSequenceClassification, Qwen2ForTokenClassification and so
-- on.
local ty = require "tycho"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"

local nn = ty.nn
local M = {}

--- The loss of logits [..., labels]: cross entropy of integers (-100: not counted); of floating-point labels the mean
-- squared error or, where the config's problem_type is multi_label_classification, binary cross entropy.
---@param logits Tensor
---@param labels Tensor
---@param config table
---@return Tensor loss
function M.loss(logits, labels, config)
  if not labels:is_floating_point() then return nn.cross_entropy(logits:flatten(0, -2), labels:flatten()) end
  if config.problem_type == "multi_label_classification" then return nn.bce_with_logits(logits, labels) end
  return nn.mse_loss(logits:flatten(), labels:flatten())
end

-- What all of them share: `name` is the layer of the head, in the files too.
local function define(base, task, name, bias)
  local class = nn.module(base.__name .. task, base)
  class.architecture = (base.judges or base.architecture:gsub("LMHeadModel$", ""):gsub("ForCausalLM$", "")) .. task

  function class:make_head(width, config)
    self[name] = layers.linear(width, configs.labels(config), bias)
  end

  function class:head(hidden) return self[name](hidden) end

  function class:tied() return nil end

  function class:loss(tokens, labels, options)
    return M.loss(self:forward(tokens, options), labels, self.config)
  end

  function class:generate()
    error(("%s: a classifier generates no text"):format(class.__name), 2)
  end

  return class
end

-- The last token of each row that is no padding, i64 [n]: by the mask or, without one, by the config's pad_token_id.
local function last_places(tokens, mask, pad)
  local n, t = tokens.shape[1], tokens.shape[2]
  if not mask and math.type(pad) == "integer" then mask = tokens:ne(pad) end
  if not mask then return ty.full({ n }, t - 1, { dtype = "i64", device = tokens.device }) end
  return (mask:to "i64" * ty.arange(t, { device = tokens.device })):max(1)
end

local made = { sequences = {}, tokens = {} }

--- The class of a family's models that judge texts: forward() gives logits [n, labels], of the last token of each row
-- that is no padding.
---@param base table  Llama, GPT2 ...
function M.sequences(base)
  if made.sequences[base] then return made.sequences[base] end
  local class = define(base, "ForSequenceClassification", "score", false)
  made.sequences[base] = class

  function class:forward(tokens, options)
    local hidden = self:hidden(tokens, options)
    local n, t = tokens.shape[1], tokens.shape[2]
    local places = last_places(tokens, options and options.mask, self.config.pad_token_id)
    local rows = ty.arange(n, { device = tokens.device }) * t + places
    return self:head(hidden:flatten(0, 1):index_select(0, rows))
  end

  return class
end

--- The class of a family's models that judge tokens: forward() gives logits [n, t, labels].
---@param base table
function M.tokens(base)
  if not made.tokens[base] then
    local name = ({ gpt2 = true, gpt_neox = true, falcon = true })[base.model_type] and "classifier" or "score"
    made.tokens[base] = define(base, "ForTokenClassification", name, true)
  end
  return made.tokens[base]
end

return M
