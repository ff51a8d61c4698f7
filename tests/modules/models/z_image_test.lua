-- Z-Image's transformer where diffusers' class says nothing: a picture to edit in the same sequence, and filling up to
-- other multiples than 32. Its values are compared in diffusers_test.lua.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local function network(more)
  ty.manual_seed(1)
  local config = { in_channels = 2, dim = 16, n_layers = 2, n_refiner_layers = 1, n_heads = 2, cap_feat_dim = 3,
    axes_dims = { 2, 2, 4 }, axes_lens = { 128, 8, 8 }, pad_multiple = 4 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = models.ZImageTransformer2DModel(config)
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.2) end
  return model
end

local x, picture, t = ty.randn(2, 2, 4, 6), ty.randn(2, 2, 4, 6), ty.tensor { 300.0, 700.0 }
local text = { embeddings = ty.randn(2, 5, 3), mask = ty.tensor { { 1, 1, 0, 0, 0 }, { 1, 1, 1, 1, 1 } }:to "bool" }

local function far(a, b) return (a - b):abs():max():item() end

check.test("a picture to edit is seen, by each sample its own, whatever the batch is", function()
  local model = network()
  local plain = model(x, t, { text = text })
  local y = model(x, t, { text = text, picture = picture })
  check.equal(y.shape, x.shape)
  check.ok(far(y, plain) > 1e-3)
  local changed = ty.concat({ picture:narrow(0, 0, 1), picture:narrow(0, 1, 1) + 1 }, 0)
  local z = model(x, t, { text = text, picture = changed })
  check.close(far(y:narrow(0, 0, 1), z:narrow(0, 0, 1)), 0, 1e-6)
  check.ok(far(y:narrow(0, 1, 1), z:narrow(0, 1, 1)) > 1e-3)
  for i = 0, 1 do
    local own = { embeddings = text.embeddings:narrow(0, i, 1):narrow(1, 0, i == 0 and 2 or 5) }
    local alone = model(x:narrow(0, i, 1), t:narrow(0, i, 1), { text = own, picture = picture:narrow(0, i, 1) })
    check.close(far(alone, y:narrow(0, i, 1)), 0, 1e-4)
  end
end)

check.test("without attention tokens are alone: x has its own time, and the picture changes nothing", function()
  local model = network()
  for name, p in pairs(model:state_dict()) do
    if name:find "attention.to_out" then p:zero_() end
  end
  local plain = model(x, t, { text = text })
  check.close(far(model(x, t, { text = text, picture = picture }), plain), 0, 1e-6)
  check.ok(far(model(x, t + 200, { text = text, picture = picture }), plain) > 1e-4)
end)

check.test("the picture's time is that of what is clean; gradients reach it", function()
  local model, seen = network(), {}
  local undo = model.t_embedder:register_forward_hook(function(_, output)
    seen[#seen + 1] = ty.is_tensor(output) and output or output[1]
  end)
  local source = picture:clone():requires_grad_()
  model(x, t, { text = text, picture = source }):square():sum():backward()
  model(x, ty.zeros(2), { text = text })
  undo()
  check.equal(#seen, 3)
  check.close(far(seen[2], seen[3]), 0, 1e-6)
  check.ok(far(seen[1], seen[2]) > 1e-3)
  check.ok(source.grad:abs():max():item() > 0)
end)

check.test("filling up: to a multiple of 1 nothing is added; more is seen", function()
  local one, four = network { pad_multiple = 1 }, network { pad_multiple = 4 }
  local full = { embeddings = text.embeddings:narrow(1, 0, 4) } -- 4 words, 2 x 3 patches
  check.ok(far(one(x, t, { text = full }), four(x, t, { text = full })) > 1e-4)
  local square, words = ty.randn(2, 2, 4, 4), { text = full } -- 4 and 4: nothing to fill up either way
  check.close(far(one(square, t, words), four(square, t, words)), 0, 1e-6)
  check.equal(models.ZImageTransformer2DModel { in_channels = 2, dim = 8, n_layers = 1, n_refiner_layers = 1,
    n_heads = 1, cap_feat_dim = 2, axes_dims = { 4, 2, 2 } }.config.pad_multiple, 32)
end)

check.test("what is refused", function()
  local model = network()
  check.fails(function() model(x, t, { text = text, picture = ty.ones(2, 2, 4, 4) }) end,
    "condition.picture: expected [2, 2, 4, 6] as x, got a tensor [2, 2, 4, 4]")
  check.fails(function() model(x, t, { text = text, picture = 3 }) end, "condition.picture: expected [2, 2, 4, 6]")
  check.fails(function() network { axes_lens = { 10, 8, 8 } }(x, t, { text = text, picture = picture }) end,
    "condition.text: expected at most 10 places (config key 'axes_lens'), got 11")
end)

check.finish()
