--- A picture in tiles that overlap, each sent through a network of its own, and blended where they meet: memory for
-- any size of picture. What comes out differs a little from the whole picture's: each tile has its own statistics.
local ty = require "tycho"

local M = {}

-- The weight of the tile that comes later over `extent` rows (dim 2) or columns (dim 3) that two tiles share.
local function ramp(like, extent, dim)
  local weights = ty.arange(extent, { device = like.device }):to(like.dtype) / extent
  return dim == 2 and weights:reshape(1, 1, extent, 1) or weights:reshape(1, 1, 1, extent)
end

-- The tile `after` with its first rows or columns blended with the last ones of the tile `before`.
local function blend(before, after, extent, dim)
  local had, has = before.shape[dim + 1], after.shape[dim + 1]
  extent = math.min(had, has, extent)
  if extent == 0 then return after end
  local weight = ramp(after, extent, dim)
  local shared = before:narrow(dim, had - extent, extent) * (1 - weight) + after:narrow(dim, 0, extent) * weight
  if extent == has then return shared end
  return ty.concat({ shared, after:narrow(dim, extent, has - extent) }, dim)
end

local function first(x, dim, count) return x:narrow(dim, 0, math.min(count, x.shape[dim + 1])) end

--- fn(x) in tiles. x [n, c, h, w]; fn gives maps whose sides are those of its input times to / from. size: of a tile,
-- in units: a unit is `from` rows and columns of x, and becomes `to` of them. overlap: the share of a tile that it has
-- in common with the next one.
---@param x Tensor
---@param fn fun(tile: Tensor): Tensor
---@param size integer
---@param from integer
---@param to integer
---@param overlap number
---@return Tensor
function M.map(x, fn, size, from, to, overlap)
  local step = math.max(1, math.floor(size * (1 - overlap)))
  local extent, keep = (size - step) * to, step * to
  step, size = step * from, size * from
  local height, width, above, rows = x.shape[3], x.shape[4], nil, {}
  for top = 0, height - 1, step do
    local row, kept = {}, {}
    for left = 0, width - 1, step do
      local tile = fn(x:narrow(2, top, math.min(size, height - top)):narrow(3, left, math.min(size, width - left)))
      local i = #row + 1
      if above then tile = blend(above[i], tile, extent, 2) end
      if i > 1 then tile = blend(row[i - 1], tile, extent, 3) end
      row[i] = tile
      kept[i] = first(first(tile, 2, keep), 3, keep)
    end
    above = row
    rows[#rows + 1] = ty.concat(kept, 3)
  end
  return ty.concat(rows, 2)
end

return M
