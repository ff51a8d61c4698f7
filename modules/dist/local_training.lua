--- The training of replicas on dist.workload by the ways that recipes compare: gradients meant at every step, or local
-- steps and an outer optimizer.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local co2 = require "tycho.dist.co2"
local gradients = require "tycho.dist.gradients"
local Group = require "tycho.dist.group"
local updates = require "tycho.dist.local_updates"
local run = require("tycho.dist.ranks").run
local workload = require "tycho.dist.workload"

local M = {}

-- By name: the outer optimizer, of (group, parameters, options). Data-parallel training has none.
local OUTER = {
  ["local SGD"] = function(group, parameters)
    return updates.DiLoCo(group, parameters, { lr = 1, momentum = 0 })
  end,
  DiLoCo = updates.DiLoCo, NoLoCo = updates.NoLoCo, CO2 = co2.CO2,
}

local METHODS = '"data parallel" or "local SGD" or "DiLoCo" or "NoLoCo" or "CO2"'

-- The arguments of recipes that train so: besides these they have steps, and every, those of a round.
M.arguments = {
  { "ranks", 4, "replicas", least = 2 },
  { "batch", 4, "rows of a replica's step", quick = 2 },
  { "books", 5, "books of the text", quick = 1 },
  { "length", 32, "tokens of a row", quick = 16 },
  { "width", 48, "hidden size of the Llama", quick = 32 },
  { "layers", 2, "layers of it", quick = 1 },
  { "rows", 192, "held-out rows, of which a third is to choose settings by", quick = 6, least = 2 },
}

