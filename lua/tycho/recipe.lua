--- What every recipe shares: arguments declared once, the folder for results, the closing table.
--
--     -- Digits by flow matching
--     -- claim: a class-conditional flow model draws digits that a classifier recognises
--     -- paper: Lipman et al. 2023, "Flow Matching for Generative Modeling"
--     -- time: 3 minutes on two CPU cores
--     local r = recipe.declare {
--       title = "Digits by flow matching", claim = "...", system = "...", paper = "...", time = "...",
--       args = { { "steps", 800, "training steps", quick = 20 }, { "guidance", 1.5, "strength of guidance" } },
--     }
--     ... r.args.steps, r.seed, r.device, r.quick, r:path "samples.png" ...
--     os.exit(r:finish { { claim = "recognised", measured = 0.97, bar = 0.95 } })
local ty = require "tycho"

local M = {}

---@class Recipe
---@field args table<string, any>  the declared arguments
---@field seed integer
---@field device string
---@field quick boolean
---@field out string               folder of the results
local Recipe = {}
Recipe.__index = Recipe

local common = {
  { "seed", 0, "seed of all random numbers" },
  { "device", "cpu", "where to compute: cpu, cuda" },
  { "threads", 0, "CPU threads (0: as many as the machine has)" },
  { "quick", false, "run in seconds, only to see that everything works" },
  { "out", "", "folder for the results" },
  { "strict", false, "exit with status 1 when a bar is not reached" },
}

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

