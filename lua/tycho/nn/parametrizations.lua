--- Parametrizations: a weight that is computed from other parameters before each forward pass. Names of parameters as
-- PyTorch's: parametrizations.weight.original0 and so on. Between passes the field holds what the last one computed.
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

-- The parametrization of a parameter, if it has one.
local function found(module, name)
  local all = rawget(module, "parametrizations")
  return all and rawget(all, name)
end

-- Puts a parametrization, made from the weight, in the place of the weight.
local function register(who, module, name, make)
  expect(who, "module", module, "a module")
  expect(who, "name", name, "a string")
  if found(module, name) then
    fail("%s: name: \"%s\" is computed by %s already; nn.remove_parametrization makes it a parameter again", who, name,
      getmetatable(found(module, name)).__name)
  end
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

-- Functions and modules one after the other, of one tensor or, for the first of them, several.
local ParametrizationList = define "ParametrizationList"

function ParametrizationList:init(originals, single, first)
  if single then self.original = originals[1]
  else
    for i, x in ipairs(originals) do self["original" .. i - 1] = x end
  end
  self.originals, self.count = #originals, 1
  self[1] = first
end

function ParametrizationList:forward()
  local x = rawget(self, "original")
  if x then x = self[1](x)
  else
    local list = {}
    for i = 1, self.originals do list[i] = self["original" .. i - 1] end
    x = self[1](table.unpack(list))
  end
  for i = 2, self.count do x = self[i](x) end
  return x
end

-- What a parametrization makes of `list`, which must be like the weight.
local function checked(who, parametrization, list, weight)
  local value = ty.no_grad(function() return parametrization(table.unpack(list)) end)
  expect(who, "what the parametrization returns", value, "a tensor")
  if table.concat(value.shape, ",") ~= table.concat(weight.shape, ",") or value.dtype ~= weight.dtype then
    fail("%s: parametrization: expected it to give %s [%s], as the parameter is, got %s [%s]", who, weight.dtype,
      table.concat(weight.shape, ", "), value.dtype, table.concat(value.shape, ", "))
  end
end

--- Lets a parametrization, a module or a function, compute a parameter of a module anew in each forward pass, from
-- parametrizations.NAME.original, which is trained in its place. A module may have right_inverse(weight): what the
-- original is at first, such that the parameter stays what it is; where that is several tensors they are called
-- original0, original1 ... and all given to the parametrization. A further one of the same parameter computes from what
-- the earlier ones gave. Returns the module.
--
--     nn.register_parametrization(layer, "weight", function(x) return (x + x:t()) * 0.5 end)
--
---@param module Module
---@param name string
---@param parametrization Module|fun(...: Tensor): Tensor
---@return Module
function M.register_parametrization(module, name, parametrization)
  local who = "register_parametrization"
  expect(who, "module", module, "a module")
  expect(who, "name", name, "a string")
  if type(parametrization) ~= "function" and not base.is_module(parametrization) then -- classes can be called, too
    fail("%s: parametrization: expected a module or a function, got %s", who, options.describe(parametrization))
  end
  local there = found(module, name)
  if there and getmetatable(there) == ParametrizationList then
    checked(who, parametrization, { ty.no_grad(there) }, ty.no_grad(there))
    there.count = there.count + 1
    there[there.count] = parametrization
    rawset(module, name, ty.keep(there()))
    return module
  end
  return register(who, module, name, function(weight)
    local originals, single = { weight }, true
    local inverse = type(parametrization) ~= "function" and parametrization.right_inverse
    if inverse then
      originals = table.pack(ty.no_grad(inverse, parametrization, weight:detach()))
      single = originals.n == 1
      for i = 1, originals.n do expect(who, "what right_inverse returns", originals[i], "a tensor") end
    end
    checked(who, parametrization, originals, weight)
    for i, x in ipairs(originals) do originals[i] = x:detach():clone():requires_grad_() end
    return ParametrizationList(originals, single, parametrization)
  end)
end

--- Whether a parameter of a module, or of no name any one, is computed by a parametrization.
---@param module Module
---@param name? string
---@return boolean
function M.is_parametrized(module, name)
  expect("is_parametrized", "module", module, "a module")
  expect("is_parametrized", "name", name, "a string or nil")
  if name then return found(module, name) ~= nil end
  return rawget(module, "parametrizations") ~= nil
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

