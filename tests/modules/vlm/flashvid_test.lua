-- FlashVID: segments, selection by attention and diversity against its definition, trees over frames, clusters around
-- peaks of density, budgets that are met, and layers of the decoder that see fewer tokens.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vlm = require "tycho.vlm"
local flashvid = vlm.flashvid

local function apart(a, b) return (a - b):abs():max():item() end

check.test("segments end where neighbours are unlike, and where they are least alike if there are too few", function()
  local a, b = { 1, 0, 0 }, { 0, 1, 0 }
  local means = ty.tensor { a, { 1, 0.01, 0 }, { 1, 0.02, 0 }, b, { 0, 1, 0.3 }, { 0, 1, 0.3 } }
  check.equal(flashvid.segments(means, { cut = 0.9, least = 1 }), { 3, 3 })
  check.equal(flashvid.segments(means, { cut = 0.9, least = 3 }), { 3, 1, 2 })
  check.equal(flashvid.segments(means, { cut = -1, least = 1 }), { 6 })
  check.equal(flashvid.segments(means, { least = 8 }), { 1, 1, 1, 1, 1, 1 })
end)

-- Max-min selection as its definition has it, token by token.
local function slow_select(x, a, count)
  local n = #x
  local function cos(i, j)
    local ij, ii, jj = 0, 0, 0
    for k = 1, #x[i] do ij, ii, jj = ij + x[i][k] * x[j][k], ii + x[i][k] ^ 2, jj + x[j][k] ^ 2 end
    return ij / (ii * jj) ^ 0.5
  end
  local taken, is_taken = {}, {}
  for step = 1, count do
    local best, at = -1, nil
    for j = 1, n do
      if not is_taken[j] then
        local least = math.huge
        for i = 1, n do
          if step == 1 and i ~= j or is_taken[i] then least = math.min(least, (1 - cos(i, j)) * a[j]) end
        end
        if least > best then best, at = least, j end
      end
    end
    taken[step], is_taken[at] = at - 1, true
  end
  table.sort(taken)
  return taken
end

check.test("tokens are those of the greedy max-min choice, distances scaled by attention", function()
  ty.manual_seed(2)
  local x, a = ty.randn(3, 12, 5), ty.rand(3, 12)
  for count = 1, 12 do
    local chosen = flashvid.select(x, a, count, { relevance = false })
    for f = 0, 2 do
      check.equal(chosen:select(0, f):tolist(), slow_select(x:select(0, f):tolist(), a:select(0, f):tolist(), count))
    end
  end
  -- With relevance, attention is multiplied by the product with the mean of all frames.
  local mean = x:mean { 0, 1 }
  local scaled = a * x:matmul(mean):clamp(0)
  check.equal(flashvid.select(x, a, 5):tolist(), flashvid.select(x, scaled, 5, { relevance = false }):tolist())
end)

