--- What could follow the text before the cursor: fields after a dot, methods after a colon, globals and keywords, and
-- names of files inside strings.

local inspect = require "tycho.inspect"
local lexer = require "tycho.lexer"
local program = require "tycho.program"

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

local function starting_with(list, start)
  local words = {}
  for _, word in ipairs(list) do
    local private = word:find("^_") and not start:find("^_") and not word:find("/")
    if word:sub(1, #start) == start and not private then words[#words + 1] = word end
  end
  table.sort(words)
  return words
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
    return starting_with(files(partial), partial), #partial
  end
  local start, at = "", #tokens
  if last and last.kind == "name" and last.to == #text then start, at = last.value, at - 1 end
  local link = tokens[at] and tokens[at].value
  if link ~= "." and link ~= ":" then
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
