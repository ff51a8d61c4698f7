--- The fields of block-quantized tensors: the grid that a block's scales make, and the same block with other codes.
-- kernels/quant_blocks.h describes ggml's formats.
local ty = require "tycho"

local M = {}

-- Rows of bytes u8 [rows, blocks, bytes of a block].
local function bytes_of(q, size)
  return ty.io.from_bytes(ty.io.to_bytes(q), "u8", { q.shape[1], q:numel() // q.shape[1] // size.columns, size.bytes })
end

-- The f16 number at byte `at` of each block, f32 [rows, blocks, 1].
local function f16_at(bytes, at)
  local shape, d = bytes.shape, ty.io.to_bytes(bytes:narrow(2, at, 2):contiguous())
  return ty.io.from_bytes(d, "f16", { shape[1], shape[2], 1 }):to "f32"
end

local function low(bytes) return bytes:bitwise_and(15) end
local function high(bytes) return bytes:floor_div(16) end

-- Codes [rows, blocks, 256] as the bytes of two bits each that q2_k and q3_k share.
local function two_bits(codes)
  local shape = codes.shape
  local q = codes:bitwise_and(3):reshape(shape[1], shape[2], 2, 4, 32)
  local sum = q:select(3, 0)
  for j = 1, 3 do sum = sum + q:select(3, j) * (1 << 2 * j) end
  return sum:reshape(shape[1], shape[2], 64)
end

-- Of each format: bits, columns and bytes of a block, elements of a group with one scale, grid(bytes): scale and offset
-- [rows, blocks, groups], and put(bytes, codes [rows, blocks, columns]): the bytes with these codes.
local formats = {
  q4_0 = { bits = 4, columns = 32, bytes = 18, group = 32,
    grid = function(b)
      local d = f16_at(b, 0)
      return d, d * -8
    end,
    put = function(b, codes)
      local q = codes:narrow(2, 0, 16) + codes:narrow(2, 16, 16) * 16
      return ty.concat({ b:narrow(2, 0, 2), q }, 2)
    end },
  q2_k = { bits = 2, columns = 256, bytes = 84, group = 16,
    grid = function(b)
      local s = b:narrow(2, 0, 16)
      return f16_at(b, 80) * low(s):to "f32", f16_at(b, 82) * high(s):to "f32" * -1
    end,
    put = function(b, codes) return ty.concat({ b:narrow(2, 0, 16), two_bits(codes), b:narrow(2, 80, 4) }, 2) end },
  q3_k = { bits = 3, columns = 256, bytes = 110, group = 16,
    grid = function(b)
      local part, top, all = b:narrow(2, 96, 8), b:narrow(2, 104, 4), {}
      local four = { low(part):narrow(2, 0, 4), low(part):narrow(2, 4, 4), high(part):narrow(2, 0, 4),
        high(part):narrow(2, 4, 4) }
      for j = 0, 3 do all[j + 1] = four[j + 1] + top:floor_div(1 << 2 * j):bitwise_and(3) * 16 end
      local scale = f16_at(b, 108) * (ty.concat(all, 2):to "f32" - 32)
      return scale, scale * -4
    end,
    put = function(b, codes)
      local shape = codes.shape
      local third = codes:floor_div(4):reshape(shape[1], shape[2], 8, 32)
      local sum = third:select(2, 0)
      for j = 1, 7 do sum = sum + third:select(2, j) * (1 << j) end
      return ty.concat({ sum, two_bits(codes), b:narrow(2, 96, 14) }, 2)
    end },
  q4_k = { bits = 4, columns = 256, bytes = 144, group = 32,
    grid = function(b)
      local s, m, rest = b:narrow(2, 4, 4), b:narrow(2, 8, 4), b:narrow(2, 12, 4)
      local scale = ty.concat({ s:bitwise_and(63), low(rest) + s:floor_div(64) * 16 }, 2)
      local min = ty.concat({ m:bitwise_and(63), high(rest) + m:floor_div(64) * 16 }, 2)
      return f16_at(b, 0) * scale:to "f32", f16_at(b, 2) * min:to "f32" * -1
    end,
    put = function(b, codes)
      local shape = codes.shape
      local q = codes:reshape(shape[1], shape[2], 4, 2, 32)
      local both = q:select(3, 0) + q:select(3, 1) * 16
      return ty.concat({ b:narrow(2, 0, 16), both:reshape(shape[1], shape[2], 128) }, 2)
    end },
}

--- The format of a name, or an error that lists them.
---@param who string
---@param name string
---@return { bits: integer, columns: integer, group: integer }
function M.get(who, name)
  local format = formats[name]
  if format then return format end
  local names = {}
  for key in pairs(formats) do names[#names + 1] = key end
  table.sort(names)
  error(("%s: format: expected %s, got %s"):format(who, table.concat(names, ", "), tostring(name)), 0)
end

--- The grid of a block-quantized matrix: a value is scale code + offset, f32 [rows, columns / group], one for each
-- `group` elements, codes counting from 0.
---@param q Tensor
---@return Tensor scale
---@return Tensor offset
function M.grid(q)
  local format = M.get("quant.formats", q.dtype)
  local scale, offset = format.grid(bytes_of(q, format))
  return scale:reshape(q.shape[1], -1), offset:reshape(q.shape[1], -1)
end

--- The matrix with the scales of q and other codes, u8 [rows, columns].
---@param q Tensor
---@param codes Tensor
---@return Tensor
function M.with_codes(q, codes)
  local format = M.get("quant.formats", q.dtype)
  local bytes = bytes_of(q, format)
  bytes = format.put(bytes, codes:reshape(bytes.shape[1], bytes.shape[2], format.columns))
  return ty.io.from_bytes(ty.io.to_bytes(bytes:contiguous()), q.dtype, q.shape)
end

return M
