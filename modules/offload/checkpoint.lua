-- Checkpoints of a model that is away: written and read tensor by tensor, within the memory that training takes. The
-- files are those of ty.train.save_checkpoint: plans are no part of them, and a run in memory goes on from them, too.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Cell = require "tycho.offload.cell"

--- Gives a class of engines its methods.
---@param Engine table
return function(Engine)
  --- An op or a writer has brought back what is away. While a checkpoint is under way, what came before it leaves.
  function Engine:brought(cell)
    if not self.passing then return end
    if self.passing.last and self.passing.last ~= cell then
      self.passing.last:drop()
      self:settle()
    end
    self.passing.last = cell
  end

  -- fn(...) while tensors come one by one.
  local function passing(self, fn, ...)
    self.passing = {}
    local result = table.pack(pcall(fn, ...))
    local last = self.passing.last
    self.passing = nil
    if last then last:drop() end
    self:settle(true)
    if not result[1] then error(result[2], 0) end
    return table.unpack(result, 2, result.n)
  end

  --- ty.train.save_checkpoint(path, parts), with parts such as { model = model, optimizer = optimizer, step = 100 }:
  -- what is away passes through the device one tensor at a time.
  ---@param path string
  ---@param parts table<string, any>
  function Engine:save(path, parts)
    if self.stepping then arguments.fail "OffloadEngine:save: called within a step" end
    passing(self, ty.train.save_checkpoint, path, parts)
  end

  -- A state that the optimizer takes over leaves as soon as it is there.
  local function send_away(self)
    local store = self:store_for(self.plan.moments)
    local rules = self.optimizer.rules
    self.taken = {}
    self.optimizer.rules = setmetatable({ place = function(group, p, made)
      local placed = rules.place and rules.place(group, p, made) or made
      if placed:nbytes() < self.plan.smallest or not self.of[p] then return placed end
      local cell = Cell.new(self, ty.keep(placed), "moments", store, self.of[p].name)
      cell:arrived()
      cell:drop()
      self:settle()
      self.taken[placed] = cell
      return placed
    end }, { __index = rules })
    return function() self.optimizer.rules = rules end
  end

  --- ty.train.load_checkpoint(path, parts), likewise tensor by tensor; the plan need not be that of the checkpoint.
  -- Returns its plain values.
  ---@param path string
  ---@param parts table<string, any>
  ---@return table<string, any> values
  function Engine:load(path, parts)
    if self.stepping then arguments.fail "OffloadEngine:load: called within a step" end
    local away = self.optimizer and self.plan.moments ~= "device"
    local undo = away and send_away(self)
    local ok, values = pcall(passing, self, ty.train.load_checkpoint, path, parts)
    if undo then undo() end
    for _, unit in ipairs(self.optimizer and self.units or {}) do self:watch_moments(unit.params) end
    for _, cell in pairs(self.taken or {}) do cell:forget() end -- of a checkpoint that did not fit
    self.taken = nil
    for _, cell in ipairs(self:cells "moments") do cell:drop() end
    self:keep {}
    if not ok then error(values, 0) end
    return values
  end
end
