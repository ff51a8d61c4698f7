-- Training with parameters, gradients, moments and saved activations where a plan says: in the device's memory, in the
-- host's, in a file. What moves when is the policy's, a table of hooks; what holds always is here: nothing is computed
-- with what is not there, and the numbers are those of the same run in memory, bit for bit.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local again = require "tycho.offload.again"
local Cell = require "tycho.offload.cell"
local Link = require "tycho.offload.link"
local Saved = require "tycho.offload.saved"
local Store = require "tycho.offload.store"
local superpipeline = require "tycho.offload.superpipeline"
local units_of = require "tycho.nn.units"

local expect, fail = arguments.expect, arguments.fail
local tier, clock = ty.core.tier_core, ty.core.system.clock

--- What offload.engine makes.
---@class OffloadEngine
---@field units ModuleUnit[]  the parts of the model
---@field order ModuleUnit[]  as they ran in the last pass; numbers: where each of them ran last
---@field counters table       stalls, waited (seconds), forwarded (bytes), shared (saved tensors that were there)
local Engine = {}
Engine.__index = Engine

local places = '"device" or "host" or "file"'
local defaults = { parameters = "device", gradients = "device", moments = "device", activations = "device",
  file = arguments.none, host = arguments.none, budget = arguments.none, backend = "auto", policy = arguments.none,
  smallest = 16384, in_flight = 64 << 20, direct = true }
local kinds = { parameters = places, gradients = places, moments = places, activations = places,
  backend = '"auto" or "uring" or "threads"', file = "a string", policy = "a table", budget = "a table",
  smallest = "an integer >= 0", host = "an integer >= 0", in_flight = "an integer >= 0" }

local tiered = ty.nn.surgery.wrapper {
  name = "Tiered", field = "_tiered",
  forward = function(base)
    return function(self, ...)
      return self._tiered.enter(base.forward, self, ...)
    end
  end,
}

-- ---- making ----

--- The store of a place; nil for the device.
function Engine:store_for(place)
  if place == "device" then return nil end
  if not self.stores[place] then
    local folder = place == "file" and (self.plan.file or os.getenv "TMPDIR" or "/tmp") or nil
    local limit = place == "host" and self.plan.host or nil
    local plan = self.plan
    self.stores[place] = self.device == "cpu"
      and Store.open(place, folder, plan.backend, self.events, limit, plan.direct)
      or Link.open(place, self.device, folder, plan.backend, self.events, limit, plan.direct)
    if folder and self.stores[place]:stats().memory then
      io.stderr:write(("offload.engine: %s is memory, no disk: what goes there is not away\n"):format(folder))
    end
  end
  return self.stores[place]
end

local function describe_parameters(self, model)
  local names = {}
  for name, p in model:named_parameters() do names[p] = name end
  local store = self:store_for(self.plan.parameters)
  for _, unit in ipairs(self.units) do
    unit.cells = {} -- of its parameters that go away, also those that it shares
    for _, p in ipairs(unit.all) do
      local known = self.of[p]
      if not known then
        known = { name = names[p] or "?", unit = unit, moments = {} }
        if p.device ~= self.device then
          fail("offload.engine: model: expected all parameters on one device, %s, got %s on %s", self.device,
            known.name, p.device)
        end
        if store and not unit.outer and p:nbytes() >= self.plan.smallest then
          known.cell = Cell.new(self, p, "parameters", store, known.name)
          known.cell:arrived()
        else
          self.parameters_at[tier.memory_of(p)] = true -- of no cell
        end
        self.of[p] = known
      end
      if known.cell then table.insert(unit.cells, known.cell) end
    end
  end
end

