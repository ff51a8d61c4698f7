--- What is known of a public name, for everything that shows it: `help` at the prompt and the pages of ./run docs. An
-- op is described by its row in the table of ops, everything else by the comment above its definition.

local names = require "tycho.names"
local sources = require "tycho.sources"

local documented = {}

---@class Description
---@field signatures string[]   how it is called; the first is the function
---@field text string[]         lines, of a comment with LuaLS tags as plain text; of an op its sentences
---@field notes string[]        remarks that follow from the table of ops
---@field options string[]      "stride = 1": options with their defaults, as the function reads them
---@field comment string[]|nil  as it stands, without dashes
---@field path string|nil       where that is
---@field line integer|nil

-- ---- ops ----

local kinds_of_arguments = { optional = "tensor or nil", operand = "tensor or number", tensors = "list of tensors",
  int = "integer", float = "number", bool = "boolean", ints = "integers", varints = "integers",
  named = "integers by name" }

--- The ops by name, and in the order of their table.
---@return table<string, table> by_name
---@return table[] list
function documented.ops()
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

-- The other names of ops, as in PyTorch: { abs = { "absolute" } }.
local other_names
local function also_called(op)
  if not other_names then
    local ty = require "tycho"
    local by_value = {}
    other_names = {}
    for _, one in ipairs(ty.core.ops()) do by_value[rawget(ty, one.name) or one] = one.name end
    for _, name in ipairs(names.keys(ty)) do
      local own = by_value[rawget(ty, name) or false]
      if own and own ~= name then
        other_names[own] = other_names[own] or {}
        table.insert(other_names[own], "ty." .. name)
      end
    end
  end
  return other_names[op.name]
end

