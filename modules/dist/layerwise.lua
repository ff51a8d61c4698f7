--- A pipeline whose layers are each divided in a way of their own: by data, by matrices, by data with weights of which
-- each rank keeps a part, or by two of these; and which run their forward pass again where that saves memory. Between
-- layers that are divided differently, activations are put together and cut anew. Miao et al. 2022, "Galvatron:
-- Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism".
--
--     local training = dist.layerwise.new(group, model, { pipeline = 2, micro_batches = 4, layers = {
--       { data = 4 }, { tensor = 2, data = 2 }, { data = 4, sharded = true, again = true }, ... } })
--     local loss = training:step(inputs, targets)
--
-- The ranks of a stage are neighbours. A layer that is sharded gathers its weights before its forward pass and again
-- before its backward pass, which begins with another forward pass; gradients are scattered as they come.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Flat = require "tycho.dist.flat"
local Group = require "tycho.dist.group"
local divide_layer = require("tycho.dist.grid_trial").divide_layer
local layers_of = require "tycho.dist.pipeline_layers"
local pipelines = require "tycho.dist.pipeline"
local schedules = require "tycho.dist.schedule"

local expect, fail = arguments.expect, arguments.fail
local M = {}

---@class LayerStrategy
---@field tensor? integer    ranks that share the layer's matrices (1)
---@field data? integer      ranks with other rows (1); tensor * data is what a stage has of ranks
---@field first? string      who are neighbours in rank: "tensor" or "data" ("tensor")
---@field sharded? boolean   ranks with other rows keep a part of the weights each (false)
---@field again? boolean     what goes in alone is kept, and the layer runs forwards twice (false; true where sharded)

local DEFAULTS = { tensor = 1, data = 1, first = "tensor", sharded = false, again = false }
local WANTED = { tensor = "an integer in [1, 1024]", data = "an integer in [1, 1024]", first = '"tensor" or "data"',
  sharded = "a boolean", again = "a boolean" }

--- A strategy with all its fields, checked.
---@param who string
---@param name string
---@param strategy LayerStrategy
---@param ranks integer  of a stage
---@return LayerStrategy
function M.strategy(who, name, strategy, ranks)
  expect("dist.layerwise.strategy", "who", who, "a string")
  expect("dist.layerwise.strategy", "name", name, "a string")
  expect("dist.layerwise.strategy", "ranks", ranks, "an integer >= 1")
  local s = arguments.read(("%s: %s"):format(who, name), strategy, DEFAULTS, WANTED)
  if s.tensor * s.data ~= ranks then
    fail("%s: %s: expected tensor * data of %d, the ranks of a stage, got %d * %d", who, name, ranks, s.tensor, s.data)
  end
  if s.sharded and s.data == 1 then fail("%s: %s: sharded: expected data of at least 2, got 1", who, name) end
  s.again = s.again or s.sharded
  return s
end

-- ---- activations between layers ----

-- The rank's own rows of what all ranks of `to` have, from its rows among the ranks of `from`.
local function rows_again(x, from, to)
  if from.size > 1 then x = from:all_gather(x) end
  if to.size > 1 then
    if x.shape[1] % to.size ~= 0 then
      fail("LayerwiseTraining:step: inputs: expected a multiple of %d rows in each micro-batch, got %d", to.size,
        x.shape[1])
    end
    local part = x.shape[1] // to.size
    x = x:narrow(0, to.rank * part, part):contiguous()
  end
  return x
end

local regroup = ty.custom_op { name = "dist.regroup",
  forward = function(ctx, x, from, to)
    ctx.from, ctx.to = from, to
    return rows_again(x, from, to)
  end,
  backward = function(ctx, g) return rows_again(g, ctx.to, ctx.from) end }

-- ---- weights that come and go ----

-- A layer that keeps what goes in, with weights of which each rank has a part. `anchor` has the result require
-- gradients where what goes in are tokens.
local sharded = ty.custom_op { name = "dist.sharded",
  forward = function(ctx, x, _, layer)
    ctx.x, ctx.layer = ty.keep(x:detach()), layer
    ty.scope(layer.flat.need, layer.flat)
    local y = ty.scope(layer.inner.forward, layer.inner, x)
    layer.flat:release()
    return y
  end,
  backward = function(ctx, g)
    local layer, flat, x = ctx.layer, ctx.layer.flat, ctx.x
    local is_float = x.dtype == g.dtype
    ctx.x = nil
    ty.scope(flat.need, flat)
    if is_float then x:requires_grad_() end
    local gradient = ty.scope(function()
      ty.enable_grad(ty.scope, function() layer.inner:forward(x):backward(g) end)
      flat:begin()
      for i, p in ipairs(flat.parameters) do
        local of_p = p.grad
        if of_p then flat:take(i, of_p) end
        p:set_grad(nil)
      end
      flat:complete()
      flat:release()
      local own = layer.data:reduce_scatter(flat.gradient, "sum")
      flat.gradient:free()
      flat.gradient = nil
      if layer.own then layer.own:add_(own) else rawset(layer, "own", ty.keep(own)) end
      return is_float and x.grad or nil
    end)
    if is_float then x:set_grad(nil) end
    x:free()
    return gradient, nil, nil
  end }

