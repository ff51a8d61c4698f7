--- Pictures from words: what a pipeline of diffusers' layout is used for. A text encoder reads the prompts, a U-Net or
-- a transformer denoises latents, an autoencoder makes pictures of them.
--
--     local pipeline = hub.pipeline "path/of/stable-diffusion"
--     local painter = diffusion.TextToImage(pipeline)
--     local pictures = painter:paint({ "two red apples", "a fox" }, { steps = 20, guidance = 4, seed = 1 })
--     local changed = painter:paint({ "a fox in snow" }, { image = pictures["1:"], strength = 0.6 })
--
-- Rombach et al. 2022 (Stable Diffusion: a U-Net with cross-attention, noise of a discrete schedule); Esser et al. 2024
-- (Stable Diffusion 3: a transformer, straight flows).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local finite = require "tycho.diffusion.finite"
local named = require "tycho.diffusion.published.named"
local paint = require "tycho.diffusion.painting"
local pixels = require "tycho.diffusion.pixels"
local prompting = require "tycho.diffusion.prompts"

local expect, fail = arguments.expect, arguments.fail
local WHO = "TextToImage"

---@class TextToImage
---@field network Module        the denoiser
---@field autoencoder AutoencoderKL
---@field text_encoder Module   the first, where there are several
---@field tokenizer Tokenizer
---@field pipeline Pipeline     what it was made of
---@field prompts Prompts       what the network is told, by the pipeline's class
---@field scheduler table       the config that the process comes from
---@field process Process       what the network was trained for
---@field length integer        tokens of a prompt: longer ones are cut, shorter ones filled up
local TextToImage = {}
TextToImage.__index = TextToImage
TextToImage.__name = WHO

-- ---- construction ----

--- pipeline: { class, components = { tokenizer, text_encoder, unet or transformer, vae, scheduler (its config) } }, as
-- hub.pipeline() reads a folder; SDXL, Stable Diffusion 3 and Flux have more text encoders, by diffusers' names. A
-- network of 3, 12, 48 ... channels needs no vae: it draws pixels, see pixels.lua.
-- options: length (tokens of a prompt, of T5 where there are several encoders; what the tokenizer or the encoder says),
-- warn (a function of a text: what is said when a prompt is cut; to the error stream).
---@param pipeline Pipeline
---@param options? { length?: integer, warn?: fun(text: string) }
---@return TextToImage
local function new(pipeline, options)
  expect(WHO, "pipeline", pipeline, "a table")
  local parts = expect(WHO, "pipeline.components", pipeline.components, "a table")
  local o = arguments.read(WHO, options, { length = arguments.none,
    warn = function(text) io.stderr:write(text, "\n") end }, { length = "an integer >= 2", warn = "a function" })
  local self = setmetatable({ pipeline = pipeline, prompts = prompting.new(pipeline, o.length, o.warn) }, TextToImage)
  self.network = self.prompts.network
  self.autoencoder = parts.vae or pixels(self.network.config.in_channels) or prompting.component(pipeline, "vae")
  self.text_encoder, self.tokenizer = parts.text_encoder, parts.tokenizer
  self.length = self.prompts.readers[1].length
  return self:use(self.prompts.scheduler)
end

--- Samples by another scheduler: the config of one, or a short name such as "dpmpp_2m_karras" (see published/named.lua)
-- of one for what the network was trained for. Returns itself.
---@param scheduler table|string
---@return TextToImage
function TextToImage:use(scheduler)
  expect("TextToImage:use", "scheduler", scheduler, "a table or a string")
  if type(scheduler) == "string" then scheduler = named.config(self.scheduler, scheduler) end
  local rows, columns = self:default_size()
  self.process, self.scheduler = self.prompts:process(rows, columns, scheduler), scheduler
  return self
end

--- The device of the network.
function TextToImage:device() return self.network:device() end

--- Moves the networks. Returns itself.
---@param options table|string  as of Module:to
---@return TextToImage
function TextToImage:to(options)
  for _, name in ipairs { "network", "autoencoder", "prompts" } do self[name]:to(options) end
  return self
