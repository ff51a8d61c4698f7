--- Pictures from words: what a pipeline of diffusers' layout is used for. A text encoder reads the prompts, a U-Net or
-- a transformer denoises latents, an autoencoder makes pictures of them.
--
--     local pipeline = hub.pipeline "path/of/stable-diffusion"
--     local painter = diffusion.TextToImage(pipeline)
--     local pictures = painter:paint({ "two red apples", "a fox" }, { steps = 20, guidance = 4, seed = 1 })
--
-- Rombach et al. 2022 (Stable Diffusion: a U-Net with cross-attention, noise of a discrete schedule); Esser et al. 2024
-- (Stable Diffusion 3: a transformer, straight flows).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local published = require "tycho.diffusion.published"

local expect, fail = arguments.expect, arguments.fail
local WHO = "TextToImage"

---@class TextToImage
---@field network Module        the denoiser
---@field autoencoder AutoencoderKL
---@field text_encoder Module
---@field tokenizer Tokenizer
---@field process Process       what the network was trained for
---@field scaled boolean        sampling begins with sigma times standard noise
---@field length integer        tokens of a prompt: longer ones are cut, shorter ones filled up
local TextToImage = {}
TextToImage.__index = TextToImage
TextToImage.__name = WHO

-- ---- construction ----

--- pipeline: { components = { tokenizer, text_encoder, unet or transformer, vae, scheduler (its config) } }, as
-- hub.pipeline() reads a folder. options: length (tokens of a prompt; what the tokenizer or the text encoder says).
---@param pipeline Pipeline
---@param options? { length?: integer }
---@return TextToImage
local function new(pipeline, options)
  expect(WHO, "pipeline", pipeline, "a table")
  local parts = expect(WHO, "pipeline.components", pipeline.components, "a table")
  local o = arguments.read(WHO, options, { length = arguments.none }, { length = "an integer >= 2" })
  local network = parts.unet or parts.transformer
  for name, part in pairs { ["unet or transformer"] = network or false, vae = parts.vae or false,
    text_encoder = parts.text_encoder or false, scheduler = parts.scheduler or false,
    tokenizer = parts.tokenizer or false } do
    if not part then
      local reason = pipeline.left_out and pipeline.left_out[name]
      fail("%s: pipeline.components.%s: expected one, got %s", WHO, name, reason or "nil")
    end
  end
  local self = setmetatable({ network = network, autoencoder = parts.vae, text_encoder = parts.text_encoder,
    tokenizer = parts.tokenizer }, TextToImage)
  self.process, self.scaled = published(parts.scheduler)
  local room = self.text_encoder.config.max_position_embeddings
  self.length = o.length or math.min(self.tokenizer.max_length or room, room)
  return self
end

--- The device of the network.
function TextToImage:device() return self.network:device() end

--- Moves the networks. Returns itself.
---@param options table|string  as of Module:to
---@return TextToImage
function TextToImage:to(options)
  for _, name in ipairs { "network", "autoencoder", "text_encoder" } do self[name]:to(options) end
  return self
end

-- ---- words ----

local function check_prompts(who, prompts)
  expect(who, "prompts", prompts, "a list of strings")
  if #prompts == 0 then fail("%s: prompts: expected at least one, got none", who) end
end

--- Tokens of prompts, i64 [n, length].
---@param prompts string[]
---@return Tensor
function TextToImage:tokens(prompts)
  check_prompts("TextToImage:tokens", prompts)
  return (self.tokenizer:encode_batch(prompts, { max_length = self.length, length = self.length }))
end

--- The condition that the network takes, of prompts or of their tokens i64 [n, length]: { text = { embeddings, pooled }
-- }, where pooled is left out for a text encoder without it. Not recorded.
---@param prompts string[]|Tensor
---@return table condition
function TextToImage:condition(prompts)
  local tokens = ty.is_tensor(prompts) and prompts or self:tokens(prompts)
  return ty.no_grad(function()
    local hidden, pooled = self.text_encoder(tokens:to { device = self.text_encoder:device() })
    if ty.is_tensor(pooled) and hidden.ndim == 2 then hidden, pooled = pooled, hidden end
    return { text = { embeddings = hidden, pooled = pooled } }
  end)
end

-- ---- pictures ----

