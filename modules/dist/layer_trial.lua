--- What recipes about layers that are divided each in a way of their own measure: what layers of a workload's model
-- take and keep, and what steps by a plan take.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local divide_layer = require("tycho.dist.grid_trial").divide_layer
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
-- beyond these.
local function time(group, layer, x, targets, repeats)
  local out = { forward = math.huge, backward = math.huge }
  local weights = layer.flat and {} or layer:parameters()
  for round = 0, repeats do
    ty.scope(function()
      local input = x.dtype == "i64" and x or x:detach():requires_grad_()
      for _, p in ipairs(weights) do p:set_grad(p:detach():zeros_like()) end
      collectgarbage()
      collectgarbage()
      group:reset_memory()
      local before, began = group:memory(), group:clock()
      local y = layer(input)
      local bytes = y:nbytes()
      if targets then y = loss_of(y, targets) end
      local middle = group:clock()
      local live, peak = group:memory()
      local g = targets and nil or ty.ones(y.shape)
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
      out.kept, out.output, out.most = live - before, bytes, math.max(peak, most) - before
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

-- A layer by a strategy, for few rows and for many.
local function profile_layer(group, work, i, last, t, how, o)
  local inner = layers_of(workload.model(work, o.seed))[i]
  if t > 1 then divide_layer(inner.layer, group, t, 0) end
  local n = 0
  for _, p in ipairs(inner:parameters()) do n = n + p:numel() end
  local layer = layerwise.layer(inner, { sharded = how == "sharded", again = how ~= "plain" },
    { tensor = group, data = group })
  local tokens, at = workload.rows(work, o.seed, 1, 0, o.rows), {}
  for _, count in ipairs { 1, o.rows } do
    local rows = tokens:narrow(0, 0, count)
    local x = i == 1 and rows:narrow(1, 0, work.length):contiguous()
      or ty.randn(count, work.length, work.config.hidden_size)
    at[#at + 1] = time(group, layer, x, i == last and rows:narrow(1, 1, work.length):contiguous() or nil, o.repeats)
  end
  local few, many = at[1], at[2]
  local function line(name)
    local slope = math.max(0, (many[name] - few[name]) / (o.rows - 1))
    return { math.max(0, few[name] - slope), slope }
  end
  -- What is there of the gradients of one rank counts as state elsewhere.
  local function working(got) return math.max(0, got.most - got.kept - (how == "sharded" and 4 * n or 0)) end
  local slope = math.max(0, (working(many) - working(few)) / (o.rows - 1))
  return { forward = line "forward", backward = line "backward", kept = many.kept / o.rows,
    output = many.output / o.rows, working = { math.max(0, working(few) - slope), slope }, parameters = n }
end

local function profile(group, work, o)
  local count = #layers_of(workload.model(work, o.seed))
  local out = { rows = o.rows, layers = {} }
  for i = 1, count do
    local block = i > 1 and i < count
    if block and i > 2 then
      out.layers[i] = out.layers[2] -- the same once more
    else
      out.layers[i] = {}
      for _, t in ipairs(block and o.tensor or { 1 }) do
        local ways = { sums = block and 2 or 0 }
        for _, how in ipairs { "plain", "again", "sharded" } do
          ways[how] = profile_layer(group, work, i, count, t, how, o)
        end
        ways.parameters, ways.output = ways.plain.parameters, ways.plain.output
        out.layers[i][t] = ways
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

--- What the layers of a workload's model take on one rank, whole and in parts. Blocks are taken to be alike. options:
-- rows (16: of a step), tensor ({ 1, 2, 4 }: in how many parts), repeats (5: the least counts), seed (0).
---@param work RankWorkload
---@param options? table
---@return LayersProfile
function M.profile(work, options)
  local who = "dist.layer_trial.profile"
  arguments.expect(who, "work", work, "a table")
  local o = arguments.read(who, options, { rows = 16, tensor = { 1, 2, 4 }, repeats = 5, seed = 0 },
    { rows = "an integer >= 2", tensor = "a list of integers >= 1", repeats = "an integer >= 1",
      seed = "an integer" })
  local out = ranks_of.run(1, profile, { seed = o.seed }, work, o)[1]
  out.action = {}
  for ranks = 1, 2 do
    out.action[ranks] = ranks_of.run(ranks, action, { seed = o.seed }, o, work.length, work.config.hidden_size)[1]
  end
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
