--- How far apart two sets of features are by their characteristic functions, the means of exp(i t . x) over samples x,
-- at frequencies t that a small network draws so that the distance is large. Wang et al. 2025, "Dataset Distillation
-- with Neural Characteristic Function: A Minmax Perspective" (NCFM, arXiv 2502.20653), and its reference code.
--
--     local sampler = characteristic.Sampler(128)
--     local far = characteristic.discrepancy(real, small, sampler(512))    -- small goes down by it, the sampler up
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

--- The characteristic function of features [..., n, d] at frequencies [k, d]: real and imaginary parts, [..., k].
---@param x Tensor
---@param t Tensor
---@return Tensor real
---@return Tensor imaginary
function M.value(x, t)
  local who = "curation.characteristic.value"
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "t", t, "a tensor")
  if x.ndim < 2 or t.ndim ~= 2 or x.shape[x.ndim] ~= t.shape[2] then
    arguments.fail("%s: expected features [..., n, d] and frequencies [k, d], got %s and %s", who,
      arguments.describe(x), arguments.describe(t))
  end
  local angle = x:matmul(t:transpose(0, 1))
  return angle:cos():mean { -2 }, angle:sin():mean { -2 }
end

--- The discrepancy of features [..., n, d] and [..., m, d] at frequencies [k, d], [...]: the mean over frequencies of
-- the root of amplitude times (|a| - |b|)^2 and phase times 2 (|a| |b| - Re(a b*)), a and b the characteristic
-- functions; with weights of 1 that is |a - b|. Amplitudes hold how much samples vary, phases where they are. options:
-- amplitude (0.5), phase (0.5).
---@param real Tensor
---@param small Tensor
---@param t Tensor
---@param options? { amplitude?: number, phase?: number }
---@return Tensor
function M.discrepancy(real, small, t, options)
  local who = "curation.characteristic.discrepancy"
  local o = arguments.read(who, options, { amplitude = 0.5, phase = 0.5 },
    { amplitude = "a number >= 0", phase = "a number >= 0" })
  local a_real, a_imaginary = M.value(real, t)
  local b_real, b_imaginary = M.value(small, t)
  -- Roots have no gradient at 0.
  local a, b = (a_real:square() + a_imaginary:square() + 1e-12):sqrt(),
    (b_real:square() + b_imaginary:square() + 1e-12):sqrt()
  local phase = (a * b - a_real * b_real - a_imaginary * b_imaginary) * 2
  return ((a - b):square() * o.amplitude + phase:clamp(0) * o.phase + 1e-12):sqrt():mean(-1)
end

--- A network that draws frequencies: noise through three layers with norms over the batch, the last with tanh.
---@class FrequencySampler: Module
local Sampler = nn.module "FrequencySampler"
M.Sampler = Sampler

--- width: of the features.
---@param width integer
function Sampler:init(width)
  self.width = arguments.expect("curation.characteristic.Sampler", "width", width, "an integer >= 1")
  self.layers = nn.Sequential()
  for i = 1, 3 do
    self.layers:append(nn.Linear(width, width))
    self.layers:append(nn.BatchNorm1d(width))
    self.layers:append(i < 3 and nn.LeakyReLU(0.2) or nn.Tanh())
  end
end

--- So many frequencies, [count, width].
---@param count integer
---@return Tensor
function Sampler:forward(count)
  arguments.expect("curation.characteristic.Sampler", "count", count, "an integer >= 2")
  local weight = self.layers[1].weight
  return self.layers(ty.randn({ count, self.width }, { device = weight.device, dtype = weight.dtype }))
end

return M
