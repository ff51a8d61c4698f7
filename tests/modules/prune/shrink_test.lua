-- Layers that are really smaller: what runs is what was left in, parameters are counted, a folder loads again, files
-- with other sizes are refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local shrink = require "tycho.prune.shrink"

local function small(kind, more)
  ty.manual_seed(4)
  local config = { vocab_size = 60, hidden_size = 24, intermediate_size = 40, num_hidden_layers = 3,
    num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, max_position_embeddings = 64 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = llm[kind or "Llama"](config):eval()
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.1) end
  end)
  return model
end

local tokens = (function()
  ty.manual_seed(5)
  return ty.randint(0, 60, { 2, 11 })
end)()

local function off(a, b) return ty.no_grad(function() return (a(tokens) - b(tokens)):abs():max():item() end) end

-- The same model with zeros in place of what is cut.
local function masked(model, sizes, cut)
  for i, part in ipairs(shrink.parts("test", model)) do
    local a, mlp, size = part.attention, part.mlp, sizes[i]
    local chosen = cut[i]
    local function zero(weight, dim, rows)
      local keep = ty.zeros { weight.shape[dim + 1] }
      keep = keep:scatter(0, rows, 1)
      ty.no_grad(function() weight:copy_(weight:detach() * (dim == 0 and keep:unsqueeze(1) or keep:unsqueeze(0))) end)
    end
    zero(a.q_proj.weight, 0, shrink.rotary_rows(chosen.pairs, 8, 4))
    zero(a.k_proj.weight, 0, shrink.rotary_rows(chosen.pairs, 8, 2))
    local rows = (chosen.values + ty.arange(2):unsqueeze(1) * 8):flatten()
    zero(a.v_proj.weight, 0, rows)
    zero(mlp.up_proj.weight, 0, chosen.inner)
    check.equal(chosen.values.shape[2], size.v)
  end
  return model
end

check.test("a shrunk model computes what one with zeros in their place does; other pairs in each head", function()
  for _, kind in ipairs { "Llama", "Mistral" } do
    local model = small(kind, kind == "Mistral" and { sliding_window = 5 } or nil)
    local zeros, cut, sizes = model:clone(), {}, {}
    for i = 1, 3 do
      cut[i] = { pairs = ty.tensor { { 0, 3 }, { 1, 2 } }, values = ty.tensor { { 0, 2, 5, 6, 7 }, { 1, 2, 3, 4, 5 } },
        inner = ty.arange(3 * i, 40 - i) }
      sizes[i] = { qk = 4, v = 5, inner = 40 - 4 * i }
    end
    masked(zeros, sizes, cut)
    for i, part in ipairs(shrink.parts("test", model)) do
      require("tycho.prune.structured").keep(part, cut[i])
      check.equal(shrink.sizes(part), sizes[i])
    end
    check.close(off(model, zeros), 0, 1e-5, kind)
    local count = 0
    for i = 1, 3 do count = count + 24 * (6 * (4 + 5) + 3 * (40 - 4 * i)) end
    check.equal(shrink.count(shrink.parts("test", model)), count)
    -- A cache, and prompts of different lengths, which have positions of their own.
    local prompts = { tokens:select(0, 0), tokens:select(0, 1):narrow(0, 0, 6) }
    local a, b = model:generate(prompts, 6, { temperature = 0 }), zeros:generate(prompts, 6, { temperature = 0 })
    for i = 1, 2 do check.equal(a[i]:tolist(), b[i]:tolist()) end
    -- A folder.
    local path = scratch.file(kind)
    model:save(path)
    local again = prune.load(path)
    check.equal(off(model, again), 0)
    check.equal(again:count_parameters(), model:count_parameters())
    local stored = 0
    for _, t in pairs(ty.io.load(path .. "/model.safetensors")) do
      if t:is_floating_point() then stored = stored + t:numel() end
    end
    check.equal(stored, model:count_parameters())
    again:save(scratch.file "again")
    check.equal(off(model, prune.load(scratch.file "again")), 0)
    check.equal(prune.load(path, { dtype = "f64" }).model.norm.weight.dtype, "f64")
  end
end)

check.test("gradients reach all that is left", function()
  local model = small()
  prune.structured(model, { ratio = 0.4 })
  model:loss(tokens):backward()
  for name, p in model:named_parameters() do check.ok(p.grad and p.grad:isfinite():all():item(), name) end
end)

check.test("a linear layer as two, saved and loaded", function()
  local model = small()
  local whole = model:clone()
  local layer = model.model.layers[2].mlp.up_proj
  local u, s, v = ty.svd(layer.weight:detach():to "f64")
  shrink.factor(model, "model.layers.1.mlp.up_proj", layer, u * s:unsqueeze(0), v)
  check.close(off(model, whole), 0, 1e-5)
  check.equal({ layer.weight.shape, layer.basis.shape }, { { 40, 24 }, { 24, 24 } })
  model:save(scratch.file "factored")
  check.equal(off(prune.load(scratch.file "factored"), model), 0)
end)

