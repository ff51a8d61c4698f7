-- Pipelines of diffusers: a folder of components, read and written.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"

local root = check.root .. "tests/fixtures/"
local scheduler = { _class_name = "DDIMScheduler", _diffusers_version = "0.42.1", beta_start = 0.00085,
  clip_sample = false }

-- A pipeline as diffusers writes it, of the fixtures.
local function published(name)
  local path = scratch.file(name)
  local function copy(from, to, files)
    ty.io.mkdir(path .. "/" .. to)
    for source, target in pairs(files) do
      scratch.spit(name .. "/" .. to .. "/" .. target, scratch.slurp(root .. from .. "/" .. source))
    end
  end
  local weights = "diffusion_pytorch_model.safetensors"
  copy("diffusers/unet_sd1", "unet", { ["config.json"] = "config.json", [weights] = weights })
  copy("diffusers/autoencoder", "vae", { ["config.json"] = "config.json", [weights] = weights })
  copy("llm/t5", "text_encoder", { ["config.json"] = "config.json", ["model.safetensors"] = "model.safetensors" })
  copy("tokenizers", "tokenizer", { ["clip.json"] = "tokenizer.json" })
  for folder, config in pairs { scheduler = { "scheduler_config.json", scheduler },
    feature_extractor = { "preprocessor_config.json", { crop_size = 8 } },
    watermark = { "config.json", { model_type = "watermark", architectures = { "Watermark" } } } } do
    ty.io.mkdir(path .. "/" .. folder)
    ty.io.save_json(path .. "/" .. folder .. "/" .. config[1], config[2])
  end
  ty.io.save_json(path .. "/model_index.json", { _class_name = "StableDiffusionPipeline",
    _diffusers_version = "0.42.1", requires_safety_checker = false, unet = { "diffusers", "UNet2DConditionModel" },
    vae = { "diffusers", "AutoencoderKL" }, text_encoder = { "transformers", "T5ForConditionalGeneration" },
    tokenizer = { "transformers", "CLIPTokenizer" }, scheduler = { "diffusers", "DDIMScheduler" },
    feature_extractor = { "transformers", "CLIPImageProcessor" }, watermark = { "other", "Watermark" },
    safety_checker = { ty.io.null, ty.io.null } })
  return path
end

local function names(t)
  local list = {}
  for name in pairs(t) do list[#list + 1] = name end
  table.sort(list)
  return list
end

check.test("components are read, what is not is said", function()
  local path = published "whole"
  local pipeline = hub.pipeline(path, { dtype = "f32" })
  check.equal(pipeline.class, "StableDiffusionPipeline")
  check.equal(pipeline.options, { requires_safety_checker = false })
  check.equal(names(pipeline.components), { "scheduler", "text_encoder", "tokenizer", "unet", "vae" })
  local c = pipeline.components
  check.equal({ getmetatable(c.unet).__name, getmetatable(c.vae).__name, getmetatable(c.text_encoder).__name },
    { "UNet2DConditionModel", "AutoencoderKL", "T5" })
  check.equal(c.scheduler, scheduler)
  check.equal(c.tokenizer:encode("a cat"):tolist(), hub.tokenizer(path .. "/tokenizer"):encode("a cat"):tolist())
  check.equal(c.vae:parameters()[1].dtype, "f32")
  check.equal(pipeline.left_out, { feature_extractor = "a CLIPImageProcessor, which is not read",
    watermark = "a Watermark, which is no network of tycho.models" })

  local some = hub.pipeline(path, { components = { "vae", "scheduler" } })
  check.equal(names(some.components), { "scheduler", "vae" })
  check.equal(some.left_out.unet, "not asked for")

  -- Written and read again: the same.
  hub.save_pipeline(scratch.file "again", pipeline)
  local again = hub.pipeline(scratch.file "again")
  check.equal(again.left_out, {})
  check.equal({ again.class, again.options }, { pipeline.class, pipeline.options })
  local z = ty.randn(1, 4, 4, 4)
  check.equal(again.components.vae:decode(z):tolist(), c.vae:decode(z):tolist())
  check.equal(again.components.scheduler, scheduler)
  check.equal(again.components.tokenizer:encode("a cat"):tolist(), c.tokenizer:encode("a cat"):tolist())
  local index = ty.io.load_json(scratch.file "again" .. "/model_index.json")
  check.equal(index.unet, { "diffusers", "UNet2DConditionModel" })
  check.equal(index.tokenizer, { "transformers", "CLIPTokenizer" })
end)

check.test("what does not fit is one clear error", function()
  check.fails(function() hub.pipeline(scratch.file "nowhere") end,
    "hub.pipeline: path: expected a folder or a checkpoint, got ")
  check.fails(function() hub.pipeline(root .. "diffusers/autoencoder") end, "has no model_index.json")
  local path = published "broken"
  check.fails(function() hub.pipeline(path, { components = { "vea" } }) end,
    "hub.pipeline: components: expected names of " .. path .. "/model_index.json, got 'vea'")
  local index = ty.io.load_json(path .. "/model_index.json")
  index.prior = { "diffusers", "PriorTransformer" }
  ty.io.save_json(path .. "/model_index.json", index)
  check.fails(function() hub.pipeline(path) end,
    "hub.pipeline: " .. path .. "/prior is not there: a PriorTransformer of model_index.json")
  for _, wrong in ipairs { { ["../vae"] = { "diffusers", "AutoencoderKL" } }, { vae = { "AutoencoderKL" } } } do
    ty.io.save_json(path .. "/model_index.json", wrong)
    check.fails(function() hub.pipeline(path) end, "expected the library and the class of a component")
  end
  local state = ty.io.load(path .. "/vae/diffusion_pytorch_model.safetensors")
  state["encoder.conv_in.bias"] = nil
  ty.io.save_safetensors(path .. "/vae/diffusion_pytorch_model.safetensors", state)
  ty.io.save_json(path .. "/model_index.json", { vae = { "diffusers", "AutoencoderKL" } })
  local message = check.fails(function() hub.pipeline(path) end, "the weights do not fit the model")
  check.ok(message:find(path .. "/vae", 1, true), "the component is named")
  check.equal(hub.pipeline(path, { strict = false }).components.vae.report.missing, { "encoder.conv_in.bias" })
  check.fails(function() hub.save_pipeline(scratch.file "no", { class = "X", components = { unet = 3 } }) end,
    "hub.save_pipeline: pipeline.components.unet: expected a network, a tokenizer or the config of a scheduler")
  check.fails(function() hub.save_pipeline(scratch.file "no", { class = "X", components = { ["a/b"] = {} } }) end,
    "hub.save_pipeline: pipeline.components: expected names of folders, got \"a/b\"")
end)

check.finish()
