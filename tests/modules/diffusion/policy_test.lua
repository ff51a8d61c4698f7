-- Diffusion policies: two-level minibatches against passes for each sample, samples that do not see each other, grouped
-- attention against attention under a mask, words, what is refused.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local mini = require "tycho.models.mini_diffuser"

local policy = diffusion.policy
local process = diffusion.DDPM { steps = 50, drop = 0 }

local function observation(n, dtype)
  local words = ty.randint(1, 9, { n, 5 })
  words["0, 3:5"] = 0 -- a shorter phrase
  return { images = ty.rand({ n, 3, 16, 16 }, { dtype = dtype }) * 2 - 1, words = words,
    states = ty.randn({ n, 4 }, { dtype = dtype }) }
end

-- Every parameter at random: some begin as zeros, which would hide what they multiply.
local function network(options, dtype)
  local o = { words = 9, size = 16, patch = 4, channels = 6, width = 16, heads = 2, phrase = 5 }
  for key, value in pairs(options or {}) do o[key] = value end
  local net = mini.MiniDiffuser(o):to(dtype or "f32")
  for _, p in ipairs(net:parameters()) do ty.no_grad(function() p:add_(ty.randn_like(p) * 0.1) end) end
  return net
end

local function list(x) return x:detach():flatten():tolist() end

check.test("grouped attention is attention under the mask of samples that see the condition and themselves", function()
  ty.manual_seed(1)
  local n, heads, m, s, d = 2, 3, 4, 5, 6
  local function draw(t) return ty.randn({ n, heads, t, d }, { dtype = "f64" }) end
  local q, k, v, own_k, own_v = draw(m), draw(s), draw(s), draw(m), draw(m)
  local there = ty.tensor { { true, true, true, false, true }, { true, true, true, true, true } }:reshape(n, 1, 1, s)
  local own = ty.eye(m):gt(0.5):reshape(1, 1, m, m):expand(n, 1, m, m)
  local mask = ty.concat({ there:expand(n, 1, m, s), own }, 3)
  local keys, values = ty.concat({ k, own_k }, 2), ty.concat({ v, own_v }, 2)
  check.close(list(mini.grouped_attention(q, k, v, own_k, own_v, { mask = there })),
    list(ty.scaled_dot_product_attention(q, keys, values, mask)), 1e-12)
  check.close(list(mini.grouped_attention(q, k, v, own_k, own_v, { leak = true })),
    list(ty.scaled_dot_product_attention(q, keys, values)), 1e-12)
end)

