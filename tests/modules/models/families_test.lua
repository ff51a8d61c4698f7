-- The language model families against transformers: logits, loss, gradients and greedy text of the small models of
-- tests/fixtures/llm (make_llm.py), loaded from the folders that transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local root = check.root .. "tests/fixtures/llm/"
local TOLERANCE = reference.TOLERANCE
local compare, compare_gradients = reference.compare, reference.compare_gradients

local function load(name, options)
  local o = { dtype = "f32" }
  for key, value in pairs(options or {}) do o[key] = value end
  return llm.load(root .. name, o)
end

local function expected(name)
  local tensors, notes = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
  return tensors, ty.io.json_decode(notes.variants)
end

local function compare_greedy(model, want, name)
  local prompts, alone = {}, {}
  for i, length in ipairs { 7, 3, 11 } do
    local all = want["greedy." .. (i - 1)]
    prompts[i] = all:narrow(0, 0, length)
    local got = model:generate(prompts[i]:unsqueeze(0), 200, { temperature = 0 })
    check.equal(got:select(0, 0):tolist(), all:tolist(), name .. " greedy " .. i)
    alone[i] = all:tolist()
  end
  local together = model:generate(prompts, 200, { temperature = 0 })
  for i, row in ipairs(together) do check.equal(row:tolist(), alone[i], name .. " in a batch " .. i) end
end

for _, name in ipairs { "gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "olmo2", "phi3",
  "gpt_neox", "gemma2", "gemma3", "opt", "opt_narrow", "falcon", "falcon_new", "falcon_rw", "mamba",
  "mamba2", "gemma" } do
  check.test(name, function()
    local want, variants = expected(name)
    local model = load(name)
    compare(model(want.tokens), want.logits, name .. " logits")
    local t = want.tokens.shape[2]
    local loss = model:loss(want.tokens, ty.concat({ want.labels:narrow(1, 1, t - 1),
      ty.full({ 2, 1 }, -100, { dtype = "i64" }) }, 1))
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    local left = compare_gradients(model, loss, want, name == "gpt2" and "transformer%." or nil)
    check.equal(left, {}, name .. " gradients left")
    for i, change in ipairs(variants) do
      compare(ty.no_grad(load(name, { config = change }).forward, load(name, { config = change }), want.tokens),
        want["variant." .. (i - 1)], ("%s variant %d"):format(name, i))
    end
    compare_greedy(model, want, name)
  end)
end

check.test("Gemma's embeddings are scaled by a number of the weights' dtype", function()
  local tokens = ty.tensor { { 5, 9, 2 } }
  for dtype, scale in pairs { bf16 = 5.65625, f16 = 5.65625, f64 = math.sqrt(32) } do
    local model = load("gemma3", { dtype = dtype })
    local want = model.model.embed_tokens(tokens) * scale
    check.equal(model:embed(tokens):tolist(), want:tolist(), dtype)
    check.equal(model(tokens).dtype, dtype)
  end
end)

check.test("what Gemma's configs cannot be is one clear error", function()
  local function fails(name, change, text)
    check.fails(function() load(name, { config = change, weights = false }) end, text)
  end
  fails("gemma2", { layer_types = { "full_attention" } },
    "config key 'layer_types': expected one for each of the 2 layers, got 1")
  fails("gemma3", { layer_types = { "full_attention", "chunked", "full_attention" } },
    "Gemma3: config key 'layer_types': expected full_attention or sliding_attention, got chunked")
  fails("gemma2", { attn_logit_softcapping = -1 }, "'attn_logit_softcapping': expected a positive number, got -1")
  fails("gemma3", { attn_logit_softcapping = 50 }, "'attn_logit_softcapping': expected false, got 50")
  fails("gemma2", { use_bidirectional_attention = true }, "'use_bidirectional_attention': expected false, got true")
  fails("gemma2", { query_pre_attn_scalar = 0 }, "'query_pre_attn_scalar': expected a positive number, got 0")
  fails("gemma2", { hidden_activation = "sine" }, "config key 'hidden_activation': unknown activation 'sine'")
  fails("gemma3", { rope_parameters = { full_attention = { rope_type = "spiral" } } }, "unknown rope_type 'spiral'")
  fails("gemma3", { rope_local_base_freq = -1, rope_parameters = { sliding_attention = {} } },
    "rope setting 'rope_theta' must be a positive number, got -1")
  -- The published files of 2025 have the older keys.
  local old = { rope_parameters = ty.io.null, rope_theta = 5e5, rope_local_base_freq = 300, layer_types = ty.io.null,
    sliding_window_pattern = 2, rope_scaling = { rope_type = "linear", factor = 8 } }
  local model = load("gemma3", { config = old, weights = false })
  local settings = model.rotary.settings
  check.equal({ settings.theta, settings.factor, settings.kind }, { 5e5, 8, "linear" })
  check.equal({ model.local_rotary.settings.theta, model.local_rotary.settings.kind }, { 300, "default" })
  check.equal(model.config.layer_types, { "sliding_attention", "full_attention", "sliding_attention" })
end)

