--- The progress display: one line redrawn in place on a terminal, a few plain lines elsewhere.
local system = require("tycho").system
local arguments = require "tycho.arguments"
local expect, none = arguments.expect, arguments.none

--- A progress bar, with the rate, the time left and the latest numbers; plain lines where there is no terminal.
---@class Progress
local Progress = {}
Progress.__index = Progress

local function duration(seconds)
  local s = math.floor(seconds + 0.5)
  if s >= 3600 then return ("%d:%02d:%02d"):format(s // 3600, s % 3600 // 60, s % 60) end
  return ("%d:%02d"):format(s // 60, s % 60)
end

local function number_text(value)
  if type(value) ~= "number" then return tostring(value) end
  if math.type(value) == "integer" then return tostring(value) end
  return ("%.4g"):format(value)
end

--- options: title, start (steps already done), quiet, stream (default: standard error).
---@param total integer
---@param options? {title: string, start: integer, quiet: boolean, stream: file*}
local function new(total, options)
  expect("train.progress", "total", total, "an integer >= 0")
  local o = arguments.read("train.progress", options, { title = "", start = 0, quiet = false, stream = none },
    { start = "an integer >= 0" })
  local self = setmetatable({ total = total, title = o.title, done = o.start }, Progress)
  self.first, self.quiet = self.done, o.quiet
  self.stream = o.stream or io.stderr
  self.terminal = not o.stream and system.isatty(2)
  self.began = system.clock()
  self.shown, self.shown_step, self.values, self.names = self.began, self.done, {}, {}
  return self
end

--- Values to show beside the step: numbers by name.
function Progress:set(values)
  expect("Progress:set", "values", values, "a table")
  for name, value in pairs(values) do
    if self.values[name] == nil then
      self.names[#self.names + 1] = name
      table.sort(self.names)
    end
    self.values[name] = value
  end
end

function Progress:text(now)
  local elapsed = now - self.began
  local rate = (self.done - self.first) / math.max(elapsed, 1e-9)
  local parts = { ("%s%d/%d"):format(self.title ~= "" and self.title .. " " or "", self.done, self.total) }
  if self.terminal then
    local filled = self.total > 0 and math.floor(20 * self.done / self.total) or 20
    parts[#parts + 1] = "[" .. ("#"):rep(filled) .. (" "):rep(20 - filled) .. "]"
  end
  if self.done > self.first then
    parts[#parts + 1] = rate >= 1 and ("%.1f/s"):format(rate) or ("%.1f s each"):format(1 / rate)
    if self.done < self.total then
      parts[#parts + 1] = duration((self.total - self.done) / rate) .. " left"
    else
      parts[#parts + 1] = "in " .. duration(elapsed)
    end
  end
  for _, name in ipairs(self.names) do parts[#parts + 1] = name .. " " .. number_text(self.values[name]) end
  return table.concat(parts, "  ")
end

--- Counts a step and shows it when it is time: ten times a second on a terminal; elsewhere at every tenth of the way
-- and when half a minute was silent.
function Progress:advance(step)
  expect("Progress:advance", "step", step, "an integer >= 0")
  self.done = step
  if self.quiet then return end
  local now = system.clock()
  if self.terminal then
    if now - self.shown < 0.1 and step < self.total then return end
    self.stream:write("\r", self:text(now), "\27[K")
    self.stream:flush()
  else
    local tenth = step * 10 // self.total ~= self.shown_step * 10 // self.total
    if not tenth and now - self.shown < 30 then return end
    self.stream:write(self:text(now), "\n")
    self.stream:flush()
  end
  self.shown, self.shown_step = now, step
end

--- Ends the line on a terminal.
function Progress:finish()
  if self.terminal and not self.quiet and self.shown_step > self.first then self.stream:write "\n" end
end

return new