end

-- ---- words ----

local function check_prompts(who, prompts)
  expect(who, "prompts", prompts, "a list of strings")
  if #prompts == 0 then fail("%s: prompts: expected at least one, got none", who) end
  for i, prompt in ipairs(prompts) do
    local length, at = utf8.len(prompt)
    if not length then
      fail("%s: prompts[%d]: expected UTF-8, got the byte 0x%02X at %d", who, i, prompt:byte(at), at)
    end
  end
end

--- Tokens of prompts for the first text encoder, i64 [n, length].
---@param prompts string[]
---@return Tensor
function TextToImage:tokens(prompts)
  check_prompts("TextToImage:tokens", prompts)
  return (self.prompts.readers[1]:tokens(prompts))
end

local told = { height = "an integer >= 1", width = "an integer >= 1", guidance = "a finite number" }

-- The options of condition() and null().
local function read_told(self, who, options)
  local factor = self:factor()
  local rows, columns = self:default_size()
  return arguments.read(who, options, { height = rows * factor, width = columns * factor, guidance = 4.0 }, told)
end

--- The condition that the network takes, of prompts or, for a pipeline with one text encoder, of their tokens i64 [n,
-- length]: { text = { embeddings, pooled, mask }, sizes, guidance }, of which a network has what it was trained with.
-- options: height and width of the picture (what the network was trained for), guidance (4). Not recorded.
---@param prompts string[]|Tensor
---@param options? { height?: integer, width?: integer, guidance?: number }
---@return table condition
function TextToImage:condition(prompts, options)
  local who = "TextToImage:condition"
  if not ty.is_tensor(prompts) then check_prompts(who, prompts) end
  return self.prompts:condition(prompts, read_told(self, who, options))
end

--- The condition that guidance pushes away from, for one picture, of a negative prompt (""), or for several of a list
-- of them. options: as of condition().
---@param negative? string|string[]
---@param options? table
---@return table condition
function TextToImage:null(negative, options)
  expect("TextToImage:null", "negative", negative, "a string or a list of strings or nil")
  if type(negative) ~= "table" then negative = { negative or "" } end
  return self.prompts:null(negative, read_told(self, "TextToImage:null", options))
end

-- ---- pictures ----

local FEW = 1 << 16 -- pixels that go through the autoencoder at once on a CPU: their maps stay in its cache

