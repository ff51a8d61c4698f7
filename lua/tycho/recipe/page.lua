--- docs/systems.md: all recipes and what their records say, by family.
local records = require "tycho.recipe.records"
local rows = require "tycho.recipe.rows"

local M = {}

local function cell(text) return (tostring(text):gsub("|", "\\|"):gsub("\n", " ")) end

local function add_table(lines, results)
  lines[#lines + 1] = "| claim | measured | bar | |"
  lines[#lines + 1] = "|---|---|---|---|"
  for _, result in ipairs(results) do
    lines[#lines + 1] = ("| %s | %s | %s | %s |"):format(cell(result.claim), cell(rows.measured_text(result)),
      cell(rows.bar_text(result)), rows.verdict(result))
  end
  lines[#lines + 1] = ""
end

local function add_recipe(lines, recipe, record, origin)
  local function add(...) for _, line in ipairs { ... } do lines[#lines + 1] = line end end
  add(("### [%s](../recipes/%s.lua): %s"):format(recipe.name, recipe.name, recipe.title), "")
  add(recipe.claim .. ".", "", ("*%s*"):format(recipe.paper or "no paper"), "")
  local run = records.plain_run(record)
  if not run then
    add("Not recorded.", "")
    return
  end
  add_table(lines, run.table)
  add(("Recorded on %s (commit %s)."):format(origin(run), run.commit:sub(1, 10)), "")
  if run.picture then
    add(("![%s](../records/%s/%s)"):format(recipe.title, recipe.name:match "^(.*)/", run.picture), "")
  end
  for _, other in ipairs(record.runs) do
    if other ~= run then
      add(("On %s:"):format(origin(other)), "")
      add_table(lines, other.table)
    end
  end
end

--- The page as text.
---@param list table[]                          recipes, in order of name
---@param read fun(recipe: table): table?       the record of one
---@param origin fun(run: table): string        where and when a run was made
---@return string
function M.text(list, read, origin)
  local lines, met, missed, family = {}, 0, 0, nil
  for _, recipe in ipairs(list) do
    local record = read(recipe)
    local state = records.state(record)
    if state == "met" then met = met + 1 elseif state ~= "not recorded" then missed = missed + 1 end
    local its = recipe.name:match "^(.-)/" or ""
    if its ~= family then
      family = its
      lines[#lines + 1] = "## " .. family
      lines[#lines + 1] = ""
    end
    add_recipe(lines, recipe, record, origin)
  end
  local intro = {
    "# Published methods, measured",
    "",
    "Each is a module and a recipe that measures its claim on held-out data, with the bar that it is held to. This",
    "page is made from `records/` by `./run recipes --page`; `./run recipes --show NAME` prints one table, `./run",
    "recipes --rerun NAME --seed 7` runs one again and says how far each figure moved. A figure with ± is a mean over",
    "seeds and their standard deviation; \"within noise\" says that the bar is nearer to the mean than its standard",
    "error.",
    "",
    ("%d recipes: %d meet all of their bars, %d miss some, %d are not recorded."):format(#list, met, missed,
      #list - met - missed),
    "",
  }
  return table.concat(intro, "\n") .. "\n" .. table.concat(lines, "\n"):gsub("\n+$", "") .. "\n"
end

return M
