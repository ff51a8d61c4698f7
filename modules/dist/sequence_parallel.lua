--- Sequences split over ranks, with attention over a ring: keys and values go from rank to rank while queries stay.
-- Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective".
--
--     dist.run(4, function(group)
--       local model = dist.workload.model(work, 1)
--       local sequence = dist.sequence_parallel(model, group)
--       local loss = model:loss(sequence:part(tokens), sequence:part(targets)) -- of the whole sequences
--       loss:backward()
--       sequence:sum_gradients()
--     end)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.dist.functional"
local Group = require "tycho.dist.group"

local nn = ty.nn
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local with_lse = ty.core.outputs_core.scaled_dot_product_attention
local M = {}

local THERE, BACK = 1001, 1002 -- tags of what goes around, and of what is summed for its owner

-- Tensors of every rank come by: visit(owner, held) is called with those of all ranks in turn, each on its way to the
-- next rank meanwhile. What visit returns, lists of tensors, is summed for the owner, who gets it at the end: `back`
-- tensors, those of visit(own rank, ...) at least. nil: nothing to add. What is sent on is let go of at once, for which
-- there is a scope around this.
local function around(group, held, visit, back)
  local n, rank = group.size, group.rank
  local next_one, before = (rank + 1) % n, (rank - 1) % n
  local home, device, count = nil, held[1].device, #held
  for step = 0, n - 1 do
    if step < n - 1 then
      for _, x in ipairs(held) do group:send(x, next_one, THERE) end
    end
    local sums = visit((rank - step) % n, held)
    for i = 1, back do
      local sum = sums and sums[i]
      if step > 0 then
        local others = group:receive(before, BACK):to(device)
        if sum then
          sum:add_(others)
          ty.discard(others)
        else
          sum = others
        end
      end
      if n == 1 then
        home = sums
      else
        group:send(sum, next_one, BACK)
        ty.discard(sum)
      end
    end
    if step > 0 then ty.discard(table.unpack(held)) end
    if step < n - 1 then
      local come = {}
      for i = 1, count do come[i] = group:receive(before, THERE):to(device) end
      held = come
    end
  end
  if n > 1 and back > 0 then
    home = {}
    for i = 1, back do home[i] = group:receive(before, BACK):to(device) end
  end
  return home
end

-- ---- a block of keys and values at a time ----

-- What two sets of keys give, joined by their log-sum-exps. Dao 2022, "FlashAttention"; Liu et al. 2023, "Ring
-- Attention with Blockwise Transformers".
local function joined(y, lse, more, more_lse)
  if not y then return more, more_lse end
  local both = ty.logaddexp(lse, more_lse)
  y:mul_((lse - both):exp():unsqueeze(-1)):add_(more * (more_lse - both):exp():unsqueeze(-1))
  return y, both
end

local by_blocks = ty.custom_op {
  name = "dist.ring_attention",
  forward = function(ctx, group, q, k, v, causal, scale)
    local y, lse = ty.scope(function()
      local y, lse
      around(group, { k, v }, function(owner, held)
        if causal and owner > group.rank then return end
        y, lse = ty.scope(function()
          local more, more_lse = with_lse(q, held[1], held[2], nil, causal and owner == group.rank, scale)
          return joined(y, lse, more:to(more_lse.dtype), more_lse)
        end)
      end, 0)
      return y:to(q.dtype), lse
    end)
    ctx:save(q, k, v, y, lse)
    ctx.group, ctx.causal, ctx.scale = group, causal, scale
    return y
  end,
  backward = function(ctx, g)
    local q, k, v, y, lse = ctx:saved()
    local rank = ctx.group.rank
    return nil, ty.scope(function()
      local dq
      -- By the log-sum-exp of all keys the weights of a block are what they are among all.
      local home = around(ctx.group, { k, v }, function(owner, held)
        if ctx.causal and owner > rank then return nil end
        local more, dk, dv = ty.core.attention_backward(g, q, held[1], held[2], y, lse, nil,
          ctx.causal and owner == rank, ctx.scale)
        if dq then
          dq:add_(more)
          ty.discard(more)
        else
          dq = more
        end
        return { dk, dv }
      end, 2)
      return dq, home[1], home[2]
    end)
  end,
}

-- ---- all scores of the rank's queries at once, as the paper has it ----

