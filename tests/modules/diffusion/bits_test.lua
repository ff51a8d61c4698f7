-- Bits: the tokenizer without a grid, diffusion of bits, tokens one after the other.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"

local tokens, process = diffusion.tokens, diffusion.binary()

local function difference(a, b) return (a - b):abs():max():item() end

local function tokenizer(options)
  ty.manual_seed(1)
  local o = { size = 8, channels = 1, patch = 2, tokens = 3, bits = 5, hidden = 16, heads = 2, depth = 1 }
  for key, value in pairs(options or {}) do o[key] = value end
  return models.BitTokenizer(o)
end

-- A network of tokens whose gates and head are open, so that all of it counts.
local function network(options)
  ty.manual_seed(2)
  local o = { tokens = 4, bits = 3, classes = 3, hidden = 16, depth = 2, heads = 2 }
  for key, value in pairs(options or {}) do o[key] = value end
  local model = models.BitTransformer(o)
  for _, p in ipairs(model:parameters()) do
    ty.no_grad(function() p:copy_(ty.randn_like(p) * 0.3) end)
  end
  return model:eval()
end

check.test("the forward kernel composes: two steps are one", function()
  local b = ty.tensor({ 0, 1, 0, 1 }, { dtype = "f64" })
  for _, times in ipairs { { 0.1, 0.5, 0.9 }, { 0, 0.3, 1 }, { 0.2, 0.2, 0.7 } } do
    local r, s, t = table.unpack(times)
    local first = process.keep(s) / process.keep(r)
    local second = process.keep(t) / process.keep(s)
    local two = process.forward(process.forward(b, first), second)
    check.equal(difference(two, process.forward(b, process.keep(t) / process.keep(r))) < 1e-14, true)
  end
  check.equal(process.forward(b, process.keep(0)):tolist(), b:tolist())
  check.equal(difference(process.forward(b, process.keep(1)), ty.full_like(b, 0.5)) < 1e-15, true)
  -- Each sample at a time of its own.
  local each = process.forward(ty.ones(2, 3), process.keep(ty.tensor { 0.0, 1.0 }))
  check.equal(difference(each, ty.tensor { { 1.0, 1.0, 1.0 }, { 0.5, 0.5, 0.5 } }) < 1e-6, true)
end)

-- The posterior from the joint distribution of b_0, b_s and b_t, all eight cases.
local function bayes(bt, clean, s, t)
  local function q(to, from, ratio)
    local one = ratio * from + (1 - ratio) / 2
    return to == 1 and one or 1 - one
  end
  local kept, ratio, result = process.keep(s), process.keep(t) / process.keep(s), { [0] = 0, [1] = 0 }
  for b0 = 0, 1 do
    local sum = 0
    for bs = 0, 1 do sum = sum + q(bt, bs, ratio) * q(bs, b0, kept) end
    for bs = 0, 1 do
      result[bs] = result[bs] + q(bt, bs, ratio) * q(bs, b0, kept) / sum * (b0 == 1 and clean or 1 - clean)
    end
  end
  return result
end

check.test("the posterior sums to 1, is Bayes' rule, and leads back to the forward kernel", function()
  for _, times in ipairs { { 0.2, 0.6 }, { 0.5, 0.95 }, { 0.05, 0.1 } } do
    local s, t = table.unpack(times)
    for bt = 0, 1 do
      for _, clean in ipairs { 0, 0.3, 1 } do
        local want = bayes(bt, clean, s, t)
        check.close(want[0] + want[1], 1, 1e-14)
        local got = process:posterior(ty.full({ 1 }, bt, { dtype = "f64" }),
          ty.full({ 1 }, clean, { dtype = "f64" }), s, t)
        check.close(got:item(), want[1], 1e-14)
        -- That of zeros is that of ones with everything turned about.
        local turned = process:posterior(ty.full({ 1 }, 1 - bt, { dtype = "f64" }),
          ty.full({ 1 }, 1 - clean, { dtype = "f64" }), s, t)
        check.close(got:item() + turned:item(), 1, 1e-14)
      end
    end
    -- sum over b_t of q(b_t | b_0) q(b_s | b_t, b_0) = q(b_s | b_0)
    for b0 = 0, 1 do
      local one = ty.full({ 1 }, b0, { dtype = "f64" })
      local p = process.forward(one, process.keep(t)):item()
      local sum = p * process:posterior(ty.ones({ 1 }, { dtype = "f64" }), one, s, t):item()
        + (1 - p) * process:posterior(ty.zeros({ 1 }, { dtype = "f64" }), one, s, t):item()
      check.close(sum, process.forward(one, process.keep(s)):item(), 1e-14)
    end
  end
  -- At the beginning it is what is thought of the clean bits.
  local clean = ty.tensor({ 0.2, 0.9 }, { dtype = "f64" })
  check.equal(difference(process:posterior(ty.tensor({ 1, 0 }, { dtype = "f64" }), clean, 0, 0.4), clean) < 1e-14, true)
end)

