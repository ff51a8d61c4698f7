-- SigLIP 2 for pictures of every shape (NaFlex) against transformers: the small models of tests/fixtures/vision
-- (make_vision.py), loaded from the folders that transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
local vlm = require "tycho.vlm"

local root = check.root .. "tests/fixtures/vision/"
local compare = reference.compare

local function load(name, options)
  local o = { dtype = "f32" }
  for key, value in pairs(options or {}) do o[key] = value end
  local model = hub.load(root .. name, o)
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
  return model, ty.io.load_safetensors(root .. name .. "/expected.safetensors")
end

check.test("logits, features, the sigmoid loss and gradients of transformers", function()
  local model, want = load "siglip2"
  check.equal(getmetatable(model).__name, "Siglip2Model")
  local x = want.x:detach():requires_grad_()
  local logits, image, text = model(want.tokens, { pictures = x, sizes = want.shapes })
  compare(logits, want.logits, "logits")
  compare(image, want.image, "features of pictures")
  compare(text, want.text, "features of texts")
  compare(ty.nn.normalize(model:image_features(x, { sizes = want.shapes })), want.image, "features alone")
  compare((model.vision_model:run(x, { sizes = want.shapes })), want.vision_last, "hidden states of pictures")
  local loss = vlm.sail.loss(image, text, model.logit_scale:exp(), model.logit_bias)
  check.close(loss:item(), want.sigmoid:item(), 1e-5 * want.sigmoid:item(), "loss")
  check.equal(reference.compare_gradients(model, loss * math.sin(1), want), {}, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the patches")
end)

for _, name in ipairs { "siglip2_vision", "siglip2_bare" } do
  check.test(name .. ": hidden states, with checkpoints too, and gradients of transformers", function()
    local model, want = load(name)
    local x, sizes = want.x:detach():requires_grad_(), want.shapes
    local hidden, pooled = model(x, { sizes = sizes })
    compare(hidden, want.last, "after the last norm")
    local loss = (hidden * reference.wave(hidden):to "f32"):sum()
    if want.pooled then
      compare(pooled, want.pooled, "pooled")
      loss = loss + (pooled * reference.wave(pooled):to "f32"):sum()
    else
      check.equal({ pooled, model.vision_model.head }, {})
    end
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    compare(x.grad, want["input_grad.x"], "gradient for the patches")
    for i = 0, model.config.num_hidden_layers do
      compare(model:hidden(x, { sizes = sizes, layer = i, checkpoint = true }), want["hidden." .. i], "layer " .. i)
    end
  end)
end

check.test("what fills a picture up is nothing to it", function()
  local model, want = load "siglip2"
  local sizes = want.shapes:narrow(0, 1, 1) -- 7 x 2 of 16
  local whole = want.x:narrow(0, 1, 1)
  local features = model:image_features(whole, { sizes = sizes })
  compare(model:image_features(whole:narrow(1, 0, 14), { sizes = sizes }), features, "cut off")
  local noise = ty.concat({ whole:narrow(1, 0, 14), ty.randn(1, 5, whole.shape[3]) * 100 }, 1)
  compare(model:image_features(noise, { sizes = sizes }), features, "filled up with noise")
end)

check.test("parts of a whole folder; written and read again", function()
  local model, want = load "siglip2"
  local text = load("siglip2", { config = { architectures = { "Siglip2TextModel" } } })
  local vision = load("siglip2", { config = { architectures = { "Siglip2VisionModel" } } })
  compare(ty.nn.normalize((select(2, text(want.tokens)))), want.text, "features of texts")
  compare(vision:hidden(want.x, { sizes = want.shapes }), want.vision_last, "hidden states of pictures")
  local path = os.tmpname()
  os.remove(path)
  for _, each in ipairs { model, text, vision } do
    each:save(path)
    local other = hub.load(path, { dtype = "f32" })
    check.equal(getmetatable(other).__name, getmetatable(each).__name)
    check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
    if each == model then
      check.equal(ty.io.load_json(path .. "/config.json").vision_config.model_type, "siglip2_vision_model")
      compare(other(want.tokens, { pictures = want.x, sizes = want.shapes }), want.logits, "logits")
    end
  end
  for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
  os.remove(path)
end)

check.test("configs and inputs that cannot be are one clear error", function()
  check.fails(function() models.Siglip2VisionModel { num_patches = 200 } end,
    "Siglip2VisionModel: config key 'num_patches': expected a square number, got 200")
  check.fails(function() models.Siglip2Model { vision_config = { num_patches = 3 } } end,
    "Siglip2Model: vision_config: config key 'num_patches': expected a square number, got 3")
  local model, want = load "siglip2"
  local x, sizes = want.x, want.shapes
  check.fails(function() model:image_features(x) end, "Siglip2Model: sizes: expected i64 [5, 2], rows and columns")
  check.fails(function() model:image_features(x, { sizes = sizes:narrow(0, 0, 2) }) end, "sizes: expected i64 [5, 2]")
  check.fails(function() model:image_features(x:narrow(1, 0, 12), { sizes = sizes }) end,
    "Siglip2Model: sizes: expected at most the 12 patches that pictures have, got 7 x 2 of number 2")
  check.fails(function() model:image_features(ty.zeros(1, 3, 8, 8), { sizes = sizes }) end,
    "Siglip2Model: pictures: expected patches [n, most, 48], got a tensor [1, 3, 8, 8]")
  check.fails(function() model:image_features(x, { sizes = sizes * (1 << 40) }) end, "expected at most the 16 patches")
  check.fails(function() model(want.tokens, { pictures = x, sizes = sizes, interpolate = true }) end, "interpolate")
  local fixed = hub.load(root .. "siglip", { dtype = "f32" })
  check.fails(function() fixed:image_features(x, { sizes = sizes }) end, "sizes")
end)

check.finish()
