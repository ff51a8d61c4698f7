--- Samples that cover a data set: the one next to each centre of k-means. Lloyd 1982, "Least Squares Quantization in
-- PCM"; as a selection of data, after Sener and Savarese 2018, "Active Learning for Convolutional Neural Networks: A
-- Core-Set Approach".
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- Squared distances of all samples to all centres.
local function distances(x, centres)
  return x:square():sum({ 1 }, true) + centres:square():sum { 1 } - x:matmul(centres:transpose(0, 1)) * 2
end

--- Positions of samples, i64, each the nearest to one of `count` centres; fewer where one is the nearest to several.
-- Centres begin at samples drawn at random; one that loses all of its samples stays where it was. options: rounds (10).
---@param features Tensor  [samples, d]
---@param count integer
---@param options? { rounds?: integer }
---@return Tensor positions
---@return Tensor centres  [count, d]
function M.select(features, count, options)
  local who = "curation.coverage.select"
  if not ty.is_tensor(features) or features.ndim ~= 2 or not features:is_floating_point() then
    arguments.fail("%s: features: expected a float tensor [samples, d], got %s", who, arguments.describe(features))
  end
  arguments.expect(who, "count", count, "an integer > 0")
  local o = arguments.read(who, options, { rounds = 10 }, { rounds = "an integer >= 0" })
  local n = features.shape[1]
  if count > n then arguments.fail("%s: count: expected at most the %d samples, got %d", who, n, count) end
  local centres = features:index_select(0, ty.randperm(n):narrow(0, 0, count):to { device = features.device })
  for _ = 1, o.rounds do
    local member = ty.one_hot(distances(features, centres):argmin(1), count):to(features.dtype)
    local size = member:sum({ 0 }):unsqueeze(1)
    centres = ty.where(size:gt(0), member:transpose(0, 1):matmul(features) / size:clamp(1), centres)
  end
  local chosen, seen = {}, {}
  for _, place in ipairs(distances(features, centres):argmin(0):tolist()) do
    if not seen[place] then chosen[#chosen + 1], seen[place] = place, true end
  end
  return ty.tensor(chosen, { dtype = "i64" }), centres
end

return M
