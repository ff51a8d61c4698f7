--- What of captions is in the scenes that painters draw: how zoo.painter's pictures are measured, beside real ones of
-- the same captions. Judges of the zoo say what they see; none was trained on anything that a painter drew.
local ty = require "tycho"
local drawing_judge = require "tycho.zoo.drawing_judge"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local geometry = require "tycho.datasets.scenes.geometry"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local vlm = require "tycho.vlm"

local M = {}

local statements = datasets.scenes.statements

-- The names of an argument; nil for "all".
local function listed(names) return names[1] ~= "all" and names or nil end

--- The scenes of a split that a painter is made for, by the arguments of its recipe (painter.arguments).
---@param args table
---@param split string
---@param fields string[]
---@param more? table  other options of the set
---@return Scenes
function M.set(args, split, fields, more)
  local o = { objects = { 1, args.most }, rotation = args.rotation, backgrounds = listed(args.backgrounds),
    objects_of = listed(args.kinds) }
  for key, value in pairs(more or {}) do o[key] = value end
  return scenes.set(split, fields, o)
end

--- A name for the training scenes of such arguments: other ones make another.
---@param args table
---@return string
function M.name(args)
  local sum, words = 0, table.concat(args.backgrounds, ",") .. " " .. table.concat(args.kinds, ",")
  for _, byte in utf8.codes(words) do sum = (sum * 31 + byte) & 0xffffffff end
  return ("%d-%d-%d-%d-%08x"):format(args.scenes, args.most, args.rotation, args.length, sum)
end

local function ships(model)
  for _, name in ipairs(shelf.names()) do
    if name == model then return true end
  end
  return false
end

local judges = {}

--- The judge of scenes of a recipe's arguments, tuned once and kept in the results; nil where scene-resnet does not
-- ship. Tuning draws random numbers.
---@param r Recipe
---@return DrawingJudge?
function M.judge(r)
  if not ships "scene-resnet" then return nil end
  local path = r:path(("judge-%s-%d-%s.safetensors"):format(M.name(r.args), r.args.judge_steps,
    shelf.version "scene-resnet"))
  if not judges[path] then
    if ty.io.exists(path) then
      judges[path] = drawing_judge.new { device = r.device }
      judges[path]:load(path)
      judges[path]:eval()
    else
      r:say("scene-resnet learns to judge what is drawn, %d steps", r.args.judge_steps)
      ty.manual_seed(1000)
      local set = M.set(r.args, "training", { "image", "statements", "owner", "boxes", "scene" }, { seed = 1000 })
      judges[path] = drawing_judge.tune { set = set, steps = r.args.judge_steps, batch = r.quick and 4 or 48,
        seed = 1000, device = r.device }
      judges[path]:save(path)
    end
  end
  return judges[path]
end

