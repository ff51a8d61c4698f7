-- The part of the engine that steps the optimizer: unit by unit, with gradients and moments that come and go.
local ty = require "tycho"
local Cell = require "tycho.offload.cell"

local clock = ty.core.system.clock

-- What the update of a parameter takes.
local function each_cell(known, fn)
  if known.cell then fn(known.cell) end
  for _, cell in pairs(known.moments) do fn(cell) end
  if known.gradient then fn(known.gradient) end
end

--- Gives a class of engines its methods.
---@param Engine table
return function(Engine)
  --- The cells of the moments of parameters, as they are now.
  function Engine:watch_moments(params)
    local store = self:store_for(self.plan.moments)
    if not store then return end
    for _, p in ipairs(params) do
      local known = self.of[p]
      for key, value in pairs(self.optimizer.state[p] or {}) do
        local cell = known.moments[key]
        if ty.is_tensor(value) and (not cell or cell.tensor ~= value) and value:nbytes() >= self.plan.smallest then
          if cell then cell:forget() end
          cell = self.taken and self.taken[value]
          if cell then
            self.taken[value] = nil
          else
            cell = Cell.new(self, value, "moments", store, known.name .. " " .. key)
            cell:arrived()
          end
          known.moments[key] = cell
        end
      end
    end
  end

  --- Begins to bring all that the update of a unit takes: in turn, as the moments of the unit before it are written
  -- and leave room.
  function Engine:fetch_update(unit)
    for _, p in ipairs(unit.params) do
      each_cell(self.of[p], function(cell) if cell.state == "away" then table.insert(self.queue, cell) end end)
    end
    self:advance()
  end

  --- Brings what fetch_update() has queued, as far as there is room: called often within the backward pass.
  function Engine:advance()
    local queue = self.queue
    if not queue[1] then return end
    local leaving, first = self:written(), 1
    while queue[first] do
      local cell = queue[first]
      if cell.state == "away" then
        if leaving > self.in_flight and leaving + self.lent.back + cell.nbytes > self.in_flight + self.lent.bytes then
          break
        end
        self.lent.back = self.lent.back + cell.nbytes
        cell:fetch()
      end
      first = first + 1
    end
    self.queue = table.move(queue, first, #queue, 1, {})
  end

  -- Steps one parameter of a unit, which has a gradient.
  local function step(self, known, p)
    known.list = known.list or { p }
    self.optimizer:step_part(self.clip, known.list)
    if known.cell then known.cell:changed() end
    for _, cell in pairs(known.moments) do cell:changed() end
    if known.gradient then
      known.gradient:forget()
      known.gradient.tensor:free()
      known.gradient = nil
    end
    p:set_grad()
    self:watch_moments(known.list)
  end

  --- Sends the gradients of a unit away, where the plan says so.
  function Engine:drop_gradients(unit)
    local store = self:store_for(self.plan.gradients)
    if not store then return end
    for _, p in ipairs(unit.params) do
      local known, g = self.of[p], p.grad
      if g and g:nbytes() >= self.plan.smallest and not known.gradient then
        known.gradient = Cell.new(self, ty.keep(g), "gradients", store, known.name)
        known.gradient:arrived()
        known.gradient:drop()
      end
    end
    self:settle()
  end

  --- No unit steps in this step: their gradients go.
  function Engine:leave_out()
    for _, unit in ipairs(self.units) do
      self.updated[unit] = true
      for _, p in ipairs(unit.params) do p:set_grad() end
    end
    self:keep {}
  end

  --- Steps the parameters of a unit, whose gradients are whole, and drops these. Moments go one parameter after the
  -- other, and until they are written the memory that they had is theirs: what is fetched next has to wait for it. The
  -- parameters stay for the policy to send away.
  function Engine:update(unit)
    if self.updated[unit] then return end
    self.updated[unit] = true
    self.lent = { bytes = 0, back = 0 }
    self:settle()
    self:fetch_update(unit)
    local from = clock()
    for _, p in ipairs(unit.params) do
      local known = self.of[p]
      each_cell(known, function(cell) cell:need() end)
      local g = p.grad
      if g then
        g:free() -- this handle of it: the memory is to go with the last one
        step(self, known, p)
      end
      for _, cell in pairs(known.moments) do
        cell:drop()
        self.lent.bytes = self.lent.bytes + cell.nbytes
      end
    end
    self:log(unit.name, "update", from)
    self:settle()
  end
end
