--- Metrics to files: one JSON object per line in metrics.jsonl, and TensorBoard events. `tycho watch` shows them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local expect = arguments.expect

---@class Logger
local Logger = {}
Logger.__index = Logger

-- What JSON can hold of a value: JSON has no infinities and no NaN, and a diverging run should still be readable.
local function plain(value, depth)
  local kind = type(value)
  if kind == "number" then
    return (value ~= value or value == math.huge or value == -math.huge) and tostring(value) or value
  elseif kind == "string" then
    return utf8.len(value) and value or nil
  elseif kind == "boolean" then
    return value
  elseif kind == "table" and not getmetatable(value) and depth > 0 then
    local copy = {}
    if #value > 0 then
      for i, entry in ipairs(value) do copy[i] = plain(entry, depth - 1) or type(entry) end
    else
      for key, entry in pairs(value) do
        if type(key) == "string" then copy[key] = plain(entry, depth - 1) end
      end
    end
    return copy
  end
  return nil
end

-- Drops lines of steps after `step`, which a resumed run will write again.
local function rewind(path, step)
  local kept, dropped = {}, false
  for line in io.lines(path) do
    local ok, entry = pcall(ty.io.json_decode, line)
    if ok and type(entry) == "table" and (entry.step or 0) <= step then
      kept[#kept + 1] = line
    else
      dropped = true
    end
  end
  if dropped then ty.io.write_atomic(path, #kept > 0 and table.concat(kept, "\n") .. "\n" or "") end
end

--- Writes <folder>/metrics.jsonl and, with tensorboard = true, events beside it. An existing file is continued after
-- step `resume` (default: it is replaced).
---@param folder string
---@param options? {tensorboard: boolean, resume: integer}
local function new(folder, options)
  expect("train.Logger", "folder", folder, "a string")
  local o = arguments.read("train.Logger", options, { tensorboard = false, resume = 0 }, { resume = "an integer >= 0" })
  ty.io.mkdir(folder)
  local path = folder .. "/metrics.jsonl"
  local resumed = o.resume > 0 and ty.io.stat(path)
  if resumed then rewind(path, o.resume) end
  local file, problem = io.open(path, resumed and "a" or "w")
  if not file then arguments.fail("train.Logger: %s", problem) end
  local self = setmetatable({ file = file, path = path, folder = folder, facts = { began = os.time() } }, Logger)
  if o.tensorboard then self.events = ty.io.event_writer(folder) end
  return self
end

--- Writes numbers by name for a step.
---@param step integer
---@param values table<string, number>
function Logger:log(step, values)
  expect("Logger:log", "step", step, "an integer")
  expect("Logger:log", "values", values, "a table")
  if not self.file then arguments.fail "Logger:log: the logger is closed" end
  local entry = { step = step, time = os.time() }
  for name, value in pairs(values) do entry[name] = type(value) == "number" and plain(value, 0) or value end
  self.file:write(ty.io.json_encode(entry), "\n")
  self.file:flush()
  if self.events then
    for name, value in pairs(values) do
      if type(value) == "number" then self.events:scalar(name, value, step) end
    end
  end
end

--- Writes what the run is to <folder>/run.json, from which `tycho watch` knows how far it is: steps (how many it is to
-- have), start (those done before), stop (where it will pause), title, options (a table), or what else there is to say.
-- What was said before stays. train.steps and train.fit call it.
---@param values table<string, any>
function Logger:about(values)
  expect("Logger:about", "values", values, "a table")
  if not self.file then arguments.fail "Logger:about: the logger is closed" end
  for name, value in pairs(values) do
    if type(name) == "string" and self.facts[name] == nil then self.facts[name] = plain(value, 3) end
  end
  ty.io.save_json(self.folder .. "/run.json", self.facts, { indent = 2 })
end

function Logger:close()
  if self.file then
    self.file:close()
    self.file = nil
    if self.events then self.events:close() end
  end
end

Logger.__close = Logger.close
Logger.__gc = Logger.close

return new
