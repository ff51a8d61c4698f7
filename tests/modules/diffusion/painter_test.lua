-- Pictures from words: TextToImage and what scheduler_config.json says, beside diffusers
-- (tests/fixtures/make_painter.py).
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local root = check.root .. "tests/fixtures/diffusers/"
local expected = ty.io.load_safetensors(check.root .. "tests/fixtures/painter.safetensors")
local unet, vae = hub.load(root .. "unet_sd1", { dtype = "f32" }), hub.load(root .. "autoencoder", { dtype = "f32" })
local sd3 = hub.load(root .. "sd3", { dtype = "f32" })

-- Prompts "0", "1" and "" are read as rows of known embeddings.
local Reader = ty.nn.module "Reader"
function Reader:init(name)
  self.config = { max_position_embeddings = 7 }
  self.rows = ty.concat({ expected[name .. ".embeddings"], expected[name .. ".null"] }, 0)
  local pooled = expected[name .. ".pooled"]
  self.pooled = pooled and ty.concat({ pooled, expected[name .. ".null_pooled"] }, 0)
  self.anchor = ty.nn.Linear(1, 1) -- a network has a device
end
function Reader:forward(tokens)
  local rows = tokens:select(1, 0)
  return self.rows:index_select(0, rows), self.pooled and self.pooled:index_select(0, rows)
end
local reader = { max_length = 7 }
function reader:encode_batch(prompts, options) -- luacheck: ignore 212
  local rows = {}
  for i, prompt in ipairs(prompts) do
    rows[i] = {}
    for k = 1, options.length do rows[i][k] = prompt == "" and 2 or math.tointeger(tonumber(prompt)) end
  end
  return ty.tensor(rows, { dtype = "i64" })
end

local function painter(name, network, scheduler)
  return diffusion.TextToImage { components = { unet = network, vae = vae, tokenizer = reader,
    text_encoder = Reader(name), scheduler = scheduler } }
end

local stable = { beta_schedule = "scaled_linear", beta_start = 0.00085, beta_end = 0.012 }
local function with(more)
  local config = {}
  for key, value in pairs(stable) do config[key] = value end
  for key, value in pairs(more) do config[key] = value end
  return config
end

local schedulers = {
  ddim = with { _class_name = "DDIMScheduler", clip_sample = false, set_alpha_to_one = false, steps_offset = 1 },
  v = with { _class_name = "DDIMScheduler", clip_sample = false, prediction_type = "v_prediction",
    timestep_spacing = "trailing", rescale_betas_zero_snr = true },
  euler = with { _class_name = "EulerDiscreteScheduler" },
  heun = with { _class_name = "HeunDiscreteScheduler" },
  karras = with { _class_name = "EulerDiscreteScheduler", use_karras_sigmas = true },
  dpm = with { _class_name = "DPMSolverMultistepScheduler" },
  dpm_karras = with { _class_name = "DPMSolverMultistepScheduler", use_karras_sigmas = true },
  dpm_leading = with { _class_name = "DPMSolverMultistepScheduler", timestep_spacing = "leading", steps_offset = 1 },
}

local function same(name, latents)
  local wanted = expected[name .. ".latents"]
  local error_ = (latents - wanted):abs():max():item() / wanted:abs():max():item()
  check.ok(error_ < 2e-5, ("%s: latents differ by %.2g"):format(name, error_))
end

check.test("a Stable Diffusion draws what diffusers draws, by eight schedulers", function()
  for name, config in pairs(schedulers) do
    local pictures, latents = painter(name, unet, config):paint({ "0", "1" }, { steps = 5, guidance = 3,
      noise = expected[name .. ".noise"] })
    same(name, latents)
    local wanted = ((expected[name .. ".picture"] + 1) * 127.5):round()
    check.ok((pictures:to "f32" - wanted):abs():max():item() <= 1, name .. ": pictures")
  end
end)

check.test("a Stable Diffusion 3's latents are diffusers', plain and shifted", function()
  for name, shift in pairs { flow = 1.0, shifted = 3.0 } do
    local p = painter(name, sd3, { _class_name = "FlowMatchEulerDiscreteScheduler", shift = shift })
    local null = p:condition { "" }
    local x = p.process:sample(sd3, { 2, 3, 8, 8 }, { condition = p:condition { "0", "1" }, null = null, guidance = 3,
      steps = 5, noise = expected[name .. ".noise"] })
    same(name, x)
  end
end)

check.test("the same seed gives the same pictures in batches of any size; another seed others", function()
  local p = painter("ddim", unet, schedulers.ddim)
  local a = p:paint({ "0", "1", "0" }, { steps = 2, seed = 5, guidance = 1 })
  check.equal(a.shape, { 3, 3, 16, 16 })
  check.equal(a.dtype, "u8")
  ty.manual_seed(9)
  local next_numbers = ty.rand(4)
  ty.manual_seed(9)
  local b = p:paint({ "0", "1", "0" }, { steps = 2, seed = 5, guidance = 1, batch = 1 })
  check.equal(ty.rand(4):tolist(), next_numbers:tolist()) -- the generator is left as it was
  check.ok((a:to "f32" - b:to "f32"):abs():max():item() <= 1)
  local c = p:paint({ "0", "1", "0" }, { steps = 2, seed = 6, guidance = 1 })
  check.ok(a:ne(c):any():item())
  check.equal(p:paint({ "0" }, { steps = 1, width = 24, height = 8 }).shape, { 1, 3, 8, 24 })
end)

check.test("pictures go to latents and come back", function()
  local p = painter("ddim", unet, schedulers.ddim)
  local x = ty.randint(0, 256, { 2, 3, 16, 16 }):to "u8"
  local z = p:encode(x)
  local y = x:to "f32" / 127.5 - 1
  check.close(z:tolist(), vae:scale(ty.no_grad(function() return vae:encode(y):mode() end)):tolist(), 1e-6)
  check.equal(p:decode(z).shape, { 2, 3, 16, 16 })
end)

check.test("what is wrong is one clear error", function()
  local p = painter("ddim", unet, schedulers.ddim)
  check.fails(function() p:paint {} end, "TextToImage:paint: prompts: expected at least one, got none")
  check.fails(function() p:paint({ "0" }, { width = 15 }) end,
    "TextToImage:paint: width: expected a multiple of the autoencoder's 2, got 15")
  check.fails(function() p:paint({ "0" }, { noise = ty.zeros(1, 4, 4, 4) }) end,
    "TextToImage:paint: noise: expected [1, 4, 8, 8], got [1, 4, 4, 4]")
  check.fails(function() diffusion.TextToImage { components = { unet = unet, vae = vae, tokenizer = reader } } end,
    "TextToImage: pipeline.components.")
  local published = diffusion.published
  check.fails(function() published { _class_name = "XScheduler" } end,
    "diffusion.published: config._class_name: expected one of DDIMScheduler, DDPMScheduler, DEISMultistepScheduler, ")
  check.fails(function() published { _class_name = "DDIMScheduler", prediction_type = "noise" } end,
    "diffusion.published: prediction_type: expected epsilon or sample or v_prediction, got noise")
  check.fails(function() published { _class_name = "DDIMScheduler", beta_start = "x" } end,
    "diffusion.published: beta_start: expected a finite number, got ")
  check.fails(function() published { _class_name = "DDIMScheduler", thresholds = true } end,
    "diffusion.published: config: no key 'thresholds' is known")
  check.fails(function() published { _class_name = "FlowMatchEulerDiscreteScheduler", invert_sigmas = true } end,
    "diffusion.published: invert_sigmas: expected false, got true")
end)

check.finish()
