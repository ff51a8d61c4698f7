--- The command line of a recipe: what is declared, read, refused and explained.
local M = {}

--- An argument: { name, default, help, quick = default under --quick, record = default under --record, choices = list,
-- least = of numbers, place = true: says where things are, and changes no result }. The type of the default is the type
-- of the argument. Of a list, `--rates 1e-3,3e-3`, the default is a list: of integers, of numbers or of texts, as its
-- elements are; choices and least are of each, and with `length` it has so many. Whole numbers whose default is not
-- negative are 0 at least, unless `least` says otherwise. `inf` is a number that is not whole.
---@alias RecipeArgument { [1]: string, [2]: any, [3]: string, quick?: any, record?: any, choices?: string[],
--- least?: number, length?: integer, place?: boolean }

--- What every recipe takes.
---@type RecipeArgument[]
M.common = {
  { "seed", 0, "seed of all random numbers", least = 0 },
  { "device", "cpu", "where to compute: cpu, cuda" },
  { "threads", 0, "CPU threads (0: as many as the machine has)", least = 0 },
  { "quick", false, "run in seconds, only to see that everything works" },
  { "out", "", "folder for the results", place = true },
  { "strict", false, "exit with status 1 when a bar is not reached", place = true },
  { "record", false, "keep the results in records/, of a clean tree", place = true },
  { "plan", false, "print what a training step takes of memory, work and time, after two of them, and stop",
    place = true },
  { "footprint", false, "print the run's energy and what it costs in 16 impact categories", place = true },
  { "electricity", "usa", "whose, for --footprint", place = true, choices = { "france", "germany", "usa" } },
}

--- What recipes that train anything take: how many seeds, from --seed on. A record has three at least, or `record`.
---@param count integer
---@param record? integer
---@return RecipeArgument
function M.seeds(count, record)
  return { "seeds", count, "runs, with seeds from --seed on", quick = 1, record = record or math.max(3, count),
    least = 1 }
end

--- What recipes that begin with trained models take.
M.base = { "base", "", "folder of trained models, which recipes may share; made where there are none", place = true }

local function flag_of(name) return "--" .. name:gsub("_", "-") end

-- "integer", "number" (also of a list that has both), "string" or "boolean": of a value or of a list's elements.
local function kind_of(default)
  if type(default) ~= "table" then return math.type(default) == "integer" and "integer" or type(default) end
  local kind
  for _, element in ipairs(default) do
    local own = kind_of(element)
    kind = (kind == nil or kind == own) and own or "number"
  end
  return kind or "string"
end

local placeholders = { integer = "N", number = "X", string = "TEXT" }

local function type_word(default)
  if type(default) == "boolean" then return "" end
  local word = placeholders[kind_of(default)]
  return " " .. word .. (type(default) == "table" and "," .. word .. ",.." or "")
end

-- A value as it would stand in a command line.
local function text_of(value)
  if type(value) ~= "table" then return tostring(value) end
  local parts = {}
  for i, element in ipairs(value) do parts[i] = type(element) == "number" and ("%.14g"):format(element) or element end
  return table.concat(parts, ",")
end

local function default_text(entry)
  local default = text_of(entry[2])
  if type(entry[2]) == "boolean" or default == "" then return "" end
  if entry.quick == nil then return (" (default %s)"):format(default) end
  return (" (default %s, %s with --quick)"):format(default, text_of(entry.quick))
end

