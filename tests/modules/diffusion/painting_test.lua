-- Pictures changed in whole and in part, beside diffusers' pipelines (tests/fixtures/make_painting.py); seeds, words,
-- schedulers by name.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, hub, models = require "tycho.diffusion", require "tycho.hub", require "tycho.models"

local root = check.root .. "tests/fixtures/"
local expected = ty.io.load_safetensors(root .. "painting.safetensors")
local unet = hub.load(root .. "diffusers/unet_sd1", { dtype = "f32" })
local vae = hub.load(root .. "diffusers/autoencoder", { dtype = "f32" })
local clip = ty.tokenizer.load(root .. "tokenizers/clip.json")
ty.tokenizer.fields(clip).max_length, ty.tokenizer.fields(clip).pad = 7, 1

local stable = { beta_schedule = "scaled_linear", beta_start = 0.00085, beta_end = 0.012 }
local function scheduler(name, more)
  local config = { _class_name = name .. "Scheduler" }
  for _, t in ipairs { stable, more or {} } do
    for key, value in pairs(t) do config[key] = value end
  end
  return config
end
local ddim = scheduler("DDIM", { clip_sample = false, set_alpha_to_one = false, steps_offset = 1 })

-- A text encoder of the U-Net's width, for a small table of tokens' own.
ty.manual_seed(2)
local function encoder()
  return models.CLIPTextModel { vocab_size = 1200, hidden_size = unet.context, intermediate_size = 16,
    num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 7, eos_token_id = 1 }:eval()
end

local function painter(config, network)
  return diffusion.TextToImage { components = { unet = network or unet, vae = vae, tokenizer = clip,
    text_encoder = encoder(), scheduler = config or ddim } }
end

-- A painter whose prompts "0" and "1" are the fixture's embeddings, whose negative prompt is its null, and whose
-- picture is encoded as its start.
local function recorded(config)
  local p = painter(config)
  function p:condition(prompts) -- luacheck: ignore 212
    local rows = {}
    for i, prompt in ipairs(prompts) do
      local from = prompt == "" and expected.null or expected.embeddings
      rows[i] = from:narrow(0, tonumber(prompt) or i - 1, 1)
    end
    return { text = { embeddings = ty.concat(rows, 0) } }
  end
  function p:null() return self:condition { "", "" } end
  function p:encode() return expected.start end -- luacheck: ignore 212
  return p
end

local function same(name, config, options)
  local o = { guidance = 3, noise = expected.noise, height = 16, width = 16 }
  for key, value in pairs(options) do o[key] = value end
  local _, latents = recorded(config):paint({ "0", "1" }, o)
  local wanted = expected[name .. ".latents"]
  local off = (latents - wanted):abs():max():item() / wanted:abs():max():item()
  check.ok(off < 2e-5, ("%s: latents differ by %.2g"):format(name, off))
end

local blank = ty.zeros(2, 3, 16, 16)

check.test("a picture is changed as diffusers changes it", function()
  same("change_ddim", ddim, { image = blank, strength = 0.6, steps = 5 })
  same("change_euler", scheduler "EulerDiscrete", { image = blank, strength = 0.75, steps = 8 })
  same("change_dpm", scheduler "DPMSolverMultistep", { image = blank, strength = 0.5, steps = 8 })
end)

check.test("a part of a picture is painted as diffusers paints it", function()
  for name, config in pairs { ddim = ddim, euler = scheduler "EulerDiscrete" } do
    for _, strength in ipairs { 1.0, 0.6 } do
      same(("inpaint_%s_%.1f"):format(name, strength), config, { image = blank, mask = expected.mask, steps = 5,
        strength = strength < 1 and strength or nil })
    end
  end
end)

check.test("guidance is rescaled as diffusers rescales it", function()
  same("rescaled", ddim, { steps = 4, rescale = 0.7 })
end)

check.test("what the mask leaves stays, also of one picture and one mask for all prompts", function()
  local p = painter()
  local image, mask = ty.randint(0, 256, { 1, 3, 16, 16 }):to "u8", ty.zeros(1, 1, 16, 16)
  mask:narrow(3, 8, 8):fill_(1)
  local _, latents = p:paint({ "a", "b" }, { image = image, mask = mask, steps = 3 })
  local clean = p:encode(image)
  for i = 0, 1 do
    check.equal(latents:narrow(0, i, 1):narrow(3, 0, 4):tolist(), clean:narrow(3, 0, 4):tolist())
    check.ok(latents:narrow(0, i, 1):narrow(3, 4, 4):ne(clean:narrow(3, 4, 4)):all():item())
  end
end)

