--- A model's config as the metadata of a GGUF file, and tensors that stand for a part of it.
local ty = require "tycho"
local gguf = require "tycho.hub.gguf"

local function refuse(format, ...) error("quant.convert: " .. format:format(...), 0) end

-- set(key, value, type) by architecture; each may return tensors to add.
local architectures = {}

function architectures.gpt2(c, set)
  set("context_length", c.n_positions)
  set("embedding_length", c.n_embd)
  set("block_count", c.n_layer)
  set("attention.head_count", c.n_head)
  set("feed_forward_length", math.type(c.n_inner) and c.n_inner or 4 * c.n_embd)
  set("attention.layer_norm_epsilon", c.layer_norm_epsilon, "f32")
end

function architectures.bert(c, set)
  if c.hidden_act ~= "gelu" then refuse("bert: hidden_act %s cannot be written, only gelu", tostring(c.hidden_act)) end
  set("context_length", c.max_position_embeddings)
  set("embedding_length", c.hidden_size)
  set("block_count", c.num_hidden_layers)
  set("attention.head_count", c.num_attention_heads)
  set("feed_forward_length", c.intermediate_size)
  set("attention.layer_norm_epsilon", c.layer_norm_eps, "f32")
  set("attention.causal", false)
  set("pooling_type", 1) -- the mean over the tokens
end

-- Files have no keys for the largest distance, for activations and for whether the head's input is scaled.
function architectures.t5(c, set)
  if c.relative_attention_max_distance ~= 128 then
    refuse("t5: relative_attention_max_distance %d cannot be written, only 128", c.relative_attention_max_distance)
  end
  if c.feed_forward_proj ~= "relu" and c.feed_forward_proj ~= "gated-gelu" then
    refuse("t5: feed_forward_proj %s cannot be written, only relu and gated-gelu", c.feed_forward_proj)
  end
  local scaled = c.scale_decoder_outputs
  if scaled == nil then scaled = c.tie_word_embeddings end
  if scaled ~= c.tie_word_embeddings then
    refuse("t5: scale_decoder_outputs %s cannot be written where tie_word_embeddings is %s", tostring(scaled),
      tostring(c.tie_word_embeddings))
  end
  set("context_length", math.type(c.n_positions) and c.n_positions or 512)
  set("embedding_length", c.d_model)
  set("feed_forward_length", c.d_ff)
  set("block_count", c.num_layers)
  set("decoder_block_count", c.num_decoder_layers)
  set("attention.head_count", c.num_heads)
  set("attention.key_length", c.d_kv)
  set("attention.value_length", c.d_kv)
  set("attention.layer_norm_epsilon", c.layer_norm_epsilon, "f32")
  set("attention.layer_norm_rms_epsilon", c.layer_norm_epsilon, "f32")
  set("attention.relative_buckets_count", c.relative_attention_num_buckets)
  set("decoder_start_token_id", c.decoder_start_token_id)
end

-- The scaling of rotary positions: by keys, or, where there is none (Llama 3's), by a number for each frequency.
local function rope_scaling(rotary, set)
  local p = rotary.settings
  if p.kind == "default" then return nil end
  if p.kind == "linear" then
    set("rope.scaling.type", "linear")
    set("rope.scaling.factor", p.factor, "f32")
  elseif p.kind == "yarn" then
    if p.truncate == false then refuse "rope_type yarn with truncate = false cannot be written" end
    local original = p.original_max_position_embeddings or p.context
    local factor = p.factor or p.context / original
    local _, scale = rotary:frequencies()
    set("rope.scaling.type", "yarn")
    set("rope.scaling.factor", factor, "f32")
    set("rope.scaling.original_context_length", original)
    set("rope.scaling.attn_factor", scale / gguf.yarn_attention(factor), "f32")
    set("rope.scaling.yarn_beta_fast", p.beta_fast or 32, "f32")
    set("rope.scaling.yarn_beta_slow", p.beta_slow or 1, "f32")
  elseif p.kind == "llama3" or p.kind == "divided" then
    local divisors = {}
    for i, f in ipairs((rotary:frequencies())) do divisors[i] = p.theta ^ (-2 * (i - 1) / rotary.width) / f end
    return { ["rope_freqs.weight"] = ty.tensor(divisors, { dtype = "f32" }) }
  else
    refuse("rope_type %s cannot be written: the format has linear, yarn and llama3's", p.kind)
  end
  return nil
end

local function decoder(c, set, model)
  if c.use_sliding_window == true then refuse "a sliding window in some of the layers cannot be written" end
  local width = math.type(c.head_dim) and c.head_dim or c.hidden_size // c.num_attention_heads
  if model.rotary.width ~= width then refuse "rotary positions for a part of a head cannot be written" end
  set("context_length", c.max_position_embeddings)
  set("embedding_length", c.hidden_size)
  set("block_count", c.num_hidden_layers)
  set("attention.head_count", c.num_attention_heads)
  set("attention.head_count_kv", c.num_key_value_heads)
  set("feed_forward_length", c.intermediate_size)
  set("attention.layer_norm_rms_epsilon", c.rms_norm_eps, "f32")
  set("rope.freq_base", model.rotary.settings.theta, "f32")
  set("rope.dimension_count", width)
  set("attention.key_length", width)
  set("attention.value_length", width)
  if math.type(c.sliding_window) then set("attention.sliding_window", c.sliding_window) end
  return rope_scaling(model.rotary, set)
end

--- The metadata of a model of an architecture, their types, and tensors that belong to them.
---@param model LanguageModel
---@param architecture string
---@return table<string, any> metadata
---@return table<string, string> types
---@return table<string, Tensor> tensors
return function(model, architecture)
  local metadata = { ["general.architecture"] = architecture, ["general.quantization_version"] = 2 }
  local types = {}
  local function set(key, value, kind)
    metadata[architecture .. "." .. key] = value
    types[architecture .. "." .. key] = value ~= nil and kind or nil
  end
  return metadata, types, (architectures[architecture] or decoder)(model.config, set, model) or {}
end
