-- Machines for prompts and machines for tokens: what requests get is what one engine gives them, and what goes over are
-- the keys and values and nothing else.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local llm = require "tycho.llm"
local serve = require "tycho.serve"

local config = { vocab_size = 61, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 3,
  num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }

local function make(class)
  local t = require "tycho"
  t.manual_seed(3)
  local model = class(config):to "f64"
  t.no_grad(function() -- texts that do not end in one token for ever
    for _, parameter in model:named_parameters() do
      if parameter.ndim == 2 then parameter:mul_(6) end
    end
  end)
  return model:eval()
end

local function prompts(lengths)
  local list = {}
  for i, length in ipairs(lengths) do list[i] = ty.randint(0, 61, { length }):tolist() end
  return list
end

-- ---- pages ----

check.test("what a cache exports another one imports", function()
  local model = make(llm.Llama)
  local layers = #model.model.layers
  local text = prompts { 23 }[1]
  local a, b = llm.PackedCache.new(layers, { page = 4 }), llm.PackedCache.new(layers, { page = 7 })
  ty.no_grad(function()
    local other, mine = a:sequence(), a:sequence()
    for _, s in ipairs { other, mine } do -- pages that do not begin with the first
      a:reserve(s, 23)
      a:begin({ s }, { 23 })
      model:hidden(ty.tensor { text }, { cache = a })
    end
    -- The plain cache of the model is the reference.
    local plain = model:cache()
    model:hidden(ty.tensor { text }, { cache = plain })
    local theirs = b:sequence()
    b:reserve(theirs, 23)
    for layer = 1, layers do
      local x = a:export(mine, layer, 5, 18)
      check.equal(x.shape, { 2, 18, 16 })
      for i, name in ipairs { "k", "v" } do
        local wanted = plain[layer][name]:narrow(2, 5, 18):squeeze(0):transpose(0, 1):flatten(1)
        check.close((x:select(0, i - 1) - wanted):abs():max():item(), 0, 1e-12, name)
      end
      b:import(theirs, layer, 0, a:export(mine, layer, 0, 5))
      b:import(theirs, layer, 5, x)
    end
    b:extend(theirs, 23)
    check.equal(theirs.length, 23)
    b:begin({ theirs }, { 1 })
    local moved = model(ty.tensor { { 9 } }, { cache = b })
    local wanted = model(ty.tensor { { 9 } }, { cache = plain })
    check.close((moved - wanted):abs():max():item(), 0, 1e-10, "logits over moved pages")
  end)
  check.fails(function() a:export(a:sequence(), 1, 0, 1) end, "PackedCache:export: count: expected at most 0 tokens")
  check.fails(function() b:export(b:sequence(), 4, 0, 1) end, "layer: expected an integer in [1, 3]")
  local s = b:sequence()
  b:reserve(s, 3)
  check.fails(function() b:import(s, 1, 0, ty.zeros(2, 3, 5)) end, "x: expected rows of 16 numbers")
  check.fails(function() b:import(s, 1, 0, ty.zeros(3, 3, 16)) end, "x: expected keys and values [2, count, width]")
  check.fails(function() b:extend(s, 9) end, "PackedCache:extend: count: expected at most 7 tokens")
end)

check.test("an engine takes over what another one has begun", function()
  local model = make(llm.Llama)
  local texts = prompts { 30, 11 }
  local first, second = serve.engine(model, { page = 4 }), serve.engine(model, { page = 8, room = 64, requests = 2 })
  local whole = {}
  for i, text in ipairs(texts) do
    whole[i] = serve.engine(model):submit(text, { count = 9, stop_tokens = false }):wait()
  end
  local beside = second:submit(texts[2], { count = 9, stop_tokens = false })
  second:step()
  local request = first:submit(texts[1], { count = 9, stop_tokens = false })
  for _ = 1, 4 do first:step() end
  local function fill(cache, sequence, count)
    for layer = 1, cache.layers do
      cache:import(sequence, layer, 0, first.cache:export(request.sequence, layer, 0, count))
    end
  end
  local o = { count = 9, stop_tokens = false }
  local taken = second:adopt(texts[1], request.tokens, o, fill)
  second:run()
  check.equal(taken.tokens, whole[1])
  check.equal(beside.tokens, whole[2])
  check.equal(second:usage().pages_used, second:usage().pages_kept)
  -- No room, and what ends at once.
  local small = serve.engine(model, { page = 4, room = 40, prefixes = false })
  local blocks = small:submit(texts[2], { count = 9, stop_tokens = false })
  small:step()
  check.equal(small:adopt(texts[1], request.tokens, o, fill), nil)
  check.equal(small:usage().pages_used, 3)
  check.equal(blocks:wait(), whole[2])
  check.equal(second:adopt(texts[1], request.tokens, { count = 4, stop_tokens = false }, fill).reason, "length")
  local stopped = second:adopt(texts[1], request.tokens, { count = 9, stop_tokens = request.tokens[4] }, fill)
  check.equal(stopped.reason, "stop")
  check.fails(function() second:adopt(texts[1], {}, o, fill) end, "serve.adopt: tokens: expected at least one")
  local used = small:usage().pages_used
  check.fails(function() small:adopt(texts[1], { 1 }, o, function() error "lost on the way" end) end, "lost on the way")
  check.equal(small:usage().pages_used, used)
end)

