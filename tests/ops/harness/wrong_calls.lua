-- Calls with wrong arguments, drawn at random from a seed: calls of an op's row in which arguments are left out, nil,
-- without dimensions, or of another kind, shape, dtype, device or size than they should be. Whatever comes, the program
-- goes on: a call fails with an error that names the op and is not the interpreter's own, or it gives a result whose
-- gradient can be asked for; and no bytes stay behind.

local case = require "case"
local dtypes = require "dtypes"
local memory = require "memory"
local report = require "report"

local wrong_calls = { done = 0 }
local ty

function wrong_calls.use(library) ty = library end

local BUDGET = 256 << 20 -- bytes: what huge sizes ask for is refused, not taken

local function pick(list) return list[math.random(#list)] end

-- ---- values that may stand anywhere ----

local names = { "f32", "f64", "bf16", "i64", "i32", "u8", "bool" }
local integers = { 0, 1, -1, 2, 3, 5, -7, 1 << 31, -(1 << 31) - 1, 1 << 53, math.maxinteger, math.mininteger }
local numbers = { 0.0, 0.5, -1.5, 1e-300, 1e300, math.huge, -math.huge, 0 / 0 }
local words = { "", "text", "mean", "f32", "f99", "cpu", "cuda:99", "->", "a b -> b a", "ij,jk->ik", "none", "relu" }

local function random_tensor()
  local shape = {}
  for i = 1, math.random(0, 4) do shape[i] = math.random(0, 3) end
  return ty.randint(0, 3, shape):to(pick(names))
end

local function released()
  local x = ty.ones(2)
  x:free()
  return x
end

local anything = {
  function() return nil end,
  function() return ty.tensor(1.0):to(pick(names)) end,
  random_tensor,
  function() return random_tensor():to "meta" end,
  function() return ty.ones(2, 1):expand { 2, 3 } end,
  released,
  function() return pick(integers) end,
  function() return pick(integers) end,
  function() return pick(numbers) end,
  function() return pick(words) end,
  function() return math.random() < 0.5 end,
  function() return {} end,
  function() return { pick(integers), pick(integers) } end,
  function() return { random_tensor(), pick(integers) } end,
  function() return { random_tensor(), random_tensor() } end,
  function() return { {} } end,
  function() return print end,
  function() return io.stdout end,
}

-- A tensor like x but for something.
local changes = {
  function(x) return x:sum() end,
  function(x) return x:to(pick(names)) end,
  function(x) return x:to "meta" end,
  function(x) return x:unsqueeze(0) end,
  function(x) return x:flatten() end,
  function(x) return x:select(0, 0) end,
  function(x) return x:narrow(-1, 0, 0) end,
  function(x) return x:narrow(0, 0, 1) end,
  function(x) return ty.concat({ x, x }, -1) end,
  function(x) return x:transpose(0, -1) end,
  function(x) return ty.full_like(x, pick(numbers)) end,
  function(x) return ty.full_like(x, pick(integers)) end,
  function(x) return x:is_floating_point() and x:detach():requires_grad_() or x end,
}

-- ---- calls ----

-- The calls of the row to start from: a few cases, each in one dtype.
local function starts(row)
  local list = {}
  for number, row_case in ipairs(row.cases) do
    local choice = row_case.dtypes or row.dtypes or dtypes.of(row.info.flags)
    local instance = case.new(row.info, number, row_case, choice[(number - 1) % #choice + 1])
    local small = instance ~= nil
    for _, slot in ipairs(instance and instance.slots or {}) do small = small and #slot.array <= 4096 end
    if small then list[#list + 1] = instance end
    if #list == 6 then break end
  end
  return list
end

-- The arguments of a right call by name: values, with nil for those left to their defaults.
local function right_arguments(info, instance)
  if not instance then return {} end
  local packed = instance:call(table.pack, instance:tensors "contiguous")[1]
  local values, options = {}, instance.opts and packed[packed.n] or {}
  for i = 1, instance.n do
    if info.args[i] then values[info.args[i].name] = packed[i] end
  end
  for name, value in pairs(options) do values[name] = value end
  return values
end

local function spoil(value)
  local kind = math.random()
  if kind < 0.3 then return nil end
  if kind < 0.7 and ty.is_tensor(value) then
    local ok, changed = pcall(pick(changes), value)
    return ok and changed or nil
  end
  return pick(anything)()
end

-- What is passed: positions up to one, the others by name, now and then something behind.
local function lay_out(info, values)
  local args, by_name = { n = 0 }, math.random(0, #info.args)
  local options
  for i, arg in ipairs(info.args) do
    if i <= by_name then
      args[i], args.n = values[arg.name], i
    elseif values[arg.name] ~= nil then
      options = options or {}
      options[arg.name] = values[arg.name]
    end
  end
  if math.random() < 0.05 then options, args.n = nil, math.random(0, args.n) end
  if options then
    args.n = args.n + 1
    args[args.n] = options
  end
  if math.random() < 0.05 then
    args.n = args.n + 1
    args[args.n] = pick(anything)()
  end
  return args
end

local function check_message(row, what, message)
  if not report.check(type(message) == "string", row.name, what, "the error is a %s", type(message)) then return end
  local name = row.name:gsub("_$", "")
  local named = message:match("([%w_]+): ") or "" -- of diagonal_backward, diagonal will do
  local is_named = message:find(name, 1, true) or #named > 2 and name:sub(1, #named) == named
  report.check(is_named or message:find("out of memory", 1, true), row.name, what, "the error does not name the op: %s",
    message)
  report.check(not message:find("attempt to", 1, true) and not message:find("bad argument", 1, true), row.name, what,
    "the error is the interpreter's: %s", message)
  report.check(not message:find("[\0-\8\14-\31\128-\255]"), row.name, what, "the error is no plain text: %q", message)
end

local function gradient_of(results)
  for i = 1, results.n do
    local y = results[i]
    if ty.is_tensor(y) and y.requires_grad and y.device == "cpu" then y:sum():backward() end
  end
end

local function run_one(row, list, number)
  local info = row.info
  local values = right_arguments(info, #list > 0 and pick(list) or nil)
  for _ = 1, math.random(1, 3) do
    local arg = pick(info.args)
    values[arg.name] = spoil(values[arg.name])
  end
  local args = lay_out(info, values)
  local fn = row.fn
  if info.flags.INPLACE and math.random() < 0.25 then fn = ty.core[info.name .. "_"] end
  local what = "wrong call " .. number
  local results = table.pack(pcall(fn, table.unpack(args, 1, args.n)))
  wrong_calls.done = wrong_calls.done + 1
  if not results[1] then return check_message(row, what, results[2]) end
  local ok, message = pcall(gradient_of, table.pack(table.unpack(results, 2, results.n)))
  report.check(ok or not tostring(message):find("attempt to", 1, true), row.name, what, "its gradient: %s", message)
end

--- `count` calls of a row, drawn from `seed`.
function wrong_calls.run(row, count, seed)
  local before_seed = ty.rng_state()
  ty.memory.set_budget("cpu", BUDGET)
  local list = starts(row)
  local hash = seed or 0
  for i = 1, #row.name do hash = hash * 33 + row.name:byte(i) & 0x7fffffff end
  math.randomseed(hash)
  local before = memory.live()
  for number = 1, count do
    local ok, message = xpcall(run_one, report.handler, row, list, number)
    if not ok then report.check(false, row.name, "wrong call " .. number, "%s", message) end
  end
  local after = memory.live(before)
  report.check(before == after, row.name, "wrong calls", "%d bytes are live after them, %d before", after, before)
  ty.memory.set_budget("cpu")
  ty.rng_state(before_seed)
end

return wrong_calls
