--- What recipes about layers that are divided each in a way of their own measure: what layers of a workload's model
-- take and keep, and what steps by a plan take.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local divide_layer = require("tycho.dist.grid_trial").divide_layer
local layer_plans = require "tycho.dist.layer_plans"
local layers_of = require "tycho.dist.pipeline_layers"
local layerwise = require "tycho.dist.layerwise"
local pipelines = require "tycho.dist.pipeline"
local ranks_of = require "tycho.dist.ranks"
local schedules = require "tycho.dist.schedule"
local workload = require "tycho.dist.workload"

local M = {}

local function loss_of(logits, targets)
  return ty.nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
end

-- ---- layers ----

-- What a layer takes for some rows: seconds forwards and backwards, at least, bytes that are kept, and bytes at most
-- beyond these. All ranks of the run do it at once, as in training.
local function time(group, layer, x, targets, repeats)
  local out = { forward = math.huge, backward = math.huge, most = 0 }
  local weights = layer.flat and {} or layer:parameters()
  for round = 0, repeats do
    ty.scope(function()
      local input = x.dtype == "i64" and x or x:detach():requires_grad_()
      for _, p in ipairs(weights) do p:set_grad(p:detach():zeros_like()) end
      collectgarbage()
      collectgarbage()
      group:reset_memory()
      group:barrier()
      local before, began = group:memory(), group:clock()
      local y = layer(input)
      local bytes = y:nbytes()
      if targets then y = loss_of(y, targets) end
      local middle = group:clock()
      local live, peak = group:memory()
      local g = targets and nil or ty.ones(y.shape)
      group:barrier()
      local from = group:clock()
      y:backward(g)
      local ended = group:clock()
      local _, most = group:memory()
      if layer.own then
        layer.own:free()
        layer.own = nil
      end
      if round == 0 then return end
      out.forward, out.backward = math.min(out.forward, middle - began), math.min(out.backward, ended - from)
      out.kept, out.output, out.most = live - before, bytes, math.max(out.most, math.max(peak, most) - before)
    end)
  end
  return out
end

-- Seconds of fn, at least.
local function least(group, repeats, fn)
  local best = math.huge
  for _ = 1, repeats do
    local began = group:clock()
    ty.scope(fn)
    best = math.min(best, group:clock() - began)
  end
  return best
end

