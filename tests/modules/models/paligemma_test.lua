-- PaliGemma 1 and 2 against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the
-- folders that transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local seeing = dofile(here .. "../modules/models/seeing.lua")(check, reference)
local ty = require "tycho"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"

for _, name in ipairs { "paligemma", "paligemma2" } do
  check.test(name .. ": features, logits, loss and gradients of transformers", function()
    local model, want = seeing.load(root .. name)
    reference.compare(model:picture_features(want.x), want.features, "features")
    check.equal(seeing.learns(model, want, { mask = want.mask, suffix = want.suffix }), {}, "gradients left")
  end)

  check.test(name .. ": a hundred greedy tokens of transformers, in a batch and row by row", function()
    local model, want = seeing.load(root .. name)
    local count = seeing.says(model, want, want.asked, want.asked_mask, { pictures = want.x },
      { { pictures = want.x:narrow(0, 0, 1) }, { pictures = want.x:narrow(0, 1, 2) }, {} })
    check.equal(count, 100)
  end)

  check.test(name .. ": written and read again", function()
    local model, want = seeing.load(root .. name)
    seeing.comes_back(model, want, { pictures = want.x, mask = want.mask, suffix = want.suffix })
  end)
end

check.test("what is asked sees all of it, an answer what is before it", function()
  local model, want = seeing.load(root .. "paligemma")
  local tokens, suffix = want.tokens:narrow(0, 2, 1):narrow(1, 6, 8), want.suffix:narrow(0, 2, 1):narrow(1, 6, 8)
  local before = model(tokens, { suffix = suffix })
  local asked = suffix:eq(0):to("i64"):sum():item()
  local changed = tokens:clone()
  changed:narrow(1, 7, 1):fill_(3)
  local after = model(changed, { suffix = suffix })
  check.ok((after - before):narrow(1, 0, 7):abs():max():item() < 1e-6, "the last word of an answer is seen by none")
  changed = tokens:clone()
  changed:narrow(1, asked - 1, 1):fill_((tokens[0][asked - 1]:item() + 1) % 30)
  check.ok((model(changed, { suffix = suffix }) - before):select(1, 0):abs():max():item() > 1e-4,
    "the last word that is asked is seen by the first")
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local text = { vocab_size = 12, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
    num_attention_heads = 2, head_dim = 8 }
  local vision = { image_size = 4, patch_size = 2, hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1,
    num_attention_heads = 2 }
  local model = models.PaliGemma { text_config = text, vision_config = vision, image_token_index = 11 }
  check.fails(function()
    models.PaliGemma { text_config = { model_type = "llama" }, vision_config = vision }
  end, "PaliGemma: text_config: model_type 'llama' is not supported; there are gemma, gemma2")
  local tokens = ty.full({ 1, 5 }, 11, { dtype = "i64" })
  check.fails(function() model(tokens, { pictures = ty.zeros(1, 3, 4, 4) }) end,
    "PaliGemma: pictures: expected as many features as the 5 image tokens, got 4 of 1 pictures")
  check.fails(function() model:loss(tokens) end, "PaliGemma:loss: suffix: expected bool [n, t]")
  check.fails(function() model(tokens, { suffix = ty.ones(1, 3) }) end, "PaliGemma: suffix: expected bool [1, 5]")
end)

check.finish()
