--- Losses and small functions of tensors: nn.cross_entropy and so on. Those that are ops are the ops themselves.
local ty = require "tycho"

local F = {}

for _, name in ipairs { "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "huber_loss", "bce_with_logits", "kl_div",
  "softmax", "log_softmax", "dropout", "scaled_dot_product_attention", "linear_cross_entropy", "glu", "add_layer_norm",
  "add_rms_norm", "rotary" } do
  F[name] = ty[name]
end

F.binary_cross_entropy_with_logits = ty.bce_with_logits

local reductions = {
  mean = function(x) return x:mean() end,
  sum = function(x) return x:sum() end,
  none = function(x) return x end,
}

local function reduce(who, x, name)
  local fn = reductions[name or "mean"]
  if not fn then error(("%s: reduction must be mean, sum or none, got '%s'"):format(who, tostring(name)), 3) end
  return fn(x)
end

--- Huber's loss divided by beta: quadratic below beta, |x - target| - beta / 2 above. options: beta (1), reduction.
function F.smooth_l1_loss(x, target, options)
  local beta = options and options.beta or 1
  return F.huber_loss(x, target, beta, options and options.reduction or "mean") * (1 / beta)
end

--- x divided by its p-norm along `dim` (default the last), at least eps.
function F.normalize(x, options)
  options = options or {}
  local norm = x:norm(options.p or 2, options.dim or -1, true)
  return x / norm:clamp(options.eps or 1e-12)
end

--- Cosine of the angle between x and y along `dim` (default the last).
function F.cosine_similarity(x, y, options)
  local dim = options and options.dim or -1
  return (F.normalize(x, { dim = dim, eps = 1e-8 }) * F.normalize(y, { dim = dim, eps = 1e-8 })):sum(dim)
end

--- max(0, margin + |anchor - positive| - |anchor - negative|) on rows [n, width]. options: margin (1), reduction.
function F.triplet_loss(anchor, positive, negative, options)
  options = options or {}
  local near = (anchor - positive):square():sum(-1):clamp(1e-12):sqrt()
  local far = (anchor - negative):square():sum(-1):clamp(1e-12):sqrt()
  return reduce("triplet_loss", (near - far + (options.margin or 1)):relu(), options.reduction)
end

--- Share of rows of logits [n, classes] whose largest entry is the label [n]; a number in [0, 1].
function F.accuracy(logits, labels)
  return logits:argmax(-1):eq(labels):to("f32"):mean():item()
end

return F
