-- Early exit for retrieval: both paths from their layers, routing, the loss of both, scores and thresholds, training.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local datasets, models, vlm = require "tycho.datasets", require "tycho.models", require "tycho.vlm"

local icar, nn = vlm.icar, ty.nn

local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

local function clip(layers)
  ty.manual_seed(3)
  return models.CLIPModel { projection_dim = 12,
    text_config = { vocab_size = 16, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 5, eos_token_id = 15 },
    vision_config = { image_size = 8, patch_size = 4, num_channels = 1, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = layers or 4, num_attention_heads = 2 } }
end

local function model(layer, layers)
  local m = icar.EarlyExit(clip(layers), { layer = layer })
  ty.no_grad(function() -- an exit of its own
    for _, p in ipairs { m.norm.weight, m.norm.bias, m.projection.weight } do p:add_(ty.randn_like(p) * 0.3) end
  end)
  return m:eval()
end

check.test("the early path is the truncated stack, the full one the whole tower", function()
  local m, x = model(2), ty.randn(5, 1, 8, 8)
  local tower = m.clip.vision_model
  local h = tower.pre_layrnorm(tower.embeddings(x))
  for i = 1, 2 do h = tower.encoder.layers[i](h, {}) end
  local want = ty.linear(m.norm(h:select(1, 0)), m.projection.weight)
  local full, early = m:image_features(x, "both")
  check.ok(distance(m:image_features(x, "early"), want) < 1e-6)
  check.ok(distance(early, want) < 1e-6)
  check.ok(distance(m:image_features(x), m.clip:image_features(x)) == 0 and distance(full, m:image_features(x)) == 0)
  -- A tower of two layers with these weights, the exit's in the places of its own.
  local short = clip(2)
  local weights = m.clip:state_dict()
  for name in pairs(weights) do
    if name:find "vision_model.encoder.layers.[23]%." then weights[name] = nil end
  end
  weights["vision_model.post_layernorm.weight"], weights["vision_model.post_layernorm.bias"] = m.norm.weight,
    m.norm.bias
  weights["visual_projection.weight"] = m.projection.weight
  short:load_state_dict(weights)
  check.ok(distance(short:image_features(x), want) < 1e-6)
  -- A new exit gives what the whole tower's norm and projection make of its layer.
  local fresh = icar.EarlyExit(clip(), { layer = 3 })
  check.ok(distance(fresh.projection.weight, fresh.clip.visual_projection.weight) == 0)
  local tokens = ty.tensor { { 14, 3, 5, 2, 15 } }
  check.ok(distance(m:text_features(tokens), m.clip:text_features(tokens)) == 0)
end)

check.test("the early path does less: layers behind the exit are not run", function()
  local m, ran = model(1), 0
  for i = 1, 4 do
    local layer = m.clip.vision_model.encoder.layers[i]
    local forward = layer.forward
    rawset(layer, "forward", function(...)
      ran = ran + 1
      return forward(...)
    end)
  end
  local function count(fn)
    ran = 0
    fn()
    return ran
  end
  local x = ty.randn(6, 1, 8, 8)
  check.equal(count(function() m:image_features(x, "early") end), 1)
  check.equal(count(function() m:image_features(x, "both") end), 4)
  check.equal(count(function() m:route(x, ty.zeros(6), 1) end), 1)
  check.equal(count(function() m:route(x, ty.ones(6), 1) end), 4)
end)

check.test("routing: the ends of the threshold, and mixed batches as one by one", function()
  local m, x = model(2), ty.randn(9, 1, 8, 8)
  local scores = ty.tensor { 0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.5, 0.4 }
  local full, early = nn.normalize(m:image_features(x)), nn.normalize(m:image_features(x, "early"))
  local all, count = m:route(x, scores, 1)
  check.ok(distance(all, early) < 1e-6 and count == 9, "always early")
  all, count = m:route(x, scores, 0)
  check.ok(distance(all, full) < 1e-6 and count == 0, "always full")
  all, count = m:route(x, scores, 0.5)
  check.equal(count, 4)
  for i = 0, 8 do
    local own = i == 0 or i == 3 or i == 5 or i == 8
    check.ok(distance(all[i], (own and early or full)[i]) < 1e-5, "picture " .. i)
    local alone = m:route(x:narrow(0, i, 1), scores:narrow(0, i, 1), 0.5)
    check.ok(distance(all[i], alone[0]) < 1e-5, "picture " .. i .. " alone")
  end
end)

check.test("complexity and thresholds", function()
  check.close(icar.complexity(ty.tensor { { 0.0, 0.0, 0.0 }, { 9.0, -99.0, -99.0 }, { -99.0, -99.0, 1.0 },
    { 0.0, -99.0, math.log(3) } }):tolist(), { 0.5, 0, 1, 0.75 }, 1e-6)
  local scores = ty.tensor { 0.4, 0.1, 0.3, 0.2 }
  for count = 0, 4 do
    check.equal(scores:lt(icar.threshold(scores, count / 4)):to("i64"):sum():item(), count)
  end
  -- Of scenes: more objects and busier backgrounds are more complex.
  local function scene(count, kind)
    local objects = {}
    for i = 1, count do objects[i] = { object = i, visible = 1 } end
    return { objects = objects, background = { kind = kind } }
  end
  local c = datasets.scenes.complexity { scene(1, "plain"), scene(1, "photo"), scene(3, "photo"), scene(5, "photo") }
  check.equal(c[1], 0.0)
  check.ok(c[1] < c[2] and c[2] < c[3] and c[3] < c[4] and c[4] <= 1)
end)

