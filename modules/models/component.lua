--- What the networks of pictures share that are published as components of a diffusers pipeline: a folder with
-- config.json, whose _class_name says the class, and diffusion_pytorch_model.safetensors.
local ty = require "tycho"
local Published = require "tycho.models.published"

---@class Component: Published
local Component = ty.nn.module("Component", Published)

Component.weights_file = "diffusion_pytorch_model.safetensors"

-- Attention in files from before diffusers 0.16.
local old_names = { query = "to_q", key = "to_k", value = "to_v", proj_attn = "to_out.0" }

--- Renames one published name to ours: files that are older have other names in attention.
function Component:rename(name)
  local where, layer, rest = name:match "^(.*%.attentions%.%d+%.)([%a_]+)(%.%a+)$"
  return old_names[layer] and where .. old_names[layer] .. rest or name
end

--- The keys of config.json, with the class.
function Component:published_config()
  local config = Published.published_config(self)
  config._class_name = self.architecture
  return config
end

return Component
