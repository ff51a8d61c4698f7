--- ZO2: zeroth-order training of a model that passes through the device block by block. Wang et al. 2025, "ZO2:
-- Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models with Limited GPU Memory".
--
--     local zo2 = offload.zo2(model, optim.MeZO(model, { lr = 1e-4 }), { parameters = "host" })
--     local loss = zo2:step(function() return model:loss(batch.tokens, batch.targets) end)
--     zo2:close()                                   -- everything is back
--
-- The two forward passes of a step go side by side: each is a coroutine that stops before every unit. A unit comes
-- once, is stepped along the direction of the step before (whose slope is known by now), moved by epsilon, run for the
-- first pass, moved back twice as far, run for the second, put back, and leaves. So a step moves every byte once each
-- way, and the numbers are those of optim.MeZO in memory, bit for bit.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Engine = require "tycho.offload.engine"

local expect, fail = arguments.expect, arguments.fail
local tier = ty.core.tier_core

--- What offload.zo2 makes.
---@class ZO2
---@field engine OffloadEngine
---@field optimizer MeZO
local ZO2 = {}
ZO2.__index = ZO2

-- ---- what is used where ----

-- Segment s of a pass is from where unit number s begins to where the next one does; 0 is before the first.
-- self.cells[s]: what it uses: the unit's own, and what is asked for besides: an embedding that is the head too.
local function learn(self, fn)
  local engine, order, cells, at = self.engine, {}, { [0] = {} }, 0
  local function uses(cell)
    for _, known in ipairs(cells[at]) do if known == cell then return end end
    table.insert(cells[at], cell)
  end
  self.entering = function(unit)
    engine:keep {}
    at = at + 1
    order[at], cells[at] = unit, {}
    for _, cell in ipairs(unit.cells) do uses(cell) end
    engine:need(unit)
  end
  rawset(engine, "was_asked", function(_, cell) uses(cell) end)
  local rng = ty.rng_state()
  local ok, problem = pcall(ty.no_grad, ty.scope, fn)
  ty.rng_state(rng)
  rawset(engine, "was_asked", nil)
  self.entering = nil
  engine:keep {}
  if not ok then error(problem, 0) end
  expect("ZO2:step", "fn()", problem, "a tensor")
  self.order, self.cells, self.last = order, cells, {}
  for s = 0, #order do
    for _, cell in ipairs(cells[s]) do self.last[cell] = s end
  end
  self.unused = {}
  for _, cell in ipairs(self.all) do
    if not self.last[cell] then table.insert(self.unused, cell) end
  end
end

-- ---- a cell's visit ----

-- It is there and has made all steps that are over.
local function arrive(self, cell)
  cell:need()
  cell:look() -- what the program changed between steps
  if self.pending[cell] then
    self.optimizer:update({ cell.tensor }, self.pending[cell])
    self.pending[cell] = nil
    cell:changed()
  end
end

-- A cell that comes again in this step must come as it was before it was moved.
local function come(self, cell, s)
  arrive(self, cell)
  if self.last[cell] > s and cell.dirty then
    cell:drop()
    cell:need()
  end
  self.optimizer:perturb({ cell.tensor }, 1)
  self.out[cell] = 1
end

local function cross(self, cell)
  self.optimizer:perturb({ cell.tensor }, -2)
  self.out[cell] = -1
end

local function leave(self, cell, s)
  if self.last[cell] == s and self.optimizer.position[cell.tensor] then
    self.optimizer:perturb({ cell.tensor }, 1)
    cell:changed()
  end
  cell:drop(self.last[cell] ~= s) -- where it comes again, it comes as it was before it was moved
  self.out[cell] = nil
end

-- Parameters of modules around others, which stay: each pass has its own values.
local function open_resident(self)
  for _, p in ipairs(self.resident) do
    if self.pending[p] then
      self.optimizer:update({ p }, self.pending[p])
      self.pending[p] = nil
    end
  end
  self.optimizer:perturb(self.resident, 1)
  self.other, self.side = {}, 1
  for i, p in ipairs(self.resident) do
    self.other[i] = ty.keep(p:detach():clone())
    tier.exchange(p, self.other[i])
  end
  self.optimizer:perturb(self.resident, -2)
  self.side = 2
