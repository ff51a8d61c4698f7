--- A vocabulary whose rows lie on several ranks: embeddings, and cross entropy of logits that no rank has whole.
-- Shoeybi et al. 2019, "Megatron-LM", section 3.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.dist.functional"
local Group = require "tycho.dist.group"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

--- A rank's part of n things: where it begins, from 0, and how many it is. The first ranks have one more where the
-- number of ranks does not divide n.
---@param n integer
---@param size integer  ranks
---@param rank integer  from 0
---@return integer begin
---@return integer count
function M.part(n, size, rank)
  expect("vocabulary.part", "n", n, "an integer >= 0")
  expect("vocabulary.part", "size", size, "an integer >= 1")
  expect("vocabulary.part", "rank", rank, ("an integer in [0, %d]"):format(size - 1))
  local least, more = n // size, n % size
  return rank * least + math.min(rank, more), least + (rank < more and 1 or 0)
end

-- Indices among the rank's own rows, those of other ranks at the first row, and which these are.
local function own(index, begin, count)
  local at = index - begin
  local elsewhere = at:lt(0):logical_or(at:ge(count))
  return at:masked_fill(elsewhere, 0), elsewhere
end

--- Rows of an embedding of which each rank has some: those of other ranks count as zeros, and the sum is what all get.
---@param group RankGroup
---@param weight Tensor   [count, width], the rank's rows
---@param index Tensor    i64 [...], the same on all ranks
---@param begin integer   the number of the rank's first row
---@param padding? integer  a row of the rank, from 0, that gets no gradient
---@return Tensor         [..., width]
function M.embedding(group, weight, index, begin, padding)
  local who = "vocabulary.embedding"
  Group.expect(who, group)
  expect(who, "weight", weight, "a tensor")
  expect(who, "index", index, "a tensor")
  expect(who, "begin", begin, "an integer >= 0")
  local at, elsewhere = own(index, begin, weight.shape[1])
  local rows = ty.embedding(weight, at, padding or -1)
  return functional.summed(group, rows:masked_fill(elsewhere:unsqueeze(-1), 0))
end

-- Of each row: the largest logit of all ranks is taken off; then the sum of the exponentials and the target's logit,
-- which one rank has, are summed together. What goes over the ranks is 3 numbers a row, whatever the vocabulary.
local entropy = ty.custom_op {
  name = "dist.cross_entropy",
  forward = function(ctx, group, logits, targets, begin)
    local x = logits:to(logits.dtype == "f64" and "f64" or "f32")
    local most = group:all_reduce(x:amax { -1 }, "max")
    x = x - most:unsqueeze(1)
    local at, elsewhere = own(targets, begin, x.shape[2])
    local mine = x:gather(1, at:unsqueeze(1)):squeeze(1):masked_fill(elsewhere, 0)
    local weights = x:exp()
    local sums = group:all_reduce(ty.stack({ weights:sum { -1 }, mine }, 0))
    local left_out = targets:eq(-100)
    local counted = left_out:numel() - left_out:to("i64"):sum():item()
    ctx.counted, ctx.dtype = counted, logits.dtype
    ctx:save(weights:div_(sums[0]:unsqueeze(1)), at, elsewhere, left_out)
    return (sums[0]:log() - sums[1]):masked_fill(left_out, 0):sum() / counted
  end,
  backward = function(ctx, g)
    local weights, at, elsewhere, left_out = ctx:saved()
    local one = elsewhere:logical_not():to(weights.dtype):unsqueeze(1)
    local grad = weights:scatter_add(1, at:unsqueeze(1), -one)
    grad = grad:masked_fill(left_out:unsqueeze(1), 0) * (g / ctx.counted)
    return nil, grad:to(ctx.dtype), nil, nil
  end,
}

--- The mean cross entropy, in nats, of logits of which each rank has those of its part of the vocabulary.
---@param group RankGroup
---@param logits Tensor   [m, count]
---@param targets Tensor  i64 [m], the same on all ranks; -100: not counted
---@param begin integer   the number of the rank's first word
---@return Tensor loss    the same on all ranks
function M.cross_entropy(group, logits, targets, begin)
  local who = "vocabulary.cross_entropy"
  Group.expect(who, group)
  expect(who, "logits", logits, "a tensor")
  expect(who, "targets", targets, "a tensor")
  expect(who, "begin", begin, "an integer >= 0")
  if logits.ndim ~= 2 or targets.ndim ~= 1 or targets.shape[1] ~= logits.shape[1] or targets.dtype ~= "i64" then
    fail("%s: targets: expected i64 [m] with logits [m, count], got %s and %s", who, describe(targets),
      describe(logits))
  end
  return entropy(group, logits, targets, begin)
end

return M