--- The description of an op.
---@param op table a row of documented.ops()
---@return Description
function documented.op(op)
  local parts, kinds, is_method = {}, {}, op.args[1] and op.args[1].kind == "tensor"
  for i, arg in ipairs(op.args) do
    parts[i] = argument_text(arg)
    local kind = kinds_of_arguments[arg.kind]
    if kind and arg.kind ~= "float" then kinds[#kinds + 1] = arg.name .. ": " .. kind end
  end
  local signatures = { ("ty.%s(%s)"):format(op.name, table.concat(parts, ", ")) }
  if is_method then
    signatures[2] = ("x:%s(%s)"):format(op.name, table.concat(parts, ", ", 2))
    if op.flags.INPLACE then signatures[2] = signatures[2] .. (", in place x:%s_(...)"):format(op.name) end
  end
  local notes = {}
  notes[1] = #kinds > 0 and table.concat(kinds, "; ") or nil
  local others = also_called(op)
  notes[#notes + 1] = others and "Also called " .. table.concat(others, ", ") .. "." or nil
  notes[#notes + 1] = op.differentiable == false and "Not differentiable." or nil
  notes[#notes + 1] = op.flags.AUTO_HALF and "Under ty.autocast it computes in that dtype." or nil
  notes[#notes + 1] = op.flags.AUTO_FULL and "Under ty.autocast it computes in f32." or nil
  return { signatures = signatures, text = { op.doc }, notes = notes, options = {} }
end

-- ---- functions and classes ----

-- The type that a tag begins with, which may have spaces between its brackets, and what follows.
local function split_type(text)
  local depth, at = 0, 1
  while at <= #text do
    local c = text:sub(at, at)
    if c:find("[%(%[{<]") then depth = depth + 1
    elseif c:find("[%)%]}>]") then depth = depth - 1
    elseif c == " " and depth <= 0 and not text:sub(1, at - 1):find("[:,|]$") then break end
    at = at + 1
  end
  return text:sub(1, at - 1), (text:sub(at):gsub("^%s+", ""))
end

---@class CommentParts
---@field text string[]     lines of prose
---@field params {name: string, type: string, text: string}[]
---@field returns {type: string, text: string}[]
---@field fields {name: string, type: string, text: string}[]

--- The parts of a comment with LuaLS tags.
---@param comment string[]
---@return CommentParts
function documented.parts(comment)
  local parts, last = { text = {}, params = {}, returns = {}, fields = {} }, nil
  for _, line in ipairs(comment) do
    local tag, rest = line:match("^@(%a+)%s*(.*)$")
    if tag == "param" or tag == "field" then
      local name, more = rest:match("^(%b[])%s*(.*)$")
      if not name then name, more = rest:match("^(%S+)%s*(.*)$") end
      local kind, text = split_type(more or "")
      last = { name = name, type = kind, text = text }
      table.insert(tag == "param" and parts.params or parts.fields, last)
    elseif tag == "return" then
      local kind, text = split_type(rest)
      last = { type = kind, text = text }
      table.insert(parts.returns, last)
    elseif tag then last = nil
    elseif last and line ~= "" then last.text = last.text .. " " .. line
    else
      parts.text[#parts.text + 1] = line
    end
  end
  return parts
end

local function of_comment(comment, path, line, name, f)
  return { signatures = { sources.signature(comment, path, line, name) }, text = sources.readable(comment), notes = {},
    options = f and sources.defaults(f) or {}, comment = comment, path = path, line = line }
end

--- The description of a function, nil when nothing is written of it.
---@param f function
---@param name string as the user writes it, perhaps with dots
---@param is_class? boolean f makes objects of a class
---@return Description|nil
function documented.of_function(f, name, is_class)
  local comment, path, line = sources.comment_of(f, name, is_class)
  return comment and of_comment(comment, path, line, name or "function", f)
end

--- How a public name is written in a program: "ty.nn.Linear", "llm.load", "Optimizer:step".
---@param entry PublicName
---@return string
function documented.full_name(entry)
  if entry.module or entry.name:find("^%u") then return entry.name end
  return "ty." .. entry.name
end

-- "(fn, options)" of a part that can be called, from the function of its file that does it; "" of others.
local function own_call(t, path)
  local meta = getmetatable(t)
  local call = type(meta) == "table" and meta.__call
  if type(call) ~= "function" then return "" end
  local where, line = sources.place(call)
  if not path or where ~= path then return "" end
  return (sources.signature({}, where, line, ""):gsub("^%([%w_]+,?%s*", "("))
end

-- The description of a class whose constructor is inherited or says nothing: the comment of its definition, or the head
-- of the file that returns it.
local function of_class(class, name, make)
  local path = sources.place_of_table(class)
  local comment, where, line
  for _, value in next, class do -- a method tells the file
    if not comment and type(value) == "function" then
      comment, where, line = sources.definition(sources.place(value), name:match("[%w_]+$"))
    end
  end
  if comment and sources.sentence(comment) == "" then comment = nil end
  if not comment then comment, where, line = path and sources.head(path), path, 1 end
  local found = comment and of_comment(comment, where, line, name, make)
  if found and not make then found.signatures[1] = name .. own_call(class, path) end
  return found
end

--- The description of a public name, nil when nothing is written of it. A part that can be called is described by what
-- calling it does.
---@param entry PublicName
---@param name? string how it is written (documented.full_name(entry))
---@return Description|nil
function documented.entry(entry, name)
  local value = entry.value
  name = name or documented.full_name(entry)
  if value == nil then
    return of_comment(sources.comment_at(entry.path, entry.line), entry.path, entry.line, name)
  end
  if type(value) == "function" then return documented.of_function(value, name) end
  local make, meta = names.constructor(value), getmetatable(value)
  local found = make and documented.of_function(make, name, true)
  if found and sources.sentence(found.comment) ~= "" then return found end
  if make or type(meta) ~= "table" or type(meta.__call) ~= "function" or names.is_class(value) then
    return of_class(value, name, make) or found
  end
  return documented.of_function(meta.__call, name)
end

--- The first sentence of what is written of a public name, "" when nothing is.
---@param entry PublicName
---@return string
function documented.sentence(entry)
  local found = documented.entry(entry)
  return found and sources.sentence(found.comment) or ""
end

--- The comment at the top of the file that is a table of the library: what `require "tycho.llm"` gives. Nil where it is
-- no such table.
---@param t table
---@return string[]|nil lines
function documented.head(t)
  local path = sources.place_of_table(t)
  local head = path and sources.head(path)
  return head and sources.readable(head)
end

return documented
