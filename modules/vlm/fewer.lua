--- Plain ways to make a clip's tokens fewer, which methods such as tycho.vlm.flashvid are compared with. All take
-- features [n, frames, places, d] and a number of tokens, and give tokens [n, count, d] and their places i64 [n,
-- count], frame * places + place in ascending order.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local picked = require "tycho.vlm.picked"

local M = {}

local function check(who, features, count)
  if not ty.is_tensor(features) or features.ndim ~= 4 then
    arguments.fail("%s: features: expected [n, frames, places, d], got %s", who, arguments.describe(features))
  end
  local n, f, p, d = table.unpack(features.shape)
  arguments.expect(who, "count", count, ("an integer in [1, %d]"):format(f * p))
  return n, f, p, d
end

-- How many tokens each of `frames` frames gets of `count`: the first ones one more.
local function shares(count, frames)
  local list = {}
  for i = 1, frames do list[i] = count // frames + (i <= count % frames and 1 or 0) end
  return list
end

-- Tokens at places i64 [n, count] of features.
local function at(features, places)
  local n, f, p, d = table.unpack(features.shape)
  return picked.pick(features:reshape(n, f * p, d), places), places
end

--- Evenly spaced tokens: every so many along a curve that goes through the quarters of a frame's square one after the
-- other, and through theirs (Z-order), so that they lie evenly in rows, columns and frames.
---@param features Tensor
---@param count integer
---@return Tensor tokens
---@return Tensor places
function M.uniform(features, count)
  local n, f, p = check("fewer.uniform", features, count)
  local side = math.ceil(p ^ 0.5)
  local curve = {}
  for place = 0, p - 1 do
    local row, column, key = place // side, place % side, 0
    for bit = 0, 15 do key = key | ((row >> bit & 1) << (2 * bit + 1)) | ((column >> bit & 1) << (2 * bit)) end
    curve[place + 1] = { key, place }
  end
  table.sort(curve, function(a, b) return a[1] < b[1] end)
  local list = {}
  for i = 0, count - 1 do
    local where = (2 * i + 1) * f * p // (2 * count)
    list[i + 1] = where // p * p + curve[where % p + 1][2]
  end
  table.sort(list)
  return at(features, ty.tensor(list, { dtype = "i64" }):to { device = features.device }:unsqueeze(0):expand(n, count))
end

--- Of each frame the tokens with the largest attention [n, frames, places].
---@param features Tensor
---@param count integer
---@param attention Tensor
---@return Tensor tokens
---@return Tensor places
function M.attended(features, count, attention)
  local who = "fewer.attended"
  local n, f, p = check(who, features, count)
  if not ty.is_tensor(attention) or attention.ndim ~= 3 or attention.shape[3] ~= p or attention.shape[2] ~= f then
    arguments.fail("%s: attention: expected [%d, %d, %d], got %s", who, n, f, p, arguments.describe(attention))
  end
  local order, list = attention:argsort(-1, true), {}
  for i, k in ipairs(shares(count, f)) do list[i] = order:select(1, i - 1):narrow(1, 0, k) + (i - 1) * p end
  return at(features, ty.concat(list, 1):sort(1))
end

-- One round of bipartite soft matching of x [b, t, d] with sizes [b, t]: of the tokens at even positions the r that are
-- most like one at an odd position are merged into it, as the mean of all their members.
local function match(x, size, places, r)
  local b, t, d = table.unpack(x.shape)
  local device = x.device
  local even, odd = ty.arange(0, t, 2, { device = device }), ty.arange(1, t, 2, { device = device })
  local unit = ty.nn.normalize(x)
  local alike = unit:index_select(1, even):matmul(unit:index_select(1, odd):transpose(1, 2))
  local best, to = alike:max { 2 }, alike:argmax(2)
  local order = best:argsort(1, true)
  local gone = order:narrow(1, 0, r)
  local kept = order:narrow(1, r, even.shape[1] - r):sort(1)
  local target = to:gather(1, gone)
  local function part(y, index) return picked.pick(y:index_select(1, even), index) end
  local w = part(size, gone)
  local sums = (x * size:unsqueeze(-1)):index_select(1, odd)
    :scatter_add(1, target:unsqueeze(-1):expand(b, r, d), part(x, gone) * w:unsqueeze(-1))
  local sizes = size:index_select(1, odd):scatter_add(1, target, w)
  local at_all = ty.concat({ part(places, kept), places:index_select(1, odd) }, 1)
  local ascending = at_all:argsort(1)
  local all = ty.concat({ part(x, kept), sums / sizes:unsqueeze(-1) }, 1)
  return picked.pick(all, ascending), ty.concat({ part(size, kept), sizes }, 1):gather(1, ascending),
    at_all:gather(1, ascending)
end

--- Merges like tokens of each frame until so many are left: rounds of bipartite soft matching, each of a quarter of the
-- tokens at most. Bolya et al. 2023, "Token Merging: Your ViT But Faster", on the features themselves. A token that
-- others are merged into stays at its place.
---@param features Tensor
---@param count integer
---@return Tensor tokens
---@return Tensor places
function M.merged(features, count)
  local n, f, p, d = check("fewer.merged", features, count)
  return ty.no_grad(function()
    local given, tokens, places = shares(count, f), {}, {}
    -- Frames with as many tokens go together.
    local from = 0
    while from < f do
      local k, length = given[from + 1], 1
      while from + length < f and given[from + length + 1] == k do length = length + 1 end
      local x = features:narrow(1, from, length):reshape(n * length, p, d)
      local size = ty.ones({ n * length, p }, { dtype = x.dtype, device = x.device })
      local where = ty.arange(p, { device = x.device }):expand(n * length, p)
      if k == 0 then
        arguments.fail("fewer.merged: count: expected at least one for each of %d frames, got %d", f, count)
      end
      while x.shape[2] > k do
        x, size, where = match(x, size, where, math.min(x.shape[2] - k, math.max(1, x.shape[2] // 4)))
      end
      local first = (ty.arange(from, from + length, { device = x.device }) * p):reshape(1, length, 1)
      tokens[#tokens + 1] = x:reshape(n, length * k, d)
      places[#places + 1] = (where:reshape(n, length, k) + first):flatten(1)
      from = from + length
    end
    return ty.concat(tokens, 1), ty.concat(places, 1)
  end)
end

return M