-- A layer by a strategy, for few rows and for many; groups: those of the strategy.
local function profile_layer(group, work, i, last, s, groups, o)
  local inner = layers_of(workload.model(work, o.seed))[i]
  if s.tensor > 1 then divide_layer(inner.layer, groups.tensor) end
  local n = 0
  for _, p in ipairs(inner:parameters()) do n = n + p:numel() end
  local layer = layerwise.layer(inner, s, groups)
  local tokens, at, counts = workload.rows(work, o.seed, 1, 0, o.rows), {}, { 1, math.max(2, o.rows // s.data) }
  for k, count in ipairs(counts) do
    local rows = tokens:narrow(0, 0, count)
    local x = i == 1 and rows:narrow(1, 0, work.length):contiguous()
      or ty.randn(count, work.length, work.config.hidden_size)
    at[k] = time(group, layer, x, i == last and rows:narrow(1, 1, work.length):contiguous() or nil, o.repeats)
  end
  local few, many = at[1], at[2]
  local function line(a, b)
    local slope = math.max(0, (b - a) / (counts[2] - 1))
    return { math.max(0, a - slope), slope }
  end
  -- What is there of a rank's gradients counts as state elsewhere.
  local function working(got)
    return math.max(0, got.most - got.kept - (s.sharded and 4 * n // s.data or 0))
  end
  return { forward = line(few.forward, many.forward), backward = line(few.backward, many.backward),
    kept = many.kept / counts[2], output = many.output / counts[2], working = line(working(few), working(many)),
    parameters = n }
end

-- All strategies of all kinds of layers, on the ranks of a stage, of which there are as many at once as in training.
local function profile(group, work, o)
  local count = #layers_of(workload.model(work, o.seed))
  local out = { rows = o.rows, layers = {} }
  for i = 1, count do out.layers[i] = i > 2 and i < count and out.layers[2] or { sums = 0, ways = {} } end
  for n = 1, group.size do
    if group.size % n == 0 then
      local stage = group:split(group.rank // n)
      for _, s in ipairs(layer_plans.strategies(n)) do
        if s.first == "tensor" then
          local groups = layerwise.groups(stage, s)
          for _, i in ipairs(s.tensor == 1 and { 1, 2, count } or { 2 }) do
            local layer = out.layers[i]
            if i == 2 then layer.sums = 2 end
            local got = profile_layer(group, work, i, count, s, groups, o)
            layer.ways[layer_plans.key(s)], layer.output = got, got.output
          end
        end
      end
    end
  end
  local n = 1 << 18
  local x, y = ty.zeros(n):requires_grad_(), ty.ones(n)
  local optimizer = ty.optim.AdamW({ x }, { lr = 1e-3 })
  x:set_grad(ty.ones(n))
  optimizer:step()
  out.optimizer = least(group, o.repeats, function() optimizer:step() end) / n
  out.copying = least(group, o.repeats, function() y:copy_(ty.concat({ y:flatten() }, 0)) end) / n
  return out
end

-- Seconds of each sum of two ranks that share a block, beside what the block takes with a half of it alone.
local function exchange(group, work, o)
  local half = layers_of(workload.model(work, o.seed))[2]
  divide_layer(half.layer, group, 2, group.rank % 2)
  local x = ty.randn(math.max(1, o.rows // 4), work.length, work.config.hidden_size)
  local best = math.huge
  for _ = 0, 2 * o.repeats do
    ty.scope(function()
      local input = x:detach():requires_grad_()
      for _, p in ipairs(half:parameters()) do p:set_grad(p:detach():zeros_like()) end
      group:barrier()
      local began = group:clock()
      local y = half(input)
      y:backward(ty.ones(y.shape))
      group:barrier()
      best = math.min(best, group:clock() - began)
    end)
  end
  return best
end

-- Seconds of each action of a pipeline beside what its layers compute.
local function action(group, o, length, width)
  local count = 16
  local layer = ty.nn.Identity()
  local stages = {}
  for i = 1, group.size do stages[i] = layer end
  local w = ty.ones(1):requires_grad_()
  local pipeline = pipelines.new(group, stages, { recompute = false, loss = function(y) return (y * w):sum() end,
    schedule = schedules.one_f_one_b(group.size, count) })
  local x, y = ty.randn(count, length, width), ty.zeros({ count, 1 }, { dtype = "i64" })
  return least(group, o.repeats, function()
    group:barrier()
    pipeline:step(x, y)
    group:barrier()
  end) / (2 * (count + group.size - 1))
end

-- The larger numbers of two tables: what the slowest rank takes.
local function larger(a, b)
  if type(a) == "number" then return math.max(a, b) end
  local out = {}
  for key, value in pairs(a) do out[key] = larger(value, b[key]) end
  return out
end

--- What the layers of a workload's model take by each strategy on so many ranks, over links that take no time. Blocks
-- are taken to be alike. options: rows (16: of a step), repeats (5: the least counts), seed (0).
---@param work RankWorkload
---@param ranks integer
---@param options? table
---@return LayersProfile
function M.profile(work, ranks, options)
  local who = "dist.layer_trial.profile"
  arguments.expect(who, "work", work, "a table")
  arguments.expect(who, "ranks", ranks, "an integer in [1, 1024]")
  local o = arguments.read(who, options, { rows = 16, repeats = 5, seed = 0 },
    { rows = "an integer >= 2", repeats = "an integer >= 1", seed = "an integer" })
  local all = ranks_of.run(ranks, profile, { seed = o.seed }, work, o)
  local out = all[1]
  for rank = 2, ranks do out = larger(out, all[rank]) end
  local alone = ranks_of.run(1, exchange, { seed = o.seed }, work, o)[1]
  local both = ranks_of.run(2, exchange, { seed = o.seed }, work, o)
  out.exchange = math.max(0, (math.max(both[1], both[2]) - alone) / 4)
  out.action = {}
  for several = 1, 2 do
    out.action[several] = ranks_of.run(several, action, { seed = o.seed }, o, work.length, work.config.hidden_size)[1]
  end
  out.action[2] = math.max(out.action[2], out.exchange)
  return out
end

-- ---- steps ----

local function steps(group, work, plan, o)
  collectgarbage()
  collectgarbage()
  local before = group:memory()
  local training = layerwise.new(group, workload.model(work, o.seed), plan)
  local stage = training.group
  local share = o.rows // stage.size
  local out = { losses = {}, seconds = {}, peak = 0 }
  for step = 1, o.steps do
    local rows = workload.rows(work, o.seed, step, share * stage.rank, share)
    local inputs, targets = rows:narrow(1, 0, work.length):contiguous(), rows:narrow(1, 1, work.length):contiguous()
    group:reset_memory()
    group:barrier()
    local began = group:clock()
    out.losses[step] = training:step(inputs, targets)
    group:barrier()
    out.seconds[step] = group:clock() - began
    local _, peak = group:memory()
    if step > 1 then out.peak = math.max(out.peak, peak - before) end -- the first makes what the optimizer keeps
  end
  return out
end

local function rounds(group, work, plans, o)
  local out = {}
  for _ = 1, o.rounds do
    for i, plan in ipairs(plans) do
      local got = ty.scope(steps, group, work, plan, o)
      local entry = out[i] or { losses = got.losses, seconds = got.seconds, peak = 0 }
      for step, seconds in ipairs(got.seconds) do entry.seconds[step] = math.min(entry.seconds[step], seconds) end
      entry.peak, out[i] = math.max(entry.peak, got.peak), entry
    end
  end
  return out
end

--- Trains a workload's model by plans of dist.layerwise, in turn, and says what a step took. options: rows (16: of a
-- step, all ranks together), steps (4: the first does not count, the fastest of the others does), rounds (1: how often
-- each has its turn; the fastest counts), seed (0), latency (0), bandwidth (math.huge), per_node (0), within (as
-- dist.run has them).
---@param work RankWorkload
---@param ranks integer
---@param plans table[]
---@param options? table
---@return { seconds: number, bytes: integer, losses: number[] }[]  by plan; bytes: the most of a rank
function M.measure(work, ranks, plans, options)
  local who = "dist.layer_trial.measure"
  arguments.expect(who, "work", work, "a table")
  arguments.expect(who, "ranks", ranks, "an integer in [1, 1024]")
  arguments.expect(who, "plans", plans, "a list of tables")
  local o = arguments.read(who, options, { rows = 16, steps = 4, rounds = 1, seed = 0, latency = 0.0,
    bandwidth = math.huge, per_node = 0, within = arguments.none },
    { rows = "an integer >= 1", steps = "an integer >= 2", rounds = "an integer >= 1", seed = "an integer",
      latency = "a finite number >= 0", bandwidth = "a number > 0", per_node = "an integer >= 0", within = "a table" })
  for _, plan in ipairs(plans) do
    local stage = ranks // (plan.pipeline or 1)
    if o.rows % (stage * (plan.micro_batches or 1)) ~= 0 then
      arguments.fail("%s: rows: expected a multiple of %d, one for each rank of a stage and micro-batch, got %d", who,
        stage * (plan.micro_batches or 1), o.rows)
    end
  end
  local got = ranks_of.run(ranks, rounds, { seed = o.seed, latency = o.latency, bandwidth = o.bandwidth,
    per_node = o.per_node, within = o.within }, work, plans, o)
  local list = {}
  for i = 1, #plans do
    local out = { seconds = math.huge, bytes = 0, losses = got[1][i].losses }
    for step = 2, o.steps do
      local slowest = 0
      for _, r in ipairs(got) do slowest = math.max(slowest, r[i].seconds[step]) end
      out.seconds = math.min(out.seconds, slowest)
    end
    for _, r in ipairs(got) do out.bytes = math.max(out.bytes, r[i].peak) end
    list[i] = out
  end
  return list
end

return M
