-- Shifts and additions: codes and powers, integers against floats, attention with codes against its definition, the
-- balance of experts, counts.
local here = arg and arg[0]:match ".*/" or "tests/modules/prune/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, prune = require "tycho.models", require "tycho.prune"

local shiftadd = prune.shiftadd

check.test("codes: the nearest power of two, both ways; the gradient passes straight through", function()
  local w = ty.tensor { 0, 1, -1, 0.75, 0.7, -0.3, 2 ^ -14, -2 ^ -20, 5 }
  check.equal(shiftadd.codes(w):tolist(), { 0, 15, -15, 15, 14, -13, 1, -1, 15 })
  check.equal(shiftadd.decode(shiftadd.codes(w)):tolist(), { 0.0, 1.0, -1.0, 1.0, 0.5, -0.25, 2 ^ -14, -2 ^ -14, 1.0 })
  local leaf = w:clone():requires_grad_()
  local y = shiftadd.power(leaf) * ty.arange(9):to "f32"
  y:sum():backward()
  check.equal(leaf.grad:tolist(), ty.arange(9):to("f32"):tolist())
  local all = ty.concat({ -ty.arange(1, 16), ty.arange(16) }, 0):to "i8"
  check.equal(shiftadd.codes(shiftadd.decode(all)):eq(all):all():item(), true)
end)

check.test("shifts of integers are the product with powers of two, bit for bit", function()
  ty.manual_seed(1)
  local x = ty.randint(-127, 128, { 9, 40 }):to "i8"
  local codes = ty.randint(-15, 16, { 13, 40 }):to "i8"
  local exact = ty.matmul(x:to "f64", shiftadd.decode(codes):to("f64"):transpose(0, 1)) * 2 ^ 14
  check.equal(ty.matmul_shift(x, codes):to("f64"):eq(exact):all():item(), true)
  local layer = ty.nn.Linear(40, 13)
  local model = ty.nn.Sequential(layer)
  local input = ty.randn(6, 40)
  shiftadd.shift(model)
  local want = ty.no_grad(model, input)
  shiftadd.deploy(model)
  local got = ty.no_grad(model, input)
  check.close((want - got):abs():max():item(), 0, 1e-5)
  -- By hand: rows in 127 steps of their largest, powers of two.
  local scale = input:abs():max(1, true) / 127
  local hand = (input / scale):round():matmul(shiftadd.decode(shiftadd.codes(layer.weight)):transpose(0, 1)) * scale
  check.close((hand + layer.bias - got):abs():max():item(), 0, 1e-5)
end)

check.test("attention with codes: by its definition, over all pairs; a mean of v with positive weights", function()
  ty.manual_seed(2)
  local q, k, v = ty.randn(2, 3, 5, 8), ty.randn(2, 3, 7, 8), ty.randn(2, 3, 7, 4)
  local got = shiftadd.binary_attention(q, k, v)
  local agree = q:ge(0):unsqueeze(3):eq(k:ge(0):unsqueeze(2)):to("f32"):sum(-1) -- places that agree, [2, 3, 5, 7]
  local weights = agree / agree:sum(-1, true)
  check.close((got - weights:matmul(v)):abs():max():item(), 0, 1e-5)
  check.close((shiftadd.binary_attention(q, k, ty.ones(2, 3, 7, 4)) - 1):abs():max():item(), 0, 1e-5)
  -- Integers: sums of v with signs are exact.
  local whole = ty.randint(-127, 128, { 7, 4 }):to "i8"
  local signs = (k:select(0, 0):select(0, 0):ge(0):to "i32" * 2 - 1):to "i8"
  local sums = ty.matmul_int8(signs:transpose(0, 1):contiguous(), whole)
  check.equal(sums:to("f32"):eq(signs:to("f32"):transpose(0, 1):matmul(whole:to "f32")):all():item(), true)
  local leaf = q:clone():requires_grad_()
  shiftadd.binary_attention(leaf, k, v):square():sum():backward()
  check.equal(leaf.grad:ne(0):to("i64"):sum():item(), q:abs():le(1):to("i64"):sum():item())
  check.fails(function() shiftadd.binary_attention(q:select(0, 0), k, v) end, "q: expected [n, heads, t, d]")
end)

check.test("balance: 0 when sums and counts are inverse to latency; more where they are not; its gradient", function()
  local p = ty.concat({ ty.full({ 30, 2 }, 0), ty.full({ 10, 2 }, 0) }, 0)
  ty.no_grad(function()
    p:select(1, 0):narrow(0, 0, 30):fill_(1)
    p:select(1, 1):narrow(0, 30, 10):fill_(1)
  end)
  check.close(shiftadd.balance_loss(p, ty.tensor { 1.0, 3.0 }):item(), 0, 1e-6)
  check.close(shiftadd.balance_loss(p, ty.tensor { 2.0, 6.0 }):item(), 0, 1e-6)
  -- Alpha 1/2 each: sums 15 and 5, mean 10, variance 25: 1/4, twice.
  check.close(shiftadd.balance_loss(p, ty.tensor { 1.0, 1.0 }):item(), 0.5, 1e-6)
  local logits = (ty.ones({ 8, 1 }) * ty.tensor { { 0, 0.1 } }):to("f64"):requires_grad_()
  shiftadd.balance_loss(logits:softmax(1), ty.tensor({ 1, 4 }, { dtype = "f64" })):backward()
  check.ok(logits.grad:select(1, 1):min():item() > 0, "the slower one gets fewer")
  check.fails(function() shiftadd.balance_loss(p, ty.ones(3)) end, "latencies: expected 2 of them")
end)

