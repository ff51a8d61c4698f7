-- Models to GGUF files and back.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local gguf = require "tycho.hub.gguf"

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
      check.equal(report.error > 0 and report.error < (dtype:find "^q[23]" and 0.4 or 0.1), true, dtype)
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

-- Codes of GPT-2 lie the other way round than its published weights.
check.test("quantized GPT-2", function()
  ty.manual_seed(2)
  local path = scratch.file "gpt2_wide"
  llm.GPT2 { vocabulary = 600, context = 64, width = 256, layers = 2, heads = 4 }:save(path)
  local model = llm.load(path)
  local want = model(tokens)
  for dtype, bound in pairs { q8_0 = 0.03, q6_k = 0.06, q4_k = 0.25, q4_0 = 0.3, f16 = 2e-3 } do
    local file = scratch.file("gpt2_" .. dtype .. ".gguf")
    local report = quant.convert(path, file, dtype)
    check.equal(report.tensors["blk.0.attn_qkv.weight"], dtype)
    check.equal(report.tensors["position_embd.weight"], "f32")
    local got = llm.load(file, { dtype = "f32" })
    check.ok((got(tokens) - want):abs():max():item() <= bound * want:abs():max():item(), dtype)
    if dtype ~= "f16" then check.equal(got:get("h.0.attn.c_attn.weight").dtype, dtype) end
    if dtype == "q8_0" then -- the same choices, one token at a time as well
      local one = got:generate({ tokens:select(0, 0) }, 12, { temperature = 0 })[1]
      check.equal(one:tolist(), model:generate({ tokens:select(0, 0) }, 12, { temperature = 0 })[1]:tolist())
      check.equal(got:get("h.0.mlp.c_fc"):describe(), "256, 1024")
    end
  end
  -- rows that are no whole blocks stay beside codes
  llm.GPT2 { vocabulary = 96, context = 64, width = 96, inner = 100, layers = 1, heads = 4 }:save(path)
  local report = quant.convert(path, scratch.file "mixed.gguf", "q8_0")
  check.equal({ report.tensors["blk.0.ffn_up.weight"], report.tensors["blk.0.ffn_down.weight"] }, { "q8_0", "f16" })
  local few = ty.tensor { { 1, 2, 3, 40 } }
  want = llm.load(path)(few)
  check.ok((llm.load(scratch.file "mixed.gguf", { dtype = "f32" })(few) - want):abs():max():item()
    <= 0.03 * want:abs():max():item())
end)

check.test("scalings of rotary positions", function()
  local long = ty.randint(0, 600, { 1, 60 })
  local scalings = {
    linear = { rope_type = "linear", factor = 4.0 },
    llama3 = { rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0,
      original_max_position_embeddings = 32 },
    yarn = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 16 },
    yarn_attention = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 16, beta_fast = 20,
      beta_slow = 2, attention_factor = 1.3 },
    yarn_mscale = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 16, mscale = 1.0,
      mscale_all_dim = 0.7 },
    default = { rope_type = "default" },
  }
  for name, scaling in pairs(scalings) do
    local path, file = small("rope_" .. name, nil, { rope_scaling = scaling }), scratch.file("rope.gguf")
    quant.convert(path, file, "f32")
    local want = llm.load(path)(long)
    check.close(llm.load(file)(long):tolist(), want:tolist(), 1e-3, name)
    local plain = llm.load(path, { config = { rope_scaling = { rope_type = "default" } } })(long)
    check.equal((plain - want):abs():max():item() > 1e-3, name ~= "default", name .. " counts")
  end
  quant.convert(root .. "llm/llama3", scratch.file "rope.gguf", "f32")
  check.close(llm.load(scratch.file "rope.gguf")(tokens):tolist(), llm.load(root .. "llm/llama3",
    { dtype = "f32" })(tokens):tolist(), 1e-3, "a published config")
  check.fails(function()
    quant.convert(small("rope_dynamic", nil, { rope_scaling = { rope_type = "dynamic", factor = 2.0 } }),
      scratch.file "x.gguf", "q8_0")
  end, "rope_type dynamic cannot be written")
end)

