--- A clip in a tenth of its tokens, without training: of every frame the tokens that are attended to and unlike each
-- other are kept, the rest is merged along trees over frames and then in clusters, and the decoder's last layers see
-- fewer still. Fan et al. 2026, "FlashVID: Efficient Video Large Language Models via Training-free Tree-based
-- Spatiotemporal Token Merging", and its reference code. Rodriguez and Laio 2014, "Clustering by fast search and find
-- of density peaks"; Chen et al. 2024, "An Image is Worth 1/2 Tokens After Layer 2" (FastV).
--
--     local features, places = vlm.flashvid.compress(all, attention, { count = 62 })   -- all: [n, frames, places, d]
--     vlm.flashvid.prune(model, { after = 3, keep = 0.3 })
--
-- Other than in the reference code, a tree's root is the mean of all its members (there the sum is divided by the
-- number of the root's own children and itself), budgets are met exactly, and of equal densities the first is taken in
-- place of one by chance.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local picked = require "tycho.vlm.picked"

local nn = ty.nn
local M = {}

local function tensor(who, name, x, shape, sizes)
  local ok = ty.is_tensor(x) and x.ndim == #sizes
  for i, size in ipairs(sizes) do ok = ok and (size == 0 or x.shape[i] == size) end
  if not ok then arguments.fail("%s: %s: expected %s, got %s", who, name, shape, arguments.describe(x)) end
end

-- ---- segments ----

