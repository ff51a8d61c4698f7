-- Text from a language model
-- claim: decoding with a cache gives the tokens that the model gives without one
-- system: transformer language models, published weights
-- paper: Vaswani et al. 2017, "Attention Is All You Need"; Leviathan et al. 2023, "Speculative Decoding"
-- time: seconds; without --model a small untrained one
local ty = require "tycho"
local llm = require "tycho.llm"

local r = ty.recipe.declare {
  args = {
    { "model", "", "a folder with config.json and weights, or a GGUF file (none: a small untrained model)" },
    { "prompt", "The meaning of life is", "text to go on from; needs the folder's tokenizer" },
    { "ids", "", "tokens to go on from in place of a prompt: 464,3290,318" },
    { "max_tokens", 100, "tokens to make at most", quick = 16 },
    { "temperature", 0.8, "0 takes the most likely token" },
    { "top_k", 0, "only the most likely tokens (0: all)" },
    { "top_p", 0.95, "only the fewest tokens that together have this probability" },
    { "min_p", 0.0, "only tokens with this share of the best one's probability" },
    { "repetition_penalty", 1.0, "above 1: tokens that were there become less likely" },
    { "stop", "", "a text that ends the answer" },
    { "draft", "", "a folder with a smaller model of the same tokens, which drafts" },
    { "draft_tokens", 4, "tokens that it drafts at a time" },
    { "dtype", "", "convert the weights: f32, bf16, f16" },
  },
}
local args, clock = r.args, ty.system.clock

local function load(path)
  return llm.load(path, { device = r.device, dtype = args.dtype ~= "" and args.dtype or nil })
end

local model, tokenizer
if args.model ~= "" then
  model = load(args.model)
  tokenizer = llm.tokenizer(args.model)
else
  model = llm.Llama { vocab_size = 512, hidden_size = 128, intermediate_size = 344, num_hidden_layers = 4,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 1024 }:eval()
  model:to(r.device)
end

local function read_ids(text)
  local list = {}
  for word in text:gmatch "[^%s,]+" do
    list[#list + 1] = math.tointeger(tonumber(word)) or error("--ids: '" .. word .. "' is no token", 0)
  end
  return ty.tensor(list, { dtype = "i64" })
end

local prompt
if args.ids ~= "" then
  prompt = read_ids(args.ids)
elseif tokenizer then
  prompt = tokenizer:encode(args.prompt)
elseif args.model == "" then
  prompt = ty.arange(1, 33)
else
  io.stderr:write "there is no tokenizer: give the prompt as --ids\n"
  os.exit(2, true)
end

r:say("%s with %d parameters, %d tokens of prompt", getmetatable(model).__name, model:count_parameters(),
  prompt.shape[1])

local stream = tokenizer and llm.stream(tokenizer)
local function show(text)
  io.stdout:write(text)
  io.stdout:flush()
end

local stats, began, first, made = {}, clock(), nil, 0
local draft = args.draft ~= "" and load(args.draft) or nil
local tokens = model:generate({ prompt }, args.max_tokens, {
  temperature = args.temperature, top_k = args.top_k, top_p = args.top_p, min_p = args.min_p,
  repetition_penalty = args.repetition_penalty, seed = r.seed, draft = draft, draft_tokens = args.draft_tokens,
  stats = stats, tokenizer = tokenizer, stop = args.stop ~= "" and { args.stop } or {},
  on_token = function(_, token)
    first = first or clock()
    made = made + 1
    show(stream and stream(token) or token .. " ")
  end,
})[1]
local finished = clock()
show((stream and stream() or "") .. "\n\n")

local prompt_rate = prompt.shape[1] / (first - began)
local rate = made > 1 and (made - 1) / (finished - first) or 0
r:say("prompt %.1f tokens/s, decoding %.1f tokens/s", prompt_rate, rate)
r.metrics.prompt_tokens_per_second, r.metrics.decode_tokens_per_second = prompt_rate, rate
if stats.rounds then
  r:say("%d of %d drafted tokens held, %.2f tokens a round", stats.accepted, stats.drafted, made / stats.rounds)
  r.metrics.accepted = stats.accepted / math.max(1, stats.drafted)
end

-- The same positions at once, without a cache: is every next token that the cached model prefers preferred here too?
local count = math.min(tokens.shape[1], prompt.shape[1] + 32)
local sequence = tokens:narrow(0, 0, count):unsqueeze(0):to { device = r.device }
local agreement = ty.no_grad(function()
  local cache, cached = model:cache(), {}
  for i = 0, count - 1 do
    cached[#cached + 1] = model:head(model:hidden(sequence:narrow(1, i, 1), { cache = cache }))
  end
  local whole, one_by_one = model(sequence):to "f32", ty.concat(cached, 1):to "f32"
  local best = whole:argmax(-1, true)
  -- Preferred, or within rounding of it.
  local lead = one_by_one:max(-1, true) - one_by_one:gather(2, best)
  return lead:le(one_by_one:abs():max():item() * 1e-3):to("f32"):mean():item()
end)

os.exit(r:finish { { claim = "tokens that agree with and without the cache", measured = agreement, bar = 1.0 } })
