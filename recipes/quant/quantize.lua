-- A model in blocks of few bits
-- claim: 8-bit blocks keep a model's predictions, 4-bit blocks nearly so
-- system: GGUF files, block-quantized
-- paper: Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale"
-- time: seconds for a small model; the reading and writing of its weights for a large one
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local r = ty.recipe.declare {
  args = {
    { "model", "", "a Hugging Face folder (none: a small untrained model)" },
    { "dtype", "q8_0", "q8_0, q4_0, q4_k, q6_k, f32, f16 or bf16" },
    { "output", "", "the file to write (none: model-DTYPE.gguf under --out)" },
    { "text", "", "a text file whose tokens the two models predict (none: tokens drawn at random)" },
    { "tokens", 256, "how many of them", quick = 64 },
  },
}
local args = r.args

local folder = args.model
if folder == "" then
  folder = r:path "model"
  llm.Llama({ vocab_size = 512, hidden_size = 256, intermediate_size = 768, num_hidden_layers = 4,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 1024 }):save(folder)
end
local file = args.output ~= "" and args.output or r:path(("model-%s.gguf"):format(args.dtype))
local report = quant.convert(folder, file, args.dtype)
r:say("%s: %d parameters, %.1f MB", file, report.parameters, report.bytes / 1e6)

local original, converted = llm.load(folder, { dtype = "f32" }), llm.load(file, { dtype = "f32" })
local tokens
if args.text ~= "" then
  local tokenizer = llm.tokenizer(folder) or error("quantize: there is no tokenizer in " .. folder, 0)
  local handle <close> = assert(io.open(args.text, "rb"))
  local all = tokenizer:encode(handle:read "a")
  tokens = all:narrow(0, 0, math.min(args.tokens, all.shape[1]))
else
  tokens = ty.randint(0, original.config.vocab_size, { args.tokens })
end

-- Mean divergence, in nats, of the next token's distribution from the original's.
local divergence = ty.no_grad(function()
  local p = original(tokens:unsqueeze(0)):to("f32"):log_softmax(-1)
  local q = converted(tokens:unsqueeze(0)):to("f32"):log_softmax(-1)
  return (p:exp() * (p - q)):sum({ -1 }):mean():item()
end)

-- Bits of each weight in a block, and what rounding changes at most where weights are about normal.
local formats = { q8_0 = { bits = 8.5, change = 0.006 }, q6_k = { bits = 6.5625, change = 0.02 },
  q4_k = { bits = 4.5, change = 0.08 }, q4_0 = { bits = 4.5, change = 0.095 } }
local format = formats[args.dtype]
local claims = {
  { claim = "divergence of its predictions, nats", measured = divergence, bar = args.dtype == "q8_0" and 1e-3 or 0.05,
    below = true },
}
if format then
  r:say("%.3f bits for each quantized weight; a block of %s has %.4f", report.bits, args.dtype, format.bits)
  table.insert(claims,
    { claim = "relative error of the weights", measured = report.error, bar = format.change, below = true })
end
os.exit(r:finish(claims))
