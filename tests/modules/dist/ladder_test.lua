-- Layers that are one module behind: the paper's formula, what it is without a lag, tensor parallel ranks, sums beside
-- computation.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local workload = dist.workload
local work = workload.open { length = 12, width = 32, layers = 4, heads = 4, rows = 8, chapters = 20,
  vocabulary = 300, config = { attention_bias = true, mlp_bias = true } }
local rows = workload.rows(work, 0, 1, 0, 3)

local function model_of(seed, dtype)
  local model = workload.model(work, seed)
  for _, p in ipairs(model:parameters()) do -- so that every term weighs
    ty.no_grad(function() p:detach():add_(ty.randn(p.shape) * 0.1) end)
  end
  return model:to(dtype or "f32")
end

local function numbers(model)
  model:zero_grad()
  local loss = workload.loss(model, rows)
  loss:backward()
  local grads = {}
  for name, p in model:named_parameters() do grads[name] = p.grad:clone() end
  return loss:item(), grads
end

check.test("without a lag it is the model itself, bit for bit", function()
  local model = model_of(1)
  local want, want_grads = numbers(model)
  for first = 1, 4 do
    local ladder = dist.ladder_residual(model, { first = first, lag = 0 })
    local got, grads = numbers(model)
    check.equal(got, want)
    for name, g in pairs(want_grads) do check.equal(grads[name]:equal(g), true, name) end
    ladder:remove()
  end
  dist.ladder_residual(model, {}):remove()
  check.equal((numbers(model)), want, "taken off again")
end)

-- By the formula: outputs of modules h[1], h[2] ..., where h[i] gets all outputs but those of the `lag` before it.
local function by_formula(model, tokens, first, lag)
  local cos, sin = model.rotary:table(12, "cpu")
  local at = { cos = cos:narrow(0, 0, 12), sin = sin:narrow(0, 0, 12) }
  local x = model:embed(tokens)
  local results = {}
  for i, layer in ipairs(model.model.layers) do
    for _, pair in ipairs { { "input_layernorm", layer.self_attn }, { "post_attention_layernorm", layer.mlp } } do
      if i < first then
        x = x + pair[2](layer[pair[1]](x), at)
      else
        local seen = x
        for k = 1, #results - lag do seen = seen + results[k] end
        results[#results + 1] = pair[2](layer[pair[1]](seen), at)
      end
    end
  end
  for _, y in ipairs(results) do x = x + y end
  return model:head(model.model.norm(x))
end

check.test("x[i + 1] = x[i] + h[i](x[i - 1])", function()
  local model = model_of(2, "f64")
  local tokens = rows:narrow(1, 0, 12):contiguous()
  for _, o in ipairs { { 1, 1 }, { 3, 1 }, { 4, 1 }, { 1, 2 }, { 2, 3 } } do
    local want = by_formula(model, tokens, o[1], o[2]):detach()
    local ladder = dist.ladder_residual(model, { first = o[1], lag = o[2] })
    local got = model(tokens):detach()
    check.close(got:tolist(), want:tolist(), 1e-12)
    local last = model:head(model:hidden(tokens, { last = 2 })):detach()
    check.close(last:tolist(), want:narrow(1, 10, 2):tolist(), 1e-12)
    -- With a cache, token after token.
    local cache = model:cache()
    ty.no_grad(function()
      for t = 0, 11 do
        local y = model(tokens:narrow(1, t, 1):contiguous(), { cache = cache })
        check.close(y:tolist(), want:narrow(1, t, 1):tolist(), 1e-12)
      end
    end)
    ladder:remove()
    check.equal((model(tokens):detach() - want):abs():max():item() > 1e-3, true, "another model")
  end
end)

local function train(group, given, dtype, first)
  local ty_, d = require "tycho", require "tycho.dist"
  local model = d.workload.model(given, 1)
  for _, p in ipairs(model:parameters()) do
    ty_.no_grad(function() p:detach():add_(ty_.randn(p.shape) * 0.02) end)
  end
  model = model:to(dtype)
  local parallel = d.tensor_parallel(model, group)
  d.ladder_residual(model, { first = first })
  local optimizer, losses, gradients = ty_.optim.AdamW(model:parameters(), { lr = 1e-2 }), {}, nil
  for step = 1, 3 do
    local loss = d.workload.loss(model, d.workload.rows(given, 0, step, 0, 3))
    optimizer:zero_grad()
    loss:backward()
    gradients = gradients or parallel:gradients()
    optimizer:step()
    losses[step] = loss:item()
  end
  return { losses = losses, gradients = gradients }
end

check.test("tensor parallel ranks have the numbers of one", function()
  for _, first in ipairs { 1, 3 } do
    for dtype, tolerance in pairs { f32 = 1e-5, f64 = 1e-12 } do
      local one = dist.run(1, train, nil, work, dtype, first)[1]
      for _, n in ipairs { 2, 4 } do
        for _, got in ipairs(dist.run(n, train, nil, work, dtype, first)) do
          check.close(got.losses, one.losses, 10 * tolerance)
          for name, g in pairs(one.gradients) do
            local apart = (got.gradients[name] - g):abs():max():item() / (1e-3 + g:abs():max():item())
            check.equal(apart < tolerance, true, name .. ": " .. apart)
          end
        end
      end
    end
  end
end)

check.test("sums are on their way while modules compute", function()
  local function run(group, given, lag, first)
    local ty_, d = require "tycho", require "tycho.dist"
    local model = d.workload.model(given, 1):eval()
    d.tensor_parallel(model, group)
    if lag then d.ladder_residual(model, { lag = lag, first = first }) end
    -- Every module takes 100 ms by the clock.
    for _, layer in ipairs(model.model.layers) do
      for _, module in ipairs { layer.self_attn, layer.mlp } do
        module:register_forward_pre_hook(function() group:advance(0.1) end)
      end
    end
    group:barrier()
    local began = group:clock()
    ty_.no_grad(function() model:hidden(given.held_out:narrow(0, 0, 1):narrow(1, 0, 4):contiguous()) end)
    return group:clock() - began
  end
  -- Sums take 80 ms; that of the embeddings is waited for, and the one of the last module is.
  local function seconds(lag, first) return dist.run(2, run, { latency = 0.04 }, work, lag, first)[1] end
  check.close(seconds(), 0.08 + 8 * 0.18, 0.05)
  check.close(seconds(0), 0.08 + 8 * 0.18, 0.05)
  check.close(seconds(1), 0.08 + 8 * 0.1 + 0.08, 0.05)
  check.close(seconds(1, 3), 0.08 + 4 * 0.18 + 4 * 0.1 + 0.08, 0.05)
end)

check.test("arguments", function()
  local model = model_of(1)
  check.fails(function() dist.ladder_residual(ty.nn.Linear(1, 1)) end, "model: expected a decoder with model.layers")
  check.fails(function() dist.ladder_residual(model, { first = 5 }) end, "first: expected an integer in [1, 4]")
  check.fails(function() dist.ladder_residual(model, { lag = -1 }) end, "lag: expected an integer >= 0")
  local ladder = dist.ladder_residual(model)
  check.fails(function() dist.ladder_residual(model) end, "expected layers with one norm before each module")
  check.fails(function()
    model:loss(rows:narrow(1, 0, 12):contiguous(), rows:narrow(1, 1, 12):contiguous(), { checkpoint = true }):backward()
  end, "checkpoint does not go with it")
  ladder:remove()
end)

check.finish()