check.test("T5", function()
  for _, change in ipairs { {}, { feed_forward_proj = "gated-gelu", tie_word_embeddings = false } } do
    local config = { vocab_size = 96, d_model = 32, d_kv = 8, d_ff = 64, num_layers = 3, num_decoder_layers = 2,
      num_heads = 4, relative_attention_num_buckets = 8, decoder_start_token_id = 3 }
    for key, value in pairs(change) do config[key] = value end
    ty.manual_seed(3)
    local path, file = scratch.file "t5", scratch.file "t5.gguf"
    llm.T5(config):save(path)
    local model = llm.load(path)
    local source, target = ty.randint(0, 96, { 2, 9 }), ty.randint(0, 96, { 2, 5 })
    local want = model(source, target)
    for dtype, bound in pairs { f32 = 1e-5, q8_0 = 0.03 } do
      local report = quant.convert(path, file, dtype)
      check.equal(report.tensors["enc.blk.0.attn_rel_b.weight"], "f32")
      local got = llm.load(file, { dtype = "f32" })
      check.equal(got.config.num_decoder_layers, 2)
      check.equal(got.config.decoder_start_token_id, 3)
      local off = (got(source, target) - want):abs():max():item()
      check.ok(off <= bound * want:abs():max():item(), ("%s: off by %g"):format(dtype, off))
    end
  end
  check.fails(function() quant.convert(root .. "llm/t5", scratch.file "x.gguf", "q8_0") end,
    "relative_attention_max_distance 32 cannot be written")
end)

check.test("BERT", function()
  for dtype, bound in pairs { f32 = 1e-5, q8_0 = 0.05 } do
    local file = scratch.file "bert.gguf"
    quant.convert(root .. "llm/bert", file, dtype)
    local model = llm.load(root .. "llm/bert", { dtype = "f32" })
    local mask, inside = ty.ones(1, 8, { dtype = "i64" }), tokens:clamp(0, 95)
    local want = model.bert(inside, { mask = mask })
    local got = llm.load(file, { dtype = "f32" })
    check.equal(got.pooler, nil)
    check.ok((got(inside, { mask = mask }) - want):abs():max():item() <= bound * want:abs():max():item(), dtype)
    local distance = (got:embed(inside) - model:embed(inside)):abs():max():item()
    check.ok(distance <= bound, "sentence embeddings")
  end
end)

check.test("tokenizers", function()
  local text = "Hello wörld, it's 12345 times the\n\n  def f(x): return x  你好 🙂"
  for _, name in ipairs { "gpt2", "llama3", "qwen2", "llama2", "t5", "xlmr", "bert_cased", "bert_uncased" } do
    local path = small("with_" .. name, name)
    local size = ty.tokenizer.load(path).size
    local file = scratch.file(name .. "_tokens.gguf")
    quant.convert(path, file, "q8_0")
    local tok, want = llm.tokenizer(file), llm.tokenizer(path)
    check.equal(tok.size, size, name)
    check.equal(tok:encode(text, { special = false }):tolist(), want:encode(text, { special = false }):tolist(), name)
    check.equal(tok:encode(text):tolist(), want:encode(text):tolist(), name .. ", with what stands around")
    check.equal(tok:decode(tok:encode(text, { special = false })), want:decode(want:encode(text, { special = false })))
    -- By the keys of ggml alone, which is what other programs read; they say nothing of cased models.
    local metadata = select(2, ty.io.load(file))
    metadata["tokenizer.huggingface.json"] = nil
    if name ~= "bert_cased" and name ~= "xlmr" then
      local plain = gguf.tokenizer(metadata)
      check.equal(plain:encode(text):tolist(), want:encode(text):tolist(), name .. " by ggml's keys")
      check.equal(plain.size, size)
    end
  end
  check.equal(llm.tokenizer(small "without"), nil)
  for n = 0, 10 do
    local bytes = ("\0\255xyz\128\1\2\3\4"):sub(1, n)
    check.equal(gguf.from_base64(gguf.to_base64(bytes)), bytes, "base64")
  end
  check.equal(gguf.to_base64 "any carnal pleas", "YW55IGNhcm5hbCBwbGVhcw==")
end)

check.test("what cannot be converted", function()
  local path = small "errors"
  check.fails(function() quant.convert(path, scratch.file "x.gguf", "q5_k") end, "dtype: expected q8_0, q4_0")
  check.fails(function() quant.convert(root .. "llm/mixtral", scratch.file "x.gguf", "q8_0") end, "mixtral model")
  check.fails(function() quant.convert(small("words", "wordlevel"), scratch.file "x.gguf", "q8_0") end,
    "WordLevel tokenizer cannot be written")
  check.fails(function() quant.convert(path, scratch.file "none/x.gguf", "q8_0") end, "x.gguf")
  check.fails(function() quant.convert(root .. "llm/qwen2", scratch.file "x.gguf", "q8_0") end,
    "a sliding window in some")
  check.fails(function() quant.convert("no/such/folder", scratch.file "x.gguf", "q8_0") end, "is not there")
end)

scratch.clean()
check.finish()
