--- Values as the prompt shows them: short, never more than a screen, tables one level deep or two.

local columns = require "tycho.columns"
local names = require "tycho.names"

local inspect = {}

local limits = { entries = 24, depth = 2, text = 400 }
local keywords = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true "
    .. "until while"):gmatch("%a+") do
  keywords[word] = true
end

--- Whether a string can stand as a field name after a dot.
function inspect.is_name(text) return text:find("^[%a_][%w_]*$") ~= nil and not keywords[text] end

local escapes = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\\"] = "\\\\", ['"'] = '\\"' }

local function show_string(text)
  local rest = ""
  if #text > limits.text then
    rest = (" ... (%d bytes)"):format(#text)
    text = text:sub(1, utf8.offset(text, 0, limits.text) - 1)
  end
  text = text:gsub('[%c\\"]', function(c) return escapes[c] or ("\\x%02x"):format(c:byte()) end)
  return '"' .. text .. '"' .. rest
end

local function show_function(f)
  local info = debug.getinfo(f, "Su")
  if info.what == "C" then return "function (native)" end
  local arguments = {}
  for i = 1, info.nparams do arguments[i] = debug.getlocal(f, i) end
  if info.isvararg then arguments[#arguments + 1] = "..." end
  return ("function(%s) %s:%d"):format(table.concat(arguments, ", "), info.short_src, info.linedefined)
end

local class_order = { number = 1, string = 2 }

local function before(a, b)
  local ka, kb = class_order[type(a)] or 3, class_order[type(b)] or 3
  if ka ~= kb then return ka < kb end
  if ka == 3 then return tostring(a) < tostring(b) end
  return a < b
end

local function is_callable(value) return type(value) == "function" or names.is_class(value) end

-- A table that has functions by name.
local function is_part(value)
  if type(value) ~= "table" then return false end
  local callable = false
  for key, entry in next, value do
    if type(key) ~= "string" then return false end
    callable = callable or is_callable(entry)
  end
  return callable
end

-- A table of functions, classes and parts with such: a module, a part of one, the methods of a class.
local function is_library(t)
  local callable, parts, count, meta = 0, 0, 0, debug.getmetatable(t)
  if type(meta) == "table" and meta.__names then return true end
  for key, value in next, t do
    if type(key) ~= "string" then return false end
    count = count + 1
    if is_callable(value) then callable = callable + 1 elseif is_part(value) then parts = parts + 1 end
  end
  return callable > 4 and callable + parts > count / 2
end

local titles = { "classes", "functions", "parts", "values" }

-- What such a table holds, its names by kind. Of ops there are too many: they have help(ty).
local function show_library(t)
  local kinds, lines = names.by_kind(t), {}
  local ty = package.loaded["tycho"]
  if t == ty then
    local ops, others = {}, {}
    for _, op in ipairs(ty.core.ops()) do ops[op.name], ops[op.name .. "_"] = true, true end
    for _, name in ipairs(kinds.functions) do
      if not ops[name] then others[#others + 1] = name end
    end
    lines[1] = ("%d ops, which help(ty) lists"):format(#kinds.functions - #others)
    kinds.functions = others
  end
  for _, kind in ipairs(titles) do
    if #kinds[kind] > 0 then lines[#lines + 1] = kind .. ":\n" .. columns.down(kinds[kind], "  ") end
  end
  return table.concat(lines, "\n")
end

-- A class: its name, and its methods when it is looked at by itself.
local function show_class(class, alone)
  local text = "class " .. tostring(rawget(class, "__name") or "without a name")
  local kinds, methods = names.by_kind(class), {}
  for _, name in ipairs(kinds.functions) do
    if name ~= "init" then methods[#methods + 1] = name end
  end
  if not alone or #methods == 0 then return text end
  return text .. ", methods:\n" .. columns.down(methods, "  ")
end

local show

local function show_table(t, depth, seen)
  if seen[t] then return "{...}" end
  if next(t) == nil then return "{}" end
  if depth == 0 then return "{...}" end
  seen[t] = true
  local parts, length = {}, #t
  for i = 1, math.min(length, limits.entries) do parts[i] = show(rawget(t, i), depth - 1, seen) end
  local keys, rest = {}, math.max(0, length - limits.entries)
  for key in next, t do
    if not (math.type(key) == "integer" and key >= 1 and key <= length) then keys[#keys + 1] = key end
  end
  table.sort(keys, before)
  for i, key in ipairs(keys) do
    if #parts >= limits.entries then
      rest = rest + #keys - i + 1
      break
    end
    local left = type(key) == "string" and inspect.is_name(key) and key or "[" .. show(key, 0, seen) .. "]"
    parts[#parts + 1] = left .. " = " .. show(rawget(t, key), depth - 1, seen)
  end
  if rest > 0 then parts[#parts + 1] = ("... %d more"):format(rest) end
  seen[t] = nil
  local line = "{" .. table.concat(parts, ", ") .. "}"
  if depth == limits.depth and (#line > 100 or line:find("\n")) then
    return "{\n  " .. table.concat(parts, ",\n  "):gsub("\n([^ ])", "\n  %1") .. "\n}"
  end
  return line
end

show = function(value, depth, seen)
  local kind = type(value)
  if kind == "string" then return show_string(value) end
  local meta = debug.getmetatable(value)
  if kind ~= "number" and type(meta) == "table" and (meta.__tostring or meta.__name) then
    local text = tostring(value)
    if depth < limits.depth and text:find("\n") then text = text:match("^[^\n]*") .. " ..." end
    return text
  end
  if kind == "table" then
    if rawget(value, "__index") == value then return show_class(value, depth == limits.depth) end
    if is_library(value) then
      if depth == limits.depth then return show_library(value) end
      return ("{%d functions and classes}"):format(#names.keys(value))
    end
    return show_table(value, depth, seen)
  end
  if kind == "function" then return show_function(value) end
  return tostring(value)
end

--- Text for any value.
function inspect.show(value) return show(value, limits.depth, {}) end

return inspect