end

local function take_side(self, side)
  if self.side == side then return end
  for i, p in ipairs(self.resident) do tier.exchange(p, self.other[i]) end
  self.side = side
end

local function close_resident(self)
  if not self.other then return end
  take_side(self, 2)
  for _, t in ipairs(self.other) do t:free() end
  self.other = nil
  self.optimizer:perturb(self.resident, 1)
end

-- ---- a step ----

-- Goes on with a pass until it stands before its next unit, or is over: then returns its loss.
local function go_on(self, pass)
  take_side(self, pass.side)
  ty.rng_state(pass.rng)
  self.running = pass
  local ok, value = coroutine.resume(pass.thread)
  self.running = nil
  pass.rng = ty.rng_state()
  if not ok then
    if type(value) == "string" and value:find("C-call boundary", 1, true) then
      fail "ZO2:step: fn: a unit is called within a function of C (string.gsub and its like), where a pass cannot wait"
    end
    error(value, 0)
  end
  if coroutine.status(pass.thread) == "dead" then
    pass.loss, pass.unit = expect("ZO2:step", "fn()", value, "a tensor"):item(), nil
  else
    pass.unit = value
    if ty.autocast_dtype() ~= self.autocast then
      fail "ZO2:step: fn: expected ty.autocast around the step, not within it, where the other pass goes on"
    end
  end
end

