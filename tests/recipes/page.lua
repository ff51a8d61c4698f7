-- docs/systems.md is what the records say, and every record is one of a recipe that is there.
local here = arg and arg[0]:match ".*/" or "tests/recipes/"
local check = dofile(here .. "../lua/check.lua")
local ty = require "tycho"
local page = require "tycho.recipe.page"
local records = require "tycho.recipe.records"
local recipes = require "tycho.recipes"

local list, known = recipes.list(), {}
for _, recipe in ipairs(list) do known[recipe.name] = true end
local function read(recipe) return records.read(check.root, recipe.name) end

check.test("docs/systems.md is up to date (./run recipes --page)", function()
  check.equal(ty.io.read(check.root .. "docs/systems.md") == page.text(list, read, recipes.origin), true)
end)

check.test("records are of recipes, in their own format", function()
  for _, family in ipairs(ty.io.exists(check.root .. "records") and ty.io.listdir(check.root .. "records") or {}) do
    for _, file in ipairs(ty.io.listdir(check.root .. "records/" .. family)) do
      local name = family .. "/" .. (file:match "^(.*)%.%w+$" or file)
      check.equal(known[name], true, name .. " is the name of a recipe")
      if file:find "%.json$" then
        local text = ty.io.read(check.root .. "records/" .. family .. "/" .. file)
        check.equal(records.encode(ty.io.json_decode(text)), text, name)
        local record = ty.io.json_decode(text)
        check.equal(record.recipe, name)
        for _, run in ipairs(record.runs) do
          for _, field in ipairs { "arguments", "commit", "cpu", "date", "seconds", "seed", "table", "threads" } do
            check.equal(run[field] ~= nil, true, name .. ": " .. field)
          end
          if run.picture then
            check.equal(ty.io.exists(("%srecords/%s/%s"):format(check.root, family, run.picture)), true, run.picture)
          end
        end
      end
    end
  end
end)

check.test("the page of a recipe that misses, and of one without a record", function()
  local recipe = { name = "a/b", title = "T", claim = "c", paper = "p" }
  local record = { recipe = "a/b", runs = { { arguments = {}, commit = "0123456789ab", cpu = "x", device = "cpu",
    date = "2026-01-01", seconds = 1, seed = 0, threads = 1, table = {
      { claim = "x | y", measured = 1.5, spread = 0.25, bar = 1, below = true, pass = false, noise = true },
    } } } }
  local text = page.text({ recipe }, function() return record end, recipes.origin)
  check.equal(text:find("| x \\| y | 1.5 ± 0.25 | <= 1 | FAIL, within noise |", 1, true) ~= nil, true, text)
  check.equal(text:find("0 meet all of their bars, 1 miss some, 0 are not recorded", 1, true) ~= nil, true)
  check.equal(text:find("Recorded on x, 1 thread, 2026-01-01, 1 s (commit 0123456789).", 1, true) ~= nil, true)
  text = page.text({ recipe }, function() return nil end, recipes.origin)
  check.equal(text:find("Not recorded.", 1, true) ~= nil, true)
end)

check.finish()
