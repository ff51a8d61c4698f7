--- Optimizers, schedules of the learning rate, clipping, averages of weights: require "tycho".optim.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam"
local expect = require("tycho.arguments").expect

local optim = {}
for name, value in pairs(require "tycho.optim.schedules") do optim[name] = value end
optim.EMA = require "tycho.optim.ema"
optim.GradScaler = require "tycho.optim.grad_scaler"

local function zeros(p) return ty.zeros_like(p) end

-- Every optimizer takes these options besides its own, all of it done in one pass over the memory: clip_norm (the
-- gradients are scaled so that their norm together is at most this), clip_value (every element is cut to it first),
-- schedule (a function of the number of steps done to a factor of lr), ema (an optim.EMA, whose averages then move
-- within the step: don't call its update()).

-- `parameters` is a module, a list of tensors or one tensor, or a list of groups { params = any of those, lr = ... }
-- whose settings are their own, a schedule among them.

--- Stochastic gradient descent. parameters: a module, a list of tensors, or a list of groups { params =, lr = ... }.
-- options: lr (0.01), momentum, dampening, weight_decay, nesterov, stochastic (see Adam); clip_norm, clip_value,
-- schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
optim.SGD = Optimizer.define("SGD",
  { lr = 0.01, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, stochastic = false }, {
    setting = function(group) return group.momentum ~= 0 end,
    kind = function(group) return group.momentum ~= 0 and "momentum" or "plain" end,
    slots = { plain = {}, momentum = { momentum_buffer = zeros } },
    step = function(_, group, batch, lr, clip)
      ty.sgd_(batch.params, batch.grads, batch.momentum_buffer or {}, batch.averages, lr, group.momentum,
        group.dampening, group.weight_decay, group.nesterov, clip.scale, clip.limit, clip.weight, batch.step,
        group.stochastic, clip.control)
    end,
  })

--- Adam; weight_decay is added to the gradient. Kingma and Ba 2015.
-- options: lr (1e-3), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay; bits (32; 8: the moments of parameters of
-- 4096 elements and more are quantized block by block, a quarter of the memory, Dettmers et al. 2022; groups may
-- differ: embeddings are best left at 32), paged (false; true: the moments of such parameters lie in memory that gives
-- way when there is little, see Tensor:page_memory, Dettmers et al. 2023), stochastic (false; true: parameters in half
-- precision that have no f32 copy are rounded up or down with chances that keep the mean, so that steps below half of
-- their last place are not lost, Gupta et al. 2015; not with 8 bits); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
optim.Adam = Optimizer.define("Adam",
  { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, bits = 32, paged = false,
    stochastic = false }, adam(false))

--- AdamW: the decay is taken from the weights themselves. Loshchilov and Hutter 2019. Options as Adam's, weight_decay
-- 0.01.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
optim.AdamW = Optimizer.define("AdamW",
  { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01, bits = 32, paged = false,
    stochastic = false }, adam(true))

--- Lion: the sign of an average of the gradients, decoupled decay; wants a rate 3 to 10 times smaller and a decay as
-- much larger than AdamW. Chen et al. 2023.
-- options: lr (1e-4), beta1 (0.9), beta2 (0.99), weight_decay, stochastic (see Adam); clip_norm, clip_value, schedule,
-- ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
optim.Lion = Optimizer.define("Lion", { lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0, stochastic = false }, {
  kind = function() return "plain" end,
  slots = { plain = { exp_avg = zeros } },
  step = function(_, group, batch, lr, clip)
    ty.lion_(batch.params, batch.grads, batch.exp_avg, batch.averages, lr, group.beta1, group.beta2,
      group.weight_decay, clip.scale, clip.limit, clip.weight, batch.step, group.stochastic, clip.control)
  end,
})

local function gradients(who, parameters)
  local grads = {}
  for _, p in ipairs(Optimizer.parameters_of(who, parameters)) do
    local grad = p.grad
    if grad then grads[#grads + 1] = grad end
  end
  return grads
end

--- Scales the gradients so that their norm together is at most max_norm; returns the norm before, inside ty.compile as
-- a 0-d tensor.
---@param parameters Module|Tensor[]|Tensor
---@param max_norm number
---@return number|Tensor
function optim.clip_grad_norm(parameters, max_norm)
  expect("clip_grad_norm", "max_norm", max_norm, "a number >= 0")
  return ty.no_grad(function()
    local grads = gradients("clip_grad_norm", parameters)
    if #grads == 0 then return 0.0 end
    local norm = ty.norm_list(grads, 2)
    if ty.core.program.is_compiling() then
      local scale = max_norm / (norm + 1e-6)
      scale = ty.where(scale:lt(1), scale, 1.0)
      for _, grad in ipairs(grads) do grad:mul_(scale) end
      return norm
    end
    norm = norm:item()
    local scale = max_norm / (norm + 1e-6)
    if scale < 1 then
      for _, grad in ipairs(grads) do grad:mul_(scale) end
    end
    return norm
  end)
end

--- Cuts every element of the gradients to [-limit, limit].
---@param parameters Module|Tensor[]|Tensor
---@param limit number
function optim.clip_grad_value(parameters, limit)
  expect("clip_grad_value", "limit", limit, "a number >= 0")
  ty.no_grad(function()
    for _, grad in ipairs(gradients("clip_grad_value", parameters)) do grad:clamp_(-limit, limit) end
  end)
end

local files = { order_effects = "tycho.optim.order_effects" }
for name, file in pairs { GaLore = "galore", APOLLO = "apollo", FRUGAL = "frugal", Muon = "muon", LAMB = "lamb",
  Adafactor = "adafactor", Shampoo = "shampoo", SOAP = "soap", LBFGS = "lbfgs", SAM = "sam",
  ReduceLROnPlateau = "plateau", DAdaptAdamW = "dadapt", Prodigy = "prodigy", DoG = "dog", Mechanic = "mechanic",
  ScheduleFree = "schedule_free", MeZO = "mezo" } do
  files[name] = "tycho.optim." .. file
end
for _, name in ipairs { "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD" } do
  files[name] = { "tycho.optim.rules", name }
end

return require "tycho.lazy" (optim, files, "ty.optim")
