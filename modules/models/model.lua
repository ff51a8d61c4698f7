--- What all language models share: saving as a Hugging Face folder, losses, generation.
local ty = require "tycho"

local nn = ty.nn

---@class LanguageModel: Module
local LanguageModel = nn.module "LanguageModel"

-- Names of a file that hold no weights: buffers that older versions wrote.
LanguageModel.ignored = { "%.attn%.bias$", "%.attn%.masked_bias$", "rotary_emb%.inv_freq$", "%.position_ids$",
  "^position_ids$" }

--- Names that belong to the heads of other classes: loading leaves them out and says so in its report, unless the
-- config asks for a class that is not known.
LanguageModel.other_heads = {}

--- Prefixes of published names that ours lack.
LanguageModel.prefixes = {}

--- The model of a config.json that was read. state: the tensors that it will get, where there are some.
---@param config table
---@param state? table<string, Tensor>
function LanguageModel.from_config(class, config, state) return class(config) end

--- Renames one published name to ours, or returns nil for a name to skip.
function LanguageModel:rename(name) return name end

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
  local logits = self:forward(tokens, { mask = mask, cu_seqlens = options.cu_seqlens, longest = options.longest,
    checkpoint = options.checkpoint })
  return nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
end

--- Writes config.json, model.safetensors and generation_config.json to a folder that transformers reads as well. A path
-- that ends in .safetensors gets the weights alone.
---@param path string
function LanguageModel:save(path, metadata)
  if path:find "%.safetensors$" then return nn.Module.save(self, path, metadata) end
  ty.io.mkdir(path)
  local config = {}
  for key, value in pairs(self:published_config()) do config[key] = value end
  config.dtype = nil
  config.torch_dtype = ({ f32 = "float32", f16 = "float16", bf16 = "bfloat16", f64 = "float64" })[
    self:parameters()[1].dtype]
  local function write(name, value)
    ty.io.write_atomic(path .. "/" .. name, ty.io.json_encode(value, { indent = 2 }) .. "\n")
  end
  nn.Module.save(self, path .. "/model.safetensors", { format = "pt" })
  if self.generation_config then write("generation_config.json", self.generation_config) end
  write("config.json", config)
  return self
end

--- The keys of config.json.
function LanguageModel:published_config()
  local config = {}
  for key, value in pairs(self.config) do
    if key ~= "given" and key ~= "unknown" then config[key] = value end
  end
  for key, value in pairs(self.config.given or {}) do
    if config[key] == nil then config[key] = value end
  end
  config.model_type = self.model_type
  config.architectures = { self.architecture }
  return config
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

--- What generation begins with: the first tokens [n, t] whose successors are wanted, their mask, and a function of
-- tokens and mask that gives the logits [n, vocabulary] of the token after them. An encoder and decoder begins anew
-- here.
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
