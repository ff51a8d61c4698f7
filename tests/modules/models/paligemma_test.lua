-- PaliGemma 1 and 2 against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the
-- folders that transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
require "tycho.llm" -- generation

local root = check.root .. "tests/fixtures/vision/"
local compare = reference.compare

local function load(name)
  local model = hub.load(root .. name, { dtype = "f32" })
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
  return model, ty.io.load_safetensors(root .. name .. "/expected.safetensors")
end

for _, name in ipairs { "paligemma", "paligemma2" } do
  check.test(name .. ": features, logits, loss and gradients of transformers", function()
    local model, want = load(name)
    local x = want.x:detach():requires_grad_()
    local options = { pictures = x, mask = want.mask, suffix = want.suffix }
    compare(model:picture_features(x), want.features, "features")
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
    local t, all = want.asked.shape[2], want.greedy
    check.equal(all.shape[2] - t, 100)
    local rows, alone = {}, { { 0, 1 }, { 1, 2 }, { 3, 0 } }
    for i = 0, 2 do
      local padding = t - want.asked_mask:select(0, i):sum():item()
      rows[i + 1] = want.asked:select(0, i):narrow(0, padding, t - padding)
    end
    local o = { temperature = 0, stop_tokens = false, pictures = want.x }
    for i, row in ipairs(model:generate(rows, 100, o)) do
      local expected = all:select(0, i - 1):narrow(0, t - rows[i].shape[1], rows[i].shape[1] + 100):tolist()
      check.equal(row:tolist(), expected, "row " .. i .. " of a batch")
      local first, count = table.unpack(alone[i])
      local one = model:generate(rows[i]:unsqueeze(0), 100, { temperature = 0, stop_tokens = false,
        pictures = count > 0 and want.x:narrow(0, first, count) or nil })
      check.equal(one:select(0, 0):tolist(), expected, "row " .. i .. " alone")
    end
  end)

  check.test(name .. ": written and read again", function()
    local model, want = load(name)
    local path = os.tmpname()
    os.remove(path)
    model:save(path)
    local other = hub.load(path, { dtype = "f32" })
    check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
    local options = { pictures = want.x, mask = want.mask, suffix = want.suffix }
    compare(other(want.tokens, options), model(want.tokens, options), "logits")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end)
end

check.test("what is asked sees all of it, an answer what is before it", function()
  local model, want = load "paligemma"
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
