--- Options of constructors: defaults filled in, unknown names refused; and the defaults for new parameters.
local ty = require "tycho"

local M = {}

--- A table with the defaults and what `given` overrides. Raises on names that `defaults` lacks; a default of
-- M.none stands for "not set".
M.none = {}

function M.read(who, given, defaults)
  local result = {}
  for key, value in pairs(defaults) do
    if value ~= M.none then result[key] = value end
  end
  if given == nil then return result end
  if type(given) ~= "table" then error(("%s: options must be a table, got %s"):format(who, type(given)), 3) end
  for key, value in pairs(given) do
    if defaults[key] == nil then
      local names = {}
      for name in pairs(defaults) do names[#names + 1] = name end
      table.sort(names)
      error(("%s: no option '%s'; there are: %s"):format(who, tostring(key), table.concat(names, ", ")), 3)
    end
    result[key] = value
  end
  return result
end

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

--- Calls fn(...) while new parameters get other defaults: { dtype =, device =, init = false } (false: left undefined,
-- for models whose weights are loaded at once). Returns what fn returns.
function M.with_defaults(defaults, fn, ...)
  local options = M.read("with_defaults", defaults, current)
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
  local result = table.pack(pcall(fn, ...))
  if not result[1] then error(result[2], 2) end -- the tail call has taken the place of the public function
  return table.unpack(result, 2, result.n)
end

--- An integer above 0, or an error that names the argument.
function M.positive(who, what, value)
  local n = math.tointeger(value)
  if not n or n < 1 then error(("%s: %s must be a positive integer, got %s"):format(who, what, tostring(value)), 3) end
  return n
end

--- A number or a pair as a pair.
function M.pair(who, what, value)
  if type(value) == "table" and #value == 1 then value = value[1] end
  if type(value) == "table" then
    if #value ~= 2 then error(("%s: %s must be a number or a pair"):format(who, what), 3) end
    return { value[1], value[2] }
  end
  if not math.tointeger(value) then
    error(("%s: %s must be an integer or a pair, got %s"):format(who, what, tostring(value)), 3)
  end
  return { value, value }
end

return M