--- How the painter of a recipe draws, as TextToImage:paint takes it: drawing_steps and guidance of its arguments and,
-- where it has them, interval, sigma / alpha between which guidance counts, and eta, the share of a step's noise that
-- is fresh (0: as the pipeline's scheduler draws).
---@param args table
---@return table
function M.options(args)
  return { steps = args.drawing_steps, guidance = args.interval
    and diffusion.guidance.classifier_free { scale = args.guidance, interval = args.interval } or args.guidance,
    solver = (args.eta or 0) > 0 and diffusion.solver.ddim { eta = args.eta } or nil }
end

-- What is found in pictures of what captions ask for: by the judge shares by kind; by CLIP the share of pictures whose
-- caption is the right one among a hundred. And what the judge finds of what the next picture's caption asks for.
local function judged(r, pictures, captions, asked)
  local shares, others, x, eye = {}, {}, scenes.pictures(pictures), M.judge(r)
  if eye then
    local logits, next_asked = eye:scores(x), {}
    for i = 1, #asked do next_asked[i] = asked[i % #asked + 1] end
    shares, others = statements.score(logits, asked), statements.score(logits, next_asked)
  end
  local tokens = scenes.tokens(shelf.tokenizer "scene-clip", captions, r.args.length)
  shares.caption = vlm.retrieval(shelf.load "scene-clip", x, tokens, { among = math.min(100, #captions) }).captions
  return shares, others
end

--- How much of what captions of a split ask for is in the pictures that a painter draws, and in the real pictures of
-- these captions: { object, colour, place } by the judge (left out where it does not ship) and `caption`, the share of
-- pictures whose caption CLIP finds among a hundred, each; the pictures; and how much of what other captions ask for
-- the judge sees in them, which tells whether it sees what is not there.
---@param r Recipe
---@param painter TextToImage
---@param split string
---@param count integer
---@param from? integer  the first of the split's scenes (0): what decides while a painter is trained is not what is
---  reported of it
---@return table drawn
---@return table real
---@return Tensor pictures
---@return table others
function M.measure(r, painter, split, count, from)
  local args = r.args
  local set = M.set(args, split, { "image", "caption", "asked" })
  from = from or 0
  local batch = set:batch(ty.arange(from, from + count))
  local pictures = painter:paint(batch.caption, M.options(args)):to "cpu"
  local drawn, others = judged(r, pictures, batch.caption, batch.asked)
  return drawn, (judged(r, batch.image, batch.caption, batch.asked)), pictures, others
end

--- The same of real pictures of a split that went through a painter's autoencoder: what no drawn one is better than.
---@param r Recipe
---@param painter TextToImage
---@param split string
---@param count integer
---@return table
function M.decoded(r, painter, split, count)
  local batch = M.set(r.args, split, { "image", "caption", "asked" }):batch(ty.arange(count))
  return (judged(r, painter:decode(painter:encode(batch.image)):to "cpu", batch.caption, batch.asked))
end

local number_of = {} -- of the nine places by name, from 0
for i, name in ipairs(geometry.places) do number_of[name] = i - 1 end

--- Of pictures of single things on a background, whose captions say where: the share in which most of what is not
-- background is at that place. A share of chance is a ninth; it tells where a painter puts things as well when it is
-- not seen what they are, and a blurred thing that spreads over two places is at one of them. nil where no judge ships.
---@param r Recipe
---@param painter TextToImage
---@param split string
---@param count integer  of captions that name a place; fewer where ten times as many scenes have fewer
---@param from? integer  the first of the split's scenes (0)
---@return number? drawn
---@return number? real   of the real pictures of these captions
function M.placed(r, painter, split, count, from)
  local eye, args = M.judge(r), r.args
  if not eye then return nil end
  local set = M.set(args, split, { "image", "caption", "asked" }, { objects = { 1, 1 }, placed = true })
  local captions, images, places = {}, {}, {}
  from = from or 0
  local last = math.min(from + 10 * count, set.size) -- there are scenes of which none can name a place
  for start = from, last - 1, count do
    local batch = set:batch(ty.arange(start, math.min(start + count, last)))
    for i, said in ipairs(batch.asked) do
      local place = said.objects[1] and said.objects[1].place
      if place and #captions < count then
        table.insert(captions, batch.caption[i])
        table.insert(images, batch.image[i - 1])
        table.insert(places, number_of[place])
      end
    end
    if #captions == count then break end
  end
  if #captions == 0 then return nil end
  local asked = ty.tensor(places, { dtype = "i64" })
  local function share(pictures) return eye:where(scenes.pictures(pictures)):eq(asked):to("f32"):mean():item() end
  local drawn = painter:paint(captions, M.options(args)):to "cpu"
  return share(drawn), share(ty.stack(images, 0))
end

--- What the table of a recipe has of a painter: shares by kind.
---@class DrawingFigures
---@field drawn table
---@field others table        what the next caption asks for
---@field real table
---@field decoded table
---@field combinations table  drawn of combinations never seen
---@field placed? number      of single things, see placed()
---@field placed_real? number

--- Measures a painter by `count` pictures of each part, the recipe's argument. Returns the figures and the pictures of
-- the validation part.
---@param r Recipe
---@param painter TextToImage
---@return DrawingFigures
---@return Tensor
function M.figures(r, painter)
  local count = r.args.count
  local drawn, real, pictures, others = M.measure(r, painter, "validation", count)
  local found = { drawn = drawn, real = real, others = others }
  found.combinations = M.measure(r, painter, "held_out_combinations", count)
  found.decoded = M.decoded(r, painter, "validation", count)
  found.placed, found.placed_real = M.placed(r, painter, "validation", count)
  return found, pictures
end

local bars = { object = 0.9, colour = 0.85, place = 0.8 }

-- A row of what there is of each seed; why: the reason where there is none of one.
local function row(claim, values, count, bar, why)
  local whole = count > 0
  for i = 1, count do whole = whole and values[i] ~= nil end
  return { claim = claim, values = whole and values or nil, measured = not whole and why or nil, bar = bar,
    judged = whole and bar ~= nil }
end

--- The rows of a recipe's table from the figures of each of its seeds.
---@param seeds DrawingFigures[]
---@return RecipeRow[]
function M.rows(seeds)
  local rows = {}
  local why = ships "scene-resnet" and "not asked for" or "scene-resnet does not ship"
  local function add(claim, value, bar)
    local values = {}
    for i, found in ipairs(seeds) do values[i] = value(found) end
    rows[#rows + 1] = row(claim, values, #seeds, bar, why)
  end
  for _, kind in ipairs { "object", "colour", "place" } do
    for _, group in ipairs { { "drawn", " that captions ask for, share that the judge sees" },
      { "others", ", that the next caption asks for, in the same pictures" },
      { "real", ", in real pictures of these captions" }, { "decoded", ", in these after the autoencoder" },
      { "combinations", ", drawn of combinations never seen" } } do
      add(kind .. "s" .. group[2], function(found) return found[group[1]][kind] end,
        group[1] == "drawn" and bars[kind] or nil)
    end
  end
  add("single things of which most is where the caption says (chance is 0.11)",
    function(found) return found.placed end)
  add("the same, in real pictures of these captions", function(found) return found.placed_real end)
  for _, group in ipairs { { "drawn", "drawn" }, { "real", "real pictures" },
    { "combinations", "drawn of combinations never seen" } } do
    add("right caption among 100 by scene-clip, " .. group[2], function(found) return found[group[1]].caption end)
  end
  return rows
end

return M
