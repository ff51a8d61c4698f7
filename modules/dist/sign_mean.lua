--- The mean over ranks of tensors that go as one bit for each element: signs, and a scale for each block. What is lost
-- is remembered and added to what is sent next, on the way to the rank that averages a part and on the way back. Tang
-- et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", whose
-- compressed all-reduce this is. There one scale stands for a whole tensor. Where gradients within a tensor differ in
-- size, as those of rows of an embedding do, what is far smaller than the scale is then mostly noise.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- The signs of x as bits, eight to a byte, the first the lowest: 1 for 0 and more.
---@param x Tensor  [n], n a multiple of 8
---@return Tensor  u8 [n / 8]
function M.pack(x)
  expect("dist.pack_signs", "x", x, "a tensor")
  if x.ndim ~= 1 or x.shape[1] % 8 ~= 0 then
    fail("dist.pack_signs: x: expected one dimension of a multiple of 8 elements, got %s", arguments.describe(x))
  end
  local weights = ty.tensor({ 1, 2, 4, 8, 16, 32, 64, 128 }, { dtype = "f32", device = x.device })
  return x:detach():ge(0):to("f32"):view(-1, 8):matmul(weights):to "u8"
end

--- What pack() made, as ones with their signs.
---@param bits Tensor   u8 [n]
---@param dtype? string  (f32)
---@return Tensor  [8 n]
function M.unpack(bits, dtype)
  expect("dist.unpack_signs", "bits", bits, "a tensor")
  expect("dist.unpack_signs", "dtype", dtype, "a string or nil")
  if bits.ndim ~= 1 or bits.dtype ~= "u8" then
    fail("dist.unpack_signs: bits: expected u8 [n], got %s %s", bits.dtype, arguments.describe(bits))
  end
  local places = ty.arange(8):to { dtype = "u8", device = bits.device }
  local ones = bits:unsqueeze(1):bitwise_right_shift(places):bitwise_and(1):reshape(-1)
  return ones:to(dtype or "f32"):mul_(2):sub_(1)
end

--- What dist.sign_mean makes.
---@class SignMean
---@field error Tensor         [padded], what this rank has not sent yet
---@field server_error Tensor  [padded / size], what its part of the mean lost on the way back
local SignMean = {}
SignMean.__index = SignMean
SignMean.__name = "SignMean"

--- Means over ranks of tensors of n elements. options: block (128: elements that share a scale, a multiple of 8),
-- feedback (true; false: what is lost is forgotten), dtype (f32).
---@param group RankGroup
---@param n integer
---@param options? { block?: integer, feedback?: boolean, dtype?: string }
---@return SignMean
function M.new(group, n, options)
  local who = "dist.sign_mean"
  Group.expect(who, group)
  expect(who, "n", n, "an integer >= 1")
  local o = arguments.read(who, options, { block = 128, feedback = true, dtype = "f32" },
    { block = "an integer >= 8", dtype = '"f32" or "f64"' })
  if o.block % 8 ~= 0 then fail("%s: block: expected a multiple of 8, got %d", who, o.block) end
  local each = group.size * o.block
  local padded = (n + each - 1) // each * each
  local self = setmetatable({ group = group, n = n, padded = padded, block = o.block, feedback = o.feedback }, SignMean)
  self.error = ty.keep(ty.zeros({ padded }, { dtype = o.dtype }))
  self.server_error = ty.keep(ty.zeros({ padded // group.size }, { dtype = o.dtype }))
  -- Elements of each block that are no filling.
  self.counts = ty.keep((n - ty.arange(padded // o.block):to(o.dtype) * o.block):clamp(0, o.block))
  return self
end

--- x as signs and scales, and x less what these say. The scale makes what is sent as large as x in the norm.
---@param x Tensor       [m], whole blocks
---@param counts Tensor  [m / block]
---@return Tensor bits, Tensor scales, Tensor error
function SignMean:compress(x, counts)
  local blocks = x:view(-1, self.block)
  local scales = (blocks:square():sum(1) / counts:clamp { min = 1 }):sqrt()
  local bits = M.pack(x)
  return bits, scales, x - self:decompress(bits, scales)
end

--- What signs and scales say.
function SignMean:decompress(bits, scales)
  return (M.unpack(bits, scales.dtype):view(-1, self.block) * scales:unsqueeze(1)):view(-1)
end

-- Of what fills the last blocks nothing is remembered.
local function remember(self, slot, error, first)
  if not self.feedback then return end
  slot:copy_(error)
  local filling = first + slot:numel() - math.max(self.n, first)
  if filling > 0 then slot:narrow(0, slot:numel() - filling, filling):zero_() end
end

--- x becomes the mean of what ranks say of theirs, the same on all of them. All ranks call it.
---@param x Tensor  [n]
---@return Tensor x
function SignMean:mean(x)
  expect("SignMean:mean", "x", x, "a tensor")
  if x:numel() ~= self.n or x.dtype ~= self.error.dtype or not x:is_contiguous() then
    fail("SignMean:mean: x: expected %d elements of %s, contiguous, got %s", self.n, self.error.dtype,
      arguments.describe(x))
  end
  ty.no_grad(ty.scope, function()
    local group, size, part = self.group, self.group.size, self.padded // self.group.size
    local whole = self.error:clone()
    whole:narrow(0, 0, self.n):add_(x:detach():view(-1))
    local bits, scales, error = self:compress(whole, self.counts)
    remember(self, self.error, error, 0)
    local theirs = self:decompress(group:all_to_all(bits), group:all_to_all(scales)) -- of all ranks, for this part
    local mean = theirs:view(size, part):mean(0):add_(self.server_error)
    local blocks = part // self.block
    bits, scales, error = self:compress(mean, self.counts:narrow(0, group.rank * blocks, blocks))
    remember(self, self.server_error, error, group.rank * part)
    local all = self:decompress(group:all_gather(bits), group:all_gather(scales))
    x:detach():view(-1):copy_(all:narrow(0, 0, self.n))
  end)
  return x
end

return M
