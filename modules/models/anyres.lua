--- Pictures of any size as tiles of one: which of some sizes a picture is fitted into, and how much of that it covers.
-- Liu et al. 2024, "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge", as transformers computes it.
local M = {}

--- Which of the sizes { height, width } keeps most of a picture of h x w pixels, and of those the one that wastes
-- least.
---@param h integer
---@param w integer
---@param sizes integer[][]
---@return integer height
---@return integer width
function M.best(h, w, sizes)
  local best, most, least = nil, -1, math.huge
  for _, size in ipairs(sizes) do
    local scale = math.min(size[2] / w, size[1] / h)
    local kept = math.min(math.tointeger(w * scale // 1) * math.tointeger(h * scale // 1), w * h)
    local wasted = size[1] * size[2] - kept
    if kept > most or kept == most and wasted < least then best, most, least = size, kept, wasted end
  end
  return best[1], best[2]
end

--- Rows and columns that a picture of h x w has when it is as large as fits into height x width.
---@return integer rows
---@return integer columns
function M.fitted(h, w, height, width)
  local by_width, by_height = width / w, height / h
  if by_width < by_height then return math.min(math.ceil(h * by_width), height), width end
  return height, math.min(math.ceil(w * by_height), width)
end

--- Of a grid of rows x columns features, that a picture of h x w was fitted into: the first row and column that show
-- it, and how many do. What is beside the picture is cut off on both sides alike.
---@return integer top
---@return integer left
---@return integer rows
---@return integer columns
function M.covered(h, w, rows, columns)
  local function whole(x) return math.tointeger((x * 1e7 + 0.5) // 1) // 10000000 end -- of what is rounded to 7 places
  if w / h > columns / rows then
    local top = (rows - whole(h * (columns / w))) // 2
    return top, 0, rows - 2 * top, columns
  end
  local left = (columns - whole(w * (rows / h))) // 2
  return 0, left, rows, columns - 2 * left
end

return M
