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
local conditions = require "tycho.diffusion.condition"
local controlled = require "tycho.diffusion.controlled"
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
---@field process Process       what the network was trained for
---@field length integer        tokens of a prompt: longer ones are cut, shorter ones filled up
local TextToImage = {}
TextToImage.__index = TextToImage
TextToImage.__name = WHO

-- ---- construction ----

--- pipeline: { class, components = { tokenizer, text_encoder, unet or transformer, vae, scheduler (its config) } }, as
-- hub.pipeline() reads a folder; SDXL, Stable Diffusion 3 and Flux have more text encoders, by diffusers' names.
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
  self.network, self.autoencoder = self.prompts.network, prompting.component(pipeline, "vae")
  self.text_encoder, self.tokenizer = parts.text_encoder, parts.tokenizer
  self.length = self.prompts.readers[1].length
  self.process = self.prompts:process(self:default_size())
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

--- The condition that guidance pushes away from, for one picture, of a negative prompt (""). options: as of
-- condition().
---@param negative? string
---@param options? table
---@return table condition
function TextToImage:null(negative, options)
  expect("TextToImage:null", "negative", negative, "a string or nil")
  return self.prompts:null(negative or "", read_told(self, "TextToImage:null", options))
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
  noise = arguments.none, controls = {} }
local paint_kinds = { steps = "an integer >= 1", guidance = "a finite number", seed = "an integer",
  negative = "a string", width = "an integer >= 1", height = "an integer >= 1", batch = "an integer >= 1",
  solver = "a table", parts = "a table", on_step = "a function", noise = "a tensor",
  controls = "a list of tables" }

--- How many pixels a latent is high and wide.
---@return integer
function TextToImage:factor() return 1 << (#self.autoencoder.config.block_out_channels - 1) end

--- Rows and columns of the latents that the network was trained for.
---@return integer rows
---@return integer columns
function TextToImage:default_size()
  local size = self.network.config.sample_size or (self.network.config.axes_dims_rope and 128 or 64)
  if type(size) == "table" then return size[1], size[2] end
  return size, size
end

-- Rows and columns of the latents that pictures of a size have.
local function latent_size(self, o)
  local factor, unit = self:factor(), self.prompts.unit
  local default, sides = { self:default_size() }, {}
  for i, key in ipairs { "height", "width" } do
    local side = o[key] or default[i] * factor
    if side % (factor * unit) ~= 0 then
      fail("TextToImage:paint: %s: expected a multiple of the autoencoder's %d%s, got %d", key, factor,
        unit > 1 and (" times the network's %d"):format(unit) or "", side)
    end
    sides[i] = side // factor
  end
  return sides[1], sides[2]
end

-- The network with those that control it, and their pictures [n, channels, height, width] from 0 to 1 on its device.
local function with_controls(self, who, list, n, told_of)
  if #list == 0 then return self.network, nil end
  local controls, pictures = {}, {}
  for i, control in ipairs(list) do
    local o = arguments.read(("%s: controls[%d]"):format(who, i), control, {
      net = self.pipeline.components.controlnet or arguments.none, picture = arguments.none, strength = 1 },
      { net = "a module", picture = "a tensor", strength = "a finite number" })
    local x = o.picture
    if not x or x.ndim < 3 or x.ndim > 4 or x.ndim == 4 and x.shape[1] ~= n and x.shape[1] ~= 1
        or x.shape[x.ndim - 1] ~= told_of.height or x.shape[x.ndim] ~= told_of.width then
      fail("%s: controls[%d].picture: expected [channels, %d, %d], or %d of them, got %s", who, i, told_of.height,
        told_of.width, n, arguments.describe(x))
    end
    if x.ndim == 3 then x = x:unsqueeze(0) end
    x = (x.dtype == "u8" and x:to "f32" / 255 or x):to { device = self:device() }
    pictures[i] = x:expand(n, x.shape[2], x.shape[3], x.shape[4])
    controls[i] = { net = o.net, strength = o.strength }
  end
  return controlled(self.network, controls), pictures
end

--- Pictures u8 [n, 3, height, width] of prompts; the same seed gives the same pictures, whatever the batch. options:
-- steps (20), guidance (4: classifier-free; 1: none; networks like Flux are told it instead), negative (""), seed (0),
-- width and height (what the network was trained for), solver (what the scheduler names), parts ({}: of the sampler),
-- batch (32: pictures at a time), noise (standard noise of the latents' shape, in the place of that of the seed),
-- on_step(i, latents, run), controls ({}: a list of { net = a ControlNetModel (the pipeline's), picture = u8 or from 0
-- to 1, [channels, height, width] or one for each prompt, strength = 1 }).
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
  local guided = self.prompts.guided
  local told_of = { height = rows * self:factor(), width = columns * self:factor(), guidance = o.guidance }
  local process = self.prompts.dynamic and self.prompts:process(rows, columns) or self.process
  local sampler = process:sampler { guidance = not guided and o.guidance or nil, steps = o.steps, solver = o.solver,
    parts = o.parts }
  local null = not guided and o.guidance ~= 1 and self:null(o.negative, told_of) or nil
  local network, seen = with_controls(self, who, o.controls, #prompts, told_of)
  local pictures, latents = {}, {}
  for start = 1, #prompts, o.batch do
    local part = table.move(prompts, start, math.min(start + o.batch - 1, #prompts), 1, {})
    pictures[#pictures + 1], latents[#latents + 1] = ty.scope(function()
      local x = noise:narrow(0, start - 1, #part):to { device = self:device() }
      local condition = self:condition(part, told_of)
      if seen then condition.controls = conditions.narrow(seen, start - 1, #part) end
      x = sampler:sample(network, x.shape, { condition = condition, null = null, noise = x, keep = { controls = true },
        on_step = o.on_step })
      return self:decode(x), x
    end)
  end
  return ty.concat(pictures, 0), ty.concat(latents, 0)
end

return new
