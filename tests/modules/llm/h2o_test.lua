-- The cache of a fixed number of tokens: exact while they all fit, the tokens with the most attention when they do not.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function llama(more)
  ty.manual_seed(3)
  local config = { vocab_size = 50, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = llm.Llama(config)
  ty.no_grad(function() -- attention that prefers some keys
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.15) end
  end)
  return model
end

local function gpt2()
  ty.manual_seed(4)
  local model = llm.GPT2 { vocabulary = 50, context = 64, width = 32, layers = 2, heads = 4 }
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.15) end
  end)
  return model
end

local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end

-- Logits of `tokens`, which come in pieces of these sizes.
local function streamed(model, tokens, cache, sizes, mask)
  local parts, at = {}, 0
  ty.no_grad(function()
    for i, n in ipairs(sizes) do
      parts[i] = model(tokens:narrow(1, at, n), { cache = cache, mask = mask and mask:narrow(1, at, n) })
      at = at + n
    end
  end)
  return ty.concat(parts, 1)
end

local function ones(n)
  local list = {}
  for i = 1, n do list[i] = 1 end
  return list
end

local function h2o(model, heavy, recent, sinks)
  return model:cache { h2o = true, heavy = heavy, recent = recent, sinks = sinks }
end

ty.manual_seed(1)
local tokens = ty.randint(0, 50, { 2, 24 })

check.test("exact while all tokens fit", function()
  for _, model in ipairs { llama(), gpt2(), llama { num_key_value_heads = 4 } } do
    local want = ty.no_grad(model.forward, model, tokens)
    for _, sizes in ipairs { { 24 }, ones(24), { 7, 1, 1, 10, 5 } } do
      local got = streamed(model, tokens, h2o(model, 12, 12), sizes)
      check.ok(off(got, want) < 1e-5, "logits in pieces of " .. sizes[1])
    end
    local greedy = model:generate(tokens, 20, { temperature = 0 })
    local cached = model:generate(tokens, 20, { temperature = 0, cache = h2o(model, 30, 14) })
    check.ok(cached:eq(greedy):all():item(), "the same tokens")
  end
end)

