-- QLLM: splitting changes nothing, merging what is alike changes nothing, thresholds and distances by brute force, a
-- quantized layer by hand, a whole model, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local qllm = quant.qllm

local function moment(x) return ty.matmul(x:transpose(0, 1), x) end
local function largest(x) return ty.norm(x, math.huge, 0) end

check.test("rows are rounded from their least to their largest value", function()
  local y = qllm.fake(ty.tensor { { 0.0, 1, 2, 3 }, { -1, 0.4, 0.1, 2 }, { 0, 0, 0, 0 } }, 2)
  check.close(y:tolist(), { { 0.0, 1, 2, 3 }, { -1, 0, 0, 2 }, { 0, 0, 0, 0 } }, 1e-6)
  local x = ty.randn(3, 5):requires_grad_()
  local up = ty.randn(3, 5);
  (qllm.fake(x, 4) * up):sum():backward()
  check.equal(x.grad:tolist(), up:tolist(), "straight through")
end)

check.test("the least threshold that a number of channels allows", function()
  ty.manual_seed(1)
  for _ = 1, 20 do
    local list = (ty.rand(9) * 10):tolist()
    for most = 0, 12 do
      local theta = qllm.threshold(list, most)
      local function extra(t)
        local sum = 0
        for _, v in ipairs(list) do sum = sum + math.ceil(v / t) - 1 end
        return sum
      end
      check.ok(extra(theta) <= most and extra(theta * (1 - 1e-9)) > most, ("%d more"):format(most))
    end
  end
  check.equal(qllm.threshold({ 0.0, 0 }, 3), 1.0)
end)

check.test("distances are equation 5", function()
  ty.manual_seed(2)
  local x, w = ty.randn({ 7, 6 }, { dtype = "f64" }), ty.randn({ 5, 6 }, { dtype = "f64" })
  local from, to = ty.tensor({ 0, 2, 4 }, { dtype = "i64" }), ty.tensor({ 1, 3, 5 }, { dtype = "i64" })
  local got = qllm.distances(moment(x), w, from, to):tolist()
  for a, i in ipairs { 0, 2, 4 } do
    for b, j in ipairs { 1, 3, 5 } do
      local xi, xj, d = x:select(1, i):unsqueeze(1), x:select(1, j):unsqueeze(1), w:select(1, i) - w:select(1, j)
      check.close(got[a][b], (xi * d / 2 - xj * d / 2):square():sum():item(), 1e-10)
    end
  end
end)

check.test("splitting is exact", function()
  ty.manual_seed(3)
  local x, w = ty.randn({ 20, 8 }, { dtype = "f64" }), ty.randn({ 6, 8 }, { dtype = "f64" })
  x:select(1, 2):mul_(9)
  x:select(1, 5):mul_(30)
  local want = ty.linear(x, w)
  for most = 0, 14 do
    local r = qllm.reassemble(largest(x), moment(x), w, qllm.threshold(largest(x), most), false)
    local y = qllm.inputs(r, x)
    check.ok(r.extra <= most and y.shape[2] == 8 + r.extra, "width")
    check.ok(y:abs():max():item() <= r.theta * (1 + 1e-6), "nothing above the threshold")
    check.close(ty.linear(y, qllm.columns(r, w)):tolist(), want:tolist(), 1e-5)
  end
end)

check.test("merging what is alike is exact, and the width stays", function()
  ty.manual_seed(4)
  local x, w = ty.randn({ 20, 10 }, { dtype = "f64" }), ty.randn({ 6, 10 }, { dtype = "f64" })
  x:select(1, 0):mul_(50) -- split; the whole ones are 1 to 9, of which 1, 3, 5 ... may go to 2, 4, 6 ...
  x:select(1, 3):copy_(x:select(1, 6)) -- the same values
  w:select(1, 7):copy_(w:select(1, 2)) -- the same columns
  w:select(1, 9):copy_(w:select(1, 2)) -- and a third one to the same channel
  local want = ty.linear(x, w)
  local r = qllm.reassemble(largest(x), moment(x), w, largest(x):max():item() / 3.5)
  check.equal(r.extra, 3)
  check.equal(r.merged:tolist(), { 3, 7, 9 }, "those that are alike")
  local y = qllm.inputs(r, x)
  check.equal(y.shape, { 20, 10 })
  check.close(ty.linear(y, qllm.columns(r, w)):tolist(), want:tolist(), 1e-5)
  check.close(y:select(1, 0):tolist(), (x:select(1, 0) / 4):tolist(), 1e-6)
  check.fails(function() qllm.reassemble(largest(x), moment(x), w, 0.1) end, "theta: 0.1 splits channels")
  local s = qllm.smooth(largest(x), w, 0.5)
  check.close(ty.linear(qllm.inputs(s, x), qllm.columns(s, w)):tolist(), want:tolist(), 1e-4)
end)

