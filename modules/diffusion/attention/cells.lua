--- Tokens of a map, or of a clip of maps, by cells: what lies together in a picture comes together in the sequence, so
-- that a block of tokens is a place. Orders are lists of positions; the inverse brings tokens back.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local kinds = { rows = "an integer >= 1", columns = "an integer >= 1", frames = "an integer >= 1",
  cell = "a pair of integers" }

--- A grid of tokens and its cells.
---@class Cells
---@field tokens integer
---@field size integer    tokens of a cell
---@field count integer   cells
---@field order Tensor    i64 [tokens]: which token stands where, cell by cell
---@field inverse Tensor  i64 [tokens]
---@field places Tensor   f32 [count, 3]: frame, row and column of the middle of each cell, in tokens
local Cells = {}
Cells.__index = Cells
Cells.__name = "Cells"

--- options: rows, columns (of the grid of tokens), frames (1: maps one after the other), cell ({ height, width } in
-- tokens, which divide rows and columns).
---@param options table
---@return Cells
function M.cells(options)
  local who = "attention.cells"
  local o = arguments.read(who, options, { rows = arguments.none, columns = arguments.none, frames = 1,
    cell = { 4, 4 } }, kinds)
  for _, name in ipairs { "rows", "columns" } do
    if not o[name] then fail("%s: %s: expected an integer >= 1, got nil", who, name) end
  end
  local h, w = o.cell[1], o.cell[2]
  if math.type(h) ~= "integer" or math.type(w) ~= "integer" or h < 1 or w < 1 or o.rows % h ~= 0
    or o.columns % w ~= 0 then
    fail("%s: cell: expected two integers that divide %d rows and %d columns, got %s and %s", who, o.rows, o.columns,
      tostring(h), tostring(w))
  end
  local f, down, across = o.frames, o.rows // h, o.columns // w
  local order = ty.arange(f * o.rows * o.columns):reshape(f, down, h, across, w):permute(0, 1, 3, 2, 4):flatten()
  local middle = {}
  for frame = 0, f - 1 do
    for i = 0, down - 1 do
      for j = 0, across - 1 do
        middle[#middle + 1] = { frame + 0.0, i * h + (h - 1) / 2, j * w + (w - 1) / 2 }
      end
    end
  end
  return setmetatable({ tokens = order.shape[1], size = h * w, count = f * down * across,
    order = ty.keep(order:contiguous()), inverse = ty.keep(order:argsort()),
    places = ty.keep(ty.tensor(middle):to "f32") }, Cells)
end

--- x [b, h, t, d] cell by cell.
---@param x Tensor
---@return Tensor
function Cells:gather(x)
  expect("Cells:gather", "x", x, "a tensor")
  if x.ndim ~= 4 or x.shape[3] ~= self.tokens then
    fail("Cells:gather: x: expected [b, h, %d, d], got %s", self.tokens, arguments.describe(x))
  end
  return x:index_select(2, self.order:to { device = x.device })
end

--- The inverse of gather().
---@param x Tensor
---@return Tensor
function Cells:restore(x)
  expect("Cells:restore", "x", x, "a tensor")
  if x.ndim ~= 4 or x.shape[3] ~= self.tokens then
    fail("Cells:restore: x: expected [b, h, %d, d], got %s", self.tokens, arguments.describe(x))
  end
  return x:index_select(2, self.inverse:to { device = x.device })
end

--- For each cell the numbers of the `kept` nearest ones, itself among them: i64 [1, 1, count, kept].
---@param kept integer
---@return Tensor
function Cells:nearest(kept)
  expect("Cells:nearest", "kept", kept, "an integer >= 1")
  if kept > self.count then fail("Cells:nearest: kept: expected at most %d cells, got %d", self.count, kept) end
  local far = (self.places:unsqueeze(0) - self.places:unsqueeze(1)):square():sum(-1)
  local list = far:argsort(-1):narrow(1, 0, kept):contiguous()
  return list:reshape(1, 1, self.count, kept)
end

--- That these tensors, by name, are [b, h, t, d] of the cells' tokens, or an error.
---@param who string
---@param cells Cells
---@param tensors table<string, Tensor>
function M.fits(who, cells, tensors)
  expect("cells.fits", "who", who, "a string")
  expect("cells.fits", "tensors", tensors, "a table")
  if getmetatable(cells) ~= Cells then
    fail("%s: cells: expected what attention.cells makes, got %s", who, arguments.describe(cells))
  end
  for name, x in pairs(tensors) do
    if not ty.is_tensor(x) or x.ndim ~= 4 or x.shape[3] ~= cells.tokens then
      fail("%s: %s: expected a tensor [b, h, %d, d], got %s", who, tostring(name), cells.tokens, arguments.describe(x))
    end
  end
end

return M
