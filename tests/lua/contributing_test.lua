-- CONTRIBUTING.md says what is there: the files that it names exist, and the code that it shows stands in the file that
-- is named above it. What its example adds has the form of what stands beside it.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local exists = require("tycho").io.exists

local function read(path)
  local file <close> = io.open(check.root .. path)
  return file and file:read("a")
end

local text = read "CONTRIBUTING.md"
if not text then -- a bundle
  check.finish()
  return
end

-- Text without white space, comments of C and the ends of lines of macros, as layout is nobody's promise.
local function bare(code) return (code:gsub("/%*.-%*/", ""):gsub("\\\n", ""):gsub("%s+", "")) end

-- Blocks of indented code, each with the paragraphs before it.
local function blocks()
  local list, before, code = {}, "", nil
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    local indented = line:match("^    +(.*)$")
    if indented and (code or before:find("\n%s*\n$")) then
      code = (code or "") .. indented .. "\n"
    elseif code and line:find("^%s*$") then
      code = code .. "\n"
    else
      if code then
        list[#list + 1] = { before = before, code = code }
        before, code = "", nil
      end
      before = before .. line .. "\n"
    end
  end
  return list
end

-- Whether `file` has the pieces of `code` between its "..." one after another.
local function stands_in(code, file)
  local at = 1
  for piece in (bare(code) .. "..."):gmatch("(.-)%.%.%.") do
    local _, stop = file:find(piece, at, true)
    if not stop then return false, piece end
    at = stop + 1
  end
  return true
end

check.test("files exist", function()
  local count = 0
  for path in text:gmatch "`([%w_./%-]+/[%w_.%-]+)`" do
    local known = path:find("^build/") or path:find("^recipes/%u") or path:find("%u%u%u")
      or path:find("^/") or path:find("^bin/")
    local name = path:gsub("/$", "")
    if not known then
      count = count + 1
      check.ok(exists(check.root .. name), path .. " exists")
    end
  end
  check.ok(count > 15, "there are files to look for: " .. count)
end)

check.test("the code of cumsum is what the files have", function()
  local found = 0
  for _, block in ipairs(blocks()) do
    local path = block.before:match "`(src/[%w_/.]+)`[^`]*$" or block.before:match "`(kernels/[%w_/.]+)`[^`]*$"
    for _, named in ipairs { "src/ops/ops.def", "src/ops/scan_sort.c", "kernels/cpu/recurrence/scan.c",
      "src/program/params.c", "src/ops/vmap.def" } do
      if block.code:find("cumsum", 1, true) and not block.code:find("CUDA", 1, true)
        and block.before:find("`" .. named .. "`", 1, true) then path = named end
    end
    if path and block.code:find("cumsum", 1, true) and not block.code:find("CUDA", 1, true) then
      found = found + 1
      local ok, piece = stands_in(block.code, bare(read(path)))
      check.ok(ok, ("%s has this no more: %s"):format(path, piece))
    end
  end
  check.equal(found, 5, "row, shape rule and gradient, kernel, parameters, rule of ty.vmap")
end)

check.test("the example op has the form of others", function()
  local def = bare(read "src/ops/ops.def")
  local row = assert(text:match "(OP%(softsign,.-%))\n")
  local parts = bare(row):gsub("softsign", "silu"):match "^(.-),\"" -- up to the documentation
  check.ok(def:find(parts, 1, true), "silu has the row of softsign: " .. parts)
  check.ok(text:find("UNARY_FLOAT(softsign,", 1, true)
    and read("kernels/elementwise.def"):find("UNARY_FLOAT(mish,", 1, true))
  check.ok(text:find("RULE(softsign,", 1, true)
    and read("src/ops/elementwise_backward.c"):find("RULE(log_sigmoid,", 1, true))
  local reference = assert(text:match "unary%(%\"softsign%\", (.-), {")
  local f = assert(load("return " .. reference))()
  check.close({ f(0), f(1), f(-3) }, { 0, 0.5, -0.75 }, 1e-15)
  check.ok(read("tests/ops/elementwise.lua"):find('unary%("%w+", function%(x%)'), "rows of tests look like this")
end)

check.finish()
