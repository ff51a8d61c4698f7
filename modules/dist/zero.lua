--- Data parallel training in which ranks divide what each of them would have a copy of. Rajbhandari et al. 2020, "ZeRO:
-- Memory Optimizations Toward Training Trillion Parameter Models".
--
--     local engine = dist.zero(group, model, { stage = 3, half = "bf16",
--       optimizer = function(list) return ty.optim.AdamW(list, { lr = 1e-3 }) end })
--     local loss = engine:step(function() return model:loss(tokens, labels) end)
--
-- Stage 0 divides nothing. Stage 1 divides the moments and the f32 copies of parameters in half precision, stage 2 also
-- the gradients, stage 3 also the parameters: a unit's (nn.units) are gathered just before its forward pass and again
-- for its backward pass, while the unit before computes.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Flat = require "tycho.dist.flat"
local Group = require "tycho.dist.group"
local divide = require("tycho.dist.gradients").divide
local units_of = require "tycho.nn.units"

local expect, fail = arguments.expect, arguments.fail
local tier = ty.core.tier_core
local M = {}

--- What dist.zero makes.
---@class ZeroEngine
---@field group RankGroup
---@field stage integer
---@field optimizer Optimizer  of the rank's own parts
---@field flats RankFlat[]     in the order in which their gradients are reduced
local Zero = {}
Zero.__index = Zero
Zero.__name = "ZeroEngine"

local divided = ty.nn.surgery.wrapper {
  name = "Divided", field = "_divided",
  forward = function(base)
    return function(self, ...) return self._divided.enter(base.forward, self, ...) end
  end,
}

-- ---- how parts are exchanged ----

-- How equal parts of all ranks are: gather(flat, values) begins to fill a flat tensor's values from the ranks' shards,
-- reduce(flat, own) to make own, this rank's part of the mean of all gradients; what they return is waited for.
local function equal_parts(group)
  return { parts = group.size, place = group.rank,
    gather = function(flat, values) return group:all_gather(flat.shard, { out = values, async = true }) end,
    reduce = function(flat, own)
      return group:reduce_scatter(flat.gradient, "mean", { out = own, async = true })
    end }
end

-- ---- making ----

