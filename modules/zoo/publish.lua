--- Writing a trained model to zoo/NAME: its files, its page, its checksums.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local rows = require "tycho.recipe.rows"
local shipped = require "tycho.shipped"

local function page_of(recipe, results, size)
  local name = recipe.name:match "[^/]+$"
  local claim = recipe.head.claim:gsub("^%l", string.upper)
  local lines = { ("# %s: %s"):format(name, recipe.head.title), "", claim .. ".", "", "| | |", "|---|---|",
    ("| in Lua | `require(\"tycho.zoo\").load \"%s\"` |"):format(name),
    ("| what it is | %s |"):format(recipe.head.system or ""), ("| after | %s |"):format(recipe.head.paper or ""),
    ("| files | %.1f MB |"):format(size / 1e6),
    ("| made by | `./run recipes/%s.lua --publish`, seed %d |"):format(recipe.name, recipe.seed), "",
    "| measured | | bar | |", "|---|---|---|---|" }
  for _, result in ipairs(results) do
    lines[#lines + 1] = ("| %s | %s | %s | %s |"):format(result.claim, rows.measured_text(result),
      rows.bar_text(result), rows.verdict(result))
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = "A figure with ± is a mean over seeds and their standard deviation; the model that ships is that"
    .. " of the first seed."
  if recipe.head.notes ~= "" then
    lines[#lines + 1] = ""
    lines[#lines + 1] = recipe.head.notes
  end
  return table.concat(lines, "\n") .. "\n"
end

local function remove(folder)
  if not ty.io.exists(folder) then return end
  for _, name in ipairs(ty.io.listdir(folder)) do
    local path = folder .. "/" .. name
    if ty.io.stat(path).kind == "directory" then remove(path) else ty.io.remove(path) end
  end
  ty.io.remove(folder)
end

-- The folder of a model that was measured and not trained (scenes.shipped): the one that ships, or an error.
local function measured(who, recipe, target)
  local folder, sums = recipe.measured, "/checksums.json"
  if not ty.io.exists(target .. sums) or ty.io.read(target .. sums) ~= ty.io.read(folder .. sums) then
    arguments.fail("%s: --publish with --base: expected the model in %s, got that in %s", who, target, folder)
  end
  return target
end

local SHARED_FROM = 100000 -- bytes of a file from which it is worth a link

local function quoted(path) return "'" .. path:gsub("'", "'\\''") .. "'" end

-- Calls fn(file, other) for each large file of shelf/name and each one of another model, as paths from the shelf, that
-- has the same checksum.
local function each_twin(shelf, name, fn)
  local function sums_of(model)
    local path = ("%s/%s/checksums.json"):format(shelf, model)
    return ty.io.exists(path) and ty.io.load_json(path) or {}
  end
  local key, twins = "%d %s", {}
  for _, other in ipairs(ty.io.listdir(shelf)) do
    for file, sum in pairs(other ~= name and sums_of(other) or {}) do
      local id = key:format(sum.bytes, sum.crc32)
      twins[id] = twins[id] or {}
      table.insert(twins[id], other .. "/" .. file)
    end
  end
  for file, sum in pairs(sums_of(name)) do
    for _, other in ipairs(sum.bytes >= SHARED_FROM and twins[key:format(sum.bytes, sum.crc32)] or {}) do
      fn(name .. "/" .. file, other)
    end
  end
end

-- What other models lead to in shelf/name becomes their own where shelf/name is about to be replaced by other bytes.
local function keep_shared(shelf, name, partial)
  each_twin(shelf, name, function(file, other)
    local old, link = quoted(shelf .. "/" .. file), quoted(shelf .. "/" .. other)
    local new = quoted(partial .. file:sub(#name + 1))
    os.execute(("test -L %s && test %s -ef %s && ! cmp -s %s %s && cp --remove-destination %s %s"):format(link, link,
      old, old, new, old, link))
  end)
end

-- Puts links in the place of files of shelf/name that another model has as files of its own. Not to what is a link
-- itself: it may be one to this file.
local function link_shared(shelf, name)
  each_twin(shelf, name, function(file, other)
    local here, there = quoted(shelf .. "/" .. file), quoted(shelf .. "/" .. other)
    local up = ("../"):rep(select(2, file:gsub("/", "")))
    os.execute(("test ! -L %s && test ! -L %s && cmp -s %s %s && ln -sf %s %s"):format(there, here, there, here,
      quoted(up .. other), here))
  end)
end

--- Writes a model of the zoo: write(folder) puts the model's files there, in the layout of their kind; the page comes
-- from the recipe's head and table. What was there before is replaced once all is written. Of a model that was measured
-- and not trained (--base zoo) the page alone is written anew. root: the source tree.
---@param recipe Recipe  recipes/zoo/NAME.lua, which the model is named by
---@param list RecipeRow[]
---@param write fun(folder: string)
---@return string path
return function(recipe, list, write)
  local who = "zoo.publish"
  arguments.expect(who, "recipe", recipe, "a table")
  arguments.expect(who, "list", list, "a list of tables")
  arguments.expect(who, "write", write, "a function")
  local name = type(recipe.name) == "string" and recipe.name:match "^zoo/([%w_-]+)$"
  if not name or not recipe.root then
    arguments.fail("%s: recipe: expected one of recipes/zoo, got %s", who, arguments.describe(recipe.name))
  end
  if recipe.quick then arguments.fail("%s: --publish: expected a full run, got one with --quick", who) end
  local target = ("%s/zoo/%s"):format(recipe.root, name)
  local ships = recipe.measured and measured(who, recipe, target)
  local partial = ships or target .. ".partial"
  if not ships then
    remove(partial)
    ty.io.mkdir(partial)
    write(partial)
  end
  local size, results = shipped.size(partial), {}
  for i, row in ipairs(list) do results[i] = rows.result(row, true) end
  local page = partial .. "/README.md"
  if ships then size = size - ty.io.stat(page).size end
  ty.io.write_atomic(page, page_of(recipe, results, size))
  if ships then return target end
  shipped.write_checksums(partial, { skip = { ["README.md"] = true }, folders = true })
  keep_shared(recipe.root .. "/zoo", name, partial)
  remove(target)
  assert(os.rename(partial, target))
  link_shared(recipe.root .. "/zoo", name)
  return target
end
