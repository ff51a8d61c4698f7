--- What constructors of modules share: checks of their arguments (tycho.arguments) and the defaults for new parameters.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = { read = arguments.read, none = arguments.none, expect = expect, fail = arguments.fail,
  describe = arguments.describe }

local current = { dtype = "f32", device = "cpu", init = true }

--- A new parameter of `size`, filled by init(tensor) unless inside nn.with_defaults { init = false }.
function M.parameter(size, init)
  local t = ty.empty(size, { dtype = current.dtype, device = current.device })
  if current.init and init and current.device ~= "meta" then init(t) end
  return t:requires_grad_()
end

--- A buffer of `size` filled with `value`.
function M.full(size, value, dtype)
  return ty.full(size, value, { dtype = dtype or current.dtype, device = current.device })
end

--- The device of new parameters; of the meta device nil: what is read from files is never there.
---@return string?
function M.device() return current.device ~= "meta" and current.device or nil end

--- A tensor that becomes part of a module, where new parameters go: moved if a model's init() made it on the CPU. On
-- the meta device nothing is moved: what is computed there once, such as frequencies, would be lost.
---@param tensor Tensor
---@return Tensor
function M.placed(tensor)
  local device = current.device
  if device == "cpu" or device == "meta" or tensor.device ~= "cpu" then return tensor end
  local there = tensor:detach():to { device = device }
  return tensor.requires_grad and there:requires_grad_() or there
end

--- Calls fn(...) while new parameters and buffers get other defaults: { dtype =, device =, init = false } (false: left
-- undefined, for models whose weights are loaded at once). Returns what fn returns.
function M.with_defaults(defaults, fn, ...)
  local options = M.read("with_defaults", defaults, current)
  expect("with_defaults", "fn", fn, "a function")
  local known, problem = pcall(ty.memory.stats, options.device)
  if not known then arguments.raise((problem:gsub("^memory: ", "")), "with_defaults: ") end
  local before = current
  current = options
  local result = table.pack(pcall(fn, ...))
  current = before
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

--- Returns fn(...). For the last line of a public function, return nn.for_caller(...): errors, however deep they come
-- from, are then those of the line that called the function.
function M.for_caller(fn, ...)
  expect("for_caller", "fn", fn, "a function")
  local result = table.pack(pcall(fn, ...))
  if not result[1] then arguments.raise(result[2]) end
  return table.unpack(result, 2, result.n)
end

--- Refuses batch_first = false, of modules whose inputs are [batch, time, width] alone.
function M.batch_first(who, o)
  if not o.batch_first then
    M.fail("%s: batch_first: expected true, got false: inputs are [batch, time, width]", who)
  end
end

--- An integer above 0, or an error that names the argument.
function M.positive(who, what, value) return math.tointeger(expect(who, what, value, "an integer >= 1")) end

--- An integer, or a list of n, as a list of n; `least` (default 0): what each is at least. n 2: as M.pair.
function M.each(who, what, value, n, least)
  if n == 2 then return M.pair(who, what, value, least) end
  local range = (">= %d"):format(least or 0)
  expect(who, what, value, ("an integer %s or a list of integers %s"):format(range, range))
  if type(value) ~= "table" then value = { value } end
  if #value ~= 1 and #value ~= n then
    arguments.fail("%s: %s: expected %s integer%s, got %d", who, what, n == 1 and "one" or "one or " .. n,
      n == 1 and "" or "s", #value)
  end
  local list = {}
  for d = 1, n do list[d] = value[d] or value[1] end
  return list
end

--- An integer or a pair of them as a pair; `least` (default 0): what each is at least.
function M.pair(who, what, value, least)
  if type(value) == "table" and #value == 1 then value = value[1] end
  local range = (">= %d"):format(least or 0)
  expect(who, what, value, ("an integer %s or a pair of integers %s"):format(range, range))
  if type(value) == "table" then return { value[1], value[2] } end
  return { value, value }
end

return M
