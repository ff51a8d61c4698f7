-- SD3Transformer2DModel against diffusers: the small models of tests/fixtures/diffusers (make_diffusers.py), loaded
-- from the folders that diffusers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/diffusers/"
local compare = reference.compare

for _, name in ipairs { "sd3", "sd35" } do
  check.test(name .. ": outputs and gradients of diffusers", function()
    local model = hub.load(root .. name, { dtype = "f32" })
    local want = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
    local inputs = {}
    for _, key in ipairs { "x", "text", "pooled" } do inputs[key] = want[key]:detach():requires_grad_() end
    local c = { text = { embeddings = inputs.text, pooled = inputs.pooled } }
    local y = model(inputs.x, want.t, c)
    compare(y, want.y, name)
    local loss = (y * reference.wave(y):to "f32"):sum()
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    for key, x in pairs(inputs) do compare(x.grad, want["input_grad." .. key], "gradient for " .. key) end
    ty.no_grad(function()
      compare(model(want.other, want.t, c), want.other_y, "another size")

      -- Text that the mask hides is as if it were not there.
      local short = { text = { embeddings = want.text:narrow(1, 0, 3), pooled = want.pooled } }
      local masked = { text = { embeddings = want.text, pooled = want.pooled,
        mask = ty.tensor({ { 1, 1, 1, 0, 0 }, { 1, 1, 1, 0, 0 } }):to "bool" } }
      compare(model(want.x, want.t, masked), model(want.x, want.t, short), "masked text")
    end)

    -- The places are those of the file without it, too.
    local fresh = hub.load(root .. name, { weights = false })
    compare(fresh.pos_embed.pos_embed, model.pos_embed.pos_embed, "places")
  end)
end

local small = { sample_size = 8, in_channels = 4, num_layers = 2, attention_head_dim = 8, num_attention_heads = 2,
  joint_attention_dim = 6, pooled_projection_dim = 5, pos_embed_max_size = 8 }

local function with(changes)
  local config = {}
  for key, value in pairs(small) do config[key] = value end
  for key, value in pairs(changes) do config[key] = value end
  return config
end

check.test("a new one is zero and learns", function()
  ty.manual_seed(2)
  local model = models.SD3Transformer2DModel(small)
  local x, t = ty.randn(2, 4, 8, 8), ty.tensor { 3.0, 800.0 }
  local c = { text = { embeddings = ty.randn(2, 3, 6), pooled = ty.randn(2, 5) } }
  check.equal(model(x, t, c):abs():max():item(), 0)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 3e-3 })
  local first, last
  for _ = 1, 40 do
    local loss = (model(x, t, c) - x):square():mean()
    opt:step(loss)
    last = loss:item()
    first = first or last
  end
  check.ok(last < 0.5 * first, ("from %.3f to %.3f"):format(first, last))
end)

check.test("compiled, it computes the same", function()
  local model = models.SD3Transformer2DModel(with { qk_norm = "rms_norm", dual_attention_layers = { 1 } }):eval()
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
    local text = { embeddings = ty.randn(2, 3, 6), pooled = ty.randn(2, 5) }
    local compiled = ty.compile(function(x, t) return model(x, t, { text = text }) end)
    for i = 1, 3 do
      local x, t = ty.randn(2, 4, 8, 8), ty.tensor { 100.0 * i, 800.0 }
      check.equal(compiled(x, t):tolist(), model(x, t, { text = text }):tolist())
    end
  end)
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local function fails(changes, text)
    check.fails(function() models.SD3Transformer2DModel(with(changes)) end, "SD3Transformer2DModel: " .. text)
  end
  fails({ qk_norm = "layer_norm" }, "config key 'qk_norm': expected false or rms_norm, got layer_norm, which is not")
  fails({ caption_projection_dim = 20 }, "config key 'caption_projection_dim': expected 16, got 20, which is not supp")
  fails({ dual_attention_layers = { -1 } }, "config key 'dual_attention_layers' must be a list of integers >= 0, got")
  fails({ attention_head_dim = 3, num_attention_heads = 1 },
    "num_attention_heads * attention_head_dim: expected a multiple of 4, got 3")
  local model = models.SD3Transformer2DModel(small)
  local x, t = ty.randn(2, 4, 8, 8), ty.tensor { 3.0, 800.0 }
  local function wrong(text, picture, c)
    check.fails(function() model(picture or x, t, c) end, "SD3Transformer2DModel: " .. text)
  end
  local text = { embeddings = ty.randn(2, 3, 6) }
  wrong("condition.text.embeddings: expected [2, tokens, 6], got nil")
  wrong("condition.text.pooled: expected [2, 5], got nil", nil, { text = text })
  text.pooled = ty.randn(2, 5)
  wrong("x: expected sides that patch_size 2 divides, up to 16, got a tensor [2, 4, 8, 18]", ty.randn(2, 4, 8, 18),
    { text = text })
  wrong("x: expected [n, 4, h, w], got a tensor [2, 3, 8, 8]", ty.randn(2, 3, 8, 8), { text = text })
  text.mask = ty.ones(2, 4)
  wrong("condition.text.mask: expected [2, 3] or nil, got a tensor [2, 4]", nil, { text = text })
end)

check.finish()
