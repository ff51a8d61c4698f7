--- The autoencoder of latent diffusion, with the names and the config.json of diffusers' AutoencoderKL: pictures to
-- normal distributions of latents and back. Kingma and Welling 2014; Rombach et al. 2022, "High-Resolution Image
-- Synthesis with Latent Diffusion Models".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local Component = require "tycho.models.component"
local Gaussian = require "tycho.models.gaussian"
local tiles = require "tycho.models.tiles"

local nn = ty.nn
local WHO = "AutoencoderKL"

-- Attention over all positions with one head, for levels whose type has it and for the middle.
local function attention(channels, o)
  return function() return blocks.Attention(channels, 1, o.groups, o.eps) end
end

local function repeated(value, count)
  local list = {}
  for i = 1, count do list[i] = value end
  return list
end

local Encoder = nn.module "Encoder"

function Encoder:init(config, o)
  local channels = config.block_out_channels
  local width = channels[1]
  self.conv_in = nn.Conv2d(config.in_channels, width, 3, { padding = 1 })
  self.down_blocks = nn.ModuleList {}
  for i, outputs in ipairs(channels) do
    local inputs = repeated(outputs, config.layers_per_block)
    inputs[1] = width
    local attends = config.down_block_types[i] == "AttnDownEncoderBlock2D"
    local level = blocks.Level(inputs, outputs, nil, attends and attention(outputs, o), o)
    if i < #channels then level.downsamplers = nn.ModuleList { blocks.Downsample(outputs, 0) } end
    self.down_blocks:append(level)
    width = outputs
  end
  self.mid_block = blocks.Middle(2, width, nil, config.mid_block_add_attention and attention(width, o)(), o)
  self.conv_norm_out = nn.GroupNorm(o.groups, width, { eps = o.eps, activation = "silu" })
  self.conv_out = nn.Conv2d(width, 2 * config.latent_channels, 3, { padding = 1 })
end

function Encoder:forward(x)
  return blocks.part(function()
    local h = self.conv_in(x)
    for _, level in ipairs(self.down_blocks) do h = level(h, true) end
    return self.conv_out(self.conv_norm_out(self.mid_block(h)))
  end)
end

local Decoder = nn.module "Decoder"