local Layer = ty.nn.module "LayerwiseLayer"

function Layer:init(inner, strategy, groups, before)
  self.inner = inner
  rawset(self, "again", strategy.again)
  rawset(self, "data", groups.data)
  rawset(self, "before", before)
  if strategy.sharded then
    local data = groups.data
    local ways = { parts = data.size, place = data.rank, gather = function(flat, values)
      return data:all_gather(flat.shard, { out = values, async = true })
    end }
    local flat = Flat.new(inner:parameters(), ways)
    flat:go(ways, function() end, function(of) of:need() end)
    rawset(self, "flat", flat)
    rawset(self, "anchor", ty.zeros(1):requires_grad_())
  end
end

function Layer:forward(x)
  if self.before and not rawequal(self.before, self.data) then x = regroup(x, self.before, self.data) end
  if self.flat then return sharded(x, self.anchor, self) end
  if self.again then return ty.checkpoint(self.inner.forward, self.inner, x) end
  return self.inner(x)
end

--- A layer with a strategy, by itself: what a profile runs. Its groups are { tensor, data }; before: the data group of
-- the layer before, if that is another one.
---@param inner Module  from a tensor to a tensor, already divided over the tensor group
---@param strategy LayerStrategy
---@param groups { tensor: RankGroup, data: RankGroup }
---@param before? RankGroup
---@return Module
function M.layer(inner, strategy, groups, before)
  local who = "dist.layerwise.layer"
  expect(who, "inner", inner, "a module")
  expect(who, "strategy", strategy, "a table")
  expect(who, "groups", groups, "a table")
  Group.expect(who, groups.data)
  if before then Group.expect(who, before) end
  return Layer(inner, strategy, groups, before)
end

-- What the optimizer steps of a layer.
local function weights_of(layer)
  return layer.flat and { layer.flat.shard } or layer.inner:parameters()
end

-- Gradients are summed over ranks with other rows, those of a layer at once.
local function sum_gradients(layer)
  if layer.flat then
    layer.flat.shard:set_grad(layer.own)
    return
  end
  if layer.data.size == 1 then return end
  ty.scope(function()
    local list, parts = layer.inner:parameters(), {}
    for i, p in ipairs(list) do parts[i] = (p.grad or p:detach():zeros_like()):flatten() end
    local flat, at = layer.data:all_reduce(ty.concat(parts, 0)), 0
    for _, p in ipairs(list) do
      local part = flat:narrow(0, at, p:numel()):view(p.shape)
      if p.grad then p.grad:copy_(part) else p:set_grad(ty.keep(part:clone())) end
      at = at + p:numel()
    end
  end)
end

-- ---- training ----

--- A rank's layers, each divided in its own way, and their training.
---@class LayerwiseTraining
---@field pipeline Pipeline
---@field layers Module[]   the rank's own
---@field group RankGroup   all ranks of its stage
---@field optimizer Optimizer
local Training = {}
Training.__index = Training
Training.__name = "LayerwiseTraining"

--- Groups of a strategy among the ranks of a stage; all of these call it.
---@param stage RankGroup
---@param strategy LayerStrategy
---@param known? table  what other calls have made, so that like strategies have the same groups
---@return { tensor: RankGroup, data: RankGroup }
function M.groups(stage, strategy, known)
  local who = "dist.layerwise.groups"
  Group.expect(who, stage)
  expect(who, "known", known, "a table or nil")
  local s = M.strategy(who, "strategy", strategy, stage.size)
  known = known or {}
  local key = s.tensor .. s.first
  if s.tensor == 1 or s.data == 1 then key = s.tensor .. "" end
  if not known[key] then
    local r = stage.rank
    local tensor, data
    if s.first == "tensor" then tensor, data = r % s.tensor, r // s.tensor
    else data, tensor = r % s.data, r // s.data end
    known[key] = { tensor = stage:split(data, tensor), data = stage:split(tensor, data) }
  end
  return known[key]
end

