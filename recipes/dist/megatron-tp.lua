-- The matrices of a transformer split over ranks
-- claim: N ranks have a share of 1/N of the weights and one rank's numbers, with two all-reduces in a block each way
-- system: a Llama on a book, attention by heads, feed-forward networks by columns and rows, embeddings by words
-- paper: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
-- time: 1 minute on one CPU core
--
-- The same steps of AdamW by one, two and four ranks, each with all rows of a batch; weights and gradients are gathered
-- for the comparison alone. Time is by the ranks' clocks, a forward pass, a backward pass and a step, in a model that
-- is wide enough to be worth it; one rank runs the model as it is, without anything of this module. The bars of time
-- are what the paper has for a model of one size on more and more GPUs (its appendix on strong scaling).
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "length", 64, "tokens of a row", quick = 16 }, { "width", 128, "hidden size where numbers are compared",
      quick = 32 },
    { "layers", 2, "layers" }, { "rows", 8, "held-out rows", quick = 8 }, { "batch", 8, "rows of a step", quick = 2 },
    { "steps", 10, "steps of AdamW that are compared", quick = 2 },
    { "wide", 768, "hidden size where time is measured", quick = 64 },
    { "rounds", 5, "steps that are timed, of which the median counts", quick = 1 },
    { "latency", 5e-6, "seconds of a message between ranks" },
    { "bandwidth", 1e10, "bytes a second between them" },
    { "slow", 2e8, "bytes a second of another link, for the picture" },
  },
}
local args = r.args
local counts = { 1, 2, 4 }

local function open(width, heads, vocabulary)
  return dist.workload.open { length = args.length, width = width, layers = args.layers, heads = heads,
    key_value_heads = 4, rows = args.rows, vocabulary = vocabulary }
end

-- Steps of AdamW: losses, whole gradients of the first step, bytes of weights and exchanges of a block.
local function train(group, work, dtype, steps, batch, seed)
  local T, d = require "tycho", require "tycho.dist"
  require "tycho.llm" -- generation
  group:reset_memory()
  local before = group:memory()
  local model = d.workload.model(work, seed):to(dtype)
  local parallel = group.size > 1 and d.tensor_parallel(model, group) or nil
  group:reset_memory()
  local out = { losses = {}, bytes = group:memory() - before, exchanges = {} }
  local optimizer = T.optim.AdamW(model:parameters(), { lr = 3e-3 })
  for step = 1, steps do
    local loss = d.workload.loss(model, d.workload.rows(work, seed, step, 0, batch))
    optimizer:zero_grad()
    loss:backward()
    out.losses[step] = loss:item()
    if step == 1 then
      out.gradients = {}
      if parallel then
        out.gradients = parallel:gradients()
      else
        for name, p in model:named_parameters() do out.gradients[name] = p.grad:clone() end
      end
    end
    optimizer:step()
  end
  -- A block alone.
  local function exchanges() return group:traffic().calls.all_reduce or 0 end
  local x = T.randn({ 1, 8, work.config.hidden_size }):to(dtype):requires_grad_()
  local cos, sin = model.rotary:table(8, "cpu")
  local began = exchanges()
  local at = { cos = cos:narrow(0, 0, 8), sin = sin:narrow(0, 0, 8), layer = 1 }
  local stream, more = model.model.layers[1](x, nil, at)
  local between = exchanges()
  stream:add(more):sum():backward()
  out.exchanges = { between - began, exchanges() - between }
  model:eval()
  out.tokens = model:generate(work.held_out:narrow(0, 0, 4):narrow(1, 0, 4):contiguous(), work.length - 4,
    { temperature = 0 })
  return out
end

local function apart(got, want)
  local loss, gradient = 0, 0
  for _, rank in ipairs(got) do
    for i, value in ipairs(rank.losses) do loss = math.max(loss, math.abs(value / want.losses[i] - 1)) end
    for name, g in pairs(want.gradients) do
      gradient = math.max(gradient, (rank.gradients[name] - g):abs():max():item() / g:abs():max():item())
    end
  end
  return loss, gradient
end