function Decoder:init(config, o)
  local channels = config.block_out_channels
  local width = channels[#channels]
  self.conv_in = nn.Conv2d(config.latent_channels, width, 3, { padding = 1 })
  self.mid_block = blocks.Middle(2, width, nil, config.mid_block_add_attention and attention(width, o)(), o)
  self.up_blocks = nn.ModuleList {}
  for i = #channels, 1, -1 do
    local outputs = channels[i]
    local inputs = repeated(outputs, config.layers_per_block + 1)
    inputs[1] = width
    local attends = config.up_block_types[#channels + 1 - i] == "AttnUpDecoderBlock2D"
    local level = blocks.Level(inputs, outputs, nil, attends and attention(outputs, o), o)
    if i > 1 then level.upsamplers = nn.ModuleList { blocks.Upsample(outputs) } end
    self.up_blocks:append(level)
    width = outputs
  end
  self.conv_norm_out = nn.GroupNorm(o.groups, width, { eps = o.eps, activation = "silu" })
  self.conv_out = nn.Conv2d(width, config.out_channels, 3, { padding = 1 })
end

function Decoder:forward(z)
  return blocks.part(function()
    local h = self.mid_block(self.conv_in(z))
    for _, level in ipairs(self.up_blocks) do h = level(h, true) end
    local normed = self.conv_norm_out(h)
    blocks.discard(h, normed)
    return self.conv_out(normed)
  end)
end

---@class AutoencoderKL: Component
---@field config table
---@field factor integer  how many pixels a latent is high and wide
local AutoencoderKL = nn.module("AutoencoderKL", Component)
AutoencoderKL.architecture = "AutoencoderKL"

local fields = {
  in_channels = { "count", 3 }, out_channels = { "count", 3 }, latent_channels = { "count", 4 },
  down_block_types = { "texts", configs.none }, up_block_types = { "texts", configs.none },
  block_out_channels = { "counts", { 64 } }, layers_per_block = { "few", 1 }, act_fn = { "text", "silu" },
  norm_num_groups = { "count", 32 }, sample_size = { "size", 32 }, scaling_factor = { "number", 0.18215 },
  shift_factor = { "number", configs.none }, latents_mean = { "numbers", configs.none },
  latents_std = { "numbers", configs.none }, force_upcast = { "flag", true }, use_quant_conv = { "flag", true },
  use_post_quant_conv = { "flag", true }, mid_block_add_attention = { "flag", true },
}

-- The list of a config that has one entry for each level.
local function each_level(config, key, allowed)
  local count, list = #config.block_out_channels, config[key] or repeated(allowed[1], #config.block_out_channels)
  if #list ~= count then
    error(("%s: config key '%s': expected as many as block_out_channels, %d, got %d"):format(WHO, key, count, #list), 0)
  end
  for _, name in ipairs(list) do
    if name ~= allowed[1] and name ~= allowed[2] then
      error(("%s: config key '%s': expected %s or %s, got %s, which is not supported"):format(WHO, key, allowed[1],
        allowed[2], name), 0)
    end
  end
  config[key] = list
end

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { act_fn = { "silu", "swish" } })
  each_level(config, "down_block_types", { "DownEncoderBlock2D", "AttnDownEncoderBlock2D" })
  each_level(config, "up_block_types", { "UpDecoderBlock2D", "AttnUpDecoderBlock2D" })
  -- Each level halves the size, and modules are made one by one: a file must not ask for more than there can be.
  if #config.block_out_channels > 16 or config.layers_per_block > 100 then
    error(("%s: expected block_out_channels of at most 16 levels and layers_per_block of at most 100, got %d and %d")
      :format(WHO, #config.block_out_channels, config.layers_per_block), 0)
  end
  for i, channels in ipairs(config.block_out_channels) do
    if channels % config.norm_num_groups ~= 0 then
      error(("%s: norm_num_groups %d must divide block_out_channels[%d], which is %d"):format(WHO,
        config.norm_num_groups, i, channels), 0)
    end
  end
  for _, key in ipairs { "latents_mean", "latents_std" } do
    if config[key] and #config[key] ~= config.latent_channels then
      error(("%s: config key '%s': expected one for each of the %d latent_channels, got %d"):format(WHO, key,
        config.latent_channels, #config[key]), 0)
    end
  end
  return config
end

--- given: the keys of diffusers' config.json, among them block_out_channels ({ 64 }: one for each level; all but the
-- last halve the size), layers_per_block (1), norm_num_groups (32), latent_channels (4), in_channels and out_channels
-- (3), mid_block_add_attention (true), use_quant_conv and use_post_quant_conv (true), scaling_factor (0.18215),
-- shift_factor, sample_size (32: the side of a picture in training, and of tiles).
function AutoencoderKL:init(given)
  local config = read(given)
  local o = { groups = config.norm_num_groups, eps = 1e-6, dropout = 0 }
  local latents = config.latent_channels
  self.config, self.factor = config, 1 << (#config.block_out_channels - 1)
  self.encoder = Encoder(config, o)
  self.decoder = Decoder(config, o)
  if config.use_quant_conv then self.quant_conv = nn.Conv2d(2 * latents, 2 * latents, 1) end
  if config.use_post_quant_conv then self.post_quant_conv = nn.Conv2d(latents, latents, 1) end
end

local kinds = { tile = "an integer >= 1 or a boolean", overlap = "a number in [0, 1)" }

-- fn(x) with the weights in f32, and the result in x's dtype, where f16 would overflow: files say so by force_upcast.
-- Where gradients are recorded the weights stay what they are.
local function upcast(self, x, fn)
  if x.dtype ~= "f16" or not self.config.force_upcast or ty.is_grad_enabled() then return fn(x) end
  local back = {}
  base.walk_state(self, function(_, _, tensor, owner, key)
    if tensor.dtype == "f16" then
      back[#back + 1] = { owner, key, tensor }
      rawset(owner, key, tensor:to "f32")
    end
  end)
  ty.core.program.renew()
  local ok, result = pcall(fn, x:to "f32")
  for _, entry in ipairs(back) do rawset(table.unpack(entry)) end
  ty.core.program.renew()
  if not ok then error(result, 0) end
  return result:to "f16"
end

-- fn(x) as the options of encode() and decode() say. from, to: how many numbers of x, and of what fn gives, are the
-- side of a latent.
local function in_parts(who, self, x, fn, options, from, to)
  if not ty.is_tensor(x) or x.ndim ~= 4 then
    arguments.fail("%s: %s: expected a tensor of 4 dimensions, got %s", who, from == 1 and "z" or "x",
      arguments.describe(x))
  end
  if options == nil then return upcast(self, x, fn) end
  local o = arguments.read(who, options, { sliced = false, tile = false, overlap = 0.25 }, kinds)
  local size = self.config.sample_size
  local tile = (o.tile == true and (type(size) == "table" and size[1] or size) or o.tile or 0) // self.factor
  if o.tile and tile < 1 then
    arguments.fail("%s: tile: expected at least the %d pixels of a latent, got %s", who, self.factor, tostring(o.tile))
  end
  local function whole(part)
    if not o.tile or math.max(part.shape[3], part.shape[4]) <= tile * from then return fn(part) end
    return tiles.map(part, fn, tile, from, to, o.overlap)
  end
  if not o.sliced or x.shape[1] <= 1 then return upcast(self, x, whole) end
  return upcast(self, x, function(all)
    local parts = {}
    for i = 1, all.shape[1] do parts[i] = whole(all:narrow(0, i - 1, 1)) end
    return ty.concat(parts, 0)
  end)
end

--- The distribution of the latents [n, latent_channels, h / factor, w / factor] of pictures x [n, in_channels, h, w].
-- In f16, without gradients, the weights are f32 meanwhile where the config says force_upcast. options, as of decode():
-- sliced, tile, overlap.
---@param x Tensor
---@param options? table
---@return Gaussian
function AutoencoderKL:encode(x, options)
  local factor = self.factor
  local moments = in_parts("AutoencoderKL:encode", self, x, function(part)
    if part.shape[3] % factor ~= 0 or part.shape[4] % factor ~= 0 then
      arguments.fail("AutoencoderKL:encode: x: expected a height and a width that %d divides, got %s", factor,
        arguments.describe(part))
    end
    local h = self.encoder(part)
    return self.quant_conv and self.quant_conv(h) or h
  end, options, factor, 1)
  return Gaussian.new(moments)
end

--- Pictures [n, out_channels, h * factor, w * factor] of latents z [n, latent_channels, h, w]. options, for less
-- memory: sliced (false; true: one sample after the other), tile (false; the side of tiles in pixels, or true: the
-- config's sample_size: what is larger is put together from overlapping tiles, which is close to the whole, not equal),
-- overlap (0.25: the share of a tile that it has in common with the next one).
---@param z Tensor
---@param options? table
---@return Tensor
function AutoencoderKL:decode(z, options)
  return in_parts("AutoencoderKL:decode", self, z, function(part)
    return self.decoder(self.post_quant_conv and self.post_quant_conv(part) or part)
  end, options, 1, self.factor)
end

-- The config's means and deviations of latents, each [1, channels, 1, 1] or a number.
local function statistics(self, like)
  local config = self.config
  local function channels(list)
    return list and ty.tensor(list, { dtype = like.dtype, device = like.device }):reshape(1, -1, 1, 1)
  end
  return channels(config.latents_mean) or config.shift_factor or 0, channels(config.latents_std) or 1
end

--- Latents as diffusion has them, of about unit variance: (z - shift_factor) * scaling_factor, or by latents_mean and
-- latents_std where the config has these.
---@param z Tensor
---@return Tensor
function AutoencoderKL:scale(z)
  arguments.expect("AutoencoderKL:scale", "z", z, "a tensor")
  local mean, std = statistics(self, z)
  return (z - mean) * self.config.scaling_factor / std
end

--- The inverse of scale(): what decode() takes.
---@param z Tensor
---@return Tensor
function AutoencoderKL:unscale(z)
  arguments.expect("AutoencoderKL:unscale", "z", z, "a tensor")
  local mean, std = statistics(self, z)
  return z * std / self.config.scaling_factor + mean
end

--- Pictures x [n, in_channels, h, w], encoded and decoded, and the distribution between. options: sample (false: the
-- mean is decoded; true: a draw, as in training), seed (of the draw).
---@param x Tensor
---@param options? {sample?: boolean, seed?: integer}
---@return Tensor
---@return Gaussian
function AutoencoderKL:forward(x, options)
  local o = arguments.read(WHO, options, { sample = false, seed = arguments.none }, { seed = "an integer" })
  local posterior = self:encode(x)
  return self:decode(o.sample and posterior:sample(o.seed) or posterior:mode()), posterior
end

return AutoencoderKL
