-- ROCKET: the knapsack against all combinations, full density is the whitened singular value decomposition, the
-- dictionary is the least-squares optimum, what sparsifying keeps, packed matrices, models, SliceGPT's yardstick.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local allocate, rocket = require "tycho.prune.allocate", require "tycho.prune.rocket"
local shrink, slice, sparse = require "tycho.prune.shrink", require "tycho.prune.slice", require "tycho.prune.sparse"
local second_order = dofile(check.root .. "tests/modules/second_order.lua")

local f64 = { dtype = "f64" }

check.test("knapsack: the best of all combinations of 6 layers with 5 choices", function()
  local state = 7
  local function random(n)
    state = (state * 6364136223846793005 + 1442695040888963407)
    return (state >> 33) % n
  end
  for _ = 1, 12 do
    local layers, cheapest, dearest = {}, 0, 0
    for i = 1, 6 do
      layers[i] = {}
      local low, high = math.huge, 0
      for k = 1, 5 do
        layers[i][k] = { cost = 1 + random(40), error = random(1000) / 7 }
        low, high = math.min(low, layers[i][k].cost), math.max(high, layers[i][k].cost)
      end
      cheapest, dearest = cheapest + low, dearest + high
    end
    local budget = cheapest + random(dearest - cheapest + 1)
    local best = math.huge
    local function try(i, cost, error)
      if cost > budget then return end
      if i > 6 then best = math.min(best, error) return end
      for _, choice in ipairs(layers[i]) do try(i + 1, cost + choice.cost, error + choice.error) end
    end
    try(1, 0, 0)
    local chosen, error, cost = allocate.choose(layers, budget, budget)
    local sum, spent = 0, 0
    for i, k in ipairs(chosen) do sum, spent = sum + layers[i][k].error, spent + layers[i][k].cost end
    check.close(error, best, 1e-9)
    check.close(sum, best, 1e-9)
    check.ok(spent == cost and cost <= budget)
  end
end)

check.test("knapsack: costs are rounded up, so that a coarse one stays within its budget", function()
  local layers = {}
  for i = 1, 9 do layers[i] = { { cost = 0.37 * i, error = 1 }, { cost = 1.13 * i, error = 0 } } end
  local _, _, cost = allocate.choose(layers, 30, 100)
  check.ok(cost <= 30)
  check.fails(function() allocate.choose(layers, 1) end, "prune.allocate: budget: expected at least the cheapest")
  check.fails(function() allocate.choose({}, 1) end, "layers: expected at least one")
  check.fails(function() allocate.choose({ {} }, 1) end, "expected choices for layer 1")
  check.fails(function() allocate.choose({ { { cost = 1 } } }, 1) end, "error of choice 1 of layer 1: expected a")
end)

local function problem(rows, inputs, outputs)
  local x, c = second_order.inputs(rows, inputs, "f64")
  return x, c, ty.randn(outputs, inputs, f64)
end

check.test("all nonzeros: no layer of that rank is nearer on the inputs; C = I is the plain decomposition", function()
  ty.manual_seed(1)
  local x, c, w = problem(60, 10, 14)
  local singular = select(2, ty.svd(ty.matmul(x, w:transpose(0, 1)))):tolist()
  for _, rank in ipairs { 1, 4, 10 } do
    local made = rocket.factorize(w, c, rank, rank, 0)
    local error = (ty.matmul(x, ty.matmul(made.left, made.right) - w:transpose(0, 1))):norm():item()
    local least, all = 0, 0
    for i = 1, 10 do
      all = all + singular[i] ^ 2
      if i > rank then least = least + singular[i] ^ 2 end
    end
    check.close(error, math.sqrt(least), 1e-7)
    check.close(made.output_error, math.sqrt(least / all), 1e-9)
  end
  local plain = select(2, ty.svd(w)):tolist()
  local made, least = rocket.factorize(w, ty.eye(10, f64), 6, 6, 0), 0
  for i = 7, 10 do least = least + plain[i] ^ 2 end
  check.close((ty.matmul(made.left, made.right) - w:transpose(0, 1)):norm():item(), math.sqrt(least), 1e-9)
  check.close(made.weight_error, made.output_error, 1e-9)
end)

