-- Ways of compressing side by side: figures against their definitions, bytes, the front, ways that fail.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local function small()
  ty.manual_seed(3)
  local model = llm.Llama { vocab_size = 24, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.3) end end
  return model
end
local tokens = ty.randint(0, 24, { 5, 12 })
local quickly = { tokens = tokens, batch = 2, prompt = 6, decode = 2, rounds = 1 }

local ways = {
  { name = "nothing", apply = function() end },
  { name = "q8_0", apply = function(copy) return quant.quantize(copy, { dtype = "q8_0" }) end },
  { name = "grid", apply = function(copy) return quant.round(copy, { bits = 3, group = 16 }) end },
  { name = "impossible", apply = function(copy) return quant.round(copy, { format = "q4_k" }) end },
}

check.test("perplexity, divergence and agreement are what they are called", function()
  local model, kept = small(), {}
  local seen = quant.compare(model, { ways[1], ways[2], { name = "grid", apply = function(copy)
    kept.grid = copy
    return ways[3].apply(copy)
  end } }, quickly)
  local p, q = model(tokens):log_softmax(-1):tolist(), kept.grid(tokens):log_softmax(-1):tolist()
  local ids, nats, divergence, same, count = tokens:tolist(), 0, 0, 0, 0
  for i = 1, 5 do
    for t = 1, 11 do
      local best_p, best_q = 1, 1
      nats, count = nats - q[i][t][ids[i][t + 1] + 1], count + 1
      for k = 1, 24 do
        divergence = divergence + math.exp(p[i][t][k]) * (p[i][t][k] - q[i][t][k])
        if p[i][t][k] > p[i][t][best_p] then best_p = k end
        if q[i][t][k] > q[i][t][best_q] then best_q = k end
      end
      same = same + (best_p == best_q and 1 or 0)
    end
  end
  local row = seen:row "grid"
  check.close({ row.perplexity, row.divergence, row.agreement },
    { math.exp(nats / count), divergence / count, same / count }, 1e-4)
  for _, name in ipairs { "original", "nothing" } do
    check.close({ seen:row(name).divergence, seen:row(name).agreement }, { 0, 1 }, 1e-6)
  end
  check.ok(seen:row "q8_0".divergence < 0.1 * row.divergence)
  for _, one in ipairs(seen.list) do
    check.ok(one.prompt > 0 and one.decode > 0 and one.faster > 0 and one.peak > 0, one.name)
  end
end)

check.test("bytes are those of a file; ways that cannot be are left out and said", function()
  local model, lines = small(), {}
  local seen = quant.compare(model, ways, { tokens = tokens, prompt = 6, decode = 1, rounds = 1,
    say = function(line) lines[#lines + 1] = line end })
  check.equal(#seen.list, 4)
  check.equal(#lines, 5)
  check.equal(seen.left[1].name, "impossible")
  check.ok(seen.left[1].problem:find "which does not divide the 32 inputs")
  local weights, all = 0, 0
  for name, p in model:named_parameters() do
    all = all + p:numel()
    if name:find "proj" then weights = weights + p:numel() end
  end
  check.equal(seen:row "original".bytes, 2 * all)
  check.equal(seen:row "q8_0".bytes, 2 * (all - weights) + weights * 34 // 32)
  -- Three bits a code; for each 16 a scale of 16 bits and a zero of 3; rows of codes and of zeros in whole bytes.
  check.ok(math.abs(seen:row "grid".bytes - (2 * (all - weights) + weights * (3 + 19 / 16) / 8)) < 2 * 32 * 14)
  check.ok(tostring(seen):find "impossible left out" and tostring(seen):find "nothing smaller is nearer")
end)

check.test("the front: what nothing smaller is nearer than", function()
  local seen = quant.compare(small(), {}, quickly)
  seen.list = { { name = "a", bytes = 10, divergence = 0.0 }, { name = "b", bytes = 5, divergence = 0.3 },
    { name = "c", bytes = 5, divergence = 0.2 }, { name = "d", bytes = 7, divergence = 0.25 },
    { name = "e", bytes = 2, divergence = 0.9 }, { name = "f", bytes = 12, divergence = 0.0 } }
  local names = {}
  for i, row in ipairs(seen:front()) do names[i] = row.name end
  check.equal(names, { "e", "c", "a" })
end)

check.test("wrong arguments", function()
  local model = small()
  check.fails(function() quant.compare(3, {}, quickly) end, "quant.compare: model: expected a module, got 3")
  check.fails(function() quant.compare(model, {}, {}) end, "quant.compare: tokens: expected i64 %[n, t%]")
  check.fails(function() quant.compare(model, { { name = "x" } }, quickly) end,
    "quant.compare: ways%[1%].apply: expected a function, got nil")
  check.fails(function() quant.compare(model, {}, { tokens = tokens, rounds = 0 }) end, "rounds: expected an integer")
end)

check.finish()
