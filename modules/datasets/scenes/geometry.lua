--- Where things are, in words: places and relations that nobody would argue about. What lies between two words has
-- none.
local M = {}

local rows = { low = "top", mid = "", high = "bottom" }
local columns = { low = "left", mid = "", high = "right" }

local function band(x)
  if x < 0.36 then return "low" elseif x > 0.64 then return "high" elseif x >= 0.42 and x <= 0.58 then return "mid" end
end

local places = {}
for y, row in pairs(rows) do
  for x, column in pairs(columns) do
    local name = (row .. " " .. column):match "^%s*(.-)%s*$"
    places[y .. x] = name == "" and "centre" or name
  end
end

--- The nine places.
M.places = { "top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right" }
--- The relations; each second one is the one before seen from the other side.
M.relations = { "left of", "right of", "above", "below", "in front of", "behind" }
M.inverse = { ["left of"] = "right of", ["right of"] = "left of", above = "below", below = "above",
  ["in front of"] = "behind", behind = "in front of" }

--- The place of a box by its middle; nil between two places.
---@param left number
---@param top number
---@param right number
---@param bottom number
---@param size number pixels of a side of the picture
---@return string?
function M.place(left, top, right, bottom, size)
  local x, y = band((left + right) / (2 * size)), band((top + bottom) / (2 * size))
  return x and y and places[y .. x]
end

--- How box a lies to box b, { left, top, right, bottom } each: "left of", "right of", "above" or "below", or nil where
-- it is not clear: the middles are at least a fifth of the picture apart, and nearly level.
function M.direction(a, b, size)
  local dx, dy = (b[1] + b[3] - a[1] - a[3]) / 2, (b[2] + b[4] - a[2] - a[4]) / 2
  local across, down = math.abs(dx), math.abs(dy)
  if across >= 0.2 * size and down <= 0.6 * across then return dx > 0 and "left of" or "right of" end
  if down >= 0.2 * size and across <= 0.6 * down then return dy > 0 and "above" or "below" end
end

--- Whether something that hides `shared` pixels of the `area` of another is in front of it.
function M.is_in_front(shared, area) return shared >= 0.12 * area end

return M