local function watch_gradients(self)
  for p, known in pairs(self.of) do
    if p.requires_grad then
      known.unit.wanted = (known.unit.wanted or 0) + 1
      local hook = p:register_hook(function(g)
        g:free()
        if not self.again then self:complete(known) end
      end)
      self.undo[#self.undo + 1] = hook.remove
    end
  end
end

--- Takes a model and its optimizer in charge: what the plan sends away goes now. plan:
--   parameters, gradients, moments, activations   "device" (the default), "host" or "file": where they are while they
--                  are not in use. The device is where the model's parameters are: a GPU, whose host is page-locked
--                  memory, or the CPU's memory that ty.memory counts, whose host is memory beside it
--   file           the folder of the file ($TMPDIR, or /tmp)
--   host           bytes that may be in the host's memory (no limit): more is an error
--   policy         what moves when: offload.superpipeline (the default), offload.ssdtrain, ...
--   smallest       bytes below which a tensor stays on the device (16384)
--   in_flight      bytes of writes that may be under way while the program goes on (64 MiB)
--   backend        "auto", "uring" or "threads", of the file
--   direct         false: the file is read and written through the page cache (true)
-- Inference takes no optimizer. The optimizer is one of ty.optim without ema; gradients that go away cannot be clipped
-- by their norm. A step is one backward pass through each graph, without GradScaler and ty.compile.
---@param model Module
---@param optimizer? Optimizer
---@param plan? table  or what offload.plan returned
---@return OffloadEngine
function Engine.new(model, optimizer, plan)
  expect("offload.engine", "model", model, "a module")
  expect("offload.engine", "optimizer", optimizer, "a table or nil")
  plan = arguments.read("offload.engine", plan, defaults, kinds)
  if optimizer and not optimizer.step_part then
    fail("offload.engine: optimizer: expected one of ty.optim that can step in parts, got %s",
      arguments.describe(optimizer))
  end
  if optimizer and optimizer.clip_norm > 0 and plan.gradients ~= "device" then
    fail("offload.engine: plan.gradients: expected \"device\" with clip_norm, which takes all of them, got \"%s\"",
      plan.gradients)
  end
  local policy, first = plan.policy or superpipeline {}, model:parameters()[1]
  if not first then fail "offload.engine: model: expected a module with parameters, got one without" end
  local self = setmetatable({ model = model, optimizer = optimizer, plan = plan, policy = policy,
    units = units_of(model), of = {}, here = {}, leaving = {}, parameters_at = {}, stores = {}, pools = {}, events = {},
    undo = {}, device = first.device,
    order = {}, numbers = {}, asked = {}, handed = {}, at = 0, in_flight = plan.in_flight, complete_units = {},
    queue = {}, -- cells that the next update wants
    lent = { bytes = 0, back = 0 }, -- moments that leave have so much beyond in_flight, less what came back since
    counters = { stalls = 0, waited = 0, forwarded = 0, shared = 0 } }, Engine)
  for _, unit in ipairs(self.units) do
    if tiered:state(unit.module) then fail("offload.engine: model: it has an engine already; close() that first") end
  end
  if self.device == "meta" then fail "offload.engine: model: expected parameters with memory, got the meta device's" end
  if policy.updates_within and optimizer and optimizer.clip_norm > 0 then
    fail("offload.engine: plan.policy: it steps within the backward pass, before the norm for clip_norm is known")
  end
  describe_parameters(self, model)
  self.saved = Saved.new(self, plan.smallest)
  self.saved:begin()
  if optimizer then watch_gradients(self) end
  for _, unit in ipairs(self.units) do
    if not unit.outer then
      tiered:wrap(unit.module, { enter = function(forward, module, ...)
        if module ~= unit.module then return forward(module, ...) end -- a clone
        return self:enter(unit, forward, module, ...)
      end })
    end
    if optimizer then self:watch_moments(unit.params) end
  end
  if rawget(model, "device") == nil then
    rawset(model, "device", function() return self.device end) -- where it computes, whatever its first parameter is
    self.undo[#self.undo + 1] = function() rawset(model, "device", nil) end
  end
  local ok, problem = pcall(function()
    if policy.begin then policy.begin(self) end
    self:keep {}
    for _, cell in ipairs(self:cells "moments") do cell:drop() end
  end)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self
end

-- ---- cells ----

--- The cells of a kind that have their memory.
function Engine:cells(kind)
  local list = {}
  for cell, of in pairs(self.here) do if of == kind then list[#list + 1] = cell end end
  return list
end

--- What nobody has any more goes now: a unit's results after the next one has run. Handles are small for Lua, which
-- would let what several units left pile up. Once for each unit: swept twice while it is in use, a tensor is an old
-- one, which only a collection of everything finds.
Engine.sweep = tier.sweep

--- What fn makes; when memory is short, after what is leaving has left.
function Engine:room(fn)
  local ok, made = pcall(fn)
  if ok then return made end
  self:settle(true)
  self.saved:sweep(0)
  return fn()
end

--- Gives free what has been written (wait: all of it, when it is). Returns the bytes that are still leaving.
function Engine:written(wait)
  local bytes, list, problem = 0, {}, nil
  for cell in pairs(self.leaving) do list[#list + 1] = cell end
  for _, cell in ipairs(list) do
    local ok, text = pcall(cell.settle, cell, wait)
    problem = problem or not ok and text or nil
    if self.leaving[cell] then bytes = bytes + cell.nbytes end
  end
  if problem then error(problem, 0) end
  return bytes
end

--- Gives free what has been written, and waits until what is under way is no more than it may be; wait: for all of it.
function Engine:settle(wait)
  local bytes, list = self:written(wait), {}
  local most = self.in_flight + math.max(0, self.lent.bytes - self.lent.back)
  if bytes <= most then return end
  for cell in pairs(self.leaving) do list[#list + 1] = cell end
  table.sort(list, function(a, b) return a.begun < b.begun end)
  for _, cell in ipairs(list) do
    if bytes <= most then break end
    bytes = bytes - cell.nbytes
    cell:settle(true)
  end
end

--- An op has asked for memory that was away, while unit number `at` ran or after it: next time it is brought then.
function Engine:was_asked(cell)
  if self.backward or self.at == 0 or cell.kind ~= "parameters" then return end
  local list = self.asked[self.at] or {}
  self.asked[self.at] = list
  for _, known in ipairs(list) do if known == cell then return end end
  list[#list + 1] = cell
end

--- Only the parameters of these units stay on the device, and what is asked for behind number `at`; others go, and so
-- does what nobody has any more. Called once for each unit.
---@param units ModuleUnit[]
---@param at? integer
function Engine:keep(units, at)
  self:sweep()
  local stay = {}
  for _, cell in ipairs(at and self.asked[at] or {}) do stay[cell] = true end
  for _, unit in ipairs(units) do
    for _, cell in ipairs(unit.cells) do stay[cell] = true end
  end
  for _, cell in ipairs(self:cells "parameters") do if not stay[cell] then cell:drop() end end
  self:settle()
end

--- The parameters of a unit are there when it returns.
function Engine:need(unit)
  for _, cell in ipairs(unit.cells) do cell:fetch() end
  for _, cell in ipairs(unit.cells) do cell:need() end
end

--- Begins to bring the parameters of a unit.
function Engine:fetch(unit)
  for _, cell in ipairs(unit.cells) do cell:fetch() end
end

--- Begins to bring what is asked for behind number `at`.
function Engine:fetch_asked(at)
  for _, cell in ipairs(self.asked[at] or {}) do cell:fetch() end
end

--- The unit that runs `distance` after the one that ran as number `at` of a pass (before it, when negative), as the
-- passes until now tell; nil beyond the ends, or the first again when inference goes round.
function Engine:neighbour(at, distance)
  local number = at + distance
  if not self.stepping and self.length and number > self.length then number = (number - 1) % self.length + 1 end
  return self.order[number]
end

-- ---- a pass ----

-- fn() once, when the first gradient comes to one of the results.
local function on_gradient(results, fn)
  local waiting = true
  for i = 1, results.n do
    local x = results[i]
    if ty.is_tensor(x) and x.requires_grad and not x.is_leaf then
      x:register_hook(function(g)
        g:free()
        if waiting then
          waiting = false
          fn()
        end
      end)
    end
  end
end

--- Runs the forward pass of a unit with the policy's hooks around it. In a scope: what it made on the way goes at once.
function Engine:enter(unit, forward, module, ...)
  if self.backward then -- a checkpoint runs it again, and what it runs next comes meanwhile
    self:need(unit)
    local at = self.numbers[unit] or math.huge
    for number = at + 1, math.min(at + (self.policy.ahead or 0), (self.behind or 0) - 1) do
      self:fetch(self.order[number])
    end
    return forward(module, ...)
  end
  if not self.stepping and unit == self.order[1] and self.at > 0 then self.length, self.at = self.at, 0 end
  local at = self.at + 1
  self.at, self.order[at], self.unit, self.number = at, unit, unit, at
  self.numbers[unit] = at
  self.policy.before_forward(self, unit, at)
  local from = clock()
  local results
  if self.stepping and self.policy.recomputes and self.policy.recomputes(self, unit, at) then
    results = table.pack(again(self, unit, forward, module, ...))
  else
    results = table.pack(ty.scope(forward, module, ...))
  end
  self:log(unit.name, "forward", from)
  unit.seconds = clock() - from
  self.unit, self.number = nil, nil
  if self.stepping then
    on_gradient(results, function() if self.stepping then self:before_backward(unit, at) end end)
    self.saved:older()
  end
  self.policy.after_forward(self, unit, at)
  return table.unpack(results, 1, results.n)
end

--- Where what a unit keeps for its backward pass goes: a store, or nil for the device.
function Engine:place_for(unit, nbytes)
  if self.plan.activations == "device" or not unit or not self.stepping then return nil end
  if self.policy.keeps and self.policy.keeps(self, unit, self.number, nbytes) then return nil end
  return self:store_for(self.plan.activations)
end

function Engine:before_backward(unit, at)
  if self.since then self:log(self.since[1], "backward", self.since[2]) end
  self.since, self.behind = { unit.name, clock() }, at -- what ran from number `at` on is done or begins
  self.saved:release(nil)
  self:release_handed()
  self:flush()
  self.policy.before_backward(self, unit, at)
end

-- Gradients that a unit which was computed again gave to the graph, which has references of its own by now.
function Engine:release_handed()
  for _, g in ipairs(self.handed) do g:free() end
  self.handed = {}
end

-- The hook of a leaf runs before the gradient is in its place: it is, when the next one runs.
function Engine:complete(known)
  self:advance()
  self:flush()
  local unit = known.unit
  unit.missing = (unit.missing or unit.wanted) - 1
  if unit.missing == 0 then
    unit.missing = nil
    table.insert(self.complete_units, unit)
  end
end

function Engine:flush()
  local list = self.complete_units
  self.complete_units = {}
  for _, unit in ipairs(list) do
    self.policy.gradients(self, unit)
  end
end

-- ---- a step ----

-- What a step that failed leaves: no gradients, nothing under way, every parameter somewhere.
local function recover(self)
  self.saved:finish()
  for _, known in pairs(self.of) do
    if known.gradient then
      known.gradient:forget()
      known.gradient = nil
    end
  end
  self.optimizer:zero_grad()
  pcall(self.settle, self, true)
end

local function finish(self)
  self.stepping, self.backward, self.at, self.since, self.clip, self.unit = false, false, 0, nil, nil, nil
  self.again = false
  self:release_handed()
  for _, unit in ipairs(self.units) do unit.missing = nil end
  self.complete_units, self.queue, self.lent = {}, {}, { bytes = 0, back = 0 }
end

local function run_step(self, fn, ...)
  local loss = ty.saved_tensor_hooks(function(t) return self.saved:pack(t) end,
    function(packed) return self.saved:unpack(packed) end, fn, ...)
  expect("OffloadEngine:step", "fn", loss, "a tensor")
  self.length = self.at
  if self.policy.updates_within then self.clip = self.optimizer:open_parts() end
  self.backward, self.behind = true, self.at + 1
  local from = clock()
  loss:backward()
  self.backward_seconds = clock() - from
  if self.since then self:log(self.since[1], "backward", self.since[2]) end
  self:release_handed()
  self:flush()
  local value = loss:item()
  self.saved:finish()
  self.clip = self.clip or self.optimizer:open_parts()
  self.policy.after_backward(self)
  for _, unit in ipairs(self.units) do self:update(unit) end
  local norm = self.optimizer:close_parts(self.clip)
  return value, norm
end

--- One step: fn(...) computes the loss of a batch, its gradients come, the optimizer steps. Afterwards what the plan
-- sends away is away. Raises when a transfer failed; the model is then whole, as it was before the step or, when the
-- optimizer had begun, partly stepped.
---@param fn function  returns the loss, a tensor of one element
---@return number loss
---@return number? norm  of the gradients, when clip_norm is set
function Engine:step(fn, ...)
  expect("OffloadEngine:step", "fn", fn, "a function")
  if not self.optimizer then fail("OffloadEngine:step: the engine was made without an optimizer") end
  if self.stepping then fail("OffloadEngine:step: called within a step") end
  if ty.core.program.is_compiling() then fail("OffloadEngine:step: does not work inside ty.compile") end
  self.optimizer:zero_grad()
  for cell in pairs(self.here) do cell:look() end
  self.stepping, self.at, self.updated = true, 0, {}
  self.saved:begin()
  local result = table.pack(pcall(ty.scope, run_step, self, fn, ...))
  finish(self)
  if not result[1] then
    recover(self)
    error(result[2], 0)
  end
  self:settle()
  return table.unpack(result, 2, result.n)
end

--- Runs fn(...) for inference, without gradients; the model may as well be called by itself.
---@param fn function
---@return any ...
function Engine:run(fn, ...)
  expect("OffloadEngine:run", "fn", fn, "a function")
  if self.stepping then fail("OffloadEngine:run: called within a step") end
  self.at = 0
  local result = table.pack(ty.no_grad(ty.scope, fn, ...))
  self.length = self.at
  return table.unpack(result, 1, result.n)
end

-- ---- looking, ending ----

--- What went where: by store ("host", "file") the bytes written and read, by kind in `counters` and in all (moved), the
-- most that was there, whether it was direct; of the engine stalls, seconds waited, bytes handed over without a read.
---@return table
function Engine:stats()
  local stats = {}
  for key, value in pairs(self.counters) do stats[key] = value end
  for name, store in pairs(self.stores) do stats[name] = store:stats() end
  stats.pools = {}
  for kind, pool in pairs(self.pools) do
    stats.pools[kind] = { bytes = pool.bytes, memory = pool.memory, most = pool.most }
  end
  return stats
end

--- Brings everything back to the device, for saving the model and the optimizer's state_dict(). Not into the buffers
-- of a pool, which do not hold all of it.
function Engine:gather()
  local pools = self.pools
  if next(pools) then
    for kind in pairs(pools) do
      for _, cell in ipairs(self:cells(kind)) do cell:drop() end
    end
    self:settle(true)
    self.pools = {}
  end
  for _, known in pairs(self.of) do
    if known.cell then known.cell:need() end
    for _, cell in pairs(known.moments) do cell:need() end
  end
  self.pools = pools
end

--- Brings everything back and lets go of the model and the optimizer, which are then as others. Where the device cannot
-- hold all of it, `discard = true` lets go without: what is away is lost, and the model is of no use. Engine:save()
-- before keeps it.
---@param options? { discard?: boolean }
function Engine:close(options)
  local o = arguments.read("OffloadEngine:close", options, { discard = false })
  if self.closed then return end
  if not o.discard then self:gather() end
  self.closed = true
  for _, known in pairs(self.of) do
    if known.cell then known.cell:forget() end
    for _, cell in pairs(known.moments) do cell:forget() end
  end
  for _, remove in ipairs(self.undo) do remove() end
  for _, unit in ipairs(self.units) do if not unit.outer then tiered:unwrap(unit.module) end end
  for _, store in pairs(self.stores) do store:close() end
end

require "tycho.offload.checkpoint"(Engine)
require "tycho.offload.update"(Engine)
require "tycho.offload.timeline"(Engine)

return Engine
