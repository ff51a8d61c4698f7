-- Weights without their zeros: products against masked dense ones, exactly; bytes; models; stored data that lies.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local sparse = require "tycho.prune.sparse"

-- Small integers, whose products and sums are exact in any order.
local function integers(...) return ty.randint(-8, 9, { ... }):to "f32" end

local function masked(rows, columns, share)
  return integers(rows, columns) * ty.rand(rows, columns):lt(share):to "f32"
end

check.test("products are those of the masked dense weight, exactly, in both forms", function()
  ty.manual_seed(1)
  for _, size in ipairs { { 1, 1 }, { 3, 8 }, { 5, 13 }, { 130, 64 }, { 129, 65 }, { 60, 700 } } do
    for _, share in ipairs { 0, 0.3, 1 } do
      local w = masked(size[1], size[2], share)
      for _, packed in ipairs { sparse.pack(w), sparse.csl(w) } do
        for _, n in ipairs { 1, 2, 3, 7, 8, 9, 64, 65 } do
          local x = integers(n, size[2])
          check.ok(sparse.product(x, packed):eq(ty.linear(x, w)):all():item(), ("%d x %d, %d rows"):format(size[1],
            size[2], n))
        end
      end
      local csl = sparse.csl(w)
      check.ok(ty.dense_csl(csl.words, csl.starts, size[1], size[2]):eq(w):all():item())
      check.equal(sparse.bytes(csl), 4 * w:ne(0):to("i64"):sum():item())
    end
  end
end)

check.test("bit for bit what the same kernel makes of a weight whose zeros are stored", function()
  ty.manual_seed(2)
  local w = (ty.randn(40, 333) * ty.rand(40, 333):lt(0.4):to "f32"):to "f16"
  local packed = sparse.pack(w)
  local bitmap = ty.full({ 40, 42 }, 255, "u8")
  bitmap:narrow(1, 41, 1):fill_(31)
  local starts = ty.arange(41) * 333
  for _, n in ipairs { 1, 3, 12 } do
    local x = ty.randn(n, 333)
    check.ok(sparse.product(x, packed):eq(ty.linear_bitmap(x, w:flatten(), bitmap, starts)):all():item(), n .. " rows")
  end
end)

check.test("gradients reach x", function()
  ty.manual_seed(3)
  local w = masked(9, 21, 0.5)
  for _, packed in ipairs { sparse.pack(w), sparse.csl(w) } do
    local x = integers(4, 21):requires_grad_()
    local g = integers(4, 9)
    sparse.product(x, packed):backward(g)
    check.ok(x.grad:eq(ty.matmul(g, w)):all():item())
  end
end)

check.test("stored data that does not fit together is one error", function()
  local w = masked(6, 70, 0.5)
  local p, c = sparse.pack(w), sparse.csl(w)
  local x = integers(1, 70)
  local function broken(packed, name, change)
    for _, n in ipairs { 1, 9, 70 } do
      local copy = {}
      for key, value in pairs(packed) do copy[key] = ty.is_tensor(value) and value:clone() or value end
      change(copy[name])
      check.fails(function() sparse.product(x:expand(n, 70):contiguous(), copy) end, "starts: expected those")
    end
  end
  broken(p, "starts", function(t) t:narrow(0, 2, 1):fill_(1000000) end)
  broken(p, "starts", function(t) t:narrow(0, 3, 1):fill_(-5) end)
  broken(p, "starts", function(t) t:narrow(0, 1, 1):add_(1) end)
  broken(p, "bitmap", function(t) t:narrow(0, 0, 1):narrow(1, 8, 1):fill_(255) end)
  broken(c, "starts", function(t) t:narrow(0, 1, 1):fill_(1 << 40) end)
  broken(c, "starts", function(t) t:narrow(0, 0, 1):fill_(-1) end)
  broken(c, "words", function(t) t:narrow(0, 0, 1):fill_(0x7fff0000) end)
  broken(c, "words", function(t) t:narrow(0, 0, 1):fill_(100 << 16) end)
end)

local function small()
  ty.manual_seed(6)
  return llm.Llama { vocab_size = 60, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, max_position_embeddings = 64 }:to("f16"):to("f32"):eval()
end

check.test("models: packed they compute the same, are smaller, and come back", function()
  local model = small()
  local tokens = ty.randint(0, 60, { 2, 11 })
  local function logits(m) return ty.no_grad(function() return m(tokens) end) end
  prune.release(prune.magnitude(model, { sparsity = 0.6 }))
  local before, weight = logits(model), model.model.layers[1].mlp.up_proj.weight:detach():clone()
  prune.save(model, scratch.file "packed")
  check.close((logits(prune.load(scratch.file "packed", { dtype = "f32" })) - before):abs():max():item(), 0, 1e-6)
  for _, form in ipairs { "bitmap", "csl" } do
    local packed = model:clone()
    local report = prune.compact(packed, { form = form })
    check.equal(#report, 14)
    for _, layer in ipairs(report) do check.ok(layer.bytes < layer.dense, layer.name) end
    check.close((logits(packed) - before):abs():max():item(), 0, 1e-4, form)
    check.equal(packed:generate(tokens, 4, { temperature = 0 }):tolist(),
      model:generate(tokens, 4, { temperature = 0 }):tolist())
    prune.expand(packed)
    check.ok(packed.model.layers[1].mlp.up_proj.weight:detach():eq(weight):all():item())
    check.equal((logits(packed) - before):abs():max():item(), 0)
  end
  check.equal(#prune.compact(small()), 0)
end)

check.test("what is refused", function()
  check.fails(function() prune.compact(small(), { form = "x" }) end, 'prune.compact: form: expected "bitmap" or "csl"')
  check.fails(function() prune.csl(ty.ones(2)) end, "prune.csl: weight: expected a matrix of floats")
  check.fails(function() prune.product(ty.ones(2), {}) end, "prune.product: packed: expected what prune.pack or")
  check.fails(function() prune.compact(3) end, "prune.compact: model: expected a module, got 3")
end)

scratch.clean()
check.finish()
