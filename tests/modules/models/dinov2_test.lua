-- DINOv2 against transformers: the small models of tests/fixtures/vision (make_vision.py), loaded from the folders that
-- transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/vision/"
local compare, load = reference.compare, reference.vision

for _, name in ipairs { "dinov2", "dinov2_registers" } do check.test(name .. ": hidden states, pooled outputs and "
  .. "gradients of transformers, at every size", function()
  local model, want = load(name)
  local x = want.x:detach():requires_grad_()
  local hidden, pooled = model(x)
  compare(hidden, want.last, "after the last norm")
  compare(pooled, want.pooled, "pooled")
  local loss = (hidden * reference.wave(hidden):to "f32"):sum() + (pooled * reference.wave(pooled):to "f32"):sum()
  check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
  -- The token of a mask is not used.
  check.equal(reference.compare_gradients(model, loss, want), { ["embeddings.mask_token"] = true }, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
  for i = 0, 3 do
    compare(model:hidden(x, { layer = i }), want["hidden." .. i], "layer " .. i)
    compare(model:hidden(x, { layer = i - 4, checkpoint = true }), want["hidden." .. i], "layer " .. i - 4)
  end
  for i = 0, 2 do compare(model:hidden(want["other." .. i]), want["other_last." .. i], "another size " .. i) end
  compare(model:hidden(x, { mask = want.hidden_patches }), want.masked, "hidden patches")
  if name == "dinov2_registers" then check.equal(model.embeddings.register_tokens.shape, { 1, 3, 24 }) end
end) end

for _, kind in ipairs { "dinov2", "dinov2_registers" } do check.test(kind .. ": a classifier with gated layers: "
  .. "logits, loss, gradients", function()
  local model, want = load(kind .. "_classifier")
  local x = want.x:detach():requires_grad_()
  compare(model(x), want.logits, "logits")
  local loss = model:loss(x, want.labels)
  check.close(loss:item(), want.bce:item(), 1e-5)
  local left = reference.compare_gradients(model, loss * math.sin(1), want)
  check.equal(left, { [model.model_type .. ".embeddings.mask_token"] = true }, "gradients left")
  compare(x.grad, want["input_grad.x"], "gradient for the pictures")
end) end

check.test("with registers: written and read again; the body of a classifier's folder", function()
  local model, want = load "dinov2_registers"
  local path = os.tmpname()
  os.remove(path)
  model:save(path)
  compare(hub.load(path, { dtype = "f32" })(want.x), want.last, "after the last norm")
  for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
  os.remove(path)
  local body = hub.load(root .. "dinov2_registers_classifier", { dtype = "f32",
    config = { architectures = { "Dinov2WithRegistersModel" } } })
  check.equal({ getmetatable(body).__name, #body.report.left_out }, { "Dinov2WithRegisters", 2 })
end)

check.test("defaults are the published sizes; rows are left out in training alone", function()
  local base = ty.nn.with_defaults({ device = "meta" }, models.Dinov2, { image_size = 518 })
  check.equal(base:count_parameters(), 86580480) -- DINOv2-B/14
  base = ty.nn.with_defaults({ device = "meta" }, models.Dinov2WithRegisters, { image_size = 518, patch_size = 14 })
  check.equal(base:count_parameters(), 86580480 + 4 * 768)
  ty.manual_seed(1)
  local model = models.Dinov2 { image_size = 4, patch_size = 2, hidden_size = 8, num_hidden_layers = 2,
    num_attention_heads = 2, drop_path_rate = 0.5 }
  local x = ty.randn(4, 3, 4, 4)
  check.ok((model(x) - model(x)):abs():max():item() > 1e-4)
  model:eval()
  check.equal(model(x):tolist(), model(x):tolist())
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local small = { image_size = 4, patch_size = 2, hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2 }
  local function fails(changes, words)
    local config = {}
    for key, value in pairs(small) do config[key] = value end
    for key, value in pairs(changes) do config[key] = value end
    check.fails(function() models.Dinov2(config) end, words)
  end
  fails({ num_attention_heads = 3 }, "Dinov2: num_attention_heads 3 must divide hidden_size 8")
  fails({ mlp_ratio = 0.1 }, "Dinov2: config key 'mlp_ratio'")
  fails({ drop_path_rate = 1 }, "Dinov2: config key 'drop_path_rate' must be a number below 1, got 1")
  check.fails(function() models.Dinov2WithRegisters { num_register_tokens = 0 } end,
    "Dinov2WithRegisters: config key 'num_register_tokens' must be a positive integer, got 0")
  local model = models.Dinov2(small)
  check.fails(function() model(ty.zeros(1, 1, 4, 4)) end, "Dinov2: pictures: expected a tensor [n, 3, height, width]")
  check.fails(function() model(ty.zeros(1, 3, 1, 4)) end, "Dinov2: pictures: expected at least a patch of 2 x 2")
end)

check.finish()
