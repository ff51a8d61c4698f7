--- What the sets that draw their items share: the positions that a caller gave, and an item of a batch.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function check(who, i, size)
  local place = type(i) == "number" and math.tointeger(i)
  if place and place >= 0 and place < size then return place end
  if size == 0 then arguments.fail("%s: the set is empty, got %s", who, arguments.describe(i)) end
  return arguments.fail("%s: expected 0 to %d, got %s", who, size - 1, arguments.describe(i))
end

--- The positions that Set:batch() was given, as a new list. who: "Clips:batch"; size: items of the set.
---@param who string
---@param positions integer[]|Tensor
---@param size integer
---@return integer[]
function M.positions(who, positions, size)
  if ty.is_tensor(positions) then positions = positions:tolist() end
  arguments.expect(who, "positions", positions, "a list of integers or a tensor")
  local list = {}
  for k, i in ipairs(positions) do list[k] = check(who .. ": positions", i, size) end
  return list
end

--- The position that Set:get() was given, as a list.
---@param who string
---@param i integer
---@param size integer
---@return integer[]
function M.position(who, i, size)
  arguments.expect(who, "i", i, "an integer")
  return { check(who .. ": i", i, size) }
end

--- The first item of a batch: tensors without their first size and with memory of their own, entries of lists. counts:
-- by field how many of a tensor's first rows are there.
---@param batch table<string, any>
---@param counts? table<string, integer>
---@return table<string, any>
function M.first(batch, counts)
  local item = {}
  for field, value in pairs(batch) do
    if ty.is_tensor(value) then
      value = value:select(0, 0)
      if counts and counts[field] then value = value:narrow(0, 0, counts[field]) end
      item[field] = value:clone()
    else
      item[field] = value[1]
    end
  end
  return item
end

return M
