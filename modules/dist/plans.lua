--- What a training step takes by tensor, pipeline and data parallelism together, in seconds and bytes, and which way to
-- divide a model over devices is the fastest that fits: formulas of dist.costs, nothing runs here.
--
--     local got = dist.plans.step(model, cluster, { tensor = 8, pipeline = 12, data = 4, sequences = 2048, micro = 2 })
--     print(got.seconds, got.flops / 1e12, got.bytes.total / 1e9)
--     local best = dist.plans.search(model, cluster, { devices = 384, sequences = 2048 })[1]
--
-- After Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", and
-- Dash et al. 2023, "Optimizing Distributed Training on Frontier for Large Language Models". Neighbours in rank share
-- layers, then come those of the same stage, then the stages, as in dist.grid.
local arguments = require "tycho.arguments"
local costs = require "tycho.dist.costs"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local COUNT = "an integer in [1, 1048576]"
local DEFAULTS = { tensor = 1, pipeline = 1, data = 1, sequences = 1, micro = 1, chunks = 1, zero = 1,
  recompute = true, fused = false, share = true, balance = "layers", gradient_bytes = 2, optimizer_bytes = 12,
  reserve = 0 }
local WANTED = { tensor = COUNT, pipeline = COUNT, data = COUNT, sequences = COUNT, micro = COUNT,
  chunks = "an integer in [1, 1024]", zero = "0 or 1", recompute = "a boolean", fused = "a boolean",
  share = "a boolean", balance = '"layers" or "embeddings"', gradient_bytes = "a finite number >= 0",
  optimizer_bytes = "a finite number >= 0", reserve = "a finite number >= 0" }

---@class ParallelPlan
---@field tensor? integer     ranks that share each layer (1)
---@field pipeline? integer   stages (1)
---@field data? integer       replicas (1)
---@field sequences? integer  of a step, all replicas together (1)
---@field micro? integer      sequences of a micro-batch (1)
---@field chunks? integer     stages of a rank: an interleaved schedule (1)
---@field zero? integer       whether replicas divide the optimizer's state: 0 or 1 (1)
---@field recompute? boolean  a layer's forward pass runs again before its backward pass (true)
---@field fused? boolean      attention without scores in memory (false)
---@field share? boolean      ranks that share layers send a part of the activations each (true)
---@field balance? string     what stages have as many of: "layers", the last stage what is left, or "embeddings":
-- embedding and head count as a layer each ("layers")
---@field gradient_bytes? number   of a parameter (2)
---@field optimizer_bytes? number  of a parameter (12)
---@field reserve? number          bytes of a device that are taken by something else (0)

-- Layers of each stage.
local function divide(model, plan)
  local p, list = plan.pipeline, {}
  if plan.balance == "embeddings" then
    local all = model.layers + 2
    for i = 1, p do
      local share = all * i // p - all * (i - 1) // p
      list[i] = share - (i == 1 and 1 or 0) - (i == p and 1 or 0)
    end
  else
    local most, left = (model.layers + p - 1) // p, model.layers
    for i = 1, p do
      list[i] = math.min(most, left - (p - i))
      left = left - list[i]
    end
  end
  return list
end

-- Seconds of a layer's forward pass over a micro-batch, without collectives: products, and the bytes that kernels
-- between them read and write. These are, of each token and value of the hidden width, two norms (8 bytes) and two
-- sums with what was dropped (14), which every rank does whole; heads that are put in order (16) and the feed-forward
-- network's activation, which ranks share; and of each score a softmax and a dropout (9).
local function layer_seconds(model, cluster, plan)
  local t, h, s = plan.tensor, model.hidden, model.length
  local tokens, width = plan.micro * s, h // model.heads
  local keys, inner = width * model.key_value_heads, model.inner * (model.gated and 2 or 1)
  local heads = plan.micro * model.heads / t
  local products = cluster:product(tokens, (h + 2 * keys) / t, h) + cluster:product(s, s, width, heads)
    + cluster:product(s, width, s, heads) + cluster:product(tokens, h, h / t)
    + cluster:product(tokens, inner / t, h) + cluster:product(tokens, h, model.inner / t)
  local bytes = tokens * h * (22 + (16 + 4 * inner / h) / t)
  if not plan.fused then bytes = bytes + 9.0 * heads * s * s end
  return products + bytes / cluster.bandwidth + 12 * cluster.launch
end

local function head_seconds(model, cluster, plan)
  local tokens, words = plan.micro * model.length, model.vocabulary / plan.tensor
  return cluster:product(tokens, words, model.hidden) + 6.0 * tokens * words / cluster.bandwidth
end

-- Ranks from `first` on, so far apart.
local function ranks(first, count, stride)
  local list = {}
  for i = 0, count - 1 do list[i + 1] = first + i * stride end
  return list
