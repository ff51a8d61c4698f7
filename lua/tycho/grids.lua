--- Grids of coordinates: functions of ty.
local arguments = require "tycho.arguments"

local expect = arguments.expect
local functions = {}

--- Lists as coordinates of a grid: each of them along a dimension of its own, repeated along the others (a view).
---@param xs Tensor[]  [n], [m] ...; 0-d ones count as one element
---@param options? {indexing: string}  "ij" (the default): results [n, m, ...]; "xy": the first two dimensions exchanged
---@return Tensor ...  one for each of xs
function functions.meshgrid(xs, options)
  expect("meshgrid", "xs", xs, "a list of tensors")
  local o = arguments.read("meshgrid", options, { indexing = "ij" }, { indexing = '"ij" or "xy"' })
  local size = {}
  for i, x in ipairs(xs) do
    if expect("meshgrid", "xs[" .. i .. "]", x, "a tensor").ndim > 1 then
      arguments.fail("meshgrid: xs: expected lists [n], got %s", arguments.describe(x))
    end
    size[i] = x:numel()
  end
  local turned = o.indexing == "xy" and #xs > 1
  local grids = {}
  for i, x in ipairs(xs) do
    local own = {}
    for k = 1, #xs do own[k] = k == i and size[i] or 1 end
    grids[i] = x:reshape(own):expand(size)
    if turned then grids[i] = grids[i]:transpose(0, 1) end
  end
  return table.unpack(grids)
end

return functions
