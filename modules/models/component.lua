--- What the networks of pictures share that are published as components of a diffusers pipeline: a folder with
-- config.json, whose _class_name says the class, and diffusion_pytorch_model.safetensors.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Published = require "tycho.models.published"

--- A part of a diffusers pipeline: a network with its config.json and diffusion_pytorch_model.safetensors.
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

--- Checks what a network of diffusion gets: x [n, channels, h, w], t [n] and a condition, or an error that names it.
function Component.check_inputs(who, channels, x, t, condition)
  if not ty.is_tensor(x) or x.ndim ~= 4 or x.shape[2] ~= channels then
    arguments.fail("%s: x: expected [n, %d, h, w], got %s", who, channels, arguments.describe(x))
  end
  if not ty.is_tensor(t) or t.ndim ~= 1 or t.shape[1] ~= x.shape[1] and t.shape[1] ~= 1 then
    arguments.fail("%s: t: expected [%d], got %s", who, x.shape[1], arguments.describe(t))
  end
  arguments.expect(who, "condition", condition, "a table or nil")
end

return Component
