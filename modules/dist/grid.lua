--- Groups of ranks for tensor, pipeline and data parallelism at once. Narayanan et al. 2021, "Efficient Large-Scale
-- Language Model Training on GPU Clusters Using Megatron-LM".
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

---@class RankGrid
---@field tensor RankGroup    ranks that share the layers of a stage
---@field pipeline RankGroup  ranks that have the stages, in their order
---@field data RankGroup      ranks that have the same parameters and other data
---@field at { tensor: integer, pipeline: integer, data: integer }  the rank's place, from 0

--- Divides a group into a grid, and gives the three groups that this rank is in. Neighbours in rank, which are on one
-- machine where per_node says so, share layers, which exchange most; then come those of the same data, and stages,
-- which exchange least, lie furthest apart. All ranks of the group call it.
---@param group RankGroup
---@param sizes { tensor?: integer, pipeline?: integer, data?: integer }  their product is the group's size; 1 each
---@return RankGrid
return function(group, sizes)
  local who = "dist.grid"
  Group.expect(who, group)
  local o = arguments.read(who, sizes, { tensor = 1, pipeline = 1, data = 1 },
    { tensor = "an integer in [1, 1024]", pipeline = "an integer in [1, 1024]", data = "an integer in [1, 1024]" })
  if o.tensor * o.pipeline * o.data ~= group.size then
    arguments.fail("%s: sizes: expected a product of %d, the ranks of the group, got %d * %d * %d", who, group.size,
      o.tensor, o.pipeline, o.data)
  end
  local tensor, rest = group.rank % o.tensor, group.rank // o.tensor
  local data, pipeline = rest % o.data, rest // o.data
  return {
    at = { tensor = tensor, pipeline = pipeline, data = data },
    tensor = group:split(pipeline * o.data + data),
    data = group:split(pipeline * o.tensor + tensor),
    pipeline = group:split(data * o.tensor + tensor),
  }
end
