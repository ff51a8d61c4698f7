--- Tensors of a model as one flat tensor, which is exchanged at once: a collective for each is a latency for each.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Flat tensors that parameters' values or gradients are copied into and back, in buckets of so many bytes, and the
-- gradients of a model meant over ranks.
---@class GradientBuckets
---@field buckets { flat: Tensor, parameters: Tensor[], count: integer }[]
local Buckets = {}
Buckets.__index = Buckets
Buckets.__name = "GradientBuckets"

-- The parameters in lists of so many bytes, one parameter at least, in the order of a pass.
function M.divide(who, parameters, bytes, order)
  local lists, filled = {}, 0
  local first, last, by = #parameters, 1, -1
  if order == "forward" then first, last, by = 1, #parameters, 1 end
  for i = first, last, by do
    local p = parameters[i]
    if p.dtype ~= parameters[1].dtype then
      arguments.fail("%s: parameters: expected tensors of one dtype, got %s and %s", who, parameters[1].dtype, p.dtype)
    end
    if not lists[1] or filled > 0 and filled + p:nbytes() > bytes then lists[#lists + 1], filled = {}, 0 end
    table.insert(lists[#lists], p)
    filled = filled + p:nbytes()
  end
  return lists
end

--- The parameters in buckets, from the last one on, whose gradients come first. options: bytes (of a bucket, 4 MiB),
-- multiple (of the elements of a bucket, which are filled up with zeros: 1), order ("backward", or "forward": from the
-- first parameter on).
---@param parameters Tensor[]  of one dtype
---@param options? { bytes?: integer, multiple?: integer, order?: string }
---@return GradientBuckets
function M.buckets(parameters, options)
  local who = "dist.buckets"
  arguments.expect(who, "parameters", parameters, "a list of tensors")
  if #parameters == 0 then arguments.fail("%s: parameters: expected at least one, got none", who) end
  local o = arguments.read(who, options, { bytes = 4 << 20, multiple = 1, order = "backward" },
    { bytes = "an integer >= 1", multiple = "an integer >= 1", order = '"backward" or "forward"' })
  local self = setmetatable({ buckets = {} }, Buckets)
  for i, list in ipairs(M.divide(who, parameters, o.bytes, o.order)) do
    local count = 0
    for _, p in ipairs(list) do count = count + p:numel() end
    local padded = (count + o.multiple - 1) // o.multiple * o.multiple
    self.buckets[i] = { parameters = list, count = count,
      flat = ty.zeros({ padded }, { dtype = list[1].dtype, device = list[1].device }) }
  end
  return self
end

-- Calls visit(part of the flat tensor in the parameter's shape, parameter) for all of a bucket.
local function each(bucket, visit)
  local at = 0
  ty.no_grad(function()
    for _, p in ipairs(bucket.parameters) do
      local n = p:numel()
      visit(bucket.flat:narrow(0, at, n):view(p.shape), p)
      at = at + n
    end
  end)
end

--- Copies gradients into a bucket; a parameter without one counts as zeros.
function Buckets:read_gradients(bucket)
  each(bucket, function(part, p)
    if p.grad then part:copy_(p.grad) else part:zero_() end
  end)
end

--- Makes what a bucket has the gradients.
function Buckets:write_gradients(bucket)
  each(bucket, function(part, p)
    if p.grad then p.grad:copy_(part) else p:set_grad(part:clone()) end
  end)
end

--- Copies parameters into a bucket.
function Buckets:read(bucket)
  each(bucket, function(part, p) part:copy_(p:detach()) end)
end

--- Makes what a bucket has the parameters.
function Buckets:write(bucket)
  each(bucket, function(part, p) p:detach():copy_(part) end)
end

--- Every rank's gradients become their mean over the ranks of a group, bucket after bucket: each is on its way while
-- the next is being filled.
---@param group RankGroup
function Buckets:mean_gradients(group)
  local works = {}
  for i, bucket in ipairs(self.buckets) do
    self:read_gradients(bucket)
    works[i] = group:all_reduce(bucket.flat, "mean", { async = true })
  end
  for i, bucket in ipairs(self.buckets) do
    works[i]:wait()
    self:write_gradients(bucket)
  end
end

return M
