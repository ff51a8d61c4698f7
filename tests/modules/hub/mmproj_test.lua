-- A Llava as two GGUF files, the language model's and the one with the tower and the projector, and back.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub, models = require "tycho.hub", require "tycho.models"
require "tycho.llm"

local root = check.root .. "tests/fixtures/vision/llava"
local want = ty.io.load_safetensors(root .. "/expected.safetensors")
local llava = hub.load(root, { dtype = "f32" })
local language, mmproj = scratch.file "language.gguf", scratch.file "mmproj.gguf"
hub.save_gguf(llava.language_model, language)
hub.mmproj.save(llava, mmproj, { dtype = "f32" })

local function apart(a, b) return (a - b):abs():max():item() / b:abs():max():item() end
local options = { pictures = want.x, mask = want.mask }
local seen = want.mask:unsqueeze(-1):to "f32"

check.test("read back, it computes what it did, and what transformers does", function()
  local text = hub.load(language)
  local model, metadata = hub.mmproj.load(mmproj, text, { image_token = 31 })
  check.ok(model.language_model == text)
  check.ok(apart(model:picture_features(want.x):flatten(0, 1), want.features:flatten(0, -2)) < 1e-5)
  check.ok(apart(model(want.tokens, options) * seen, want.logits * seen) < 1e-4)
  check.equal(model:loss(want.tokens, nil, options):requires_grad_() ~= nil, true)
  check.close(metadata["clip.vision.image_mean"], { 0.48145466, 0.4578275, 0.40821073 }, 1e-6)
  -- The number of the token of pictures does not matter: no file of a language model has one.
  local other = hub.mmproj.load(mmproj, text)
  check.equal(other:image_token(), 32)
  local tokens = ty.where(want.tokens:eq(31), 32, want.tokens)
  check.ok(apart(other(tokens, options) * seen, want.logits * seen) < 1e-4)
end)

check.test("what llama.cpp reads: names, shapes and keys", function()
  local tensors, metadata = ty.io.load_gguf(mmproj)
  check.equal({ metadata["general.architecture"], metadata["clip.projector_type"], metadata["clip.vision.block_count"],
    metadata["clip.vision.feature_layer"], metadata["clip.use_gelu"], metadata["clip.vision.projection_dim"] },
    { "clip", "mlp", 2, { 1 }, false, 16 })
  check.equal({ tensors["v.patch_embd.weight"].shape, tensors["v.class_embd"].shape, tensors["mm.2.weight"].shape },
    { { 24, 3, 8, 8 }, { 24 }, { 16, 16 } })
  check.equal({ tensors["v.blk.1.ffn_up.weight"].shape, tensors["v.blk.1.ffn_down.weight"].shape },
    { { 32, 24 }, { 24, 32 } })
  check.equal({ tensors["v.post_ln.weight"], tensors["v.blk.0.attn_out.bias"].dtype }, { nil, "f32" })
  local half = scratch.file "half.gguf"
  hub.mmproj.save(llava, half)
  tensors = ty.io.load_gguf(half)
  check.equal({ tensors["mm.0.weight"].dtype, tensors["mm.0.bias"].dtype, tensors["v.position_embd.weight"].dtype },
    { "f16", "f32", "f32" })
end)

check.test("old files, in which the feed-forward matrices have each other's names and the layer is not said", function()
  local tensors, metadata = ty.io.load_gguf(mmproj)
  local old = {}
  for name, t in pairs(tensors) do
    old[name:find "ffn_up" and name:gsub("up", "down") or name:gsub("ffn_down", "ffn_up")] = t
  end
  metadata["clip.vision.feature_layer"] = nil
  local path = scratch.file "old.gguf"
  ty.io.save_gguf(path, old, metadata)
  local model = hub.mmproj.load(path, hub.load(language), { image_token = 31 })
  check.ok(apart(model(want.tokens, options) * seen, want.logits * seen) < 1e-4)
end)