check.test("the dictionary: its gradient is zero, and no step from it is better", function()
  ty.manual_seed(2)
  local x, v = ty.randn(9, 20, f64), ty.randn(5, 20, f64)
  v = v * ty.rand(5, 20):gt(0.5):to "f64"
  local u = rocket.dictionary(x, v, 0)
  local gradient = ty.matmul(ty.matmul(u, v) - x, v:transpose(0, 1))
  check.close(gradient:abs():max():item(), 0, 1e-4) -- the least ridge of 1e-6 stays
  local function loss(d) return (ty.matmul(d, v) - x):square():sum():item() end
  for _ = 1, 5 do check.ok(loss(u) <= loss(u + ty.randn(9, 5, f64) * 1e-2)) end
  local ridge = 0.1 * ty.matmul(v, v:transpose(0, 1)):diagonal():mean():item()
  local ridged = rocket.dictionary(x, v, 0.1)
  check.close((ty.matmul(ty.matmul(ridged, v) - x, v:transpose(0, 1)) + ridged * ridge):abs():max():item(), 0, 1e-9)
end)

check.test("sparsifying: as many as asked for, those that matter most, in every column some", function()
  ty.manual_seed(3)
  local v, lengths = ty.randn(40, 30, f64), ty.rand(40, f64) + 0.1
  local kept = rocket.sparsify(v, lengths, 10)
  check.equal(kept:ne(0):to("i64"):sum():item(), 300)
  check.ok(kept:ne(0):to("i64"):sum(0):min():item() >= 9)
  check.equal(kept:eq(v):logical_or(kept:eq(0)):all():item(), true)
  local importance = (v:abs() * lengths:sqrt():unsqueeze(1)):tolist()
  local mask = kept:ne(0):tolist()
  for column = 1, 30 do -- the nine that lead each column by its importance
    local order = {}
    for i = 1, 40 do order[i] = i end
    table.sort(order, function(a, b) return importance[a][column] > importance[b][column] end)
    for i = 1, 9 do check.ok(mask[order[i]][column]) end
  end
  check.ok(rocket.sparsify(v, lengths, 40) == v)
end)

check.test("sizes stay within what they cost", function()
  for _, keep in ipairs { 0.3, 0.7, 0.95 } do
    for _, split in ipairs { 1, 1.5, 3 } do
      local rank, nonzeros = rocket.sizes(256, 672, keep, split)
      local cost = rocket.cost(256, 672, rank, nonzeros * 672)
      check.ok(cost <= keep * 256 * 672, ("%g %g: %g"):format(keep, split, cost))
      check.ok(rank == 256 or cost > (keep - 0.02) * 256 * 672, ("%g %g: %g"):format(keep, split, cost))
    end
  end
  check.equal(rocket.cost(10, 6, 4, 24), 64)
  check.equal(rocket.cost(10, 16, 4, 20), 64)
end)

