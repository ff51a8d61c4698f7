-- Generation: filters of the logits, seeds, stops, streaming, batches of different lengths, the caches.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local sampling = require "tycho.llm.sampling"

local root = check.root .. "tests/fixtures/llm/"
local plain = { temperature = 1, top_k = 0, top_p = 1, min_p = 0, repetition_penalty = 1 }

local function options(change)
  local o = {}
  for key, value in pairs(plain) do o[key] = value end
  for key, value in pairs(change) do o[key] = value end
  return o
end

-- Which tokens are left, and the probabilities.
local function filtered(logits, change, seen)
  local t = sampling.filter(ty.tensor { logits }, options(change), seen)
  local p, left = t:softmax(-1):tolist()[1], {}
  for i, share in ipairs(p) do if share > 0 then left[#left + 1] = i - 1 end end
  return left, p
end

local function logs(list)
  local result = {}
  for i, p in ipairs(list) do result[i] = math.log(p) end
  return result
end

check.test("filters", function()
  local p = logs { 0.1, 0.4, 0.2, 0.25, 0.05 }
  check.equal(filtered(p, {}), { 0, 1, 2, 3, 4 })
  check.equal(filtered(p, { top_k = 2 }), { 1, 3 })
  check.equal(filtered(p, { top_k = 99 }), { 0, 1, 2, 3, 4 })
  check.equal(filtered(p, { top_p = 0.6 }), { 1, 3 })
  check.equal(filtered(p, { top_p = 0.7 }), { 1, 2, 3 })
  check.equal(filtered(p, { top_p = 1e-6 }), { 1 })
  check.equal(filtered(p, { min_p = 0.3 }), { 1, 2, 3 })
  check.equal(filtered(p, { min_p = 1 }), { 1 })
  check.equal(filtered(p, { top_k = 4, top_p = 0.8, min_p = 0.55 }), { 1, 3 })
  local _, shares = filtered(logs { 0.2, 0.8 }, { temperature = 0.5 })
  check.close(shares, { 0.04 / 0.68, 0.64 / 0.68 }, 1e-6)
  local seen = ty.tensor { { true, false, true } }
  local t = sampling.filter(ty.tensor { { 2, 2, -2 } }, options { repetition_penalty = 2 }, seen)
  check.close(t:tolist(), { { 1, 2, -4 } }, 1e-6)
end)

check.test("draws follow the probabilities", function()
  ty.manual_seed(3)
  local p = { 0.1, 0.4, 0.2, 0.3 }
  local drawn = sampling.sample(ty.tensor(logs(p)):unsqueeze(0):expand(20000, 4), options {})
  local shares = drawn:flatten():one_hot(4):to("f32"):mean(0):tolist()
  check.close(shares, p, 0.015)
end)

check.test("seeds, and the generator is left as it was", function()
  local model = llm.load(root .. "llama", { dtype = "f32" })
  local prompt = ty.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
  ty.manual_seed(9)
  local want = ty.rand(3):tolist()
  ty.manual_seed(9)
  local a = model:generate(prompt, 30, { seed = 5, temperature = 2, top_p = 0.9 }):tolist()
  check.equal(ty.rand(3):tolist(), want)
  check.equal(model:generate(prompt, 30, { seed = 5, temperature = 2, top_p = 0.9 }):tolist(), a)
  check.ok(table.concat(model:generate(prompt, 30, { seed = 6, temperature = 2 }):tolist()[1], " ")
    ~= table.concat(a[1], " "))
end)

check.test("stop tokens, stop strings, streaming", function()
  local model = llm.load(root .. "mistral", { dtype = "f32" })
  local prompts = { { 3, 1, 4, 1, 5 }, { 9, 2 } }
  local free = model:generate(prompts, 40, { temperature = 0 })
  free = { free[1]:tolist(), free[2]:tolist() }
  local streamed = { { 3, 1, 4, 1, 5 }, { 9, 2 } }
  local result = model:generate(prompts, 40, { temperature = 0, on_token = function(row, token)
    table.insert(streamed[row], token)
  end })
  check.equal(streamed, free)
  check.equal(result[2]:tolist(), free[2])
  local stop = free[1][9]
  local stopped = model:generate(prompts, 40, { temperature = 0, stop_tokens = { stop } })
  for row, list in ipairs(free) do
    local want = {}
    for i, token in ipairs(list) do
      want[i] = token
      if i > #prompts[row] and token == stop then break end
    end
    check.equal(stopped[row]:tolist(), want, "row " .. row)
  end
  model.generation_config = { eos_token_id = stop }
  check.equal(model:generate(prompts, 40, { temperature = 0 })[1]:tolist(), stopped[1]:tolist())
  check.equal(model:generate(prompts, 40, { temperature = 0, stop_tokens = false })[1]:tolist(), free[1])
  local padded = model:generate(ty.tensor(prompts[2]):unsqueeze(0):expand(2, 2), 5, { temperature = 0, pad = 7 })
  check.equal(padded.shape[1], 2)
  -- A tokenizer of two letters a token.
  local tokenizer = { decode = function(_, ids)
    local parts = {}
    for i, id in ipairs(ids) do parts[i] = string.char(97 + id // 26, 97 + id % 26) end
    return table.concat(parts)
  end }
  local row = model:generate({ prompts[1] }, 40, { temperature = 0, stop_tokens = false })[1]:tolist()
  local text = tokenizer:decode { row[8], row[9], row[10] }
  local cut = model:generate({ prompts[1] }, 40, { temperature = 0, tokenizer = tokenizer, stop_tokens = false,
    stop = { text:sub(2, 5) } })[1]:tolist()
  check.ok(#cut <= 10 and #cut > 5, "stopped at " .. #cut)
  check.equal(cut, table.move(row, 1, #cut, 1, {}))
  local ended = model:generate({ prompts[1] }, 40, { temperature = 0, stop_tokens = false,
    on_token = function() return false end })
  check.equal(#ended[1]:tolist(), 6)
end)

check.test("repetition penalty sees the prompt and what was made, not the padding", function()
  local model = llm.load(root .. "qwen3", { dtype = "f32" })
  local o = { temperature = 0, repetition_penalty = 1e6 }
  local alone = model:generate({ { 8, 2, 9, 4 } }, 30, o)[1]:tolist()
  local seen = {}
  for _, token in ipairs(alone) do
    check.ok(not seen[token], "token again: " .. token)
    seen[token] = true
  end
  local together = model:generate({ { 8, 2, 9, 4 }, { 1, 2, 3, 4, 5, 6, 7, 8 } }, 30, o)
  check.equal(together[1]:tolist(), alone)
end)

check.test("a cache goes on, forgets and keeps rows", function()
  local model = llm.load(root .. "llama", { dtype = "f32" })
  local tokens = ty.randint(0, 96, { 3, 90 })
  ty.no_grad(function()
    local whole = model(tokens)
    local cache = model:cache { room = 4 }
    local function step(from, count, rows)
      local part = (rows or tokens):narrow(1, from, count)
      return ty.scope(function() return model(part, { cache = cache }) end)
    end
    check.close(step(0, 70):tolist(), whole:narrow(1, 0, 70):tolist(), 1e-3)
    check.close(step(70, 20):tolist(), whole:narrow(1, 70, 20):tolist(), 1e-3)
    cache:truncate(33)
    check.close(step(33, 5):tolist(), whole:narrow(1, 33, 5):tolist(), 1e-3)
    local rows = ty.tensor({ 2, 0 }, { dtype = "i64" })
    cache:select(rows)
    check.close(step(38, 1, tokens:index_select(0, rows)):tolist(),
      whole:index_select(0, rows):narrow(1, 38, 1):tolist(), 1e-3)
    check.fails(function() cache:truncate(100) end, "expected at most the 39 positions of the cache, got 100")
  end)
end)

check.test("a cache in pages gives the same, shares and gives back", function()
  local model = llm.load(root .. "mistral", { dtype = "f32" })
  local expected = ty.io.load(root .. "mistral/expected.safetensors")
  local prompts = {}
  for i, length in ipairs { 7, 3, 11 } do prompts[i] = expected["greedy." .. i - 1]:narrow(0, 0, length) end
  local cache = model:cache { paged = true, page = 4, room = 20 }
  local rows = model:generate(prompts, 200, { temperature = 0, cache = cache })
  for i, row in ipairs(rows) do check.equal(row:tolist(), expected["greedy." .. i - 1]:tolist(), "row " .. i) end
  local total, used = cache:usage()
  check.equal(used, (math.ceil(206 / 4) + math.ceil(202 / 4) + math.ceil(210 / 4)) * 4)
  check.ok(total >= used)
  cache:truncate(11)
  check.equal(select(2, cache:usage()), (2 + 1 + 3) * 4)

  ty.no_grad(function()
    local tokens = ty.randint(0, 96, { 3, 12 })
    local whole = model(tokens)
    local pages = model:cache { paged = true, page = 4, room = 4 }
    local index = ty.tensor({ 0, 0 }, { dtype = "i64" })
    model(tokens:narrow(0, 0, 1):narrow(1, 0, 6), { cache = pages })
    pages:select(index) -- the same beginning twice
    check.equal(select(2, pages:usage()), 8, "what is shared takes no room")
    local first = tokens:narrow(0, 0, 1)
    local fork = ty.concat({ first:narrow(1, 6, 2), tokens:narrow(0, 1, 1):narrow(1, 6, 2) }, 0)
    local logits = model(fork, { cache = pages })
    check.equal(select(2, pages:usage()), 12, "the page that differs is copied")
    check.close(logits:select(0, 0):tolist(), whole:select(0, 0):narrow(0, 6, 2):tolist(), 1e-3)
    local mixed = model(ty.concat({ first:narrow(1, 0, 6), fork:narrow(0, 1, 1) }, 1))
    check.close(logits:select(0, 1):tolist(), mixed:select(0, 0):narrow(0, 6, 2):tolist(), 1e-3)
    -- A sequence of another length joins, one leaves.
    local late = model:cache { paged = true, pool = pages.pool }
    model(tokens:narrow(0, 2, 1):narrow(1, 0, 3), { cache = late })
    pages:join(late)
    pages:select(ty.tensor({ 2, 0 }, { dtype = "i64" }))
    logits = model(ty.concat({ tokens:narrow(0, 2, 1):narrow(1, 3, 1), first:narrow(1, 8, 1) }, 0), { cache = pages })
    check.close(logits:select(0, 0):tolist(), whole:select(0, 2):narrow(0, 3, 1):tolist(), 1e-3)
    check.close(logits:select(0, 1):tolist(), whole:select(0, 0):narrow(0, 8, 1):tolist(), 1e-3)
    pages:select(ty.tensor({}, { dtype = "i64" }))
    check.equal(select(2, pages:usage()), 0, "everything is given back")
  end)
  check.fails(function() model:cache { paged = true, page = 0 } end, "page must be a positive integer")
  check.fails(function() model:cache { paged = true, pages = 3 } end, "no option 'pages'")
end)

check.test("text comes in whole characters", function()
  local text = "na\u{ef}ve \u{1F600}!"
  local tokenizer = { decode = function(_, ids)
    local parts = {}
    for i, id in ipairs(ids) do parts[i] = string.char(id) end
    return table.concat(parts)
  end }
  local stream, parts = require("tycho.llm.text").stream(tokenizer), {}
  for i = 1, #text do
    local part = stream(text:byte(i))
    check.ok(utf8.len(part), "half a character")
    parts[#parts + 1] = part
  end
  check.equal(table.concat(parts) .. stream(), text)
  stream(0xF0)
  check.equal(stream(), "\xF0", "what is left at the end comes as it is")
end)

check.test("a draft changes nothing but the speed", function()
  local model = llm.load(root .. "llama", { dtype = "f32" })
  local expected = ty.io.load(root .. "llama/expected.safetensors")
  for _, name in ipairs { "mistral", "llama" } do
    for _, ahead in ipairs { 1, 4, 7 } do
      local stats, streamed = {}, {}
      local tokens = model:generate({ expected["greedy.0"]:narrow(0, 0, 7) }, 200, { temperature = 0, stats = stats,
        draft = llm.load(root .. name, { dtype = "f32" }), draft_tokens = ahead,
        on_token = function(_, token) streamed[#streamed + 1] = token end })[1]
      check.equal(tokens:tolist(), expected["greedy.0"]:tolist(), name)
      check.equal(streamed, tokens:narrow(0, 7, 200):tolist())
      if name == "llama" then
        check.equal(stats.accepted, stats.drafted, "a model agrees with itself")
        check.equal(stats.rounds, math.ceil(200 / (ahead + 1)))
      end
    end
  end
  local stop = expected["greedy.0"]:tolist()[20]
  local o = { temperature = 0, stop_tokens = stop }
  local want = model:generate({ expected["greedy.0"]:narrow(0, 0, 7) }, 50, o)[1]:tolist()
  o.draft = model
  check.equal(model:generate({ expected["greedy.0"]:narrow(0, 0, 7) }, 50, o)[1]:tolist(), want)
  check.fails(function() model:generate({ { 1 }, { 2 } }, 5, { draft = model }) end, "one row at a time")
  check.fails(function() model:generate({ { 1 } }, 5, { draft = llm.load(root .. "bert") }) end, "must be a decoder")
end)

check.test("drawn tokens follow the large model, whatever the draft offers", function()
  local judge = require("tycho.llm.speculative").judge
  local p, q, after = { 0.5, 0.2, 0.3, 0 }, { 0.1, 0.6, 0.1, 0.2 }, { 0.25, 0.25, 0, 0.5 }
  local logits = ty.tensor { p, after }:log()
  local offer, first, second, rounds = ty.tensor { q }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, 6000
  ty.manual_seed(11)
  local kept = 0
  for _ = 1, rounds do
    ty.scope(function()
      local drafted = ty.multinomial(offer, 1):item()
      local held, token = judge(logits, { drafted }, { offer }, options {})
      local one = held == 1 and drafted or token
      first[one + 1] = first[one + 1] + 1 / rounds
      if held == 1 then
        kept = kept + 1
        second[token + 1] = second[token + 1] + 1
      end
    end)
  end
  check.close(first, p, 0.025)
  for i = 1, 4 do second[i] = second[i] / kept end
  check.close(second, after, 0.03)
  check.close(kept / rounds, 0.1 + 0.2 + 0.1, 0.03)
end)

local function small_gla()
  return llm.GLA { vocab_size = 64, hidden_size = 32, num_hidden_layers = 2, num_heads = 2, intermediate_size = 48 }
end

check.test("hidden states of the last positions alone", function()
  ty.manual_seed(2)
  local tokens, mask = ty.randint(1, 60, { 2, 9 }), ty.ones({ 2, 9 }, { dtype = "bool" })
  mask:narrow(0, 1, 1):narrow(1, 0, 3):fill_(0)
  for _, name in ipairs { "gpt2", "llama", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "olmo2", "phi3",
    "gpt_neox", "gemma2", "gemma3", "opt", "opt_narrow", "falcon", "falcon_new", "falcon_rw", "gla" } do
    local model = name == "gla" and small_gla() or llm.load(root .. name, { dtype = "f32" })
    -- Options are made anew for each call: a cache goes on with it.
    local makers = { plain = function() return {} end, padding = function() return { mask = mask } end,
      checkpoint = function() return { checkpoint = true } end,
      packed = function() return { cu_seqlens = ty.tensor { 0, 7, 18 } } end }
    local caches = name == "gla" and { {} } or { {}, { paged = true } }
    if name == "llama" or name == "gpt2" then caches[3] = { h2o = true, heavy = 4, recent = 20 } end
    for i, kind in ipairs(caches) do
      makers["cache " .. i] = function()
        local cache = model:cache(kind)
        ty.no_grad(model.hidden, model, tokens:narrow(1, 0, 5), { cache = cache })
        return { cache = cache }
      end
    end
    for what, make in pairs(makers) do
      for _, last in ipairs { 1, 4, 9, 20 } do
        ty.no_grad(function()
          local rows = what == "packed" and tokens:flatten():unsqueeze(0) or tokens
          local t = rows.shape[2]
          local count, o = math.min(last, t), make()
          o.last = last
          local got, want = model:hidden(rows, o), model:hidden(rows, make()):narrow(1, t - count, count)
          check.close(got:tolist(), want:tolist(), 1e-5, ("%s, %s, last %d"):format(name, what, last))
        end)
      end
    end
    check.fails(function() model:hidden(tokens, { last = 0 }) end, "last must be a positive integer, got 0")
  end
end)

check.test("mistakes are named", function()
  local model = llm.load(root .. "llama")
  local prompt = ty.tensor { { 1, 2 } }
  for _, case in ipairs { { { temperature = -1 }, "temperature must be a number from 0" },
    { { top_p = 0 }, "top_p must be a number above 0 to 1, got 0" }, { { min_p = 2 }, "min_p" },
    { { stop = { "x" } }, "need the tokenizer option" }, { { topk = 3 }, "no option 'topk'" } } do
    check.fails(function() model:generate(prompt, 3, case[1]) end, case[2])
  end
  check.fails(function() model:generate({}, 3) end, "no prompts")
  check.fails(function() model:generate({ {} }, 3) end, "prompt 1 has no tokens")
  check.fails(function() model:generate(prompt:to "f32", 3) end, "i64 [n, t]")
  check.fails(function() model:generate(prompt, 0) end, "positive integer")
  check.fails(function() model:generate(ty.tensor { { 1, 96 } }, 1) end, "96")
end)

check.finish()
