--- Forgetting samples without training: weights that matter to them much more than to all data are made smaller.
-- Foster et al. 2023, "Fast Machine Unlearning Without Retraining Through Selective Synaptic Dampening" (arXiv
-- 2308.07707).
--
--     local whole = fisher.diagonal(model, training)                      -- once, and kept in place of the data
--     dampening.apply(model, fisher.diagonal(model, forget), whole, { alpha = 10, lambda = 1 })
--
-- With F_f and F_D the diagonals of the Fisher information of what is to be forgotten and of all training data, a
-- weight is chosen where F_f > alpha F_D, and multiplied by min(lambda F_D / F_f, 1).
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- A diagonal's tensor for a parameter.
local function entry(who, what, diagonal, name, parameter)
  local x = diagonal[name]
  if not ty.is_tensor(x) or table.concat(x.shape, ",") ~= table.concat(parameter.shape, ",") then
    arguments.fail("%s: %s: expected a tensor [%s] for %s, got %s", who, what, table.concat(parameter.shape, ", "),
      name, arguments.describe(x))
  end
  return x
end

--- Dampens a model's weights in place. Parameters that the diagonals do not name stay. options: alpha (10: how many
-- times as important to the forgotten samples a weight has to be), lambda (1: strength, the smaller the more). Returns
-- how many weights were chosen, of how many, and what these keep in the mean.
---@param model Module
---@param forget table<string, Tensor>  as fisher.diagonal gives it
---@param whole table<string, Tensor>
---@param options? { alpha?: number, lambda?: number }
---@return { selected: integer, total: integer, kept: number }
function M.apply(model, forget, whole, options)
  local who = "curation.dampening.apply"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "forget", forget, "a table")
  arguments.expect(who, "whole", whole, "a table")
  local o = arguments.read(who, options, { alpha = 10, lambda = 1 },
    { alpha = "a number > 0", lambda = "a number >= 0" })
  local report, parts = { selected = 0, total = 0, kept = 0.0 }, {}
  for name, parameter in model:named_parameters() do
    if forget[name] ~= nil then
      parts[#parts + 1] = { parameter, entry(who, "forget", forget, name, parameter),
        entry(who, "whole", whole, name, parameter) }
    end
  end
  if #parts == 0 then arguments.fail("%s: forget: expected the model's parameters by name, got none of them", who) end
  ty.no_grad(function()
    for _, part in ipairs(parts) do
      ty.scope(function()
        local parameter, own, all = part[1], part[2], part[3]
        local chosen = own:gt(all * o.alpha)
        local factor = (all * o.lambda / ty.where(chosen, own, 1.0)):clamp(0, 1)
        parameter:copy_(ty.where(chosen, parameter * factor, parameter))
        local count = chosen:to("f64"):sum():item()
        report.selected, report.total = report.selected + math.tointeger(count), report.total + parameter:numel()
        report.kept = report.kept + ty.where(chosen, factor, 0.0):to("f64"):sum():item()
      end)
    end
  end)
  if report.selected > 0 then report.kept = report.kept / report.selected end
  return report
end

return M
