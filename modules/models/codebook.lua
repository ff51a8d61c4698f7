--- A codebook of a vector quantizer, which follows what is quantized by moving averages: van den Oord et al. 2017,
-- "Neural Discrete Representation Learning", appendix A.1. Codes that hardly anything chooses are put where something
-- is: Dhariwal et al. 2020, "Jukebox", section 3.1.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

---@class Codebook: Module
---@field codes integer
---@field width integer
local Codebook = nn.module "Codebook"

--- options: decay (0.97, of the averages at each call in training), least (0.2: of what falls on a code on the average
-- it has to get this share, or it is put on a vector drawn from those at hand).
---@param codes integer
---@param width integer
---@param options? {decay?: number, least?: number}
function Codebook:init(codes, width, options)
  arguments.expect("Codebook", "codes", codes, "an integer >= 2")
  arguments.expect("Codebook", "width", width, "an integer >= 1")
  local o = arguments.read("Codebook", options, { decay = 0.97, least = 0.2 }, { decay = "a number in [0, 1)",
    least = "a number in [0, 1)" })
  self.codes, self.width, self.decay, self.least = codes, width, o.decay, o.least
  self:buffer("weight", ty.randn(codes, width))
  self:buffer("count", ty.zeros(codes))
  self:buffer("sum", ty.zeros(codes, width))
end

--- Numbers of the codes that are nearest to vectors x [..., width]: i64 [...].
---@param x Tensor
---@return Tensor
function Codebook:nearest(x)
  arguments.expect("Codebook:nearest", "x", x, "a tensor")
  if x.shape[x.ndim] ~= self.width then
    arguments.fail("Codebook:nearest: x: expected [..., %d], got %s", self.width, arguments.describe(x))
  end
  local shape = x.shape
  shape[#shape] = nil
  -- |x - w|^2 without |x|^2, which is the same for all codes.
  local scores = x:detach():reshape(-1, self.width):matmul(self.weight:transpose(0, 1)) * 2
    - self.weight:square():sum(1):unsqueeze(0)
  return scores:argmax(1):reshape(shape)
end

--- The vectors of codes i64 [...]: [..., width].
---@param ids Tensor
---@return Tensor
function Codebook:embed(ids)
  arguments.expect("Codebook:embed", "ids", ids, "a tensor")
  local shape = ids.shape
  shape[#shape + 1] = self.width
  return self.weight:index_select(0, ids:flatten()):reshape(shape)
end

--- Moves the codes towards vectors x [n, width] that chose them, ids i64 [n].
---@param x Tensor
---@param ids Tensor
function Codebook:follow(x, ids)
  arguments.expect("Codebook:follow", "x", x, "a tensor")
  arguments.expect("Codebook:follow", "ids", ids, "a tensor")
  ty.no_grad(function()
    x = x:detach()
    local n, fresh = x.shape[1], self.count:sum():item() == 0
    if fresh then -- the first vectors that come are the first codes
      self.weight:copy_(x:index_select(0, ty.randint(0, n, { self.codes }, { device = x.device })))
      ids = self:nearest(x)
    end
    local decay = fresh and 0 or self.decay
    local count = ty.zeros_like(self.count):index_add(0, ids, ty.ones({ n }, { dtype = x.dtype, device = x.device }))
    self.count:copy_(self.count * decay + count * (1 - decay))
    self.sum:copy_(self.sum * decay + ty.zeros_like(self.sum):index_add(0, ids, x) * (1 - decay))
    local least = self.least * n / self.codes
    local dead = self.count:lt(least):unsqueeze(1)
    local random = x:index_select(0, ty.randint(0, n, { self.codes }, { device = x.device }))
    self.weight:copy_(ty.where(dead, random, self.sum / self.count:clamp(1e-6):unsqueeze(1)))
    -- One that was put anew counts as one that is just alive.
    self.sum:copy_(ty.where(dead, random * least, self.sum))
    self.count:copy_(ty.where(dead:squeeze(1), ty.full_like(self.count, least), self.count))
  end)
end

return Codebook
