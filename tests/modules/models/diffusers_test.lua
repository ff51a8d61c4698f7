-- Flux, Z-Image, Wan, DiT, PixArt, ControlNet, the small autoencoder against diffusers: the models of
-- tests/fixtures/diffusers (make_diffusers.py), loaded from the folders that diffusers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/diffusers/"
local compare = reference.compare

-- A fixture's model and figures; the figures that have a gradient are made to take one.
local function load(name)
  local model = hub.load(root .. name, { dtype = "f32" })
  local want, inputs = ty.io.load_safetensors(root .. name .. "/expected.safetensors"), {}
  check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} }, name)
  for key in pairs(want) do
    local input = key:match "^input_grad%.(.*)$"
    if input then
      want[input] = want[input]:detach():requires_grad_()
      inputs[#inputs + 1] = input
    end
  end
  return model, want, inputs
end

-- The loss of outputs, its gradients for the model and for the inputs.
local function gradients(name, model, want, inputs, outputs)
  local loss
  for _, y in ipairs(outputs) do
    local part = (y * reference.wave(y):to "f32"):sum()
    loss = loss and loss + part or part
  end
  check.close(loss:item(), want.loss:item(), 1e-4 * math.max(math.abs(want.loss:item()), 1), name .. " loss")
  check.equal(reference.compare_gradients(model, loss, want), {}, name .. " gradients left")
  for _, input in ipairs(inputs) do
    compare(want[input].grad, want["input_grad." .. input], name .. " gradient for " .. input)
  end
end

for _, name in ipairs { "flux", "flux_schnell" } do
  check.test(name .. ": outputs and gradients of diffusers", function()
    local model, want, inputs = load(name)
    local c = { text = { embeddings = want.text, pooled = want.pooled }, guidance = want.guidance,
      places = want.places }
    local y = model(want.x, want.t, c)
    compare(y, want.y, name)
    gradients(name, model, want, inputs, { y })
    ty.no_grad(function()
      c.places = want.elsewhere
      compare(model(want.x, want.t, c), want.elsewhere_y, name .. ": other places")
      -- The same as maps: 4 x 6 patches of 2 x 2.
      local n, width = 2, want.x.shape[3] // 4
      local map = want.x:reshape(n, 4, 6, width, 2, 2):permute(0, 3, 1, 4, 2, 5):reshape(n, width, 8, 12)
      c.places = nil
      local out = model(map, want.t, c)
      width = want.y.shape[3] // 4
      compare(out, want.y:reshape(n, 4, 6, width, 2, 2):permute(0, 3, 1, 4, 2, 5):reshape(n, width, 8, 12),
        name .. ": maps")
    end)
  end)
end

check.test("z_image: outputs and gradients of diffusers", function()
  local model, want, inputs = load "z_image"
  local text = { embeddings = want.text }
  local y = model(want.x, want.t, { text = text })
  compare(y, want.y, "z_image")
  gradients("z_image", model, want, inputs, { y })
  ty.no_grad(function()
    compare(model(want.other, want.t, { text = text }), want.other_y, "another size")
    text.mask = want.mask
    local masked = model(want.x, want.t, { text = text })
    compare(masked, want.masked, "a short text beside a long one")
    -- What fills the short text up is not seen.
    local filled = { embeddings = want.text:clone(), mask = want.mask }
    filled.embeddings[1]:narrow(0, 7, 28):fill_(5)
    check.equal(model(want.x, want.t, { text = filled }):tolist(), masked:tolist())
    local alone = model(want.x[1]:unsqueeze(0), want.t:narrow(0, 1, 1),
      { text = { embeddings = want.text[1]:narrow(0, 0, 7):unsqueeze(0) } })
    check.close(alone[0]:tolist(), masked[1]:tolist(), 1e-5)
  end)
  local c = { text = { embeddings = want.text } }
  check.fails(function() model(want.x:narrow(2, 0, 5), want.t, c) end,
    "ZImageTransformer2DModel: x: expected sides that patch_size 2 divides, got")
  check.fails(function() model(ty.zeros(2, 3, 40, 8), want.t, c) end,
    "ZImageTransformer2DModel: x: expected at most 16 places (config key 'axes_lens'), got 20")
  check.fails(function() model(want.x, want.t, { text = { embeddings = want.text:narrow(2, 0, 5) } }) end,
    "ZImageTransformer2DModel: condition.text.embeddings: expected [2, tokens, 6], got")
end)

for _, name in ipairs { "wan", "wan_frames" } do
  check.test(name .. ": outputs and gradients of diffusers", function()
    local model, want, inputs = load(name)
    local text = { embeddings = want.text }
    local y = model(want.x, want.t, { text = text })
    compare(y, want.y, name)
    gradients(name, model, want, inputs, { y })
    ty.no_grad(function()
      compare(model(want.other, want.t, { text = text }), want.other_y, name .. ": another size")
      -- What the mask leaves out is not seen.
      local short = { embeddings = want.text:narrow(1, 0, 3) }
      local masked = { embeddings = want.text, mask = ty.tensor { { 1, 1, 1, 0, 0 }, { 1, 1, 1, 0, 0 } } }
      check.close(model(want.x, want.t, { text = masked }):tolist(), model(want.x, want.t, { text = short }):tolist(),
        1e-5)
    end)
  end)
end

check.test("dit: outputs and gradients of diffusers", function()
  local model, want, inputs = load "dit"
  local y = model(want.x, want.t, { labels = want.labels })
  compare(y, want.y, "dit")
  gradients("dit", model, want, inputs, { y })
  check.equal(model.null_label, 4)
  ty.no_grad(function() compare(model(want.other, want.t, { labels = want.labels }), want.other_y, "another size") end)
end)

for _, name in ipairs { "pixart", "pixart_sigma" } do
  check.test(name .. ": outputs and gradients of diffusers", function()
    local model, want, inputs = load(name)
    local c = { text = { embeddings = want.text, mask = want.mask }, sizes = want.sizes }
    local y = model(want.x, want.t, c)
    compare(y, want.y, name)
    gradients(name, model, want, inputs, { y })
    ty.no_grad(function() compare(model(want.other, want.t, c), want.other_y, name .. ": another size") end)
  end)
end

check.test("autoencoder_tiny: outputs and gradients of diffusers", function()
  local model, want, inputs = load "autoencoder_tiny"
  local mean, y = model:encode(want.x):mode(), model:decode(want.z)
  compare(mean, want.mean, "latents")
  compare(y, want.y, "pictures")
  gradients("autoencoder_tiny", model, want, inputs, { mean, y })
  ty.no_grad(function()
    -- diffusers' forward keeps the latents as bytes on the way.
    local bytes = model:to_bytes(want.mean)
    check.equal(bytes.dtype, "u8")
    compare(model:decode(model:from_bytes(bytes)), want.both, "by way of bytes")
    compare(model:unscale(model:scale(want.z)), want.z, "scaled and back")
    check.close(model:scale(want.z):tolist(), ((want.z - 0.1) * 1.5):tolist(), 1e-6)
    check.equal(model:encode(want.x):std():abs():max():item(), 0)
    compare((model(want.x)), model:decode(want.mean), "forward")
  end)
end)

for _, name in ipairs { "controlnet", "controlnet_sd1" } do
  check.test(name .. ": residuals and gradients of diffusers", function()
    local model, want, inputs = load(name)
    local c = { text = { embeddings = want.text, pooled = want.pooled }, sizes = want.sizes, control = want.control }
    local got = model(want.x, want.t, c)
    local outputs = { table.unpack(got.down) }
    outputs[#outputs + 1] = got.middle
    for i, y in ipairs(outputs) do compare(y, want["out" .. i - 1], ("%s: residual %d"):format(name, i)) end
    check.ok(not want["out" .. #outputs])
    gradients(name, model, want, inputs, outputs)
    if not want.controlled then return end
    ty.no_grad(function()
      local unet = hub.load(root .. "unet_sdxl", { dtype = "f32" })
      local function with(picture, strength)
        return model(want.x, want.t, { text = c.text, sizes = c.sizes, control = picture }, strength)
      end
      local one, two = with(want.control, 0.7), with(want.control2, 1.3)
      local sum = { down = {}, middle = one.middle + two.middle }
      for i, map in ipairs(one.down) do sum.down[i] = map + two.down[i] end
      compare(unet(want.x, want.t, { text = c.text, sizes = c.sizes, residuals = sum }), want.controlled, "controlled")
      check.fails(function() unet(want.x, want.t, { text = c.text, sizes = c.sizes, residuals = { down = {} } }) end,
        "UNet: condition.residuals: expected { down = 4 tensors, middle = a tensor }, got 0 tensors")
    end)
  end)
end

local small = {
  WanTransformer3DModel = { num_attention_heads = 1, attention_head_dim = 8, in_channels = 2, out_channels = 2,
    text_dim = 6, freq_dim = 8, ffn_dim = 16, num_layers = 1 },
  ZImageTransformer2DModel = { in_channels = 2, dim = 8, n_layers = 1, n_refiner_layers = 1, n_heads = 1,
    cap_feat_dim = 6, axes_dims = { 4, 2, 2 }, axes_lens = { 64, 8, 8 } },
  FluxTransformer2DModel = { in_channels = 8, num_layers = 1, num_single_layers = 1, attention_head_dim = 8,
    num_attention_heads = 2, joint_attention_dim = 6, pooled_projection_dim = 5, axes_dims_rope = { 2, 2, 4 } },
  DiTTransformer2DModel = { sample_size = 8, in_channels = 2, num_layers = 1, attention_head_dim = 4,
    num_attention_heads = 2, num_embeds_ada_norm = 3 },
  PixArtTransformer2DModel = { sample_size = 8, in_channels = 2, out_channels = 2, num_layers = 1,
    attention_head_dim = 6, num_attention_heads = 2, cross_attention_dim = 12, caption_channels = 6,
    use_additional_conditions = true },
  ControlNetModel = { block_out_channels = { 8, 8 }, layers_per_block = 1, norm_num_groups = 4, attention_head_dim = 2,
    cross_attention_dim = 6, down_block_types = { "DownBlock2D", "CrossAttnDownBlock2D" },
    conditioning_embedding_out_channels = { 4, 4 } },
  AutoencoderTiny = { encoder_block_out_channels = { 4, 4 }, decoder_block_out_channels = { 4, 4 },
    num_encoder_blocks = { 1, 1 }, num_decoder_blocks = { 1, 1 } },
}

local function make(class, changes)
  local config = {}
  for _, part in ipairs { small[class], changes or {} } do
    for key, value in pairs(part) do config[key] = value end
  end
  return models[class](config)
end

local latents, t = ty.randn(2, 2, 8, 8), ty.tensor { 3.0, 800.0 }
local conditions = {
  WanTransformer3DModel = { text = { embeddings = ty.randn(2, 3, 6) } },
  ZImageTransformer2DModel = { text = { embeddings = ty.randn(2, 3, 6) } },
  FluxTransformer2DModel = { text = { embeddings = ty.randn(2, 3, 6), pooled = ty.randn(2, 5) } },
  DiTTransformer2DModel = { labels = ty.tensor { 0, 3 } },
  PixArtTransformer2DModel = { text = { embeddings = ty.randn(2, 3, 6) }, sizes = ty.ones(2, 3) },
}

for class, c in pairs(conditions) do
  check.test(class .. ": a new one is zero and learns; compiled, it computes the same", function()
    ty.manual_seed(2)
    local model = make(class)
    local x = class:find "3D" and latents:unsqueeze(2) or latents
    check.equal(model(x, t, c):abs():max():item(), 0)
    local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
    local first, last
    for _ = 1, 40 do
      local loss = (model(x, t, c) - x):square():mean()
      opt:step(loss)
      last = loss:item()
      first = first or last
    end
    check.ok(last < 0.5 * first, ("from %.3f to %.3f"):format(first, last))
    ty.no_grad(function()
      model:eval()
      local compiled = ty.compile(function(a, b) return model(a, b, c) end)
      for i = 1, 3 do
        local a = ty.randn_like(x)
        check.equal(compiled(a, t * i):tolist(), model(a, t * i, c):tolist())
      end
    end)
  end)
end

check.test("a new ControlNet changes nothing", function()
  local model = make "ControlNetModel"
  local residuals = model(ty.randn(2, 4, 8, 8), t, { text = { embeddings = ty.randn(2, 3, 6) },
    control = ty.rand(2, 3, 16, 16) })
  check.equal(#residuals.down, 4)
  for _, map in ipairs(residuals.down) do check.equal(map:abs():max():item(), 0) end
  check.equal(residuals.middle.shape, { 2, 8, 4, 4 })
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local function fails(class, changes, text)
    check.fails(function() make(class, changes) end, class .. ": " .. text)
  end
  fails("FluxTransformer2DModel", { axes_dims_rope = { 2, 2, 2 } },
    "config key 'axes_dims_rope': expected three numbers with the sum attention_head_dim 8, got 2, 2, 2")
  fails("FluxTransformer2DModel", { axes_dims_rope = { 1, 3, 4 } },
    "config key 'axes_dims_rope': expected even numbers, got 1")
  fails("FluxTransformer2DModel", { patch_size = 2 }, "config key 'patch_size': expected 1, got 2, which is not supp")
  fails("DiTTransformer2DModel", { norm_type = "ada_norm" }, "config key 'norm_type': expected ada_norm_zero, got ada_")
  fails("DiTTransformer2DModel", { sample_size = 7 }, "patch_size 2 must divide sample_size 7")
  fails("DiTTransformer2DModel", { attention_head_dim = 3 }, "num_attention_heads * attention_head_dim: expected a mul")
  fails("PixArtTransformer2DModel", { attention_head_dim = 4 },
    "num_attention_heads * attention_head_dim: expected a multiple of 12, got 8")
  fails("PixArtTransformer2DModel", { cross_attention_dim = 9 },
    "config key 'cross_attention_dim': expected 12 beside caption_channels, got 9")
  fails("PixArtTransformer2DModel", { interpolation_scale = 0 }, "config key 'interpolation_scale': expected a number")
  fails("AutoencoderTiny", { num_decoder_blocks = { 1 } },
    "config key 'num_decoder_blocks': expected one for each of 2 levels, got 1 and 2 in decoder_block_out_channels")
  fails("AutoencoderTiny", { encoder_block_out_channels = { 4, 5 } },
    "config key 'encoder_block_out_channels': expected the same for all levels, 4, got 5")
  fails("AutoencoderTiny", { act_fn = "tanh" }, "config key 'act_fn': expected relu or silu or swish or gelu, got tanh")
  fails("ControlNetModel", { controlnet_conditioning_channel_order = "gbr" },
    "config key 'controlnet_conditioning_channel_order': expected rgb or bgr, got gbr")
  fails("ControlNetModel", { down_block_types = { "DownBlock2D" } },
    "config key 'down_block_types': expected as many as block_out_channels, 2, got 1")

  local function wrong(class, text, picture, condition)
    check.fails(function() make(class)(picture or latents, t, condition) end, class .. ": " .. text)
  end
  local flux = conditions.FluxTransformer2DModel
  wrong("FluxTransformer2DModel", "x: expected [n, 2, h, w] or [n, tokens, 8], got a tensor [2, 3, 8, 8]",
    ty.randn(2, 3, 8, 8), flux)
  wrong("FluxTransformer2DModel", "x: expected even sides, got a tensor [2, 2, 8, 7]", ty.randn(2, 2, 8, 7), flux)
  wrong("FluxTransformer2DModel", "condition.places: expected [4, 3] beside packed x, got nil", ty.randn(2, 4, 8), flux)
  wrong("FluxTransformer2DModel", "condition.text.embeddings: expected [2, tokens, 6], got nil")
  wrong("FluxTransformer2DModel", "condition.guidance: expected nil (the config has no guidance_embeds), got a tensor",
    nil, { text = flux.text, guidance = ty.ones(2) })
  check.fails(function() make("FluxTransformer2DModel", { guidance_embeds = true })(latents, t, flux) end,
    "condition.guidance: expected [2] (the config has guidance_embeds), got nil")
  wrong("DiTTransformer2DModel", "condition.labels: expected i64 [2] (3 for any class), got nil")
  wrong("DiTTransformer2DModel", "x: expected sides that patch_size 2 divides, got a tensor [2, 2, 8, 7]",
    ty.randn(2, 2, 8, 7), conditions.DiTTransformer2DModel)
  wrong("PixArtTransformer2DModel", "condition.sizes: expected [2, 3]: height, width, height / width, got nil", nil,
    { text = conditions.PixArtTransformer2DModel.text })
  wrong("PixArtTransformer2DModel", "condition.text.mask: expected [2, 3] or nil, got a tensor [2, 4]", nil,
    { text = { embeddings = ty.randn(2, 3, 6), mask = ty.ones(2, 4) } })
  wrong("ControlNetModel", "condition.control: expected [2, 3, 16, 16], got nil", ty.randn(2, 4, 8, 8),
    { text = { embeddings = ty.randn(2, 3, 6) } })
  local autoencoder = make "AutoencoderTiny"
  check.fails(function() autoencoder:encode(ty.zeros(1, 3, 7, 8)) end,
    "AutoencoderTiny:encode: x: expected a height and a width that 2 divides, got a tensor [1, 3, 7, 8]")
  check.fails(function() autoencoder:decode(ty.zeros(1, 3, 7, 8)) end,
    "AutoencoderTiny:decode: z: expected [n, 4, h, w], got a tensor [1, 3, 7, 8]")
end)

check.finish()
