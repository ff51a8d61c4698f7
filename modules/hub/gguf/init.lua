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
  bert = { model_type = "bert" },
  t5 = { model_type = "t5" },
}

-- Names outside of layers, and inside: what layers begin with here, there, and the parts of each.
local decoder = {
  outer = { token_embd = "model.embed_tokens", output_norm = "model.norm", output = "lm_head" },
  { "blk", "model.layers.%s.%s", { attn_norm = "input_layernorm", ffn_norm = "post_attention_layernorm",
    attn_q = "self_attn.q_proj", attn_k = "self_attn.k_proj", attn_v = "self_attn.v_proj",
    attn_output = "self_attn.o_proj", attn_q_norm = "self_attn.q_norm", attn_k_norm = "self_attn.k_norm",
    ffn_gate = "mlp.gate_proj", ffn_up = "mlp.up_proj", ffn_down = "mlp.down_proj",
    ffn_gate_inp = "block_sparse_moe.gate" } },
}
local gpt2 = {
  outer = { token_embd = "wte", position_embd = "wpe", output_norm = "ln_f", output = "lm_head" },
  { "blk", "h.%s.%s", { attn_norm = "ln_1", ffn_norm = "ln_2", attn_qkv = "attn.c_attn", attn_output = "attn.c_proj",
    ffn_up = "mlp.c_fc", ffn_down = "mlp.c_proj" } },
}
local bert = {
  outer = { token_embd = "embeddings.word_embeddings", position_embd = "embeddings.position_embeddings",
    token_types = "embeddings.token_type_embeddings", token_embd_norm = "embeddings.LayerNorm" },
  { "blk", "encoder.layer.%s.%s", { attn_q = "attention.self.query", attn_k = "attention.self.key",
    attn_v = "attention.self.value", attn_output = "attention.output.dense",
    attn_output_norm = "attention.output.LayerNorm", ffn_up = "intermediate.dense", ffn_down = "output.dense",
    layer_output_norm = "output.LayerNorm" } },
}
-- `gated`: the feed-forward networks have two matrices that lead in, as in version 1.1.
local function t5(gated)
  local names = { outer = { token_embd = "shared", ["enc.output_norm"] = "encoder.final_layer_norm",
    ["dec.output_norm"] = "decoder.final_layer_norm", output = "lm_head" } }
  for i, side in ipairs { "encoder", "decoder" } do
    local parts, last = {}, ("layer.%d."):format(i)
    local function attention(prefix, layer, name)
      parts[prefix .. "attn_norm"] = layer .. "layer_norm"
      for _, part in ipairs { "q", "k", "v", "o" } do
        parts[prefix .. "attn_" .. part] = ("%s%s.%s"):format(layer, name, part)
      end
    end
    attention("", "layer.0.", "SelfAttention")
    parts.attn_rel_b = "layer.0.SelfAttention.relative_attention_bias"
    if side == "decoder" then attention("cross_", "layer.1.", "EncDecAttention") end
    parts.ffn_norm, parts.ffn_down = last .. "layer_norm", last .. "DenseReluDense.wo"
    parts.ffn_up = last .. (gated and "DenseReluDense.wi_1" or "DenseReluDense.wi")
    parts.ffn_gate = gated and last .. "DenseReluDense.wi_0" or nil
    names[i] = { side:sub(1, 3) .. ".blk", side .. ".block.%s.%s", parts }
  end
  return names
end
local tables = { gpt2 = gpt2, bert = bert, t5 = t5(false), ["t5 gated"] = t5(true) }
local experts = { ffn_gate_exps = "w1", ffn_down_exps = "w2", ffn_up_exps = "w3" }

--- The published name of a tensor of a GGUF file, or nil. "blk.3.attn_q.weight" is
-- "model.layers.3.self_attn.q_proj.weight" in all architectures but gpt2, bert, t5 and "t5 gated", which is t5 with
-- gated feed-forward networks.
---@param name string
---@param architecture string
---@return string?
function M.rename(name, architecture)
  local names = tables[architecture] or decoder
  local stem, kind = name:match "^(.*)%.(%a+)$"
  if not stem then return nil end
  if names.outer[stem] then return names.outer[stem] .. "." .. kind end
  local prefix, layer, part = stem:match "^([%a.]-)%.?(%d+)%.([%w_]+)$"
  for _, group in ipairs(names) do
    local inner = prefix == group[1] and group[3][part]
    if inner then return group[2]:format(layer, inner .. "." .. kind) end
  end
  return nil
end

local function key_of(map, value)
  for key, other in pairs(map) do
    if other == value then return key end
  end
  return nil
end

