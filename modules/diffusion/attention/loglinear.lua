--- Log-linear sparse attention (Zhou et al. 2025, "Trainable Log-linear Sparse Attention for Efficient Diffusion
-- Transformers"): tokens are averaged in blocks of B, and these again, to log_B N levels. At the coarsest all scores
-- are computed, and each block of queries chooses K; every finer level scores only the children of what was chosen
-- above and chooses K of these. A query then sees the tokens of its K chosen blocks and, coarser and coarser, the means
-- that lie around them, up to all of the coarsest; a mean stands for as many tokens as it was made of. Nothing with N^2
-- elements is made, forward or backward: the parts are lists of blocks, joined by their log-sum-exps, and the gradients
-- walk the same lists.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.diffusion.attention.layers"

local expect, fail = arguments.expect, arguments.fail
local WHO = "attention.loglinear"
local M = {}

local function pooled(x, block) return x:reshape(x.shape[1], x.shape[2], -1, block, x.shape[4]):mean(3) end

--- Positions of a map's tokens in Z-order, i64 [side * side]: blocks of 4^n that follow each other are squares. side: a
-- power of 2.
---@param side integer
---@return Tensor
function M.z_order(side)
  local who = "attention.z_order"
  expect(who, "side", side, "an integer >= 1")
  if side & (side - 1) ~= 0 then fail("%s: side: expected a power of 2, got %d", who, side) end
  local list = {}
  for i = 0, side * side - 1 do
    local row, column, bit = 0, 0, 0
    while side >> bit > 1 do
      column = column | (i >> 2 * bit & 1) << bit
      row = row | (i >> 2 * bit + 1 & 1) << bit
      bit = bit + 1
    end
    list[i + 1] = row * side + column
  end
  return ty.tensor(list, { dtype = "i64" })
end

--- How many levels of means are made of so many tokens: while there are blocks to choose from.
---@param tokens integer
---@param block integer
---@param kept integer
---@return integer
function M.levels(tokens, block, kept)
  local who = "attention.levels"
  expect(who, "tokens", tokens, "an integer >= 1")
  expect(who, "block", block, "an integer >= 2")
  expect(who, "kept", kept, "an integer >= 1")
  local n = 0
  while tokens % block == 0 and tokens // block >= math.max(kept, 1) do tokens, n = tokens // block, n + 1 end
  return n
end

-- Of each query [b, h, n, d] the `kept` best of all keys [b, h, m, d].
local function best_of_all(q, k, kept)
  local _, at = q:matmul(k:transpose(-2, -1)):topk(math.min(kept, k.shape[3]))
  return at
end

-- The same among the children of what the parents chose, above [b, h, n / block, K].
local function best_of_children(q, k, above, block, kept)
  local b, h, n, d = table.unpack(q.shape)
  local parents, chosen = n // block, above.shape[4]
  local groups = k:reshape(b * h * parents, block * d)
  local first = ty.arange(b * h, { device = q.device }):reshape(b, h, 1, 1) * parents
  local children = groups:index_select(0, (above + first):flatten()):reshape(b, h, parents, chosen * block, d)
  local scores = q:reshape(b, h, parents, block, d):matmul(children:transpose(-2, -1))
  local _, at = scores:topk(math.min(kept, chosen * block)) -- [b, h, parents, block, K]
  local of = (at / block):floor():to "i64"
  local wide = above:unsqueeze(3):expand(b, h, parents, block, chosen)
  return (wide:gather(-1, of) * block + (at - of * block)):reshape(b, h, n, -1)
end

--- What each level chooses, from the finest: lists [b, h, tokens of the level, K] of tokens of that level, of queries
-- and keys averaged `levels` times (q, k: lists from the finest level of means).
---@param q Tensor[]
---@param k Tensor[]
---@param block integer
---@param kept integer
---@return Tensor[]
function M.choose(q, k, block, kept)
  local who = "attention.choose"
  expect(who, "q", q, "a list of tensors")
  expect(who, "k", k, "a list of tensors")
  expect(who, "block", block, "an integer >= 2")
  expect(who, "kept", kept, "an integer >= 1")
  return ty.no_grad(function()
    local lists, top = {}, #q
    if top == 0 or #k ~= top then fail("%s: q: expected as many levels as k, at least one, got %d", who, top) end
    lists[top] = best_of_all(q[top], k[top], kept)
    for l = top - 1, 1, -1 do lists[l] = best_of_children(q[l], k[l], lists[l + 1], block, kept) end
    return lists
  end)
end

local kinds = { block = "an integer >= 2", kept = "an integer >= 1", levels = "an integer >= 1" }

--- Attention of q, k, v [b, h, t, d], whose blocks lie together (Z-order). options: block (16), kept (8), levels (as
-- many as the length has; 1: all blocks are scored, as in other sparse attention), enrich (true; false: tokens of the
-- chosen blocks alone). t is to be a multiple of block^levels.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param options? table
---@return Tensor
function M.attention(q, k, v, options)
  for name, x in pairs { q = q or false, k = k or false, v = v or false } do expect(WHO, name, x, "a tensor") end
  local o = arguments.read(WHO, options, { block = 16, kept = 8, levels = arguments.none, enrich = true }, kinds)
  if q.ndim ~= 4 or k.ndim ~= 4 or v.ndim ~= 4 or q.shape[3] ~= k.shape[3] or q.shape[2] ~= k.shape[2]
    or v.shape[3] ~= k.shape[3] then
    fail("%s: q: expected q, k and v [b, h, t, d] of the same length and heads, got %s, %s and %s", WHO,
      arguments.describe(q), arguments.describe(k), arguments.describe(v))
  end
  local t, block = q.shape[3], o.block
  local levels = o.levels or M.levels(t, block, o.kept)
  if levels < 1 or t % block ^ levels ~= 0 then
    fail("%s: q: expected a length that %d^%d divides, got %d", WHO, block, math.max(levels, 1), t)
  end
  local qs, ks, vs = {}, { [0] = k }, { [0] = v }
  local detached = q:detach()
  for l = 1, levels do
    detached = pooled(detached, block)
    qs[l], ks[l], vs[l] = detached, pooled(ks[l - 1], block), pooled(vs[l - 1], block)
  end
  local detached_keys = {}
  for l = 1, levels do detached_keys[l] = ks[l]:detach() end
  local chosen = M.choose(qs, detached_keys, block, o.kept)
  local parts = {}
  -- Tokens of level l below what level l + 1 chose, for blocks of queries of that level.
  for l = 0, levels - 1 do
    if l > 0 and not o.enrich then break end
    local size = math.tointeger(block ^ (l + 1))
    local y, lse = ty.block_sparse_attention(q, ks[l], vs[l], chosen[l + 1], size, block)
    parts[#parts + 1] = { y = y, lse = lse, weight = block ^ l }
  end
  if o.enrich then
    local n, rows = ks[levels].shape[3], math.min(t, 128)
    local all = ty.zeros({ 1, 1, (t + rows - 1) // rows, 1 }, { dtype = "i64", device = q.device })
    local y, lse = ty.block_sparse_attention(q, ks[levels], vs[levels], all, rows, n)
    parts[#parts + 1] = { y = y, lse = lse, weight = block ^ levels }
  end
  return (layers.join(parts))
end

--- Has log-linear attention in the place of a network's self-attention over square maps of tokens, which are brought to
-- Z-order and back. options: those of attention(), and order (i64 [t]: positions by blocks, in the place of Z-order).
-- Until remove() of what it returns.
---@param model Module
---@param options? table
---@return ReplacedAttention
function M.replace(model, options)
  local who = "attention.llsa"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { block = 16, kept = 8, levels = arguments.none, enrich = true,
    order = arguments.none }, { block = "an integer >= 2", kept = "an integer >= 1", levels = "an integer >= 1",
      order = "a tensor" })
  local orders = {}
  local function order_of(t)
    if not orders[t] then
      local side = math.floor(t ^ 0.5 + 0.5)
      if not o.order and side * side ~= t then fail("%s: expected a square map of tokens, got %d of them", who, t) end
      local order = o.order or M.z_order(side)
      orders[t] = ty.unscoped(function() return { order:clone(), order:argsort() } end)
    end
    return orders[t]
  end
  return layers.replace(model, function(_, q, k, v, text)
    if text then fail("%s: model: expected one whose maps attend to themselves, got one with text beside", who) end
    local order = order_of(q.shape[3])
    local there, back = order[1]:to { device = q.device }, order[2]:to { device = q.device }
    local function by(x) return x:index_select(2, there) end
    local y = M.attention(by(q), by(k), by(v), { block = o.block, kept = o.kept, levels = o.levels,
      enrich = o.enrich })
    return y:index_select(2, back)
  end)
end

return M
