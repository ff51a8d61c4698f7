--- What could follow the text before the cursor: fields after a dot, methods after a colon, globals and keywords,
-- options in the table that a call is given, modules after require, and names of files inside other strings.

local inspect = require "tycho.inspect"
local lexer = require "tycho.lexer"
local names = require "tycho.names"
local program = require "tycho.program"
local sources = require "tycho.sources"

local complete = {}

local keywords = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true "
    .. "until while"):gmatch("%a+") do
  keywords[#keywords + 1] = word
end

local fields_of_tensors = { "device", "dtype", "grad", "ndim", "requires_grad", "shape" }

local function callable(value)
  if type(value) == "function" then return true end
  local meta = debug.getmetatable(value)
  return type(meta) == "table" and meta.__call ~= nil
end

-- Calls add(name, value) for the string keys of a table and of what it inherits from.
local function each_member(value, add)
  for _ = 1, 8 do
    if type(value) == "table" then
      for key, member in next, value do
        if type(key) == "string" then add(key, member) end
      end
    end
    local meta = debug.getmetatable(value)
    if type(meta) ~= "table" then return end
    if type(meta.__names) == "table" then -- a table whose fields are made at first use lists them here
      for _, name in ipairs(meta.__names) do add(name, false) end
    end
    value = meta.__index
    if type(value) ~= "table" then return end
  end
end

-- Members of a tensor, whose fields are answered by native code.
local function each_tensor_member(ty, add)
  for _, name in ipairs(fields_of_tensors) do add(name, false) end
  for name, method in pairs(ty.core.Tensor.methods) do add(name, method) end
end

-- The value of a chain of names, or nil.
local function resolve(tokens, first, last)
  local value = _G
  for i = first, last, 2 do
    local ok, member = pcall(function() return value[tokens[i].value] end)
    if not ok or member == nil then return nil end
    value = member
  end
  return value
end

local function members(value, only_callable)
  local found, seen = {}, {}
  local function add(name, member)
    if seen[name] or not inspect.is_name(name) or (only_callable and not callable(member)) then return end
    seen[name] = true
    found[#found + 1] = name
  end
  local ty = package.loaded["tycho"]
  if type(ty) == "table" then -- ops made for backward rules are nobody's to call
    for _, op in ipairs(ty.core.ops()) do
      if op.flags.INTERNAL then seen[op.name] = true end
    end
  end
  if type(ty) == "table" and ty.is_tensor(value) then
    each_tensor_member(ty, add)
  else
    each_member(value, add)
  end
  return found
end

local function files(partial)
  local folder, start = partial:match("^(.*/)([^/]*)$")
  local found = {}
  for _, name in ipairs(program.list(folder or ".") or {}) do
    if name:sub(1, 1) ~= "." or start and start:sub(1, 1) == "." then found[#found + 1] = (folder or "") .. name end
  end
  return found
end

-- Modules whose names begin with `partial`: those that are loaded, and files where require looks, one folder at a time.
local function modules(partial)
  local folder = partial:match("^(.*%.)[^.]*$") or ""
  local found, seen = {}, {}
  local function add(name)
    if not seen[name] and name:find("^[%w_.%-]+$") then
      seen[name] = true
      found[#found + 1] = name
    end
  end
  for _, list in ipairs { package.loaded, package.preload } do
    for name in next, list do
      if type(name) == "string" and not name:sub(#folder + 1):find("%.") then add(name) end
    end
  end
  local ty_io = require("tycho").core.io
  local function look(root)
    for _, name in ipairs(program.list(root) or {}) do
      local is_folder = name:sub(-1) == "/"
      local plain = name:match("^([%w_%-]+)%.lua$") or name:match("^([%w_%-]+)/$")
      local holds = is_folder and plain and ty_io.exists(root .. plain .. "/init.lua")
      if plain and plain ~= "init" and (not is_folder or holds) then add(folder .. plain) end
    end
  end
  for root in package.path:gmatch("([^;?]*)%?%.lua") do look(root .. folder:gsub("%.", "/")) end
  local inside = folder:match("^tycho%.(.*)$")
  if inside and program.source_tree then look(program.home .. "/modules/" .. inside:gsub("%.", "/")) end
  return found
end

local function starting_with(list, start)
  local words = {}
  for _, word in ipairs(list) do
    local private = word:find("^_") and not start:find("^_") and not word:find("/")
    if word:sub(1, #start) == start and not private then words[#words + 1] = word end
  end
  table.sort(words)
  return words
end

-- ---- options ----

local closing = { ["("] = ")", ["{"] = "}", ["["] = "]" }
local opening = { [")"] = true, ["}"] = true, ["]"] = true }

-- The token that opens the bracket which tokens[at] stands in, or nil.
local function opener(tokens, at)
  local depth = 0
  for i = at, 1, -1 do
    local value = tokens[i].kind == "symbol" and tokens[i].value
    if opening[value] then depth = depth + 1 end
    if closing[value] then
      if depth == 0 then return i end
      depth = depth - 1
    end
  end
end

-- The value of the chain of names, with a method perhaps, that ends at tokens[last]; its first token.
local function called(tokens, last)
  if not tokens[last] or tokens[last].kind ~= "name" then return nil end
  local first = last
  while first > 2 and (tokens[first - 1].value == "." or tokens[first - 1].value == ":")
    and tokens[first - 2].kind == "name" do first = first - 2 end
  if first > 1 and (tokens[first - 1].value == "." or tokens[first - 1].value == ":") then return nil end
  return resolve(tokens, first, last), tokens[last].value
end

-- What can be given by name to an op: the arguments that have a default.
local function options_of_op(f, name)
  local ty = package.loaded["tycho"]
  local methods = ty and ty.core.Tensor.methods
  for _, op in ipairs(ty and ty.core.ops() or {}) do
    if name == op.name and (f == rawget(ty, name) or f == methods[name]) then
      local list = {}
      for _, arg in ipairs(op.args) do
        if not arg.required then list[#list + 1] = arg.name end
      end
      return list
    end
  end
end

-- The options that a call takes whose `{` is tokens[at].
local function options_at(tokens, at)
  local before = at - 1
  if tokens[before] and tokens[before].kind == "symbol" then -- f(a, {
    before = opener(tokens, before)
    if not before or tokens[before].value ~= "(" then return nil end
    before = before - 1
  end
  local value, name = called(tokens, before)
  local f = value
  if names.is_class(value) then f = names.constructor(value) end
  if type(f) ~= "function" then return nil end
  local list = options_of_op(f, name)
  if list then return list end
  list = sources.options(f)
  local comment = #list == 0 and sources.comment_of(f, name, f ~= value)
  return comment and sources.declared_options(comment) or list
end

-- The options that may be written next in the table around the end of the text, if a field's name can stand there.
local function options(tokens, at)
  local brace = opener(tokens, at)
  if not brace or tokens[brace].value ~= "{" then return nil end
  local last = tokens[at].value
  if at ~= brace and last ~= "," and last ~= ";" then return nil end
  local list, given = options_at(tokens, brace), {}
  for i = brace + 1, at do
    if tokens[i].kind == "name" and tokens[i + 1] and tokens[i + 1].value == "=" then given[tokens[i].value] = true end
  end
  local free = {}
  for _, name in ipairs(list or {}) do
    if not given[name] then free[#free + 1] = name end
  end
  return list and free
end

-- Whether the string that begins at tokens[at] is what require is given.
local function is_required(tokens, at)
  local before = tokens[at - 1]
  if before and before.value == "(" then before = tokens[at - 2] end
  return before ~= nil and before.kind == "name" and before.value == "require"
end

--- The words that could stand at the end of text, in order, and how many bytes of them are there already.
---@param text string
---@return string[] words
---@return integer length
function complete.candidates(text)
  local tokens = lexer.scan(text)
  local last = tokens[#tokens]
  if last and last.kind == "open" then
    if last.value:find("^[%-%[]") then return {}, 0 end
    local partial = last.value:sub(2)
    local list = is_required(tokens, #tokens) and modules(partial) or files(partial)
    return starting_with(list, partial), #partial
  end
  local start, at = "", #tokens
  if last and last.kind == "name" and last.to == #text then start, at = last.value, at - 1 end
  local link = tokens[at] and tokens[at].value
  if link ~= "." and link ~= ":" then
    local given = tokens[at] and options(tokens, at)
    local found = given and starting_with(given, start)
    if found and #found > 0 then return found, #start end
    local list = members(_G, false)
    table.move(keywords, 1, #keywords, #list + 1, list)
    return starting_with(list, start), #start
  end
  local owner = tokens[at - 1]
  if not owner then return {}, 0 end
  local value
  if owner.kind == "string" then value = ""
  elseif owner.kind == "name" then
    local first = at - 1
    while first > 2 and tokens[first - 1].value == "." and tokens[first - 2].kind == "name" do first = first - 2 end
    if first > 1 and (tokens[first - 1].value == "." or tokens[first - 1].value == ":") then return {}, 0 end
    value = resolve(tokens, first, at - 1)
  end
  if value == nil then return {}, 0 end
  return starting_with(members(value, link == ":"), start), #start
end

return complete
