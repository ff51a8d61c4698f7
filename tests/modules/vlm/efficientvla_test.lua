-- EfficientVLA: nothing changed where nothing is left out, a deleted layer against one that adds nothing, importance
-- and choice by hand, the head's cache, and operations counted against operations run.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion, models, vlm = require "tycho.diffusion", require "tycho.models", require "tycho.vlm"
local efficient = vlm.efficientvla

local function model()
  ty.manual_seed(3)
  local m = models.ActionModel { words = { "a", "b", "c" }, image_size = 32, patch_size = 8, tower_channels = 8,
    phrase_length = 4, text_config = { hidden_size = 16, intermediate_size = 24, num_hidden_layers = 4,
      num_attention_heads = 2, max_position_embeddings = 64 }, head_hidden_size = 16, head_layers = 2, head_heads = 2 }
  -- Larger than they begin, so that all parts of a layer matter.
  for _, p in ipairs(m.language_model:parameters()) do
    if p.ndim == 2 then ty.no_grad(function() p:mul_(8) end) end
  end
  return m:eval()
end

local observation = { images = ty.randn(3, 3, 32, 32), states = ty.randn(3, 4),
  words = ty.tensor({ { 2, 3, 0, 0 }, { 4, 2, 3, 0 }, { 3, 0, 0, 0 } }, { dtype = "i64" }) }

local function draw(network, steps)
  local process = diffusion.DDPM { steps = 100, predict = "sample", drop = 0 }
  return (diffusion.policy.draw(process, network, observation, { 4, 3 }, { steps = steps or 10, seeds = { 1, 2, 3 } }))
end

local function apart(a, b) return (a - b):abs():max():item() end

check.test("no layer deleted, all tokens, an interval of 1: the same actions to the last bit", function()
  local m = model()
  check.equal(apart(draw(efficient.apply(m)), draw(m)), 0)
  local o = { layers = { 1, 2, 3, 4 }, tokens = 16, interval = 1 }
  check.equal(apart(draw(efficient.apply(m, o)), draw(m)), 0)
end)

check.test("a deleted layer is one whose projections to the stream are zero", function()
  local m = model()
  local fast = draw(efficient.apply(m, { layers = { 1, 2, 4 } }))
  local before = draw(m)
  local layer = m.language_model.model.layers[3]
  ty.no_grad(function()
    layer.self_attn.o_proj.weight:zero_()
    layer.mlp.down_proj.weight:zero_()
  end)
  check.ok(apart(fast, draw(m)) < 1e-5)
  check.ok(apart(fast, before) > 1e-4)
end)

check.test("tokens chosen: as if the others were masked, at the positions that they had", function()
  local m = model()
  local fast = efficient.apply(m, { tokens = 5, key = 2 })
  local condition = ty.no_grad(function() return fast:encode(observation) end)
  check.equal(condition.places.shape, { 3, 5 })
  -- The whole sequence, where none sees what was not chosen.
  local wanted = ty.no_grad(function()
    local x = m:embed(observation)
    local n, t = x.shape[1], x.shape[2]
    local there = ty.zeros({ n, 16 }):scatter(1, condition.places, ty.ones { n, 5 })
    there = ty.concat({ there, ty.ones { n, t - 16 } }, 1):to "bool"
    local at = m:turns(x)
    at.mask = there:reshape(n, 1, 1, t)
    local stream, more = models.layers.through(m.language_model.model.layers, x, at)
    return m.language_model.model.norm(stream + more):select(1, t - 1)
  end)
  check.ok(apart(condition.query, wanted) < 1e-4)
end)

