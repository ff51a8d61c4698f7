-- Vision transformers against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the
-- folders that transformers wrote; the picture transformers of DeiT, CLIP and SigLIP among them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"
local compare, load = reference.compare, reference.vision

for name, layers in pairs { vit = 3, deit = 3, clip_vision = 2, clip_vision_bare = 2, siglip_vision = 2 } do
  check.test(name .. ": hidden states, pooled outputs and gradients of transformers", function()
    local model, want = load(name)
    local x = want.x:detach():requires_grad_()
    local hidden, pooled = model(x)
    compare(hidden, want.last, "after the last layer")
    compare(pooled, want.pooled, "pooled")
    local loss = (hidden * reference.wave(hidden):to "f32"):sum() + (pooled * reference.wave(pooled):to "f32"):sum()
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    compare(x.grad, want["input_grad.x"], "gradient for the pictures")
    -- Every layer, counted from either end; all at once; the same by checkpoints; the pooled output comes with each.
    for i = 0, layers do
      for _, layer in ipairs { i, i - layers - 1 } do
        compare(model:hidden(x, { layer = layer }), want["hidden." .. i], "layer " .. layer)
        local state, whole = model(x, { layer = layer, checkpoint = true })
        compare(state, want["hidden." .. i], "layer " .. layer)
        compare(whole, want.pooled, "pooled, with layer " .. layer)
      end
    end
    local list = model:hidden(x, { layer = { -2, 0 } })
    check.equal(#list, 2)
    compare(list[1], want["hidden." .. layers - 1], "list")
    compare(list[2], want["hidden.0"], "list")
    -- Pictures of other sizes.
    for i = 0, 2 do
      local other = want["other." .. i]
      compare(model:hidden(other, { interpolate = true }), want["other_last." .. i], "interpolated " .. i)
      check.fails(function() model(other) end, "without the option interpolate, got a tensor")
    end
    -- It goes as far as the layer that is asked for, and no further.
    local count, list_of = 0, (model.encoder or model.vision_model.encoder)
    list_of = list_of.layer or list_of.layers
    local class = getmetatable(list_of[1])
    local forward = class.forward
    class.forward = function(...)
      count = count + 1
      return forward(...)
    end
    model:hidden(x, { layer = 1 })
    class.forward = forward
    check.equal(count, 1)
  end)
end

check.test("the last norm, where it is asked for", function()
  local model, want = load "vit"
  compare(model:hidden(want.x, { layer = -1, norm = true }), want.last, "norm of the last layer")
  compare(model:hidden(want.x, { norm = false }), want["hidden.3"], "without the norm")
  local clip, other = load "clip_vision"
  compare(clip:hidden(other.x, { norm = true }):select(1, 0), clip.vision_model.post_layernorm(other.last:select(1, 0)),
    "norm")
end)

check.test("a classifier: logits, the loss of many labels, gradients", function()
  local model, want = load "vit_classifier"
  local x = want.x:detach():requires_grad_()
  compare(model(x), want.logits, "logits")
  local loss = model:loss(x, want.labels)
  check.close(loss:item(), want.bce:item(), 1e-5)
  -- The fixture's figures are those of the loss times the first number of the wave.
  check.equal(reference.compare_gradients(model, loss * math.sin(1), want), {}, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
  local labels = ty.tensor { 0, 4, 1 }
  check.close(model:loss(x, labels):item(), ty.nn.cross_entropy(model(x), labels):item(), 1e-6)
end)

check.test("deit: two heads, their mean, gradients", function()
  local model, want = load "deit_teacher"
  local x = want.x:detach():requires_grad_()
  local logits, own, taught = model(x)
  compare(logits, want.logits, "logits")
  compare(own, want.own, "those of the class")
  compare(taught, want.taught, "those of the teacher's token")
  local loss = (logits * reference.wave(logits):to "f32"):sum()
  check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
  check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
  local single = hub.load(root .. "deit_teacher", { config = { architectures = { "DeiTModel" } }, dtype = "f32" })
  check.equal(#single.report.left_out, 4)
  compare(single:hidden(x), model.deit:hidden(x), "without heads")
end)

check.test("other heads of a file are left out and said", function()
  local bare = hub.load(root .. "vit_classifier", { config = { architectures = { "ViTModel" } } })
  check.equal(getmetatable(bare).__name, "ViT")
  check.equal(bare.report.left_out, { "classifier.bias", "classifier.weight" })
  check.equal(bare.pooler, nil)
  check.equal(select("#", bare(ty.zeros(1, 1, 12, 20, { dtype = "bf16" }))), 1)
end)

local small = { image_size = 8, patch_size = 4, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2,
  num_attention_heads = 2, num_channels = 1 }

local function with(changes)
  local config = {}
  for key, value in pairs(small) do config[key] = value end
  for key, value in pairs(changes or {}) do config[key] = value end
  return config
end

check.test("it learns; dropout is for training alone", function()
  ty.manual_seed(1)
  local model = models.ViTForImageClassification(with { num_labels = 4, hidden_dropout_prob = 0.1,
    attention_probs_dropout_prob = 0.1 })
  local opt = ty.optim.AdamW(model:parameters(), { lr = 3e-3 })
  local x, labels = ty.randn(16, 1, 8, 8), ty.arange(16) % 4
  local a, b = model(x), model(x)
  check.ok((a - b):abs():max():item() > 1e-4, "dropout")
  for _ = 1, 60 do opt:step(model:loss(x, labels)) end
  model:eval()
  check.equal(model(x):argmax(-1):tolist(), labels:tolist())
  check.equal(model(x):tolist(), model(x):tolist())
end)

check.test("defaults are the published sizes", function()
  local vit = ty.nn.with_defaults({ device = "meta" }, models.ViT, {}, false)
  check.equal(vit:count_parameters(), 85798656) -- ViT-B/16 without its head
end)

check.test("configs and inputs that cannot be are one clear error", function()
  check.fails(function() models.ViT(with { num_attention_heads = 3 }) end,
    "ViT: num_attention_heads 3 must divide hidden_size 16")
  check.fails(function() models.ViT(with { patch_size = 9 }) end, "ViT: patch_size must be at most image_size")
  check.fails(function() models.ViT(with { hidden_act = "sine" }) end,
    "ViT: config key 'hidden_act': unknown activation 'sine'; there are gelu,")
  check.fails(function() models.ViT(with { image_sizes = 8 }) end, "ViT: no config key 'image_sizes'")
  local model = models.ViT(small)
  check.fails(function() model(ty.zeros(1, 3, 8, 8)) end,
    "ViT: pictures: expected a tensor [n, 1, height, width], got a tensor [1, 3, 8, 8]")
  check.fails(function() model(ty.zeros(1, 1, 8, 16)) end,
    "ViT: pictures: expected [n, 1, 8, 8] without the option interpolate, got a tensor [1, 1, 8, 16]")
  check.fails(function() model(ty.zeros(1, 1, 3, 8), { interpolate = true }) end,
    "ViT: pictures: expected at least a patch of 4 x 4, got a tensor [1, 1, 3, 8]")
  check.fails(function() model(ty.zeros(1, 1, 8, 8), { layer = 3 }) end,
    "ViT: layer: expected an integer in [-3, 2], got 3")
  check.fails(function() model(ty.zeros(1, 1, 8, 8), { layer = "last" }) end,
    "ViT: layer: expected an integer or a list of integers, got \"last\"")
  check.fails(function() model(ty.zeros(1, 1, 8, 8), { mask = ty.ones(1) }) end, "no option 'mask'")
end)

check.finish()
