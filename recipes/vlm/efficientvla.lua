-- A policy that acts with a third of the work
-- claim: with less than 30 % of the operations of an action it does as many tasks, without training
-- system: EfficientVLA on arm-policy: layers that turn little are deleted, tokens that are asked for go on, the
--   diffusion head's layers are computed every few steps
-- paper: Yang et al. 2025, "EfficientVLA: Training-Free Acceleration and Compression for Vision-Language-Action Models"
-- time: 4 minutes on one CPU core
--
-- All ways share the weights of arm-policy and act in the same episodes with the same noise, so that they are compared
-- episode by episode; each seed has episodes of its own. Importance of layers is measured on training episodes, and how
-- many layers, tokens and steps are left was chosen on other episodes. Layers and tokens stand alone with what brings
-- the operations to the same bar, or as far as it goes, and each part as it is in the method; layers and tokens at
-- random and fewer steps of denoising cost what the method costs. What has one figure acts in the first seed's
-- episodes.
--
-- Success does not stay: in a decoder of six layers the two that go hardly turn what they get, but they shift the
-- hand by what a grasp feels. Tokens and the head's cache alone cost little. The cache is made
-- anew in the first and the last step, because what stands in the last step is done: every fifth step was worse. A base
-- whose layers were not left out at random at the end of its training lost far more of its success.
local ty = require "tycho"
local datasets, vlm, zoo = require "tycho.datasets", require "tycho.vlm", require "tycho.zoo"
local efficient = vlm.efficientvla

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "episodes", 100, "of each seed", quick = 2 },
    { "deleted", 2, "layers of the decoder" },
    { "tokens", 12, "of the picture that go on, of 64" },
    { "key", 8, "of them that the text attends to most" },
    { "share", 0.5, "of the others that relevance chooses" },
    { "interval", 9, "steps of denoising for which the head's layers stand" },
    { "calibration", 40, "training episodes that importance is measured on", quick = 4 },
    { "first", 0, "episode of the first seed" },
    { "tasks", { "push", "open", "place" }, "of the arm" },
  },
}
local args, arm = r.args, datasets.arm
local tasks = args.tasks
local model = r:place(function() return zoo.load "arm-policy" end)
local layers = #model.language_model.model.layers

local seen = arm.plans { episodes = args.calibration, tasks = tasks, looks = 4, seed = 1 }
local importance = efficient.importance(model, zoo.arm.observation(model, seen))
for i, value in ipairs(importance) do
  r:say("layer %d: importance %.4f", i, value)
  r.metrics["importance/" .. i] = value
end
local kept = efficient.kept(importance, args.deleted)

-- The least change of one part that brings the operations to the bar, or all that it can change.
local full = efficient.cost(model).all
local function least(options, from, to, step)
  local o
  for value = from, to, step do
    o = options(value)
    if efficient.cost(model, o).all <= 0.3 * full then break end
  end
  return o
end

local function random_places(seed)
  return function(tower, tokens)
    ty.manual_seed(seed)
    return (ty.rand(tower.shape[1], tower.shape[2]):argsort(1):narrow(1, 0, tokens):sort(1)):to(tower.device)
  end
end

local ours = { layers = kept, tokens = args.tokens, key = args.key, share = args.share, interval = args.interval }
local function with(changes)
  local o = {}
  for key, value in pairs(ours) do o[key] = value end
  for key, value in pairs(changes) do o[key] = value end
  return o
end
local ways = {
  { name = "full", options = {} },
  { name = "ours", options = ours },
  { name = "layers alone", once = true, options = least(function(n)
    return { layers = efficient.kept(importance, n) }
  end, 1, layers - 1, 1) },
  { name = "tokens alone", once = true, options = least(function(n)
    return { tokens = n, key = args.key, share = args.share }
  end, model.places - 1, 1, -1) },
  { name = "its layers alone", once = true, options = { layers = kept } },
  { name = "its tokens alone", once = true, options = { tokens = args.tokens, key = args.key, share = args.share } },
  { name = "its cache alone", once = true, options = { interval = args.interval } },
  { name = "random layers", options = function(seed)
    ty.manual_seed(100 + seed)
    local others = ty.rand(layers):tolist()
    return with { layers = efficient.kept(others, args.deleted) }
  end },
  { name = "random tokens", once = true, options = function(seed) return with { choose = random_places(seed) } end },
  { name = "fewer steps", options = with { interval = 1 }, steps = math.ceil(zoo.arm.steps / args.interval) },
}

