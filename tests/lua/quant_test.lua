-- Models to GGUF files and back.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local root = check.root .. "tests/fixtures/"
local tokens = ty.tensor { { 1, 2, 3, 40, 5, 6, 70, 8 } }

-- A small Llama as a folder, with the tokenizer of a fixture.
local function small(name, tokenizer, change)
  local config = { vocab_size = 600, hidden_size = 256, intermediate_size = 320, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, bos_token_id = 1, eos_token_id = 2 }
  for key, value in pairs(change or {}) do config[key] = value end
  ty.manual_seed(1)
  local path = scratch.file(name)
  llm.Llama(config):save(path)
  if tokenizer then
    local from <close> = assert(io.open(root .. "tokenizers/" .. tokenizer .. ".json", "rb"))
    scratch.spit(name .. "/tokenizer.json", from:read "a")
  end
  return path
end

check.test("logits of a Llama in every format", function()
  local path = small "llama"
  local want = llm.load(path)(tokens)
  local size = want:abs():max():item()
  local bounds = { f32 = 1e-6, f16 = 2e-3, bf16 = 2e-2, q8_0 = 0.03, q6_k = 0.06, q4_k = 0.25, q4_0 = 0.3,
    q3_k = 0.6, q2_k = 1.2 }
  local bits = { q8_0 = 8.5, q6_k = 6.5625, q4_k = 4.5, q4_0 = 4.5, q3_k = 3.4375, q2_k = 2.625 }
  for dtype, bound in pairs(bounds) do
    local file = scratch.file(dtype .. ".gguf")
    local report = quant.convert(path, file, dtype)
    local model = llm.load(file, { dtype = "f32" })
    local change = (model(tokens) - want):abs():max():item()
    check.equal(change <= bound * size, true, ("%s: logits change by %g of %g"):format(dtype, change, size))
    if bits[dtype] then -- the head has more, and rows of 320 are no whole blocks of 256
      check.equal(report.bits >= bits[dtype] and report.bits <= 8.5, true, ("%s: %g bits"):format(dtype, report.bits))
      check.equal(report.error > 0 and report.error < (report.bits < 4 and 0.5 or 0.1), true, dtype)
    end
    check.equal(report.tensors["blk.0.attn_norm.weight"], "f32")
  end
  check.equal(quant.convert(path, scratch.file "x.gguf", "q4_k").tensors["blk.0.ffn_down.weight"], "q8_0")
  check.equal(quant.convert(path, scratch.file "x.gguf", "q4_k").tensors["output.weight"], "q6_k")
end)

check.test("other families", function()
  for _, name in ipairs { "gpt2", "llama", "mistral", "qwen3" } do
    local file = scratch.file(name .. ".gguf")
    quant.convert(root .. "llm/" .. name, file, "f32")
    local want = llm.load(root .. "llm/" .. name, { dtype = "f32" })(tokens)
    check.close(llm.load(file)(tokens):tolist(), want:tolist(), 1e-4, name)
  end
end)

check.test("tokenizers", function()
  local text = "Hello wörld, it's 12345 times the\n\n  def f(x): return x  你好 🙂"
  for _, name in ipairs { "gpt2", "llama3", "qwen2" } do
    local path = small("with_" .. name, name)
    local size = ty.tokenizer.load(path).size
    local file = scratch.file(name .. "_tokens.gguf")
    quant.convert(path, file, "q8_0")
    local tok, want = llm.tokenizer(file), llm.tokenizer(path)
    check.equal(tok.size, size, name)
    check.equal(tok:encode(text, { special = false }):tolist(), want:encode(text, { special = false }):tolist(), name)
    check.equal(tok:decode(tok:encode(text, { special = false })), text, name)
  end
  check.equal(llm.tokenizer(small "without"), nil)
end)

check.test("what cannot be converted", function()
  local path = small "errors"
  check.fails(function() quant.convert(path, scratch.file "x.gguf", "q5_k") end, "dtype: expected q8_0, q4_0")
  check.fails(function() quant.convert(root .. "llm/bert", scratch.file "x.gguf", "q8_0") end, "bert model cannot be")
  check.fails(function() quant.convert(root .. "llm/gpt2", scratch.file "x.gguf", "q8_0") end, "f32, f16 and bf16 only")
  check.fails(function() quant.convert(small("bert_tokens", "bert_cased"), scratch.file "x.gguf", "q8_0") end,
    "WordPiece tokenizer is not written yet")
  check.fails(function() quant.convert(path, scratch.file "none/x.gguf", "q8_0") end, "x.gguf")
  for name, text in pairs { qwen2 = "a sliding window in some", llama3 = "rope_type llama3 is not written yet" } do
    check.fails(function() quant.convert(root .. "llm/" .. name, scratch.file "x.gguf", "q8_0") end, text)
  end
  check.fails(function() quant.convert("no/such/folder", scratch.file "x.gguf", "q8_0") end, "is not there")
end)

scratch.clean()
check.finish()
