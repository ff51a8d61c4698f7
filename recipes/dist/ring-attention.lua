-- Sequences that are too long for one rank
-- claim: n ranks train on sequences about n times as long as one rank's memory allows, with one rank's numbers
-- system: a Llama on a book whose sequences are split over ranks; keys and values travel around the ring
-- paper: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective"
-- time: 4 minutes on one CPU core
--
-- A rank has a hard limit of bytes, of weights, gradients, moments and activations: a step of AdamW that needs more
-- fails. The longest sequence is found by halving, to an eighth of one rank's. One rank runs the model as it is. The
-- paper's form keeps all scores of a rank's queries, [t / n, t]; the other takes keys and values rank by rank, joins
-- results by their log-sum-exps and keeps no scores. The gradients of weights are summed over the ranks.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "ranks", { 1, 2, 4, 8 }, "ranks", quick = { 1, 2 } }, { "width", 64, "hidden size", quick = 32 },
    { "layers", 2, "layers", quick = 1 }, { "memory", 24, "MiB that a rank may have", quick = 3 },
    { "length", 2048, "tokens of the sequence whose bytes are measured", quick = 128 },
    { "compared", 128, "tokens of those whose numbers are compared", quick = 32 },
    { "steps", 6, "steps of AdamW that are compared", quick = 2 },
  },
}
local args = r.args
local MIB, forms = 1 << 20, { "blocks", "scores" }

local work = dist.workload.open { length = 64, width = args.width, layers = args.layers, heads = 4,
  key_value_heads = 2, rows = 1, vocabulary = 512 }
local function of_length(t)
  return { training = work.training, held_out = work.held_out, config = work.config, length = t }
end

-- Steps of AdamW with split sequences (form nil: as the model is): losses, gradients and bytes beside the weights.
local function train(group, given, dtype, form, steps, batch)
  local T, d = require "tycho", require "tycho.dist"
  local model = d.workload.model(given, 1):to(dtype)
  local sequence = form and d.sequence_parallel(model, group, { form = form })
  local optimizer = T.optim.AdamW(model:parameters(), { lr = 3e-3 })
  group:reset_memory()
  local before, out = group:memory(), { losses = {}, gradients = {} }
  for step = 1, steps do
    T.scope(function()
      local rows, t = d.workload.rows(given, 0, step, 0, batch), given.length
      local tokens, targets = rows:narrow(1, 0, t):contiguous(), rows:narrow(1, 1, t):contiguous()
      if sequence then tokens, targets = sequence:part(tokens), sequence:part(targets) end
      local loss = model:loss(tokens, targets)
      optimizer:zero_grad()
      loss:backward()
      if sequence then sequence:sum_gradients() end
      if step == 1 then
        out.bytes = group:all_reduce(T.tensor(select(2, group:memory()) - before), "max"):item()
        for name, p in model:named_parameters() do out.gradients[name] = T.keep(p.grad:clone()) end
      end
      optimizer:step()
      out.losses[step] = loss:item()
    end)
  end
  return out
end

local function apart(got, one)
  local most = 0
  for _, rank in ipairs(got) do
    for i, value in ipairs(one.losses) do most = math.max(most, math.abs(rank.losses[i] / value - 1)) end
    for name, g in pairs(one.gradients) do
      most = math.max(most, (rank.gradients[name] - g):abs():max():item() / g:abs():max():item())
    end
  end
  return most
end

-- ---- numbers ----

local short, from_one = of_length(args.compared), {}
for _, dtype in ipairs { "f32", "f64" } do
  local one = dist.run(1, train, nil, short, dtype, nil, args.steps, 2)[1]
  from_one[dtype] = 0
  for _, n in ipairs(args.ranks) do
    for _, form in ipairs(forms) do
      local got = dist.run(n, train, nil, short, dtype, form, args.steps, 2)
      from_one[dtype] = math.max(from_one[dtype], apart(got, one))
    end
  end
  r:say("%s: losses and gradients at most %.1e from one rank's", dtype, from_one[dtype])
