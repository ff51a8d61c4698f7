-- Who requires whom: floors and modules keep to tests/modules/arrows.lua, and there is no circle. Lower floors never
-- name higher ones: recipes and examples -> modules -> lua/tycho.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local lexer = require "tycho.lexer"

local root = check.root
local arrows = dofile(root .. "tests/modules/arrows.lua")

-- Every Lua file under a folder, as paths from the root.
local function files_under(folder, list)
  list = list or {}
  for _, name in ipairs(ty.io.listdir(root .. folder)) do
    local path = folder .. "/" .. name
    if ty.io.stat(root .. path).kind == "directory" then
      files_under(path, list)
    elseif name:find "%.lua$" then
      list[#list + 1] = path
    end
  end
  return list
end

-- What a file requires: a list of { name, line }. Any string of the source that is the name of a module counts, or
-- begins one ("tycho.models." .. file): tables of files that are loaded later hold such strings.
local function required(text)
  local list = {}
  for _, token in ipairs(lexer.scan(text)) do
    local name = token.kind == "string" and token.value:match "^[\"'](tycho%.[%w_.]+)[\"']$"
    if name then
      local _, line = text:sub(1, token.from):gsub("\n", "")
      list[#list + 1] = { name = name, line = line + 1 }
    end
  end
  return list
end

-- The file of a module's name, and the floor that it is on.
local function file_of(name)
  local rest = name:gsub("^tycho%.", ""):gsub("%.$", ""):gsub("%.", "/")
  for _, floor in ipairs { "lua/tycho", "modules" } do
    for _, ending in ipairs { ".lua", "/init.lua" } do
      local path = ("%s/%s%s"):format(floor, rest, ending)
      if ty.io.stat(root .. path) then return path, floor end
    end
  end
  return nil
end

local function module_of(path) return path:match "^modules/([%w_]+)" end

local sources = {} -- by path: { { to =, floor =, name =, line = }, ... }
for _, folder in ipairs { "lua/tycho", "modules", "recipes", "examples" } do
  for _, path in ipairs(files_under(folder)) do
    local list = {}
    for _, entry in ipairs(required(ty.io.read(root .. path))) do
      local to, floor = file_of(entry.name)
      if to then list[#list + 1] = { to = to, floor = floor, name = entry.name, line = entry.line } end
    end
    sources[path] = list
  end
end

-- Calls visit(path, arrow) for all arrows of the files whose paths begin so.
local function each(prefix, visit)
  local paths = {}
  for path in pairs(sources) do
    if path:sub(1, #prefix) == prefix then paths[#paths + 1] = path end
  end
  table.sort(paths)
  for _, path in ipairs(paths) do
    for _, arrow in ipairs(sources[path]) do visit(path, arrow) end
  end
end

check.test("the sources are read", function()
  local function has(path, name)
    for _, arrow in ipairs(sources[path] or {}) do
      if arrow.name == name then return true end
    end
    return false
  end
  check.ok(has("modules/llm/init.lua", "tycho.hub"))
  check.ok(has("modules/llm/init.lua", "tycho.llm.cache.h2o"), "a name in a table")
  check.ok(has("lua/tycho/nn/surgery.lua", "tycho.nn.layers"))
  local found = required [==[
    local a = require "tycho.a" -- require "tycho.comment"
    local b = require('tycho.b').c, "expected require \"tycho.text\"", [[ "tycho.long" ]]
    local d = require("tycho.d." .. name)]==]
  check.equal(found,
    { { name = "tycho.a", line = 1 }, { name = "tycho.b", line = 2 }, { name = "tycho.d.", line = 3 } })
end)

check.test("the library requires no modules", function()
  each("lua/tycho/", function(path, arrow)
    check.ok(arrow.floor == "lua/tycho", ("%s:%d requires %s"):format(path, arrow.line, arrow.name))
  end)
end)

check.test("modules require each other only where the table says so", function()
  local used = {}
  each("modules/", function(path, arrow)
    local from, to = module_of(path), module_of(arrow.to)
    check.ok(arrows[from] ~= nil, ("%s: tests/modules/arrows.lua has a row for %s"):format(path, from))
    if to and to ~= from then
      check.ok((arrows[from] or {})[to] ~= nil, ("%s:%d requires %s: %s -> %s is in tests/modules/arrows.lua"):format(
        path, arrow.line, arrow.name, from, to))
      used[from .. " -> " .. to] = true
    end
  end)
  for from, row in pairs(arrows) do
    check.ok(ty.io.stat(root .. "modules/" .. from) ~= nil, ("%s of the table is a module"):format(from))
    for to, reason in pairs(row) do
      check.ok(arrows[to] ~= nil, ("%s -> %s: there is a row for %s"):format(from, to, to))
      check.ok(type(reason) == "string" and #reason > 10, ("%s -> %s has a reason"):format(from, to))
      check.ok(used[from .. " -> " .. to], ("%s -> %s is in use"):format(from, to))
    end
  end
  check.equal(arrows.models, {}, "networks require no other module")
end)

-- A circle of a graph { [node] = { [node] = true } } as text, or nil.
local function circle(graph)
  local state, way = {}, {}
  local function visit(node)
    if state[node] == "done" then return nil end
    way[#way + 1] = node
    if state[node] == "open" then
      local first = 1
      while way[first] ~= node do first = first + 1 end
      return table.concat(way, " -> ", first)
    end
    state[node] = "open"
    local next_nodes = {}
    for to in pairs(graph[node] or {}) do next_nodes[#next_nodes + 1] = to end
    table.sort(next_nodes)
    for _, to in ipairs(next_nodes) do
      local found = visit(to)
      if found then return found end
    end
    state[node] = "done"
    way[#way] = nil
    return nil
  end
  local nodes = {}
  for node in pairs(graph) do nodes[#nodes + 1] = node end
  table.sort(nodes)
  for _, node in ipairs(nodes) do
    local found = visit(node)
    if found then return found end
  end
  return nil
end

check.test("no circles between modules, nor between files", function()
  check.equal(circle { a = { b = true }, b = { c = true }, c = { b = true } }, "b -> c -> b")
  check.equal(circle { a = { b = true, c = true }, b = { c = true }, c = {} }, nil)
  check.equal(circle(arrows), nil)
  local files = {}
  for path, list in pairs(sources) do
    files[path] = {}
    for _, arrow in ipairs(list) do
      -- A prefix ("tycho.models." .. file) stands for the module, not for its init.lua; a file may look itself up.
      if not arrow.name:find "%.$" and arrow.to ~= path then files[path][arrow.to] = true end
    end
  end
  check.equal(circle(files), nil)
end)

check.test("recipes and examples know modules by their public names", function()
  for _, folder in ipairs { "recipes/", "examples/" } do
    each(folder, function(path, arrow)
      local inner = arrow.floor == "modules" and arrow.name:gsub("^tycho%.", ""):find "%."
      check.ok(not inner, ("%s:%d requires %s, a file inside of a module"):format(path, arrow.line, arrow.name))
      check.ok(arrow.floor == "modules", ("%s:%d requires %s, which is a part of tycho"):format(path, arrow.line,
        arrow.name))
    end)
  end
end)

check.finish()
