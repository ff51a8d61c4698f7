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
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local scenes, annotated, instructions = zoo.scenes, zoo.annotated, vlm.label_instructions

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "scenes", 1000, "of which crops are taken, for each seed", quick = 150 },
    { "kinds", 16, "of objects, half of them two categories", quick = 4 },
    { "pairs", 4, "of a category at most", quick = 2 },
    { "folds", 5, "of which each is held out once" },
    { "least", 24, "pixels of a crop's longer side at least" },
    { "weights", { 0, 0.25, 0.5, 0.75, 1 }, "of pictures in queries, to choose from", quick = { 0.5, 1 } },
  },
}
local args = r.args
local clip, words = r:place(function() return zoo.load "scene-clip" end), zoo.tokenizer "scene-clip"
local kinds, weights = table.move(scenes.drawn.objects_of, 1, args.kinds, 1, {}), args.weights
local categories, phrases = annotated.categories(kinds), annotated.phrases
local texts = {}
for _, kind in ipairs(kinds) do
  texts[kind] = ty.no_grad(scenes.read, clip, words, phrases(kind))
end

-- ---- the annotated set: pictures, features, categories and scenes of each crop ----

local function draw(seed)
  local set = annotated.crops(categories, { kinds = kinds, scenes = args.scenes, seed = seed, least = args.least })
  set.image = vlm.embed(set.pictures.shape[1], function(start, count)
    return clip:image_features(set.pictures:narrow(0, start, count):to { device = r.device })
  end)
  return set
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
  return instructions.mean_precision(queries, rows(set, at), set.labels:index_select(0, at))
end

-- ---- five folds of a draw ----

local sheet
local function run(seed)
  local set, sums = draw(seed), {}
  for fold = 0, args.folds - 1 do
    local part = annotated.parts(set.of_scene, fold, args.folds)
    -- The instructions by weight; the other ways get as many pairs as the best of them have.
    local found, _, best_weight = ty.stats.best(weights, function(weight)
      local one = {}
      for c, category in ipairs(categories) do
        if own(set, part, c):numel() > 0 then
          one[c] = instructions.generate { image = set.image, labels = set.labels, category = c - 1,
            texts = texts[category.kind], candidates = part.candidates, scored = part.scored, pairs = args.pairs,
            weight = weight }
        end
      end
      return one, precision(set, one, part.scored)
    end)
    sheet = sheet or { set = set, found = found }
    local result = { instructions = precision(set, found, part.held_out), pairs = 0, weight = best_weight }
    for _, one in pairs(found) do result.pairs = result.pairs + #one.pairs / #categories end
    for _, way in ipairs(ways) do
      ty.manual_seed(seed * 100 + fold)
      local chosen = ty.stats.best(way[3] or weights, function(weight)
        local queries = {}
        for c, category in ipairs(categories) do
          if found[c] then queries[c] = way[2](set, part, c, category, weight, #found[c].pairs) end
        end
        return queries, precision(set, queries, part.scored)
      end)
      result[way[1]] = precision(set, chosen, part.held_out)
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