--- What --help prints. head: title, claim, system, paper, time.
---@param head RecipeHead
---@param entries RecipeArgument[]
---@return string
function M.help(head, entries)
  local lines = { head.title or "", "" }
  for _, field in ipairs { "claim", "system", "paper", "time" } do
    if head[field] then lines[#lines + 1] = ("  %-8s%s"):format(field .. ":", head[field]) end
  end
  lines[#lines + 1] = "\nArguments:"
  for _, entry in ipairs(entries) do
    local flag = flag_of(entry[1]) .. type_word(entry[2])
    if entry[2] == true then flag = flag .. ", --no-" .. entry[1]:gsub("_", "-") end
    lines[#lines + 1] = ("  %-26s%s%s"):format(flag, entry[3] or "", default_text(entry))
  end
  return table.concat(lines, "\n") .. "\n"
end

local function convert_one(entry, kind, text)
  local flag = flag_of(entry[1])
  if kind == "string" then
    for _, choice in ipairs(entry.choices or { text }) do if choice == text then return text end end
    return nil, ("%s: expected one of %s, got '%s'"):format(flag, table.concat(entry.choices, ", "), text)
  end
  local number = text == "inf" and math.huge or tonumber(text)
  number = kind == "integer" and math.tointeger(number) or kind == "number" and number and number + 0.0 or nil
  if not number or number ~= number then
    return nil, ("%s: expected %s, got '%s'"):format(flag, kind == "integer" and "an integer" or "a number", text)
  end
  local least = entry.least
  if not least and math.type(entry[2]) == "integer" and entry[2] >= 0 then least = 0 end
  if least and number < least then return nil, ("%s: expected at least %s, got %s"):format(flag, least, text) end
  return number
end

local function convert(entry, text)
  local kind = kind_of(entry[2])
  if type(entry[2]) ~= "table" then return convert_one(entry, kind, text) end
  local list = {}
  for part in text:gmatch "[^,]+" do
    local value, problem = convert_one(entry, kind, part)
    if problem then return nil, problem end
    list[#list + 1] = value
  end
  if entry.length and #list ~= entry.length then
    return nil, ("%s: expected %d values with commas between, got '%s'"):format(flag_of(entry[1]), entry.length, text)
  end
  return list
end

--- Values by name from a list of words; nil and a message on mistakes, or nil and "help".
---@param entries RecipeArgument[]
---@param words string[]
---@return table<string, any>? given, string? problem
function M.parse(entries, words)
  local by_flag = {}
  for _, entry in ipairs(entries) do by_flag[flag_of(entry[1])] = entry end
  local given, i = {}, 1
  while i <= #words do
    local word = words[i]
    if word == "--help" or word == "-h" then return nil, "help" end
    local flag, value = word:match "^(%-%-[^=]+)=(.*)$"
    flag = flag or word
    local entry = by_flag[flag]
    local negated = not entry and by_flag[flag:gsub("^%-%-no%-", "--")]
    if entry and type(entry[2]) == "boolean" then
      if value then return nil, flag .. " takes no value" end
      given[entry[1]] = true
    elseif entry then
      if not value then
        i = i + 1
        value = words[i]
        if value == nil then return nil, flag .. " needs a value" end
      end
      local converted, problem = convert(entry, value)
      if problem then return nil, problem end
      given[entry[1]] = converted
    elseif negated and type(negated[2]) == "boolean" then
      given[negated[1]] = false
    else
      return nil, ("unknown argument '%s'; --help lists them"):format(word)
    end
    i = i + 1
  end
  return given
end

--- Every argument's value: as given, or by default.
---@param entries RecipeArgument[]
---@param given table<string, any>
---@return table<string, any>
function M.values(entries, given)
  local args = {}
  for _, entry in ipairs(entries) do
    local value = given[entry[1]]
    if value == nil then
      value = entry[2]
      if given.record and entry.record ~= nil then value = entry.record end
      if given.quick and entry.quick ~= nil then value = entry.quick end
    end
    args[entry[1]] = type(value) == "table" and table.move(value, 1, #value, 1, {}) or value
  end
  return args
end

--- The arguments that may change results and differ from those of a plain run, recorded or not; a list as its text.
---@param entries RecipeArgument[]
---@param args table<string, any>
---@return table<string, any>
function M.changed(entries, args)
  local changed = {}
  for _, entry in ipairs(entries) do
    local name, value, default, recorded = entry[1], args[entry[1]], entry[2], entry.record
    if type(value) == "table" then
      value, default, recorded = text_of(value), text_of(default), recorded and text_of(recorded)
    end
    local plain = value == default or value == recorded
    if not entry.place and name ~= "device" and name ~= "threads" and not plain then changed[name] = value end
  end
  return changed
end

return M
