-- What annotators were told, found again from what they annotated
-- claim: a few pairs of example and label find a category's crops better than its name or typical examples do
-- system: greedy search over an index of the zoo's CLIP, for categories of which some follow hidden rules
-- paper: Chang et al. 2023, "Thinking Like an Annotator: Generation of Dataset Labeling Instructions"
-- time: 3 minutes on one CPU core
--
-- The set is made of crops of objects in scenes, by their boxes. Half of its kinds are two categories each, by a rule
-- that the name does not tell: tinted warmly or not, large or not. Of five folds of the scenes one is held out in turn;
-- of the others a third may be examples and the rest scores them. Every way gets as many pairs for a category as the
-- instructions have, the same fusion, and the weight of pictures in queries that is best for it on the scored part.
-- Other ways are the name alone, random examples with the name, and medoids with the name. Nothing is trained, and no
-- crop that is asked for was an example or scored one.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local vision, vlm, zoo = require "tycho.vision", require "tycho.vlm", require "tycho.zoo"
local scenes, instructions = zoo.scenes, vlm.label_instructions

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "scenes", 1000, "of which crops are taken, for each seed", quick = 150 },
    { "kinds", 16, "of objects, half of them two categories", quick = 4 },
    { "pairs", 4, "of a category at most", quick = 2 },
    { "folds", 5, "of which each is held out once" },
    { "least", 24, "pixels of a crop's longer side at least" },
    { "weights", "0,0.25,0.5,0.75,1", "of pictures in queries, to choose from", quick = "0.5,1" },
  },
}
local args = r.args
local clip, words = r:place(function() return zoo.load "scene-clip" end), zoo.tokenizer "scene-clip"
local weights = {}
for text in args.weights:gmatch "[^,]+" do weights[#weights + 1] = tonumber(text) end

-- ---- categories, and what a label may say ----

local kinds = {}
for i = 1, args.kinds do kinds[i] = scenes.drawn.objects_of[i] end
local tints = {}
for name in pairs(datasets.scenes.tints) do tints[#tints + 1] = name end
table.sort(tints)
local warm = { red = true, orange = true, yellow = true, pink = true }

-- Each kind's categories: what the annotator writes, and which objects belong; known to the set alone.
local categories, of_kind = {}, {}
for i, name in ipairs(kinds) do
  of_kind[name] = {}
  local rules = { { "", function() return true end } }
  if i % 4 == 1 then
    rules = { { " (1)", function(o) return warm[o.colour] ~= nil end },
      { " (2)", function(o) return warm[o.colour] == nil end } }
  elseif i % 4 == 3 then
    rules = { { " (1)", function(o) return o.size == "large" end },
      { " (2)", function(o) return o.size ~= "large" end } }
  end
  for _, rule in ipairs(rules) do
    categories[#categories + 1] = { name = name .. rule[1], kind = name, holds = rule[2] }
    table.insert(of_kind[name], #categories)
  end
end

local function article(text) return (text:find "^[aeiou]" and "an " or "a ") .. text end
local function phrases(kind)
  local list = { article(kind), "a small " .. kind, "a large " .. kind }
  for _, tint in ipairs(tints) do list[#list + 1] = article(tint .. " " .. kind) end
  return list
end
local texts = {}
for _, kind in ipairs(kinds) do
  texts[kind] = ty.no_grad(function()
    return clip:text_features(scenes.tokens(words, phrases(kind), 48):to { device = r.device })
  end)
end

-- ---- the annotated set ----

-- Square crops about the boxes of one draw of scenes: pictures, features, categories and scenes of each.
local function annotated(seed)
  local set = scenes.set("validation", { "image", "scene", "boxes" }, { objects_of = kinds, seed = seed })
  local batch = set:batch(ty.arange(args.scenes))
  local side, boxes = set.side, batch.boxes:tolist()
  local crops, labels, of_scene = {}, {}, {}
  for s, scene in ipairs(batch.scene) do
    for k, object in ipairs(scene.objects) do
      local _, left, top, right, bottom = table.unpack(boxes[s][k])
      local size = math.min(side, math.max(right - left, bottom - top) + 4)
      if size - 4 >= args.least then
        local x = math.max(0, math.min(side - size, (left + right - size) // 2))
        local y = math.max(0, math.min(side - size, (top + bottom - size) // 2))
        for _, c in ipairs(of_kind[datasets.scenes.objects[object.object + 1].name]) do
          if categories[c].holds(object) then
            local crop = scenes.pictures(batch.image:select(0, s - 1):narrow(1, y, size):narrow(2, x, size))
            crops[#crops + 1] = crop:unsqueeze(0):interpolate { size = { 64, 64 }, mode = "bilinear" }
            labels[#labels + 1], of_scene[#of_scene + 1] = c - 1, s - 1
          end
        end
      end
    end
  end
  local pictures = ty.concat(crops, 0)
  local image = vlm.embed(#crops, function(start, count)
    return clip:image_features(pictures:narrow(0, start, count):to { device = r.device })
  end)
  return { pictures = pictures, image = image, labels = ty.tensor(labels), of_scene = of_scene }
end

-- Positions of crops by what their scene's number is: held out, example or scored.
local function parts(set, fold)
  local lists = { held_out = {}, candidates = {}, scored = {} }
  for i, s in ipairs(set.of_scene) do
    local name = s % args.folds == fold and "held_out" or s // args.folds % 3 == 0 and "candidates" or "scored"
    table.insert(lists[name], i - 1)
  end
  for name, list in pairs(lists) do lists[name] = ty.tensor(list) end
  return lists
end

-- ---- ways to ask for a category ----

local function rows(set, at) return set.image:index_select(0, at:to { device = r.device }) end

-- The candidates of a category.
local function own(set, part, c)
  local here = set.labels:index_select(0, part.candidates):eq(c - 1)
  return part.candidates:masked_select(here)
end

-- Queries of examples with the category's name.
local function named(set, at, kind, weight)
  return instructions.fuse(rows(set, at), texts[kind]:narrow(0, 0, 1):expand(at.shape[1], texts[kind].shape[2]), weight)
end

local ways = {
  { "name", function(_, _, _, category) return texts[category.kind]:narrow(0, 0, 1) end, { 0 } },
  { "random", function(set, part, c, category, weight, count)
    local all = own(set, part, c)
    local some = ty.randperm(all.shape[1]):narrow(0, 0, math.min(count, all.shape[1]))
    return named(set, all:index_select(0, some), category.kind, weight)
  end },
  { "medoids", function(set, part, c, category, weight, count)
    local all = own(set, part, c)
    local some = instructions.medoids(rows(set, all), math.min(count, all.shape[1])):to "cpu"
    return named(set, all:index_select(0, some), category.kind, weight)
  end },
}

-- Mean average precision of queries by category on a part, over the categories that it has.
local function precision(set, queries, at)
  local scores, wanted, image, labels = {}, {}, rows(set, at), set.labels:index_select(0, at)
  for c = 1, #categories do
    if queries[c] then
      scores[#scores + 1] = instructions.scores(queries[c], image):to "cpu"
      wanted[#wanted + 1] = labels:eq(c - 1):to "f32"
    end
  end
  return (vision.mean_average_precision(ty.stack(scores, 1), ty.stack(wanted, 1)))
end

-- ---- five folds of a draw ----

local sheet
local function run(seed)
  local set, sums = annotated(seed), {}
  for fold = 0, args.folds - 1 do
    local part = parts(set, fold)
    -- The instructions by weight; the other ways get as many pairs as the best of them have.
    local best
    for _, weight in ipairs(weights) do
      local queries, found = {}, {}
      for c, category in ipairs(categories) do
        if own(set, part, c):numel() > 0 then
          found[c] = instructions.generate { image = set.image, labels = set.labels, category = c - 1,
            texts = texts[category.kind], candidates = part.candidates, scored = part.scored, pairs = args.pairs,
            weight = weight }
          queries[c] = found[c].queries
        end
      end
      local score = precision(set, queries, part.scored)
      if not best or score > best.score then
        best = { score = score, queries = queries, found = found, weight = weight }
      end
    end
    sheet = sheet or { set = set, found = best.found }
    local result = { instructions = precision(set, best.queries, part.held_out), pairs = 0, weight = best.weight }
    for _, one in pairs(best.found) do result.pairs = result.pairs + #one.pairs / #categories end
    for _, way in ipairs(ways) do
      ty.manual_seed(seed * 100 + fold)
      local chosen
      for _, weight in ipairs(way[3] or weights) do
        local queries = {}
        for c, category in ipairs(categories) do
          if best.found[c] then queries[c] = way[2](set, part, c, category, weight, #best.found[c].pairs) end
        end
        local score = precision(set, queries, part.scored)
        if not chosen or score > chosen.score then chosen = { score = score, queries = queries } end
      end
      result[way[1]] = precision(set, chosen.queries, part.held_out)
    end
    for name, value in pairs(result) do sums[name] = (sums[name] or 0) + value / args.folds end
  end
  r:say("seed %d: %d crops; instructions %.4f (%.1f pairs, weight %.2f), name %.4f, random %.4f, medoids %.4f", seed,
    set.labels.shape[1], sums.instructions, sums.pairs, sums.weight, sums.name, sums.random, sums.medoids)
  for name, value in pairs(sums) do r.metrics[("%s/%d"):format(name, seed)] = value end
  return sums
end

local gains, ours, over_name, theirs = {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local sums = run(seed)
  ours[i], theirs[i] = sums.instructions, math.max(sums.name, sums.random, sums.medoids)
  gains[i], over_name[i] = ours[i] - theirs[i], ours[i] - sums.name
end

-- ---- the sheet of the first fold ----

local shown, labels = {}, {}
for c, category in ipairs(categories) do
  local one = sheet.found[c]
  if one then
    local said, list = {}, phrases(category.kind)
    for k, pair in ipairs(one.pairs) do
      said[k] = list[pair.text + 1]
      if k <= 2 and #shown < 16 then
        shown[#shown + 1] = sheet.set.pictures:select(0, pair.crop)
        labels[#labels + 1] = category.name .. "\n" .. said[k]
      end
    end
    r:say("%-16s %s", category.name, table.concat(said, "; "))
  end
end
ty.plot.grid(ty.stack(shown, 0), { columns = 4, scale = 2, labels = labels }):save(r:picture "sheet.png")

os.exit(r:finish {
  { claim = "mean average precision of held-out crops, more than the best other way with as many pairs", values = gains,
    baseline = ty.stats.mean(theirs), bar = 0 },
  { claim = "mean average precision of held-out crops", values = ours, baseline = ty.stats.mean(theirs),
    judged = false },
  { claim = "the same, more than by the name alone", values = over_name, judged = false },
}, true)