--- The other way: the name in a GGUF file of a published one, or nil.
---@param name string
---@param architecture string
---@return string?
function M.gguf_name(name, architecture)
  local names = tables[architecture] or decoder
  local stem, kind = name:match "^(.*)%.(%a+)$"
  if not stem then return nil end
  local outer = key_of(names.outer, stem)
  if outer then return outer .. "." .. kind end
  for _, group in ipairs(names) do
    local pattern = "^" .. group[2]:gsub("%.", "%%."):gsub("%%s", "(%%d+)", 1):gsub("%%s", "(.*)", 1) .. "$"
    local layer, inner = stem:match(pattern)
    local part = layer and key_of(group[3], inner)
    if part then return ("%s.%s.%s.%s"):format(group[1], layer, part, kind) end
  end
  return nil
end

-- Keys of config.json for the architectures that are not like Llama: configs[architecture](get, tensors, metadata).
local configs = {}

function configs.gpt2(get, tensors)
  return { n_positions = get "context_length", n_embd = get "embedding_length", n_layer = get "block_count",
    n_head = get "attention.head_count", n_inner = get "feed_forward_length",
    tie_word_embeddings = tensors["output.weight"] == nil,
    layer_norm_epsilon = get "attention.layer_norm_epsilon" }
end

function configs.bert(get, tensors)
  local types = tensors["token_types.weight"]
  return { hidden_size = get "embedding_length", num_hidden_layers = get "block_count",
    num_attention_heads = get "attention.head_count", intermediate_size = get "feed_forward_length",
    max_position_embeddings = get "context_length", layer_norm_eps = get "attention.layer_norm_epsilon",
    type_vocab_size = types and types.shape[1], architectures = { "BertModel" } }
end

-- What version 1.0 does besides, it does where the head is the token embedding.
function configs.t5(get, tensors, metadata)
  local gated, tied = tensors["enc.blk.0.ffn_gate.weight"] ~= nil, tensors["output.weight"] == nil
  return { d_model = get "embedding_length", d_kv = get "attention.key_length", d_ff = get "feed_forward_length",
    num_layers = get "block_count", num_decoder_layers = get "decoder_block_count", num_heads = get
    "attention.head_count", relative_attention_num_buckets = get "attention.relative_buckets_count",
    layer_norm_epsilon = get "attention.layer_norm_rms_epsilon",
    feed_forward_proj = gated and "gated-gelu" or "relu", tie_word_embeddings = tied, scale_decoder_outputs = tied,
    decoder_start_token_id = get "decoder_start_token_id",
    pad_token_id = metadata["tokenizer.ggml.padding_token_id"], eos_token_id = metadata["tokenizer.ggml.eos_token_id"] }
end

--- The factor that YaRN gives the scores, which files count as 1.
function M.yarn_attention(factor) return factor <= 1 and 1 or 0.1 * math.log(factor) + 1 end

