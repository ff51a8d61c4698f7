--- Structured pruning without data: whole neurons, rotary pairs and value channels go, those with the least weights or
-- any. What MoDeGPT is measured against.
local ty = require "tycho"
local shrink = require "tycho.prune.shrink"

local nn = ty.nn
local arguments = require "tycho.arguments"
local M = {}

-- What the weights of a group come to, of rows [groups, n].
local scores_by = {
  l2 = function(rows) return rows:square():sum(1) end,
  l1 = function(rows) return rows:abs():sum(1) end,
  random = function(rows) return ty.rand(rows.shape[1], { device = rows.device }) end,
}

-- The `count` best of scores [..., n], in their order, i64 [..., count].
local function best(scores, count)
  local _, at = scores:topk(count, -1)
  return (at:sort(-1))
end

-- Row `i` of the weight [heads * width, hidden] as [heads, width, hidden].
local function by_head(layer, heads) return layer.weight:detach():reshape(heads, -1, layer.weight.shape[2]) end

-- The rows of heads, picks i64 [kv_heads, kept], of which each kv head has `groups`.
local function rows_of(picks, width, groups)
  local each = picks:repeat_interleave(groups, 0)
  return (each + ty.arange(each.shape[1], { device = each.device }):unsqueeze(1) * width):flatten()
end

--- Keeps what `chosen` says of a layer: pairs i64 [kv_heads, d / 2], values i64 [kv_heads, dv], inner i64 [n].
function M.keep(part, chosen)
  local a, mlp, full = part.attention, part.mlp, shrink.sizes(part)
  local groups = a.heads // a.kv_heads
  local q_rows = shrink.rotary_rows(chosen.pairs, full.qk, a.heads)
  local k_rows = shrink.rotary_rows(chosen.pairs, full.qk, a.kv_heads)
  local v_rows, o_rows = rows_of(chosen.values, full.v, 1), rows_of(chosen.values, full.v, groups)
  local function rows(layer, at, name)
    local t = name == "bias" and layer.bias or name == nil and layer.weight
    return t and t:detach():index_select(0, at) or nil
  end
  shrink.attention(part, { q = rows(a.q_proj, q_rows), k = rows(a.k_proj, k_rows), pairs = chosen.pairs,
    q_bias = rows(a.q_proj, q_rows, "bias"), k_bias = rows(a.k_proj, k_rows, "bias"), v = rows(a.v_proj, v_rows),
    v_bias = rows(a.v_proj, v_rows, "bias"), o = a.o_proj.weight:detach():index_select(1, o_rows) })
  shrink.mlp(part, { gate = rows(mlp.gate_proj, chosen.inner), up = rows(mlp.up_proj, chosen.inner),
    gate_bias = rows(mlp.gate_proj, chosen.inner, "bias"), up_bias = rows(mlp.up_proj, chosen.inner, "bias"),
    down = mlp.down_proj.weight:detach():index_select(1, chosen.inner) })
end

-- What goes together in a layer, and what is kept of it.
local function choose(part, size, score)
  local a, mlp = part.attention, part.mlp
  local q, k = by_head(a.q_proj, a.heads), by_head(a.k_proj, a.kv_heads)
  local v, hidden = by_head(a.v_proj, a.kv_heads), part.model.config.hidden_size
  local o = a.o_proj.weight:detach():transpose(0, 1):reshape(a.kv_heads, a.heads // a.kv_heads, -1, hidden)
  local half, full = q.shape[2] // 2, shrink.sizes(part)
  local groups = {}
  for h = 0, a.kv_heads - 1 do
    local list = { k:select(0, h):reshape(2, half, hidden) }
    for g = 0, a.heads // a.kv_heads - 1 do
      list[#list + 1] = q:select(0, h * (a.heads // a.kv_heads) + g):reshape(2, half, hidden)
    end
    groups[h + 1] = score(ty.concat(list, 0):transpose(0, 1):reshape(half, -1))
  end
  local values = score(ty.concat({ v:unsqueeze(1), o }, 1):transpose(1, 2):reshape(a.kv_heads * full.v, -1))
  local inner = score(ty.concat({ mlp.gate_proj.weight:detach(), mlp.up_proj.weight:detach(),
    mlp.down_proj.weight:detach():transpose(0, 1) }, 1))
  return { pairs = best(ty.stack(groups, 0), size.qk // 2), values = best(values:reshape(a.kv_heads, full.v), size.v),
    inner = best(inner, size.inner) }
end

local function structured(model, options)
  local who = "prune.structured"
  local o = arguments.read(who, options, { ratio = 0.25, score = "l2", shares = arguments.none },
    { ratio = "a number in [0, 1)", score = '"l2" or "l1" or "random"', shares = "a list of numbers" })
  local parts = shrink.parts(who, model)
  local before = shrink.count(parts)
  local shares = o.shares or {}
  if o.shares and #o.shares ~= #parts then
    arguments.fail("%s: shares: expected one for each of %d layers, got %d", who, #parts, #o.shares)
  end
  for i = 1, #parts do shares[i] = shares[i] or 1 - o.ratio end
  local sizes = shrink.plan(parts, shares, (1 - o.ratio) * before)
  ty.no_grad(function()
    for i, part in ipairs(parts) do
      ty.scope(function() M.keep(part, choose(part, sizes[i], scores_by[o.score])) end)
    end
  end)
  return { before = before, after = shrink.count(parts), sizes = sizes }
end

--- Takes neurons of the feed-forward networks, rotary pairs of queries and keys, and channels of values out of a
-- decoder of Llama's shape, those with the least weights. options:
--   ratio   0.25: the share of the parameters of the blocks' linear layers that goes
--   score   "l2" or "l1" of all weights that go together, or "random" (of ty.manual_seed)
--   shares  what each layer keeps, a list (default: all the same)
-- Returns { before, after, sizes }: parameters of the blocks' linear layers, and the sizes of each layer.
---@param model LanguageModel
---@param options? { ratio?: number, score?: "l2"|"l1"|"random", shares?: number[] }
---@return { before: integer, after: integer, sizes: table[] }
function M.structured(model, options) return nn.for_caller(structured, model, options) end

return M
