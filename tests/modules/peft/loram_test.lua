-- LoRAM: nothing pruned is plain LoRA, what recovery puts where, the pruned model against one that is cut by hand.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local loram, surgery = peft.loram, ty.nn.surgery

local function model(kv_heads)
  ty.manual_seed(4)
  return llm.Llama { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = kv_heads or 2, max_position_embeddings = 32 }
end

local tokens = ty.tensor({ { 1, 5, 9, 30, 2, 8, 8, 3 } }, { dtype = "i64" })
local data = { { tokens = tokens:narrow(1, 0, 7), targets = tokens:narrow(1, 1, 7) } }
local function logits(m) return ty.no_grad(function() return m(tokens) end) end
local function same(a, b) return a:eq(b):all():item() end
local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

local function adapt(m, steps)
  ty.manual_seed(9)
  peft.lora(m, { rank = 2, alpha = 3, targets = "all-linear" })
  local optimizer = ty.optim.AdamW(peft.parameters(m), { lr = 1e-2, weight_decay = 0 })
  for _ = 1, steps or 4 do ty.scope(function() optimizer:step(m:loss(tokens)) end) end
  return m
end

check.test("with nothing pruned it is LoRA, bit for bit", function()
  local whole = model()
  local small, map = loram.prune(whole, { ratio = 0, data = data })
  check.ok(same(logits(small), logits(whole)))
  adapt(small)
  loram.recover(small, map, whole)
  check.ok(same(logits(whole), logits(adapt(model()))))
end)

