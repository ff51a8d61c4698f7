-- Llava against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the folders that
-- transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local seeing = dofile(here .. "../modules/models/seeing.lua")(check, reference)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"
local compare = reference.compare

local function load(name, options) return seeing.load(root .. name, options) end

for _, name in ipairs { "llava", "llava_vit" } do
  check.test(name .. ": features, logits, loss and gradients of transformers", function()
    local model, want = load(name)
    compare(model:picture_features(want.x):flatten(0, 1), want.features:flatten(0, -2), "features")
    -- The tower's last layer and norm are not used by the one, its pooler by the other.
    seeing.learns_but_for_the_tower(model, want, { mask = want.mask })
    local options = { pictures = want.x:detach():requires_grad_(), mask = want.mask }
    local loss = model:loss(want.tokens, nil, options):item()
    options.checkpoint = true
    check.close(model:loss(want.tokens, nil, options):item(), loss, 1e-5, "checkpoints")
  end)

  check.test(name .. ": greedy text of transformers, in a batch and row by row", function()
    local model, want = load(name)
    seeing.says(model, want, want.tokens, want.mask, { pictures = want.x },
      { { pictures = want.x:narrow(0, 0, 1) }, { pictures = want.x:narrow(0, 1, 2) }, {} })
  end)

  check.test(name .. ": names of other versions", function()
    local model, want = load(name)
    local path = os.tmpname()
    os.remove(path)
    ty.io.mkdir(path)
    local renamed = {}
    for key, t in pairs(ty.io.load(root .. name .. "/model.safetensors")) do
      local new = key:gsub("^language_model%.lm_head", "lm_head"):gsub("^language_model%.model", "model.language_model")
        :gsub("^vision_tower%.", "model.vision_tower."):gsub("^multi_modal", "model.multi_modal")
      renamed[new] = t
    end
    ty.io.save_safetensors(path .. "/model.safetensors", renamed)
    ty.io.write_atomic(path .. "/config.json", ty.io.read(root .. name .. "/config.json"))
    local other = hub.load(path, { dtype = "f32" })
    local state = model:state_dict()
    for key, t in pairs(other:state_dict()) do check.ok(t:eq(state[key]):all():item(), key) end
    compare(other(want.tokens, { pictures = want.x, mask = want.mask }),
      model(want.tokens, { pictures = want.x, mask = want.mask }), "logits")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end)
end

check.test("a tied head comes off", function()
  local model, want = load "llava_vit"
  local before = model(want.tokens, { pictures = want.x, mask = want.mask })
  check.ok(model:tied())
  model:untie()
  check.equal({ model:tied(), model.config.tie_word_embeddings, model.language_model.config.tie_word_embeddings },
    { nil, false, false })
  compare(model(want.tokens, { pictures = want.x, mask = want.mask }), before, "logits")
end)

local text = { model_type = "llama", vocab_size = 12, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
  num_attention_heads = 2, max_position_embeddings = 32 }
local vision = { model_type = "vit", image_size = 4, patch_size = 2, num_channels = 1, hidden_size = 8,
  intermediate_size = 16, num_hidden_layers = 2, num_attention_heads = 2 }

local function with(changes)
  local config = { text_config = text, vision_config = vision, image_token_index = 11 }
  for key, value in pairs(changes or {}) do config[key] = value end
  return config
end

check.test("it learns to say what it sees", function()
  ty.manual_seed(2)
  -- Wide enough, and slow enough, that every seed of eight learns it.
  local wide = { model_type = "vit", image_size = 4, patch_size = 2, num_channels = 1, hidden_size = 32,
    intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2 }
  local model = models.Llava(with { vision_config = wide })
  local n = 4
  local pictures = ty.interpolate(ty.eye(4):reshape(n, 1, 2, 2), {}, 2)
  local image = ty.full({ n, 4 }, 11, { dtype = "i64" })
  local tokens = ty.concat({ image, ty.full({ n, 1 }, 9, { dtype = "i64" }), ty.arange(n):unsqueeze(1) }, 1)
  local targets = ty.concat({ ty.full({ n, 4 }, -100, { dtype = "i64" }), tokens:narrow(1, 5, 1),
    ty.full({ n, 1 }, -100, { dtype = "i64" }) }, 1)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-3 })
  for _ = 1, 400 do opt:step(model:loss(tokens, targets, { pictures = pictures })) end
  model:eval()
  local said = model:generate(tokens:narrow(1, 0, 5), 1, { temperature = 0, pictures = pictures })
  check.equal(said:select(1, 5):tolist(), { 0, 1, 2, 3 })
  -- The other way round, it says the other way round.
  said = model:generate(tokens:narrow(1, 0, 5), 1, { temperature = 0, pictures = pictures:flip { 0 } })
  check.equal(said:select(1, 5):tolist(), { 3, 2, 1, 0 })
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local function fails(changes, words) check.fails(function() models.Llava(with(changes)) end, words) end
  fails({ text_config = { model_type = "gpt2" } },
    "Llava: text_config: model_type 'gpt2' is not supported; there are llama, mistral,")
  fails({ vision_config = { model_type = "siglip" } },
    "Llava: vision_config: model_type 'siglip' is not supported; there are clip_vision_model, resnet_vision_model,")
  fails({ vision_feature_layer = 3 }, "Llava: vision_feature_layer: expected integers in [-3, 2], got 3")
  fails({ vision_feature_layer = { 1, "2" } },
    "Llava: config key 'vision_feature_layer' must be an integer or a list of integers, got a table")
  fails({ vision_feature_select_strategy = "some" },
    "config key 'vision_feature_select_strategy': expected default or full, got some")
  fails({ projector_hidden_act = "sine" }, "Llava: config key 'projector_hidden_act': unknown activation 'sine'")
  local model = models.Llava(with())
  local tokens = ty.tensor { { 11, 11, 11, 11, 2 } }
  check.fails(function() model(tokens, { pictures = ty.zeros(2, 1, 4, 4) }) end,
    "Llava: pictures: expected as many features as the 4 image tokens, got 8 of 2 pictures")
  check.fails(function() model(tokens, { pictures = ty.zeros(1, 3, 4, 4) }) end,
    "ViT: pictures: expected a tensor [n, 1, height, width], got a tensor [1, 3, 4, 4]")
  check.fails(function() model { 1, 2 } end, "Llava: tokens: expected an i64 tensor [n, t], got a table")
  check.fails(function() model(tokens, 3) end, "Llava: options: expected a table or nil, got 3")
  check.fails(function() model:generate(tokens, 2, { pictures = 3 }) end,
    "generate: pictures: expected a tensor, got 3")
  local plain = models.Llama { vocab_size = 12, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
    num_attention_heads = 2 }
  check.fails(function() plain:generate(tokens, 2, { pictures = ty.zeros(1, 1, 4, 4) }) end,
    "generate: pictures: expected a model that sees them, got a Llama")
end)

check.finish()
