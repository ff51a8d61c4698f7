--- Transforms of pictures and sound, done to whole batches, in the worker threads of a DataLoader: require
-- "tycho".data.transforms.
--
--     local t = ty.data.transforms
--     local set = ty.data.transform(folder, t.horizontal_flip(), t.color_jitter { brightness = 0.4 }, t.normalize())
--
-- Each is made once by a function here and is then a function of a batch (see frame.lua); each picture gets draws of
-- its own.
local arguments = require "tycho.arguments"

local M = {}

for _, part in ipairs { "geometry", "colour", "mix", "policy", "sound" } do
  for name, value in pairs(require("tycho.data.transforms." .. part)) do M[name] = value end
end
-- What the others are built of.
for _, name in ipairs { "crop", "map", "matrices", "affine_matrices", "brighten", "contrast", "saturate", "turn_hue",
  "random_place" } do
  M[name] = nil
end

--- Transforms one after the other, as one.
---@param ... function  or one list of them
---@return fun(batch: table): table
function M.compose(...)
  local list = { ... }
  if #list == 1 and type(list[1]) == "table" then list = table.move(list[1], 1, #list[1], 1, {}) end
  for i, fn in ipairs(list) do arguments.expect("transforms.compose", "transform " .. i, fn, "a function") end
  return function(batch)
    for _, fn in ipairs(list) do batch = fn(batch) end
    return batch
  end
end

return M
