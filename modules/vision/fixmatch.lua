--- FixMatch for what may have several labels at once: as what a slightly disturbed picture or signal is surely judged,
-- a strongly disturbed one is to be judged. Sohn et al. 2020, "FixMatch: Simplifying Semi-Supervised Learning with
-- Consistency and Confidence".
--
--     local loss = vision.fixmatch_loss(model, batch.signal, batch.labels, others, { weak = shaken, strong = torn })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

--- The mean binary cross entropy of x, which has labels, and of `others`, which have none. options: weak and strong
-- (functions of `others` that disturb them a little and much), high (0.9: the probability above which a label surely is
-- there) and low (0.05: below which it is not). A label of which neither is sure does not count, for that item.
---@param model Module
---@param x Tensor       [n, ...]
---@param labels Tensor  [n, classes], 1 for what is there, else 0
---@param others Tensor  [m, ...]
---@param options { weak: fun(x: Tensor): Tensor, strong: fun(x: Tensor): Tensor, high?: number, low?: number }
---@return Tensor loss
return function(model, x, labels, others, options)
  local who = "vision.fixmatch_loss"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "labels", labels, "a tensor")
  arguments.expect(who, "others", others, "a tensor")
  local o = arguments.read(who, options, { weak = arguments.none, strong = arguments.none, high = 0.9, low = 0.05 },
    { weak = "a function", strong = "a function", high = "a number in [0, 1]", low = "a number in [0, 1]" })
  arguments.expect(who, "weak", o.weak, "a function")
  arguments.expect(who, "strong", o.strong, "a function")
  local sure = ty.no_grad(function() return model(o.weak(others)):sigmoid() end)
  local all, n = model(ty.concat({ x, o.strong(others) }, 0)), x.shape[1] -- norms see both
  local certain = sure:gt(o.high):logical_or(sure:lt(o.low)):to(all.dtype)
  local each = nn.bce_with_logits(all:narrow(0, n, others.shape[1]), sure:gt(0.5):to(all.dtype),
    { reduction = "none" })
  return nn.bce_with_logits(all:narrow(0, 0, n), labels:to(all.dtype)) + (each * certain):mean()
end
