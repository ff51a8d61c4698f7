-- SigLIP against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the folders that
-- transformers wrote. Its picture transformer alone is in vit_test.lua.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local compare = reference.compare

local function load(options) return reference.vision("siglip", options) end

check.test("logits, features and gradients of transformers", function()
  local model, want = load()
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
  local x = want.x:detach():requires_grad_()
  local logits, image, text = model(want.tokens, { pictures = x })
  compare(logits, want.logits, "logits")
  compare(image, want.image, "features of pictures")
  compare(text, want.text, "features of texts")
  compare(model.text_model:run(want.tokens), want.text_last, "hidden states of texts")
  compare(model.text_model:run(want.tokens, { mask = want.mask }), want.masked, "hidden states of masked texts")
  compare(model.vision_model:run(x), want.vision_last, "hidden states of pictures")
  compare(model:image_features(want.other, { interpolate = true }), want.other_image, "another size")
  local loss = (logits * reference.wave(logits):to "f32"):sum()
  check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
  check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
end)

check.test("parts of a whole SigLIP's folder", function()
  local _, want = load()
  local function part(name)
    local model = load { config = { architectures = { name } } }
    check.equal(getmetatable(model).__name, name)
    check.ok(#model.report.left_out > 10, "heads left out")
    return model
  end
  local text, vision = part "SiglipTextModel", part "SiglipVisionModel"
  compare(ty.nn.normalize((select(2, text(want.tokens)))), want.text, "features of texts")
  local hidden, pooled = vision(want.x)
  compare(hidden, want.vision_last, "hidden states of pictures")
  compare(ty.nn.normalize(pooled), want.image, "features of pictures")
end)

check.test("written and read again; a tower without a head", function()
  local model, want = load()
  local path = os.tmpname()
  os.remove(path)
  model:save(path)
  local other = hub.load(path, { dtype = "f32" })
  check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
  compare(other(want.tokens, { pictures = want.x }), want.logits, "logits")
  local bare = models.SiglipVisionModel { image_size = 16, patch_size = 8, hidden_size = 24, intermediate_size = 32,
    num_hidden_layers = 1, num_attention_heads = 2, vision_use_head = false }
  bare:save(path)
  other = hub.load(path, { dtype = "f32" })
  check.equal(other.vision_model.head, nil)
  check.equal(select("#", other(want.x)), 1)
  compare(other(want.x), bare(want.x), "hidden states")
  for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
  os.remove(path)
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local text = { vocab_size = 8, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1,
    num_attention_heads = 2, max_position_embeddings = 4 }
  local vision = { image_size = 4, patch_size = 2, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1,
    num_attention_heads = 2 }
  local model = models.SiglipModel { text_config = text, vision_config = vision }
  local function fails(changes, words)
    local changed = {}
    for key, value in pairs(vision) do changed[key] = value end
    for key, value in pairs(changes) do changed[key] = value end
    check.fails(function() models.SiglipModel { text_config = text, vision_config = changed } end, words)
  end
  fails({ hidden_size = 16 }, "SiglipModel: text_config.projection_size 8 must be vision_config.hidden_size 16")
  fails({ num_attention_heads = 3 }, "SiglipModel: vision_config: num_attention_heads 3 must divide hidden_size 8")
  fails({ vision_use_head = false }, "'vision_config.vision_use_head': expected true, got false")
  fails({ patch_size = 5 }, "SiglipModel: vision_config: patch_size must be at most image_size")
  check.fails(function() model(ty.zeros({ 1, 5 }, { dtype = "i64" }), { pictures = ty.zeros(1, 3, 4, 4) }) end,
    "SiglipModel: tokens: expected at most the 4 of max_position_embeddings, got 5")
  check.fails(function() model(ty.zeros(1, 3), { pictures = ty.zeros(1, 3, 4, 4) }) end,
    "SiglipModel: tokens: expected an i64 tensor [n, t], got a tensor [1, 3]")
  check.fails(function() model(ty.zeros({ 1, 3 }, { dtype = "i64" })) end, "SiglipModel: pictures: expected a tensor")
end)

check.finish()
