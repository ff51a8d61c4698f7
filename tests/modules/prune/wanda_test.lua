-- Wanda: the masks against the paper's rule on plain tables, models beside magnitude, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local solve = require("tycho.prune.wanda").solve

-- Of each row, or of each group of a row, the weights with the least |w| |x| become zero. Tables from 1.
local function plain(w, norms, group, gone)
  local result = {}
  for i, row in ipairs(w) do
    result[i] = { table.unpack(row) }
    for from = 1, #row, group do
      local list = {}
      for j = from, math.min(from + group - 1, #row) do list[#list + 1] = j end
      table.sort(list, function(a, b) return math.abs(row[a]) * norms[a] < math.abs(row[b]) * norms[b] end)
      for k = 1, gone do result[i][list[k]] = 0.0 end
    end
  end
  return result
end

check.test("what goes is what the rule says, row by row", function()
  ty.manual_seed(1)
  local w = ty.randn(6, 20, { dtype = "f64" })
  local x = ty.randn(50, 20, { dtype = "f64" }) * ty.linspace(0.1, 4, 20, { dtype = "f64" })
  local moment, norms = ty.matmul(x:transpose(0, 1), x), ty.norm(x, 2, 0):tolist()
  for _, case in ipairs { { { sparsity = 0.5 }, 20, 10 }, { { sparsity = 0.3 }, 20, 6 }, { { sparsity = 0 }, 20, 0 },
    { { pattern = "2:4" }, 4, 2 }, { { pattern = "1:5" }, 5, 4 } } do
    local value, keep = solve(w, moment, case[1])
    check.equal(value:tolist(), plain(w:tolist(), norms, case[2], case[3]))
    check.ok(value:ne(0):eq(keep):all():item())
  end
end)

local function small()
  ty.manual_seed(3)
  local model = llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32 }
  for name, p in model:named_parameters() do
    if p.ndim >= 2 then p:detach():normal_(0, 0.2) end
    -- A few channels of the stream are far larger than the rest, as they are in large models.
    if name:find "norm" then p:detach():narrow(0, 0, 3):fill_(8) end
  end
  return model
end

check.test("a model stays nearer to what it was than by magnitude, and has masks", function()
  local original, data = small(), {}
  for i = 1, 4 do data[i] = { tokens = ty.randint(0, 40, { 1, 30 }) } end
  local function distance(model)
    return ty.no_grad(function() return (model(data[1].tokens) - original(data[1].tokens)):square():mean():item() end)
  end
  for _, o in ipairs { { pattern = "2:4" }, { sparsity = 0.5 } } do
    local model = original:clone()
    local report = prune.wanda(model, data, o)
    check.equal(#report, 14)
    for _, layer in ipairs(report) do check.ok(layer.error > 0 and layer.error < 1, layer.name) end
    check.close(prune.sparsity(model), 0.5, 1e-9)
    local plainly = prune.magnitude(original:clone(), o)
    check.ok(distance(model) < distance(plainly), ("%g %g"):format(distance(model), distance(plainly)))
    check.fails(function() prune.wanda(model, data, o) end, "prune.wanda: the model has masks already")
    prune.release(model)
  end
end)

check.test("wrong arguments, the model as before", function()
  local model = small()
  local before = model.model.layers[1].mlp.up_proj.weight:tolist()
  check.fails(function() prune.wanda(model, {}, {}) end, "prune.wanda: expected sparsity or pattern, and not both")
  check.fails(function() prune.wanda(model, { { tokens = ty.zeros({ 1, 4 }, { dtype = "i64" }) } }, { sparsity = 1 })
    end, "sparsity must be a number within %[0, 1%)")
  check.fails(function() prune.wanda(model, { { tokens = ty.zeros({ 1, 4 }, { dtype = "i64" }) } },
    { pattern = "2:5" }) end, "2:5 needs a multiple of 5 inputs")
  check.fails(function() prune.wanda(model, 3, { sparsity = 0.5 }) end, "prune.wanda: data: expected a dataset")
  check.equal(model.model.layers[1].mlp.up_proj.weight:tolist(), before)
end)

check.finish()