local function small()
  ty.manual_seed(5)
  local model = llm.Llama { vocab_size = 60, hidden_size = 32, intermediate_size = 56, num_hidden_layers = 2,
    num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.2) end end
  -- Two channels far above the others, as an exact rescaling.
  local norm = model.model.layers[1].input_layernorm.weight:detach()
  for _, i in ipairs { 3, 20 } do norm:narrow(0, i, 1):mul_(40) end
  for _, name in ipairs { "q_proj", "k_proj", "v_proj" } do
    local w = model.model.layers[1].self_attn[name].weight:detach()
    for _, i in ipairs { 3, 20 } do w:narrow(1, i, 1):div_(40) end
  end
  return model
end

local batches = {}
ty.manual_seed(6)
for i = 1, 4 do
  local tokens = ty.randint(0, 60, { 4, 16 })
  batches[i] = { tokens = tokens, targets = tokens, count = 64 }
end

check.test("a layer of a quantized model, by hand", function()
  local model = small()
  local before = model.model.layers[1].self_attn.q_proj.weight:clone()
  local report = qllm.quantize(model, batches, { channels = "none", epochs = 0 })
  local layer = model.model.layers[1].self_attn.q_proj
  local w = qllm.weight(layer)
  -- Scales are kept in half precision.
  check.close(w:tolist(), qllm.fake(before, 4):tolist(), 3e-3)
  local x = ty.randn(3, 32)
  check.close(layer(x):tolist(), ty.linear(qllm.fake(x, 4), w):tolist(), 1e-5)
  check.equal(#report, 14)
  check.equal(report[1].bits, 8 * (16 + 3) / 32)
  check.equal(report.blocks[1].tuned, nil)
  check.close(report.blocks[1].packed, report.blocks[1].rounded, 0.02)
  check.ok(layer.weight == nil and layer.rounded == nil and layer.mapped == nil, "nothing else is kept")
  check.fails(function() qllm.quantize(model, batches, {}) end, "is quantized already")
  check.fails(function() qllm.weight(ty.nn.Linear(2, 2)) end, "expected a quantized layer")
end)

check.test("large channels are split, the width stays, and the block is nearer to what it was", function()
  local function run(options)
    local model = small()
    options.epochs, options.ratios = options.epochs or 0, { 0, 0.1, 0.25 }
    return qllm.quantize(model, batches, options), model
  end
  local plain = run { channels = "none" }
  local split = run { channels = "split" }
  local assembled, model = run { channels = "assembled" }
  check.ok(assembled.sites[1].extra > 0 and assembled.sites[1].kurtosis > 10)
  check.ok(split.sites[1].extra > 0)
  check.ok(split.blocks[1].rounded < plain.blocks[1].rounded / 2, "split")
  check.ok(assembled.blocks[1].rounded < plain.blocks[1].rounded * 0.75, "assembled")
  for _, row in ipairs(assembled) do check.equal(row.channels, row.inputs) end
  check.equal(split[1].channels, 32 + split.sites[1].extra)
  for _, site in ipairs(assembled.sites) do
    check.ok(site.extra == 0 or not site.name:find "o_proj", "the output of attention stays")
  end
  check.ok(model:loss(batches[1].tokens, batches[1].targets):isfinite():item())
  -- Low-rank weights: tuning is for what the block was trained on, and rounding them in costs some of it.
  for _, fused in ipairs { false, true } do
    local tuned = run { channels = "assembled", epochs = 8, lr = 2e-3, fused = fused }
    for i = 1, 2 do check.ok(tuned.blocks[i].tuned < tuned.blocks[i].rounded, "tuned") end
    if fused then check.close(tuned.blocks[1].packed, tuned.blocks[1].tuned, 0.02) end
  end
  local a, b = run { epochs = 2 }, run { epochs = 2 }
  check.equal(a.blocks[2].packed, b.blocks[2].packed, "by the seed alone")
end)

check.test("what is refused", function()
  local model = small()
  check.fails(function() qllm.fake(ty.ones(2, 2), 9) end, "quant.qllm.fake: bits: expected an integer in %[1, 8%]")
  check.fails(function() qllm.threshold({ math.huge }, 1) end, "largest: expected finite numbers")
  check.fails(function() qllm.quantize(model, batches, { bits = 5 }) end, "bits: expected an integer in %[1, 4%]")
  check.fails(function() qllm.quantize(model, batches, { ratios = { 0.5 } }) end, "ratios: expected numbers in")
  check.fails(function() qllm.quantize(model, batches, { channels = "some" }) end, 'channels: expected "assembled"')
  check.fails(function() qllm.distances(ty.ones(3, 3), ty.ones(2, 4), ty.ones(1):to "i64", ty.ones(1):to "i64") end,
    "expected %[outputs, channels%]")
end)

check.finish()
