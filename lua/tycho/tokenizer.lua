--- Tokenizers: text to ids and back. `ty.tokenizer.load(path)` reads the tokenizer.json that comes with a model,
-- `ty.tokenizer.new` takes what a GGUF file says, `ty.tokenizer.train` learns one from text. The ids are those of
-- huggingface's `tokenizers`. Bytes that are no UTF-8 count as U+FFFD, as Python's errors="replace" has it. A dropout
-- that the file gives is not applied; its truncation and padding neither, unless they are asked for.
local core = require "tycho.core"
local native, io = core.tokenizer_core, core.io
local arguments = require "tycho.arguments"
local bpe_files = require "tycho.bpe_files"

local expect = arguments.expect

local tokenizer = {}
local methods = native.methods

--- The fields of a tokenizer besides those that the C part knows; see load and new.
tokenizer.fields = native.fields

local function token_text(value)
  if type(value) == "table" then value = value.content end
  return type(value) == "string" and value or nil
end

local special_names = { "bos", "eos", "pad", "unk", "cls", "sep", "mask" }

-- What tokenizer_config.json says of special tokens and the chat template.
local function read_config(tok, path)
  local config = io.load_json(path)
  if type(config) ~= "table" then return end
  local fields = native.fields(tok)
  for _, name in ipairs(special_names) do
    local text = token_text(config[name .. "_token"])
    fields[name] = text and tok:id(text)
  end
  if type(config.chat_template) == "string" then fields.chat_template = config.chat_template end
  if math.type(config.model_max_length) == "integer" then fields.max_length = config.model_max_length end
end

--- Reads a tokenizer.json, or the one in a folder; there tokenizer_config.json, if there is one, gives the fields bos,
--- eos, pad, unk, cls, sep, mask (ids), chat_template and max_length. Older folders, which have vocab.json and
--- merges.txt in its place, are read as those of GPT-2 or CLIP.
---@param path string a tokenizer.json or a folder
---@return Tokenizer
function tokenizer.load(path)
  expect("tokenizer.load", "path", path, "a string")
  local info = io.stat(path)
  if not (info and info.kind == "directory") then return native.read(path) end
  local file, tok = path .. "/tokenizer.json"
  if not io.exists(file) and bpe_files.are_in(path) then
    tok = native.parse(bpe_files.json(path), path .. "/vocab.json")
  else
    tok = native.read(file)
  end
  local config = path .. "/tokenizer_config.json"
  if io.exists(config) then read_config(tok, config) end
  return tok
end

--- A tokenizer from the text of a tokenizer.json.
---@param text string
---@param name? string for errors
---@return Tokenizer
function tokenizer.parse(text, name)
  expect("tokenizer.parse", "text", text, "a string")
  expect("tokenizer.parse", "name", name, "a string or nil")
  return native.parse(text, name or "tokenizer.parse")
end

-- ---- from GGUF ----

local llama3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
  .. "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
local qwen2 = (llama3:gsub("{1,3}", "", 1))
local patterns = { -- tokenizer.ggml.pre; false: ByteLevel's own, which is GPT-2's
  ["default"] = false, ["gpt-2"] = false, ["gpt2"] = false, ["phi-2"] = false, ["olmo"] = false, ["llama-bpe"] = llama3,
  ["llama3"] = llama3, ["llama-v3"] = llama3, ["smaug-bpe"] = llama3, ["qwen2"] = qwen2, ["deepseek-r1-qwen"] = qwen2,
}
local metaspace = "\u{2581}"
local UNKNOWN, CONTROL, USER = 2, 3, 4 -- tokenizer.ggml.token_type; 1 is a normal token, 6 a byte

