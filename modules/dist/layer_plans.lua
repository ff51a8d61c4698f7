--- Which way to divide each layer of a pipeline is the fastest that fits into the ranks' memory: a tree of decisions
-- makes the strategies that a layer may have, dynamic programming finds the best of all their combinations in each
-- stage, and the stages' schedule is played through. Miao et al. 2022, "Galvatron: Efficient Transformer Training over
-- Multiple GPUs Using Automatic Parallelism"; Wang et al. 2024, "Improving Automatic Parallel Training via Balanced
-- Memory Workload Optimization", which let layers run forwards again.
--
--     local profile = dist.layer_trial.profile(work, 4, { rows = 16 })
--     local best = dist.layer_plans.search(profile, cluster, { ranks = 4, memory = 16e6 })[1]
--     local took = dist.layer_trial.measure(work, 4, best.plan)
--
-- What layers take and keep is measured; collectives, messages and states of the optimizer are formulas.
local arguments = require "tycho.arguments"
local costs = require "tycho.dist.costs"
local layerwise = require "tycho.dist.layerwise"
local pipelines = require "tycho.dist.pipeline"
local schedules = require "tycho.dist.schedule"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- What a layer takes on a rank by a strategy, over links that take no time; lines are { for a micro-batch, for each
-- row }.
---@class LayerProfile
---@field forward number[]    seconds
---@field backward number[]
---@field kept number         bytes of each row that wait for the backward pass, its result among them
---@field output number       bytes of each row of the result
---@field working number[]    bytes beyond these that it has while it runs
---@field parameters integer

--- By layer: profiles by strategy (key()); sums, of ranks that share it, in a forward pass, each as large as its
-- result; output, bytes of each row.
---@class LayersProfile
---@field rows integer      of a step, all ranks together
---@field layers { ways: table<string, LayerProfile>, sums: integer, output: number }[]
---@field optimizer number  seconds of a parameter's step
---@field action number[]  seconds of the pipeline itself for a micro-batch in one direction: of one stage, of more
---@field exchange number  seconds of a collective besides its way over links: what a rank waits for another that was
-- disturbed, and finds cold afterwards
---@field copying number    seconds of a parameter that is copied into one piece and back

-- ---- strategies ----

