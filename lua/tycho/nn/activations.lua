--- Activations as modules; the functions themselves are ops.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define, expect = base.define, options.expect
local M = {}

local function simple(name, fn)
  local class = define(name)
  function class:forward(x) return fn(x) end
  M[name] = class
end

--- max(x, 0).
simple("ReLU", ty.relu)
--- x * sigmoid(x), also called swish.
simple("SiLU", ty.silu)
--- 1 / (1 + exp(-x)).
simple("Sigmoid", ty.sigmoid)
--- The hyperbolic tangent.
simple("Tanh", ty.tanh)
--- x * tanh(log(1 + exp(x))). Misra 2019.
simple("Mish", ty.mish)
--- log(1 + exp(x)).
simple("Softplus", ty.softplus)
--- log(1 / (1 + exp(-x))).
simple("LogSigmoid", ty.log_sigmoid)

--- x * Phi(x); approximate = "tanh" for GPT-2's form. nn.GELU "tanh" or nn.GELU { approximate = "tanh" }.
local GELU = define "GELU"
M.GELU = GELU

function GELU:init(given)
  if type(given) == "string" then given = { approximate = given } end
  local kinds = { approximate = '"none" or "tanh"' }
  self.approximate = options.read("GELU", given, { approximate = "none" }, kinds).approximate
end

function GELU:forward(x) return ty.gelu(x, self.approximate) end

function GELU:describe() return self.approximate == "none" and "" or self.approximate end

--- x where it is positive, elsewhere slope (0.01) times x.
local LeakyReLU = define "LeakyReLU"
M.LeakyReLU = LeakyReLU

function LeakyReLU:init(slope) self.slope = expect("LeakyReLU", "slope", slope, "a number or nil") or 0.01 end

function LeakyReLU:forward(x) return ty.leaky_relu(x, self.slope) end

--- x where it is positive, elsewhere alpha (1) * (exp(x) - 1). Clevert et al. 2015.
local ELU = define "ELU"
M.ELU = ELU

function ELU:init(alpha) self.alpha = expect("ELU", "alpha", alpha, "a number or nil") or 1 end

function ELU:forward(x) return ty.elu(x, self.alpha) end

local function over_dim(name, fn)
  local class = define(name)
  function class:init(dim) self.dim = expect(name, "dim", dim, "an integer or nil") or -1 end
  function class:forward(x) return fn(x, self.dim) end
  M[name] = class
end

--- exp(x) / sum(exp(x)) along dimension dim (-1).
over_dim("Softmax", ty.softmax)
--- log(softmax(x)) along dimension dim (-1).
over_dim("LogSoftmax", ty.log_softmax)

return M
