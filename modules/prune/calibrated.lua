--- Pruning by what layers get to see of some text: what SparseGPT and Wanda share. Blocks go one after the other, each
-- layer with everything before it pruned, and all get masks in the end.
local ty = require "tycho"
local blocks = require "tycho.quant.blocks"
local gptq = require "tycho.quant.gptq"
local masks = require "tycho.prune.masks"

local nn = ty.nn
local M = {}

--- Prunes the linear layers of a model's blocks. own: further options with their defaults, besides sparsity, pattern
-- and those of quant.blocks.walk; solve(w, moment, o): the pruned weight [outputs, inputs] and what it keeps, bool, for
-- inputs whose x' x sums up to `moment`; check(o): raises where an option of `own` is wrong. Returns masks.report(),
-- with error in each row, |(W - W') X|^2 / |W X|^2.
---@param who string  in front of errors
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options table
---@param own table
---@param solve fun(w: Tensor, moment: Tensor, o: table): Tensor, Tensor
---@param check? fun(o: table)
---@return { name: string, error: number, parameters: integer, sparsity: number }[] report
function M.prune(who, model, data, options, own, solve, check)
  local defaults = { sparsity = nn.none, pattern = nn.none }
  for _, more in ipairs { own, blocks.options } do
    for key, value in pairs(more) do defaults[key] = value end
  end
  local o = nn.options(who, options, defaults)
  if (o.sparsity == nil) == (o.pattern == nil) then error(who .. ": expected sparsity or pattern, and not both", 0) end
  local n, m = masks.pattern(who, o.pattern)
  if not m then masks.check_sparsity(who, o.sparsity) end
  if check then check(o) end
  if #masks.masked(who, model) > 0 then
    error(who .. ": the model has masks already; prune.release takes them away", 0)
  end
  for _, layer in ipairs(blocks.linears(who, model, o.skip)) do
    local w = gptq.weight_of(who, layer)
    if m then masks.check_groups(who, n, m, w.shape[2]) end
  end
  local done, notes, new = {}, {}, {}
  blocks.walk(who, model, data, o, function(group, moment)
    for _, layer in ipairs(group) do
      local module, w = layer.module, gptq.weight_of(who, layer)
      local value, keep = gptq.solved(who, layer.name, solve, w, moment, o)
      done[#done + 1], notes[#notes + 1] = layer, { error = gptq.error(w, value, moment) }
      module.weight:detach():copy_(nn.surgery.laid_out(module, value))
      new[#new + 1] = { module, ty.keep(nn.surgery.laid_out(module, keep)) }
    end
  end)
  for _, entry in ipairs(new) do masks.attach(entry[1], entry[2]) end
  ty.core.program.renew()
  return masks.report(done, notes)
end

return M
