--- Samples that are larger than a network's size, cut into overlapping tiles of that size at each call: what the
-- network says of tiles is put together with weights that fall towards a tile's edges. Bar-Tal et al. 2023,
-- "MultiDiffusion: Fusing Diffusion Paths for Controlled Image Generation", equation 5: the weighted mean is what is
-- nearest to what all tiles ask for.
--
--     local part = diffusion.tiles.part { height = 16, width = 16, overlap = 8 }
--     diffusion.Sampler { schedule = schedule, parts = { part } }:sample(model, { 1, 4, 32, 32 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Where tiles begin, from 0: as few as cover `size` and overlap by at least `overlap`, spread evenly.
---@param size integer
---@param tile integer
---@param overlap integer
---@return integer[]
function M.places(size, tile, overlap)
  local who = "tiles.places"
  expect(who, "size", size, "an integer >= 1")
  expect(who, "tile", tile, "an integer >= 1")
  expect(who, "overlap", overlap, "an integer >= 0")
  if size < tile then fail("%s: size: expected at least a tile's, %d, got %d", who, tile, size) end
  if size == tile then return { 0 } end
  if overlap >= tile then fail("%s: overlap: expected less than a tile, %d, got %d", who, tile, overlap) end
  local steps = -((size - tile) // -(tile - overlap)) -- rounded up
  local list = { 0 }
  for i = 1, steps do list[i + 1] = (size - tile) * i // steps end
  return list
end

-- Weights of a tile along one side: rising over the overlap, then 1, then falling.
local function ramp(tile, overlap)
  local list = {}
  for i = 0, tile - 1 do list[i + 1] = math.min(1, (math.min(i, tile - 1 - i) + 1) / (overlap + 1)) end
  return ty.tensor(list, { dtype = "f32" })
end

--- A large sample in tiles.
---@class Tiling
---@field list { row: integer, column: integer }[]  where tiles begin, from 0
local Tiling = {}
Tiling.__index = Tiling

--- The tiles of samples of height x width places. options: height and width of a tile, overlap (0: places that two
-- neighbours share at least).
---@param height integer
---@param width integer
---@param options { height: integer, width: integer, overlap?: integer }
---@return Tiling
function M.tiling(height, width, options)
  local who = "tiles.tiling"
  local o = arguments.read(who, options, { height = arguments.none, width = arguments.none, overlap = 0 },
    { height = "an integer >= 1", width = "an integer >= 1", overlap = "an integer >= 0" })
  for _, name in ipairs { "height", "width" } do expect(who, name, o[name], "an integer >= 1") end
  local self = setmetatable({ list = {}, height = o.height, width = o.width, rows = height, columns = width }, Tiling)
  for _, row in ipairs(M.places(height, o.height, o.overlap)) do
    for _, column in ipairs(M.places(width, o.width, o.overlap)) do
      self.list[#self.list + 1] = { row = row, column = column }
    end
  end
  self.weight = ty.keep(ramp(o.height, o.overlap):unsqueeze(1) * ramp(o.width, o.overlap))
  return self
end

--- Tile number i, from 1, of x [n, c, rows, columns]: [n, c, height, width].
---@param x Tensor
---@param i integer
---@return Tensor
function Tiling:cut(x, i)
  expect("Tiling:cut", "x", x, "a tensor")
  if x.ndim ~= 4 or x.shape[3] ~= self.rows or x.shape[4] ~= self.columns then
    fail("Tiling:cut: x: expected [n, channels, %d, %d], got %s", self.rows, self.columns, arguments.describe(x))
  end
  local tile = self.list[i]
  if not tile then fail("Tiling:cut: i: expected a number of a tile, 1 to %d, got %s", #self.list, tostring(i)) end
  return x:narrow(2, tile.row, self.height):narrow(3, tile.column, self.width):contiguous()
end

--- Tiles put together, where they overlap with their weights: [n, c, rows, columns]. One tile alone stays as it is.
---@param tiles Tensor[]
---@return Tensor
function Tiling:join(tiles)
  expect("Tiling:join", "tiles", tiles, "a list of tensors")
  if #tiles ~= #self.list then fail("Tiling:join: tiles: expected %d, got %d", #self.list, #tiles) end
  if #tiles == 1 then return tiles[1] end
  local function spread(i, x)
    local tile = self.list[i]
    return ty.pad(x, { tile.column, self.columns - self.width - tile.column, tile.row,
      self.rows - self.height - tile.row }, "constant", 0)
  end
  local weight, sum, total = self.weight:to { device = tiles[1].device, dtype = tiles[1].dtype }, nil, nil
  for i, x in ipairs(tiles) do
    local one, share = spread(i, x * weight), spread(i, weight)
    sum, total = sum and sum + one or one, total and total + share or share
  end
  return sum / total
end

local Part = {}
Part.__index = Part

--- A part of a sampler that calls the network on tiles, one after the other. options: height and width of a tile,
-- overlap (0), each (a function of a list of requests and of `next` that returns their outputs: who has several devices
-- asks them at once).
---@param options table
---@return table part
function M.part(options)
  local o = arguments.read("tiles.part", options, { height = arguments.none, width = arguments.none, overlap = 0,
    each = arguments.none }, { height = "an integer >= 1", width = "an integer >= 1", overlap = "an integer >= 0",
    each = "a function" })
  for _, name in ipairs { "height", "width" } do expect("tiles.part", name, o[name], "an integer >= 1") end
  return setmetatable(o, Part)
end

-- One call after the other.
local function in_turn(requests, next)
  local list = {}
  for i, request in ipairs(requests) do list[i] = next(request) end
  return list
end

function Part:call(run, next, request)
  local state, x = run.state[self], request.x
  if x.ndim ~= 4 then
    fail("tiles.part: expected samples [n, channels, rows, columns], got %s", arguments.describe(x))
  end
  state.tiling = state.tiling or M.tiling(x.shape[3], x.shape[4], { height = self.height, width = self.width,
    overlap = self.overlap })
  if #state.tiling.list == 1 then return next(request) end
  local requests = {}
  for i = 1, #state.tiling.list do
    local one = {}
    for key, value in pairs(request) do one[key] = value end
    one.x = state.tiling:cut(x, i)
    requests[i] = one
  end
  return state.tiling:join((self.each or in_turn)(requests, next))
end

return M
