--- A U-Net for diffusion, conditioned on time, class and text, with the parameter names of diffusers' UNet2DModel and
-- (with a context) UNet2DConditionModel. Ronneberger et al. 2015; Ho et al. 2020; scale and shift by the time
-- embedding: Dhariwal and Nichol 2021; text by cross-attention: Rombach et al. 2022; sizes beside it: Podell et al.
-- 2023, "SDXL". The config.json of diffusers is read by unet_config.lua.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local front = require "tycho.models.unet_front"
local Component = require "tycho.models.component"

local nn = ty.nn

---@class UNet: Component
---@field options table        those of the constructor, with the defaults; levels and middle as read above
---@field null_label? integer  the label that means "any class"
local UNet = nn.module("UNet", Component)

--- options: in_channels (1), out_channels (1);
-- levels ({ 32, { channels = 64, attention = true } }), one for each resolution: a number of channels, or a table of
--   channels, layers (residual blocks; that of the U-Net), down and up ("conv", or "resnet": how the size changes after
--   it), attention (false; true; or { heads =, head_width =, depth =, cross_only =, groups = } with depth blocks of a
--   transformer where there is a context, a list of depths for each residual block; groups of the norm before attention
--   without a context, false: none) and up_attention (that on the way up; as on the way down);
-- middle (true: attention in the middle, as in the last level where that has some; false; or a table as above);
-- middle_blocks (2: residual blocks there; 0: no middle);
-- layers (1) and heads (4) for levels that do not say;
-- classes (0: not conditioned on a class) and null_class (true: one label more, null_label, for any class);
-- class_kind ("table": labels are numbers of classes; what else labels may be, and class_width: see unet_config.lua);
-- context (0; the width of text embeddings: attention is then to the map and to the text);
-- linear_projection (false: 1x1 convolutions lead into the transformers, as in Stable Diffusion 1);
-- added_width (0; as in SDXL, of pooled text and embedded sizes together) and sizes_width (256, of each size's);
-- guidance_width (none: of an embedding of guidance that is added to the time's, as in consistency models);
-- groups (8) and eps (1e-5) of the norms, dropout (0);
-- scale_shift (true: the time scales and shifts; false: it is added), sines_first (false) and frequency_shift (0) of
-- the time's waves, time_width (four times the first level's channels);
-- down_padding (1: on all sides; 0: on the right and below alone), in_kernel and out_kernel (3), centre (false: true
-- takes pictures of [0, 1]).
function UNet:init(options)
  local o = front.options(options)
  local levels = o.levels
  local first, width = levels[1].channels, levels[#levels].channels
  rawset(self, "options", o)
  local skips, time = front.build(self, o)

  self.up_blocks = nn.ModuleList {}
  for i = #levels, 1, -1 do
    local l, inputs = levels[i], {}
    for layer = 1, l.layers + 1 do
      inputs[layer] = (layer == 1 and width or l.channels) + table.remove(skips)
    end
    local level = blocks.Level(inputs, l.channels, time, front.attention_blocks(l.channels, l.up_attention, o), o)
    if i > 1 then level.upsamplers = nn.ModuleList { front.resizer(l.up, "up", l.channels, time, o) } end
    self.up_blocks:append(level)
    width = l.channels
  end

  self.conv_norm_out = nn.GroupNorm(o.groups, first, { eps = o.eps, activation = "silu" })
  self.conv_out = blocks.zero(nn.Conv2d(first, o.out_channels, o.out_kernel, { padding = (o.out_kernel - 1) // 2 }))
end

-- Adds what controls the network to the maps on the way, and to what came through the middle.
local function add_residuals(residuals, h, skips)
  local down = type(residuals) == "table" and residuals.down
  if type(down) ~= "table" or #down ~= #skips or not ty.is_tensor(residuals.middle) then
    arguments.fail("UNet: condition.residuals: expected { down = %d tensors, middle = a tensor }, got %s", #skips,
      type(down) == "table" and ("%d tensors"):format(#down) or arguments.describe(residuals))
  end
  for i, skip in ipairs(skips) do skips[i] = skip + down[i] end
  return h + residuals.middle
end

-- Residual block i of a level on the way up, and the attention after it, with the last of the maps beside; h and that
-- map are needed no longer.
local function climb(level, i, h, skips, time, context, mask)
  local skip = table.remove(skips)
  local joined, rest = ty.concat({ h, skip }, 1), skips[#skips]
  blocks.discard(h, rest)
  blocks.discard(skip, rest)
  return level:run(i, joined, time, context, mask, true)
end

--- x [n, in_channels, h, w], t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: labels (i64 [n]; null_label for any class), text = { embeddings [n, tokens, context], mask [n, tokens],
-- pooled [n, width] }, sizes [n, count] (SDXL: height and width of the original, top and left of the crop, height and
-- width wanted), guidance [n, guidance_width], residuals = { down = { ... }, middle = ... } (what a ControlNetModel
-- gives: added to the maps on the way down, and to what comes out of the middle).
---@param x Tensor
---@param t Tensor
---@param condition? table
---@return Tensor
function UNet:forward(x, t, condition)
  Component.check_inputs("UNet", self.in_channels, x, t, condition)
  local context, mask = front.text(self, condition, x.shape[1])
  return blocks.part(function()
    local time = front.embed(self, x, t, condition)
    local h, skips = front.descend(self, self.conv_in(self.centre and x * 2 - 1 or x), time, context, mask)
    local residuals = condition and condition.residuals
    if residuals ~= nil then h = add_residuals(residuals, h, skips) end
    for _, level in ipairs(self.up_blocks) do
      for i = 1, #level.resnets do h = climb(level, i, h, skips, time, context, mask) end
      local beside, before = skips[#skips], h
      if beside then
        h = level:resize(h, time, { beside.shape[3], beside.shape[4] })
        blocks.discard(before, h, beside)
      end
    end
    return self.conv_out(self.conv_norm_out(h))
  end)
end

--- The keys of diffusers' config.json for it.
function UNet:published_config() return require("tycho.models.unet_config").write(self.options) end

return UNet