-- Queries [b, h, t, d] by the heads of keys, [b, hkv, h / hkv * t, d], and back.
local function grouped(x, kv_heads)
  local s = x.shape
  return x:reshape(s[1], kv_heads, s[2] // kv_heads * s[3], s[4])
end

local by_scores = ty.custom_op {
  name = "dist.ring_self_attention",
  forward = function(ctx, group, q, k, v, causal, scale)
    local b, h, t, hkv = q.shape[1], q.shape[2], q.shape[3], k.shape[2]
    local y, weights = ty.scope(function()
      local queries, scores, rank = grouped(q, hkv), {}, group.rank
      around(group, { k }, function(owner, held)
        local s = queries:matmul(held[1]:transpose(2, 3)):mul_(scale)
        if causal and owner > rank then
          s:fill_(-math.huge)
        elseif causal and owner == rank then
          local at = ty.arange(t, { device = q.device })
          s = s:reshape(b, h, t, t):masked_fill(at:unsqueeze(0):gt(at:unsqueeze(1)), -math.huge):reshape(s.shape)
        end
        scores[owner + 1] = s
      end, 0)
      local all = ty.concat(scores, -1)
      ty.discard(table.unpack(scores))
      local weights, y = all:softmax(-1), nil
      around(group, { v }, function(owner, held)
        local more = weights:narrow(-1, owner * t, t):matmul(held[1])
        y = y and y:add_(more) or more
      end, 0)
      return y:reshape(b, h, t, -1), weights
    end)
    ctx:save(q, k, v, weights)
    ctx.group, ctx.scale = group, scale
    return y
  end,
  backward = function(ctx, g)
    local q, k, v, weights = ctx:saved()
    local t, hkv = q.shape[3], k.shape[2]
    local function of(x, owner) return x:narrow(-1, owner * t, t) end
    return nil, ty.scope(function()
      local queries, list, dq = grouped(q, hkv), {}, nil
      g = grouped(g, hkv)
      local dv = around(ctx.group, { v }, function(owner, held)
        list[owner + 1] = g:matmul(held[1]:transpose(2, 3))
        return { of(weights, owner):transpose(2, 3):matmul(g) }
      end, 1)[1]
      local ds = ty.concat(list, -1)
      ty.discard(table.unpack(list))
      ds:sub_((ds * weights):sum({ -1 }, true)):mul_(weights):mul_(ctx.scale)
      local dk = around(ctx.group, { k }, function(owner, held)
        local more = of(ds, owner):matmul(held[1])
        dq = dq and dq:add_(more) or more
        return { of(ds, owner):transpose(2, 3):matmul(queries) }
      end, 1)[1]
      return dq:reshape(q.shape), dk, dv
    end)
  end,
}

local forms = { blocks = by_blocks, scores = by_scores }

--- Attention of sequences of which each rank has as many positions, those of rank 0 first. options: causal (true),
-- scale (0: 1/sqrt(d)), form ("blocks": the keys and values of a rank at a time, joined by their log-sum-exps, of which
-- nothing is kept; "scores": all scores [t, ranks * t] of the rank's queries, then their softmax, as the paper has it).
---@param group RankGroup
---@param q Tensor  [b, h, t, d], the rank's positions
---@param k Tensor  [b, hkv, t, d], h a multiple of hkv
---@param v Tensor  [b, hkv, t, dv]
---@param options? { causal?: boolean, scale?: number, form?: string }
---@return Tensor   [b, h, t, dv]
function M.attention(group, q, k, v, options)
  local who = "dist.ring_attention"
  Group.expect(who, group)
  for name, x in pairs { q = q, k = k, v = v } do
    if not ty.is_tensor(x) or x.ndim ~= 4 then
      fail("%s: %s: expected a tensor of 4 dimensions, got %s", who, name, describe(x))
    end
  end
  local a, b, c = q.shape, k.shape, v.shape
  if a[1] ~= b[1] or b[1] ~= c[1] or b[2] ~= c[2] or a[2] % math.max(b[2], 1) ~= 0 or a[3] ~= b[3] or b[3] ~= c[3]
    or a[4] ~= b[4] then
    fail("%s: k and v: expected [b, hkv, t, d] that go with q %s, got %s and %s", who, describe(q), describe(k),
      describe(v))
  end
  local o = arguments.read(who, options, { causal = true, scale = 0, form = "blocks" },
    { scale = "a finite number", form = '"blocks" or "scores"' })
  return forms[o.form](group, q, k, v, o.causal, o.scale ~= 0 and o.scale or 1 / math.sqrt(a[4]))
end

-- ---- a model ----

-- What a model takes for a cache: it says where the rank's positions begin, and attends.
local function ring(state, tokens)
  local cache = { past = state.group.rank * tokens.shape[2], layers = state.layers }
  function cache:see(_, mask) -- luacheck: ignore self
    if mask then fail("sequence_parallel: mask: expected none, got %s", describe(mask)) end
  end
  function cache:advance() end -- luacheck: ignore self
  function cache:attend(_, q, k, v, scale, window) -- luacheck: ignore self
    if window and window >= 0 then
      fail("sequence_parallel: expected layers that see all before them, got a window of %d", window + 1)
    end
    return M.attention(state.group, q, k, v, { scale = scale, form = state.form })
  end
  return cache
end

local function class_on(base)
  local class = nn.module("SequenceParallel" .. base.__name, base)

  --- As of the model; tokens are the rank's own.
  function class:hidden(tokens, options)
    local with = {}
    for key, value in pairs(options or {}) do with[key] = value end
    for _, key in ipairs { "cache", "mask", "cu_seqlens", "prefix", "last" } do
      if with[key] then fail("sequence_parallel: %s: expected none, got %s", key, describe(with[key])) end
    end
    with.cache = ring(self._sequence_parallel, tokens)
    return base.hidden(self, tokens, with)
  end

  --- The mean cross entropy of the whole sequences, on all ranks; tokens and targets are the rank's own.
  function class:loss(tokens, targets, options)
    expect("loss", "tokens", tokens, "a tensor")
    expect("loss", "targets", targets, "a tensor")
    local group = self._sequence_parallel.group
    local logits = self:head(self:hidden(tokens, options))
    local mine = targets:ne(-100):to("f64"):sum()
    local share = mine:item() / group:all_reduce(mine:clone()):item()
    local loss = nn.cross_entropy(logits:flatten(0, 1), targets:flatten(), { reduction = "sum" })
    return functional.summed(group, mine:item() > 0 and loss * (share / mine:item()) or loss)
  end

  return class
end

--- A model that gets sequences of which each rank has a part.
---@class SequenceParallel
---@field model LanguageModel
---@field group RankGroup
local Sequence = {}
Sequence.__index = Sequence
Sequence.__name = "SequenceParallel"

--- The rank's part of what is whole along dimension 1: tokens or targets [n, t].
---@param x Tensor
---@return Tensor
function Sequence:part(x)
  expect("SequenceParallel:part", "x", x, "a tensor")
  local n = x.ndim > 1 and x.shape[2] or 0
  if x.ndim < 2 or n % self.group.size ~= 0 then
    fail("SequenceParallel:part: x: expected [n, t] with t a multiple of %d, got %s", self.group.size, describe(x))
  end
  return x:narrow(1, self.group.rank * (n // self.group.size), n // self.group.size):contiguous()
end

--- The gradients of the weights, of which each rank has what comes of its positions, become their sum.
function Sequence:sum_gradients()
  local works = {}
  for _, p in ipairs(self.model:parameters()) do
    if p.grad then works[#works + 1] = self.group:all_reduce(p.grad, "sum", { async = true }) end
  end
  for _, work in ipairs(works) do work:wait() end
end

--- Makes the model what it was.
---@return LanguageModel model
function Sequence:remove()
  if not rawget(self.model, "_sequence_parallel") then
    fail("SequenceParallel:remove: expected a model that is given parts of sequences")
  end
  rawset(self.model, "_sequence_parallel", nil)
  return setmetatable(self.model, self.base)
end

local classes = setmetatable({}, { __mode = "k" })

--- Lets a causal language model be trained on sequences of which each rank has a part, of as many positions: its
-- weights are on all ranks, and attention goes around. model:hidden(), model:forward() and model:loss(tokens, targets)
-- take the rank's own part afterwards; positions count on from rank to rank. options: form, as dist.ring_attention has
-- it. It goes without caches, masks, windows and dropout of attention's weights.
---@param model LanguageModel
---@param group RankGroup
---@param options? { form?: string }
---@return SequenceParallel
function M.split(model, group, options)
  local who = "dist.sequence_parallel"
  expect(who, "model", model, "a module")
  Group.expect(who, group)
  local o = arguments.read(who, options, { form = "blocks" }, { form = '"blocks" or "scores"' })
  if type(model.hidden) ~= "function" or type(model.cache) ~= "function" or type(model.head) ~= "function" then
    fail("%s: model: expected a language model with a cache, got %s", who, describe(model))
  end
  if rawget(model, "_sequence_parallel") then fail("%s: model: expected one that has whole sequences", who) end
  local base = getmetatable(model)
  classes[base] = classes[base] or class_on(base)
  rawset(model, "_sequence_parallel", { group = group, form = o.form, layers = model:cache().layers })
  setmetatable(model, classes[base])
  return setmetatable({ model = model, group = group, base = base }, Sequence)
end

return M
