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
local compare, load = reference.compare, reference.vision

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
  local loss = vlm.sigmoid_loss(image, text, model.logit_scale:exp(), model.logit_bias)
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

check.test("the sigmoid loss is what it learns by, in small batches of one large one too", function()
  local model, want = load "siglip2"
  local function batches(counts)
    local list, start = {}, 0
    for i, count in ipairs(counts) do
      list[i] = { pictures = want.x:narrow(0, start, count), tokens = want.tokens:narrow(0, start, count),
        sizes = want.shapes:narrow(0, start, count) }
      start = start + count
    end
    return list
  end
  for _, counts in ipairs { { 5 }, { 2, 2, 1 } } do
    model:zero_grad()
    check.close(vlm.cached_backward(model, batches(counts)), want.sigmoid:item(), 1e-5 * want.sigmoid:item())
    for _, name in ipairs { "logit_scale", "logit_bias" } do
      local g = model[name].grad:abs():item()
      check.close(g, want["grad." .. name]:tolist()[1] / math.sin(1), 1e-4 * g, name)
    end
  end
  local softmax = vlm.cached_backward(model, batches { 3, 2 }, { loss = "softmax" })
  local _, image, text = model(want.tokens, { pictures = want.x, sizes = want.shapes })
  check.close(softmax, vlm.contrastive_loss(image, text, model.logit_scale:exp()):item(), 1e-5)
  local first = batches { 3, 2 }
  local mean = vlm.accumulated_backward(model, first)
  local sum = 0
  for _, batch in ipairs(first) do sum = sum + vlm.cached_backward(model, { batch }) / 2 end
  check.close(mean, sum, 1e-5)
  check.fails(function() vlm.cached_backward(model, first, { loss = "none" }) end, 'loss: expected "softmax" or')
  local set = ty.data.TensorDataset { pictures = want.x:detach(), tokens = want.tokens, sizes = want.shapes }
  local loader = ty.data.DataLoader(set, { batch_size = 5 })
  local losses = vlm.fit_contrastive(model, loader, { steps = 30, lr = 3e-3, warmup = 2, quiet = true })
  check.close(losses[1], want.sigmoid:item(), 1e-4)
  check.ok(losses[30] < 0.5 * losses[1], ("from %.3f to %.3f"):format(losses[1], losses[30]))
  local clip = hub.load(root .. "clip", { dtype = "f32" })
  check.fails(function() vlm.fit_contrastive(clip, loader, { steps = 1, loss = "sigmoid", quiet = true }) end,
    "loss: expected softmax of a model without logit_bias, got sigmoid")
end)

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

check.test("heads over pictures of fixed size and of every shape: logits, loss, gradients; read again", function()
  for _, name in ipairs { "siglip_classifier", "siglip2_classifier" } do
    local model, want = load(name)
    local x, options = want.x:detach():requires_grad_(), { sizes = want.shapes }
    compare(model(x, options), want.logits, name)
    local loss = model:loss(x, want.labels, options)
    check.close(loss:item(), (want.bce or want.ce):item(), 1e-5)
    local left = reference.compare_gradients(model, loss * math.sin(1), want)
    for key in pairs(left) do check.ok(key:find "^vision_model%.head%.", key) end -- what finds a whole is not asked
    compare(x.grad, want["input_grad.x"], "gradient for the pictures")
    local path = os.tmpname()
    os.remove(path)
    model:save(path)
    local other = hub.load(path, { dtype = "f32" })
    check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
    compare(other(want.x, options), want.logits, "read again")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end
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
