--- Optimizers with a rate for each element: RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop; and ASGD. Their
-- steps are rules of one native pass over the memory, ty.adaptive_.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"

local M = {}

local function zeros(p) return ty.zeros_like(p) end
local function filled(setting)
  return function(p, group) return ty.full_like(p, group[setting]) end
end

-- A class of optimizers. order: the names of the states as the rule has them (first, second, third); slots: by kind,
-- the states that it has; numbers(group): rule, beta1, beta2, eps, low, high.
local function define(name, defaults, order, more)
  local numbers = more.numbers
  return Optimizer.define(name, defaults, {
    kind = more.kind or function() return "plain" end,
    setting = more.setting,
    slots = more.slots,
    step = function(_, group, batch, lr, clip)
      local rule, beta1, beta2, eps, low, high = numbers(group)
      ty.adaptive_(batch.params, batch.grads, batch[order[1]], batch[order[2]] or {}, batch[order[3]] or {},
        batch.averages, rule, lr, beta1, beta2, eps, group.weight_decay, low or 0, high or 0, clip.scale, clip.limit,
        clip.weight, batch.step, clip.control)
    end,
  })
end

-- Every optimizer takes the options of all besides: clip_norm, clip_value, schedule, ema.

local rms = { plain = { square_avg = zeros }, momentum = { square_avg = zeros, momentum_buffer = zeros },
  centered = { square_avg = zeros, grad_avg = zeros },
  both = { square_avg = zeros, momentum_buffer = zeros, grad_avg = zeros } }

local function rms_kind(group)
  if group.momentum ~= 0 then return group.centered and "both" or "momentum" end
  return group.centered and "centered" or "plain"
end

--- Gradients divided by the root of an average of their squares. Tieleman and Hinton 2012; centered: by their standard
-- deviation, Graves 2013.
-- options: lr (0.01), alpha (0.99: what stays of the average), eps (1e-8), weight_decay (0), momentum (0), centered
-- (false); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.RMSprop = define("RMSprop", { lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0,
  centered = false }, { "square_avg", "momentum_buffer", "grad_avg" }, {
    kind = rms_kind, setting = rms_kind, slots = rms,
    numbers = function(group) return "rmsprop", group.momentum, group.alpha, group.eps end,
  })

--- Gradients divided by the root of the sum of all their squares so far. Duchi et al. 2011.
-- options: lr (0.01), lr_decay (0: the rate is divided by 1 + lr_decay times the steps done), weight_decay (0),
-- initial (0: of the sum), eps (1e-10); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.Adagrad = define("Adagrad", { lr = 0.01, lr_decay = 0, weight_decay = 0, initial = 0, eps = 1e-10 }, { "sum" }, {
  slots = { plain = { sum = filled "initial" } },
  numbers = function(group) return "adagrad", 0, 0, group.eps, group.lr_decay end,
})

--- Adadelta: updates as large as the last ones were, by averages of the squares of both. Zeiler 2012.
-- options: lr (1), rho (0.9: what stays of the averages), eps (1e-6), weight_decay (0); clip_norm, clip_value,
-- schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.Adadelta = define("Adadelta", { lr = 1, rho = 0.9, eps = 1e-6, weight_decay = 0 }, { "square_avg", "acc_delta" }, {
  slots = { plain = { square_avg = zeros, acc_delta = zeros } },
  numbers = function(group) return "adadelta", 0, group.rho, group.eps end,
})

--- Adam with the largest magnitude, which decays, in place of the root of the squares. Kingma and Ba 2015, section 7.
-- options: lr (2e-3), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay (0); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.Adamax = define("Adamax", { lr = 2e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 },
  { "exp_avg", "exp_inf" }, {
    slots = { plain = { exp_avg = zeros, exp_inf = zeros } },
    numbers = function(group) return "adamax", group.beta1, group.beta2, group.eps end,
  })

local moments = { plain = { exp_avg = zeros, exp_avg_sq = zeros } }

--- Adam with Nesterov's momentum, which grows with the steps. Dozat 2016.
-- options: lr (2e-3), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay (0), momentum_decay (4e-3), decoupled
-- (false; true: weight decay as AdamW has it); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.NAdam = define("NAdam", { lr = 2e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0,
  momentum_decay = 4e-3, decoupled = false }, { "exp_avg", "exp_avg_sq" }, {
    slots = moments,
    numbers = function(group)
      return group.decoupled and "nadamw" or "nadam", group.beta1, group.beta2, group.eps, group.momentum_decay
    end,
  })

--- Adam whose first steps do without the squares, of which too little is known, and need no warm-up. Liu et al. 2020.
-- options: lr (1e-3), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay (0), decoupled (false; true: weight decay as
-- AdamW has it); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.RAdam = define("RAdam", { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, decoupled = false },
  { "exp_avg", "exp_avg_sq" }, {
    slots = moments,
    numbers = function(group)
      return group.decoupled and "radamw" or "radam", group.beta1, group.beta2, group.eps
    end,
  })

--- Resilient propagation, for gradients of the whole data: of gradients only the signs count; each element has a step
-- size that grows while the sign stays and shrinks where it turns. Riedmiller and Braun 1993.
-- options: lr (0.01: the first step sizes), shrink (0.5), grow (1.2), smallest (1e-6), largest (50); clip_norm,
-- clip_value, schedule (without effect), ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.Rprop = define("Rprop", { lr = 0.01, shrink = 0.5, grow = 1.2, smallest = 1e-6, largest = 50, weight_decay = 0 },
  { "prev", "step_size" }, {
    slots = { plain = { prev = zeros, step_size = filled "lr" } },
    numbers = function(group) return "rprop", group.shrink, group.grow, 0, group.smallest, group.largest end,
  })

--- Stochastic gradient descent with an average of its weights, the state `ax`: optimizer.state[p].ax. Polyak and
-- Juditsky 1992.
-- options: lr (0.01), decay (1e-4: the rate is divided by (1 + decay lr steps)^alpha, the weights lose decay times it),
-- alpha (0.75), start (1e6: steps before the average begins), weight_decay (0); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
M.ASGD = define("ASGD", { lr = 0.01, decay = 1e-4, alpha = 0.75, start = 1e6, weight_decay = 0 }, { "ax" }, {
  slots = { plain = { ax = zeros } },
  numbers = function(group) return "asgd", group.alpha, 0, 0, group.decay, group.start end,
})

return M
