--- What all networks share that are published as folders of transformers: config.json with their model_type and their
-- class, and the dtype of the weights.
local ty = require "tycho"
local Published = require "tycho.models.published"

--- A network with a config and weights in the names of published files: from_pretrained, save_pretrained.
---@class Pretrained: Published
---@field model_type string    the kind of network, as config.json has it
---@field architecture string  the class in transformers
local Pretrained = ty.nn.module("Pretrained", Published)

-- Names of a file that hold no weights: buffers that older versions wrote.
Pretrained.ignored = { "%.attn%.bias$", "%.attn%.masked_bias$", "rotary_emb%.inv_freq$", "%.position_ids$",
  "^position_ids$" }

--- The keys of config.json.
function Pretrained:published_config()
  local config = Published.published_config(self)
  config.model_type = self.model_type
  config.architectures = { self.architecture }
  return config
end

-- config.json with the dtype of the weights, and generation_config.json where there is one.
function Pretrained:published_files()
  local files = Published.published_files(self)
  local config = files["config.json"]
  config.dtype = nil
  config.torch_dtype = ({ f32 = "float32", f16 = "float16", bf16 = "bfloat16", f64 = "float64" })[
    self:parameters()[1].dtype]
  files["generation_config.json"] = self.generation_config
  return files
end

return Pretrained
