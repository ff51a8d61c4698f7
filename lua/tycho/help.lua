--- Documentation at the prompt: help(x), ?name, `tycho help NAME`. Ops are documented by the table of ops, everything
-- else by the comment above its definition.

local help = {}

local overview = [[
help(x) or ?x documents an op, function or class: ?softmax, ?ty.nn.Linear, help(x.relu)
help(ty) lists the ops; help(ty.nn), help(ty.optim) ... list what those hold; Tab completes.
`_` is the last value. A `local` of the outermost level stays for the next lines. :time CODE measures.
Tensors count from 0: x[0], x["0:8, :, -1"]; Lua tables count from 1.]]

--- Words in columns down the page.
local function in_columns(words)
  local widest, width = 0, require("tycho").core.system.columns(1) or 100
  for _, word in ipairs(words) do widest = math.max(widest, #word) end
  local columns = math.max(1, width // (widest + 2))
  local rows, lines = math.ceil(#words / columns), {}
  for row = 1, rows do
    local line = {}
    for i = row, #words, rows do line[#line + 1] = words[i] .. (" "):rep(widest + 2 - #words[i]) end
    lines[row] = table.concat(line):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

-- ---- ops ----

local kinds = { optional = "tensor or nil", operand = "tensor or number", tensors = "list of tensors", int = "integer",
  float = "number", bool = "boolean", ints = "integers", varints = "integers" }

local function ops()
  local list, by_name = require("tycho").core.ops(), {}
  for _, op in ipairs(list) do by_name[op.name] = op end
  return by_name, list
end

local function default_text(arg)
  local value = arg.default
  if type(value) == "table" then return "{" .. table.concat(value, ", ") .. "}" end
  if type(value) == "string" and arg.kind == "string" then return ('"%s"'):format(value) end
  if value ~= value then return "nil" end
  return tostring(value)
end

local function argument_text(arg)
  if arg.required or arg.default == nil then return arg.name end
  return arg.name .. " = " .. default_text(arg)
end

local function op_text(op)
  local parts, notes, is_method = {}, {}, op.args[1] and op.args[1].kind == "tensor"
  for i, arg in ipairs(op.args) do
    parts[i] = argument_text(arg)
    if kinds[arg.kind] and arg.kind ~= "float" then notes[#notes + 1] = arg.name .. ": " .. kinds[arg.kind] end
  end
  local lines = { ("ty.%s(%s)"):format(op.name, table.concat(parts, ", ")) }
  if is_method then
    lines[2] = ("x:%s(%s)"):format(op.name, table.concat(parts, ", ", 2))
    if op.flags.INPLACE then lines[2] = lines[2] .. (", in place x:%s_(...)"):format(op.name) end
  end
  lines[#lines + 1] = "  " .. op.doc
  if #notes > 0 then lines[#lines + 1] = "  " .. table.concat(notes, "; ") end
  lines[#lines + 1] = op.differentiable == false and "  Not differentiable." or nil
  lines[#lines + 1] = op.flags.AUTO_HALF and "  Under ty.autocast it computes in that dtype." or nil
  lines[#lines + 1] = op.flags.AUTO_FULL and "  Under ty.autocast it computes in f32." or nil
  return table.concat(lines, "\n")
end

-- ---- functions and classes written in Lua ----

local function lines_of(path)
  local file, lines = io.open(path), {}
  if file then
    for line in file:lines() do lines[#lines + 1] = line end
    file:close()
  end
  return lines
end

-- The comment above line `number`, without its dashes, or nil.
local function comment_above(lines, number)
  local first = number
  while first > 1 and lines[first - 1]:find("^%s*%-%-") do first = first - 1 end
  if first == number then return nil end
  local comment = {}
  for i = first, number - 1 do comment[#comment + 1] = lines[i]:match("^%s*%-%-%-?%s?(.*)$") end
  return comment
end

-- Where a file defines `name`, and the comment above that.
local function find_definition(path, name)
  local lines = lines_of(path)
  for number, line in ipairs(lines) do
    local defined = line:match("^%s*local%s+([%w_]+)%s*=") or line:match("^%s*local%s+function%s+([%w_]+)")
      or line:match("^%s*function%s+[%w_%.]-:?([%w_]+)%s*%(") or line:match("^%s*[%w_%.]-([%w_]+)%s*=[^=]")
    if defined == name then
      local comment = comment_above(lines, number)
      if comment then return comment, path, number end
    end
  end
end

-- The comment of a function: above its definition, or where `name` is defined with a comment in its file, in the files
-- beside that, or among the declarations of native functions.
local function comment_of(f, name)
  local info = debug.getinfo(f, "S")
  local path = info.source:match("^@(.+)$")
  local short = name and name:match("([%w_]+)$")
  if path then
    local comment = comment_above(lines_of(path), info.linedefined)
    if comment then return comment, path, info.linedefined end
  end
  if not short then return nil end
  local folder = path and path:match("^(.*/)") or nil
  local comment, where, number
  if path then comment, where, number = find_definition(path, short) end
  local inside, program = pcall(require, "tycho.program")
  for _, file in ipairs(not comment and folder and inside and program.list(folder) or {}) do
    if file:find("%.lua$") and not comment then comment, where, number = find_definition(folder .. file, short) end
  end
  for _, part in ipairs(path and {} or { "core", "io", "tokenizer" }) do
    local natives = not comment and package.searchpath("tycho.meta." .. part, package.path)
    if natives then comment, where, number = find_definition(natives, short) end
  end
  return comment, where, number
end

-- LuaLS tags as plain text: "@param x Tensor the input" becomes "x: Tensor the input".
local function readable_line(text)
  local name, rest = text:match("^@param%s+(%S+)%s*(.*)$")
  if not name then name, rest = text:match("^@field%s+(%S+)%s*(.*)$") end
  if name then return name .. ": " .. rest end
  rest = text:match("^@return%s+(.*)$")
  if rest then return "returns " .. rest end
  if text:find("^@") then return nil end
  return text
end

-- How it is called, from "@overload fun(...)" or the line of the definition.
local function signature(comment, path, number, name)
  for _, text in ipairs(comment) do
    local arguments = text:match("^@overload%s+fun(%b())") or text:match("^@type%s+fun(%b())")
    if arguments then return name .. arguments end
  end
  local arguments = (lines_of(path)[number] or ""):match("function[%s%w_%.:]*(%b())")
  return name .. (arguments or "")
end

local function function_text(f, name)
  local comment, path, number = comment_of(f, name)
  if not comment then
    local info = debug.getinfo(f, "S")
    local where = info.what == "C" and "a native function" or ("%s:%d"):format(info.short_src, info.linedefined)
    return ("%s: no documentation (%s)"):format(name or "function", where)
  end
  local lines = { signature(comment, path, number, name or "function") }
  for _, text in ipairs(comment) do
    local line = readable_line(text)
    if line then lines[#lines + 1] = "  " .. line end
  end
  lines[#lines + 1] = ("  (%s:%d)"):format(path, number)
  return table.concat(lines, "\n")
end

local function names_of(t)
  local names = {}
  for key in next, t do
    if type(key) == "string" and not key:find("^_") then names[#names + 1] = key end
  end
  local meta = getmetatable(t)
  for _, key in ipairs(type(meta) == "table" and meta.__names or {}) do names[#names + 1] = key end
  table.sort(names)
  return names
end

local function table_text(t, name)
  local ty = require "tycho"
  if t == ty then
    local list = {}
    for _, op in ipairs(select(2, ops())) do
      if not op.flags.INTERNAL then list[#list + 1] = op.name end
    end
    table.sort(list)
    return ("Ops (%d), ty.NAME(x, ...) or x:NAME(...):\n%s\n\nAlso in ty: %s"):format(#list, in_columns(list),
      table.concat(help.other_names(ty), ", "))
  end
  local class = rawget(t, "init") or rawget(t, "forward")
  local meta = getmetatable(t)
  if type(class) == "function" then return function_text(class, name or rawget(t, "__name")) end
  if type(meta) == "table" and type(meta.__call) == "function" and #names_of(t) == 0 then
    return function_text(meta.__call, name)
  end
  return (name or "table") .. " holds:\n" .. in_columns(names_of(t))
end

--- What the table of Tycho holds besides ops.
function help.other_names(ty)
  local by_name, list = ops(), {}
  for _, name in ipairs(names_of(ty)) do
    if not by_name[name] and not by_name[name:gsub("_$", "")] then list[#list + 1] = name end
  end
  return list
end

-- ---- looking up ----

-- The op whose function this is.
local function op_of(f)
  local ty = require "tycho"
  local methods = ty.core.Tensor.methods
  for name, op in pairs(ops()) do
    if ty[name] == f or methods[name] == f or methods[name .. "_"] == f then return op end
  end
end

local function nearby(name)
  local found, wanted = {}, name:lower():gsub("%p", "")
  for _, op in ipairs(select(2, ops())) do
    local plain = op.name:gsub("_", "")
    local close = plain:find(wanted, 1, true) or wanted:find(plain, 1, true) and #plain > 3
    if not op.flags.INTERNAL and (close or op.doc:lower():find(name:lower(), 1, true)) then
      found[#found + 1] = ("  %-20s %s"):format(op.name, op.doc)
    end
  end
  if #found == 0 then return ("nothing is known of '%s'; help(ty) lists the ops"):format(name) end
  table.sort(found)
  return ("nothing is named '%s'; near it:\n%s"):format(name, table.concat(found, "\n", 1, math.min(#found, 20)))
end

-- The value of "nn.Linear", "ty.nn.Linear" or "table.concat".
local function value_of(name)
  for _, root in ipairs { require "tycho", _G } do
    local value = root
    for part in name:gsub("^ty%.", ""):gmatch("[^%.:]+") do
      local ok, member = pcall(function(t) return t[part] end, value)
      value = ok and member or nil
      if value == nil then break end
    end
    if value ~= nil then return value end
  end
  return require("tycho").core.Tensor.methods[name:match("[%.:]([%w_]+)$")]
end

--- The documentation of a value, or of what a string names.
---@param what any a function, table or value; a string is a name: "softmax", "x:softmax", "nn.Linear"
---@param name? string how the user called it
---@return string
function help.text(what, name)
  if what == nil then return overview end
  if type(what) == "string" then
    local by_name = ops()
    local short = what:match("([%w_]+)%s*$") or what
    local op = by_name[short] or by_name[(short:gsub("_$", ""))]
    if op and (what == short or what:find("^ty%.[%w_]+$") or what:find(":")) then return op_text(op) end
    local value = value_of(what)
    if value == nil or type(value) == "string" then return nearby(what) end
    return help.text(value, what)
  end
  if type(what) == "function" then
    local op = op_of(what)
    return op and op_text(op) or function_text(what, name)
  end
  if type(what) == "table" then return table_text(what, name) end
  return ("%s: %s"):format(name or type(what), require("tycho.inspect").show(what))
end

--- `tycho help NAME`.
function help.command(words)
  for _, word in ipairs(words) do print(help.text(word)) end
  return 0
end

return help
