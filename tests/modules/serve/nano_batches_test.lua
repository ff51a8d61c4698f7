-- Steps that are cut give what whole ones give: hidden states, keys and values, and the tokens of requests.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local llm = require "tycho.llm"
local serve = require "tycho.serve"

local config = { vocab_size = 64, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 3,
  num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }

local function make(settings)
  local t = require "tycho"
  t.manual_seed(3)
  local model = require("tycho.llm").Llama(settings):to "f64"
  t.no_grad(function() -- texts that do not end in one token for ever
    for _, parameter in model:named_parameters() do
      if parameter.ndim == 2 then parameter:mul_(6) end
    end
  end)
  return model:eval()
end

local function serve_all(group, build, settings, texts, options)
  local d, s = require "tycho.dist", require "tycho.serve"
  local model = build(settings)
  d.tensor_parallel(model, group)
  local nano = options and s.nano_batches(model, group, options)
  local engine = s.engine(model, { requests = 6, batch = 24, page = 4, room = 400 })
  local list, tokens = {}, {}
  for i, text in ipairs(texts) do list[i] = engine:submit(text, { count = 3 + i, stop_tokens = false }) end
  local events = group:record()
  engine:run()
  local sums, early = 0, 0
  for _, e in ipairs(events) do
    if e.name == "all_reduce" then
      sums = sums + 1
      if e.from > e.begun then early = early + 1 end
    end
  end
  for i, request in ipairs(list) do tokens[i] = request.tokens end
  local chosen = nano and next(nano.chosen)
  if nano then
    nano:remove()
    tokens[#tokens + 1] = engine:submit(texts[1], { count = 4, stop_tokens = false }):wait()
  end
  return { tokens = tokens, sums = sums, early = early, chosen = chosen }
end

check.test("requests get the same tokens, however their steps are cut", function()
  local texts, wanted = {}, {}
  local model = make(config)
  for i, length in ipairs { 20, 3, 33, 1, 12, 25, 8, 40 } do
    texts[i] = ty.randint(0, 64, { length }):tolist()
    wanted[i] = serve.engine(model):submit(texts[i], { count = 3 + i, stop_tokens = false }):wait()
  end
  local whole = dist.run(2, serve_all, nil, make, config, texts)
  check.equal(whole[1].tokens, wanted)
  wanted[9] = wanted[1]
  for _, options in ipairs { { shares = { 0.5, 0.5 } }, { shares = { 0.1, 0.2, 0.7 } },
    { shares = { 0.2, 0.2, 0.2, 0.2, 0.2 } }, { rounds = 1 } } do
    local got = dist.run(2, serve_all, { latency = 1e-4, bandwidth = 1e7 }, make, config, texts, options)
    for rank = 1, 2 do check.equal(got[rank].tokens, wanted) end
    check.equal(got[1].early > 0.4 * got[1].sums, true, "sums that were begun before they were waited for")
    check.equal(got[1].chosen ~= nil, options.shares == nil)
  end
end)

-- One step of a prompt that has begun, one that begins and two that decode, whole and in parts.
local function one_step(group, build, settings, texts)
  local t, d, l = require "tycho", require "tycho.dist", require "tycho.llm"
  local model = build(settings)
  d.tensor_parallel(model, group)
  local function go(shares)
    local cache = l.PackedCache.new(settings.num_hidden_layers, { page = 4 })
    local list, counts = {}, { 9, 14, 1, 1 }
    for i, text in ipairs(texts) do
      list[i] = cache:sequence()
      cache:reserve(list[i], #text)
      local before = #text - counts[i]
      if before > 0 then
        cache:begin({ list[i] }, { before })
        model:hidden(t.tensor { table.move(text, 1, before, 1, {}) }, { cache = cache })
      end
    end
    local tokens = {}
    for i, text in ipairs(texts) do table.move(text, #text - counts[i] + 1, #text, #tokens + 1, tokens) end
    local nano = shares and require("tycho.serve").nano_batches(model, group, { shares = shares })
    cache:begin(list, counts)
    local all = model:hidden(t.tensor { tokens }, { cache = cache })
    local result = { all }
    for i, s in ipairs(list) do
      s.length = s.length - counts[i]
      for layer = 1, cache.layers do
        result[#result + 1] = cache:export(s, layer, s.length, counts[i]):flatten()
      end
    end
    cache:begin(list, counts)
    local places = t.tensor({ 8, 22, 24 }, { dtype = "i64" })
    local some = model:hidden(t.tensor { tokens }, { cache = cache, places = places })
    result[#result + 1] = some
    if some.shape[2] ~= 3 then error "places" end
    local lengths = {}
    for i, s in ipairs(list) do lengths[i] = s.length end
    if nano then nano:remove() end
    return result, table.concat(lengths, " ")
  end
  return t.no_grad(function()
    local whole, lengths = go(nil)
    local worst = 0
    for _, shares in ipairs { { 0.5, 0.5 }, { 0.04, 0.96 }, { 0.3, 0.4, 0.3 }, { 0.01, 0.99 } } do
      local cut, own = go(shares)
      if own ~= lengths then error "lengths" end
      for i, x in ipairs(whole) do worst = math.max(worst, (x - cut[i]):abs():max():item()) end
    end
    return worst
  end)
end

check.test("a step in parts, within sequences too, to the last bits of f64", function()
  local texts = {}
  for i, length in ipairs { 20, 14, 7, 30 } do texts[i] = ty.randint(0, 64, { length }):tolist() end
  for _, worst in ipairs(dist.run(2, one_step, nil, make, config, texts)) do check.close(worst, 0, 1e-11) end
end)

check.test("wrong models", function()
  dist.run(1, function(group)
    local s, l, d = require "tycho.serve", require "tycho.llm", require "tycho.dist"
    local tiny = { vocab_size = 64, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 1,
      num_attention_heads = 4 }
    local model = l.Llama(tiny)
    local function fails(with, text)
      local ok, problem = pcall(s.nano_batches, with, group)
      if ok or not tostring(problem):find(text, 1, true) then error(tostring(problem)) end
    end
    fails(model, "expected one that dist.tensor_parallel has split, got 0 of 2 modules")
    d.tensor_parallel(model, group)
    local nano = s.nano_batches(model, group)
    fails(model, "expected one whose steps are not cut yet")
    nano:remove()
    s.nano_batches(model, group):remove()
  end)
  check.fails(function() serve.nano_batches(llm.Llama(config), 3) end, "serve.nano_batches: group: expected a group")
end)

check.finish()
