-- LLaVA-NeXT against transformers: the small model of tests/fixtures/vision (make_vision.py), read from the folder that
-- transformers wrote, with pictures of five sizes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local seeing = dofile(here .. "../modules/models/seeing.lua")(check, reference)
local ty = require "tycho"
local models = require "tycho.models"
local anyres = require "tycho.models.anyres"

local root = check.root .. "tests/fixtures/vision/llava_next"

check.test("features, logits, loss and gradients of transformers", function()
  local model, want = seeing.load(root)
  check.equal(model:feature_counts(want.x, want.sizes), want.counts:tolist())
  reference.compare(model:picture_features(want.x, { sizes = want.sizes }):squeeze(0), want.features, "features")
  seeing.learns_but_for_the_tower(model, want, { sizes = want.sizes, mask = want.mask })
end)

check.test("a hundred greedy tokens of transformers, in a batch and row by row", function()
  local model, want = seeing.load(root)
  local at = { [0] = 0 } -- where the tiles of each picture end
  for i, size in ipairs(want.sizes:tolist()) do
    local height, width = anyres.best(size[1], size[2], model.config.image_grid_pinpoints)
    at[i] = at[i - 1] + 1 + height // 8 * (width // 8)
  end
  local count = seeing.says(model, want, want.tokens, want.mask, { pictures = want.x, sizes = want.sizes },
    seeing.parts(want, at, { { 0, 1 }, { 1, 2 }, { 3, 2 }, { 5, 0 } }))
  check.equal(count, 100)
end)

check.test("written and read again", function()
  local model, want = seeing.load(root)
  seeing.comes_back(model, want, { pictures = want.x, sizes = want.sizes, mask = want.mask })
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local function config(changes)
    local result = { image_token_index = 11, image_grid_pinpoints = { { 4, 8 }, { 8, 4 } },
      text_config = { model_type = "llama", vocab_size = 12, hidden_size = 16, intermediate_size = 32,
        num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 64 },
      vision_config = { model_type = "vit", image_size = 4, patch_size = 2, hidden_size = 8, intermediate_size = 16,
        num_hidden_layers = 2, num_attention_heads = 2 } }
    for key, value in pairs(changes or {}) do result[key] = value end
    return result
  end
  local function fails(changes, words) check.fails(function() models.LlavaNext(config(changes)) end, words) end
  fails({ image_grid_pinpoints = { { 4, 6 } } }, "LlavaNext: image_grid_pinpoints: expected pairs of multiples of 4")
  fails({ image_grid_pinpoints = {} }, "LlavaNext: image_grid_pinpoints: expected at least one size")
  local model = models.LlavaNext(config())
  local sizes = ty.tensor { { 4, 8 } }
  check.equal(model:feature_counts(ty.zeros(3, 3, 4, 4), sizes), { 4 + 2 * 5 })
  check.fails(function() model:picture_features(ty.zeros(2, 3, 4, 4), { sizes = sizes }) end,
    "LlavaNext: pictures: expected the 3 tiles of pictures of these sizes, got a tensor [2, 3, 4, 4]")
  check.fails(function() model:picture_features(ty.zeros(3, 3, 4, 4)) end,
    "LlavaNext: sizes: expected i64 [pictures, 2], heights and widths, got nil")
  check.fails(function() model:picture_features(ty.zeros(3, 3, 4, 4), { sizes = ty.tensor { { 0, 8 } } }) end,
    "LlavaNext: sizes: expected heights and widths of 1 to 2^20, got 0 x 8 as number 1")
  local tokens = ty.full({ 1, 13 }, 11, { dtype = "i64" })
  check.fails(function() model(tokens, { pictures = ty.zeros(3, 3, 4, 4), sizes = sizes }) end,
    "expected as many features as the 13 image tokens, got 14")
end)

check.finish()