check.test("what configs of OPT and Falcon cannot be is one clear error", function()
  local function fails(name, change, text)
    check.fails(function() load(name, { config = change, weights = false }) end, text)
  end
  fails("opt", { layerdrop = 0.1 }, "OPT: config key 'layerdrop': expected 0, got 0.1")
  fails("opt", { num_attention_heads = 3 }, "num_attention_heads 3 must divide hidden_size 32")
  fails("opt", { activation_function = "sine" }, "config key 'activation_function': unknown activation 'sine'")
  fails("opt", { word_embed_proj_dim = 0 }, "config key 'word_embed_proj_dim' must be a positive integer, got 0")
  fails("falcon_new", { num_kv_heads = 3 }, "num_kv_heads 3 must divide num_attention_heads 4")
  fails("falcon_new", { parallel_attn = false }, "Falcon: config key 'parallel_attn': expected true, got false")
  fails("falcon", { num_ln_in_parallel_attn = 2 }, "config key 'num_ln_in_parallel_attn': expected false or 1, got 2")
  fails("falcon", { hidden_dropout = 0.5 }, "config key 'hidden_dropout': expected 0, got 0.5")
  local long = load("opt", { config = { max_position_embeddings = 4 }, weights = false })
  check.fails(function() long(ty.tensor { { 1, 2, 3, 4, 5 } }) end, "OPT: 5 tokens, but there is room for 4")
end)

check.test("caches that attend themselves take no capped or biased scores", function()
  for _, name in ipairs { "gemma2", "falcon_rw" } do
    local model = load(name, { config = { layer_types = { "full_attention", "full_attention" } } })
    check.fails(function()
      local cache = model:cache { h2o = true, heavy = 4, recent = 20 }
      ty.no_grad(model.forward, model, ty.tensor { { 1, 2 } }, { cache = cache })
    end, "scores of attention do not go with")
  end
end)

check.test("bert", function()
  local want = expected "bert"
  local model = load "bert"
  local options = { mask = want.mask, types = want.types }
  local seen = want.mask:to("bool"):unsqueeze(-1):to "f32"
  local logits = model(want.tokens, options)
  compare(logits * seen, want.logits * seen, "bert logits")
  local loss = model:loss(want.tokens, want.labels, options)
  check.close(loss:item(), want.loss:item(), TOLERANCE, "bert loss")
  check.equal(compare_gradients(model, loss, want), {}, "bert gradients left")
  local encoder = llm.Bert(ty.io.load_json(root .. "bert/config.json"), false)
  llm.assign(encoder, llm.weights(root .. "bert"), { dtype = "f32" })
  encoder:eval()
  compare(encoder(want.tokens, options) * seen, want.hidden * seen, "bert hidden states")
  compare(encoder:embed(want.tokens, options), want.embedding, "bert embeddings")
  check.close(encoder:embed(want.tokens, options):square():sum(1):tolist(), { 1, 1 }, 1e-5)
end)

