--- What all language models share: losses, heads, generation.
local ty = require "tycho"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn

--- What all language models have: loss, caches, generation.
---@class LanguageModel: Pretrained
local LanguageModel = nn.module("LanguageModel", Pretrained)

--- Mean cross entropy, in nats, of the token after each one. tokens i64 [n, t]; targets [n, t] are the tokens one place
-- on (-100: not counted), by default those of `tokens` itself. options, as in forward(): mask, checkpoint, and with
-- targets only cu_seqlens and longest.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function LanguageModel:loss(tokens, targets, options)
  options = options or {}
  local mask = options.mask
  if not targets then
    if options.cu_seqlens then error("loss: packed sequences need their targets", 2) end
    local t = tokens.shape[2]
    targets = tokens:narrow(1, 1, t - 1)
    if mask then targets = targets:masked_fill(mask:narrow(1, 1, t - 1):to("bool"):logical_not(), -100) end
    tokens, mask = tokens:narrow(1, 0, t - 1), mask and mask:narrow(1, 0, t - 1)
  end
  local with = {}
  for key, value in pairs(options) do with[key] = value end
  with.mask = mask
  local logits = self:forward(tokens, with)
  return nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
end

--- The embedding whose weights are those of the head, too; nil where the head has its own.
---@return Module?
function LanguageModel:tied() return nil end

--- Gives a head that is tied to an embedding weights of its own, equal to the embedding's and frozen where these are,
-- so that one can change without the other; config.tie_word_embeddings is false afterwards. A head that is not tied
-- stays as it is. Returns the model.
---@return LanguageModel model
function LanguageModel:untie()
  local embedding = self:tied()
  if not embedding then return self end
  local weight = embedding.weight
  local head = nn.with_defaults({ device = "meta" }, nn.Linear, weight.shape[2], weight.shape[1], { bias = false })
  rawset(head, "weight", ty.keep(ty.no_grad(weight.clone, weight):detach()))
  if weight.requires_grad then head.weight:requires_grad_() end
  rawset(self, "ignored_too", nil)
  self:set_head(head)
  self.config.tie_word_embeddings = false
  if not self.training then self:eval() end
  ty.core.program.renew()
  return self
end

--- Puts a linear layer without a bias, which head() then goes through, where the files have it.
---@param head Linear
function LanguageModel:set_head(head) self.lm_head = head end

--- The token, or the list of tokens, that ends a text by the config.
function LanguageModel:end_tokens() return self.config and self.config.eos_token_id end

--- What generation begins with: the first tokens [n, t] whose successors are wanted, their mask, and a function of
-- tokens and mask that gives the logits [n, vocabulary] of the token after them. An encoder and decoder begins anew
-- here. Models that see pictures get those of the prompts as well.
function LanguageModel:start(tokens, mask, cache)
  return tokens, mask, function(input, given)
    return self:head(self:hidden(input, { cache = cache, mask = given, last = 1 }):select(1, -1))
  end
end

--- Continues token sequences. Generation is a method, not a part of a network: tycho.llm puts its own here, whose
-- options tycho.llm.generate has.
function LanguageModel:generate()
  error(("generate: expected require \"tycho.llm\" before a %s generates, got the network alone"):format(
    getmetatable(self).__name), 2)
end

return LanguageModel
