-- EfficientQAT: gradients of the fake quantization, both phases, packed layers, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local packing = require "tycho.quant.packing"

local qat = quant.efficient_qat

check.test("codes side by side: 1 to 4 bits, all lengths", function()
  ty.manual_seed(1)
  for bits = 1, 4 do
    for n = 1, 18 do
      local codes = ty.randint(0, 1 << bits, { 3, n })
      local packed = packing.pack(codes, bits)
      local low = bits == 3 and (2 * n + 7) // 8 + (n + 7) // 8 or (bits * n + 7) // 8
      check.equal(packed.shape, { 3, low })
      check.equal(packing.unpack(packed, bits, n):to("i64"):tolist(), codes:tolist())
    end
  end
  check.fails(function() packing.unpack(ty.zeros({ 2, 3 }, { dtype = "u8" }), 2, 20) end, "expected u8 [rows, 5]")
  check.fails(function() packing.pack(ty.zeros(2, 3), 5) end, "bits: expected an integer in [1, 4]")
end)

check.test("gradients: inside round(w / s) - w / s, where clipped code - z, and of zero points", function()
  local s, z, top = 0.5, 1, 3
  local w = ty.tensor { { -3.0, -0.6, 0.1, 0.7, 0.95, 4.0 } }:to "f64"
  local values = w:tolist()[1]
  local up = ty.tensor { { 1.0, 2, 3, 4, 5, 6 } }:to "f64"
  local function leaf(v) return ty.tensor { { v } }:to("f64"):requires_grad_() end
  local step, zero, weight = leaf(s), leaf(z), w:clone():requires_grad_()
  local value = qat.fake(weight, step, zero, 2);
  (value * up):sum():backward()
  local of_step, of_zero, of_weight, want = 0, 0, {}, {}
  for i, x in ipairs(values) do
    local rounded = math.floor(x / s + 0.5)
    local code = math.max(0, math.min(top, rounded + z))
    want[i] = s * (code - z)
    local inside = code == rounded + z
    of_step = of_step + i * (inside and rounded - x / s or code - z)
    of_zero = of_zero + i * (inside and 0 or -s)
    of_weight[i] = inside and i * 1.0 or 0.0
  end
  check.close(value:tolist()[1], want, 1e-12)
  check.close(step.grad:item(), of_step, 1e-12)
  check.close(zero.grad:item(), of_zero, 1e-12)
  check.close(weight.grad:tolist()[1], of_weight, 1e-12)
  -- Steps below their bound and zero points off the grid are brought back, and still get gradients.
  local small, off = leaf(1e-6), leaf(7.3)
  local y = qat.fake(w, small, off, 2)
  y:sum():backward()
  check.close(y:abs():max():item(), 3e-4, 1e-9)
  check.ok(small.grad:item() ~= 0 and off.grad:item() ~= 0)
end)

local function small()
  ty.manual_seed(2)
  local model = llm.Llama { vocab_size = 60, hidden_size = 32, intermediate_size = 56, num_hidden_layers = 2,
    num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.2) end end
  return model:eval()
end