for name, base in pairs { roberta = "Roberta", distilbert = "DistilBert", modernbert = "ModernBert" } do
  check.test(name, function()
    local want = expected(name)
    local model, options = load(name), { mask = want.mask }
    check.equal(getmetatable(model).__name, base .. "ForMaskedLM")
    local seen = want.mask:to("bool"):unsqueeze(-1):to "f32"
    compare(model(want.tokens, options) * seen, want.logits * seen, name .. " logits")
    compare(model:embed(want.tokens, options), want.embedding, name .. " embeddings")
    local loss = model:loss(want.tokens, want.labels, options)
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    check.equal(compare_gradients(model, loss, want), {}, name .. " gradients left")

    -- The encoder alone, from the same file.
    local encoder = load(name, { config = { architectures = { base .. "Model" } } })
    check.equal(getmetatable(encoder).__name, base)
    check.ok(#encoder.report.left_out > 0)
    compare(encoder:embed(want.tokens, options), want.embedding, name .. " alone")
    check.equal(#encoder:embed(want.tokens, { mask = want.mask, pooling = "first" }).shape, 2)
    check.fails(function() encoder:embed(want.tokens, { pooling = "most" }) end,
      base .. ".embed: pooling 'most' is not")
    check.fails(function() encoder:loss() end, "take " .. base .. "ForMaskedLM")

    -- Untied, the head changes alone; saved and loaded it is untied still.
    local path = scratch.file(name)
    local untied = load(name):untie()
    check.equal(untied:tied(), nil)
    compare(untied(want.tokens, options) * seen, want.logits * seen, name .. " untied")
    untied:save(path)
    compare(llm.load(path)(want.tokens, options) * seen, want.logits * seen, name .. " untied and saved")
    check.fails(function() model:generate({ { 1 } }, 1) end, "generates no text")
  end)
end

check.test("what configs of encoders cannot be is one clear error", function()
  local function fails(name, change, text)
    check.fails(function() load(name, { config = change, weights = false }) end, text)
  end
  fails("roberta", { pad_token_id = 31 }, "Roberta: config key 'pad_token_id': expected a row of the 32 positions")
  fails("roberta", { hidden_act = "sine" }, "Roberta: config key 'hidden_act': unknown activation 'sine'")
  fails("roberta", { position_embedding_type = "relative_key" },
    "config key 'position_embedding_type': expected absolute, got relative_key")
  fails("distilbert", { n_heads = 3 }, "n_heads 3 must divide dim 16")
  fails("modernbert", { classifier_pooling = "max" },
    "ModernBert: config key 'classifier_pooling': expected cls or mean, got max")
  fails("modernbert", { layer_types = { "full_attention" } },
    "ModernBert: config key 'layer_types': expected one for each of the 4 layers, got 1")
  check.fails(function() load("roberta")(ty.full({ 1, 31 }, 5, { dtype = "i64" })) end,
    "Roberta: 31 tokens, but there are 30 positions")
  check.fails(function() load("distilbert")(ty.full({ 1, 33 }, 5, { dtype = "i64" })) end,
    "DistilBert: 33 tokens, but there are 32 positions")
  -- The published files have the older keys.
  local old = { rope_parameters = ty.io.null, global_rope_theta = 7e4, local_rope_theta = 300,
    layer_types = ty.io.null, global_attn_every_n_layers = 2 }
  local model = load("modernbert", { config = old, weights = false }).model
  check.equal({ model.rotary.settings.theta, model.local_rotary.settings.theta }, { 7e4, 300 })
  check.equal(model.config.layer_types, { "full_attention", "sliding_attention", "full_attention",
    "sliding_attention" })
end)

check.test("models that are RoBERTa by another name", function()
  local want = expected "roberta"
  for kind, prefix in pairs { ["xlm-roberta"] = "XLMRoberta", camembert = "Camembert" } do
    local change = { model_type = kind, architectures = { prefix .. "ForMaskedLM" } }
    local model = load("roberta", { config = change })
    compare(model(want.tokens, { mask = want.mask }):narrow(0, 0, 1), want.logits:narrow(0, 0, 1), kind)
    local path = scratch.file(kind)
    model:save(path)
    local written = ty.io.load_json(path .. "/config.json")
    check.equal({ written.model_type, written.architectures }, { kind, { prefix .. "ForMaskedLM" } })
    check.equal(getmetatable(llm.load(path)).__name, "RobertaForMaskedLM")
  end
end)

for _, name in ipairs { "t5", "t5_v1_1" } do
  check.test(name, function()
    local want = expected(name)
    local model = load(name)
    local loss = model:loss(want.tokens, want.labels, { mask = want.mask })
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    local inputs = ty.concat({ ty.zeros({ 2, 1 }, { dtype = "i64" }), want.labels:narrow(1, 0, 12) }, 1)
    inputs = inputs:masked_fill(inputs:eq(-100), 0)
    compare(model(want.tokens, inputs, { mask = want.mask }), want.logits, name .. " logits")
    check.equal(compare_gradients(model, loss, want), {}, name .. " gradients left")
    for i = 0, 1 do
      local got = model:generate(want["source." .. i]:unsqueeze(0), 200, { temperature = 0 })
      check.equal(got:select(0, 0):tolist(), want["greedy." .. i]:tolist(), name .. " greedy " .. i)
    end
    -- The encoder alone, of the same file.
    local reader = load(name, { config = { architectures = { "T5EncoderModel" } } })
    check.equal(getmetatable(reader).__name, "T5EncoderModel")
    check.ok(#reader.report.left_out > 0 and #reader.report.unexpected == 0, name .. " left out")
    check.equal(reader(want.tokens, { mask = want.mask }):tolist(),
      model:encode(want.tokens, { mask = want.mask }):tolist(), name .. " encoder")
    local rows = model:generate({ want["source.0"], want["source.1"] }, 200, { temperature = 0 })
    for i = 0, 1 do check.equal(rows[i + 1]:tolist(), want["greedy." .. i]:tolist(), name .. " in a batch " .. i) end
  end)
end

scratch.clean()
check.finish()