local function run_step(self, fn)
  local engine, passes, rng = self.engine, {}, ty.rng_state()
  self.passes, self.autocast = passes, ty.autocast_dtype()
  for side = 1, 2 do
    passes[side] = { side = side, rng = rng, thread = coroutine.create(function() return ty.scope(fn) end) }
  end
  open_resident(self)
  self.out = {}
  for s = 0, #self.order do
    engine:sweep()
    for _, cell in ipairs(self.cells[s]) do come(self, cell, s) end
    for ahead = s + 1, math.min(s + self.ahead, #self.order) do
      for _, cell in ipairs(self.cells[ahead]) do cell:fetch() end
    end
    for side, pass in ipairs(passes) do
      if side == 2 then
        for _, cell in ipairs(self.cells[s]) do cross(self, cell) end
      end
      go_on(self, pass)
      if pass.unit ~= self.order[s + 1] then
        fail("ZO2:step: fn: expected the units of the first step in their order, got %s in place of %s",
          pass.unit and pass.unit.name or "the end", self.order[s + 1] and self.order[s + 1].name or "the end")
      end
    end
    for _, cell in ipairs(self.cells[s]) do leave(self, cell, s) end
    engine:settle()
  end
  close_resident(self)
  for _, cell in ipairs(self.unused) do -- moved all the same, as in memory
    arrive(self, cell)
    if self.optimizer.position[cell.tensor] then
      for _, factor in ipairs { 1, -2, 1 } do self.optimizer:perturb({ cell.tensor }, factor) end
      cell:changed()
    end
    cell:drop()
    engine:settle()
  end
  return passes[1].loss, passes[2].loss
end

-- What a step that failed leaves: all as it was before it, but for rounding.
local function recover(self)
  for cell, moved in pairs(self.out or {}) do
    if cell.state == "here" then
      if cell.dirty then self.optimizer:perturb({ cell.tensor }, -moved) end
      cell:drop(true) -- what is not dirty comes back as it was
    end
  end
  self.out = {}
  for _, pass in ipairs(self.passes or {}) do coroutine.close(pass.thread) end
  close_resident(self)
  pcall(self.engine.keep, self.engine, {})
end

--- One step: fn() computes the loss, twice, side by side. It calls the same units of the model in the same order at
-- every step, and does not open ty.autocast itself. What the step changes is changed when a unit comes
-- next: flush() does it now. Returns the mean of the two losses.
---@param fn fun(): Tensor
---@return number loss
function ZO2:step(fn)
  expect("ZO2:step", "fn", fn, "a function")
  if self.closed then fail "ZO2:step: it is closed" end
  if self.stepping then fail "ZO2:step: called within a step" end
  if ty.core.program.is_compiling() then fail "ZO2:step: does not work inside ty.compile" end
  if not self.order then learn(self, fn) end
  self.stepping = true
  local ok, above, below = pcall(ty.no_grad, run_step, self, fn)
  self.stepping = false
  if not ok then
    recover(self)
    error(above, 0)
  end
  local done = self.optimizer:close(above, below)
  for _, cell in ipairs(self.all) do self.pending[cell] = done end
  for _, p in ipairs(self.resident) do self.pending[p] = done end
  return (above + below) / 2
end

--- Makes the last step whole: every unit comes once. Before the parameters are looked at; run() and close() do it
-- themselves.
function ZO2:flush()
  if self.stepping then fail "ZO2:flush: called within a step" end
  for _, p in ipairs(self.resident) do
    if self.pending[p] then self.optimizer:update({ p }, self.pending[p]) end
    self.pending[p] = nil
  end
  for _, cell in ipairs(self.all) do
    if self.pending[cell] then
      arrive(self, cell)
      cell:drop()
      self.engine:settle()
    end
  end
  self.engine:settle(true)
end

--- Runs fn(...) for inference, a unit at a time.
---@param fn function
---@return any ...
function ZO2:run(fn, ...)
  expect("ZO2:run", "fn", fn, "a function")
  if self.stepping then fail "ZO2:run: called within a step" end
  self:flush()
  return self.engine:run(fn, ...)
end

--- Bytes moved and the like: OffloadEngine:stats().
---@return table
function ZO2:stats() return self.engine:stats() end

--- Brings everything back and lets go of the model.
function ZO2:close()
  if self.closed then return end
  self:flush()
  self.closed = true
  self.engine:close()
end

--- Takes a model in charge that optim.MeZO trains: its units (blocks) leave for where the plan says. plan:
--   parameters   "host" (the default) or "file": where they are while they are not in use
--   ahead        units that are on their way while one computes (1; 0: the least memory)
--   in_flight    bytes of writes that may be under way while the next unit computes (16 MiB; 0: each is waited for)
--   file, host, backend   as in offload.engine
---@param model Module
---@param optimizer MeZO
---@param plan? table
---@return ZO2
return function(model, optimizer, plan)
  local who = "offload.zo2"
  expect(who, "model", model, "a module")
  if type(optimizer) ~= "table" or type(optimizer.perturb) ~= "function" then
    fail("%s: optimizer: expected an optim.MeZO, got %s", who, arguments.describe(optimizer))
  end
  local o = arguments.read(who, plan, { parameters = "host", ahead = 1, in_flight = 16 << 20, file = arguments.none,
    host = arguments.none, backend = "auto" }, { parameters = '"host" or "file"', ahead = "an integer >= 0",
    in_flight = "an integer >= 0", file = "a string", host = "an integer >= 0",
    backend = '"auto" or "uring" or "threads"' })
  local self = setmetatable({ optimizer = optimizer, ahead = o.ahead, pending = {}, all = {}, resident = {} }, ZO2)
  local policy = {}
  --- Before a unit's forward pass: a pass of a step waits there for its turn.
  function policy.before_forward(engine, unit)
    if self.running then
      coroutine.yield(unit)
    elseif self.entering then
      self.entering(unit)
    else
      engine:keep { unit }
      engine:need(unit)
    end
  end

  --- After it.
  function policy.after_forward() end

  self.engine = Engine.new(model, nil, { parameters = o.parameters, file = o.file, host = o.host, backend = o.backend,
    in_flight = o.in_flight, smallest = 1, policy = policy })
  local known = {}
  for _, unit in ipairs(self.engine.units) do
    for _, p in ipairs(unit.params) do
      local cell = self.engine.of[p] and self.engine.of[p].cell
      if cell and not known[cell] then
        known[cell] = true
        table.insert(self.all, cell)
      elseif not cell and optimizer.position[p] then
        table.insert(self.resident, p)
      end
    end
  end
  return self
end
