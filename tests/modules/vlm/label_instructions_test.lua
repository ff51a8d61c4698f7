-- Labelling instructions by retrieval: the search against brute force, scores that never fall, parts kept apart.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vlm = require "tycho.vlm"

local li, nn = vlm.label_instructions, ty.nn

-- Average precision by its definition, ties apart.
local function precision(scores, wanted)
  local order = {}
  for i = 1, #scores do order[i] = i end
  table.sort(order, function(a, b) return scores[a] > scores[b] end)
  local hits, sum = 0, 0
  for place, i in ipairs(order) do
    if wanted[i] == 1 then
      hits = hits + 1
      sum = sum + hits / place
    end
  end
  return sum / hits
end

-- Crops of four categories about random centres; the last has two centres. The first 40 may be examples.
local function world(seed)
  ty.manual_seed(seed)
  local centres = ty.randn(5, 8)
  local kind = ty.arange(120) % 5
  local image = centres:index_select(0, kind) + ty.randn(120, 8) * 0.8
  return { image = image, labels = kind:clamp(nil, 3), texts = ty.randn(3, 8), candidates = ty.arange(40),
    scored = ty.arange(40, 120) }, centres
end

local function with(o, more)
  local result = {}
  for _, part in ipairs { o, more } do for key, value in pairs(part) do result[key] = value end end
  return result
end

check.test("one pair: brute force over all pairs", function()
  for seed = 1, 3 do
    local o = world(seed)
    for category = 0, 3 do
      local found = li.generate(with(o, { category = category, pairs = 1, weight = 0.6 }))
      local best, labels = 0, o.labels:tolist()
      local wanted = {}
      for i = 40, 119 do wanted[i - 39] = labels[i + 1] == category and 1 or 0 end
      local x, y = nn.normalize(o.image), nn.normalize(o.texts)
      for i = 0, 39 do
        if labels[i + 1] == category then
          for j = 0, 2 do
            local q = x[i] * 0.6 + y[j] * 0.4
            best = math.max(best, precision(x["40:120"]:matmul(q:unsqueeze(1)):flatten():tolist(), wanted))
          end
        end
      end
      check.close(found.score, best, 1e-6)
      check.equal(#found.pairs, 1)
      local pair = found.pairs[1]
      check.equal(labels[pair.crop + 1], category)
      check.close(li.precision(li.fuse(o.image[pair.crop]:unsqueeze(0), o.texts[pair.text]:unsqueeze(0), 0.6),
        o.image["40:120"], ty.tensor(wanted)), best, 1e-6)
    end
  end
end)

check.test("the score never falls, each step is the best one, and a category of two kinds needs two pairs", function()
  local o, centres = world(1)
  local found = li.generate(with(o, { category = 3, pairs = 6, weight = 1 }))
  local before = 0
  for k, pair in ipairs(found.pairs) do
    check.ok(pair.score > before, "step " .. k)
    before = pair.score
    check.ok(pair.crop < 40, "an example is a candidate")
  end
  check.equal(found.score, before)
  check.equal(found.queries.shape, { #found.pairs, 8 })
  local wanted = o.labels["40:120"]:eq(3):to "f32"
  check.close(li.precision(found.queries, o.image["40:120"], wanted), found.score, 1e-6)
  -- The second step, by brute force.
  local first, best = found.queries["0:1"], 0
  for i = 0, 39 do
    if o.labels[i]:item() == 3 then
      best = math.max(best, li.precision(ty.concat({ first, nn.normalize(o.image[i]:unsqueeze(0)) }, 0),
        o.image["40:120"], wanted))
    end
  end
  check.close(found.pairs[2].score, best, 1e-6)
  -- Both centres are asked for.
  local near = nn.normalize(found.queries["0:2"]):matmul(nn.normalize(centres["3:5"]):transpose(0, 1)):argmax(1)
  check.ok(near[0]:item() ~= near[1]:item(), "one pair of each kind")
  -- A gain that is asked for ends it.
  check.equal(#li.generate(with(o, { category = 3, pairs = 6, gain = 1 })).pairs, 1)
end)

check.test("queries and scores", function()
  local image, text = ty.tensor { { 2.0, 0.0 } }, ty.tensor { { 0.0, 5.0 } }
  check.close(li.fuse(image, text, 1):tolist()[1], { 1, 0 }, 1e-6)
  check.close(li.fuse(image, text, 0):tolist()[1], { 0, 1 }, 1e-6)
  check.close(li.fuse(image, text):tolist()[1], { math.sqrt(0.5), math.sqrt(0.5) }, 1e-6)
  check.close(li.scores(ty.tensor { { 1.0, 0.0 }, { 0.0, 1.0 } }, ty.tensor { { 3.0, 4.0 }, { 4.0, 3.0 } }):tolist(),
    { 0.8, 0.8 }, 1e-6)
end)

check.test("medoids: one of each heap", function()
  ty.manual_seed(2)
  local centres = ty.eye(4) * 5
  local x = centres:index_select(0, ty.arange(24) % 4) + ty.randn(24, 4) * 0.2
  local heaps = {}
  for _, at in ipairs(li.medoids(x, 4):tolist()) do heaps[at % 4] = true end
  check.ok(heaps[0] and heaps[1] and heaps[2] and heaps[3])
  check.equal(#li.medoids(ty.ones(3, 2), 3):tolist(), 3)
  local all = li.medoids(ty.ones(3, 2), 3):tolist()
  table.sort(all)
  check.equal(all, { 0, 1, 2 }, "no crop twice")
end)

check.test("wrong arguments", function()
  local o = world(1)
  local function refused(more, text) check.fails(function() li.generate(with(o, more)) end, text) end
  refused({ category = 9 }, "candidates: expected one of category 9 at least, got none")
  refused({ category = 0, scored = ty.arange(39, 120) }, "candidates: expected none of the scored crops, got 39")
  refused({ category = 0, candidates = ty.tensor { 500 } }, "candidates: expected positions from 0 to 119")
  refused({ category = 0, texts = ty.ones(2, 3) }, "texts: expected features [n, 8], got a tensor [2, 3]")
  refused({ category = 0, labels = ty.arange(3) }, "labels: expected i64 [120]")
  refused({}, "category: expected an integer >= 0, got nil")
  check.fails(function() li.fuse(ty.ones(1, 2), ty.ones(2, 2)) end, "expected as many pictures as texts, got 1 and 2")
  check.fails(function() li.medoids(ty.ones(2, 2), 3) end, "k: expected at most the 2 crops, got 3")
  check.fails(function() li.precision(ty.ones(1, 2), ty.ones(3, 2), ty.ones(2)) end, "wanted: expected [3]")
end)

check.test("the mean precision over categories", function()
  ty.manual_seed(8)
  local image, labels = ty.randn(12, 4), ty.tensor { 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2 }
  local a, b = ty.randn(2, 4), ty.randn(1, 4)
  local want = (li.precision(a, image, labels:eq(0):to "f32") + li.precision(b, image, labels:eq(2):to "f32")) / 2
  check.close(li.mean_precision({ [1] = a, [3] = { queries = b } }, image, labels), want, 1e-6)
  check.fails(function() li.mean_precision({}, image, labels) end, "expected those of one category at least, got none")
end)

check.finish()