local Orthogonal = define "Orthogonal"

-- Q of a matrix whose R has no negative element on its diagonal: nearest to the matrix where that is orthogonal.
local function orthogonal_of(x)
  local q, r = ty.qr(x)
  local sign = r:diagonal(0, -2, -1):sign()
  return q * ty.where(sign:eq(0), 1.0, sign):unsqueeze(-2)
end

function Orthogonal:init(weight, map)
  self.map = map
  self.wide = weight:size(-2) < weight:size(-1)
  local q = weight:detach():clone()
  if self.wide then q = q:transpose(-2, -1) end
  local tall, missing = q:size(-2), q:size(-2) - q:size(-1)
  if missing > 0 then -- the rest of a square matrix, which is cut off again
    local shape = q.shape
    shape[#shape] = missing
    q = ty.concat({ orthogonal_of(q), ty.randn(shape, { dtype = q.dtype, device = q.device }) }, -1)
  end
  self.width = tall - missing
  self:buffer("base", orthogonal_of(q))
end

function Orthogonal:right_inverse(weight) return ty.zeros_like(weight) end

function Orthogonal:forward(x)
  if self.wide then x = x:transpose(-2, -1) end
  x = x:tril()
  local n, k = x:size(-2), x:size(-1)
  if n > k then
    local shape = x.shape
    shape[#shape] = n - k
    x = ty.concat({ x, ty.zeros(shape, { dtype = x.dtype, device = x.device }) }, -1)
  end
  local a = x - x:transpose(-2, -1)
  local q
  if self.map == "matrix_exp" then q = ty.matrix_exp(a)
  else
    local one = ty.eye(n, { dtype = x.dtype, device = x.device })
    q = ty.solve((one - a * 0.5):contiguous(), (one + a * 0.5):expand(a.shape):contiguous())
  end
  q = ty.matmul(self.base, q):narrow(-1, 0, k)
  return self.wide and q:transpose(-2, -1) or q
end

--- A module's weight [..., n, k] as a matrix whose columns are orthogonal and of length 1 (rows, where there are fewer
-- of them), at first the Q of the weight's own QR factorization: base times exp(A), or times Cayley's (1 - A/2)^-1
-- (1 + A/2), of a matrix A = L - L' of what is trained. Returns the module. options: name ("weight"), map ("matrix_exp"
-- or "cayley"). Lezcano-Casado 2019, "Trivializations for Gradient-Based Optimization on Manifolds".
---@param module Module
---@param given? { name?: string, map?: string }
---@return Module
function M.orthogonal(module, given)
  local o = options.read("orthogonal", given, { name = "weight", map = "matrix_exp" },
    { map = '"matrix_exp" or "cayley"' })
  expect("orthogonal", "module", module, "a module")
  local weight = rawget(module, o.name)
  if ty.is_tensor(weight) and not found(module, o.name) then
    if weight.ndim < 2 or (weight.dtype ~= "f32" and weight.dtype ~= "f64") then
      fail("orthogonal: name: expected matrices [..., n, k] of f32 or f64, got \"%s\" %s [%s]", o.name, weight.dtype,
        table.concat(weight.shape, ", "))
    end
    return M.register_parametrization(module, o.name, Orthogonal(weight, o.map))
  end
  return register("orthogonal", module, o.name) -- which says what is wrong
end

--- Makes what a parametrization computes a parameter again. Returns the module.
---@param module Module
---@param name? string  "weight"
---@return Module
function M.remove_parametrization(module, name)
  expect("remove_parametrization", "module", module, "a module")
  name = expect("remove_parametrization", "name", name, "a string or nil") or "weight"
  local all, made = rawget(module, "parametrizations"), found(module, name)
  if not made then fail("remove_parametrization: name: the module has no parametrization of \"%s\"", name) end
  local weight = ty.no_grad(function() return made() end):detach():clone():requires_grad_()
  base.remove_hook(module, "before", made._hook) -- of a copy too, which shares the function
  forget(all, name)
  if #all._order == 0 then forget(module, "parametrizations") end
  rawset(module, name, nil)
  module[name] = weight
  return module
end

return M
