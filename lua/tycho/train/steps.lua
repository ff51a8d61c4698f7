--- The training loop: `for step, batch, log in train.steps(loader, 1000) do ... end`.
local ty = require "tycho"
local new_progress = require "tycho.train.progress"
local arguments = require "tycho.arguments"
local expect, none = arguments.expect, arguments.none

local Loop = {}
Loop.__index = Loop

local function has_next(source)
  local ok, method = pcall(function() return source.next end)
  return ok and type(method) == "function"
end

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
  local o = arguments.read("train.steps", options, { start = 0, title = "", quiet = false, logger = none,
    log_every = 1 }, { start = "an integer >= 0", logger = "a table", log_every = "an integer > 0" })
  expect("train.steps", "count", count, "an integer >= 0")
  if loader ~= nil and type(loader) ~= "function" and not has_next(loader) then
    arguments.fail("train.steps: loader: expected a DataLoader, a function or nil, got %s", arguments.describe(loader))
  end
  if o.logger and type(o.logger.log) ~= "function" then
    arguments.fail "train.steps: logger: expected a train.Logger, got a table without log()"
  end
  local self = setmetatable({
    progress = new_progress(count, { start = o.start, title = o.title, quiet = o.quiet }),
  }, Loop)
  if o.logger and type(o.logger.about) == "function" then
    o.logger:about { steps = count, start = o.start, title = o.title }
  end
  local step = o.start
  local function log(values)
    expect("log", "values", values, "a table")
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
