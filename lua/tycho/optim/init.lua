--- Optimizers, schedules of the learning rate, clipping, averages of weights: require "tycho".optim.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"

local optim = {}
for name, value in pairs(require "tycho.optim.schedules") do optim[name] = value end
optim.EMA = require "tycho.optim.ema"

--- Stochastic gradient descent. parameters: a list, or a list of groups { params = list, lr = ... }.
-- options: lr (0.01), momentum, dampening, weight_decay, nesterov; clip_norm, clip_value (0: none), schedule.
---@type fun(parameters: table, options?: table): Optimizer
optim.SGD = Optimizer.define("SGD",
  { lr = 0.01, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false },
  function(group) return group.momentum ~= 0 and { "momentum_buffer" } or {} end,
  function(group, lists, lr, scale)
    ty.sgd_(lists.params, lists.grads, lists.momentum_buffer or {}, lr, group.momentum, group.dampening,
      group.weight_decay, group.nesterov, scale, lists.step)
  end)

local function adam_slots() return { "exp_avg", "exp_avg_sq" } end

local function adam_update(decoupled)
  return function(group, lists, lr, scale)
    ty.adam_(lists.params, lists.grads, lists.exp_avg, lists.exp_avg_sq, lr, group.beta1, group.beta2, group.eps,
      group.weight_decay, decoupled, scale, lists.step)
  end
end

--- Adam; weight_decay is added to the gradient. Kingma and Ba 2015.
-- options: lr (1e-3), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay; clip_norm, clip_value, schedule.
---@type fun(parameters: table, options?: table): Optimizer
optim.Adam = Optimizer.define("Adam", { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 },
  adam_slots, adam_update(false))

--- AdamW: the decay is taken from the weights themselves. Loshchilov and Hutter 2019. Options as Adam's, weight_decay
-- 0.01.
---@type fun(parameters: table, options?: table): Optimizer
optim.AdamW = Optimizer.define("AdamW", { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01 },
  adam_slots, adam_update(true))

local function gradients(parameters)
  local grads = {}
  for _, p in ipairs(parameters) do
    local grad = p.grad
    if grad then grads[#grads + 1] = grad end
  end
  return grads
end

--- Scales the gradients so that their norm together is at most max_norm; returns the norm before, inside ty.compile as
-- a 0-d tensor.
---@return number|Tensor
function optim.clip_grad_norm(parameters, max_norm)
  return ty.no_grad(function()
    local grads = gradients(parameters)
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
function optim.clip_grad_value(parameters, limit)
  ty.no_grad(function()
    for _, grad in ipairs(gradients(parameters)) do grad:clamp_(-limit, limit) end
  end)
end

return optim
