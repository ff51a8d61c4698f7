--- What recipes' full runs gave, as data: records/FAMILY/NAME.json, one run for each machine and set of arguments.
--
--     { "recipe": "llm/h2o", "runs": [ { "arguments": {}, "commit": "...", "cpu": "...", "date": "2026-01-31",
--         "device": "cpu", "metrics": {}, "picture": "h2o.png", "seconds": 61.2, "seed": 0, "table": [ ... ],
--         "threads": 2, "version": "0.1.0" } ] }
--
-- `arguments` are those that differ from a plain run's. Keys are sorted and numbers have six digits, so that recording
-- again changes only what changed.
local core = require "tycho.core"
local machine = require "tycho.machine"

local M = {}
local io_ = core.io

-- Six significant digits; a JSON file has no infinities and no NaN: those as text.
local function plain(value)
  if type(value) == "table" then
    local copy = {}
    for key, entry in pairs(value) do copy[type(key) == "number" and key or tostring(key)] = plain(entry) end
    return copy
  end
  if math.type(value) ~= "float" then return value end
  if value ~= value or value == math.huge or value == -math.huge then return tostring(value) end
  return tonumber(("%.6g"):format(value))
end
M.plain = plain

--- Data as JSON text with sorted keys, lists of plain values on one line.
---@param value table
---@return string
function M.encode(value)
  local text = io_.json_encode(plain(value), { indent = 2 })
  -- A line break never stands within a JSON text's strings.
  text = text:gsub("%[\n[^%[%]{}]-\n%s*%]", function(list)
    return (list:gsub("%s*\n%s*", " "):gsub("^%[ ", "["):gsub(" %]$", "]"))
  end)
  return text .. "\n"
end

local function path_of(root, name) return ("%s/records/%s.json"):format(root, name) end

--- The record of a recipe, { recipe, runs }; nil where there is none.
---@param root string  the folder that holds records/
---@param name string  family/name
---@return table?
function M.read(root, name)
  local path = path_of(root, name)
  return io_.exists(path) and io_.load_json(path) or nil
end

local function command(text)
  local pipe = io.popen(text .. " 2>/dev/null")
  local output = pipe and pipe:read "a" or ""
  local done = pipe and pipe:close()
  return done and (output:gsub("%s+$", "")) or nil
end

--- The commit that the tree at `root` is. An error of one line where there is none or where files were changed: what a
-- record says must be what anybody gets from that commit. Other records do not count as changes.
---@param root string
---@return string commit
function M.commit(root)
  local quoted = "'" .. root:gsub("'", "'\\''") .. "'"
  local commit = command(("git -C %s rev-parse HEAD"):format(quoted))
  if not commit then error(("--record: %s is no git checkout, so there is no commit to name"):format(root), 0) end
  local changed = command(("git -C %s status --porcelain -- . ':!records' ':!docs/systems.md'"):format(quoted))
  if changed ~= "" then
    error("--record: the tree has changes that are not committed:\n" .. tostring(changed), 0)
  end
  return commit
end

-- What two runs must share to take each other's place.
local function key_of(run)
  return M.encode { run.arguments, run.cpu, run.device, run.threads }
end

--- Adds a run to a recipe's record, in place of the one with the same machine, threads and arguments.
---@param root string
---@param name string
---@param run table
---@return string path
function M.add(root, name, run)
  run.cpu = machine.cpu().name
  run.date = os.date "!%Y-%m-%d"
  local record = M.read(root, name) or { recipe = name, runs = {} }
  local runs, key = {}, key_of(run)
  for _, other in ipairs(record.runs) do
    if key_of(other) ~= key then runs[#runs + 1] = other end
  end
  runs[#runs + 1] = run
  table.sort(runs, function(a, b) return key_of(a) < key_of(b) end)
  record.runs = runs
  local path = path_of(root, name)
  io_.mkdir(path:match "^(.*)/")
  io_.write_atomic(path, M.encode(record))
  return path
end

-- Whether a run has a recipe's own arguments but for the number of seeds.
local function plain_but_seeds(run)
  local key = next(run.arguments)
  return key == nil or key == "seeds" and next(run.arguments, key) == nil
end

--- The newest run with a recipe's own arguments; where there is none, one of more or fewer seeds; nil where there is
-- none of these.
---@param record table?
---@return table? run
function M.plain_run(record)
  local newest
  local function better(run)
    if not newest then return true end
    local own, others = next(run.arguments) == nil, next(newest.arguments) == nil
    if own ~= others then return own end
    return run.date > newest.date
  end
  for _, run in ipairs(record and record.runs or {}) do
    if plain_but_seeds(run) and better(run) then newest = run end
  end
  return newest
end

--- What a record comes to: "met", "missed" with how many rows, or "not recorded".
---@param record table?
---@return string state, integer missed, integer judged
function M.state(record)
  local run = M.plain_run(record)
  if not run then return "not recorded", 0, 0 end
  local missed, judged = 0, 0
  for _, row in ipairs(run.table) do
    if row.pass ~= nil then judged = judged + 1 end
    if row.pass == false then missed = missed + 1 end
  end
  return missed > 0 and ("missed %d of %d"):format(missed, judged) or "met", missed, judged
end

return M
