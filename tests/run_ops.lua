-- The op tests: every op of the table against its row in tests/ops/*.lua. See tests/ops/harness and CONTRIBUTING.md.
--
--   tycho tests/run_ops.lua [--device cuda] [--op NAME]... [--part K/N] [--quick] [--all] [--no-grad]
--                           [--calls N [--seed N]] [--moved N]
--
-- A row file returns function(row, T) and calls row(name, { ... }) with these fields:
--
--   cases    list of calls: positional arguments, T{...} for tensors (harness/template.lua), opts = { by name }. A case
--            may hold grad = false, dtypes = {...} and tol besides.
--   ref      the same in plain Lua on arrays { shape = {..}, [1..n] = values in C order }, independent of the op;
--            returns an array (or number) per result. References of ops that write change the arrays they are given.
--            Left out for random ops. T has helpers: harness/reference.lua.
--   grad     "why not", for differentiable ops whose gradient is not tested; grad2 the same for second derivatives
--   errors   calls that must fail, with match = "text" (or a list of texts) that the error contains
--   tol      allowed error: a number for f32 that the other dtypes scale with, or { f32 =, f64 =, f16 =, bf16 = };
--            gradtol the same for gradients; strict = true: relative to each element, not to the largest
--   dtype    dtype of the results where the rules of harness/compare.lua do not know it: a name, a list, or
--            function(dtype, result number)
--   dtypes   instead of those of the op's class; constant = { x = true }: inputs without gradient; strided, broadcast,
--            inplace, meta = false: leaves these variants out; writes = true: changes its inputs although not flagged
--            WRITES
--   big      function(ty) whose results, and gradients, are compared between one thread and two
--
-- --device: where; ops that have no kernel there are listed. --partial: what fails for want of a kernel is listed, not
-- counted. --op: only these ops. --part: every Nth of them, from the Kth: N processes share the work. --quick: fewer
-- dtypes and layouts, and on other devices the CPU's gradients in place of differences. --all: prints every failure.
-- --calls: only calls with wrong arguments, N of them over all ops; without it each op gets a few among its other tests
-- (harness/wrong_calls.lua). --seed: draws others. --no-grad: values and errors only. --moved: of each input at most N
-- elements are moved for its gradient; where memory is watched, one does what another did. --time: the slowest ops.
-- --mapped: only the calls inside ty.vmap. --trace: errors with a traceback.

local here = (arg and arg[0] or "run_ops.lua"):match("^(.*/)") or "./"
package.path = here .. "ops/harness/?.lua;" .. package.path
dofile(here .. "lua/check.lua") -- finds the library under plain lua5.4

local ty = require "tycho"
local template = require "template"
local reference = require "reference"
local report = require "report"
local forward = require "forward"
local gradient = require "gradient"
local errors = require "errors"
local failing = require "failing"
local threads = require "threads"
local replayed = require "replayed"
local layout = require "layout"
local wrong_calls = require "wrong_calls"
local mapped = require "mapped"
local memory = require "memory"

local options = { ops = nil }
do
  local i = 1
  while arg[i] do
    if arg[i] == "--op" then
      options.ops = options.ops or {}
      i = i + 1
      options.ops[arg[i] or ""] = true
    elseif arg[i] == "--device" then
      i = i + 1
      layout.device = arg[i] or ""
    elseif arg[i] == "--calls" or arg[i] == "--seed" or arg[i] == "--moved" then
      local name = arg[i]:sub(3)
      i = i + 1
      options[name] = math.tointeger(tonumber(arg[i] or ""))
      if not options[name] then
        io.stderr:write("--" .. name .. ": expected an integer, got " .. tostring(arg[i]) .. "\n")
        os.exit(2)
      end
    elseif arg[i] == "--part" then
      i = i + 1
      local part, parts = (arg[i] or ""):match "^(%d+)/(%d+)$"
      options.part, options.parts = math.tointeger(part), math.tointeger(parts)
      if not options.part or options.part < 1 or options.part > options.parts then
        io.stderr:write("--part: expected K/N with K from 1 to N, got " .. tostring(arg[i]) .. "\n")
        os.exit(2)
      end
    elseif arg[i] == "--partial" then report.partial = true
    elseif arg[i] == "--quick" then options.quick = true
    elseif arg[i] == "--all" then report.limit = math.huge
    elseif arg[i] == "--no-grad" then options.no_grad = true
    elseif arg[i] == "--time" then options.time = true
    elseif arg[i] == "--mapped" then options.mapped = true
    elseif arg[i] == "--trace" then report.trace = true
    else
      io.stderr:write("unknown argument " .. arg[i] .. "; see the head of tests/run_ops.lua\n")
      os.exit(2)
    end
    i = i + 1
  end
