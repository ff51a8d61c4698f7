--- Small layers of two inputs or of bags of them, and Unflatten.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local layers = require "tycho.nn.layers"
local losses = require "tycho.nn.losses"
local functional = require "tycho.nn.functional"
local options = require "tycho.nn.options"

local define, expect, positive = base.define, options.expect, options.positive
local M = {}

--- Dimension `dim` becomes several, of `sizes` (one may be -1).
local Unflatten = define "Unflatten"
M.Unflatten = Unflatten

function Unflatten:init(dim, sizes)
  self.dim = math.tointeger(expect("Unflatten", "dim", dim, "an integer"))
  self.sizes = expect("Unflatten", "sizes", sizes, "a list of integers >= -1")
end

function Unflatten:forward(x)
  expect("Unflatten", "x", x, "a tensor")
  local dim, shape = self.dim < 0 and self.dim + x.ndim or self.dim, {}
  if dim < 0 or dim >= x.ndim then
    options.fail("Unflatten: dim: expected a dimension of x [%s], got %d", table.concat(x.shape, ", "), self.dim)
  end
  for d, size in ipairs(x.shape) do
    if d - 1 == dim then table.move(self.sizes, 1, #self.sizes, #shape + 1, shape) else shape[#shape + 1] = size end
  end
  return x:reshape(shape)
end

function Unflatten:describe() return ("%d, { %s }"):format(self.dim, table.concat(self.sizes, ", ")) end

--- x weight[o] y' + bias[o] for each output o; x [..., inputs1], y [..., inputs2]. options: bias (true).
---@overload fun(inputs1: integer, inputs2: integer, outputs: integer, options?: {bias: boolean}): Module
local Bilinear = define "Bilinear"
M.Bilinear = Bilinear

function Bilinear:init(inputs1, inputs2, outputs, given)
  local o = options.read("Bilinear", given, { bias = true })
  self.in1_features = positive("Bilinear", "inputs1", inputs1)
  self.in2_features = positive("Bilinear", "inputs2", inputs2)
  self.out_features = positive("Bilinear", "outputs", outputs)
  local function fill(t) init.uniform(t, -inputs1 ^ -0.5, inputs1 ^ -0.5) end
  self.weight = options.parameter({ outputs, inputs1, inputs2 }, fill)
  if o.bias then self.bias = options.parameter({ outputs }, fill) end
end

function Bilinear:forward(x, y)
  for i, name in ipairs { "x", "y" } do
    local t, width = x, self.in1_features
    if i == 2 then t, width = y, self.in2_features end
    if not ty.is_tensor(t) or t.ndim == 0 or t:size(-1) ~= width then
      options.fail("Bilinear: %s: expected a tensor [..., %d], got %s", name, width, options.describe(t))
    end
  end
  local shape = x.shape
  shape[#shape] = self.out_features
  local left = x:reshape(-1, self.in1_features):matmul(self.weight:permute(1, 0, 2):flatten(1))
  left = left:reshape(-1, self.out_features, self.in2_features)
  local z = left:matmul(y:reshape(-1, self.in2_features, 1)):reshape(shape)
  return self.bias and z + self.bias or z
end

function Bilinear:describe()
  return ("%d, %d, %d"):format(self.in1_features, self.in2_features, self.out_features)
end

--- nn.cosine_similarity along dim (-1).
local CosineSimilarity = define "CosineSimilarity"
M.CosineSimilarity = CosineSimilarity

function CosineSimilarity:init(dim) self.dim = expect("CosineSimilarity", "dim", dim, "an integer or nil") or -1 end

function CosineSimilarity:forward(x, y) return functional.cosine_similarity(x, y, { dim = self.dim }) end

--- nn.pairwise_distance. options: p (2), eps (1e-6), keepdim (false).
local PairwiseDistance = define "PairwiseDistance"
M.PairwiseDistance = PairwiseDistance

function PairwiseDistance:init(given)
  local o = options.read("PairwiseDistance", given, { p = 2, eps = 1e-6, keepdim = false },
    { p = "a number > 0", eps = "a finite number >= 0" })
  self.p, self.eps, self.keepdim = o.p, o.eps, o.keepdim
end

function PairwiseDistance:forward(x, y)
  return losses.pairwise_distance(x, y, { p = self.p, eps = self.eps, keepdim = self.keepdim })
end

--- Sums, means or largest values of the rows of an embedding, bag by bag. layer(index [bags, length]), or layer(index
-- [n], offsets [bags]): the bags are index[offsets[i]] up to the next offset. options: mode ("mean", "sum" or "max"),
-- padding_index (-1: none; a row that belongs to no bag).
---@overload fun(count: integer, width: integer, options?: table): Module
local EmbeddingBag = define "EmbeddingBag"
M.EmbeddingBag = EmbeddingBag

function EmbeddingBag:init(count, width, given)
  local o = options.read("EmbeddingBag", given, { mode = "mean", padding_index = -1 },
    { mode = '"mean" or "sum" or "max"', padding_index = "an integer >= -1" })
  self.mode, self.padding_index = o.mode, o.padding_index
  self.weight = layers.Embedding(count, width, { padding_index = o.padding_index }).weight
end

-- The rows of each bag put together: rows [n, width], bag [n], how many bags, whether a row counts.
local function combine(self, rows, bag, bags, counts)
  local width = rows:size(1)
  if self.mode ~= "max" then
    local sum = ty.zeros({ bags, width }, { dtype = rows.dtype, device = rows.device })
      :index_add(0, bag, rows * counts:unsqueeze(1))
    if self.mode == "sum" then return sum end
    local n = ty.zeros({ bags }, { dtype = rows.dtype, device = rows.device }):index_add(0, bag, counts)
    return sum / n:clamp(1):unsqueeze(1)
  end
  local low = rows:masked_fill(counts:eq(0):unsqueeze(1), -math.huge)
  local start = ty.full({ bags, width }, -math.huge, { dtype = rows.dtype, device = rows.device })
  local most = start:scatter_reduce(0, bag:unsqueeze(1):expand(rows.shape), low, "amax")
  return most:masked_fill(most:eq(-math.huge), 0) -- bags without rows
end

--- weights: factors of the rows, shaped like index, for mode "sum".
function EmbeddingBag:forward(index, offsets, weights)
  expect("EmbeddingBag", "index", index, "a tensor")
  if weights and self.mode ~= "sum" then
    options.fail("EmbeddingBag: weights: expected none in mode \"%s\"", self.mode)
  end
  local bag, bags
  if index.ndim == 2 and offsets == nil then
    bags = index:size(0)
    bag = ty.arange(bags, { device = index.device }):unsqueeze(1):expand(index.shape):reshape(-1)
  elseif index.ndim == 1 and ty.is_tensor(offsets) and offsets.ndim == 1 and offsets:size(0) > 0 then
    bags = offsets:size(0)
    local place = ty.arange(index:size(0), { device = index.device }):unsqueeze(1)
    bag = offsets:unsqueeze(0):le(place):to("i64"):sum { 1 } - 1
  else
    options.fail("EmbeddingBag: index: expected a tensor [bags, length], or [n] with offsets [bags], got %s and %s",
      options.describe(index), options.describe(offsets))
  end
  index = index:reshape(-1)
  local rows = ty.embedding(self.weight, index, self.padding_index)
  if weights then rows = rows * expect("EmbeddingBag", "weights", weights, "a tensor"):reshape(-1, 1) end
  return combine(self, rows, bag, bags, index:ne(self.padding_index):to(rows.dtype))
end

function EmbeddingBag:describe()
  return ("%d, %d, mode = \"%s\""):format(self.weight:size(0), self.weight:size(1), self.mode)
end

return M
