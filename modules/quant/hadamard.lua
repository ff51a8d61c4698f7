--- The block Hadamard transform: blocks of a row times an orthogonal matrix whose entries are all as large, which
-- spreads what is large in one place over its block. With random signs of the columns (Tseng et al. 2025, "Training
-- LLMs with MXFP4") it is another rotation each time. Both factors of a product are rotated along the dimension that is
-- summed over, so that the product stays what it was.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local matrices = {}

local function check_block(who, block)
  expect(who, "block", block, "an integer >= 1")
  if block & (block - 1) ~= 0 or block > 4096 then
    fail("%s: block: expected a power of 2 up to 4096, got %d", who, block)
  end
  return block
end

--- Sylvester's matrix of a power of 2, over the root of its size: symmetric and its own inverse, f32 [block, block].
---@param block integer
---@return Tensor
function M.matrix(block)
  check_block("quant.hadamard.matrix", block)
  if not matrices[block] then
    local rows, entry = {}, block ^ -0.5
    for i = 0, block - 1 do
      local row = {}
      for j = 0, block - 1 do
        local odd, both = 0, i & j
        while both > 0 do odd, both = odd ~ (both & 1), both >> 1 end
        row[j + 1] = odd == 1 and -entry or entry
      end
      rows[i + 1] = row
    end
    matrices[block] = ty.keep(ty.tensor(rows, { dtype = "f32" }))
  end
  return matrices[block]
end

--- That matrix with random signs of its rows, which the generator draws: still orthogonal, no longer symmetric.
---@param block integer
---@return Tensor
function M.random(block)
  check_block("quant.hadamard.random", block)
  return M.matrix(block) * (ty.randint(0, 2, { block, 1 }):to "f32" * 2 - 1)
end

local function apply(who, x, matrix)
  expect(who, "x", x, "a tensor")
  expect(who, "matrix", matrix, "a tensor")
  if matrix.ndim ~= 2 or matrix:size(0) ~= matrix:size(1) or matrix:numel() == 0 then
    fail("%s: matrix: expected one of matrix() or random(), got %s", who, arguments.describe(matrix))
  end
  local block = matrix:size(0)
  if x.ndim == 0 or x:size(-1) % block ~= 0 then
    fail("%s: x: expected [..., n], n a multiple of %d, got %s", who, block, arguments.describe(x))
  end
  if matrix.device ~= x.device then matrix = matrix:to(x.device) end
  if matrix.dtype ~= x.dtype then matrix = matrix:to(x.dtype) end
  return ty.matmul(x:reshape(-1, block), matrix):reshape(x.shape)
end

--- x [..., n] with every block of its last dimension times the matrix.
---@param x Tensor
---@param matrix Tensor  of matrix() or random()
---@return Tensor
function M.rotate(x, matrix) return apply("quant.hadamard.rotate", x, matrix) end

--- The inverse: every block times the matrix transposed.
---@param x Tensor
---@param matrix Tensor
---@return Tensor
function M.unrotate(x, matrix)
  expect("quant.hadamard.unrotate", "matrix", matrix, "a tensor")
  return apply("quant.hadamard.unrotate", x, matrix:transpose(0, 1):contiguous())
end

return M
