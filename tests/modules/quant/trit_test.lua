-- Trit-planes: the fit against all choices, packing, layers, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local trit = quant.trit

local function value(scales, planes)
  local sum = scales[1] * planes[1]
  if planes[2] then sum = sum + scales[2] * planes[2] end
  return sum
end

check.test("the error never rises in any half of a round", function()
  ty.manual_seed(1)
  for _, count in ipairs { 1, 2 } do
    local w = ty.randn(40, 24, { dtype = "f64" })
    local scales, planes, rounds, errors = trit.fit(w, { planes = count, ridge = 0, tolerance = 0, trace = true })
    check.ok(rounds > 3 and #errors >= 2 * rounds - 1)
    for i = 2, #errors do check.ok(errors[i] <= errors[i - 1] * (1 + 1e-12), ("half-step %d"):format(i)) end
    check.ok(errors[#errors] < (count == 2 and 0.9 or 1) * errors[1], "it falls")
    check.close((w - value(scales, planes)):square():sum():item(), errors[#errors], 1e-9)
    for _, plane in ipairs(planes) do
      check.ok((plane * (plane:square() - 1)):eq(0):all():item(), "trits are -1, 0 and 1")
    end
  end
end)

check.test("scales are the least squares of the planes, planes the best of nine for the scales", function()
  ty.manual_seed(2)
  local n = 10
  local w = ty.randn(6, n, { dtype = "f64" })
  local scales, planes = trit.fit(w, { ridge = 0, rounds = 200, tolerance = 0 })
  local off = w - value(scales, planes)
  for i = 1, 2 do -- the gradient by each scale is 0
    check.close((off * planes[i]):sum(1):abs():max():item(), 0, 1e-10)
  end
  local x, a, b = w:tolist(), scales[1]:tolist(), scales[2]:tolist()
  local t1, t2 = planes[1]:tolist(), planes[2]:tolist()
  for r = 1, 6 do
    for i = 1, n do
      local best = math.huge
      for p = -1, 1 do
        for q = -1, 1 do best = math.min(best, (x[r][i] - a[r][1] * p - b[r][1] * q) ^ 2) end
      end
      check.close((x[r][i] - a[r][1] * t1[r][i] - b[r][1] * t2[r][i]) ^ 2, best, 1e-12)
    end
  end
end)

check.test("a start at exact planes stays exact", function()
  ty.manual_seed(3)
  local t1, t2 = ty.randint(-1, 2, { 5, 30 }):to "f64", ty.randint(-1, 2, { 5, 30 }):to "f64"
  local a, b = ty.rand(5, 1, { dtype = "f64" }) + 1, ty.rand(5, 1, { dtype = "f64" }) * 0.3 + 0.1
  local w = a * t1 + b * t2
  local scales, planes, rounds = trit.fit(w, { start = { t1, t2 }, ridge = 0 })
  check.ok(rounds <= 2)
  check.ok(planes[1]:eq(t1):all():item() and planes[2]:eq(t2):all():item())
  check.close(scales[1]:tolist(), a:tolist(), 1e-12)
  check.close(scales[2]:tolist(), b:tolist(), 1e-12)
end)

check.test("planes that depend on each other, and rows of zeros", function()
  local w = ty.tensor { { 1.0, -1, 0, 2 }, { 0, 0, 0, 0 }, { 3, 3, 3, 3 } }:to "f64"
  local same = w:sign()
  local scales, planes = trit.fit(w, { start = { same, same } })
  check.ok(value(scales, planes):isfinite():all():item())
  check.close(value(scales, planes):select(0, 1):abs():max():item(), 0, 1e-12)
  check.close(value(scales, planes):select(0, 2):tolist(), { 3, 3, 3, 3 }, 1e-6)
  -- The ridge halves what two equal planes share: its sum is that of one.
  local first = trit.fit(w, { start = { same, same }, rounds = 1 })
  check.close((first[1] + first[2]):select(0, 0):item(), 4 / 3, 1e-6)
end)

check.test("five trits to a byte: every byte, padded groups, and back", function()
  ty.manual_seed(4)
  for _, case in ipairs { { 3, 20, 10 }, { 4, 23, 8 }, { 2, 7, 16 }, { 5, 64, 64 }, { 64, 10, 5 }, { 70, 9, 7 } } do
    local rows, columns, group = table.unpack(case)
    local planes = { ty.randint(-1, 2, { rows, columns }), ty.randint(-1, 2, { rows, columns }) }
    local codes = trit.pack(planes, group)
    local groups = (columns + group - 1) // group
    check.equal(codes.shape, { groups, (rows + 63) // 64, (group + 4) // 5, 2, 64 })
    check.ok(codes:to("i64"):remainder(128):max():item() <= 121)
    local scales = ty.rand(groups, rows, 2)
    local got, want = trit.decode(codes, scales, columns, group):tolist(), {}
    local a, b, s = planes[1]:tolist(), planes[2]:tolist(), scales:tolist()
    for r = 1, rows do
      want[r] = {}
      for i = 1, columns do
        local g = (i - 1) // group + 1
        want[r][i] = s[g][r][1] * a[r][i] + s[g][r][2] * b[r][i]
      end
    end
    check.close(got, want, 1e-6)
  end
  local all, want = {}, {} -- each number of five digits, its sign apart
  for number = -121, 121 do
    local row, left = {}, number + 121
    for j = 1, 5 do row[j], left = left % 3 - 1, left // 3 end
    all[#all + 1], want[#want + 1] = row, math.abs(number) + (number < 0 and 128 or 0)
  end
  local codes = trit.pack({ ty.tensor(all) }, 5):flatten():to "i64"
  check.equal(codes:narrow(0, 0, 243):tolist(), want)
end)

check.test("the product is that of the decoded weight, bit for bit on integers", function()
  ty.manual_seed(6)
  for _, case in ipairs { { 40, 96, 32, 2 }, { 1100, 70, 64, 2 }, { 3, 33, 128, 1 }, { 200, 300, 150, 3 } } do
    local rows, columns, group, count = table.unpack(case)
    local planes = {}
    for i = 1, count do planes[i] = ty.randint(-1, 2, { rows, columns }) end
    local codes = trit.pack(planes, group)
    local scales = ty.randint(-3, 4, { codes.shape[1], rows, count }):to "f32" / 8
    local x = ty.randint(-100, 100, { 2, 3, columns }):to "f32"
    local y = ty.matmul_trit(x, codes, scales, group)
    check.ok(y:eq(ty.linear(x, trit.decode(codes, scales, columns, group))):all():item())
  end
end)

check.test("the product of any numbers: near that in f64, and of such as become no integers", function()
  ty.manual_seed(7)
  local rows, columns, group = 200, 640, 128
  local planes = { ty.randint(-1, 2, { rows, columns }), ty.randint(-1, 2, { rows, columns }) }
  local codes, scales = trit.pack(planes, group), ty.rand(5, rows, 2):to "f16"
  local w = trit.decode(codes, scales, columns, group):to "f64"
  local x = ty.randn(3, columns)
  local function off(y, want) return ((y:to "f64" - want):square():sum() / want:square():sum()):sqrt():item() end
  check.ok(off(ty.matmul_trit(x, codes, scales, group), ty.linear(x:to "f64", w)) < 1e-6)
  local one = x:clone() -- a column that is much larger than its group
  one:narrow(1, 70, 1):mul_(1e4)
  check.ok(off(ty.matmul_trit(one, codes, scales, group), ty.linear(one:to "f64", w)) < 1e-6)
  local whole = ty.randint(-100, 100, { 2, columns }):to "f32"
  local y = ty.matmul_trit(whole, codes, scales, group)
  for _, factor in ipairs { 2.0 ^ 105, 2.0 ^ -110 } do
    check.ok(off(ty.matmul_trit(whole * factor, codes, scales, group), y:to "f64" * factor) < 1e-6)
  end
  check.ok(ty.matmul_trit(whole * 0, codes, scales, group):eq(0):all():item())
  whole:narrow(0, 1, 1):narrow(1, 3, 1):fill_(0 / 0)
  local some = ty.matmul_trit(whole, codes, scales, group)
  check.ok(off(some:narrow(0, 0, 1), y:narrow(0, 0, 1):to "f64") < 1e-6)
  check.ok(some:narrow(0, 1, 1):isnan():any():item())
end)

local function small()
  ty.manual_seed(5)
  local model = llm.Llama { vocab_size = 60, hidden_size = 48, intermediate_size = 80, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 64 }
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.1) end end
  return model:eval()
end

check.test("layers of a model: bits as stored, less error with two planes, unpacked the same", function()
  local model = small()
  local tokens = ty.randint(0, 60, { 2, 20 })
  local dense = model(tokens)
  local two, one = model:clone(), model:clone()
  local report, single = trit.quantize(two, { group = 32 }), trit.quantize(one, { group = 32, planes = 1 })
  check.equal(#report, 14)
  for i, row in ipairs(report) do
    check.ok(row.error < 0.04 and row.error < 0.2 * single[i].error, ("%s: %g of %g"):format(row.name, row.error,
      single[i].error))
  end
  -- A row of 48: two groups, each of two planes of 7 bytes and two scales of 2; bytes for 64 rows where there are 48.
  check.close(report[1].bits, 8 * 2 * 2 * (7 * 64 / 48 + 2) / 48, 1e-12)
  check.ok(two.model.layers[1].mlp.up_proj.weight == nil and one:state_dict()["model.layers.0.mlp.up_proj.trits"])
  local size = quant.stored.model(two, report)
  check.equal(size.parameters, model:count_parameters())
  local logits = two(tokens)
  check.ok((logits - dense):square():sum():item() < (one(tokens) - dense):square():sum():item())
  check.fails(function() trit.quantize(two) end, "model.layers.0.self_attn.q_proj is in trits already")
  local copy = two:clone()
  check.close(copy(tokens):tolist(), logits:tolist(), 0)
  trit.unpack(copy)
  check.close(copy(tokens):tolist(), logits:tolist(), 1e-5)
  check.equal(copy.model.layers[1].mlp.up_proj.weight.shape, { 80, 48 })
  local x = ty.randn(3, 48)
  local layer, plain = two.model.layers[1].mlp.up_proj, copy.model.layers[1].mlp.up_proj
  local function grad(module)
    local leaf = x:clone():requires_grad_()
    module(leaf):square():sum():backward()
    return leaf.grad:tolist()
  end
  check.close(grad(layer), grad(plain), 1e-5)
end)

check.test("what is refused", function()
  local w = ty.randn(3, 8)
  check.fails(function() trit.fit(w, { planes = 3 }) end, "quant.trit.fit: planes: expected 1 or 2, got 3")
  check.fails(function() trit.fit(w, { start = { w } }) end, "start: expected 2 planes, got 1")
  check.fails(function() trit.fit(ty.randn(3)) end, "w: expected a float tensor [rows, n]")
  check.fails(function() trit.pack({}, 4) end, "planes: expected at least one")
  check.fails(function() trit.pack({ w, ty.randn(2, 8) }, 4) end, "expected tensors [rows, columns] of one size")
  local codes = trit.pack({ w:sign(), w:sign() }, 4)
  check.fails(function() trit.decode(codes, ty.ones(2, 3, 2), 12, 4) end,
    "codes: expected u8 [3, blocks, 1, planes, 64]")
  check.fails(function() trit.decode(codes, ty.ones(2, 3, 1), 8, 4) end,
    "scales: expected floats [2, rows of 1 blocks, 2]")
  check.fails(function() trit.quantize(small(), { group = 0 }) end,
    "quant.trit.quantize: group: expected an integer >= 1")
  check.fails(function() trit.quantize(ty.nn.Linear(3, 3)) end, "the model has no list of layers")
  check.fails(function() trit.unpack(small()) end, "expected one with layers in trits")
  local broken = small()
  broken.model.layers[1].mlp.up_proj.weight:detach()["1, 2"] = 0 / 0
  check.fails(function() trit.quantize(broken) end, "up_proj: a weight is not finite")
end)

check.finish()