--- Divides a decoder over the ranks of a group, all of which call it with the same model, whose embedding and head are
-- not tied. options: layers (a strategy for each of dist.pipeline.layers(model): embedding, layers, head; embedding and
-- head have tensor = 1), pipeline (stages, 1), micro_batches (1), schedule ("one_f_one_b" or "gpipe"), parts (layers of
-- the stages, { first, last }; by default as many for each), optimizer (a function of a list of tensors; AdamW with a
-- rate of 1e-3).
---@param group RankGroup
---@param model LanguageModel
---@param options table
---@return LayerwiseTraining
function M.new(group, model, options)
  local who, none = "dist.layerwise.new", arguments.none
  Group.expect(who, group)
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { layers = none, pipeline = 1, micro_batches = 1, schedule = "one_f_one_b",
    parts = none, optimizer = none },
    { layers = "a list of tables", pipeline = "an integer >= 1", micro_batches = "an integer >= 1",
      schedule = '"one_f_one_b" or "gpipe"', parts = "a list of tables", optimizer = "a function" })
  if not model.lm_head then fail("%s: model: expected a head of its own, got one that is tied", who) end
  if group.size % o.pipeline ~= 0 then
    fail("%s: pipeline: expected a divisor of the %d ranks, got %d", who, group.size, o.pipeline)
  end
  local all, ranks = layers_of(model), group.size // o.pipeline
  if type(o.layers) ~= "table" or #o.layers ~= #all then
    fail("%s: layers: expected %d strategies, got %s", who, #all,
      type(o.layers) == "table" and #o.layers or arguments.describe(o.layers))
  end
  local costs = {}
  for i = 1, #all do costs[i] = 1 end
  local parts = o.parts or pipelines.divide(costs, o.pipeline)
  if #parts ~= o.pipeline then fail("%s: parts: expected %d, got %d", who, o.pipeline, #parts) end
  local index = group.rank // ranks + 1
  local stage, across = group:split(index), group:split(group.rank % ranks)
  local known, own, before = {}, {}, nil
  for i, inner in ipairs(all) do
    local s = M.strategy(who, ("layers[%d]"):format(i), o.layers[i], ranks)
    if s.tensor > 1 and (i == 1 or i == #all) then
      fail("%s: layers[%d]: tensor: expected 1 for the embedding and the head, got %d", who, i, s.tensor)
    end
    if i + 1 == parts[index][1] or i >= parts[index][1] and i <= parts[index][2] then
      local groups = M.groups(stage, s, known)
      if i >= parts[index][1] then
        if s.tensor > 1 then divide_layer(inner.layer, groups.tensor) end
        own[#own + 1] = Layer(inner, s, groups, before)
      end
      before = groups.data -- rows as they come from the layer before, though a rank of another stage ran it
    end
  end
  local self = setmetatable({ layers = own, group = stage }, Training)
  local last = o.layers[#all].data or 1
  -- For the pipeline a stage is one layer; what the others have is elsewhere.
  local stages = {}
  for i = 1, o.pipeline do stages[i] = i == index and ty.nn.Sequential(table.unpack(own)) or ty.nn.Identity() end
  self.pipeline = pipelines.new(across, stages, { recompute = false,
    schedule = schedules[o.schedule](o.pipeline, o.micro_batches),
    loss = function(logits, targets)
      return ty.nn.cross_entropy(logits:flatten(0, 1), targets:flatten()) / last
    end })
  local weights = {}
  for _, layer in ipairs(own) do
    for _, p in ipairs(weights_of(layer)) do weights[#weights + 1] = p end
  end
  self.optimizer = (o.optimizer or function(list) return ty.optim.AdamW(list, { lr = 1e-3 }) end)(weights)
  return self
end

--- The gradients of a batch: those of the mean loss over all ranks' rows. Each rank of a stage comes with its own rows,
-- as many as any other; ranks with the same place in their stage with the same.
---@param inputs Tensor   i64 [rows, length]
---@param targets Tensor  i64 [rows, length]
---@return number loss  the mean over all rows, on all ranks
function Training:backward(inputs, targets)
  if getmetatable(self) ~= Training then
    fail("LayerwiseTraining:backward: expected one of dist.layerwise, got %s", arguments.describe(self))
  end
  for _, layer in ipairs(self.layers) do
    if layer.own then layer.own:free() end
    rawset(layer, "own", nil)
    if layer.flat then layer.flat.shard:set_grad(nil) end
    for _, p in ipairs(layer.flat and {} or layer.inner:parameters()) do p:set_grad(nil) end
  end
  local part = self.pipeline:step(inputs, targets)
  ty.no_grad(function()
    for i = #self.layers, 1, -1 do sum_gradients(self.layers[i]) end
  end)
  return self.group:all_reduce(ty.tensor({ part }, { dtype = "f64" })):item()
end

--- backward() and a step of the optimizer.
---@param inputs Tensor
---@param targets Tensor
---@return number loss
function Training:step(inputs, targets)
  local loss = Training.backward(self, inputs, targets)
  self.optimizer:step()
  return loss
end

return M