local function vit()
  return models.ViTForImageClassification { image_size = 9, patch_size = 3, num_channels = 1, hidden_size = 16,
    intermediate_size = 32, num_hidden_layers = 2, num_attention_heads = 2, num_labels = 10 }
end

check.test("a mixture: each token gets its expert times its probability; equal split; all stages train", function()
  ty.manual_seed(3)
  local model, images = vit(), ty.randn(4, 1, 9, 9)
  local plain = model:clone()
  shiftadd.mixture(model, { latencies = { 1, 2 } })
  local layer = model.vit.encoder.layer[1]
  ty.no_grad(function() layer.router.weight:copy_(ty.randn(2, 16)) end)
  ty.no_grad(model, images)
  local x = ty.no_grad(function() return model.vit.embeddings(images) end)
  local got = ty.no_grad(layer, x)
  local list = shiftadd.choices(model)
  check.equal({ #list, list[1].shape }, { 2, { 4, 10 } })
  local old = plain.vit.encoder.layer[1]
  local middle, y = nil, nil
  ty.no_grad(function()
    middle = x + old.attention(old.layernorm_before(x))
    y = old.layernorm_after(middle):reshape(40, 16)
    local p = layer.router(y):softmax(1)
    local products, shifts = old.output(old.intermediate(y)) * 2, layer.down(layer.up(y, nil, "gelu"))
    local which = p:argmax(1)
    check.equal(which:eq(list[1]:flatten()):all():item(), true)
    local picked = ty.where(which:eq(0):unsqueeze(1), products, shifts) * p:max(1, true)
    check.close((middle + picked:reshape(4, 10, 16) - got):abs():max():item(), 0, 1e-5)
  end)
  local share = list[1]:sum():item()
  check.ok(share > 0 and share < 40)
  check.ok(shiftadd.balance(model):item() > 0)
  local split = shiftadd.mixture(plain:clone(), { split = true })
  ty.no_grad(split, images)
  check.equal(shiftadd.choices(split)[1]:sum():item(), 20)

  local set = ty.data.TensorDataset { image = ty.randn(16, 1, 9, 9), label = ty.randint(0, 10, { 16 }) }
  local whole = vit()
  local before = shiftadd.count(whole)
  local function train(m)
    local losses = require("tycho.vision").distil(m, set, { steps = 3, batch_size = 16, quiet = true, warmup = 0,
      more = function(net)
        return net.vit.encoder.layer[1]._mixture and shiftadd.balance(net) * 0.01 or ty.zeros({})
      end })
    check.ok(losses[3] == losses[3])
  end
  shiftadd.attention(whole)
  train(whole)
  shiftadd.shift(whole, { targets = "attention" })
  local powers = whole.vit.encoder.layer[1].attention.attention.query
  check.equal(#ty.nn.surgery.find("test", whole, { targets = "attention" }), 8)
  train(whole)
  shiftadd.mixture(whole, { latencies = shiftadd.latencies(whole, 32) })
  train(whole)
  whole:eval()
  local floats = ty.no_grad(whole, images)
  local after = shiftadd.count(whole)
  shiftadd.deploy(whole)
  local integers = ty.no_grad(whole, images)
  -- A number that lies between two of 127 steps may be rounded the other way.
  check.ok((floats - integers):abs():mean():item() < 0.02 * floats:abs():mean():item())
  check.equal(powers._shift.codes.dtype, "i8")
  check.ok(after.multiplications < before.multiplications and after.shifts > 0 and before.shifts == 0)
end)

check.test("counts by hand", function()
  local model = vit()
  local t, patches, w, m, d = 10, 9, 16, 32, 8
  local outside = patches * 9 * w + w * 10
  check.equal(shiftadd.count(model).multiplications, outside + 2 * (4 * t * w * w + 2 * t * t * w + 2 * t * w * m))
  shiftadd.attention(model)
  shiftadd.shift(model, { targets = "attention" })
  local count = shiftadd.count(model)
  check.equal(count.shifts, 2 * 4 * t * w * w)
  check.equal(count.multiplications, outside + 2 * (4 * t * 2 * w + t * w + 9 * patches * w + 2 * t * w * m))
  check.equal(count.additions, outside + 2 * (4 * t * w * w + 2 * t * w * d + 3 * t * w + 9 * patches * w
    + 2 * t * w * m))
end)

check.test("what is refused", function()
  check.fails(function() shiftadd.mixture(vit(), { latencies = { 1, 0 } }) end, "latencies: expected two above 0")
  check.fails(function() shiftadd.shift(vit(), { targets = "nothing" }) end, "targets: no linear layer matches")
  check.fails(function() shiftadd.deploy(vit()) end, "prune.shiftadd.deploy: model: expected one of")
  check.fails(function() shiftadd.attention(ty.nn.Linear(2, 2)) end, "expected a ViTForImageClassification")
  check.fails(function() shiftadd.balance(vit()) end, "prune.shiftadd.balance: model: expected one with a mixture")
end)

check.finish()