check.test("LLaVA-NeXT, which sees tiles", function()
  local folder = check.root .. "tests/fixtures/vision/llava_next"
  local expected = ty.io.load_safetensors(folder .. "/expected.safetensors")
  local next_model = hub.load(folder, { dtype = "f32" })
  local text, tiles = scratch.file "next.gguf", scratch.file "tiles.gguf"
  hub.save_gguf(next_model.language_model, text)
  hub.mmproj.save(next_model, tiles, { dtype = "f32" })
  local model = hub.mmproj.load(tiles, hub.load(text), { image_token = 31 })
  check.equal(getmetatable(model).__name, "LlavaNext")
  check.equal(model.config.image_grid_pinpoints, next_model.config.image_grid_pinpoints)
  local given = { pictures = expected.x, sizes = expected.sizes, mask = expected.mask }
  local shown = expected.mask:unsqueeze(-1):to "f32"
  check.ok(apart(model(expected.tokens, given) * shown, expected.logits * shown) < 1e-4)
  local loss = model:loss(expected.tokens, nil, given)
  loss:backward()
  check.ok(model.image_newline.grad:abs():sum():item() > 0, "what stands behind a row learns")
  local tensors, metadata = ty.io.load_gguf(tiles)
  check.equal({ metadata["clip.vision.mm_patch_merge_type"], metadata["clip.vision.image_grid_pinpoints"] },
    { "spatial_unpad", { 16, 8, 8, 16, 16, 16, 8, 24, 24, 8 } })
  local function fails(change, words)
    local t, m = {}, {}
    for key, value in pairs(tensors) do t[key] = value end
    for key, value in pairs(metadata) do m[key] = value end
    change(t, m)
    local path = scratch.file "bad.gguf"
    ty.io.save_gguf(path, t, m)
    check.fails(function() hub.mmproj.load(path, hub.load(text)) end, words)
  end
  fails(function(t) t["model.image_newline"] = nil end, "got one without the other")
  fails(function(_, m) m["clip.vision.mm_patch_merge_type"] = nil end, "got one without the other")
  fails(function(t) t["model.image_newline"] = ty.ones(3) end, "model.image_newline: expected [16], got a tensor [3]")
  fails(function(_, m) m["clip.vision.image_grid_pinpoints"] = { 8 } end, "image_grid_pinpoints: expected pairs")
  fails(function(_, m) m["clip.vision.image_grid_pinpoints"] = { 8, 9 } end, "expected pairs of multiples of 8")
end)

check.test("a file of another model, and what is no such file, are one clear error", function()
  local text = hub.load(language)
  local function fails(change, words)
    local tensors, metadata = ty.io.load_gguf(mmproj)
    change(tensors, metadata)
    local path = scratch.file "bad.gguf"
    ty.io.save_gguf(path, tensors, metadata)
    check.fails(function() hub.mmproj.load(path, text) end, words)
  end
  local wide = models.Llama { vocab_size = 32, hidden_size = 24, intermediate_size = 8, num_hidden_layers = 1,
    num_attention_heads = 2 }
  check.fails(function() hub.mmproj.load(mmproj, wide) end,
    "makes features of 16, the language model takes 24: it belongs to another model")
  check.fails(function() hub.mmproj.load(language, text) end,
    "expected an mmproj file with a network of pictures, got architecture \"llama\"")
  fails(function(_, m) m["clip.projector_type"] = "resampler" end, "projector_type: expected mlp, got \"resampler\"")
  fails(function(t) t["mm.0.weight"] = nil end, "expected the projector mm.0 and mm.2, got none")
  fails(function(t) t["v.blk.1.ln1.weight"] = nil end, "vision_model.encoder.layers.1.layer_norm1.weight")
  fails(function(_, m) m["clip.vision.block_count"] = -1 end, "clip.vision.block_count: expected a positive integer")
  fails(function(_, m) m["clip.vision.feature_layer"] = { 9 } end, "expected integers from 0 to 2, got 9")
  fails(function(_, m) m["clip.vision.attention.head_count"] = 7 end, "num_attention_heads 7 must divide")
  fails(function(t) t["v.post_ln.weight"] = ty.ones(24) end, "expected a tower without a last norm")
  check.fails(function() hub.mmproj.load("nowhere.gguf", text) end, "nowhere.gguf")
  check.fails(function() hub.mmproj.save(text, mmproj) end,
    "expected a Llava or a LlavaNext with CLIP's tower, got a Llama")
end)

check.finish()