local function rope_scaling(get)
  local kind, factor = get "rope.scaling.type", get "rope.scaling.factor"
  if not kind or kind == "none" then return nil end
  local scaling = { rope_type = kind, factor = factor,
    original_max_position_embeddings = get "rope.scaling.original_context_length" }
  if kind == "yarn" then
    scaling.beta_fast, scaling.beta_slow = get "rope.scaling.yarn_beta_fast", get "rope.scaling.yarn_beta_slow"
    local attention = get "rope.scaling.attn_factor"
    if type(attention) == "number" and type(factor) == "number" then
      scaling.attention_factor = attention * M.yarn_attention(factor)
    end
  end
  return scaling
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
  if configs[architecture] then
    local config = configs[architecture](get, tensors, metadata)
    config.model_type, config.vocab_size = known.model_type, vocabulary
    return config
  end
  local config = { model_type = known.model_type, vocab_size = vocabulary, hidden_size = get "embedding_length",
    intermediate_size = get "feed_forward_length", num_hidden_layers = get "block_count",
    num_attention_heads = get "attention.head_count", num_key_value_heads = get "attention.head_count_kv",
    head_dim = get "attention.key_length" or get "rope.dimension_count",
    max_position_embeddings = get "context_length", rms_norm_eps = get "attention.layer_norm_rms_epsilon",
    rope_theta = get "rope.freq_base", tie_word_embeddings = tensors["output.weight"] == nil,
    bos_token_id = metadata["tokenizer.ggml.bos_token_id"], eos_token_id = metadata["tokenizer.ggml.eos_token_id"] }
  if known.turned then
    config.attention_bias = tensors["blk.0.attn_q.bias"] ~= nil
    config.mlp_bias = tensors["blk.0.ffn_up.bias"] ~= nil
  end
  config.rope_scaling = rope_scaling(get)
  if tensors["rope_freqs.weight"] then
    config.rope_scaling = { rope_type = "divided", divisors = tensors["rope_freqs.weight"]:flatten():tolist() }
  end
  if get "expert_count" then
    config.model_type = "mixtral"
    config.num_local_experts, config.num_experts_per_tok = get "expert_count", get "expert_used_count"
    config.attention_bias, config.mlp_bias = nil, nil
  end
  local window = get "attention.sliding_window"
  if window and known.model_type == "llama" and not get "expert_count" then config.model_type = "mistral" end
  if window and known.model_type ~= "qwen2" and known.model_type ~= "qwen3" then config.sliding_window = window end
  if config.model_type == "mistral" then config.attention_bias, config.mlp_bias = nil, nil end
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
  local names = tensors["enc.blk.0.ffn_gate.weight"] and "t5 gated" or architecture
  for name, t in pairs(tensors) do
    if turned and name:find "%.attn_[qk]%.weight$" and not t:is_floating_point() then interleaved = true end
  end
  for name, t in pairs(tensors) do
    local layer, part = name:match "^blk%.(%d+)%.([%w_]+)%.weight$"
    local new = M.rename(name, names)
    if experts[part] then
      for e = 0, t.shape[1] - 1 do
        local expert = ("model.layers.%s.block_sparse_moe.experts.%d.%s.weight"):format(layer, e, experts[part])
        state[expert] = t:select(0, e)
      end
    elseif turned and not interleaved and name:find "%.attn_[qk]%." then
      state[new] = halves(t, name:find "attn_q" and config.num_attention_heads or config.num_key_value_heads
        or config.num_attention_heads)
    elseif architecture == "gpt2" and t:is_floating_point() and (part == "attn_qkv" or part == "attn_output"
      or part == "ffn_up" or part == "ffn_down") then
      state[new] = t:transpose(0, 1) -- GPT-2's own files have these turned; codes stay as they are
    elseif name ~= "rope_freqs.weight" then
      state[new or name] = t
    end
  end
  return state, interleaved
end

local alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

--- Bytes as text of base64, which is how a tokenizer.json has a table of characters, and back.
function M.to_base64(bytes)
  return (bytes:gsub("..?.?", function(three)
    local a, b, c = three:byte(1, 3)
    local n = a << 16 | (b or 0) << 8 | (c or 0)
    local text = ""
    for shift = 18, 0, -6 do
      local at = n >> shift & 63
      text = text .. alphabet:sub(at + 1, at + 1)
    end
    return text:sub(1, #three + 1) .. ("="):rep(3 - #three)
  end))
end

--- The bytes of a text in base64; what is no digit of it is passed over.
---@param text string
---@return string
function M.from_base64(text)
  local value = {}
  for i = 1, #alphabet do value[alphabet:sub(i, i)] = i - 1 end
  return (text:gsub("[^%w+/]", ""):gsub("..?.?.?", function(four)
    local n = 0
    for i = 1, 4 do n = n << 6 | (value[four:sub(i, i)] or 0) end
    return string.char(n >> 16 & 255, n >> 8 & 255, n & 255):sub(1, #four - 1)
  end))
end

--- The tokenizer that a file has in its metadata, or nil: the whole tokenizer.json where that is in it, otherwise what
-- the keys of ggml say.
---@param metadata table<string, any>
---@return Tokenizer?
function M.tokenizer(metadata)
  local function get(key) return metadata["tokenizer.ggml." .. key] end
  local function id(name) return get(name .. "_token_id") end
  local whole, charsmap = metadata["tokenizer.huggingface.json"], get "precompiled_charsmap"
  if type(whole) == "string" then
    local tok = ty.tokenizer.parse(whole, "tokenizer.huggingface.json")
    local fields = ty.tokenizer.fields(tok)
    for ours, theirs in pairs { bos = "bos", eos = "eos", unk = "unknown", sep = "seperator", pad = "padding" } do
      fields[ours] = id(theirs)
    end
    return tok
  end
  if not get "model" then return nil end
  if charsmap ~= nil then
    local ok, bytes = pcall(function() return ty.io.to_bytes(ty.tensor(charsmap, { dtype = "u8" })) end)
    if not ok then error("tokenizer.ggml.precompiled_charsmap must be a list of bytes", 0) end
    charsmap = M.to_base64(bytes)
  end
  return ty.tokenizer.new { charsmap = charsmap, remove_extra_whitespaces = get "remove_extra_whitespaces",
    model = get "model", pre = get "pre", tokens = get "tokens", scores = get "scores",
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