local function flat(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do list[i] = p:detach():reshape(-1) end
  return ty.concat(list, 0)
end

---@class LocalTraining
---@field held_out number       loss of this rank's weights at the end, nats per token
---@field development? number   the same over the workload's rows to choose settings by
---@field curve number[][]      { step, held-out loss } of this rank
---@field weights Tensor[]      flat weights of this rank after rounds: as many as `snapshots`
---@field traffic table         RankGroup:traffic() of the training
---@field collectives integer   how often it called a collective
---@field seconds number        of its clock, until its last step's end
---@field waited number         of these, with exchanges

--- Trains a replica of dist.workload.model by AdamW with a cosine schedule and a clipped norm of gradients; every rank
-- of the group calls it. options: method ("data parallel", "local SGD", "DiLoCo", "NoLoCo", "CO2"), outer (options of
-- its outer optimizer), rate (3e-3), beta1 (0.9: AdamW's), steps (240), every (10), batch (4: rows of this rank's
-- step), seed (0), snapshots (0: how often weights are kept), curve (0: how often the held-out loss is measured before
-- the end).
---@param group RankGroup
---@param work RankWorkload
---@param options? table
---@return LocalTraining
function M.train(group, work, options)
  local who = "dist.local_training.train"
  local o = arguments.read(who, options, { method = "data parallel", outer = {}, rate = 3e-3, steps = 240, every = 10,
    batch = 4, seed = 0, snapshots = 0, curve = 0, beta1 = 0.9 },
    { method = METHODS, outer = "a table",
      rate = "a finite number >= 0", steps = "an integer >= 1", every = "an integer >= 1", batch = "an integer >= 1",
      seed = "an integer", snapshots = "an integer >= 0", curve = "an integer >= 0", beta1 = "a number in [0, 1)" })
  Group.expect(who, group)
  local model = workload.model(work, o.seed)
  local parameters = model:parameters()
  local inner = ty.optim.AdamW(parameters, { lr = o.rate, beta1 = o.beta1, clip_norm = 1, weight_decay = 0,
    schedule = ty.optim.cosine { steps = o.steps, warmup = o.steps // 10, final = 0.1 } })
  local buckets = o.method == "data parallel" and gradients.buckets(parameters)
  local outer = not buckets and OUTER[o.method](group, parameters, o.outer)
  local result = { curve = {}, weights = {}, waited = 0 }
  local began, measuring = group:clock(), 0
  local function exchange(fn, object, ...)
    local from = group:clock()
    fn(object, ...)
    result.waited = result.waited + group:clock() - from
  end
  local function due(step, times) return times > 0 and step * times // o.steps > (step - 1) * times // o.steps end
  local snapshot_due, curve_due
  for step = 1, o.steps do
    ty.scope(function()
      local rows = workload.rows(work, o.seed, step, o.batch * group.rank, o.batch)
      inner:zero_grad()
      workload.loss(model, rows):backward()
      if buckets then exchange(buckets.mean_gradients, buckets, group) end
      inner:step()
    end)
    local round_ends = not outer or step % o.every == 0 or step == o.steps
    if outer and round_ends then exchange(outer.step, outer) end
    if step == o.steps then
      result.seconds = group:clock() - began - measuring
      if outer and outer.finish then outer:finish() end
    end
    local from = group:clock()
    snapshot_due, curve_due = snapshot_due or due(step, o.snapshots), curve_due or due(step, o.curve)
    if snapshot_due and round_ends then
      result.weights[#result.weights + 1] = flat(model)
      snapshot_due = nil
    end
    if curve_due and round_ends then
      result.curve[#result.curve + 1] = { step, workload.evaluate(model, work) }
      curve_due = nil
    end
    measuring = measuring + group:clock() - from
  end
  result.traffic, result.collectives = group:traffic(), 0
  for kind, calls in pairs(result.traffic.calls) do
    if kind ~= "send" then result.collectives = result.collectives + calls end
  end
  result.held_out = workload.evaluate(model, work)
  if work.development then
    result.development = workload.evaluate(model, setmetatable({ held_out = work.development }, { __index = work }))
  end
  return result
end

--- A workload whose held-out rows are divided: every third is one to choose settings by, `development`.
---@param options? table  of dist.workload.open
---@return RankWorkload
function M.work(options)
  local work = workload.open(options)
  local chosen, judged = {}, {}
  for i = 0, work.held_out.shape[1] - 1 do table.insert(i % 3 == 0 and chosen or judged, i) end
  if #judged == 0 then arguments.fail "dist.local_training.work: rows: expected at least two held-out rows, got one" end
  work.development = work.held_out:index_select(0, ty.tensor(chosen, { dtype = "i64" }))
  work.held_out = work.held_out:index_select(0, ty.tensor(judged, { dtype = "i64" }))
  return work
end

--- train() on so many ranks, and what it gave together: means over ranks of held_out, development, waited and curve,
-- the sum of collectives, the largest seconds, the spread of replicas at each snapshot, and bytes that a rank sent.
---@param ranks integer
---@param work RankWorkload
---@param options? table   of train()
---@param network? table   of dist.run
---@return table
function M.replicas(ranks, work, options, network)
  local each = run(ranks, function(group, given, o)
    return require "tycho.dist.local_training".train(group, given, o)
  end, network, work, options)
  local all = { collectives = 0, seconds = 0, spread = {}, curve = {}, bytes = each[1].traffic.bytes }
  for _, name in ipairs { "held_out", "development", "waited" } do
    if each[1][name] then all[name] = ty.stats.mean(ty.stats.column(each, name)) end
  end
  for _, one in ipairs(each) do
    all.collectives, all.seconds = all.collectives + one.collectives, math.max(all.seconds, one.seconds)
  end
  for i in ipairs(each[1].weights) do
    local weights = {}
    for rank, one in ipairs(each) do weights[rank] = one.weights[i] end
    all.spread[i] = updates.spread(weights)
  end
  for i, point in ipairs(each[1].curve) do
    local losses = {}
    for rank, one in ipairs(each) do losses[rank] = one.curve[i][2] end
    all.curve[i] = { point[1], ty.stats.mean(losses) }
  end
  return all
end

--- Rounds as train() has them, on weights that nobody trains: the rank's clock goes on by what the steps of a round
-- would take, drawn anew for each round and rank from a log-normal distribution, as in the paper of NoLoCo. options:
-- method (as of train), weights (how many, 1e5), rounds (20), round_seconds (1: the median), every (1: exchanges of a
-- round in data-parallel training, one after each step), jitter (0: of the logarithm, its standard deviation), late
-- (0: seconds by which one rank of each round, drawn at random, is later), seed (0). Every rank of the group calls it.
---@param group RankGroup
---@param options? table
---@return { seconds: number, waited: number }  by its clock: of all rounds; of these, for exchanges
function M.pace(group, options)
  local who = "dist.local_training.pace"
  local o = arguments.read(who, options, { method = "DiLoCo", weights = 100000, rounds = 20, round_seconds = 1,
    every = 1, jitter = 0, late = 0, seed = 0 },
    { method = METHODS, weights = "an integer >= 1", rounds = "an integer >= 1",
      round_seconds = "a finite number >= 0", every = "an integer >= 1", jitter = "a finite number >= 0",
      late = "a finite number >= 0", seed = "an integer" })
  Group.expect(who, group)
  local x, exchanges = ty.zeros(o.weights), OUTER[o.method] and 1 or o.every
  local outer = OUTER[o.method] and OUTER[o.method](group, { x }, {})
  local began, waited = group:clock(), 0
  for round = 1, o.rounds do
    local draws = ty.seeded_noise(ty.empty(group.size), o.seed * 1000003 + round)
    local last = ty.seeded_noise(ty.empty(group.size), o.seed * 1000003 - round, "uniform"):argmax():item()
    local seconds = o.round_seconds * math.exp(o.jitter * draws[group.rank]:item())
      + (last == group.rank and o.late or 0)
    for _ = 1, exchanges do
      group:advance(seconds / exchanges)
      local from = group:clock()
      if outer then outer:step() else group:all_reduce(x, "mean") end
      waited = waited + group:clock() - from
    end
  end
  local seconds = group:clock() - began
  if outer and outer.finish then outer:finish() end
  return { seconds = seconds, waited = waited }
end

return M