local film, done, cost, lost = { order = {} }, {}, {}, {}
for _, way in ipairs(ways) do done[way.name], lost[way.name] = {}, {} end
for i, seed in ipairs(r.seeds) do
  local reference
  for _, way in ipairs(ways) do
    if way.once and i > 1 then goto continue end
    local options = type(way.options) == "function" and way.options(seed) or way.options
    local network = efficient.apply(model, options)
    local priced = { steps = way.steps }
    for key, value in pairs(options) do priced[key] = value end
    cost[way.name] = efficient.cost(model, priced).all / full
    local watch
    if way.name == "ours" and i == 1 then
      watch = function(now, plans, condition)
        zoo.arm.film(film, now, plans, 8, function(picture, row) -- what does not go on is dark
          local on = condition.places:select(0, row - 1):to { device = picture.device }
          return zoo.arm.shaded(picture, ty.zeros({ model.places }):scatter(0, on, ty.ones { args.tokens }))
        end)
      end
    end
    local found = arm.trial(zoo.arm.acts(model, network, { steps = way.steps, seed = seed, watch = watch }),
      zoo.arm.rules { tasks = tasks, episodes = args.episodes, first = args.first + (i - 1) * args.episodes,
        looks = r.quick and 1 or nil })
    reference = reference or found
    done[way.name][i], lost[way.name][i] = found.success, reference.success - found.success
    local other = 0
    for k, success in ipairs(found.episodes) do other = other + (success ~= reference.episodes[k] and 1 or 0) end
    r:say("seed %d, %s: operations %.3f, success %.3f, %d episodes end otherwise, %.1f looks", seed, way.name,
      cost[way.name], found.success, other, found.looks)
    ::continue::
  end
end
for _, way in ipairs(ways) do
  r.metrics["operations/" .. way.name], r.metrics["success/" .. way.name] = cost[way.name], done[way.name]
end

-- Seconds of an action of one arm, and of sixteen that are looked at together.
local faster = {}
for _, count in ipairs(r.quick and { 1 } or { 1, 16 }) do
  local looks, functions = zoo.arm.observation(model, seen), {}
  for key, value in pairs(looks) do looks[key] = value:narrow(0, 0, count) end
  for k = 1, 2 do
    local network = efficient.apply(model, ways[k].options)
    functions[k] = function() zoo.arm.draw(model, network, looks) end
  end
  local times = r:time(functions, { rounds = r.quick and 1 or 7 })
  local a, b = times[1], times[2]
  r.metrics["milliseconds/full/" .. count], r.metrics["milliseconds/ours/" .. count] = 1e3 * a, 1e3 * b
  r:say("%d arms: %.2f ms, ours %.2f ms", count, 1e3 * a, 1e3 * b)
  faster[count] = a / b
end
ty.plot.grid(zoo.arm.strips(film, 8), { columns = 8, gap = 2 }):save(r:picture "kept.png")

local rows = {
  { claim = "operations of an action, of the full policy's", measured = cost.ours, bar = 0.3, below = true },
  { claim = "success lost, in share of episodes", values = lost.ours, baseline = done.full, bar = 0.01, below = true },
  { claim = "times as fast, one arm", measured = faster[1], judged = false },
}
for _, way in ipairs(ways) do
  if way.name ~= "full" and way.name ~= "ours" then
    rows[#rows + 1] = { claim = ("success lost with %s"):format(way.name), values = lost[way.name], judged = false }
  end
end
os.exit(r:finish(rows), true)
