--- A network that says where things shall be in a picture, with the names and the config.json of diffusers'
-- ControlNetModel: the way down of a U-Net, which sees another picture besides (edges, depths, poses), and from each
-- map on that way what is added to the U-Net's own. Zhang et al. 2023, "Adding Conditional Control to Text-to-Image
-- Diffusion Models".
--
--     local control = hub.load "path/of/a/controlnet"
--     local residuals = control(x, t, { text = text, control = edges })
--     local y = unet(x, t, { text = text, residuals = residuals })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local front = require "tycho.models.unet_front"
local unet_config = require "tycho.models.unet_config"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "ControlNetModel"

-- The picture that controls, made as small as the latents.
local Eye = nn.module "ControlNetConditioningEmbedding"

function Eye:init(inputs, channels, outputs)
  self.conv_in = nn.Conv2d(inputs, channels[1], 3, { padding = 1 })
  self.blocks = nn.ModuleList {}
  for i = 1, #channels - 1 do
    self.blocks:append(nn.Conv2d(channels[i], channels[i], 3, { padding = 1 }))
    self.blocks:append(nn.Conv2d(channels[i], channels[i + 1], 3, { padding = 1, stride = 2 }))
  end
  self.conv_out = blocks.zero(nn.Conv2d(channels[#channels], outputs, 3, { padding = 1 }))
end

function Eye:forward(x)
  x = self.conv_in(x):silu()
  for _, conv in ipairs(self.blocks) do x = conv(x):silu() end
  return self.conv_out(x)
end

---@class ControlNetModel: Component
---@field factor integer  how many of the controlling picture's pixels a latent is high and wide
local ControlNet = nn.module(WHO, Component)
ControlNet.architecture = WHO

--- given: the keys of diffusers' config.json: those of a UNet2DConditionModel's way down, and conditioning_channels (3:
-- of the controlling picture), conditioning_embedding_out_channels ({ 16, 32, 96, 256 }: all but the first halve its
-- size), controlnet_conditioning_channel_order ("rgb", "bgr"), global_pool_conditions (false; true: of each map the
-- mean alone).
function ControlNet:init(given)
  local options, config = unet_config.read_control(given)
  local o = front.options(options)
  local channels = config.conditioning_embedding_out_channels
  if #channels > 16 then
    error(("%s: config key 'conditioning_embedding_out_channels': expected at most 16, got %d"):format(WHO, #channels),
      0)
  end
  local skips = front.build(self, o)
  self.config, self.factor = config, 1 << (#channels - 1)
  self.controlnet_cond_embedding = Eye(config.conditioning_channels, channels, o.levels[1].channels)
  self.controlnet_down_blocks = nn.ModuleList {}
  for _, width in ipairs(skips) do self.controlnet_down_blocks:append(blocks.zero(nn.Conv2d(width, width, 1))) end
  local last = o.levels[#o.levels].channels
  self.controlnet_mid_block = blocks.zero(nn.Conv2d(last, last, 1))
end

--- What a U-Net adds to its own maps, { down = { ... }, middle = ... }, for x [n, in_channels, h, w] and t [n].
-- condition: control [n, conditioning_channels, h * factor, w * factor] (floats from 0 to 1) and what the U-Net's
-- condition has: text, labels, sizes. strength (1): all is multiplied by it.
---@param x Tensor
---@param t Tensor
---@param condition table
---@param strength? number
---@return table residuals
function ControlNet:forward(x, t, condition, strength)
  local config = self.config
  Component.check_inputs(WHO, self.in_channels, x, t, condition)
  strength = arguments.expect(WHO, "strength", strength, "a finite number or nil") or 1
  local picture = condition and condition.control
  local wanted = { x.shape[1], config.conditioning_channels, self.factor * x.shape[3], self.factor * x.shape[4] }
  if not ty.is_tensor(picture) or table.concat(picture.shape, ", ") ~= table.concat(wanted, ", ") then
    arguments.fail("%s: condition.control: expected [%s], got %s", WHO, table.concat(wanted, ", "),
      arguments.describe(picture))
  end
  if config.controlnet_conditioning_channel_order == "bgr" then picture = picture:flip { 1 } end
  local context, mask = front.text(self, condition, x.shape[1])
  local time = front.embed(self, x, t, condition)
  local h = self.conv_in(x) + self.controlnet_cond_embedding(picture:to(x.dtype))
  local middle, skips = front.descend(self, h, time, context, mask)
  local function out(conv, map)
    local y = conv(map)
    if strength ~= 1 then y = y * strength end
    return config.global_pool_conditions and y:mean({ 2, 3 }, true) or y
  end
  local down = {}
  for i, map in ipairs(skips) do down[i] = out(self.controlnet_down_blocks[i], map) end
  return { down = down, middle = out(self.controlnet_mid_block, middle) }
end

return ControlNet
