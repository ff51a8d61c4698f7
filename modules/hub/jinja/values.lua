--- The values of chat templates and what can be done with them: Python's truth, texts, lists and dictionaries as far as
-- published templates use them. Lists are Lua lists, counted from 0 in templates; nil is undefined, M.none is None.
local ty = require "tycho"
local budget = require "tycho.hub.jinja.budget"

local M = {}
local DEPTH_MOST = 64

M.none = setmetatable({}, { __tostring = function() return "None" end })

-- Results that are lists even when they are empty.
local List = {}
function M.list(t) return setmetatable(t, List) end

function M.is_none(v) return v == M.none or v == ty.io.null end
-- An empty table of a script is a dictionary; an empty list of a JSON file is marked as one.
function M.is_list(v)
  return type(v) == "table" and not M.is_none(v) and (#v > 0 or getmetatable(v) == List
    or next(v) == nil and getmetatable(v) ~= nil)
end
function M.is_map(v) return type(v) == "table" and not M.is_none(v) and not M.is_list(v) end

function M.truth(v)
  if v == nil or v == false or v == "" or v == 0 or M.is_none(v) then return false end
  return type(v) ~= "table" or next(v) ~= nil
end

local function sorted_keys(map)
  local keys = {}
  for key in pairs(map) do keys[#keys + 1] = key end
  budget.list(#keys)
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  return keys
end

local function number_text(v)
  if math.type(v) == "integer" then return tostring(v) end
  local text = ("%.17g"):format(v)
  for digits = 1, 16 do
    local shorter = ("%." .. digits .. "g"):format(v)
    if tonumber(shorter) == v then
      text = shorter
      break
    end
  end
  return text:find "[%.en]" and text or text .. ".0"
end

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\b"] = "\\b",
  ["\f"] = "\\f" }

local function quote(text)
  budget.text(#text + 2)
  return '"' .. text:gsub('[%c"\\]', function(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end) .. '"'
end

--- table.concat() and string.rep(), counted before they are made.
function M.concat(parts, separator)
  separator = separator or ""
  local size = #separator * math.max(#parts - 1, 0)
  for _, part in ipairs(parts) do size = size + #part end
  budget.text(size)
  return table.concat(parts, separator)
end

function M.rep(text, count)
  if count <= 0 or text == "" then return "" end
  budget.text(#text * (count + 0.0)) -- a float does not overflow
  return text:rep(count)
end

--- JSON as Python writes it. Keys of dictionaries come in order, because Lua's tables have none of their own.
function M.json(v, indent, depth)
  depth = depth or 0
  budget.step()
  if depth > DEPTH_MOST then error("tojson: values are nested too deep", 0) end
  if type(v) == "string" then return quote(v) end
  if type(v) == "number" then return number_text(v) end
  if type(v) == "boolean" then return tostring(v) end
  if v == nil or M.is_none(v) then return "null" end
  local parts, list = {}, M.is_list(v)
  if list then
    for i, item in ipairs(v) do parts[i] = M.json(item, indent, depth + 1) end
  else
    for i, key in ipairs(sorted_keys(v)) do
      parts[i] = quote(tostring(key)) .. ": " .. M.json(v[key], indent, depth + 1)
    end
  end
  local open, close = list and "[" or "{", list and "]" or "}"
  if #parts == 0 then return open .. close end
  if not indent then return open .. M.concat(parts, ", ") .. close end
  local pad = "\n" .. M.rep(" ", indent * (depth + 1))
  return open .. pad .. M.concat(parts, "," .. pad) .. "\n" .. M.rep(" ", indent * depth) .. close
end

--- As {{ v }} prints it.
function M.text(v)
  if v == nil then return "" end
  if type(v) == "string" then return v end
  if v == true then return "True" end
  if v == false then return "False" end
  if type(v) == "number" then return number_text(v) end
  if M.is_none(v) then return "None" end
  if type(v) == "table" then
    local text = M.json(v)
    budget.text(#text)
    return (text:gsub('"', "'"))
  end
  return tostring(v)
end

local function length(v)
  budget.step(type(v) == "string" and #v or 0)
  if type(v) == "string" then return utf8.len(v) or #v end
  if type(v) ~= "table" then return 0 end
  local count = 0
  for _ in pairs(v) do count = count + 1 end
  budget.step(count)
  return count
end

--- What a loop goes over: the items of a list, the keys of a dictionary, the characters of a text.
function M.items(v)
  if M.is_list(v) then return v end
  if M.is_map(v) then return M.list(sorted_keys(v)) end
  if type(v) == "string" then
    budget.list(#v)
    local result = M.list {}
    for c in v:gmatch(utf8.len(v) and utf8.charpattern or ".") do result[#result + 1] = c end
    return result
  end
  return M.list {}
end

-- Characters first to last of a text, counted from 1 and cut to what there is.
local function characters(text, first, last)
  budget.step(#text)
  if not utf8.len(text) then return text:sub(first, last) end
  local from = utf8.offset(text, first)
  local to = from and utf8.offset(text, last - first + 2, from)
  local part = from and text:sub(from, (to or #text + 1) - 1) or ""
  budget.text(#part)
  return part
end

--- Element or attribute `key` of v.
function M.index(v, key)
  budget.step()
  if math.type(key) == "integer" and type(v) == "string" then
    local n = length(v)
    local at = key < 0 and n + key or key
    if at < 0 or at >= n then return nil end
    return characters(v, at + 1, at + 1)
  end
  if math.type(key) == "integer" and M.is_list(v) then
    return v[key < 0 and #v + key + 1 or key + 1]
  end
  if type(v) == "table" and not M.is_none(v) then return v[key] end
  return nil
end

--- v[first:last:step].
function M.slice(v, first, last, step)
  step = step or 1
  for _, part in ipairs { first or 0, last or 0, step } do
    if math.type(part) ~= "integer" then error("a slice goes by integers", 0) end
  end
  if step == 0 then error("a slice with step 0", 0) end
  local plain = type(v) == "string" and step == 1
  local items = plain and {} or M.items(v)
  local n = plain and length(v) or #items
  local function clip(at, otherwise)
    if at == nil then return otherwise end
    if at < 0 then at = at + n end
    if step > 0 then return math.max(0, math.min(at, n)) end
    return math.max(-1, math.min(at, n - 1))
  end
  first = clip(first, step > 0 and 0 or n - 1)
  last = clip(last, step > 0 and n or -1)
  if plain then return first < last and characters(v, first + 1, last) or "" end
  local result = M.list {}
  budget.list(n)
  for i = first, last - (step > 0 and 1 or -1), step do result[#result + 1] = items[i + 1] end
  return type(v) == "string" and M.concat(result) or result
end

local function find_set(chars)
  local set = {}
  for c in (chars or " \t\n\r\v\f"):gmatch "." do set[c] = true end
  return set
end

local function strip(text, chars, left, right)
  budget.text(#text)
  local set, a, b = find_set(chars), 1, #text
  while left and a <= b and set[text:sub(a, a)] do a = a + 1 end
  while right and b >= a and set[text:sub(b, b)] do b = b - 1 end
  return text:sub(a, b)
end

local function split(text, separator, most)
  local result = M.list {}
  budget.text(#text)
  if separator == nil or M.is_none(separator) then
    for word in text:gmatch "%S+" do
      budget.list(1)
      result[#result + 1] = word
    end
    return result
  end
  if separator == "" then error("split: an empty separator", 0) end
  local at = 1
  while true do
    local from, to = text:find(separator, at, true)
    if not from or (most and most >= 0 and #result >= most) then break end
    budget.list(1)
    result[#result + 1] = text:sub(at, from - 1)
    at = to + 1
  end
  result[#result + 1] = text:sub(at)
  return result
end

local function replace(text, old, new, count)
  local parts = split(text, old, count)
  return M.concat(parts, new)
end

-- Functions of a text to one of the same size.
local function same_size(fn)
  return function(text)
    budget.text(#text)
    return fn(text)
  end
end
local upper, lower = same_size(string.upper), same_size(string.lower)
local capitalize = same_size(function(text) return text:sub(1, 1):upper() .. text:sub(2):lower() end)
local title = same_size(function(text)
  return (text:gsub("(%a)(%w*)", function(a, b) return a:upper() .. b:lower() end))
end)

local function starts(text, with)
  for _, one in ipairs(type(with) == "table" and with or { with }) do
    if text:sub(1, #one) == one then return true end
  end
  return false
end

local function ends(text, with)
  for _, one in ipairs(type(with) == "table" and with or { with }) do
    if one == "" or text:sub(-#one) == one then return true end
  end
  return false
end

local function pairs_of(map)
  local result = M.list {}
  for i, key in ipairs(M.is_list(map) and {} or sorted_keys(map)) do
    budget.list(2)
    result[i] = M.list { key, map[key] }
  end
  return result
end

--- Methods of texts.
M.text_methods = {
  strip = function(s, chars) return strip(s, chars, true, true) end,
  lstrip = function(s, chars) return strip(s, chars, true, false) end,
  rstrip = function(s, chars) return strip(s, chars, false, true) end,
  split = split, replace = replace, startswith = starts, endswith = ends, title = title, capitalize = capitalize,
  upper = upper, lower = lower,
  find = function(s, what)
    budget.step(#s)
    return (s:find(what, 1, true) or 0) - 1
  end,
  join = function(s, list)
    local parts = {}
    for i, item in ipairs(M.items(list)) do parts[i] = M.text(item) end
    budget.list(#parts)
    return M.concat(parts, s)
  end,
}

--- Methods of dictionaries.
M.map_methods = {
  items = pairs_of,
  keys = function(map) return M.list(M.is_list(map) and {} or sorted_keys(map)) end,
  values = function(map)
    local result = M.list {}
    for i, pair in ipairs(pairs_of(map)) do result[i] = pair[2] end
    return result
  end,
  get = function(map, key, otherwise)
    if map[key] ~= nil then return map[key] end
    return otherwise == nil and M.none or otherwise
  end,
}

local function equal(a, b, depth)
  depth = (depth or 0) + 1
  budget.step()
  if depth > DEPTH_MOST then error("values are nested too deep to be compared", 0) end
  if M.is_none(a) and M.is_none(b) then return true end
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for key, value in pairs(a) do if not equal(value, b[key], depth) then return false end end
  for key in pairs(b) do if a[key] == nil then return false end end
  return true
end
function M.equal(a, b) return equal(a, b) end

--- Whether v is in a text, a list or the keys of a dictionary.
function M.contains(container, v)
  budget.step(type(container) == "string" and #container or 0)
  if type(container) == "string" then return type(v) == "string" and container:find(v, 1, true) ~= nil end
  if M.is_map(container) then return container[v] ~= nil end
  for _, item in ipairs(M.items(container)) do if equal(item, v) then return true end end
  return false
end

--- Tests: `x is name`.
M.tests = {
  defined = function(v) return v ~= nil end,
  undefined = function(v) return v == nil end,
  none = function(v) return M.is_none(v) end,
  string = function(v) return type(v) == "string" end,
  number = function(v) return type(v) == "number" end,
  integer = function(v) return math.type(v) == "integer" end,
  float = function(v) return math.type(v) == "float" end,
  boolean = function(v) return type(v) == "boolean" end,
  ["true"] = function(v) return v == true end,
  ["false"] = function(v) return v == false end,
  mapping = function(v) return M.is_map(v) end,
  sequence = function(v) return type(v) == "string" or M.is_list(v) or M.is_map(v) end,
  iterable = function(v) return type(v) == "string" or M.is_list(v) or M.is_map(v) end,
  even = function(v) return v % 2 == 0 end,
  odd = function(v) return v % 2 == 1 end,
  equalto = M.equal, eq = M.equal,
  ne = function(a, b) return not equal(a, b) end,
  ["in"] = function(a, b) return M.contains(b, a) end,
}

local function selected(list, name, arguments, wanted, of)
  local result = M.list {}
  local test = name == nil and M.truth or M.tests[name] or error("no test '" .. tostring(name) .. "'", 0)
  for _, item in ipairs(M.items(list)) do
    budget.list(1)
    if M.truth(test(of(item), table.unpack(arguments))) == wanted then result[#result + 1] = item end
  end
  return result
end

local function itself(v) return v end

--- Filters: `x | name(...)`. Named arguments come in a table at the end.
M.filters = {
  trim = function(v, chars) return strip(M.text(v), chars, true, true) end,
  length = length, count = length, string = M.text, safe = itself,
  upper = function(v) return upper(M.text(v)) end,
  lower = function(v) return lower(M.text(v)) end,
  title = function(v) return title(M.text(v)) end,
  capitalize = function(v) return capitalize(M.text(v)) end,
  list = function(v) return M.slice(M.items(v)) end,
  items = pairs_of,
  dictsort = pairs_of,
  first = function(v) return M.items(v)[1] end,
  last = function(v)
    local items = M.items(v)
    return items[#items]
  end,
  reverse = function(v) return M.slice(v, nil, nil, -1) end,
  replace = function(v, old, new) return replace(M.text(v), old, new) end,
  abs = math.abs,
  int = function(v) return math.tointeger(tonumber(v)) or math.tointeger((tonumber(v) or 0) // 1) or 0 end,
  float = function(v) return (tonumber(v) or 0) + 0.0 end,
  join = function(v, separator, options)
    local parts, attribute = {}, options and options.attribute
    for i, item in ipairs(M.items(v)) do parts[i] = M.text(attribute and M.index(item, attribute) or item) end
    budget.list(#parts)
    return M.concat(parts, separator ~= nil and M.text(separator) or "")
  end,
  default = function(v, otherwise, always)
    if type(always) == "table" then always = always.boolean end
    if v == nil or (always and not M.truth(v)) then return otherwise end
    return v
  end,
  tojson = function(v, indent)
    if type(indent) == "table" then indent = indent.indent end
    return M.json(v, math.type(indent) == "integer" and indent or nil)
  end,
  indent = function(v, width, first)
    if type(width) == "table" then width, first = width.width, width.first end
    if width ~= nil and math.type(width) ~= "integer" then error("indent: expected a whole number of spaces", 0) end
    local pad, text = M.rep(" ", width or 4), M.text(v)
    budget.step(#text)
    local lines = select(2, text:gsub("\n[^\n]", "%0")) + 1
    budget.text(#text + lines * (#pad + 0.0))
    return (first == true and pad or "") .. text:gsub("\n([^\n])", "\n" .. pad .. "%1")
  end,
  select = function(v, name, ...) return selected(v, name, { ... }, true, itself) end,
  reject = function(v, name, ...) return selected(v, name, { ... }, false, itself) end,
  selectattr = function(v, key, name, ...)
    return selected(v, name, { ... }, true, function(item) return M.index(item, key) end)
  end,
  rejectattr = function(v, key, name, ...)
    return selected(v, name, { ... }, false, function(item) return M.index(item, key) end)
  end,
  map = function(v, name, ...)
    local result = M.list {}
    for i, item in ipairs(M.items(v)) do
      budget.list(1)
      if type(name) == "table" then
        result[i] = M.index(item, name.attribute)
      else
        result[i] = (M.filters[name] or error("no filter '" .. tostring(name) .. "'", 0))(item, ...)
      end
    end
    return result
  end,
}
M.filters.d = M.filters.default

return M
