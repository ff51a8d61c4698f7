-- Masked autoregression over continuous tokens, and preferences between samples.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local distill = require "tycho.distill"
local models = require "tycho.models"

local tokens, preference = diffusion.tokens, diffusion.preference

local function difference(a, b) return (a - b):abs():max():item() end

-- A network whose gates and head are open, so that all of it counts.
local function network()
  ty.manual_seed(2)
  local model = models.MAR { tokens = 9, channels = 2, text = 3, width = 16, encoder = 1, decoder = 1, heads = 2,
    head_width = 16, head_depth = 1 }
  for _, p in ipairs(model:parameters()) do
    ty.no_grad(function() p:copy_(ty.randn_like(p) * 0.3) end)
  end
  return model:eval()
end
local function condition(n)
  return { text = { embeddings = ty.data.with_seed(8, function() return ty.randn(n, 2, 3) end) } }
end

check.test("vectors look at the visible places and the text, and at nothing else", function()
  local model, x = network(), ty.randn(2, 9, 2)
  local visible = ty.tensor { { 4, 0, 7 }, { 1, 2, 8 } }
  local z = model(x, visible, condition(2))
  check.equal(z.shape, { 2, 9, 16 })
  -- The order of the visible does not count, what is hidden does not either.
  check.equal(difference(z, model(x, ty.tensor { { 7, 4, 0 }, { 8, 1, 2 } }, condition(2))) < 1e-5, true)
  local other = ty.randn(2, 9, 2):scatter(1, visible:unsqueeze(2):expand(-1, -1, 2),
    x:gather(1, visible:unsqueeze(2):expand(-1, -1, 2)))
  check.equal(difference(z, model(other, visible, condition(2))) < 1e-6, true)
  other = x:clone()
  other:narrow(1, 4, 1):fill_(3)
  local d = (model(other, visible, condition(2)) - z):abs():amax { 1, 2 }:tolist()
  check.equal({ d[1] > 1e-4, d[2] < 1e-6 }, { true, true })
  local changed = condition(2)
  changed.text.embeddings = changed.text.embeddings + 1
  check.equal(difference(z, model(x, visible, changed)) > 1e-4, true)
  check.equal(model(x, visible:narrow(1, 0, 0), condition(2)).shape, { 2, 9, 16 })
end)