local function help_text(spec, entries)
  local lines = { spec.title or "", "" }
  for _, field in ipairs { "claim", "system", "paper", "time" } do
    if spec[field] then lines[#lines + 1] = ("  %-8s%s"):format(field .. ":", spec[field]) end
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
      return nil, ("%s must be one of %s, got '%s'"):format(flag, table.concat(entry.choices, ", "), text)
    end
    return text
  end
  local number = tonumber(text)
  if math.type(default) == "integer" then
    number = math.tointeger(number)
    if not number then return nil, ("%s takes an integer, got '%s'"):format(flag, text) end
  elseif not number then
    return nil, ("%s takes a number, got '%s'"):format(flag, text)
  else
    number = number + 0.0
  end
  return number
end

-- Values by name from a list of words; nil and a message on mistakes, or "help".
local function parse(entries, words)
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

local function default_folder(source)
  local path = source:match "^@(.*)%.lua$" or "recipe"
  return "runs/" .. (path:match "recipes/(.*)$" or path:match "[^/\\]+$")
end

--- Declares a recipe and reads the command line. spec: title, claim, system, paper, time, and args: a list of
-- { name, default, help, quick = default under --quick, choices = list }; the type of the default is the type of the
-- argument. --help prints and ends the program; a mistake prints a line and ends it with status 2.
---@param spec table
---@param words? string[]  instead of the command line
---@return Recipe
function M.declare(spec, words)
  local entries, known = {}, {}
  for _, list in ipairs { spec.args or {}, common } do
    for _, entry in ipairs(list) do
      if known[entry[1]] then error(("recipe: argument '%s' is declared twice"):format(entry[1]), 2) end
      known[entry[1]] = true
      entries[#entries + 1] = entry
    end
  end
  local given, problem = parse(entries, words or rawget(_G, "arg") or {})
  if problem == "help" then
    io.stdout:write(help_text(spec, entries))
    os.exit(0, true)
  elseif problem then
    io.stderr:write(problem, "\n")
    os.exit(2, true)
  end
  local args = {}
  for _, entry in ipairs(entries) do
    local value = given[entry[1]]
    if value == nil then
      value = entry[2]
      if given.quick and entry.quick ~= nil then value = entry.quick end
    end
    args[entry[1]] = value
  end
  local self = setmetatable({ spec = spec, args = args, began = ty.system.clock(), metrics = {} }, Recipe)
  for _, entry in ipairs(common) do self[entry[1]] = args[entry[1]] end
  if self.out == "" then self.out = default_folder(debug.getinfo(2, "S").source) end
  if self.threads > 0 then ty.set_threads(self.threads) end
  ty.manual_seed(self.seed)
  ty.io.mkdir(self.out)
  return self
end

--- A path in the folder of the results.
function Recipe:path(name) return self.out .. "/" .. name end

--- Prints a line of the recipe's report.
function Recipe:say(format, ...)
  io.stdout:write(select("#", ...) > 0 and format:format(...) or format, "\n")
  io.stdout:flush()
end

--- Seconds since the recipe began.
function Recipe:seconds() return ty.system.clock() - self.began end

local function text_of(value)
  if type(value) == "number" and math.type(value) == "float" then return ("%.4g"):format(value) end
  return value == nil and "" or tostring(value)
end

local function judge(row)
  if row.pass ~= nil then return row.pass end
  if type(row.measured) ~= "number" or type(row.bar) ~= "number" then
    error(("recipe: '%s' needs pass, or numbers for measured and bar"):format(tostring(row.claim)), 3)
  end
  if row.below then return row.measured <= row.bar end
  return row.measured >= row.bar
end

-- Pads to a width in characters, not bytes.
local function pad(text, width) return text .. (" "):rep(width - (utf8.len(text) or #text)) end

local function print_table(rows)
  local widths = { 0, 0, 0, 0 }
  for _, row in ipairs(rows) do
    for i = 1, 4 do widths[i] = math.max(widths[i], utf8.len(row[i]) or #row[i]) end
  end
  for n, row in ipairs(rows) do
    local cells = {}
    for i = 1, 4 do cells[i] = pad(row[i], widths[i]) end
    io.stdout:write((table.concat(cells, "  "):gsub("%s+$", "")), "\n")
    if n == 1 then io.stdout:write(("-"):rep(widths[1] + widths[2] + widths[3] + widths[4] + 6), "\n") end
  end
end

-- A number for a JSON file, which has no infinities and no NaN: those as text.
local function plain(x)
  local finite = type(x) ~= "number" or (x == x and x ~= math.huge and x ~= -math.huge)
  return finite and x or tostring(x)
end

--- Ends the recipe: prints the table of claims and writes metrics.json. A row is { claim =, measured =, bar =, pass =
-- }; without `pass` a row passes when measured >= bar (below = true: measured <= bar). A row with judged = false says
-- what this machine cannot measure. Under --quick nothing is judged.
-- Returns the exit status: 0, or 1 with --strict when a row failed.
---@param rows table[]
---@return integer status
function Recipe:finish(rows)
  local lines = { { "claim", "measured", "bar", "" } }
  local results, failed = {}, 0
  for i, row in ipairs(rows) do
    local judged = row.judged ~= false and not self.quick
    local pass = row.judged ~= false and judge(row)
    local bar = type(row.bar) == "number" and ((row.below and "<= " or ">= ") .. text_of(row.bar)) or text_of(row.bar)
    local verdict = not judged and "not judged" or pass and "pass" or "FAIL"
    lines[#lines + 1] = { row.claim, text_of(row.measured), bar, verdict }
    results[i] = { claim = row.claim, measured = plain(row.measured), bar = row.bar }
    if judged then results[i].pass = pass end
    if judged and not pass then failed = failed + 1 end
  end
  io.stdout:write "\n"
  print_table(lines)
  local seconds, metrics = self:seconds(), {}
  for name, value in pairs(self.metrics) do metrics[name] = plain(value) end
  ty.io.write_atomic(self:path "metrics.json", ty.io.json_encode({
    title = self.spec.title, claim = self.spec.claim, system = self.spec.system, paper = self.spec.paper,
    args = self.args, seconds = seconds, results = results, metrics = next(metrics) and metrics or nil,
    version = ty.version,
  }, { indent = 2 }) .. "\n")
  local note = self.quick and "quick run, bars not judged; " or ""
  io.stdout:write(("\n%s%.1f s, results in %s\n"):format(note, seconds, self.out))
  return self.strict and failed > 0 and 1 or 0
end

M.parse, M.help_text = parse, help_text

return M
