-- MEND: the factors give the gradient of the weight; an untrained editor without normalisation is a step of SGD; the
-- objective's derivatives are those of finite differences; an edit taken back leaves the bytes of before.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local peft = require "tycho.peft"
local nn, mend = ty.nn, peft.mend

local tokens = ty.randint(0, 40, { 2, 7 })
local others = ty.randint(0, 40, { 3, 7 })

local function model(seed)
  ty.manual_seed(seed or 1)
  return llm.Llama { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 16 }
end

local function loss_of(m, ids)
  return function()
    return nn.cross_entropy(m(ids:narrow(1, 0, 6)):flatten(0, 1), ids:narrow(1, 1, 6):reshape(-1))
  end
end

local layers = "mlp"
local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

check.test("the product of the factors is the gradient, and no gradient is left behind", function()
  local m = model()
  local q, head = m:get "model.layers.0.mlp.up_proj", m:get "model.layers.1.mlp.down_proj"
  local factors, value = mend.factors({ q, head }, loss_of(m, tokens))
  check.equal(q.weight.grad, nil)
  local loss = loss_of(m, tokens)()
  check.close(value, loss:item(), 1e-6)
  loss:backward()
  for i, layer in ipairs { q, head } do
    local product = factors[i].deltas:transpose(0, 1):matmul(factors[i].inputs)
    check.ok(distance(product, layer.weight.grad) < 1e-6)
    check.equal(factors[i].inputs.shape[1], 12)
  end
  -- Only the rows that the loss depends on: of one position only what is before it.
  factors = mend.factors({ head }, function() return m(tokens)[":, 2"]:square():sum() end)
  check.equal(factors[1].deltas.shape[1], 2)
  -- A layer that is called twice has the rows of both calls.
  local twice = nn.Linear(3, 3)
  local x = ty.randn(4, 3)
  factors = mend.factors({ twice }, function() return twice(twice(x)):square():sum() end)
  twice(twice(x)):square():sum():backward()
  check.ok(distance(factors[1].deltas:transpose(0, 1):matmul(factors[1].inputs), twice.weight.grad) < 1e-4)
end)