-- Merges of a SentencePiece BPE: every way to put a token together of two, the best scores first.
local function merges_of_scores(tokens, scores, vocab)
  local list = {}
  for i, token in ipairs(tokens) do
    for at in token:gmatch "()[^\x80-\xbf]" do
      local left, right = vocab[token:sub(1, at - 1)], vocab[token:sub(at)]
      if at > 1 and left and right then list[#list + 1] = { left, right, scores[i], i } end
    end
  end
  table.sort(list, function(a, b) -- as SentencePiece models are converted for huggingface's `tokenizers`
    if a[3] ~= b[3] then return a[3] > b[3] end
    if a[4] ~= b[4] then return a[4] < b[4] end
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  for i, m in ipairs(list) do list[i] = { tokens[m[1] + 1], tokens[m[2] + 1] } end
  return io.array(list)
end

local function vocab_of(tokens)
  local vocab = {}
  for i, token in ipairs(tokens) do vocab[token] = i - 1 end
  return vocab
end

local function sequence(name, list)
  if #list == 0 then return io.null end
  return { type = "Sequence", [name] = list }
end

-- How each model of tokenizer.ggml.model becomes parts of a tokenizer.json.
local models = {}

function models.gpt2(spec)
  local pattern = spec.pattern
  if pattern == nil then pattern = patterns[spec.pre or "default"] end
  if pattern == nil then
    arguments.fail("tokenizer.new: pre: %q is not known; pattern = gives its regular expression", spec.pre)
  end
  local merges = {}
  if not spec.merges then arguments.fail "tokenizer.new: merges: model gpt2 needs them" end
  for i, merge in ipairs(spec.merges) do merges[i] = merge end
  local bytes = { type = "ByteLevel", add_prefix_space = spec.add_space_prefix == true, trim_offsets = true,
    use_regex = not pattern }
  local split = pattern and { type = "Split", pattern = { Regex = pattern }, behavior = "Isolated", invert = false }
  return {
    normalizer = io.null,
    pre_tokenizer = sequence("pretokenizers", { split or bytes, split and bytes or nil }),
    decoder = { type = "ByteLevel", add_prefix_space = true, trim_offsets = true, use_regex = true },
    model = { type = "BPE", vocab = vocab_of(spec.tokens), merges = io.array(merges), fuse_unk = false,
      byte_fallback = false, ignore_merges = pattern == llama3 },
  }
end

function models.llama(spec)
  local vocab = vocab_of(spec.tokens)
  local scores = spec.scores or arguments.fail "tokenizer.new: scores: model llama needs them"
  local steps = { { type = "Replace", pattern = { String = " " }, content = metaspace } }
  local prefix = spec.add_space_prefix ~= false
  if prefix then table.insert(steps, 1, { type = "Prepend", prepend = metaspace }) end
  local decoders = { { type = "Replace", pattern = { String = metaspace }, content = " " }, { type = "ByteFallback" },
    { type = "Fuse" } }
  if prefix then decoders[4] = { type = "Strip", content = " ", start = 1, stop = 0 } end
  return {
    normalizer = sequence("normalizers", steps), pre_tokenizer = io.null, decoder = sequence("decoders", decoders),
    model = { type = "BPE", vocab = vocab, merges = merges_of_scores(spec.tokens, scores, vocab), fuse_unk = true,
      byte_fallback = true, unk_token = spec.unk and spec.tokens[spec.unk + 1] or nil },
  }
end

function models.t5(spec)
  local scores, vocab = spec.scores or arguments.fail "tokenizer.new: scores: model t5 needs them", {}
  for i, token in ipairs(spec.tokens) do vocab[i] = { token, scores[i] } end
  local steps = {}
  if spec.charsmap then steps[1] = { type = "Precompiled", precompiled_charsmap = spec.charsmap } end
  if spec.remove_extra_whitespaces ~= false then
    steps[#steps + 1] = { type = "Replace", pattern = { Regex = " {2,}" }, content = " " }
  end
  local scheme = spec.add_space_prefix == false and "never" or "always"
  local meta = { type = "Metaspace", replacement = metaspace, prepend_scheme = scheme, split = true }
  return { normalizer = sequence("normalizers", steps), pre_tokenizer = meta, decoder = meta,
    model = { type = "Unigram", vocab = io.array(vocab), unk_id = spec.unk or 2,
      byte_fallback = spec.byte_fallback == true } }
end

-- GGUF marks the beginnings of words, the other files what goes on.
function models.bert(spec)
  local tokens = {}
  for i, token in ipairs(spec.tokens) do
    if token:match "^%[.*%]$" then tokens[i] = token
    elseif token:sub(1, #metaspace) == metaspace then tokens[i] = token:sub(#metaspace + 1)
    else tokens[i] = "##" .. token end
  end
  spec.tokens = tokens
  return { normalizer = { type = "BertNormalizer", clean_text = true, handle_chinese_chars = true,
      strip_accents = io.null, lowercase = spec.lowercase ~= false },
    pre_tokenizer = { type = "BertPreTokenizer" }, decoder = { type = "WordPiece", prefix = "##", cleanup = true },
    model = { type = "WordPiece", vocab = vocab_of(tokens), continuing_subword_prefix = "##",
      max_input_chars_per_word = 100, unk_token = spec.unk and tokens[spec.unk + 1] or "[UNK]" } }
end

-- [bos] A [eos], as far as they are wanted.
local function template(spec, default_bos)
  local pieces, pair, special = {}, {}, {}
  local function add(id, list, type_id)
    local token = spec.tokens[id + 1]
    special[token] = { id = token, ids = { id }, tokens = { token } }
    list[#list + 1] = { SpecialToken = { id = token, type_id = type_id } }
  end
  local add_bos = spec.add_bos
  if add_bos == nil then add_bos = default_bos end
  local add_eos = spec.add_eos
  if add_eos == nil then add_eos = spec.model == "t5" or spec.model == "bert" end
  local last = spec.model == "bert" and spec.sep or spec.eos
  if add_bos and spec.bos then add(spec.bos, pieces, 0) end
  pieces[#pieces + 1] = { Sequence = { id = "A", type_id = 0 } }
  if add_eos and last then add(last, pieces, 0) end
  if #pieces == 1 then return io.null end
  table.move(pieces, 1, #pieces, 1, pair)
  if add_bos and spec.bos and spec.model ~= "bert" then add(spec.bos, pair, 1) end
  pair[#pair + 1] = { Sequence = { id = "B", type_id = 1 } }
  if add_eos and last then add(last, pair, 1) end
  return { type = "TemplateProcessing", single = pieces, pair = pair, special_tokens = special }
end

local spec_kinds = { model = '"gpt2" or "llama" or "t5" or "bert"', tokens = "a list of strings",
  scores = "a list of numbers or a tensor or nil", merges = "a list of strings or nil",
  token_types = "a list of integers or a tensor or nil", pre = "a string or nil", pattern = "a string or nil",
  charsmap = "a string or nil", chat_template = "a string or nil" }

--- A tokenizer from the values that GGUF files have under tokenizer.ggml: `model` "gpt2" (byte-level BPE; `pre` names
--- how text is split, or `pattern` is the regular expression), "llama" (SentencePiece BPE with byte fallback, merges by
--- scores), "t5" (Unigram) or "bert" (WordPiece); `tokens`, and with them `scores`, `merges` ("left right") and
--- `token_types`; the ids `bos`, `eos`, `unk`, `sep`, `pad`, which count from 0; `add_bos`, `add_eos`,
--- `add_space_prefix`, and `charsmap`, the precompiled_charsmap in base64. They stay as fields of the tokenizer.
---@param spec table
---@return Tokenizer
function tokenizer.new(spec)
  expect("tokenizer.new", "spec", spec, "a table")
  expect("tokenizer.new", "model", spec.model, spec_kinds.model)
  for name, kind in pairs(spec_kinds) do expect("tokenizer.new", name, spec[name], kind) end
  for _, name in ipairs { "bos", "eos", "unk", "sep", "pad" } do
    local id = expect("tokenizer.new", name, spec[name], "an integer >= 0 or nil")
    if id and id >= #spec.tokens then
      arguments.fail("tokenizer.new: %s: expected one of the %d tokens, from 0, got %d", name, #spec.tokens, id)
    end
  end
  spec = setmetatable({}, { __index = spec })
  local make = models[spec.model]
  local added, types = {}, spec.token_types or {}
  if type(types) ~= "table" then types = types:tolist() end
  local whole = make(spec)
  for i, token in ipairs(spec.tokens) do
    local kind = types[i]
    if token ~= "" and (kind == CONTROL or kind == USER or (kind == UNKNOWN and spec.model ~= "gpt2")) then
      added[#added + 1] = { id = i - 1, content = token, single_word = false, lstrip = false, rstrip = false,
        normalized = false, special = kind ~= USER }
    end
  end
  whole.version, whole.truncation, whole.padding = "1.0", io.null, io.null
  whole.added_tokens = io.array(added)
  whole.post_processor = template(spec, spec.model == "llama" or spec.model == "bert")
  local tok = native.parse(io.json_encode(whole), "tokenizer.new")
  local fields = native.fields(tok)
  for _, name in ipairs { "bos", "eos", "unk", "sep", "pad", "chat_template" } do fields[name] = spec[name] end
  return tok
end

-- ---- training ----

local train_defaults = { vocabulary = 32768, kind = "bpe", pattern = "gpt2", special = {}, min_frequency = 0,
  max_token_length = 0, prefix_space = false, files = false }
local count = "an integer in [0, 268435456]"
local train_kinds = { vocabulary = count, kind = '"bpe"', special = "a list of strings", min_frequency = count,
  max_token_length = count }

--- Learns a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) on all threads; the same text gives the same
--- tokenizer, which is that of huggingface's BpeTrainer. Options: `vocabulary`, tokens in all (32768); `special`, a
--- list of special tokens, which come first; `pattern`, how text is cut into words: "gpt2" (default), "llama3", "qwen2"
--- or a regular expression; `min_frequency` (0); `max_token_length`; `prefix_space`; `files = true`: the texts are
--- names of files, each line of which is a text.
---@param texts string[]|string a list of texts, or one
---@param options? table
---@return Tokenizer
function tokenizer.train(texts, options)
  local o = arguments.read("tokenizer.train", options, train_defaults, train_kinds)
  expect("tokenizer.train", "texts", texts, "a string or a list of strings")
  if type(texts) == "string" then texts = { texts } end
  local trainer = native.trainer(o.vocabulary, o.pattern, o.min_frequency, o.max_token_length, o.prefix_space,
    o.special)
  if o.files then
    for _, path in ipairs(texts) do trainer:add_file(path) end
  else
    trainer:add(texts)
  end
  return native.parse(trainer:finish(), "tokenizer.train")
end

-- ---- methods that are written in Lua ----

local save_json = methods.save

--- Writes a tokenizer.json, which others read, too. Into a folder that is there it writes tokenizer.json and
--- tokenizer_config.json, with what read_config() and transformers' AutoTokenizer read: the special tokens by their
--- roles (bos, eos ...), the chat template and the length.
---@param path string a file, or a folder that is there
function methods:save(path)
  local info = type(path) == "string" and io.stat(path)
  if not (info and info.kind == "directory") then return save_json(self, path) end
  local config = { tokenizer_class = "PreTrainedTokenizerFast", clean_up_tokenization_spaces = false,
    chat_template = self.chat_template, model_max_length = self.max_length }
  for _, name in ipairs(special_names) do
    local id = self[name]
    config[name .. "_token"] = id and self:token(id)
  end
  save_json(self, path .. "/tokenizer.json")
  io.save_json(path .. "/tokenizer_config.json", config)
end

local batch_options = { pad = true, pad_id = true, side = true, multiple = true, length = true }

--- The ids of several texts, encoded on all threads: [texts, longest], and which of them are text: a mask of the same
--- shape. Options besides those of encode: `pad_id` (else the tokenizer's), `side` "right" or "left" (else the
--- tokenizer's), `multiple`, `length`; `pad = false` gives a list of tensors instead.
---@param texts string[]
---@param options? table
---@return Tensor ids, Tensor mask
function methods:encode_batch(texts, options)
  local encode, o = {}, expect("encode_batch", "options", options, "a table or nil") or {}
  expect("encode_batch", "texts", texts, "a list")
  for name, value in pairs(o) do
    if not batch_options[name] then encode[name] = value end
  end
  if o.pad == false then return native.encode_texts(self, texts, encode) end
  local pad, side, multiple, length = o.pad_id or self.pad, o.side or self.pad_side, o.multiple or 1, o.length or 0
  if pad == nil then arguments.fail "encode_batch: pad_id: the tokenizer has no padding token; expected its id" end
  expect("encode_batch", "pad_id", pad, "an integer")
  expect("encode_batch", "side", side, '"left" or "right"')
  expect("encode_batch", "multiple", multiple, "an integer in [1, 1048576]")
  expect("encode_batch", "length", length, "an integer in [0, 1073741824]")
  return native.encode_padded(self, texts, encode, pad, side == "left", multiple, length)
end

--- The texts of several lists of ids: a list, or a tensor [texts, n].
---@param batch table|Tensor
---@param options? {skip_special?: boolean}
---@return string[]
function methods:decode_batch(batch, options)
  expect("decode_batch", "batch", batch, "a list or a tensor")
  if type(batch) ~= "table" and batch.ndim ~= 2 then
    arguments.fail("decode_batch: batch: expected a tensor [texts, n], got %s", arguments.describe(batch))
  end
  local out, n = {}, type(batch) == "table" and #batch or batch.shape[1]
  for i = 1, n do out[i] = self:decode(type(batch) == "table" and batch[i] or batch[i - 1], options) end
  return out
end

--- The special tokens and their ids.
---@return table<string, integer>
function methods:special_tokens()
  local out = {}
  for id = 0, self.size - 1 do
    local text, kind = self:token(id)
    if kind == "special" then out[text] = id end
  end
  return out
end

local samples = { "Hello, world!", "  two  spaces\n\tand a tab", "it's 12345 o'clock", "grün ÄÖÜ ß", "Привет, мир",
  "你好，世界", "こんにちは 안녕하세요", "مرحبا שלום नमस्ते", "\u{1F469}\u{200D}\u{1F52C} e\u{301}",
  "if (x != 0) { return a[i]; } // done" }

--- Checks a tokenizer with itself: every id has a token that has this id, and what text is decoded to has that text
--- again. Returns a table: `tokens`, `shared` (tokens that have several ids), `lossless` (whether all texts came back
--- as they were) and `failures`, a list of texts, which is empty when all is well.
---@param texts? string[] to try besides some that are built in
---@return {tokens: integer, shared: integer, lossless: boolean, failures: string[]}
function methods:selftest(texts)
  expect("selftest", "texts", texts, "a list of strings or nil")
  local report = { tokens = 0, shared = 0, lossless = true, failures = {} }
  for id = 0, self.size - 1 do
    local token = self:token(id)
    if token then
      report.tokens = report.tokens + 1
      local back = self:id(token)
      if not back then report.failures[#report.failures + 1] = ("token %d, %q, is not found"):format(id, token)
      elseif back ~= id then report.shared = report.shared + 1 end
    end
  end
  local all = table.move(samples, 1, #samples, 1, {})
  table.move(texts or {}, 1, #(texts or {}), #all + 1, all)
  for _, text in ipairs(all) do
    local once = self:decode(self:encode(text, { special = false }))
    local twice = self:decode(self:encode(once, { special = false }))
    if once ~= text then report.lossless = false end
    if once ~= twice then
      report.failures[#report.failures + 1] = ("%q became %q and then %q"):format(text, once, twice)
    end
  end
  return report
end

return tokenizer
