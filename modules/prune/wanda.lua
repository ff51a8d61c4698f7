--- Wanda: a weight goes by its size times that of the input that it is multiplied with, compared with the others of its
-- output; what stays is not changed. Sun et al. 2024, "A Simple and Effective Pruning Approach for Large Language
-- Models".
local ty = require "tycho"
local calibrated = require "tycho.prune.calibrated"
local masks = require "tycho.prune.masks"

local nn = ty.nn
local M = {}

--- Prunes w [rows, columns] for inputs whose x' x sums up to `moment` [columns, columns]: by |w_ij| |x_j| within each
-- row (section 3 of the paper). o: pattern or sparsity.
---@param w Tensor
---@param moment Tensor
---@param o { sparsity?: number, pattern?: string }
---@return Tensor value  [rows, columns]
---@return Tensor keep   bool [rows, columns]
function M.solve(w, moment, o)
  local n, m = masks.pattern("prune.wanda", o.pattern)
  local scores, columns = w:to("f64"):abs() * moment:diagonal():sqrt():unsqueeze(0), w.shape[2]
  local keep
  if m then keep = masks.largest_of_groups(scores, n, m) else
    local gone = math.floor(o.sparsity * columns + 0.5)
    keep = ty.ones(w.shape, { dtype = "u8", device = w.device })
    if gone > 0 then keep = keep:scatter(1, scores:argsort(1):narrow(1, 0, gone), 0) end
    keep = keep:to "bool"
  end
  return ty.where(keep, w, 0), keep
end

local function wanda(model, data, options)
  return calibrated.prune("prune.wanda", model, data, options, {}, M.solve)
end

--- Prunes the linear layers of a model's blocks, each with everything before it pruned, and gives them masks as
-- prune.magnitude does. data: llm.data.Packed, or a list of its batches. options: pattern ("2:4": of each 4
-- neighbouring inputs 2 stay), or sparsity (the share of each output's weights that goes); rows (128), batch (8), seed
-- (0), device, skip: as in quant.gptq.quantize(). Returns a list of { name, error }, error being |(W - W') X|^2 /
-- |W X|^2.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options {sparsity?: number, pattern?: string, rows?: integer, seed?: integer}
---@return { name: string, error: number, parameters: integer, sparsity: number }[] report  with parameters,
---  sparsity, dense (bytes in half precision) and bytes (of what prune.compact keeps) of all
function M.wanda(model, data, options)
  return nn.for_caller(wanda, model, data, options)
end

return M
