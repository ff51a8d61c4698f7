--- The encoder of T5 alone, which reads the words in pipelines of pictures, with the names and the config.json of
-- transformers' T5EncoderModel. Files of a whole T5 are read too. Raffel et al. 2020.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.models.layers"
local parts = require "tycho.models.t5_blocks"
local Pretrained = require "tycho.models.pretrained"

local WHO = "T5EncoderModel"

---@class T5EncoderModel: Pretrained
local T5Encoder = ty.nn.module(WHO, Pretrained)
T5Encoder.model_type, T5Encoder.architecture = "t5", WHO
T5Encoder.ignored_too = { "^encoder%.embed_tokens%.weight$" }
T5Encoder.other_heads = { "^decoder%.", "^lm_head%." }

--- config: the keys of config.json.
---@param config table
function T5Encoder:init(config)
  local c = parts.read(WHO, config)
  self.config = c
  self.shared = layers.embedding(c.vocab_size, c.d_model, 1)
  self.encoder = parts.Stack(c, c.num_layers, false)
end

--- Hidden states [n, s, d_model] of tokens i64 [n, s]. options: mask (bool or i64 [n, s], 0: padding).
---@param tokens Tensor
---@param options? {mask?: Tensor}
---@return Tensor hidden
function T5Encoder:forward(tokens, options)
  if not ty.is_tensor(tokens) or tokens.ndim ~= 2 or tokens.dtype ~= "i64" then
    arguments.fail("%s: tokens: expected an i64 tensor [n, t], got %s", WHO, arguments.describe(tokens))
  end
  local o = arguments.read(WHO, options, { mask = arguments.none }, { mask = "a tensor" })
  return parts.encode(self.encoder, self.shared(tokens), o.mask)
end

return T5Encoder