local small = open(args.width, 8, 509) -- a prime number: no two ranks have as many words
local from_one, per_rank, blocks, same_tokens, all_tokens = {}, {}, { true, true }, 0, 0
for _, dtype in ipairs { "f32", "f64" } do
  local one
  from_one[dtype] = { 0, 0 }
  for _, n in ipairs(counts) do
    local got = dist.run(n, train, nil, small, dtype, args.steps, args.batch, r.seed)
    if n == 1 then
      one = got[1]
    else
      local loss, gradient = apart(got, one)
      r:say("%s, %d ranks: losses %.1e from one rank's, gradients %.1e; %.3f of its weights", dtype, n, loss, gradient,
        got[n].bytes / one.bytes)
      from_one[dtype] = { math.max(from_one[dtype][1], loss), math.max(from_one[dtype][2], gradient) }
      per_rank[n] = got[1].bytes / one.bytes
      for _, rank in ipairs(got) do
        for i = 1, 2 do blocks[i] = blocks[i] and rank.exchanges[i] == 2 end
        same_tokens = same_tokens + rank.tokens:eq(one.tokens):to("i64"):sum():item()
        all_tokens = all_tokens + one.tokens:numel()
      end
    end
  end
end

-- Seconds of a step by the clock of rank 0.
local function time(group, work, rounds, batch)
  local T, d = require "tycho", require "tycho.dist"
  local model = d.workload.model(work, 1)
  if group.size > 1 then d.tensor_parallel(model, group) end
  local optimizer, times = T.optim.AdamW(model:parameters(), { lr = 1e-3 }), {}
  for step = 0, rounds do
    T.scope(function()
      local rows = d.workload.rows(work, 0, step, 0, batch)
      group:barrier()
      local began = group:clock()
      optimizer:step(d.workload.loss(model, rows))
      group:barrier()
      if step > 0 then times[step] = group:clock() - began end
    end)
  end
  return T.stats.median(times)
end

local wide = open(args.wide, args.wide // 64 > 3 and args.wide // 64 or 4, 512)
local speedups, series = {}, { { x = counts, y = counts, label = "as many times as fast as there are ranks" } }
for i, bandwidth in ipairs { args.bandwidth, args.slow } do
  local times, ratios = {}, {}
  for k, n in ipairs(counts) do
    times[k] = dist.run(n, time, { latency = args.latency, bandwidth = bandwidth }, wide, args.rounds, args.batch)[1]
    ratios[k] = times[1] / times[k]
    r:say("width %d, %g bytes a second, %d ranks: %.1f ms, %.2f times as fast", args.wide, bandwidth, n,
      1e3 * times[k], ratios[k])
  end
  if i == 1 then speedups = ratios end
  r.metrics[i == 1 and "speedups" or "speedups_slow"] = ratios
  series[#series + 1] = { x = counts, y = ratios, label = ("%g GB a second"):format(bandwidth / 1e9) }
end
ty.plot.line { series = series, title = "A step of tensor parallel ranks", x_label = "ranks",
  y_label = "times as fast as one rank", width = 700 }:save(r:picture "megatron-tp.png")

os.exit(r:finish {
  { claim = "losses in f32, largest distance from one rank's", measured = from_one.f32[1], bar = 1e-5, below = true },
  { claim = "gradients in f32, of their largest", measured = from_one.f32[2], bar = 1e-5, below = true },
  { claim = "losses in f64", measured = from_one.f64[1], bar = 1e-12, below = true },
  { claim = "gradients in f64", measured = from_one.f64[2], bar = 1e-12, below = true },
  { claim = "weights of one of 2 ranks, times 2, of one rank's", measured = 2 * per_rank[2], bar = 1.02, below = true },
  { claim = "weights of one of 4 ranks, times 4, of one rank's", measured = 4 * per_rank[4], bar = 1.02, below = true },
  { claim = "all-reduces of a block forwards", measured = blocks[1] and "2" or "others", bar = "2", pass = blocks[1] },
  { claim = "all-reduces of a block backwards", measured = blocks[2] and "2" or "others", bar = "2", pass = blocks[2] },
  { claim = "generated tokens that are one rank's", measured = same_tokens / all_tokens, bar = 1 },
  { claim = "times as fast with 2 ranks", measured = speedups[2], bar = 1.64 },
  { claim = "times as fast with 4 ranks", measured = speedups[3], bar = 2.34 },
}, true)
