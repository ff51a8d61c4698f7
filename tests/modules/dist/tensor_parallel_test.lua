-- Tensor parallelism: the numbers of one rank, two sums over ranks in a block each way, words that no rank has all of,
-- generation, dropout, and taking a model apart and putting it together again.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local workload = dist.workload
-- 301 words: no number of ranks divides them.
local work = workload.open { length = 12, width = 32, layers = 2, heads = 4, rows = 8, chapters = 20,
  vocabulary = 301, config = { intermediate_size = 50 } }
local variants = {
  llama = {},
  grouped = { num_attention_heads = 8, num_key_value_heads = 4, attention_bias = true, mlp_bias = true,
    tie_word_embeddings = false },
}

local function largest(a, b)
  local most = 0
  for name, x in pairs(a) do
    check.equal(b[name] ~= nil, true, name)
    check.equal(x.shape, b[name].shape, name)
    most = math.max(most, (x - b[name]):abs():max():item() / (1e-3 + x:abs():max():item()))
  end
  return most
end

-- Trains, and returns losses, the gradients of the first step and the weights at the end.
local function train(group, name, config, dtype, given)
  local ty_, d, models = require "tycho", require "tycho.dist", require "tycho.models"
  ty_.manual_seed(5)
  local model
  if name == "gpt2" then
    model = models.GPT2 { vocabulary = given.config.vocab_size, context = 16, width = 32, layers = 2, heads = 4 }
  else
    local all = {}
    for _, t in ipairs { given.config, config } do for k, v in pairs(t) do all[k] = v end end
    model = models.Llama(all)
  end
  for _, p in ipairs(model:parameters()) do -- zeros hide what is missing
    ty_.no_grad(function() p:detach():add_(ty_.randn(p.shape) * 0.02) end)
  end
  model = model:to(dtype)
  local before = {}
  for key, p in model:named_parameters() do before[key] = p:detach():clone() end
  local parallel = d.tensor_parallel(model, group)
  local out = { losses = {}, apart = 0, bytes = parallel:bytes() }
  for key, x in pairs(parallel:state_dict()) do
    out.apart = math.max(out.apart, (x - before[key]):abs():max():item())
  end
  local optimizer = ty_.optim.AdamW(model:parameters(), { lr = 1e-2 })
  for step = 1, 4 do
    local rows = d.workload.rows(given, 0, step, 0, 3)
    local loss = model:loss(rows:narrow(1, 0, 12):contiguous(), rows:narrow(1, 1, 12):contiguous(),
      { checkpoint = step == 3 })
    optimizer:zero_grad()
    loss:backward()
    out.losses[step] = loss:item()
    out.gradients = out.gradients or parallel:gradients()
    out.norm = parallel:clip_grad_norm(0.5)
    optimizer:step()
  end
  out.state = parallel:state_dict()
  out.logits = model(given.held_out:narrow(0, 0, 2):narrow(1, 0, 5):contiguous()):detach()
  return out
end

for _, dtype in ipairs { "f32", "f64" } do
  local tolerance = dtype == "f64" and 1e-12 or 1e-5
  for _, name in ipairs { "llama", "grouped", "gpt2" } do
    check.test(("%s in %s: 2 and 4 ranks have the numbers of one"):format(name, dtype), function()
      local function run(n) return dist.run(n, train, nil, name, variants[name], dtype, work) end
      local one = run(1)[1]
      check.equal(one.losses[4] < one.losses[1] - 0.1, true, "it learns")
      for _, n in ipairs { 2, 4 } do
        for _, got in ipairs(run(n)) do
          check.equal(got.apart, 0, "what is taken apart is put together exactly")
          check.close(got.losses, one.losses, tolerance * 10)
          check.close(got.norm, one.norm, tolerance * one.norm * 10)
          check.equal(largest(got.gradients, one.gradients) < tolerance, true,
            ("gradients, %g"):format(largest(got.gradients, one.gradients)))
          -- Adam divides by the size of a gradient, however small: rounding grows.
          check.equal(largest(got.state, one.state) < 1e3 * tolerance, true,
            ("weights, %g"):format(largest(got.state, one.state)))
          check.equal((got.logits - one.logits):abs():max():item() < 1e3 * tolerance, true)
          check.equal(got.bytes < one.bytes / n * 1.2, true)
        end
      end
    end)
  end
end

check.test("two sums over ranks in a block each way, and no word's logit goes to another rank", function()
  local function count(group, given)
    local d = require "tycho.dist"
    local model = d.workload.model(given, 1)
    d.tensor_parallel(model, group)
    local function calls() return (group:traffic().calls.all_reduce or 0) end
    local rows = d.workload.rows(given, 0, 1, 0, 2)
    local tokens = rows:narrow(1, 0, 12):contiguous()
    local a = calls()
    local hidden = model:hidden(tokens)
    local b = calls()
    hidden:sum():backward()
    local c = calls()
    local largest_one = 0
    local events = group:record()
    local loss = d.workload.loss(model, rows)
    local e = calls()
    loss:backward()
    for _, event in ipairs(events) do largest_one = math.max(largest_one, event.bytes or 0) end
    return { b - a, c - b, e - c, calls() - e, gathers = group:traffic().calls.all_gather or 0, largest = largest_one }
  end
  for _, layers in ipairs { 1, 2 } do
    work.config.num_hidden_layers = layers
    local got = dist.run(2, count, nil, work)[1]
    check.equal({ got[1], got[2] }, { 1 + 2 * layers, 2 * layers }, "one more for embeddings")
    check.equal({ got[3], got[4] }, { 1 + 2 * layers + 2, 1 + 2 * layers }, "the loss has two, the head one backwards")
    check.equal(got.gathers, 0)
    check.equal(got.largest, 2 * 12 * 32 * 4, "bytes of the largest exchange: hidden states")
  end
  work.config.num_hidden_layers = 2
end)

