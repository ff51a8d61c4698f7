-- Adapters of other ways: nothing at the start, what the formulas say, merged and without, files; PiSSA's start.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local peft = require "tycho.peft"
local ways = require "tycho.peft.ways"

local nn = ty.nn

local function llama()
  ty.manual_seed(3)
  return llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
end

ty.manual_seed(1)
local tokens = ty.randint(0, 40, { 2, 9 })
local function logits(model) return ty.no_grad(function() return model(tokens) end) end
local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end
local function disturb(model)
  ty.no_grad(function()
    for _, p in ipairs(peft.parameters(model)) do p:add_(ty.randn(p.shape) * 0.2) end
  end)
end

local targets = { "q_proj", "v_proj", "down_proj" }
local kinds = {
  { "loha", { targets = targets, rank = 3, alpha = 6 } },
  { "lokr", { targets = targets, rank = 2, alpha = 2 } },
  { "lokr", { targets = targets, rank = 1, alpha = 2, factor = 4, both = true } },
  { "lokr", { targets = targets, rank = 32 } },
  { "ia3", { targets = { "k_proj", "v_proj", "down_proj" }, feedforward = { "down_proj" } } },
  { "lora", { targets = targets, rank = 3, alpha = 6, init = "pissa" } },
  { "lora", { targets = targets, rank = 2, alpha = 6, init = "pissa", rslora = true, rank_pattern = { v_proj = 4 } } },
}

for i, kind in ipairs(kinds) do
  check.test(("%s (%d): nothing at the start, trained, merged, off, in files"):format(kind[1], i), function()
    local model = llama()
    local before = logits(model)
    peft[kind[1]](model, kind[2])
    check.ok(off(logits(model), before) < 1e-5, off(logits(model), before))
    disturb(model)
    local with = logits(model)
    check.ok(off(with, before) > 0.01)
    check.equal(peft.disable(model, logits, model):tolist(), before:tolist())
    model:loss(tokens):backward()
    for _, p in ipairs(peft.parameters(model)) do check.ok(p.grad and p.grad:abs():max():item() > 0, "a gradient") end
    check.equal(model.model.layers[1].self_attn.q_proj.weight.grad, nil)

    local folder = scratch.file("way" .. i)
    peft.save(model, folder)
    local again = llama()
    peft.load(again, folder)
    check.ok(off(logits(again), with) < 1e-5, off(logits(again), with))

    local report = peft.merge(model)
    check.ok(off(logits(model), with) < 1e-5 and report.max_change > 0.01)
    peft.unmerge(model)
    check.equal(logits(model):tolist(), with:tolist())
    peft.merge(again)
    peft.remove(again)
    check.ok(off(logits(again), with) < 1e-5)
    peft.remove(model)
    check.equal(logits(model):tolist(), before:tolist())
  end)
end

local function layer(kind, options, inputs, outputs)
  ty.manual_seed(5)
  local model = nn.Sequential(nn.Linear(inputs, outputs))
  options.targets = { "0" }
  peft[kind](model, options)
  disturb(model)
  return model, model[1]
end

check.test("what is added is what the formulas say", function()
  local x = ty.randn(4, 12)
  local function added(model)
    return ty.no_grad(function() return model(x) - peft.disable(model, model.forward, model, x) end)
  end
  local model, m = layer("loha", { rank = 2, alpha = 3 }, 12, 10)
  local w = m.hada_w1_a:matmul(m.hada_w1_b) * m.hada_w2_a:matmul(m.hada_w2_b) * 1.5
  check.ok(off(added(model), x:matmul(w:transpose(0, 1))) < 1e-5)
  -- A Kronecker product, element by element: w[a * p + b, c * q + d] = w1[a, c] w2[b, d].
  model, m = layer("lokr", { rank = 100, alpha = 50 }, 12, 10)
  check.equal({ m.lokr_w1.shape, m.lokr_w2.shape }, { { 2, 3 }, { 5, 4 } })
  local w1, w2, want = m.lokr_w1:tolist(), m.lokr_w2:tolist(), {}
  for a = 0, 1 do
    for b = 0, 4 do
      local row = {}
      for c = 0, 2 do for d = 0, 3 do row[c * 4 + d + 1] = w1[a + 1][c + 1] * w2[b + 1][d + 1] * 0.5 end end
      want[a * 5 + b + 1] = row
    end
  end
  check.ok(off(added(model), x:matmul(ty.tensor(want):transpose(0, 1))) < 1e-5)
  model, m = layer("ia3", {}, 12, 10)
  local plain = peft.disable(model, model.forward, model, x)
  check.ok(off(model(x), plain * m.ia3_l:flatten()) < 1e-6)
  check.fails(function() peft.merge(model) end, "peft.merge: 0: cannot be merged: its factors are the bias's as well")
  model, m = layer("ia3", { feedforward = { "0" } }, 12, 10)
  check.ok(off(model(x), peft.disable(model, model.forward, model, x * m.ia3_l:flatten())) < 1e-6)
end)

