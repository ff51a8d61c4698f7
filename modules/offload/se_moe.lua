--- Experts in a file, and a ring of buffers on the device: one computes while the next ones come. Shen et al. 2022,
-- "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference System", its inference by
-- ring memory and prefetching in two dimensions: along the layers, and by what the router will want.
--
--     local ring <close> = offload.expert_ring(model, { slots = 4, file = "/data" })
--     local logits = model(tokens)                 -- the numbers are those of the model in memory, bit for bit
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Store = require "tycho.offload.store"

local M = {}
local tier = ty.core.tier_core

--- Made by offload.expert_ring.
---@class ExpertRing
---@field bytes integer      of all experts, in the file
---@field counters table     loads, wanted (loads that began only when their layer did), foretold (that had begun
-- before), discarded (foretold and not wanted), evicted (for one whose turn came first), computed (experts),
-- waited (seconds)
local ExpertRing = {}
ExpertRing.__index = ExpertRing
ExpertRing.__name = "ExpertRing"

-- ---- slots ----

-- Begins to read an expert into a free slot.
local function load(self, expert, foretold)
  local slot = table.remove(self.free, 1)
  slot.expert, slot.transfers = expert, {}
  for i, place in ipairs(expert.places) do
    slot.transfers[i] = self.store:begin("read", slot.tensors[i], place, "parameters", expert.name)
  end
  expert.slot = slot
  self.counters.loads = self.counters.loads + 1
  local kind = foretold and "foretold" or "wanted"
  self.counters[kind] = self.counters[kind] + 1
end

local function arrive(self, slot)
  local since = ty.system.clock()
  for _, transfer in ipairs(slot.transfers or {}) do self.store:wait(transfer) end
  self.counters.waited = self.counters.waited + ty.system.clock() - since
  slot.transfers = nil
end

