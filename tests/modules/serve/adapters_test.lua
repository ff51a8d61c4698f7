-- Adapters of requests: each gets what a model with its adapter merged into the weights says, whoever else there is.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local peft = require "tycho.peft"
local serve = require "tycho.serve"

local folder = os.tmpname()
os.remove(folder)
ty.io.mkdir(folder)

local function tiny(class, more)
  ty.manual_seed(3)
  local config = { vocab_size = 61, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = class(config):to "f64"
  ty.no_grad(function()
    for _, parameter in model:named_parameters() do
      if parameter.ndim == 2 then parameter:mul_(6) end
    end
  end)
  return model:eval()
end

-- Adapters as folders: ranks, layers and scales differ. Drawn in f32, as files have them.
local function draw(model, name, options)
  local path = folder .. "/" .. name
  peft.lora(model, options)
  ty.no_grad(function()
    for _, p in ipairs(peft.parameters(model)) do p:normal_(0, 0.3) end
  end)
  peft.save(model, path)
  peft.remove(model)
  return path
end

local attention = { "q_proj", "k_proj", "v_proj", "o_proj" }
local kinds = {
  { rank = 1, alpha = 1, targets = attention }, { rank = 5, alpha = 3, targets = "all-linear" },
  { rank = 8, alpha = 16, targets = { "q_proj", "v_proj" } },
  { rank = 3, alpha = 3, targets = "model%.layers%.1%..*_proj" },
  { rank = 2, alpha = 2, rank_pattern = { ["layers.0.self_attn.q_proj"] = 4 }, targets = attention },
}

local function prompts(lengths)
  local list = {}
  for i, length in ipairs(lengths) do list[i] = ty.randint(0, 61, { length }):tolist() end
  return list
end

-- Tokens and the logarithms of their probabilities of a model whose weights have the adapter in them.
local function merged(model, path, prompt, count)
  if path then
    peft.load(model, path, { dtype = "f64" })
    peft.merge(model)
  end
  local request = serve.engine(model, { prefixes = false }):submit(prompt, { count = count, stop_tokens = false,
    logprobs = true })
  request:wait()
  local all = model:generate({ prompt }, count, { temperature = 0, stop_tokens = false })[1]:tolist()
  check.equal(request.tokens, table.move(all, #prompt + 1, #all, 1, {}))
  if path then peft.remove(peft.unmerge(model)) end
  return request
end

local function same(got, wanted, what)
  check.equal(got.tokens, wanted.tokens, what)
  for j, share in ipairs(wanted.logprobs) do check.close(got.logprobs[j], share, 1e-7, what) end
end

check.test("heterogeneous steps are those of merged weights; pages that run out", function()
  local families = { { "Llama", {}, 5 }, { "Qwen3", { head_dim = 8 }, 5 }, { "Gemma2", { head_dim = 8,
    query_pre_attn_scalar = 8, attn_logit_softcapping = 5, final_logit_softcapping = 3, sliding_window = 6 }, 3 } }
  for _, family in ipairs(families) do
    local model = tiny(llm[family[1]], family[2])
    local paths, list, texts = {}, {}, prompts { 5, 30, 1, 17, 8, 40, 12, 3, 22 }
    for i = 1, family[3] do paths[i] = draw(model, family[1] .. i, kinds[i]) end
    -- Too few pages for all adapters, and for all sequences beside some of them.
    local engine = serve.engine(model, { requests = 4, batch = 16, page = 4, room = 224 })
    local set = serve.adapters(engine, { host = 40000 })
    for i, path in ipairs(paths) do set:add("adapter " .. i, path) end
    for i, prompt in ipairs(texts) do
      local number = i % (family[3] + 1)
      list[i] = engine:submit(prompt, { count = 4 + 3 * i, stop_tokens = false, logprobs = true,
        adapter = number > 0 and "adapter " .. number or nil })
    end
    engine:run()
    local usage = set:usage()
    check.equal(usage.fetched > family[3], true, "some were brought again")
    check.equal(usage.read > family[3], true, "some were read again")
    check.equal(usage.host_bytes <= 40000, true)
    check.equal(engine:usage().pages_used, usage.pages + engine:usage().pages_kept)
    check.equal(usage.bytes, usage.pages * 2 * 2 * 4 * 16 * 8)
    set:remove()
    check.equal(engine:usage().pages_used, engine:usage().pages_kept)
    for i, prompt in ipairs(texts) do
      same(list[i], merged(model, paths[i % (family[3] + 1)], prompt, 4 + 3 * i), family[1] .. " request " .. i)
    end
  end
end)

check.test("pairs from memory; other dtypes of pages; ranks padded", function()
  local model = tiny(llm.Llama)
  local path = draw(model, "pairs", kinds[2])
  local prompt, pairs_of = prompts { 19 }[1], peft.read(model, path)
  local wanted = merged(model, path, prompt, 10)
  for _, options in ipairs { {}, { pad = 9 } } do
    local engine = serve.engine(model, { page = 4 })
    local set = serve.adapters(engine, options):add("x", pairs_of)
    same(engine:submit(prompt, { count = 10, stop_tokens = false, logprobs = true, adapter = "x" }), { tokens = {},
      logprobs = {} })
    engine:run()
    local request = engine:submit(prompt, { count = 10, stop_tokens = false, logprobs = true, adapter = "x" })
    request:wait()
    same(request, wanted)
    -- A rank of 5 or 9 at sites of 2 + 2 + 2 + 2 rows of A (q, k, v, o), 2 + 2 + 3 (gate, up, down).
    check.equal(set:usage().pages, math.ceil((options.pad or 5) * 15 / 4))
    set:remove()
  end
  model:to "f32"
  local engine = serve.engine(model, { dtype = "f16" })
  serve.adapters(engine):add("x", path)
  check.equal(#engine:submit(prompt, { count = 10, stop_tokens = false, adapter = "x" }):wait(), 10)
  engine.adapters:remove()
end)

check.test("beginnings are not shared between adapters", function()
  local model = tiny(llm.Llama)
  local paths = { draw(model, "one", kinds[1]), draw(model, "two", kinds[3]) }
  local prompt = prompts { 24 }[1]
  local engine = serve.engine(model, { page = 4 })
  local set = serve.adapters(engine):add("one", paths[1]):add("two", paths[2])
  local function ask(name)
    local request = engine:submit(prompt, { count = 6, stop_tokens = false, logprobs = true, adapter = name })
    request:wait()
    return request
  end
  local plain, one, two = ask(), ask "one", ask "two"
  check.equal(engine:usage().shared, 0)
  local again = ask "two"
  check.equal(engine:usage().shared, 20)
  check.equal(again.tokens, two.tokens)
  -- Another adapter under the name of one that was taken away finds nothing of it.
  set:delete "two"
  set:add("two", paths[1])
  local other = ask "two"
  check.equal(engine:usage().shared, 20)
  set:remove()
  same(plain, merged(model, nil, prompt, 6))
  same(one, merged(model, paths[1], prompt, 6))
  same(two, merged(model, paths[2], prompt, 6))
  same(other, one)
end)

check.test("adapters of those who wait are brought before their turn", function()
  local model = tiny(llm.Llama)
  local paths = { draw(model, "a", kinds[1]), draw(model, "b", kinds[3]) }
  local engine = serve.engine(model, { page = 4, requests = 1 })
  local set = serve.adapters(engine):add("a", paths[1]):add("b", paths[2])
  engine:submit({ 1, 2, 3 }, { count = 3, stop_tokens = false, adapter = "a" })
  engine:submit({ 1, 2, 3 }, { count = 3, stop_tokens = false, adapter = "b" })
  engine:step()
  check.equal({ set:usage().resident, engine:usage().running }, { 2, 1 })
  engine:run()
  check.equal({ set:usage().fetched, set:usage().read }, { 2, 2 })
  set:remove()
end)

check.test("so many adapters at once; nobody is passed for ever", function()
  local model = tiny(llm.Llama)
  local paths = { draw(model, "x", kinds[1]), draw(model, "y", kinds[3]), draw(model, "z", kinds[2]) }
  local engine = serve.engine(model, { page = 4, requests = 4 })
  local set = serve.adapters(engine, { most = 2 })
  for i, name in ipairs { "x", "y", "z" } do set:add(name, paths[i]) end
  local order = {}
  local function ask(name, count)
    return engine:submit({ 1, 2, 3 }, { count = count or 3, stop_tokens = false, adapter = name,
      on_end = function() order[#order + 1] = name or "none" end })
  end
  for _, name in ipairs { "x", "y", "z", "x", "y", "x" } do ask(name) end
  ask()
  while engine:step() do check.equal(set.in_use <= 2, true) end
  check.equal(order, { "x", "x", "y", "y", "z", "x", "none" }, "the second two passed")
  check.equal(set.in_use, 0)
  -- A stream of others that does not end.
  local late
  ask("x", 3)
  ask("y", 3)
  late = ask("z", 3)
  for i = 1, 200 do
    ask(i % 2 == 0 and "x" or "y", 3)
    engine:step()
    if late.reason then break end
  end
  check.equal(late.reason, "length")
  engine:run()
  set:remove()
end)

check.test("what is wrong", function()
  local model = tiny(llm.Llama)
  local path = draw(model, "wrong", kinds[1])
  local engine = serve.engine(model, { page = 4, room = 64 })
  check.fails(function() serve.adapters(3) end, "serve.adapters: engine: expected a table, got 3")
  check.fails(function() serve.adapters {} end, "serve.adapters: engine: expected one of serve.engine")
  check.fails(function() engine:submit({ 1 }, { adapter = "x" }) end, "expected nil, as the engine has none")
  local set = serve.adapters(engine)
  check.fails(function() serve.adapters(engine) end, "expected one without adapters")
  check.fails(function() engine:submit({ 1 }, { adapter = "x" }) end, 'expected one of the 0 that there are, got "x"')
  check.fails(function() set:add("x", folder .. "/none") end, "source: expected a folder or a file")
  check.fails(function() set:add("x", {}) end, "got an empty list")
  check.fails(function() set:add("x", { { name = "lm_head", a = ty.ones(1, 32), b = ty.ones(61, 1) } }) end,
    "lm_head: expected a linear layer that every layer")
  check.fails(function() set:add("x", { { name = "nothing", a = ty.ones(1, 32), b = ty.ones(61, 1) } }) end,
    "nothing: expected a linear layer of the model")
  local q_proj = "model.layers.0.self_attn.q_proj"
  check.fails(function() set:add("x", { { name = q_proj, a = ty.ones(1, 3), b = ty.ones(3, 1) } }) end,
    "expected A and B for a layer [32, 32], got A [1, 3] and B [3, 1]")
  check.fails(function() set:add("x", { { name = q_proj, a = ty.ones(1, 3) } }) end,
    "expected a [rank, inputs] and b [outputs, rank], floating point, in pair 1")
  set:add("x", path)
  check.fails(function() set:add("x", path) end, "name: expected a new one")
  check.fails(function() set:delete "y" end, 'expected one of the 1 that there are, got "y"')
  check.fails(function() engine:submit({ 1, 2, 3 }, { count = 60, adapter = "x" }) end, "beside the adapter")
  local request = engine:submit({ 1, 2, 3 }, { adapter = "x", stop_tokens = false })
  check.fails(function() set:delete "x" end, "with which no request runs or waits")
  check.fails(function() set:remove() end, "expected an engine without requests, got one with 1")
  check.equal(#request:wait(), 16)
  -- A file that is gone by the time that it is wanted fails its request alone.
  local late = draw(model, "late", kinds[3])
  set:add("late", late)
  set.host = 0
  local lost = engine:submit({ 4, 5 }, { adapter = "late" })
  set:pages_of("test", "x")
  os.remove(late .. "/adapter_config.json")
  os.remove(late .. "/adapter_model.safetensors")
  set.entries.late.image, set.host_bytes = nil, 0
  local fine = engine:submit({ 4, 5 }, { count = 4, stop_tokens = false })
  engine:run()
  check.equal({ lost.reason, fine.reason, #fine.tokens }, { "failed", "length", 4 })
  check.equal(lost.error:find("late", 1, true) ~= nil, true)
  set:remove()
  check.fails(function() set:add("z", path) end, "got one that was removed")
  os.remove(folder)
end)

check.finish()
