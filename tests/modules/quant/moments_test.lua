-- Second moments: sums against products, one pass over a model against a layer at a time, damping, whitening.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local moments = require "tycho.quant.moments"

local function small()
  ty.manual_seed(2)
  return llm.Llama { vocab_size = 50, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 32 }
end

local function batches(count)
  local list = {}
  for i = 1, count do list[i] = { tokens = ty.randint(0, 50, { 2, 9 }) } end
  return list
end

check.test("a sum of x' x, in f64 or a batch at a time in f32", function()
  ty.manual_seed(1)
  local x = ty.randn(2, 7, 5)
  local rows = x:reshape(-1, 5):to "f64"
  local want = ty.matmul(rows:transpose(0, 1), rows)
  local exact, plain = moments.new(5, "cpu", true), moments.new(5, "cpu")
  for i = 0, 1 do
    moments.add(exact, x:select(0, i))
    moments.add(plain, x:select(0, i))
  end
  check.equal(exact.count, 14)
  check.close((exact.sum - want):abs():max():item(), 0, 1e-13)
  check.close((plain.sum - want):abs():max():item(), 0, 1e-4)
end)

check.test("one pass gives what each layer sees; layers of one input share a sum", function()
  local model, data = small(), batches(3)
  local layers, seen = {}, {}
  for _, layer in ipairs(ty.nn.surgery.find("test", model, { head = false })) do layers[#layers + 1] = layer end
  local found = moments.collect("test", model, data, layers)
  for i, layer in ipairs(layers) do
    local remove = layer.module:register_forward_pre_hook(function(_, x)
      local rows = x:detach():reshape(-1, x.shape[3]):to "f64"
      seen[i] = (seen[i] or 0) + ty.matmul(rows:transpose(0, 1), rows)
    end)
    for _, batch in ipairs(data) do model(batch.tokens) end
    remove()
    check.equal(found[layer].count, 54, layer.name)
    check.close((found[layer].sum - seen[i]):abs():max():item(), 0, 1e-10, layer.name)
  end
  check.ok(found[layers[1]] == found[layers[2]] and found[layers[1]] ~= found[layers[4]])
  check.equal(model.training, true)
end)

check.test("damping, and an input that is always zero", function()
  local h = moments.damped(ty.tensor({ { 4, 1, 0 }, { 1, 2, 0 }, { 0, 0, 0 } }, { dtype = "f64" }), 0.5)
  check.close(h:tolist(), { { 5, 1, 0 }, { 1, 3, 0 }, { 0, 0, 3 } }, 1e-12)
end)

check.test("whitening: a root and its inverse, also of a moment without full rank", function()
  ty.manual_seed(3)
  local x = ty.randn(20, 6, { dtype = "f64" })
  local c = ty.matmul(x:transpose(0, 1), x)
  local root, inverse = moments.whiten(c)
  check.close((ty.matmul(root:transpose(0, 1), root) - c):abs():max():item(), 0, 1e-12)
  check.close((ty.matmul(root, inverse) - ty.eye(6, { dtype = "f64" })):abs():max():item(), 0, 1e-12)
  local thin = ty.randn(3, 6, { dtype = "f64" })
  local singular = ty.matmul(thin:transpose(0, 1), thin)
  root, inverse = moments.whiten(singular)
  check.close((ty.matmul(root:transpose(0, 1), root) - singular):abs():max():item(), 0, 1e-9)
  check.ok(inverse:isfinite():all():item())
end)

check.test("what is refused", function()
  local model = small()
  local layer = { name = "q", module = model.model.layers[1].self_attn.q_proj }
  check.fails(function() moments.batches("f", "text", moments.options) end, "f: data: expected a dataset of llm.data")
  check.fails(function() moments.check("f", { rows = 0, batch = 1 }) end, "f: rows: expected a positive integer, got 0")
  check.fails(function() moments.batches("f", { size = 0 }, { rows = 1, batch = 1 }) end, "f: data: there are no rows")
  check.fails(function() moments.collect("f", model, batches(1), { { name = "x", module = ty.nn.Linear(16, 2) } }) end,
    "f: no batch reaches x")
  model.model.embed_tokens.weight:detach():fill_(0 / 0)
  check.fails(function() moments.collect("f", model, batches(1), { layer }) end, "f: the inputs of q are not finite")
end)

check.finish()
