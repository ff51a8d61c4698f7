-- Deep Optimizer States: the f32 parameters and the moments live on the host, and the update goes subgroup by subgroup:
-- some are stepped by the host, one of every k by the device, to which its states are brought while the host steps
-- others and from which they go back while it steps more. Gradients of the device's subgroups stay there, others go to
-- the host as they appear. k is that of a model of the machine's rates: tycho.offload.interleave, which also has the
-- order. Maurya et al. 2024, "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
-- Offloading".
--
-- On a GPU all moves are asynchronous, on streams of their own that wait for each other's events. On the CPU, which is
-- the device as well then, there is one processor and nothing overlaps; the numbers are the same.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local interleave = require "tycho.offload.interleave"
local Masters = require "tycho.offload.masters"

local tier, fail = ty.core.tier_core, arguments.fail

--- What offload.deep_opt_states makes.
---@class DeepOptStates: OffloadMasters
---@field every number        of how many subgroups the device steps the first
---@field on_device boolean[]  by subgroup
---@field elements integer[]   by subgroup
---@field schedule table[]     of interleave.schedule()
---@field counters table      bytes that went up to the device and down from it in updates
local DeepOptStates = Masters.define "DeepOptStates"

-- Streams where there are some, and events by name, so that the rest need not ask.
local Order = {}
Order.__index = Order

function Order.new(device)
  local self = setmetatable({ events = {}, streams = {}, gpu = device ~= "cpu" and device or nil }, Order)
  for _, what in ipairs(self.gpu and { "fetch", "step", "flush", "send" } or {}) do
    self.streams[what] = ty.cuda.Stream(device)
  end
  return self
end

--- fn() on the stream of a kind of entry, after the named events, which gives a new one.
function Order:run(what, name, after, fn)
  if not self.gpu then return fn() end
  local stream = self.streams[what] or ty.cuda.default_stream(self.gpu)
  for _, other in ipairs(after) do
    if self.events[other] then stream:wait_event(self.events[other]) end
  end
  ty.cuda.stream(stream, fn)
  self:record(name, stream)
end

function Order:record(name, stream)
  if not self.gpu then return end
  self.events[name] = self.events[name] or ty.cuda.Event()
  self.events[name]:record(stream)
end

--- The host waits for the named events.
function Order:wait(after)
  for _, name in ipairs(after) do if self.events[name] then self.events[name]:synchronize() end end
end

--- A tensor is used by the stream of a kind of entry until it is freed.
function Order:uses(t, what) if self.gpu then t:record_stream(self.streams[what]) end end

-- A copy in the host's memory, page-locked where that means something.
local function host(tensor)
  if ty.cuda.count() > 0 then return ty.keep(tensor:to("cpu"):pin_memory()) end
  return ty.keep(tier.host(tensor))
end

