--- The command line of a recipe: what is declared, read, refused and explained.
local M = {}

--- An argument: { name, default, help, quick = default under --quick, record = default under --record, choices = list,
-- least = of numbers, place = true: says where things are, and changes no result }. The type of the default is the type
-- of the argument.
---@alias RecipeArgument { [1]: string, [2]: any, [3]: string, quick?: any, record?: any, choices?: string[],
--- least?: number, place?: boolean }

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

local function type_word(default)
  if type(default) == "boolean" then return "" end
  if math.type(default) == "integer" then return " N" end
  return type(default) == "number" and " X" or " TEXT"
end

local function default_text(entry)
  local default = entry[2]
  if type(default) == "boolean" or default == "" then return "" end
  local text = ("default %s"):format(tostring(default))
  if entry.quick ~= nil then text = text .. (", %s with --quick"):format(tostring(entry.quick)) end
  return " (" .. text .. ")"
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

local function convert(entry, text)
  local default, flag = entry[2], flag_of(entry[1])
  if type(default) ~= "number" then
    if entry.choices then
      for _, choice in ipairs(entry.choices) do if choice == text then return text end end
      return nil, ("%s: expected one of %s, got '%s'"):format(flag, table.concat(entry.choices, ", "), text)
    end
    return text
  end
  local integer = math.type(default) == "integer"
  local number = tonumber(text)
  number = integer and math.tointeger(number) or not integer and number and number + 0.0 or nil
  if not number or number ~= number then
    return nil, ("%s: expected %s, got '%s'"):format(flag, integer and "an integer" or "a number", text)
  end
  if entry.least and number < entry.least then
    return nil, ("%s: expected at least %s, got %s"):format(flag, entry.least, text)
  end
  return number
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
    args[entry[1]] = value
  end
  return args
end

--- The arguments that may change results and differ from those of a plain run, recorded or not.
---@param entries RecipeArgument[]
---@param args table<string, any>
---@return table<string, any>
function M.changed(entries, args)
  local changed = {}
  for _, entry in ipairs(entries) do
    local name = entry[1]
    local plain = args[name] == entry[2] or args[name] == entry.record
    if not entry.place and name ~= "device" and name ~= "threads" and not plain then
      changed[name] = args[name]
    end
  end
  return changed
end

return M
