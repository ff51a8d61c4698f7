--- How a tensor of all ranks lies on them, and what changing that costs. Yuan et al. 2021, "OneFlow: Redesign the
-- Distributed Deep Learning Framework from Scratch": split (S), broadcast (B) and partial (P), and the table of what
-- goes over the links from one to another.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.dist.functional"

local M = {}

--- The dimension of "S(d)"; nil for "B" and "P".
---@param sbp string
---@return integer?
function M.dim(sbp)
  arguments.expect("dist.boxing.dim", "sbp", sbp, "a string")
  return math.tointeger(tonumber(sbp:match "^S%((%d+)%)$"))
end

--- Bytes that all ranks of a group together send to bring a tensor of so many bytes from one form into another: with
-- p ranks (p - 1) / p of it from split to another split, p - 1 times it from split to broadcast and from partial to
-- split, twice that from partial to broadcast, else nothing.
---@param from string
---@param to string
---@param ranks integer
---@param bytes integer
---@return number
function M.cost(from, to, ranks, bytes)
  local who = "dist.boxing.cost"
  arguments.expect(who, "from", from, "a string")
  arguments.expect(who, "to", to, "a string")
  arguments.expect(who, "ranks", ranks, "an integer >= 1")
  arguments.expect(who, "bytes", bytes, "a number >= 0")
  if from == to or from == "B" or to == "P" or ranks == 1 then return 0 end
  if from == "P" then return (to == "B" and 2 or 1) * (ranks - 1) * bytes end
  if to == "B" then return (ranks - 1) * bytes end
  return (ranks - 1) / ranks * bytes
end

-- The rank's own part within zeros, along a dimension.
local function among_zeros(group, x, dim)
  local list, shape = {}, table.move(x.shape, 1, x.ndim, 1, {})
  local n = shape[dim + 1]
  local function zeros(count)
    if count == 0 then return end
    shape[dim + 1] = count * n
    list[#list + 1] = ty.zeros(shape, { dtype = x.dtype })
  end
  zeros(group.rank)
  list[#list + 1] = x
  zeros(group.size - 1 - group.rank)
  return #list == 1 and x or ty.concat(list, dim)
end

-- From parts along dimension i to parts along dimension j.
local function across(group, x, i, j)
  local p = group.size
  local y = functional.exchanged(group, x, j):unflatten(j, { p, x.shape[j + 1] // p })
  return y:movedim(j, i):flatten(i, i + 1):contiguous()
end

--- The rank's part of a tensor in another form, with a history: of what is broadcast the gradient is partial, and of
-- what is partial it is broadcast. A dimension that is split has to be a multiple of the ranks.
---@param group RankGroup
---@param part Tensor
---@param from string
---@param to string
---@return Tensor
function M.box(group, part, from, to)
  local i, j = M.dim(from), M.dim(to)
  if from == to or group.size == 1 then return part end
  if from == "B" then
    if to == "P" then return group.rank == 0 and part or part * 0 end
    local n = part.shape[j + 1] // group.size
    return part:narrow(j, group.rank * n, n):contiguous()
  elseif from == "P" then
    if j then return functional.sum_scattered(group, part, j) end
    return functional.copied(group, functional.summed(group, part)) -- gradients of all ranks are summed as well
  elseif j then
    return across(group, part, i, j)
  elseif to == "B" then
    return functional.gathered_apart(group, part, i)
  end
  return among_zeros(group, part, i)
end

return M
