--- Every public name of the library and the modules: what `help` finds a word in. Names come from the tables that users
-- see, methods of classes that have no place in these from the sources.

local sources = require "tycho.sources"

local names = {}

---@class PublicName
---@field name string       as written after `ty.` or the module's name: "optim.AdamW", "llm.load", "Module:save"
---@field value any         the function or class; nil for a method that only its source knows
---@field path string|nil   where it is defined, nil for native code
---@field line integer|nil
---@field module string|nil what to require for it, nil for what `require "tycho"` gives
---@field alias boolean|nil  another entry with this value comes first: llm.load is hub.load

local function is_public(key) return type(key) == "string" and key:find("^%a[%w_]*$") ~= nil end

-- What a table holds for the library itself, and what every class has. Methods of tensors are known by declarations.
local not_for_users = {
  core = true, program = true, tokenizer_core = true, tier_core = true, profile_core = true, http_core = true,
  vmap_core = true, comm_core = true, outputs_core = true, Tensor = true,
}
names.of_every_class = { super = true, init = true, forward = true, describe = true }

--- Whether a table is a class: its instances, or it itself, look things up in it.
---@param value any
---@return boolean
function names.is_class(value)
  if type(value) ~= "table" then return false end
  local meta = getmetatable(value)
  return rawget(value, "__index") == value or type(meta) == "table" and meta.__call ~= nil
end

--- The function that tells how objects of a class are made, or what they do when they are called.
---@param class table
---@return function|nil
function names.constructor(class)
  local f = rawget(class, "init") or rawget(class, "forward")
  return type(f) == "function" and f or nil
end

