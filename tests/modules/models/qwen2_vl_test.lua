-- Qwen2-VL and Qwen2.5-VL against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from
-- the folders that transformers wrote, with pictures of five sizes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local seeing = dofile(here .. "../modules/models/seeing.lua")(check, reference)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"

-- A written folder as the first versions wrote it: the keys of the text beside the others, the settings of positions as
-- rope_scaling, and tensors with other names.
local function as_first_written(path)
  local config = ty.io.load_json(path .. "/config.json")
  for key, value in pairs(config.text_config) do
    if key ~= "model_type" then config[key] = value end
  end
  config.rope_scaling = { type = "mrope", mrope_section = config.rope_parameters.mrope_section }
  config.rope_theta = config.rope_parameters.rope_theta
  config.text_config, config.rope_parameters = nil, nil
  ty.io.save_json(path .. "/config.json", config)
  local renamed = {}
  for key, x in pairs(ty.io.load(path .. "/model.safetensors")) do
    renamed[key:find "^lm_head" and key or key:find "^visual" and "model." .. key
      or key:gsub("^model%.", "model.language_model.")] = x:clone()
  end
  ty.io.save_safetensors(path .. "/model.safetensors", renamed)
end

for _, name in ipairs { "qwen2_vl", "qwen2_5_vl" } do
  check.test(name .. ": features, logits, loss and gradients of transformers", function()
    local model, want = seeing.load(root .. name)
    local x = want.x
    check.equal(model:feature_counts(x, want.sizes), want.counts:tolist())
    reference.compare(model:picture_features(x, { sizes = want.sizes }):squeeze(0), want.features, "features")
    local again = model:picture_features(x:detach():requires_grad_(), { sizes = want.sizes, checkpoint = true })
    reference.compare(again:squeeze(0), want.features, "checkpoints")
    check.equal(seeing.learns(model, want, { sizes = want.sizes, mask = want.mask }), {}, "gradients left")
  end)

  check.test(name .. ": a hundred greedy tokens of transformers, in a batch and row by row", function()
    local model, want = seeing.load(root .. name)
    local at = { [0] = 0 } -- where the patches of each picture end
    for i, grid in ipairs(want.sizes:tolist()) do at[i] = at[i - 1] + grid[2] * grid[3] end
    local count = seeing.says(model, want, want.tokens, want.mask, { pictures = want.x, sizes = want.sizes },
      seeing.parts(want, at, { { 0, 1 }, { 1, 2 }, { 3, 2 }, { 5, 0 } }))
    check.equal(count, 100)
  end)

  check.test(name .. ": written and read again, by the names of other versions too", function()
    local model, want = seeing.load(root .. name)
    local options = { pictures = want.x, sizes = want.sizes, mask = want.mask }
    seeing.comes_back(model, want, options)
    seeing.comes_back(model, want, options, as_first_written)
  end)
end

for _, name in ipairs { "qwen2_vl_clips", "qwen2_5_vl_clips" } do
  local function given(want)
    return { videos = want.videos, video_sizes = want.video_sizes, video_seconds = want.video_seconds }
  end

  check.test(name .. ": features, positions, logits, loss and gradients of transformers", function()
    local model, want = seeing.load(root .. name)
    reference.compare(model:picture_features(want.videos, { sizes = want.video_sizes }):squeeze(0), want.features,
      "features")
    local options = given(want)
    options.videos = want.videos:detach():requires_grad_()
    options.sizes, options.mask = want.sizes, want.mask
    check.equal(seeing.learns(model, want, options), {}, "gradients left")
    reference.compare(options.videos.grad, want["input_grad.videos"], "gradient for the clips")
    local axes
    local below = model.language_model.hidden
    function model.language_model:hidden(tokens, o) -- luacheck: ignore 432
      axes = o.axes
      return below(self, tokens, o)
    end
    options.pictures = want.x
    model:hidden(want.tokens, options)
    check.equal(axes:tolist(), want.axes:tolist(), "positions")
  end)

  check.test(name .. ": forty greedy tokens of transformers, in a batch and row by row", function()
    local model, want = seeing.load(root .. name)
    local function part(x, sizes, first, count)
      local counts = sizes:tolist()
      local from, length = 0, 0
      for i, grid in ipairs(counts) do
        local patches = grid[1] * grid[2] * grid[3]
        if i <= first then from = from + patches elseif i <= first + count then length = length + patches end
      end
      return x:narrow(0, from, length), sizes:narrow(0, first, count)
    end
    local alone = {}
    for i, some in ipairs { { 0 }, { 1, 0 }, { 2, 1 }, {} } do
      local o = {}
      if some[1] then
        o.videos, o.video_sizes = part(want.videos, want.video_sizes, some[1], 1)
        o.video_seconds = want.video_seconds:narrow(0, some[1], 1)
      end
      if some[2] then o.pictures, o.sizes = part(want.x, want.sizes, some[2], 1) end
      alone[i] = o
    end
    local all = given(want)
    all.pictures, all.sizes = want.x, want.sizes
    check.equal(seeing.says(model, want, want.tokens, want.mask, all, alone), 40)
  end)
end

