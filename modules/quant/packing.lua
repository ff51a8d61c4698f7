--- Codes of 2, 3 and 4 bits side by side in bytes.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

-- The widths of the parts of a code, lowest bits first: each lies by itself, as many to a byte as fit.
local parts = { [1] = { 1 }, [2] = { 2 }, [3] = { 2, 1 }, [4] = { 4 } }

local function bytes_of(n, width) return (n * width + 7) // 8 end

--- Codes [rows, n], whole numbers below 2^bits, as u8 [rows, bytes]: of 3 bits the two low ones of all codes come first
-- and then the high ones. Each part is padded with zeros to whole bytes.
---@param codes Tensor
---@param bits integer  1 to 4
---@return Tensor
function M.pack(codes, bits)
  local who = "quant.packing.pack"
  expect(who, "codes", codes, "a tensor")
  expect(who, "bits", bits, "an integer in [1, 4]")
  if codes.ndim ~= 2 then fail("%s: codes: expected [rows, n], got %s", who, arguments.describe(codes)) end
  local rows, n = codes.shape[1], codes.shape[2]
  local left, all = codes:to "u8", {}
  for i, width in ipairs(parts[bits]) do
    local each, bytes = 8 // width, bytes_of(n, width)
    local part = left:bitwise_and((1 << width) - 1)
    if bytes * each > n then
      part = ty.concat({ part, ty.zeros({ rows, bytes * each - n }, { dtype = "u8", device = part.device }) }, 1)
    end
    part = part:reshape(rows, bytes, each)
    local sum = part:select(2, 0)
    for j = 1, each - 1 do sum = sum + part:select(2, j) * (1 << j * width) end
    all[i], left = sum, left:floor_div(1 << width)
  end
  return ty.concat(all, 1):contiguous()
end

--- The first n codes of each row, u8 [rows, n].
---@param packed Tensor
---@param bits integer
---@param n integer
---@return Tensor
function M.unpack(packed, bits, n)
  local who = "quant.packing.unpack"
  expect(who, "packed", packed, "a tensor")
  expect(who, "bits", bits, "an integer in [1, 4]")
  expect(who, "n", n, "an integer >= 0")
  local total = 0
  for _, width in ipairs(parts[bits]) do total = total + bytes_of(n, width) end
  if packed.dtype ~= "u8" or packed.ndim ~= 2 or packed.shape[2] ~= total then
    fail("%s: packed: expected u8 [rows, %d], got %s", who, total, arguments.describe(packed))
  end
  local rows, at, sum, shift = packed.shape[1], 0, nil, 0
  for _, width in ipairs(parts[bits]) do
    local each, bytes = 8 // width, bytes_of(n, width)
    local part, digits = packed:narrow(1, at, bytes), {}
    for j = 0, each - 1 do digits[j + 1] = part:floor_div(1 << j * width):bitwise_and((1 << width) - 1) end
    local codes = ty.stack(digits, 2):reshape(rows, bytes * each):narrow(1, 0, n)
    sum = sum and sum + codes * (1 << shift) or codes
    at, shift = at + bytes, shift + width
  end
  return sum
end

return M