-- The definition, for one layer and one head after the other: q [t, d], k, v [t, d]; returns y [t, d].
local function reference(q, k, v, heavy, recent, scale)
  local t, scores, held, rows = #q, {}, {}, {}
  for i = 1, t do
    held[#held + 1], scores[i] = i, 0
    local weights, sum = {}, 0
    for _, j in ipairs(held) do
      local x = 0
      for e = 1, #q[i] do x = x + q[i][e] * k[j][e] end
      weights[j] = math.exp(x * scale)
      sum = sum + weights[j]
    end
    rows[i] = {}
    for e = 1, #v[1] do rows[i][e] = 0 end
    for _, j in ipairs(held) do
      scores[j] = scores[j] + weights[j] / sum
      for e = 1, #v[1] do rows[i][e] = rows[i][e] + weights[j] / sum * v[j][e] end
    end
    if #held > heavy + recent then
      local least
      for place, j in ipairs(held) do
        if j <= i - recent and (not least or scores[j] < scores[held[least]]) then least = place end
      end
      table.remove(held, least)
    end
  end
  return rows
end

check.test("tokens with the most attention stay", function()
  for _, case in ipairs { { 3, 2 }, { 0, 5 }, { 4, 1 } } do
    local heavy, recent = case[1], case[2]
    local q, k, v = ty.randn(1, 2, 20, 4) * 2, ty.randn(1, 2, 20, 4), ty.randn(1, 2, 20, 3)
    local cache = llm.HeavyHitterCache.new(1, { heavy = heavy, recent = recent })
    local rows = {}
    for i = 0, 19 do
      rows[i + 1] = cache:attend(1, q:narrow(2, i, 1), k:narrow(2, i, 1), v:narrow(2, i, 1))
      cache:advance(1)
    end
    local got = ty.concat(rows, 2)
    for head = 0, 1 do
      local function list(x) return x:select(0, 0):select(0, head):tolist() end
      check.close(list(got), reference(list(q), list(k), list(v), heavy, recent, 0.5), 1e-4,
        ("heavy %d, recent %d, head %d"):format(heavy, recent, head))
    end
  end
end)

check.test("a window alone is attention with a window; sinks stay", function()
  local q, k, v = ty.randn(2, 4, 20, 8), ty.randn(2, 2, 20, 8), ty.randn(2, 2, 20, 8)
  for _, sinks in ipairs { 0, 2 } do
    -- A query sees itself and the `recent` tokens before it.
    local want = ty.scaled_dot_product_attention(q, k, v, nil, true, 0, 6, sinks)
    for _, sizes in ipairs { ones(20), { 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 } } do
      local cache = llm.HeavyHitterCache.new(1, { heavy = 0, recent = 6, sinks = sinks })
      local at, rows = 0, {}
      for i, n in ipairs(sizes) do
        rows[i] = cache:attend(1, q:narrow(2, at, n), k:narrow(2, at, n), v:narrow(2, at, n))
        cache:advance(n)
        at = at + n
      end
      check.ok(off(ty.concat(rows, 2), want) < 1e-5, "sinks " .. sinks)
    end
  end
end)

check.test("a prompt longer than the budget, and pieces of several tokens", function()
  local model = llama()
  local want = ty.no_grad(model.forward, model, tokens)
  local got = streamed(model, tokens, h2o(model, 4, 4), { 16, 1, 1, 6 })
  check.ok(off(got:narrow(1, 0, 16), want:narrow(1, 0, 16)) < 1e-5, "the prompt sees itself whole")
  check.ok(off(got:narrow(1, 16, 8), want:narrow(1, 16, 8)) > 1e-4, "and is cut then")
  local cache = h2o(model, 4, 4)
  local out = model:generate(tokens, 20, { temperature = 0, cache = cache })
  check.equal(out.shape, { 2, 44 })
  check.equal({ cache[1].k.shape, cache.past }, { { 2, 2, 9, 8 }, 43 }, "it holds what it may")
  check.equal(cache:bytes(), 2 * 2 * 2 * 2 * 9 * 8 * 4)
end)

check.test("prompts of different lengths are as each alone", function()
  local model = llama()
  local prompts = { tokens:select(0, 0):narrow(0, 0, 5), tokens:select(0, 1):narrow(0, 0, 14) }
  for _, budget in ipairs { { 20, 20 }, { 3, 6 } } do
    local both = model:generate(prompts, 16, { temperature = 0, cache = h2o(model, budget[1], budget[2]) })
    for i, prompt in ipairs(prompts) do
      local alone = model:generate({ prompt }, 16, { temperature = 0, cache = h2o(model, budget[1], budget[2]) })
      check.equal(both[i]:tolist(), alone[1]:tolist(), ("row %d, budget %d"):format(i, budget[1] + budget[2]))
    end
  end
end)

check.test("rows of the batch", function()
  local model = llama()
  local cache, other = h2o(model, 3, 3), h2o(model, 3, 3)
  streamed(model, tokens, cache, { 12, 1, 1 })
  cache:select(ty.tensor({ 1 }, { dtype = "i64" }))
  streamed(model, tokens:narrow(0, 1, 1), other, { 12, 1, 1 })
  local next_token = ty.tensor { { 7 } }
  local a, b = ty.no_grad(model.forward, model, next_token, { cache = cache }),
    ty.no_grad(model.forward, model, next_token, { cache = other })
  check.ok(off(a, b) < 1e-5, "a row that is kept goes on")
end)

check.test("mistakes", function()
  local model = llama()
  check.fails(function() model:cache { h2o = true, recent = 4 } end, "heavy must be an integer of at least 0, got nil")
  check.fails(function() model:cache { h2o = true, heavy = 4, recent = 0 } end, "recent must be an integer")
  check.fails(function() model:cache { h2o = true, heavy = 4, recent = 1, keep = 2 } end, "no option 'keep'")
  local cache = h2o(model, 2, 2)
  streamed(model, tokens, cache, { 8 })
  check.fails(function() cache:truncate(3) end, "does not come back")
  check.fails(function() cache:append() end, "does not take a cache that forgets")
  local mistral = llm.Mistral { vocab_size = 50, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1,
    num_attention_heads = 4, num_key_value_heads = 2, sliding_window = 8 }
  check.fails(function() mistral:generate(tokens, 2, { cache = h2o(mistral, 2, 2) }) end, "sliding window")
end)

check.finish()