--- The public keys of a table in order, those that are loaded when first used among them.
---@param t table
---@return string[]
function names.keys(t)
  local keys, seen = {}, {}
  local function add(key)
    if is_public(key) and not seen[key] then
      seen[key] = true
      keys[#keys + 1] = key
    end
  end
  for key in next, t do add(key) end
  local meta = getmetatable(t)
  for _, key in ipairs(type(meta) == "table" and meta.__names or {}) do add(key) end
  table.sort(keys)
  return keys
end

--- The public keys of a table by kind. CamelCase functions make objects, as classes do, and stand with them.
---@param t table
---@return {classes: string[], functions: string[], parts: string[], values: string[]}
function names.by_kind(t)
  local kinds = { classes = {}, functions = {}, parts = {}, values = {} }
  for _, key in ipairs(names.keys(t)) do
    local found, value = pcall(function() return t[key] end) -- may load it
    local kind = "values"
    if names.is_class(value) or key:find("^%u") and type(value) == "function" then kind = "classes"
    elseif type(value) == "function" then kind = "functions"
    elseif type(value) == "table" and is_public(next(value)) then kind = "parts"
    end
    if found and not not_for_users[key] then table.insert(kinds[kind], key) end
  end
  return kinds
end

-- ---- the modules ----

-- The folders with the library and, in the source tree, with the modules.
local function folders()
  local library = package.searchpath("tycho.names", package.path):match("^(.*/)")
  local root = library:match("^(.*/)lua/tycho/$") or library == "lua/tycho/" and ""
  return root and { library, root .. "modules/" } or { library }
end

local function subfolders(folder)
  local io = require("tycho").core.io
  local ok, list = pcall(io.listdir, folder)
  local found = {}
  for _, name in ipairs(ok and list or {}) do
    if io.exists(folder .. name .. "/init.lua") then found[#found + 1] = name end
  end
  return found
end

--- The names of the modules, sorted: "llm" of `require "tycho.llm"`. In the source tree they have a folder of their
-- own; an installed tree has them beside the parts of the library.
---@return string[]
function names.modules()
  local ty, list, part = require "tycho", {}, { meta = true }
  for _, name in ipairs(names.keys(ty)) do part[name] = type(rawget(ty, name)) ~= "function" end -- ty.dist is an op
  for _, folder in ipairs(folders()) do
    for _, name in ipairs(subfolders(folder)) do
      if not part[name] then list[#list + 1] = name end
    end
  end
  table.sort(list)
  return list
end

-- The files of the library and the modules that may define classes.
local function library_files()
  local io, files = require("tycho").core.io, {}
  local function add(folder)
    local ok, list = pcall(io.listdir, folder)
    for _, name in ipairs(ok and list or {}) do
      if name:find("%.lua$") then files[#files + 1] = folder .. name
      elseif io.exists(folder .. name .. "/.") then add(folder .. name .. "/") end
    end
  end
  for _, folder in ipairs(folders()) do add(folder) end
  return files
end

-- ---- the list ----

-- Whether a table is what some file gives to require.
local function is_loaded(t)
  for _, value in next, package.loaded do
    if value == t then return true end
  end
  return false
end

local function collect()
  local ty = require "tycho"
  local list, seen, is_op, placed = {}, {}, {}, {}
  for _, op in ipairs(ty.core.ops()) do -- ops have their own documentation
    for _, name in ipairs { op.name, op.name .. "_" } do
      is_op[rawget(ty, name) or false], is_op[ty.core.Tensor.methods[name] or false] = true, true
    end
  end
  local function add(name, value, module)
    local entry = { name = name, value = value, module = module, alias = seen[value] }
    local f = type(value) == "function" and value or names.constructor(value)
    if f then entry.path, entry.line = sources.place(f) end
    if type(value) == "function" and entry.path then placed[entry.path .. ":" .. entry.line] = true end
    list[#list + 1] = entry
  end
  local function walk(prefix, t, module)
    local inner, of_class = {}, names.is_class(t)
    local hidden = of_class and names.of_every_class or not_for_users
    for _, key in ipairs(names.keys(t)) do
      local ok, value = pcall(function() return t[key] end)
      if ok and not hidden[key] and not is_op[value or false] then
        local class = names.is_class(value)
        if type(value) == "function" or class then add(prefix .. key, value, module) end
        local holds_names = class or prefix == "" or is_loaded(value) -- other tables are values
        if type(value) == "table" and holds_names and not seen[value] and not of_class then
          inner[#inner + 1] = { prefix .. key .. (class and ":" or "."), value }
        end
        if type(value) == "function" or type(value) == "table" then seen[value] = true end
      end
    end
    for _, pair in ipairs(inner) do walk(pair[1], pair[2], module) end -- the shortest name of a value comes first
  end
  walk("", ty)
  for _, name in ipairs(names.modules()) do
    local ok, module = pcall(require, "tycho." .. name)
    if ok and type(module) == "table" then walk(name .. ".", module, "tycho." .. name) end
  end
  local known = {}
  for _, entry in ipairs(list) do known[entry.name:match("[^.]+$")] = true end
  for _, path in ipairs(library_files()) do
    for _, method in ipairs(sources.methods(path)) do
      local hidden = names.of_every_class[method.name:match(":(.*)$") or ""]
      hidden = hidden or method.name == "ty" -- declared for editors
      if not hidden and not placed[path .. ":" .. method.line] and not known[method.name] then
        known[method.name] = true
        list[#list + 1] = method
      end
    end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

local all

--- All public names but those of ops, in order.
---@return PublicName[]
function names.all()
  all = all or collect()
  return all
end

-- ---- looking up ----

local function parts_of(name)
  local parts = {}
  for part in name:gsub("^tycho%.", ""):gsub("^ty%.", ""):gmatch("[^.:]+") do parts[#parts + 1] = part end
  return parts
end

local function ends_with(parts, wanted)
  if #wanted > #parts then return false end
  for i = 0, #wanted - 1 do
    if parts[#parts - i] ~= wanted[#wanted - i] then return false end
  end
  return true
end

local function as_is(text) return text end

-- Entries with the parts of their names by the last part, made for a way to fold when it is first wanted.
local indices = {}
local function by_last_part(fold)
  local index = indices[fold]
  if not index then
    index = {}
    for _, entry in ipairs(names.all()) do
      local parts = parts_of(fold(entry.name))
      local last = parts[#parts] or ""
      index[last] = index[last] or {}
      table.insert(index[last], { entry = entry, parts = parts })
    end
    indices[fold] = index
  end
  return index
end

--- The names that end in `name`, "AdamW", "nn.Linear" or "Module:save", of what has several the first; when there are
-- none but methods, those that do but for capitals as well, in front.
---@param name string
---@return PublicName[]
function names.ending_in(name)
  local methods = {}
  for _, fold in ipairs { as_is, string.lower } do
    local wanted, found, listed = parts_of(fold(name)), {}, {}
    for _, candidate in ipairs(#wanted > 0 and by_last_part(fold)[wanted[#wanted]] or {}) do
      local entry = candidate.entry
      if ends_with(candidate.parts, wanted) and not (entry.value and listed[entry.value]) then
        found[#found + 1] = entry
        if entry.value then listed[entry.value] = true end
      end
    end
    local plain = {}
    for _, entry in ipairs(found) do
      if not entry.name:find(":", 1, true) then plain[#plain + 1] = entry end
    end
    if #plain > 0 or name:find(":", 1, true) and #found > 0 then
      return fold == as_is and found or table.move(methods, 1, #methods, #plain + 1, plain)
    end
    if #methods == 0 then methods = found end
  end
  return methods
end

--- How many letters have to be changed, put in, left out or swapped with their neighbour to make `a` of `b`.
---@param a string
---@param b string
---@return integer
function names.distance(a, b)
  local before, last = {}, {}
  for j = 0, #b do last[j] = j end
  for i = 1, #a do
    local row = { [0] = i }
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      row[j] = math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        row[j] = math.min(row[j], before[j - 2] + 1)
      end
    end
    before, last = last, row
  end
  return last[#b]
end

return names
