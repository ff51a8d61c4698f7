--- A pipeline that draws the handwritten digits by their names, small enough to be trained in a minute: what methods of
-- fine-tuning begin with where no pipeline of diffusers is at hand. It has the parts and names of one, of Stable
-- Diffusion's layout; pictures are so small that they are their own latents.
--
--     local painter = diffusion.TextToImage(zoo.digit_painter.pipeline())
--     zoo.digit_painter.train(painter, training, { steps = 700 })
--     local share, pictures = zoo.digit_painter.recognised(painter, classifier, { 3, 3, 7 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"
local vision = require "tycho.vision"

local M = {}

local WORDS = { "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine" }

--- What a picture of a digit is called.
---@param label integer  0 to 9
---@return string
function M.caption(label)
  arguments.expect("zoo.digit_painter.caption", "label", label, "an integer in [0, 9]")
  return "a " .. WORDS[label + 1]
end

-- Grey pictures in the place of latents.
local Pixels = ty.nn.module "GreyPixels"
function Pixels:init() self.config = { block_out_channels = { 1 }, latent_channels = 1 } end
function Pixels:encode(x)
  local z = x:mean({ 1 }, true)
  return { mode = function() return z end }
end
function Pixels:decode(z) return z:expand(z.shape[1], 3, 8, 8) end
function Pixels:scale(z) return z end
Pixels.unscale = Pixels.scale

local function tokenizer()
  local vocabulary = { ["<pad>"] = 0, ["<unk>"] = 1, a = 2 }
  for i, word in ipairs(WORDS) do vocabulary[word] = i + 2 end
  local made = ty.tokenizer.parse(ty.io.json_encode { model = { type = "WordLevel", vocab = vocabulary,
    unk_token = "<unk>" }, pre_tokenizer = { type = "Whitespace" } })
  local fields = ty.tokenizer.fields(made)
  fields.pad, fields.max_length = 0, 4
  return made
end

--- An untrained pipeline, as hub.pipeline returns one: for diffusion.TextToImage.
---@return table
function M.pipeline()
  local text = models.CLIPTextModel { vocab_size = 16, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1,
    num_attention_heads = 2, max_position_embeddings = 4, eos_token_id = 0, initializer_factor = 10 }
  return { class = "StableDiffusionPipeline", components = { vae = Pixels(), text_encoder = text:eval(),
    tokenizer = tokenizer(), unet = models.UNet2DConditionModel { sample_size = 8, in_channels = 1, out_channels = 1,
      block_out_channels = { 32, 64 }, layers_per_block = 1, norm_num_groups = 8, cross_attention_dim = 32,
      attention_head_dim = 4, down_block_types = { "DownBlock2D", "CrossAttnDownBlock2D" },
      up_block_types = { "CrossAttnUpBlock2D", "UpBlock2D" } },
    scheduler = { _class_name = "FlowMatchEulerDiscreteScheduler", shift = 1.0 } } }
end

--- Trains a painter on pictures of digits with their captions. options: steps (700), batch (64), lr (2e-3), seed (0).
---@param painter TextToImage
---@param dataset table  items { image = [1, 8, 8] from -1 to 1, label = 0 to 9 }
---@param options? { steps?: integer, batch?: integer, lr?: number, seed?: integer }
function M.train(painter, dataset, options)
  local who = "zoo.digit_painter.train"
  arguments.expect(who, "painter", painter, "a table")
  arguments.expect(who, "painter.network", painter.network, "a module")
  local o = arguments.read(who, options, { steps = 700, batch = 64, lr = 2e-3, seed = 0 }, { steps = "an integer >= 1",
    batch = "an integer >= 1", lr = "a finite number > 0", seed = "an integer" })
  local objective, conditions = painter.process.objective, {}
  objective.null = painter:null ""
  local loader = ty.data.DataLoader(dataset, { batch_size = o.batch, shuffle = true, seed = o.seed, drop_last = true,
    device = painter.network:device() })
  for i = 0, 9 do conditions[i] = ty.keep(painter:condition { M.caption(i) }) end
  ty.train.fit(painter.network, loader, { steps = o.steps, lr = o.lr, quiet = true, title = "pipeline",
    weight_decay = 0, loss = function(m, batch)
      local rows = {}
      for i, label in ipairs(batch.label:tolist()) do rows[i] = conditions[label] end
      return objective:loss(m, batch.image, diffusion.condition.concat(rows))
    end })
  painter.network:eval()
end

--- The share of drawn digits that a classifier reads as what was asked for, and the digits. options: steps (16) and
-- guidance (2) of drawing, seed (0).
---@param painter TextToImage
---@param classifier Module  of pictures [n, 1, 8, 8] from -1 to 1
---@param labels integer[]
---@param options? { steps?: integer, guidance?: number, seed?: integer }
---@return number share
---@return Tensor pictures  f32 [n, 1, 8, 8]
function M.recognised(painter, classifier, labels, options)
  local who = "zoo.digit_painter.recognised"
  arguments.expect(who, "labels", labels, "a list of integers")
  local pictures = M.draw(painter, labels, options)
  local x = (pictures:narrow(1, 0, 1):to "f32" / 127.5 - 1):to "cpu"
  return vision.predict(classifier, x):eq(ty.tensor(labels)):to("f64"):mean():item(), x
end

--- Digits drawn by a painter, u8 [n, 3, 8, 8]. options: as in recognised().
---@param painter TextToImage
---@param labels integer[]
---@param options? { steps?: integer, guidance?: number, seed?: integer }
---@return Tensor
function M.draw(painter, labels, options)
  local who = "zoo.digit_painter.draw"
  arguments.expect(who, "painter", painter, "a table")
  arguments.expect(who, "painter.paint", painter.paint, "a function")
  arguments.expect(who, "labels", labels, "a list of integers")
  local o = arguments.read(who, options, { steps = 16, guidance = 2, seed = 0 }, { steps = "an integer >= 1",
    guidance = "a finite number", seed = "an integer" })
  local prompts = {}
  for i, label in ipairs(labels) do prompts[i] = M.caption(label) end
  return painter:paint(prompts, { steps = o.steps, guidance = o.guidance, seed = o.seed, height = 8, width = 8,
    batch = 90 })
end

return M
