-- MoDeGPT: full widths are exact, redundant neurons are free, the singular values of C^(1/2) W_V W_O bound the error,
-- scores against loops, shares of layers, models, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local moments = require "tycho.quant.moments"
local modegpt = require "tycho.prune.modegpt"
local second_order = dofile(check.root .. "tests/modules/second_order.lua")

local function inputs(rows, columns) return second_order.inputs(rows, columns, "f64") end

local function off(x, a, b) -- |x a' - x b'| by |x a'|
  local want = ty.matmul(x, a:transpose(0, 1))
  return ((want - ty.matmul(x, b:transpose(0, 1))):norm() / want:norm()):item()
end

check.test("Nystrom: all neurons are exact; the layer after them is the least-squares optimum", function()
  ty.manual_seed(1)
  local x, c = inputs(60, 12)
  local down = ty.randn(5, 12, { dtype = "f64" })
  local kept, new = modegpt.nystrom(c, down, 12, 1)
  check.equal(kept:tolist(), ty.arange(12):tolist())
  check.close(off(x, down, new), 0, 1e-8)
  kept, new = modegpt.nystrom(c, down, 7, 1)
  -- The residual is orthogonal to every neuron that is left.
  local part = x:index_select(1, kept)
  local residual = ty.matmul(x, down:transpose(0, 1)) - ty.matmul(part, new:transpose(0, 1))
  check.close(ty.matmul(part:transpose(0, 1), residual):abs():max():item(), 0, 1e-6)
end)

check.test("Nystrom: neurons that the kept ones span cost nothing", function()
  ty.manual_seed(2)
  local base = ty.randn(80, 4, { dtype = "f64" })
  local x = ty.matmul(base, ty.randn(4, 10, { dtype = "f64" }))
  local down = ty.randn(6, 10, { dtype = "f64" })
  local kept, new = modegpt.nystrom(ty.matmul(x:transpose(0, 1), x), down, 4, 1e-6)
  check.close(off(x:index_select(1, kept), new, new), 0, 1e-12)
  local want = ty.matmul(x, down:transpose(0, 1))
  local got = ty.matmul(x:index_select(1, kept), new:transpose(0, 1))
  check.close(((want - got):norm() / want:norm()):item(), 0, 1e-4)
end)

check.test("Nystrom: ridge leverage scores are those of the definition", function()
  ty.manual_seed(3)
  local _, c = inputs(40, 9)
  local ridge = 0.3 * c:diagonal():mean():item()
  local scores = ty.matmul(c, (c + ty.eye(9, { dtype = "f64" }) * ridge):inverse()):diagonal():tolist()
  local order = {}
  for i = 1, 9 do order[i] = i - 1 end
  table.sort(order, function(a, b) return scores[a + 1] > scores[b + 1] end)
  local want = { table.unpack(order, 1, 5) }
  table.sort(want)
  check.equal((modegpt.nystrom(c, ty.randn(2, 9), 5, 0.3)):tolist(), want)
end)

check.test("pairs: scores of a loop over heads, pairs and rows", function()
  ty.manual_seed(4)
  local x, c = inputs(50, 8)
  local q, k = ty.randn(4 * 6, 8, { dtype = "f64" }), ty.randn(2 * 6, 8, { dtype = "f64" })
  local queries, keys = ty.matmul(x, q:transpose(0, 1)):square():sum(0):tolist(),
    ty.matmul(x, k:transpose(0, 1)):square():sum(0):tolist()
  local want = {}
  for h = 0, 1 do
    local scores, order = {}, { 0, 1, 2 }
    for i = 0, 2 do
      local a, b = 0, keys[h * 6 + i + 1] + keys[h * 6 + i + 4]
      for g = 2 * h, 2 * h + 1 do a = a + queries[g * 6 + i + 1] + queries[g * 6 + i + 4] end
      scores[i] = a * b
    end
    table.sort(order, function(a, b) return scores[a] > scores[b] end)
    want[h + 1] = { math.min(order[1], order[2]), math.max(order[1], order[2]) }
  end
  check.equal(modegpt.pairs(c, q, k, 4, 2, 2):tolist(), want)
end)

check.test("values and outputs: no map of that rank is nearer on the inputs", function()
  ty.manual_seed(5)
  local x, c = inputs(70, 10)
  local v, o = ty.randn(6, 10, { dtype = "f64" }), ty.randn(7, 2, 6, { dtype = "f64" })
  local root, inverse = moments.whiten(c)
  local whole = ty.matmul(o:reshape(14, 6), v)
  local values = select(2, ty.svd(ty.matmul(x, whole:transpose(0, 1)))):tolist()
  for count = 1, 6 do
    local v2, o2 = modegpt.value_output(root, inverse, v, o, count)
    check.equal({ v2.shape, o2.shape }, { { count, 10 }, { 7, 2, count } })
    local error = (ty.matmul(x, whole:transpose(0, 1))
      - ty.matmul(ty.matmul(x, v2:transpose(0, 1)), o2:reshape(14, count):transpose(0, 1))):norm():item()
    local least = 0
    for i = count + 1, 6 do least = least + values[i] ^ 2 end
    check.close(error, math.sqrt(least), 1e-8, "rank " .. count)
  end
end)