check.test("places are filled by the cosine schedule, each once; what is given stays; nothing masked stays as it is",
  function()
    local way, seen = tokens.masked(network(), { steps = 4, head_steps = 2 }), {}
    local function draw(said)
      seen[#seen + 1] = said.shape[2]
      return ty.full({ said.shape[1], said.shape[2], 2 }, #seen * 1.0)
    end
    local got = tokens.sample(way, condition(3), { draw = draw, seed = 1 })
    -- floor(9 cos(pi s / 8)) = 8, 6, 3 are left after the first three steps.
    check.equal(seen, { 1, 2, 3, 3 })
    for i = 0, 2 do
      local count = { 0, 0, 0, 0 }
      for _, v in ipairs(got:select(0, i):select(1, 0):tolist()) do count[v // 1 | 0] = count[v // 1 | 0] + 1 end
      check.equal(count, { 1, 2, 3, 3 })
    end
    check.equal(difference(got:select(0, 0), got:select(0, 1)) > 0, true) -- other orders
    local x = ty.randn(2, 9, 2)
    local all = ty.arange(9):unsqueeze(0):expand(2, -1)
    check.equal(tokens.sample(way:given(x, all), condition(2), { guidance = 2,
      null = { text = { embeddings = ty.zeros(1, 2, 3) } } }):tolist(), x:tolist())
    local places = ty.tensor { { 2, 5, 6 }, { 0, 1, 8 } }
    local some = tokens.sample(way:given(x, places), condition(2), { seed = 2 })
    local index = places:unsqueeze(2):expand(-1, -1, 2)
    check.equal(some:gather(1, index):tolist(), x:gather(1, index):tolist())
    check.equal((some - x):abs():sum(2):gt(0):to("i64"):sum(1):tolist(), { 6, 6 })
  end)

check.test("the head draws under guidance, and the loop is the same for the same seed", function()
  local way = tokens.masked(network(), { steps = 3, head_steps = 3 })
  local null = { text = { embeddings = ty.zeros(1, 2, 3) } }
  local a = tokens.sample(way, condition(2), { seed = 4, guidance = 2, null = null })
  local b = tokens.sample(way, condition(2), { seed = 4, guidance = 2, null = null })
  check.equal(a:tolist(), b:tolist())
  check.equal(a:isfinite():all():item(), true)
  check.equal(difference(a, tokens.sample(way, condition(2), { seed = 4 })) > 1e-4, true)
end)

check.test("errors: those of the head at masked places, the same under the same seed, with gradients to all", function()
  local model = network()
  local way, x = tokens.masked(model, { ratio = { 0.5, 0.5 } }), ty.randn(3, 9, 2)
  local function errors(y, options)
    return ty.data.with_seed(6, function() return way:errors(y or x, condition(3), options) end)
  end
  check.equal(errors().shape, { 3 })
  check.equal(errors():tolist(), errors():tolist())
  check.equal(errors(nil, { repeats = 3 }).shape, { 3 })
  -- By hand, with what is drawn in the same order.
  local want = ty.data.with_seed(6, function()
    local order = ty.rand(3, 9):argsort(1)
    ty.rand { 1 }
    local hidden, visible = order:narrow(1, 0, 5), order:narrow(1, 5, 4)
    local index = hidden:unsqueeze(2)
    local z = model(x, visible, condition(3)):gather(1, index:expand(-1, -1, 16)):reshape(-1, 16)
    local target = x:gather(1, index:expand(-1, -1, 2)):reshape(-1, 2)
    local flow = diffusion.Flow()
    local t = flow.objective:draw_times(15)
    local noise = ty.randn_like(target)
    local at = t:reshape(-1, 1)
    local said = model.head(target * (1 - at) + noise * at, t * 1000, { z = z })
    return (said - (noise - target)):square():mean { 1 }:reshape(3, 5):mean { 1 }
  end)
  check.equal(difference(errors(), want) < 1e-5, true)
  for _, g in ipairs(ty.grad(way:loss(x, condition(3)), model:parameters())) do
    check.equal(g:abs():sum():item() > 0, true)
  end
end)

check.test("DPO: log 2 at the reference, its formula, and exchanged pairs turn the gradient there about", function()
  local model = network()
  local w, l = ty.randn(4, 9, 2), ty.randn(4, 9, 2)
  local function errors(m, x, c) return tokens.masked(m):errors(x, c) end
  local pair = { winner = w, loser = l, condition = condition(4) }
  local list = model:parameters()
  local loss, parts = preference.dpo(model, model:clone(), errors, pair, { beta = 7, seed = 3 })
  check.close(loss:item(), math.log(2), 1e-6)
  check.close(parts.margin:item(), 0, 1e-7)
  local g = ty.grad(loss, list)
  local turned = ty.grad(preference.dpo(model, model:clone(), errors, { winner = l, loser = w,
    condition = condition(4) }, { beta = 7, seed = 3 }), list)
  local largest = 0
  for i in ipairs(list) do
    largest = math.max(largest, g[i]:abs():max():item())
    check.equal(difference(g[i], -turned[i]) < 1e-5, true)
  end
  check.equal(largest > 1e-3, true)
  -- Another reference: the formula.
  local other = model:clone()
  for _, p in ipairs(other:parameters()) do ty.no_grad(function() p:add_(0.05) end) end
  local function of(m, x) return ty.data.with_seed(3, function() return errors(m, x, condition(4)) end) end
  local inside = -7 * ((of(model, w) - of(other, w)) - (of(model, l) - of(other, l)))
  local want = (1 + (-inside):exp()):log():mean():item()
  check.close(preference.dpo(model, other, errors, pair, { beta = 7, seed = 3 }):item(), want, 1e-5)
  -- The reference is not trained.
  preference.dpo(model, other, errors, pair, { seed = 3 }):backward()
  for _, p in ipairs(other:parameters()) do check.equal(p.grad, nil) end
end)

check.test("pairs: the best and the worst draw of each condition, where they differ", function()
  local samples = ty.arange(6):to("f32"):reshape(3, 2, 1)
  local scores = ty.tensor { { 0.1, 0.5 }, { 0.9, 0.5 }, { 0.3, 0.5 } }
  local w, l, which = preference.pairs(samples, scores)
  check.equal({ w:tolist(), l:tolist(), which:tolist() }, { { { 2.0 } }, { { 0.0 } }, { 0 } })
  check.equal(preference.pairs(samples, scores, 0.9).shape, { 0, 1 })
end)

check.test("captions of shapes: apart, each as often; shares of what is right", function()
  local shapes = distill.shapes
  local first, rest, seen = shapes.captions(0, 48, 96), shapes.captions(48, 16, 32), {}
  for _, of in ipairs { first, rest } do
    for _, row in ipairs(of:tolist()) do
      local key = table.concat(row, " ")
      seen[key] = (seen[key] or 0) + 1
    end
  end
  local count = 0
  for _, n in pairs(seen) do count = count + (n == 2 and 1 or 100) end
  check.equal(count, 64)
  local labels = shapes.captions(0, 64, 64)
  check.equal(shapes.shares((shapes.draw(labels)), labels), { colour = 1.0, kind = 1.0, place = 1.0, all = 1.0 })
  local moved = labels:clone()
  moved:narrow(0, 0, 16):select(1, 2):copy_((labels:narrow(0, 0, 16):select(1, 2) + 1) % 4)
  check.equal(shapes.shares((shapes.draw(moved)), labels), { colour = 1.0, kind = 1.0, place = 0.75, all = 0.75 })
end)

check.test("a painter and a classifier of shapes run", function()
  local painter, flow = distill.shape_painter.painter { steps = 2, width = 16, batch = 4 }
  local x = flow:sample(painter, { 2, 3, 8, 8 }, { steps = 2,
    condition = { text = { embeddings = distill.shapes.text(distill.shapes.labels(2)) } } })
  local p = distill.shape_painter.classifier("kind", { steps = 2, pictures = 8 })(x)
  check.equal(p.shape, { 2, 4 })
  check.close(p:sum():item(), 2, 1e-5)
end)

check.test("errors of arguments", function()
  check.fails(function() models.MAR { tokens = 8, channels = 2, text = 2 } end, "MAR: tokens: expected the square")
  check.fails(function() models.MAR { tokens = 4, channels = 2 } end, "MAR: text: expected an integer >= 1, got nil")
  check.fails(function() network()(ty.zeros(1, 4, 2), ty.zeros({ 1, 0 }, { dtype = "i64" }), condition(1)) end,
    "MAR: x: expected [n, 9, 2]")
  check.fails(function() network()(ty.zeros(1, 9, 2), ty.zeros({ 1, 0 }, { dtype = "i64" }), {}) end,
    "MAR: condition.text.embeddings: expected [1, words, width]")
  check.fails(function() tokens.masked(network(), { steps = 0 }) end, "tokens.masked: steps")
  check.fails(function() preference.pairs(ty.zeros(2, 3), ty.zeros(2, 4)) end, "preference.pairs: scores: expected")
  check.fails(function() preference.dpo(network(), network(), 3, {}) end, "preference.dpo: errors: expected a function")
  check.fails(function() distill.shapes.captions(60, 10, 3) end, "distill.shapes.captions: count")
  check.fails(function() distill.shape_painter.painter { width = 20 } end, "distill.shapes.painter: width")
  check.fails(function() distill.shape_painter.classifier "size" end, "distill.shapes.classifier: word")
end)

check.finish()
