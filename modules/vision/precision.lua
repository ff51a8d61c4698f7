--- Average precision: how well scores put what is there before what is not.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

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
  arguments.expect(who, "scores", scores, "a tensor")
  arguments.expect(who, "labels", labels, "a tensor")
  if scores.ndim ~= 2 or scores:numel() == 0 or table.concat(scores.shape, " ") ~= table.concat(labels.shape, " ") then
    arguments.fail("%s: expected scores and labels [n, classes], got %s and %s", who, arguments.describe(scores),
      arguments.describe(labels))
  end
  return ty.no_grad(function()
    local there = labels:to { dtype = "f64", device = scores.device }
    if not there:eq(0):logical_or(there:eq(1)):all():item() then
      arguments.fail("%s: labels: expected 0 and 1 alone, got others", who)
    end
    if scores:isnan():any():item() then arguments.fail("%s: scores: expected numbers, got NaN", who) end
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

return M
