--- Where time goes: ty.profile(fn) runs a function and notes every kernel that it runs.
--
--     local p, loss = ty.profile(function()
--       local loss = ty.cross_entropy(model(x), y)
--       loss:backward()
--       return loss
--     end, { model = model })
--     print(p)                       -- the ops by time, with the share of what the machine could do
--     print(p:table { by = "module" })
--     p:flame "flame.svg"            -- open it in a browser
--     p:trace "trace.json"           -- open it at https://ui.perfetto.dev
--     print(ty.profile.blame(step, { model = model }))   -- where the first NaN came from
--     print(model:summary { 8, 3, 64, 64 })              -- shapes, parameters and work by module
--
-- Times are those of kernels, on the thread that called; what lies between them (Lua, checks, allocation) is told as a
-- whole. On a GPU every kernel is waited for, so that its time is its own, and the whole takes longer than without a
-- profile. Worker threads of a DataLoader are not seen.
local arguments = require "tycho.arguments"
local limits = require "tycho.profile.limits"
local take = require "tycho.profile.take"
local time_model = require "tycho.profile.time_model"

local expect = arguments.expect

--- What ty.profile has noted. tostring() gives the table of ops.
---@class Profile
---@field events table[]   in the order they ran: op, module, backward, fused, begin and seconds, bytes, flops, shapes
---@field scopes table[]   calls of modules: name, begin, seconds
---@field seconds number   of the whole function
---@field lost integer     events that were too many to keep
---@field limits { flops: number, bandwidth: number }
local Profile = {}
Profile.__index = Profile
Profile.__name = "Profile"

--- Runs fn() and returns what was seen, and then what fn returned. options: model (a module: its parts become those of
-- the tables and the picture), most (1,000,000 events are kept), limits (what the machine can do: { flops = per second,
-- bandwidth = bytes per second }; measured at first use, in a quarter of a second).
---@param fn function
---@param options? { model?: Module, most?: integer, limits?: table }
---@return Profile
---@return any ...
local function profile(fn, options)
  local who = "profile"
  expect(who, "fn", fn, "a function")
  local o = arguments.read(who, options, { model = arguments.none, most = 1000000, limits = arguments.none },
    { model = "a module", most = "an integer >= 1", limits = "a table" })
  if o.limits then
    expect(who, "limits.flops", o.limits.flops, "a number > 0")
    expect(who, "limits.bandwidth", o.limits.bandwidth, "a number > 0")
  end
  local run, results = take(fn, { model = o.model, most = o.most })
  run.limits = o.limits or limits()
  return setmetatable(run, Profile), table.unpack(results, 1, results.n)
end

-- ---- sums ----

-- Seconds that a kernel would take at the machine's limits.
local function at_limit(self, event)
  return math.max(event.flops / self.limits.flops, event.bytes / self.limits.bandwidth)
end

local keys = {
  op = function(e) return (e.fused and "fused " or "") .. e.op end,
  module = function(e) return (e.module or "(no module)") .. (e.backward and " backward" or "") end,
  shapes = function(e) return e.op .. " " .. e.shapes end,
}