check.test("a network that was trained for it sees mask and picture", function()
  local seen = {}
  local network = setmetatable({ config = { in_channels = 9, sample_size = 8 } }, { __call = function(_, x)
    seen[#seen + 1] = ty.keep(x)
    return x:narrow(1, 0, 4) * 0.1
  end })
  function network:device() return "cpu" end -- luacheck: ignore 212
  function network:parameters() return {} end -- luacheck: ignore 212
  local p = painter(ddim, network)
  local image, mask = ty.rand(2, 3, 16, 16) * 2 - 1, ty.zeros(1, 1, 16, 16)
  mask:narrow(2, 4, 8):fill_(1)
  p:paint({ "a", "b" }, { image = image, mask = mask, steps = 2 })
  check.equal({ #seen, seen[1].shape }, { 2, { 4, 9, 8, 8 } })
  local masked = p:encode(image * (1 - mask))
  for i = 0, 1 do -- both branches
    local half = seen[2]:narrow(0, 2 * i, 2)
    check.equal(half:narrow(1, 4, 1):tolist(), ty.concat({ mask, mask }, 0)[":, :, ::2, ::2"]:tolist())
    check.close(half:narrow(1, 5, 4):tolist(), masked:tolist(), 1e-6)
  end
  check.fails(function() p:paint({ "a" }, {}) end, "image: expected one, for a network that paints parts anew, got nil")
end)

check.test("a picture depends on its own seed alone, with fresh noise in the steps too", function()
  for _, name in ipairs { "ddim", "euler_a", "dpmpp_2m_sde", "lcm" } do
    local p = painter():use(name)
    local _, both = p:paint({ "a fox", "two", "a fox" }, { steps = 3, seed = { 5, 9, 5 } })
    local _, alone = p:paint({ "two" }, { steps = 3, seed = 9 })
    check.close(both:narrow(0, 1, 1):tolist(), alone:tolist(), 1e-4, name)
    check.close(both:narrow(0, 0, 1):tolist(), both:narrow(0, 2, 1):tolist(), 1e-4, name)
    local _, counted = p:paint({ "x", "two" }, { steps = 3, seed = 8, batch = 1 })
    check.close(counted:narrow(0, 1, 1):tolist(), alone:tolist(), 1e-4, name)
  end
end)

check.test("a negative prompt for each; guidance as a value; steps that end early", function()
  local p = painter()
  local _, one = p:paint({ "a", "a" }, { steps = 2, seed = { 1, 1 }, negative = { "b", "c" } })
  local _, two = p:paint({ "a", "a" }, { steps = 2, seed = { 1, 1 }, negative = "c" })
  check.close(one:narrow(0, 1, 1):tolist(), two:narrow(0, 1, 1):tolist(), 1e-4)
  check.ok((one - two):narrow(0, 0, 1):abs():max():item() > 1e-6)
  local _, value = p:paint({ "a" }, { steps = 2, guidance = diffusion.guidance.classifier_free { scale = 4 } })
  local _, number = p:paint({ "a" }, { steps = 2, guidance = 4 })
  check.equal(value:tolist(), number:tolist())
  local steps = 0
  check.equal(p:paint({ "a" }, { steps = 5, on_step = function(i)
    steps = i
    return i < 2
  end }).shape, { 1, 3, 16, 16 })
  check.equal(steps, 2)
end)

check.test("schedulers by name", function()
  local p = painter()
  for _, name in ipairs { "ddim", "ddpm", "pndm", "lms", "euler", "euler_a", "heun", "dpm2", "dpmpp_2m", "dpmpp_3m",
    "dpmpp_2m_sde", "unipc", "deis", "lcm", "dpmpp_2m_karras", "euler_beta", "unipc_exponential" } do
    local _, latents = p:use(name):paint({ "a" }, { steps = 4 })
    check.ok(latents:isfinite():all():item(), name)
    check.equal(p.process.schedule.alpha_bar[500] < 0.5, true, name) -- that of the network
  end
  local flow = painter { _class_name = "FlowMatchEulerDiscreteScheduler", shift = 3.0 }
  for _, name in ipairs { "euler", "heun", "dpmpp_2m", "unipc", "deis", "euler_karras" } do
    local _, latents = flow:use(name):paint({ "a" }, { steps = 4 })
    check.ok(latents:isfinite():all():item(), name)
    check.equal(flow.process.schedule.shift, 3.0, name)
    flow:use { _class_name = "FlowMatchEulerDiscreteScheduler", shift = 3.0 }
  end
  check.fails(function() p:use "dpm9" end, "TextToImage:use: name: expected one of ddim, ddpm, deis, ")
end)

check.test("what is wrong is one clear error", function()
  local p, image = painter(), ty.zeros(1, 3, 16, 16)
  for text, options in pairs {
    ["mask: expected the size of image, 16 x 16, got"] = { image = image, mask = ty.zeros(1, 1, 8, 8) },
    ["image: expected one beside mask, got nil"] = { mask = ty.zeros(1, 1, 16, 16) },
    ["image: expected [1, 3, height, width], got"] = { image = ty.zeros(1, 1, 16, 16) },
    ["strength: expected one that leaves a step of 4, got 0.2"] = { image = image, strength = 0.2, steps = 4 },
    ["seed: expected 1, one for each prompt, got 2"] = { seed = { 1, 2 } },
    ["image: expected pictures of 8 x 8, as height and width say"] = { image = image, width = 8, height = 8 },
  } do
    check.fails(function() p:paint({ "a" }, options) end, text)
  end
end)

check.finish()
