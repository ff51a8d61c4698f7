--- LLaVA-NeXT (1.6): LLaVA whose pictures come whole and in tiles, so that more of a large one is seen. Liu et al.
-- 2024, "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge". Names and config.json of transformers'
-- LlavaNextForConditionalGeneration.
--
--     local tiles, sizes = hub.processor("path/of/llava-next") { "photo.jpg" }
--     local logits = model(tokens, { pictures = tiles, sizes = sizes })
local ty = require "tycho"
local anyres = require "tycho.models.anyres"
local arguments = require "tycho.arguments"
local Llava = require "tycho.models.llava"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

--- LLaVA-NeXT: a language model that sees pictures whole and in tiles.
---@class LlavaNext: Llava
---@field image_newline Tensor  [hidden], behind each row of a picture's features
local LlavaNext = nn.module("LlavaNext", Llava)
LlavaNext.model_type, LlavaNext.architecture = "llava_next", "LlavaNextForConditionalGeneration"
LlavaNext.family = "LlavaNext"
LlavaNext.fields = { image_grid_pinpoints = { "table",
  { { 336, 672 }, { 672, 336 }, { 672, 672 }, { 1008, 336 }, { 336, 1008 } } },
  use_image_newline_parameter = { "flag", true } }
for name, field in pairs(Llava.fields) do LlavaNext.fields[name] = field end

--- config: as Llava's, and image_grid_pinpoints, the sizes { height, width } that pictures are fitted into, multiples
-- of the tower's image_size.
---@param config table
---@param pooler? boolean
function LlavaNext:init(config, pooler)
  Llava.init(self, config, pooler)
  config = self.config
  local side = self.vision_tower.config.image_size
  if math.type(side) ~= "integer" then error("LlavaNext: vision_config.image_size: expected one number", 0) end
  for i, size in ipairs(config.image_grid_pinpoints) do
    for k = 1, 2 do
      local value = type(size) == "table" and #size == 2 and math.tointeger(size[k])
      if not value or value < 1 or value > 1 << 20 or value % side ~= 0 then
        error(("LlavaNext: image_grid_pinpoints: expected pairs of multiples of %d, got another as number %d"):format(
          side, i), 0)
      end
    end
  end
  if #config.image_grid_pinpoints == 0 then error("LlavaNext: image_grid_pinpoints: expected at least one size", 0) end
  if not config.use_image_newline_parameter then
    error("LlavaNext: config key 'use_image_newline_parameter': expected true, got false, which is not supported", 0)
  end
  local width = self.language_model.config.hidden_size
  self.image_newline = parameter({ width }, function(t) nn.init.normal(t, 0, width ^ -0.5) end)
end

--- As Llava:rename().
function LlavaNext:rename(name) return Llava.rename(self, (name:gsub("^model%.image_newline$", "image_newline"))) end

-- Rows and columns of tiles of a picture of h x w pixels, and of patches of a tile.
local function grid_of(self, h, w)
  local side = self.vision_tower.config.image_size
  local height, width = anyres.best(h, w, self.config.image_grid_pinpoints)
  return height // side, width // side, side // self.vision_tower.config.patch_size
end

local function check_sizes(self, sizes)
  local who = self.family .. ": sizes"
  if not ty.is_tensor(sizes) or sizes.ndim ~= 2 or sizes.shape[2] ~= 2 or sizes.dtype ~= "i64" then
    arguments.fail("%s: expected i64 [pictures, 2], heights and widths, got %s", who, arguments.describe(sizes))
  end
  local list = sizes:tolist()
  for i, size in ipairs(list) do
    if size[1] < 1 or size[2] < 1 or size[1] > 1 << 20 or size[2] > 1 << 20 then
      arguments.fail("%s: expected heights and widths of 1 to 2^20, got %d x %d as number %d", who, size[1], size[2], i)
    end
  end
  return list
end

--- How many features the language model gets of each picture.
---@param pictures Tensor
---@param sizes Tensor
---@return integer[]
function LlavaNext:feature_counts(pictures, sizes)
  arguments.expect("LlavaNext:feature_counts", "pictures", pictures, "a tensor")
  local counts = {}
  for i, size in ipairs(check_sizes(self, sizes)) do
    local rows, columns, patches = grid_of(self, size[1], size[2])
    local _, _, height, width = anyres.covered(size[1], size[2], rows * patches, columns * patches)
    counts[i] = patches * patches + height * (width + 1)
  end
  return counts
end

--- What the language model gets of pictures, one after another, [1, features, hidden]. pictures [all tiles, channels,
-- side, side] and the option sizes, i64 [m, 2], are what hub.processor's processor gives: of each picture first the
-- whole, then its tiles. Of a picture the features of the whole come first, then those of the tiles, row by row over
-- all of them, a mark behind each row.
---@param pictures Tensor
---@param options? {sizes: Tensor, checkpoint?: boolean}
---@return Tensor features
function LlavaNext:picture_features(pictures, options)
  local o = arguments.read("LlavaNext:picture_features", options, { sizes = arguments.none, interpolate = false,
    checkpoint = false }, { sizes = "a tensor" })
  local sizes = check_sizes(self, o.sizes)
  local wanted = 0
  for _, size in ipairs(sizes) do
    local rows, columns = grid_of(self, size[1], size[2])
    wanted = wanted + 1 + rows * columns
  end
  if not ty.is_tensor(pictures) or pictures.ndim ~= 4 or pictures.shape[1] ~= wanted then
    arguments.fail("LlavaNext: pictures: expected the %d tiles of pictures of these sizes, got %s", wanted,
      arguments.describe(pictures))
  end
  if self.config.vision_feature_select_strategy ~= "default" then
    error("LlavaNext: config key 'vision_feature_select_strategy': expected default with pictures", 0)
  end
  local all = Llava.picture_features(self, pictures, { checkpoint = o.checkpoint }) -- [tiles, patches, hidden]
  local hidden, parts, at = all.shape[3], {}, 0
  for _, size in ipairs(sizes) do
    local rows, columns, patches = grid_of(self, size[1], size[2])
    parts[#parts + 1] = all[at]
    local x = all:narrow(0, at + 1, rows * columns):reshape(rows, columns, patches, patches, hidden)
    x = x:permute(0, 2, 1, 3, 4):reshape(rows * patches, columns * patches, hidden)
    local top, left, height, width = anyres.covered(size[1], size[2], rows * patches, columns * patches)
    x = x:narrow(0, top, height):narrow(1, left, width)
    parts[#parts + 1] = ty.concat({ x, self.image_newline:to(x.dtype):expand(height, 1, hidden) }, 1):flatten(0, 1)
    at = at + 1 + rows * columns
  end
  return ty.concat(parts, 0):unsqueeze(0)
end

return LlavaNext