check.test("importance: 1 - the mean cosine, and what stays", function()
  local m = model()
  local x = ty.no_grad(function() return m:embed(observation) end)
  local list = efficient.importance(m, observation)
  check.equal(#list, 4)
  local first = m.language_model.model.layers[1]
  local y = ty.no_grad(function()
    local stream, more = first(x, nil, m:turns(x))
    return stream + more
  end)
  local sum, count = 0, 0
  for i = 0, 2 do
    for k = 0, x.shape[2] - 1 do
      local a, b = x:select(0, i):select(0, k), y:select(0, i):select(0, k)
      sum, count = sum + (a * b):sum():item() / math.sqrt(a:square():sum():item() * b:square():sum():item()), count + 1
    end
  end
  check.close(list[1], 1 - sum / count, 1e-5)
  check.equal(efficient.kept({ 0.5, 0.1, 0.3, 0.2 }, 2), { 1, 3 })
  check.equal(efficient.kept({ 0.5, 0.1, 0.3, 0.2 }, 0), { 1, 2, 3, 4 })
end)

check.test("relevance: the attention of what asks, padding left out", function()
  local m = model()
  local layer = m.language_model.model.layers[1]
  ty.no_grad(function()
    local x = m:embed(observation)
    local found = efficient.relevance(m, layer, x, observation.words)
    local weights = layer.self_attn:weights(layer.input_layernorm(x), m:turns(x))
    for row = 0, 2 do
      local asked = {}
      for k, word in ipairs(observation.words:select(0, row):tolist()) do
        if word ~= 0 then asked[#asked + 1] = 15 + k end
      end
      asked[#asked + 1], asked[#asked + 2] = 20, 21
      local sum = weights:select(0, row):index_select(1, ty.tensor(asked, { dtype = "i64" })):narrow(2, 0, 16)
        :sum { 0, 1 }
      sum = (sum - sum:min()) / (sum:max() - sum:min())
      check.ok(apart(found:select(0, row), sum) < 1e-4)
    end
  end)
end)

check.test("choice: the most relevant, then by relevance, then the farthest from the first", function()
  local relevance = ty.tensor { { 0.9, 0.1, 0.8, 0.3, 0.0, 0.2 } }
  local seen = ty.tensor { { { 1, 0 }, { 0.9, 0.1 }, { 1, 0.1 }, { 0, 1 }, { -1, 0 }, { 0.2, 1 } } }
  -- 0 and 2 are key; 3 is the next by relevance; 4 points the other way.
  check.equal(efficient.choose(seen, relevance, { tokens = 4, key = 2, share = 0.5 }):tolist(), { { 0, 2, 3, 4 } })
  check.equal(efficient.choose(seen, relevance, { tokens = 3, key = 2, share = 0 }):tolist(), { { 0, 2, 4 } })
  check.equal(efficient.choose(seen, relevance, { tokens = 4, key = 2, share = 1 }):tolist(), { { 0, 2, 3, 5 } })
end)

check.test("the head's layers are computed every few steps and stand still between", function()
  local m = model()
  local fast = efficient.apply(m, { interval = 5 })
  local calls = { 0, 0 }
  for i, layer in ipairs(m.action_head.layers) do
    local attend = layer.attend
    rawset(layer, "attend", function(self, h)
      calls[i] = calls[i] + 1
      return attend(self, h)
    end)
  end
  draw(fast)
  check.equal(calls, { 2, 2 })
  for _, layer in ipairs(m.action_head.layers) do rawset(layer, "attend", nil) end
  -- Where the layers add the same whatever comes, the cache changes nothing.
  ty.no_grad(function()
    for _, layer in ipairs(m.action_head.layers) do
      layer.proj.weight:zero_()
      layer.fc2.weight:zero_()
      layer.proj.bias:fill_(0.3)
    end
  end)
  check.ok(apart(draw(fast), draw(m)) < 1e-5)
end)

check.test("operations counted are those that run", function()
  local m = model()
  local products = { matmul = true, linear = true, conv2d = true, scaled_dot_product_attention = true, addmm = true }
  local one = { images = observation.images:narrow(0, 0, 1), states = observation.states:narrow(0, 0, 1),
    words = observation.words:narrow(0, 0, 1) }
  local process = diffusion.DDPM { steps = 100, predict = "sample", drop = 0 }
  local function run(network)
    local flops = 0
    local report = ty.profile(function()
      diffusion.policy.draw(process, network, one, { 4, 3 }, { steps = 10, seeds = { 1 } })
    end)
    for _, event in ipairs(report.events) do
      if products[event.op] then flops = flops + event.flops end
    end
    return flops
  end
  for _, o in ipairs { {}, { layers = { 1, 3 } }, { tokens = 5 }, { interval = 5 },
    { layers = { 1, 2, 4 }, tokens = 3, interval = 3 } } do
    local counted = efficient.cost(m, o).all
    local ran = run(efficient.apply(m, o))
    check.ok(math.abs(ran / counted - 1) < 0.05, ("counted %g, ran %g"):format(counted, ran))
  end
end)

check.test("wrong arguments", function()
  local m = model()
  check.fails(function() efficient.apply(m, { layers = { 2, 1 } }) end, "rising numbers from 1 to 4")
  check.fails(function() efficient.apply(m, { tokens = 17 }) end, "at most the 16 places")
  check.fails(function() efficient.kept({ 1, 2 }, 2) end, "less than the 2 layers")
  check.fails(function() efficient.apply(ty.nn.Linear(2, 2)) end, "expected a policy")
end)

check.finish()
