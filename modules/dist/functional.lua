--- Collectives with a history: what goes through them forwards has its gradient come back through the opposite one.
-- Shoeybi et al. 2019, "Megatron-LM", call the first two f and g; Korthikanti et al. 2022, "Reducing Activation
-- Recomputation in Large Transformer Models", have those of sequences.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local M = {}

local function check(who, group, x, dim)
  Group.expect("dist." .. who, group)
  arguments.expect("dist." .. who, "x", x, "a tensor")
  arguments.expect("dist." .. who, "dim", dim, "an integer or nil")
end

-- The rank's own part of x along a dimension.
local function own(group, x, dim)
  local n = x.shape[(dim < 0 and dim + x.ndim or dim) + 1] or 0
  if n % group.size ~= 0 then
    arguments.fail("dist.scattered: x: expected a multiple of %d along dimension %d, got %s", group.size, dim,
      arguments.describe(x))
  end
  local part = n // group.size
  return x:narrow(dim, group.rank * part, part):contiguous()
end

-- An op of a collective and of its opposite, each of (group, tensor, dim).
local function op(name, forward, backward)
  local call = ty.custom_op {
    name = "dist." .. name,
    forward = function(ctx, group, x, dim)
      ctx.group, ctx.dim = group, dim
      return forward(group, x, dim)
    end,
    backward = function(ctx, g) return nil, backward(ctx.group, g, ctx.dim), nil end,
  }
  return function(group, x, dim)
    check(name, group, x, dim)
    return call(group, x, dim or 0)
  end
end

local function same(_, x) return x end
local function sum(group, x) return group:all_reduce(x:clone()) end
local function gather(group, x, dim) return group:all_gather(x, { dim = dim }) end
local function sum_scatter(group, x, dim) return group:reduce_scatter(x, "sum", { dim = dim }) end
local function exchange(group, x, dim) return group:all_to_all(x, { dim = dim }) end

--- x as it is, on all ranks the same; gradients are summed over the ranks, each of which goes on with x in its own way.
---@param group RankGroup
---@param x Tensor
---@return Tensor
M.copied = op("copied", same, sum)

--- The sum of all x; gradients go back as they are.
M.summed = op("summed", sum, same)

--- What all ranks have, along a dimension (0); of the gradient each takes its own part, as it is the same on all ranks.
---@param group RankGroup
---@param x Tensor
---@param dim? integer
---@return Tensor
M.gathered = op("gathered", gather, own)

--- The rank's own part of x, which is the same on all ranks, along a dimension; gradients are gathered.
M.scattered = op("scattered", own, gather)

--- What all ranks have, along a dimension, for ranks that go on with it in different ways: of the sum of the gradients
-- each takes its own part.
M.gathered_apart = op("gathered_apart", gather, sum_scatter)

--- Of the sum of all x the rank's own part along a dimension; gradients are gathered.
M.sum_scattered = op("sum_scattered", sum_scatter, gather)

--- Part r of x along a dimension goes to rank r; so do gradients.
M.exchanged = op("exchanged", exchange, exchange)

return M
