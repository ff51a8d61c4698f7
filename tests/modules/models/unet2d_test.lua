-- The U-Nets of diffusers: the small models of tests/fixtures/diffusers (make_diffusers.py), loaded from the folders
-- that diffusers wrote; their configs as options and back.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/diffusers/"
local compare = reference.compare

-- The condition of a fixture, with gradients for what had one; other: changes of text.
local function condition(want, mask)
  local c = { labels = want.labels, sizes = want.sizes, guidance = want.guidance }
  if want.text then c.text = { embeddings = want.text, pooled = want.pooled, mask = mask } end
  return c
end

for _, name in ipairs { "unet_ddpm", "unet_adm", "unet_sd1", "unet_sdxl", "unet_upscaler" } do
  check.test(name .. ": outputs and gradients of diffusers", function()
    local model = hub.load(root .. name, { dtype = "f32" })
    local want = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
    local inputs = {}
    for key in pairs(want) do
      local input = key:match "^input_grad%.(.*)$"
      if input then
        want[input] = want[input]:detach():requires_grad_()
        inputs[#inputs + 1] = input
      end
    end
    local y = model(want.x, want.t, condition(want))
    compare(y, want.y, name)
    local loss = (y * reference.wave(y):to "f32"):sum()
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    for _, input in ipairs(inputs) do
      compare(want[input].grad, want["input_grad." .. input], "gradient for " .. input)
    end
    ty.no_grad(function()
      if want.mask then
        compare(model(want.x, want.t, condition(want, want.mask:to "bool")), want.masked, "masked text")
      end
      if want.odd then compare(model(want.odd, want.t, condition(want)), want.odd_y, "sides that 2 does not divide") end
    end)

    -- The same by the options of the U-Net, and from these the config again.
    local twin = models.UNet(model.options)
    hub.assign(twin, model:state_dict())
    compare(twin:eval()(want.x, want.t, condition(want)), want.y, name .. " of its options")
    twin:save(scratch.file(name))
    local again = hub.load(scratch.file(name))
    check.equal(getmetatable(again).__name, getmetatable(model).__name)
    compare(again(want.x, want.t, condition(want)), want.y, name .. " saved")
  end)
end

check.test("without gradients maps are given back as soon as nothing needs them", function()
  local model = models.UNet { in_channels = 4, out_channels = 4, context = 16, scale_shift = false,
    levels = { { channels = 32, attention = true }, { channels = 32, attention = true } } }
  for _, p in ipairs(model:parameters()) do ty.no_grad(p.normal_, p, 0, 0.1) end
  local x, t, text = ty.randn(2, 4, 32, 32), ty.full({ 2 }, 10.0), { embeddings = ty.randn(2, 5, 16) }
  local want = model:eval()(x, t, { text = text })
  local function memory() return ty.memory.stats().live end

  -- All at once, and tokens by the hundred; the last of them are fewer.
  local fed = model.down_blocks[1].attentions[1].transformer_blocks[1].ff
  for _, at_once in ipairs { fed.at_once, 2 * 100 * fed.inner * 4 } do
    for _, module in pairs(select(2, ty.nn.surgery.modules(model))) do
      if rawget(module, "inner") then rawset(module, "at_once", at_once) end
    end
    collectgarbage()
    collectgarbage "stop"
    local before = memory()
    ty.memory.reset_peak()
    local y = ty.no_grad(model, x, t, { text = text })
    collectgarbage "restart"
    check.equal(memory() - before, y:nbytes(), "what is left")
    check.equal((y - want):abs():max():item() <= 1e-5 * want:abs():max():item(), true)
    -- A map of the first level is 256 KiB; of the inner layer and what comes of it, all at once, twelve.
    local most = ty.memory.stats().peak - before
    check.equal(most < (at_once == fed.at_once and 24 or 18) << 18, true, ("%d bytes at the peak"):format(most))
  end
end)

check.test("what a hook keeps of a U-Net without gradients stays, of a copy as well", function()
  local model = models.UNet { in_channels = 1, levels = { { channels = 32 } } }:eval()
  local x, t, seen = ty.randn(1, 1, 8, 8), ty.tensor { 3.0 }, {}
  local function look(_, outputs) seen[#seen + 1] = outputs[1] end
  local off = model.mid_block.resnets[1]:register_forward_hook(look)
  local copy = model:clone()
  ty.no_grad(model, x, t)
  off:remove()
  ty.no_grad(copy, x, t)
  check.equal(#seen, 2)
  check.equal(seen[1]:tolist(), seen[2]:tolist())
end)

check.test("U-Nets of the house's options are written and read", function()
  local x, t = ty.randn(2, 1, 8, 8), ty.tensor { 3.0, 800.0 }
  local c = { labels = ty.tensor { 0, 4 }, text = { embeddings = ty.randn(2, 3, 6) } }
  for name, options in pairs {
    plain = { levels = { 8, { channels = 16, attention = { heads = 2 } } }, classes = 4 },
    bare = { levels = { 8, { channels = 16, layers = 1, down = "resnet" }, 16 }, middle = false, scale_shift = false,
      sines_first = true, frequency_shift = 1, eps = 1e-6, null_class = false, classes = 5 },
    text = { context = 6, levels = { 8, { channels = 16, layers = 2, attention = { heads = 2, depth = { 1, 2 } },
      up_attention = { heads = 2, depth = { 0, 2, 1 } } }, { channels = 16, attention = { heads = 4 } } } },
  } do
    local model = models.UNet(options):eval()
    ty.no_grad(function()
      for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
    end)
    model:save(scratch.file(name))
    local again = hub.load(scratch.file(name))
    check.equal(again(x, t, c):tolist(), model(x, t, c):tolist(), name)
    check.equal({ again.null_label, again.config.unknown }, { model.null_label, {} }, name)
  end
  local function fails(options, text)
    check.fails(function() models.UNet(options):save(scratch.file "never") end,
      "UNet: cannot be written as diffusers has it: " .. text)
  end
  fails({ levels = { 8, { channels = 8, layers = 2 } }, middle = false },
    "levels[2]: expected layers 1 as in the levels before, got 2")
  fails({ levels = { { channels = 8, attention = { heads = 2 } }, { channels = 16, attention = { heads = 2 } } } },
    "levels[2]: expected a width of heads of 4 as in the levels before, got 8")
  fails({ levels = { { channels = 8, attention = true } }, context = 6, middle = false },
    "middle_blocks: expected 2 with attention, 1 without, or 0, got 2 without")
  check.ok(not ty.io.exists(scratch.file "never"))
end)

local plain = { block_out_channels = { 8, 8 }, norm_num_groups = 4, layers_per_block = 1,
  down_block_types = { "DownBlock2D", "AttnDownBlock2D" }, up_block_types = { "AttnUpBlock2D", "UpBlock2D" } }
local conditional = { block_out_channels = { 8, 8 }, norm_num_groups = 4, layers_per_block = 1,
  cross_attention_dim = 6, attention_head_dim = 2,
  down_block_types = { "DownBlock2D", "CrossAttnDownBlock2D" }, up_block_types = { "CrossAttnUpBlock2D", "UpBlock2D" } }

local function with(config, changes)
  local result = {}
  for key, value in pairs(config) do result[key] = value end
  for key, value in pairs(changes) do result[key] = value end
  return result
end

check.test("what is not supported is one clear error that names the key", function()
  local function fails(class, base, changes, text)
    check.fails(function() models[class](with(base, changes)) end, class .. ": config key " .. text)
  end
  local function unet(changes, text) fails("UNet2DModel", plain, changes, text) end
  local function text_unet(changes, text) fails("UNet2DConditionModel", conditional, changes, text) end
  unet({ down_block_types = { "SkipDownBlock2D", "DownBlock2D" } },
    "'down_block_types': expected AttnDownBlock2D or DownBlock2D or ResnetDownsampleBlock2D, got SkipDown")
  unet({ up_block_types = { "CrossAttnUpBlock2D", "UpBlock2D" } }, "'up_block_types': expected AttnUpBlock2D or ")
  unet({ up_block_types = { "UpBlock2D" } }, "'up_block_types': expected as many as block_out_channels, 2, got 1")
  unet({ time_embedding_type = "fourier" }, "'time_embedding_type': expected positional, got fourier, which is not")
  unet({ attention_head_dim = 3 }, "'attention_head_dim': expected a divisor of the 8 channels of a level, g")
  unet({ norm_num_groups = ty.io.null }, "'norm_num_groups': expected a positive integer, got null, which is not")
  unet({ norm_num_groups = 3 }, "'block_out_channels': expected multiples of norm_num_groups 3, got 8")
  unet({ act_fn = "gelu" }, "'act_fn': expected silu or swish, got gelu, which is not supported")
  unet({ layers_per_block = 9000 }, "'layers_per_block': expected at most 1000 residual blocks, got 18000")
  unet({ layers_per_block = { 1, 0 } }, "'layers_per_block' must be a positive integer up to 10000 or a list of them")
  text_unet({ dual_cross_attention = true }, "'dual_cross_attention': expected false, got true, which is not support")
  text_unet({ addition_embed_type = "image" }, "'addition_embed_type': expected false or text_time, got image, which")
  text_unet({ addition_embed_type = "text_time" },
    "'projection_class_embeddings_input_dim': expected a positive integer with addition_embed_type text_time, got nil")
  text_unet({ encoder_hid_dim = 5 }, "'encoder_hid_dim': expected false, got 5, which is not supported")
  text_unet({ mid_block_type = "UNetMidBlock2DSimpleCrossAttn" }, "'mid_block_type': expected false or UNetMidBlock2DC")
  text_unet({ cross_attention_dim = { 6, 7 } }, "'cross_attention_dim': expected the same width for all levels, got")
  text_unet({ transformer_layers_per_block = { 1, 2, 3 } }, "'transformer_layers_per_block': expected as many as blo")
  text_unet({ transformer_layers_per_block = 1001 }, "'transformer_layers_per_block' must be an integer in [0, 1000]")
  check.fails(function() models.UNet2DModel(with(plain, { layer_per_block = 1 })) end,
    "UNet2DModel: no config key 'layer_per_block'")
end)

check.test("conditions that do not fit", function()
  local x, t = ty.randn(2, 4, 8, 8), ty.tensor { 3.0, 800.0 }
  local text = { embeddings = ty.randn(2, 3, 6) }
  local model = models.UNet2DConditionModel(with(conditional, { addition_embed_type = "text_time",
    addition_time_embed_dim = 4, projection_class_embeddings_input_dim = 29 }))
  local function fails(c, message) check.fails(function() model(x, t, c) end, "UNet: condition." .. message) end
  fails({}, "text.embeddings: expected [2, tokens, 6], got nil")
  fails({ text = text }, "text.pooled: expected [2, 29 less 4 for each size], got nil")
  text.pooled = ty.randn(2, 4)
  fails({ text = text }, "text.pooled: expected [2, 29 less 4 for each size], got [2, 4]")
  text.pooled = ty.randn(2, 5)
  fails({ text = text, sizes = ty.zeros(2, 5) }, "sizes: expected [2, 6] beside text.pooled [2, 5], got [2, 5]")
  fails({ text = text, sizes = ty.zeros(2, 6), guidance = ty.zeros(2, 3) },
    "guidance: expected nil (the model has no guidance_width), got [2, 3]")
  check.equal(model(x, t, { text = text, sizes = ty.zeros(2, 6) }).shape, { 2, 4, 8, 8 })
end)

check.finish()
