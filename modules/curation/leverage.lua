--- Which samples span what a data set's representations span: leverage scores, in time linear in the samples. Wu et al.
-- 2026, "ScalSelect: Scalable Training-Free Multimodal Data Selection for Efficient Visual Instruction Tuning" (arXiv
-- 2602.11636), and its reference code; the scores are those of Drineas et al. 2008, "Relative-Error CUR Matrix
-- Decompositions".
--
--     local chosen = leverage.select(features, 0.16)        -- positions, i64
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function matrix(who, x)
  if not ty.is_tensor(x) or x.ndim ~= 2 or not x:is_floating_point() or x.shape[1] < 1 then
    arguments.fail("%s: features: expected a float tensor [samples, d], got %s", who, arguments.describe(x))
  end
  return x
end

-- Calls fn(rows in f64, first) for parts of x of so many rows.
local function each_part(x, part, fn)
  for first = 0, x.shape[1] - 1, part do
    ty.scope(function() fn(x:narrow(0, first, math.min(part, x.shape[1] - first)):to "f64", first) end)
  end
end

--- A function that prepares rows of features as all of them say: centred, each column divided by its standard deviation
-- (scale), each row of length 1 (unit). Columns and rows of zeros stay so.
---@param features Tensor  [samples, d]
---@param options? { scale?: boolean, unit?: boolean, part?: integer }
---@return fun(rows: Tensor): Tensor
function M.preparation(features, options)
  local who = "curation.leverage.preparation"
  matrix(who, features)
  local o = arguments.read(who, options, { scale = true, unit = true, part = 8192 }, { part = "an integer > 0" })
  local n, d = features.shape[1], features.shape[2]
  local kind = { dtype = "f64", device = features.device }
  local sum, squares = ty.zeros({ d }, kind), ty.zeros({ d }, kind)
  each_part(features, o.part, function(x) sum:add_(x:sum { 0 }) end)
  local mean = sum / n
  each_part(features, o.part, function(x) squares:add_((x - mean):square():sum { 0 }) end)
  local deviation = (squares / n):sqrt()
  deviation = ty.where(deviation:gt(0), deviation, 1.0)
  return function(rows)
    local x = rows:to "f64" - mean
    if o.scale then x = x / deviation end
    if o.unit then
      local length = x:square():sum({ 1 }, true):sqrt()
      x = x / ty.where(length:gt(0), length, 1.0)
    end
    return x
  end
end

--- Leverage scores of samples: with X the prepared features and U_k the left singular vectors of its k largest singular
-- values, the squared lengths of the rows of U_k, which sum to k. k is the smallest number whose squared singular
-- values have the share `energy` of all. X X' is never made: X' X (d x d) is added up part by part, and V, its
-- eigenvectors, give U_k = X V_k / s. options: energy (0.9), scale, unit (true: see preparation), part (8192 rows at a
-- time).
---@param features Tensor  [samples, d]
---@param options? { energy?: number, scale?: boolean, unit?: boolean, part?: integer }
---@return Tensor scores  f64 [samples]
---@return integer k
function M.scores(features, options)
  local who = "curation.leverage.scores"
  matrix(who, features)
  local o = arguments.read(who, options, { energy = 0.9, scale = true, unit = true, part = 8192 },
    { energy = "a number in [0, 1]", part = "an integer > 0" })
  local prepare = M.preparation(features, { scale = o.scale, unit = o.unit, part = o.part })
  local n, d = features.shape[1], features.shape[2]
  local gram = ty.zeros({ d, d }, { dtype = "f64", device = features.device })
  each_part(features, o.part, function(rows)
    local x = prepare(rows)
    gram:add_(x:transpose(0, 1):matmul(x))
  end)
  local values, vectors = gram:eigh() -- in rising order
  local squares = values:clamp(0):flip { 0 }:tolist()
  local total, so_far, k = 0, 0, 0
  for _, value in ipairs(squares) do total = total + value end
  if total == 0 then arguments.fail("%s: features: expected samples that differ, got %d that are alike", who, n) end
  while k < d and so_far < o.energy * total do
    k = k + 1
    so_far = so_far + squares[k]
  end
  k = math.max(k, 1)
  while k > 1 and squares[k] <= total * 1e-14 do k = k - 1 end -- directions that no sample has
  local basis = vectors:narrow(1, d - k, k) / values:narrow(0, d - k, k):sqrt()
  local scores = ty.empty({ n }, { dtype = "f64", device = features.device })
  each_part(features, o.part, function(rows, first)
    scores:narrow(0, first, rows.shape[1]):copy_(prepare(rows):matmul(basis):square():sum { 1 })
  end)
  return scores, k
end

--- Positions of the share of samples with the largest scores, i64, the largest first. options: those of scores().
---@param features Tensor  [samples, d]
---@param share number     of the samples, 0.16 in the paper
---@param options? table
---@return Tensor positions
---@return Tensor scores
---@return integer k
function M.select(features, share, options)
  local who = "curation.leverage.select"
  matrix(who, features)
  arguments.expect(who, "share", share, "a number in [0, 1]")
  local scores, k = M.scores(features, options)
  local count = math.max(1, math.floor(share * features.shape[1] + 0.5))
  return scores:argsort(0, true):narrow(0, 0, count):clone(), scores, k
end

return M