-- Lists of parameters that become a flat tensor each, in the order in which their gradients come, and of stage 3 the
-- units that they belong to.
local function lists_of(self, model, bytes)
  local lists, units = {}, {}
  if self.stage < 3 then
    local trained = {}
    for _, p in ipairs(model:parameters()) do if p.requires_grad then trained[#trained + 1] = p end end
    return divide("dist.zero", trained, bytes, "backward"), units
  end
  self.units = units_of(model)
  for i = #self.units, 1, -1 do
    local unit = self.units[i]
    unit.flats = {}
    for _, is in ipairs { true, false } do
      local list = {}
      for _, p in ipairs(unit.params) do if p.requires_grad == is then list[#list + 1] = p end end
      if list[1] then
        lists[#lists + 1] = list
        units[#lists] = unit
      end
    end
  end
  return lists, units
end

-- The copies of the parameters that this rank's optimizer has, made before these become half precision.
local function masters_of(self, model, half)
  local masters, first = {}, model:parameters()[1]
  local wider = half and first:nbytes() // first:numel() // 2 or 1 -- the same lists as of half precision
  for i, list in ipairs((lists_of(self, model, self.bucket * wider))) do
    if list[1].requires_grad then
      local flat = Flat.new(list, self.ways)
      local whole = flat:copied(half and "f32" or first.dtype)
      masters[i] = whole
      if self.stage > 0 then
        local own = flat:own(whole)
        masters[i] = ty.keep(own:clone())
        own:free()
        whole:free()
      end
    end
  end
  self.units = nil -- which would hold what is converted now
  if half then model:to(half) end
  return masters
end

-- What the optimizer steps: a copy in f32, or the values themselves.
local function master_of(self, flat, copy)
  if copy then return copy end
  if self.stage == 3 then return flat.shard end
  if self.stage > 0 then return flat:own(flat.values) end
  return flat.values
end

local function watch(self, flat)
  for i, p in ipairs(flat.parameters) do
    local hook = p:register_hook(function(g)
      if self.stepping then
        self:drop_last()
        flat:take(i, g)
        self.last = p
        self:launch()
      end
      g:free()
    end)
    self.undo[#self.undo + 1] = hook.remove
  end
end

local defaults = { stage = 3, optimizer = arguments.none, half = arguments.none, bucket = 4 << 20, clip_norm = 0,
  ahead = 1 }
local kinds = { stage = "0 or 1 or 2 or 3", optimizer = "a function", half = '"bf16" or "f16"',
  bucket = "an integer >= 1", clip_norm = "a finite number >= 0", ahead = "an integer >= 0" }

--- Takes a model in charge, the same on all ranks, to train it with a share of each batch on every rank. All ranks of
-- the group call it. options:
--   stage      3; 2, 1 or 0
--   optimizer  a function of a list of tensors that makes the optimizer, one that treats elements alone, in f32
--              (AdamW with a rate of 1e-3). Clipping by the norm is not its business
--   half       "bf16" or "f16": parameters and gradients are of that, the optimizer has copies in f32; by default all
--              is of the dtype that the model has
--   bucket     bytes of gradients that are reduced together, of stages below 3 (4 MiB); stage 3 reduces units
--   clip_norm  gradients are scaled so that their norm together is at most this (0: they are not)
--   ahead      units that stage 3 gathers before they are wanted (1)
-- A step is one backward pass. Parameters that are not trained are divided in stage 3 alone. In stage 3 the model runs
-- on all ranks alike: what one rank runs, all do.
---@param group RankGroup
---@param model Module
---@param options? table
---@return ZeroEngine
function M.new(group, model, options)
  local who = "dist.zero"
  Group.expect(who, group)
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, defaults, kinds)
  if not model:parameters()[1] then fail("%s: model: expected a module with parameters, got one without", who) end
  return Zero.with(group, model, o, equal_parts(group))
end

--- Takes a model in charge whose parts are exchanged in some way: a table with parts and place (Flat.new), gather and
-- reduce; of stage 3 perhaps spread(flat), which begins to bring what was stepped to the ranks' shards where these are
-- not what is stepped.
function Zero.with(group, model, o, ways)
  local self = setmetatable({ group = group, model = model, stage = o.stage, clip_norm = o.clip_norm, ahead = o.ahead,
    bucket = o.bucket, flats = {}, of_memory = {}, here = {}, order = {}, before = {}, at = 0, undo = {}, ways = ways },
    Zero)
  return self:take(o)
end

--- Divides the model.
function Zero:take(o)
  local model = self.model
  local masters = (o.half or self.ways.spread) and masters_of(self, model, o.half) or {}
  self.device = model:parameters()[1].device
  local lists, units = lists_of(self, model, self.bucket)
  local parts = {}
  for i, list in ipairs(lists) do
    local flat = Flat.new(list, self.ways)
    if self.stage == 3 then
      flat:go(self.ways, function(of, is) self:placed(of, is) end, function(of) of:need() end)
      table.insert(units[i].flats, flat)
    else
      flat:stay()
    end
    if flat.trained then
      if self.stage < 2 then flat:whole_gradients() end
      flat.master = master_of(self, flat, masters[i])
      flat.copied_master = masters[i] ~= nil
      flat.list = { flat.master }
      parts[#parts + 1] = flat.master
      watch(self, flat)
      self.flats[#self.flats + 1] = flat
    else
      self.frozen = self.frozen or {}
      table.insert(self.frozen, flat)
    end
  end
  if not parts[1] then fail "dist.zero: model: expected parameters that require gradients, got none" end
  local make = o.optimizer or function(list) return ty.optim.AdamW(list, { lr = 1e-3 }) end
  self.optimizer = make(parts)
  if type(self.optimizer) ~= "table" or not self.optimizer.step_part then
    fail("dist.zero: optimizer: expected a function that makes one of ty.optim, got %s from it",
      arguments.describe(self.optimizer))
  elseif self.optimizer.clip_norm > 0 then
    fail "dist.zero: optimizer: expected one without clip_norm, which is an option of dist.zero; it sees parts alone"
  end
  for _, unit in ipairs(self.units or {}) do
    divided:wrap(unit.module, { enter = function(forward, module, ...)
      if module ~= unit.module then return forward(module, ...) end -- a clone
      return self:enter(unit, forward, module, ...)
    end })
  end
  if self.stage == 3 and rawget(model, "device") == nil then -- where it computes, whatever is away
    rawset(model, "device", function() return self.device end)
    self.undo[#self.undo + 1] = function() rawset(model, "device", nil) end
  end
  return self
end

-- ---- parameters that come and go ----

--- A flat tensor's values have come or go.
function Zero:placed(flat, is)
  self.of_memory[tier.memory_of(flat.values)] = is and flat or nil
  self.here[flat] = is or nil
end

local function need(unit) for _, flat in ipairs(unit.flats) do flat:need() end end

-- Begins to gather unit number `at` of the last pass.
local function fetch(unit) for _, flat in ipairs(unit and unit.flats or {}) do flat:fetch() end end

--- All that is here goes, but for these units and those that run around others.
function Zero:keep(units)
  tier.sweep()
  local stay, list = {}, {}
  for _, unit in ipairs(units) do for _, flat in ipairs(unit.flats) do stay[flat] = true end end
  for _, unit in ipairs(self.units) do
    if (unit.active or 0) > 0 or self.back and unit.outer then
      for _, flat in ipairs(unit.flats) do stay[flat] = true end
    end
  end
  for flat in pairs(self.here) do if not stay[flat] then list[#list + 1] = flat end end
  for _, flat in ipairs(list) do flat:release() end
end

-- Units that ran next in the last pass, for so many from number `at` on.
local function following(self, at)
  local list = {}
  for number = at + 1, at + self.ahead do list[#list + 1] = self.before[number] end
  return list
end

-- Units whose backward pass comes after that of number `at`, of those that kept parameters for it.
local function preceding(self, at)
  local list = {}
  while at > 1 and #list < self.ahead do
    at = at - 1
    if self.order[at].packed then list[#list + 1] = self.order[at] end
  end
  return list
end

--- Runs a unit's forward pass with its parameters.
function Zero:enter(unit, forward, module, ...)
  if self.back then -- a checkpoint runs it again
    need(unit)
    return forward(module, ...)
  end
  if not self.stepping and unit == self.order[1] and self.at > 0 then self:turn() end
  local at = self.at + 1
  self.at, self.order[at], unit.packed = at, unit, false
  local next_ones = following(self, at)
  self:keep { unit, table.unpack(next_ones) }
  need(unit)
  for _, other in ipairs(next_ones) do fetch(other) end
  local around = self.running
  self.running, unit.active = unit, (unit.active or 0) + 1
  local results = table.pack(ty.scope(forward, module, ...))
  self.running, unit.active = around, unit.active - 1
  if self.stepping then self:await_gradient(results, unit, at) end
  -- The last one's backward pass is next.
  if not self.stepping or at < #self.before then for _, flat in ipairs(unit.flats) do flat:release() end end
  return table.unpack(results, 1, results.n)
end

--- A pass has ended: what ran in it is what is expected of the next.
function Zero:turn()
  self.before, self.order, self.at = self.order, {}, 0
end

--- Once the first gradient comes to one of a unit's results, its parameters are needed again.
function Zero:await_gradient(results, unit, at)
  local waiting = true
  for i = 1, results.n do
    local x = results[i]
    if ty.is_tensor(x) and x.requires_grad and not x.is_leaf then
      x:register_hook(function(g)
        g:free()
        if not (waiting and self.stepping) then return end
        waiting = false
        local list = preceding(self, at)
        self:keep { unit, table.unpack(list) }
        if unit.packed then need(unit) end
        for _, other in ipairs(list) do fetch(other) end
      end)
    end
  end
end

-- What ops keep for the backward pass: of parameters that go away, which they were.
local function pack(self, t)
  local flat = self.of_memory[tier.memory_of(t)]
  local bytes, how
  if flat then bytes, how = tier.unfold(t) end
  if not bytes then return ty.keep(t) end
  bytes:free()
  t:free()
  if self.running then self.running.packed = true end
  return { flat = flat, how = how }
end

-- The graph has a reference of its own to what was handed out last.
local function release_handed(self, following_one)
  if self.handed then self.handed:free() end
  self.handed = following_one
end

local function unpack(self, packed)
  local t = packed
  if not ty.is_tensor(packed) then
    packed.flat:need()
    local bytes = tier.unfold(packed.flat.values)
    t = ty.keep(tier.fold(bytes, packed.how))
    bytes:free()
  end
  release_handed(self, t)
  return t
end

-- ---- gradients ----

--- The gradient that the graph gave last has been copied.
function Zero:drop_last()
  if self.last then self.last:set_grad() end
  self.last = nil
end

-- The reduction of a flat tensor's gradients is over.
local function finish_reduction(self, flat)
  local work = flat.reducing
  if not work then return end
  flat.reducing = nil
  work:wait()
  if self.stage == 1 then
    ty.scope(function() flat.gradient:narrow(0, flat.place * flat.part, flat.part):copy_(flat.own_gradient) end)
    flat.own_gradient:free()
    flat.own_gradient = nil
  elseif self.stage > 1 then
    flat.gradient:free()
    flat.gradient = nil
  end
end

--- Begins to reduce those whose gradients are whole, in the same order on all ranks.
function Zero:launch()
  while self.flats[self.next] and self.flats[self.next].missing == 0 do
    local flat, earlier = self.flats[self.next], self.flats[self.next - 1]
    if self.stage > 1 and earlier then finish_reduction(self, earlier) end -- two of them at once, not more
    if self.stage == 0 then
      flat.reducing = self.group:all_reduce(flat.gradient, "mean", { async = true })
    else
      flat.own_gradient = ty.keep(ty.empty({ flat.part }, { dtype = flat.dtype, device = flat.device }))
      flat.reducing = self.ways.reduce(flat, flat.own_gradient)
    end
    self.next = self.next + 1
  end
end

-- ---- a step ----

local function run(self, fn, ...)
  local loss
  if self.stage == 3 then
    loss = ty.saved_tensor_hooks(function(t) return pack(self, t) end, function(p) return unpack(self, p) end, fn, ...)
  else
    loss = fn(...)
  end
  expect("ZeroEngine:backward", "fn", loss, "a tensor")
  self.back = true
  loss:backward()
  release_handed(self)
  self:drop_last()
  for _, flat in ipairs(self.flats) do flat:complete() end
  self:launch()
  for _, flat in ipairs(self.flats) do finish_reduction(self, flat) end
  return loss:item()
end

--- The loss of fn(...) over this rank's share of a batch, and its gradients, of which each rank then has what its stage
-- leaves it: the mean over ranks.
---@param fn function  returns the loss, a tensor of one element
---@return number loss  of this rank's share
function Zero:backward(fn, ...)
  expect("ZeroEngine:backward", "fn", fn, "a function")
  if self.stepping or self.ready then fail "ZeroEngine:backward: expected update() after each backward()" end
  for _, flat in ipairs(self.flats) do flat:begin() end
  self.stepping, self.next = true, 1
  if self.stage == 3 then self:turn() end
  local result = table.pack(pcall(ty.scope, run, self, fn, ...))
  self.stepping, self.back, self.ready = false, false, result[1]
  if self.stage == 3 then
    self:keep {}
    for _, flat in ipairs(self.flats) do flat:release() end
  end
  if not result[1] then error(result[2], 0) end
  return result[2]
end

-- The gradient of what the optimizer steps, in its dtype.
local function gradient_of(self, flat)
  local g = flat.own_gradient or flat.gradient
  if self.stage == 1 then g = flat:own(flat.gradient) end
  if g.dtype == flat.master.dtype then return g, self.stage > 0 end
  local wide = ty.keep(g:to(flat.master.dtype))
  if self.stage > 0 then g:free() end
  return wide, true
end

-- The norm of all gradients together.
local function norm_of(self)
  local total = ty.zeros({}, { dtype = "f64" })
  for _, flat in ipairs(self.flats) do
    local g = flat.own_gradient or flat.gradient
    if self.stage == 1 then g = g:narrow(0, flat.place * flat.part, flat.part) end
    total = total + g:to("f64"):square():sum():to "cpu"
  end
  if self.stage > 0 then self.group:all_reduce(total) end
  return total:sqrt():item()
end

--- Steps with the gradients that backward() left, and drops them. Returns their norm when clip_norm is set.
---@return number? norm
function Zero:update()
  if not self.ready then fail "ZeroEngine:update: expected backward() before it" end
  self.ready = false
  local clip, norm = self.optimizer:open_parts(), nil
  if self.clip_norm > 0 then
    norm = ty.no_grad(ty.scope, norm_of, self)
    clip.scale = math.min(1.0, self.clip_norm / (norm + 1e-6))
    clip.factor = clip.scale
  end
  local works = {}
  for i, flat in ipairs(self.flats) do
    local g, mine = gradient_of(self, flat)
    flat.master:set_grad(g)
    self.optimizer:step_part(clip, flat.list)
    flat.master:set_grad()
    if mine then g:free() end
    flat.own_gradient = nil
    works[i] = self:spread(flat)
  end
  self.optimizer:close_parts(clip)
  for _, work in pairs(works) do work:wait() end
  return norm
end

--- What the optimizer has stepped becomes the parameters, on all ranks; returns what is to be waited for, if anything.
function Zero:spread(flat)
  if self.ways.spread then return self.ways.spread(flat) end
  local own = flat.shard or self.stage > 0 and flat:own(flat.values) or flat.values
  if flat.copied_master then ty.no_grad(own.copy_, own, flat.master) end
  if flat.shard or self.stage == 0 then return nil end
  return self.group:all_gather(own, { out = flat.values, async = true })
end

--- What this rank has sent so far in the groups that the engine uses: bytes, and those that left its machine.
---@return { bytes: integer, crossed: integer }
function Zero:traffic()
  local sum = { bytes = 0, crossed = 0 }
  for _, group in ipairs { self.group, table.unpack(self.ways.groups or {}) } do
    local traffic = group:traffic()
    sum.bytes, sum.crossed = sum.bytes + traffic.bytes, sum.crossed + traffic.crossed
  end
  return sum
end

--- backward() and update().
---@param fn function
---@return number loss
---@return number? norm
function Zero:step(fn, ...)
  expect("ZeroEngine:step", "fn", fn, "a function")
  local loss = self:backward(fn, ...)
  return loss, self:update()
end

--- Gives the model back, whole on each rank; the optimizer's state is gone. All ranks call it.
function Zero:close()
  if self.closed then return end
  self.closed = true
  for _, unit in ipairs(self.units or {}) do divided:unwrap(unit.module) end
  for _, undo in ipairs(self.undo) do undo() end
  for _, list in ipairs { self.flats, self.frozen or {} } do for _, flat in ipairs(list) do flat:leave() end end
end

M.Zero, M.defaults, M.kinds = Zero, defaults, kinds

return M
