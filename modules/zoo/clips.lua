--- Networks that draw clips (datasets.clips) from captions, and the judge of how things move in what they draw: what
-- recipes/zoo/clip-dit.lua does.
--
--     local painter = diffusion.TextToImage(zoo.load "clip-dit")
--     local clips = painter:paint({ "a red star bounces off the walls" }, { guidance = 3 })  -- u8 [1, 16, 3, 32, 32]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local drawing_judge = require "tycho.zoo.drawing_judge"
local models = require "tycho.models"
local painter = require "tycho.zoo.painter"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"

local nn = ty.nn
local M = {}

--- The laws of motion by number, from 0.
M.laws = datasets.clips.laws

--- What clips show that networks of the zoo draw: things on a plain colour or a gradient, by every law.
M.drawn = { frames = 16, size = 32, backgrounds = { "plain", "gradient" } }

--- Clips of a split with some fields: a data set. more: other options of the set.
---@param split string
---@param fields string[]
---@param more? table
---@return Clips
function M.set(split, fields, more)
  local options = { split = split, fields = fields }
  for _, list in ipairs { M.drawn, more or {} } do
    for key, value in pairs(list) do options[key] = value end
  end
  return datasets.load("clips", options)
end

-- ---- the painter ----

local LENGTH = 32 -- tokens of a caption

--- A painter of clips with fresh weights: Wan's transformer over the latents of frames, each made by the zoo's
-- autoencoder, and a text encoder of CLIP's kind. options: width (120: a multiple of 24), layers (6), inner (240: width
-- inside of feed-forward networks), text (64: width of words), text_layers (2), captions (4000: that the tokenizer
-- learns from), words (768: of its vocabulary), patch ({ 2, 2, 2 }: frames, rows and columns of latents that are one
-- token), device.
---@param options? table
---@return TextToImage
function M.painter(options)
  local o = arguments.read("zoo.clips.painter", options, { width = 120, layers = 6, inner = 240, text = 64,
    text_layers = 2, captions = 4000, words = 768, patch = { 2, 2, 2 }, device = "cpu" }, { width = "an integer >= 24",
    layers = "an integer >= 1", inner = "an integer >= 1", text = "an integer >= 8", text_layers = "an integer >= 1",
    captions = "an integer >= 1", words = "an integer >= 258", patch = "a list of integers >= 1" })
  local tokenizer = scenes.tokenizer_of(M.set("training", { "caption" }):batch(ty.arange(o.captions)).caption, o.words)
  ty.tokenizer.fields(tokenizer).max_length = LENGTH
  local components = nn.with_defaults({ device = o.device }, function()
    return {
      transformer = models.WanTransformer3DModel { patch_size = o.patch, in_channels = 4, out_channels = 4,
        num_layers = o.layers, num_attention_heads = o.width // 24, attention_head_dim = 24, ffn_dim = o.inner,
        text_dim = o.text, freq_dim = 64, rope_max_seq_len = 32 },
      text_encoder = models.CLIPTextModel { vocab_size = tokenizer.size, hidden_size = o.text,
        intermediate_size = 3 * o.text, num_hidden_layers = o.text_layers, num_attention_heads = 4,
        max_position_embeddings = LENGTH, bos_token_id = tokenizer.bos, eos_token_id = tokenizer.eos,
        pad_token_id = tokenizer.pad, initializer_factor = 5 } }
  end)
  components.tokenizer, components.vae = tokenizer, shelf.load("scene-vae", { device = o.device })
  components.scheduler = { _class_name = "FlowMatchEulerDiscreteScheduler", num_train_timesteps = 1000, shift = 1.0 }
  return diffusion.TextToImage { class = "WanPipeline", classes = {}, components = components,
    options = { num_frames = M.drawn.frames, height = M.drawn.size, width = M.drawn.size } }
end

