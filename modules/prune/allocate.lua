--- Which of its choices each layer takes under one budget for all: the multiple-choice knapsack problem, by dynamic
-- programming. Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", chapter 11.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function choose(layers, budget, units)
  local who = "prune.allocate"
  arguments.expect(who, "layers", layers, "a list of tables")
  arguments.expect(who, "budget", budget, "a finite number > 0")
  units = arguments.expect(who, "units", units or 30000, "an integer >= 1")
  if #layers == 0 then arguments.fail("%s: layers: expected at least one, got an empty table", who) end
  -- Costs are rounded up to units, so that what is chosen never costs more than the budget.
  local unit, full = budget / units, units + 1
  local least, picks = ty.full({ full }, 0, { dtype = "f64" }), {}
  for i, choices in ipairs(layers) do
    if type(choices) ~= "table" or #choices == 0 then
      arguments.fail("%s: layers: expected choices for layer %d, got %s", who, i, arguments.describe(choices))
    end
    local errors = {}
    for k, choice in ipairs(choices) do
      local what = ("choice %d of layer %d"):format(k, i)
      arguments.expect(who, what, choice, "a table")
      arguments.expect(who, "cost of " .. what, choice.cost, "a finite number >= 0")
      arguments.expect(who, "error of " .. what, choice.error, "a finite number")
      local cost = math.ceil(choice.cost / unit - 1e-9)
      if cost > units then
        errors[k] = ty.full({ full }, math.huge, { dtype = "f64" })
      else -- with so many units to spend, the layers before it had `cost` fewer
        errors[k] = ty.concat({ ty.full({ cost }, math.huge, { dtype = "f64" }), least:narrow(0, 0, full - cost) }, 0)
          + choice.error
      end
    end
    local all = ty.stack(errors, 0)
    least, picks[i] = all:min(0), all:argmin(0)
  end
  local sum = least:narrow(0, units, 1):item()
  if sum == math.huge then
    arguments.fail("%s: budget: expected at least the cheapest choices of all layers, got %g", who, budget)
  end
  local chosen, left, cost = {}, units, 0
  for i = #layers, 1, -1 do
    chosen[i] = picks[i]:narrow(0, left, 1):item() + 1
    local choice = layers[i][chosen[i]]
    left, cost = left - math.ceil(choice.cost / unit - 1e-9), cost + choice.cost
  end
  return chosen, sum, cost
end

--- The choices, one of each layer, with the least sum of errors whose costs are within a budget.
---@param layers { cost: number, error: number }[][]  the choices of each layer
---@param budget number
---@param units? integer   30000: parts of the budget that costs are rounded up to
---@return integer[] chosen  of each layer, from 1
---@return number error      their sum
---@return number cost       their sum, before rounding
function M.choose(layers, budget, units)
  return require("tycho").nn.for_caller(function()
    return ty.no_grad(function() return choose(layers, budget, units) end)
  end)
end

return M
