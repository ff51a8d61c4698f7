-- Whole pipelines of diffusers: the same pictures from the same noise (tests/fixtures/make_pipelines.py).
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local root = check.root .. "tests/fixtures/pipelines/"
local prompts = { "two red apples", "A fox on a hill, in the rain" }

-- As DRAWN of make_pipelines.py.
local drawn = {
  sd15 = { guidance = 3, negative = "blurry", height = 16, width = 16 },
  sdxl = { guidance = 3, height = 16, width = 24 },
  sd3 = { guidance = 3, negative = "blurry", height = 16, width = 16, length = 20 },
  flux = { guidance = 3.5, height = 16, width = 24, length = 20 },
  pixart = { guidance = 3, negative = "blurry", height = 16, width = 24, length = 20 },
}

local function psnr(a, b)
  local error_ = (a:to "f64" - b:to "f64"):square():mean():item()
  return error_ == 0 and math.huge or 10 * math.log(255 ^ 2 / error_, 10)
end

local function options(name, more)
  local o = { steps = 4 }
  for key, value in pairs(drawn[name]) do o[key] = key ~= "length" and value or nil end
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

local function painter(name, path, said)
  return diffusion.TextToImage(hub.pipeline(path or root .. name, { dtype = "f32" }), { length = drawn[name].length,
    warn = function(text) table.insert(said or {}, text) end })
end

