--- Ten small networks of three kinds, each with a loss of data without content: what is tried on them asks for shapes
-- alone, what a training step takes of memory and time, so they train as well on the meta device.
--
--     for _, work in ipairs(zoo.kinds.all { batch = 8 }) do
--       local step, model = zoo.kinds.training(work, "cpu", { mode = "bf16" })
--       step()
--     end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"

local nn = ty.nn
local M = {}

local heads, words, classes = 4, 1024, 10

local function labels(o, device) return ty.zeros({ o.batch }, { dtype = "i64", device = device }) end
local function pictures(o, device, channels)
  return ty.randn({ o.batch, channels, o.size, o.size }, { device = device })
end

-- The losses, by what a network does: (o, model, device, options).
local function read(o, model, device, options)
  local x = ty.zeros({ o.batch // 4, o.tokens }, { dtype = "i64", device = device })
  return nn.cross_entropy(model(x, options):reshape(-1, words), x:reshape(-1))
end
local function classify(o, model, device)
  return nn.cross_entropy(model(pictures(o, device, 3)), labels(o, device))
end
local function denoise(channels, condition)
  return function(o, model, device)
    local x = pictures(o, device, channels)
    local t = ty.zeros({ o.batch }, { device = device })
    return (model(x, t, condition and { labels = labels(o, device) }) - x):square():mean()
  end
end
local function restore(o, model, device)
  local x = pictures(o, device, 3)
  return (model:decode(model:encode(x):mode()) - x):square():mean()
end

local function language(o)
  return { vocab_size = words, hidden_size = o.width, intermediate_size = 4 * o.width, num_hidden_layers = o.layers,
    num_attention_heads = heads, max_position_embeddings = o.tokens }
end

-- Name, kind, model, loss, whether the model has checkpoints.
local rows = {
  { "Llama", "language", function(o) return models.Llama(language(o)) end, read, true },
  { "GPT-2", "language", function(o)
    return models.GPT2 { vocabulary = words, context = o.tokens, width = o.width, layers = o.layers, heads = heads }
  end, read, true },
  { "GPT-NeoX", "language", function(o) return models.GPTNeoX(language(o)) end, read, true },
  { "BERT", "language", function(o) return models.BertForMaskedLM(language(o)) end, read },
  { "DiT", "diffusion", function(o)
    return models.DiT { size = o.size, patch = 2, channels = 4, width = o.width, depth = o.layers, heads = heads }
  end, denoise(4, true) },
  { "U-Net", "diffusion", function()
    return models.UNet { in_channels = 3, out_channels = 3, levels = { 32, { channels = 64, attention = true } } }
  end, denoise(3) },
  { "autoencoder", "diffusion", function()
    return models.AutoencoderKL { block_out_channels = { 32, 64 }, norm_num_groups = 8,
      down_block_types = { "DownEncoderBlock2D", "DownEncoderBlock2D" },
      up_block_types = { "UpDecoderBlock2D", "UpDecoderBlock2D" } }
  end, restore },
  { "ResNet", "vision", function()
    return models.ResNet { channels = { 32, 64, 128 }, blocks = { 2, 2, 2 }, classes = classes, small = true }
  end, classify },
  { "ViT", "vision", function(o)
    return models.ViTForImageClassification { image_size = o.size, patch_size = 4, hidden_size = o.width,
      intermediate_size = 4 * o.width, num_hidden_layers = o.layers, num_attention_heads = heads,
      num_labels = classes }
  end, classify },
  { "convolutions", "vision", function(o)
    local half = o.size // 2
    return nn.Sequential(nn.Conv2d(3, 64, 3, { padding = 1 }), nn.GroupNorm(8, 64), nn.SiLU(),
      nn.Conv2d(64, 128, 3, { padding = 1, stride = 2 }), nn.GroupNorm(8, 128), nn.SiLU(), nn.Flatten(),
      nn.Linear(128 * half * half, classes))
  end, classify },
}

--- A network with a loss: name; kind ("language", "diffusion" or "vision"); checkpoints (whether it has them); model(),
-- new weights of the generator; loss(model, device, options), of new data there, options behind the inputs.
---@class KindOfWork
---@field name string
---@field kind string
---@field checkpoints boolean
---@field model fun(): Module
---@field loss fun(model: Module, device: string, options?: table): Tensor

--- All ten. options: batch (32: pictures of a step; texts are a quarter of it), size (32: height and width of pictures,
-- a multiple of 4), width (128: of transformers, a multiple of 8), layers (4: theirs), tokens (256: of a text).
---@param options? { batch?: integer, size?: integer, width?: integer, layers?: integer, tokens?: integer }
---@return KindOfWork[]
function M.all(options)
  local who = "zoo.kinds.all"
  local o = arguments.read(who, options, { batch = 32, size = 32, width = 128, layers = 4, tokens = 256 },
    { batch = "an integer >= 4", size = "an integer >= 4", width = "an integer >= 8", layers = "an integer >= 1",
      tokens = "an integer >= 1" })
  for name, factor in pairs { size = 4, width = 8 } do
    if o[name] % factor ~= 0 then
      arguments.fail("%s: %s: expected a multiple of %d, got %d", who, name, factor, o[name])
    end
  end
  local list = {}
  for i, row in ipairs(rows) do
    list[i] = { name = row[1], kind = row[2], checkpoints = row[5] or false, model = function() return row[3](o) end,
      loss = function(...) return row[4](o, ...) end }
  end
  return list
end

--- A training step of a network with AdamW, in a scope of its own, and the network, which is made on the device.
-- options: mode ("plain"; "bf16": under autocast; "checkpoints": activations are computed again), seed (0).
---@param work KindOfWork
---@param device string
---@param options? { mode?: string, seed?: integer }
---@return fun() step
---@return Module model
function M.training(work, device, options)
  local who = "zoo.kinds.training"
  arguments.expect(who, "work", work, "a table")
  arguments.expect(who, "work.model", work.model, "a function")
  arguments.expect(who, "work.loss", work.loss, "a function")
  arguments.expect(who, "device", device, "a string")
  local o = arguments.read(who, options, { mode = "plain", seed = 0 },
    { mode = '"plain" or "bf16" or "checkpoints"', seed = "an integer" })
  if o.mode == "checkpoints" and not work.checkpoints then
    arguments.fail('%s: mode: expected "plain" or "bf16" of a network without checkpoints, got "checkpoints" of %s',
      who, tostring(work.name))
  end
  ty.manual_seed(o.seed)
  local model = nn.with_defaults({ device = device }, work.model)
  arguments.expect(who, "what work.model gives", model, "a module")
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = 1e-3 })
  local more = o.mode == "checkpoints" and { checkpoint = true } or nil
  local dtype = o.mode == "bf16" and "bf16" or "f32"
  return function()
    ty.scope(function() optimizer:step(ty.autocast(dtype, work.loss, model, device, more)) end)
  end, model
end

return M
