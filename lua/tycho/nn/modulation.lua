--- Adaptive normalisation: scale, shift and gates of a block follow from a condition (time, class, text).
local base = require "tycho.nn.module"
local activations = require "tycho.nn.activations"
local init = require "tycho.nn.initial"
local layers = require "tycho.nn.layers"
local options = require "tycho.nn.options"

local M = {}

--- x (1 + scale) + shift. x [n, ..., d] with shift and scale [n, d], the same for all positions of a sample.
-- Perez et al. 2018, "FiLM"; Peebles and Xie 2023.
---@param x Tensor
---@param shift Tensor
---@param scale Tensor
---@return Tensor
function M.modulate(x, shift, scale)
  options.expect("modulate", "x", x, "a tensor")
  options.expect("modulate", "shift", shift, "a tensor")
  options.expect("modulate", "scale", scale, "a tensor")
  for _ = 1, x.ndim - 2 do shift, scale = shift:unsqueeze(1), scale:unsqueeze(1) end
  return x * (scale + 1) + shift
end

--- From a condition [n, width] the numbers that modulate a block: SiLU and a linear layer to parts * outputs. All are 0
-- at the start, so that a residual block whose gate is among them begins as the identity (adaLN-Zero, Peebles and Xie
-- 2023). The parameters are `1.weight` and `1.bias`, as in the published files. Returns `parts` tensors [n, outputs].
-- options: outputs (width).
---@overload fun(width: integer, parts: integer, options?: {outputs?: integer}): Module
local Modulation = base.define "Modulation"
M.Modulation = Modulation

function Modulation:init(width, parts, given)
  local o = options.read("Modulation", given, { outputs = width })
  options.positive("Modulation", "width", width)
  self.parts = options.positive("Modulation", "parts", parts)
  local linear = layers.Linear(width, parts * o.outputs)
  if linear.weight.device ~= "meta" then
    init.zeros(linear.weight)
    init.zeros(linear.bias)
  end
  self[1] = activations.SiLU()
  self[2] = linear
end

function Modulation:forward(condition) return self[2](self[1](condition)):chunk(self.parts, 1) end

function Modulation:describe() return ("%d parts"):format(self.parts) end

return M