--- Sums by op, by module or by op and shapes, the longest first: { name, calls, seconds, bytes, flops, limit } each,
-- where limit is the seconds that this would take at the machine's limits, and nil for loops of several ops.
---@param by? "op"|"module"|"shapes"  (op)
---@return table[]
function Profile:sums(by)
  by = by or "op"
  expect("Profile:sums", "by", by, '"op" or "module" or "shapes"')
  local list, known = {}, {}
  for _, event in ipairs(self.events) do
    local name = keys[by](event)
    local sum = known[name]
    if not sum then
      sum = { name = name, calls = 0, seconds = 0.0, bytes = 0, flops = 0.0, limit = 0.0 }
      known[name] = sum
      list[#list + 1] = sum
    end
    sum.calls, sum.seconds = sum.calls + 1, sum.seconds + event.seconds
    sum.bytes, sum.flops = sum.bytes + event.bytes, sum.flops + event.flops
    sum.limit = sum.limit and not event.fused and sum.limit + at_limit(self, event) or nil
  end
  table.sort(list, function(a, b)
    if a.seconds ~= b.seconds then return a.seconds > b.seconds end
    return a.name < b.name
  end)
  return list
end

--- Seconds in kernels.
---@return number
function Profile:in_kernels()
  local sum = 0.0
  for _, event in ipairs(self.events) do sum = sum + event.seconds end
  return sum
end

local function seconds_text(s)
  if s >= 1 then return ("%.2f s"):format(s) end
  if s >= 1e-3 then return ("%.2f ms"):format(s * 1e3) end
  return ("%.1f us"):format(s * 1e6)
end

local function rate_text(n, seconds)
  if n == 0 or seconds == 0 then return "" end
  return ("%.1f"):format(n / seconds / 1e9)
end

--- The sums as a table of text. options: by ("op", "module" or "shapes"), rows (20). The last column is the share of
-- the machine's limit, of arithmetic or of memory, whichever is reached first; data in the caches may go beyond 100 %.
---@param options? { by?: string, rows?: integer }
---@return string
function Profile:table(options)
  local o = arguments.read("Profile:table", options, { by = "op", rows = 20 },
    { by = '"op" or "module" or "shapes"', rows = "an integer >= 1" })
  local sums, total = self:sums(o.by), self:in_kernels()
  local lines = { { o.by, "calls", "time", "share", "each", "GFLOP/s", "GB/s", "of limit" } }
  for i = 1, math.min(o.rows, #sums) do
    local s = sums[i]
    lines[#lines + 1] = { s.name, tostring(s.calls), seconds_text(s.seconds),
      ("%.1f %%"):format(100 * s.seconds / math.max(self.seconds, 1e-12)), seconds_text(s.seconds / s.calls),
      rate_text(s.flops, s.seconds), rate_text(s.bytes, s.seconds),
      s.limit and s.seconds > 0 and ("%.0f %%"):format(100 * s.limit / s.seconds) or "" }
  end
  local widths = {}
  for _, line in ipairs(lines) do
    for c, text in ipairs(line) do widths[c] = math.max(widths[c] or 0, utf8.len(text) or #text) end
  end
  local out = {}
  for i, line in ipairs(lines) do
    local cells = {}
    for c, text in ipairs(line) do
      local gap = (" "):rep(widths[c] - (utf8.len(text) or #text))
      cells[c] = c == 1 and text .. gap or gap .. text
    end
    out[#out + 1] = table.concat(cells, "  "):gsub("%s+$", "")
    if i == 1 then out[#out + 1] = ("-"):rep(#table.concat(cells, "  ")) end
  end
  if #sums > o.rows then out[#out + 1] = ("and %d more"):format(#sums - o.rows) end
  out[#out + 1] = ("%s in all, %s in %d kernels, %s (%.0f %%) outside of them"):format(seconds_text(self.seconds),
    seconds_text(total), #self.events, seconds_text(self.seconds - total),
    100 * (self.seconds - total) / math.max(self.seconds, 1e-12))
  if self.lost > 0 then out[#out + 1] = ("%d more kernels were not kept; see the option most"):format(self.lost) end
  return table.concat(out, "\n")
end

Profile.__tostring = function(self) return self:table() end

--- Writes a flame graph as SVG: time from left to right, what ran inside of what from bottom to top; each part says
-- what it is under the mouse. options: width (1200 pixels).
---@param path string
---@param options? { width?: integer }
---@return string path
function Profile:flame(path, options) return require "tycho.profile.flame"(self, path, options) end

--- Writes the events as Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing show.
---@param path string
---@return string path
function Profile:trace(path) return require "tycho.profile.trace"(self, path) end

local M = { limits = limits, blame = require "tycho.profile.blame", summary = require "tycho.profile.summary",
  foresee = require "tycho.profile.foresee", fit_time = time_model.fit, cross_time = time_model.cross }

return setmetatable(M, { __call = function(_, ...) return profile(...) end })
