-- A language model in 2, 3 and 4 bits, column after column
-- claim: at 3 bits at most a third of the perplexity that rounding to nearest costs; decoding 3 times as fast as in f32
-- system: GPTQ on the paper's grids and on those of GGUF's blocks, which stay packed in memory
-- paper: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
-- time: 8 minutes on two CPU cores, and 6 more for the three models if there are none
--
-- Rounding and GPTQ have the same grids and the same choice of ranges, plain or searched, by the validation part. GPTQ
-- takes the columns with the largest inputs first; that of columns in order stands beside it. These models lose at most
-- 1 % to rounding at 3 bits, so that seeds scatter.
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "steps", 1050, "training steps of a base", quick = 2 },
    { "rows", 128, "rows of training text to calibrate with", quick = 4 },
    { "parts", "both", "what to do", choices = { "both", "quality", "speed" } },
    { "tokens", 24, "tokens to time", quick = 3 },
    { "width", 1024, "hidden size of the random Llama that is timed", quick = 256 },
    { "layers", 8, "its layers", quick = 1 },
  },
}
local args = r.args
local claims = {}

-- ---- quality ----

-- Rounding and GPTQ have the same grids, and the same choice where a grid has one: whether ranges are searched for. It
-- is made by the validation part, in rows without overlap. GPTQ takes the columns with the largest inputs first; that
-- of columns in order stands beside it.
local grids = {
  { name = "4 bits, rows", bits = 4 },
  { name = "3 bits, rows", bits = 3, bar = true },
  { name = "3 bits, groups of 64", bits = 3, group = 64, bar = true },
  { name = "2 bits, groups of 64", bits = 2, group = 64 },
  { name = "q3_k", format = "q3_k", bar = true },
  { name = "q2_k", format = "q2_k" },
}
if r.quick then grids = { grids[3], grids[5] } end

local function quality()
  local corpus = llm.corpus.open { folder = r:base "corpus", validation = true, every = r.quick and 100 or 10,
    vocabulary = r.quick and 300 or 1024 }
  local quickly = llm.data.Packed(r:base "corpus/validation.safetensors", { length = corpus.length })
  local function perplexity(model) return corpus:evaluate(model, "held_out", { device = r.device }).perplexity end
  -- The better of the grids of plain and of searched ranges for what make(model, options) does.
  local function choose(base, grid, make)
    local best, least, chosen = nil, math.huge, nil
    for _, mse in ipairs((grid.format or r.quick) and { false } or { false, true }) do
      local model, o = base:clone(), { bits = grid.bits, group = grid.group, format = grid.format }
      if not grid.format then o.mse = mse end
      make(model, o)
      local loss = llm.train.evaluate(model, quickly, { device = r.device }).loss
      if loss < least then best, least, chosen = model, loss, o end
    end
    return perplexity(best), chosen
  end
  local sums = {}
  for _, seed in ipairs(r.seeds) do
    local base = corpus:trained { folder = r:base(seed), device = r.device,
      model = { width = 256, layers = r.quick and 1 or 3, heads = 4, hidden = r.quick and 256 or 512 },
      train = { seed = seed, steps = args.steps, quiet = true } }
    local whole = corpus:evaluate(base, "held_out", { device = r.device }).perplexity
    r.metrics[("f32/%d"):format(seed)] = whole
    r:say("seed %d: perplexity %.3f in f32", seed, whole)
    for _, grid in ipairs(grids) do
      local bits
      local function solve(model, o)
        o.rows, o.seed, o.device = args.rows, seed, r.device
        if o.act_order == nil then o.act_order = true end
        bits = quant.gptq.quantize(model, corpus.training, o).bits
      end
      local rounded, how = choose(base, grid, quant.round)
      local solved, chosen = choose(base, grid, solve)
      local other = base:clone()
      chosen.act_order = false
      solve(other, chosen)
      local in_order = perplexity(other)
      local sum = sums[grid.name] or { rounded = 0, solved = 0, in_order = 0, lost = {}, ratios = {} }
      sums[grid.name] = sum
      for name, value in pairs { rounded = rounded, solved = solved, in_order = in_order } do
        sum[name] = sum[name] + (value - whole) / #r.seeds
        r.metrics[("%s/%s/%d"):format(grid.name, name, seed)] = value
      end
      table.insert(sum.lost, rounded - whole)
      table.insert(sum.ratios, (solved - whole) / (rounded - whole))
      r:say("  %-21s %.3f bits  rounded %7.3f%s  GPTQ %7.3f%s (in order %7.3f)", grid.name, bits, rounded,
        how.mse and "*" or " ", solved, chosen.mse and "*" or " ", in_order)
    end
  end
  for _, grid in ipairs(grids) do
    local sum = sums[grid.name]
    r:say("%-21s perplexity over f32: rounded %.3f, GPTQ %.3f, ratio %.3f; in order %.3f, ratio %.3f", grid.name,
      sum.rounded, sum.solved, sum.solved / sum.rounded, sum.in_order, sum.in_order / sum.rounded)
    if grid.bar then
      claims[#claims + 1] = { claim = ("perplexity lost to that of rounding, %s"):format(grid.name),
        measured = sum.solved / sum.rounded, values = sum.ratios, baseline = sum.lost, bar = 1 / 3, below = true }
    end
  end
end

-- ---- speed ----

local median = ty.stats.median

-- One token at a time out of a Llama with random weights that no cache holds, all kinds in turn.
local function speed()
  ty.manual_seed(r.seed)
  local kinds, models, times = { "f32", "q4_k", "q3_k", "q2_k" }, {}, {}
  local width = args.width
  models.f32 = llm.Llama { vocab_size = 1024, hidden_size = width, intermediate_size = width * 11 // 1024 * 256,
    num_hidden_layers = args.layers, num_attention_heads = width // 64, max_position_embeddings = 512,
    tie_word_embeddings = true }
  models.f32:eval():to(r.device)
  for _, kind in ipairs(kinds) do
    if kind ~= "f32" then
      models[kind] = models.f32:clone()
      quant.round(models[kind], { format = kind })
    end
    times[kind] = {}
  end
  ty.no_grad(function()
    for round = 0, 3 do
      for _, kind in ipairs(kinds) do
        ty.scope(function()
          local model = models[kind]
          local cache = model:cache()
          local token = ty.zeros({ 1, 1 }, { dtype = "i64", device = r.device })
          model(token, { cache = cache })
          local began = r:seconds()
          for _ = 1, args.tokens do
            token = model(token, { cache = cache }):argmax(-1):reshape(1, 1)
          end
          token:item()
          if round > 0 then table.insert(times[kind], (r:seconds() - began) / args.tokens) end
        end)
      end
    end
  end)
  local f32 = median(times.f32)
  r:say("a Llama of %.0f million parameters, tokens per second:", models.f32:count_parameters() / 1e6)
  for _, kind in ipairs(kinds) do
    local time = median(times[kind])
    r.metrics["tokens_per_second/" .. kind] = 1 / time
    r:say("  %-5s %7.1f   x %.2f", kind, 1 / time, f32 / time)
  end
  claims[#claims + 1] = { claim = "tokens per second in q3_k over f32", measured = f32 / median(times.q3_k), bar = 3 }
  claims[#claims + 1] = { claim = "tokens per second in q2_k over f32", measured = f32 / median(times.q2_k), bar = 3 }
end

if args.parts ~= "speed" then quality() end
if args.parts ~= "quality" then speed() end
os.exit(r:finish(claims))
