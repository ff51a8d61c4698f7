-- Mixture of depths: shares by the schedule, nothing changed where nothing is skipped, the rule of kept and skipped
-- tokens by hand, gradients of routers by finite differences, decoding with a cache whose layers hold different tokens.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vlm = require "tycho.vlm"
local mod = vlm.mixture_of_depths

local small = dofile(here .. "../small_llava.lua")
local FEATURES, rows, tokens, pictures, apart = small.features, small.rows, small.tokens, small.pictures, small.apart

local function model(layers) return small.model { num_hidden_layers = layers } end

-- Routers that choose.
local function shake(m)
  ty.manual_seed(5)
  for _, layer in ipairs(m.language_model.model.layers) do
    if layer.router then
      ty.no_grad(function()
        layer.router.weight:copy_(ty.randn(layer.router.weight.shape))
        layer.router.bias:copy_(ty.randn(1))
      end)
    end
  end
end

check.test("shares fall as a cosine, between the floor and all", function()
  check.close(mod.shares(5, { shift = 0.5, dense = 0.85, floor = 0.15 }),
    { 1, 1, 0.5, 0.15, 0.15 }, 1e-12)
  check.close(mod.shares(5)[4], 0.25, 0)
  check.close(mod.shares(32, { dense = 1 })[12], math.cos(11 * math.pi / 31) / 2 + 0.5, 1e-12)
end)

check.test("all tokens kept and weights of 1: the dense model", function()
  local m = model()
  local want = ty.no_grad(function() return m(tokens, { pictures = pictures }) end)
  local report = mod.apply(m, { shares = { 1, 1, 1 }, scale = 0, all = true })
  check.equal(report.layers, { 1, 2, 3 })
  shake(m)
  check.ok(apart(ty.no_grad(function() return m(tokens, { pictures = pictures }) end), want) < 1e-5)
  mod.remove(m)
  check.equal(m.language_model.model.layers[1].router == nil, true)
  check.equal(apart(ty.no_grad(function() return m(tokens, { pictures = pictures }) end), want), 0)
end)