--- The strategies that a layer may have on the ranks of a stage: how many ranks share its matrices, and of the others,
-- which have other rows, whether they divide the weights, and whether they are the neighbours; where ranks do not
-- divide weights, also to run forwards again.
---@param ranks integer  of a stage
---@param tensor? boolean  whether matrices may be shared (true)
---@return LayerStrategy[]
function M.strategies(ranks, tensor)
  local who = "dist.layer_plans.strategies"
  expect(who, "ranks", ranks, "an integer in [1, 1024]")
  expect(who, "tensor", tensor, "a boolean or nil")
  local list = {}
  for t = 1, tensor == false and 1 or ranks do
    if ranks % t == 0 then
      local d = ranks // t
      for _, first in ipairs(t > 1 and d > 1 and { "tensor", "data" } or { "tensor" }) do
        for _, how in ipairs(d > 1 and { "plain", "again", "sharded" } or { "plain", "again" }) do
          list[#list + 1] = { tensor = t, data = d, first = first, sharded = how == "sharded", again = how ~= "plain" }
        end
      end
    end
  end
  return list
end

--- The name of a strategy in a profile, which is the same whoever is the neighbour.
---@param strategy LayerStrategy
---@return string
function M.key(strategy)
  expect("dist.layer_plans.key", "strategy", strategy, "a table")
  return ("tensor %d, data %d, %s"):format(strategy.tensor or 1, strategy.data or 1,
    strategy.sharded and "sharded" or strategy.again and "again" or "plain")
end

-- Places in a stage of the ranks that the stage's first one shares a layer with, and of those with other rows.
local function places(s)
  local tensor, data = {}, {}
  for i = 0, s.tensor - 1 do tensor[i + 1] = s.first == "tensor" and i or i * s.data end
  for i = 0, s.data - 1 do data[i + 1] = s.first == "tensor" and i * s.tensor or i end
  return tensor, data
end

local function line(at, rows) return at[1] + at[2] * rows end

-- Seconds of a collective of a stage's ranks.
local function exchange(profile, cluster, kind, members, bytes)
  return #members > 1 and cluster:seconds(kind, members, bytes) + profile.exchange or 0
end

-- The same where a profile has what ranks take besides.
local function way(cluster, kind, members, bytes)
  return #members > 1 and cluster:seconds(kind, members, bytes) or 0
end

-- What a layer takes by a strategy: seconds forwards and backwards of a micro-batch, seconds of a step, bytes of its
-- state, bytes of the micro-batches that are on their way, and bytes while it runs.
local function cost_of(profile, cluster, i, s, rows, micro_batches, flying)
  local ways = profile.layers[i]
  local layer = ways.ways[M.key(s)]
  local own, n = rows / s.data, layer.parameters
  local tensor, data = places(s)
  local sums = ways.sums * way(cluster, "all_reduce", tensor, own * ways.output)
  local c = { forward = line(layer.forward, own) + sums,
    backward = line(layer.backward, own) + (s.again and 2 or 1) * sums, kept = flying * own * layer.kept,
    working = line(layer.working, own), state = 16 * n, step = n * profile.optimizer }
  if s.sharded then
    local gather = way(cluster, "all_gather", data, 4 * n)
    c.forward = c.forward + gather
    c.backward = c.backward + gather + way(cluster, "reduce_scatter", data, 4 * n)
    c.state, c.step = c.state / s.data, c.step / s.data
  elseif s.data > 1 then
    c.step = c.step + n * profile.copying + exchange(profile, cluster, "all_reduce", data, 4 * n)
    c.working = math.max(c.working, 4 * n - c.kept) -- a copy for the sum, when activations have gone
  end
  if micro_batches == 1 then -- gradients come where activations go
    local gradients = c.state / 4
    c.state, c.kept = c.state - gradients, math.max(c.kept, gradients)
  end
  return c
end

-- Seconds forwards and backwards until rows that are divided as before are divided as a layer wants them.
local function between(profile, cluster, i, before, s, rows)
  if not before or before.data == s.data and (before.first == s.first or s.data == 1 or s.tensor == 1) then
    return 0, 0
  end
  local bytes = rows * profile.layers[i - 1].output
  local _, from = places(before)
  local _, to = places(s)
  return exchange(profile, cluster, "all_gather", from, bytes), exchange(profile, cluster, "all_gather", to, bytes)
end

-- ---- what a plan takes ----

local function check_profile(who, profile, cluster)
  expect(who, "profile", profile, "a table")
  if type(profile.layers) ~= "table" or not profile.layers[1] or not profile.rows or not profile.optimizer then
    fail("%s: profile: expected one of dist.layer_trial.profile, got %s", who, arguments.describe(profile))
  end
  costs.expect_cluster(who, cluster)
end

-- Runs through the stages' schedule, and adds what comes after it.
local function play(profile, cluster, plan, stages, rows, ranks)
  local forward, backward, message = {}, {}, {}
  for i, stage in ipairs(stages) do
    forward[i], backward[i], message[i] = stage.forward, stage.backward, 0
    if i < #stages then
      local last = plan.parts[i][2]
      message[i] = costs.message(rows / plan.layers[last].data * profile.layers[last].output,
        cluster:link { (i - 1) * ranks, i * ranks })
    end
  end
  local run = schedules.simulate(schedules.one_f_one_b(#stages, plan.micro_batches),
    { forward = forward, backward = backward, message = message })
  local seconds = 0
  for i, stage in ipairs(stages) do
    local events = run.rows[i]
    seconds = math.max(seconds, events[#events].to + stage.step)
  end
  return seconds
end

-- A stage's sums, of strategies that are already chosen.
local function stage_of(profile, cluster, plan, index, rows)
  local flying = math.min(plan.micro_batches, #plan.parts - index + 1)
  local sum = { forward = 0, backward = 0, step = 0, state = 0, kept = 0, working = 0 }
  for i = plan.parts[index][1], plan.parts[index][2] do
    local s = plan.layers[i]
    local c = cost_of(profile, cluster, i, s, rows, plan.micro_batches, flying)
    local to, back = between(profile, cluster, i, plan.layers[i - 1], s, rows)
    sum.forward, sum.backward, sum.step = sum.forward + c.forward + to, sum.backward + c.backward + back,
      sum.step + c.step
    sum.state, sum.kept, sum.working = sum.state + c.state, sum.kept + c.kept, math.max(sum.working, c.working)
  end
  local action = profile.action[math.min(2, #plan.parts)]
  sum.forward, sum.backward = sum.forward + action, sum.backward + action
  sum.bytes = sum.state + sum.kept + sum.working
  return sum
end

--- What a plan of dist.layerwise would take: seconds of a step, and bytes of the rank that has most.
---@param profile LayersProfile
---@param cluster CostCluster
---@param ranks integer  all
---@param plan { layers: LayerStrategy[], parts?: integer[][], pipeline?: integer, micro_batches?: integer }
---@return number seconds
---@return number bytes
function M.estimate(profile, cluster, ranks, plan)
  local who = "dist.layer_plans.estimate"
  check_profile(who, profile, cluster)
  expect(who, "ranks", ranks, "an integer in [1, 1024]")
  local o = arguments.read(who, plan, { layers = {}, parts = {}, pipeline = 1, micro_batches = 1 },
    { layers = "a list of tables", parts = "a list of tables", pipeline = "an integer >= 1",
      micro_batches = "an integer >= 1" })
  if #o.layers ~= #profile.layers then
    fail("%s: layers: expected %d strategies, got %d", who, #profile.layers, #o.layers)
  end
  if ranks % o.pipeline ~= 0 then fail("%s: pipeline: expected a divisor of %d, got %d", who, ranks, o.pipeline) end
  if #o.parts == 0 then
    local alike = {}
    for i = 1, #o.layers do alike[i] = 1 end
    o.parts = pipelines.divide(alike, o.pipeline)
  end
  local of_stage = ranks // o.pipeline
  for i, s in ipairs(o.layers) do
    o.layers[i] = layerwise.strategy(who, ("layers[%d]"):format(i), s, of_stage)
    if not profile.layers[i].ways[M.key(o.layers[i])] then
      fail("%s: layers[%d]: expected a strategy that was profiled, got %s", who, i, M.key(o.layers[i]))
    end
  end
  local rows, stages, bytes = profile.rows / o.micro_batches, {}, 0
  for index = 1, o.pipeline do
    stages[index] = stage_of(profile, cluster, o, index, rows)
    bytes = math.max(bytes, stages[index].bytes)
  end
  return play(profile, cluster, o, stages, rows, of_stage), bytes
end

-- ---- the best plan ----

-- Of states of a layer's strategy those that no other one has less bytes and less seconds than.
local function undominated(list)
  table.sort(list, function(a, b)
    if a.bytes ~= b.bytes then return a.bytes < b.bytes end
    return a.seconds < b.seconds
  end)
  local kept, best = {}, math.huge
  for _, state in ipairs(list) do
    if state.seconds < best then kept[#kept + 1], best = state, state.seconds end
  end
  return kept
end

-- The fastest strategies of a stage's layers that fit, after a layer with a strategy: seconds are those of all
-- micro-batches and of the step. Only strategies whose layers need at most `working` bytes while they run.
local function best_of_stage(choices, from, to, o, working)
  local states
  for i = from, to do
    local now = {}
    for _, choice in ipairs(choices[i]) do
      local c, list = choice.cost, {}
      if c.working <= working then
        local bytes = c.state + c.kept
        local seconds = o.micro_batches * (c.forward + c.backward) + c.step
        if not states then
          list[1] = { bytes = bytes, seconds = seconds + o.micro_batches * choice.after(o.before) }
        else
          for _, before in ipairs(states) do
            local extra = o.micro_batches * choice.after(before.strategy)
            for _, state in ipairs(before) do
              if state.bytes + bytes + working <= o.memory then
                list[#list + 1] = { bytes = state.bytes + bytes, seconds = state.seconds + seconds + extra,
                  before = state, of = before.strategy }
              end
            end
          end
        end
      end
      local kept = undominated(list)
      if #kept > 0 and kept[1].bytes + working <= o.memory then
        kept.strategy = choice.strategy
        now[#now + 1] = kept
      end
    end
    states = now
  end
  local best
  for _, list in ipairs(states) do
    for _, state in ipairs(list) do
      if state.bytes + working <= o.memory and (not best or state.seconds < best.seconds) then
        best = { seconds = state.seconds, state = state, strategy = list.strategy }
      end
    end
  end
  if not best then return nil end
  local layers, state, strategy = {}, best.state, best.strategy
  for i = to, from, -1 do
    layers[i] = strategy
    state, strategy = state.before, state.of
  end
  return best.seconds, layers
end

-- All strategies of all layers on the ranks of a stage, with what they take.
local function choices_of(profile, cluster, ranks, rows, o)
  local choices = {}
  for i = o.from, o.to do
    local layer = profile.layers[i]
    choices[i] = {}
    for _, s in ipairs(M.strategies(ranks)) do
      if layer.ways[M.key(s)] and rows % s.data == 0 and (not o.allow or o.allow(s, i)) then
        local known = {}
        table.insert(choices[i], { strategy = s, after = function(before)
          if before and not known[before] then
            local to, back = between(profile, cluster, i, before, s, rows)
            known[before] = to + back
          end
          return before and known[before] or 0
        end, cost = cost_of(profile, cluster, i, s, rows, o.micro_batches, o.flying) })
      end
    end
  end
  return choices
end

-- The fastest strategies of a stage's layers.
local function fill_stage(profile, cluster, o, plan, index, ranks, rows)
  local from, to = plan.parts[index][1], plan.parts[index][2]
  local of = { memory = o.memory, micro_batches = plan.micro_batches, before = plan.layers[from - 1], from = from,
    to = to, flying = math.min(plan.micro_batches, plan.pipeline - index + 1), allow = o.allow }
  local choices = choices_of(profile, cluster, ranks, rows, of)
  local seen, best, layers = {}, math.huge, nil
  for i = from, to do
    for _, choice in ipairs(choices[i]) do
      local working = choice.cost.working
      if not seen[working] then
        seen[working] = true
        local seconds, found = best_of_stage(choices, from, to, of, working)
        if seconds and seconds < best then best, layers = seconds, found end
      end
    end
  end
  for i, s in pairs(layers or {}) do plan.layers[i] = s end
  return layers ~= nil
end

local function whole_plan(profile, cluster, o, p, micro, parts)
  local plan = { layers = {}, parts = parts, pipeline = p, micro_batches = micro }
  for index = 1, p do
    if not fill_stage(profile, cluster, o, plan, index, o.ranks // p, profile.rows // micro) then return nil end
  end
  return plan
end

--- The best plan of each number of stages and micro-batches, the fastest first: { plan, seconds, bytes }. options:
-- ranks, memory (bytes of a rank, math.huge), pipelines (numbers of stages; all divisors of the ranks), micro_batches
-- ({ 1, 2, 4, 8 }), allow (a function of a strategy and a layer's number that says whether the layer may have it: what
-- a search among fewer strategies would find).
---@param profile LayersProfile
---@param cluster CostCluster
---@param options table
---@return { plan: table, seconds: number, bytes: number }[]
function M.search(profile, cluster, options)
  local who, none = "dist.layer_plans.search", arguments.none
  check_profile(who, profile, cluster)
  local o = arguments.read(who, options, { ranks = none, memory = math.huge, pipelines = none,
    micro_batches = { 1, 2, 4, 8 }, allow = none },
    { ranks = "an integer in [1, 1024]", memory = "a number > 0", pipelines = "a list of integers >= 1",
      micro_batches = "a list of integers >= 1", allow = "a function" })
  expect(who, "ranks", o.ranks, "an integer in [1, 1024]")
  local weight, alike = {}, {}
  for i, layer in ipairs(profile.layers) do
    local one = layer.ways[M.key {}]
    if not one then fail("%s: profile: expected layers on one rank among its strategies", who) end
    weight[i], alike[i] = line(one.forward, profile.rows) + line(one.backward, profile.rows), 1
  end
  local found = {}
  local function try(p, micro, parts)
    local plan = whole_plan(profile, cluster, o, p, micro, parts)
    if plan then
      local seconds, bytes = M.estimate(profile, cluster, o.ranks, plan)
      found[#found + 1] = { plan = plan, seconds = seconds, bytes = bytes }
    end
  end
  for p = 1, math.min(o.ranks, #profile.layers) do
    local wanted = o.ranks % p == 0 and not o.pipelines
    for _, value in ipairs(o.pipelines or {}) do wanted = wanted or value == p and o.ranks % p == 0 end
    for _, micro in ipairs(wanted and o.micro_batches or {}) do
      if profile.rows % micro == 0 then
        local by_weight, by_count = pipelines.divide(weight, p), pipelines.divide(alike, p)
        try(p, micro, by_weight)
        local same = true
        for i = 1, p do same = same and by_weight[i][2] == by_count[i][2] end
        if not same then try(p, micro, by_count) end
      end
    end
  end
  table.sort(found, function(a, b) return a.seconds < b.seconds end)
  return found
end

return M
