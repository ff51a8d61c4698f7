-- Qwen2-VL and Qwen2.5-VL against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from
-- the folders that transformers wrote, with pictures of five sizes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
require "tycho.llm" -- generation

local root = check.root .. "tests/fixtures/vision/"
local compare = reference.compare

local function load(name, config)
  local model = hub.load(root .. name, { dtype = "f32", config = config })
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
  return model, ty.io.load_safetensors(root .. name .. "/expected.safetensors")
end

for _, name in ipairs { "qwen2_vl", "qwen2_5_vl" } do
  check.test(name .. ": features, logits, loss and gradients of transformers", function()
    local model, want = load(name)
    local x = want.x:detach():requires_grad_()
    local options = { pictures = x, sizes = want.sizes, mask = want.mask }
    check.equal(model:feature_counts(x, want.sizes), want.counts:tolist())
    compare(model:picture_features(x, { sizes = want.sizes }):squeeze(0), want.features, "features")
    local again = model:picture_features(x, { sizes = want.sizes, checkpoint = true })
    compare(again:squeeze(0), want.features, "checkpoints")
    local seen = want.mask:unsqueeze(-1):to "f32"
    compare(model(want.tokens, options) * seen, want.logits * seen, "logits")
    local n, t = want.labels.shape[1], want.labels.shape[2]
    local targets = ty.concat({ want.labels:narrow(1, 1, t - 1), ty.full({ n, 1 }, -100, { dtype = "i64" }) }, 1)
    local loss = model:loss(want.tokens, targets, options)
    check.close(loss:item(), want.ce:item(), 1e-4 * want.ce:item(), "loss")
    check.close(model:loss(want.tokens, nil, options):item(), loss:item(), 1e-5, "targets of its own")
    local ours = {}
    for key, pair in pairs(want) do
      local theirs = key:match "^grad%.(.*)$"
      if theirs then ours["grad." .. (model:state_dict()[theirs] and theirs or model:rename(theirs))] = pair end
    end
    -- The fixture's figures are those of the loss times the first number of the wave.
    check.equal(reference.compare_gradients(model, loss * math.sin(1), ours), {}, "gradients left")
    compare(x.grad, want["input_grad.x"], "gradient for the pictures")
  end)

  check.test(name .. ": a hundred greedy tokens of transformers, in a batch and row by row", function()
    local model, want = load(name)
    local t, all = want.tokens.shape[2], want.greedy
    check.equal(all.shape[2] - t, 100)
    local rows, pictures, at = {}, { { 0, 1 }, { 1, 2 }, { 3, 2 }, { 5, 0 } }, { [0] = 0 }
    for i, grid in ipairs(want.sizes:tolist()) do at[i] = at[i - 1] + grid[2] * grid[3] end
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
      local alone = model:generate(rows[i]:unsqueeze(0), 100, own):select(0, 0)
      check.equal(alone:tolist(), expected, "row " .. i .. " alone")
    end
  end)

  check.test(name .. ": written and read again, by the names of other versions too", function()
    local model, want = load(name)
    local options = { pictures = want.x, sizes = want.sizes, mask = want.mask }
    local path = os.tmpname()
    os.remove(path)
    model:save(path)
    local logits = model(want.tokens, options)
    local other = hub.load(path, { dtype = "f32" })
    check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
    compare(other(want.tokens, options), logits, "logits")
    -- The first files have the keys of the text beside the others, and the settings of positions as rope_scaling.
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
    other = hub.load(path, { dtype = "f32" })
    check.equal({ other.report.unexpected, other.report.missing }, { {}, {} })
    compare(other(want.tokens, options), logits, "logits")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end)
end

check.test("what cannot be is one clear error", function()
  local model, want = load "qwen2_vl"
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