local function batches(count, length)
  local list = {}
  for i = 1, count do
    list[i] = { tokens = ty.randint(0, 60, { 1, length }), longest = length,
      cu_seqlens = ty.tensor({ 0, length // 3, length }, { dtype = "i64" }) }
  end
  return list
end

check.test("no steps are rounding to nearest, and packed is fake quantization", function()
  local model = small()
  for _, bits in ipairs { 2, 3, 4 } do
    local rounded, packed, trained = model:clone(), model:clone(), model:clone()
    quant.round(rounded, { bits = bits, group = 24 })
    local report = qat.round(packed, { bits = bits, group = 24 })
    local none = qat.block_ap(trained, batches(2, 20), { bits = bits, group = 24, epochs = 0 })
    check.equal(#report, 14)
    check.close(report.bits, none.bits, 1e-12)
    -- A row of 56 in groups of 24: its codes, three zeros, three steps.
    check.close(report[7].bits, 8 * (56 * bits // 8 + (bits == 2 and 1 or 2) + 6) / 56, 1e-12)
    for i, layer in ipairs(quant.linears(rounded)) do
      local value = qat.weight(quant.linears(packed)[i].module)
      local step = quant.linears(packed)[i].module.steps
      -- Steps are stored in half precision, by which codes and values may move a little.
      local near = (value - layer.module.weight):abs():lt(step:max():item() * 0.01)
      check.ok(near:to("f32"):mean():item() > 0.98, layer.name)
      check.ok(value:eq(qat.weight(quant.linears(trained)[i].module)):all():item())
    end
    local w = ty.randn(5, 24)
    local layer = ty.nn.Linear(24, 5, { bias = false })
    layer.weight:detach():copy_(w)
    local scale, offset = quant.gptq.grid(w, { bits = bits, symmetric = false })
    local step = scale:to("f16"):to "f32"
    local fake = qat.fake(w, step, -offset / scale, bits)
    local one = llm.Llama { vocab_size = 9, hidden_size = 24, intermediate_size = 24, num_hidden_layers = 1,
      num_attention_heads = 1 }
    one.model.layers[1].mlp.up_proj.weight:detach():narrow(0, 0, 5):copy_(w)
    qat.round(one, { bits = bits, group = 24 })
    check.ok(qat.weight(one.model.layers[1].mlp.up_proj):narrow(0, 0, 5):eq(fake):all():item(), "to the bit")
  end
end)

check.test("Block-AP: every block nearer to the original, also on rows that it did not see", function()
  local model, data = small(), batches(8, 40)
  local rounded, trained, steps_only = model:clone(), model:clone(), model:clone()
  qat.round(rounded, { bits = 2, group = 16 })
  local o = { bits = 2, group = 16, epochs = 12, weight_lr = 2e-3, step_lr = 2e-3, held = 2 }
  local report = qat.block_ap(trained, data, o)
  for _, row in ipairs(report.blocks) do
    check.ok(row.trained < 0.7 * row.rounded and row.held_trained < 0.9 * row.held_rounded,
      ("block %d: %g of %g, %g of %g"):format(row.index, row.trained, row.rounded, row.held_trained, row.held_rounded))
  end
  o.weights = false
  local less = qat.block_ap(steps_only, data, o)
  check.ok(less.blocks[1].trained < less.blocks[1].rounded)
  check.ok(report.blocks[1].trained < less.blocks[1].trained)
  local tokens = data[1].tokens
  local function off(m) return (m(tokens) - model(tokens)):square():mean():item() end
  check.ok(off(trained) < 0.9 * off(rounded))
  for name, p in trained:named_parameters() do
    check.equal(p.requires_grad, name:find "%.steps$" == nil, name)
  end
  check.ok(trained.model.layers[1].mlp.up_proj.weight == nil)
  local size = quant.stored.model(trained, report)
  check.equal(size.parameters, model:count_parameters())
  local again = model:clone()
  o.weights = true
  qat.block_ap(again, data, o)
  check.close(again(tokens):tolist(), trained(tokens):tolist(), 0)
end)

check.test("E2E-QP: the gradient of a step is code - z, and no code changes", function()
  local model, data = small(), batches(2, 30)
  qat.round(model, { bits = 2, group = 16 })
  local layer = model.model.layers[2].mlp.down_proj
  local before = ty.io.to_bytes(layer.codes) .. ty.io.to_bytes(layer.zeros)
  local list = qat.steps(model)
  check.equal(#list, 14)
  local trainable = 0
  for _, p in ipairs(model:parameters()) do trainable = trainable + (p.requires_grad and p:numel() or 0) end
  local all = 0
  for _, p in ipairs(list) do all = all + p:numel() end
  check.equal(trainable, all)
  local g = ty.randn(32, 56);
  (qat.weight(layer) * g):sum():backward()
  local got, w = layer.steps.grad:tolist(), qat.weight(layer):detach()
  local at = layer.steps:detach():tolist()
  for r = 1, 32, 7 do
    for k = 1, 4 do -- (code - z) is the value over the step, which is what finite differences give
      local n = k < 4 and 16 or 8
      local part = (w:narrow(0, r - 1, 1):narrow(1, 16 * (k - 1), n) / at[r][k]
        * g:narrow(0, r - 1, 1):narrow(1, 16 * (k - 1), n)):sum():item()
      check.close(got[r][k], part, 1e-4)
    end
  end
  local function loss() return model:loss(data[1].tokens, data[2].tokens) end
  local so_far = layer.steps.grad["3, 1"]:item()
  loss():backward()
  local eps, slope = 1e-3, layer.steps.grad["3, 1"]:item() - so_far
  local function shifted(by)
    return ty.no_grad(function()
      layer.steps:detach()["3, 1"] = at[4][2] + by
      return loss():item()
    end)
  end
  check.close((shifted(eps) - shifted(-eps)) / (2 * eps), slope, 0.05 * math.abs(slope) + 1e-3)
  shifted(0)
  local opt, first = ty.optim.AdamW(list, { lr = 1e-3, weight_decay = 0 }), loss():item()
  for _ = 1, 20 do opt:step(loss()) end
  check.ok(loss():item() < first)
  qat.finish(model)
  check.ok(ty.io.to_bytes(layer.codes) .. ty.io.to_bytes(layer.zeros) == before)
  check.ok(layer.steps:eq(layer.steps:to("f16"):to "f32"):all():item() and not layer.steps.requires_grad)
  local tokens, logits = data[1].tokens, model(data[1].tokens)
  check.close(qat.unpack(model)(tokens):tolist(), logits:tolist(), 1e-5)
  check.equal(layer.weight.shape, { 32, 56 })
end)

check.test("GPTQ's codes in packed layers", function()
  local model, data = small(), batches(3, 40)
  local dense, packed = model:clone(), model:clone()
  quant.gptq.quantize(dense, data, { bits = 3, group = 16, act_order = true })
  local report = qat.gptq(packed, data, { bits = 3, group = 16 })
  check.equal(#report, 14)
  for i, layer in ipairs(quant.linears(dense)) do
    local value = qat.weight(quant.linears(packed)[i].module)
    check.ok((value - layer.module.weight):abs():max():item() < 2e-3, layer.name)
  end
end)

check.test("what is refused", function()
  local data = batches(2, 20)
  local function fails(options, message) check.fails(function() qat.block_ap(small(), data, options) end, message) end
  fails({ bits = 5 }, "quant.efficient_qat.block_ap: bits: expected 2 or 3 or 4, got 5")
  fails({ group = 0 }, "group: expected an integer >= 1")
  fails({ held = 2 }, "held: expected fewer than the 2 batches of the data, got 2")
  fails({ rate = 2 }, "no option 'rate'")
  local packed = small()
  qat.round(packed, {})
  check.fails(function() qat.round(packed, {}) end, "q_proj is packed already")
  check.fails(function() qat.steps(small()) end, "expected one with packed layers")
  check.fails(function() qat.weight(ty.nn.Linear(2, 2)) end, "module: expected a packed layer")
end)

check.finish()