check.test("a tree's root times its size is the sum of its members, which are linked frame after frame", function()
  ty.manual_seed(3)
  local f, n, d = 5, 9, 6
  local base = ty.randn(1, n, d)
  local x = (base + ty.randn(f, n, d) * 0.4):to "f64"
  local free = ty.rand(f, n):gt(0.25)
  local trees = flashvid.trees(x, free, 0.8)
  local flat, root, parent = x:flatten(0, 1), trees.root:tolist(), trees.parent:tolist()
  local is_free, is_root, sizes = free:flatten():tolist(), trees.is_root:tolist(), trees.size:tolist()
  local sums, members, linked, deep = {}, {}, 0, 0
  for i = 1, f * n do
    local r = root[i] + 1
    sums[r], members[r] = (sums[r] or 0) + flat:select(0, i - 1), (members[r] or 0) + 1
    local p = parent[i] + 1
    if p ~= i then
      linked = linked + 1
      check.equal((i - 1) // n - (p - 1) // n, 1)
      check.ok(is_free[i] and is_free[p])
      local one = ty.nn.normalize(flat:select(0, i - 1):unsqueeze(0)):matmul(ty.nn.normalize(x:select(0, (p - 1) // n))
        :transpose(0, 1)):flatten()
      check.ok(one:select(0, (p - 1) % n):item() > 0.8)
      for j = 1, n do
        if is_free[(p - 1) // n * n + j] then
          check.ok(one:select(0, j - 1):item() <= one:select(0, (p - 1) % n):item() + 1e-6)
        end
      end
      if parent[p] + 1 ~= p then deep = deep + 1 end
    end
  end
  check.ok(linked > 8 and deep > 2, "trees of several frames")
  for i = 1, f * n do
    check.equal(is_root[i] == true, is_free[i] == true and parent[i] == i - 1)
    if members[i] then
      check.equal(sizes[i], members[i])
      check.ok(apart(trees.means:select(0, i - 1) * sizes[i], sums[i]) < 1e-12)
    end
  end
  -- With a least number of roots the strongest links stay.
  local all = trees.is_root:to("i64"):sum():item()
  local fewer = flashvid.trees(x, free, 0.8, all + 5)
  check.equal(fewer.is_root:to("i64"):sum():item(), all + 5)
end)

check.test("clusters: as many as tokens are the tokens, and groups that lie apart are found", function()
  ty.manual_seed(4)
  local x = ty.randn(10, 4)
  local centres, joined = flashvid.clusters(x, 10)
  check.equal({ centres:tolist(), joined:tolist() }, { ty.arange(10):tolist(), ty.arange(10):tolist() })
  local middles = ty.tensor { { 9, 0, 0, 0 }, { 0, 9, 0, 0 }, { 0, 0, 9, 0 } }
  local of = ty.tensor { 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0 }
  local points = middles:index_select(0, of) + ty.randn(14, 4) * 0.1
  centres, joined = flashvid.clusters(points, 3)
  local group_of, other = {}, of:tolist()
  for i, centre in ipairs(centres:tolist()) do group_of[i - 1] = other[centre + 1] end
  for k, cluster in ipairs(joined:tolist()) do check.equal(group_of[cluster], other[k]) end
  check.equal(#centres:tolist(), 3)
end)

check.test("all tokens kept is the identity, and every budget is met exactly", function()
  ty.manual_seed(5)
  local x, a = ty.randn(2, 6, 16, 8), ty.rand(2, 6, 16)
  local tokens, places = flashvid.compress(x, a, { count = 96, segments = 2 })
  check.equal(apart(tokens, x:flatten(1, 2)), 0)
  check.equal(places:select(0, 1):tolist(), ty.arange(96):tolist())
  local still = x:narrow(1, 0, 1):expand(2, 6, 16, 8) + ty.randn(2, 6, 16, 8) * 0.05
  for _, given in ipairs { x, still } do
    for _, share in ipairs { 0, 0.7, 1 } do
      for _, count in ipairs { 1, 7, 10, 31, 95 } do
        tokens, places = flashvid.compress(given, a, { count = count, share = share, segments = 2 })
        check.equal({ tokens.shape, places.shape }, { { 2, count, 8 }, { 2, count } })
        local list, twice = places:select(0, 0):tolist(), false
        for i = 2, count do twice = twice or list[i] <= list[i - 1] end
        check.equal(twice, false)
      end
    end
  end
end)

check.test("without the floor, a segment in which nothing moves keeps its first frame's unselected tokens", function()
  ty.manual_seed(6)
  local picture, a = ty.randn(1, 1, 16, 8), ty.rand(1, 1, 16):expand(1, 5, 16)
  local x = picture:expand(1, 5, 16, 8)
  local tokens, places, segments = flashvid.compress(x, a, { count = 40, share = 0.5, segments = 1, floor = false })
  check.equal({ #segments[1], segments[1][1].length }, { 1, 5 })
  local chosen, is_chosen = segments[1][1].chosen, {}
  for _, place in ipairs(chosen:select(0, 0):tolist()) do is_chosen[place] = true end
  local want = {}
  for place = 0, 79 do
    if place < 16 or is_chosen[place % 16] then want[#want + 1] = place end
  end
  check.equal(places:select(0, 0):tolist(), want)
  check.ok(apart(tokens:select(0, 0), picture:reshape(16, 8):index_select(0, ty.tensor(want) % 16)) < 1e-6)
  -- Compared by keys that do not change, tokens are averaged all the same.
  local moving = x + ty.randn(1, 5, 16, 8)
  tokens, places = flashvid.compress(moving, a, { count = 40, share = 0, segments = 1, floor = false, keys = x })
  check.equal(places:select(0, 0):tolist(), ty.arange(16):tolist())
  check.ok(apart(tokens:select(0, 0), moving:select(0, 0):mean { 0 }) < 1e-5)
  -- A cut: the frames behind it begin anew.
  local other = ty.concat({ x:narrow(1, 0, 3), ty.randn(1, 1, 16, 8):expand(1, 2, 16, 8) }, 1)
  places = select(2, flashvid.compress(other, a, { count = 40, share = 0, segments = 1, floor = false }))
  check.equal(places.shape, { 1, 32 })
end)

-- ---- in the decoder ----

local small = dofile(here .. "../small_llava.lua")
local IMAGE, model = small.image, small.model

local function row(words)
  local ids = {}
  for k = 1, 16 do ids[k] = IMAGE end
  table.move(words, 1, #words, 17, ids)
  return ids
end

check.test("layers behind the chosen one work on the tokens that the question attends to, and on no others", function()
  local m = model()
  local tokens, features = ty.tensor { row { 1, 2, 3 }, row { 4, 5, 6 } }, ty.randn(2, 16, 16)
  local want = ty.no_grad(function() return m(tokens, { features = features }) end)
  flashvid.prune(m, { after = 1, keep = 1 })
  check.ok(apart(ty.no_grad(function() return m(tokens, { features = features }) end), want) < 1e-4)
  flashvid.unprune(m)
  flashvid.prune(m, { after = 2, keep = 0.3 })
  local got = ty.no_grad(function() return m(tokens, { features = features }) end)
  local places = m.language_model.model.layers[3]._flashvid.shared.places
  check.equal(places.shape, { 2, 8 }) -- ceil(0.3 * 16) and three words
  check.equal(places:select(0, 1):tolist()[8], 18)
  flashvid.unprune(m)
  -- By hand: the last layer on the kept ones alone.
  local decoder, taps = m.language_model, { [2] = true }
  local weights
  local remove = decoder.model.layers[2]:register_forward_hook(function(layer, _, stream, more, at)
    weights = layer.self_attn:weights(layer.input_layernorm(more and stream + more or stream), at)
  end)
  ty.no_grad(function() m:hidden(tokens, { features = features, taps = taps }) end)
  remove()
  for r = 0, 1 do
    local order = weights:select(0, r):mean({ 0 }):select(0, 18):narrow(0, 0, 16):argsort(0, true):narrow(0, 0, 5)
    local kept = order:sort(0):tolist()
    table.move({ 16, 17, 18 }, 1, 3, 6, kept)
    check.equal(places:select(0, r):tolist(), kept)
    local index = ty.tensor(kept)
    local cos, sin = decoder.rotary:table(19, "cpu")
    local y, added = ty.no_grad(decoder.model.layers[3], taps[2]:narrow(0, r, 1):index_select(1, index), nil,
      { cos = cos:index_select(0, index), sin = sin:index_select(0, index), layer = 3 })
    local logits = ty.no_grad(function() return m:head(decoder.model.norm(y + added)) end):select(0, 0)
    check.ok(apart(got:select(0, r):narrow(0, 16, 3), logits:narrow(0, 5, 3)) < 1e-3)
  end
end)

check.test("with a cache, decoding is computing all anew with the choice of the prompt", function()
  local m = model()
  local tokens, features = ty.tensor { row { 1, 2, 3 } }, ty.randn(1, 16, 16)
  flashvid.prune(m, { after = 1, keep = 0.25 })
  local cache = m:cache()
  local logits = ty.no_grad(function() return m(tokens, { features = features, cache = cache }) end):narrow(1, 18, 1)
  check.equal(cache:held(), { 19, 7, 7 })
  flashvid.asking(m, ty.tensor { 18 })
  for _ = 1, 3 do
    local word = logits:argmax(-1):clamp(0, 18)
    tokens = ty.concat({ tokens, word }, 1)
    logits = ty.no_grad(function() return m(word, { cache = cache }) end)
    local whole = ty.no_grad(function() return m(tokens, { features = features }) end)
    check.ok(apart(logits, whole:narrow(1, tokens.shape[2] - 1, 1)) < 1e-3)
  end
end)

check.test("a budget: the mean over layers is the share that is asked for, or just below", function()
  for _, case in ipairs { { 512, 4, 3, 0.3 }, { 96, 3, 1, 0.5 }, { 7, 2, 2, 0.1 }, { 10, 5, 1, 0 } } do
    local count, shares, mean = flashvid.budget(case[1], case[2], { ratio = 0.1, after = case[3], keep = case[4] })
    local seen = 0
    for l, share in ipairs(shares) do
      check.equal(share, l <= case[3] and 1 or case[4])
      seen = seen + share * count
    end
    check.ok(math.abs(seen / case[2] / case[1] - mean) < 1e-12 and mean <= 0.1 + 1e-9)
    local more = mean * (count + 1) / math.max(count, 1)
    check.ok(count == 0 or more > 0.1, "one token more would be too many")
  end
  check.equal((flashvid.budget(50, 4, { ratio = 1, after = 1, keep = 0 })), 50)
  check.fails(function() flashvid.budget(50, 4, { ratio = 0.1, after = 5 }) end, "after: expected an integer in [1, 4]")
end)

check.test("what does not fit is one clear error", function()
  local x, a = ty.randn(2, 6, 16, 8), ty.rand(2, 6, 16)
  check.fails(function() flashvid.compress(x, a, { count = 97 }) end, "expected an integer in [1, 96], got 97")
  check.fails(function() flashvid.compress(x, a:narrow(1, 0, 5), { count = 9 }) end,
    "attention: expected [2, 6, 16], got")
  check.fails(function() flashvid.compress(x, a, { count = 9, floor = false }) end, "floor: expected true with 2 clips")
  check.fails(function() flashvid.prune(model(), { after = 3 }) end, "after: expected an integer in [1, 2], got 3")
  check.fails(function() flashvid.prune(ty.nn.Linear(2, 2), { after = 1 }) end, "expected a model that sees")
end)

check.finish()
