--- The U-Nets of diffusers by their names and the keys of their config.json: tycho.models.UNet with the options that
-- unet_config.lua reads from these.
local ty = require "tycho"
local Component = require "tycho.models.component"
local UNet = require "tycho.models.unet"
local unet_config = require "tycho.models.unet_config"

local M = {}

-- A class whose constructor takes a config.
local function define(name, read)
  local class = ty.nn.module(name, UNet)
  class.architecture = name
  class.published_config = Component.published_config

  function class:init(given)
    local options, config = read(given)
    UNet.init(self, options)
    self.config = config
  end

  return class
end

--- A U-Net without text, of the keys of diffusers' config.json (block_out_channels, down_block_types, layers_per_block,
-- attention_head_dim ...).
---@overload fun(config: table): UNet
M.UNet2DModel = define("UNet2DModel", unet_config.read_plain)

--- A U-Net conditioned on text, as Stable Diffusion 1, 2 and XL have it, of the keys of diffusers' config.json
-- (cross_attention_dim, attention_head_dim, which is the number of heads, transformer_layers_per_block ...).
---@overload fun(config: table): UNet
M.UNet2DConditionModel = define("UNet2DConditionModel", unet_config.read_conditional)

return M