check.test("a network that knows the bits draws them, and its loss is nothing", function()
  local truth = ty.tensor { { { 0.0, 1, 1 }, { 1, 0, 0 } }, { { 1, 1, 0 }, { 0, 0, 1 } } }
  local function knows(x) return (truth * 2 - 1) * 60 + x * 0 end
  local condition = { labels = ty.tensor { 0, 1 } }
  check.close(process:loss(knows, truth, condition):item(), 0, 1e-12)
  local way = process:way(knows, { 2, 3 }, { steps = 7 })
  check.equal(tokens.sample(way, condition, { seed = 3 }):tolist(), truth:tolist())
  -- One that knows nothing is as surprised as a coin.
  check.close(process:loss(function(x) return x * 0 end, truth, condition):item(), math.log(2), 1e-6)
end)

check.test("straight through: drawn bits have the gradient of their probabilities", function()
  local logits = ty.tensor { -2.0, -0.5, 0.0, 0.7, 3.0 }:requires_grad_()
  for _, temperature in ipairs { 1, 0.4 } do
    local bits = models.BitTokenizer.draw(logits, temperature)
    for _, b in ipairs(bits:tolist()) do check.equal(math.abs(b) < 1e-6 or math.abs(b - 1) < 1e-6, true) end
    local weights = ty.tensor { 1.0, -2.0, 0.5, 3.0, 1.0 }
    local g = ty.grad((bits * weights):sum(), { logits })[1]
    local p = (logits:detach() / temperature):sigmoid()
    check.equal(difference(g, weights * p * (1 - p) / temperature) < 1e-6, true)
  end
  check.equal(models.BitTokenizer.draw(logits, 0):tolist(), { 0.0, 0.0, 0.0, 1.0, 1.0 })
  ty.manual_seed(4)
  local share = models.BitTokenizer.draw(ty.full({ 20000 }, math.log(3)), 1):mean():item()
  check.close(share, 0.75, 0.015)
end)

check.test("tokenizers: tokens of each kind, what comes back, and gradients to all of them", function()
  local x = ty.randn(4, 1, 8, 8)
  for name, options in pairs { bits = {}, codes = { kind = "codes" }, plain = { kind = "plain" },
    grid = { grid = true } } do
    local t = tokenizer(options)
    check.equal(t.bits, (options.grid and 4 or 3) * 5, name)
    local back, extra = t(x)
    local g = ty.grad(back:square():sum() + (extra or 0), t:parameters(), { allow_unused = true })
    local missing = 0
    for i in ipairs(t:parameters()) do missing = missing + (g[i] and g[i]:abs():sum():item() > 0 and 0 or 1) end
    check.equal(missing, 0, name)
    t:eval()
    local ids = t:encode(x)
    check.equal(ids.shape, options.kind == "codes" and { 4, 3 } or { 4, options.grid and 4 or 3, 5 }, name)
    check.equal(difference(t:decode(ids), t(x)) < 1e-5, true, name)
    if name == "bits" or name == "grid" then
      check.equal(difference(ids * (1 - ids), ids * 0), 0.0)
      check.equal(difference(ids, t:logits(x):gt(0):to "f32"), 0.0)
    end
  end
end)

check.test("latent tokens have no place: pictures moved by a patch are other tokens, batches do not mix", function()
  local t = tokenizer():eval()
  local x = ty.randn(3, 1, 8, 8)
  local alone = t:logits(x:narrow(0, 1, 1))
  check.equal(difference(t:logits(x):narrow(0, 1, 1), alone) < 1e-5, true)
end)

