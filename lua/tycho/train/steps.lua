--- The training loop: `for step, batch, log in train.steps(loader, 1000) do ... end`.
local ty = require "tycho"
local new_progress = require "tycho.train.progress"
local read = require("tycho.nn.options").read
local none = require("tycho.nn.options").none

local Loop = {}
Loop.__index = Loop

local function next_batch(source)
  if source == nil then return nil end
  if type(source) == "function" then return source() end
  return source:next()
end

-- Ends the scope of the step that ran.
function Loop:leave()
  local scope = self.scope
  if scope then
    self.scope = nil
    scope:close()
  end
end

function Loop:close()
  self:leave()
  if not self.closed then
    self.closed = true
    self.progress:finish()
  end
end

Loop.__close = Loop.close
Loop.__gc = Loop.close

local function to_number(value)
  if ty.is_tensor(value) then return value:item() end
  return value
end

--- Iterates steps start + 1 to count. Each step is a scope: tensors made in it are released at its end, except those
-- that were kept (ty.keep). Shows progress on standard error.
-- In the loop: the number of the step (from 1), a batch (loader:next(), or what a function `loader` returns; none for
-- nil), and log(values), which takes numbers or tensors by name, shows them and hands them to the logger.
-- options: start (0: steps done before, when resuming), title, quiet, logger (train.Logger), log_every (1: how often
-- values reach the logger).
---@param loader table|function|nil
---@param count integer
---@param options? table
function Loop.steps(loader, count, options)
  local o = read("train.steps", options, { start = 0, title = "", quiet = false, logger = none, log_every = 1 })
  if not math.tointeger(count) or count < 0 then
    error("train.steps: the number of steps must be an integer >= 0, got " .. tostring(count), 2)
  end
  local self = setmetatable({ progress = new_progress(count, o) }, Loop)
  local step = o.start
  local function log(values)
    local logged = o.logger and (step % o.log_every == 0 or step == count)
    local numbers = {}
    for name, value in pairs(values) do numbers[name] = to_number(value) end
    self.progress:set(numbers)
    if logged then o.logger:log(step, numbers) end
  end
  local function advance()
    if step > o.start then self.progress:advance(step) end
    self:leave()
    if step >= count then
      self:close()
      return nil
    end
    step = step + 1
    self.scope = ty.open_scope()
    return step, next_batch(loader), log
  end
  return advance, nil, nil, self
end

return Loop.steps
