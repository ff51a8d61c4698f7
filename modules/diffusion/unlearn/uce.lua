--- Unified Concept Editing: keys and values of cross-attention in closed form, so that the concept's tokens c get what
-- an anchor's tokens c* got, and tokens p of what is kept get what they got:
--
--     W = (a sum W0 c* c' + b sum W0 p p' + lambda W0) (a sum c c' + b sum p p' + lambda I)^-1
--
-- Gandikota et al. 2024, "Unified Concept Editing in Diffusion Models", equation 7, with the scales of its code. Tokens
-- are what the text encoder makes of prompts: from the concept's first token on they know of it, those before do not.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local tuning = require "tycho.diffusion.unlearn.tuning"

-- What a text encoder makes of prompts, as rows f64 [tokens, width]; from: bool [n, tokens], the rows that are wanted.
local function rows_of(painter, prompts, wanted)
  local hidden = painter:condition(prompts).text.embeddings
  hidden = hidden:flatten(0, 1):to "f64"
  if not wanted then return hidden end
  return hidden:index_select(0, wanted:flatten():nonzero():select(1, 0):to { device = hidden.device })
end

-- From the first true of each row on.
local function from_first(positions) return positions:to("i64"):cumsum(1):gt(0) end

local defaults = { erase = 1.0, preserve = 0.1, lambda = 0.1 }
local names = { "edits", "targets", "kept" }
local kinds = { erase = "a finite number >= 0", preserve = "a finite number >= 0", lambda = "a finite number > 0" }

--- The weight W of what W0 [outputs, width] makes of tokens: edits c to targets (both [m, width]: W c = W0 target)
-- while p [k, width] stay. Where there are no edits it is W0.
---@param weight Tensor
---@param edits? Tensor
---@param targets? Tensor
---@param kept? Tensor
---@param options? { erase?: number, preserve?: number, lambda?: number }  as of uce()
---@return Tensor
local function solve(weight, edits, targets, kept, options)
  local who = "unlearn.solve_uce"
  arguments.expect(who, "weight", weight, "a tensor")
  if weight.ndim ~= 2 then
    arguments.fail("%s: weight: expected [outputs, width], got %s", who, arguments.describe(weight))
  end
  local o = arguments.read(who, options, defaults, kinds)
  local w0, width = weight:to "f64", weight.shape[2]
  local counts = {}
  for i, rows in ipairs { edits or false, targets or false, kept or false } do
    if rows and not (ty.is_tensor(rows) and rows.ndim == 2 and rows.shape[2] == width) then
      arguments.fail("%s: %s: expected [m, %d], got %s", who, names[i], width, arguments.describe(rows))
    end
    counts[i] = rows and rows.shape[1] or 0
  end
  if counts[1] ~= counts[2] then
    arguments.fail("%s: targets: expected as many rows as edits, %d, got %d", who, counts[1], counts[2])
  end
  local left, right = w0 * o.lambda, ty.eye(width, { dtype = "f64", device = weight.device }) * o.lambda
  if counts[1] > 0 then
    left = left + w0:matmul(targets:transpose(0, 1)):matmul(edits) * o.erase
    right = right + edits:transpose(0, 1):matmul(edits) * o.erase
  end
  if counts[3] > 0 then
    local square = kept:transpose(0, 1):matmul(kept) * o.preserve
    left, right = left + w0:matmul(square), right + square
  end
  return ty.solve(right, left:transpose(0, 1)):transpose(0, 1):to(weight.dtype)
end

--- Makes a painter's network forget, at once. options: erase (1) and preserve (0.1: how much each token of what is to
-- go and of what is to stay counts), lambda (0.1).
---@param painter TextToImage
---@param task UnlearnTask
---@param options? { erase?: number, preserve?: number, lambda?: number }
---@return UnlearnReport
local function uce(painter, task, options)
  tuning.check("unlearn.uce", painter, task)
  local o = arguments.read("unlearn.uce", options, defaults, kinds)
  return ty.no_grad(function()
    local wanted = from_first(task.positions)
    if #task.anchor ~= #task.forget then
      arguments.fail("unlearn.uce: task: expected an anchor for each of %d prompts, got %d", #task.forget, #task.anchor)
    end
    local edits = rows_of(painter, task.forget, wanted)
    local targets, kept = rows_of(painter, task.anchor, wanted), rows_of(painter, task.retain)
    if o.erase == 0 then edits, targets = nil, nil end
    return tuning.replace("uce", painter.network, "cross_keys", function(_, weight)
      return solve(weight, edits, targets, kept, o)
    end)
  end)
end

return { uce = uce, solve = solve }
