--- What the tensors of a checkpoint say of its networks: the keys of diffusers' and transformers' config.json, of names
-- and shapes, and where these do not say it what the published files of the family have.
local M = {}

local function shape(state, name)
  local t = state[name]
  return t and t.shape
end

-- A size of a tensor, or an error that names what is missing.
local function size(state, name, dim)
  local s = shape(state, name)
  if not s or not s[dim] then
    error(("expected a tensor %s with at least %d dimensions, got %s"):format(name, dim, s and table.concat(s, " x ")
      or "none"), 0)
  end
  return s[dim]
end

-- How many numbers there are in the names that a pattern with one capture fits: the largest plus one.
local function count(state, pattern)
  local most = -1
  for name in pairs(state) do
    local i = math.tointeger(tonumber(name:match(pattern) or -1))
    if i and i > most then most = i end
  end
  if most >= 10000 then error(("expected at most 10000 of %s, got %d"):format(pattern, most + 1), 0) end
  return most + 1
end

-- ---- the U-Net ----

-- One way of the U-Net: for each numbered block { level, layer }, and for each level its width, whether it attends, the
-- depths and how many layers it has.
local function way(state, name, first)
  local total = count(state, "^" .. name .. "%.(%d+)%.")
  local places, levels, layer = {}, { { depths = {} } }, 0
  for i = first, total - 1 do
    local at = ("%s.%d."):format(name, i)
    local level = levels[#levels]
    if state[at .. "0.op.weight"] then
      places[i] = { #levels - 1 }
      levels[#levels + 1], layer = { depths = {} }, 0
    else
      level.channels = size(state, at .. "0.out_layers.3.weight", 1)
      local depth = count(state, "^" .. at:gsub("%.", "%%.") .. "1%.transformer_blocks%.(%d+)%.")
      if depth > 0 then level.attention = at .. "1." end
      level.depths[#level.depths + 1] = depth
      places[i] = { #levels - 1, layer }
      level.layers, layer = layer + 1, layer + 1
      if state[at .. "1.conv.weight"] or state[at .. "2.conv.weight"] then
        levels[#levels + 1], layer = { depths = {} }, 0
      end
    end
  end
  return places, levels
end

--- The config of a U-Net and the places of its blocks, for rules.unet(). family: sd1, sd2, sdxl; given: keys that the
-- caller knows better.
function M.unet(state, family, given)
  local input, down = way(state, "input_blocks", 1)
  local output = way(state, "output_blocks", 0)
  local config = { _class_name = "UNet2DConditionModel", act_fn = "silu",
    in_channels = size(state, "input_blocks.0.0.weight", 2), out_channels = size(state, "out.2.weight", 1),
    block_out_channels = {}, layers_per_block = down[1].layers, down_block_types = {}, up_block_types = {},
    transformer_layers_per_block = {}, attention_head_dim = {},
    sample_size = ({ sd1 = 64, sd2 = 96, sdxl = 128 })[family] }
  local middle, context = count(state, "^middle_block%.1%.transformer_blocks%.(%d+)%."), nil
  for i, level in ipairs(down) do
    if not level.channels then
      error("expected residual blocks in every level of input_blocks, got a level without", 0)
    end
    config.block_out_channels[i] = level.channels
    config.down_block_types[i] = level.attention and "CrossAttnDownBlock2D" or "DownBlock2D"
    config.up_block_types[#down + 1 - i] = level.attention and "CrossAttnUpBlock2D" or "UpBlock2D"
    config.transformer_layers_per_block[i] = i == #down and math.max(middle, 1) or math.max(level.depths[1], 1)
    config.attention_head_dim[i] = family == "sd1" and 8 or math.max(level.channels // 64, 1)
    if level.attention then context = level.attention end
  end
  context = context or "middle_block.1."
  config.cross_attention_dim = size(state, context .. "transformer_blocks.0.attn2.to_k.weight", 2)
  config.use_linear_projection = #(shape(state, context .. "proj_in.weight") or {}) == 2
  if state["label_emb.0.0.weight"] then
    config.addition_embed_type, config.addition_time_embed_dim = "text_time", 256
    config.projection_class_embeddings_input_dim = size(state, "label_emb.0.0.weight", 2)
  elseif state["label_emb.weight"] then
    config.num_class_embeds = size(state, "label_emb.weight", 1)
  end
  for key, value in pairs(given or {}) do config[key] = value end
  return config, { input = input, output = output }
end

-- ---- the autoencoder ----

local scales = { sdxl = { 0.13025 }, sd3 = { 1.5305, 0.0609 }, flux = { 0.3611, 0.1159 } }

--- The config of an autoencoder.
function M.vae(state, family, given)
  local levels = count(state, "^encoder%.down%.(%d+)%.")
  local scale = scales[family] or { 0.18215 }
  local config = { _class_name = "AutoencoderKL", act_fn = "silu", block_out_channels = {}, down_block_types = {},
    up_block_types = {}, in_channels = size(state, "encoder.conv_in.weight", 2),
    out_channels = size(state, "decoder.conv_out.weight", 1),
    latent_channels = size(state, "decoder.conv_in.weight", 2),
    layers_per_block = count(state, "^encoder%.down%.0%.block%.(%d+)%."), scaling_factor = scale[1],
    shift_factor = scale[2], use_quant_conv = state["quant_conv.weight"] ~= nil,
    use_post_quant_conv = state["post_quant_conv.weight"] ~= nil,
    mid_block_add_attention = state["encoder.mid.attn_1.q.weight"] ~= nil,
    sample_size = ({ sd1 = 512, sd2 = 768 })[family] or 1024 }
  for i = 1, levels do
    config.block_out_channels[i] = size(state, ("encoder.down.%d.block.0.conv2.weight"):format(i - 1), 1)
    local attends = state[("encoder.down.%d.attn.0.q.weight"):format(i - 1)]
    config.down_block_types[i] = attends and "AttnDownEncoderBlock2D" or "DownEncoderBlock2D"
    config.up_block_types[levels + 1 - i] = attends and "AttnUpDecoderBlock2D" or "UpDecoderBlock2D"
  end
  for key, value in pairs(given or {}) do config[key] = value end
  return config, levels
end

-- ---- text encoders ----

local function clip(state, names, given)
  local width = size(state, names.tokens, 2)
  local config = { model_type = "clip_text_model", hidden_size = width, vocab_size = size(state, names.tokens, 1),
    intermediate_size = size(state, names.wide, 1), max_position_embeddings = size(state, names.positions, 1),
    num_hidden_layers = count(state, names.layer), num_attention_heads = math.max(width // 64, 1),
    hidden_act = names.activation or width == 768 and "quick_gelu" or "gelu",
    eos_token_id = size(state, names.tokens, 1) - 1,
    architectures = { names.projection and "CLIPTextModelWithProjection" or "CLIPTextModel" } }
  if names.projection then config.projection_dim = size(state, names.projection, names.outputs) end
  for key, value in pairs(given or {}) do config[key] = value end
  return config
end

--- The config of a CLIP of transformers' names.
function M.clip(state, given)
  local where = "text_model.encoder.layers."
  return clip(state, { tokens = "text_model.embeddings.token_embedding.weight",
    positions = "text_model.embeddings.position_embedding.weight", wide = where .. "0.mlp.fc1.weight",
    layer = "^text_model%.encoder%.layers%.(%d+)%.", outputs = 1,
    projection = state["text_projection.weight"] and "text_projection.weight" }, given)
end

--- The config of a CLIP of OpenCLIP's names. projected: with the projection of the whole text.
function M.open_clip(state, projected, given)
  return clip(state, { tokens = "token_embedding.weight", positions = "positional_embedding", activation = "gelu",
    wide = "transformer.resblocks.0.mlp.c_fc.weight", layer = "^transformer%.resblocks%.(%d+)%.",
    projection = projected and "text_projection", outputs = 2 }, given)
end

--- The config of T5's encoder.
function M.t5(state, given)
  local where = "encoder.block.0.layer.0.SelfAttention."
  local heads = size(state, where .. "relative_attention_bias.weight", 2)
  local ff = "encoder.block.0.layer.1.DenseReluDense."
  local gated = state[ff .. "wi_0.weight"] ~= nil
  local config = { model_type = "t5", architectures = { "T5EncoderModel" },
    vocab_size = size(state, "shared.weight", 1), d_model = size(state, "shared.weight", 2),
    d_kv = size(state, where .. "q.weight", 1) // heads, num_heads = heads,
    d_ff = size(state, ff .. (gated and "wi_0.weight" or "wi.weight"), 1),
    num_layers = count(state, "^encoder%.block%.(%d+)%."), feed_forward_proj = gated and "gated-gelu" or "relu",
    relative_attention_num_buckets = size(state, where .. "relative_attention_bias.weight", 1) }
  for key, value in pairs(given or {}) do config[key] = value end
  return config
end

-- ---- transformers ----

--- The config of Stable Diffusion 3's transformer, and the number of its last block.
function M.sd3(state, given)
  local patches = shape(state, "x_embedder.proj.weight")
  if not patches or #patches ~= 4 then error("expected x_embedder.proj.weight with 4 dimensions, got none", 0) end
  local width, patch, layers = patches[1], patches[3], count(state, "^joint_blocks%.(%d+)%.")
  local norm = shape(state, "joint_blocks.0.x_block.attn.ln_q.weight")
  local head = given and given.attention_head_dim or norm and norm[1] or 64
  local config = { _class_name = "SD3Transformer2DModel", sample_size = 128, patch_size = patch,
    in_channels = patches[2], num_layers = layers, attention_head_dim = head, num_attention_heads = width // head,
    caption_projection_dim = width, joint_attention_dim = size(state, "context_embedder.weight", 2),
    pooled_projection_dim = size(state, "y_embedder.mlp.0.weight", 2),
    out_channels = size(state, "final_layer.linear.weight", 1) // (patch * patch),
    pos_embed_max_size = math.floor(size(state, "pos_embed", 2) ^ 0.5 + 0.5), qk_norm = norm and "rms_norm" or nil,
    dual_attention_layers = {} }
  for i = 0, layers - 1 do
    if state[("joint_blocks.%d.x_block.attn2.qkv.weight"):format(i)] then
      table.insert(config.dual_attention_layers, i)
    end
  end
  config.dual_attention_layers = require("tycho").io.array(config.dual_attention_layers)
  for key, value in pairs(given or {}) do config[key] = value end
  return config, layers - 1
end

--- The config of Flux's transformer.
function M.flux(state, given)
  local head = size(state, "double_blocks.0.img_attn.norm.query_norm.scale", 1)
  local config = { _class_name = "FluxTransformer2DModel", patch_size = 1, attention_head_dim = head,
    in_channels = size(state, "img_in.weight", 2), num_attention_heads = size(state, "img_in.weight", 1) // head,
    out_channels = size(state, "final_layer.linear.weight", 1), num_layers = count(state, "^double_blocks%.(%d+)%."),
    num_single_layers = count(state, "^single_blocks%.(%d+)%."),
    joint_attention_dim = size(state, "txt_in.weight", 2),
    pooled_projection_dim = size(state, "vector_in.in_layer.weight", 2),
    guidance_embeds = state["guidance_in.in_layer.weight"] ~= nil }
  for key, value in pairs(given or {}) do config[key] = value end
  return config
end

-- ---- schedulers ----

local stable = { beta_schedule = "scaled_linear", beta_start = 0.00085, beta_end = 0.012, num_train_timesteps = 1000,
  steps_offset = 1, timestep_spacing = "leading" }

local function scheduler(class, more)
  local config = { _class_name = class }
  for _, part in ipairs { class:find "Flow" and {} or stable, more } do
    for key, value in pairs(part) do config[key] = value end
  end
  return config
end

--- The config of the scheduler that the published pipelines of a family have. guided: of Flux, whether the network is
-- told the guidance.
function M.scheduler(family, guided)
  if family == "sdxl" then return scheduler("EulerDiscreteScheduler", { prediction_type = "epsilon" }) end
  if family == "sd3" then return scheduler("FlowMatchEulerDiscreteScheduler", { shift = 3.0 }) end
  if family == "flux" then
    return scheduler("FlowMatchEulerDiscreteScheduler", guided and { shift = 3.0, use_dynamic_shifting = true,
      base_shift = 0.5, max_shift = 1.15, base_image_seq_len = 256, max_image_seq_len = 4096 } or { shift = 1.0 })
  end
  return scheduler("DDIMScheduler", { clip_sample = false, set_alpha_to_one = false,
    prediction_type = family == "sd2" and "v_prediction" or "epsilon" })
end

return M