check.test("an untrained editor without normalisation is a step of SGD on its layers", function()
  local m, twin = model(), model()
  local editor = mend.editor(m, { layers = layers, rate = 0.05, normalise = false, rank = 4 })
  editor:edit(loss_of(m, tokens))
  local list = {}
  for name, p in twin:named_parameters() do if name:find "mlp" then list[#list + 1] = p end end
  local sgd = ty.optim.SGD(list, { lr = 0.05 })
  sgd:step(loss_of(twin, tokens)())
  local theirs = twin:parameters()
  for i, p in ipairs(m:parameters()) do check.ok(distance(p, theirs[i]) < 1e-7) end
  check.ok(distance(m:get "model.layers.0.mlp.up_proj".weight, model():get "model.layers.0.mlp.up_proj".weight) > 1e-6)
end)

check.test("undo gives the bytes back, edit by edit", function()
  local m = model()
  local editor = mend.editor(m, { layers = layers, rate = 0.3 })
  editor.networks:train()
  editor:changes(loss_of(m, others)) -- something to normalise by
  local function bytes()
    local list = {}
    for i, p in ipairs(m:parameters()) do list[i] = p:detach():clone() end
    return list
  end
  local function same(list)
    for i, p in ipairs(m:parameters()) do if not p:detach():equal(list[i]) then return false end end
    return true
  end
  local first = bytes()
  local before = editor:edit(loss_of(m, tokens))
  local second = bytes()
  check.ok(not same(first))
  check.ok(before > 0 and editor.training)
  editor:edit(loss_of(m, others))
  check.ok(not same(second))
  check.equal(editor:undo(), 1)
  check.ok(same(second))
  check.equal(editor:undo(), 0)
  check.ok(same(first))
  check.fails(function() editor:undo() end, "there is no edit to take back")
end)

check.test("changes within `with` alone; the objective has no change for an editor that does nothing", function()
  local m = model()
  local editor = mend.editor(m, { layers = layers, rate = 0 })
  local function logits() return m(others) end
  local plain = ty.no_grad(logits)
  local _, parts = editor:objective { edit = loss_of(m, tokens), keep = logits }
  check.close(parts.change, 0, 1e-6)
  check.close(parts.edit, parts.check, 1e-6)
  local changes = editor:changes(loss_of(m, tokens))
  changes["model.layers.0.mlp.up_proj.weight"] = ty.ones(24, 16)
  check.ok(distance(ty.no_grad(editor.with, editor, changes, logits), plain) > 1e-3)
  check.ok(ty.no_grad(logits):equal(plain))
  check.fails(function() editor:with(changes, function() error "broken" end) end, "broken")
  check.ok(ty.no_grad(logits):equal(plain), "put back after an error")
end)

check.test("derivatives of the objective by finite differences", function()
  ty.manual_seed(3)
  local m = nn.with_defaults({ dtype = "f64" }, function()
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
  end)
  local x, y = ty.randn({ 6, 4 }, { dtype = "f64" }), ty.randint(0, 3, { 6 })
  local z = ty.randn({ 5, 4 }, { dtype = "f64" })
  local editor = nn.with_defaults({ dtype = "f64" }, mend.editor, m, { layers = { "0", "2" }, rank = 3, rate = 0.1 })
  editor:to "f64"
  local function said() return nn.cross_entropy(m(x), y) end
  for _ = 1, 2 do editor:changes(said) end
  editor:eval()
  ty.no_grad(function() -- not at the start, where half of the networks is 0
    for _, p in ipairs(editor:parameters()) do p:detach():add_(ty.randn(p.shape, { dtype = "f64" }) * 0.1) end
  end)
  local function loss()
    return (editor:objective { edit = said, check = function() return nn.cross_entropy(m(x * 0.9), y) end,
      keep = function() return m(z) end, share = 0.5 })
  end
  loss():backward()
  check.equal(m:parameters()[1].grad and m:parameters()[1].grad:abs():max():item() or 0, 0)
  local tried = 0
  for _, p in ipairs(editor:parameters()) do
    local flat, grad = p:detach():flatten(), p.grad:flatten():tolist()
    for i = 0, flat:numel() - 1, math.max(1, flat:numel() // 5) do
      local at, values = flat:narrow(0, i, 1), {}
      local value = at:item()
      for k, by in ipairs { 1e-6, -1e-6 } do
        at:fill_(value + by)
        values[k] = loss():item()
      end
      at:fill_(value)
      check.close(grad[i + 1], (values[1] - values[2]) / 2e-6, 1e-5)
      tried = tried + 1
    end
  end
  check.ok(tried > 40)
end)

check.test("normalised rows have mean 0 and variance 1; layers of one shape do not share statistics", function()
  local m = model()
  local editor = mend.editor(m, { layers = layers, rate = 1 })
  local count = 0
  for _ in editor.networks:named_children() do count = count + 1 end
  check.equal(count, 2)
  for _ = 1, 2 do editor:changes(loss_of(m, tokens)) end
  editor:eval()
  local factors = mend.factors({ m:get "model.layers.1.mlp.up_proj" }, loss_of(m, tokens))
  local network = editor.networks["24x16"]
  local which
  for _, layer in ipairs(editor._layers) do
    if layer.name == "model.layers.1.mlp.up_proj" then which = layer.which end
  end
  local x, d = network(factors[1].inputs, factors[1].deltas, which)
  for _, t in ipairs { x, d } do
    check.ok(t:mean(0):abs():max():item() < 1e-3)
    check.close(t:square():mean():item(), 23 / 24, 0.02) -- 24 rows were seen, each of 12 twice
  end
  check.ok(network.sum:select(0, 0):equal(network.sum:select(0, which)) == false)
  check.equal(network.seen:tolist()[1], 24.0)
  editor:save(scratch.file "editor.safetensors")
  local other = mend.editor(m, { layers = layers, rate = 0.5 })
  other:load(scratch.file "editor.safetensors")
  check.close(other.rates:tolist()[1], 1, 1e-9)
  check.equal(other.networks["24x16"].seen:tolist()[1], 24.0)
end)

check.test("it learns: edits that hold said otherwise, and leave the rest", function()
  ty.manual_seed(2)
  local m = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
  local data = ty.randn(64, 8)
  local editor = mend.editor(m, { layers = { "0", "2" }, rank = 16, rate = 1e-2 })
  local opt = ty.optim.Adam(editor:groups(1e-3), { lr = 3e-3 })
  local function example(i)
    local x, y = data:narrow(0, i, 1), ty.tensor { i % 4 }
    return function() return nn.cross_entropy(m(x), y) end,
      function() return nn.cross_entropy(m(x + ty.randn(1, 8) * 0.1), y) end
  end
  local first, last = 0, 0
  for step = 0, 299 do
    local edit, otherwise = example(step % 48)
    ty.scope(function()
      local loss, parts = editor:objective { edit = edit, check = otherwise, keep = function() return m(data) end }
      opt:step(loss)
      if step < 48 then first = first + parts.check / 48 elseif step >= 252 then last = last + parts.check / 48 end
    end)
  end
  check.ok(last < 0.65 * first, ("%g of %g"):format(last, first))
end)

check.test("mistakes", function()
  local m = model()
  check.fails(function() mend.editor(m, {}) end, "peft.mend.editor: layers: expected a pattern, a list of names")
  check.fails(function() mend.editor(m, { layers = "nowhere" }) end, "expected at least one linear layer, got none")
  check.fails(function() mend.factors({ nn.Tanh() }, function() end) end, "layers: expected linear layers, got ")
  local editor = mend.editor(m, { layers = layers })
  check.fails(function() editor:objective { edit = loss_of(m, tokens) } end,
    "MendEditor:objective: keep: expected a function")
  check.fails(function() editor:edit(function() return 3 end) end, "fn(): expected a tensor, got 3")
  check.fails(function() editor:edit(function() return m:get "model.embed_tokens"(tokens):sum() end) end,
    "the loss does not depend on number 1")
end)

scratch.clean()
check.finish()
