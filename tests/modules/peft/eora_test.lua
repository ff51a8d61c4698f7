-- EoRA: the factors against the optimum, adapters of models, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, quant, peft = require "tycho.llm", require "tycho.quant", require "tycho.peft"

local eora = peft.eora

check.test("the factors are the optimum of |(E - B A) X|", function()
  ty.manual_seed(1)
  local mix = ty.randn(12, 12, { dtype = "f64" })
  local x = ty.matmul(ty.randn(80, 12, { dtype = "f64" }), mix)
  local moment, e = ty.matmul(x:transpose(0, 1), x), ty.randn(9, 12, { dtype = "f64" })
  for _, rank in ipairs { 1, 4, 9 } do
    local b, a = eora.factors(e, moment, rank)
    check.equal({ b.shape, a.shape }, { { 9, rank }, { rank, 12 } })
    -- By any root l l' of the moment, here Cholesky's: the best product of rank r is that of e l, times l^-1.
    local l = ty.cholesky(moment)
    local u, s, v = ty.svd(ty.matmul(e, l))
    local best = ty.matmul(u:narrow(1, 0, rank) * s:narrow(0, 0, rank):unsqueeze(0), v:narrow(0, 0, rank))
    check.close(ty.matmul(b, a):tolist(), ty.matmul(best, l:inverse()):tolist(), 1e-8)
    -- Without a moment: plain truncation.
    local b2, a2 = eora.factors(e, nil, rank)
    local u2, s2, v2 = ty.svd(e)
    check.close(ty.matmul(b2, a2):tolist(),
      ty.matmul(u2:narrow(1, 0, rank) * s2:narrow(0, 0, rank):unsqueeze(0), v2:narrow(0, 0, rank)):tolist(), 1e-10)
  end
end)

check.test("they project the error on the directions that outputs go off in: no token's error grows", function()
  ty.manual_seed(5)
  -- A few inputs are a hundred times the others, in directions of their own.
  local x = ty.randn(200, 24, { dtype = "f64" })
  x:narrow(0, 0, 5):mul_(100)
  x:narrow(1, 0, 6):mul_(1e-3)
  local moment, e = ty.matmul(x:transpose(0, 1), x), ty.randn(16, 24, { dtype = "f64" })
  for _, rank in ipairs { 1, 6 } do
    local b, a = eora.factors(e, moment, rank)
    local _, u = ty.eigh(ty.matmul(ty.matmul(e, moment), e:transpose(0, 1)))
    u = u:narrow(1, 16 - rank, rank)
    check.close(ty.matmul(b, a):tolist(), ty.matmul(u, ty.matmul(u:transpose(0, 1), e)):tolist(), 1e-9)
    -- Inputs that were not calibrated with as well. As the adapter keeps them, in f32.
    local left = e - ty.matmul(b:to "f32", a:to "f32"):to "f64"
    for _, inputs in ipairs { x, ty.randn(100, 24, { dtype = "f64" }) } do
      local function of(w) return ty.matmul(inputs, w:transpose(0, 1)):square():sum(1) end
      check.ok(of(left):le(of(e) * (1 + 1e-5)):all():item())
    end
  end
end)

check.test("fewer rows than inputs: nothing is left that they see, and what they do not see stays small", function()
  ty.manual_seed(2)
  local x, e = ty.randn(5, 12, { dtype = "f64" }), ty.randn(9, 12, { dtype = "f64" })
  local b, a = eora.factors(e, ty.matmul(x:transpose(0, 1), x), 5)
  local left = ty.matmul(e - ty.matmul(b, a), x:transpose(0, 1))
  check.ok(left:abs():max():item() < 1e-6)
  check.ok(ty.matmul(b, a):abs():max():item() < 100)
  b, a = eora.factors(e, ty.zeros(12, 12, { dtype = "f64" }), 2)
  check.ok(ty.matmul(b, a):isfinite():all():item())
end)

local function small(name)
  ty.manual_seed(3)
  if name == "gpt2" then return llm.GPT2 { vocabulary = 40, context = 32, width = 32, layers = 2, heads = 4 } end
  return llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32 }
end

local function prepared(name)
  local original = small(name)
  for _, p in ipairs(original:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.2) end end
  local compressed = original:clone()
  quant.round(compressed, { bits = 2 })
  local data = {}
  for i = 1, 3 do data[i] = { tokens = ty.randint(0, 40, { 1, 30 }) } end
  return original, compressed, data
end

check.test("a model gets nearer to its original, by more than with plain truncation; its adapter is PEFT's", function()
  for _, name in ipairs { "llama", "gpt2" } do
    local original, compressed, data = prepared(name)
    local tokens = data[1].tokens
    local function distance(model) return (model(tokens) - original(tokens)):square():mean():item() end
    local results = { none = distance(compressed) }
    for _, method in ipairs { "eora", "svd" } do
      local model = compressed:clone()
      local report = eora.compensate(model, original, data, { rank = 6, method = method })
      check.equal(#report, name == "gpt2" and 8 or 14)
      for _, layer in ipairs(report) do check.ok(layer.after < layer.before, layer.name) end
      results[method] = distance(model)
      if method == "eora" then
        peft.save(model, scratch.file(name))
        local other = compressed:clone()
        peft.load(other, scratch.file(name))
        check.ok(distance(other) == results.eora or math.abs(distance(other) - results.eora) < 1e-9, "loaded again")
        peft.merge(other)
        peft.remove(other)
        check.close(distance(other), results.eora, 1e-5, "merged")
      end
    end
    check.ok(results.eora < results.svd and results.svd < results.none,
      ("%s: %g %g %g"):format(name, results.eora, results.svd, results.none))
    -- All ranks together are the error itself.
    local whole = compressed:clone()
    eora.compensate(whole, original, nil, { rank = 32, method = "svd" })
    check.ok(distance(whole) < 1e-8, "of full rank")
  end
end)

check.test("beside packed weights", function()
  ty.manual_seed(4)
  local original = llm.Llama { vocab_size = 40, hidden_size = 256, intermediate_size = 256, num_hidden_layers = 1,
    num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32 }
  for _, p in ipairs(original:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.2) end end
  local model = original:clone()
  quant.round(model, { format = "q2_k" })
  local data = { { tokens = ty.randint(0, 40, { 8, 30 }) } }
  local report = eora.compensate(model, original, data, { rank = 8 })
  check.equal(model.model.layers[1].mlp.up_proj.weight.dtype, "q2_k")
  for _, layer in ipairs(report) do check.ok(layer.after < layer.before, layer.name) end
end)

check.test("what is refused", function()
  local original, compressed, data = prepared "llama"
  local function fails(message, options, other, rows)
    check.fails(function() eora.compensate(compressed:clone(), other or original, rows or data, options) end, message)
  end
  fails("peft.eora: rank: expected a positive integer", { rank = 0 })
  fails("rank: 33 is more than model.layers.0.self_attn.q_proj has, 32", { rank = 33, skip = {} })
  fails("method: expected eora or svd, got lora", { method = "lora" })
  fails("original: model.layers.0.self_attn.q_proj is", {}, small "gpt2")
  fails("data: expected a dataset", {}, nil, 3)
  fails("are not finite", {}, nil, (function()
    compressed.model.embed_tokens.weight:detach()["7"]:fill_(1 / 0)
    return { { tokens = ty.tensor({ { 7, 7, 7 } }, { dtype = "i64" }) } }
  end)())
end)

scratch.clean()
check.finish()
