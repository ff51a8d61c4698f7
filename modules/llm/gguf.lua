--- Models in GGUF files: the metadata as a config.json, the tensors under the published names. Block-quantized weights
-- stay as they are; ty.linear computes with them.
local ty = require "tycho"

local M = {}

-- architecture -> model_type, and whether files of it have the rows of queries and keys in another order.
local architectures = {
  llama = { model_type = "llama", turned = true },
  mistral = { model_type = "mistral", turned = true },
  qwen2 = { model_type = "qwen2" },
  qwen3 = { model_type = "qwen3" },
  gpt2 = { model_type = "gpt2" },
}

-- Names inside of a layer, and outside.
local decoder = {
  outer = { token_embd = "model.embed_tokens", output_norm = "model.norm", output = "lm_head" },
  layer = "model.layers.%s.%s",
  inner = { attn_norm = "input_layernorm", ffn_norm = "post_attention_layernorm", attn_q = "self_attn.q_proj",
    attn_k = "self_attn.k_proj", attn_v = "self_attn.v_proj", attn_output = "self_attn.o_proj",
    attn_q_norm = "self_attn.q_norm", attn_k_norm = "self_attn.k_norm", ffn_gate = "mlp.gate_proj",
    ffn_up = "mlp.up_proj", ffn_down = "mlp.down_proj", ffn_gate_inp = "block_sparse_moe.gate" },
}
local gpt2 = {
  outer = { token_embd = "wte", position_embd = "wpe", output_norm = "ln_f", output = "lm_head" },
  layer = "h.%s.%s",
  inner = { attn_norm = "ln_1", ffn_norm = "ln_2", attn_qkv = "attn.c_attn", attn_output = "attn.c_proj",
    ffn_up = "mlp.c_fc", ffn_down = "mlp.c_proj" },
}
local experts = { ffn_gate_exps = "w1", ffn_down_exps = "w2", ffn_up_exps = "w3" }

--- The published name of a tensor of a GGUF file, or nil. "blk.3.attn_q.weight" is
-- "model.layers.3.self_attn.q_proj.weight" in all architectures but gpt2.
---@param name string
---@param architecture string
---@return string?
function M.rename(name, architecture)
  local names = architecture == "gpt2" and gpt2 or decoder
  local stem, kind = name:match "^([%w_]+)%.(%a+)$"
  if stem then return names.outer[stem] and names.outer[stem] .. "." .. kind end
  local layer, part, ending = name:match "^blk%.(%d+)%.([%w_]+)%.(%a+)$"
  if not layer or not names.inner[part] then return nil end
  return names.layer:format(layer, names.inner[part] .. "." .. ending)
end

local function inverse(map)
  local other = {}
  for key, value in pairs(map) do other[value] = key end
  return other
end

--- The other way: the name in a GGUF file of a published one, or nil.
---@param name string
---@param architecture string
---@return string?
function M.gguf_name(name, architecture)
  local names = architecture == "gpt2" and gpt2 or decoder
  local stem, kind = name:match "^(.*)%.(%a+)$"
  local outer = inverse(names.outer)[stem]
  if outer then return outer .. "." .. kind end
  local layer, inner = stem:match "^model%.layers%.(%d+)%.(.*)$"
  if architecture == "gpt2" then layer, inner = stem:match "^h%.(%d+)%.(.*)$" end
  local part = inner and inverse(names.inner)[inner]
  return part and ("blk.%s.%s.%s"):format(layer, part, kind)
end