check.test("plans meet the budget to a unit, and shares", function()
  local parts = shrink.parts("test", small())
  local all = shrink.count(parts)
  for _, ratio in ipairs { 0.1, 0.25, 0.5, 0.8 } do
    local sizes = shrink.plan(parts, { 1 - ratio, 1 - ratio, 1 - ratio }, (1 - ratio) * all)
    local total = 0
    for _, size in ipairs(sizes) do total = total + 24 * (6 * (size.qk + size.v) + 3 * size.inner) end
    check.ok(total <= (1 - ratio) * all and total > (1 - ratio) * all - 72, ("%g: %d"):format(ratio, total))
  end
  local sizes = shrink.plan(parts, { 1, 0.5, 0.75 }, 0.75 * all)
  check.ok(sizes[1].v == 8 and sizes[2].v == 4 and sizes[3].v == 6)
  check.equal(shrink.plan(parts, { 1, 1, 1 }, all)[2], { qk = 8, v = 8, inner = 40 })
end)

check.test("structured: the least weights go, at equal counts; random is of the seed", function()
  local model = small()
  local layer = model.model.layers[1].mlp
  ty.no_grad(function()
    layer.gate_proj.weight:detach():narrow(0, 7, 3):mul_(0)
    layer.up_proj.weight:detach():narrow(0, 7, 3):mul_(0)
    layer.down_proj.weight:detach():narrow(1, 7, 3):mul_(0)
  end)
  local before = model:clone()
  for _, score in ipairs { "l2", "l1" } do
    local shrunk = before:clone()
    local report = prune.structured(shrunk, { ratio = 0.2, score = score })
    check.ok(report.after <= 0.8 * report.before)
    local rows = before.model.layers[1].mlp.up_proj.weight:detach()
    for _, gone in ipairs { 7, 8, 9 } do
      local same = (shrunk.model.layers[1].mlp.up_proj.weight:detach() - rows:narrow(0, gone, 1)):abs():sum(1):min()
      check.ok(same:item() > 0, score)
    end
  end
  local function random(seed)
    local shrunk = before:clone()
    ty.manual_seed(seed)
    prune.structured(shrunk, { score = "random" })
    return shrunk
  end
  check.equal(off(random(1), random(1)), 0)
  check.ok(off(random(1), random(2)) > 0)
end)

check.test("what is refused: models, and files that lie", function()
  check.fails(function() prune.structured(ty.nn.Linear(2, 2)) end, "expected a decoder of Llama's shape, got a module")
  check.fails(function() prune.structured(small("Qwen3")) end, "expected attention of Llama's shape, got norms of")
  check.fails(function() prune.structured(small(), { ratio = 1 }) end, "prune.structured: ratio: expected a number in")
  check.fails(function() prune.structured(small(), { shares = { 1 } }) end, "shares: expected one for each of 3 layers")
  local model, path = small(), scratch.file "lies"
  model:save(path)
  check.fails(function() prune.load(path) end, "no layer of it is packed or shrunk")
  check.fails(function() prune.load(scratch.file "none") end, "has no config.json")
  prune.structured(model)
  model:save(path)
  local good = ty.io.load_json(path .. "/config.json")
  local function lie(change, message)
    local config = ty.io.load_json(path .. "/config.json")
    change(config.shrunk)
    local other = scratch.file "lie"
    ty.io.mkdir(other)
    ty.io.write_atomic(other .. "/config.json", ty.io.json_encode(config))
    ty.io.write_atomic(other .. "/model.safetensors", ty.io.read(path .. "/model.safetensors"))
    check.fails(function() prune.load(other) end, message)
  end
  check.equal(#good.shrunk.layers, 3)
  lie(function(s) s.layers[2].qk = 7 end, "shrunk.layers: layer 1: expected qk and v up to 8")
  lie(function(s) s.layers[1].v = -1 end, "layer 0: expected qk and v")
  lie(function(s) s.layers[3] = nil end, "expected sizes of 3 layers")
  lie(function(s) s.layers[1].inner = "x" end, "layer 0: expected qk and v")
  lie(function(s) s.layers[1].inner = 3 end, "misshapen")
  lie(function(s) s.ranks = { ["model.norm"] = 2 } end, "shrunk.ranks: 'model.norm'")
  lie(function(s) s.ranks = { ["model.layers.0.mlp.up_proj"] = 1000 } end, "a rank of it, got 1000")
  model.model.layers[1].self_attn.rotary_pairs:fill_(9)
  model:save(path)
  check.fails(function() prune.load(path) end, "rotary_pairs of layer 0: expected numbers of [0, 4), got 9 to 9")
end)

scratch.clean()
check.finish()
