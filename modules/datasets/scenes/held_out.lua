--- Which combinations no split but held_out_combinations shows: fixed rules on the positions of objects and colours.
local objects = require "tycho.datasets.scenes.objects"
local colours = require "tycho.datasets.scenes.colours"

local M = {}

local codes = { ["left of"] = 0, above = 1, ["in front of"] = 2 }
local mirrored = { ["right of"] = "left of", below = "above", behind = "in front of" }

--- Whether an object (its position among the hundred, from 0) in a tint is one of them. Natural looks never are.
---@param object integer
---@param colour? string
function M.colour(object, colour)
  if not colour then return false end
  return (object + 3 * colours.tint[colour]) % 10 == 7
end

--- Whether object a in a relation to object b is one of them; "a left of b" is the same as "b right of a".
---@param a integer
---@param relation string
---@param b integer
function M.relation(a, relation, b)
  local inverse = mirrored[relation]
  if inverse then a, relation, b = b, inverse, a end
  return (7 * a + 11 * b + 13 * codes[relation]) % 32 == 5
end

--- The held-out objects, and the others: lists of positions from 0.
M.objects, M.others = {}, {}
for i, object in ipairs(objects) do
  local list = object.held_out and M.objects or M.others
  list[#list + 1] = i - 1
end

return M
