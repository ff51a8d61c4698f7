--- What the optimizers share that estimate the distance from the start to the solution and take it for a rate:
-- optim.DAdaptAdamW, Prodigy and DoG. All parameters together are the vector that the papers speak of.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local lowrank = require "tycho.optim.lowrank"

local M = {}

--- The rate of a step: that of all groups, but for those of rate 0, which rest.
function M.rate(self, parts)
  local rate
  for _, part in ipairs(parts) do
    if part.lr > 0 then
      if rate and part.lr ~= rate then
        arguments.fail("%s: lr: expected one rate for all groups (or 0), got %g and %g", self.name, rate, part.lr)
      end
      rate = part.lr
    end
  end
  return rate or 0.0
end

--- Calls fn(batch, i, gradient, group, part) for every parameter of the parts that do not rest; the gradient is
-- clipped.
function M.each(parts, clip, fn)
  for _, part in ipairs(parts) do
    if part.lr > 0 then
      for i, g in ipairs(part.batch.grads) do fn(part.batch, i, lowrank.clipped(g, clip), part.group, part) end
    end
  end
end

--- Adds up what fn(batch, i, gradient, group) returns for every parameter as each() calls it: two 0-d tensors, whose
-- sums are looked at once.
---@return number, number
function M.sums(parts, clip, fn)
  return ty.scope(function()
    local first, second
    M.each(parts, clip, function(...)
      local a, b = ty.scope(function(...)
        local x, y = fn(...)
        return x:to "f64", y:to "f64"
      end, ...)
      first, second = first and first + a or a, second and second + b or b
    end)
    if not first then return 0.0, 0.0 end
    return first:item(), second:item()
  end)
end

--- exp_avg_sq's root and eps, the divisor of Adam's steps.
function M.divisor(batch, i, eps) return batch.exp_avg_sq[i]:sqrt():add_(eps) end

return M