--- Latents f16 and tokens of the first `count` training clips, from a file that is made where there is none.
---@param path string
---@param made TextToImage
---@param count integer
---@return Dataset
function M.data(path, made, count)
  if not ty.io.exists(path) then
    local set, latents, tokens = M.set("training", { "video", "caption" }), {}, {}
    for start = 0, count - 1, 25 do
      local batch = set:batch(ty.arange(start, math.min(start + 25, count)))
      latents[#latents + 1] = ty.scope(function()
        return made:encode(batch.video):to { dtype = "f16", device = "cpu" }
      end)
      tokens[#tokens + 1] = made:tokens(batch.caption)
    end
    ty.io.save_safetensors(path, { latents = ty.concat(latents, 0), tokens = ty.concat(tokens, 0) })
  end
  return ty.data.TensorDataset(ty.io.load_safetensors(path, { mmap = true }))
end

-- ---- the judge ----

-- Clips as the judge sees them, [n, 3, frames, h, w].
local function seen(video) return video:transpose(1, 2):to "f32" / 127.5 - 1 end

--- A judge with fresh weights, which says by which law a thing moves: a residual network over frames.
---@param channels? integer[]
---@return Module
function M.judge_network(channels)
  channels = channels or { 16, 32, 64 }
  local blocks = {}
  for i = 1, #channels do blocks[i] = 1 end
  return models.ResNet3d { classes = #M.laws, channels = channels, blocks = blocks, small = true }
end

--- Trains a judge on training clips that no painter sees (of another seed), most of them disturbed as drawing leaves
-- clips: one that knew clean clips alone took constant speed for bouncing where latents had a tenth of noise, which
-- hides no motion from an eye. options: batch (32), seed (0), and those of train.fit.
---@param network Module
---@param options table
---@return Module
function M.train_judge(network, options)
  local o = { batch = 32, seed = 0 }
  for key, value in pairs(options) do o[key] = value end
  local loader = ty.data.DataLoader(M.set("training", { "video", "law" }, { seed = o.seed + 1000 }), {
    batch_size = o.batch, shuffle = true, seed = o.seed, drop_last = true, device = network:device() })
  local fit = { lr = 3e-3, weight_decay = 0.02, final = 0.02, quiet = true, title = "judge", loss = function(m, batch)
    return nn.cross_entropy(m(drawing_judge.disturb(seen(batch.video))), batch.law)
  end }
  for key, value in pairs(o) do
    if key ~= "batch" and key ~= "seed" then fit[key] = value end
  end
  local _, averaged = ty.train.fit(network, loader, fit)
  return averaged:eval()
end

--- Numbers of the laws that a judge sees in clips u8 [n, frames, 3, h, w]: i64 [n].
---@param judge Module
---@param video Tensor
---@return Tensor
function M.see(judge, video)
  local list, n = {}, video.shape[1]
  for start = 0, n - 1, 50 do
    list[#list + 1] = ty.no_grad(ty.scope, function()
      local few = video:narrow(0, start, math.min(50, n - start)):to { device = judge:device() }
      return judge(seen(few)):argmax(1)
    end)
  end
  return ty.concat(list, 0):to "cpu"
end

--- Which share of the clips that a painter draws of captions of a split a judge sees the law in that is asked for, by
-- law and over all, that of the real clips of these captions, and the clips. first: of the captions.
---@param made TextToImage
---@param judge Module
---@param split string
---@param count integer
---@param options table  of TextToImage:paint, and first (0)
---@return table<string, number> drawn
---@return table<string, number> real
---@return Tensor video
function M.measure(made, judge, split, count, options)
  local first = options.first or 0
  local batch = M.set(split, { "video", "caption", "law" }):batch(ty.arange(first, first + count))
  local how = {}
  for key, value in pairs(options) do how[key] = value end
  how.first = nil
  local video = made:paint(batch.caption, how):to "cpu"
  local function shares(clips)
    local right, found = M.see(judge, clips):eq(batch.law):to "f32", {}
    found.law = right:mean():item()
    for i, law in ipairs(M.laws) do
      local asked = batch.law:eq(i - 1):to "f32"
      if asked:sum():item() > 0 then found[law] = ((right * asked):sum() / asked:sum()):item() end
    end
    return found
  end
  return shares(video), shares(batch.video), video
end

--- So many frames of each clip, evenly over its time, one after the other: u8 [n * count, 3, h, w], a row of a grid
-- for each clip.
---@param video Tensor  u8 [n, frames, 3, h, w]
---@param count integer
---@return Tensor
function M.frames(video, count)
  arguments.expect("clips.frames", "video", video, "a tensor")
  arguments.expect("clips.frames", "count", count, "an integer >= 1")
  local last, list = video.shape[2] - 1, {}
  for i = 0, count - 1 do list[i + 1] = video:select(1, i * last // math.max(1, count - 1)) end
  return ty.stack(list, 1):flatten(0, 1)
end

-- More of the times at which there is hardly anything but noise than flows usually see: there paths are decided, which
-- are what is slow in a clip.
local times = diffusion.times.logit_normal { mean = 0.7, std = 1.3 }

--- Trains a painter on latents and tokens, as painter.fit does, with its text encoder.
---@param r Recipe
---@param made TextToImage
---@param set Dataset
---@param seed integer
---@param evaluate fun(step: integer): table<string, number>
function M.fit(r, made, set, seed, evaluate)
  painter.fit(r, made, set, seed, evaluate, { text = "new", times = times })
end

return M
