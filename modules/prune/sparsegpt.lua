--- SparseGPT: pruning with calibration. The columns of a layer go one after another, and what each loses is taken out
-- of those that are still to come. Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately
-- Pruned in One-Shot".
local ty = require "tycho"
local calibrated = require "tycho.prune.calibrated"
local gptq = require "tycho.quant.gptq"
local moments = require "tycho.quant.moments"
local masks = require "tycho.prune.masks"

local nn = ty.nn
local M = {}

--- Prunes w [rows, columns] for inputs whose x' x sums up to `moment` [columns, columns]. o: pattern or sparsity, damp,
-- block. Computes in f64.
---@param w Tensor
---@param moment Tensor
---@param o table
---@return Tensor value  [rows, columns] f64, with its zeros
---@return Tensor keep   bool [rows, columns]
function M.solve(w, moment, o)
  local n, m = masks.pattern("prune.sparsegpt", o.pattern)
  local columns = w.shape[2]
  local factor = gptq.inverse_factor(moments.damped(moment, o.damp))
  local left, kept, from = w:to("f64"):clone(), {}, 0
  -- What the error of the layer grows by when a weight goes, and the others make up for it: equation 3 of the paper.
  local function scores(at, count)
    return (left:narrow(1, at, count) / factor:diagonal():narrow(0, at, count)):square()
  end
  while from < columns do
    -- The mask of a block is chosen before it is pruned; with a pattern that of a group is, by the weights as they
    -- have become.
    local count = math.min(m or o.block, columns - from)
    local keep = m and masks.largest_of_groups(scores(from, m), n, m)
      or masks.all_but_smallest(scores(from, count), math.floor(o.sparsity * w.shape[1] * count + 0.5))
    local errors = {}
    for j = from, from + count - 1 do
      local column = left:narrow(1, j, 1)
      local mine = keep:narrow(1, j - from, 1)
      local error = ty.where(mine, 0, column) / factor:diagonal():narrow(0, j, 1)
      errors[#errors + 1] = error
      column:copy_(ty.where(mine, column, 0))
      local rest = from + count - 1 - j
      if rest > 0 then
        left:narrow(1, j + 1, rest):sub_(ty.matmul(error, factor:narrow(0, j, 1):narrow(1, j + 1, rest)))
      end
    end
    kept[#kept + 1] = keep
    local next = from + count
    if next < columns then
      left:narrow(1, next, columns - next):sub_(ty.matmul(ty.concat(errors, 1),
        factor:narrow(0, from, count):narrow(1, next, columns - next)))
    end
    from = next
  end
  return left, ty.concat(kept, 1)
end

local function sparsegpt(model, data, options)
  local who = "prune.sparsegpt"
  return calibrated.prune(who, model, data, options, { damp = 0.01, block = 128 }, M.solve,
    function(o) gptq.check_solver(who, o) end)
end

--- Prunes the linear layers of a model's blocks by what they get to see of some text, each with everything before it
-- pruned, and gives them masks as prune.magnitude does. data: llm.data.Packed, or a list of its batches. options:
--   pattern ("2:4": of each 4 neighbouring inputs 2 stay), or sparsity (the share that goes, of each block of columns)
--   damp (0.01 of the diagonal's mean is added to it), block (128: columns whose mask is chosen together, without a
--   pattern), rows (128), batch (8), seed (0), device, skip: as in quant.gptq.quantize()
-- Returns a list of { name, error }, error being |(W - W') X|^2 / |W X|^2.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options {sparsity?: number, pattern?: string, damp?: number, block?: integer, rows?: integer, seed?: integer}
---@return { name: string, error: number, parameters: integer, sparsity: number }[] report  with parameters,
---  sparsity, dense (bytes in half precision) and bytes (of what prune.compact keeps) of all
function M.sparsegpt(model, data, options)
  return nn.for_caller(sparsegpt, model, data, options)
end

return M
