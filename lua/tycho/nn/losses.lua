--- Losses made of a few ops: nn.margin_ranking_loss and so on. Those that are ops themselves are in functional.lua.
-- All take the option reduction: "mean", "sum" or "none".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.nn.functional"

local expect, fail = arguments.expect, arguments.fail
local F = {}

local reductions = {
  mean = function(x) return x:mean() end,
  sum = function(x) return x:sum() end,
  none = function(x) return x end,
}
local kinds = {
  reduction = '"mean" or "sum" or "none"', weight = "a tensor", margin = "a finite number", p = "a number > 0",
  eps = "a finite number >= 0", gamma = "a finite number >= 0", alpha = "a number <= 1",
  smooth = "a finite number >= 0",
  distance = "a function", beta = "a finite number > 0", log_input = "a boolean", full = "a boolean",
}

local function read(who, options, defaults)
  local all = { reduction = "mean" }
  for name, value in pairs(defaults) do all[name] = value end
  return arguments.read(who, options, all, kinds)
end

local function tensor(who, what, x, ndim, layout)
  expect(who, what, x, "a tensor")
  if ndim and x.ndim ~= ndim then
    fail("%s: %s: expected a tensor %s, got %s", who, what, layout, arguments.describe(x))
  end
  return x
end

-- A tensor of the shape of x; broadcasting one to the other is nearly always a mistake.
local function like(who, what, target, name, x)
  tensor(who, name, x)
  tensor(who, what, target)
  if table.concat(target.shape, ",") ~= table.concat(x.shape, ",") then
    fail("%s: %s: expected the shape of %s [%s], got [%s]", who, what, name, table.concat(x.shape, ", "),
      table.concat(target.shape, ", "))
  end
end

--- Loss of log-rates x (log_input = false: rates) for counts: exp(x) - target x, without the term that x has no part
-- in; full = true adds Stirling's approximation of it. options: log_input (true), full (false), eps (1e-8: added to
-- rates in the logarithm), reduction.
function F.poisson_nll_loss(x, target, options)
  local who = "poisson_nll_loss"
  local o = read(who, options, { log_input = true, full = false, eps = 1e-8 })
  like(who, "target", target, "x", x)
  local loss = o.log_input and x:exp() - target * x or x - target * (x + o.eps):log()
  if o.full then
    local count = target:to(x.dtype)
    local large = ty.where(count:gt(1), count, 1.0)
    local rest = large * large:log() - large + (large * (2 * math.pi)):log() * 0.5
    loss = loss + ty.where(count:gt(1), rest, 0.0)
  end
  return reductions[o.reduction](loss)
end

--- Loss of means x and variances var, which broadcast to x, for a target: (log var + (x - target)^2 / var) / 2.
-- options: full (false; true: and log(2 pi) / 2), eps (1e-6: the least variance), reduction. Nix and Weigend 1994.
function F.gaussian_nll_loss(x, target, var, options)
  local who = "gaussian_nll_loss"
  local o = read(who, options, { full = false, eps = 1e-6 })
  like(who, "target", target, "x", x)
  if type(var) == "number" then var = x:new_full({}, var) end
  local variance = tensor(who, "var", var):clamp(o.eps)
  local loss = (variance:log() + (x - target):square() / variance) * 0.5
  return reductions[o.reduction](o.full and loss + 0.5 * math.log(2 * math.pi) or loss)
end

--- The p-norm of x - y + eps along the last dimension. options: p (2), eps (1e-6), keepdim (false).
function F.pairwise_distance(x, y, options)
  local o = arguments.read("pairwise_distance", options, { p = 2, eps = 1e-6, keepdim = false }, kinds)
  tensor("pairwise_distance", "x", x)
  tensor("pairwise_distance", "y", y)
  return (x - y + o.eps):norm(o.p, -1, o.keepdim)
end

--- max(0, margin + d(anchor, positive) - d(anchor, negative)) on rows [n, width]. options: margin (1), p (2: of the
-- distance), eps (1e-6), swap (false; true: the nearer of anchor and positive counts for the negative, Balntas et al.
-- 2016), distance (nil: a function of two tensors in place of the p-norm), reduction.
function F.triplet_margin_loss(anchor, positive, negative, options)
  local who = "triplet_margin_loss"
  local o = read(who, options, { margin = 1, p = 2, eps = 1e-6, swap = false, distance = arguments.none })
  like(who, "positive", positive, "anchor", anchor)
  like(who, "negative", negative, "anchor", anchor)
  local distance = o.distance or function(x, y) return F.pairwise_distance(x, y, { p = o.p, eps = o.eps }) end
  local far = distance(anchor, negative)
  if o.swap then far = ty.minimum(far, distance(positive, negative)) end
  return reductions[o.reduction]((distance(anchor, positive) - far + o.margin):relu())
end

--- 1 - cos(x, y) where the target [n] is 1, max(0, cos(x, y) - margin) where it is -1. options: margin (0), reduction.
function F.cosine_embedding_loss(x, y, target, options)
  local who = "cosine_embedding_loss"
  local o = read(who, options, { margin = 0 })
  like(who, "y", y, "x", x)
  tensor(who, "target", target)
  local cosine = functional.cosine_similarity(x, y)
  return reductions[o.reduction](ty.where(target:gt(0), 1 - cosine, (cosine - o.margin):relu()))
end

--- max(0, margin - target (x - y)): target 1 wants x above y, -1 below. options: margin (0), reduction.
function F.margin_ranking_loss(x, y, target, options)
  local who = "margin_ranking_loss"
  local o = read(who, options, { margin = 0 })
  like(who, "y", y, "x", x)
  tensor(who, "target", target)
  return reductions[o.reduction]((o.margin - target * (x - y)):relu())