check.test("packed matrices: back as they were, empty, full, of odd sizes; bytes; what does not fit", function()
  ty.manual_seed(4)
  for _, shape in ipairs { { 1, 1 }, { 3, 8 }, { 5, 13 }, { 7, 64 }, { 2, 129 } } do
    for _, share in ipairs { 0, 0.4, 1 } do
      local w = (ty.randn(shape) * ty.rand(shape):lt(share):to "f32"):to "f16"
      local packed = sparse.pack(w)
      check.equal(sparse.unpack(packed):eq(w):all():item(), true)
      check.equal(sparse.bytes(packed), 2 * w:ne(0):to("i64"):sum():item() + shape[1] * ((shape[2] + 7) // 8))
    end
  end
  local packed = sparse.pack(ty.ones(2, 5))
  packed.bitmap:select(0, 0):fill_(255)
  check.fails(function() sparse.unpack(packed) end, "prune.unpack: bitmap: expected 10 bits within 5 columns, got 13")
  check.fails(function() sparse.pack(ty.ones(3)) end, "prune.pack: weight: expected a matrix of floats")
  check.fails(function() sparse.unpack { values = ty.ones(1), bitmap = ty.ones(1, 1), columns = 1 } end, "expected f16")
end)

local function small()
  ty.manual_seed(6)
  local model = llm.Llama { vocab_size = 60, hidden_size = 24, intermediate_size = 40, num_hidden_layers = 2,
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

check.test("models: within the budget, counted nonzeros, saved and loaded; the knapsack is no worse than equal shares",
  function()
  local model, data = small(), batches(4)
  local tokens = ty.randint(0, 60, { 4, 20 })
  local function logits(m) return ty.no_grad(function() return m(tokens) end) end
  local seen = prune.rocket_moments(model, data)
  local function total(report)
    local sum = 0
    for _, layer in ipairs(report.layers) do sum = sum + layer.error end
    return sum
  end
  local small_one = model:clone()
  local report = prune.rocket(small_one, nil, { keep = 0.6, moments = seen })
  check.ok(report.after <= 0.6 * report.before)
  local _, modules = ty.nn.surgery.modules(small_one)
  local cost = 0
  for _, layer in ipairs(report.layers) do
    local module = modules[layer.name]
    if layer.rank then
      local nonzeros = module.weight:detach():ne(0):to("i64"):sum():item()
      check.equal(nonzeros, layer.nonzeros * module.weight.shape[1], layer.name)
      cost = cost + rocket.cost(module.basis.shape[2], module.weight.shape[1], layer.rank,
        layer.nonzeros * module.weight.shape[1])
    else
      cost = cost + module.weight:numel()
    end
  end
  check.close(cost, report.after, 1e-6)
  small_one:save(scratch.file "rocket")
  check.equal((logits(prune.load(scratch.file "rocket")) - logits(small_one)):abs():max():item(), 0)
  -- Packed, in half precision: what the report counts, and the tensors that did not change.
  local half = small_one:clone():to "f16"
  prune.save(half, scratch.file "packed")
  local state, numbers = ty.io.load(scratch.file "packed" .. "/model.safetensors"), 0
  for name, t in pairs(state) do
    if name:find "_proj" then numbers = numbers + t:numel() * (t.dtype == "u8" and 0.5 or 1) end
  end
  check.ok(numbers <= report.after + 8 * 40 * 7 and numbers > 0.9 * report.after)
  local loaded = prune.load(scratch.file "packed", { dtype = "f32" })
  check.equal((logits(loaded) - logits(half:to "f32")):abs():max():item(), 0)
  for name in pairs(state) do
    if name:find "bitmap$" then
      state[name] = state[name]:narrow(0, 1, 1)
      break
    end
  end
  ty.io.save_safetensors(scratch.file "packed" .. "/model.safetensors", state)
  check.fails(function() prune.load(scratch.file "packed") end, "bitmap: expected")
  -- Equal shares are among what the knapsack may choose.
  local even = prune.rocket(model:clone(), nil, { keep = 0.65, moments = seen, allocation = "uniform" })
  local free = prune.rocket(model:clone(), nil, { keep = 0.65, moments = seen })
  check.ok(total(free) <= total(even))
  check.equal(prune.rocket(model:clone(), data, { keep = 0.65 }).after, free.after)
  local whole = model:clone()
  prune.rocket(whole, nil, { keep = 1, moments = seen })
  check.equal((logits(whole) - logits(model)):abs():max():item(), 0)
end)

check.test("slicing: the stream has so many directions, and the numbers that it would take", function()
  local model, data = small(), batches(6)
  local sliced = model:clone()
  local report = slice.slice(sliced, data, { keep = 0.7 })
  local parts = shrink.parts("test", model)
  check.ok(report.after <= 0.7 * report.before and slice.cost(parts, report.width + 1) > 0.7 * report.before)
  local streams = {}
  local remove = sliced.model.layers[2].self_attn:register_forward_pre_hook(function(_, x)
    streams[1] = x:reshape(-1, 24) / sliced.model.layers[2].input_layernorm.weight
  end)
  ty.no_grad(function() sliced(data[1].tokens) end)
  remove()
  local values = select(2, ty.svd(streams[1]:to "f64"))
  check.ok(values:narrow(0, report.width, 24 - report.width):max():item() < 1e-5 * values:max():item())
  check.ok(values:narrow(0, report.width - 1, 1):item() > 1e-4 * values:max():item())
end)

check.test("what is refused", function()
  local data = batches(1)
  check.fails(function() prune.rocket(small(), data, { keep = 0 }) end, "prune.rocket: keep: expected a number in (0")
  check.fails(function() prune.rocket(small(), data, { keeps = { 2 } }) end, "keeps: expected numbers in (0, 1), got 2")
  check.fails(function() prune.rocket(small(), data, { splits = { 0.5 } }) end, "splits: expected numbers of at")
  check.fails(function() prune.rocket(small(), data, { by = "x" }) end, 'by: expected "weight" or "output"')
  check.fails(function() prune.rocket(small(), nil) end, "prune.rocket: data: expected a dataset")
  check.fails(function() prune.rocket(small(), nil, { moments = { ty.eye(2) } }) end, "moments: expected those of")
  check.fails(function() prune.rocket(small(), data, { keep = 0.1 }) end, "budget: expected at least the cheapest")
end)

scratch.clean()
check.finish()