--- The keys of a config.json by the metadata of a file.
---@param metadata table<string, any>
---@param tensors table<string, Tensor>
---@return table config
function M.config(metadata, tensors)
  local architecture = metadata["general.architecture"]
  local known = architectures[architecture]
  if not known then
    local names = {}
    for name in pairs(architectures) do names[#names + 1] = name end
    table.sort(names)
    error(("architecture '%s' is not known; there are %s"):format(tostring(architecture), table.concat(names, ", ")), 0)
  end
  local function get(key) return metadata[architecture .. "." .. key] end
  local embedding = tensors["token_embd.weight"]
  local vocabulary = embedding and embedding.shape[1] or get "vocab_size"
  if known.model_type == "gpt2" then
    return { model_type = "gpt2", vocab_size = vocabulary, n_positions = get "context_length",
      n_embd = get "embedding_length", n_layer = get "block_count", n_head = get "attention.head_count",
      n_inner = get "feed_forward_length", layer_norm_epsilon = get "attention.layer_norm_epsilon" }
  end
  local config = { model_type = known.model_type, vocab_size = vocabulary, hidden_size = get "embedding_length",
    intermediate_size = get "feed_forward_length", num_hidden_layers = get "block_count",
    num_attention_heads = get "attention.head_count", num_key_value_heads = get "attention.head_count_kv",
    head_dim = get "attention.key_length" or get "rope.dimension_count",
    max_position_embeddings = get "context_length", rms_norm_eps = get "attention.layer_norm_rms_epsilon",
    rope_theta = get "rope.freq_base", tie_word_embeddings = tensors["output.weight"] == nil,
    bos_token_id = metadata["tokenizer.ggml.bos_token_id"], eos_token_id = metadata["tokenizer.ggml.eos_token_id"] }
  if known.turned then config.attention_bias = tensors["blk.0.attn_q.bias"] ~= nil end
  local scaling = get "rope.scaling.type"
  if scaling and scaling ~= "none" then
    config.rope_scaling = { rope_type = scaling, factor = get "rope.scaling.factor",
      original_max_position_embeddings = get "rope.scaling.original_context_length" }
  end
  if tensors["rope_freqs.weight"] then
    config.rope_scaling = { rope_type = "divided", divisors = tensors["rope_freqs.weight"]:flatten():tolist() }
  end
  if get "expert_count" then
    config.model_type = "mixtral"
    config.num_local_experts, config.num_experts_per_tok = get "expert_count", get "expert_used_count"
    config.attention_bias = nil
  end
  local window = get "attention.sliding_window"
  if window and known.model_type == "llama" and not get "expert_count" then config.model_type = "mistral" end
  if window and known.model_type ~= "qwen2" and known.model_type ~= "qwen3" then config.sliding_window = window end
  if config.model_type == "mistral" then config.attention_bias = nil end
  return config
end

-- Rows of each head from interleaved pairs (0, 1), (2, 3) ... to halves (0, d/2), (1, d/2 + 1) ..., which is how
-- published files have them.
local function halves(t, heads)
  local shape = t.shape
  local order = t:reshape(heads, shape[1] // heads // 2, 2, -1):transpose(1, 2)
  return order:reshape(shape)
end

--- The tensors under the published names. The second result says that queries and keys are still in the file's order,
-- whose pairs are neighbours: block-quantized rows are not moved.
---@param tensors table<string, Tensor>
---@param metadata table<string, any>
---@param config table  of M.config()
---@return table<string, Tensor> state
---@return boolean interleaved
function M.state(tensors, metadata, config)
  local architecture = metadata["general.architecture"]
  local turned, state, interleaved = architectures[architecture].turned, {}, false
  for name, t in pairs(tensors) do
    if turned and name:find "%.attn_[qk]%.weight$" and not t:is_floating_point() then interleaved = true end
  end
  for name, t in pairs(tensors) do
    local layer, part = name:match "^blk%.(%d+)%.([%w_]+)%.weight$"
    local new = M.rename(name, architecture)
    if experts[part] then
      for e = 0, t.shape[1] - 1 do
        local expert = ("model.layers.%s.block_sparse_moe.experts.%d.%s.weight"):format(layer, e, experts[part])
        state[expert] = t:select(0, e)
      end
    elseif turned and not interleaved and name:find "%.attn_[qk]%." then
      state[new] = halves(t, name:find "attn_q" and config.num_attention_heads or config.num_key_value_heads
        or config.num_attention_heads)
    elseif architecture == "gpt2" and (part == "attn_qkv" or part == "attn_output" or part == "ffn_up"
      or part == "ffn_down") then
      state[new] = t:transpose(0, 1) -- GPT-2's own files have these turned
    elseif name ~= "rope_freqs.weight" then
      state[new or name] = t
    end
  end
  return state, interleaved
end

--- The tokenizer that a file has in its metadata, or nil.
---@param metadata table<string, any>
---@return Tokenizer?
function M.tokenizer(metadata)
  local function get(key) return metadata["tokenizer.ggml." .. key] end
  if not get "model" then return nil end
  local function id(name) return get(name .. "_token_id") end
  return ty.tokenizer.new { model = get "model", pre = get "pre", tokens = get "tokens", scores = get "scores",
    merges = get "merges", token_types = get "token_type", bos = id "bos", eos = id "eos", unk = id "unknown",
    sep = id "seperator", pad = id "padding", add_bos = get "add_bos_token", add_eos = get "add_eos_token",
    add_space_prefix = get "add_space_prefix" }
end

--- The dtype to compute in: that of the token embedding, f32 when it is block-quantized. Files keep norms in f32 beside
-- half weights.
function M.dtype(tensors)
  local embedding = tensors["token_embd.weight"]
  return embedding and embedding:is_floating_point() and embedding.dtype or "f32"
end

return M
