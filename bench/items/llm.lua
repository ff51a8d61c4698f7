--- A Llama of 1.1 billion parameters (22 layers, width 2048, 32 heads of which 4 of keys, FFN 5632) with random weights
-- in a GGUF file, beside llama.cpp, which reads the same file: one token after 128 others, and a prompt of 512. The
-- limit of a token is reading the weights once.
local ty = require "tycho"
local steps = require "bench.lib.steps"
local bits = { f16 = 16, q8_0 = 8.5, q4_0 = 4.5 }
local layers, width, heads, kv_heads, ffn, vocabulary = 22, 2048, 32, 4, 5632, 32000
local head = width // heads
local in_layers = layers * width * (2 * width + 2 * kv_heads * head + 3 * ffn)

-- Every layer has the same weights, which takes no less time to compute with.
local function file_of(kind)
  local root = assert(arg[0]:match "^(.*)/bench/[^/]*$")
  local path = ("%s/build/bench/llama-1.1b-%s.gguf"):format(root, kind)
  if ty.io.exists(path) then return path end
  ty.io.mkdir(root .. "/build/bench")
  ty.manual_seed(0)
  local function weight(out, inner) return (ty.randn(out, inner) * 0.02):to(kind) end
  local norm, layer = ty.ones(width), { attn_q = { width, width }, attn_k = { kv_heads * head, width },
    attn_v = { kv_heads * head, width }, attn_output = { width, width }, ffn_gate = { ffn, width },
    ffn_up = { ffn, width }, ffn_down = { width, ffn } }
  local tensors = { ["token_embd.weight"] = weight(vocabulary, width), ["output.weight"] = weight(vocabulary, width),
    ["output_norm.weight"] = norm }
  for name, shape in pairs(layer) do
    local w = weight(shape[1], shape[2])
    for i = 0, layers - 1 do tensors[("blk.%d.%s.weight"):format(i, name)] = w end
  end
  for i = 0, layers - 1 do
    tensors[("blk.%d.attn_norm.weight"):format(i)] = norm
    tensors[("blk.%d.ffn_norm.weight"):format(i)] = norm
  end
  local metadata = { ["general.architecture"] = "llama", ["tokenizer.ggml.model"] = "none" }
  for key, value in pairs { context_length = 2048, embedding_length = width, block_count = layers,
    feed_forward_length = ffn, ["rope.dimension_count"] = head, ["rope.freq_base"] = 10000.0, vocab_size = vocabulary,
    ["attention.head_count"] = heads, ["attention.head_count_kv"] = kv_heads,
    ["attention.layer_norm_rms_epsilon"] = 1e-5 } do
    metadata["llama." .. key] = value
  end
  ty.io.save_gguf(path .. ".new", tensors, metadata)
  assert(os.rename(path .. ".new", path))
  return path
end

local items, past, prompt = {}, 128, 512
for _, kind in ipairs { "f16", "q8_0", "q4_0" } do
  local path = ("build/bench/llama-1.1b-%s.gguf"):format(kind)
  items[#items + 1] = { name = "decode-" .. kind, target = 0.5, bars = { limit = 0.85 },
    work = { read = (in_layers + vocabulary * width) * bits[kind] / 8 },
    peer = { "decode", { path = path, past = past } }, setup = function()
      local model = require("tycho.llm").load(file_of(kind))
      return steps.decode(model, past)
    end }
  items[#items + 1] = { name = "prompt-" .. kind, target = 0.5, rounds = 5,
    bars = kind == "f16" and { limit = 0.8 } or { peer = 2.5 },
    work = { [kind == "f16" and "f32" or "int8"] = 2 * prompt * in_layers },
    peer = { "prompt", { path = path, count = prompt } }, setup = function()
      local model = require("tycho.llm").load(file_of(kind))
      local tokens = ty.zeros({ 1, prompt }, { dtype = "i64" })
      return function()
        ty.no_grad(ty.scope, function()
          local hidden = model:hidden(tokens, { cache = model:cache { room = prompt }, last = 1 })
          return model:head(hidden):argmax(-1):item()
        end)
      end
    end }
end
return items
