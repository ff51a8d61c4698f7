-- Next-scale prediction: the residual tokenizer, VAR and MVAR, the loop that draws tokens and its parts.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"

local tokens = diffusion.tokens
local SCALES = { 1, 2, 3, 4 }

local function tokenizer(options)
  ty.manual_seed(1)
  local o = { hidden = 8, width = 6, codes = 12, scales = SCALES }
  for key, value in pairs(options or {}) do o[key] = value end
  return models.ScaleTokenizer(o)
end

-- A network whose gates and head are open, so that all of it counts.
local function network(attention, window)
  ty.manual_seed(2)
  local model = models.VAR { scales = SCALES, codes = 12, inputs = 6, classes = 3, width = 16, depth = 2, heads = 2,
    attention = attention, window = window }
  for _, p in ipairs(model:parameters()) do
    ty.no_grad(function() p:copy_(ty.randn_like(p) * 0.3) end)
  end
  return model:eval()
end

local function difference(a, b) return (a - b):abs():max():item() end

check.test("tokens of all scales add up to what is decoded, and inputs are sums brought to the next size", function()
  local t = tokenizer():eval()
  local x = ty.randn(3, 3, 16, 16)
  local ids = t:encode(x)
  check.equal(#ids, 4)
  check.equal(t.length, 30)
  check.close(t.bits, 30 * math.log(12, 2), 1e-12)
  local sum, rest = nil, t:features(x)
  local inputs = t:inputs(ids)
  for l, side in ipairs(SCALES) do
    -- The codes are the nearest to the means of what is left, by all distances.
    local places = rest:interpolate({ side, side }, { mode = "area" }):flatten(2):transpose(1, 2)
    local nearest = places:reshape(-1, 6):cdist(t.codebook.weight):argmin(1):reshape(3, -1)
    check.equal(ids[l]:tolist(), nearest:tolist())
    if l > 1 then
      local pooled = sum:interpolate({ side, side }, { mode = "area" }):flatten(2):transpose(1, 2)
      check.equal(difference(inputs[l - 1], pooled) < 1e-6, true)
    end
    local map = t.codebook.weight:index_select(0, ids[l]:flatten()):reshape(3, side, side, 6):permute(0, 3, 1, 2)
    local raised = map:interpolate({ 4, 4 }, { mode = "bicubic" })
    raised = raised / 2 + t.smooth[l](raised) / 2
    sum = sum and sum + raised or raised
    rest = t:features(x) - sum
  end
  check.equal(difference(t:decode(ids), t.decoder(sum)) < 1e-5, true)
  check.equal(difference(t(x), t.decoder(sum)) < 1e-5, true)
end)

check.test("places of the last scale have one, two or four pixels a side", function()
  for _, factor in ipairs { 1, 2, 4 } do
    local t = tokenizer { factor = factor }:eval()
    local x = ty.randn(2, 3, 4 * factor, 4 * factor)
    check.equal(t:encode(x)[4].shape, { 2, 16 })
    check.equal(t(x).shape, x.shape)
  end
end)

check.test("straight through: the features get the gradient of what is decoded", function()
  local t = tokenizer { commitment = 0 }
  local x = ty.randn(2, 3, 16, 16)
  t:eval()
  local features = t:features(x)
  local g = ty.grad(t(x):square():sum(), { t.encoder[1].weight })[1]
  local sum = features:detach()
  for _ = 1, 1 do
    local total
    for l, ids in ipairs(t:encode(x)) do total = t:add(total, ids, l) end
    sum = total:detach():requires_grad_()
  end
  local of_sum = ty.grad(t.decoder(sum):square():sum(), { sum })[1]
  local want = ty.grad((features * of_sum:detach()):sum(), { t.encoder[1].weight })[1]
  check.equal(difference(g, want) < 1e-4 * want:abs():max():item(), true)
end)

check.test("a codebook follows the means of what chose it, and dead codes are put on data", function()
  local book = models.Codebook(3, 2, { decay = 0.5, least = 0.2 })
  local x = ty.tensor { { 0, 0 }, { 0, 2 }, { 10, 10 }, { 10, 12 }, { -9, 1 }, { -9, 3 } }
  book.weight:copy_(ty.tensor { { 0, 1 }, { 10, 10 }, { -9, 2 } })
  book.count:fill_(1)
  book.sum:copy_(book.weight)
  local ids = book:nearest(x)
  check.equal(ids:tolist(), { 0, 0, 1, 1, 2, 2 })
  book:follow(x, ids)
  -- (0.5 * old + 0.5 * sum) / (0.5 * 1 + 0.5 * 2)
  check.close(book.weight[1][0]:item(), (0.5 * 10 + 0.5 * 20) / 1.5, 1e-5)
  check.close(book.weight[1][1]:item(), (0.5 * 10 + 0.5 * 22) / 1.5, 1e-5)
  book:follow(x:narrow(0, 0, 4), ids:narrow(0, 0, 4))
  for _ = 1, 4 do book:follow(x:narrow(0, 0, 4), ids:narrow(0, 0, 4)) end
  local third = book.weight:narrow(0, 2, 1)
  check.equal((x - third):square():sum(1):min():item() < 1e-8, true)
end)

check.test("a window over the grid is attention within the scale; a smaller one is that under its mask", function()
  local wide, scale = network("window", 4), network "scale"
  scale:load_state_dict(wide:state_dict())
  local inputs, labels = tokenizer():inputs(tokenizer():eval():encode(ty.randn(2, 3, 16, 16))), ty.tensor { 0, 2 }
  check.equal(difference(wide(inputs, { labels = labels }), scale(inputs, { labels = labels })) < 1e-5, true)
  local q, k, v = ty.randn(2, 2, 5, 6, 3), ty.randn(2, 2, 5, 6, 3), ty.randn(2, 2, 5, 6, 4)
  local rows = {}
  local function begin(i, n, w) return math.max(0, math.min(i - w // 2, n - w)) end
  for i = 0, 29 do
    rows[i + 1] = {}
    for j = 0, 29 do
      local y, x = begin(i // 6, 5, 3), begin(i % 6, 6, 3)
      rows[i + 1][j + 1] = (j // 6 >= y and j // 6 < y + 3 and j % 6 >= x and j % 6 < x + 3) and 1 or 0
    end
  end
  local want = ty.scaled_dot_product_attention(q:flatten(2, 3), k:flatten(2, 3), v:flatten(2, 3),
    ty.tensor(rows):to "bool")
  check.equal(difference(ty.neighbourhood_attention(q, k, v, 3):flatten(2, 3), want) < 1e-5, true)
end)

check.test("scale by scale gives the logits, the loss and the gradients of all at once", function()
  local t, x, labels = tokenizer():eval(), ty.randn(2, 3, 16, 16), ty.tensor { 1, 2 }
  local inputs, condition = t:inputs(t:encode(x)), { labels = labels }
  for _, kind in ipairs { "full", "scale", "window" } do
    local model = network(kind)
    local all = model(inputs, condition)
    local cache = kind == "full" and models.KVCache.new(2) or nil
    local parts = {}
    ty.no_grad(function()
      for l in ipairs(SCALES) do parts[l] = model:scale(l, inputs[l - 1], condition, cache) end
    end)
    check.equal(difference(ty.concat(parts, 1), all) < 1e-4, true, kind)
    local way, batch = tokens.next_scale(model, t), nil
    batch = way:material(x)
    batch.labels = labels
    local list = model:parameters()
    local loss = way:loss(batch)
    check.equal(difference(loss, ty.nn.cross_entropy(all:flatten(0, 1), batch.ids:flatten())) < 1e-5, true)
    if kind ~= "full" then
      local want = ty.grad(loss, list)
      check.close(way:backward(batch), loss:item(), 1e-5)
      for i, p in ipairs(list) do
        check.equal(difference(p.grad, want[i]) < 1e-5, true, kind)
      end
    else
      check.fails(function() way:backward(batch) end, "NextScale:backward: model: expected one whose scales")
    end
  end
end)

check.test("who sees whom: full sees the coarser scales, scale its own, window its places", function()
  local inputs = tokenizer():inputs(tokenizer():eval():encode(ty.randn(1, 3, 16, 16)))
  local condition = { labels = ty.tensor { 0 } }
  local function changed(kind, scale, place)
    local model = network(kind)
    local other = { table.unpack(inputs) }
    other[scale - 1] = inputs[scale - 1]:clone()
    other[scale - 1]:narrow(1, place, 1):fill_(3)
    local d = (model(inputs, condition) - model(other, condition)):abs():amax { 0, 2 }
    local list = {}
    for i, x in ipairs(d:tolist()) do if x > 1e-6 then list[#list + 1] = i - 1 end end
    return list
  end
  -- Scale 3 has the tokens 5 to 13, scale 4 those from 14 on.
  local function range(a, b)
    local list = {}
    for i = a, b do list[#list + 1] = i end
    return list
  end
  check.equal(changed("full", 3, 0), range(5, 29))
  check.equal(changed("scale", 3, 0), range(5, 13))
  check.equal(changed("scale", 4, 0), range(14, 29))
  -- Two layers of 3 x 3 windows, moved inwards: the corner reaches all but the last row and column of four.
  local seen = {}
  for _, i in ipairs(changed("window", 4, 0)) do seen[i - 14] = true end
  for i = 0, 15 do check.equal(seen[i] or false, true) end
end)

check.test("the loop: guidance 1 is none, a scale guides, seeds repeat, temperature 0 takes the likeliest", function()
  local t = tokenizer():eval()
  for _, kind in ipairs { "full", "window" } do
    local way = tokens.next_scale(network(kind), t)
    local condition = { labels = ty.tensor { 0, 1, 2 } }
    local a = tokens.sample(way, condition, { seed = 5 })
    local b = tokens.sample(way, condition, { seed = 5 })
    check.equal(#a, 4)
    for l, side in ipairs(SCALES) do
      check.equal(a[l].shape, { 3, side * side })
      check.equal(a[l]:tolist(), b[l]:tolist())
    end
    check.equal(t:decode(a).shape, { 3, 3, 16, 16 })
    -- Guided by the null condition's own labels, scales say nothing.
    local null = { labels = ty.full({ 2 }, 3, { dtype = "i64" }) }
    local plain = tokens.sample(way, null, { seed = 6 })
    local guided = tokens.sample(way, null, { seed = 6, guidance = tokens.rising(4) })
    for l in ipairs(SCALES) do check.equal(plain[l]:tolist(), guided[l]:tolist()) end
    -- The likeliest, step by step, by hand.
    local greedy = tokens.sample(way, condition, { draw = tokens.categorical { temperature = 0 }, guidance = 2 })
    local model, cache, other, sum = way.model, nil, nil, nil
    if kind == "full" then cache, other = models.KVCache.new(2), models.KVCache.new(2) end
    for l in ipairs(SCALES) do
      local input = l > 1 and t:input(sum, l) or nil
      local ids = ty.no_grad(function()
        local said = model:scale(l, input, condition, cache)
        local nothing = model:scale(l, input, { labels = ty.full({ 3 }, 3, { dtype = "i64" }) }, other)
        return (nothing + (said - nothing) * 2):argmax(-1)
      end)
      check.equal(greedy[l]:tolist(), ids:tolist())
      sum = t:add(sum, ids, l)
    end
  end
end)

check.test("parts of the loop", function()
  local logits = ty.tensor { { { 0, 5, 1 }, { 3, 0, 0 } } }
  check.equal(tokens.categorical { temperature = 0 }(logits):tolist(), { { 1, 0 } })
  check.equal(tokens.categorical { top_k = 1 }(logits):tolist(), { { 1, 0 } })
  check.equal(tokens.guided(ty.tensor { 2.0 }, ty.tensor { 1.0 }, 3):tolist(), { 4.0 })
  check.equal(tokens.bernoulli { temperature = 0 }(ty.tensor { { -1.0, 2.0 } }):tolist(), { { 0.0, 1.0 } })
  check.close(tokens.rising(3)(0.5), 2, 1e-12)
  ty.manual_seed(3)
  local many = ty.zeros(1, 20000, 3) + ty.tensor { 0.0, math.log(2), math.log(5) }
  local share = tokens.categorical()(many):flatten():bincount():to "f64" / 20000
  check.close(share[1]:item(), 2 / 8, 0.02)
end)

check.test("a tokenizer learns, and its table says what comes back", function()
  ty.manual_seed(4)
  local t = tokenizer()
  local x = (ty.rand(32, 3, 1, 1) * 2 - 1):expand(32, 3, 16, 16):contiguous()
  local before = tokens.reconstruction(t:eval(), x)
  local loader = ty.data.DataLoader(ty.data.TensorDataset { image = x }, { batch_size = 16, shuffle = true })
  tokens.fit(t, loader, { steps = 150, lr = 5e-3, quiet = true })
  local after, back = tokens.reconstruction(t, x, { features = function(y) return y:mean { 2, 3 } end })
  check.equal(after.psnr > before.psnr + 5, true)
  check.equal(back.shape, { 32, 3, 16, 16 })
  check.close(after.bits, t.bits, 0)
  check.equal(after.frechet >= -1e-6 and after.frechet < 1, true)
end)

check.test("errors", function()
  check.fails(function() models.VAR { codes = 3, inputs = 2 } end, "VAR: scales: expected what the tokenizer has")
  check.fails(function() models.ScaleTokenizer { scales = { 2, 2 } } end, "ScaleTokenizer: scales: expected rising")
  check.fails(function() tokenizer():encode(ty.zeros(1, 3, 8, 8)) end,
    "ScaleTokenizer: pictures: expected [n, 3, 16, 16]")
  check.fails(function() network "full":scale(1, nil, { labels = ty.tensor { 0 } }) end, "VAR:scale: cache")
  check.fails(function() network "scale":scale(2, nil, { labels = ty.tensor { 0 } }) end, "VAR:scale: input")
  check.fails(function() network "scale"({}, { labels = ty.tensor { 0 } }) end, "VAR: inputs: expected one")
  check.fails(function() network "scale"({}, {}) end, "VAR: inputs")
  check.fails(function() tokens.next_scale(network "scale", tokenizer { scales = { 1, 2 } }) end,
    "tokens.next_scale: model: expected the scales")
  check.fails(function() tokens.sample({}, {}) end, "tokens.sample: way.begin")
end)

check.finish()