-- Subgroups: parameters in their order, until there are so many elements.
local function group(self, most)
  local current
  for i, master in ipairs(self.masters) do
    if not current or self.elements[#self.elements] + master:numel() > most then
      current = { index = #self.elements + 1, members = {}, params = {} }
      self.groups[current.index], self.elements[current.index] = current, 0
    end
    table.insert(current.members, i)
    table.insert(current.params, master)
    self.elements[current.index] = self.elements[current.index] + master:numel()
    self.group_of[i] = current
  end
end

--- Takes a model in charge: its parameters become half-precision ones on the device where they are. options:
--   optimizer  the name of one in ty.optim ("AdamW") whose states are f32
--   settings   its options, but clip_norm and ema ({})
--   dtype      "bf16" or "f16", of the parameters on the device
--   every      of how many subgroups the device steps the first: a number >= 1, 1 for all, math.huge for none, which is
--              ZeRO-Offload; by default what interleave.stride() says of `rates`
--   rates      of the machine: host, convert, device (elements a second), up, down (bytes a second)
--   subgroup   elements of a subgroup (100 million); a parameter that has more is one of its own
--   slots      subgroups whose states are on the device at a time (2: one is brought while one is stepped)
-- Parameters without a gradient are not stepped.
---@param model Module
---@param options table
---@return DeepOptStates
function DeepOptStates.new(model, options)
  local who = "offload.deep_opt_states"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { optimizer = "AdamW", settings = {}, dtype = "bf16",
    every = arguments.none, rates = arguments.none, subgroup = 100000000, slots = 2 }, { optimizer = "a string",
    settings = "a table", dtype = '"bf16" or "f16"', every = "a number >= 1", rates = "a table",
    subgroup = "an integer >= 1", slots = "an integer >= 1" })
  if not o.every and not o.rates then fail("%s: every: expected a number >= 1 or rates to choose by, got nil", who) end
  local every = o.every or interleave.stride(o.rates)
  local known, make = pcall(function() return ty.optim[o.optimizer] end)
  if not known or not make then
    fail("%s: optimizer: expected a name in ty.optim, got %s", who, arguments.describe(o.optimizer))
  end
  if (o.settings.clip_norm or 0) > 0 or o.settings.ema or o.settings.bits == 8 or o.settings.paged then
    fail("%s: settings: expected none of clip_norm, ema, bits = 8 and paged", who)
  end
  local self = Masters.open(DeepOptStates, who, model, o.dtype, host, "^c[pu][ud]a?")
  self.every, self.groups, self.elements, self.group_of = every, {}, {}, {}
  self.counters = { up = 0, down = 0 }
  group(self, o.subgroup)
  self.on_device = interleave.places(#self.groups, every)
  self.schedule = interleave.schedule(self.on_device, o.slots)
  self.order = Order.new(self.parameters[1].device)
  self.grads, self.halves, self.there, self.slots = {}, {}, {}, {}
  self.kept, self.wide = {}, {}
  for i, master in ipairs(self.masters) do
    if not self.on_device[self.group_of[i].index] then
      self.grads[i], self.halves[i] = host(ty.zeros_like(master)), host(ty.zeros_like(self.parameters[i]))
    end
  end
  self.optimizer = make(self.masters, o.settings)
  self.optimizer.rules = setmetatable({ place = function(_, p, made)
    return p.device == "cpu" and not self.there[p] and host(made) or made
  end }, { __index = self.optimizer.rules })
  return self
end

-- Gradients that the device has used go when the current stream has waited for it, those that were copied to the host
-- when that has waited for the copies: their memory is given out again in the stream where they were made.
function DeepOptStates:before()
  for _, list in ipairs { self.kept, self.wide } do
    for i, g in pairs(list) do
      g:free()
      list[i] = nil
    end
  end
  self.has = {}
end

-- The gradient of a parameter goes to the host, or stays for the device.
function DeepOptStates:take(i, g)
  local of = self.group_of[i].index
  if self.on_device[of] then
    self.has[i], self.kept[i] = g, ty.keep(g)
    return true
  end
  local order, wide = self.order, g:to "f32"
  self.wide[i] = ty.keep(wide)
  order:record("gradient", order.gpu and ty.cuda.current_stream(order.gpu))
  order:run("flush", "landed " .. of, { "gradient" }, function()
    self.grads[i]:copy_(wide, { non_blocking = true })
  end)
  self.has[i] = self.grads[i]
end

-- ---- the entries of the schedule ----

-- The f32 tensors of a subgroup: parameters and what the optimizer has for them.
local function states(self, of)
  local list = {}
  for _, p in ipairs(of.params) do
    list[#list + 1] = p
    local names, state = {}, self.optimizer.state[p] or {}
    for name, value in pairs(state) do if ty.is_tensor(value) then names[#names + 1] = name end end
    table.sort(names)
    for _, name in ipairs(names) do list[#list + 1] = state[name] end
  end
  return list
end

-- A place in the device's buffer of a slot for each tensor; the buffer grows when a subgroup needs more than it has.
local function places(self, slot, list)
  local n = 0
  for _, t in ipairs(list) do
    if t.dtype ~= "f32" then fail("DeepOptStates:step: expected an optimizer whose states are f32, got %s", t.dtype) end
    n = n + t:numel()
  end
  local buffer = self.slots[slot]
  if not buffer or buffer:numel() < n then
    if buffer then
      if self.order.gpu then ty.cuda.synchronize() end
      buffer:free()
    end
    buffer = ty.keep(ty.empty({ n }, { device = self.parameters[1].device }))
    self.slots[slot] = buffer
    if self.order.gpu then ty.cuda.synchronize() end
  end
  local found, at = {}, 0
  for i, t in ipairs(list) do
    found[i] = ty.keep(buffer:narrow(0, at, t:numel()):reshape(t.shape))
    at = at + t:numel()
  end
  return found
end

-- From here on the tensors stand on the device's memory, which others put in their place hold the host's.
function DeepOptStates:fetch(of, entry)
  local list = states(self, of)
  local there = places(self, entry.slot, list)
  self.order:run("fetch", "fetch " .. of.index, entry.after, function()
    for i, t in ipairs(list) do
      there[i]:copy_(t, { non_blocking = true })
      tier.exchange(t, there[i])
      self.there[t] = there[i]
      self.counters.up = self.counters.up + t:nbytes()
    end
  end)
end

-- Steps the parameters of a subgroup that have gradients.
local function step(self, of, gradient)
  for _, i in ipairs(of.members) do
    if self.has[i] then self.masters[i]:set_grad(gradient(self.has[i])) end
  end
  self.optimizer:step_part(self.clip, of.params)
  for _, p in ipairs(of.params) do p:set_grad() end
end

function DeepOptStates:step_there(of, entry)
  self.order:run("step", "step " .. of.index, entry.after, function()
    step(self, of, function(g) return g:to "f32" end)
    for _, i in ipairs(of.members) do self.parameters[i]:copy_(self.masters[i]) end
  end)
end

function DeepOptStates:flush(of, entry)
  self.order:run("flush", "flush " .. of.index, entry.after, function()
    for _, t in ipairs(states(self, of)) do
      local home = self.there[t]
      if not home then -- the optimizer has just made it
        home = self.order.gpu and ty.keep(ty.empty(t.shape, { dtype = t.dtype }):pin_memory()) or host(t)
        self.order:uses(t, "flush")
      end
      tier.exchange(t, home)
      t:copy_(home, { non_blocking = true })
      self.counters.down = self.counters.down + t:nbytes()
      home:free()
      self.there[t] = nil
    end
  end)
end

-- The half-precision copies were sent before the forward pass, and with it before the gradients came.
function DeepOptStates:host(of, entry)
  self.order:wait(entry.after)
  step(self, of, function(g) return g end)
  for _, i in ipairs(of.members) do self.halves[i]:copy_(self.masters[i]) end
end

function DeepOptStates:send(of, entry)
  self.order:run("send", "send " .. of.index, entry.after, function()
    for _, i in ipairs(of.members) do
      self.parameters[i]:copy_(self.halves[i], { non_blocking = true })
      self.counters.up = self.counters.up + self.halves[i]:nbytes()
    end
  end)
end

function DeepOptStates:ready(_, entry) self.order:run("ready", "ready", entry.after, function() end) end

local methods = { fetch = "fetch", step = "step_there", flush = "flush", host = "host", send = "send", ready = "ready" }

function DeepOptStates:update()
  local order = self.order
  order:record("backward", order.gpu and ty.cuda.current_stream(order.gpu))
  for _, of in ipairs(self.groups) do
    of.wanted = false
    for _, i in ipairs(of.members) do of.wanted = of.wanted or self.has[i] ~= nil end
  end
  self.clip = self.optimizer:open_parts()
  ty.no_grad(ty.scope, function()
    for _, entry in ipairs(self.schedule) do
      local of = self.groups[entry.group]
      if not of or of.wanted then self[methods[entry.what]](self, of, entry) end
    end
  end)
  self.optimizer:close_parts(self.clip)
end

--- Waits until all states are on the host.
function DeepOptStates:finish() if self.order.gpu then ty.cuda.synchronize() end end

--- Bytes of f32 states that are on the device at a time.
---@return integer
function DeepOptStates:device_bytes()
  local bytes = 0
  for _, buffer in pairs(self.slots) do bytes = bytes + buffer:nbytes() end
  return bytes
end

--- The bytes of parameters, gradients and states in the host's memory.
---@return integer
function DeepOptStates:host_bytes()
  local bytes = self.optimizer:state_bytes()
  for _, list in ipairs { self.masters, self.grads, self.halves } do
    for _, t in pairs(list) do bytes = bytes + t:nbytes() end
  end
  return bytes
end

return DeepOptStates