check.test("the loss is that of both paths, and both get gradients", function()
  local m, x = model(2), ty.randn(6, 1, 8, 8)
  local text = ty.randn(6, 12)
  local loss, full, early = icar.loss(m, x, text, 0.5)
  local scale = m.clip.logit_scale:exp()
  check.close(full:item(), vlm.contrastive_loss(m:image_features(x), text, scale):item(), 1e-6)
  check.close(early:item(), vlm.contrastive_loss(m:image_features(x, "early"), text, scale):item(), 1e-6)
  check.close(loss:item(), full:item() + 0.5 * early:item(), 1e-6)
  icar.loss(m, x, text, 0):backward()
  check.equal(m.projection.weight.grad:abs():max():item(), 0.0, "without weight the exit learns nothing")
  m:zero_grad()
  early:backward()
  local layers = m.clip.vision_model.encoder.layers
  check.ok(layers[2].mlp.fc1.weight.grad:abs():max():item() > 0, "the exit teaches what lies before it")
  check.ok(layers[3].mlp.fc1.weight.grad == nil, "and nothing behind it")
end)

check.test("fit: both paths find the texts of pictures", function()
  ty.manual_seed(1)
  local pictures, tokens = ty.randn(64, 1, 8, 8) * 0.1, ty.full({ 64, 5 }, 14, { dtype = "i64" })
  for i = 0, 63 do
    local y, x = i % 8 // 4 * 4, i % 4 * 2
    pictures[("%d, 0, %d:%d, %d:%d"):format(i, y, y + 4, x, x + 2)]:fill_(1)
  end
  tokens[":, 2"]:copy_(ty.arange(64) % 8 + 2)
  tokens[":, 4"]:fill_(15)
  local set = ty.data.TensorDataset { image = pictures, tokens = tokens }
  local m = icar.EarlyExit(clip(2), { layer = 1 })
  icar.fit(m, ty.data.DataLoader(set, { batch_size = 8 }), { steps = 120, lr = 3e-3, warmup = 10, quiet = true })
  m:eval()
  local text = m:text_features(tokens["0:8"])
  for _, path in ipairs { "full", "early" } do
    local found = vlm.recall((m:image_features(pictures["8:16"], path)), text, { at = { 1 } }).captions[1]
    check.ok(found > 0.6, ("%s: %.3f, by chance 0.125"):format(path, found))
  end
  -- Features in place of tokens: the text tower stays as it is.
  local before = m.clip.text_projection.weight:detach():clone()
  local fixed = ty.data.TensorDataset { image = pictures, tokens = ty.no_grad(function()
    return m:text_features(tokens)
  end) }
  icar.fit(m, ty.data.DataLoader(fixed, { batch_size = 8 }), { steps = 2, quiet = true, weight_decay = 0 })
  check.ok(distance(m.clip.text_projection.weight, before) == 0)
  -- The exit learns at a rate of its own: Adam's first step is the rate, whatever the gradient.
  for _, rate in ipairs { 1, 10 } do
    local one = icar.EarlyExit(clip(2), { layer = 1 })
    local exit, tower = one.projection.weight, one.clip.visual_projection.weight
    local was = { exit:detach():clone(), tower:detach():clone() }
    icar.fit(one, ty.data.DataLoader(fixed, { batch_size = 8 }), { steps = 1, lr = 1e-3, exit_rate = rate, warmup = 0,
      weight_decay = 0, quiet = true })
    check.close(distance(exit, was[1]) / distance(tower, was[2]), rate, 0.02 * rate)
  end
end)

check.test("wrong arguments", function()
  check.fails(function() icar.EarlyExit(nn.Linear(1, 1), { layer = 1 }) end, "model: expected a CLIPModel")
  check.fails(function() icar.EarlyExit(clip(), { layer = 4 }) end, "layer: expected an integer in [1, 3], got 4")
  check.fails(function() icar.EarlyExit(clip(), {}) end, "layer: expected an integer in [1, 3], got nil")
  local m = model(1)
  check.fails(function() m:image_features(ty.ones(1, 1, 8, 8), "late") end, 'path: expected "full" or "early"')
  check.fails(function() m:route(ty.ones(2, 1, 8, 8), ty.ones(3), 1) end, "EarlyExit:route: expected pictures")
  check.fails(function() icar.loss(clip(), ty.ones(1), ty.ones(1)) end, "model: expected an EarlyExit, got a module")
  check.fails(function() icar.complexity(ty.ones(2, 1)) end, "logits: expected [n, 2 levels or more]")
  check.fails(function() icar.threshold(ty.ones(2), 1.5) end, "share: expected a number in [0, 1], got 1.5")
  check.fails(function() datasets.scenes.complexity { {} } end, "a scene's objects: expected a list of tables")
end)

check.finish()
