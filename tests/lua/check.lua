-- A small test library for the tests of this folder.
--
--   local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
--   check.test("what it shows", function()
--     check.equal(1 + 1, 2, "a sum")
--     check.close({ 0.1 + 0.2 }, { 0.3 }, 1e-12)
--     check.fails(function() error("no such thing") end, "no such")
--   end)
--   check.finish()
--
-- A failed check is noted and the test goes on; an error ends its test only. Every check counts.

local check = { passed = 0, failed = 0, failures = {} }

-- Under plain lua5.4 the library is looked for beside this file: lua/ of the project and build/lib (or
-- $TYCHO_BUILD/lib).
do
  local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
  local root = here .. "../../"
  if not package.searchpath("tycho", package.path) then
    package.path = root .. "lua/?.lua;" .. root .. "lua/?/init.lua;" .. package.path
  end
  if not package.searchpath("tycho.core", package.cpath) then
    package.cpath = (os.getenv("TYCHO_BUILD") or root .. "build") .. "/lib/?.so;" .. package.cpath
  end
  check.root = root
end

local current = "(outside of a test)"

-- Where the test called us: the first stack level that is not in this file.
local function position()
  local this = debug.getinfo(1, "S").source
  for level = 2, 20 do
    local info = debug.getinfo(level, "Sl")
    if not info then break end
    if info.source ~= this and info.currentline > 0 then return info.short_src .. ":" .. info.currentline end
  end
  return "?"
end

local function show(v, depth)
  depth = depth or 0
  if type(v) == "string" then return string.format("%q", v) end
  if math.type(v) == "float" then return string.format("%.17g", v) end
  if type(v) ~= "table" or getmetatable(v) then return tostring(v) end
  if depth > 4 then return "{...}" end
  local parts, n = {}, #v
  for i = 1, math.min(n, 12) do parts[#parts + 1] = show(v[i], depth + 1) end
  if n > 12 then parts[#parts + 1] = "... " .. n .. " in all" end
  for k, x in pairs(v) do
    if not (math.type(k) == "integer" and k >= 1 and k <= n) then
      parts[#parts + 1] = tostring(k) .. " = " .. show(x, depth + 1)
    end
  end
  return "{" .. table.concat(parts, ", ") .. "}"
end

local function note(ok, what, detail)
  if ok then
    check.passed = check.passed + 1
    return true
  end
  check.failed = check.failed + 1
  local label = what and what .. ": " or ""
  check.failures[#check.failures + 1] = string.format("%s: %s: %s%s", position(), current, label, detail)
  return false
end

local function same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" or getmetatable(a) or getmetatable(b) then
    return a == b or (a ~= a and b ~= b)
  end
  for k, v in pairs(a) do
    if not same(v, b[k]) then return false end
  end
  for k in pairs(b) do
    if a[k] == nil then return false end
  end
  return true
end

-- Largest excess of |a - b| over tol * max(1, |b|) in nested tables; an error text when the structures differ.
local function distance(a, b, tol, path)
  if type(b) == "table" then
    if type(a) ~= "table" then return nil, path .. " is " .. show(a) .. ", not a table" end
    if #a ~= #b then return nil, path .. " has " .. #a .. " entries, not " .. #b end
    local worst, where = 0, path
    for i = 1, #b do
      local d, w = distance(a[i], b[i], tol, path .. "[" .. i .. "]")
      if not d then return nil, w end
      if d > worst then worst, where = d, w end
    end
    return worst, where
  end
  if type(a) ~= "number" or type(b) ~= "number" then
    if a == b then return 0, path end
    return nil, path .. " is " .. show(a) .. ", expected " .. show(b)
  end
  if a == b or (a ~= a and b ~= b) then return 0, path end
  local d = math.abs(a - b) / math.max(1, math.abs(b))
  if d ~= d then d = math.huge end
  return d, d > tol and string.format("%s is %.12g, expected %.12g", path, a, b) or path
end

--- Runs `fn` as a test of that name; an error in it counts as one failure.
function check.test(name, fn)
  local before = current
  current = name
  local ok, message = xpcall(fn, debug.traceback)
  if not ok then
    check.failed = check.failed + 1
    check.failures[#check.failures + 1] = name .. ": " .. tostring(message)
  end
  current = before
  collectgarbage()
end

--- That a and b are equal; tables by contents, NaN equals NaN.
function check.equal(a, b, what)
  return note(same(a, b), what, "got " .. show(a) .. ", expected " .. show(b))
end

--- That numbers, or nested tables of numbers, differ by at most tol * max(1, |b|).
function check.close(a, b, tol, what)
  local d, where = distance(a, b, tol or 1e-6, "value")
  tol = tol or 1e-6
  return note(d and d <= tol, what, d and string.format("%s (off by %.3g, allowed %.3g)", where, d, tol) or where)
end

--- That a condition holds.
function check.ok(condition, what)
  return note(condition, what or "condition", "does not hold")
end

--- That the gradient which loss():backward() left in p, f64, is that of central differences, at some positions of it
--- (a list, from 1). loss: a function that gives a tensor of one element.
function check.gradient(loss, p, positions, tol)
  local ty = require "tycho"
  local grads, flat, h = p.grad:flatten():tolist(), p:detach():flatten(), 1e-5
  for _, k in ipairs(positions) do
    local function moved(by)
      return ty.no_grad(function()
        flat:narrow(0, k - 1, 1):add_(by)
        local value = loss():item()
        flat:narrow(0, k - 1, 1):add_(-by)
        return value
      end)
    end
    check.close(grads[k], (moved(h) - moved(-h)) / (2 * h), tol or 1e-6)
  end
end

--- That fn raises an error whose text matches `pattern` (a Lua pattern, or plain text contained in it). Returns the
--- text.
function check.fails(fn, pattern, what)
  local ok, message = pcall(fn)
  if ok then
    note(false, what, "no error was raised" .. (pattern and " (expected " .. show(pattern) .. ")" or ""))
    return ""
  end
  message = tostring(message)
  local fits = not pattern or message:find(pattern, 1, true)
  if not fits then
    local valid, found = pcall(string.find, message, pattern)
    fits = valid and found
  end
  note(fits, what, "error is " .. show(message) .. ", expected " .. show(pattern))
  return message
end

--- Prints the failures and the closing line, and ends the program: status 1 when a check failed.
function check.finish()
  for _, text in ipairs(check.failures) do print("FAIL " .. text) end
  print(string.format("%d passed, %d failed", check.passed, check.failed))
  io.stdout:flush()
  os.exit(check.failed == 0 and 0 or 1, true)
end

return check