check.test("a layer: kept tokens go through it by themselves, skipped ones are weighed, text weighs 1", function()
  local m = model(2)
  mod.apply(m, { shares = { 0.5, 1 }, scale = 0.2 })
  shake(m)
  local layer, seen = m.language_model.model.layers[1], nil
  mod.watch(m, function(_, visual, places, weights) seen = { visual = visual, places = places, weights = weights } end)
  local x = ty.randn(1, 20, 16)
  local cos, sin = m.language_model.rotary:table(20, "cpu")
  local at = { cos = cos, sin = sin, layer = 1, tokens = tokens:narrow(0, 0, 1) }
  local y = ty.no_grad(function() return layer(x, nil, at) end):select(0, 0)
  local w = ty.no_grad(function() return layer.router(x):flatten():tanh() * 0.2 + 1 end):tolist()
  -- The eight largest weights of the sixteen patches, and the words.
  local order, kept, is_kept = {}, {}, {}
  for k = 1, FEATURES do order[k] = k end
  table.sort(order, function(a, b) return w[a] > w[b] end)
  for k = 1, 8 do is_kept[order[k]] = true end
  for k = 1, 20 do if k > FEATURES or is_kept[k] then kept[#kept + 1] = k - 1 end end
  check.equal(seen.places:select(0, 0):tolist(), kept)
  local index = ty.tensor(kept)
  local sub = x:index_select(1, index)
  local z, added = ty.no_grad(function()
    return getmetatable(layer).super.forward(layer, sub, nil, { cos = cos:index_select(0, index),
      sin = sin:index_select(0, index), layer = 1 })
  end)
  for i, place in ipairs(kept) do
    local weight = place < FEATURES and w[place + 1] or 1
    check.ok(apart(y:select(0, place), (z + added * weight):select(0, 0):select(0, i - 1)) < 1e-5)
  end
  for k = 1, FEATURES do
    if not is_kept[k] then check.ok(apart(y:select(0, k - 1), x:select(0, 0):select(0, k - 1) * w[k]) < 1e-6) end
  end
end)

check.test("gradients of routers are those of finite differences, and skipped tokens have some", function()
  local m = model():to "f64"
  mod.apply(m, { shares = { 1, 0.5, 0.25 }, scale = 0.2 })
  shake(m)
  local wide = pictures:to "f64"
  local function loss() return m:loss(tokens, nil, { pictures = wide }) end
  m:zero_grad()
  loss():backward()
  local skipped
  for i = 2, 3 do
    local router = m.language_model.model.layers[i].router
    for _, p in ipairs { router.weight, router.bias } do
      check.gradient(loss, p, { table.unpack({ 1, 2, 3, 4, 5, 6 }, 1, math.min(6, p:numel())) })
    end
  end
  -- A weight that only skipped tokens have moves the loss, too: they are seen in the layer behind.
  local x = ty.randn(1, 20, 16, { dtype = "f64" })
  local layer = m.language_model.model.layers[2]
  mod.watch(m, function(_, _, places) skipped = places end)
  local cos, sin = m.language_model.rotary:table(20, "cpu")
  local y = layer(x, nil, { cos = cos:to "f64", sin = sin:to "f64", layer = 2, tokens = tokens:narrow(0, 0, 1) })
  local is_skipped = ty.ones { 20 }:scatter(0, skipped:select(0, 0), ty.zeros { skipped.shape[2] }):to "f64"
  m:zero_grad()
  local moved = (y * is_skipped:reshape(1, 20, 1)):sum()
  moved:backward()
  check.ok(layer.router.weight.grad:abs():max():item() > 1e-3)
end)

check.test("a router of the last layer has no gradient, so that layer asks the one before", function()
  local m = model()
  mod.apply(m, { shares = { 1, 0.5, 0.25 }, own = true })
  shake(m)
  local layers = m.language_model.model.layers
  local function learn()
    m:zero_grad()
    local answers = ty.full({ 2, 20 }, -100, { dtype = "i64" })
    answers:narrow(1, 18, 2):fill_(3)
    m:loss(tokens, answers, { pictures = pictures }):backward()
  end
  learn()
  check.ok(layers[2].router.weight.grad:abs():max():item() > 0)
  local last = layers[3].router.weight.grad
  check.ok(not last or last:abs():max():item() == 0)
  mod.remove(m)
  check.equal(layers[3].router == nil, true)
  mod.apply(m, { shares = { 1, 0.5, 0.25 } })
  check.ok(layers[3].router == layers[2].router)
  local copy = m:clone().language_model.model.layers
  check.ok(copy[3].router == copy[2].router and copy[2].router ~= layers[2].router)
  mod.remove(m)
  mod.apply(m, { shares = { 1, 1, 0.25 } })
  check.ok(layers[3].router ~= nil and layers[2].router == nil)
  mod.remove(m)
end)

check.test("decoding with a cache whose layers hold different tokens is computing all anew", function()
  local m = model()
  mod.apply(m, { shares = { 1, 0.5, 0.25 } })
  shake(m)
  local cache = m:cache()
  local first = ty.no_grad(function() return m(tokens, { pictures = pictures, cache = cache }) end)
  check.equal(cache:held(), { 20, 12, 8 })
  local all = tokens
  local logits = first:narrow(1, 19, 1)
  for _ = 1, 4 do
    local next_token = logits:argmax(-1):clamp(0, 18)
    all = ty.concat({ all, next_token }, 1)
    logits = ty.no_grad(function() return m(next_token, { cache = cache }) end)
    local want = ty.no_grad(function() return m(all, { pictures = pictures }) end)
    check.ok(apart(logits, want:narrow(1, all.shape[2] - 1, 1)) < 1e-5)
  end
  check.equal(cache:held(), { 24, 16, 12 })
  check.fails(function() cache:truncate(3) end, "expected layers that hold all 24 positions, got 16 in layer 2")
  cache:select(ty.tensor { 1 })
  local step = ty.no_grad(function() return m(ty.tensor { { 3 } }, { cache = cache }) end)
  local whole = ty.concat({ all:narrow(0, 1, 1), ty.tensor { { 3 } } }, 1)
  local want = ty.no_grad(function() return m(whole, { pictures = pictures:narrow(0, 1, 1) }) end)
  check.ok(apart(step, want:narrow(1, 24, 1)) < 1e-5)
  -- Text of the same tokens, by generation.
  local said = m:generate(tokens, 4, { temperature = 0, pictures = pictures, stop_tokens = false })
  check.equal(said.shape, { 2, 24 })
end)

check.test("prompts of different lengths, padded on the left, decode as each does by itself", function()
  local m = model()
  mod.apply(m, { shares = { 1, 0.5, 0.25 } })
  shake(m)
  local short, long = { 1, 2 }, { 5, 6, 7, 8 }
  local prompts = { rows(short):select(0, 0), rows(long):select(0, 0) }
  local together = m:generate(prompts, 5, { temperature = 0, pictures = pictures, stop_tokens = false })
  for i, prompt in ipairs(prompts) do
    local alone = m:generate({ prompt }, 5, { temperature = 0, pictures = pictures:narrow(0, i - 1, 1),
      stop_tokens = false })
    check.equal(together[i]:tolist(), alone[1]:tolist())
  end
end)

check.test("questions packed about one picture see the tokens that the picture keeps", function()
  local m = model()
  mod.apply(m, { shares = { 1, 0.5, 0.25 } })
  shake(m)
  local shared, turns = rows({}):select(0, 0):tolist(), {}
  for k, words in ipairs { { 1, 2, 3 }, { 4, 5 } } do
    local learnt = {}
    for i = 1, #words do learnt[i] = i > 1 end
    turns[k] = { ids = words, learnt = learnt }
  end
  local batch = vlm.packing.turns({ { shared = shared, turns = turns } }, 0)
  local one = pictures:narrow(0, 0, 1)
  local packed = ty.no_grad(function()
    return m(batch.tokens, { pictures = one, mask = batch.options.mask, positions = batch.options.positions })
  end)
  local at = FEATURES
  for k, words in ipairs { { 1, 2, 3 }, { 4, 5 } } do
    local alone = ty.no_grad(function() return m(rows(words), { pictures = one }) end)
    check.ok(apart(packed:narrow(1, at, #words), alone:narrow(1, FEATURES, #words)) < 1e-5, "turn " .. k)
    at = at + #words
  end
end)

check.test("what cannot be routed is one clear error", function()
  local m = model()
  check.fails(function() mod.apply(m, { shares = { 1 } }) end, "shares: expected one of each of 3 layers, got 1")
  check.fails(function() mod.apply(m, { shares = { 1, 2, 1 } }) end, "expected numbers in [0, 1], got 2")
  check.fails(function() mod.apply(ty.nn.Linear(2, 2)) end, "expected a model that sees")
end)

check.finish()
