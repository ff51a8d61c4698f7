--- Models to GGUF files, their large matrices in blocks of few bits.
local ty = require "tycho"
local loader = require "tycho.hub.load"
local gguf = require "tycho.hub.gguf"
local add_tokenizer = require "tycho.hub.gguf.vocabulary"
local describe = require "tycho.hub.gguf.metadata"

local M = {}

local blocks = { q8_0 = 32, q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256, mxfp4 = 32 }
-- general.file_type
local file_types = { f32 = 0, f16 = 1, q4_0 = 2, q8_0 = 7, q2_k = 10, q3_k = 11, q4_k = 15, q6_k = 18, bf16 = 32,
  mxfp4 = 38 }

-- model_type -> architecture, and whether llama.cpp wants neighbouring pairs in the rows of queries and keys.
local architectures = {
  llama = { "llama", true }, mistral = { "llama", true }, qwen2 = { "qwen2" }, qwen3 = { "qwen3" }, gpt2 = { "gpt2" },
  bert = { "bert" }, t5 = { "t5" },
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

-- The dtype for a tensor: matrices that fill whole blocks take the wanted one, and the head, whose errors nothing
-- averages out, 6 bits where the others get 4. Positions, kinds of tokens and biases of attention are small and stay.
local function dtype_for(name, t, wanted, tied)
  if t.ndim < 2 or name:find "ffn_gate_inp" or name:find "attn_rel_b" or name:find "^token_types"
    or name:find "^position_embd" then
    return "f32"
  end
  local columns = t.shape[t.ndim]
  local head = name == "output.weight" or (tied and name == "token_embd.weight")
  if head and wanted:find "^q[234]_k$" then wanted = "q6_k" end
  if head and (wanted == "q4_0" or wanted == "mxfp4") then wanted = "q8_0" end
  for _, dtype in ipairs { wanted, "q8_0" } do
    if not blocks[dtype] or columns % blocks[dtype] == 0 then return dtype end
  end
  return "f16"
end

--- A function that gives the name of a model's tensor in GGUF files, or its own name where they have none for it.
---@param model Module
---@return fun(name: string): string
function M.names(model)
  local known = architectures[model.model_type]
  if not known then return function(name) return name end end
  local names = known[1]
  if names == "t5" and tostring(model.config.feed_forward_proj):find "^gated" then names = "t5 gated" end
  return function(name)
    return gguf.gguf_name(names == "bert" and name:gsub("^bert%.", "") or name, names) or name
  end
end

-- The codes of a tensor, by the importance of its columns where that is known.
local function encode(t, kind, name, importance, report)
  local mean = importance and blocks[kind] and kind ~= "q8_0" and importance:get(name, t.shape[t.ndim])
  if not mean then return t:to(kind) end
  report.weighed = report.weighed + 1
  return t:to "f32":quantize(kind, mean)
end

local function check_importance(who, importance)
  if importance ~= nil and (type(importance) ~= "table" or type(importance.get) ~= "function") then
    error(("%s: importance: expected one of quant.imatrix, got %s"):format(who,
      require("tycho.arguments").describe(importance)), 3)
  end
end

-- Writes a model; kind_of(name in the file, tensor, whether the head is the embedding) says in which dtype.
local function write(who, model, path, folder, file_type, kind_of, importance)
  local known = architectures[model.model_type]
  if not known then error(("%s: a %s model cannot be written"):format(who, tostring(model.model_type)), 3) end
  local architecture, turns = known[1], known[2] and not model.interleaved
  local metadata, types, more = describe(model, architecture)
  if folder then add_tokenizer(metadata, types, folder) end
  if architecture == "bert" then metadata["tokenizer.ggml.token_type_count"] = model.config.type_vocab_size end
  metadata["general.file_type"] = file_types[file_type]
  local tensors, report = {}, { parameters = 0, tensors = {}, weighed = 0 }
  local bits, counted, wrong, all = 0, 0, 0, 0
  local state = model:state_dict()
  local tied, c = not state["lm_head.weight"], model.config
  local names = architecture == "t5" and c.feed_forward_proj:find "^gated" and "t5 gated" or architecture
  for name, t in pairs(state) do
    if architecture == "bert" then
      name = name:gsub("^bert%.", "")
      if name:find "^pooler%." or name:find "^cls%." then goto continue end
    end
    local new = gguf.gguf_name(name, names) or error(who .. ": no name for " .. name, 0)
    if t.device ~= "cpu" then t = t:to "cpu" end
    if turns and name:find "%.[qk]_proj%." then
      t = pairs_of_rows(t, name:find "q_proj" and c.num_attention_heads or c.num_key_value_heads)
    elseif architecture == "gpt2" and t.ndim == 2 and name:find "c_" and not blocks[t.dtype] then -- codes lie by rows
      t = t:transpose(0, 1):contiguous()
    end
    local kind = kind_of(new, t, tied)
    local q = t.dtype == kind and t:detach() or encode(t:detach(), kind, new, importance, report)
    if blocks[kind] then
      local value = t:detach():to "f32"
      local change = (q:to "f32" - value):to "f64"
      wrong, all = wrong + (change * change):sum():item(), all + (value * value):sum():item()
      bits, counted = bits + 8 * q:nbytes(), counted + t:numel()
    end
    tensors[new], report.tensors[new] = q, kind
    report.parameters = report.parameters + t:numel()
    ::continue::
  end
  for name, t in pairs(more) do tensors[name] = t end
  if importance then
    if report.weighed == 0 then
      error(("%s: importance: expected one of weights that are encoded, got none of them"):format(who), 0)
    end
    metadata["quantize.imatrix.entries_count"], types["quantize.imatrix.entries_count"] = report.weighed, "i32"
  end
  ty.io.save_gguf(path, tensors, metadata, { types = types })
  report.bytes = ty.io.stat(path).size
  report.bits = counted > 0 and bits / counted or 0
  report.error = all > 0 and math.sqrt(wrong / all) or 0
  return report
end

--- Writes a published model (a Hugging Face folder) as a GGUF file. dtype: q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, mxfp4,
--- or f32, f16, bf16; rows that are no whole blocks take q8_0 or f16, vectors stay f32. Families: Llama, Mistral,
--- Qwen2, Qwen3, GPT-2, T5, and of BERT the encoder, without a pooler or a head. A tokenizer.json in the folder is
--- written as well.
---@param folder string
---@param path string  of the GGUF file
---@param dtype string
---@param options? { importance?: table }  of quant.imatrix: by which columns the codes lose least
---@return { bytes: integer, parameters: integer, bits: number, error: number, tensors: table, weighed: integer } report
--- bits: of each parameter that is quantized; error: the root mean square of what quantizing changed, over that of the
--- weights; weighed: tensors whose codes were chosen by importance
function M.convert(folder, path, dtype, options)
  local o = ty.nn.options("quant.convert", options, { importance = ty.nn.none }, { importance = "a table" })
  check_importance("quant.convert", o.importance)
  if not file_types[dtype] then
    error(("quant.convert: dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, mxfp4, f32, f16 or bf16, got %s"):format(
      tostring(dtype)), 2)
  end
  return write("quant.convert", loader.load(folder), path, folder, dtype, function(name, t, tied)
    return dtype_for(name, t, dtype, tied)
  end, o.importance)
end

--- Writes a model as a GGUF file, its block-quantized weights (of quant.gptq, or of a file) as they are. options:
--- tokenizer (the folder whose tokenizer.json goes with it), dtype (f32: of the other matrices), importance (of
--- quant.imatrix: by which columns the codes of those lose least).
---@param model LanguageModel
---@param path string
---@param options? { tokenizer?: string, dtype?: string, importance?: table }
---@return table report  as convert() has it
function M.save(model, path, options)
  local o = ty.nn.options("quant.save", options, { tokenizer = ty.nn.none, dtype = "f32",
    importance = ty.nn.none }, { tokenizer = "a string", importance = "a table" })
  local expect = require("tycho.arguments").expect
  expect("quant.save", "model", model, "a module")
  expect("quant.save", "path", path, "a string")
  check_importance("quant.save", o.importance)
  if not file_types[o.dtype] then
    error(("quant.save: dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, mxfp4, f32, f16 or bf16, got %s"):format(
      tostring(o.dtype)), 2)
  end
  local most, counts = o.dtype, {}
  for name, t in pairs(model:state_dict()) do
    if t.dtype == "nf4" or t.dtype == "nvfp4" then
      error(("quant.save: GGUF has no %s, in which %s is"):format(t.dtype, name), 2)
    end
    if blocks[t.dtype] then
      counts[t.dtype] = (counts[t.dtype] or 0) + t:numel()
      if counts[t.dtype] > (counts[most] or 0) then most = t.dtype end
    end
  end
  return write("quant.save", model, path, o.tokenizer, most, function(name, t, tied)
    return blocks[t.dtype] and t.dtype or dtype_for(name, t, o.dtype, tied)
  end, o.importance)
end

return M
