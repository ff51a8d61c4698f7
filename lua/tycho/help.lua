--- Documentation at the prompt: help(x), ?name, `tycho help NAME`. Ops are documented by the table of ops, everything
-- else by the comment above its definition.

local columns = require "tycho.columns"
local documented = require "tycho.documented"
local names = require "tycho.names"
local sources = require "tycho.sources"

local help = {}

local overview = [[
help(x) or ?x documents an op, function or class: ?softmax, ?ty.nn.Linear, help(x.relu)
or what a name ends in: ?AdamW, ?Module:save
help(ty) lists the ops; help(ty.nn), ?llm ... tell what those hold. Tab completes names, options and modules.
`_` is the last value. A `local` of the outermost level stays for the next lines. :time CODE measures. exit leaves.
Tensors count from 0: x[0], x["0:8, :, -1"]; Lua tables count from 1.]]

-- The text of a description.
local function text_of(found, module)
  local lines = { table.unpack(found.signatures) }
  for _, list in ipairs { found.text, found.notes } do
    for _, text in ipairs(list) do lines[#lines + 1] = "  " .. text end
  end
  if #found.options > 0 then lines[#lines + 1] = "  Defaults: " .. table.concat(found.options, ", ") end
  if found.path then
    lines[#lines + 1] = ("  (%s:%d%s)"):format(found.path, found.line,
      module and ('; require "%s"'):format(module) or "")
  end
  return table.concat(lines, "\n")
end

local ops = documented.ops
local function op_text(op) return text_of(documented.op(op)) end

-- ---- functions, classes and tables ----

-- The name of a function of Lua's own libraries in its manual.
local function name_in_manual(f)
  local found
  local function look(t, prefix)
    for name, value in next, t do
      if value == f then found = prefix .. name end
    end
  end
  for _, library in ipairs { "string", "table", "math", "io", "os", "utf8", "debug", "coroutine", "package", "_G" } do
    look(package.loaded[library] or {}, library == "_G" and "" or library .. ".")
  end
  return found
end

local function function_text(f, name, module, is_class)
  local own = name_in_manual(f)
  if own then return ("%s: of Lua itself, https://www.lua.org/manual/5.4/manual.html#pdf-%s"):format(own, own) end
  local found = documented.of_function(f, name, is_class)
  if found then return text_of(found, module) end
  local path, line = sources.place(f)
  if not path then return ("%s: no documentation (a native function)"):format(name or "function") end
  local signature = sources.signature({}, path, line, name or "function")
  return ("%s\n  no documentation (%s:%d)"):format(signature, path, line)
end

local titles = { "classes", "functions", "parts", "values" }

-- The names that a table holds, by kind, in columns.
local function holdings(t)
  local kinds, lines = names.by_kind(t), {}
  for _, kind in ipairs(titles) do
    if #kinds[kind] > 0 then lines[#lines + 1] = kind .. ":\n" .. columns.down(kinds[kind], "  ") end
  end
  return table.concat(lines, "\n")
end

-- The methods that a class has of its own; of a class that only the sources know, by its name.
local function methods_of(class, name)
  local list = {}
  for _, key in ipairs(class and names.by_kind(class).functions or {}) do
    if not names.of_every_class[key] then list[#list + 1] = key end
  end
  for _, entry in ipairs(class and {} or names.all()) do
    local owner, method = entry.name:match("^(.*):(.*)$")
    if owner == name then list[#list + 1] = method end
  end
  return #list > 0 and "\nmethods:\n" .. columns.down(list, "  ") or ""
end

local function table_text(t, name, module)
  local ty = require "tycho"
  if t == ty then
    local list = {}
    for _, op in ipairs(select(2, ops())) do
      if not op.flags.INTERNAL then list[#list + 1] = op.name end
    end
    table.sort(list)
    return ("Ops (%d), ty.NAME(x, ...) or x:NAME(...):\n%s\n\nAlso in ty: %s"):format(#list, columns.down(list),
      table.concat(help.other_names(ty), ", "))
  end
  local make, meta = names.constructor(t), getmetatable(t)
  if make or names.is_class(t) and (not documented.head(t) or not next(names.by_kind(t).functions)) then
    local found = documented.entry({ value = t }, name or rawget(t, "__name") or "class")
    if found then return text_of(found, module) .. methods_of(t) end
  end
  if type(meta) == "table" and type(meta.__call) == "function" and #names.keys(t) == 0 then
    return function_text(meta.__call, name, module)
  end
  local lines = documented.head(t) or {}
  if #lines == 0 then lines[1] = (name or "table") .. " holds:" end
  return table.concat(lines, "\n") .. "\n" .. holdings(t)
end

--- What the table of Tycho holds besides ops.
function help.other_names(ty)
  local by_name, list = ops(), {}
  for _, name in ipairs(names.keys(ty)) do
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
    if rawget(ty, name) == f or methods[name] == f or methods[name .. "_"] == f then return op end
  end
end

-- "name  first sentence", cut to the width of the terminal.
local function row(name, sentence)
  local room = columns.width() - 32
  if #sentence > room then sentence = sentence:sub(1, math.max(0, room - 4)) .. " ..." end
  return (("  %-28s  %s"):format(name, sentence):gsub("%s+$", ""))
end

local sentence_of, full_name = documented.sentence, documented.full_name

local function entry_text(entry)
  if entry.value == nil then
    return text_of(documented.entry(entry)) .. methods_of(nil, entry.name)
  end
  if type(entry.value) == "table" then return table_text(entry.value, full_name(entry), entry.module) end
  return function_text(entry.value, full_name(entry), entry.module)
end

local function rows_of(entries)
  local lines = {}
  for i, entry in ipairs(entries) do lines[i] = row(full_name(entry), sentence_of(entry)) end
  return table.concat(lines, "\n")
end

-- Appends the other names that end in the same word.
local function with_others(text, name, value)
  local others = {}
  for _, entry in ipairs(names.ending_in(name)) do
    if entry.value ~= value or value == nil then others[#others + 1] = entry end
  end
  if #others == 0 then return text end
  return text .. "\nand there is:\n" .. rows_of(others)
end

-- What is said of a name that nothing has: those spelt nearly so, and ops whose sentence mentions it.
local function nearby(name)
  local word = (name:match("([%w_]+)[^%w_]*$") or name):lower()
  local plain, spelt, found = word:gsub("_", ""), name:gsub("_", ""):match("%w*$"), {}
  local place = name:match "^(.*)[.:]"
  local function consider(full, sentence, only_near)
    local last = full:match("([%w_]+)$"):lower()
    local compact = last:gsub("_", "")
    local distance = #plain > 0 and names.distance(compact, plain) or math.huge
    local close = distance <= math.max(1, #plain // 3)
    local part = #plain > 2 and compact:find(plain, 1, true) or #compact > 3 and plain:find(compact, 1, true)
    local mentioned = not only_near and #plain > 3 and sentence():lower():find(name:lower(), 1, true)
    if close or part or mentioned then
      local capitals = names.distance(full:match("([%w_]+)$"):gsub("_", ""), spelt) > distance and 0.5 or 0
      local there = place and full:match "^(.*)[.:]" == place and 0.25 or 0 -- in the module that was asked for
      local method = full:find(":", 1, true) and 0.125 or 0 -- functions first
      found[#found + 1] = { full, sentence,
        rank = (close and distance or part and 100 or 200) + capitals + method - there }
    end
  end
  for _, op in ipairs(select(2, ops())) do
    if not op.flags.INTERNAL then consider("ty." .. op.name, function() return op.doc end) end
  end
  for _, entry in ipairs(names.all()) do
    if not entry.alias or name:find("[.:]") then
      consider(full_name(entry), function() return sentence_of(entry) end, true)
    end
  end
  if #found == 0 then return ("nothing is known of '%s'; help(ty) lists what there is"):format(name) end
  table.sort(found, function(a, b)
    if a.rank ~= b.rank then return a.rank < b.rank end
    return a[1] < b[1]
  end)
  local lines = {}
  for i = 1, math.min(#found, 12) do lines[i] = row(found[i][1], found[i][2]()) end
  return ("nothing is named '%s'; near it:\n%s"):format(name, table.concat(lines, "\n"))
end

-- What `require "tycho.NAME"` gives, if there is such a module.
local function module_named(name)
  for _, module in ipairs(names.modules()) do
    if module == name then return require("tycho." .. name) end
  end
end

-- The value of "nn.Linear", "ty.nn.Linear", "llm.load" or "table.concat"; the module to require when it is in one.
local function value_of(name)
  local module
  local modules = setmetatable({}, { __index = function(_, key)
    module = "tycho." .. key
    return module_named(key)
  end })
  for _, root in ipairs { require "tycho", modules, _G } do
    local value = root
    for part in name:gsub("^tycho%.", ""):gsub("^ty%.", ""):gmatch("[^%.:]+") do
      local ok, member = pcall(function(t) return t[part] end, value)
      value = ok and member or nil
      if value == nil then break end
    end
    if value ~= nil and value ~= root then return value, root == modules and module or nil end
  end
  return require("tycho").core.Tensor.methods[name:match("[%.:]([%w_]+)$")]
end

local function text_of_name(what)
  local by_name = ops()
  local short = what:match("([%w_]+)%s*$") or what
  local op = by_name[short] or by_name[(short:gsub("_$", ""))]
  if what:find ":" or op and what:gsub("^ty%.", ""):find "%." then -- Module:clone is no op, Profile:trace no Tensor's
    local entry = names.ending_in(what)[1]
    if entry and entry.name:sub(-#what) == what:gsub("^ty%.", ""):sub(-#what) then return entry_text(entry), true end
  end
  if op and not op.flags.INTERNAL and (what == short or what:find("^ty%.[%w_]+$") or what:find(":")) then
    return what == short and with_others(op_text(op), what) or op_text(op), true
  end
  if what == "ty" or what == "tycho" then return table_text(require "tycho"), true end
  local value, module = value_of(what)
  if type(value) == "function" or type(value) == "table" and value ~= require("tycho").Tensor then
    local text = help.text(value, what, module)
    local ambiguous = what == short and type(value) == "function" and not name_in_manual(value)
    return ambiguous and with_others(text, what, value) or text, true
  end
  local found = names.ending_in(what)
  if #found == 1 then return entry_text(found[1]), true end
  if #found > 1 then return ("%d names end in '%s':\n%s"):format(#found, what, rows_of(found)), true end
  return nearby(what), false
end

--- The documentation of a value, or of what a string names.
---@param what any a function, table or value; a string is a name: "softmax", "x:softmax", "nn.Linear", or the end of
--- one: "Linear", "AdamW", "Module:save"
---@param name? string how the user called it
---@param module? string what to require for it
---@return string text
---@return boolean found false when nothing has that name
function help.text(what, name, module)
  if what == nil then return overview, true end
  if type(what) == "string" then return text_of_name((what:gsub("%s+", ""))) end
  if type(what) == "function" then
    local op = op_of(what)
    local text = op and op_text(op) or function_text(what, name, module)
    return name and name_in_manual(what) and with_others(text, name, what) or text, true
  end
  if type(what) == "table" then return table_text(what, name, module), true end
  return ("%s: %s"):format(name or type(what), require("tycho.inspect").show(what)), true
end

--- `tycho help NAME ...`: 1 when one of them names nothing.
function help.command(words)
  local status = 0
  for _, word in ipairs(words) do
    local text, found = help.text(word)
    if found then print(text) else io.stderr:write(text, "\n") end
    if not found then status = 1 end
  end
  return status
end

return help
