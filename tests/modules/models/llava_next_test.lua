-- LLaVA-NeXT against transformers: the small model of tests/fixtures/vision (make_vision.py), read from the folder that
-- transformers wrote, with pictures of five sizes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
local anyres = require "tycho.models.anyres"
require "tycho.llm" -- generation

local root = check.root .. "tests/fixtures/vision/llava_next"
local compare = reference.compare

local function load()
  local model = hub.load(root, { dtype = "f32" })
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
  return model, ty.io.load_safetensors(root .. "/expected.safetensors")
end

check.test("features, logits, loss and gradients of transformers", function()
  local model, want = load()
  local x = want.x:detach():requires_grad_()
  local options = { pictures = x, sizes = want.sizes, mask = want.mask }
  check.equal(model:feature_counts(x, want.sizes), want.counts:tolist())
  compare(model:picture_features(x, { sizes = want.sizes }):squeeze(0), want.features, "features")
  local seen = want.mask:unsqueeze(-1):to "f32"
  compare(model(want.tokens, options) * seen, want.logits * seen, "logits")
  local n, t = want.labels.shape[1], want.labels.shape[2]
  local targets = ty.concat({ want.labels:narrow(1, 1, t - 1), ty.full({ n, 1 }, -100, { dtype = "i64" }) }, 1)
  local loss = model:loss(want.tokens, targets, options)
  check.close(loss:item(), want.ce:item(), 1e-4 * want.ce:item(), "loss")
  check.close(model:loss(want.tokens, nil, options):item(), loss:item(), 1e-5, "targets of its own")
  local ours, parameters = {}, {}
  for key, pair in pairs(want) do
    local theirs = key:match "^grad%.(.*)$"
    if theirs then ours["grad." .. (model:state_dict()[theirs] and theirs or model:rename(theirs))] = pair end
  end
  for key, p in model:named_parameters() do parameters[key] = p end
  -- The fixture's figures are those of the loss times the first number of the wave.
  for key in pairs(reference.compare_gradients(model, loss * math.sin(1), ours)) do
    check.ok(key:find "^vision_tower%." and parameters[key].grad == nil, key)
  end
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
end)

check.test("a hundred greedy tokens of transformers, in a batch and row by row", function()
  local model, want = load()
  local t, all = want.tokens.shape[2], want.greedy
  check.equal(all.shape[2] - t, 100)
  local rows, pictures, at = {}, { { 0, 1 }, { 1, 2 }, { 3, 2 }, { 5, 0 } }, { [0] = 0 }
  for i, size in ipairs(want.sizes:tolist()) do
    local height, width = anyres.best(size[1], size[2], model.config.image_grid_pinpoints)
    at[i] = at[i - 1] + 1 + height // 8 * (width // 8)
  end
  for i = 0, 3 do
    local padding = t - want.mask:select(0, i):sum():item()
    rows[i + 1] = want.tokens:select(0, i):narrow(0, padding, t - padding)
  end
  local o = { temperature = 0, stop_tokens = false, pictures = want.x, sizes = want.sizes }
  for i, row in ipairs(model:generate(rows, 100, o)) do
    local expected = all:select(0, i - 1):narrow(0, t - rows[i].shape[1], rows[i].shape[1] + 100):tolist()
    check.equal(row:tolist(), expected, "row " .. i .. " of a batch")
    local first, count = table.unpack(pictures[i])
    local own = { temperature = 0, stop_tokens = false }
    if count > 0 then
      own.pictures = want.x:narrow(0, at[first], at[first + count] - at[first])
      own.sizes = want.sizes:narrow(0, first, count)
    end
    check.equal(model:generate(rows[i]:unsqueeze(0), 100, own):select(0, 0):tolist(), expected, "row " .. i .. " alone")
  end
end)

check.test("written and read again", function()
  local model, want = load()
  local path = os.tmpname()
  os.remove(path)
  model:save(path)
  local other = hub.load(path, { dtype = "f32" })
  check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
  local options = { pictures = want.x, sizes = want.sizes, mask = want.mask }
  compare(other(want.tokens, options), model(want.tokens, options), "logits")
  for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
  os.remove(path)
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