local names = {}
for name in pairs(drawn) do names[#names + 1] = name end
table.sort(names)

check.test("networks in halves draw nearly the same", function()
  for _, name in ipairs(names) do
    local noise = ty.io.load_safetensors(root .. name .. "/expected.safetensors").noise
    local plain
    for _, dtype in ipairs { "f32", "f16", "bf16", "file" } do
      local p = diffusion.TextToImage(hub.pipeline(root .. name, { dtype = dtype ~= "file" and dtype or nil }),
        { length = drawn[name].length, warn = function() end })
      local _, latents = p:paint(prompts, options(name, { noise = noise }))
      plain = plain or latents
      local off = (latents - plain):abs():max():item() / plain:abs():max():item()
      check.ok(latents.dtype == "f32" and off < 0.1, ("%s in %s: latents differ by %.2g"):format(name, dtype, off))
    end
  end
end)

for _, name in ipairs(names) do
  check.test(name .. ": diffusers' pictures, from the folder and from the folder written again", function()
    local want = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    local said = {}
    local p = painter(name, nil, said)
    local function same(from, what)
      local pictures, latents = from:paint(prompts, options(name, { noise = want.noise }))
      local off = (latents - want.latents):abs():max():item() / want.latents:abs():max():item()
      check.ok(off < 1e-4, ("%s: latents differ by %.2g"):format(what, off))
      local ratio = psnr(pictures, want.picture)
      check.ok(ratio >= 60, ("%s: %.1f dB"):format(what, ratio))
    end
    same(p, name)
    check.equal(#said, ({ sd15 = 1, sdxl = 2, sd3 = 3, flux = 2, pixart = 1 })[name], table.concat(said, "\n"))
    check.ok(said[1]:find("TextToImage: prompts: the text encoder reads %d+ tokens, prompt 2 has %d+; the rest is cut"),
      said[1])
    same(p, name .. " again")
    check.equal(#said, ({ sd15 = 1, sdxl = 2, sd3 = 3, flux = 2, pixart = 1 })[name]) -- said once

    hub.save_pipeline(scratch.file(name), hub.pipeline(root .. name, { dtype = "f32" }))
    same(painter(name, scratch.file(name)), name .. " written")

    -- The same seed, one picture at a time.
    local a = p:paint(prompts, options(name, { seed = 3 }))
    local b = p:paint(prompts, options(name, { seed = 3, batch = 1 }))
    check.ok((a:to "f32" - b:to "f32"):abs():max():item() <= 1, name .. ": batches")
  end)
end

check.test("a negative prompt of nothing is zeros where the pipeline says so", function()
  local p = painter "sdxl"
  local null = p:null("", { height = 16, width = 24 })
  check.equal({ null.text.embeddings:abs():max():item(), null.text.pooled:abs():max():item() }, { 0, 0 })
  check.equal(null.sizes:tolist(), { { 16, 24, 0, 0, 16, 24 } })
  check.ok(p:null("x").text.embeddings:abs():max():item() > 0)
  p.prompts.options.force_zeros_for_empty_prompt = false
  check.ok(p:null("").text.embeddings:abs():max():item() > 0)
end)

check.test("a Stable Diffusion 3 without T5", function()
  local pipeline = hub.pipeline(root .. "sd3", { dtype = "f32" })
  pipeline.components.text_encoder_3, pipeline.components.tokenizer_3 = nil, nil
  local p = diffusion.TextToImage(pipeline, { length = 20, warn = function() end })
  local embeddings = p:condition({ "a" }).text.embeddings
  check.equal(embeddings.shape, { 1, 12 + 20, 16 })
  check.equal(embeddings:narrow(1, 12, 20):abs():max():item(), 0)
end)

check.test("a pipeline that never had the second text encoder of its class is read by its first", function()
  local parts = hub.pipeline(root .. "sd15", { dtype = "f32" }).components
  local p = diffusion.TextToImage({ class = "StableDiffusion3Pipeline", components = parts }, { warn = function() end })
  check.equal(p:condition({ "a" }).text.embeddings:tolist(),
    painter("sd15"):condition({ "a" }).text.embeddings:tolist())
  check.equal(p:condition(p:tokens { "a" }).text.embeddings:tolist(), p:condition({ "a" }).text.embeddings:tolist())
end)

check.test("ControlNets: one and two of them draw what diffusers draws", function()
  local net = hub.load(root .. "control", { dtype = "f32" })
  local want = ty.io.load_safetensors(root .. "control/expected.safetensors")
  local p = painter "sd15"
  local function same(controls, name, more)
    local o = { noise = want.noise, controls = controls }
    for key, value in pairs(more or {}) do o[key] = value end
    local _, latents = p:paint(prompts, options("sd15", o))
    local off = (latents - want[name]):abs():max():item() / want[name]:abs():max():item()
    check.ok(off < 1e-4, ("%s: latents differ by %.2g"):format(name, off))
  end
  local one = { { net = net, picture = want.picture0, strength = 0.8 } }
  same(one, "one")
  same(one, "one", { batch = 1 })
  same({ { net = net, picture = want.picture0:to "f32" / 255, strength = 0.5 },
    { net = net, picture = want.picture1, strength = 0.7 } }, "two")
  p.pipeline.components.controlnet = net
  same({ { picture = want.picture0, strength = 0.8 } }, "one")
  check.fails(function() p:paint({ "a" }, options("sd15", { controls = { { picture = want.picture0 } } })) end,
    "TextToImage:paint: controls[1].picture: expected [channels, 16, 16], or 1 of them, got a tensor [2, 3, 16, 16]")
  check.fails(function() diffusion.controlled(p.network, {}) end,
    "diffusion.controlled: controls: expected at least one, got none")
  check.fails(function() diffusion.controlled(p.network, { { strength = 1 } }) end,
    "diffusion.controlled: controls[1].net: expected a ControlNetModel, got nil")
  local both = diffusion.controlled(p.network, { { net = net } })
  check.fails(function() both(ty.zeros(1, 4, 8, 8), ty.tensor { 1.0 }, {}) end,
    "diffusion.controlled: condition.controls: expected a list of 1 pictures, got nil")
end)

check.test("quick views by the small autoencoder", function()
  local tiny = hub.load(check.root .. "tests/fixtures/diffusers/autoencoder_tiny", { weights = false,
    config = { latent_channels = 4, encoder_block_out_channels = { 4, 4 }, decoder_block_out_channels = { 4, 4 },
      num_encoder_blocks = { 1, 1 }, num_decoder_blocks = { 1, 1 }, block_out_channels = { 4, 4 } } })
  local pipeline = hub.pipeline(root .. "sd15", { dtype = "f32" })
  pipeline.components.vae = tiny
  local p = diffusion.TextToImage(pipeline, { warn = function() end })
  local pictures, latents = p:paint({ "a" }, options "sd15")
  check.equal({ pictures.shape, latents.shape }, { { 1, 3, 16, 16 }, { 1, 4, 8, 8 } })
  check.equal(p:encode(pictures).shape, { 1, 4, 8, 8 })
end)

check.test("a NaN ends it with the step and the module where it began", function()
  local p = painter "sd15"
  local o = { steps = 3, width = 16, height = 16 }
  local weight = p.network.mid_block.resnets[1].conv1.weight
  local before = weight:detach():clone()
  ty.no_grad(function() weight:fill_(0 / 0) end)
  check.fails(function() p:paint({ "a cat" }, o) end, "TextToImage:paint: step 1 of 3, what the network says: expected "
    .. "finite numbers, got NaN or infinity; conv2d(")
  check.fails(function() p:paint({ "a cat" }, o) end, "in mid_block.resnets.0.conv1: the first NaN")
  ty.no_grad(function() weight:copy_(before) end)
  local broken = { advance = function(_, run, next, ...)
    local x = next(...)
    return run.step == 2 and x * (1 / 0) or x
  end }
  o.parts = { broken }
  check.fails(function() p:paint({ "a cat" }, o) end,
    "TextToImage:paint: step 3 of 3: expected a sample of finite numbers, got NaN or infinity, of a step or a part")
  o.parts = {}
  local bias = p.autoencoder.decoder.conv_out.bias
  before = bias:detach():clone()
  ty.no_grad(function() bias:fill_(1 / 0) end)
  check.fails(function() p:paint({ "a cat" }, o) end, "TextToImage:decode: the pictures of the autoencoder: expected "
    .. "finite numbers, got NaN or infinity; conv2d(")
  ty.no_grad(function() bias:copy_(before) end)
  check.fails(function() p:paint({ "a cat", "a \xff dog" }, o) end,
    "TextToImage:paint: prompts[2]: expected UTF-8, got the byte 0xFF at 3")
end)

check.test("what is wrong is one clear error", function()
  local function fails(name, missing, text)
    local pipeline = hub.pipeline(root .. name, { dtype = "f32" })
    pipeline.components[missing] = nil
    pipeline.left_out[missing] = "a Strange, which is not read"
    check.fails(function() diffusion.TextToImage(pipeline) end, "TextToImage: pipeline.components." .. text)
  end
  fails("sdxl", "text_encoder_2", "text_encoder_2: expected one, got a Strange, which is not read")
  fails("sdxl", "tokenizer_2", "tokenizer_2: expected one, got a Strange, which is not read")
  fails("flux", "vae", "vae: expected one, got a Strange, which is not read")
  fails("pixart", "scheduler", "scheduler: expected one, got a Strange, which is not read")
  fails("sd15", "unet", "unet or transformer: expected one, got nil")
  local p = painter "flux"
  check.fails(function() p:paint({ "a" }, { width = 18 }) end,
    "TextToImage:paint: width: expected a multiple of the autoencoder's 2 times the network's 2, got 18")
  check.fails(function() painter("sd15"):paint({ "a" }, { height = 15 }) end,
    "TextToImage:paint: height: expected a multiple of the autoencoder's 2, got 15")
  check.fails(function() p:condition(ty.tensor { { 1, 2 } }) end,
    "TextToImage:condition: prompts: expected a list of strings (the pipeline has 2 text encoders), got a tensor")
  check.fails(function() p:condition({ "a" }, { size = 3 }) end, "no option 'size'")
  check.fails(function() p:null(3) end,
    "TextToImage:null: negative: expected a string or a list of strings or nil, got 3")
  -- A folder that lost a component.
  local path = scratch.file "lost"
  hub.save_pipeline(path, hub.pipeline(root .. "sd15", { dtype = "f32" }))
  for _, file in ipairs(ty.io.listdir(path .. "/vae")) do os.remove(path .. "/vae/" .. file) end
  os.remove(path .. "/vae")
  check.fails(function() hub.pipeline(path) end, "vae is not there: a AutoencoderKL of model_index.json")
end)

check.finish()
