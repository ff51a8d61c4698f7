-- Calibration with two streams, what quantized weights take, and the common baselines.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local calibration = require "tycho.quant.calibration"

local function small()
  ty.manual_seed(1)
  local model = llm.Llama { vocab_size = 60, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 3,
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

local function equal(a, b) return a:eq(b):all():item() end

check.test("inputs are those of the changed prefix, targets those of the original model", function()
  local model = small()
  local original, data = model:clone(), batches(4, 24)
  local seen, off = 0, {}
  calibration.walk("test", model, data, { rows = 1, batch = 1, seed = 0, skip = {}, held = 1 }, function(step)
    seen = seen + 1
    check.equal({ #step.inputs, #step.targets, #step.originals, #step.held.inputs, #step.held.targets },
      { 3, 3, 3, 1, 1 })
    check.equal(#step.layers, 7)
    -- By hand: the stream behind the first i blocks of a model, all of whose blocks before are as they are now.
    local function stream(of, batch, i)
      local out
      local remove = of.model.layers[i]:register_forward_pre_hook(function(_, s, more) out = more and s + more or s end)
      of(batch.tokens, { cu_seqlens = batch.cu_seqlens, longest = batch.longest })
      remove()
      return out
    end
    for k = 1, 4 do
      local input = k < 4 and step.inputs[k] or step.held.inputs[1]
      local got = input[2] and input[1] + input[2] or input[1]
      check.ok(equal(got, stream(model, data[k], step.index)), "the changed stream")
      local target = k < 4 and step.targets[k] or step.held.targets[1]
      if step.index < 3 then
        check.ok(equal(target, stream(original, data[k], step.index + 1)), "the original stream")
      end
      if k < 4 then check.close(step.output(step.originals[k]):tolist(), step.targets[k]:tolist(), 0) end
    end
    off[step.index] = not equal(step.output(step.inputs[1]), step.targets[1])
    for _, layer in ipairs(step.layers) do layer.module.weight:detach():mul_(0.9) end
  end)
  check.equal(seen, 3)
  check.equal(off, { false, true, true })
end)

check.test("gradients are allowed in a step, and the rows of a dataset are cut as they are read", function()
  local model = small()
  local data = llm.data.Packed(llm.data.join { ty.randint(0, 60, { 200 }) }, { length = 20 })
  calibration.walk("test", model, data, { rows = 8, batch = 2, seed = 3, skip = {}, held = 3 }, function(step)
    check.equal({ #step.inputs, #step.held.inputs }, { 2, 2 })
    local weight = step.layers[1].module.weight
    weight:requires_grad_(true)
    step.output(step.inputs[1]):square():sum():backward()
    check.ok(weight.grad:abs():sum():item() > 0)
  end)
  check.fails(function()
    calibration.walk("test", model, data, { rows = 8, batch = 2, seed = 3, skip = {}, held = 8 }, print)
  end, "test: held: expected fewer than the 8 rows of the data, got 8")
  check.fails(function()
    calibration.walk("test", model, data, { rows = 8, batch = 2, seed = 3, skip = {}, held = -1 }, print)
  end, "test: held: expected an integer >= 0")
end)

check.test("bytes of grids and of models", function()
  local stored = quant.stored
  check.equal(stored.codes(9, 3), 4)
  check.equal(stored.groups(672, 64), 11)
  check.equal(stored.groups(672, 0), 1)
  -- A row of 672 at 3 bits: 252 bytes of codes, 11 scales of 2 bytes, 11 zeros of 3 bits in 5 bytes.
  check.equal(stored.grid(10, 672, { bits = 3, group = 64 }), 10 * (252 + 22 + 5))
  check.equal(stored.grid(10, 672, { bits = 3, group = 64, symmetric = true }), 10 * (252 + 22))
  check.equal(stored.grid(4, 30, { bits = 2, group = 0 }), 4 * (8 + 2 + 1))
  local model = small()
  local report = quant.round(model, { bits = 2, group = 32 })
  local size = stored.model(model, report)
  -- 3 blocks: four of 32 x 32, two of 48 x 32 and one of 32 x 48, whose rows have two groups.
  local weights = 3 * (4 * 32 * 32 + 3 * 32 * 48)
  local bytes = 3 * (4 * 32 * (8 + 2 + 1) + 2 * 48 * (8 + 2 + 1) + 32 * (12 + 4 + 1))
  local rest = 60 * 32 + 7 * 32
  check.close(size.bits, 8 * bytes / weights, 1e-12)
  check.equal({ size.bytes, size.parameters }, { bytes + 2 * rest, weights + rest })
  check.equal(size.parameters, model:count_parameters())
  check.close(size.whole, 8 * size.bytes / size.parameters, 1e-12)
  check.fails(function() stored.model(model, { { name = "no", parameters = 3, bits = 2 } }) end, "1 of its 1 layers")
  check.fails(function() stored.model(model, { 3 }) end, "expected a list of { name, parameters, bits }, got 3")
  check.fails(function() stored.codes(-1, 3) end, "quant.stored.codes: n: expected an integer >= 0")
end)

check.test("baselines: all methods and bits, the best settings by the measure", function()
  local model, data = small(), batches(3, 40)
  local tokens, tried = data[1].tokens, 0
  local logits = model(tokens)
  local function measure(m)
    tried = tried + 1
    return (m(tokens) - logits):square():mean():item()
  end
  local rows = quant.baselines.run(model, data, { bits = { 2, 4 }, group = 16, measure = measure })
  check.equal(tried, 12)
  local names = {}
  for i, row in ipairs(rows) do
    names[i] = row.name
    check.close(measure(row.model), row.found, 1e-12)
    local again = model:clone()
    if row.method == "round" then quant.round(again, { bits = row.bits, group = 16, mse = not row.how.mse })
    else quant.gptq.quantize(again, data, { bits = row.bits, group = 16, mse = not row.how.mse,
      act_order = row.how.act_order }) end
    check.ok(measure(again) >= row.found)
  end
  check.equal(names, { "round, 2 bits", "gptq, 2 bits", "round, 4 bits", "gptq, 4 bits" })
  check.ok(rows[2].found < rows[1].found and rows[3].found < rows[1].found)
  tried = 0
  local again = quant.baselines.run(model, data, { bits = { 2, 4 }, group = 16, measure = measure, settled = rows })
  check.equal(tried, 4)
  for i, row in ipairs(again) do
    check.equal({ row.name, row.how, row.found }, { names[i], rows[i].how, rows[i].found })
  end
  check.ok(equal(model(tokens), logits), "the model stays as it was")
  check.fails(function() quant.baselines.run(model, data, {}) end, "measure: expected a function")
  check.fails(function() quant.baselines.run(model, data, { measure = measure, methods = { "awq" } }) end,
    'methods: expected "round" and "gptq", got "awq"')
end)

check.finish()