-- ---- machines ----

local function machine(group, build, requests, options)
  local t = require "tycho"
  local model = build(require("tycho.llm").Llama)
  return t.no_grad(require("tycho.serve").split.run, group, model, requests, options)
end

check.test("requests get what one engine gives them, whatever machines they are on", function()
  local model = make(llm.Llama)
  local texts = prompts { 20, 9, 33, 4, 12, 25, 3, 18, 40, 7 }
  local places = { { 1, 3 }, { 2, 3 }, { 1, 3 }, { 2, 4 }, { 1, 4 }, { 2, 2 }, { 3, 3 }, { 1, 4 }, { 2, 3 }, { 1, 1 } }
  local requests, wanted, bytes = {}, {}, 0
  for i, text in ipairs(texts) do
    requests[i] = { arrival = 0.002 * i, prompt = text, count = i == 5 and 1 or 3 + i, place = places[i] }
    wanted[i] = serve.engine(model):submit(text, { count = requests[i].count, stop_tokens = false }):wait()
    -- Two of 16 numbers in f64 of each layer and token.
    if places[i][1] ~= places[i][2] and i ~= 5 then bytes = bytes + #text * 3 * 2 * 16 * 8 end
  end
  for _, serial_below in ipairs { 0, 16, math.huge } do
    local all = serve.split.together(dist.run(4, machine, nil, make, requests, { limit = 32, page = 4,
      serial_below = serial_below, bandwidth = 1e8, latency = 1e-5 }))
    check.equal(all.bytes, bytes, "bytes of keys and values")
    for i, r in ipairs(all.requests) do
      check.equal(r.tokens, wanted[i], ("request %d, serial below %g"):format(i, serial_below))
      check.equal(r.first > r.arrival and r.over >= r.first, true)
    end
    check.equal(#all.requests, #texts)
  end
  -- Machines that mix, with parts of prompts.
  for i, r in ipairs(requests) do r.place = { i % 2 + 1, i % 2 + 1 } end
  local all = serve.split.together(dist.run(2, machine, nil, make, requests, { chunk = 10, page = 4 }))
  check.equal(all.bytes, 0)
  for i, r in ipairs(all.requests) do check.equal(r.tokens, wanted[i]) end
  for _, s in ipairs(all.steps) do check.equal(s.prompt + s.decodes <= 10, true) end
  requests[1].place, requests[2].place = { 1, 2 }, { 2, 1 }
  check.fails(function() dist.run(2, machine, nil, make, requests, {}) end, "which does both")
end)

check.test("one prompt by the clocks of ranks: layers hide their way, the same token comes", function()
  local prompt = prompts { 200 }[1]
  local model = make(llm.Llama)
  local wanted = serve.engine(model):submit(prompt, { count = 2, stop_tokens = false }):wait()
  local function go(group, build, text, way)
    local t = require "tycho"
    return t.no_grad(require("tycho.serve").split.transfer, group, build(require("tycho.llm").Llama), text, way)
  end
  local second = {}
  for _, way in ipairs { "layers", "serial", "stays" } do
    -- A link on which all bytes take a second, which is longer than anything else here.
    local n = 200 * 3 * 2 * 16 * 8
    local ranks = dist.run(2, go, { bandwidth = n, latency = 0 }, make, prompt, way)
    check.equal(ranks[way == "stays" and 1 or 2].tokens, wanted, way)
    second[way] = ranks[way == "stays" and 1 or 2].second
    check.equal(ranks[1].bytes, way == "stays" and 0 or n)
    local sends = 0
    for _, e in ipairs(ranks[1].events) do
      if e.name == "send" and e.bytes > 8 then sends = sends + 1 end
    end
    check.equal(sends, ({ layers = 3, serial = 1, stays = 0 })[way])
  end
  check.equal(second.layers >= 1 and second.serial > second.layers, true)
end)

check.finish()
