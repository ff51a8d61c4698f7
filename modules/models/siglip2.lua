--- SigLIP 2 for pictures of every shape (NaFlex): a picture keeps the ratio of its sides, is cut into at most so many
-- patches, and the positions of a square grid are resized to its rows and columns. The names and the config.json of
-- transformers' Siglip2Model. Tschannen et al. 2025, "SigLIP 2: Multilingual Vision-Language Encoders with Improved
-- Semantic Understanding, Localization, and Dense Features". SigLIP 2 of fixed resolution is a SiglipModel.
--
--     local patches, sizes = hub.processor("path/of/siglip2-naflex") { "wide.jpg", "tall.jpg" }
--     local logits = model(tokens, { pictures = patches, sizes = sizes })       -- [pictures, texts]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.siglip_blocks"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local siglip = require "tycho.models.siglip"

local nn = ty.nn

-- ---- pictures ----

local Embeddings = nn.module "Siglip2VisionEmbeddings"

function Embeddings:init(config)
  local values = config.num_channels * config.patch_size * config.patch_size
  self.side = math.tointeger(config.num_patches ^ 0.5)
  self.patch_embedding = layers.linear(values, config.hidden_size, true, values ^ -0.5)
  self.position_embedding = layers.embedding(config.num_patches, config.hidden_size)
end

-- patches [n, most, values], and rows and columns of each picture as a list.
function Embeddings:forward(patches, grids)
  local positions, side, most, resized = self.position_embedding.weight, self.side, patches.shape[2], {}
  local all = {}
  for i, grid in ipairs(grids) do
    local key = grid[1] * (most + 1) + grid[2]
    if not resized[key] then
      local own, count = encoder.resized(positions, side, side, grid[1], grid[2], 0, "linear"), grid[1] * grid[2]
      -- What fills a picture up is at its first place, as in transformers.
      if count < most then own = ty.concat({ own, own:narrow(0, 0, 1):expand(most - count, own.shape[2]) }, 0) end
      resized[key] = own
    end
    all[i] = resized[key]
  end
  return self.patch_embedding(patches) + ty.stack(all, 0)
end

local Transformer = nn.module "Siglip2VisionTransformer"

function Transformer:init(config, who)
  blocks.build_tower(self, config, who, Embeddings(config))
end

-- Rows and columns of pictures as a list, checked against their patches.
local function grids_of(who, patches, sizes)
  local n, most = patches.shape[1], patches.shape[2]
  if not ty.is_tensor(sizes) or sizes.dtype ~= "i64" or sizes.ndim ~= 2 or sizes.shape[1] ~= n
    or sizes.shape[2] ~= 2 then
    arguments.fail("%s: sizes: expected i64 [%d, 2], rows and columns of the patches of each picture, got %s", who, n,
      arguments.describe(sizes))
  end
  local grids = sizes:tolist()
  for i, grid in ipairs(grids) do
    if grid[1] < 1 or grid[2] < 1 or grid[1] > most or grid[2] > most or grid[1] * grid[2] > most then
      arguments.fail("%s: sizes: expected at most the %d patches that pictures have, got %d x %d of number %d", who,
        most, grid[1], grid[2], i)
    end
  end
  return grids
end

function Transformer:run(patches, options, whole)
  local who, config = self.who, self.config
  local o = encoder.options(who, options, { "sizes" })
  local values = config.num_channels * config.patch_size * config.patch_size
  if not ty.is_tensor(patches) or patches.ndim ~= 3 or patches.shape[3] ~= values or patches:numel() == 0 then
    arguments.fail("%s: pictures: expected patches [n, most, %d], got %s", who, values, arguments.describe(patches))
  end
  local grids, most, counts = grids_of(who, patches, o.sizes), patches.shape[2], {}
  for i, grid in ipairs(grids) do counts[i] = grid[1] * grid[2] end
  local weight = self.embeddings.patch_embedding.weight
  -- [n, 1, 1, most]: what is a patch, and not what fills the picture up.
  local mask = ty.arange(most):lt(ty.tensor(counts, { dtype = "i64" }):reshape(-1, 1, 1, 1))
  mask = mask:to { device = weight.device }
  local x = self.embeddings(patches:to(weight.dtype), grids)
  local hidden, last = encoder.through(who, self.encoder.layers, x, { mask = mask }, o, whole, self.post_layernorm)
  if not whole or not self.head then return hidden end
  return hidden, self.head(self.post_layernorm(last), mask)
end

local vision_fields = blocks.vision_fields { patch_size = { "count", 16 }, num_patches = { "count", 256 },
  -- Some files have it, of the resolution that their names say; it counts for nothing here.
  image_size = { "size", configs.none } }

local function check(who, config)
  local side = math.tointeger(config.num_patches ^ 0.5)
  if not side or side * side ~= config.num_patches then
    error(("%s: config key 'num_patches': expected a square number, got %d"):format(who, config.num_patches), 0)
  end
end

-- ---- the models ----

--- SigLIP 2's text encoder, which is SigLIP's.
---@class Siglip2TextModel: Pretrained
local Siglip2TextModel = blocks.single("Siglip2TextModel", "siglip2_text_model", "text_model", blocks.text_fields,
  blocks.TextTransformer)
--- SigLIP 2's encoder of pictures of every shape.
---@class Siglip2VisionModel: Pretrained
local Siglip2VisionModel = blocks.single("Siglip2VisionModel", "siglip2_vision_model", "vision_model", vision_fields,
  Transformer, check)

--- SigLIP 2: texts and pictures of every shape in one space. A SiglipModel whose pictures are patches [n, most,
-- channels * patch_size^2], of each those that are there first, with the option sizes, i64 [n, 2], rows and columns;
-- hub.processor's processor gives both.
---@class Siglip2Model: SiglipModel
local Siglip2Model = nn.module("Siglip2Model", siglip.SiglipModel)
Siglip2Model.model_type, Siglip2Model.architecture = "siglip2", "Siglip2Model"
Siglip2Model.tower = { fields = vision_fields, Transformer = Transformer, check = check }

--- config: the keys of config.json: text_config, vision_config (among them num_patches, 256, a square number).
---@param config table
function Siglip2Model:init(config) siglip.SiglipModel.init(self, config) end

--- SigLIP 2's encoder of pictures of every shape with a head over the mean of the patches.
---@class Siglip2ForImageClassification: Pretrained
local Siglip2ForImageClassification = blocks.classifier("Siglip2ForImageClassification", "siglip2", vision_fields,
  Transformer, check)

return { Siglip2ForImageClassification = Siglip2ForImageClassification, Siglip2Model = Siglip2Model,
  Siglip2TextModel = Siglip2TextModel, Siglip2VisionModel = Siglip2VisionModel }
