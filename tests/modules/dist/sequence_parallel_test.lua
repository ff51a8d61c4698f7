-- Attention over a ring, forwards and backwards, against that of one rank; a Llama and a GPT-2 with split sequences;
-- memory.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local workload = dist.workload

check.test("ring attention is attention", function()
  local function run(group, q, k, v, g, o)
    local d = require "tycho.dist"
    local t = q.shape[3] // group.size
    local function mine(x) return x:narrow(2, group.rank * t, t):clone():requires_grad_() end
    local a, b, c = mine(q), mine(k), mine(v)
    local y = d.ring_attention(group, a, b, c, o)
    y:mul(mine(g)):sum():backward()
    return { y:detach(), a.grad, b.grad, c.grad, group:traffic().calls.message or 0 }
  end
  for _, dtype in ipairs { "f64", "f32" } do
    for _, case in ipairs { { causal = true }, { causal = false }, { causal = true, scale = 0.9 } } do
      for _, form in ipairs { "blocks", "scores" } do
        local shape = { dtype = dtype }
        local q, g = ty.randn({ 2, 4, 12, 8 }, shape) * 2, ty.randn({ 2, 4, 12, 6 }, shape)
        local k, v = ty.randn({ 2, 2, 12, 8 }, shape), ty.randn({ 2, 2, 12, 6 }, shape)
        local a, b, c = q:clone():requires_grad_(), k:clone():requires_grad_(), v:clone():requires_grad_()
        local want = ty.scaled_dot_product_attention(a, b, c, nil, case.causal, case.scale or 0)
        want:mul(g):sum():backward()
        for _, n in ipairs { 1, 2, 4 } do
          local got = dist.run(n, run, nil, q, k, v, g, { causal = case.causal, scale = case.scale, form = form })
          for i, x in ipairs { want:detach(), a.grad, b.grad, c.grad } do
            local parts = {}
            for r = 1, n do parts[r] = got[r][i] end
            local apart = (ty.concat(parts, 2) - x):abs():max():item()
            check.equal(apart < (dtype == "f64" and 1e-13 or 2e-5), true,
              ("%s %s, %d ranks, %d: %g"):format(form, dtype, n, i, apart))
          end
        end
      end
    end
  end
end)

local work = workload.open { length = 16, width = 32, layers = 2, heads = 4, key_value_heads = 2, rows = 8,
  chapters = 20, vocabulary = 300 }

local function train(group, given, dtype, options, name)
  local ty_, d, models = require "tycho", require "tycho.dist", require "tycho.models"
  ty_.manual_seed(3)
  local model = name == "gpt2"
    and models.GPT2 { vocabulary = given.config.vocab_size, context = 16, width = 32, layers = 2, heads = 4 }
    or d.workload.model(given, 1)
  model = model:to(dtype)
  local sequence = options and d.sequence_parallel(model, group, options)
  local optimizer, losses, gradients = ty_.optim.AdamW(model:parameters(), { lr = 1e-2 }), {}, nil
  for step = 1, 4 do
    local rows = d.workload.rows(given, 0, step, 0, 3)
    local tokens, targets = rows:narrow(1, 0, 16), rows:narrow(1, 1, 16):clone()
    targets["0, 3:9"] = -100 -- other ranks have other numbers of tokens that count
    if sequence then tokens, targets = sequence:part(tokens), sequence:part(targets) end
    local loss = model:loss(tokens:contiguous(), targets, { checkpoint = step == 2 })
    optimizer:zero_grad()
    loss:backward()
    if sequence then sequence:sum_gradients() end
    if not gradients then
      gradients = {}
      for key, p in model:named_parameters() do gradients[key] = p.grad:clone() end
    end
    optimizer:step()
    losses[step] = loss:item()
  end
  return { losses = losses, gradients = gradients }
end

check.test("models with split sequences have the numbers of one rank", function()
  for _, name in ipairs { "llama", "gpt2" } do
    for dtype, tolerance in pairs { f32 = 1e-5, f64 = 1e-12 } do
      local one = dist.run(1, train, nil, work, dtype, nil, name)[1]
      for _, n in ipairs { 2, 4 } do
        for _, form in ipairs { "blocks", "scores" } do
          for _, got in ipairs(dist.run(n, train, nil, work, dtype, { form = form }, name)) do
            check.close(got.losses, one.losses, 10 * tolerance)
            for key, g in pairs(one.gradients) do
              local apart = (got.gradients[key] - g):abs():max():item() / (1e-3 + g:abs():max():item())
              check.equal(apart < tolerance, true, ("%s %s: %g"):format(name, key, apart))
            end
          end
        end
      end
    end
  end
end)

check.test("a sequence that is too long for one rank", function()
  local long = workload.open { length = 512, width = 32, layers = 2, rows = 1, chapters = 20, vocabulary = 300 }
  local function run(group, given)
    local d = require "tycho.dist"
    local model = d.workload.model(given, 1)
    local sequence = d.sequence_parallel(model, group)
    local rows = d.workload.rows(given, 0, 1, 0, 4)
    group:reset_memory()
    local before = group:memory()
    local loss = model:loss(sequence:part(rows:narrow(1, 0, 512)), sequence:part(rows:narrow(1, 1, 512)))
    loss:backward()
    local _, peak = group:memory()
    return { loss:item(), peak - before }
  end
  local one, four = dist.run(1, run, nil, long)[1], dist.run(4, run, nil, long)
  check.close(four[1][1], one[1], 1e-5)
  local most = 0
  for _, r in ipairs(four) do most = math.max(most, r[2]) end
  check.equal(most < one[2] / 2.8, true, ("%d bytes, %d of one rank"):format(most, one[2]))
  local limit = { memory = one[2] // 2 + (1 << 21) }
  check.fails(function() dist.run(1, run, limit, long) end, "bytes more are beyond the")
  check.close(dist.run(4, run, limit, long)[1][1], one[1], 1e-5)
end)

check.test("taking it off, and arguments", function()
  local got = dist.run(2, function(group, given)
    local d = require "tycho.dist"
    local model = d.workload.model(given, 1)
    local class, rows = getmetatable(model), d.workload.rows(given, 0, 1, 0, 2)
    local want = d.workload.loss(model, rows):item()
    local sequence = d.sequence_parallel(model, group)
    local problems = {}
    local function try(fn, ...) problems[#problems + 1] = tostring(select(2, pcall(fn, ...))) end
    try(d.sequence_parallel, model, group)
    try(sequence.part, sequence, rows)
    try(model.hidden, model, rows, { mask = rows })
    try(d.ring_attention, group, rows, rows, rows)
    try(d.sequence_parallel, model, group, { form = "x" })
    sequence:remove()
    return { getmetatable(model) == class and want - d.workload.loss(model, rows):item(), problems }
  end, nil, work)[1]
  check.equal(got[1], 0.0)
  for i, text in ipairs { "expected one that has whole sequences", "with t a multiple of 2", "mask: expected none",
    "expected a tensor of 4 dimensions", "form: expected" } do
    check.equal(got[2][i]:find(text, 1, true) ~= nil, true, got[2][i])
  end
end)

check.finish()
