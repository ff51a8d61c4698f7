-- Checkpoints in one file with the names of their authors (tests/fixtures/make_single.py): the same networks as the
-- folders of diffusers that they were made of, and the same pictures.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local root = check.root .. "tests/fixtures/"
local single, folders = root .. "single/", root .. "pipelines/"

-- What names and shapes do not say of networks as small as these.
local small = { norm_num_groups = 2, attention_head_dim = 2 }
local vae = { norm_num_groups = 2 }
local clip = { num_attention_heads = 2 }
local given = {
  sd15 = { unet = small, vae = vae, text_encoder = clip },
  sdxl = { unet = { norm_num_groups = 2, attention_head_dim = { 1, 2 }, addition_time_embed_dim = 4 }, vae = vae,
    text_encoder = { num_attention_heads = 2, hidden_act = "quick_gelu" }, text_encoder_2 = clip },
  sd3 = { transformer = { attention_head_dim = 8, sample_size = 8 }, vae = vae, text_encoder = clip,
    text_encoder_2 = clip, text_encoder_3 = { relative_attention_max_distance = 32 } },
  flux = { transformer = { axes_dims_rope = { 2, 2, 4 } } },
}
given.sd15.text_encoder = { num_attention_heads = 2, hidden_act = "quick_gelu" }

local function same(got, want, what)
  local left, right, count = got:state_dict(), want:state_dict(), 0
  for name, t in pairs(right) do
    local other = left[name]
    check.ok(other and other.dtype == t.dtype and table.concat(other.shape, " ") == table.concat(t.shape, " ")
      and other:eq(t):all():item(), what .. " " .. name)
    count = count + 1
  end
  for _ in pairs(left) do count = count - 1 end
  check.equal(count, 0, what)
end

-- Keys of configs that say how a network computes.
local keys = { unet = { "in_channels", "out_channels", "block_out_channels", "layers_per_block", "down_block_types",
    "up_block_types", "cross_attention_dim", "use_linear_projection", "addition_embed_type",
    "projection_class_embeddings_input_dim", "num_class_embeds" },
  vae = { "in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block", "scaling_factor",
    "shift_factor", "use_quant_conv", "use_post_quant_conv", "mid_block_add_attention", "down_block_types",
    "up_block_types" },
  transformer = { "in_channels", "num_layers", "num_single_layers", "attention_head_dim", "num_attention_heads",
    "joint_attention_dim", "pooled_projection_dim", "guidance_embeds", "patch_size", "pos_embed_max_size", "qk_norm" },
  text_encoder = { "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "vocab_size",
    "hidden_act", "d_model", "d_kv", "d_ff", "num_heads", "feed_forward_proj" } }

for name, configs in pairs(given) do
  check.test(name .. ": the networks of the folder, the configs inferred", function()
    local want = hub.pipeline(folders .. name)
    local got = hub.pipeline(single .. name .. ".safetensors", { config = configs })
    check.equal(got.class, want.class)
    local parts = 0
    for component in pairs(configs) do
      local a, b = got.components[component], want.components[component]
      check.equal(getmetatable(a).__name, getmetatable(b).__name)
      same(a, b, name .. " " .. component)
      check.equal({ a.report.missing, a.report.unexpected, a.config.unknown }, { {}, {}, {} })
      for _, key in ipairs(keys[component:gsub("_%d$", "")]) do
        check.equal(a.config[key], b.config[key], ("%s %s %s"):format(name, component, key))
      end
      parts = parts + 1
    end
    local count = 0
    for _, part in pairs(got.components) do count = count + (ty.nn.is_module(part) and 1 or 0) end
    check.equal(count, parts)
    -- By hub.load: what draws, or what is asked for.
    local drawer = configs.unet and "unet" or "transformer"
    same(hub.load(single .. name .. ".safetensors", { config = configs[drawer] }), want.components[drawer], name)
    if configs.vae then
      same(hub.load(single .. name .. ".safetensors", { component = "vae", config = configs.vae, dtype = "f32" }),
        hub.load(folders .. name .. "/vae", { dtype = "f32" }), name .. " vae")
    end
  end)
end

check.test("pictures of a checkpoint in one file, with tokenizers from a folder", function()
  local expected = ty.io.load_safetensors(folders .. "sd15/expected.safetensors")
  local pipeline = hub.pipeline(single .. "sd15.safetensors", { config = given.sd15, rest = folders .. "sd15",
    dtype = "f32" })
  local painter = diffusion.TextToImage(pipeline, { warn = function() end })
  local _, latents = painter:paint({ "two red apples", "A fox on a hill, in the rain" }, { steps = 4, guidance = 3,
    negative = "blurry", height = 16, width = 16, noise = expected.noise })
  check.ok((latents - expected.latents):abs():max():item() <= 1e-4 * expected.latents:abs():max():item())
  -- Without a folder the scheduler is the family's.
  local alone = hub.pipeline(single .. "sd15.safetensors", { config = given.sd15 })
  check.equal(alone.components.scheduler._class_name, "DDIMScheduler")
  check.equal(alone.components.tokenizer, nil)
  for name, class in pairs { sdxl = "EulerDiscreteScheduler", sd3 = "FlowMatchEulerDiscreteScheduler",
    flux = "FlowMatchEulerDiscreteScheduler" } do
    local p = hub.pipeline(single .. name .. ".safetensors", { config = given[name] })
    check.equal(p.components.scheduler._class_name, class)
    check.equal(p.components.scheduler.use_dynamic_shifting, name == "flux" or nil)
  end
end)