--- The lengths of the segments of a clip by the means of its frames [frames, d]: it is cut where the cosine of
-- neighbours is below `cut`, and, while there are fewer than `least` segments, where it is smallest.
---@param means Tensor
---@param options? { cut?: number, least?: integer }
---@return integer[]
function M.segments(means, options)
  local who = "flashvid.segments"
  tensor(who, "means", means, "[frames, d]", { 0, 0 })
  local o = arguments.read(who, options, { cut = 0.9, least = 8 }, { cut = "a number in [-1, 1]",
    least = "an integer > 0" })
  local frames, order, lengths, from = means.shape[1], {}, {}, 0
  if frames == 1 then return { 1 } end
  local unit = nn.normalize(means)
  local alike = (unit:narrow(0, 0, frames - 1) * unit:narrow(0, 1, frames - 1)):sum(-1):tolist()
  for i = 1, frames - 1 do order[i] = i end
  table.sort(order, function(a, b)
    if alike[a] ~= alike[b] then return alike[a] < alike[b] end
    return a < b
  end)
  local cuts = {}
  for _, i in ipairs(order) do
    if alike[i] < o.cut or #cuts + 1 < o.least then cuts[#cuts + 1] = i end
  end
  table.sort(cuts)
  cuts[#cuts + 1] = frames
  for i, at in ipairs(cuts) do lengths[i], from = at - from, at end
  return lengths
end

-- ---- attention and diversity ----

--- ADTS: which `count` tokens of each frame represent it: features [frames, places, d], attention [frames, places].
-- D_ij = (1 - cos(i, j)) a_j r_j, with r the product of a token with the mean of all frames (relevance to the event,
-- none below 0; relevance = false: without it, as the reference code does for Qwen's models). The first token is the
-- one whose nearest neighbour is farthest; each further one is the farthest from those that are taken. Returns i64
-- [frames, count], in the order of places.
---@param features Tensor
---@param attention Tensor
---@param count integer
---@param options? { relevance?: boolean }
---@return Tensor
function M.select(features, attention, count, options)
  local who = "flashvid.select"
  tensor(who, "features", features, "[frames, places, d]", { 0, 0, 0 })
  local f, n = features.shape[1], features.shape[2]
  tensor(who, "attention", attention, ("[%d, %d]"):format(f, n), { f, n })
  arguments.expect(who, "count", count, ("an integer in [0, %d]"):format(n))
  local o = arguments.read(who, options, { relevance = true })
  if count == 0 then return ty.zeros({ f, 0 }, { dtype = "i64", device = features.device }) end
  return ty.no_grad(function()
    local x = features:to "f32"
    local unit, scale = nn.normalize(x), attention:to "f32"
    if o.relevance then scale = scale * x:matmul(x:mean { 0, 1 }):clamp(0) end
    -- Sizes do not matter to which is larger; so much that products of shares of attention stay far from 0.
    scale = scale / scale:max():clamp(1e-30)
    local apart = (1 - unit:matmul(unit:transpose(1, 2))):clamp(0) * scale:unsqueeze(1) -- [f, i, j]
    if count == n then return ty.arange(n, { device = x.device }):expand(f, n):clone() end
    local self = ty.eye(n, { device = x.device }):to("bool"):unsqueeze(0)
    local first = apart:masked_fill(self, math.huge):min { 1 } -- of j to its nearest i
    local taken = first:argmax(-1, true)
    local list = { taken }
    local least = ty.full({ f, n }, math.huge, { device = x.device })
    for _ = 2, count do
      local to_last = picked.pick(apart, taken):squeeze(1)
      least = ty.minimum(least, to_last):scatter(1, taken, ty.full({ f, 1 }, -1, { device = x.device }))
      taken = least:argmax(-1, true)
      list[#list + 1] = taken
    end
    return (ty.concat(list, 1):sort(1))
  end)
end

-- Means [count, d] of the rows of x [n, d] that belong to each number of `of`, i64 [n]; the row 0 where none does.
local function average(x, of, count)
  local ones = ty.ones({ x.shape[1] }, { dtype = x.dtype, device = x.device })
  local size = ty.zeros({ count }, { dtype = x.dtype, device = x.device }):index_add(0, of, ones)
  local sum = ty.zeros({ count, x.shape[2] }, { dtype = x.dtype, device = x.device }):index_add(0, of, x)
  return sum / size:clamp(1):unsqueeze(1), size
end

-- ---- trees ----

--- TSTM within a segment: every free token is linked to the free token of the frame before that it is most like, if
-- their cosine is above `threshold`. Links make trees, whose roots are the free tokens without a link. With least, so
-- many free tokens stay roots: the weakest links are left out. features [frames, places, d], free bool [frames,
-- places]. Returns a table with
--   means    [frames * places, d]: of each root the mean of its tree (what other places hold means nothing)
--   root     i64 [frames * places]: the root of each token's tree, itself where it is none's child
--   parent   i64 [frames * places]: what each token is linked to, itself where it is not
--   is_root  bool [frames * places]: free and without a link
--   size     [frames * places]: members of a root's tree
---@param features Tensor
---@param free Tensor
---@param threshold number
---@param least? integer
---@return table
function M.trees(features, free, threshold, least)
  local who = "flashvid.trees"
  tensor(who, "features", features, "[frames, places, d]", { 0, 0, 0 })
  local f, n, d = table.unpack(features.shape)
  tensor(who, "free", free, ("bool [%d, %d]"):format(f, n), { f, n })
  arguments.expect(who, "threshold", threshold, "a number")
  arguments.expect(who, "least", least or 0, "an integer >= 0")
  return ty.no_grad(function()
    local device = features.device
    local own = ty.arange(f * n, { device = device })
    local parent, linked = own, ty.zeros({ f * n }, { dtype = "bool", device = device })
    if f > 1 then
      local unit = nn.normalize(features:to "f32")
      local alike = unit:narrow(0, 1, f - 1):matmul(unit:narrow(0, 0, f - 1):transpose(1, 2))
      local both = free:narrow(0, 1, f - 1):unsqueeze(2):logical_and(free:narrow(0, 0, f - 1):unsqueeze(1))
      alike = ty.where(both, alike, -2.0)
      local best, at = alike:max { 2 }, alike:argmax(2)
      local over = best:gt(threshold):logical_and(best:gt(-1.5)):flatten()
      local allowed = free:to("i64"):sum():item() - (least or 0)
      if over:to("i64"):sum():item() > allowed then
        local strongest = ty.where(over, best:flatten(), -2.0):argsort(0, true):narrow(0, 0, math.max(0, allowed))
        over = ty.zeros(over.shape, { device = device }):scatter(0, strongest,
          ty.ones(strongest.shape, { device = device })):to "bool"
      end
      local before = (at + ty.arange(f - 1, { device = device }):unsqueeze(1) * n):flatten()
      linked = ty.concat({ ty.zeros({ n }, { dtype = "bool", device = device }), over }, 0)
      parent = ty.where(linked, ty.concat({ own:narrow(0, 0, n), before }, 0), own)
    end
    -- The root of a token is its parent's, frame after frame.
    local roots = { parent:narrow(0, 0, n) }
    for i = 2, f do
      local up = parent:narrow(0, (i - 1) * n, n)
      local above = roots[i - 1]:gather(0, (up - (i - 2) * n):clamp(0, n - 1))
      roots[i] = ty.where(linked:narrow(0, (i - 1) * n, n), above, up)
    end
    local root = ty.concat(roots, 0)
    local means, size = average(features:reshape(f * n, d), root, f * n)
    return { means = means, root = root, parent = parent, size = size,
      is_root = free:flatten():logical_and(linked:logical_not()) }
  end)
end

-- ---- clusters ----

--- Clusters around peaks of density: x [n, d] in `count` clusters. A token's density is exp(-mean of its squared
-- distances to its k nearest, itself among them), distances over the root of d; centres are those with the largest
-- product of density and distance to the nearest denser token; others join the nearest centre. Returns centres i64
-- [count], in the order of tokens, and the number of each token's cluster, i64 [n].
---@param x Tensor
---@param count integer
---@param k? integer  (7)
---@return Tensor centres
---@return Tensor of
function M.clusters(x, count, k)
  local who = "flashvid.clusters"
  tensor(who, "x", x, "[n, d]", { 0, 0 })
  local n, d = x.shape[1], x.shape[2]
  arguments.expect(who, "count", count, ("an integer in [1, %d]"):format(n))
  arguments.expect(who, "k", k or 7, "an integer > 0")
  return ty.no_grad(function()
    local places = ty.arange(n, { device = x.device })
    if count == n then return places, places end
    local far = ty.cdist(x:to "f32", x:to "f32") / d ^ 0.5
    local nearest = ty.topk(far, math.min(k or 7, count), -1, false)
    -- Of tokens that are alike the first one counts as denser.
    local density = (-nearest:square():mean { -1 }):exp() + places:to "f32" * (-1e-6 / n)
    local denser = density:unsqueeze(0):gt(density:unsqueeze(1)) -- [i, j]: j is denser than i
    local peak = ty.where(denser, far, far:max()):min { 1 }
    local _, centres = ty.topk(peak * density, count, 0)
    centres = centres:sort(0)
    local of = far:index_select(1, centres):argmin(1):scatter(0, centres, ty.arange(count, { device = x.device }))
    return centres, of
  end)
end

-- ---- all of it ----

--- Integers near the weights that sum to `total`, none above its weight's limit: the largest remainders are rounded up.
---@param weights number[]
---@param total integer
---@param limits integer[]
---@return integer[]
function M.apportion(weights, total, limits)
  local who = "flashvid.apportion"
  arguments.expect(who, "weights", weights, "a list of numbers")
  arguments.expect(who, "total", total, "an integer >= 0")
  arguments.expect(who, "limits", limits, "a list of integers")
  local sum, left, given, order = 0, total, {}, {}
  for i, w in ipairs(weights) do sum, order[i] = sum + w, i end
  local rest = {}
  for i, w in ipairs(weights) do
    local exact = sum > 0 and w / sum * total or 0
    given[i] = math.min(math.floor(exact + 1e-9), limits[i])
    rest[i], left = exact - given[i], left - given[i]
  end
  table.sort(order, function(a, b)
    if rest[a] ~= rest[b] then return rest[a] > rest[b] end
    return a < b
  end)
  while left > 0 do
    local before = left
    for _, i in ipairs(order) do
      if left > 0 and given[i] < limits[i] then given[i], left = given[i] + 1, left - 1 end
    end
    if left == before then break end
  end
  return given
end

-- One clip: features [frames, places, d], attention [frames, places] and keys [frames, places, m] to tokens [count, d]
-- and places i64 [count].
local function one(features, attention, keys, o)
  local f, n, d = table.unpack(features.shape)
  local lengths = M.segments(keys:mean { 1 }, { cut = o.cut, least = o.segments })
  local of_frame = math.min(math.floor(o.count * o.share / f + 0.5), o.count // f, n)
  local limits, tokens, places, shown = {}, {}, {}, {}
  for i, length in ipairs(lengths) do limits[i] = length * (n - of_frame) end
  local budgets, from = M.apportion(lengths, o.count - of_frame * f, limits), 0
  for i, length in ipairs(lengths) do
    local x, free = features:narrow(0, from, length), ty.ones({ length, n }, { device = features.device })
    local by = keys:narrow(0, from, length)
    local chosen = M.select(by, attention:narrow(0, from, length), of_frame, { relevance = o.relevance })
    if of_frame > 0 then
      local first = ty.arange(length, { device = x.device }):unsqueeze(1) * n
      local flat = (chosen + first):flatten()
      tokens[#tokens + 1], places[#places + 1] = x:reshape(length * n, d):index_select(0, flat), flat + from * n
      free = free:scatter(1, chosen, ty.zeros(chosen.shape, { device = x.device }))
    end
    local trees = M.trees(by, free:to "bool", o.threshold, o.floor and budgets[i] or 0)
    local means = keys == features and trees.means or average(x:reshape(length * n, d), trees.root, length * n)
    local roots = trees.is_root:reshape(length, n)
    local counts = roots:to("i64"):sum({ 1 }):tolist()
    local all = 0
    for _, c in ipairs(counts) do all = all + c end
    local kept = counts
    if budgets[i] < all and o.floor then kept = M.apportion(counts, budgets[i], counts) end
    for j = 1, length do
      if kept[j] > 0 then
        local at = roots:select(0, j - 1):to("u8"):argsort(0, true):narrow(0, 0, counts[j]):sort(0)
        local flat = at + (j - 1) * n
        local centres, of = M.clusters(trees.means:index_select(0, flat), kept[j], o.neighbours)
        tokens[#tokens + 1] = average(means:index_select(0, flat), of, kept[j])
        places[#places + 1] = at:index_select(0, centres) + (from + j - 1) * n
      end
    end
    shown[i] = { from = from, length = length, chosen = chosen, trees = trees }
    from = from + length
  end
  local at = ty.concat(places, 0)
  local order = at:argsort(0)
  return ty.concat(tokens, 0):index_select(0, order), at:index_select(0, order), shown
end

--- Compresses clips to `count` tokens each. features [n, frames, places, d], what the decoder would get; attention [n,
-- frames, places], of the tower's class to its places, or what stands for it. options, with the paper's values: count;
-- share (0.7: of the tokens that ADTS takes), threshold (0.8: of the cosine of a link), cut (0.9) and segments (8: the
-- least number; the paper's clips have 32 frames), neighbours (7: of density), relevance (true), keys ([n, frames,
-- places, m]: what tokens are compared by, in the place of features, where these say more of where a token is than of
-- what it shows; averages are of features), floor (true; false: trees are merged as far as they go and not clustered,
-- so that clips get numbers of tokens of their own and n must be 1). Returns tokens [n, count, d], their places i64 [n,
-- count], frame * places + place in ascending order, and of each clip its segments { from, length, chosen (ADTS,
-- [length, k]), trees (see there) }.
---@param features Tensor
---@param attention Tensor
---@param options { count: integer, share?: number, threshold?: number, cut?: number, segments?: integer,
-- neighbours?: integer, relevance?: boolean, keys?: Tensor, floor?: boolean }
---@return Tensor tokens
---@return Tensor places
---@return table[][] segments
function M.compress(features, attention, options)
  local who = "flashvid.compress"
  tensor(who, "features", features, "[n, frames, places, d]", { 0, 0, 0, 0 })
  local n, f, p = table.unpack(features.shape)
  tensor(who, "attention", attention, ("[%d, %d, %d]"):format(n, f, p), { n, f, p })
  local o = arguments.read(who, options, { count = 0, share = 0.7, threshold = 0.8, cut = 0.9, segments = 8,
    neighbours = 7, relevance = true, keys = arguments.none, floor = true },
    { count = ("an integer in [1, %d]"):format(f * p),
    share = "a number in [0, 1]", threshold = "a number", segments = "an integer > 0",
    neighbours = "an integer > 0" })
  local keys = o.keys or features
  tensor(who, "keys", keys, ("[%d, %d, %d, m]"):format(n, f, p), { n, f, p, 0 })
  if not o.floor and n ~= 1 then arguments.fail("%s: floor: expected true with %d clips, got false", who, n) end
  local tokens, places, shown = {}, {}, {}
  for i = 1, n do
    local x = features:select(0, i - 1)
    tokens[i], places[i], shown[i] = ty.no_grad(one, x, attention:select(0, i - 1),
      o.keys and keys:select(0, i - 1) or x, o)
  end
  return ty.stack(tokens), ty.stack(places), shown
end

-- A colour for each number: hues that lie far from those of the numbers before.
local function colour(k)
  local hue, rgb = (k * 0.618034) % 1 * 6, {}
  for i, shift in ipairs { 0, 4, 2 } do
    rgb[i] = 255 * math.max(0, math.min(1, math.abs((hue + shift) % 6 - 3) - 1))
  end
  return rgb
end

--- What becomes of a clip's tokens, to look at: pictures u8 [frames, 3, side, side] in which tokens that ADTS chose
-- look as they do, those of a tree have a colour of the tree's own in all of its frames, and others are dark.
---@param video Tensor      u8 [frames, 3, side, side]
---@param segments table[]  of one clip, as compress() returns them
---@return Tensor
function M.paint(video, segments)
  local who = "flashvid.paint"
  tensor(who, "video", video, "u8 [frames, 3, side, side]", { 0, 3, 0, 0 })
  arguments.expect(who, "segments", segments, "a list of tables")
  local frames, trees, parts = video.shape[1], 0, {}
  for i, segment in ipairs(segments) do
    local n = segment.trees.root.shape[1] // segment.length
    local root, size, chosen = segment.trees.root:tolist(), segment.trees.size:tolist(), {}
    for f, list in ipairs(segment.chosen:tolist()) do
      for _, place in ipairs(list) do chosen[(f - 1) * n + place + 1] = true end
    end
    -- By token: how much of the picture is seen, and the colour over it.
    local rows, of_root = {}, {}
    for t = 1, segment.length * n do
      local r = root[t] + 1
      if chosen[t] then
        rows[t] = { 1, 0, 0, 0 }
      elseif size[r] > 1 then
        if not of_root[r] then trees, of_root[r] = trees + 1, colour(trees) end
        rows[t] = { 0.35, of_root[r][1], of_root[r][2], of_root[r][3] }
      else
        rows[t] = { 0.25, 0, 0, 0 }
      end
    end
    local edge = math.floor(n ^ 0.5 + 0.5)
    local map = ty.tensor(rows, { dtype = "f32" }):reshape(segment.length, edge, edge, 4):permute { 0, 3, 1, 2 }
    map = ty.interpolate(map:contiguous(), { video.shape[3], video.shape[4] }, 0, "nearest")
    map = map:to { device = video.device }
    local shown = map:narrow(1, 0, 1)
    parts[i] = video:narrow(0, segment.from, segment.length):to "f32" * shown + map:narrow(1, 1, 3) * (1 - shown)
  end
  local painted = ty.concat(parts, 0)
  if painted.shape[1] ~= frames then
    arguments.fail("%s: video: expected the %d frames of the segments, got %d", who, painted.shape[1], frames)
  end
  return painted:clamp(0, 255):round():to "u8"
end

-- ---- in the decoder ----

local pruned = nn.surgery.wrapper { name = "Pruned", field = "_flashvid",
  describe = function(state) return ("keeps %.2f of pictures"):format(state.keep) end,
  forward = function(base)
    return function(self, stream, more, at)
      local places = self._flashvid.shared.places
      if at.cache and at.cache.past > 0 then return picked.follow(self, base.forward, stream, more, at) end
      if not places then return base.forward(self, stream, more, at) end
      local x = more and stream + more or stream
      local kept, added = picked.through("flashvid.prune", self, base.forward, x, places, at)
      return picked.put(x, places, kept + added)
    end
  end }

-- What the layers behind layer `after` keep of each row: all text, and of the picture's tokens ceil(keep * k), those
-- that the asking token attends to most in that layer, in the mean of its heads.
local function choose(layer, state, stream, more, at)
  local visual = at.tokens:eq(state.image)
  local count = visual:to("i64"):sum { 1 }
  local seen = count:max():item()
  if seen == 0 then return nil end
  if count:min():item() ~= seen then
    arguments.fail("flashvid.prune: expected rows with as many tokens of pictures, got %d and %d", count:min():item(),
      seen)
  end
  local n, t = at.tokens.shape[1], at.tokens.shape[2]
  local x = layer.input_layernorm(more and stream + more or stream)
  local asking = state.asking or ty.full({ n }, t - 1, { dtype = "i64", device = x.device })
  if asking.shape[1] ~= n then
    arguments.fail("flashvid.prune: asking: expected i64 [%d], got %s", n, arguments.describe(asking))
  end
  local weights = picked.pick(layer.self_attn:weights(x, at):to("f32"):mean { 1 }, asking:unsqueeze(1)):squeeze(1)
  local rank = ty.where(visual, weights, math.huge)
  return (rank:argsort(1, true):narrow(1, 0, t - seen + math.ceil(state.keep * seen - 1e-9)):sort(1))
end

--- How many of a clip's tokens the decoder may get, so that a share `ratio` of them is seen in the mean of its layers
-- where those behind layer `after` see the share `keep` of what the others do. Also the share of what is got that each
-- layer sees, and the share of the clip's tokens that all of them see in the mean, which rounding leaves below ratio.
---@param tokens integer  of a clip
---@param layers integer  of the decoder
---@param options { ratio: number, after: integer, keep: number }
---@return integer count
---@return number[] shares
---@return number mean
function M.budget(tokens, layers, options)
  local who = "flashvid.budget"
  arguments.expect(who, "tokens", tokens, "an integer >= 1")
  arguments.expect(who, "layers", layers, "an integer >= 1")
  local o = arguments.read(who, options, { ratio = 0.1, after = layers, keep = 0.3 },
    { ratio = "a number in [0, 1]", after = ("an integer in [1, %d]"):format(layers), keep = "a number in [0, 1]" })
  local shares, seen = {}, 0
  for l = 1, layers do
    shares[l] = l <= o.after and 1 or o.keep
    seen = seen + shares[l] / layers
  end
  local count = math.min(tokens, math.floor(o.ratio * tokens / seen + 1e-9))
  return count, shares, count * seen / tokens
end

--- Lets the layers behind layer `after` work on `keep` (0.3) of the picture's tokens: those that the token that asks
-- attends to most in layer `after`. That is the last of each row, unless asking() says otherwise. Rows have one
-- question each, and as many tokens of pictures. With a cache, what was left out stays out.
---@param model Llava
---@param options { after: integer, keep?: number }
function M.prune(model, options)
  local who = "flashvid.prune"
  arguments.expect(who, "model", model, "a module")
  local layers = picked.decoder(who, model).model.layers
  local o = arguments.read(who, options, { after = 0, keep = 0.3 },
    { after = ("an integer in [1, %d]"):format(math.max(1, #layers - 1)), keep = "a number in [0, 1]" })
  local shared = { image = model.config.image_token_index, keep = o.keep }
  local watched = layers[o.after]
  shared.remove = watched:register_forward_hook(function(layer, _, stream, more, at)
    if at.cache and at.cache.past > 0 then return end
    shared.places = ty.no_grad(choose, layer, shared, stream, more, at)
  end)
  for i = o.after + 1, #layers do pruned:wrap(layers[i], { keep = o.keep, shared = shared }) end
end

--- Takes it off again.
---@param model Llava
function M.unprune(model)
  local who = "flashvid.unprune"
  arguments.expect(who, "model", model, "a module")
  for _, layer in ipairs(pruned:wrapped(who, picked.decoder(who, model))) do
    local shared = layer.module._flashvid.shared
    if shared.remove then shared.remove() end
    shared.remove = nil
    pruned:unwrap(layer.module)
  end
end

--- Says which token of each row asks, i64 [n], in the calls to come; nil: the last one. batch: in place of it what
-- vlm.frames.packed() or Dialogue:packed() gave, with one question to a row: its token before the first of the answer.
---@param model Llava
---@param asking Tensor|table|nil
function M.asking(model, asking)
  local who = "flashvid.asking"
  arguments.expect(who, "model", model, "a module")
  local layers = pruned:wrapped(who, picked.decoder(who, model))
  if type(asking) == "table" then
    if not ty.is_tensor(asking.targets) then
      arguments.fail("%s: asking: expected i64 [n] or a batch with targets, got %s", who, arguments.describe(asking))
    end
    asking = asking.targets:ne(-100):to("u8"):argmax(1):to { device = model:device() }
  end
  for _, layer in ipairs(layers) do layer.module._flashvid.shared.asking = asking end
end

return M
