-- CLIP against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the folders that
-- transformers wrote. Its picture transformers alone are in vit_test.lua.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"
local compare, load = reference.compare, reference.vision

check.test("clip: logits, features and gradients of transformers", function()
  local model, want = load "clip"
  local x = want.x:detach():requires_grad_()
  local logits, image, text = model(want.tokens, { pictures = x, mask = want.mask })
  compare(logits, want.logits, "logits")
  compare(image, want.image, "features of pictures")
  compare(text, want.text, "features of texts")
  compare(model.text_model:run(want.tokens, { mask = want.mask }), want.text_last, "hidden states of texts")
  compare(model.vision_model:run(x), want.vision_last, "hidden states of pictures")
  compare(ty.nn.normalize(model:image_features(x, { interpolate = true })), want.image, "features of pictures alone")
  local loss = (logits * reference.wave(logits):to "f32"):sum()
  check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
  check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
end)

for _, name in ipairs { "clip_text", "clip_text_bare" } do
  check.test(name .. ": hidden states, pooled outputs and gradients of transformers", function()
    local model, want = load(name)
    local options = { mask = want.mask }
    local hidden, pooled = model(want.tokens, options)
    compare(hidden, want.last, "after the last norm")
    compare(pooled, want.pooled, "pooled")
    compare(model:hidden(want.tokens), want.unmasked, "without a mask")
    local loss = (hidden * reference.wave(hidden):to "f32"):sum() + (pooled * reference.wave(pooled):to "f32"):sum()
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    for layer = -3, 2 do
      local state, whole = model(want.tokens, { mask = want.mask, layer = layer })
      compare(state, want["hidden." .. layer % 3], "layer " .. layer)
      compare(whole, want.pooled, "pooled, with layer " .. layer)
      compare(model:hidden(want.tokens, { mask = want.mask:to "bool", layer = layer }), want["hidden." .. layer % 3],
        "layer " .. layer)
    end
    -- What diffusion calls skipping layers: an earlier state, through the last norm.
    compare(model:hidden(want.tokens, { layer = -2, norm = true }),
      model.text_model.final_layer_norm(model:hidden(want.tokens, { layer = 1 })), "norm")
    -- A token sees those before it alone.
    local changed = want.tokens:clone()
    changed[":, 4:"]:fill_(5)
    compare(model:hidden(changed)[":, 0:4"], model:hidden(want.tokens)[":, 0:4"], "causal")
  end)
end

check.test("parts of a whole CLIP's folder", function()
  local whole, want = load "clip"
  local function part(name, options)
    local o = { dtype = "f32", config = { architectures = { name } } }
    for key, value in pairs(options or {}) do o[key] = value end
    local model = hub.load(root .. "clip", o)
    check.equal(getmetatable(model).__name, name)
    check.ok(#model.report.left_out > 10, "heads left out")
    return model
  end
  local text, vision = part "CLIPTextModelWithProjection", part "CLIPVisionModelWithProjection"
  local _, features = text(want.tokens, { mask = want.mask })
  compare(ty.nn.normalize(features), want.text, "features of texts")
  _, features = vision(want.x)
  compare(ty.nn.normalize(features), want.image, "features of pictures")
  compare(part "CLIPTextModel"(want.tokens, { mask = want.mask }), want.text_last, "hidden states of texts")
  compare(part "CLIPVisionModel"(want.x), want.vision_last, "hidden states of pictures")
  check.equal(text.config.hidden_size, whole.text_model.config.hidden_size)
end)

check.test("where a text ends: the first end, or the highest token in configs of old", function()
  local function model(eos)
    ty.manual_seed(3)
    return models.CLIPTextModel { vocab_size = 20, hidden_size = 8, num_attention_heads = 2, intermediate_size = 8,
      num_hidden_layers = 1, max_position_embeddings = 6, eos_token_id = eos }
  end
  local tokens = ty.tensor { { 0, 7, 15, 3, 15, 15 }, { 0, 19, 4, 15, 1, 2 } }
  for eos, places in pairs { [15] = { 2, 3 }, [2] = { 2, 1 } } do
    local hidden, pooled = model(eos)(tokens)
    for i, place in ipairs(places) do
      check.close(pooled:select(0, i - 1):tolist(), hidden:select(0, i - 1):select(0, place):tolist(), 1e-6)
    end
  end
end)

check.test("defaults are the published sizes", function()
  local function count(class) return ty.nn.with_defaults({ device = "meta" }, models[class], {}):count_parameters() end
  check.equal(count "CLIPModel", 151277313) -- ViT-B/32
  check.equal(count "CLIPTextModel", 63165952)
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local text = { vocab_size = 20, hidden_size = 8, num_attention_heads = 2, intermediate_size = 8,
    num_hidden_layers = 1, max_position_embeddings = 6 }
  local vision = { image_size = 8, patch_size = 4, hidden_size = 8, num_attention_heads = 2, intermediate_size = 8,
    num_hidden_layers = 1 }
  local model = models.CLIPModel { text_config = text, vision_config = vision, projection_dim = 4 }
  local x, tokens = ty.zeros(2, 3, 8, 8), ty.zeros({ 3, 5 }, { dtype = "i64" })
  check.equal(model(tokens, { pictures = x }).shape, { 2, 3 })
  check.fails(function() model(tokens) end, "CLIPModel: pictures: expected a tensor, got nil")
  check.fails(function() model(x, { pictures = x }) end, "CLIP: tokens: expected an i64 tensor [n, t], got a tensor")
  check.fails(function() model(ty.zeros({ 1, 7 }, { dtype = "i64" }), { pictures = x }) end,
    "CLIP: tokens: expected at most the 6 of max_position_embeddings, got 7")
  check.fails(function() model:image_features(ty.zeros(2, 3, 8, 9)) end,
    "CLIP: pictures: expected [n, 3, 8, 8] without the option interpolate, got a tensor [2, 3, 8, 9]")
  check.fails(function() models.CLIPModel { text_config = { hiden_size = 8 } } end,
    "CLIPModel: text_config: no config key 'hiden_size'")
  check.fails(function() models.CLIPModel { vision_config = 3 } end,
    "CLIPModel: config key 'vision_config' must be an object, got 3")
  check.fails(function() models.CLIPVisionModel { patch_size = 225 } end,
    "CLIPVisionModel: patch_size must be at most image_size")
  check.fails(function() models.CLIPTextModel { num_attention_heads = 7 } end,
    "CLIPTextModel: num_attention_heads 7 must divide hidden_size 512")
end)

check.finish()
