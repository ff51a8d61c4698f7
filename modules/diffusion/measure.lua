--- How varied samples are, by Euclidean distances between them.
local ty = require "tycho"

local M = {}

--- Distances between the rows of a [n, ...] and b [m, ...], f64 [n, m].
function M.distances(a, b)
  a, b = a:to("f64"):flatten(1), b:to("f64"):flatten(1)
  local squares = a:square():sum(1):unsqueeze(1) + b:square():sum(1):unsqueeze(0) - a:matmul(b:transpose(0, 1)) * 2
  return squares:clamp(0):sqrt()
end

--- Distances of all pairs within each class together: their mean (over classes of the mean), and the smallest.
---@param samples Tensor  [n, ...]
---@param labels Tensor   i64 [n]
---@return number mean, number smallest
function M.spread_within_classes(samples, labels, classes)
  local total, count, smallest = 0.0, 0, math.huge
  for class = 0, classes - 1 do
    local positions = labels:eq(class):nonzero():squeeze(1)
    local n = positions:numel()
    if n > 1 then
      local d = M.distances(samples:index_select(0, positions), samples:index_select(0, positions))
      total = total + d:sum():item() / (n * (n - 1)) -- the diagonal is 0
      count = count + 1
      smallest = math.min(smallest, (d + ty.eye(n, n, { dtype = "f64", device = d.device }) * 1e9):min():item())
    end
  end
  return total / math.max(1, count), smallest
end

--- Mean distance from each sample to its nearest neighbour in `reference`: against copies of the training set.
function M.nearest(samples, reference)
  return M.distances(samples, reference):min(1):mean():item()
end

return M
