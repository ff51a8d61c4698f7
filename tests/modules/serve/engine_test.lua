-- The engine: what requests get is what the model says of each alone, whatever goes on beside them; pages come and go.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local serve = require "tycho.serve"

local function tiny(class, more)
  ty.manual_seed(3)
  local config = { vocab_size = 61, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = class(config):to "f64"
  -- Weights that make texts which do not end in one token for ever.
  ty.no_grad(function()
    for _, parameter in model:named_parameters() do
      if parameter.ndim == 2 then parameter:mul_(6) end
    end
  end)
  return model:eval()
end

local function llama(more) return tiny(llm.Llama, more) end

local function prompts(lengths)
  local list = {}
  for i, length in ipairs(lengths) do
    list[i] = ty.randint(0, 61, { length }):tolist()
  end
  return list
end

-- What the model says alone.
local function alone(model, prompt, count, options)
  local o = { temperature = 0, stop_tokens = false }
  for key, value in pairs(options or {}) do o[key] = value end
  local all = model:generate({ prompt }, count, o)[1]:tolist()
  return table.move(all, #prompt + 1, #all, 1, {})
end

check.test("many requests of several families get what they would get alone", function()
  local families = { { "Llama" }, { "Qwen3", { head_dim = 8 } }, { "Mistral", { sliding_window = 7 } },
    { "Gemma2", { head_dim = 8, query_pre_attn_scalar = 8, attn_logit_softcapping = 5, final_logit_softcapping = 3,
      sliding_window = 6 } }, { "Phi3", { pad_token_id = 0 } },
    { "Mixtral", { num_local_experts = 3, num_experts_per_tok = 2 } },
    { "GPTNeoX", { num_key_value_heads = 4 } }, { "Olmo2" } }
  for _, family in ipairs(families) do
    local model = tiny(llm[family[1]], family[2])
    local engine = serve.engine(model, { requests = 3, batch = 16, page = 4, room = 512 })
    local list, lengths = {}, { 5, 30, 1, 17, 8, 40 }
    local texts = prompts(lengths)
    for i, prompt in ipairs(texts) do
      list[i] = engine:submit(prompt, { count = 4 + 3 * i, stop_tokens = false })
    end
    engine:run()
    for i, request in ipairs(list) do
      check.equal(request.tokens, alone(model, texts[i], 4 + 3 * i), family[1] .. " request " .. i)
      check.equal(request.reason, "length")
    end
    check.equal(engine:usage().running, 0)
    check.equal(engine:step(), false)
  end
end)

check.test("requests come and go between steps; pages that run out", function()
  local model = llama()
  -- 20 pages of 4 tokens: far too few for all at once.
  local engine = serve.engine(model, { requests = 8, batch = 12, page = 4, room = 80, prefixes = false })
  local texts, list = prompts { 20, 9, 33, 4, 12, 25, 3, 18 }, {}
  for i, prompt in ipairs(texts) do
    list[i] = engine:submit(prompt, { count = 30, stop_tokens = false })
    for _ = 1, i do engine:step() end
  end
  engine:run()
  for i, request in ipairs(list) do check.equal(request.tokens, alone(model, texts[i], 30), "request " .. i) end
  local usage = engine:usage()
  check.equal(usage.preempted > 0, true, "some had to wait")
  check.equal(usage.pages_used, 0, "all pages are free")
  check.fails(function() engine:submit(texts[3], { count = 60 }) end, "as the engine has room for 80")
end)

check.test("beginnings are computed once", function()
  local model = llama()
  local engine = serve.engine(model, { page = 4, room = 120, batch = 64 })
  local common = prompts { 22 }[1]
  local function with(tail)
    local prompt = table.move(common, 1, #common, 1, {})
    return table.move(tail, 1, #tail, #prompt + 1, prompt)
  end
  local first = engine:submit(with { 1, 2, 3 }, { count = 6, stop_tokens = false })
  engine:run()
  local before = engine:usage().computed
  local second = engine:submit(with { 4, 5 }, { count = 6, stop_tokens = false })
  local third = engine:submit(with { 4, 5 }, { count = 8, stop_tokens = false })
  engine:run()
  check.equal(first.tokens, alone(model, with { 1, 2, 3 }, 6))
  check.equal(second.tokens, alone(model, with { 4, 5 }, 6))
  check.equal(third.tokens, alone(model, with { 4, 5 }, 8))
  -- Five full pages of 22 common tokens are there: 4 of 24 tokens of each prompt are left, and what follows.
  check.equal(engine:usage().computed - before, 2 * 4 + 5 + 7)
  -- The text of one is the beginning of the next.
  local longer = table.move(third.tokens, 1, 8, 25, with { 4, 5 })
  before = engine:usage().computed
  local fourth = engine:submit(longer, { count = 1, stop_tokens = false })
  engine:run()
  check.equal(fourth.tokens, alone(model, longer, 1))
  check.equal(engine:usage().computed - before, 32 - 28)
  -- Room for other requests: kept pages that nobody uses go.
  for _, prompt in ipairs(prompts { 60, 70, 50 }) do
    local request = engine:submit(prompt, { count = 20, stop_tokens = false })
    engine:run()
    check.equal(request.tokens, alone(model, prompt, 20))
  end
  check.equal(engine:usage().pages_used, engine:usage().pages_kept)
end)

check.test("kept pages go in the order in which they were used last", function()
  local Prefixes, Pool = require "tycho.serve.prefixes", require "tycho.llm.cache.pool"
  local pool = Pool.new(1, 1, { pages = 64, most = 64 })
  local tree = Prefixes.new(pool)
  math.randomseed(5)
  local alive = {}
  local function keep(tokens)
    local pages, node = tree:find(tokens)
    for at = #pages + 1, #tokens do
      local page = pool:take()
      node = tree:add(node, tokens, at, page)
      pool:release(page)
      alive[node] = true
    end
  end
  for _ = 1, 25 do
    local tokens = {}
    for i = 1, math.random(1, 5) do tokens[i] = math.random(1, 2) end
    keep(tokens)
  end
  local held
  for node in pairs(alive) do -- a page that a request has, too
    if not next(node.children) then held = node end
  end
  pool:share(held.page)
  -- One after another by a look at all of them.
  local function oldest()
    local found
    for node in pairs(alive) do
      local followed = false
      for other in pairs(alive) do followed = followed or other.parent == node end
      if not followed and node ~= held and (not found or node.used < found.used) then found = node end
    end
    return found
  end
  local total = tree.count
  for _, count in ipairs { 1, 3, 2, 7, 100 } do
    local expected = {}
    for _ = 1, count do
      local node = oldest()
      if not node then break end
      alive[node], expected[#expected + 1] = nil, node
    end
    local before = #pool.free
    check.equal(tree:evict(count), #expected)
    check.equal(#pool.free - before, #expected)
    for _, node in ipairs(expected) do check.equal(pool.references[node.page], 0) end
    total = total - #expected
    check.equal(tree.count, total)
  end
  check.equal(tree.count > 0 and tree:evict(5) == 0, true, "what leads to the page of a request stays")
end)

check.test("draws do not depend on the company, and follow the probabilities", function()
  local model = llama()
  local texts = prompts { 6, 11, 3 }
  local options = { { temperature = 0.9, top_k = 7, seed = 5 }, { temperature = 1.2, top_p = 0.8, seed = 6 },
    { temperature = 0.7, min_p = 0.05, repetition_penalty = 1.3, seed = 7 } }
  local function ask(engine, i)
    local o = { count = 12, stop_tokens = false }
    for key, value in pairs(options[i]) do o[key] = value end
    return engine:submit(texts[i], o)
  end
  local together = serve.engine(model, { page = 4 })
  local list = {}
  for i in ipairs(texts) do list[i] = ask(together, i) end
  together:run()
  for i in ipairs(texts) do
    check.equal(ask(serve.engine(model, { page = 4 }), i):wait(), list[i].tokens, "request " .. i)
  end
  -- The penalty and the filters are those of generate().
  local greedy = serve.engine(model):submit(texts[1], { count = 20, repetition_penalty = 1.5, stop_tokens = false })
  check.equal(greedy:wait(), alone(model, texts[1], 20, { repetition_penalty = 1.5 }))
  -- 3,000 first tokens against the model's probabilities.
  local engine, counts, n = serve.engine(model, { requests = 500, batch = 4096, room = 32768 }), {}, 3000
  for seed = 1, n do
    engine:submit(texts[3], { count = 1, temperature = 1, top_k = 5, seed = seed, stop_tokens = false, logprobs = true,
      on_end = function(request)
        local token = request.tokens[1]
        counts[token] = (counts[token] or 0) + 1
        check.equal(request.logprobs[1] < 0, true)
      end })
  end
  engine:run()
  local p = ty.no_grad(function() return model(ty.tensor { texts[3] }) end):select(0, 0):select(0, -1)
  local best, places = p:topk(5)
  local shares = best:softmax(-1):tolist()
  for i, token in ipairs(places:tolist()) do
    local share = (counts[token] or 0) / n
    check.close(share, shares[i], 4 * math.sqrt(shares[i] * (1 - shares[i]) / n) + 1e-9, "token " .. token)
    counts[token] = nil
  end
  check.equal(next(counts), nil, "no others were drawn")
end)

check.test("ends: stop tokens, cancelling, calls that fail", function()
  local model = llama()
  local prompt = prompts { 9 }[1]
  local whole = alone(model, prompt, 20)
  local engine = serve.engine(model, { page = 4 })
  local seen, ends = {}, {}
  local a = engine:submit(prompt, { count = 20, stop_tokens = { whole[5], 60 },
    on_token = function(_, token) seen[#seen + 1] = token end, on_end = function(_, reason) ends[1] = reason end })
  local b = engine:submit(prompt, { count = 20, stop_tokens = false,
    on_token = function(request) if #request.tokens == 3 then request:cancel() end end })
  local c = engine:submit(prompt, { count = 20, stop_tokens = false })
  engine:step()
  c:cancel()
  c:cancel()
  engine:run()
  local at
  for i, token in ipairs(whole) do at = at or (token == whole[5] or token == 60) and i or nil end
  check.equal(a.tokens, table.move(whole, 1, at, 1, {}))
  check.equal({ a.reason, b.reason, c.reason }, { "stop", "cancelled", "cancelled" })
  check.equal({ seen, ends[1], #b.tokens, #c.tokens }, { a.tokens, "stop", 3, 1 })
  local broken = engine:submit(prompt, { on_token = function() error "no more" end })
  check.fails(function() engine:run() end, "no more")
  check.equal(broken.reason, "failed")
  check.equal(engine:usage().pages_used, engine:usage().pages_kept, "its pages are free")
  local after = engine:submit(prompt, { count = 20, stop_tokens = false })
  check.equal(after:wait(), whole)
end)

check.test("pages in half of the precision", function()
  local model = llama():to "f32"
  local prompt = prompts { 40 }[1]
  local bytes = {}
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    local engine = serve.engine(model, { dtype = dtype, room = 256 })
    check.equal(#engine:submit(prompt, { count = 8, stop_tokens = false }):wait(), 8)
    bytes[dtype] = engine.cache:bytes()
  end
  check.equal(bytes.f16, bytes.f32 / 2)
  check.equal(bytes.bf16, bytes.f32 / 2)
  -- The op itself, against pages that were rounded the same way.
  local q, k, v = ty.randn(3, 2, 8), ty.randn(32, 1, 8), ty.randn(32, 1, 8)
  local pages, cu, lengths = ty.tensor { { 1, 0 } }, ty.tensor { 0, 3 }, ty.tensor { 20 }
  for _, dtype in ipairs { "f16", "bf16" } do
    local a = ty.paged_attention(q, k:to(dtype), v:to(dtype), pages, cu, lengths, 16)
    local b = ty.paged_attention(q, k:to(dtype):to "f32", v:to(dtype):to "f32", pages, cu, lengths, 16)
    check.equal((a - b):abs():max():item(), 0, dtype)
  end
end)

check.test("wrong arguments", function()
  local model = llama()
  local engine = serve.engine(model)
  check.fails(function() serve.engine(3) end, "serve.engine: model: expected a module")
  check.fails(function() serve.engine(ty.nn.Linear(2, 2)) end,
    "serve.engine: model: expected a decoder whose attention takes packed sequences, got a Linear")
  check.fails(function()
    serve.engine(llm.Mamba { vocab_size = 61, hidden_size = 16, state_size = 4, num_hidden_layers = 1 })
  end, "got a Mamba")
  check.fails(function() serve.engine(model, { rooms = 3 }) end, "no option 'rooms'")
  check.fails(function() engine:submit {} end, "serve.submit: tokens: expected at least one, got none")
  check.fails(function() engine:submit { 3, 61 } end, "expected integers in [0, 61), got 61 at place 2")
  check.fails(function() engine:submit { 3, "a" } end, "at place 2")
  check.fails(function() engine:submit({ 3 }, { count = 0 }) end, "serve.submit: count: expected an integer >= 1")
  check.fails(function() engine:submit({ 3 }, { temperature = -1 }) end, "serve.submit: temperature must be a number")
  check.fails(function() engine:submit({ 3 }, { count = 256 }) end, "as the model sees 256, got 1")
end)

check.finish()
