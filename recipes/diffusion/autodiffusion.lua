-- Times of four steps, and blocks left out in them, found by evolution
-- claim: four steps at times that were searched for are nearer to real pictures than four equal ones
-- system: AutoDiffusion's search on a text-to-image transformer of the zoo, without training
-- paper: Li et al. 2023, "AutoDiffusion: Training-Free Optimization of Time Steps and Architectures for Automated
--   Diffusion Model Acceleration"
-- time: 14 minutes on one CPU core
--
-- Fitness is the kernel distance of few pictures to real ones by features of scene-clip, unbiased; the best few of each
-- stage are then told apart by the Frechet distance of more pictures, of other prompts and noise, by the same features.
-- (The Frechet distance of 32 pictures was all before. It is mostly their number, 48 to 51 for times whose distance by
-- 160 is 11 to 18, and the least of many such numbers was luck: 1.28 of candidates at random, 1.05 of equal steps.)
-- What is found is measured on other prompts, other noise and other features, those of scene-resnet. Beside it stand
-- equal steps, the spacings that people choose by hand, and as many candidates drawn at random, told apart in the same
-- way; every one costs what four steps of the whole network cost. The second stage may put a fifth step in for blocks
-- that are left out. Searches are made once, with the first seed: the seeds of the table are of prompts' noise.
--
-- Of the distance of the better spacing by hand it was 0.89 on the first scene-dit, 1.04 on one that was trained for
-- longer, and 1.02 on the one that ships now. Of that of equal steps it was 0.92 on the base before, and is 0.99: equal
-- ones are at 19.3 to 20.3, and what is found is at 19.6 to 19.9. Times alone were found at 17.9 to 19.1, candidates at
-- random at 17.8 to 18.4: the second stage, which buys a fifth step with blocks that are left out, took what is nearer
-- by scene-clip and farther by scene-resnet. The other spacing by hand is at 30 to 31.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "model", "scene-dit", "a transformer of the zoo, or a folder of diffusers with a path" },
    { "steps", 4, "of the samplers", quick = 2 },
    { "grid", 64, "places of times" },
    { "search", 64, "prompts for the fitness of a candidate", quick = 4 },
    { "judge", 160, "other prompts, by which the best few of a stage are told apart", quick = 4 },
    { "finalists", 6, "of a stage", quick = 1 },
    { "population", 10, "candidates of a generation", quick = 3 },
    { "generations", { 4, 3 }, "of the two stages", least = 1, quick = { 1, 1 } },
    { "count", 64, "prompts for each seed of the table", quick = 4 },
    { "scale", 4.0, "of guidance" },
  } }
local args = r.args
local search = diffusion.search

local yardstick = zoo.yardstick { model = args.model, device = r.device, real = r.quick and 8 or 512 }
local blocks = diffusion.blocks(yardstick.painter.network)

local function sampler(part)
  return yardstick.painter.process:sampler { steps = args.grid, guidance = args.scale, parts = { part } }
end
local grid = sampler():points()

-- measure: of a yardstick, "frechet" or "kernel".
local function distance(candidate, prompts, by, measure)
  local latents = yardstick:draw(sampler(search.part(candidate, blocks)), prompts,
    { points = search.points(candidate, grid) })
  return yardstick[measure or "frechet"](yardstick, yardstick:decode(latents), prompts.split, by)
end

-- ---- the search ----

local tuning = yardstick:prompts("training", 0, args.search, 1000)
local fresh = yardstick:prompts("training", args.search, args.judge, 1001)
local layers = #blocks.names
local function options(how)
  local curve = { label = how, x = {}, y = {} }
  return { grid = args.grid, steps = args.steps, most_steps = args.steps + 1, layers = layers,
    limit = args.steps * layers, population = args.population, keep = math.max(1, args.population // 3),
    crossed = args.population // 4, moved = args.population // 4, seed = r.seed,
    generations = args.generations,
    start = { search.uniform(args.steps, args.grid) },
    fitness = function(candidate) return distance(candidate, tuning, "scene-clip", "kernel") end,
    judge = function(candidate) return distance(candidate, fresh, "scene-clip") end, finalists = args.finalists,
    on_generation = function(entry)
      table.insert(curve.x, entry.evaluated)
      table.insert(curve.y, entry.best)
      r:say("%s, stage %d, generation %d: the best of %d candidates %.3f", how, entry.stage, entry.generation,
        entry.evaluated, entry.best)
    end }, curve
end
local began = r:seconds()
local evolved_options, evolved_curve = options "evolution"
local evolved = search.evolve(evolved_options)
r.metrics.search_seconds = r:seconds() - began
local random_options, random_curve = options "at random"
local drawn = search.random(random_options)

local function text(candidate)
  local list = {}
  for i, t in ipairs(candidate.times) do
    list[i] = ("%d%s"):format(t, #candidate.skip[i] > 0 and " without " .. table.concat(candidate.skip[i], ",") or "")
  end
  return table.concat(list, "; ")
end
r:say("found: %s; the search took %.0f s", text(evolved.best), r.metrics.search_seconds)
r:say("times alone: %s; at random: %s", text(evolved.stages[1].best), text(drawn.best))
ty.plot.line { series = { evolved_curve, random_curve }, x_label = "candidates",
  y_label = "kernel distance of the best" }:save(r:picture "autodiffusion.png")

-- ---- the table ----

-- Times that people choose: places that go with a power of the step.
local function powered(power)
  local made = { times = {}, skip = {} }
  for i = 1, args.steps do
    local place = 1 + math.floor(((i - 1) / args.steps) ^ power * args.grid + 0.5)
    made.times[i], made.skip[i] = math.max(place, (made.times[i - 1] or 0) + 1), {}
  end
  return made
end
local candidates = { uniform = search.uniform(args.steps, args.grid), found = evolved.best,
  times = evolved.stages[1].best, random = drawn.best, late = powered(1.5), early = powered(0.75) }
local values = {}
for name in pairs(candidates) do values[name] = {} end
for i, seed in ipairs(r.seeds) do
  local prompts = yardstick:prompts("validation", 0, args.count, seed)
  for name, candidate in pairs(candidates) do
    values[name][i] = distance(candidate, prompts, "scene-resnet")
    r.metrics[("%s/%d"):format(name, seed)] = values[name][i]
  end
  r:say("seed %d: equal %.3f, by hand %.3f and %.3f, at random %.3f, times alone %.3f, found %.3f", seed,
    values.uniform[i], values.late[i], values.early[i], values.random[i], values.times[i], values.found[i])
end
local function over(name, other)
  local list = {}
  for i, value in ipairs(values[name]) do list[i] = value / values[other][i] end
  return list
end
local hand = ty.stats.mean(values.late) < ty.stats.mean(values.early) and "late" or "early"
os.exit(r:finish {
  { claim = "Frechet distance to real pictures by scene-resnet, of that of equal steps",
    values = over("found", "uniform"), baseline = values.uniform, bar = 1, below = true },
  { claim = "the same with times alone", values = over("times", "uniform"), baseline = values.uniform, judged = false },
  { claim = "of that of the better spacing by hand", values = over("found", hand), baseline = values[hand], bar = 1,
    below = true },
  { claim = "of that of as many candidates at random", values = over("found", "random"), baseline = values.random,
    bar = 1, below = true },
}, true)
