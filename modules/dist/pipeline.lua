--- Training a sequence of layers that is divided over ranks: micro-batches go from rank to rank, activations forwards
-- and gradients backwards, in the order of a schedule. Huang et al. 2019, "GPipe: Efficient Training of Giant Neural
-- Networks using Pipeline Parallelism".
--
--     local layers = dist.pipeline.layers(model)             -- the same model on every rank
--     local pipeline = dist.pipeline.new(group, layers, {
--       schedule = dist.schedule.gpipe(group.size, 8), loss = nn.cross_entropy })
--     model, layers = nil, nil                               -- the rank keeps its own layers alone
--     local optimizer = optim.AdamW(pipeline:parameters(), { lr = 1e-3 })
--     optimizer:zero_grad()
--     local loss = pipeline:step(inputs, targets)            -- gradients are those of one rank
--     optimizer:step()
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"
local schedules = require "tycho.dist.schedule"

local expect, fail = arguments.expect, arguments.fail
local M = {}

M.layers = require "tycho.dist.pipeline_layers"

--- A rank's stages of layers that are divided over the ranks of a group.
---@class Pipeline
---@field schedule PipelineSchedule
---@field stages Module[][]   the rank's own layers, by chunk from 1 on
---@field parts integer[][]   by stage from 1 on: the first layer and the last, from 1 on
---@field in_flight integer   the most stages' micro-batches at once that were forwards and not yet backwards
local Pipeline = {}
Pipeline.__index = Pipeline
Pipeline.__name = "Pipeline"

-- ---- division ----

--- Divides costs of layers into as many runs of neighbours, none of them empty, so that the dearest is as cheap as it
-- can be.
---@param costs number[]
---@param count integer
---@return integer[][] parts  { first, last }, from 1 on
function M.divide(costs, count)
  local who = "dist.pipeline.divide"
  expect(who, "costs", costs, "a list of finite numbers >= 0")
  expect(who, "count", count, "an integer >= 1")
  local n = #costs
  if n < count then fail("%s: costs: expected at least %d layers, one for each stage, got %d", who, count, n) end
  local upto = { [0] = 0 }
  for i = 1, n do upto[i] = upto[i - 1] + costs[i] end
  -- best[k][i]: the dearest of k parts of the first i layers; from[k][i]: the first layer of the last part.
  local best, from = { [0] = { [0] = 0 } }, {}
  for k = 1, count do
    best[k], from[k] = {}, {}
    for i = k, n - (count - k) do
      for first = k, i do
        local before = best[k - 1][first - 1]
        local most = before and math.max(before, upto[i] - upto[first - 1])
        if most and (not best[k][i] or most < best[k][i]) then best[k][i], from[k][i] = most, first end
      end
    end
  end
  local parts, last = {}, n
  for k = count, 1, -1 do
    parts[k] = { from[k][last], last }
    last = from[k][last] - 1
  end
  return parts
end

--- What each layer costs, in operations of its forward pass: for `costs` of new(). It watches the whole process, so
-- that it is for before the ranks begin.
---@param layers Module[]
---@param x Tensor  what the first layer gets, of a micro-batch
---@return number[]
function M.costs(layers, x)
  local who = "dist.pipeline.costs"
  expect(who, "layers", layers, "a list of modules")
  expect(who, "x", x, "a tensor")
  local costs = {}
  ty.no_grad(ty.scope, function()
    for i, layer in ipairs(layers) do
      local seen
      seen, x = ty.profile(function() return layer(x) end, { limits = { flops = 1, bandwidth = 1 } })
      costs[i] = 0
      for _, event in ipairs(seen.events) do costs[i] = costs[i] + event.flops end
    end
  end)
  return costs
end

-- ---- making one ----

