-- Steps without a call of the network where the path bends evenly
-- claim: 1.8 times as fast as the full sampler at a perceptual distance of at most 0.1
-- system: SADA on a text-to-image transformer of the zoo
-- paper: Jiang et al. 2025, "SADA: Stability-guided Adaptive Diffusion Acceleration"
-- time: 6 minutes on one CPU core
--
-- The settings are those of the published code for 50 steps. Beside the method stand the full sampler with fewer steps
-- in the same time, the criterion alone (nothing interpolated late in sampling), and with a part of the tokens computed
-- where a step is not stable. The perceptual distance is the mean of three levels of scene-resnet: what two pictures of
-- the same prompt by other noise are apart stands beside it.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "model", "scene-dit", "a text-to-image base of the zoo, or a folder of diffusers with a path" },
    { "steps", 50, "of the full sampler", quick = 8 },
    { "count", 24, "prompts for each seed", quick = 2 },
    { "scale", 4.0, "of guidance" },
    { "tokens", 0.5, "share of the tokens that are computed where a step is not stable" },
  } }
local args = r.args
local stability = diffusion.cache.stability

local yardstick = zoo.yardstick { model = args.model, device = r.device, real = r.quick and 8 or 256 }

local function sampler(part)
  return yardstick.painter.process:sampler { steps = args.steps, guidance = args.scale, parts = { part } }
end

local sada = stability()
local list = yardstick:compare(sampler(), { SADA = sampler(sada), criterion = sampler(stability { late = 1 }) },
  { count = args.count, seeds = r.seeds, fewer = { "SADA" } })
local by_token = stability { late = 1, tokens = args.tokens, network = yardstick.painter.network }
local sparse = yardstick:compare(sampler(), { tokens = sampler(by_token) },
  { count = args.count, seeds = { r.seed }, fewer = false })
by_token:remove()
for i, comparison in ipairs(list) do r:say("seed %d\n%s", r.seeds[i], tostring(comparison)) end
r:say("with tokens, seed %d\n%s", r.seed, tostring(sparse[1]))

-- How far pictures of the same prompts by other noise are apart.
local function apart()
  local inside = diffusion.measure.features(yardstick:judge "scene-resnet", { "layer1", "layer2", "layer3" })
  local pictures = yardstick:decode((yardstick:draw(sampler(), yardstick:prompts("validation", 0, args.count, 77))))
  return diffusion.measure.perceptual(list[1]:row "full".samples, pictures, function(x)
    return inside(zoo.scenes.pictures(x))
  end):mean():item() / 3
end

-- Which steps had a call: a row for each prompt of the tuning prompts, white where there was one.
local _, run = yardstick:draw(sampler(sada), yardstick:prompts("training", 0, args.count, 1000))
local colours = { call = 1.0, tokens = 0.8, between = 0.0, ahead = 0.3 }
local map = {}
for i, notes in ipairs(sada:notes(run)) do
  map[i] = {}
  for step = 1, args.steps do map[i][step] = colours[notes[step]] end
end
local shown = ty.tensor(map):unsqueeze(0):unsqueeze(0):interpolate({ 8 * args.count, 8 * args.steps }, nil, "nearest")
ty.plot.grid((shown * 2 - 1):expand(1, 3, 8 * args.count, 8 * args.steps), { columns = 1 }):save(r:picture "sada.png")

local rows = yardstick.rows(list, "SADA", { speedup = 1.8, perceptual = 0.1 }, { "perceptual" })
local criterion = { speedup = {}, perceptual = {} }
for i, comparison in ipairs(list) do
  local row = comparison:row "criterion"
  criterion.speedup[i], criterion.perceptual[i] = row.speedup, row.perceptual
end
rows[#rows + 1] = { claim = "criterion alone: times as fast as the full sampler", values = criterion.speedup,
  judged = false }
rows[#rows + 1] = { claim = "criterion alone: distance of features to the full sampler's pictures",
  values = criterion.perceptual, judged = false }
rows[#rows + 1] = { claim = "with a part of the tokens: distance of features to the full sampler's pictures",
  measured = sparse[1]:row "tokens".perceptual, judged = false }
rows[#rows + 1] = { claim = "pictures of the same prompts by other noise: distance of features", measured = apart(),
  judged = false }
os.exit(r:finish(rows), true)
