--- A tokenizer.json as the keys tokenizer.ggml of a GGUF file: "gpt2" (byte-level BPE), "llama" (SentencePiece's BPE
-- with byte fallback), "t5" (Unigram), "bert" (WordPiece).
local ty = require "tycho"
local gguf = require "tycho.hub.gguf"

local metaspace = "\u{2581}"
local NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

-- Texts and kinds of all tokens; text_of(text, special) is how the file writes one.
local function tokens_of(tok, unknown, text_of)
  local tokens, kinds = {}, {}
  for id = 0, tok.size - 1 do
    local text, special = tok:token(id)
    tokens[id + 1] = text and text_of(text, special) or ("[PAD%d]"):format(id)
    kinds[id + 1] = id == unknown and UNKNOWN or special == "special" and CONTROL or special == "added" and USER
      or not text and UNUSED or NORMAL
  end
  return tokens, kinds
end

local function as_it_is(text) return text end

-- Whether a tokenizer.json's normalizer or pre-tokenizer, or one of a sequence of them, is of a type; returns it.
local function part(json, type_name)
  if type(json) ~= "table" then return nil end
  if json.type == type_name then return json end
  for _, list in pairs(json) do
    for _, one in ipairs(type(list) == "table" and list or {}) do
      if type(one) == "table" and one.type == type_name then return one end
    end
  end
  return nil
end

local models = {}

function models.BPE(tok, json, set)
  local byte_level = not json.model.byte_fallback
  local ranks, merges = {}, {}
  for i, merge in ipairs(json.model.merges) do
    if type(merge) == "table" then merge = merge[1] .. " " .. merge[2] end
    merges[i] = merge
    local whole = merge:gsub(" ", "", 1)
    ranks[whole] = ranks[whole] or i
  end
  local tokens, kinds = tokens_of(tok, nil, as_it_is)
  set("model", byte_level and "gpt2" or "llama")
  set("tokens", tokens)
  if byte_level then
    local pattern = ty.io.json_encode(json.pre_tokenizer or {})
    local general = pattern:find("\\p{L}", 1, true) or pattern:find("\\\\p{L}", 1, true)
    set("pre", not general and "gpt-2" or pattern:find("{1,3}", 1, true) and "llama-bpe" or "qwen2")
    set("merges", merges)
  else
    local scores = {}
    for i, text in ipairs(tokens) do
      scores[i] = -(ranks[text] or 0) + 0.0
      if kinds[i] == NORMAL and text:find "^<0x%x%x>$" then kinds[i] = BYTE end
    end
    set("scores", scores, "f32[]")
  end
  set("token_type", kinds, "i32[]")
end

function models.Unigram(tok, json, set)
  local unknown, scores = json.model.unk_id, {}
  local tokens, kinds = tokens_of(tok, unknown, as_it_is)
  for i, text in ipairs(tokens) do
    local entry = json.model.vocab[i]
    scores[i] = entry and entry[1] == text and entry[2] + 0.0 or 0.0
    if kinds[i] == NORMAL and text:find "^<0x%x%x>$" then kinds[i] = BYTE end
  end
  set("model", "t5")
  set("pre", "default")
  set("tokens", tokens)
  set("scores", scores, "f32[]")
  set("token_type", kinds, "i32[]")
  if math.type(unknown) then set("unknown_token_id", unknown) end
  local meta, charsmap = part(json.pre_tokenizer, "Metaspace"), part(json.normalizer, "Precompiled")
  set("add_space_prefix", not meta or meta.prepend_scheme ~= "never")
  set("remove_extra_whitespaces", part(json.normalizer, "Replace") ~= nil)
  if charsmap then
    local bytes = ty.io.from_bytes(gguf.from_base64(charsmap.precompiled_charsmap), "u8"):tolist()
    set("precompiled_charsmap", bytes, "u8[]")
  end
end

-- Beginnings of words are marked there, here what goes on.
function models.WordPiece(tok, json, set)
  local prefix = json.model.continuing_subword_prefix or "##"
  local tokens, kinds = tokens_of(tok, tok:id(json.model.unk_token or "[UNK]"), function(text, special)
    if special or text:find "^%[.*%]$" then return text end
    return text:sub(1, #prefix) == prefix and text:sub(#prefix + 1) or metaspace .. text
  end)
  set("model", "bert")
  set("pre", "default")
  set("tokens", tokens)
  set("token_type", kinds, "i32[]")
  for name, text in pairs { bos = "[CLS]", unknown = "[UNK]", seperator = "[SEP]", padding = "[PAD]",
    cls = "[CLS]", mask = "[MASK]" } do
    local id = tok:id(text)
    if id then set(name .. "_token_id", id) end
  end
end

-- The token that is put before a text, and the one behind it, where there is one of each.
local function around(tok)
  local whole, plain = tok:encode "a", tok:encode("a", { special = false }):tolist()
  whole = whole:tolist()
  local before = 0
  while before < #whole and whole[before + 1] ~= plain[1] do before = before + 1 end
  local behind = #whole - before - #plain
  return before == 1 and whole[1] or nil, behind == 1 and whole[#whole] or nil
end

--- Adds the tokenizer of a folder to the metadata of a file; false when it has none. The keys of ggml do not say all
-- that Unigram and WordPiece tokenizers do (cased models, how pairs are joined): of these the file also gets the text
-- of tokenizer.json under tokenizer.huggingface.json, which Tycho's reader prefers.
---@param metadata table<string, any>
---@param types table<string, string>
---@param folder string
---@return boolean
return function(metadata, types, folder)
  local path = folder .. "/tokenizer.json"
  if not ty.io.exists(path) then return false end
  local tok, json = ty.tokenizer.load(folder), ty.io.load(path)
  local make = models[tok.model]
  if not make then
    error(("quant.convert: %s: a %s tokenizer cannot be written; BPE, Unigram and WordPiece can"):format(path,
      tok.model), 0)
  end
  make(tok, json, function(key, value, kind)
    metadata["tokenizer.ggml." .. key] = value
    types["tokenizer.ggml." .. key] = kind
  end)
  for name, theirs in pairs { bos = "bos", eos = "eos", pad = "padding", sep = "seperator", unk = "unknown" } do
    local key = ("tokenizer.ggml.%s_token_id"):format(theirs)
    metadata[key] = tok[name] or metadata[key]
  end
  if tok.model ~= "WordPiece" then
    local first, last = around(tok)
    for name, id in pairs { bos = first or false, eos = last or false } do
      metadata[("tokenizer.ggml.add_%s_token"):format(name)] = id ~= false
      if id then metadata[("tokenizer.ggml.%s_token_id"):format(name)] = id end
    end
  end
  if tok.model ~= "BPE" then metadata["tokenizer.huggingface.json"] = tok:json() end
  return true
end