--- Latents of pictures [n, 3, h, w], u8 or floats from -1 to 1, as the network sees them: the means of the posterior,
-- scaled to unit variance.
---@param pictures Tensor
---@return Tensor
function TextToImage:encode(pictures)
  expect("TextToImage:encode", "pictures", pictures, "a tensor")
  if pictures.dtype == "u8" then pictures = pictures:to "f32" / 127.5 - 1 end
  return ty.no_grad(function()
    return self.autoencoder:scale(self.autoencoder:encode(pictures:to { device = self:device() }):mode())
  end)
end

--- Pictures u8 [n, 3, h, w] of latents.
---@param latents Tensor
---@return Tensor
function TextToImage:decode(latents)
  expect("TextToImage:decode", "latents", latents, "a tensor")
  return ty.no_grad(function()
    local x = self.autoencoder:decode(self.autoencoder:unscale(latents))
    return ((x:clamp(-1, 1) + 1) * 127.5):round():to "u8"
  end)
end

local paint_defaults = { steps = 20, guidance = 4.0, seed = 0, negative = "", width = arguments.none,
  height = arguments.none, solver = arguments.none, parts = {}, batch = 32, on_step = arguments.none,
  noise = arguments.none }
local paint_kinds = { steps = "an integer >= 1", guidance = "a finite number", seed = "an integer",
  negative = "a string", width = "an integer >= 1", height = "an integer >= 1", batch = "an integer >= 1",
  solver = "a table", parts = "a table", on_step = "a function", noise = "a tensor" }

-- Rows and columns of the latents that pictures of a size have.
local function latent_size(self, o)
  local config = self.autoencoder.config
  local factor = 2 ^ (#config.block_out_channels - 1) // 1 | 0
  local sides = {}
  for i, key in ipairs { "height", "width" } do
    local side = o[key] or (self.network.config.sample_size or 64) * factor
    if side % factor ~= 0 then
      fail("TextToImage:paint: %s: expected a multiple of the autoencoder's %d, got %d", key, factor, side)
    end
    sides[i] = side // factor
  end
  return sides[1], sides[2]
end

--- Pictures u8 [n, 3, height, width] of prompts; the same seed gives the same pictures, whatever the batch. options:
-- steps (20), guidance (4: classifier-free; 1: none), negative (""), seed (0), width and height (what the network was
-- trained for), solver (what the scheduler names), parts ({}: of the sampler), batch (32: pictures at a time), noise
-- (standard noise of the latents' shape, in the place of that of the seed), on_step(i, latents, run).
---@param prompts string[]
---@param options? table
---@return Tensor pictures
---@return Tensor latents
function TextToImage:paint(prompts, options)
  local who = "TextToImage:paint"
  check_prompts(who, prompts)
  local o = arguments.read(who, options, paint_defaults, paint_kinds)
  local rows, columns = latent_size(self, o)
  local shape = { #prompts, self.autoencoder.config.latent_channels, rows, columns }
  local noise = o.noise
  if not noise then
    local state = ty.rng_state()
    ty.manual_seed(o.seed)
    noise = ty.randn(shape)
    ty.rng_state(state)
  elseif table.concat(noise.shape, ", ") ~= table.concat(shape, ", ") then
    fail("%s: noise: expected [%s], got [%s]", who, table.concat(shape, ", "), table.concat(noise.shape, ", "))
  end
  local sampler = self.process:sampler { guidance = o.guidance, steps = o.steps, solver = o.solver, parts = o.parts }
  local null = o.guidance ~= 1 and self:condition { o.negative } or nil
  local pictures, latents = {}, {}
  for start = 1, #prompts, o.batch do
    local part = table.move(prompts, start, math.min(start + o.batch - 1, #prompts), 1, {})
    pictures[#pictures + 1], latents[#latents + 1] = ty.scope(function()
      local x = noise:narrow(0, start - 1, #part):to { device = self:device() }
      if self.scaled then x = x * sampler:points()[1].sigma end
      x = sampler:sample(self.network, x.shape, { condition = self:condition(part), null = null, x = x,
        on_step = o.on_step })
      return self:decode(x), x
    end)
  end
  return ty.concat(pictures, 0), ty.concat(latents, 0)
end

return new
