--- `tycho recipes [WORD]`: the runnable recipes with what they claim, read from the comment each begins with:
--
--     -- Class-conditional diffusion on 8x8 digits
--     -- claim: 95 % of the samples are recognised as the digit that was asked for

local program = require "tycho.program"

local recipes = {}

-- Title and fields ("claim", "paper", "time") of a recipe's leading comment.
local function read_header(path)
  local file <close> = assert(io.open(path))
  local header = { title = "" }
  for line in file:lines() do
    local text = line:match("^%-%-+%s*(.-)%s*$")
    if not text and not line:find("^#!") then break end
    local field, value = (text or ""):match("^(%l+):%s*(.+)$")
    if field then header[field] = value
    elseif text and header.title == "" then header.title = text end
  end
  return header
end

local function collect(folder, prefix, list)
  for _, name in ipairs(program.list(folder) or {}) do
    if name:sub(-1) == "/" then
      collect(folder .. "/" .. name:sub(1, -2), prefix .. name, list)
    elseif name:find("%.lua$") then
      local header = read_header(folder .. "/" .. name)
      header.name = prefix .. name:gsub("%.lua$", "")
      list[#list + 1] = header
    end
  end
  return list
end

--- All recipes, in order of name: { { name = "diffusion/digits", title =, claim =, ... } ... }
function recipes.list() return collect(program.home .. "/recipes", "", {}) end

local function mentions(recipe, word)
  for _, text in pairs(recipe) do
    if text:lower():find(word:lower(), 1, true) then return true end
  end
  return false
end

function recipes.command(words)
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
  for _, recipe in ipairs(shown) do
    print(recipe.name .. (" "):rep(widest + 2 - #recipe.name) .. recipe.title)
    if recipe.claim then print((" "):rep(widest + 2) .. recipe.claim) end
  end
  print(("\nrun one: tycho recipes/%s.lua --quick    (--help lists its arguments)"):format(shown[1].name))
  return 0
end

return recipes
