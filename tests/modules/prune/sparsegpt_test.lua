-- SparseGPT: the weights against the algorithm of the paper without its shortcuts, models, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local second_order = dofile(check.root .. "tests/modules/second_order.lua")
local ty = require "tycho"
local llm, prune = require "tycho.llm", require "tycho.prune"
local solve = require("tycho.prune.sparsegpt").solve

local function moment_of(rows, columns) return (select(2, second_order.inputs(rows, columns, "f64"))) end

-- Algorithm 1 as it stands: after each column the inverse of what is left of the Hessian is had by elimination.
-- A weight of a block, or of a group, stays or goes by w^2 over the entry that its column has in the inverse when its
-- turn comes. Tables from 1.
local function plain(w, moment, o)
  local rows, columns = #w, #w[1]
  local inverse = second_order.inverse(moment, o.damp)
  local left, pivots = {}, {}
  for r = 1, rows do left[r] = { table.unpack(w[r]) } end
  -- The pivots do not depend on the weights: they are known beforehand.
  local rest = {}
  for i = 1, columns do rest[i] = { table.unpack(inverse[i]) } end
  for i = 1, columns do
    pivots[i] = rest[i][i]
    second_order.eliminate(rest, i)
  end
  local gone = {}
  local function choose(list, count) -- the `count` with the least scores of a list of { row, column }
    table.sort(list, function(a, b)
      return left[a[1]][a[2]] ^ 2 / pivots[a[2]] < left[b[1]][b[2]] ^ 2 / pivots[b[2]]
    end)
    for k = 1, count do gone[list[k][1] * 1000 + list[k][2]] = true end
  end
  for i = 1, columns do
    if o.sparsity and (i - 1) % o.block == 0 then
      local list = {}
      for r = 1, rows do
        for j = i, math.min(i + o.block - 1, columns) do list[#list + 1] = { r, j } end
      end
      choose(list, math.floor(o.sparsity * #list + 0.5))
    elseif o.pattern and (i - 1) % o.group == 0 then
      for r = 1, rows do
        local list = {}
        for j = i, i + o.group - 1 do list[#list + 1] = { r, j } end
        choose(list, o.group - o.kept)
      end
    end
    for r = 1, rows do
      if gone[r * 1000 + i] then
        local e = left[r][i] / inverse[i][i]
        for j = i + 1, columns do left[r][j] = left[r][j] - e * inverse[i][j] end
        left[r][i] = 0
      end
    end
    second_order.eliminate(inverse, i)
  end
  return left
end

check.test("the weights are those of the paper's algorithm, by pattern and by share", function()
  ty.manual_seed(1)
  local w, moment = ty.randn(5, 24, { dtype = "f64" }), moment_of(60, 24)
  for _, o in ipairs {
    { pattern = "2:4", kept = 2, group = 4, damp = 0.01, block = 128 },
    { pattern = "1:3", kept = 1, group = 3, damp = 0.1, block = 7 },
    { sparsity = 0.5, damp = 0.01, block = 128 }, { sparsity = 0.7, damp = 0.01, block = 10 },
  } do
    local value, keep = solve(w, moment, o)
    check.close(value:tolist(), plain(w:tolist(), moment:tolist(), o), 1e-8)
    check.ok(value:ne(0):eq(keep):all():item(), "what is kept is not zero")
  end
end)

check.test("inputs that are never seen do not matter, and those that are give less error than by magnitude", function()
  ty.manual_seed(2)
  local w, moment = ty.randn(16, 32, { dtype = "f64" }), moment_of(200, 32)
  local function off(value)
    local e = w - value
    return (ty.matmul(e, moment) * e):sum():item()
  end
  local mask = ty.zeros(16 * 8, 4, { dtype = "f64" }):scatter(1, select(2, w:reshape(-1, 4):abs():topk(2)), 1)
  local value = solve(w, moment, { pattern = "2:4", damp = 0.01, block = 128 })
  check.ok(off(value) < 0.7 * off(w * mask:reshape(16, 32)), off(value) / off(w * mask:reshape(16, 32)))
  moment:narrow(0, 3, 1):fill_(0)
  moment:narrow(1, 3, 1):fill_(0)
  value = solve(w, moment, { pattern = "2:4", damp = 0.01, block = 128 })
  check.ok(value:isfinite():all():item() and off(value) < off(w * mask:reshape(16, 32)))
end)

local function small(name)
  ty.manual_seed(3)
  local model
  if name == "gpt2" then model = llm.GPT2 { vocabulary = 40, context = 32, width = 32, layers = 2, heads = 4 }
  else
    model = llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
      num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32 }
  end
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.2) end end
  return model
end

local function batches()
  local data = {}
  for i = 1, 6 do data[i] = { tokens = ty.randint(0, 40, { 1, 30 }) } end
  return data
end

check.test("a model stays nearer to what it was than by magnitude, and has masks", function()
  for _, name in ipairs { "llama", "gpt2" } do
    local original, data = small(name), batches()
    local function distance(model)
      return ty.no_grad(function() return (model(data[1].tokens) - original(data[1].tokens)):square():mean():item() end)
    end
    for _, o in ipairs { { pattern = "2:4" }, { sparsity = 0.6, block = 16 } } do
      local model = original:clone()
      local report = prune.sparsegpt(model, data, o)
      check.equal(#report, name == "gpt2" and 8 or 14)
      for _, layer in ipairs(report) do check.ok(layer.error > 0 and layer.error < 1, layer.name) end
      check.close(prune.sparsity(model), o.sparsity or 0.5, 2e-3)
      local plainly = prune.magnitude(original:clone(), { pattern = o.pattern, sparsity = o.sparsity })
      check.ok(distance(model) < distance(plainly), ("%s: %g %g"):format(name, distance(model), distance(plainly)))
      local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
      local zeros = prune.sparsity(model)
      opt:step(model:loss(data[1].tokens))
      check.equal(prune.sparsity(model), zeros, "after a step")
    end
  end
end)

check.test("what is refused", function()
  local function fails(message, options, data, model)
    check.fails(function() prune.sparsegpt(model or small "llama", data or batches(), options) end, message)
  end
  fails("expected sparsity or pattern", {})
  fails("expected sparsity or pattern", { sparsity = 0.5, pattern = "2:4" })
  fails("pattern must be kept:group", { pattern = "4:2" })
  fails("2:5 needs a multiple of 5 inputs, got a weight of 32", { pattern = "2:5" })
  fails("sparsity must be a number within", { sparsity = 1 })
  fails("damp: expected a share of the mean", { sparsity = 0.5, damp = -1 })
  fails("block: expected a positive integer", { sparsity = 0.5, block = 0 })
  fails("data: expected a dataset", { sparsity = 0.5 }, 3)
  fails("the model has masks already", { sparsity = 0.5 }, nil, prune.magnitude(small "llama", { sparsity = 0.5 }))
  fails("the Hessian of model.layers.0.self_attn.q_proj is singular", { sparsity = 0.5, damp = 0 },
    { { tokens = ty.tensor({ { 7, 7, 7 } }, { dtype = "i64" }) } })
end)

check.finish()