-- The parameters of a layer that are also in a layer of another rank, with a group of the ranks that have them.
local function find_ties(self, layers, owner)
  local ranks_of, order = {}, {}
  for i, layer in ipairs(layers) do
    for _, p in ipairs(layer:parameters()) do
      if not ranks_of[p] then
        ranks_of[p] = {}
        order[#order + 1] = p
      end
      ranks_of[p][owner[i]] = true
    end
  end
  local groups = {}
  self.ties = {}
  for _, p in ipairs(order) do
    local ranks = {}
    for rank in pairs(ranks_of[p]) do ranks[#ranks + 1] = rank end
    if #ranks > 1 then
      table.sort(ranks)
      local key, mine = table.concat(ranks, " "), ranks_of[p][self.group.rank]
      if not groups[key] then groups[key] = { self.group:split(mine and 0 or -1) } end -- all ranks call it
      if mine then self.ties[#self.ties + 1] = { group = groups[key][1], parameter = p } end
    end
  end
end

--- The rank's part of a pipeline. All ranks of the group call it with the same layers, of which each keeps its own; a
-- layer is a module from a tensor to a tensor, batch first. A layer may itself be divided over ranks of another group.
-- Parameters that layers of several ranks share, as an embedding that is also the head, have on each of these ranks the
-- sum of the gradients, and stay equal as long as the optimizers treat them equally.
--
-- options: schedule (of tycho.dist.schedule, for as many ranks as the group has); loss(output, targets) gives the mean
-- over a micro-batch; costs (by layer, for the division: all alike); recompute (true: of a stage only what goes in is
-- kept, and it runs forwards again before it runs backwards; random numbers are repeated, and buffers, such as the
-- running means of batch norms, count once); share (a group of ranks that have the same activations, as tensor parallel
-- ones have: each sends a part of the last dimension, and those that receive them put them together, which is less to
-- send between machines: Narayanan et al. 2021). Batch norms see micro-batches.
---@param group RankGroup
---@param layers Module[]
---@param options { schedule: PipelineSchedule, loss: function, costs?: number[], recompute?: boolean,
---  share?: RankGroup }
---@return Pipeline
function M.new(group, layers, options)
  local who = "dist.pipeline.new"
  Group.expect(who, group)
  expect(who, "layers", layers, "a list of modules")
  local none = arguments.none
  local o = arguments.read(who, options,
    { schedule = none, loss = none, costs = none, recompute = true, share = none },
    { schedule = "a table", loss = "a function", costs = "a list of finite numbers >= 0", recompute = "a boolean",
      share = "a table" })
  if o.share and getmetatable(o.share) ~= Group then
    fail("%s: share: expected a group, got %s", who, arguments.describe(o.share))
  end
  local schedule = o.schedule
  if not schedules.is_schedule(schedule) then
    fail("%s: schedule: expected one of dist.schedule, got %s", who, arguments.describe(schedule))
  end
  if schedule.ranks ~= group.size then
    fail("%s: schedule: expected one for the %d ranks of the group, got one for %d", who, group.size, schedule.ranks)
  end
  expect(who, "loss", o.loss, "a function")
  local costs = o.costs
  if not costs then
    costs = {}
    for i = 1, #layers do costs[i] = 1 end
  elseif #costs ~= #layers then
    fail("%s: costs: expected one for each of the %d layers, got %d", who, #layers, #costs)
  end
  local stages = group.size * schedule.chunks
  if #layers < stages then
    fail("%s: layers: expected at least %d, one for each stage, got %d", who, stages, #layers)
  end
  local self = setmetatable({ group = group, schedule = schedule, loss = o.loss, recompute = o.recompute, stages = {},
    share = o.share and o.share.size > 1 and o.share or nil, last = stages - 1, in_flight = 0,
    parts = M.divide(costs, stages) }, Pipeline)
  local owner = {}
  for stage, part in ipairs(self.parts) do
    local rank, chunk = (stage - 1) % group.size, (stage - 1) // group.size + 1
    if rank == group.rank then self.stages[chunk] = {} end
    for i = part[1], part[2] do
      owner[i] = rank
      if rank == group.rank then table.insert(self.stages[chunk], layers[i]) end
    end
  end
  find_ties(self, layers, owner)
  return self
end

--- The parameters of the rank's layers, each once.
---@return Tensor[]
function Pipeline:parameters()
  local list, seen = {}, {}
  for _, stage in ipairs(self.stages) do
    for _, layer in ipairs(stage) do
      for _, p in ipairs(layer:parameters()) do
        if not seen[p] then seen[p], list[#list + 1] = true, p end
      end
    end
  end
  return list
end

-- ---- a step ----

-- Micro-batches of a batch: views.
local function divided(self, what, x)
  expect("Pipeline:step", what, x, "a tensor")
  local m = self.schedule.micro_batches
  if x.ndim == 0 or x.shape[1] == 0 or x.shape[1] % m ~= 0 then
    fail("Pipeline:step: %s: expected a multiple of the %d micro-batches along dimension 0, got %s", what, m,
      arguments.describe(x))
  end
  return function(micro) return x:narrow(0, micro * (x.shape[1] // m), x.shape[1] // m) end
end

-- Messages of activations have even tags, those of gradients odd ones.
local function tag(self, action, chunk, back)
  return 2 * (chunk * self.schedule.micro_batches + action.micro) + (back and 1 or 0)
end

local function through(stage, x)
  for _, layer in ipairs(stage) do x = layer(x) end
  return x
end

-- Copies of the buffers of a stage, and a function that puts them back.
local function hold_buffers(stage)
  local held = {}
  for _, layer in ipairs(stage) do
    for _, buffer in layer:named_buffers() do held[#held + 1] = { buffer, buffer:clone() } end
  end
  return function()
    for _, pair in ipairs(held) do pair[1]:copy_(pair[2]) end
  end
end

-- The stage's output, or in the last stage the loss.
local function output_of(self, at, x)
  local y = through(self.stages[at.chunk + 1], x)
  if at.stage == self.last then y = self.loss(y, self.targets(at.micro)) end
  return y
end

-- Where an action is: its stage, and the ranks and chunks before and behind.
local function place(self, action)
  local p, stage = self.group.size, action.chunk * self.group.size + self.group.rank
  return { micro = action.micro, chunk = action.chunk, stage = stage, device = self.device,
    before = stage > 0 and { rank = (stage - 1) % p, chunk = (stage - 1) // p },
    behind = stage < self.last and { rank = (stage + 1) % p, chunk = (stage + 1) // p } }
end

local function receive(self, at, from, back)
  local x = self.group:receive(from.rank, tag(self, at, at.chunk, back))
  if self.share then x = self.share:all_gather(x, { dim = -1 }) end
  return self.device ~= "cpu" and x:to(self.device) or x
end

local function send(self, at, x, to, back)
  local share = self.share
  if share then
    local n = x.ndim > 0 and x.shape[x.ndim] or 1
    if n % share.size ~= 0 then
      fail("Pipeline:step: share: expected activations with a multiple of %d in the last dimension, got %s", share.size,
        arguments.describe(x))
    end
    x = x:detach():narrow(-1, share.rank * (n // share.size), n // share.size)
  end
  self.group:send(x, to.rank, tag(self, at, to.chunk, back))
end

local function forward(self, action, training, next_action)
  local at = place(self, action)
  local x = at.before and receive(self, at, at.before) or self.inputs(action.micro)
  -- What goes back at once need not be computed twice.
  local again = self.recompute
    and not (next_action and next_action.kind == "backward" and next_action.micro == at.micro
      and next_action.chunk == at.chunk)
  local kept = { rng = training and again and ty.rng_state() or nil }
  local y = self.group:span(schedules.label(self.schedule, action), function()
    if training and not again then
      if at.before then x:requires_grad_() end
      return output_of(self, at, x)
    end
    return ty.no_grad(output_of, self, at, x)
  end)
  if at.behind then send(self, at, y, at.behind) end
  if at.stage == self.last then self.total = self.total + y:item() end
  if not training then return end
  kept.x = at.before and ty.keep(x) or nil
  if not again then kept.y = ty.keep(y) end
  self.kept[at.chunk][at.micro] = kept
  self.flying = self.flying + 1
  self.in_flight = math.max(self.in_flight, self.flying)
end

-- Runs forwards what was only run for its output, as it ran then.
local function run_again(self, at, x, rng)
  local put_back = hold_buffers(self.stages[at.chunk + 1])
  local now = ty.rng_state()
  ty.rng_state(rng)
  local y = output_of(self, at, x)
  ty.rng_state(now)
  ty.no_grad(put_back)
  return y
end

local function backward(self, action)
  local at = place(self, action)
  local kept = self.kept[at.chunk][at.micro]
  self.kept[at.chunk][at.micro] = nil
  local g = at.behind and receive(self, at, at.behind, true)
  local x = kept.x or self.inputs(at.micro)
  self.group:span(schedules.label(self.schedule, action), function()
    local y = kept.y
    if not y then
      if at.before then x:requires_grad_() end
      y = run_again(self, at, x, kept.rng)
    end
    if y.requires_grad then
      if at.behind then y:backward(g) else (y / self.schedule.micro_batches):backward() end
    end
  end)
  if at.before then send(self, at, x.grad or x:zeros_like(), at.before, true) end
  if kept.x then
    x:set_grad(nil)
    x:free()
  end
  if kept.y then kept.y:free() end
  self.flying = self.flying - 1
end

local LOSS = -1 -- the tag of losses

-- Runs the schedule and returns the mean loss, which the last rank tells the others.
local function run(self, inputs, targets, training)
  local group, list = self.group, self.schedule[self.group.rank + 1]
  self.inputs, self.targets = divided(self, "inputs", inputs), divided(self, "targets", targets)
  self.device, self.total, self.flying, self.in_flight, self.kept = inputs.device, 0.0, 0, 0, {}
  for chunk = 0, self.schedule.chunks - 1 do self.kept[chunk] = {} end
  for i, action in ipairs(list) do
    if action.kind == "forward" then ty.scope(forward, self, action, training, list[i + 1])
    elseif training then ty.scope(backward, self, action) end
  end
  self.inputs, self.targets, self.kept = nil, nil, nil
  local mean
  if group.rank == group.size - 1 then
    mean = self.total / self.schedule.micro_batches
    for rank = 0, group.size - 2 do group:send(ty.tensor({ mean }, { dtype = "f64" }), rank, LOSS) end
  else
    mean = group:receive(group.size - 1, LOSS):item()
  end
  return mean
end

--- Runs a batch forwards and backwards, and adds the gradients of the mean loss to those of the rank's parameters. All
-- ranks call it, with batches of the same size: the first stage looks at the inputs, the last one at the targets.
-- Returns the mean loss, on every rank.
---@param inputs Tensor   [micro_batches * n, ...]
---@param targets Tensor  [micro_batches * n, ...]
---@return number loss
function Pipeline:step(inputs, targets)
  if getmetatable(self) ~= Pipeline then
    fail("Pipeline:step: expected a pipeline, got %s", arguments.describe(self))
  end
  -- What is already there must not be summed once more.
  local before = {}
  for i, tie in ipairs(self.ties) do
    before[i] = tie.parameter.grad or false
    tie.parameter:set_grad(nil)
  end
  local loss = run(self, inputs, targets, true)
  ty.no_grad(function()
    for i, tie in ipairs(self.ties) do
      local p = tie.parameter
      if not p.grad then p:set_grad(p:detach():zeros_like()) end
      tie.group:all_reduce(p.grad)
      if before[i] then p.grad:add_(before[i]) end
    end
  end)
  return loss
end

--- The mean loss of a batch, on every rank, without gradients.
---@param inputs Tensor
---@param targets Tensor
---@return number loss
function Pipeline:evaluate(inputs, targets)
  if getmetatable(self) ~= Pipeline then
    fail("Pipeline:evaluate: expected a pipeline, got %s", arguments.describe(self))
  end
  return run(self, inputs, targets, false)
end

return M
