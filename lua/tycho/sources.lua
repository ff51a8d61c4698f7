--- What the sources say of themselves: the comment above a definition, the line that defines a name, the options that a
-- function reads. For `help` and for completion at the prompt; nothing here runs what it looks at.

local sources = {}

local kept = {} -- lines by path: one question asks many things of the same file

--- The lines of a file, an empty list when there is none.
---@param path string
---@return string[]
function sources.lines(path)
  if not kept[path] then
    local lines = {}
    local file <close> = io.open(path)
    for line in file and file:lines() or function() end do lines[#lines + 1] = line end
    kept[path] = lines
  end
  return kept[path]
end

--- Where a function's text is, or nil for a native one.
---@param f function
---@return string|nil path
---@return integer|nil line
---@return integer|nil last
function sources.place(f)
  local info = debug.getinfo(f, "S")
  local path = info.source:match("^@(.+)$")
  if path then return path, info.linedefined, info.lastlinedefined end
end

--- The file of a module, or nil.
---@param name string what require takes
---@return string|nil path
function sources.place_of_module(name)
  local path = package.searchpath(name, package.path)
  if path then return path end
  for _, searcher in ipairs(package.searchers) do -- modules/ of the source tree
    local loader, where = searcher(name)
    if type(loader) == "function" and type(where) == "string" and where:find("%.lua$") then return where end
  end
end

--- The file that gives a table to require, or nil.
---@param t table
---@return string|nil path
function sources.place_of_table(t)
  for name, value in pairs(package.loaded) do
    if value == t and name:find("^tycho") then return sources.place_of_module(name) end
  end
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

--- The comment above a line of a file, without its dashes, or nil.
---@param path string
---@param line integer
---@return string[]|nil
function sources.comment_at(path, line) return comment_above(sources.lines(path), line) end

--- The comment that a file begins with.
---@param path string
---@return string[]|nil
function sources.head(path)
  local lines, last = sources.lines(path), 0
  while lines[last + 1] and lines[last + 1]:find("^%-%-") do last = last + 1 end
  return comment_above(lines, last + 1)
end

-- Where a file defines `name` below a comment.
local function find_definition(path, name)
  local lines = sources.lines(path)
  for number, line in ipairs(lines) do
    local defined = line:match("^%s*local%s+([%w_]+)%s*=") or line:match("^%s*local%s+function%s+([%w_]+)")
      or line:match("^%s*function%s+[%w_%.]-:?([%w_]+)%s*%(") or line:match("^%s*[%w_%.]-([%w_]+)%s*=[^=]")
      or line:match('^[%w_%.]+%s*%(?%s*"([%w_]+)"') -- made by a function: pool("MaxPool2d", ...)
    if defined and (defined == name or defined .. "_" == name) then -- init.normal_ is init.normal
      local comment = comment_above(lines, number)
      if comment then return comment, path, number end
    end
  end
end

--- Where a file defines `name` below a comment, or nil.
---@param path string|nil
---@param name string
---@return string[]|nil comment
---@return string|nil path
---@return integer|nil line
function sources.definition(path, name)
  if path then return find_definition(path, name) end
end

local function lua_files(folder)
  local ok, names = pcall(require("tycho").core.io.listdir, folder)
  local files = {}
  for _, name in ipairs(ok and names or {}) do
    if name:find("%.lua$") then files[#files + 1] = folder .. name end
  end
  return files
end

--- The comment of a function: above its definition, or where `name` is defined with a comment in its file, in the files
-- beside that, or among the declarations of native functions.
---@param f function
---@param name? string as the user wrote it, perhaps with dots
---@param is_class? boolean f makes objects of a class: the comment of the class in its file comes first
---@return string[]|nil comment
---@return string|nil path
---@return integer|nil line
function sources.comment_of(f, name, is_class)
  local path, line = sources.place(f)
  local short = name and name:match("([%w_]+)$")
  local comment, where, number
  if path and short and is_class then comment, where, number = find_definition(path, short) end
  if comment and sources.sentence(comment) ~= "" then return comment, where, number end
  comment = path and sources.comment_at(path, line)
  if comment then return comment, path, line end
  if not short then return nil end
  if path then
    comment, where, number = find_definition(path, short)
    if comment then return comment, where, number end
    comment = path:match("([%w_]+)%.lua$") == short and sources.head(path) -- a file that is this function
    if comment then return comment, path, line end
    local folder = path:match("^(.*/)")
    for _, file in ipairs(folder and lua_files(folder) or {}) do
      comment, where, number = find_definition(file, short)
      if comment then return comment, where, number end
    end
    return nil
  end
  for _, part in ipairs { "core", "io", "tokenizer" } do
    local file = package.searchpath("tycho.meta." .. part, package.path)
    if file then comment, where, number = find_definition(file, short) end
    if comment then return comment, where, number end
  end
end

--- The classes of a file (what `---@class` names) and their public methods that have a comment.
---@param path string
---@return {name: string, path: string, line: integer}[]
function sources.methods(path)
  local lines, class, found = sources.lines(path), {}, {}
  local announced
  local function add(name, line)
    if comment_above(lines, line) then found[#found + 1] = { name = name, path = path, line = line } end
  end
  for number, line in ipairs(lines) do
    announced = line:match("^%-%-%-@class%s+([%w_]+)") or announced
    local variable = announced and line:match("^local%s+([%w_]+)%s*=")
    if variable then
      class[variable] = announced
      add(announced, number)
    end
    if not line:find("^%-%-") then announced = nil end
    local owner, name = line:match("^function%s+([%w_]+):([%a][%w_]*)%s*%(")
    if owner and class[owner] then add(class[owner] .. ":" .. name, number) end
  end
  return found
end

-- A line of a comment as plain text: "@param x Tensor the input" becomes "x: Tensor the input".
local function readable(text)
  local name, rest = text:match("^@param%s+(%S+)%s*(.*)$")
  if not name then name, rest = text:match("^@field%s+(%S+)%s*(.*)$") end
  if name then return name .. ": " .. rest end
  rest = text:match("^@return%s+(.*)$")
  if rest then return "returns " .. rest end
  if text:find("^@") then return nil end
  return text
end

--- The lines of a comment as a reader wants them: LuaLS tags as plain text.
---@param comment string[]
---@return string[]
function sources.readable(comment)
  local lines = {}
  for _, text in ipairs(comment) do lines[#lines + 1] = readable(text) end
  return lines
end

--- The first sentence of a comment, "" when it has none.
---@param comment string[]
---@return string
function sources.sentence(comment)
  local words = {}
  for _, text in ipairs(comment) do
    if text:find("^@") or text:find("^%s*$") then break end
    words[#words + 1] = text
  end
  local text = table.concat(words, " ")
  return text:match("^(.-%.)%s") or text
end

--- How a thing is called, from "@overload fun(...)" or the line that defines it.
---@param comment string[]
---@param path string
---@param line integer
---@param name string
---@return string
function sources.signature(comment, path, line, name)
  for _, text in ipairs(comment) do
    local arguments = text:match("^@overload%s+fun(%b())") or text:match("^@type%s+fun(%b())")
    if arguments then return name .. arguments end
  end
  local arguments = (sources.lines(path)[line] or ""):match("function[%s%w_%.:]*(%b())")
  return name .. (arguments or "")
end

-- ---- options ----

local readers = { read = true, options = true } -- nn.options.read and what it is called where it is used

-- A default as a reader wants it: numbers, booleans, texts, short lists of numbers; nil for what says "not set" or is
-- computed.
local function shown(value)
  if type(value) == "string" then return ("%q"):format(value) end
  if type(value) == "number" then return ("%.14g"):format(value) end
  if type(value) == "boolean" then return tostring(value) end
  if type(value) ~= "table" or #value == 0 or #value > 4 then return nil end
  local parts = {}
  for i, part in ipairs(value) do parts[i] = type(part) == "number" and shown(part) or nil end
  return #parts == #value and "{ " .. table.concat(parts, ", ") .. " }" or nil
end

-- The same of a default that is written in a source.
local function written_default(text)
  text = text:match("^%s*(.-)%s*$")
  local plain = tonumber(text) or text == "true" or text == "false" or text:find('^"[^"]*"$')
  if plain then return text end
  local list = text:match("^{%s*([%d%s.,-]+)}$")
  return list and "{ " .. list:match("^(.-)%s*$") .. " }" or nil
end

-- The options of a table written out, "{ stride = 1, padding = 0 }", as a list of { key =, default = }.
local function options_of_text(text)
  local list, rest = {}, "," .. text:sub(2, -2) .. ","
  local blank = rest:gsub("%b{}", function(inner) return ("{"):rep(#inner) end)
  blank = blank:gsub("%b()", function(inner) return ("("):rep(#inner) end)
  blank = blank:gsub('"[^"]*"', function(inner) return ('"'):rep(#inner) end)
  for key, from, to in blank:gmatch("%f[,;][,;]%s*([%a_][%w_]*)%s*=()[^,;]*()%f[,;]") do
    list[#list + 1] = { key = key, default = written_default(rest:sub(from, to - 1)) }
  end
  return list
end

-- The options whose defaults a call of `read` is given: written there, a table of the file, or a local one that begins
-- as a written table and takes in another.
local function options_of_defaults(given, text, values)
  local written = given:match("^%b{}")
  if written then return options_of_text(written) end
  local name = given:match("^[%a_][%w_]*")
  if not name then return nil end
  local list = {}
  local function take(defaults)
    local taken = {}
    for key, value in pairs(defaults) do taken[#taken + 1] = { key = tostring(key), default = shown(value) } end
    table.sort(taken, function(a, b) return a.key < b.key end)
    return table.move(taken, 1, #taken, #list + 1, list)
  end
  if type(values[name]) == "table" then return take(values[name]) end
  written = text:match("%f[%w_]local%s+" .. name .. "%s*=%s*(%b{})")
  if not written then return nil end
  list = options_of_text(written)
  local other = values[text:match("in%s+pairs%(([%w_]+)%)%s+do%s+" .. name .. "%[") or ""]
  return type(other) == "table" and take(other) or list
end

local function upvalues(f)
  local values = {}
  for i = 1, 255 do
    local name, value = debug.getupvalue(f, i)
    if not name then break end
    values[name] = value
  end
  return values
end

-- The options that a function declares where it reads them, see sources.options.
local function declared(f, depth)
  local path, first, last = sources.place(f)
  if not path then return {} end
  local text = table.concat(sources.lines(path), "\n", first, math.min(last, #sources.lines(path)))
  local values = upvalues(f)
  for reader, at in text:gmatch("%f[%w_]([%a_][%w_]*)%s*()%(") do
    local arguments = readers[reader] and text:match("^%b()", at)
    local rest = arguments and arguments:match("^%([^,]+,%s*[%a_][%w_]*%s*,%s*(.*)%)$")
    local list = rest and options_of_defaults(rest, text, values)
    if list then return list end
  end
  if depth > 0 then
    for name, value in pairs(values) do
      if type(value) == "function" and text:find("%f[%w_]" .. name .. "%s*%(") and sources.place(value) == path then
        local list = declared(value, depth - 1)
        if #list > 0 then return list end
      end
    end
  end
  return {}
end

--- The names of the options that a function declares where it reads them, `read("Conv2d", given, { stride = 1, ... })`,
-- itself or in a function of its file that it hands them to.
---@param f function
---@param depth? integer how many calls deep it looks (2)
---@return string[]
function sources.options(f, depth)
  local keys = {}
  for i, option in ipairs(declared(f, depth or 2)) do keys[i] = option.key end
  return keys
end

--- The same with the defaults: "stride = 1"; of an option without one, or with one that is computed, its name.
---@param f function
---@return string[]
function sources.defaults(f)
  local list = {}
  for i, option in ipairs(declared(f, 2)) do
    list[i] = option.default and ("%s = %s"):format(option.key, option.default) or option.key
  end
  return list
end

--- The names of the options that a comment declares: "options?: {bias: boolean, eps?: number}", or a class of them.
---@param comment string[]
---@return string[]
function sources.declared_options(comment)
  local keys = {}
  for _, line in ipairs(comment) do
    for fields in line:gmatch("options%??:?%s+(%b{})") do
      for key in ("," .. fields:sub(2, -2)):gmatch("[,;]%s*([%a_][%w_]*)%??%s*:") do keys[#keys + 1] = key end
    end
  end
  return keys
end

return sources