check.test("cross entropy over words of several ranks", function()
  local x, targets = ty.randn({ 5, 11 }, { dtype = "f64" }), ty.tensor({ 0, 10, -100, 4, 7 }, { dtype = "i64" })
  x[1] = x[1] + 1000 -- exponentials that would overflow
  local whole = x:clone():requires_grad_()
  local want = ty.nn.cross_entropy(whole, targets)
  want:backward()
  for _, n in ipairs { 1, 2, 3 } do
    local got = dist.run(n, function(group, logits, at)
      local vocabulary = require "tycho.dist".vocabulary
      local begin, count = vocabulary.part(11, group.size, group.rank)
      local mine = logits:narrow(1, begin, count):clone():requires_grad_()
      local loss = vocabulary.cross_entropy(group, mine, at, begin)
      loss:backward()
      return { loss:item(), mine.grad }
    end, nil, x, targets)
    local grads = {}
    for rank, r in ipairs(got) do
      check.close(r[1], want:item(), 1e-13)
      grads[rank] = r[2]
    end
    check.close(ty.concat(grads, 1):tolist(), whole.grad:tolist(), 1e-14)
  end
end)

check.test("generation with a cache has the tokens of one rank", function()
  local function generate(group, given)
    local ty_, d = require "tycho", require "tycho.dist"
    require "tycho.llm" -- generation
    local model = d.workload.model(given, 3)
    for _, p in ipairs(model:parameters()) do -- so that one word stands out
      ty_.no_grad(function() p:detach():mul_(3) end)
    end
    model:eval()
    if group.size > 1 then d.tensor_parallel(model, group) end
    local prompt = given.held_out:narrow(0, 0, 2):narrow(1, 0, 4):contiguous()
    local greedy = model:generate(prompt, 8, { temperature = 0 })
    return { greedy, model:generate(prompt, 8, { temperature = 1, seed = 4 }) }
  end
  local one = dist.run(1, generate, nil, work)[1]
  for _, got in ipairs(dist.run(4, generate, nil, work)) do
    check.equal(got[1]:tolist(), one[1]:tolist())
    check.equal(got[2]:tolist(), one[2]:tolist())
  end
end)

check.test("heads drop different weights, residuals the same", function()
  local got = dist.run(2, function(group)
    local ty_, d, models = require "tycho", require "tycho.dist", require "tycho.models"
    ty_.manual_seed(1)
    local model = models.GPT2 { vocabulary = 20, context = 8, width = 8, layers = 1, heads = 2,
      attention_dropout = 0.5, dropout = 0.5 }
    d.tensor_parallel(model, group)
    local weights, outputs = nil, nil
    local dropout = ty_.dropout
    rawset(ty_, "dropout", function(x, ...)
      local y = dropout(x, ...)
      if x.ndim == 4 then weights = y:ne(0) else outputs = y end
      return y
    end)
    local hidden = model:hidden(ty_.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, { dtype = "i64" }))
    return { weights:to "i64", outputs:detach(), hidden:detach(), ty_.rng_state() }
  end)
  check.equal(got[1][1]:equal(got[2][1]), false, "weights of attention")
  for i = 2, 3 do check.equal(got[1][i]:tolist(), got[2][i]:tolist()) end
  check.equal(got[1][4], got[2][4], "the generators are together again")
end)

check.test("taking it off again", function()
  local got = dist.run(2, function(group, given)
    local d = require "tycho.dist"
    local model = d.workload.model(given, 1)
    local rows = d.workload.rows(given, 0, 1, 0, 2)
    local before, class, state = d.workload.loss(model, rows):item(), getmetatable(model), {}
    for name, p in model:named_parameters() do state[name] = p:detach():clone() end
    local parallel = d.tensor_parallel(model, group)
    local doubled = {}
    for name, p in pairs(state) do doubled[name] = 2 * p end
    parallel:load_state_dict(doubled)
    parallel:load_state_dict(state)
    parallel:remove()
    local same = getmetatable(model) == class
    for name, p in model:named_parameters() do same = same and p:equal(state[name]) end
    return { before, d.workload.loss(model, rows):item(), same }
  end, nil, work)
  for _, r in ipairs(got) do
    check.equal(r[1], r[2])
    check.equal(r[3], true)
  end
end)

check.test("arguments", function()
  local function refuses(config, n, text)
    check.fails(function()
      dist.run(n, function(group, given, more)
        local d, models = require "tycho.dist", require "tycho.models"
        local all = {}
        for _, t in ipairs { given.config, more } do for k, v in pairs(t) do all[k] = v end end
        local model = models.Llama(all)
        d.tensor_parallel(model, group)
      end, nil, work, config)
    end, text)
  end
  refuses({ num_key_value_heads = 2 }, 4, "expected a multiple of 4 for kv_heads of model.layers.0.self_attn")
  refuses({}, 3, "expected a multiple of 3 for")
  check.fails(function() dist.tensor_parallel(ty.nn.Linear(2, 2), {}) end, "group: expected a group")
  check.fails(function()
    dist.run(1, function(group) require "tycho.dist".tensor_parallel(require "tycho".nn.Linear(2, 2), group) end)
  end, "model: expected a language model")
  check.fails(function()
    dist.run(1, function(group, given)
      local d = require "tycho.dist"
      local model = d.workload.model(given, 1)
      d.tensor_parallel(model, group)
      d.tensor_parallel(model, group)
    end, nil, work)
  end, "expected one that is not split yet")
end)

check.finish()
