--- Losses and small functions of tensors: nn.cross_entropy and so on. Those that are ops are the ops themselves.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, read = arguments.expect, arguments.read
local F = {}

for _, name in ipairs { "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "huber_loss", "bce_with_logits", "kl_div",
  "softmax", "log_softmax", "dropout", "scaled_dot_product_attention", "linear_cross_entropy",
  "ctc_loss", "rnnt_loss", "glu", "add_layer_norm", "add_rms_norm", "rotary" } do
  F[name] = ty[name]
end

F.binary_cross_entropy_with_logits = ty.bce_with_logits

local reductions = {
  mean = function(x) return x:mean() end,
  sum = function(x) return x:sum() end,
  none = function(x) return x end,
}
local reduction_kind = '"mean" or "sum" or "none"'

--- Huber's loss divided by beta: quadratic below beta, |x - target| - beta / 2 above. options: beta (1), reduction.
function F.smooth_l1_loss(x, target, options)
  local o = read("smooth_l1_loss", options, { beta = 1, reduction = "mean" },
    { beta = "a finite number > 0", reduction = reduction_kind })
  return F.huber_loss(x, target, o.beta, o.reduction) * (1 / o.beta)
end

--- What fn makes of x [n, ...], at most `most` rows at a time and joined again, so that what it needs on the way is
-- there for a few rows alone: fn(rows) gives [rows, ...]. Gradients go through it, unless it is called without.
---@param x Tensor
---@param most integer
---@param fn fun(rows: Tensor): Tensor
---@return Tensor
function F.in_parts(x, most, fn)
  expect("in_parts", "x", x, "a tensor")
  expect("in_parts", "most", most, "an integer >= 1")
  expect("in_parts", "fn", fn, "a function")
  if x.ndim == 0 then arguments.fail("in_parts: x: expected [n, ...], got a tensor []") end
  local n, parts = x.shape[1], {}
  if n <= most then return fn(x) end
  for start = 0, n - 1, most do
    parts[#parts + 1] = ty.scope(function() return fn(x:narrow(0, start, math.min(most, n - start))) end)
  end
  return ty.concat(parts, 0)
end

local vector_kinds = { dim = "an integer", p = "a number >= 0", eps = "a finite number >= 0" }

-- Of halves in f32: their own range has no room for the eps.
local function normalized(x, p, dim, eps)
  if x.dtype == "f16" or x.dtype == "bf16" then x = x:to "f32" end
  return x / x:norm(p, dim, true):clamp(eps)
end

--- x divided by its p-norm along `dim` (default the last), at least eps. options: p (2), dim (-1), eps (1e-12).
function F.normalize(x, options)
  local o = read("normalize", options, { p = 2, dim = -1, eps = 1e-12 }, vector_kinds)
  expect("normalize", "x", x, "a tensor")
  return normalized(x, o.p, o.dim, o.eps):to(x.dtype)
end

--- Cosine of the angle between x and y along `dim` (default the last). options: dim (-1).
function F.cosine_similarity(x, y, options)
  local dim = read("cosine_similarity", options, { dim = -1 }, vector_kinds).dim
  expect("cosine_similarity", "x", x, "a tensor")
  expect("cosine_similarity", "y", y, "a tensor")
  local cosine = (normalized(x, 2, dim, 1e-8) * normalized(y, 2, dim, 1e-8)):sum(dim)
  return x.dtype == y.dtype and cosine:to(x.dtype) or cosine
end

--- max(0, margin + |anchor - positive| - |anchor - negative|) on rows [n, width]. options: margin (1), reduction.
function F.triplet_loss(anchor, positive, negative, options)
  local o = read("triplet_loss", options, { margin = 1, reduction = "mean" }, { reduction = reduction_kind })
  expect("triplet_loss", "anchor", anchor, "a tensor")
  expect("triplet_loss", "positive", positive, "a tensor")
  expect("triplet_loss", "negative", negative, "a tensor")
  local near = (anchor - positive):square():sum(-1):clamp(1e-12):sqrt()
  local far = (anchor - negative):square():sum(-1):clamp(1e-12):sqrt()
  return reductions[o.reduction]((near - far + o.margin):relu())
end

--- Share of rows of logits [n, classes] whose largest entry is the label [n]; a number in [0, 1].
function F.accuracy(logits, labels)
  expect("accuracy", "logits", logits, "a tensor")
  expect("accuracy", "labels", labels, "a tensor")
  if labels.ndim ~= logits.ndim - 1 then
    arguments.fail("accuracy: labels: expected one dimension less than the logits, got %s for %s",
      arguments.describe(labels), arguments.describe(logits))
  end
  return logits:argmax(-1):eq(labels):to("f32"):mean():item()
end

return F