end

gradient.most = options.moved or gradient.most

for _, name in ipairs { "layout", "forward", "gradient", "errors", "failing", "threads", "replayed", "wrong_calls",
  "mapped", "memory" } do
  require(name).use(ty)
end

-- What row files are given: T{...} makes a template, T.name is a helper for reference functions.
local T = setmetatable({}, { __index = reference, __call = function(_, spec) return template.new(spec) end })

local infos, order = {}, {}
for _, info in ipairs(ty.core.ops()) do
  infos[info.name] = info
  order[#order + 1] = info.name
end

local rows = {}
local function load_rows(path)
  local ok, message = pcall(function()
    dofile(path)(function(name, row)
      if not report.check(infos[name] ~= nil, name, path, "the table of ops has no such op") then return end
      local first = rows[name]
      local once = report.check(first == nil, name, path, "a second row; the first is in %s", first and first.file)
      if not once then return end
      row.name, row.file, row.info = name, path, infos[name]
      row.fn = ty.core[name]
      row.cases = row.cases or {}
      rows[name] = row
    end, T)
  end)
  report.check(ok, path, "rows", "%s", message)
end

local listing = io.popen("ls '" .. here .. "ops'")
for file in listing:lines() do
  if file:match("%.lua$") then load_rows(here .. "ops/" .. file) end
end
listing:close()

local function run(row)
  local before = memory.live()
  if not report.check(row.fn ~= nil, row.name, "row", "ty has no function %s", row.name) then return end
  if layout.device ~= "cpu" and not ty.cuda.has_kernel(row.name, layout.device) then
    return report.without_kernel(row.name)
  end
  if options.mapped then return mapped.run(row) end
  if options.calls then return wrong_calls.run(row, options.calls_each, options.seed) end
  report.check(#row.cases > 0 or row.reason ~= nil, row.name, "row", "has no cases and no reason for that")
  for number, row_case in ipairs(row.cases) do forward.run(row, number, row_case, options) end
  errors.run(row)
  if layout.device == "cpu" then wrong_calls.run(row, options.quick and 4 or 20, options.seed) end
  if options.no_grad then return end
  gradient.run(row, options)
  failing.run(row)
  if layout.device == "cpu" and not options.quick then threads.run(row) end
  replayed.run(row)
  if not options.quick then mapped.run(row) end
  local after = memory.live(before)
  report.check(before == after, row.name, "memory", "%d bytes live after the tests, %d before", after, before)
end

for name in pairs(options.ops or {}) do
  report.check(infos[name] ~= nil, name, "--op", "the table of ops has no such op")
end

local chosen = {}
do
  local n = 0
  for _, name in ipairs(order) do
    if not options.ops or options.ops[name] then
      n = n + 1
      if not options.part or (n - options.part) % options.parts == 0 then chosen[#chosen + 1] = name end
    end
  end
end
if options.calls then options.calls_each = math.ceil(options.calls / #chosen) end

-- Every full collection goes over the rows that are there: only those that are still to be run are kept.
do
  local kept = {}
  for _, name in ipairs(chosen) do kept[name] = rows[name] end
  rows = kept
end

local clock = {}
for _, name in ipairs(chosen) do
  local row = rows[name]
  rows[name] = nil
  local started = os.clock()
  if report.check(row ~= nil, name, "row", "the op has no row in tests/ops") then run(row) end
  clock[#clock + 1] = { name, os.clock() - started }
end

if options.time then
  table.sort(clock, function(a, b) return a[2] > b[2] end)
  for i = 1, math.min(15, #clock) do print(string.format("%7.2f s  %s", clock[i][2], clock[i][1])) end
end
print(("\n%d calls with wrong arguments"):format(wrong_calls.done))
if next(mapped.covered) then print(mapped.summary()) end
os.exit(report.finish(), true)
