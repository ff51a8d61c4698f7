-- ty.tokenizer: equal to huggingface's `tokenizers` on 10,500 strings for every fixture of make_tokenizers.py; streams,
-- batches, training, GGUF, and files that are bad.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local folder = check.root .. "tests/fixtures/tokenizers/"
local expected = ty.io.load_json(folder .. "expected.json")

-- ---- the strings: see Generator in make_tokenizers.py ----

local function checksum(numbers, h)
  h = h or 7
  for i = 1, #numbers do h = (h * 31 + numbers[i] + 1) % 2147483647 end
  return h
end

local function bytes_checksum(text, h)
  for i = 1, #text, 4096 do h = checksum({ text:byte(i, i + 4095) }, h) end
  return h or 7
end

local function generate()
  local parts, x = expected.parts, 20240229
  local function below(n)
    x = (x * 1103515245 + 12345) & 0x7fffffff
    return (x >> 8) % n
  end
  local function of(list) return list[below(#list) + 1] end
  local function char()
    local range = of(parts.ranges)
    return utf8.char(range[1] + below(range[2] - range[1] + 1))
  end
  local function piece()
    local kind = below(16)
    if kind < 5 then
      local word, case = of(parts.words), below(8)
      return case == 0 and word:upper() or case == 1 and word:sub(1, 1):upper() .. word:sub(2) or word
    elseif kind < 7 then return of(parts.spaces)
    elseif kind == 7 then return of(parts.code)
    elseif kind == 8 then return of(parts.misc)
    elseif kind == 9 then
      local digits = below(6)
      return tostring(below(10 ^ (1 + digits) // 1 | 0))
    elseif kind == 10 then return of(parts.special)
    elseif kind == 11 then
      if below(3) ~= 0 then return "." end
      return string.char(table.unpack(of(parts.broken)))
    elseif kind == 12 then
      local base = char()
      return base .. utf8.char(of(parts.marks))
    elseif kind == 13 then
      local range, out = of(parts.ranges), {}
      for i = 1, 1 + below(8) do out[i] = utf8.char(range[1] + below(range[2] - range[1] + 1)) end
      return table.concat(out)
    elseif kind == 14 then
      local at = below(12) + 1
      return (",.;:!?()[]{}"):sub(at, at)
    end
    return char()
  end
  local list = { "", " ", "  ", "\n", "a", "\xff", "\u{2581}", "<s>", ("a"):rep(80 * 3) }
  while #list < expected.count do
    local out, n, spaced = {}, 1 + below(24), below(4) > 0
    for i = 1, n do
      if i > 1 and spaced and below(4) > 0 then out[#out + 1] = " " end
      out[#out + 1] = piece()
    end
    list[#list + 1] = table.concat(out)
  end
  return list
end

local strings = generate()
local texts = {} -- what Python's errors="replace" makes of them, as far as the tests need it

check.test("the strings are those of the fixtures", function()
  local h
  for _, s in ipairs(strings) do h = bytes_checksum(s, checksum({ #s }, h)) end
  check.equal(h, expected.strings)
  for i, s in ipairs(strings) do texts[i] = utf8.len(s) and s or false end
end)

local function sorted(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys)
  return keys
end

local names = sorted(expected.tokenizers)

for _, name in ipairs(names) do
  local want = expected.tokenizers[name]

  check.test(name .. ": ids and decoded text equal the reference's", function()
    local tok = ty.tokenizer.load(folder .. name .. ".json")
    local all = {}
    for first = 1, #strings, 1000 do -- on all threads
      local list = table.move(strings, first, math.min(first + 999, #strings), 1, {})
      table.move(tok:encode_batch(list, { pad = false }), 1, #list, first, all)
    end
    local wrong_ids, wrong_text = {}, {}
    for block = 1, #want.ids do
      local ids, text
      for i = block * 100 - 99, math.min(block * 100, #strings) do
        local list = all[i]:tolist()
        ids = checksum(list, checksum({ #list }, ids))
        local decoded = tok:decode(list)
        text = bytes_checksum(decoded, checksum({ #decoded }, text))
      end
      if ids ~= want.ids[block] then wrong_ids[#wrong_ids + 1] = block end
      if text ~= want.text[block] then wrong_text[#wrong_text + 1] = block end
    end
    check.equal(wrong_ids, {}, "blocks of strings whose ids differ")
    check.equal(wrong_text, {}, "blocks of strings whose decoded text differs")
    for i, ids in ipairs(want.first) do
      check.equal(tok:encode(strings[i + 9]):tolist(), table.move(ids, 1, #ids, 1, {}), "string " .. i + 9)
    end
    local ids, more = tok:encode("the first text", { pair = "and another 123", types = true })
    check.equal(ids:tolist(), want.pair[1], "a pair")
    check.equal(more.types:tolist(), want.pair[2], "the types of a pair")
  end)

  -- Where normalizers put characters together or apart, the reference's spans follow rules of its own.
  if not ("clip qwen2 t5 xlmr nfkc_previous nfd_next wordlevel bert_uncased bytes_next llama2"):find(name, 1, true) then
    check.test(name .. ": offsets equal the reference's", function()
      local tok = ty.tokenizer.load(folder .. name .. ".json")
      for i, spans in ipairs(want.spans) do
        local text = strings[i + 9]
        if utf8.len(text) then
          local _, more = tok:encode(text, { offsets = true })
          local got = {}
          for _, span in ipairs(more.offsets:tolist()) do
            for _, byte in ipairs(span) do got[#got + 1] = byte == 0 and 0 or utf8.len(text, 1, byte) end
          end
          check.equal(got, spans, "string " .. i + 9)
        end
      end
    end)
  end

  check.test(name .. ": saving, streaming, itself", function()
    local tok = ty.tokenizer.load(folder .. name .. ".json")
    local copy = scratch.file "tokenizer.json"
    tok:save(copy)
    local again = ty.tokenizer.load(copy)
    for i = 50, 80 do
      local ids = tok:encode(strings[i])
      check.equal(again:encode(strings[i]):tolist(), ids:tolist())
      local stream, out = tok:stream(), {}
      for _, id in ipairs(ids:tolist()) do
        local piece = stream:put(id)
        check.equal(utf8.len(piece) ~= nil, true, "a piece of a stream is whole characters")
        out[#out + 1] = piece
      end
      out[#out + 1] = stream:finish()
      if name ~= "clip" and name ~= "bytes_next" and not name:find "^n" then -- theirs depend on what is last
        check.equal(table.concat(out), tok:decode(ids), "a stream of string " .. i)
      end
    end
    check.equal(tok:selftest().tokens > 0, true)
  end)
end

check.test("scanners stop where the regular expressions do", function()
  for _, name in ipairs { "gpt2", "llama3", "qwen2" } do
    local text = scratch.slurp(folder .. name .. ".json")
    -- The same expression in a group is none of the known ones, so PCRE2 runs it.
    local whole = ty.io.json_decode(text)
    local bytes = { type = "ByteLevel", add_prefix_space = false, trim_offsets = false, use_regex = false }
    local expression = name == "gpt2" and [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]
      or whole.pre_tokenizer.pretokenizers[1].pattern.Regex
    whole.pre_tokenizer = { type = "Sequence", pretokenizers = { { type = "Split", behavior = "Isolated",
      invert = false, pattern = { Regex = "(?:" .. expression .. ")" } }, bytes } }
    local slow = ty.io.json_encode(whole)
    local a, b = ty.tokenizer.parse(text), ty.tokenizer.parse(slow)
    local x, y = a:encode_batch(strings, { pad = false }), b:encode_batch(strings, { pad = false })
    local different = 0
    for i = 1, #x do
      if #x[i] ~= #y[i] or not ty.eq(x[i], y[i]):all():item() then different = different + 1 end
    end
    check.equal(different, 0, name)
  end
end)

check.test("words longer than the short way takes, and spans, give the same ids", function()
  local tok = ty.tokenizer.load(folder .. "gpt2.json")
  for i = 100, 400 do
    local text = strings[i]
    local glued = text:gsub("[%s%p%d]", "") -- one long word
    local ids, more = tok:encode(glued, { offsets = true })
    check.equal(ids:tolist(), tok:encode(glued):tolist())
    check.equal(#more.offsets, #ids)
  end
  local long = ("abcdefghij"):rep(20000)
  check.equal(tok:decode(tok:encode(long)), long)
end)

check.test("every number of threads gives the same ids", function()
  local tok = ty.tokenizer.load(folder .. "llama3.json")
  local list = table.move(strings, 1, 2000, 1, {})
  local threads, want = ty.cpu().threads, nil
  for _, n in ipairs { 1, 2, 3 } do
    ty.set_threads(n)
    local h
    for _, ids in ipairs(tok:encode_batch(list, { pad = false })) do h = checksum(ids:tolist(), h) end
    want = want or h
    check.equal(h, want)
  end
  ty.set_threads(threads)
end)

check.test("options", function()
  local tok = ty.tokenizer.load(folder .. "bert_uncased.json")
  local ids, mask = tok:encode_batch({ "the cat", "a much longer text than that", "" }, { pad_id = 0 })
  check.equal(ids.shape[1], 3)
  check.equal(mask:sum():item() > 0, true)
  check.equal(ids[2]:tolist()[1], 2)
  check.equal(ids[2]:tolist()[3], 0)
  ids, mask = tok:encode_batch({ "the cat", "" }, { pad_id = 0, side = "left", multiple = 8 })
  check.equal(ids.shape, { 2, 8 })
  check.equal(mask:tolist()[2], { false, false, false, false, false, false, true, true })
  check.equal(tok:encode_batch({ "x" }, { pad_id = 0, length = 20 }).shape, { 1, 20 })
  check.equal(#tok:encode("the cat sat on the mat", { max_length = 4 }), 4)
  check.equal(tok:encode("the cat", { max_length = 3 }):tolist()[3], 3)
  check.equal(#tok:encode("the cat sat", { pair = "on the mat", max_length = 7 }), 7)
  check.fails(function() tok:encode("x", { max_length = 1 }) end, "special tokens alone are 2")
  check.equal(tok:encode("[MASK]", { special = false }):tolist(), { tok:id "[MASK]" })
  check.equal(#tok:encode("[MASK]", { special = false, plain = true }) > 1, true)
  check.equal(tok:token(2), "[CLS]")
  check.equal(select(2, tok:token(2)), "special")
  check.equal(tok:token(10 ^ 6 // 1 | 0), nil)
  check.equal(tok:id "no such token", nil)
  check.equal(tok:special_tokens()["[SEP]"], 3)
  check.equal(tok:decode(ty.tensor { 2, 3 }), "")
  check.equal(tok:decode({ 2, 3 }, { skip_special = false }), "[CLS] [SEP]")
  check.equal(tok:decode_batch { { 2 }, { 3 } }, { "", "" })
  check.fails(function() tok:decode { 99999 } end, "there is no token 99999")
  check.fails(function() tok:decode { -1 } end, "-1")
  check.fails(function() tok:decode(ty.tensor { 1.5 }) end,
    "tokenizer:decode: argument 2: expected an integer, a list of integers or a 1-d tensor")
  check.fails(function() tok:encode(ty.tensor { 1 }) end,
    "tokenizer:encode: argument 2: expected a string, got a tensor")
  check.fails(function() tok:encode("x", { speciale = true }) end, "unknown option speciale")
  check.fails(function() tok:encode_batch { "a", {} } end, "pad")
  check.fails(function() tok:encode_batch({ "a", {} }, { pad_id = 0 }) end, "text 2: expected a string, got a table")
  check.fails(function() tok:encode_batch({ "a b c d e" }, { pad_id = 0, length = 3 }) end, "do not fit")
end)

check.test("a folder with tokenizer_config.json", function()
  local path = scratch.file "model"
  ty.io.mkdir(path)
  ty.tokenizer.load(folder .. "llama3.json"):save(path .. "/tokenizer.json")
  ty.io.save_json(path .. "/tokenizer_config.json", { bos_token = "<|begin_of_text|>",
    eos_token = { content = "<|eot_id|>" }, pad_token = ty.io.null,
    chat_template = "{{ x }}", model_max_length = 1e30 })
  local tok = ty.tokenizer.load(path)
  check.equal({ tok.bos, tok.eos, tok.chat_template }, { 0, 2, "{{ x }}" })
  check.equal(tok.pad, nil)
  check.equal(tok.max_length, nil)
  local other = scratch.file "other"
  ty.io.mkdir(other)
  ty.tokenizer.fields(tok).max_length = 512
  tok:save(other)
  local again = ty.tokenizer.load(other)
  check.equal({ again.bos, again.eos, again.pad, again.chat_template, again.max_length }, { 0, 2, nil, "{{ x }}", 512 })
  check.equal(again:json(), tok:json())
end)

check.test("training equals the reference's, on every number of threads", function()
  local repaired = ty.tokenizer.load(folder .. "gpt2.json")
  local corpus = {}
  for i, s in ipairs(strings) do -- as Python gives them to the reference
    corpus[i] = texts[i] or repaired:decode(repaired:encode(s), { skip_special = false })
  end
  for name, want in pairs(expected.train) do
    for _, threads in ipairs { 1, 3 } do
      local before = ty.cpu().threads
      ty.set_threads(threads)
      local tok = ty.tokenizer.train(corpus, { pattern = name, special = { "<s>", "</s>" },
        vocabulary = name == "gpt2" and 1500 or 2500, min_frequency = name == "llama3" and 3 or nil,
        max_token_length = name == "llama3" and 9 or nil })
      ty.set_threads(before)
      local model = ty.io.json_decode(tok:json()).model
      local tokens, merges = {}, {}
      for token, id in pairs(model.vocab) do tokens[id + 1] = token end
      for i, m in ipairs(model.merges) do merges[i] = m[1] .. " " .. m[2] end
      check.equal({ #tokens, bytes_checksum(table.concat(tokens, "\n")), #merges,
        bytes_checksum(table.concat(merges, "\n")) }, want, name)
    end
  end
end)

check.test("training: files and mistakes", function()
  local path = scratch.spit("corpus.txt", "low lower lowest\nnew newer newest\n")
  local a = ty.tokenizer.train({ path }, { files = true, vocabulary = 270 })
  local b = ty.tokenizer.train({ "low lower lowest\n", "new newer newest\n" }, { vocabulary = 270 })
  check.equal(a:json(), b:json())
  check.equal(a:decode(a:encode "lowest \u{1F600}\xff"), "lowest \u{1F600}\u{FFFD}")
  check.equal(ty.tokenizer.train({}, { vocabulary = 256 }).size, 256)
  check.fails(function() ty.tokenizer.train({ "x" }, { vocabulary = 100 }) end, "no room for 256 bytes")
  check.fails(function() ty.tokenizer.train({ "x" }, { vocab = 300 }) end, "no option 'vocab'")
  check.fails(function() ty.tokenizer.train({ "x" }, { vocabulary = "many" }) end, "vocabulary: expected an integer")
  check.fails(function() ty.tokenizer.train({ "x" }, { kind = "unigram" }) end, "kind")
  check.fails(function() ty.tokenizer.train({ "x" }, { pattern = "(" }) end, "regular expression")
  check.fails(function() ty.tokenizer.train({ "/no/such/file" }, { files = true }) end, "/no/such/file")
  check.fails(function() ty.tokenizer.train { 1 } end,
    "texts: expected a string or a list of strings, got 1 as element 1")
end)

-- ---- what GGUF files say ----

local function model_of(name)
  local whole = ty.io.load_json(folder .. name .. ".json")
  local tokens = {}
  for token, id in pairs(whole.model.vocab) do
    if type(id) == "number" then tokens[id + 1] = token else tokens[token] = id[1] end
  end
  return whole, tokens
end

local function same_ids(a, b, what)
  local different = 0
  for i = 1, 2000 do
    local x, y = a:encode(strings[i], { special = false }), b:encode(strings[i], { special = false })
    if #x ~= #y or (#x > 0 and not ty.eq(x, y):all():item()) then different = different + 1 end
  end
  check.equal(different, 0, what)
end

check.test("GGUF: byte-level BPE", function()
  for name, pre in pairs { gpt2 = "gpt-2", llama3 = "llama-bpe" } do
    local whole, tokens = model_of(name)
    local types, merges = {}, {}
    for i = 1, #tokens do types[i] = 1 end
    for _, t in ipairs(whole.added_tokens) do types[t.id + 1] = 3 end
    for i, m in ipairs(whole.model.merges) do merges[i] = m[1] .. " " .. m[2] end
    local tok = ty.tokenizer.new { model = "gpt2", pre = pre, tokens = tokens, merges = merges, token_types = types,
      bos = 0, eos = 0, add_bos = name == "llama3" }
    same_ids(tok, ty.tokenizer.load(folder .. name .. ".json"), name)
    check.equal(tok:encode("a"):tolist()[1] == 0, name == "llama3")
    check.equal(tok.eos, 0)
  end
  check.fails(function() ty.tokenizer.new { model = "gpt2", pre = "nobody's", tokens = {} } end, "nobody's")
  check.fails(function() ty.tokenizer.new { model = "rwkv" } end, "rwkv")
  check.fails(function() ty.tokenizer.new { model = "gpt2" } end, "tokens")
end)

check.test("GGUF: SentencePiece BPE equals SentencePiece", function()
  local sp = expected.sentencepiece
  local tok = ty.tokenizer.new { model = "llama", tokens = sp.tokens, scores = sp.scores, token_types = sp.types,
    bos = 1, eos = 2, unk = 0 }
  check.equal(tok:encode("x"):tolist()[1], 1)
  local chosen = {}
  for _, s in ipairs(strings) do
    local taken = s ~= ""
    for _, c in ipairs { "<s>", "</s>", "<unk>", "<0x", "\0", "\u{2581}" } do
      taken = taken and not s:find(c, 1, true)
    end
    if taken then chosen[#chosen + 1] = s end
  end
  check.equal(#chosen, sp.strings)
  local wrong = 0
  for i, want in ipairs(sp.ids) do
    local ids = tok:encode(chosen[i * 10 - 9], { special = false })
    if checksum(ids:tolist()) ~= want then wrong = wrong + 1 end
  end
  check.equal(wrong, 0)
  check.equal(tok:encode(strings[21], { special = false }):tolist(), sp.first)
end)

check.test("GGUF: Unigram and WordPiece", function()
  local whole = model_of "t5"
  local tokens, scores, types = {}, {}, {}
  for i, entry in ipairs(whole.model.vocab) do tokens[i], scores[i], types[i] = entry[1], entry[2], 1 end
  for _, t in ipairs(whole.added_tokens) do types[t.id + 1] = 3 end
  local tok = ty.tokenizer.new { model = "t5", tokens = tokens, scores = scores, token_types = types, eos = 1, unk = 2,
    charsmap = whole.normalizer.normalizers[1].precompiled_charsmap }
  same_ids(tok, ty.tokenizer.load(folder .. "t5.json"), "t5")
  check.equal(tok:encode("a"):tolist()[#tok:encode "a"], 1)

  whole, tokens = model_of "bert_uncased"
  local marked = {}
  types = {}
  for i, token in ipairs(tokens) do
    marked[i] = token:match "^%[.*%]$" or token:match "^##(.*)" or "\u{2581}" .. token
    types[i] = 1
  end
  for _, t in ipairs(whole.added_tokens) do
    if t.special then types[t.id + 1] = 3 end
  end
  local bert = ty.tokenizer.new { model = "bert", tokens = marked, token_types = types, bos = 2, sep = 3, unk = 1 }
  local text = "A much longer text, with [MASK] in it: Ünïcode!"
  check.equal(bert:encode(text):tolist(), ty.tokenizer.load(folder .. "bert_uncased.json"):encode(text):tolist())
end)

check.test("added tokens that the normalizers change: ids and decoded text equal the reference's", function()
  local added = ty.io.load_json(folder .. "added.json")
  for i, case in ipairs(added.cases) do
    local tok = ty.tokenizer.parse(ty.io.json_encode(case.tokenizer), "case " .. i)
    for k, ids in ipairs(case.ids) do
      local text = added.texts[k]
      if text then check.equal(tok:encode(text):tolist(), ids, ("ids %d of case %d"):format(k, i)) end
      check.equal(tok:decode(ids), case.skipped[k], ("text %d of case %d"):format(k, i))
      check.equal(tok:decode(ids, { skip_special = false }), case.all[k], ("text %d of case %d, whole"):format(k, i))
    end
  end
end)

check.test("steps that take everything away, and keys that a step does not have", function()
  local tok = ty.tokenizer.parse([[{"added_tokens":[],
    "normalizer":{"type":"Replace","pattern":{"Regex":"[ x]{0,}"},"content":""},
    "pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"never","pattern":{"Regex":"a"}},
    "model":{"type":"WordLevel","vocab":{"a":0,"?":1},"unk_token":"?"}}]], "steps.json")
  check.equal(tok:encode(""):tolist(), {})
  check.equal(tok:encode(" x x"):tolist(), {})
  check.equal(tok:encode(" xa x"):tolist(), { 0 })
end)

-- ---- bad files ----

local function bad(text, message, what)
  check.fails(function() ty.tokenizer.parse(text, "bad.json") end, message, what)
end

check.test("bad files are one clear error", function()
  bad("", "bad.json")
  bad("{}", "there is no model")
  bad('{"model":{}}', "no vocabulary")
  bad('{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}', "merge 0")
  bad('{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}}',
    "its result \"ab\" is not in the vocabulary")
  bad('{"model":{"type":"BPE","vocab":{"a":0},"merges":["ab"]}}', "two tokens with a space")
  bad('{"model":{"type":"BPE","vocab":{"a":0},"merges":[["a"]]}}', "one token only")
  bad('{"model":{"type":"BPE","vocab":{"a":0,"b":0},"merges":[]}}', "belongs to two tokens")
  bad('{"model":{"type":"BPE","vocab":{"a":200000000},"merges":[]}}', "ids go up to")
  bad('{"model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}', "an integer from 0")
  bad('{"model":{"type":"BPE","unk_token":"x","vocab":{"a":0},"merges":[]}}', "unk_token")
  bad('{"model":{"type":"Unigram","vocab":{"a":0}}}', "list of tokens and scores")
  bad('{"model":{"type":"Unigram","unk_id":7,"vocab":[["a",0.5]]}}', "unk_id")
  bad('{"model":{"type":"Unigram","vocab":[["a"]]}}', "score is missing")
  bad('{"model":{"type":"Magic","vocab":{}}}', "unknown model \"Magic\"")
  local function with(part) return '{' .. part .. ',"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}' end
  check.equal(ty.tokenizer.parse(with '"normalizer":null').size, 1)
  bad(with '"normalizer":{"type":"Magic"}', "normalizer \"Magic\" is not supported")
  bad(with '"normalizer":{"type":"BertNormalizer","strip_accents":x}', "expected a JSON value")
  bad(with '"pre_tokenizer":{"type":"UnicodeScripts"}', "pre-tokenizer \"UnicodeScripts\" is not supported")
  bad(with '"normalizer":{"type":"Precompiled","precompiled_charsmap":"!!"}', "no character map")
  bad(with '"normalizer":{"type":"Precompiled","precompiled_charsmap":"/////w=="}', "no character map")
  local function split(regex)
    return with('"pre_tokenizer":{"type":"Split","pattern":{"Regex":"' .. regex .. '"},"behavior":"Isolated"}')
  end
  bad(split "(", "regular expression")
  bad(split "[a[b]]", "a class within a class")
  bad(with('"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x","type_id":0}}],"pair":[],'
    .. '"special_tokens":{}}'), "not among special_tokens")
  bad(with '"added_tokens":[{"id":268435456,"content":"x"}]', "far out of the vocabulary")
  bad(with '"added_tokens":[{"id":5,"content":"x"},{"id":5,"content":"y"}]', "belongs to two added tokens")
  bad(with('"normalizer":' .. ('{"type":"Sequence","normalizers":['):rep(200)), "nested deeper")
  for _, name in ipairs { "llama3", "roberta", "bert_cased", "clip" } do
    local text = scratch.slurp(folder .. name .. ".json")
    for i = 1, 60 do bad(text:sub(1, #text * i // 61), "bad.json", name .. " cut short") end
  end
  check.fails(function() ty.tokenizer.load "/no/such/tokenizer.json" end, "/no/such/tokenizer.json")
end)

check.test("a hostile expression stops", function()
  local tok = ty.tokenizer.parse('{"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(a+)+(a+)+$"},'
    .. '"behavior":"Isolated",'
    .. '"invert":false},"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}')
  check.fails(function() tok:encode(("a"):rep(5000) .. "b") end, "matching the regular expression")
end)

check.test("folders with vocab.json and merges.txt are those with tokenizer.json", function()
  local samples = { "", "A photo of two CATS, it's 12345!", "  Grün \n\tÄÖÜ ß  don't", "你好 мир \u{1F469}",
    "<|endoftext|> end" }
  for _, name in ipairs { "clip", "gpt2" } do
    local whole = ty.io.load_json(folder .. name .. ".json")
    local path = scratch.file(name)
    ty.io.mkdir(path)
    ty.io.save_json(path .. "/vocab.json", whole.model.vocab)
    local lines = { "#version: 0.2" }
    for i, merge in ipairs(whole.model.merges) do
      lines[i + 1] = type(merge) == "table" and table.concat(merge, " ") or merge
    end
    ty.io.write_atomic(path .. "/merges.txt", table.concat(lines, "\n") .. "\n")
    ty.io.save_json(path .. "/tokenizer_config.json", { eos_token = "<|endoftext|>", model_max_length = 77 })
    local tok, want = ty.tokenizer.load(path), ty.tokenizer.load(folder .. name .. ".json")
    check.equal({ tok.size, tok.eos, tok.max_length }, { want.size, want:id "<|endoftext|>", 77 })
    for _, text in ipairs(samples) do
      local ids = want:encode(text)
      check.equal(tok:encode(text):tolist(), ids:tolist(), name .. " " .. text)
      check.equal(tok:decode(ids), want:decode(ids), name .. " " .. text)
    end
    local hub = require "tycho.hub"
    check.equal(hub.tokenizer(path):encode("a cat"):tolist(), want:encode("a cat"):tolist())
    ty.io.write_atomic(path .. "/vocab.json", '{"a": "b"}')
    check.fails(function() ty.tokenizer.load(path) end, "vocab.json: expected tokens and their ids, got a = b")
    ty.io.write_atomic(path .. "/vocab.json", '{"a": 99999999999}')
    check.fails(function() ty.tokenizer.load(path) end, "vocab.json")
  end
end)

check.finish()
