--- Calls of the network for some samples of a batch: what methods share that decide for each sample by itself whether
-- the network is asked, so that a picture never depends on the others that are drawn beside it.
--
-- A request for some samples has the field `samples`, their positions in the batch, from 0; without it, it is for all.
-- Its x and its condition are those samples' alone, branch after branch.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"

local M = {}

--- Positions in the batch of the samples that a request is for, from 0.
---@param request table
---@return integer[]
function M.of(request)
  if request.samples then return request.samples end
  local list = {}
  for i = 1, request.x.shape[1] // #request.branches do list[i] = i - 1 end
  return list
end

-- Rows of a request's tensors: those of its samples number places[i] (from 1) in every branch.
local function rows(request, places)
  local n, list = request.x.shape[1] // #request.branches, {}
  for b = 0, #request.branches - 1 do
    for _, place in ipairs(places) do list[#list + 1] = b * n + place - 1 end
  end
  return ty.tensor(list, { dtype = "i64", device = request.x.device })
end

--- The request for its samples number places[i], from 1.
---@param request table
---@param places integer[]
---@return table
function M.narrow(request, places)
  local all, list = M.of(request), {}
  if #places == #all then return request end
  for i, place in ipairs(places) do list[i] = all[place] end
  local index = rows(request, places)
  return { x = request.x:index_select(0, index), point = request.point, branches = request.branches,
    condition = conditions.select(request.condition, index), samples = list }
end

--- The rows of a tensor that has those of a request, as a list by branch of lists by sample, each [1, ...].
---@param request table
---@param tensor Tensor
---@return table<string, Tensor[]>
function M.split(request, tensor)
  local n, split = tensor.shape[1] // #request.branches, {}
  for b, name in ipairs(request.branches) do
    split[name] = {}
    for i = 1, n do split[name][i] = tensor:narrow(0, (b - 1) * n + i - 1, 1) end
  end
  return split
end

--- What split() took apart, put together in the order of the request's branches.
---@param request table
---@param split table<string, Tensor[]>
---@return Tensor
function M.join(request, split)
  local list = {}
  for _, name in ipairs(request.branches) do
    for _, row in ipairs(split[name]) do list[#list + 1] = row end
  end
  return ty.concat(list, 0)
end

return M
