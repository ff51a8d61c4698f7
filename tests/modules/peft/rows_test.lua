-- Adapters by row: each row is what its adapter alone gives, in any order, with ranks and layers of their own.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local function llama(seed)
  ty.manual_seed(seed or 3)
  return llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
end
local function logits(model, tokens) return ty.no_grad(function() return model(tokens) end) end
local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end

ty.manual_seed(1)
local tokens = ty.randint(0, 40, { 6, 7 })
local plain = logits(llama(), tokens)

-- Adapters of several ranks, scales and layers, in files; what each gives alone.
local kinds = {
  a = { rank = 2, alpha = 4, targets = { "q_proj", "v_proj" } },
  b = { rank = 5, alpha = 5, targets = "all-linear", rank_pattern = { down_proj = 3 } },
  c = { rank = 3, alpha = 2, rslora = true, targets = { "down_proj" } },
  d = { rank = 2, alpha = 2, init = "pissa", targets = { "o_proj", "q_proj" } },
}
local alone = { [false] = plain }
for name, options in pairs(kinds) do
  local model = llama()
  peft.lora(model, options)
  ty.no_grad(function()
    for _, p in ipairs(peft.parameters(model)) do p:add_(ty.randn(p.shape) * 0.2) end
  end)
  peft.save(model, scratch.file(name))
  alone[name] = logits(model, tokens)
  check.ok(off(alone[name], plain) > 0.01, name)
end

local function set_of(model)
  local set = peft.rows(model)
  for _, name in ipairs { "a", "b", "c", "d" } do set:add(name, scratch.file(name)) end
  return set
end

check.test("each row is what its adapter alone gives, to 1e-5, rows without one to the bit", function()
  local model = llama()
  local set = set_of(model)
  check.equal(logits(model, tokens):tolist(), plain:tolist(), "none until set:use")
  for _, rows in ipairs { { "a", "b", "c", "d", "a", "b" }, { "d", "d", "d", "d", "d", "d" },
    { "c", false, "a", "a", "a", "b" }, { "a", "a", "a", "b", "b", "b" }, { false, false, false, false, false, false },
    { "b", "a", "d", "c", false, "b" } } do
    set:use(rows)
    local got = logits(model, tokens)
    for i, name in ipairs(rows) do
      local row, want = got:select(0, i - 1), alone[name]:select(0, i - 1)
      check.ok(off(row, want) < (name and 1e-5 or 1e-12), ("row %d, %s: %g"):format(i, tostring(name), off(row, want)))
    end
  end
  check.equal(logits(model, tokens):tolist(), logits(model, tokens):tolist(), "again")
  check.fails(function() model(tokens:narrow(0, 0, 2)) end,
    "peft.rows: expected a batch of 6 rows, as set:use says, got 2")
  set:use()
  check.equal(logits(model, tokens):tolist(), plain:tolist())
  check.ok(tostring(model):find("4 adapters by row", 1, true))
  set:remove()
  check.equal(logits(model, tokens):tolist(), plain:tolist())
  check.equal(getmetatable(model.model.layers[1].self_attn.q_proj), ty.nn.Linear)
end)

check.test("one token at a time with a cache; gradients reach the input", function()
  local model = llama()
  local set = set_of(model):use { "a", "b", "b", "c", false, "d" }
  local with, cache, parts = logits(model, tokens), model:cache(), {}
  for t = 0, 6 do
    parts[#parts + 1] = ty.no_grad(function() return model(tokens:narrow(1, t, 1), { cache = cache }) end)
  end
  check.ok(off(ty.concat(parts, 1), with) < 1e-5)
  local layer = model.model.layers[1].mlp.down_proj
  local x = ty.randn(6, 2, 48):requires_grad_()
  layer(x):square():sum():backward()
  set:use()
  for i, name in ipairs { "a", "b", "b", "c", false, "d" } do
    local single = llama()
    if name then peft.load(single, scratch.file(name)) end
    local one = x:detach():narrow(0, i - 1, 1):clone():requires_grad_()
    single.model.layers[1].mlp.down_proj(one):square():sum():backward()
    check.ok(off(x.grad:narrow(0, i - 1, 1), one.grad) < 1e-5, tostring(name))
  end
end)

check.test("an adapter that was just trained goes into the set; GPT-2's layers; half precision", function()
  local model = llama()
  peft.load(model, scratch.file "c")
  local set = peft.rows(model):add "c"
  check.equal(rawget(model, "_adapter"), nil)
  set:use { "c", false, "c", "c", false, "c" }
  check.ok(off(logits(model, tokens):select(0, 2), alone.c:select(0, 2)) < 1e-5)
  local gpt = llm.load(check.root .. "tests/fixtures/llm/gpt2", { dtype = "f32" })
  local text = ty.randint(0, 96, { 3, 5 })
  peft.lora(gpt, { rank = 3, targets = { "c_attn", "c_fc" } })
  ty.no_grad(function() for _, p in ipairs(peft.parameters(gpt)) do p:add_(ty.randn(p.shape) * 0.1) end end)
  local want = logits(gpt, text)
  local of_gpt = peft.rows(gpt):add("x"):use { "x", "x", false }
  check.ok(off(logits(gpt, text):narrow(0, 0, 2), want:narrow(0, 0, 2)) < 1e-5)
  of_gpt:remove()
  local half = llama():to "bf16"
  peft.rows(half, { dtype = "bf16" }):add("b", scratch.file "b"):use { "b", "b", "b", "b", "b", "b" }
  check.ok(off(logits(half, tokens):to "f32", alone.b) < 0.1)
end)

check.test("wrong arguments; what is no plain LoRA; the model as before", function()
  local model = llama()
  check.fails(function() peft.rows(3) end, "peft.rows: model: expected a module, got 3")
  check.fails(function() peft.rows(model, { dtype = "i8" }) end, "dtype must be f32")
  local set = peft.rows(model)
  check.fails(function() peft.rows(model) end, "peft.rows: model: expected one without a set")
  check.fails(function() set:add(3) end, "AdapterRows:add: name: expected a string, got 3")
  check.fails(function() set:add("x", scratch.file "nowhere") end, "peft.load: .*nowhere: is not there")
  check.fails(function() set:add "x" end, "the model has no adapter")
  set:add("a", scratch.file "a")
  check.fails(function() set:add("a", scratch.file "a") end, 'AdapterRows:add: name: expected a new one, got "a"')
  check.fails(function() set:use { "a", "z" } end,
    'rows: expected names of adapters %(a%) or false, got "z" as element 2')
  check.fails(function() set:use {} end, "rows: expected at least one row")
  check.fails(function() set:use "a" end, "AdapterRows:use: rows: expected a list or nil")
  local function refused(words, kind, options)
    peft[kind](model, options)
    check.fails(function() set:add "x" end, words)
    peft.remove(model)
  end
  refused("got loha", "loha", { targets = { "q_proj" } })
  refused("q_proj: expected plain LoRA on linear layers, got DoRA", "lora", { targets = { "q_proj" }, dora = true })
  refused("embed_tokens: expected plain LoRA on linear layers, got a layer", "lora", { targets = { "embed_tokens" } })
  refused("parameters of its own besides", "lora", { targets = { "q_proj" }, save = { "lm_head" } })
  check.equal(set.names, { "a" })
  set:remove()
  check.fails(function() set:use { "a" } end, "AdapterRows:use: expected a set that is on its model")
  check.fails(function() set:add("b", scratch.file "b") end, "expected a set that is on its model, got one that was")
  check.equal(logits(model, tokens):tolist(), plain:tolist())
end)

scratch.clean()
check.finish()