end

--- x where the target is 1, max(0, margin - x) where it is -1, for distances x. options: margin (1), reduction.
function F.hinge_embedding_loss(x, target, options)
  local who = "hinge_embedding_loss"
  local o = read(who, options, { margin = 1 })
  like(who, "target", target, "x", x)
  return reductions[o.reduction](ty.where(target:gt(0), x, (o.margin - x):relu()))
end

--- log(1 + exp(-target x)) with targets 1 and -1. options: reduction.
function F.soft_margin_loss(x, target, options)
  local o = read("soft_margin_loss", options, {})
  like("soft_margin_loss", "target", target, "x", x)
  return reductions[o.reduction](-(target * x):log_sigmoid())
end

--- The sum over the other classes of max(0, margin - x[target] + x[i])^p, divided by the number of classes; x [n,
-- classes], target [n]. options: p (1), margin (1), weight (a tensor [classes]), reduction.
function F.multi_margin_loss(x, target, options)
  local who = "multi_margin_loss"
  local o = read(who, options, { p = 1, margin = 1, weight = arguments.none })
  tensor(who, "x", x, 2, "[n, classes]")
  tensor(who, "target", target, 1, "[n]")
  local column = target:to("i64"):unsqueeze(1)
  local terms = (x - x:gather(1, column) + o.margin):relu()
  if o.p ~= 1 then terms = terms:pow(o.p) end
  terms = terms * x:size(1) ^ -1 * ty.one_hot(target:to "i64", x:size(1)):eq(0):to(x.dtype)
  if o.weight then terms = terms * o.weight:index_select(0, target:to "i64"):unsqueeze(1) end
  return reductions[o.reduction](terms:sum(1))
end

--- The sum over classes that are targets and those that are not of max(0, 1 - x[target] + x[other]), divided by the
-- number of classes; x [n, classes], target [n, classes]: the targets of each row, after them -1. options: reduction.
function F.multilabel_margin_loss(x, target, options)
  local who = "multilabel_margin_loss"
  local o = read(who, options, {})
  tensor(who, "x", x, 2, "[n, classes]")
  like(who, "target", target, "x", x)
  local there = target:ge(0):to("i64"):cumprod(1):to(x.dtype)
  local index = target:to("i64"):clamp(0)
  local wanted = ty.zeros_like(x:detach()):scatter_add(1, index, there):gt(0)
  local gaps = (x:unsqueeze(1) - x:gather(1, index):unsqueeze(2) + 1):relu()
  gaps = gaps * there:unsqueeze(2) * wanted:logical_not():to(x.dtype):unsqueeze(1)
  return reductions[o.reduction](gaps:sum { 1, 2 } * x:size(1) ^ -1)
end

--- Binary cross entropy of logits x [..., classes], averaged over the classes. options: weight (a tensor that
-- broadcasts to x), reduction.
function F.multilabel_soft_margin_loss(x, target, options)
  local who = "multilabel_soft_margin_loss"
  local o = read(who, options, { weight = arguments.none })
  like(who, "target", target, "x", x)
  local loss = ty.bce_with_logits(x, target, { reduction = "none" })
  if o.weight then loss = loss * o.weight end
  return reductions[o.reduction](loss:mean(-1))
end

-- log(x), at least -100, so that one element cannot make the mean infinite; no gradient where x is 0.
local function log_of(x)
  local none = x:le(0)
  return ty.where(none, -100.0, ty.where(none, 1.0, x):log():clamp(-100))
end

--- Cross entropy of probabilities x in [0, 1]; for logits take nn.bce_with_logits, which is exact. options: weight (a
-- tensor that broadcasts to x), reduction.
function F.binary_cross_entropy(x, target, options)
  local who = "binary_cross_entropy"
  local o = read(who, options, { weight = arguments.none })
  like(who, "target", target, "x", x)
  local loss = -(target * log_of(x) + (1 - target) * log_of(1 - x))
  if o.weight then loss = loss * o.weight end
  return reductions[o.reduction](loss)
end

--- Binary cross entropy of logits in which elements that are right already count little: times alpha_t (1 - p_t)^gamma,
-- with p_t the probability of the target and alpha_t alpha where the target is 1, 1 - alpha where it is 0. Lin et al.
-- 2017. options: alpha (0.25; below 0: no such factor), gamma (2), reduction.
function F.focal_loss(x, target, options)
  local who = "focal_loss"
  local o = read(who, options, { alpha = 0.25, gamma = 2 })
  like(who, "target", target, "x", x)
  local p = x:sigmoid()
  local wrong = p + target - p * target * 2 -- 1 - p_t
  local loss = ty.bce_with_logits(x, target, { reduction = "none" }) * wrong:pow(o.gamma)
  if o.alpha >= 0 then loss = loss * (target * (2 * o.alpha - 1) + (1 - o.alpha)) end
  return reductions[o.reduction](loss)
end

--- 1 - (2 sum(x target) + smooth) / (sum(x) + sum(target) + smooth) of each sample of probabilities x [n, ...].
-- options: smooth (1), squared (false; true: squares in the sums below, Milletari et al. 2016), reduction.
function F.dice_loss(x, target, options)
  local who = "dice_loss"
  local o = read(who, options, { smooth = 1, squared = false })
  like(who, "target", target, "x", x)
  if x.ndim < 2 then fail("dice_loss: x: expected a tensor [n, ...], got %s", arguments.describe(x)) end
  local a, b = x:flatten(1), target:to(x.dtype):flatten(1)
  local both = (a * b):sum(1) * 2 + o.smooth
  if o.squared then a, b = a:square(), b:square() end
  return reductions[o.reduction](1 - both / (a:sum(1) + b:sum(1) + o.smooth))
end

return F
