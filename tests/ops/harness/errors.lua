-- Wrong calls. Made from the table for every op: too few and too many arguments, wrong kinds of argument, an unknown
-- option, a dtype that the class forbids; and those of the row. Each must raise an error that names the op (and the
-- argument), and leave no bytes behind.

local case = require "case"
local dtypes = require "dtypes"
local layout = require "layout"
local memory = require "memory"
local report = require "report"

local errors = {}
local ty

function errors.use(library) ty = library end

-- fn(args...) must fail with a text that contains all of `parts`.
local function must_fail(row, what, parts, fn, args)
  local late = false -- known only when the GPU is waited for, by the innermost op
  local before, after, ok, problem = memory.around(function()
    local called, first = pcall(fn, table.unpack(args, 1, args.n))
    if not called then error(first, 0) end
    if layout.device ~= "cpu" then
      late = true
      ty.cuda.synchronize(layout.device)
    end
  end)
  local message = not ok and tostring(problem) or ""
  if not report.check(not ok, row.name, what, "no error was raised") then return end
  for _, part in ipairs(parts) do
    local found = message:find(part, 1, true) or (pcall(string.find, "", part) and message:find(part))
    report.check(found or (late and part == row.name), row.name, what, "the error should contain %q: %s", part, message)
  end
  report.check(before == after, row.name, what, "%d bytes are live after the error, %d before", after, before)
end

local function example(row)
  for number, row_case in ipairs(row.cases) do
    for _, dtype in ipairs(row_case.dtypes or row.dtypes or dtypes.of(row.info.flags)) do
      local instance = case.new(row.info, number, row_case, dtype)
      if instance then return instance end
    end
  end
  return nil
end

local function text() return "text" end
local function tensor() return ty.ones(2, { device = layout.device }) end
local wrong = { -- for each kind of argument a value of another kind
  tensor = text, optional = text, operand = text, tensors = text, bool = text, ints = text, varints = text,
  number = text, int = tensor, float = tensor, string = tensor, named = tensor,
  dtype = function() return "no_such_dtype" end, device = function() return "no_such_device" end,
}

-- The example's arguments as a packed list that may be changed; nil when it does not use positions alone.
local function arguments(instance, tensors)
  local args = instance:call(table.pack, tensors)[1]
  return args
end

local function check_kinds(row, instance)
  local info = row.info
  local positions = 0 -- arguments after a list that takes several numbers in a row have no position
  for i, arg in ipairs(info.args) do
    positions = i
    if arg.kind == "varints" then break end
  end
  for i, arg in ipairs(info.args) do
    local make = wrong[arg.kind]
    if make then
      local tensors = instance:tensors("contiguous")
      local args = arguments(instance, tensors)
      local options = instance.opts and args[args.n]
      if instance.opts then args.n = args.n - 1 end
      args[instance.n + 1] = nil
      args.n = instance.n
      local named = { table.unpack(args, 1, args.n) }
      local call = { n = args.n + 1, table.unpack(named, 1, args.n) }
      local more = {}
      for k, v in pairs(options or {}) do more[k] = v end
      if i <= instance.n and i <= positions then
        call[i] = make()
        call[call.n] = options
        if not options then call.n = call.n - 1 end
      else
        more[arg.name] = make()
        call[call.n] = more
      end
      must_fail(row, "wrong kind of " .. arg.name, { row.name, arg.name }, row.fn, call)
    end
  end
end

local function check_arity(row, instance)
  local info = row.info
  if info.args[1] and info.args[1].required then
    must_fail(row, "no arguments", { row.name, info.args[1].name }, row.fn, { n = 0 })
  end
  local last = info.args[#info.args]
  if not last then return end
  local variable = false
  for _, arg in ipairs(info.args) do variable = variable or arg.kind == "varints" end
  if variable then return end
  local tensors = instance:tensors("contiguous")
  local args = arguments(instance, tensors)
  if instance.opts then args.n = args.n - 1 end
  local call = { n = #info.args + 1 }
  for i = 1, math.min(instance.n, #info.args) do call[i] = args[i] end
  call[call.n] = 1
  must_fail(row, "too many arguments", { row.name }, row.fn, call)
end

local function check_option(row, instance)
  local args = arguments(instance, instance:tensors("contiguous"))
  local options = { no_such_option = 1 }
  if instance.opts then
    for k, v in pairs(args[args.n]) do options[k] = v end
    args[args.n] = options
  else
    args.n = args.n + 1
    args[args.n] = options
  end
  local full = instance.n >= #row.info.args -- a table more is one argument too many
  must_fail(row, "unknown option", { row.name, full and "" or "no_such_option" }, row.fn, args)
end

local function check_class(row, instance)
  local slot = instance.slots[1]
  local bad = dtypes.forbidden(row.info.flags)
  if not slot or not bad or row.any_dtype or slot.array.fixed then return end
  local tensors = instance:tensors("contiguous")
  for i, s in ipairs(instance.slots) do
    if not s.array.fixed then tensors[i] = ty.zeros(s.array.shape, { dtype = bad, device = layout.device }) end
  end
  local args = arguments(instance, tensors)
  must_fail(row, "dtype " .. bad, { row.name, (slot.name:gsub("%[.*", "")) }, row.fn, args)
end

local function check_row_errors(row)
  for number, row_case in ipairs(row.errors or {}) do
    local instance
    for _, dtype in ipairs(row_case.dtypes or row.dtypes or dtypes.of(row.info.flags)) do
      instance = instance or case.new(row.info, 1000 + number, row_case, dtype)
    end
    if report.check(instance ~= nil, row.name, "error " .. number, "the templates cannot be made in any dtype") then
      local args = arguments(instance, instance:tensors("contiguous"))
      local parts = type(row_case.match) == "table" and row_case.match or { row.name, row_case.match }
      must_fail(row, "error " .. number, parts, row.fn, args)
    end
  end
end

--- All error checks of a row.
function errors.run(row)
  local ok, message = xpcall(function()
    local instance = example(row)
    if instance then
      check_arity(row, instance)
      check_kinds(row, instance)
      check_option(row, instance)
      check_class(row, instance)
    end
    check_row_errors(row)
  end, report.handler)
  if not ok then report.check(false, row.name, "errors", "%s", message) end
end

return errors
