--- How near pictures are to others, and how varied samples are. Likeness of pictures, one by one: psnr, ssim, ms_ssim,
-- perceptual. Nearness of sets of them, by features: frechet, kernel, precision_recall. To their texts: alignment.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local distribution = require "tycho.diffusion.measure.distribution"
local likeness = require "tycho.diffusion.measure.likeness"

local M = {}
for _, part in ipairs { likeness, distribution } do
  for name, fn in pairs(part) do M[name] = fn end
end

-- Rows of samples [n, ...] as f64 [n, width].
local function rows(who, what, x)
  arguments.expect(who, what, x, "a tensor")
  if x.ndim < 2 then arguments.fail("%s: %s: expected [n, ...], got %s", who, what, arguments.describe(x)) end
  return x:to("f64"):flatten(1)
end

--- The peak signal-to-noise ratio in dB of each picture of a [n, ...] against that of b, f64 [n]; equal ones give
-- infinity. options: range (1: the difference between the largest and the smallest value there can be; 2 for pictures
-- from -1 to 1, 255 for bytes).
---@param a Tensor
---@param b Tensor
---@param options? {range: number}
---@return Tensor
function M.psnr(a, b, options)
  local who = "measure.psnr"
  local x, y = rows(who, "a", a), rows(who, "b", b)
  local o = arguments.read(who, options, { range = 1 }, { range = "a finite number > 0" })
  if table.concat(a.shape, ",") ~= table.concat(b.shape, ",") then
    arguments.fail("%s: b: expected the shape of a, [%s], got [%s]", who, table.concat(a.shape, ", "),
      table.concat(b.shape, ", "))
  end
  return (x - y):square():mean { 1 }:log() * (-10 / math.log(10)) + 20 * math.log(o.range, 10)
end

--- Distances between the rows of a [n, ...] and b [m, ...], f64 [n, m].
function M.distances(a, b)
  a, b = rows("measure.distances", "a", a), rows("measure.distances", "b", b)
  local squares = a:square():sum(1):unsqueeze(1) + b:square():sum(1):unsqueeze(0) - a:matmul(b:transpose(0, 1)) * 2
  return squares:clamp(0):sqrt()
end

--- Distances of all pairs within each class together: their mean (over classes of the mean), and the smallest.
---@param samples Tensor  [n, ...]
---@param labels Tensor   i64 [n]
---@return number mean, number smallest
function M.spread_within_classes(samples, labels, classes)
  local who = "measure.spread_within_classes"
  rows(who, "samples", samples)
  arguments.expect(who, "labels", labels, "a tensor")
  arguments.expect(who, "classes", classes, "an integer >= 1")
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
  samples, reference = rows("measure.nearest", "samples", samples), rows("measure.nearest", "reference", reference)
  return M.distances(samples, reference):min(1):mean():item()
end

return M
