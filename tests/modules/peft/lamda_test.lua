-- LaMDA: it begins as nothing, the sum that it stands for, what is frozen stays, merging and files, ranks by spectra.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local lamda, nn = peft.lamda, ty.nn

local function model(seed)
  ty.manual_seed(seed or 3)
  return llm.Llama { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 1, tie_word_embeddings = true, max_position_embeddings = 32 }
end

local tokens = ty.tensor({ { 1, 5, 9, 30, 2, 8, 8, 3 } }, { dtype = "i64" })
local function logits(m) return ty.no_grad(function() return m(tokens) end) end
local function same(a, b) return a:eq(b):all():item() end
local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

-- Trains for some steps, freezing B over `freeze` of them.
local function train(m, steps, freeze)
  local optimizer = ty.optim.AdamW(peft.parameters(m), { lr = 1e-2, weight_decay = 0 })
  if freeze then lamda.follow(m, optimizer, { steps = freeze }) end
  for _ = 1, steps do ty.scope(function() optimizer:step(m:loss(tokens)) end) end
  return optimizer
end

check.test("the first forward is the base's, bit for bit, and of the sum of the paper", function()
  local m = model()
  local before = logits(m)
  lamda.attach(m, { rank = 4 })
  check.ok(same(logits(m), before), "nothing is added at first")
  for _, layer in ipairs(nn.surgery.find("test", m, { targets = "proj" })) do
    local module = layer.module
    local u, s, v = ty.svd(module.weight:detach():to "f64")
    local start = (u:narrow(1, 0, 4) * s:narrow(0, 0, 4):unsqueeze(0)):matmul(v:narrow(0, 0, 4))
    local product = module.lora_B:detach():to("f64"):matmul(module.lora_S:detach():to "f64")
      :matmul(module.lora_A.weight:detach():to "f64")
    check.ok(distance(product, start) < 1e-6, layer.name .. ": B S A is the best approximation of rank 4")
  end
  -- After training: (W - start) x + B S A x.
  train(m, 5)
  local q = m:get "model.layers.0.self_attn.q_proj"
  local u, s, v = ty.svd(q.weight:detach():to "f64")
  local remainder = q.weight:detach():to "f64"
    - (u:narrow(1, 0, 4) * s:narrow(0, 0, 4):unsqueeze(0)):matmul(v:narrow(0, 0, 4))
  local x = ty.randn(3, 16)
  local b, middle, a = q.lora_B:detach():to "f64", q.lora_S:detach():to "f64", q.lora_A.weight:detach():to "f64"
  local want = x:to("f64"):matmul((remainder + b:matmul(middle):matmul(a)):transpose(0, 1))
  local got = ty.no_grad(function() return q(x) end)
  check.ok(distance(got, want) < 1e-5, "the layer is the paper's")
  check.ok(distance(got, ty.linear(x, q.weight:detach())) > 1e-2, "and training moved it")
end)

check.test("gradients of S and B by finite differences", function()
  ty.manual_seed(5)
  local layer = nn.with_defaults({ dtype = "f64" }, nn.Linear, 5, 6, { bias = false })
  local m = nn.Sequential(layer)
  lamda.attach(m, { rank = 3, dtype = "f64", targets = { "0" } })
  lamda.freeze(m, 0.4)
  check.equal({ layer.lora_B.shape[2], layer.lora_B_frozen.shape[2] }, { 2, 1 })
  local x = ty.randn({ 4, 5 }, { dtype = "f64" })
  local function loss() return m(x):square():sum() end
  loss():backward()
  for _, p in ipairs(peft.parameters(m)) do
    local flat, grad = p:detach():flatten(), p.grad:flatten():tolist()
    for i = 0, flat:numel() - 1 do
      local at, values = flat:narrow(0, i, 1), {}
      local value = at:item()
      for k, by in ipairs { 1e-5, -1e-5 } do
        at:fill_(value + by)
        values[k] = ty.no_grad(loss):item()
      end
      at:fill_(value)
      check.close(grad[i + 1], (values[1] - values[2]) / 2e-5, 1e-5)
    end
  end
end)

