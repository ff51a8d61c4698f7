-- Loading and saving language models: folders, shards, PyTorch's files, the report of what does not fit, damaged files.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub, llm = require "tycho.hub", require "tycho.llm"

local root = check.root .. "tests/fixtures/llm/"

local function json(path, value) scratch.spit(path:sub(#scratch.folder + 2), ty.io.json_encode(value)) end

-- A folder with a fixture's config and other tensors.
local count = 0
local function folder(name, state, change)
  count = count + 1
  local path = scratch.file("model" .. count)
  ty.io.mkdir(path)
  local config = ty.io.load_json(root .. name .. "/config.json")
  for key, value in pairs(change or {}) do config[key] = value end
  json(path .. "/config.json", config)
  if state then ty.io.save_safetensors(path .. "/model.safetensors", state) end
  return path
end

local function copy(state)
  local result = {}
  for name, t in pairs(state) do result[name] = t end
  return result
end

check.test("the file's dtype, or another; mapped memory is not the file", function()
  local model = llm.load(root .. "llama")
  check.equal(model.model.norm.weight.dtype, "bf16")
  check.equal(llm.load(root .. "llama", { dtype = "f32" }).lm_head.weight.dtype, "f32")
  check.equal(model.training, false)
  check.equal(model.generation_config.transformers_version ~= nil, true)
  check.equal(model.config.unknown, {})
  local before = model.lm_head.weight:detach():tolist()
  model.lm_head.weight:detach():fill_(0)
  check.equal(llm.load(root .. "llama").lm_head.weight:tolist(), before)
end)

check.test("what is saved is loaded again, tied weights once", function()
  for _, name in ipairs { "gpt2", "llama3", "qwen2", "mixtral", "gpt_neox", "gemma2", "gemma3", "opt_narrow",
    "falcon_new", "bert", "roberta", "distilbert", "modernbert", "t5", "t5_v1_1" } do
    local model = llm.load(root .. name)
    local path = scratch.file("saved_" .. name)
    model:save(path)
    local again = llm.load(path)
    local a, b = model:state_dict(), again:state_dict()
    for key, t in pairs(a) do
      check.equal(b[key].dtype, t.dtype)
      check.equal((t:to "f32" - b[key]:to "f32"):abs():max():item(), 0, name .. " " .. key)
    end
    local written = ty.io.load_json(path .. "/config.json")
    check.equal(written.model_type, ({ llama3 = "llama", t5_v1_1 = "t5", gemma3 = "gemma3_text",
      opt_narrow = "opt", falcon_new = "falcon" })[name] or name)
    check.equal(written.torch_dtype, "bfloat16")
    check.equal(again.config.unknown, {})
    if name:find "t5" then check.equal(again.scale, model.scale) end
  end
end)

check.test("shards with an index, PyTorch's file, bodies alone, other prefixes", function()
  local state = ty.io.load(root .. "llama/model.safetensors")
  local tokens = ty.tensor { { 5, 9, 2 } }
  local want = llm.load(root .. "llama")(tokens):tolist()
  local path, parts, map = folder "llama", { {}, {} }, {}
  for name, t in pairs(state) do
    local part = name:find "layers.1" and 2 or 1
    parts[part][name] = t
    map[name] = ("model-0000%d-of-00002.safetensors"):format(part)
  end
  for i, part in ipairs(parts) do
    ty.io.save_safetensors(("%s/model-0000%d-of-00002.safetensors"):format(path, i), part)
  end
  json(path .. "/model.safetensors.index.json", { metadata = { total_size = 1 }, weight_map = map })
  check.equal(llm.load(path)(tokens):tolist(), want)
  map["lm_head.weight"] = "../elsewhere.safetensors"
  json(path .. "/model.safetensors.index.json", { weight_map = map })
  check.fails(function() llm.load(path) end, "no file name")
  map["lm_head.weight"] = "model-00003-of-00003.safetensors"
  json(path .. "/model.safetensors.index.json", { weight_map = map })
  check.fails(function() llm.load(path) end, "shard model-00003-of-00003.safetensors is not there")
  map["lm_head.weight"] = "model-00002-of-00002.safetensors"
  json(path .. "/model.safetensors.index.json", { weight_map = map })
  check.fails(function() llm.load(path) end, "'lm_head.weight' is not in shard")

  local tied = copy(ty.io.load(root .. "qwen3/model.safetensors"))
  tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
  check.equal(llm.load(folder("qwen3", tied))(tokens):tolist(), llm.load(root .. "qwen3")(tokens):tolist())
  check.equal(llm.load(root .. "llama/model.safetensors")(tokens):tolist(), want)

  local bare = {}
  for name, t in pairs(state) do bare[name:gsub("^model%.", "")] = t end
  check.equal(llm.load(folder("llama", bare))(tokens):tolist(), want)
  for family, prefix in pairs { falcon_rw = "transformer.", gpt_neox = "gpt_neox.", opt_narrow = "model." } do
    local alone, all = {}, ty.io.load(root .. family .. "/model.safetensors")
    for name, t in pairs(all) do alone[name:gsub("^" .. prefix:gsub("%.", "%%."), "")] = t end
    check.equal(llm.load(folder(family, alone))(tokens):tolist(), llm.load(root .. family)(tokens):tolist(), family)
  end
  local gpt2 = llm.load(root .. "gpt2")
  local published = {}
  for name, t in pairs(gpt2:state_dict()) do published[name] = t end
  published["h.0.attn.bias"] = ty.ones { 1, 1, 4, 4 }
  published["h.1.attn.masked_bias"] = ty.tensor(-1e4)
  published["lm_head.weight"] = gpt2.wte.weight
  check.equal(llm.load(folder("gpt2", published))(tokens):tolist(), gpt2(tokens):tolist())
  local old = {}
  for name, t in pairs(ty.io.load(root .. "bert/model.safetensors")) do
    old[name:gsub("LayerNorm%.weight", "LayerNorm.gamma"):gsub("LayerNorm%.bias", "LayerNorm.beta")] = t
  end
  old["cls.seq_relationship.weight"] = ty.zeros { 2, 32 }
  check.equal(llm.load(folder("bert", old))(tokens):tolist(), llm.load(root .. "bert")(tokens):tolist())
  check.equal(getmetatable(llm.load(folder("bert", old, { architectures = { "BertModel" } }))).__name, "Bert")
end)

check.test("the report names what is missing, unexpected and misshapen, by groups", function()
  local state = copy(ty.io.load(root .. "llama/model.safetensors"))
  state["model.layers.0.mlp.up_proj.weight"] = nil
  state["model.layers.1.mlp.up_proj.weight"] = nil
  state["model.norm.weight"] = ty.ones { 31 }
  state["model.extra.bias"] = ty.ones { 3 }
  state["model.layers.0.self_attn.rotary_emb.inv_freq"] = ty.ones { 4 }
  local path = folder("llama", state)
  local message = check.fails(function() llm.load(path) end, "missing (2)")
  for _, text in ipairs { path, "model.layers.N.mlp.up_proj (2): model.layers.0.mlp.up_proj.weight, ",
    "unexpected (1):\n    model.extra.bias", "misshapen (1)",
    "model.norm.weight: the model has [32], the file [31]" } do
    check.ok(message:find(text, 1, true), text)
  end
  check.ok(not message:find "inv_freq")
  local model = llm.load(folder("llama", nil), { weights = false })
  local report = llm.assign(model, state, { strict = false })
  check.equal(#report.missing, 2)
  check.equal(report.unexpected, { "model.extra.bias" })
  check.equal(#report.misshapen, 1)
end)

check.test("configs that cannot be are one clear error", function()
  local function fails(change, text) check.fails(function() llm.load(folder("llama", {}, change)) end, text) end
  fails({ model_type = "rwkv" }, "model_type 'rwkv' is not known; there are action_model, bert, camembert, clip, ")
  fails({ hidden_size = ty.io.null, hiden_size = 32 }, "the config has no hidden_size; it has the unknown hiden_size")
  fails({ num_hidden_layers = "two" }, "'num_hidden_layers' must be a positive integer up to 10000, got two")
  fails({ num_hidden_layers = 0 }, "up to 10000, got 0")
  fails({ num_key_value_heads = 3 }, "num_key_value_heads 3 must divide num_attention_heads 4")
  fails({ hidden_act = "sine" }, "config key 'hidden_act': unknown activation 'sine'; there are gelu, ")
  fails({ rms_norm_eps = -1 }, "config key 'rms_norm_eps' must be a number >= 0, got -1")
  fails({ rope_parameters = { rope_theta = 0 } }, "rope setting 'rope_theta' must be a positive number, got 0")
  -- Rows of tables that no machine has room for.
  fails({ rope_parameters = { partial_rotary_factor = 1e300 } }, "'partial_rotary_factor' must be at most 1, got 1e+")
  fails({ rope_parameters = { rope_type = "spiral" } }, "unknown rope_type 'spiral'")
  fails({ rope_parameters = { rope_type = "linear" } }, "rope_type 'linear' needs 'factor'")
  fails({ rope_parameters = { rope_type = "linear", factor = -1 } }, "'factor' must be a positive number")
  fails({ quantization_config = { quant_method = "gptq" } }, "quantized by gptq")
  fails({ head_dim = 5 }, "head_dim 5")
  fails({ num_hidden_layers = 1000000000 }, "up to 10000, got 1000000000")
  fails({ hidden_size = 1 << 30, intermediate_size = 1 << 30, vocab_size = 1 << 30 }, "config.json")
  fails({ vocab_size = 1 << 40 }, "must be a positive integer")
  check.fails(function() llm.load(folder("t5", {}, { relative_attention_num_buckets = 2 })) end, "at least 4, got 2")
  local old = { rope_parameters = ty.io.null, rope_theta = 5e5, rope_scaling = { type = "linear", factor = 2 } }
  local model = llm.load(folder("llama", nil, old), { weights = false })
  check.equal({ model.rotary.settings.kind, model.rotary.settings.theta }, { "linear", 5e5 })
  check.fails(function() llm.Llama { hidden_size = 32, colour = 1 } end, "the config has no ")
  check.fails(function() llm.load(scratch.file "nowhere") end, "is not there")
  local empty = scratch.file "empty"
  ty.io.mkdir(empty)
  check.fails(function() llm.load(empty) end, "has no config.json")
  check.fails(function() llm.load(folder "llama") end, "none of model.safetensors")
  check.fails(function() llm.load(root .. "llama", { typ = "f32" }) end, "no option 'typ'")
end)

check.test("every key of every config with values that it cannot have", function()
  local odd = { 0, -1, 3, 1.5, 1e300, -math.huge, "x", true, false, ty.io.null, {}, { a = 1 }, { "x", 2 } }
  for _, name in ipairs { "gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "olmo2", "phi3",
    "gpt_neox", "gemma2", "gemma3", "opt", "opt_narrow", "falcon", "falcon_new", "falcon_rw", "bert", "roberta",
    "distilbert", "modernbert", "t5" } do
    local config = ty.io.load_json(root .. name .. "/config.json")
    local state = llm.weights(root .. name)
    local path = folder(name, state)
    for key, before in pairs(config) do
      for i, value in ipairs(odd) do
        if value == -math.huge then value = "-1e999" end
        config[key] = value
        json(path .. "/config.json", config)
        local ok, message = pcall(llm.load, path)
        if ok then
          local targets = name == "t5" and ty.tensor { { 1 } } or nil
          ok, message = pcall(ty.no_grad, message.forward, message, ty.tensor { { 1, 2 } }, targets)
        end
        message = tostring(message)
        check.ok(ok or not message:find "attempt to" and not message:find "number has no",
          ("%s.%s = odd %d: %s"):format(name, key, i, message))
      end
      config[key] = before
    end
  end
end)

check.test("damaged files are one clear error; NaN is found where it is looked for", function()
  local text = scratch.slurp(root .. "qwen2/model.safetensors")
  local path = folder "qwen2"
  for _, size in ipairs { 0, 7, 100, #text // 2, #text - 1 } do
    scratch.spit(path:match "[^/]*$" .. "/model.safetensors", text:sub(1, size))
    local message = check.fails(function() llm.load(path) end, "model.safetensors")
    check.ok(not message:find "traceback")
  end
  scratch.spit(path:match "[^/]*$" .. "/config.json", "{ \"model_type\": ")
  check.fails(function() llm.load(path) end, "config.json")
  local state = copy(ty.io.load(root .. "qwen2/model.safetensors"))
  local bad = state["model.norm.weight"]:clone()
  bad:narrow(0, 3, 1):fill_(0 / 0)
  state["model.norm.weight"] = bad
  local damaged = folder("qwen2", state)
  check.ok(llm.load(damaged))
  check.fails(function() llm.load(damaged, { check = true }) end, "with NaN or infinity (1):\n    model.norm.weight")
  check.ok(llm.load(root .. "qwen2", { check = true }))
end)

check.test("GGUF: names, metadata, the order of queries and keys", function()
  local gguf = require "tycho.hub.gguf"
  local tokens = ty.tensor { { 5, 9, 2, 77 } }
  local want = llm.load(root .. "llama", { dtype = "f32" })
  local back = { ["model.embed_tokens"] = "token_embd", ["model.norm"] = "output_norm", lm_head = "output",
    input_layernorm = "attn_norm", post_attention_layernorm = "ffn_norm", ["self_attn.q_proj"] = "attn_q",
    ["self_attn.k_proj"] = "attn_k", ["self_attn.v_proj"] = "attn_v", ["self_attn.o_proj"] = "attn_output",
    ["mlp.gate_proj"] = "ffn_gate", ["mlp.up_proj"] = "ffn_up", ["mlp.down_proj"] = "ffn_down" }
  local tensors, turned = {}, {}
  for name, t in pairs(want:state_dict()) do
    local layer, part = name:match "^model%.layers%.(%d+)%.(.*)%.weight$"
    local new = layer and
      ("blk.%s.%s.weight"):format(layer, back[part]) or back[name:gsub("%.weight$", "")] .. ".weight"
    if new:find "attn_[qk]%." then
      local heads = new:find "attn_q" and 4 or 2
      t = t:reshape(heads, 2, 4, 32):transpose(1, 2):reshape(t.shape)
    end
    tensors[new], turned[name] = t, t
    check.equal(gguf.rename(new, "llama"), name)
  end
  local metadata = { ["general.architecture"] = "llama", ["llama.context_length"] = 256,
    ["llama.embedding_length"] = 32, ["llama.block_count"] = 2, ["llama.feed_forward_length"] = 48,
    ["llama.attention.head_count"] = 4, ["llama.attention.head_count_kv"] = 2, ["llama.rope.freq_base"] = 10000,
    ["llama.attention.layer_norm_rms_epsilon"] = 1e-6, ["llama.rope.dimension_count"] = 8 }
  local config = gguf.config(metadata, tensors)
  local state, interleaved = gguf.state(tensors, metadata, config)
  check.equal(interleaved, false)
  local model = llm.Llama(config):eval()
  llm.assign(model, state)
  check.close(model(tokens):tolist(), want(tokens):tolist(), 1e-5)
  local other = llm.Llama(config):eval()
  llm.assign(other, turned)
  other.interleaved = true
  check.close(other(tokens):tolist(), want(tokens):tolist(), 1e-4)

  tensors["rope_freqs.weight"] = ty.tensor { 1, 1, 4, 8 }
  check.equal(gguf.config(metadata, tensors).rope_scaling.divisors, { 1, 1, 4, 8 })
  local scaled = llm.Llama(gguf.config(metadata, tensors))
  local _, sin = scaled.rotary:table(4, "cpu")
  check.close(sin:select(0, 1):tolist(), { math.sin(1), math.sin(0.1), math.sin(0.01 / 4), math.sin(0.001 / 8) }, 1e-6)
  check.equal(gguf.rename("blk.3.attn_qkv.bias", "gpt2"), "h.3.attn.c_attn.bias")
  check.equal(gguf.rename("blk.3.nothing.bias", "llama"), nil)
  check.fails(function() gguf.config({ ["general.architecture"] = "rwkv" }, {}) end, "architecture 'rwkv' is not")

  if ty.io.save_gguf then
    local path = scratch.file "model.gguf"
    tensors["rope_freqs.weight"] = nil
    ty.io.save_gguf(path, tensors, metadata)
    check.close(llm.load(path)(tokens):tolist(), want(tokens):tolist(), 1e-4)
  end
end)

check.test("a device that is not there is one line, before a file is looked for", function()
  for _, load in ipairs { hub.load, hub.pipeline } do
    for device, text in pairs { gpu = 'unknown device "gpu"', ["cuda:77"] = 'device "cuda:77": ' } do
      local message = check.fails(function() load("nowhere", { device = device }) end, text)
      local _, positions = message:gsub("%.lua:%d+:", "")
      check.ok(positions <= 1 and not message:find "nowhere", message)
    end
  end
end)

scratch.clean()
check.finish()
