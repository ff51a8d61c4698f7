--- How long a step takes, learnt from steps that were timed, of what ty.profile.foresee says of them.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local features = { "products", "convolutions", "bytes", "kernels" }

--- Made by profile.fit_time: seconds for each operation of products, each of convolutions, each byte and each kernel.
---@class TimeModel
---@field products number
---@field convolutions number
---@field bytes number
---@field kernels number
local TimeModel = {}
TimeModel.__index = TimeModel
TimeModel.__name = "TimeModel"

local function check(who, what, seen)
  arguments.expect(who, what, seen, "a table")
  for _, name in ipairs(features) do
    arguments.expect(who, what .. "." .. name, seen[name], "a finite number >= 0")
  end
end

local function check_rows(who, rows)
  for i, row in ipairs(rows) do
    arguments.expect(who, ("rows[%d]"):format(i), row, "a table")
    check(who, ("rows[%d].seen"):format(i), row.seen)
    arguments.expect(who, ("rows[%d].seconds"):format(i), row.seconds, "a finite number > 0")
  end
end

-- The solution of a system in double precision; nil where it has none.
local function solve(a, b)
  local ok, x = pcall(function()
    return ty.solve(ty.tensor(a, { dtype = "f64" }), ty.tensor(b, { dtype = "f64" })):tolist()
  end)
  return ok and x or nil
end

--- Fits seconds to what was foreseen: a sum of costs, none below zero, whose relative errors have the least squares.
-- As many rows as costs or more, of steps of different kinds, make it worth something.
---@param rows { seen: table, seconds: number }[]  seen: what profile.foresee returned
---@return TimeModel
local function fit(rows)
  local who = "profile.fit_time"
  arguments.expect(who, "rows", rows, "a table")
  if #rows == 0 then arguments.fail("%s: rows: expected at least one, got none", who) end
  check_rows(who, rows)
  local scale = {} -- so that columns are near 1
  for _, name in ipairs(features) do
    scale[name] = 0
    for _, row in ipairs(rows) do scale[name] = math.max(scale[name], row.seen[name] / row.seconds) end
  end
  -- Of all sets of costs the best whose solution has none below zero: there are 15.
  local best, least = { products = 0, convolutions = 0, bytes = 0, kernels = 0 }, math.huge
  for set = 1, (1 << #features) - 1 do
    local names = {}
    for i, name in ipairs(features) do
      if set >> (i - 1) & 1 == 1 and scale[name] > 0 then names[#names + 1] = name end
    end
    local a, b = {}, {}
    for i, left in ipairs(names) do
      a[i], b[i] = {}, 0
      for j in ipairs(names) do a[i][j] = 0 end
      for _, row in ipairs(rows) do
        local x = row.seen[left] / row.seconds / scale[left]
        b[i] = b[i] + x
        for j, right in ipairs(names) do a[i][j] = a[i][j] + x * row.seen[right] / row.seconds / scale[right] end
      end
    end
    local solution = #names > 0 and solve(a, b)
    local fine = solution
    for _, x in ipairs(solution or {}) do fine = fine and x >= 0 end
    if fine then
      local sum = 0
      for _, row in ipairs(rows) do
        local predicted = 0
        for i, name in ipairs(names) do
          predicted = predicted + solution[i] * row.seen[name] / row.seconds / scale[name]
        end
        sum = sum + (predicted - 1) ^ 2
      end
      if sum < least then
        least, best = sum, { products = 0, convolutions = 0, bytes = 0, kernels = 0 }
        for i, name in ipairs(names) do best[name] = solution[i] / scale[name] end
      end
    end
  end
  return setmetatable(best, TimeModel)
end

--- Seconds that a step takes, of what profile.foresee says of it.
---@param seen table
---@return number
function TimeModel:seconds(seen)
  check("TimeModel:seconds", "seen", seen)
  local sum = 0.0
  for _, name in ipairs(features) do sum = sum + self[name] * seen[name] end
  return sum
end

--- Seconds of each row by what the others alone teach (leave-one-out): how far to trust the fit for a step that it has
-- not seen. rows: two at least, as profile.fit_time takes them.
---@param rows { seen: table, seconds: number }[]
---@return number[]
local function cross_time(rows)
  local who = "profile.cross_time"
  arguments.expect(who, "rows", rows, "a table")
  if #rows < 2 then arguments.fail("%s: rows: expected at least two, got %d", who, #rows) end
  check_rows(who, rows)
  local seconds = {}
  for i, row in ipairs(rows) do
    local others = {}
    for j, other in ipairs(rows) do if j ~= i then others[#others + 1] = other end end
    seconds[i] = fit(others):seconds(row.seen)
  end
  return seconds
end

return { fit = fit, cross = cross_time }
