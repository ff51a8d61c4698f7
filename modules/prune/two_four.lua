--- Matrices of integers with two of four: of each four neighbours in a row at most two are not zero, as sparse tensor
-- cores have it. Two codes of 8 or 4 bits and two positions of 2 bits are stored for each four.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local packing = require "tycho.quant.packing"

local expect, fail = arguments.expect, arguments.fail
local M = {}

-- Whether codes are stored two to a byte.
local function halves(bits) return bits <= 4 end

local bit_words = "an integer in [2, 8]"

--- How many elements the parts of a packed matrix have, values and positions, and the dtype of the values.
---@param rows integer
---@param columns integer
---@param bits integer
---@return integer values
---@return integer positions
---@return string dtype
function M.sizes(rows, columns, bits)
  local who = "prune.two_four.sizes"
  expect(who, "rows", rows, "an integer >= 1")
  expect(who, "columns", columns, "an integer >= 1")
  expect(who, "bits", bits, bit_words)
  local kept = columns // 2
  return rows * (halves(bits) and (kept + 1) // 2 or kept), rows * ((kept + 3) // 4), halves(bits) and "u8" or "i8"
end

--- Packs codes: values i8 [rows, columns / 2] or, of up to 4 bits, u8 with two of them plus 8 in a byte, the first low;
-- positions u8, four to a byte; of each group in the order of the columns. Raises where a group has more than two that
-- are not zero, or the columns are no multiple of 4.
---@param codes Tensor  i8 [rows, columns], within the bits
---@param bits? integer  8
---@return { values: Tensor, positions: Tensor, columns: integer, bits: integer, bytes: integer }
function M.encode(codes, bits)
  local who = "prune.two_four.encode"
  expect(who, "codes", codes, "a tensor")
  bits = expect(who, "bits", bits, bit_words .. " or nil") or 8
  if codes.dtype ~= "i8" or codes.ndim ~= 2 or codes:numel() == 0 or codes.shape[2] % 4 ~= 0 then
    fail("%s: codes: expected i8 [rows, a multiple of 4], got %s", who, arguments.describe(codes))
  end
  local rows, columns = codes.shape[1], codes.shape[2]
  return ty.no_grad(function()
    local groups = codes:to("i32"):reshape(-1, 4)
    local count = groups:ne(0):to("i32"):sum(1):max():item()
    if count > 2 then fail("%s: codes: expected two of four that are not zero, got %d", who, count) end
    local most = 1 << bits - 1
    if groups:abs():max():item() > most or bits <= 4 and groups:max():item() >= most then
      fail("%s: codes: expected integers of %d bits, got larger ones", who, bits)
    end
    local _, at = groups:abs():topk(2, 1)
    at = at:sort(1)
    local values = groups:gather(1, at):reshape(rows, columns // 2)
    values = halves(bits) and packing.pack(values + 8, 4) or values:to("i8"):contiguous()
    local positions = packing.pack(at:reshape(rows, columns // 2), 2)
    return { values = values, positions = positions, columns = columns, bits = bits,
      bytes = values:nbytes() + positions:nbytes() }
  end)
end

--- The codes of a packed matrix, i8 [rows, columns].
---@param packed { values: Tensor, positions: Tensor, columns: integer }
---@return Tensor
function M.decode(packed)
  local who = "prune.two_four.decode"
  expect(who, "packed", packed, "a table")
  expect(who, "values", packed.values, "a tensor")
  expect(who, "positions", packed.positions, "a tensor")
  local columns = expect(who, "columns", packed.columns, "an integer >= 4")
  return ty.no_grad(function()
    local kept = columns // 2
    local values = packed.values.dtype == "u8" and packing.unpack(packed.values, 4, kept):to "i8" - 8 or packed.values
    local at = packing.unpack(packed.positions, 2, kept):to "i64"
    local rows = values.shape[1]
    if values:numel() ~= rows * kept or at:numel() ~= rows * kept or columns % 4 ~= 0 then
      fail("%s: values: expected %d codes in a row, got %s", who, kept, arguments.describe(packed.values))
    end
    return ty.zeros({ rows * columns // 4, 4 }, { dtype = "i8", device = values.device })
      :scatter(1, at:reshape(-1, 2), values:to("i8"):reshape(-1, 2)):reshape(rows, columns)
  end)
end

--- x times a packed matrix, transposed, in integers: loaded sparse, multiplied dense.
---@param x Tensor  i8 [..., columns]
---@param packed table  of encode()
---@return Tensor i32 [..., rows]
function M.product(x, packed)
  local who = "prune.two_four.product"
  expect(who, "x", x, "a tensor")
  if not packed or x.dtype ~= "i8" or x.shape[x.ndim] ~= packed.columns then
    fail("%s: x: expected i8 [..., columns], got %s", who, arguments.describe(x))
  end
  local shape = x.shape
  local y = ty.matmul_int8(x:reshape(-1, packed.columns):contiguous(), M.decode(packed):transpose(0, 1))
  shape[#shape] = y.shape[2]
  return y:reshape(shape)
end

return M