end

-- ---- bytes ----

-- One rank has no use for blocks: its attention keeps no scores.
local function as_split(n, form) return (n > 1 or form == "scores") and form or nil end

local long, bytes = of_length(args.length), { blocks = {}, scores = {} }
for _, form in ipairs(forms) do
  for i, n in ipairs(args.ranks) do
    bytes[form][i] = dist.run(n, train, nil, long, "f32", as_split(n, form), 1, 1)[1].bytes
    r:say("%d tokens, %d ranks, %s: %.2f MiB beside weights", args.length, n, form, bytes[form][i] / MIB)
  end
end

-- ---- the longest sequence ----

local limit = args.memory * MIB
local function trains(n, t, form)
  local ok, problem = pcall(dist.run, n, train, { memory = limit }, of_length(t), "f32", as_split(n, form), 2, 1)
  assert(ok or problem:find "bytes more are beyond" or problem:find "out of memory", problem)
  return ok, problem
end

local function longest(n, form, guess)
  local unit = math.max(n, guess // 8 // n * n)
  local low, high = 0, 8 * n
  while trains(n, high * unit, form) do low, high = high, 2 * high end
  while high - low > 1 do
    local middle = (low + high) // 2
    if trains(n, middle * unit, form) then low = middle else high = middle end
  end
  return low * unit
end

local tokens = { blocks = {}, scores = {} }
local first = longest(1, nil, r.quick and 128 or 1024)
for _, form in ipairs(forms) do
  for i, n in ipairs(args.ranks) do
    tokens[form][i] = n == 1 and form == "blocks" and first or longest(n, form, first)
    r:say("%d MiB, %d ranks, %s: %d tokens", args.memory, n, form, tokens[form][i])
  end
end
r.metrics.bytes, r.metrics.tokens = bytes, tokens

-- One and a half times as many as one rank can have, by all ranks within the limit and by one without.
local last, n = #args.ranks, args.ranks[#args.ranks]
local too_long = of_length(first * 3 // 2 // n * n)
local alone, problem = trains(1, too_long.length)
r:say("%d tokens by one rank: %s", too_long.length, tostring(problem))
local beyond = apart(dist.run(n, train, { memory = limit }, too_long, "f32", "blocks", 2, 1),
  dist.run(1, train, nil, too_long, "f32", nil, 2, 1)[1])

local proportional, points = {}, { blocks = {}, scores = {} }
for i, count in ipairs(args.ranks) do
  proportional[i] = first * count
  for _, form in ipairs(forms) do points[form][i] = { count, bytes[form][i] } end
end
local curves = { { x = args.ranks, y = tokens.blocks, label = "keys and values rank by rank" },
  { x = args.ranks, y = tokens.scores, label = "all scores of a rank's queries" },
  { x = args.ranks, y = proportional, label = "as many times as ranks" } }
ty.plot.line { series = curves, title = ("Longest sequence, %d MiB a rank"):format(args.memory), x_label = "ranks",
  y_label = "tokens", width = 800 }:save(r:picture "ring-attention.png")

os.exit(r:finish {
  { claim = "losses and gradients in f32, largest distance from one rank's", measured = from_one.f32, bar = 1e-5,
    below = true },
  { claim = "the same in f64", measured = from_one.f64, bar = 1e-12, below = true },
  { claim = "1.5 times one rank's longest, trained by all: distance from one rank without a limit",
    measured = alone and "one rank trains it, too" or beyond, pass = not alone and beyond <= 1e-5, bar = "<= 1e-05" },
  { claim = ("longest sequence of %d ranks, of one's, by their number"):format(n),
    measured = tokens.blocks[last] / first / n, bar = 0.75 },
  { claim = "bytes of a rank go as the number of ranks to the power of",
    measured = ty.stats.slope(points.blocks, true), bar = -0.85, below = true },
  { claim = "the same with all scores of a rank's queries, as the paper",
    measured = ty.stats.slope(points.scores, true), judged = false },
}, true)
