-- Dense networks as mixtures of experts, and experts that are skipped: the division, the rule by hand, what is counted
-- against what runs, the walk along the frontier against all of the table.
local here = arg and arg[0]:match ".*/" or "tests/modules/prune/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local prune = require "tycho.prune"
local modes = prune.modes

local small = dofile(here .. "../small_llava.lua")
local FEATURES, tokens, pictures, apart = small.features, small.tokens, small.pictures, small.apart
local dense = small.model
local function logits(m) return ty.no_grad(function() return m(tokens, { pictures = pictures }) end) end

check.test("groups are as large as each other, and rows that point the same way share one", function()
  local list = {}
  for i = 0, 23 do
    local angle = (i % 4) * math.pi / 2 + (i // 4) * 0.02
    list[i + 1] = { math.cos(angle) * (1 + i), math.sin(angle) * (1 + i) }
  end
  local groups, seen = prune.moefy_groups(ty.tensor(list), 4), {}
  for _, group in ipairs(groups) do
    check.equal(#group, 6)
    for _, i in ipairs(group) do
      seen[i] = true
      check.equal(i % 4, group[1] % 4)
    end
  end
  check.equal(#seen, 23)
  check.fails(function() prune.moefy_groups(ty.ones(10, 2), 4) end, "rows: expected [n, d] with n a multiple of 4")
end)

check.test("all experts, undecided: the dense network; some: by hand", function()
  local m = dense()
  local before = logits(m)
  check.ok(apart(logits(prune.moefy(m, { experts = 4, chosen = 4, sharp = 0 })), before) < 1e-5)
  check.equal(apart(logits(m), before), 0)
  local sparse = prune.moefy(m, { experts = 4, chosen = 2, sharp = 2 })
  check.equal(sparse.language_model.config.model_type, "mixtral")
  check.equal(sparse.language_model.config.intermediate_size, 8)
  local mixture, mlp = sparse.language_model.model.layers[2].block_sparse_moe, m.language_model.model.layers[2].mlp
  local x = ty.randn(1, 5, 16)
  local groups = prune.moefy_groups(mlp.gate_proj.weight, 4)
  local hidden = ty.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
  local gates = mlp.gate_proj(x)
  for t = 0, 4 do
    local scored = {}
    for e, group in ipairs(groups) do
      scored[e] = { gates:select(1, t):index_select(1, ty.tensor(group)):mean():item() * 2, e }
    end
    table.sort(scored, function(a, b) return a[1] > b[1] end)
    local first, second = math.exp(scored[1][1]), math.exp(scored[2][1])
    local want = 0
    for k, w in ipairs { first / (first + second), second / (first + second) } do
      local index = ty.tensor(groups[scored[k][2]])
      want = want + ty.linear(hidden:select(1, t):index_select(1, index),
        mlp.down_proj.weight:index_select(1, index)) * (2 * w)
    end
    check.ok(apart(ty.no_grad(function() return mixture(x, {}) end):select(1, t), want) < 1e-4)
  end
  check.fails(function() prune.moefy(m, { experts = 5, chosen = 2 }) end, "a number that divides the 32 neurons")
  check.fails(function() prune.moefy(m, { experts = 4, chosen = 5 }) end, "expected at most the 4 experts, got 5")
  check.fails(function() prune.moefy(ty.nn.Linear(2, 2)) end, "expected a decoder with gated feed-forward networks")
end)

local function sparse() return prune.moefy(dense(), { experts = 4, chosen = 2, sharp = 2 }) end

check.test("thresholds of 0 skip nothing", function()
  local m = sparse()
  local before = logits(m)
  check.equal(modes.apply(m), 3)
  check.equal(apart(logits(m), before), 0)
  local after, counts = modes.count(m, function() return logits(m) end)
  check.equal(apart(after, before), 0)
  check.equal({ counts.text, counts.visual, counts.executed, counts.skipped }, { 48, 192, 240, 0 })
  modes.remove(m)
  check.equal(apart(logits(m), before), 0)
  check.fails(function() modes.set(m, { text = 1 }) end, "expected one with modes.apply(), got one without")
end)

check.test("a layer by hand: alpha p below the threshold of its kind is left out, the rest stays as it is", function()
  local m = sparse()
  local mixture = m.language_model.model.layers[2].block_sparse_moe
  modes.apply(m)
  modes.set(m, { alpha = { text = { 1, 0.5, 1 }, visual = { 1, 0.25, 1 } }, text = 0.25, visual = 0.1 })
  local row = tokens:narrow(0, 0, 1)
  local x = ty.randn(1, 20, 16)
  local y = ty.no_grad(function() return mixture(x, { tokens = row }) end):select(0, 0)
  local weights, experts = mixture:route(x:select(0, 0))
  weights, experts = weights:tolist(), experts:tolist()
  local left_out = 0
  for t = 1, 20 do
    local want = ty.zeros(1, 16)
    for k = 1, 2 do
      local important = weights[t][k] * (t <= FEATURES and 0.25 or 0.5)
      if important >= (t <= FEATURES and 0.1 or 0.25) then
        want = want + mixture.experts[experts[t][k] + 1](x:select(1, t - 1)) * weights[t][k]
      else
        left_out = left_out + 1
      end
    end
    check.ok((y:select(0, t - 1) - want):abs():max():item() < 1e-4)
  end
  check.ok(left_out > 5 and left_out < 35, left_out)
end)

check.test("what is counted is what the experts compute", function()
  local m, ran = sparse(), 0
  modes.apply(m)
  modes.set(m, { text = 0.3, visual = 0.6 })
  for _, layer in ipairs(m.language_model.model.layers) do
    for _, expert in ipairs(layer.block_sparse_moe.experts) do
      expert.w1:register_forward_hook(function(_, output) ran = ran + output[1].shape[1] end)
    end
  end
  local function both(options)
    ran = 0
    local _, counts = modes.count(m, function() return ty.no_grad(function() return m:hidden(tokens, options) end) end)
    check.equal(counts.executed, ran)
    return counts
  end
  local counts = both { pictures = pictures }
  check.ok(counts.skipped > 0.1 and counts.skipped < 0.9)
  check.close(counts.skipped, 1 - ran / 240, 1e-12)
  -- Where the last layer works on few places, neither it nor the count has more.
  check.equal(both { pictures = pictures, last = 1 }.visual, 2 * 2 * FEATURES * 2)
  check.equal(both { pictures = pictures, places = ty.tensor { 0, 19 } }.visual, 2 * 2 * FEATURES * 2 + 2)
  modes.set(m, { text = math.huge, visual = math.huge })
  check.equal(both { pictures = pictures }.skipped, 1)
end)

check.test("decoding with a cache skips what computing all anew skips", function()
  local m = sparse()
  modes.apply(m)
  modes.set(m, { text = 0.4, visual = 0.6 })
  local cache = m:cache()
  ty.no_grad(function()
    m(tokens, { pictures = pictures, cache = cache })
    local step = ty.tensor { { 3 }, { 9 } }
    local want = m(ty.concat({ tokens, step }, 1), { pictures = pictures })
    check.ok(apart(m(step, { cache = cache }), want:narrow(1, 20, 1)) < 1e-5)
  end)
end)

check.test("importance is the divergence of what a layer's experts say", function()
  local m = sparse()
  modes.apply(m)
  local function all() return m(tokens, { pictures = pictures }):flatten(0, 1) end
  local alpha = modes.importance(m, all)
  local found, sum = {}, 0
  local reference = ty.no_grad(all)
  for i = 1, 3 do
    local mixture = m.language_model.model.layers[i].block_sparse_moe
    local forward = getmetatable(mixture).forward
    getmetatable(mixture).forward = function(self, x, at)
      return rawequal(self, mixture) and ty.zeros_like(x) or forward(self, x, at)
    end
    local after = ty.no_grad(all)
    getmetatable(mixture).forward = forward
    local p, q = reference:softmax(-1), after:softmax(-1)
    found[i] = (p * (p:log() - q:log())):sum(-1):mean():item()
    sum = sum + found[i]
  end
  for i = 1, 3 do check.close(alpha.text[i], found[i] / sum, 1e-4) end
  check.equal(alpha.text, alpha.visual)
  -- The last layer's experts of a picture's tokens say nothing about the words behind it.
  local divided = modes.importance(m, function()
    return m(tokens, { pictures = pictures }):narrow(1, 16, 4):flatten(0, 1)
  end, { apart = true })
  check.close(divided.visual[3], 0, 1e-6)
  check.ok(divided.text[3] > 0)
end)

check.test("the walk along the frontier finds what the whole table has", function()
  for seed = 1, 40 do
    math.randomseed(seed)
    local n, m, value, share = math.random(1, 9), math.random(1, 9), {}, {}
    for i = 1, n do
      value[i], share[i] = {}, {}
      for j = 1, m do
        local v, s = math.random(0, 3), math.random(0, 3)
        value[i][j] = v + math.max(i > 1 and value[i - 1][j] or 0, j > 1 and value[i][j - 1] or 0)
        share[i][j] = s + math.max(i > 1 and share[i - 1][j] or 0, j > 1 and share[i][j - 1] or 0)
      end
    end
    local wanted, best = share[n][m] * math.random(), nil
    for i = 1, n do
      for j = 1, m do
        if share[i][j] >= wanted and (not best or value[i][j] < best) then best = value[i][j] end
      end
    end
    local function measure(i, j) return value[i][j], share[i][j] end
    local row, column, found, had, count = modes.search(n, m, wanted, measure)
    check.equal(found, best)
    check.equal(value[row][column], best)
    check.ok(had >= wanted and count <= n + m - 1, count)
    check.equal(modes.search(n, m, share[n][m] + 1, measure), nil)
  end
end)

check.test("calibration reaches the share, and two thresholds are not worse than one", function()
  local m = sparse()
  modes.apply(m)
  local function answers() return m(tokens, { pictures = pictures }):narrow(1, 16, 4):flatten(0, 1) end
  local found = modes.calibrate(m, answers, { share = 0.6, points = 12 })
  local _, counts = modes.count(m, function() return ty.no_grad(answers) end)
  check.ok(found.share >= 0.6)
  check.equal(counts.skipped, found.share)
  local one = modes.calibrate(m, answers, { share = 0.6, points = 12, one = true, alpha = found.alpha })
  check.equal(one.text, one.visual)
  check.ok(one.share >= 0.6)
  check.fails(function() modes.calibrate(m, answers, { share = 2 }) end, "share: expected a number in [0, 1], got 2")
  check.fails(function() modes.apply(dense()) end, "expected a mixture of experts, got a model without one")
end)

check.test("paint: patches are as dark as experts are left out, those of every picture its own", function()
  local image = ty.full({ 2, 3, 4, 4 }, 200, { dtype = "u8" })
  -- Five tokens of each picture, of which four are patches of 2 x 2 pixels; two experts each.
  local chosen = ty.tensor { { 1, 1 }, { 1, 0 }, { 0, 0 }, { 1, 1 }, { 0, 0 }, { 0, 0 }, { 1, 1 }, { 1, 1 }, { 1, 0 },
    { 1, 1 } }
  local painted = modes.paint(image, chosen, 2)
  local half = math.floor(200 * (0.9 * 0.5 ^ 0.5 + 0.1))
  check.equal({ painted.dtype, table.unpack(painted.shape) }, { "u8", 2, 3, 4, 4 })
  local function corners(x) return { x[0][0][0]:item(), x[0][0][3]:item(), x[0][3][0]:item(), x[0][3][3]:item() } end
  check.close(corners(painted[0]), { 200, half, 20, 200 }, 1)
  check.close(corners(painted[1]), { 20, 200, 200, half }, 1)
  check.fails(function() modes.paint(image, chosen, 3) end, "prune.modes.paint: expected an image")
  check.fails(function() modes.paint(image, chosen:narrow(0, 0, 9), 2) end, "chosen %[n x at least 4, experts%]")
end)

check.finish()
