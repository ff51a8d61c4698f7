--- ZeRO's third stage where links differ: between a pair of ranks, between those of a machine, between machines. Xu et
-- al. 2025, "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", after Wang et al.
-- 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
--
-- What moves most often is divided where links are fastest. Parameters are divided within a pair, whose two ranks
-- gather them for each forward and each backward pass: nothing of that leaves a machine. Gradients are reduced within a
-- machine first, then between machines, each time as blocks of few bits through an all-to-all, so that what has been
-- added up is rounded once at each level. Moments and the parameters' exact copies are divided among all ranks. After a
-- step the new parameters go to the pairs as blocks of 8 bits, first between machines, then within them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.dist.blocks"
local Group = require "tycho.dist.group"
local zero = require "tycho.dist.zero"

local fail = arguments.fail
local M = {}

local defaults = { per_node = arguments.none, pair = 2, weights = 8, gradients = 4, block = 256 }
local kinds = { per_node = "an integer >= 1", pair = "an integer >= 1", weights = "8 or 0", gradients = "4 or 8 or 0",
  block = "an integer >= 8" }
for _, key in ipairs { "optimizer", "half", "clip_norm", "ahead" } do
  defaults[key], kinds[key] = zero.defaults[key], zero.kinds[key]
end

-- Begins a collective of codes and their scales; wait() of what it returns gives both.
local function begin(group, kind, codes, scales)
  local first = group[kind](group, codes, { async = true })
  local second = scales and group[kind](group, scales, { async = true })
  return function() return first:wait(), second and second:wait() end
end

-- Elements that share a scale: fewer where a rank's part is small.
local function block_for(most, parts)
  return function(count)
    local block = 8
    while block < most and block * parts < count do block = 2 * block end
    return block
  end
end

-- How parts are exchanged over three levels. A flat tensor is, in this order, a half for each rank of a pair, in it a
-- slice for each pair of a machine, in that a part for each machine.
local function three_levels(group, o)
  local machines = group.size // o.per_node
  local machine = group:split(group.rank // o.per_node)
  local across = group:split(machine.rank)
  local pair, stride = machine:split(machine.rank // o.pair), machine:split(machine.rank % o.pair)
  local pairs_of = o.per_node // o.pair
  local ways = { parts = group.size, shards = o.pair, shard = pair.rank, multiple = block_for(o.block, group.size),
    place = (pair.rank * pairs_of + stride.rank) * machines + across.rank,
    groups = { machine, across, pair, stride } }

  function ways.gather(flat, values) return pair:all_gather(flat.shard, { out = values, async = true }) end

  -- Of parts of all ranks of a group, for this one: their mean.
  local function mean(flat, n, codes, scales)
    return blocks.dequantize(codes, scales, o.gradients, flat.multiple):view(n, -1):mean(0)
  end

  function ways.reduce(flat, own)
    local received = ty.no_grad(function()
      local slices = flat.gradient:view(o.pair, pairs_of, -1):transpose(0, 1):contiguous():view(-1)
      return begin(machine, "all_to_all", blocks.quantize(slices, o.gradients, flat.multiple))
    end)
    return { wait = function()
      ty.no_grad(ty.scope, function()
        local slice = mean(flat, o.per_node, received())
        local codes, scales = begin(across, "all_to_all", blocks.quantize(slice, o.gradients, flat.multiple))()
        own:copy_(mean(flat, machines, codes, scales))
      end)
    end }
  end

  function ways.spread(flat)
    local slice = ty.no_grad(function()
      return begin(across, "all_gather", blocks.quantize(flat.master, o.weights, flat.multiple))
    end)
    return { wait = function()
      ty.no_grad(ty.scope, function()
        local codes, scales = begin(stride, "all_gather", slice())()
        flat.shard:copy_(blocks.dequantize(codes, scales, o.weights, flat.multiple))
      end)
    end }
  end
  return ways
end

--- Takes a model in charge as dist.zero does in stage 3, whose optimizer, half, clip_norm and ahead are options here.
-- Besides them:
--   per_node   ranks of a machine, which are neighbours (all)
--   pair       ranks that divide the parameters (2), neighbours too
--   weights    8: bits of the parameters that are sent after a step; 0: as they are
--   gradients  4: bits of gradients that are sent; 8; 0: as they are
--   block      elements that share a scale (256), a power of 2
---@param group RankGroup
---@param model Module
---@param options? table
---@return ZeroEngine
function M.new(group, model, options)
  local who = "dist.low_bandwidth"
  Group.expect(who, group)
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, defaults, kinds)
  o.per_node = o.per_node or group.size
  if group.size % o.per_node ~= 0 then
    fail("%s: per_node: expected a divisor of the %d ranks, got %d", who, group.size, o.per_node)
  elseif o.per_node % o.pair ~= 0 then
    fail("%s: pair: expected a divisor of the %d ranks of a machine, got %d", who, o.per_node, o.pair)
  end
  if not model:parameters()[1] then fail("%s: model: expected a module with parameters, got one without", who) end
  o.stage, o.bucket = 3, zero.defaults.bucket
  return zero.Zero.with(group, model, o, three_levels(group, o))
end

return M
