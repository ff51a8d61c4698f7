--- Models to GGUF files, their large matrices in blocks of few bits.
local ty = require "tycho"
local llm = require "tycho.llm"
local gguf = require "tycho.llm.gguf"

local M = {}

local blocks = { q8_0 = 32, q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256 }
-- general.file_type
local file_types = { f32 = 0, f16 = 1, q4_0 = 2, q8_0 = 7, q2_k = 10, q3_k = 11, q4_k = 15, q6_k = 18, bf16 = 32 }

-- model_type -> architecture, and whether llama.cpp wants neighbouring pairs in the rows of queries and keys.
local architectures = {
  llama = { "llama", true }, mistral = { "llama", true }, qwen2 = { "qwen2" }, qwen3 = { "qwen3" }, gpt2 = { "gpt2" },
}

-- Rows of each head from halves (0, d/2), (1, d/2 + 1) ... to pairs (0, 1), (2, 3) ...
local function pairs_of_rows(t, heads)
  local shape = t.shape
  if blocks[t.dtype] then -- rows of bytes
    local rows = ty.io.from_bytes(ty.io.to_bytes(t), "u8")
    return ty.io.from_bytes(ty.io.to_bytes(pairs_of_rows(rows:reshape(shape[1], -1), heads)), t.dtype, shape)
  end
  return t:reshape(heads, 2, shape[1] // heads // 2, -1):transpose(1, 2):reshape(shape)
end

local function model_metadata(model, architecture)
  local c = model.config
  local metadata = { ["general.architecture"] = architecture, ["general.quantization_version"] = 2 }
  local types = {}
  local function set(key, value, kind)
    metadata[architecture .. "." .. key] = value
    if kind and value ~= nil then types[architecture .. "." .. key] = kind end
  end
  if architecture == "gpt2" then
    set("context_length", c.n_positions)
    set("embedding_length", c.n_embd)
    set("block_count", c.n_layer)
    set("attention.head_count", c.n_head)
    set("feed_forward_length", math.type(c.n_inner) and c.n_inner or 4 * c.n_embd)
    set("attention.layer_norm_epsilon", c.layer_norm_epsilon, "f32")
    return metadata, types
  end
  local theta = c.rope_theta
  for _, rope in ipairs { c.rope_scaling or {}, c.rope_parameters or {} } do -- the older and the newer name
    if rope ~= ty.io.null then
      local kind = rope.rope_type or rope.type or "default"
      if kind ~= "default" then error(("quant.convert: rope_type %s is not written yet"):format(kind), 0) end
      theta = rope.rope_theta or theta
    end
  end
  if c.use_sliding_window == true then
    error("quant.convert: a sliding window in some of the layers cannot be written", 0)
  end
  set("context_length", c.max_position_embeddings)
  set("embedding_length", c.hidden_size)
  set("block_count", c.num_hidden_layers)
  set("attention.head_count", c.num_attention_heads)
  set("attention.head_count_kv", c.num_key_value_heads)
  set("feed_forward_length", c.intermediate_size)
  set("attention.layer_norm_rms_epsilon", c.rms_norm_eps, "f32")
  set("rope.freq_base", theta, "f32")
  local width = math.type(c.head_dim) and c.head_dim or c.hidden_size // c.num_attention_heads
  set("rope.dimension_count", width)
  set("attention.key_length", width)
  set("attention.value_length", width)
  if math.type(c.sliding_window) then set("attention.sliding_window", c.sliding_window) end
  return metadata, types
end

-- What tokenizer.json says, as GGUF has it: byte-level BPE ("gpt2") and BPE with byte fallback ("llama").
local function add_tokenizer(metadata, types, folder)
  local path = folder .. "/tokenizer.json"
  if not ty.io.exists(path) then return false end
  local tok, json = ty.tokenizer.load(folder), ty.io.load(path)
  if tok.model ~= "BPE" then
    error(("quant.convert: %s: a %s tokenizer is not written yet, only BPE"):format(path, tok.model), 0)
  end
  local byte_level = not json.model.byte_fallback
  local ranks, merges = {}, {}
  for i, merge in ipairs(json.model.merges) do
    if type(merge) == "table" then merge = merge[1] .. " " .. merge[2] end
    merges[i] = merge
    local whole = merge:gsub(" ", "", 1)
    ranks[whole] = ranks[whole] or i
  end
  local tokens, scores, kinds = {}, {}, {}
  for id = 0, tok.size - 1 do
    local text, special = tok:token(id)
    tokens[id + 1] = text or ("[PAD%d]"):format(id)
    scores[id + 1] = -(ranks[text] or 0) + 0.0
    kinds[id + 1] = special == "special" and 3 or special == "added" and 4 or not text and 5
      or not byte_level and text:find "^<0x%x%x>$" and 6 or 1
  end
  local function set(key, value, kind)
    metadata["tokenizer.ggml." .. key] = value
    if kind then types["tokenizer.ggml." .. key] = kind end
  end
  set("model", byte_level and "gpt2" or "llama")
  set("tokens", tokens)
  set("token_type", kinds, "i32[]")
  if byte_level then
    local pattern = ty.io.json_encode(json.pre_tokenizer or {})
    local general = pattern:find("\\p{L}", 1, true) or pattern:find("\\\\p{L}", 1, true)
    set("pre", not general and "gpt-2" or pattern:find("{1,3}", 1, true) and "llama-bpe" or "qwen2")
    set("merges", merges)
  else
    set("scores", scores, "f32[]")
  end
  for _, name in ipairs { "bos", "eos", "pad" } do
    set((name == "pad" and "padding" or name) .. "_token_id", tok[name])
  end
  return true
end

-- The dtype for a tensor: matrices that fill whole blocks take the wanted one, and the head, whose errors nothing
-- averages out, 6 bits where the others get 4.
local function dtype_for(name, t, wanted, tied)
  if t.ndim < 2 or name:find "ffn_gate_inp" then return "f32" end
  local columns = t.shape[t.ndim]
  local head = name == "output.weight" or (tied and name == "token_embd.weight")
  if head and wanted:find "^q[234]_k$" then wanted = "q6_k" elseif head and wanted == "q4_0" then wanted = "q8_0" end
  for _, dtype in ipairs { wanted, "q8_0" } do
    if not blocks[dtype] or columns % blocks[dtype] == 0 then return dtype end
  end
  return "f16"
end

-- Writes a model; kind_of(name in the file, tensor, whether the head is the embedding) says in which dtype.
local function write(who, model, path, folder, file_type, kind_of)
  local known = architectures[model.model_type]
  if not known then error(("%s: a %s model cannot be written"):format(who, tostring(model.model_type)), 3) end
  local architecture, turns = known[1], known[2] and not model.interleaved
  local metadata, types = model_metadata(model, architecture)
  if folder then add_tokenizer(metadata, types, folder) end
  metadata["general.file_type"] = file_types[file_type]
  local tensors, report = {}, { parameters = 0, tensors = {} }
  local bits, counted, wrong, all = 0, 0, 0, 0
  local state = model:state_dict()
  local tied = not state["lm_head.weight"]
  for name, t in pairs(state) do
    local new = gguf.gguf_name(name, architecture) or error(who .. ": no name for " .. name, 0)
    local c = model.config
    if t.device ~= "cpu" then t = t:to "cpu" end
    if turns and name:find "%.[qk]_proj%." then
      t = pairs_of_rows(t, name:find "q_proj" and c.num_attention_heads or c.num_key_value_heads)
    elseif architecture == "gpt2" and t.ndim == 2 and name:find "c_" then
      t = t:transpose(0, 1):contiguous()
    end
    local kind = kind_of(new, t, tied)
    local q = t.dtype == kind and t:detach() or t:detach():to(kind)
    if blocks[kind] then
      local value = t:detach():to "f32"
      local change = (q:to "f32" - value):to "f64"
      wrong, all = wrong + (change * change):sum():item(), all + (value * value):sum():item()
      bits, counted = bits + 8 * #ty.io.to_bytes(q), counted + t:numel()
    end
    tensors[new], report.tensors[new] = q, kind
    report.parameters = report.parameters + t:numel()
  end
  ty.io.save_gguf(path, tensors, metadata, { types = types })
  report.bytes = ty.io.stat(path).size
  report.bits = counted > 0 and bits / counted or 0
  report.error = all > 0 and math.sqrt(wrong / all) or 0
  return report
end

--- Writes a published model (a Hugging Face folder) as a GGUF file. dtype: q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, or f32,
--- f16, bf16; rows that are no whole blocks take q8_0 or f16, vectors stay f32. Families: Llama, Mistral, Qwen2, Qwen3;
--- GPT-2 with f32, f16 and bf16 only, since its weights lie the other way.
---@param folder string
---@param path string  of the GGUF file
---@param dtype string
---@return { bytes: integer, parameters: integer, bits: number, error: number, tensors: table }  bits: of each parameter
--- that is quantized; error: the root mean square of what quantizing changed, over that of the weights
function M.convert(folder, path, dtype)
  if not file_types[dtype] then
    error(("quant.convert: dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, f32, f16 or bf16, got %s"):format(
      tostring(dtype)), 2)
  end
  local model = llm.load(folder)
  if model.model_type == "gpt2" and blocks[dtype] then
    error("quant.convert: GPT-2's weights lie the other way: f32, f16 and bf16 only", 2)
  end
  return write("quant.convert", model, path, folder, dtype, function(name, t, tied)
    return dtype_for(name, t, dtype, tied)
  end)
end

--- Writes a model as a GGUF file, its block-quantized weights (of quant.gptq, or of a file) as they are. options:
--- tokenizer (the folder whose tokenizer.json goes with it), dtype (f32: of the other matrices).
---@param model LanguageModel
---@param path string
---@param options? { tokenizer?: string, dtype?: string }
---@return table report  as convert() has it
function M.save(model, path, options)
  local o = ty.nn.options("quant.save", options, { tokenizer = ty.nn.none, dtype = "f32" })
  if not file_types[o.dtype] then
    error(("quant.save: dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, f32, f16 or bf16, got %s"):format(
      tostring(o.dtype)), 2)
  end
  local most, counts = o.dtype, {}
  for name, t in pairs(model:state_dict()) do
    if t.dtype == "nf4" then error(("quant.save: GGUF has no nf4, in which %s is"):format(name), 2) end
    if blocks[t.dtype] then
      counts[t.dtype] = (counts[t.dtype] or 0) + t:numel()
      if counts[t.dtype] > (counts[most] or 0) then most = t.dtype end
    end
  end
  return write("quant.save", model, path, o.tokenizer, most, function(name, t, tied)
    return blocks[t.dtype] and t.dtype or dtype_for(name, t, o.dtype, tied)
  end)
end

return M