-- What fn makes of x [n, c, h, w], a few rows at a time; factor: pixels of a side that one place of x has.
local function by_few(self, x, factor, fn)
  if self:device() ~= "cpu" then return fn(x) end
  return ty.nn.in_parts(x, math.max(1, FEW // math.max(1, x.shape[3] * x.shape[4] * factor * factor)), fn)
end

--- Latents of pictures [n, 3, h, w], u8 or floats from -1 to 1, as the network sees them: the means of the posterior,
-- scaled to unit variance. Of clips [n, frames, 3, h, w] each frame by itself: [n, channels, frames, rows, columns].
---@param pictures Tensor
---@return Tensor
function TextToImage:encode(pictures)
  expect("TextToImage:encode", "pictures", pictures, "a tensor")
  if pictures.ndim == 5 then
    return self:encode(pictures:flatten(0, 1)):unflatten(0, { pictures.shape[1], -1 }):transpose(1, 2):contiguous()
  end
  if pictures.ndim ~= 4 then
    fail("TextToImage:encode: pictures: expected [n, 3, h, w] or [n, frames, 3, h, w], got %s",
      arguments.describe(pictures))
  end
  return ty.no_grad(by_few, self, pictures, 1, function(x)
    x = x:to { device = self:device() }
    if x.dtype == "u8" then x = x:to "f32" / 127.5 - 1 end
    return self.autoencoder:scale(self.autoencoder:encode(x):mode())
  end)
end

--- Pictures u8 [n, 3, h, w] of latents; of those of clips [n, channels, frames, rows, columns] u8 [n, frames, 3, h, w].
---@param latents Tensor
---@return Tensor
function TextToImage:decode(latents)
  expect("TextToImage:decode", "latents", latents, "a tensor")
  if latents.ndim == 5 then
    return self:decode(latents:transpose(1, 2):flatten(0, 1)):unflatten(0, { latents.shape[1], -1 })
  end
  if latents.ndim ~= 4 then
    fail("TextToImage:decode: latents: expected [n, channels, rows, columns] or [n, channels, frames, rows, columns], "
      .. "got %s", arguments.describe(latents))
  end
  return ty.no_grad(by_few, self, latents, self:factor(), function(few)
    local function decode() return self.autoencoder:decode(self.autoencoder:unscale(few)) end
    -- An autoencoder in halves may be too small for its own numbers: SDXL's first one is.
    local x = finite.check("TextToImage:decode", "the pictures of the autoencoder", decode(), decode, self.autoencoder)
    return ((x:clamp(-1, 1) + 1) * 127.5):round():to "u8"
  end)
end

--- How many pixels a latent is high and wide.
---@return integer
function TextToImage:factor() return 1 << (#self.autoencoder.config.block_out_channels - 1) end

-- A whole number that the pipeline's index says; nil where it says none.
local function said(self, key)
  local value = (self.pipeline.options or {})[key]
  if value == nil then return nil end
  return expect(WHO, "pipeline.options." .. key, value, "an integer >= 1")
end

--- How many frames a picture has: of a network that draws clips what the pipeline's index says under num_frames (81,
-- where it says nothing); nil for one that draws single pictures.
---@return integer?
function TextToImage:default_frames()
  local patch = self.network.config.patch_size
  return type(patch) == "table" and #patch == 3 and (said(self, "num_frames") or 81) or nil
end

--- Rows and columns of the latents that the network was trained for; the pipeline's index may say them as height and
-- width of the picture.
---@return integer rows
---@return integer columns
function TextToImage:default_size()
  local height, width = said(self, "height"), said(self, "width")
  if height and width then return math.max(1, height // self:factor()), math.max(1, width // self:factor()) end
  local size = self.network.config.sample_size or (self.network.config.axes_dims_rope and 128 or 64)
  if type(size) == "table" then return size[1], size[2] end
  return size, size
end

--- Pictures u8 [n, 3, height, width] of prompts, or clips u8 [n, frames, 3, height, width] from a network that draws
-- clips, and their latents. options:
--   steps (20), solver (what the scheduler names; use() names another scheduler), parts ({}: of the sampler)
--   guidance (4: classifier-free; 1: none; networks like Flux are told it instead; or a value of diffusion.guidance),
--     rescale (0: see guidance.rescale)
--   negative (""; or one for each prompt)
--   seed (0: the first prompt's, each further one's is one more; or one for each prompt): a picture depends on its own
--     alone, so that it is the same by itself and in any batch
--   width and height (those of image, or what the network was trained for), frames (of clips)
--   image ([n or 1, 3, h, w], u8 or floats from -1 to 1): it is changed instead of beginning with noise alone
--   strength (0.8; 1 with a mask): how much of the way is gone anew; steps shrink with it
--   mask ([n or 1, 1, h, w], 1 where something new comes): the rest of image stays. Networks that were trained for it
--     see mask and image, with others the rest is put back after each step
--   controls ({}: a list of { net = a ControlNetModel (the pipeline's), picture = u8 or from 0 to 1, [channels, height,
--     width] or one for each prompt, strength = 1 })
--   batch (32: pictures at a time), noise (standard noise of the latents' shape, in the place of that of the seeds),
--   on_step(i, latents, run) after each step; false from it ends the batch there
---@param prompts string[]
---@param options? table
---@return Tensor pictures
---@return Tensor latents
function TextToImage:paint(prompts, options)
  check_prompts("TextToImage:paint", prompts)
  return paint(self, prompts, options)
end

return new
