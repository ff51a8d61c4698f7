--- How good scores of many labels are: average precision, how well they put what is there before what is not; F1, how
-- well a threshold tells them apart; and intervals of such figures.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function check_pair(who, scores, labels)
  arguments.expect(who, "scores", scores, "a tensor")
  arguments.expect(who, "labels", labels, "a tensor")
  if scores.ndim ~= 2 or scores:numel() == 0 or table.concat(scores.shape, " ") ~= table.concat(labels.shape, " ") then
    arguments.fail("%s: expected scores and labels [n, classes], got %s and %s", who, arguments.describe(scores),
      arguments.describe(labels))
  end
end

-- The labels in f64 beside the scores, once both were looked at.
local function truth(who, scores, labels)
  local there = labels:to { dtype = "f64", device = scores.device }
  if not there:eq(0):logical_or(there:eq(1)):all():item() then
    arguments.fail("%s: labels: expected 0 and 1 alone, got others", who)
  end
  if scores:isnan():any():item() then arguments.fail("%s: scores: expected numbers, got NaN", who) end
  return there
end

--- The mean over classes of their average precision, which is the mean, over what is there, of the share of what is
-- there among all that scores at least as high: the area under the curve of precision over recall in steps. Classes
-- of which nothing is there are left out. scores [n, classes] (any numbers that order, logits say), labels [n, classes]
-- (1: there, 0: not). Returns it, and f64 [classes] by class, NaN for those left out. Everingham et al. 2010, "The
-- PASCAL Visual Object Classes Challenge"; computed as scikit-learn has it.
---@param scores Tensor
---@param labels Tensor
---@return number mean
---@return Tensor by_class
function M.mean_average_precision(scores, labels)
  local who = "vision.mean_average_precision"
  check_pair(who, scores, labels)
  return ty.no_grad(function()
    local there = truth(who, scores, labels)
    local sorted, order = scores:to("f64"):sort(0, true)
    local hits = there:gather(0, order)
    local n, classes = sorted.shape[1], sorted.shape[2]
    -- What scores the same has the same place: groups, numbered from 0 down each column.
    local first = ty.zeros({ 1, classes }, { dtype = "i64", device = scores.device })
    local group = n > 1 and ty.concat({ first, sorted:narrow(0, 1, n - 1):ne(sorted:narrow(0, 0, n - 1)):to "i64" }, 0)
      :cumsum(0) or first
    local function up_to_group(x) return ty.zeros_like(hits):scatter_add(0, group, x):cumsum(0):gather(0, group) end
    local precision = up_to_group(hits) / up_to_group(ty.ones_like(hits))
    local by_class = (hits * precision):sum(0) / hits:sum(0)
    local counted = by_class:isnan():logical_not()
    if not counted:any():item() then
      arguments.fail("%s: labels: expected at least one class that is there, got none", who)
    end
    return by_class:masked_select(counted):mean():item(), by_class
  end)
end

--- The mean over classes of F1, the harmonic mean of precision and recall, where what scores above the threshold is
-- said to be there. Classes of which nothing is there and nothing is said to be are left out; elsewhere one without a
-- hit has 0. scores [n, classes], labels [n, classes] (1: there, 0: not). Returns it, and f64 [classes] by class, NaN
-- for those left out.
---@param scores Tensor
---@param labels Tensor
---@param threshold? number|number[]|Tensor  of the scores (0, as logits have it), or one for each class
---@return number mean
---@return Tensor by_class
function M.macro_f1(scores, labels, threshold)
  local who = "vision.macro_f1"
  check_pair(who, scores, labels)
  arguments.expect(who, "threshold", threshold, "a number or a tensor or a list of numbers or nil")
  return ty.no_grad(function()
    local there = truth(who, scores, labels)
    local limit = threshold or 0
    if type(limit) == "table" then limit = ty.tensor(limit) end
    if ty.is_tensor(limit) then
      if limit.ndim ~= 1 or limit.shape[1] ~= scores.shape[2] then
        arguments.fail("%s: threshold: expected one for each of %d classes, got %s", who, scores.shape[2],
          arguments.describe(limit))
      end
      limit = limit:to { dtype = scores.dtype, device = scores.device }
    end
    local said = scores:gt(limit):to "f64"
    local by_class = (there * said):sum(0) * 2 / (there:sum(0) + said:sum(0))
    local counted = by_class:isnan():logical_not()
    if not counted:any():item() then
      arguments.fail("%s: labels: expected at least one class that is there or said to be, got none", who)
    end
    return by_class:masked_select(counted):mean():item(), by_class
  end)
end

--- The interval of a figure of scores and labels, by drawing the items anew with replacement (Efron 1979, "Bootstrap
-- Methods: Another Look at the Jackknife"): percentiles of the figure over the draws. metric(scores, labels) returns a
-- number first. options: rounds (200), level (0.95), seed (0, of the draws).
---@param metric fun(scores: Tensor, labels: Tensor): number
---@param scores Tensor  [n, ...]
---@param labels Tensor  [n, ...]
---@param options? {rounds?: integer, level?: number, seed?: integer}
---@return {value: number, low: number, high: number}
function M.interval(metric, scores, labels, options)
  local who = "vision.interval"
  arguments.expect(who, "metric", metric, "a function")
  arguments.expect(who, "scores", scores, "a tensor")
  arguments.expect(who, "labels", labels, "a tensor")
  local o = arguments.read(who, options, { rounds = 200, level = 0.95, seed = 0 },
    { rounds = "an integer >= 10", level = "a number in (0, 1)", seed = "an integer" })
  local n = scores.ndim > 0 and scores.shape[1] or 0
  if n == 0 or labels.ndim == 0 or labels.shape[1] ~= n then
    arguments.fail("%s: expected scores and labels of equally many items, got %s and %s", who,
      arguments.describe(scores), arguments.describe(labels))
  end
  local values = {}
  for round = 1, o.rounds do
    values[round] = ty.scope(function()
      local drawn = (ty.seeded_noise(ty.zeros(n), o.seed * 1000003 + round, "uniform") * n):floor():clamp(0, n - 1)
      local index = drawn:to { dtype = "i64", device = scores.device }
      local ok, value = pcall(metric, scores:index_select(0, index), labels:index_select(0, index))
      return ok and value or false -- a draw without a label
    end)
  end
  local list = {}
  for _, value in ipairs(values) do
    if type(value) == "number" and value == value then list[#list + 1] = value end
  end
  local value = metric(scores, labels)
  if #list == 0 then return { value = value, low = value, high = value } end
  table.sort(list)
  local function at(share)
    local place = 1 + share * (#list - 1)
    local below = math.floor(place)
    return list[below] + (place - below) * ((list[below + 1] or list[below]) - list[below])
  end
  return { value = value, low = at((1 - o.level) / 2), high = at((1 + o.level) / 2) }
end

return M