check.test("the pruned model is smaller, and is the whole one without the units' contributions", function()
  for _, kv in ipairs { 2, 4 } do
    local whole = model(kv)
    local small, map = loram.prune(whole, { ratio = 0.5, data = data })
    check.equal(small:get "model.layers.0.mlp.gate_proj".weight.shape, { 12, 16 })
    check.equal(small:get "model.layers.0.self_attn.o_proj".weight.shape, { 16, 8 })
    check.equal(small:get "model.layers.1.self_attn.k_proj".weight.shape, { kv == 2 and 4 or 8, 16 })
    -- Zeros in the columns that go give the same results, at the whole size.
    local masked = whole:clone()
    ty.no_grad(function()
      for name, entry in pairs(map) do
        if entry.columns then
          local weight = masked:get(name).weight
          local kept = ty.zeros(entry.inputs):index_add(0, ty.tensor(entry.columns, { dtype = "i64" }),
            ty.ones(#entry.columns))
          weight:copy_(weight * kept:unsqueeze(0))
        end
      end
    end)
    check.ok(distance(logits(small), logits(masked)) < 1e-5, "kv heads " .. kv)
    check.ok(distance(logits(small), logits(whole)) > 1e-3)
    check.ok(small:count_parameters() < whole:count_parameters())
    check.ok(not whole.model.layers[1].mlp.gate_proj.weight.grad, "the whole model got no gradients")
  end
end)

check.test("what is recovered is the pruned update at kept places, zero elsewhere; restricting it is the inverse",
  function()
    local whole = model()
    local small, map = loram.prune(whole, { ratio = 0.5, data = data })
    local trained = adapt(small)
    loram.recover(small, map, whole)
    local compared, zeros = 0, 0
    for name, entry in pairs(map) do
      local function update(m)
        local layer = m:get(name)
        return layer.lora_B.weight:detach():matmul(layer.lora_A.weight:detach()) * layer._lora.scale
      end
      local big, little = update(whole), update(trained)
      local kept = {}
      for _, i in ipairs(entry.rows or entry.columns) do kept[i] = true end
      local dim, at = entry.rows and 0 or 1, 0
      for i = 0, (entry.rows and entry.outputs or entry.inputs) - 1 do
        local line = big:select(dim, i)
        if kept[i] then
          check.ok(same(line, little:select(dim, at)), name)
          at, compared = at + 1, compared + 1
        else
          check.equal(line:abs():max():item(), 0)
          zeros = zeros + 1
        end
      end
    end
    check.equal({ compared, zeros }, { 2 * (12 * 3 + 8 + 4 + 4 + 8), 2 * (12 * 3 + 8 + 4 + 4 + 8) })
    local again = loram.prune(model(), { ratio = 0.5, data = data })
    loram.restrict(whole, map, again)
    check.ok(same(logits(again), logits(small)))
    -- Merged into the whole weights, only kept places move.
    local before = model():get "model.layers.0.mlp.down_proj".weight
    local report = peft.merge(whole)
    check.ok(report.max_change > 0)
    local moved = whole:get "model.layers.0.mlp.down_proj".weight:ne(before):any(0):to("i64"):sum():item()
    check.equal(moved, 12)
  end)

check.test("units are chosen by what they matter", function()
  local whole = model()
  local mlp, attention = whole:get "model.layers.0.mlp", whole:get "model.layers.0.self_attn"
  ty.no_grad(function() -- neurons 3 and 5 and the second group of heads do nothing
    for _, i in ipairs { 3, 5 } do mlp.down_proj.weight:narrow(1, i, 1):fill_(0) end
    attention.o_proj.weight:narrow(1, 8, 8):fill_(0)
  end)
  -- By finite differences of the loss: a unit's importance is the sum of |weight x gradient|.
  local _, map = loram.prune(whole, { ratio = 0.25, data = data })
  local function has(list, value)
    for _, v in ipairs(list) do if v == value then return true end end
    return false
  end
  local kept = map["model.layers.0.mlp.gate_proj"].rows
  check.equal(#kept, 18)
  check.ok(not has(kept, 3) and not has(kept, 5))
  local _, half = loram.prune(whole, { ratio = 0.5, data = data })
  check.equal(half["model.layers.0.self_attn.v_proj"].rows, { 0, 1, 2, 3 })
  check.equal(half["model.layers.0.self_attn.q_proj"].rows, { 0, 1, 2, 3, 4, 5, 6, 7 })
  local _, rough = loram.prune(whole, { ratio = 0.5, method = "magnitude", multiple = 8, skip = { "layers.1" } })
  check.equal(#rough["model.layers.0.mlp.up_proj"].rows, 16)
  check.equal(#rough["model.layers.1.mlp.up_proj"].rows, 24)
  ty.manual_seed(1)
  local _, drawn = loram.prune(whole, { ratio = 0.5, method = "random" })
  check.equal(#drawn["model.layers.0.mlp.up_proj"].rows, 12)
end)

check.test("with weights of 4 bits while it is trained", function()
  ty.manual_seed(4)
  local whole = llm.Llama { vocab_size = 40, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 1,
    num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 32 }
  local small, map = loram.prune(whole, { ratio = 0.5, method = "magnitude", multiple = 64 })
  peft.qlora(small, { rank = 2, alpha = 2, quantize = "q8_0" })
  ty.no_grad(function()
    for _, p in ipairs(peft.parameters(small)) do p:normal_(0, 0.1) end
  end)
  loram.recover(small, map, whole)
  local up = whole:get "model.layers.0.mlp.up_proj"
  check.equal({ up.lora_B.weight.shape[1], up.weight.dtype }, { 128, "f32" })
  check.ok(surgery.rows(small:get "model.layers.0.mlp.up_proj").dtype ~= "f32")
end)

check.test("mistakes", function()
  local whole = model()
  check.fails(function() loram.prune(whole, {}) end, "data: expected at least one batch for the method taylor")
  check.fails(function() loram.prune(whole, { ratio = 1 }) end, "ratio: expected a number in [0, 1)")
  check.fails(function() loram.prune(whole, { method = "best" }) end, "method: expected taylor, magnitude or random")
  check.fails(function() loram.prune(ty.nn.Linear(2, 2), { method = "random" }) end, "expected blocks with gate_proj")
  local small, map = loram.prune(whole, { method = "magnitude" })
  check.fails(function() loram.recover(small, map, whole) end, "the model has no adapter")
  adapt(small, 1)
  check.fails(function() loram.recover(small, {}, whole) end, "the map gives [")
  check.fails(function() loram.recover(small, map, small) end, "has an adapter already")
  check.fails(function() loram.recover(small, nil, whole) end, "map: expected a table")
  check.fails(function() loram.prune(small, { method = "random" }) end, "expected one without an adapter")
end)

check.finish()
