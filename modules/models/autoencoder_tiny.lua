--- The small autoencoder that gives quick views of latents, with the names and the config.json of diffusers'
-- AutoencoderTiny. Boer Bohan 2023, "TAESD".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local Component = require "tycho.models.component"
local Fixed = require "tycho.models.fixed"

local nn = ty.nn
local WHO = "AutoencoderTiny"

local activations = { relu = nn.ReLU, silu = nn.SiLU, swish = nn.SiLU, gelu = nn.GELU }

local function conv(inputs, outputs, options)
  options = options or {}
  options.padding = 1
  return nn.Conv2d(inputs, outputs, 3, options)
end

-- Three convolutions and the input beside.
local Block = nn.module "AutoencoderTinyBlock"

function Block:init(channels, activation)
  self.conv = nn.Sequential(conv(channels, channels), activation(), conv(channels, channels), activation(),
    conv(channels, channels))
end

function Block:forward(x) return (self.conv(x) + x):relu() end

local Encoder = nn.module "EncoderTiny"

function Encoder:init(config, activation)
  local layers, width = {}, nil
  for i, count in ipairs(config.num_encoder_blocks) do
    width = config.encoder_block_out_channels[i]
    layers[#layers + 1] = i == 1 and conv(config.in_channels, width) or conv(width, width, { stride = 2, bias = false })
    for _ = 1, count do layers[#layers + 1] = Block(width, activation) end
  end
  layers[#layers + 1] = conv(width, config.latent_channels)
  self.layers = nn.Sequential(table.unpack(layers))
end

function Encoder:forward(x) return self.layers((x + 1) / 2) end

local Decoder = nn.module "DecoderTiny"

function Decoder:init(config, activation)
  local channels, blocks = config.decoder_block_out_channels, config.num_decoder_blocks
  local layers = { conv(config.latent_channels, channels[1]), activation() }
  for i, count in ipairs(blocks) do
    local last = i == #blocks
    for _ = 1, count do layers[#layers + 1] = Block(channels[i], activation) end
    if not last then layers[#layers + 1] = nn.Upsample { scale = config.upsampling_scaling_factor } end
    layers[#layers + 1] = conv(channels[i], last and config.out_channels or channels[i], { bias = last })
  end
  self.layers = nn.Sequential(table.unpack(layers))
end

-- Latents beyond 3 are no latents of pictures.
function Decoder:forward(z) return self.layers((z / 3):tanh() * 3) * 2 - 1 end

---@class AutoencoderTiny: Component
---@field config table
---@field factor integer  how many pixels a latent is high and wide
local AutoencoderTiny = nn.module(WHO, Component)
AutoencoderTiny.architecture = WHO

local fields = {
  in_channels = { "count", 3 }, out_channels = { "count", 3 },
  encoder_block_out_channels = { "counts", { 64, 64, 64, 64 } },
  decoder_block_out_channels = { "counts", { 64, 64, 64, 64 } }, act_fn = { "text", "relu" },
  upsample_fn = { "text", "nearest" }, latent_channels = { "count", 4 }, upsampling_scaling_factor = { "count", 2 },
  num_encoder_blocks = { "counts", { 1, 3, 3, 3 } }, num_decoder_blocks = { "counts", { 3, 3, 3, 1 } },
  latent_magnitude = { "number", 3 }, latent_shift = { "number", 0.5 }, force_upcast = { "flag", false },
  scaling_factor = { "number", 1 }, shift_factor = { "number", 0 }, block_out_channels = { "counts", configs.none },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { upsample_fn = "nearest", upsampling_scaling_factor = 2,
    act_fn = { "relu", "silu", "swish", "gelu" } })
  local levels
  for _, part in ipairs { "encoder", "decoder" } do
    local channels, key = config[part .. "_block_out_channels"], ("num_%s_blocks"):format(part)
    levels = levels or #channels
    if #config[key] ~= #channels or #channels ~= levels then
      error(("%s: config key '%s': expected one for each of %d levels, got %d and %d in %s_block_out_channels"):format(
        WHO, key, levels, #config[key], #channels, part), 0)
    end
    local sum = 0
    for i, count in ipairs(config[key]) do
      sum = sum + count
      if channels[i] ~= channels[1] then
        error(("%s: config key '%s_block_out_channels': expected the same for all levels, %d, got %d"):format(WHO, part,
          channels[1], channels[i]), 0)
      end
    end
    if levels > 16 or sum > 1000 then
      error(("%s: expected at most 16 levels and 1000 blocks, got %d and %d"):format(WHO, levels, sum), 0)
    end
  end
  config.block_out_channels = config.block_out_channels or config.decoder_block_out_channels
  return config
end

--- given: the keys of diffusers' config.json: encoder_block_out_channels and decoder_block_out_channels ({ 64, 64, 64,
-- 64 }: all but one level halve the size), num_encoder_blocks ({ 1, 3, 3, 3 }) and num_decoder_blocks ({ 3, 3, 3, 1 }),
-- in_channels and out_channels (3), latent_channels (4), act_fn ("relu"), scaling_factor (1), shift_factor (0).
function AutoencoderTiny:init(given)
  local config = read(given)
  local activation = activations[config.act_fn]
  self.config, self.factor = config, 1 << (#config.num_encoder_blocks - 1)
  self.encoder, self.decoder = Encoder(config, activation), Decoder(config, activation)
end

local function check(who, name, x, channels)
  if not ty.is_tensor(x) or x.ndim ~= 4 or x.shape[2] ~= channels then
    arguments.fail("%s: %s: expected [n, %d, h, w], got %s", who, name, channels, arguments.describe(x))
  end
  return x
end

--- The latents [n, latent_channels, h / factor, w / factor] of pictures x [n, in_channels, h, w] from -1 to 1, as what
-- AutoencoderKL:encode() gives: mode() and sample() are both just these.
---@param x Tensor
---@return Fixed
function AutoencoderTiny:encode(x)
  local who = "AutoencoderTiny:encode"
  check(who, "x", x, self.config.in_channels)
  if x.shape[3] % self.factor ~= 0 or x.shape[4] % self.factor ~= 0 then
    arguments.fail("%s: x: expected a height and a width that %d divides, got %s", who, self.factor,
      arguments.describe(x))
  end
  return Fixed.new(self.encoder(x))
end

--- Pictures [n, out_channels, h * factor, w * factor] of latents z [n, latent_channels, h, w].
---@param z Tensor
---@return Tensor
function AutoencoderTiny:decode(z)
  return self.decoder(check("AutoencoderTiny:decode", "z", z, self.config.latent_channels))
end

--- Latents as diffusion has them.
---@param z Tensor
---@return Tensor
function AutoencoderTiny:scale(z)
  arguments.expect("AutoencoderTiny:scale", "z", z, "a tensor")
  return (z - self.config.shift_factor) * self.config.scaling_factor
end

--- The inverse of scale(): what decode() takes.
---@param z Tensor
---@return Tensor
function AutoencoderTiny:unscale(z)
  arguments.expect("AutoencoderTiny:unscale", "z", z, "a tensor")
  return z / self.config.scaling_factor + self.config.shift_factor
end

--- Latents as bytes can hold them, u8: what is kept of pictures that wait to be decoded.
---@param z Tensor
---@return Tensor
function AutoencoderTiny:to_bytes(z)
  arguments.expect("AutoencoderTiny:to_bytes", "z", z, "a tensor")
  local c = self.config
  return ((z / (2 * c.latent_magnitude) + c.latent_shift):clamp(0, 1) * 255):round():to "u8"
end

--- The inverse of to_bytes(), but for what rounding took: f32.
---@param bytes Tensor
---@return Tensor
function AutoencoderTiny:from_bytes(bytes)
  arguments.expect("AutoencoderTiny:from_bytes", "bytes", bytes, "a tensor")
  local c = self.config
  return (bytes:to "f32" / 255 - c.latent_shift) * (2 * c.latent_magnitude)
end

--- Pictures x [n, in_channels, h, w], encoded and decoded, and the latents.
---@param x Tensor
---@return Tensor
---@return Fixed
function AutoencoderTiny:forward(x)
  local latents = self:encode(x)
  return self:decode(latents:mode()), latents
end

return AutoencoderTiny
