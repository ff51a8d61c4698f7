--- Parametrizations: a weight that is computed from other parameters before each forward pass. Names of parameters as
-- PyTorch's: parametrizations.weight.original0 and so on.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define, expect, fail = base.define, options.expect, options.fail
local M = {}

-- Takes a field out of a module, so that it is no parameter any longer.
local function forget(module, name)
  for i, key in ipairs(module._order) do
    if key == name then
      table.remove(module._order, i)
      break
    end
  end
  module._known[name], module._parameters[name] = nil, nil
  rawset(module, name, nil)
end

-- The norm over all dimensions but dim, kept; dim -1: over all.
local function norm_except(v, dim)
  if dim == -1 then return v:norm() end
  local over = {}
  for d = 0, v.ndim - 1 do
    if d ~= dim then over[#over + 1] = d end
  end
  return #over == 0 and v:abs() or v:norm(2, over, true)
end

local WeightNorm = define "WeightNorm"

function WeightNorm:init(weight, dim)
  self.dim = dim
  self.original0 = norm_except(weight, dim):detach():clone():requires_grad_()
  self.original1 = weight:detach():clone():requires_grad_()
end

function WeightNorm:forward() return self.original1 * (self.original0 / norm_except(self.original1, self.dim)) end

local function unit(x, eps) return x / x:norm():clamp(eps) end

-- A module of its own for the vectors, whose names in state_dict() are so PyTorch's.
local Vectors = define "Vectors"

function Vectors:init(u, v)
  self:buffer("_u", u)
  self:buffer("_v", v)
end

function Vectors:forward() fail "Vectors: holds the vectors of spectral_norm; it is not called" end

local SpectralNorm = define "SpectralNorm"

-- The matrix of a weight: `dim` by the rest.
local function matrix_of(weight, dim)
  return (dim == 0 and weight or weight:transpose(0, dim)):flatten(1)
end

local function iterate(self, matrix, times)
  ty.no_grad(function()
    local vectors, w = self[1], matrix:detach()
    for _ = 1, times do
      vectors._u:copy_(unit(w:matmul(vectors._v), self.eps))
      vectors._v:copy_(unit(w:transpose():matmul(vectors._u), self.eps))
    end
  end)
end

function SpectralNorm:init(weight, o)
  self.dim, self.iterations, self.eps = o.dim, o.iterations, o.eps
  self.original = weight:detach():clone():requires_grad_()
  local matrix = matrix_of(self.original, o.dim):detach()
  local like = { dtype = weight.dtype, device = weight.device }
  self[1] = Vectors(unit(ty.randn({ matrix:size(0) }, like), o.eps), unit(ty.randn({ matrix:size(1) }, like), o.eps))
  iterate(self, matrix, 15)
end

function SpectralNorm:forward()
  local matrix = matrix_of(self.original, self.dim)
  if self.training then iterate(self, matrix, self.iterations) end
  local u, v = self[1]._u:clone(), self[1]._v:clone() -- the next pass changes them in place
  return self.original / (u * matrix:matmul(v)):sum()
end

local Parametrizations = define "Parametrizations"

function Parametrizations:forward() fail "Parametrizations: holds those of a module; it is not called" end

-- Puts a parametrization, made from the weight, in the place of the weight.
local function register(who, module, name, make)
  expect(who, "module", module, "a module")
  expect(who, "name", name, "a string")
  local weight = rawget(module, name)
  if not ty.is_tensor(weight) or not weight.requires_grad then
    fail("%s: name: expected a parameter of %s, got \"%s\"", who, getmetatable(module).__name, name)
  end
  if weight.ndim < 1 then fail("%s: name: expected a parameter with dimensions, got \"%s\" []", who, name) end
  local made = make(weight)
  forget(module, name)
  if not rawget(module, "parametrizations") then module.parametrizations = Parametrizations() end
  module.parametrizations[name] = made
  rawset(module, name, ty.keep(made()))
  made._hook = function(self) rawset(self, name, self.parametrizations[name]()) end
  module:register_forward_pre_hook(made._hook)
  return module
end

--- A module's weight as a direction and a length: original0 g / norm(v) times original1 v, by slices along dim. Returns
-- the module. options: name ("weight"), dim (0; -1: one length for all). Salimans and Kingma 2016.
---@param module Module
---@param given? table
---@return Module
function M.weight_norm(module, given)
  local o = options.read("weight_norm", given, { name = "weight", dim = 0 }, { dim = "an integer >= -1" })
  return register("weight_norm", module, o.name, function(weight)
    if o.dim >= weight.ndim then
      fail("weight_norm: dim: expected a dimension of the weight [%s], got %d", table.concat(weight.shape, ", "),
        o.dim)
    end
    return WeightNorm(weight, o.dim)
  end)
end

--- A module's weight divided by its largest singular value, which power iterations follow in training. Returns the
-- module. options: name ("weight"), iterations (1: in each forward pass), eps (1e-12), dim (0: of the outputs; 1 for
-- transposed convolutions). Miyato et al. 2018.
---@param module Module
---@param given? table
---@return Module
function M.spectral_norm(module, given)
  local o = options.read("spectral_norm", given, { name = "weight", iterations = 1, eps = 1e-12, dim = 0 },
    { iterations = "an integer >= 1", eps = "a finite number >= 0", dim = "an integer >= 0" })
  return register("spectral_norm", module, o.name, function(weight)
    if o.dim >= weight.ndim then
      fail("spectral_norm: dim: expected a dimension of the weight [%s], got %d", table.concat(weight.shape, ", "),
        o.dim)
    end
    return SpectralNorm(weight, o)
  end)
end

--- Makes what a parametrization computes a parameter again. Returns the module.
---@param module Module
---@param name? string  "weight"
---@return Module
function M.remove_parametrization(module, name)
  expect("remove_parametrization", "module", module, "a module")
  name = expect("remove_parametrization", "name", name, "a string or nil") or "weight"
  local all = rawget(module, "parametrizations")
  local made = all and rawget(all, name)
  if not made then fail("remove_parametrization: name: the module has no parametrization of \"%s\"", name) end
  local weight = ty.no_grad(function() return made() end):detach():clone():requires_grad_()
  local before = module._hooks.before -- of a copy too, which shares the function
  for i = #before, 1, -1 do
    if before[i] == made._hook then table.remove(before, i) end
  end
  if #before == 0 and #module._hooks.after == 0 then rawset(module, "_hooks", false) end
  forget(all, name)
  if #all._order == 0 then forget(module, "parametrizations") end
  rawset(module, name, nil)
  module[name] = weight
  return module
end

return M
