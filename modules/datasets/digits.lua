--- Handwritten digits, 8 x 8, for what has to be fast. Its page, datasets/digits/README.md, says where they are from.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- datasets.load("digits", options): { image = f32 [1, 8, 8] from -1 (paper) to 1 (ink), label = i64 [] }, the same
-- splits as ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }. options: split ("training"; "held_out", "all").
---@param options? {split: string}
function M.load(options)
  local o = arguments.read("datasets.digits", options, { split = "training" },
    { split = '"training" or "held_out" or "all"' })
  if o.split == "all" then return ty.data.digits() end
  local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }
  return o.split == "training" and training or held_out
end

--- The ink of an item in black on white, and its label: what datasets.show draws.
function M.cell(item)
  arguments.expect("datasets.digits.cell", "item", item, "a table")
  arguments.expect("datasets.digits.cell", "item.image", item.image, "a tensor")
  return -item.image, item.label
end

return M
