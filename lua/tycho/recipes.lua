--- `tycho recipes`: the runnable recipes, what each claims and what its record says.
--
--     tycho recipes [WORD ...]             those that mention the words, with their state
--     tycho recipes --show NAME            the recorded table
--     tycho recipes --rerun NAME [...]     runs it again, with other arguments, and says how far each figure moved
--     tycho recipes --page                 writes docs/systems.md from the records
local head = require "tycho.recipe.head"
local program = require "tycho.program"
local records = require "tycho.recipe.records"
local rows = require "tycho.recipe.rows"

local recipes = {}

local function collect(folder, prefix, list)
  for _, name in ipairs(program.list(folder) or {}) do
    if name:sub(-1) == "/" then
      collect(folder .. "/" .. name:sub(1, -2), prefix .. name, list)
    elseif name:find("%.lua$") then
      local recipe = head.read(folder .. "/" .. name)
      recipe.name = prefix .. name:gsub("%.lua$", "")
      recipe.path = folder .. "/" .. name
      list[#list + 1] = recipe
    end
  end
  return list
end

--- All recipes, in order of name: { { name = "diffusion/digits", path =, title =, claim =, ... } ... }
function recipes.list() return collect(program.home .. "/recipes", "", {}) end

local function mentions(recipe, word)
  for _, text in pairs(recipe) do
    if text:lower():find(word:lower(), 1, true) then return true end
  end
  return false
end

local function read(recipe) return records.read(program.home, recipe.name) end

local function show_list(words)
  local shown, widest = {}, 0
  for _, recipe in ipairs(recipes.list()) do
    local all = true
    for _, word in ipairs(words) do all = all and mentions(recipe, word) end
    if all then
      shown[#shown + 1] = recipe
      widest = math.max(widest, #recipe.name)
    end
  end
  if #shown == 0 then
    print(#words > 0 and ("no recipe mentions '%s'"):format(table.concat(words, " "))
      or ("no recipes in %s/recipes"):format(program.home))
    return 1
  end
  local margin = (" "):rep(widest + 2)
  for _, recipe in ipairs(shown) do
    print(recipe.name .. (" "):rep(widest + 2 - #recipe.name) .. recipe.title)
    if recipe.claim then print(margin .. recipe.claim) end
    print(margin .. records.state(read(recipe)))
  end
  print(("\nrun one: tycho recipes/%s.lua --quick    (--help lists its arguments)"):format(shown[1].name))
  return 0
end

-- The recipe of a name; several or none are said, and nil.
local function find(name)
  local near = {}
  for _, recipe in ipairs(recipes.list()) do
    if recipe.name == name then return recipe end
    if name and recipe.name:find(name, 1, true) then near[#near + 1] = recipe end
  end
  if #near == 1 then return near[1] end
  local exact = {} -- without the family
  for _, recipe in ipairs(near) do
    if recipe.name:match "[^/]+$" == name then exact[#exact + 1] = recipe end
  end
  if #exact == 1 then return exact[1] end
  local names = {}
  for i, recipe in ipairs(near) do names[i] = recipe.name end
  io.stderr:write(not name and "expected the name of a recipe; `tycho recipes` lists them\n"
    or #near == 0 and ("no recipe is named '%s'; `tycho recipes` lists them\n"):format(name)
    or ("'%s' is one of: %s\n"):format(name, table.concat(names, ", ")))
  return nil
end

--- Where and when a run was made, in a line.
---@param run table
---@return string
function recipes.origin(run)
  local changed = {}
  for name, value in pairs(run.arguments) do
    changed[#changed + 1] = ("--%s %s"):format(name:gsub("_", "-"), tostring(value))
  end
  table.sort(changed)
  return ("%s, %d %s, %s, %.0f s%s"):format(run.device == "cpu" and run.cpu or run.device .. " beside " .. run.cpu,
    run.threads, run.threads == 1 and "thread" or "threads", run.date, run.seconds,
    #changed > 0 and "; " .. table.concat(changed, " ") or "")
end

local function show_record(name)
  local recipe = find(name)
  if not recipe then return 1 end
  print(recipe.title)
  if recipe.claim then print(recipe.claim) end
  local record = read(recipe)
  if not record then
    print "\nnot recorded"
    return 1
  end
  for _, run in ipairs(record.runs) do
    print(("\n%s; commit %s"):format(recipes.origin(run), run.commit:sub(1, 10)))
    io.stdout:write(rows.text(run.table))
  end
  return 0
end

-- How far a figure is from the recorded one: of its spread over seeds where there is one, and in percent.
local function moved(row, before)
  if type(row.measured) ~= "number" or type(before.measured) ~= "number" then
    return row.measured == before.measured and "the same" or "changed"
  end
  local by = row.measured - before.measured
  if by == 0 then return "the same" end
  local text = ("%+.3g"):format(by)
  if before.measured ~= 0 then text = ("%+.2f %%"):format(100 * by / math.abs(before.measured)) end
  if before.spread and before.spread > 0 then text = ("%s, %.1f spreads"):format(text, math.abs(by) / before.spread) end
  return text
end

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function rerun(words)
  local recipe = find(words[1])
  if not recipe then return 1 end
  local before = records.plain_run(read(recipe))
  if not before then
    io.stderr:write(recipe.name, " has no record to compare with\n")
    return 1
  end
  local out, command = "runs/rerun/" .. recipe.name, { quote(program.executable), quote(recipe.path) }
  for i = 2, #words do
    if words[i] == "--out" then out = words[i + 1] or out end
    command[#command + 1] = quote(words[i])
  end
  command[#command + 1] = "--out " .. quote(out)
  if not os.execute(table.concat(command, " ")) then return 1 end
  local result = require("tycho.core").io.load_json(out .. "/metrics.json")
  local recorded = {}
  for _, row in ipairs(before.table) do recorded[row.claim] = row end
  print(("\nagainst the record (%s):"):format(recipes.origin(before)))
  for _, row in ipairs(result.table) do
    local other = recorded[row.claim]
    print(("  %s: %s, recorded %s: %s"):format(row.claim, rows.measured_text(row),
      other and rows.measured_text(other) or "nothing", other and moved(row, other) or "new"))
  end
  return 0
end

local function write_page()
  local page = require "tycho.recipe.page"
  local path = program.home .. "/docs/systems.md"
  require("tycho.core").io.write_atomic(path, page.text(recipes.list(), read, recipes.origin))
  print("wrote " .. path)
  return 0
end

function recipes.command(words)
  local first = words[1]
  if first == "--show" then return show_record(words[2]) end
  if first == "--rerun" then return rerun(table.move(words, 2, #words, 1, {})) end
  if first == "--page" then return write_page() end
  if first and first:sub(1, 2) == "--" then
    io.stderr:write(("unknown argument '%s'; there are --show NAME, --rerun NAME and --page\n"):format(first))
    return 2
  end
  return show_list(words)
end

return recipes
