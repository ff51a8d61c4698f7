--- Numbers that stand for lists of numbers: require "tycho.stats". Lists are Lua tables that count from 1; none of
-- these functions changes its list. An empty list, or an entry that is no number, is an error.
local arguments = require "tycho.arguments"

local M = {}

local function check(who, list, least)
  if type(list) ~= "table" then error(("stats.%s: list: expected a table, got %s"):format(who, type(list)), 3) end
  if #list < (least or 1) then
    error(("stats.%s: list: expected at least %d numbers, got %d"):format(who, least or 1, #list), 3)
  end
  for i, x in ipairs(list) do
    if type(x) ~= "number" then
      error(("stats.%s: list: expected numbers, got %s at %d"):format(who, type(x), i), 3)
    end
  end
end

local function mean(list)
  local sum = 0.0
  for _, x in ipairs(list) do sum = sum + x end
  return sum / #list
end

--- The arithmetic mean.
---@param list number[]
---@return number
function M.mean(list)
  check("mean", list)
  return mean(list)
end

--- The value in the middle; of an even count the mean of the two in the middle.
---@param list number[]
---@return number
function M.median(list)
  check("median", list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local n = #sorted
  if n % 2 == 1 then return sorted[(n + 1) // 2] end
  return (sorted[n // 2] + sorted[n // 2 + 1]) / 2
end

--- The sample standard deviation (divided by n - 1); 0 for one number.
---@param list number[]
---@return number
function M.spread(list)
  check("spread", list)
  if #list == 1 then return 0.0 end
  local from_first = {} -- equal numbers have no spread at all
  for i, x in ipairs(list) do from_first[i] = x - list[1] end
  local middle, sum = mean(from_first), 0.0
  for _, x in ipairs(from_first) do sum = sum + (x - middle) ^ 2 end
  return math.sqrt(sum / (#list - 1))
end

--- Slope of the least-squares line through points { x, y }; through their logarithms with `log`: the power of x that y
-- grows with.
---@param points number[][]
---@param log? boolean
---@return number
function M.slope(points, log)
  local xs, ys = {}, {}
  arguments.expect("stats.slope", "points", points, "a list of lists")
  for i, point in ipairs(points) do
    arguments.expect("stats.slope", ("point %d"):format(i), point, "a pair of numbers")
    xs[i], ys[i] = point[1], point[2]
    if log then xs[i], ys[i] = math.log(xs[i]), math.log(ys[i]) end
  end
  check("slope", xs, 2)
  check("slope", ys, 2)
  local x, y, above, below = mean(xs), mean(ys), 0.0, 0.0
  for i = 1, #xs do above, below = above + (xs[i] - x) * (ys[i] - y), below + (xs[i] - x) ^ 2 end
  return above / below
end

--- Pearson's correlation of two lists of as many numbers; no number where one of them does not vary.
---@param a number[]
---@param b number[]
---@return number
function M.correlation(a, b)
  check("correlation", a, 2)
  check("correlation", b, 2)
  if #a ~= #b then error(("stats.correlation: expected lists of one length, got %d and %d"):format(#a, #b), 2) end
  local x, y, both, own, other = mean(a), mean(b), 0.0, 0.0, 0.0
  for i = 1, #a do
    both, own, other = both + (a[i] - x) * (b[i] - y), own + (a[i] - x) ^ 2, other + (b[i] - y) ^ 2
  end
  return both / math.sqrt(own * other)
end

local function pairwise(who, a, b, fn)
  check(who, a, 0)
  check(who, b, 0)
  if #a ~= #b then error(("stats.%s: expected lists of one length, got %d and %d"):format(who, #a, #b), 3) end
  local list = {}
  for i, x in ipairs(a) do list[i] = fn(x, b[i]) end
  return list
end

--- a[i] - b[i] for each i: how far the runs of one way are above those of another.
---@param a number[]
---@param b number[]
---@return number[]
function M.differences(a, b) return pairwise("differences", a, b, function(x, y) return x - y end) end

--- a[i] / b[i] for each i.
---@param a number[]
---@param b number[]
---@return number[]
function M.ratios(a, b) return pairwise("ratios", a, b, function(x, y) return x / y end) end

--- The root of the mean square of the numbers of a, or of how far they are from those of b, or from b.
---@param a number[]
---@param b? number[]|number  (0)
---@return number
function M.rms(a, b)
  check("rms", a)
  arguments.expect("stats.rms", "b", b, "a list or a number or nil")
  if type(b) ~= "table" then
    local one = b or 0
    b = {}
    for i = 1, #a do b[i] = one end
  end
  local sum = 0.0
  for _, x in ipairs(pairwise("rms", a, b, function(x, y) return x - y end)) do sum = sum + x ^ 2 end
  return math.sqrt(sum / #a)
end

--- Ranks from 1 for the least; equal numbers share the mean of theirs.
---@param list number[]
---@return number[]
function M.ranks(list)
  check("ranks", list)
  local result = {}
  for i, x in ipairs(list) do
    local below, equal = 0, 0
    for _, y in ipairs(list) do below, equal = below + (y < x and 1 or 0), equal + (y == x and 1 or 0) end
    result[i] = below + (equal + 1) / 2
  end
  return result
end

--- Spearman's correlation: Pearson's of the ranks.
---@param a number[]
---@param b number[]
---@return number
function M.rank_correlation(a, b)
  check("rank_correlation", a, 2)
  check("rank_correlation", b, 2)
  return M.correlation(M.ranks(a), M.ranks(b))
end

--- The share of a list's values that are true.
---@param list boolean[]
---@return number
function M.share(list)
  arguments.expect("stats.share", "list", list, "a list")
  if #list == 0 then arguments.fail "stats.share: list: expected at least one value, got none" end
  local sum = 0
  for _, value in ipairs(list) do sum = sum + (value and 1 or 0) end
  return sum / #list
end

--- Whether a curve goes up again: whether the mean over a window of numbers is more than `by` above the least such mean
-- before it, or is no number. What says that a training run has broken down.
---@param list number[]
---@param window integer
---@param by number
---@return boolean
function M.rises(list, window, by)
  check("rises", list)
  arguments.expect("stats.rises", "window", window, "an integer >= 1")
  arguments.expect("stats.rises", "by", by, "a number")
  local low = math.huge
  for i = window, #list do
    local here = mean(table.move(list, i - window + 1, i, 1, {}))
    if here ~= here or here > low + by then return true end
    low = math.min(low, here)
  end
  return false
end

--- The place, from 1, of the smallest number; of equal ones the first. What is no number of a list (nan) is never it,
-- unless all are.
---@param list number[]
---@return integer
function M.least(list)
  check("least", list)
  local place
  for i, x in ipairs(list) do
    if x == x and (not place or x < list[place]) then place = i end
  end
  return place or 1
end

--- What is best of a list by a score: try(entry) returns a result and its score, of which the largest counts; of equal
-- ones the first, and one that is no number only where all are none.
---@generic E, T
---@param list E[]
---@param try fun(entry: E): T, number
---@return T result
---@return number score
---@return E entry
function M.best(list, try)
  local who = "stats.best"
  arguments.expect(who, "list", list, "a list")
  arguments.expect(who, "try", try, "a function")
  if #list == 0 then arguments.fail("%s: list: expected at least one entry, got none", who) end
  local result, score, best
  for i, entry in ipairs(list) do
    local one, own = try(entry)
    arguments.expect(who, "the score", own, "a number")
    if i == 1 or own > score or score ~= score and own == own then result, score, best = one, own, entry end
  end
  return result, score, best
end

--- The place, from 1, of the largest value among those that keep enough, kept[i] >= enough; where none does, of the one
-- that keeps the most: how a setting is chosen that may not pay for its gain with something else.
---@param values number[]
---@param kept number[]  what each keeps, as a share of what there was
---@param enough number
---@return integer
function M.largest_keeping(values, kept, enough)
  local who = "stats.largest_keeping"
  check("largest_keeping", values)
  check("largest_keeping", kept)
  arguments.expect(who, "enough", enough, "a number")
  if #values ~= #kept then
    arguments.fail("%s: kept: expected as many as values, %d, got %d", who, #values, #kept)
  end
  local negative, some = {}, false
  for i, x in ipairs(values) do
    local is_enough = kept[i] >= enough
    negative[i], some = is_enough and -x or 0 / 0, some or is_enough
  end
  if not some then
    for i, x in ipairs(kept) do negative[i] = -x end
  end
  return M.least(negative)
end

--- Puts what run i of something gave into lists by name: lists[name][i] = value, and of a table of numbers by key, or
-- of such tables, lists[name][key][i]. What is not there yet is made.
---@param lists table
---@param name string
---@param i integer  counts from 1
---@param value number|table
function M.put(lists, name, i, value)
  local who = "stats.put"
  arguments.expect(who, "lists", lists, "a table")
  arguments.expect(who, "name", name, "a string")
  arguments.expect(who, "i", i, "an integer >= 1")
  arguments.expect(who, "value", value, "a number or a table")
  local list = lists[name] or {}
  lists[name] = list
  if type(value) == "number" then
    list[i] = value
  else
    for key, one in pairs(value) do M.put(list, key, i, one) end
  end
end

--- The field `key` of each table of a list: of what several runs returned, one number each.
---@param list table[]
---@param key any
---@return any[]
function M.column(list, key)
  arguments.expect("stats.column", "list", list, "a list of tables")
  local column = {}
  for i, entry in ipairs(list) do
    column[i] = entry[key]
    if entry[key] == nil then
      arguments.fail("stats.column: key: expected a field that all tables have, got %s, which number %d lacks",
        arguments.describe(key), i)
    end
  end
  return column
end

return M