check.test("loss and gradients of n x m samples are the mean of m passes with one sample each", function()
  ty.manual_seed(2)
  local n, m = 3, 4
  local net, seen, actions = network({}, "f64"), observation(n, "f64"), ty.rand({ n, 2 }, { dtype = "f64" }) * 2 - 1
  local t, noise = ty.randint(0, 50, { n * m }), ty.randn({ n * m, 2 }, { dtype = "f64" })
  local names = {}
  for name in net:named_parameters() do names[#names + 1] = name end
  table.sort(names)
  local function gradients(loss)
    local parameters = {}
    for name, p in net:named_parameters() do parameters[name] = p end
    local wanted = {}
    for i, name in ipairs(names) do if not name:match "^hand" then wanted[#wanted + 1] = parameters[names[i]] end end
    return ty.grad(loss, wanted)
  end
  local loss = policy.loss(process, net, seen, actions, { samples = m, t = t, noise = noise })
  local found = gradients(loss)
  local sum, sums = 0, {}
  for j = 0, m - 1 do
    local rows = ty.arange(n) * m + j
    local one = policy.loss(process, net, seen, actions, { t = t:index_select(0, rows),
      noise = noise:index_select(0, rows) })
    sum = sum + one:item() / m
    for i, g in ipairs(gradients(one)) do sums[i] = sums[i] and sums[i] + g / m or g / m end
  end
  check.close(loss:item(), sum, 1e-12)
  for i, g in ipairs(found) do check.ok((g - sums[i]):abs():max():item() < 1e-10, "gradient " .. i) end
  local size = 0
  for _, g in ipairs(found) do size = size + g:abs():max():item() end
  check.ok(size > 1e-3)
end)

check.test("a sample changes no other one, bit for bit; where attention leaks it does", function()
  ty.manual_seed(3)
  local n, m = 2, 4
  for _, leak in ipairs { false, true } do
    local net, seen = network { leak = leak }, observation(n, "f32")
    local x, t = ty.rand({ n * m, 2 }) * 2 - 1, ty.randint(0, 50, { n * m }):to "f32"
    local condition = net:encode(seen)
    local before = net:denoise(x, t, condition)
    local other, later = x:clone(), t:clone()
    other["2, :"], later["2"] = 0.3, 7
    local after = net:denoise(other, later, condition)
    local changed = (after - before):abs():max({ 1 }):gt(0):tolist()
    check.equal(changed, leak and { true, true, true, true, false, false, false, false }
      or { false, false, true, false, false, false, false, false })
  end
end)

check.test("the condition is encoded once and does not depend on samples; padding is not seen", function()
  ty.manual_seed(4)
  local net, seen = network(), observation(2, "f32")
  local calls, encode = 0, net.encode
  local spy = { denoise = function(_, ...) return net:denoise(...) end,
    encode = function(_, o) calls = calls + 1 return encode(net, o) end }
  local actions = ty.rand(2, 2)
  local _, first = policy.loss(process, spy, seen, actions, { samples = 1 })
  local _, second = policy.loss(process, spy, seen, actions, { samples = 5 })
  check.equal(calls, 2)
  check.equal(list(first.tokens), list(second.tokens))
  local x = policy.draw(process, spy, seen, { 2 }, { steps = 3, samples = 4 })
  check.equal(calls, 3)
  check.equal(x.shape, { 8, 2 })
  -- The words of the first phrase end after three; a longer row of padding is the same phrase.
  local short = { images = seen.images:narrow(0, 0, 1), words = seen.words:narrow(0, 0, 1):narrow(1, 0, 3),
    states = seen.states:narrow(0, 0, 1) }
  local t = ty.ones(1)
  check.close(list(net:denoise(actions:narrow(0, 0, 1), t, net:encode(short))),
    list(net:denoise(actions, ty.ones(2), net:encode(seen)):narrow(0, 0, 1)), 1e-5)
end)

check.test("draws follow their seeds, and m draws in a row belong to one observation", function()
  ty.manual_seed(5)
  local net, seen = network(), observation(2, "f32")
  local noise = ty.randn(6, 2)
  local all = policy.draw(process, net, seen, { 2 }, { steps = 4, samples = 3, noise = noise })
  for i = 0, 1 do
    local one = { images = seen.images:narrow(0, i, 1), words = seen.words:narrow(0, i, 1),
      states = seen.states:narrow(0, i, 1) }
    local alone = policy.draw(process, net, one, { 2 }, { steps = 4, samples = 3, noise = noise:narrow(0, 3 * i, 3) })
    check.close(list(alone), list(all:narrow(0, 3 * i, 3)), 1e-5)
  end
end)

check.test("the local query reads the map where the sample is", function()
  local net = mini.MiniDiffuser { words = 2, size = 16, patch = 4, channels = 1, width = 8, heads = 2, window = 3 }
  local map = ty.arange(16, { dtype = "f32" }):reshape(1, 1, 4, 4)
  -- The middle of place (1, 2), in the second row and third column.
  local x = ty.tensor { { { 0.25, -0.25 } } }
  check.close(list(net:gather(x, map)), { 1, 2, 3, 5, 6, 7, 9, 10, 11 }, 1e-5)
end)

check.test("words", function()
  local words = policy.words { "put the Red block", "the bowl" }
  check.equal(words.count, 7)
  check.equal(words:encode({ "The red bowl!", "a block in the bowl" }, 4):tolist(), { { 6, 5, 3, 0 }, { 1, 2, 1, 6 } })
end)

-- Examples as datasets.arm.examples gives them: where the bright square is, the hand goes; in the left half it closes.
local function squares(n)
  local images, targets, hands, tasks = ty.zeros({ n, 3, 16, 16 }, { dtype = "u8" }), {}, {}, {}
  for i = 0, n - 1 do
    local x, y = ty.randint(0, 4, { 2 }):tolist()[1], i % 4
    images:select(0, i):narrow(1, 4 * y, 4):narrow(2, 4 * x, 4):fill_(255)
    targets[2 * i + 1], targets[2 * i + 2] = (4 * x + 2) / 8 - 1, (4 * y + 2) / 8 - 1
    hands[i + 1], tasks[i + 1] = x < 2 and 1 or 0, "go"
  end
  return { images = images, states = ty.zeros(n, 4), tasks = tasks, hands = ty.tensor(hands, { dtype = "f32" }),
    targets = ty.tensor(targets, { dtype = "f32" }):reshape(n, 2), starts = ty.arange(0, n + 1, 2) }
end

check.test("a policy of key poses learns where to go and when to close", function()
  ty.manual_seed(6)
  local examples = squares(64)
  local agent = diffusion.KeyPoses(mini.MiniDiffuser { words = 3, size = 16, channels = 8, width = 32, heads = 2,
    phrase = 2 }, policy.words { "go" }, { phrase = 2 })
  local fitted = agent:fit(examples, { steps = 150, samples = 8, batch = 16, lr = 5e-3 })
  check.ok(fitted.loss < 0.35 and fitted.hand < 0.3 and fitted.seconds > 0)
  local targets, hands = agent:draw(examples)
  local off = (targets - examples.targets):square():sum({ 1 }):sqrt()
  check.ok(ty.stats.median(off:tolist()) < 0.25)
  check.ok(hands:gt(0):eq(examples.hands:gt(0.5)):to("f32"):mean():item() > 0.9)
  local given = {}
  local plans = agent:act({ images = examples.images:narrow(0, 0, 2), states = examples.states:narrow(0, 0, 2),
    tasks = { "go", "go" } }, function(state, x, y, hand)
    given[#given + 1] = { x, y, hand }
    return ty.zeros(2, 4) + state
  end, { seeds = { 1, 2 } })
  check.equal({ #plans, #given, plans[1].shape[1] }, { 2, 2, 2 })
  check.ok(math.abs(given[1][3]) == 1)
  check.fails(function() agent:fit({}, {}) end, "KeyPoses:fit: examples.images: expected a tensor")
  check.fails(function() agent:fit(examples, { batch = 0 }) end, "batch: expected an integer >= 1")
  check.fails(function() diffusion.KeyPoses(3, {}) end, "KeyPoses: network: expected a module")
  check.fails(function() agent:act({}, 3) end, "plan: expected a function")
end)

check.test("what is refused", function()
  local net, seen = network(), observation(2, "f32")
  check.fails(function() policy.loss({}, net, seen, ty.ones(2, 2)) end, "policy.loss: process: expected a process")
  check.fails(function() policy.loss(process, {}, seen, ty.ones(2, 2)) end, "network: expected one with encode")
  check.fails(function() policy.loss(process, net, seen, ty.ones(2, 2), { samples = 0 }) end, "samples: expected")
  check.fails(function() policy.draw(process, net, seen, { 2 }, { samples = 0 }) end, "policy.draw: samples")
  check.fails(function() policy.draw(process, net, {}, { 2 }) end, "observation: expected tensors")
  check.fails(function() mini.MiniDiffuser {} end, "MiniDiffuser: words")
  check.fails(function() mini.MiniDiffuser { words = 3, size = 20, patch = 8 } end, "size: expected a multiple of")
  check.fails(function() net:encode { images = ty.ones(2, 3, 8, 8), words = seen.words, states = seen.states } end,
    "MiniDiffuser:encode: observation.images: expected")
  check.fails(function() net:encode { images = seen.images, words = ty.ones(2, 9), states = seen.states } end,
    "observation.words: expected")
  local condition = net:encode(seen)
  check.fails(function() net:denoise(ty.ones(3, 2), ty.ones(3), condition) end, "expected [a multiple of 2, 2]")
end)

check.finish()
