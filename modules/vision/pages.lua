--- Handwritten digits anywhere on a larger page, and the small vision transformer that reads them: what methods that
-- make vision transformers smaller begin with where a run has to be short. The task is not solved by a look at fixed
-- pixels, so that patches, positions and attention are all needed.
--
--     local base = vision.pages.base("runs/base", { seed = 0 })
--     local held_out = vision.pages.set "held_out"
--     print(vision.pages.measure(base, held_out).accuracy)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local classify = require "tycho.vision.classify"
local models = require "tycho.models"

local expect = arguments.expect
local M = {}

local SIDE = 9 -- of a page

--- Pictures [n, c, h, w] at places of their own on pages [n, c, size, size] of `fill` (-1). Places are drawn from the
-- library's generator.
---@param images Tensor
---@param size integer  at least h and w
---@param fill? number
---@return Tensor
function M.place(images, size, fill)
  local who = "vision.pages.place"
  expect(who, "images", images, "a tensor")
  expect(who, "size", size, "an integer >= 1")
  fill = expect(who, "fill", fill, "a finite number or nil") or -1
  if images.ndim ~= 4 or images.shape[3] > size or images.shape[4] > size then
    arguments.fail("%s: images: expected [n, c, h, w] with h and w up to %d, got %s", who, size,
      arguments.describe(images))
  end
  local n, c, h, w = table.unpack(images.shape)
  local y, x = size - h, size - w
  local padded = ty.pad(images, { x, x, y, y }, "constant", fill)
  local function window(room, side) -- where each row or column of a page is found: i64 [n, side]
    local first = ty.randint(0, room + 1, { n, 1 })
    return (first + ty.arange(side):unsqueeze(0)):to { device = images.device }
  end
  local rows = window(y, size):reshape(n, 1, size, 1):expand(n, c, size, padded.shape[4])
  local columns = window(x, size):reshape(n, 1, 1, size):expand(n, c, size, size)
  return padded:gather(2, rows:contiguous()):gather(3, columns:contiguous())
end

--- The pictures that are trained on, { image f32 [1, 8, 8] from -1 to 1, label }: 1,200 digits, which go through
-- place() as training goes on.
---@return table dataset
function M.training()
  local training = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }
  local batch = training:batch(ty.arange(1200))
  return ty.data.TensorDataset { image = batch.image, label = batch.label }
end

--- Pages to measure on, each digit at all four places: image f32 [n, 1, 9, 9], label i64 [n]. Settings are
-- chosen by "validation" (237 digits), results are those of "held_out" (360). Neither is trained on.
---@param split "validation"|"held_out"
---@return { image: Tensor, label: Tensor }
function M.set(split)
  expect("vision.pages.set", "split", split, '"validation" or "held_out"')
  local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }
  local batch = split == "held_out" and held_out:batch(ty.arange(#held_out))
    or training:batch(ty.arange(1200, #training))
  local images, labels, room = {}, {}, SIDE - 8
  for y = 0, room do
    for x = 0, room do
      images[#images + 1] = ty.pad(batch.image, { x, room - x, y, room - y }, "constant", -1)
      labels[#labels + 1] = batch.label
    end
  end
  return { image = ty.keep(ty.concat(images, 0)), label = ty.keep(ty.concat(labels, 0)) }
end

--- How well a model reads pages, as vision.measure says it.
M.measure = classify.measure

--- What moves digits about in vision.fit and vision.distil: their option `transform`.
---@param images Tensor
---@return Tensor
function M.transform(images) return M.place(images, SIDE) end

local base_options = { steps = 1500, batch = 32, lr = 1.5e-3, width = 64, depth = 4, heads = 4, seed = 0 }
local count = "an integer >= 1"

--- A ViT that reads pages, in patches of 3 x 3, trained with a seed or read from the folder. options: steps (1500),
-- batch (32), lr (1.5e-3), width (64), depth (4), heads (4), seed (0).
---@param folder string
---@param options? table
---@return ViTForImageClassification
function M.base(folder, options)
  local who = "vision.pages.base"
  expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, base_options,
    { steps = count, batch = count, width = count, depth = count, heads = count, seed = "an integer" })
  local path = ("%s/pages-%d-%d-%d-%d.safetensors"):format(folder, o.width, o.depth, o.steps, o.seed)
  return ty.data.with_seed(o.seed, function()
    local fresh = models.ViTForImageClassification { image_size = SIDE, patch_size = 3, num_channels = 1,
      hidden_size = o.width, intermediate_size = 4 * o.width, num_hidden_layers = o.depth,
      num_attention_heads = o.heads, num_labels = 10 }
    return ty.train.kept(path, fresh, function(model)
      classify.fit(model, M.training(), { steps = o.steps, batch_size = o.batch, lr = o.lr, seed = o.seed,
        weight_decay = 0.05, smoothing = 0, transform = M.transform, clip_norm = 1, quiet = true })
      return model
    end)
  end)
end

return M