check.test("columns of B are frozen from the least on, stay where they are, and their state is released", function()
  local m = model()
  lamda.attach(m, { rank = 4 })
  local q = m:get "model.layers.1.self_attn.q_proj"
  local a = q.lora_A.weight:detach():clone()
  local optimizer = ty.optim.AdamW(peft.parameters(m), { lr = 1e-2, weight_decay = 0 })
  local function steps(count) for _ = 1, count do ty.scope(function() optimizer:step(m:loss(tokens)) end) end end
  steps(2)
  local whole, bytes = q.lora_B:detach():clone(), optimizer:state_bytes()
  check.equal(lamda.freeze(m, 0.5, optimizer), 14 * 2)
  check.ok(same(q.lora_B, whole:narrow(1, 0, 2)) and same(q.lora_B_frozen, whole:narrow(1, 2, 2)), "nothing moved")
  local outputs = 0
  for _, layer in ipairs(nn.surgery.find("test", m, { targets = "proj" })) do
    outputs = outputs + select(2, nn.surgery.sizes(layer.module))
  end
  check.equal(bytes - optimizer:state_bytes(), outputs * 2 * 2 * 4)
  steps(3)
  check.ok(same(q.lora_B_frozen, whole:narrow(1, 2, 2)), "what is frozen stays")
  check.ok(not same(q.lora_B, whole:narrow(1, 0, 2)), "the rest is trained on")
  check.equal(optimizer.state[q.lora_B].step, 5)
  local s = q.lora_S:detach():clone()
  check.equal(lamda.freeze(m, 1, optimizer), 0)
  local all = q.lora_B_frozen:detach():clone()
  steps(2)
  check.ok(rawget(q, "lora_B") == nil and same(q.lora_B_frozen, all), "all of B is frozen")
  check.ok(not same(q.lora_S, s) and same(q.lora_A.weight, a), "S goes on, A never moved")
  check.equal(optimizer:state_bytes(), 14 * 16 * 2 * 4)
  check.equal(#peft.parameters(m), 14)
end)

check.test("a step with nothing frozen is the step of the whole; freezing columns leaves the others' steps alone",
  function()
    local function after(freeze)
      local m = model()
      lamda.attach(m, { rank = 4 })
      -- The gradient of the first column does not know whether the last is trained in the same step.
      local optimizer = ty.optim.AdamW(peft.parameters(m), { lr = 1e-2, weight_decay = 0 })
      optimizer:step(m:loss(tokens))
      if freeze then lamda.freeze(m, freeze, optimizer) end
      optimizer:step(m:loss(tokens))
      return m:get "model.layers.0.mlp.up_proj".lora_B:detach():narrow(1, 0, 2)
    end
    check.ok(distance(after(nil), after(0.5)) < 1e-6)
    check.ok(same(after(nil), after(0)))
  end)

check.test("follow freezes linearly", function()
  local m = model()
  lamda.attach(m, { rank = 4, targets = { "q_proj" } })
  local optimizer = lamda.follow(m, ty.optim.AdamW(peft.parameters(m), { lr = 1e-3 }), { steps = 8 })
  local q, columns = m:get "model.layers.0.self_attn.q_proj", {}
  for i = 1, 9 do
    ty.scope(function() optimizer:step(m:loss(tokens)) end)
    columns[i] = rawget(q, "lora_B") and q.lora_B.shape[2] or 0
  end
  check.equal(columns, { 4, 3, 3, 2, 2, 1, 1, 0, 0 })
end)

check.test("groups: B has a rate of its own, which freezing keeps", function()
  local m = model()
  lamda.attach(m, { rank = 4 })
  local groups = lamda.groups(m, { lr = 1e-2, share = 0.25 })
  check.equal({ #groups[1].params, #groups[2].params, groups[1].lr, groups[2].lr }, { 14, 14, 1e-2, 2.5e-3 })
  local q = m:get "model.layers.0.self_attn.q_proj"
  local function distances(optimizer)
    local b, s = q.lora_B:detach():clone(), q.lora_S:detach():clone()
    ty.scope(function() optimizer:step(m:loss(tokens)) end)
    return distance(q.lora_B, b), distance(q.lora_S, s)
  end
  local optimizer = ty.optim.Adam(groups)
  local outer, square = distances(optimizer) -- the first step of Adam is the rate
  check.close({ outer, square }, { 2.5e-3, 1e-2 }, 1e-4)
  lamda.freeze(m, 0.5, optimizer)
  check.equal({ optimizer.groups[2].params[1].shape[2], #optimizer.groups[2].params }, { 2, 14 })
  lamda.freeze(m, 1, optimizer)
  check.equal({ #optimizer.groups[1].params, #optimizer.groups[2].params }, { 14, 0 })
  ty.scope(function() optimizer:step(m:loss(tokens)) end)
end)

check.test("merged equals unmerged, files are plain LoRA, removing gives the base back", function()
  local m = model()
  local before = logits(m)
  lamda.attach(m, { rank = 3, alpha = 6, ranks = "spectrum" })
  train(m, 6, 4)
  local with = logits(m)
  check.ok(distance(with, before) > 1e-2, "training changed something")
  peft.save(m, scratch.file "adapter")
  local other = peft.load(model(), scratch.file "adapter")
  check.ok(distance(logits(other), with) < 1e-5, "loaded as LoRA")
  check.ok(same(peft.disable(m, logits, m), before), "disabled")
  peft.merge(m)
  check.ok(distance(logits(m), with) < 1e-5, "merged")
  peft.unmerge(m)
  peft.remove(m)
  check.ok(same(logits(m), before), "removed")
  check.equal(#m:parameters(), #model():parameters())
end)

check.test("ranks by spectra", function()
  check.equal(lamda.allocate({ { 3, 3, 3, 3, 3, 3, 3, 3 }, { 2, 2, 2, 2, 2, 2, 2, 2 } }, 4), { 4, 4 })
  local flat, steep = {}, {}
  for i = 1, 64 do flat[i], steep[i] = 1, 2 ^ -i end
  local ranks = lamda.allocate({ flat, steep, flat }, 8)
  check.ok(ranks[1] > 8 and ranks[2] < 8 and ranks[3] == ranks[1], "flat spectra get more")
  local function squares(list) return list[1] ^ 2 + list[2] ^ 2 + list[3] ^ 2 end
  check.ok(squares(ranks) <= 3 * 64 and squares { ranks[1] + 1, ranks[2], ranks[3] + 1 } > 3 * 64, "the budget is used")
  check.equal(lamda.allocate({ { 1, 1 }, { 1, 1 } }, 9), { 2, 2 })
end)

check.test("mistakes", function()
  check.fails(function() lamda.attach(model(), { rank = 17 }) end, "rank: expected at most 16, which")
  check.fails(function() lamda.attach(model(), { dora = true }) end, "peft.lamda.attach: dora: expected false")
  check.fails(function() lamda.attach(model(), { ranks = "all" }) end, "ranks: expected uniform or spectrum, got all")
  check.fails(function() lamda.attach(model(), { targets = { "embed_tokens" } }) end,
    "embed_tokens: expected a linear layer, got a embedding")
  check.fails(function() lamda.attach(model(), { rnk = 2 }) end, "rnk")
  local plain = peft.lora(model(), { targets = { "q_proj" } })
  check.fails(function() lamda.groups(ty.nn.Linear(2, 2)) end, "lamda_test.lua:%d+: .*has no adapter")
  check.fails(function() lamda.freeze(plain, 1) end, "expected one of peft.lamda.attach, got another adapter")
  local m = lamda.attach(model(), { rank = 2 })
  check.fails(function() lamda.attach(m, {}) end, "the model has an adapter already")
  check.fails(function() lamda.groups(plain) end, "peft.lamda.groups: model: expected one of peft.lamda.attach")
  check.fails(function() lamda.groups(m, { share = -1 }) end, "share: expected a finite number >= 0, got -1")
  check.fails(function() lamda.freeze(m, 2) end, "share: expected a number in [0, 1], got 2")
  check.fails(function() lamda.follow(m, {}, { steps = 3 }) end, "optimizer: expected one of ty.optim")
  local optimizer = ty.optim.AdamW(peft.parameters(m), {})
  check.fails(function() lamda.follow(m, optimizer, {}) end, "expected one of the options steps and schedule, got none")
  check.fails(function() lamda.allocate({ {} }, 3) end, "spectra: expected falling values from above 0")
  check.fails(function() optimizer:exchange(ty.ones(2), nil) end, "parameter: expected one that the optimizer trains")
  check.fails(function() optimizer:exchange(peft.parameters(m)[1], ty.ones(2)) end, "change: expected a function")
end)

scratch.clean()
check.finish()