check.test("a clip's processor gives what transformers' gives, and a second of it is told to the model", function()
  local model, want = seeing.load(root .. "qwen2_5_vl_clips")
  local process = hub.video_processor { video_processor_type = "Qwen2VLVideoProcessor", patch_size = 2, merge_size = 2,
    temporal_patch_size = 2, size = { shortest_edge = 64, longest_edge = 300 },
    image_mean = { 0.48145466, 0.4578275, 0.40821073 }, image_std = { 0.26862954, 0.26130258, 0.27577711 } }
  local patches, grids, seconds = process({ want["clip.0"], want["clip.1"], want["clip.2"] }, { fps = { 4, 1.5, 25 } })
  check.equal({ grids:tolist(), seconds:tolist() }, { want.video_sizes:tolist(), want.video_seconds:tolist() })
  local off = (patches - want.videos):abs()
  check.ok(off:max():item() <= 1 / 255 / 0.26 + 1e-5, off:max():item())
  -- The seconds between frames turn the tokens, where the model is Qwen2.5-VL.
  local o = { videos = want.videos, video_sizes = want.video_sizes, pictures = want.x, sizes = want.sizes,
    mask = want.mask }
  check.ok((model(want.tokens, o) - want.logits):abs():max():item() > 1e-2, "another second")
  o.video_seconds = want.video_seconds
  reference.compare(model(want.tokens, o) * want.mask:unsqueeze(-1), want.logits * want.mask:unsqueeze(-1), "logits")
end)

check.test("clips that cannot be are one clear error", function()
  local model, want = seeing.load(root .. "qwen2_5_vl_clips")
  local function fails(changes, words)
    local o = { videos = want.videos, video_sizes = want.video_sizes, video_seconds = want.video_seconds,
      pictures = want.x, sizes = want.sizes, mask = want.mask }
    for key, value in pairs(changes) do o[key] = value or nil end
    check.fails(function() model(want.tokens, o) end, words)
  end
  fails({ videos = false }, "Qwen2_5_VL: video_sizes: expected one for each of the clips in the text, got 0")
  fails({ video_sizes = false }, "Qwen2_5_VL: video_sizes: expected i64 [clips, 3]")
  fails({ video_sizes = want.video_sizes:narrow(0, 0, 2) }, "video_seconds: expected numbers [2], one for each clip")
  fails({ video_sizes = want.video_sizes:narrow(0, 0, 2), video_seconds = false },
    "Qwen2_5_VL: video_sizes: expected one for each of the clips in the text, got 2")
  fails({ video_seconds = ty.tensor { 0.5, -1, 2 } }, "video_seconds: expected numbers in [0, 1e6], got -1.0 of clip 2")
  fails({ video_seconds = ty.tensor { 1e6, 1, 2 } }, "Qwen2_5_VL: tokens: expected positions below 1048576, got")
  fails({ videos = want.videos:narrow(0, 0, 8) }, "QwenVision: pictures: expected the")
  local swapped = want.video_sizes:index_select(0, ty.tensor { 2, 1, 0 })
  fails({ video_sizes = swapped }, "Qwen2_5_VL: tokens: expected the")
  local llava = seeing.load(root .. "llava")
  check.fails(function() llava:generate(ty.tensor { { 1, 2 } }, 2, { videos = want.videos }) end,
    "generate: videos: expected a model that sees clips, got a Llava")
end)

check.test("what cannot be is one clear error", function()
  local model, want = seeing.load(root .. "qwen2_vl")
  local function fails(changes, words)
    check.fails(function() hub.load(root .. "qwen2_vl", { config = changes, weights = false }) end, words)
  end
  local config = ty.io.load_json(root .. "qwen2_vl/config.json")
  local vision, text = config.vision_config, config.text_config
  local function with(base, key, value)
    local result = {}
    for k, v in pairs(base) do result[k] = v end
    result[key] = value
    return result
  end
  fails({ vision_config = with(vision, "num_heads", 3) }, "num_heads 3 must divide the width 16 into multiples of 4")
  fails({ vision_config = with(vision, "hidden_size", 24) }, "its features of 24 must be as wide as the text's")
  fails({ text_config = with(text, "rope_parameters", { rope_theta = 1e4, mrope_section = { 1, 1, 1 } }) },
    "rope setting 'mrope_section': expected half of a head's 8 in all, got 3")
  fails({ text_config = with(text, "rope_parameters", { rope_theta = 1e4 }) },
    "rope setting 'mrope_section': expected three positive integers, got nil")
  local x, sizes = want.x, want.sizes
  check.fails(function() model:picture_features(x:narrow(0, 0, 5), { sizes = sizes }) end,
    "QwenVision: pictures: expected the")
  check.fails(function() model:picture_features(x) end, "Qwen2VL: sizes: expected i64 [pictures, 3]")
  check.fails(function() model:picture_features(x, { sizes = ty.tensor { { 1, 3, 4 } } }) end,
    "Qwen2VL: sizes: expected rows and columns in multiples of 2, got 3 x 4 as number 1")
  check.fails(function() model(want.tokens, { pictures = x, sizes = sizes:narrow(0, 0, 2), mask = want.mask }) end,
    "Qwen2VL: sizes: expected one for each of the pictures in the text, got 2")
  check.fails(function() model(ty.full({ 1, 3 }, 31, { dtype = "i64" })) end,
    "Qwen2VL: sizes: expected one for each of the pictures in the text, got 0")
  local cut = want.tokens:narrow(1, 0, 25)
  check.fails(function() model(cut, { pictures = x, sizes = sizes }) end, "Qwen2VL: ")
  check.fails(function() model { 1, 2 } end, "Qwen2VL: tokens: expected an i64 tensor [n, t], got a table")
  check.fails(function() model(want.tokens, { cu_seqlens = sizes }) end, "cu_seqlens is not an option of this family")
  check.equal(models.Qwen2_5_VL.architecture, "Qwen2_5_VLForConditionalGeneration")
end)

check.finish()
