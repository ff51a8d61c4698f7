-- MixLoRA: it begins as nothing; equal experts are one LoRA; all experts are the dense mixture; the grouped products,
-- the balance of the experts, switching off and taking away.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local mixlora = peft.mixlora

local function model()
  ty.manual_seed(4)
  return llm.Llama { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 32 }
end

local tokens = ty.tensor({ { 1, 5, 9, 30, 2, 8, 8, 3 } }, { dtype = "i64" })
local batch = { tokens = tokens:narrow(1, 0, 7), targets = tokens:narrow(1, 1, 7) }
local function logits(m) return ty.no_grad(function() return m(tokens) end) end
local function same(a, b) return a:eq(b):all():item() end
local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

-- Puts random numbers into all that is trained.
local function fill(m, size)
  ty.manual_seed(8)
  ty.no_grad(function()
    for _, p in ipairs(peft.parameters(m)) do p:normal_(0, size or 0.3) end
  end)
end

check.test("it begins as nothing, can be switched off and taken away", function()
  local m = model()
  local before = logits(m)
  mixlora.attach(m, { rank = 2, experts = 4 })
  check.ok(distance(logits(m), before) < 1e-5, "begins as nothing")
  fill(m)
  check.ok(distance(logits(m), before) > 1e-2)
  check.ok(same(peft.disable(m, logits, m), before))
  check.fails(function() peft.merge(m) end, "peft.merge: expected an adapter of low-rank matrices alone, got MixLoRA")
  check.fails(function() peft.save(m, os.tmpname()) end, "peft.save: expected an adapter of low-rank matrices alone")
  peft.remove(m)
  check.ok(same(logits(m), before))
  check.equal({ #m:parameters(), m:count_parameters() }, { #model():parameters(), model():count_parameters() })
end)

check.test("equal experts are one LoRA, whatever the router says", function()
  local m, other = model(), model()
  mixlora.attach(m, { rank = 2, alpha = 3, experts = 4 })
  fill(m)
  peft.lora(other, { rank = 2, alpha = 3, targets = "all-linear" })
  ty.no_grad(function()
    for l = 0, 1 do
      local mine, plain = m:get("model.layers." .. l .. ".mlp"), other:get("model.layers." .. l .. ".mlp")
      for _, name in ipairs { "gate", "up", "down" } do
        for _, side in ipairs { "A", "B" } do
          local stack = mine["mix_" .. name .. "_" .. side]
          for e = 1, 3 do stack:narrow(0, e, 1):copy_(stack:narrow(0, 0, 1)) end
          plain[name .. "_proj"]["lora_" .. side].weight:copy_(stack:select(0, 0))
        end
      end
      for _, name in ipairs { "q_proj", "k_proj", "v_proj", "o_proj" } do
        local path = ("model.layers.%d.self_attn.%s"):format(l, name)
        for _, side in ipairs { "lora_A", "lora_B" } do
          other:get(path)[side].weight:copy_(m:get(path)[side].weight)
        end
      end
    end
  end)
  check.ok(distance(logits(m), logits(other)) < 1e-4)
end)

-- What the paper says, an expert after the other, over all tokens; shares of those that were not chosen are 0.
local function dense(mlp, x, top_k)
  local s = mlp._mixlora
  local p = ty.linear(x, mlp.mix_router):softmax(-1)
  local rows = p:tolist()
  local sum = 0
  for e = 0, s.experts - 1 do
    local function lora(name, input)
      return ty.linear(ty.linear(input, mlp["mix_" .. name .. "_A"]:select(0, e)),
        mlp["mix_" .. name .. "_B"]:select(0, e)) * s.scale
    end
    local inner = (mlp.gate_proj(x) + lora("gate", x)):silu() * (mlp.up_proj(x) + lora("up", x))
    local y = mlp.down_proj(inner) + lora("down", inner)
    local shares = {}
    for t, row in ipairs(rows) do
      local sorted = table.move(row, 1, #row, 1, {})
      table.sort(sorted, function(a, b) return a > b end)
      local total = 0
      for k = 1, top_k do total = total + sorted[k] end
      shares[t] = row[e + 1] >= sorted[top_k] and row[e + 1] / total or 0
    end
    sum = sum + y * ty.tensor(shares):unsqueeze(1)
  end
  return sum
end

check.test("the network is the sum of the experts' by their shares: of two, and of all", function()
  for _, top_k in ipairs { 1, 2, 4 } do
    local m = model()
    mixlora.attach(m, { rank = 2, alpha = 5, experts = 4, top_k = top_k })
    fill(m)
    ty.manual_seed(2)
    local mlp, x = m:get "model.layers.0.mlp", ty.randn(9, 16)
    ty.no_grad(function()
      local got = mlp(x:unsqueeze(0)):squeeze(0)
      check.ok(distance(got, dense(mlp, x, top_k)) < 1e-4, "top_k " .. top_k)
    end)
  end
end)

check.test("grouped products equal a loop over the rows; gradients by finite differences", function()
  ty.manual_seed(3)
  local function random(...) return ty.randn({ ... }, { dtype = "f64" }):requires_grad_() end
  local x, a, b, counts = random(6, 4), random(3, 2, 4), random(3, 5, 2), { 2, 0, 4 }
  local y, row = mixlora.grouped(x, a, b, counts), 0
  for e, count in ipairs(counts) do
    for _ = 1, count do
      local want = b:select(0, e - 1):matmul(a:select(0, e - 1):matmul(x:select(0, row)))
      check.ok(distance(y:select(0, row), want) < 1e-12)
      row = row + 1
    end
  end
  local weight = ty.randn({ 6, 5 }, { dtype = "f64" })
  check.ok(ty.gradcheck(function(...)
    local inputs = { ... }
    return (mixlora.grouped(inputs[1], inputs[2], inputs[3], counts) * weight):sum()
  end, { x, a, b }))
end)

check.test("gradients reach the router and the experts that were chosen", function()
  local m = model()
  mixlora.attach(m, { rank = 2, experts = 8, top_k = 2 })
  fill(m)
  m:train()
  local optimizer = ty.optim.AdamW(peft.parameters(m), { lr = 1e-2, weight_decay = 0 })
  local losses = {}
  for i = 1, 30 do
    ty.scope(function()
      local loss = mixlora.loss(m, batch)
      losses[i] = loss:item()
      optimizer:step(loss)
    end)
  end
  check.ok(losses[30] < losses[1] - 0.1, ("%.3f to %.3f"):format(losses[1], losses[30]))
  local mlp = m:get "model.layers.1.mlp"
  mixlora.loss(m, batch, { weight = 0 }):backward()
  local counts = mixlora.load(m, function() m(batch.tokens) end)[2]
  for e, count in ipairs(counts) do
    local norm = mlp.mix_down_B.grad:select(0, e - 1):norm():item()
    check.equal(norm > 0, count > 0, "expert " .. e)
  end
  check.ok(mlp.mix_router.grad:norm():item() > 0)
end)

check.test("the balance is 1 at perfect balance, and more where it is worse", function()
  local even = ty.full({ 8, 4 }, 0.25)
  check.close(mixlora.balance(even, { 4, 4, 4, 4 }):item(), 1, 1e-6)
  check.close(mixlora.balance(even, { 16, 0, 0, 0 }):item(), 1, 1e-6) -- with even probabilities counts do not matter
  local sure = ty.zeros(8, 4)
  sure:narrow(1, 0, 1):fill_(1)
  check.close(mixlora.balance(sure, { 8, 0, 0, 0 }):item(), 4, 1e-6)
  local m = model()
  mixlora.attach(m, { rank = 2, experts = 4, router_std = 0 })
  m:train()
  local with = mixlora.loss(m, batch, { weight = 0.5 }):item()
  m:eval()
  check.close(with, mixlora.loss(m, batch):item() + 0.5, 1e-5)
  local load = mixlora.load(m, function() logits(m) end)
  check.equal(#load, 2)
  check.equal(load[1][1] + load[1][2] + load[1][3] + load[1][4], 16)
end)

check.test("mistakes", function()
  check.fails(function() mixlora.attach(model(), { experts = 2, top_k = 3 }) end, "top_k: expected at most experts, 2")
  check.fails(function() mixlora.attach(model(), { rank = 0 }) end, "rank: expected an integer >= 1, got 0")
  check.fails(function() mixlora.attach(ty.nn.Linear(2, 2), {}) end, "expected feed-forward networks with gate_proj")
  check.fails(function() mixlora.attach(model(), { blocks = "nowhere" }) end, "got none by the name nowhere")
  check.fails(function() mixlora.attach(model(), { attention = { targets = "all-linear" } }) end,
    "expected layers outside of the feed-forward networks")
  local m = mixlora.attach(model(), { experts = 2, rank = 1 })
  check.fails(function() mixlora.attach(m, {}) end, "the model has an adapter already")
  check.fails(function() mixlora.loss(model(), batch) end, "expected one of peft.mixlora.attach")
  check.fails(function() mixlora.loss(m, 3) end, "batch: expected a table")
  check.fails(function() mixlora.load(m, 3) end, "fn: expected a function")
  check.fails(function() mixlora.grouped(ty.ones(2, 3), ty.ones(1, 1, 3), ty.ones(1, 4, 1), { 3 }) end,
    "whose sum is the rows")
  check.fails(function() mixlora.balance(ty.ones(2, 3), { 1 }) end, "counts: expected one for each expert of [2, 3]")
end)

check.finish()