check.test("token after token: causal, the same with a cache, and its loss", function()
  for _, codes in ipairs { false, 6 } do
    local model = network { causal = true, codes = codes or nil, bits = not codes and 3 or nil }
    local ids = codes and ty.randint(0, 6, { 2, 4 }) or ty.rand(2, 4, 3):gt(0.5):to "f32"
    local condition = { labels = ty.tensor { 0, 2 } }
    ty.no_grad(function()
      local all = model(ids, nil, condition)
      check.equal(all.shape, { 2, 4, codes or 3 })
      local other = ids:clone()
      other:narrow(1, 2, 1):copy_(codes and (ids:narrow(1, 2, 1) + 1) % 6 or 1 - ids:narrow(1, 2, 1))
      local changed = (model(other, nil, condition) - all):abs():amax { 0, 2 }:tolist()
      check.equal({ changed[1] < 1e-6, changed[2] < 1e-6, changed[3] < 1e-6, changed[4] > 1e-4 },
        { true, true, true, true })
      local cache, last = models.KVCache.new(2), nil
      for i = 1, 4 do
        local said = model(last, nil, condition, cache)
        check.equal(difference(said, all:narrow(1, i - 1, 1)) < 1e-5, true)
        last = ids:narrow(1, i - 1, 1)
      end
      local want = codes and -(all:log_softmax(-1):gather(2, ids:unsqueeze(2)):mean())
        or ty.nn.bce_with_logits(all, ids)
      check.close(tokens.next_token(model):loss(ids, condition):item(), want:item(), 1e-5)
    end)
    -- Greedily by the loop and by hand.
    local draw = codes and tokens.categorical { temperature = 0 } or tokens.bernoulli { temperature = 0 }
    local got = tokens.sample(tokens.next_token(model), condition, { draw = draw, guidance = 3 })
    ty.no_grad(function()
      local seen
      for i = 1, 4 do
        local said = model(seen, nil, condition):narrow(1, i - 1, 1)
        local nothing = model(seen, nil, { labels = ty.full({ 2 }, 3, { dtype = "i64" }) }):narrow(1, i - 1, 1)
        local next = nothing + (said - nothing) * 3
        next = codes and next:argmax(-1) or next:gt(0):to "f32"
        seen = seen and ty.concat({ seen, next }, 1) or next
      end
      check.equal(got:tolist(), seen:tolist())
    end)
  end
end)

check.test("a network of noised bits looks at all of them, their time and their label", function()
  local model = network()
  local bits, t = ty.rand(1, 4, 3):gt(0.5):to "f32", ty.tensor { 300.0 }
  local function said(b, time, label) return model(b, time, { labels = ty.tensor { label } }) end
  local base = said(bits, t, 0)
  local other = bits:clone()
  other:narrow(1, 3, 1):copy_(1 - bits:narrow(1, 3, 1))
  for _, changed in ipairs { said(other, t, 0), said(bits, t + 300, 0), said(bits, t, 1) } do
    check.equal((base - changed):narrow(1, 0, 1):abs():max():item() > 1e-4, true)
  end
  check.equal(tokens.sample(process:way(model, { 4, 3 }), { labels = ty.tensor { 0, 1 } },
    { guidance = 2, seed = 1 }).shape, { 2, 4, 3 })
end)

check.test("errors", function()
  check.fails(function() tokenizer { size = 6 } end, "BitTokenizer: size: expected a multiple of 2 * patch, 4, got 6")
  check.fails(function() tokenizer():encode(ty.zeros(1, 1, 4, 4)) end, "BitTokenizer: pictures: expected [n, 1, 8, 8]")
  check.fails(function() tokenizer():decode(ty.zeros(1, 4, 5)) end, "BitTokenizer:decode: tokens: expected [n, 3, 5]")
  check.fails(function() models.BitTransformer { tokens = 3 } end, "BitTransformer: tokens, bits: expected")
  check.fails(function() network()(ty.zeros(1, 4, 3), nil, { labels = ty.tensor { 0 } }) end, "BitTransformer: t:")
  check.fails(function() network()(ty.zeros(1, 4, 3), ty.zeros(1), {}) end, "BitTransformer: condition.labels")
  check.fails(function() tokens.next_token(network()) end, "tokens.next_token: model: expected one with causal")
  check.fails(function() process.keep "a" end, "BinaryProcess.keep: t: expected a number")
  check.fails(function() process:way(network(), { 4, 3 }, { steps = 0 }) end, "BinaryProcess:way: steps")
end)

check.finish()
