-- Training over machines with slow links between them: parts as near as their traffic asks for
-- claim: a quarter of the bytes of ZeRO's third stage leave a machine, in less time a step, at the same held-out loss
-- system: dist.low_bandwidth, parameters in pairs, gradients in machines, moments over all ranks, 8 and 4 bits
-- paper: Xu et al. 2025, "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning"
-- time: 6 minutes on one CPU core
--
-- A quarter is what ZeRO++ saves, on which the paper builds. Both ways train in bf16 with the same batches, the same
-- rate and the same network: links between machines of a bandwidth with which the third stage waits for them most of
-- the time, and links within that are eight times as fast. A pair's own link counts as one within its machine. What
-- leaves a machine is what rings and exchanges of all its ranks send to others, the parameters after a step among it.
-- What is paid is memory: a machine of four has its parameters twice. Seconds are those of the ranks' clocks, rounding
-- included.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "length", 64, "tokens of a row", quick = 16 }, { "width", 96, "hidden size of the Llama", quick = 32 },
    { "layers", 3, "layers of it", quick = 1 }, { "rows", 192, "held-out rows that are measured", quick = 8 },
    { "steps", 150, "training steps", quick = 5 }, { "batch", 8, "rows of a step", quick = 4 },
    { "ranks", 8, "that share them", quick = 4 }, { "per_node", 4, "ranks of a machine", quick = 2 },
    { "rate", 4e-3, "of AdamW" }, { "bandwidth", 2e7, "bytes a second between machines" },
  },
}
local args = r.args
local work = dist.workload.open { length = args.length, width = args.width, layers = args.layers, rows = args.rows,
  config = { tie_word_embeddings = false } }

-- Trains on a rank; bits nil: the third stage of ZeRO.
local function train(group, bits, seed, o)
  local t, d = require "tycho", require "tycho.dist"
  group:reset_memory()
  local before = group:memory()
  local model = d.workload.model(o.work, seed)
  local options = { half = "bf16", optimizer = function(list)
    return t.optim.AdamW(list, { lr = o.rate, schedule = t.optim.cosine { steps = o.steps, warmup = o.steps // 10 } })
  end }
  local engine
  if bits then
    options.per_node, options.gradients = o.per_node, bits
    engine = d.low_bandwidth(group, model, options)
  else
    options.stage = 3
    engine = d.zero(group, model, options)
  end
  local share, losses, left, from, crossed, live = o.batch // group.size, {}, {}, nil, nil, nil
  for step = 1, o.steps do
    t.scope(function()
      if step == 2 then from, crossed = group:clock(), engine:traffic().crossed end -- the first learns the order
      local rows = d.workload.rows(o.work, seed, step, share * group.rank, share)
      local loss = engine:backward(function() return d.workload.loss(model, rows) end)
      losses[step] = group:all_reduce(t.tensor(loss, { dtype = "f64" }), "mean"):item()
      if step == o.steps then
        collectgarbage()
        live = group:memory() - before
      end
      engine:update()
      left[step] = engine:traffic().crossed
    end)
  end
  local steps = o.steps - 1
  return { seconds = (group:clock() - from) / steps, crossed = (engine:traffic().crossed - crossed) / steps,
    bytes = live / model:count_parameters(), held_out = d.workload.evaluate(model, o.work),
    count = model:count_parameters(), losses = losses, left = left }
end

local ways = { { "ZeRO 3" }, { "4 bits", 4 }, { "8 bits", 8 } }
local network = { per_node = args.per_node, latency = 1e-4, bandwidth = args.bandwidth,
  within = { latency = 1e-5, bandwidth = 8 * args.bandwidth } }
local found, curves = {}, {}
for _, seed in ipairs(r.seeds) do
  for _, way in ipairs(ways) do
    local got = dist.run(args.ranks, train, network, way[2], seed, { work = work, steps = args.steps,
      batch = args.batch, rate = args.rate, per_node = args.per_node })
    local all = { seconds = got[1].seconds, held_out = got[1].held_out, bytes = got[1].bytes, crossed = 0 }
    for _, of in ipairs(got) do -- for each machine, in bytes a parameter
      all.crossed = all.crossed + of.crossed / of.count * args.per_node / args.ranks
    end
    if seed == r.seeds[1] then
      local x, y = {}, {}
      for step = 5, args.steps, 5 do
        local sum = 0
        for _, of in ipairs(got) do sum = sum + of.left[step] / 1e6 end
        x[#x + 1], y[#y + 1] = sum, ty.stats.mean(table.move(got[1].losses, step - 4, step, 1, {}))
      end
      curves[#curves + 1] = { x = x, y = y, label = way[1] }
    end
    found[way[1]] = found[way[1]] or {}
    for key, value in pairs(all) do
      found[way[1]][key] = found[way[1]][key] or {}
      table.insert(found[way[1]][key], value)
    end
    r:note(way[1], all, seed)
    r:say("%-7s seed %d: loss %.4f, %.3f bytes a parameter leave a machine, %.1f ms a step, %.2f bytes kept", way[1],
      seed, all.held_out, all.crossed, 1e3 * all.seconds, all.bytes)
  end
end
local plain, four, eight = found["ZeRO 3"], found["4 bits"], found["8 bits"]
local ratios = ty.stats.ratios
ty.plot.line { series = curves, title = "Loss by what has left the machines", x_label = "megabytes", width = 900 }
  :save(r:picture "low_bandwidth.png")

os.exit(r:finish {
  { claim = "times fewer bytes leave a machine than in ZeRO's third stage", values = ratios(plain.crossed,
    four.crossed), bar = 4 },
  { claim = "times as fast a step, by the clock", values = ratios(plain.seconds, four.seconds), bar = 1.4 },
  { claim = "held-out loss, of the third stage's", values = ratios(four.held_out, plain.held_out),
    baseline = plain.held_out, bar = 1.01, below = true },
  { claim = "the same with gradients of 8 bits", values = ratios(eight.held_out, plain.held_out), judged = false },
  { claim = "bytes a rank keeps, of the third stage's", values = ratios(four.bytes, plain.bytes), judged = false },
}, true)
