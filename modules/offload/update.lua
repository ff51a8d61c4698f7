-- The part of the engine that steps the optimizer: unit by unit, with gradients and moments that come and go.
local ty = require "tycho"
local Cell = require "tycho.offload.cell"

local clock = ty.core.system.clock

local function each_cell(self, unit, fn)
  for _, p in ipairs(unit.params) do
    local known = self.of[p]
    if known.cell then fn(known.cell) end
    for _, cell in pairs(known.moments) do fn(cell) end
    if known.gradient then fn(known.gradient) end
  end
end

--- Gives a class of engines its methods.
---@param Engine table
return function(Engine)
  --- The cells of the moments of a unit's parameters, as they are now.
  function Engine:watch_moments(unit)
    local store = self:store_for(self.plan.moments)
    if not store then return end
    for _, p in ipairs(unit.params) do
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

  --- Begins to bring all that the update of a unit takes.
  function Engine:fetch_update(unit)
    each_cell(self, unit, function(cell) cell:fetch() end)
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

  --- Steps the parameters of a unit, whose gradients are whole, and drops these; its moments go, its parameters stay
  -- for the policy to send away.
  function Engine:update(unit)
    if self.updated[unit] then return end
    self.updated[unit] = true
    self:fetch_update(unit)
    each_cell(self, unit, function(cell) cell:need() end)
    local from, has = clock(), false
    for _, p in ipairs(unit.params) do
      local g = p.grad
      has = has or g ~= nil
      if g then g:free() end -- this handle of it: the memory is to go with the last one
    end
    if has then self.optimizer:step_part(self.clip, unit.params) end
    for _, p in ipairs(unit.params) do
      local known, g = self.of[p], p.grad
      if g then
        if known.cell then known.cell:changed() end
        for _, cell in pairs(known.moments) do cell:changed() end
        if known.gradient then
          known.gradient:forget()
          known.gradient.tensor:free()
          known.gradient = nil
        end
        p:set_grad()
        g:free()
      end
    end
    self:log(unit.name, "update", from)
    self:watch_moments(unit)
    for _, p in ipairs(unit.params) do
      for _, cell in pairs(self.of[p].moments) do cell:drop() end
    end
    self:settle()
  end
end
