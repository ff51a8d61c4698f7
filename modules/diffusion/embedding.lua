--- Embeddings of time and class that the diffusion networks share.
local ty = require "tycho"

local expect = require("tycho.arguments").expect
local M = {}

--- Frequencies exp(-ln(10000) i / half) for i below half, as a tensor [half].
function M.frequencies(width)
  local half = width // 2
  return (ty.arange(half):to "f32" * (-math.log(10000) / half)):exp()
end

--- Sinusoidal embedding of times t [n] (0 to 1000): [n, width], cosines first. Vaswani et al. 2017; Ho et al. 2020.
function M.sinusoidal(t, frequencies)
  local angles = t:unsqueeze(1) * frequencies:unsqueeze(0)
  return ty.concat({ angles:cos(), angles:sin() }, 1)
end

--- Where a model computes; "cpu" for plain functions.
function M.device_of(model) return type(model) == "table" and model.device and model:device() or "cpu" end

--- Labels [n] of which a share p became `null`, at random: training for classifier-free guidance. Ho and Salimans 2022.
function M.drop_labels(labels, p, null)
  expect("drop_labels", "labels", labels, "a tensor")
  expect("drop_labels", "p", p, "a number in [0, 1]")
  expect("drop_labels", "null", null, "an integer")
  if p <= 0 then return labels end
  local dropped = ty.rand(labels.shape, { device = labels.device }):lt(p)
  return ty.where(dropped, null, labels)
end

--- A function of (x, t) that guides `model`: v = v(null) + scale * (v(label) - v(null)) in one call on twice the batch.
-- scale 1 is the plain conditional model. labels: i64 [n], or nil for an unconditional model.
---@param model fun(x: Tensor, t: Tensor, labels?: Tensor): Tensor
---@param labels? Tensor
---@param scale number
---@param null integer  the label that means "any"
function M.guided(model, labels, scale, null)
  if not labels or scale == 1 then
    return function(x, t) return model(x, t, labels) end
  end
  local both = ty.concat({ labels, ty.full_like(labels, null) }, 0)
  return function(x, t)
    local y = model(ty.concat({ x, x }, 0), ty.concat({ t, t }, 0), both)
    local n = x.shape[1]
    local with, without = y:narrow(0, 0, n), y:narrow(0, n, n)
    return without + (with - without) * scale
  end
end

return M
