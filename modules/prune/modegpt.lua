--- MoDeGPT: pairs of matrices made narrower together, by closed forms from second moments of what they see, without
-- training. Lin et al. 2025, "MoDeGPT: Modular Decomposition for Large Language Model Compression": Nystrom for the
-- feed-forward network (its algorithm 1), CR for queries and keys (algorithm 2), singular values for values and outputs
-- (algorithm 3), shares of layers by how much they turn the stream (its section on global sparsity allocation).
--
--     local report = prune.modegpt(model, corpus.training, { ratio = 0.25 })
--     model:save "small"; local again = prune.load "small"
local ty = require "tycho"
local blocks = require "tycho.quant.blocks"
local moments = require "tycho.quant.moments"
local shrink = require "tycho.prune.shrink"

local nn = ty.nn
local surgery = nn.surgery
local arguments = require "tycho.arguments"
local M = {}

-- ---- the three decompositions ----

local function top(scores, count)
  local _, at = scores:topk(count, -1)
  return (at:sort(-1))
end

--- The neurons of a feed-forward network that are kept, and the layer after them, which makes up for the others:
-- ridge leverage scores, the diagonal of C (C + l I)^-1, and W_D C S (S' C S)^-1.
---@param moment Tensor  C [inner, inner], of the inputs of `down`
---@param down Tensor    [outputs, inner]
---@param count integer  neurons to keep
---@param ridge number   l as a share of the mean of C's diagonal
---@return Tensor kept   i64 [count], ascending
---@return Tensor new    f64 [outputs, count]
function M.nystrom(moment, down, count, ridge)
  local c = moment:to "f64"
  -- C (C + l I)^-1 = I - l (C + l I)^-1
  local factor = ty.cholesky(moments.damped(c, ridge))
  local inverse = ty.solve_triangular(factor, ty.eye(c.shape[1], { dtype = "f64", device = c.device }))
  local kept = top(inverse:square():sum(0) * -1, count)
  local rows = c:index_select(0, kept)
  local inner = moments.damped(rows:index_select(1, kept), 1e-10)
  return kept, ty.solve(inner, ty.matmul(rows, down:to("f64"):transpose(0, 1))):transpose(0, 1)
end

--- The rotary pairs of each head of keys that are kept: those with the largest product of what queries and keys come to
-- in them, |C^(1/2) W_q,i| |C^(1/2) W_k,i| over both elements of a pair; of the queries that share a head of keys the
-- squares are summed.
---@param moment Tensor  C [hidden, hidden], of the inputs
---@param q Tensor       [heads * d, hidden]
---@param k Tensor       [kv_heads * d, hidden]
---@param heads integer
---@param kv_heads integer
---@param count integer  pairs to keep
---@return Tensor pairs  i64 [kv_heads, count], ascending
function M.pairs(moment, q, k, heads, kv_heads, count)
  local c = moment:to "f64"
  local function of_pairs(w, n)
    w = w:to "f64"
    return (ty.matmul(w, c) * w):sum(1):clamp(0):reshape(n, 2, -1):sum(1)
  end
  local queries = of_pairs(q, heads):reshape(kv_heads, heads // kv_heads, -1):sum(1)
  return top(queries * of_pairs(k, kv_heads), count)
end

--- Values and outputs of one head of values at a smaller width: the best in the norm of C, by the singular values of
-- C^(1/2) W_V W_O, with all outputs that share the head.
---@param root Tensor      of moments.whiten(C)
---@param inverse Tensor   of it as well
---@param v Tensor         [d, hidden]
---@param o Tensor         [outputs, groups, d]
---@param count integer
---@return Tensor v        f64 [count, hidden]
---@return Tensor o        f64 [outputs, groups, count]
function M.value_output(root, inverse, v, o, count)
  local outputs, groups, d = o.shape[1], o.shape[2], o.shape[3]
  local u, s, z = ty.svd(ty.matmul(root, v:to("f64"):transpose(0, 1)))
  local second, length, right = ty.svd(ty.matmul(s:unsqueeze(1) * z, o:to("f64"):reshape(-1, d):transpose(0, 1)))
  local left = ty.matmul(ty.matmul(inverse, u), second:narrow(1, 0, count))
  local new = right:narrow(0, 0, count) * length:narrow(0, 0, count):unsqueeze(1)
  return left:transpose(0, 1), new:transpose(0, 1):reshape(outputs, groups, count)
end

--- What each layer loses: mean * layers * softmax(-s / epsilon) of influences s, at most `most`; what that takes from a
-- layer the others lose by their weights.
---@param influence number[]  1 - the mean cosine of a layer's input and output
---@param mean number         share to lose of all
---@param epsilon number      math.huge: all the same
---@param most number
---@return number[] lost
function M.allocation(influence, mean, epsilon, most)
  local weights, lost, least = {}, {}, math.min(table.unpack(influence))
  for i, s in ipairs(influence) do weights[i] = math.exp((least - s) / epsilon) end
  local left, open = mean * #influence, {}
  for i = 1, #influence do open[i] = true end
  repeat
    local sum, capped = 0, false
    for i in pairs(open) do sum = sum + weights[i] end
    for i in pairs(open) do lost[i] = left * weights[i] / sum end
    for i = 1, #influence do
      if open[i] and lost[i] > most then lost[i], open[i], capped = most, nil, true end
    end
    left = mean * #influence
    for i = 1, #influence do
      if not open[i] then left = left - lost[i] end
    end
  until not capped or next(open) == nil
  return lost
end

-- ---- models ----

local statistics_options = {}
for key, value in pairs(moments.options) do statistics_options[key] = value end

local function statistics(who, model, data, o)
  local parts = shrink.parts(who, model)
  local layers = {}
  for _, part in ipairs(parts) do
    layers[#layers + 1] = { name = part.name .. ".self_attn.q_proj", module = part.attention.q_proj }
    layers[#layers + 1] = { name = part.name .. ".mlp.down_proj", module = part.mlp.down_proj }
  end
  local cosine, count = {}, {}
  local function sum(stream, more) return more and stream + more or stream end
  local found = moments.collect(who, model, moments.batches(who, data, o), layers, {
    blocks = blocks.list(who, model),
    after = function(i, outputs, stream, more)
      ty.scope(function()
        local x, y = sum(stream, more), sum(outputs[1], outputs[2])
        local each = (x * y):sum(-1) / (x:square():sum(-1) * y:square():sum(-1)):sqrt():clamp(1e-30)
        cosine[i] = (cosine[i] or 0) + each:sum():item()
        count[i] = (count[i] or 0) + each:numel()
      end)
    end })
  local list = {}
  for i in ipairs(parts) do
    list[i] = { input = found[layers[2 * i - 1]].sum, inner = found[layers[2 * i]].sum,
      influence = 1 - cosine[i] / count[i] }
  end
  return list
end

--- What modegpt() has to know of the data, of a model as it is: for each layer the second moments of its normed input
-- (input [hidden, hidden]) and of its feed-forward network's neurons (inner), f64, and influence, 1 - the mean cosine
-- of what goes into the layer and what comes out. options: rows (128), batch (8), seed (0), device.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return { input: Tensor, inner: Tensor, influence: number }[]
function M.statistics(model, data, options)
  return nn.for_caller(function()
    local who = "prune.modegpt_statistics"
    return statistics(who, model, data, arguments.read(who, options, statistics_options))
  end)
end

-- The layer's new projections.
local function decompose(part, seen, size, o)
  local a, mlp = part.attention, part.mlp
  local hidden, groups = part.model.config.hidden_size, a.heads // a.kv_heads
  local full = shrink.sizes(part)
  local function rows(layer, at) return layer.weight:detach():index_select(0, at) end
  local function bias(layer, at) return layer.bias and layer.bias:detach():index_select(0, at) or nil end
  local input = moments.damped(seen.input, o.damp)
  local chosen = M.pairs(input, a.q_proj.weight:detach(), a.k_proj.weight:detach(), a.heads, a.kv_heads, size.qk // 2)
  local q_rows = shrink.rotary_rows(chosen, full.qk, a.heads)
  local k_rows = shrink.rotary_rows(chosen, full.qk, a.kv_heads)
  local root, inverse = moments.whiten(input)
  local v, out = a.v_proj.weight:detach():reshape(a.kv_heads, full.v, hidden), {}
  local by_group = a.o_proj.weight:detach():reshape(hidden, a.kv_heads, groups, full.v)
  local values = {}
  for h = 0, a.kv_heads - 1 do
    values[h + 1], out[h + 1] = M.value_output(root, inverse, v:select(0, h), by_group:select(1, h), size.v)
  end
  shrink.attention(part, { q = rows(a.q_proj, q_rows), k = rows(a.k_proj, k_rows), pairs = chosen,
    q_bias = bias(a.q_proj, q_rows), k_bias = bias(a.k_proj, k_rows), v = ty.concat(values, 0),
    o = ty.stack(out, 1):reshape(hidden, a.heads * size.v) })
  local kept, down = M.nystrom(seen.inner, mlp.down_proj.weight:detach(), size.inner, o.ridge)
  shrink.mlp(part, { gate = rows(mlp.gate_proj, kept), up = rows(mlp.up_proj, kept), gate_bias = bias(mlp.gate_proj,
    kept), up_bias = bias(mlp.up_proj, kept), down = down })
end

local function compress(model, data, options)
  local who = "prune.modegpt"
  local defaults = { ratio = 0.25, epsilon = math.huge, most = 0.8, ridge = 1, damp = 1e-6, statistics = nn.none }
  for key, value in pairs(statistics_options) do defaults[key] = value end
  local o = arguments.read(who, options, defaults, { ratio = "a number in [0, 1)", epsilon = "a number > 0",
    most = "a number in (0, 1)", ridge = "a finite number > 0", damp = "a finite number >= 0", statistics = "a list" })
  if o.ratio > o.most then
    arguments.fail("%s: ratio: expected at most `most` (%g), got %g", who, o.most, o.ratio)
  end
  local parts = shrink.parts(who, model)
  for _, part in ipairs(parts) do
    if part.attention.v_proj.bias then
      arguments.fail("%s: %s: expected values without a bias, got some with one", who, part.name)
    end
    for _, layer in ipairs(surgery.find(who, part.block)) do
      if not layer.module.weight:is_floating_point() then
        arguments.fail("%s: %s.%s is quantized (%s)", who, part.name, layer.name, layer.module.weight.dtype)
      end
    end
  end
  local seen = o.statistics or statistics(who, model, data, o)
  if #seen ~= #parts then
    arguments.fail("%s: statistics: expected those of %d layers, got %d", who, #parts, #seen)
  end
  local influence, shares = {}, {}
  for i, each in ipairs(seen) do influence[i] = each.influence end
  local lost = M.allocation(influence, o.ratio, o.epsilon, o.most)
  for i, share in ipairs(lost) do shares[i] = 1 - share end
  local before = shrink.count(parts)
  local sizes = shrink.plan(parts, shares, (1 - o.ratio) * before)
  ty.no_grad(function()
    for i, part in ipairs(parts) do ty.scope(decompose, part, seen[i], sizes[i], o) end
  end)
  return { before = before, after = shrink.count(parts), sizes = sizes, shares = shares, influence = influence }
end

--- Makes a decoder of Llama's shape (Llama, Mistral) really smaller, without training. data: llm.data.Packed, or a list
-- of its batches, such as the model was trained on. options:
--   ratio       0.25: the share of the parameters of the blocks' linear layers that goes
--   epsilon     of the softmax that gives layers their shares by their influence; math.huge (default): all the same
--   most        0.8: what a layer may lose
--   ridge       1: of the leverage scores, as a share of the mean of the diagonal
--   damp        1e-6: share of the mean that is added to the diagonal of the inputs' moments
--   statistics  of prune.modegpt_statistics(), where several ratios are tried
--   rows (128), batch (8), seed (0), device: the data that is looked at
-- Returns { before, after, sizes, shares, influence }: parameters of the blocks' linear layers, the sizes of each
-- layer, what it keeps and how much it turns the stream.
---@param model LanguageModel
---@param data PackedDataset|table[]|nil  nil with statistics
---@param options? table
---@return table report
function M.compress(model, data, options) return nn.for_caller(compress, model, data, options) end

return M
