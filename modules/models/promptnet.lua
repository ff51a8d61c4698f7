--- PromptNet: a network that says of a picture, and of the noisy sample that is to become one like it, which words a
-- network that draws from words should be told: pseudo-words in the space of a text encoder's token embeddings.
-- Zhou et al. 2023, "Enhancing Detail Preservation for Customized Text-to-Image Generation: A Regularization-Free
-- Approach", section 3.1. Parts are those of the U-Net.
local ty = require "tycho"
local blocks = require "tycho.models.unet_blocks"

local nn = ty.nn

---@class PromptNet: Module
---@field options table
local PromptNet = nn.module "PromptNet"

--- options: in_channels (4: of pictures as the network that draws sees them), features (0: width of an embedding of the
-- picture that comes beside), with_noise (true: the noisy sample is seen too; false: a network cannot learn to say what
-- the sample shows by itself, and has to look at the picture), channels ({ 64, 96 }: of each resolution), words (1: how
-- many), width (768: of a word), groups (8), eps (1e-5), dropout (0).
function PromptNet:init(options)
  local o = nn.options("PromptNet", options, { in_channels = 4, features = 0, with_noise = true,
    channels = { 64, 96 }, words = 1,
    width = 768, groups = 8, eps = 1e-5, dropout = 0.0 }, { in_channels = "an integer >= 1",
    features = "an integer >= 0", channels = "a list of integers >= 1", words = "an integer >= 1",
    width = "an integer >= 1", groups = "an integer >= 1", eps = "a finite number >= 0",
    dropout = "a number in [0, 1)" })
  if #o.channels == 0 then
    require("tycho.arguments").fail("PromptNet: channels: expected at least one number, got none")
  end
  o.scale_shift = true
  rawset(self, "options", o)
  local time = 4 * o.channels[1]
  self.time_proj = nn.Sinusoidal(o.channels[1])
  self.time_embedding = blocks.TimeEmbedding(o.channels[1], time)
  self.conv_in = nn.Conv2d(o.with_noise and 2 * o.in_channels or o.in_channels, o.channels[1], 3, { padding = 1 })
  self.resnets, self.downsamplers = nn.ModuleList {}, nn.ModuleList {}
  local width = o.channels[1]
  for i, channels in ipairs(o.channels) do
    if i > 1 then self.downsamplers:append(blocks.Downsample(width)) end
    self.resnets:append(blocks.ResnetBlock(width, channels, time, o))
    width = channels
  end
  self.norm_out = nn.GroupNorm(o.groups, width, { eps = o.eps, activation = "silu" })
  if o.features > 0 then self.feature_proj = nn.Linear(o.features, width) end
  self.word_proj = nn.Linear(width, o.words * o.width)
end

--- picture and noisy sample [n, in_channels, h, w], t [n] from 0 to 1000, features [n, features] of the picture where
-- there are any: words [n, words, width].
---@param picture Tensor
---@param noisy Tensor
---@param t Tensor
---@param features? Tensor
---@return Tensor
function PromptNet:forward(picture, noisy, t, features)
  local o = self.options
  local time = self.time_embedding(self.time_proj(t:to(picture.dtype))):silu()
  local h = self.conv_in(o.with_noise and ty.concat({ picture, noisy }, 1) or picture)
  for i = 1, #o.channels do
    if i > 1 then h = self.downsamplers[i - 1](h) end
    h = self.resnets[i](h, time)
  end
  h = self.norm_out(h):mean { 2, 3 }
  if features and rawget(self, "feature_proj") then h = (h + self.feature_proj(features)):silu() end
  return self.word_proj(h):reshape(h.shape[1], o.words, o.width)
end

return PromptNet