local function release(self, slot)
  arrive(self, slot)
  slot.expert.slot, slot.expert = nil, nil
  self.free[#self.free + 1] = slot
end

-- What is to come, as far as there are slots.
local function pump(self)
  while #self.free > 0 and #self.queue > 0 do
    local next = table.remove(self.queue, 1)
    if not next.expert.slot then load(self, next.expert, next.foretold) end
  end
end

-- ---- layers ----

-- Which experts rows x go to, in the order in which they are computed.
local function wanted(layer, x)
  local chosen = layer.module.chosen
  local _, experts = layer.module.gate(x):to("f32"):softmax(-1):topk(chosen)
  local counts = experts:flatten():one_hot(#layer.experts):sum(0):tolist()
  local list = {}
  for e, n in ipairs(counts) do if n > 0 then list[#list + 1] = layer.experts[e] end end
  return list
end

-- A layer begins: what it wants comes first, then what the next one will want by what this one sees.
local function begin(self, layer, x)
  ty.scope(function()
    ty.no_grad(function()
      x = x:reshape(-1, x.shape[#x.shape])
      local now, queue = {}, {}
      for _, expert in ipairs(wanted(layer, x)) do
        now[expert] = true
        if not expert.slot then queue[#queue + 1] = { expert = expert, foretold = false } end
      end
      for _, slot in ipairs(self.slots) do
        if slot.expert and not now[slot.expert] then
          self.counters.discarded = self.counters.discarded + 1
          release(self, slot)
        end
      end
      local next = self.ahead and self.layers[layer.index + 1]
      if next then
        for _, expert in ipairs(wanted(next, x)) do queue[#queue + 1] = { expert = expert, foretold = true } end
      end
      self.queue = queue
      pump(self)
    end)
  end)
end

-- Of the experts in slots the one whose turn is last goes, and comes again behind what else its layer wants.
local function make_room(self)
  local last
  for _, slot in ipairs(self.slots) do if not last or slot.expert.index > last.expert.index then last = slot end end
  local at = 1
  while self.queue[at] and not self.queue[at].foretold do at = at + 1 end
  table.insert(self.queue, at, { expert = last.expert, foretold = false })
  self.counters.evicted = self.counters.evicted + 1
  release(self, last)
end

-- An expert computes with the memory of its slot.
local function run(self, expert, forward, ...)
  if not expert.slot then -- what was foretold has the slots, or it is called by itself
    if #self.free == 0 then make_room(self) end
    for i, next in ipairs(self.queue) do
      if next.expert == expert then
        table.remove(self.queue, i)
        break
      end
    end
    load(self, expert, false)
  end
  local slot = expert.slot
  self.counters.computed = self.counters.computed + 1
  arrive(self, slot)
  for i, p in ipairs(expert.params) do tier.exchange(p, slot.tensors[i]) end
  local results = table.pack(pcall(ty.no_grad, forward, ...))
  for i, p in ipairs(expert.params) do tier.exchange(p, slot.tensors[i]) end
  release(self, slot)
  pump(self)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- ---- making and ending ----

local function layers_of(who, model)
  local found = {}
  for name, module in model:named_modules() do
    local ok, gate, experts = pcall(function() return module.gate, module.experts end)
    if ok and gate and experts and math.type(rawget(module, "chosen")) == "integer" then
      found[#found + 1] = { name = name, module = module, index = #found + 1, experts = {} }
    end
  end
  if #found == 0 then
    arguments.fail("%s: model: expected layers of experts (a router `gate`, `experts` and `chosen`), found none", who)
  end
  return found
end

local function shapes_of(params)
  local text = {}
  for i, p in ipairs(params) do text[i] = p.dtype .. table.concat(p.shape, "x") end
  return table.concat(text, " ")
end

--- Moves the experts of a model into a file, for inference: on the device are as many as the ring has slots. While one
-- computes, the next ones are read; what the router of the next layer says of this layer's input is read before that
-- layer begins. Models are mixtures like models.Mixtral: layers with a router `gate`, a list `experts` of one shape
-- and `chosen`. close() (or the end of a variable that is <close>) brings the experts back. options:
--   slots    buffers of an expert each (2)
--   ahead    whether the next layer's experts are foretold (true)
--   file     folder of the file (TMPDIR or /tmp)
--   backend  "auto", "uring" or "threads"
---@param model Module
---@param options? table
---@return ExpertRing
function M.ring(model, options)
  local who = "offload.expert_ring"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { slots = 2, ahead = true, file = arguments.none, backend = "auto" },
    { slots = "an integer >= 1", file = "a string", backend = '"auto" or "uring" or "threads"' })
  local layers = layers_of(who, model)
  local folder = o.file or os.getenv "TMPDIR" or "/tmp"
  if not ty.io.exists(folder) then arguments.fail("%s: file: there is no folder %s", who, folder) end
  local shape
  for _, layer in ipairs(layers) do
    for e, module in ipairs(layer.module.experts) do
      local expert = { name = ("%s.experts.%d"):format(layer.name, e - 1), index = e, module = module, places = {},
        params = module:parameters() }
      shape = shape or shapes_of(expert.params)
      if shapes_of(expert.params) ~= shape then
        arguments.fail("%s: model: expected experts of one shape, got %s and %s", who, shape, shapes_of(expert.params))
      end
      if expert.params[1].device ~= "cpu" then
        arguments.fail("%s: model: expected experts on the CPU, which is the device here, got %s on %s", who,
          expert.name, expert.params[1].device)
      end
      layer.experts[e] = expert
    end
  end
  local self = setmetatable({ layers = layers, ahead = o.ahead, slots = {}, free = {}, queue = {}, undo = {},
    bytes = 0, events = {}, counters = { loads = 0, wanted = 0, foretold = 0, discarded = 0, evicted = 0, computed = 0,
      waited = 0.0 } }, ExpertRing)
  self.store = Store.open("file", folder, o.backend, self.events)
  for s = 1, o.slots do
    self.slots[s] = { tensors = {} }
    for i, p in ipairs(layers[1].experts[1].params) do
      self.slots[s].tensors[i] = ty.keep(ty.empty(p.shape, { dtype = p.dtype }))
    end
    self.free[s] = self.slots[s]
  end
  for _, layer in ipairs(layers) do
    for _, expert in ipairs(layer.experts) do
      for i, p in ipairs(expert.params) do
        expert.places[i] = self.store:place(p:nbytes())
        self.store:wait(self.store:begin("write", p, expert.places[i], "parameters", expert.name))
        self.bytes = self.bytes + p:nbytes()
        local stub = ty.keep(ty.empty(p.shape, { dtype = p.dtype, device = "meta" }))
        tier.exchange(p, stub)
        stub:free()
      end
      local module = expert.module
      rawset(module, "forward", function(_, ...)
        return run(self, expert, getmetatable(module).forward, module, ...)
      end)
    end
    self.undo[#self.undo + 1] = layer.module:register_forward_pre_hook(function(_, given)
      begin(self, layer, ty.is_tensor(given) and given or given[1])
    end)
  end
  return self
end

--- Brings the experts back into memory and gives the file up; the model is as it was.
function ExpertRing:close()
  arguments.expect("ExpertRing:close", "self.slots", self.slots, "a table")
  if self.closed then return end
  self.closed = true
  for _, fn in ipairs(self.undo) do fn() end
  for _, slot in ipairs(self.slots) do if slot.expert then release(self, slot) end end
  for _, layer in ipairs(self.layers) do
    for _, expert in ipairs(layer.experts) do
      rawset(expert.module, "forward", nil)
      for i, p in ipairs(expert.params) do
        local whole = ty.keep(ty.empty(p.shape, { dtype = p.dtype }))
        self.store:wait(self.store:begin("read", whole, expert.places[i], "parameters", expert.name))
        tier.exchange(p, whole)
        whole:free()
      end
    end
  end
  for _, slot in ipairs(self.slots) do for _, t in ipairs(slot.tensors) do t:free() end end
  self.store:close()
end

ExpertRing.__close = ExpertRing.close

-- ---- the same in time ----

--- What a ring takes, by seconds that were measured: follows a trace of offload.record_routing. An expert is read when
-- a slot is free, one after the other; it computes when it is there and the one before it is done. options:
--   slots   buffers
--   ahead   whether the next layer's experts are read when this one's are (true)
--   rates   seconds: base + token * n of an expert with n tokens, link to read one, dense of the rest of a layer and
--           dense_link to read that, a layer ahead (0: it is in memory)
-- Returns seconds, those of the same with all experts in memory (resident), and resident / seconds (speed).
---@param trace table
---@param options table
---@return { seconds: number, resident: number, speed: number }
function M.simulate(trace, options)
  local who = "offload.simulate_ring"
  if type(trace) ~= "table" or type(trace.steps) ~= "table" or #trace.steps == 0 then
    arguments.fail("%s: trace: expected what offload.record_routing returns, got %s", who, arguments.describe(trace))
  end
  arguments.expect(who, "options", options, "a table")
  local o = arguments.read(who, options, { slots = 2, ahead = true, rates = arguments.none },
    { slots = "an integer >= 1", rates = "a table" })
  arguments.expect(who, "rates", o.rates, "a table")
  local none = arguments.none
  local rates = arguments.read(who, o.rates, { base = none, token = none, link = none, dense = 0, dense_link = 0 },
    { base = "a finite number >= 0", token = "a finite number >= 0", link = "a finite number >= 0",
      dense = "a finite number >= 0", dense_link = "a finite number >= 0" })
  for _, name in ipairs { "base", "token", "link" } do
    arguments.expect(who, "rates." .. name, rates[name], "a finite number >= 0")
  end
  local free, link, now, resident = {}, 0.0, 0.0, 0.0
  for s = 1, o.slots do free[s] = 0.0 end
  -- An expert that may be read from `since` on: when it is there, in the slot that is free first.
  local function read(since)
    table.sort(free)
    local ready = math.max(link, since, table.remove(free, 1)) + rates.link
    link = ready
    return ready
  end
  local dense_there = 0.0
  for _, step in ipairs(trace.steps) do
    local coming = {}
    for l, entry in ipairs(step.layers) do
      now = math.max(now, dense_there) + rates.dense
      resident = resident + rates.dense
      local began = now
      if rates.dense_link > 0 then
        dense_there = math.max(link, began) + rates.dense_link
        link = dense_there
      end
      local ready = {}
      for e, n in pairs(coming) do
        if entry.load[e] > 0 then ready[e] = n else free[#free + 1] = math.max(began, n) end
      end
      coming = {}
      for e, n in ipairs(entry.load) do
        if n > 0 then
          if not ready[e] then ready[e] = read(began) end
          local seconds = rates.base + rates.token * n
          now, resident = math.max(now, ready[e]) + seconds, resident + seconds
          free[#free + 1] = now
          ready[e] = nil
        end
      end
      local next = o.ahead and step.layers[l + 1] and entry.ahead[1]
      for e, n in ipairs(next and next.load or {}) do
        if n > 0 and #free > 0 then coming[e] = read(began) end
      end
    end
    for _, n in pairs(coming) do free[#free + 1] = n end
  end
  return { seconds = now, resident = resident, speed = now > 0 and resident / now or 1.0 }
end

return M