check.test("Stable Diffusion 2: the text encoder of OpenCLIP without its last layer", function()
  local want = hub.load(folders .. "sdxl/text_encoder_2"):state_dict()
  local got = hub.load(single .. "sd2.safetensors", { component = "text_encoder", config = clip })
  check.equal(getmetatable(got).__name, "CLIPTextModel")
  check.equal({ got.config.num_hidden_layers, got.config.hidden_act }, { 2, "gelu" })
  for name, t in pairs(got:state_dict()) do check.ok(t:eq(want[name]):all():item(), name) end
  same(hub.load(single .. "sd2.safetensors", { config = small }), hub.load(folders .. "sd15/unet"), "sd2")
  local p = hub.pipeline(single .. "sd2.safetensors", { config = { unet = small, text_encoder = clip } })
  check.equal(p.components.scheduler.prediction_type, "v_prediction")
end)

check.test("Flux with its text encoders in the same file", function()
  local file = scratch.file "whole.safetensors"
  local state = {}
  for key, t in pairs(ty.io.load(single .. "flux.safetensors")) do state["model.diffusion_model." .. key] = t end
  for key, t in pairs(ty.io.load(single .. "vae.ckpt")) do
    local rest = key:match "^state_dict%.(.*)$"
    if rest then state["vae." .. rest] = t end
  end
  local text = hub.load(folders .. "flux/text_encoder")
  for key, t in pairs(text:state_dict()) do state["text_encoders.clip_l.transformer." .. key] = t end
  state["text_encoders.clip_l.transformer.text_projection.weight"] = ty.zeros({ 8, 8 }, { dtype = "bf16" })
  for key, t in pairs(hub.load(folders .. "flux/text_encoder_2"):state_dict()) do
    state["text_encoders.t5xxl.transformer." .. key] = t
  end
  ty.io.save_safetensors(file, state)
  local p = hub.pipeline(file, { config = { transformer = given.flux.transformer, vae = vae,
    text_encoder = given.sd15.text_encoder, text_encoder_2 = { relative_attention_max_distance = 32 } } })
  check.equal({ p.classes.text_encoder, p.classes.text_encoder_2, p.components.text_encoder_3 },
    { "CLIPTextModel", "T5EncoderModel" })
  local want = hub.pipeline(folders .. "flux")
  for _, name in ipairs { "transformer", "vae", "text_encoder", "text_encoder_2" } do
    same(p.components[name], want.components[name], "whole flux " .. name)
  end
end)

check.test("an autoencoder alone, as training writes it, in PyTorch's format", function()
  same(hub.load(single .. "vae.ckpt", { config = vae }), hub.load(folders .. "flux/vae"), "vae.ckpt")
end)

-- A checkpoint with its tensors changed.
local function changed(name, change)
  local state = {}
  for key, t in pairs(ty.io.load(single .. name .. ".safetensors")) do state[key] = t end
  change(state)
  local path = scratch.file(name .. "_changed.safetensors")
  ty.io.save_safetensors(path, state)
  return path
end

check.test("what does not fit is one clear error", function()
  local path = changed("flux", function(state)
    state["double_blocks.0.img_mlp.0.weight"] = nil
    state["double_blocks.0.txt_mlp.2.bias"] = ty.zeros(3)
    state["double_blocks.0.more.weight"] = ty.zeros(3)
  end)
  local message = check.fails(function() hub.load(path, { config = given.flux.transformer }) end,
    "the weights do not fit the model")
  for _, text in ipairs { path, "missing (1):\n    transformer_blocks.0.ff.net.0.proj.weight",
    "unexpected (1):\n    double_blocks.0.more.weight",
    "transformer_blocks.0.ff_context.net.2.bias: the model has [16], the file [3]" } do
    check.ok(message:find(text, 1, true), text)
  end
  local report = hub.load(changed("flux", function(state) state["double_blocks.0.more.weight"] = ty.zeros(3) end),
    { config = given.flux.transformer, strict = false }).report
  check.equal(report.unexpected, { "double_blocks.0.more.weight" })

  local other = scratch.file "other.safetensors"
  ty.io.save_safetensors(other, { ["model.layers.0.weight"] = ty.zeros(2), ["lm_head.weight"] = ty.zeros(2) })
  check.fails(function() hub.load(other) end, "other.safetensors: expected a config.json beside it, or a checkpoint of "
    .. "Stable Diffusion 1, 2, XL or 3 or of Flux, got tensors such as lm_head.weight, model.layers.0.weight")
  check.fails(function() hub.pipeline(other) end, "or a checkpoint of Stable Diffusion")
  check.fails(function() hub.load(single .. "flux.safetensors", { component = "vae" }) end,
    "component: expected one of transformer, got vae")
  check.fails(function() hub.load(changed("sd15", function(state)
    state["model.diffusion_model.out.2.weight"] = nil
  end)) end, "unet: expected a tensor out.2.weight with at least 1 dimensions, got none")
  -- The family of another: the keys that are known better are those of another class.
  check.fails(function() hub.load(single .. "flux.safetensors", { config = { norm_num_groups = 2 } }) end,
    "config key 'axes_dims_rope': expected three numbers with the sum attention_head_dim 8, got 16, 56, 56")
  check.fails(function() hub.pipeline(folders .. "sd15", { rest = folders .. "sd15" }) end,
    "hub.pipeline: rest: expected nil for a folder, got \"")
  check.fails(function() hub.load(single .. "sd15.safetensors") end, "norm_num_groups")
end)

check.finish()
