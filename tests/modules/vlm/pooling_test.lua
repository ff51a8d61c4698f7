-- Pooled picture tokens: averages over a coarser grid, in the grid's order, between the tower and the projector.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local pooling = vlm.pooling

ty.manual_seed(3)
local model = models.Llava { image_token_index = 19, tie_word_embeddings = true, vision_feature_layer = -1,
  text_config = { model_type = "llama", vocab_size = 20, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true },
  vision_config = { model_type = "clip_vision_model", image_size = 16, patch_size = 4, hidden_size = 8,
    intermediate_size = 16, num_hidden_layers = 2, num_attention_heads = 2 } }
local pictures = ty.randn(2, 3, 16, 16)
local function apart(a, b) return (a - b):abs():max():item() end

check.test("with the grid that it has a picture is what it was", function()
  ty.no_grad(function()
    local seen = pooling.seen(model, pictures)
    check.equal(seen.shape, { 2, 16, 8 })
    check.equal(apart(pooling.pool(seen, 4), seen), 0)
    check.ok(apart(pooling.features(model, seen), model:picture_features(pictures)) < 1e-6)
    check.ok(apart(pooling.features(model, seen, 4), model:picture_features(pictures)) < 1e-6)
  end)
end)

check.test("a pooled place is the mean of its places, row by row", function()
  local seen = ty.arange(2 * 16 * 3):to("f32"):reshape(2, 16, 3)
  local pooled = pooling.pool(seen, 2)
  check.equal(pooled.shape, { 2, 4, 3 })
  for n = 0, 1 do
    for place = 0, 3 do
      local row, column, sum = place // 2 * 2, place % 2 * 2, nil
      for y = row, row + 1 do
        for x = column, column + 1 do
          local one = seen:select(0, n):select(0, y * 4 + x)
          sum = sum and sum + one or one
        end
      end
      check.ok(apart(pooled:select(0, n):select(0, place), sum / 4) < 1e-4)
    end
  end
  check.ok(apart(pooling.pool(seen, 1):select(1, 0), seen:mean { 1 }) < 1e-4)
end)

check.test("the language model takes pooled pictures, and the projector learns from them", function()
  local seen = ty.no_grad(pooling.seen, model, pictures)
  local ids = { 19, 19, 19, 19, 1, 2, 3 }
  model:zero_grad()
  local few = pooling.features(model, seen, 2)
  model:loss(ty.tensor({ ids, ids }, { dtype = "i64" }), nil, { features = few }):backward()
  check.ok(model.multi_modal_projector.linear_1.weight.grad:abs():max():item() > 0)
end)

check.test("what cannot be pooled is one clear error", function()
  check.fails(function() pooling.pool(ty.zeros(2, 15, 8), 2) end, "seen: expected a tensor [n, side * side, width]")
  check.fails(function() pooling.pool(ty.zeros(2, 16, 8), 5) end, "side: expected at most the 4 of the features, got 5")
  check.fails(function() pooling.seen(ty.nn.Linear(2, 2), pictures) end, "expected a model that sees")
end)

check.finish()
