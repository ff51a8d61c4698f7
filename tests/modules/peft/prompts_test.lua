-- Virtual tokens: PEFT's files, logits and gradients with them; what they are by definition; caches; files; errors.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local llm_root, root = check.root .. "tests/fixtures/llm/", check.root .. "tests/fixtures/peft/"
local function base(name) return llm.load(llm_root .. name, { dtype = "f32" }) end
local function logits(model, tokens, options) return ty.no_grad(function() return model(tokens, options) end) end
local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end

ty.manual_seed(1)
local tokens = ty.randint(0, 96, { 2, 9 })

for _, name in ipairs { "llama", "gpt2" } do
  check.test(name .. ": a prompt of a text's own embeddings is that text", function()
    local model = base(name)
    local text = ty.randint(0, 96, { 5 })
    local whole = ty.concat({ text:unsqueeze(0):expand(2, 5), tokens }, 1)
    local want, plain = logits(model, whole):narrow(1, 5, 9), logits(model, tokens)
    peft.prompt(model, { tokens = 5, ids = text })
    check.ok(off(logits(model, tokens), want) < 1e-5, off(logits(model, tokens), want))
    check.ok(off(logits(model, tokens), plain) > 0.01)
    check.equal(peft.disable(model, logits, model, tokens):tolist(), plain:tolist())
    check.equal(logits(model, tokens, { last = 2 }).shape[2], 2)
    peft.remove(model)
    check.equal(logits(model, tokens):tolist(), plain:tolist())
    check.equal(model:state_dict().prompt_embeddings, nil)
    check.ok(model:parameters()[1].requires_grad)
  end)

  check.test(name .. ": a prefix of a text's own keys and values is that text", function()
    local model = base(name)
    local text = ty.randint(0, 96, { 1, 5 })
    local want = logits(model, ty.concat({ text:expand(2, 5), tokens }, 1)):narrow(1, 5, 9)
    local cache = model:cache()
    logits(model, text, { cache = cache })
    peft.prefix(model, { tokens = 5 })
    ty.no_grad(function()
      local parts = {}
      for i = 1, cache.layers do
        for _, x in ipairs { cache[i].k, cache[i].v } do parts[#parts + 1] = x:narrow(2, 0, 5):select(0, 0) end
      end
      model.prompt_embeddings:copy_(ty.stack(parts, 0):permute(2, 0, 1, 3):reshape(5, -1))
    end)
    check.ok(off(logits(model, tokens), want) < 1e-5, off(logits(model, tokens), want))
  end)

  for _, kind in ipairs { "prompt", "prefix" } do
    check.test(name .. ": " .. kind .. ": caches, padding, training, files", function()
      local model = base(name)
      peft[kind](model, { tokens = 4 })
      local with = logits(model, tokens)
      local cache = model:cache()
      local parts = { logits(model, tokens:narrow(1, 0, 6), { cache = cache }) }
      for t = 6, 8 do parts[#parts + 1] = logits(model, tokens:narrow(1, t, 1), { cache = cache }) end
      check.ok(off(ty.concat(parts, 1), with) < 1e-5, "token by token")
      check.equal(cache.past, 13)
      local mask = ty.ones({ 2, 9 }, { dtype = "i64" })
      check.ok(off(logits(model, tokens, { mask = mask }), with) < 1e-5, "with a mask of ones")
      check.ok(off(logits(model:clone(), tokens), with) < 1e-6, "a copy")
      model:loss(tokens):backward()
      check.equal(#peft.parameters(model), 1)
      check.ok(model.prompt_embeddings.grad:abs():max():item() > 0)
      for parameter, p in model:named_parameters() do
        check.ok(parameter == "prompt_embeddings" or not p.grad, parameter)
      end
      local opt, first, last = ty.optim.AdamW(peft.parameters(model), { lr = 0.05 }), nil, nil
      for _ = 1, 15 do
        last = model:loss(tokens)
        first = first or last:item()
        opt:step(last)
      end
      check.ok(last:item() < 0.95 * first, ("the loss falls: %.3f to %.3f"):format(first, last:item()))
      with = logits(model, tokens)
      local folder, again = scratch.file(name .. kind), base(name)
      peft.save(model, folder, { base = name })
      peft.load(again, folder)
      check.equal(logits(again, tokens):tolist(), with:tolist())
      check.ok(not again.prompt_embeddings.requires_grad)
      check.fails(function() peft.merge(model) end,
        "peft.merge: expected an adapter of low%-rank matrices alone, got P")
    end)
  end
end

check.test("a prefix that a network makes; files have what it makes", function()
  local model = base "llama"
  peft.prefix(model, { tokens = 3, projection = 8 })
  check.equal(#peft.parameters(model), 5)
  model:loss(tokens):backward()
  for _, p in ipairs(peft.parameters(model)) do check.ok(p.grad and p.grad:abs():max():item() > 0) end
  local folder, again = scratch.file "projected", base "llama"
  peft.save(model, folder)
  check.equal(ty.io.load_json(folder .. "/adapter_config.json").prefix_projection, true)
  peft.load(again, folder, { train = true })
  check.ok(off(logits(again, tokens), logits(model, tokens)) < 1e-5)
  peft.remove(model)
  check.equal(model.prompt_transform, nil)
end)

local function wave(t) return (ty.arange(t:numel(), { dtype = "f64" }) * 0.37 + 1):sin():reshape(t.shape) end

for _, name in ipairs { "llama_prompt", "llama_prefix", "llama_prefix_projected", "gpt2_prompt", "gpt2_prefix" } do
  if ty.io.stat(root .. name) then
    check.test("of PEFT: " .. name, function()
      local want, notes = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
      local model = base(notes.base)
      check.ok(off(logits(model, want.tokens), want.base) < 1e-4)
      peft.load(model, root .. name, { train = true })
      local t = want.tokens.shape[2]
      local right = want.logits:narrow(1, want.logits.shape[2] - t, t)
      check.ok(off(logits(model, want.tokens), right) < 1e-4, off(logits(model, want.tokens), right))
      local loss = model:loss(want.tokens)
      loss:backward()
      check.close(loss:item(), want.loss:item(), 1e-4)
      local pair = want["grad.prompt_embeddings"]
      if check.ok(pair or name:find "projected", "a gradient") and pair then
        local norm, product = pair:tolist()[1], pair:tolist()[2]
        local g = model.prompt_embeddings.grad:to "f64"
        check.ok(math.abs(g:norm():item() - norm) <= 1e-4 * norm, "norm of the gradient")
        check.ok(math.abs((g * wave(g)):sum():item() - product) <= 1e-4 * norm, "its product")
      end
      local folder = scratch.file(name)
      peft.save(model, folder, { base = notes.base })
      check.equal(ty.io.load_safetensors(folder .. "/adapter_model.safetensors").prompt_embeddings:tolist(),
        ty.io.load_safetensors(root .. name .. "/adapter_model.safetensors").prompt_embeddings:tolist())
      local ours, theirs = ty.io.load_json(folder .. "/adapter_config.json"),
        ty.io.load_json(root .. name .. "/adapter_config.json")
      for key, value in pairs(ours) do
        local free = key == "prompt_tuning_init" or key == "encoder_hidden_size" or key == "prefix_projection"
        if not free then check.equal(theirs[key], value, key) end
      end
    end)
  end
end

check.test("wrong arguments and files, the model as before", function()
  local model = base "llama"
  for _, kind in ipairs { "prompt", "prefix" } do
    local who = "peft." .. kind
    check.fails(function() peft[kind](3) end, who .. ": model: expected a module, got 3")
    check.fails(function() peft[kind](model, { tokens = 0 }) end, who .. ": tokens: expected an integer >= 1, got 0")
    check.fails(function() peft[kind](model, { init = "x" }) end, who .. ": init: expected ")
    check.fails(function() peft[kind](model, { dtype = "i32" }) end, "dtype must be f32")
    check.fails(function() peft[kind](ty.nn.Linear(2, 2)) end, "expected a language model that decodes with a cache")
    peft[kind](model, { tokens = 2 })
    check.fails(function() peft[kind](model) end, "has an adapter already")
    check.fails(function() model(tokens:reshape(1, -1), { cu_seqlens = ty.tensor({ 0, 18 }, { dtype = "i64" }) }) end,
      who .. ": cu_seqlens: expected no such option with virtual tokens")
    local folder = scratch.file("bad" .. kind)
    peft.save(model, folder)
    peft.remove(model)
    local config = ty.io.load_json(folder .. "/adapter_config.json")
    local function broken(text, state, changes)
      local given = {}
      for key, value in pairs(config) do given[key] = value end
      for key, value in pairs(changes or {}) do given[key] = value end
      ty.io.save_safetensors(folder .. "/adapter_model.safetensors", state)
      ty.io.save_json(folder .. "/adapter_config.json", given)
      check.fails(function() peft.load(model, folder) end, text)
      check.equal(rawget(model, "_adapter"), nil, "nothing is left of what failed")
    end
    local right = kind == "prompt" and 32 or config.token_dim * 2 * config.num_layers
    broken("prompt_embeddings: expected floats %[tokens, " .. right .. "%], got f32 %[2, 7%]",
      { prompt_embeddings = ty.zeros(2, 7) })
    broken("got i64", { prompt_embeddings = ty.zeros({ 2, right }, { dtype = "i64" }) })
    broken("other: expected prompt_embeddings alone", { other = ty.zeros(2, 7) })
    broken("num_virtual_tokens: expected 3, got 2", { prompt_embeddings = ty.zeros(3, right) })
    broken("num_layers: expected %d+, got 7", { prompt_embeddings = ty.zeros(2, right) }, { num_layers = 7 })
  end
  check.fails(function() peft.prompt(model, { ids = ty.tensor({ 96 }, { dtype = "i64" }) }) end,
    "peft.prompt: ids: expected i64 within the vocabulary of 96")
end)

scratch.clean()
check.finish()
