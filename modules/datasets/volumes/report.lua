--- Reports: short texts that say what was found, with how large and where, and what was not found.
local arguments = require "tycho.arguments"

local M = {}

local function article(word)
  return (word:find "^[aeiou8]" or word:find "^1[18] ") and "an " .. word or "a " .. word
end

-- "the upper left lung", "the upper part of the liver", "the heart"
local function place(random, f)
  if f.side then
    local part = f.part
    if not part then return "the " .. f.organ end
    local zone = part == "middle" and "mid" or part
    return random:choose { ("the %s %s"):format(part, f.organ), ("the %s part of the %s"):format(part, f.organ),
      ("the %s zone of the %s"):format(zone, f.organ) }
  end
  if f.part and f.part ~= "middle" and random:integer(0, 1) == 0 then
    return ("the %s part of the %s"):format(f.part, f.organ)
  end
  return f.organ == "aorta" and random:choose { "the wall of the aorta", "the aorta" } or "the " .. f.organ
end

local function size(random, f)
  if f.size % 10 == 0 and random:integer(0, 1) == 0 then return ("%d cm"):format(f.size // 10) end
  return ("%d mm"):format(f.size)
end

--- The word for an effusion so many millimetres thick.
---@param millimetres number
---@return string
function M.amount(millimetres)
  arguments.expect("datasets.volumes.report.amount", "millimetres", millimetres, "a finite number")
  return millimetres < 13 and "small" or millimetres < 21 and "moderate" or "large"
end

-- What a finding is called, without and with its size; then where.
local phrases = {}

local function in_organ(names)
  return function(random, f)
    local name, long = random:choose(names), size(random, f)
    return random:choose {
      ("%s %s in %s"):format(article(long), name, place(random, f)),
      ("%s of %s in %s"):format(article(name), long, place(random, f)),
      ("%s in %s, %s"):format(article(name), place(random, f), long),
      ("%s contains %s %s"):format(place(random, f), article(long), name),
    }
  end
end

phrases.nodule = in_organ { "nodule", "solid nodule", "round nodule" }
phrases.cyst = in_organ { "cyst", "simple cyst" }
phrases.calcification = in_organ { "calcification", "calcified focus" }

function phrases.effusion(random, f)
  local how, long = M.amount(f.size), size(random, f)
  if f.organ == "heart" then
    return random:choose { ("a %s effusion around the heart"):format(how), ("a %s pericardial effusion"):format(how),
      ("a pericardial effusion of %s"):format(long) }
  end
  return random:choose { ("a %s effusion on the %s side"):format(how, f.side),
    ("a %s %s pleural effusion"):format(how, f.side),
    ("a crescent of fluid behind the %s, %s thick"):format(f.organ, long),
    ("a %s pleural effusion of %s"):format(f.side, long) }
end

phrases["missing part"] = function(random, f)
  return random:choose { ("the %s part of the %s is missing"):format(f.part, f.organ),
    ("absence of the %s %s of the %s"):format(f.part, size(random, f), f.organ),
    ("the %s has no %s part"):format(f.organ, f.part) }
end

--- What says that a kind is not there, by kind.
M.absent = {
  nodule = { "no nodule", "no nodules" }, cyst = { "no cyst", "no cysts" },
  calcification = { "no calcification", "no calcifications" }, effusion = { "no effusion", "no effusions" },
  ["missing part"] = { "no part is missing", "all organs are complete" },
}

--- What says that nothing is there.
M.nothing = { "no findings", "nothing is found", "a normal chest", "the lungs are clear, the heart is normal" }

local function capital(text) return (text:gsub("^%l", string.upper)) end

--- A report of findings: the text, and what it says is not there (a list of kinds).
---@param random table datasets.random
---@param findings table
---@return string text
---@return string[] denied
function M.write(random, findings)
  arguments.expect("datasets.volumes.report.write", "random", random, "a table")
  arguments.expect("datasets.volumes.report.write", "findings", findings, "a list")
  local parts, denied, there = {}, {}, {}
  for _, f in ipairs(findings) do
    parts[#parts + 1] = phrases[f.kind](random, f)
    there[f.kind] = true
  end
  random:shuffle(parts)
  if #findings == 0 then
    parts[1] = random:choose(M.nothing)
  end
  local kinds = { "nodule", "cyst", "calcification", "effusion", "missing part" }
  random:shuffle(kinds)
  for i = 1, random:integer(0, 2) do
    if not there[kinds[i]] then
      denied[#denied + 1] = kinds[i]
      parts[#parts + 1] = random:choose(M.absent[kinds[i]])
    end
  end
  if random:integer(0, 1) == 0 then return table.concat(parts, "; "), denied end
  for i, part in ipairs(parts) do parts[i] = capital(part) .. "." end
  return table.concat(parts, " "), denied
end

return M
