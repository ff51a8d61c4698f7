-- Multi-level training: pairs that are alike come back, functions are kept, matrices of the paper, FLOPs by hand.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local multilevel = llm.multilevel

local function llama(seed, changes)
  ty.manual_seed(seed)
  local config = { vocab_size = 19, hidden_size = 12, intermediate_size = 20, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, head_dim = 6, max_position_embeddings = 32,
    attention_bias = true, mlp_bias = true }
  for key, value in pairs(changes or {}) do config[key] = value end
  local model = llm.Llama(config)
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:normal_(0, 0.5) end
  end)
  return model
end

local function list_of(model)
  local list = {}
  for name, p in model:named_parameters() do list[name] = p:detach():reshape(-1):tolist() end
  return list
end

local tokens = ty.tensor { { 3, 1, 4, 1, 5, 9, 2, 6 }, { 18, 0, 7, 7, 11, 2, 3, 4 } }
local big = { hidden_size = 24, intermediate_size = 40, num_hidden_layers = 4, num_attention_heads = 8,
  num_key_value_heads = 4 }

check.test("a model whose neurons, heads and layers are alike in pairs comes back, bit for bit", function()
  local small = llama(1)
  local tied = multilevel.decoalesce(small, llama(2, big))
  local again = multilevel.coalesce(tied)
  check.equal(list_of(again), list_of(small), "the small model")
  check.equal(list_of(multilevel.decoalesce(again, tied)), list_of(tied), "the large model")
  for key, value in pairs(big) do check.equal(again.config[key], value // 2, key) end
  -- and one without such pairs does not
  local other = llama(3, big)
  local back = list_of(multilevel.decoalesce(multilevel.coalesce(other), other))
  check.ok(math.abs(back["lm_head.weight"][1] - list_of(other)["lm_head.weight"][1]) > 1e-3)
end)

check.test("twice the width is the same function, and so is half the width of pairs that are alike", function()
  local small = llama(1):to "f64"
  local wide = multilevel.decoalesce(small, llama(2, { hidden_size = 24, intermediate_size = 40,
    num_attention_heads = 8, num_key_value_heads = 4 }):to "f64")
  ty.no_grad(function()
    local expected = small(tokens)
    check.ok(expected:abs():max():item() > 0.1)
    check.close(wide(tokens):reshape(-1):tolist(), expected:reshape(-1):tolist(), 1e-10)
    local narrow = multilevel.coalesce(wide, { depth = false })
    check.close(narrow(tokens):reshape(-1):tolist(), expected:reshape(-1):tolist(), 1e-10)
  end)
end)

-- The matrix that averages units 2i and 2i + 1 of `size` numbers: [n / 2, n].
local function averaging(n, size)
  local rows = {}
  for i = 0, n // 2 - 1 do
    rows[i + 1] = {}
    local at = i // size * 2 * size + i % size
    for j = 0, n - 1 do rows[i + 1][j + 1] = (j == at or j == at + size) and 0.5 or 0 end
  end
  return ty.tensor(rows, { dtype = "f64" })
end

check.test("F_out W F_in of every weight, averaged over layers", function()
  local model = llama(3, big):to "f64"
  local small = multilevel.coalesce(model)
  local sizes = { hidden = averaging(24, 1), inner = averaging(40, 1), heads = averaging(48, 6),
    groups = averaging(24, 6) }
  local cases = { ["self_attn.q_proj"] = { "heads", "hidden" }, ["self_attn.k_proj"] = { "groups", "hidden" },
    ["self_attn.v_proj"] = { "groups", "hidden" }, ["self_attn.o_proj"] = { "hidden", "heads" },
    ["mlp.gate_proj"] = { "inner", "hidden" }, ["mlp.up_proj"] = { "inner", "hidden" },
    ["mlp.down_proj"] = { "hidden", "inner" } }
  local from, to = model:state_dict(), small:state_dict()
  for layer = 0, 1 do
    for name, case in pairs(cases) do
      local sum, bias
      for k = 0, 1 do
        local full = ("model.layers.%d.%s."):format(2 * layer + k, name)
        local part = sizes[case[1]]:matmul(from[full .. "weight"]):matmul(sizes[case[2]]:transpose() * 2)
        local part_bias = sizes[case[1]]:matmul(from[full .. "bias"])
        sum, bias = sum and sum + part or part, bias and bias + part_bias or part_bias
      end
      local full = ("model.layers.%d.%s."):format(layer, name)
      check.close(to[full .. "weight"]:reshape(-1):tolist(), (sum / 2):reshape(-1):tolist(), 1e-12, full)
      check.close(to[full .. "bias"]:reshape(-1):tolist(), (bias / 2):reshape(-1):tolist(), 1e-12, full)
    end
  end
  check.close(to["model.embed_tokens.weight"]:reshape(-1):tolist(),
    from["model.embed_tokens.weight"]:matmul(sizes.hidden:transpose()):reshape(-1):tolist(), 1e-12)
  check.close(to["model.norm.weight"]:tolist(), sizes.hidden:matmul(from["model.norm.weight"]):tolist(), 1e-12)
end)

check.test("copied neurons stay alike until the models are mixed", function()
  local small = llama(1)
  local model = llama(2, big)
  local copied = multilevel.decoalesce(small, model)
  local loss = ty.nn.cross_entropy(copied(tokens):reshape(16, 19), tokens:reshape(16))
  loss:backward()
  local gate = copied.model.layers[1].mlp.gate_proj.weight.grad
  check.close(gate:select(0, 0):tolist(), gate:select(0, 1):tolist(), 1e-5, "so are their gradients")
  local before, other = list_of(model), list_of(copied)
  multilevel.interpolate(model, copied, 0.25)
  for name, list in pairs(list_of(model)) do
    for i, x in ipairs(list) do
      local wanted = 0.75 * before[name][i] + 0.25 * other[name][i]
      if math.abs(x - wanted) > 1e-6 then check.ok(false, ("%s[%d] is %g, not %g"):format(name, i, x, wanted)) end
    end
  end
  local mixed = model.model.layers[1].mlp.gate_proj.weight
  check.ok((mixed:select(0, 0) - mixed:select(0, 1)):abs():max():item() > 0.1)
end)

check.test("stacking repeats the layers", function()
  local model = llama(1)
  local tall = multilevel.stack(model)
  check.equal(#tall.model.layers, 4)
  local from, to = list_of(model), list_of(tall)
  for layer = 0, 3 do
    check.equal(to[("model.layers.%d.mlp.up_proj.weight"):format(layer)],
      from[("model.layers.%d.mlp.up_proj.weight"):format(layer % 2)])
  end
  check.equal(to["lm_head.weight"], from["lm_head.weight"])
end)

check.test("FLOPs by hand", function()
  local model = llama(1)
  -- q, k, v, o: 12 x 24, 12 x 12 twice, 24 x 12; gate, up, down: 12 x 20; two layers; the head 12 x 19
  local weights = 2 * (12 * 24 + 2 * 12 * 12 + 24 * 12 + 3 * 12 * 20) + 12 * 19
  -- scores and their sum of values: 4 heads of 6 with 8 positions, twice, in two layers
  check.equal(multilevel.flops(model, 16, 8), 3 * 2 * 16 * (weights + 2 * 2 * 4 * 6 * 8))
end)

check.test("a V-cycle trains in turn", function()
  local model, seen = llama(2, big), {}
  local small = multilevel.vcycle(model, function(net, steps, stage)
    seen[#seen + 1] = ("%s %d %d"):format(stage, steps, net.config.hidden_size)
  end, { before = 3, small = 5, after = 7, alpha = 0 })
  check.equal(seen, { "before 3 24", "small 5 12", "after 7 24" })
  check.equal(small.config.num_hidden_layers, 2)
  check.equal(list_of(model), list_of(llama(2, big)), "alpha 0 leaves the model as it was")
end)

check.test("mistakes", function()
  check.fails(function() multilevel.coalesce(ty.nn.Linear(2, 2)) end,
    "multilevel.coalesce: model: expected a decoder with the parameter names of Llama, got a module Linear")
  check.fails(function() multilevel.coalesce(llama(1, { tie_word_embeddings = true })) end, "its head is tied")
  check.fails(function() multilevel.coalesce(llama(1, { num_hidden_layers = 3 })) end,
    "multilevel.coalesce: model: num_hidden_layers: expected an even number, got 3")
  check.fails(function() multilevel.decoalesce(llama(1), llama(2, { hidden_size = 36, num_attention_heads = 8,
    num_key_value_heads = 4, intermediate_size = 40 })) end, "small: hidden_size: expected half of 36, got 12")
  check.fails(function() multilevel.interpolate(llama(1), llama(2, big), 0.5) end, "multilevel.interpolate: other: ")
  check.fails(function() multilevel.interpolate(llama(1), llama(2), 2) end, "alpha: expected a number in [0, 1], got 2")
end)

check.finish()