check.test("sides of Kronecker factors", function()
  local function sides(n, factor) return { ways.divisors(n, factor) } end
  check.equal({ sides(128, -1), sides(250, -1), sides(360, -1), sides(512, -1), sides(1024, -1), sides(7, -1) },
    { { 8, 16 }, { 10, 25 }, { 18, 20 }, { 16, 32 }, { 32, 32 }, { 1, 7 } })
  check.equal({ sides(128, 4), sides(250, 4), sides(360, 4), sides(1024, 16) },
    { { 4, 32 }, { 2, 125 }, { 4, 90 }, { 16, 64 } })
end)

check.test("PiSSA begins with the largest singular values, and files have it as LoRA of twice the rank", function()
  ty.manual_seed(5)
  local model = nn.Sequential(nn.Linear(12, 10))
  local u, s, vh = ty.svd(model[1].weight:detach():to "f64")
  peft.lora(model, { targets = { "0" }, rank = 3, alpha = 6, init = "pissa" })
  local m = model[1]
  local product = (m.lora_B.weight:detach():matmul(m.lora_A.weight:detach()) * 2):to "f64"
  local nearest = (u:narrow(1, 0, 3) * s:narrow(0, 0, 3)):matmul(vh:narrow(0, 0, 3))
  check.ok(off(product, nearest) < 1e-6)
  local folder = scratch.file "pissa"
  peft.save(model, folder)
  local config = ty.io.load_json(folder .. "/adapter_config.json")
  check.equal({ config.r, config.lora_alpha, config.init_lora_weights }, { 6, 12, true })
  check.fails(function() peft.lora(nn.Sequential(nn.Linear(4, 8)), { targets = { "0" }, rank = 5, init = "pissa" }) end,
    "peft.lora: rank: '0' has 4 singular values, and pissa is to take 5")
  check.fails(function() peft.lora(nn.Sequential(nn.Linear(4, 8)), { targets = { "0" }, dora = true, init = "pissa" })
    end, "init: pissa does not go with dora")
  check.fails(function() peft.lora(nn.Sequential(nn.Linear(4, 8)), { targets = { "0" }, init = "olora" }) end,
    'peft.lora: init: expected "default" or "pissa", got "olora"')
end)

check.test("wrong arguments and files, the model as before", function()
  local model = llama()
  check.fails(function() peft.loha(model, { targets = { "embed_tokens" } }) end, "is an embedding, which loha does not")
  check.fails(function() peft.loha(model, { targets = targets, dora = true }) end, "peft.loha: .*dora")
  check.fails(function() peft.ia3(model, { targets = targets, rank = -1 }) end, "rank must be a positive integer")
  check.fails(function() peft.lokr(model, { targets = targets, factor = "x" }) end, "factor: expected an integer")
  local folder = scratch.file "wrong_way"
  peft.loha(model, { targets = targets, rank = 3 })
  peft.save(model, folder)
  peft.remove(model)
  local config = ty.io.load_json(folder .. "/adapter_config.json")
  config.r = 4
  ty.io.write_atomic(folder .. "/adapter_config.json", ty.io.json_encode(config))
  check.fails(function() peft.load(model, folder) end, "hada_w1_a: expected floats %[32, 4%], got f32 %[32, 3%]")
  config.peft_type = "LOKR"
  ty.io.write_atomic(folder .. "/adapter_config.json", ty.io.json_encode(config))
  check.fails(function() peft.load(model, folder) end, "lokr_w1 is not there")
  check.fails(function() peft.load(model, folder .. "/adapter_model.safetensors") end,
    "is loha, which takes adapter_config.json besides")
  check.equal(rawget(model, "_adapter"), nil)
end)

check.finish()
