--- How near two sets of samples are as a whole, by features of a network [n, width]: distances of their distributions,
-- and which share of the one lies within the other.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

local function rows(who, what, x, least)
  expect(who, what, x, "a tensor")
  if x.ndim ~= 2 or x.shape[1] < least then
    fail("%s: %s: expected features [n, width] of at least %d samples, got %s", who, what, least, describe(x))
  end
  return x:to "f64"
end

local function same_width(who, a, b)
  if a.shape[#a.shape] ~= b.shape[#b.shape] then
    fail("%s: b: expected features of width %d as those of a, got %d", who, a.shape[#a.shape], b.shape[#b.shape])
  end
end

--- Mean and covariance of features [n, width]: what frechet() needs of them, to be kept.
---@param x Tensor
---@return { mean: Tensor, cov: Tensor, count: integer }
function M.moments(x)
  x = rows("measure.moments", "x", x, 2)
  local mean = x:mean { 0 }
  local d = x - mean
  return { mean = mean, cov = d:transpose(0, 1):matmul(d) / (x.shape[1] - 1), count = x.shape[1] }
end

-- The square root of a symmetric matrix without negative eigenvalues.
local function root(a)
  local values, vectors = a:eigh()
  return (vectors * values:clamp(0):sqrt()):matmul(vectors:transpose(0, 1))
end

--- The Fréchet distance of two sets of features [n, width] as normal distributions: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1
-- C2)^(1/2)). Heusel et al. 2017 ("FID" where the features are those of a certain network). It grows as samples get
-- fewer: compare numbers of one count. a and b may be what moments() returned.
---@param a Tensor|table
---@param b Tensor|table
---@return number
function M.frechet(a, b)
  local who = "measure.frechet"
  local function read(what, x)
    if type(x) == "table" and ty.is_tensor(x.mean) and ty.is_tensor(x.cov) then return x end
    return M.moments(rows(who, what, x, 2))
  end
  local p, q = read("a", a), read("b", b)
  same_width(who, p.mean, q.mean)
  -- (C1 C2)^(1/2) has the eigenvalues of (C1^(1/2) C2 C1^(1/2))^(1/2), which is symmetric.
  local half = root(p.cov)
  local values = half:matmul(q.cov):matmul(half):eigh()
  local traces = (p.cov:diagonal():sum() + q.cov:diagonal():sum()):item()
  return (p.mean - q.mean):square():sum():item() + traces - 2 * values:clamp(0):sqrt():sum():item()
end

-- Squared distances [n, m].
local function squares(a, b)
  return (a:square():sum(1):unsqueeze(1) + b:square():sum(1):unsqueeze(0) - a:matmul(b:transpose(0, 1)) * 2):clamp(0)
end

-- For each sample, the squared distance to its k-th nearest neighbour among the others.
local function radii(x, k) return (squares(x, x):kthvalue(k + 1, 1)) end

--- Precision, the share of `drawn` that lies among `real`, and recall, the share of `real` that lies among `drawn`: a
-- sample lies among others where it is no further from one of these than that one's k-th nearest neighbour.
-- Kynkäänniemi et al. 2019, "Improved Precision and Recall Metric for Assessing Generative Models". options: k (3).
---@param real Tensor   features [n, width]
---@param drawn Tensor  features [m, width]
---@param options? {k?: integer}
---@return number precision
---@return number recall
function M.precision_recall(real, drawn, options)
  local who = "measure.precision_recall"
  local o = arguments.read(who, options, { k = 3 }, { k = "an integer >= 1" })
  real, drawn = rows(who, "real", real, o.k + 1), rows(who, "drawn", drawn, o.k + 1)
  same_width(who, real, drawn)
  local d = squares(drawn, real)
  local precise = d:le(radii(real, o.k):unsqueeze(0)):any(1)
  local recalled = d:le(radii(drawn, o.k):unsqueeze(1)):any(0)
  return precise:to("f64"):mean():item(), recalled:to("f64"):mean():item()
end

--- The kernel distance of two sets of features [n, width]: the unbiased estimate of the squared maximum mean
-- discrepancy with the kernel (x y / width + 1)^3, which does not grow as samples get fewer, and may come out below 0.
-- Binkowski et al. 2018, "Demystifying MMD GANs" ("KID"). With `size`, the mean over `subsets` draws of so many of
-- each, and their standard deviation. options: size (all), subsets (100), seed (0).
---@param a Tensor
---@param b Tensor
---@param options? {size?: integer, subsets?: integer, seed?: integer}
---@return number mean
---@return number deviation  0 without size
function M.kernel(a, b, options)
  local who = "measure.kernel"
  local o = arguments.read(who, options, { size = arguments.none, subsets = 100, seed = 0 },
    { size = "an integer >= 2", subsets = "an integer >= 1", seed = "an integer" })
  a, b = rows(who, "a", a, 2), rows(who, "b", b, 2)
  same_width(who, a, b)
  local width = a.shape[2]
  local function similar(x, y) return (x:matmul(y:transpose(0, 1)) / width + 1) ^ 3 end
  local function estimate(x, y)
    local n, m, xx, yy = x.shape[1], y.shape[1], similar(x, x), similar(y, y)
    return ((xx:sum() - xx:diagonal():sum()) / (n * (n - 1)) + (yy:sum() - yy:diagonal():sum()) / (m * (m - 1))
      - similar(x, y):mean() * 2):item()
  end
  if not o.size then return estimate(a, b), 0.0 end
  local most = math.min(a.shape[1], b.shape[1])
  if o.size > most then fail("%s: size: expected at most %d, the samples there are, got %d", who, most, o.size) end
  local before, values = ty.rng_state(), {}
  ty.manual_seed(o.seed)
  for i = 1, o.subsets do
    local function some(x)
      return x:index_select(0, ty.randperm(x.shape[1]):narrow(0, 0, o.size):to { device = x.device })
    end
    values[i] = ty.scope(function() return estimate(some(a), some(b)) end)
  end
  ty.rng_state(before)
  local mean, sum = 0, 0
  for _, value in ipairs(values) do mean = mean + value / #values end
  for _, value in ipairs(values) do sum = sum + (value - mean) ^ 2 end
  return mean, math.sqrt(sum / #values)
end

--- The cosine of each picture's features to its text's, f64 [n], of features [n, width] in a space that both share
-- (CLIPModel's image_features and text_features). Hessel et al. 2021, "CLIPScore", without its factor of 2.5 and the
-- cut at 0.
---@param pictures Tensor
---@param texts Tensor
---@return Tensor
function M.alignment(pictures, texts)
  local who = "measure.alignment"
  local x, y = rows(who, "pictures", pictures, 1), rows(who, "texts", texts, 1)
  if table.concat(x.shape, ",") ~= table.concat(y.shape, ",") then
    fail("%s: texts: expected the shape of pictures, [%s], got %s", who, table.concat(x.shape, ", "), describe(texts))
  end
  return (x * y):sum(1) / (x:square():sum(1) * y:square():sum(1)):sqrt()
end

return M
