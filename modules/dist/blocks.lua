-- Numbers as whole ones of few bits with a scale for each block, as ranks send them.
local ty = require "tycho"

local M = {}

--- Codes and scales of x: i8 [n] of 8 bits, u8 [n / 2] of 4 bits, two to a byte; with 0 bits x itself and no scales.
---@param x Tensor       [n], whole blocks, an even number each
---@param bits integer   8, 4 or 0
---@param block integer
---@return Tensor codes
---@return Tensor|nil scales  f32 [n / block]
function M.quantize(x, bits, block)
  if bits == 0 then return x:contiguous(), nil end
  local levels = bits == 8 and 127 or 7
  local rows = x:detach():to("f32"):view(-1, block)
  local scales = rows:abs():amax(1) / levels
  -- A block of zeros has a scale of zero.
  local codes = (rows / ty.where(scales:gt(0), scales, 1.0):unsqueeze(1)):round():clamp(-levels, levels)
  if bits == 8 then return codes:to("i8"):view(-1), scales end
  local two = codes:add_(8):view(-1, 2)
  return (two:select(1, 0) + two:select(1, 1) * 16):to "u8", scales
end

--- What codes and scales say: f32 [n], with 0 bits the codes themselves.
---@param codes Tensor
---@param scales Tensor|nil
---@param bits integer
---@param block integer
---@return Tensor
function M.dequantize(codes, scales, bits, block)
  if bits == 0 then return codes end
  if bits == 4 then
    codes = ty.stack({ codes:bitwise_and(15), codes:bitwise_right_shift(4) }, 1):to("f32"):sub_(8)
  end
  return (codes:to("f32"):view(-1, block) * scales:unsqueeze(1)):view(-1)
end

return M