end

-- A step's times of its parts, and layers by stage.
local function times(model, cluster, plan)
  local t, p, d = plan.tensor, plan.pipeline, plan.data
  local out = { stages = divide(model, plan), micro = plan.sequences // (d * plan.micro) }
  local passes = plan.recompute and 4 or 3 -- in forward passes; backwards takes two
  local activations = 2.0 * plan.micro * model.length * model.hidden
  out.layer = passes * layer_seconds(model, cluster, plan)
  out.head = 3 * head_seconds(model, cluster, plan)
  out.sum = t > 1 and 2 * (passes - 1) * cluster:seconds("all_reduce", ranks(0, t, 1), activations) or 0
  out.message = 0
  if p > 1 then
    local part = plan.share and t or 1
    local link = cluster:link { 0, t * d }
    out.message = 2 * plan.chunks * costs.message(activations / part, link)
    if part > 1 then
      out.message = out.message + 2 * plan.chunks * cluster:seconds("all_gather", ranks(0, t, 1), activations)
    end
  end
  return out
end

-- Parameters of a stage's rank.
local function stage_parameters(model, plan, stages, i)
  local n = stages[i] * model:layer_parameters()
  local words = model.vocabulary * model.hidden
  if i == 1 then n = n + words end
  if i == plan.pipeline and (plan.pipeline > 1 or not model.tied) then n = n + words end
  return n / plan.tensor
end

local function bytes_of(model, plan, at)
  local worst = { total = 0 }
  local kept = model:activations(plan.micro, { tensor = plan.tensor, recompute = plan.recompute, fused = plan.fused })
  local whole = plan.recompute and model:activations(plan.micro, { tensor = plan.tensor, fused = plan.fused }) or 0
  for i, layers in ipairs(at.stages) do
    local n = stage_parameters(model, plan, at.stages, i)
    local flying = math.min(at.micro, plan.pipeline - i + 1)
    local b = { weights = 2 * n, gradients = plan.gradient_bytes * n,
      optimizer = plan.optimizer_bytes * n / (plan.zero > 0 and plan.data or 1),
      activations = flying * layers * kept + whole }
    if i == plan.pipeline then -- logits, once more in single precision
      b.activations = b.activations + 6.0 * plan.micro * model.length * model.vocabulary / plan.tensor
    end
    b.total = b.weights + b.gradients + b.optimizer + b.activations + plan.reserve
    if b.total > worst.total then worst = b end
  end
  return worst
end

local function read(who, model, cluster, plan)
  costs.expect(who, model)
  costs.expect_cluster(who, cluster)
  local o = arguments.read(who, plan, DEFAULTS, WANTED)
  if o.pipeline * o.chunks > model.layers then
    fail("%s: pipeline: expected at most %d stages, one for each layer, got %d", who, model.layers,
      o.pipeline * o.chunks)
  end
  if model.heads % o.tensor ~= 0 then
    fail("%s: tensor: expected a divisor of the %d heads, got %d", who, model.heads, o.tensor)
  end
  if o.sequences % (o.data * o.micro) ~= 0 then
    fail("%s: sequences: expected a multiple of %d, a micro-batch for each replica, got %d", who, o.data * o.micro,
      o.sequences)
  end
  return o
end

--- What a step takes by a plan: seconds; flops, operations a second of each device, with those that are done twice;
-- utilization, of what the devices could do, without these; bytes of the device that has most, and whether they fit;
-- parts, the seconds of a step in layers and head, sums of ranks that share layers, messages between stages, the
-- pipeline's filling and draining, gradients, and the optimizer.
---@param model CostTransformer
---@param cluster CostCluster
---@param plan ParallelPlan
---@return { seconds: number, flops: number, utilization: number, fits: boolean, bytes: table, parts: table,
---  micro_batches: integer, stages: integer[] }
function M.step(model, cluster, plan)
  local who = "dist.plans.step"
  local o = read(who, model, cluster, plan)
  local at = times(model, cluster, o)
  local t, p, d = o.tensor, o.pipeline, o.data
  local slowest, all, parts = 0, 0, { bubble = 0 }
  for i, layers in ipairs(at.stages) do
    local computing = layers * at.layer + (i == p and at.head or 0)
    local sums, messages = layers * at.sum, p > 1 and at.message or 0
    local seconds = computing + sums + messages
    all = all + seconds
    if seconds > slowest then
      slowest = seconds
      parts.layers, parts.tensor, parts.messages = at.micro * computing, at.micro * sums, at.micro * messages
    end
  end
  parts.bubble = (all - slowest) / o.chunks
  local n = 0
  for i = 1, p do n = math.max(n, stage_parameters(model, o, at.stages, i)) end
  local replicas = ranks(0, d, t)
  parts.data = 0
  if d > 1 and o.zero == 0 then
    parts.data = cluster:seconds("all_reduce", replicas, o.gradient_bytes * n)
  elseif d > 1 then
    parts.data = cluster:seconds("reduce_scatter", replicas, o.gradient_bytes * n)
      + cluster:seconds("all_gather", replicas, 2 * n)
  end
  -- Reads and writes the state and the weights.
  parts.optimizer = (2 * o.optimizer_bytes + o.gradient_bytes + 2) * n / (o.zero > 0 and d or 1) / cluster.bandwidth
  local seconds = at.micro * slowest + parts.bubble + parts.data + parts.optimizer
  local devices = t * p * d
  local bytes = bytes_of(model, o, at)
  return { seconds = seconds, parts = parts, bytes = bytes, fits = bytes.total <= cluster.memory,
    flops = model:flops(o.sequences, o.recompute) / seconds / devices,
    utilization = model:flops(o.sequences) / seconds / devices / cluster.flops,
    micro_batches = at.micro, stages = at.stages }
end

--- What a stage's parts take by a plan, for those who put steps together in another way: seconds of a micro-batch
-- through a layer, forwards and backwards with its sums, through the head, and layers by stage.
---@param model CostTransformer
---@param cluster CostCluster
---@param plan ParallelPlan
---@return { forward: number, backward: number, head_forward: number, head_backward: number, stages: integer[],
---  micro_batches: integer, plan: ParallelPlan }  plan: with all its fields
function M.layer(model, cluster, plan)
  local o = read("dist.plans.layer", model, cluster, plan)
  local at = times(model, cluster, o)
  local passes = o.recompute and 4 or 3
  local forward = at.layer / passes + at.sum / (passes - 1)
  return { forward = forward, backward = at.layer + at.sum - forward, head_forward = at.head / 3,
    head_backward = at.head * 2 / 3, stages = at.stages, micro_batches = at.micro, plan = o }
end

local function divisors(n)
  local list = {}
  for i = 1, n do if n % i == 0 then list[#list + 1] = i end end
  return list
end

--- All ways to divide a model over devices, the fastest first: those that fit into the devices' memory. options:
-- devices, sequences (of a step), micro ({ 1, 2, 4, 8 }: sizes of micro-batches), tensor (all divisors of the heads and
-- of the devices up to `most_tensor`, 8), zero ({ 0, 1 }), and whatever else of a plan is the same for all.
---@param model CostTransformer
---@param cluster CostCluster
---@param options table
---@return { plan: ParallelPlan, seconds: number, flops: number, bytes: table }[] found
---@return integer tried
function M.search(model, cluster, options)
  local who, none = "dist.plans.search", arguments.none
  costs.expect(who, model)
  costs.expect_cluster(who, cluster)
  local defaults = { devices = none, sequences = none, micro = { 1, 2, 4, 8 }, most_tensor = 8, zero = { 0, 1 } }
  local wanted = { devices = COUNT, sequences = COUNT, micro = "a list of integers >= 1",
    most_tensor = "an integer >= 1", zero = "a list of integers in [0, 1]" }
  for _, name in ipairs { "chunks", "recompute", "fused", "share", "balance", "gradient_bytes", "optimizer_bytes",
    "reserve" } do
    defaults[name], wanted[name] = DEFAULTS[name], WANTED[name]
  end
  local o = arguments.read(who, options, defaults, wanted)
  expect(who, "devices", o.devices, COUNT)
  expect(who, "sequences", o.sequences, COUNT)
  local found, tried = {}, 0
  local function try(t, p, d, micro, zero)
    local plan = { tensor = t, pipeline = p, data = d, micro = micro, zero = zero, sequences = o.sequences }
    for _, name in ipairs { "chunks", "recompute", "fused", "share", "balance", "gradient_bytes", "optimizer_bytes",
      "reserve" } do
      plan[name] = o[name]
    end
    local got = M.step(model, cluster, plan)
    tried = tried + 1
    if got.fits then
      got.plan = plan
      found[#found + 1] = got
    end
  end
  for _, t in ipairs(divisors(o.devices)) do
    for _, p in ipairs(t <= o.most_tensor and model.heads % t == 0 and divisors(o.devices // t) or {}) do
      local d = o.devices // t // p
      for _, micro in ipairs(p * o.chunks <= model.layers and o.micro or {}) do
        for _, zero in ipairs(o.sequences % (d * micro) == 0 and o.zero or {}) do try(t, p, d, micro, zero) end
      end
    end
  end
  table.sort(found, function(a, b)
    if a.seconds ~= b.seconds then return a.seconds < b.seconds end
    return a.bytes.total < b.bytes.total
  end)
  return found, tried
end

-- The numbers of a cluster that its sheet does not say, and how they are put into it.
local UNKNOWN = {
  efficiency = function(c, x) c.efficiency = math.min(1, x) end,
  launch = function(c, x) c.launch = x end,
  bandwidth = function(c, x) c.bandwidth = x end,
}

local function with(cluster, values)
  local tiers = {}
  for i, tier in ipairs(cluster.tiers) do
    tiers[i] = { size = tier.size, latency = tier.latency, shared = tier.shared,
      bandwidth = values["tier" .. i] or tier.bandwidth }
  end
  local options = { tiers = tiers }
  for _, name in ipairs { "flops", "memory", "bandwidth", "efficiency", "launch", "units", "tile" } do
    options[name] = cluster[name]
  end
  for name, put in pairs(UNKNOWN) do if values[name] then put(options, values[name]) end end
  return costs.cluster(options)
end

--- A cluster whose unknown numbers are those with which foretold steps are nearest to measured ones, by the mean square
-- of the logarithms of their ratios: the share of the operations that products reach, what a kernel takes besides, and
-- bandwidths, which are not more than what the cluster has. By steps up and down, of one number at a time.
---@param cluster CostCluster
---@param rows PublishedStep[]  those without flops are left out
---@param names? string[]  efficiency, launch, bandwidth, tier1, tier2 ... (efficiency, launch and all tiers)
---@return CostCluster
---@return number error  the root of that mean
function M.fit(cluster, rows, names)
  local who = "dist.plans.fit"
  costs.expect_cluster(who, cluster)
  expect(who, "rows", rows, "a list of tables")
  expect(who, "names", names, "a list of strings or nil")
  local values, most = {}, { efficiency = 1 }
  if not names then
    names = { "efficiency", "launch" }
    for i in ipairs(cluster.tiers) do names[#names + 1] = "tier" .. i end
  end
  for _, row in ipairs(rows) do
    costs.expect(who, row.model)
    expect(who, "rows: plan", row.plan, "a table")
  end
  for _, name in ipairs(names) do
    local tier = cluster.tiers[math.tointeger(tonumber(name:match "^tier(%d+)$")) or 0]
    if not tier and not UNKNOWN[name] then
      fail("%s: names: expected efficiency, launch, bandwidth or one of the tiers, got %s", who, name)
    end
    most[name] = most[name] or tier and tier.bandwidth or name == "bandwidth" and cluster.bandwidth or 1
    values[name] = tier and tier.bandwidth / 2 or name == "launch" and math.max(cluster.launch, 1e-6) or cluster[name]
  end
  local function apart(tried)
    local c, sum, count = with(cluster, tried), 0, 0
    for _, row in ipairs(rows) do
      if row.flops then
        sum, count = sum + math.log(M.step(row.model, c, row.plan).flops / row.flops) ^ 2, count + 1
      end
    end
    if count == 0 then fail("%s: rows: expected at least one with flops, got none", who) end
    return math.sqrt(sum / count)
  end
  local best, factor = apart(values), 2.0
  while factor > 1.01 do
    local better = false
    for _, name in ipairs(names) do
      for _, f in ipairs { factor, 1 / factor } do
        local before = values[name]
        values[name] = math.min(most[name], before * f)
        local now = apart(values)
        if now < best - 1e-6 then best, better = now, true else values[name] = before end
      end
    end
    if not better then factor = math.sqrt(factor) end
  end
  return with(cluster, values), best
end

--- Of pairs within the same group whose measured numbers are more than `margin` apart, the share that the foretold
-- numbers put in the same order; and how many pairs these are.
---@param foretold number[]
---@param measured number[]
---@param groups any[]     by row: only rows of equal groups are compared
---@param margin? number   of the larger of the two (0.02)
---@return number share
---@return integer pairs
function M.agreement(foretold, measured, groups, margin)
  local who = "dist.plans.agreement"
  expect(who, "foretold", foretold, "a list of numbers")
  expect(who, "measured", measured, "a list of numbers")
  expect(who, "groups", groups, "a table")
  expect(who, "margin", margin, "a finite number >= 0 or nil")
  if #foretold ~= #measured then
    fail("%s: measured: expected %d numbers, one for each that is foretold, got %d", who, #foretold, #measured)
  end
  margin = margin or 0.02
  local right, count = 0, 0
  for i = 1, #measured do
    for j = 1, i - 1 do
      local apart = measured[i] - measured[j]
      if groups[i] == groups[j] and math.abs(apart) > margin * math.max(measured[i], measured[j]) then
        count = count + 1
        if apart * (foretold[i] - foretold[j]) > 0 then right = right + 1 end
      end
    end
  end
  return count > 0 and right / count or 0, count
end

return M