check.test("shares of layers: the softmax, a mean that holds, a cap whose rest the others take", function()
  local lost = modegpt.allocation({ 0.5, 0.1, 0.2 }, 0.25, 0.3, 0.9)
  local weights, sum = { math.exp(-0.5 / 0.3), math.exp(-0.1 / 0.3), math.exp(-0.2 / 0.3) }, 0
  for i = 1, 3 do sum = sum + weights[i] end
  for i = 1, 3 do check.close(lost[i], 0.75 * weights[i] / sum, 1e-12) end
  lost = modegpt.allocation({ 0.5, 0.1, 0.2 }, 0.25, math.huge, 0.9)
  check.close(lost, { 0.25, 0.25, 0.25 }, 1e-12)
  lost = modegpt.allocation({ 0.9, 0.0, 0.3 }, 0.5, 0.05, 0.6)
  check.close(lost[1] + lost[2] + lost[3], 1.5, 1e-12)
  check.close({ lost[2], lost[3] }, { 0.6, 0.6 }, 1e-12)
end)

local function small()
  ty.manual_seed(6)
  local model = llm.Llama { vocab_size = 60, hidden_size = 24, intermediate_size = 40, num_hidden_layers = 3,
    num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, max_position_embeddings = 64 }:eval()
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:detach():add_(ty.randn(p.shape) * 0.1) end
  end)
  return model
end

local function batches(count)
  local list = {}
  for i = 1, count do list[i] = { tokens = ty.randint(0, 60, { 4, 20 }) } end
  return list
end

check.test("models: nothing taken is the same model; less is lost than by magnitude; files", function()
  local model = small()
  local data = batches(4)
  local tokens = ty.randint(0, 60, { 4, 20 })
  local function logits(m) return ty.no_grad(function() return m(tokens) end) end
  local want = logits(model)
  local function distance(m) return (logits(m) - want):square():mean():sqrt():item() end
  local same = model:clone()
  local report = prune.modegpt(same, data, { ratio = 0 })
  check.equal(report.before, report.after)
  check.close(distance(same), 0, 1e-4)
  local seen = prune.modegpt_statistics(model, data)
  check.equal(#seen, 3)
  local ours, theirs = model:clone(), model:clone()
  report = prune.modegpt(ours, nil, { ratio = 0.3, statistics = seen })
  local other = prune.structured(theirs, { ratio = 0.3 })
  check.equal(report.after, other.after)
  check.ok(distance(ours) < distance(theirs), ("%g and %g"):format(distance(ours), distance(theirs)))
  local again = model:clone()
  prune.modegpt(again, data, { ratio = 0.3 })
  check.equal((logits(again) - logits(ours)):abs():max():item(), 0)
  local path = scratch.file "small"
  ours:save(path)
  check.equal((logits(prune.load(path)) - logits(ours)):abs():max():item(), 0)
  local shares = prune.modegpt(model:clone(), nil, { ratio = 0.3, statistics = seen, epsilon = 0.1 }).shares
  check.close(shares[1] + shares[2] + shares[3], 2.1, 1e-9)
end)

check.test("influence is 1 - the mean cosine of a layer's input and output", function()
  local model, data = small(), batches(2)
  local seen, streams = prune.modegpt_statistics(model, data), {}
  for i = 1, 3 do streams[i] = {} end
  ty.no_grad(function()
    for _, batch in ipairs(data) do
      local x = model.model.embed_tokens(batch.tokens)
      local cos, sin = model.rotary:table(20, "cpu")
      for i, layer in ipairs(model.model.layers) do
        local stream, more = layer(x, nil, { cos = cos:narrow(0, 0, 20), sin = sin:narrow(0, 0, 20) })
        local y = stream + more
        table.insert(streams[i], ((x * y):sum(-1) / (x:norm(2, -1) * y:norm(2, -1))):mean():item())
        x = y
      end
    end
  end)
  for i = 1, 3 do check.close(seen[i].influence, 1 - (streams[i][1] + streams[i][2]) / 2, 1e-5) end
end)

check.test("what is refused", function()
  local data = batches(1)
  check.fails(function() prune.modegpt(small(), data, { ratio = 1 }) end, "prune.modegpt: ratio: expected a number in")
  check.fails(function() prune.modegpt(small(), data, { ratio = 0.9 }) end, "ratio: expected at most `most` (0.8), got")
  check.fails(function() prune.modegpt(small(), data, { ridge = 0 }) end, "ridge: expected a finite number > 0, got 0")
  check.fails(function() prune.modegpt(small(), data, { rank = 1 }) end, "no option 'rank'")
  check.fails(function() prune.modegpt(small(), data, { statistics = {} }) end, "expected those of 3 layers, got 0")
  check.fails(function() prune.modegpt(small(), nil) end, "prune.modegpt: data: expected a dataset")
  check.fails(function() prune.modegpt_statistics(small(), data, { rows = 0 }) end, "rows: expected a positive integer")
  local qwen = llm.Qwen2 { vocab_size = 60, hidden_size = 24, intermediate_size = 40, num_hidden_layers = 1,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }
  check.fails(function() prune.modegpt(qwen, data) end, "model.layers.0: expected values without a bias")
end)

scratch.clean()
check.finish()
