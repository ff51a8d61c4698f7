-- A policy that computes again only what matters of a picture
-- claim: 1.5 times as fast at no lower success: keys and values of a picture's tokens are kept from look to look
-- system: a learned token cache on arm-policy: a selector of tokens and a predictor of how many, both tiny
-- paper: Wei et al. 2026, "Learning to Accelerate Vision-Language-Action Models through Adaptive Visual Token Caching"
-- time: 5 minutes on one CPU core
--
-- The policy's weights stay; a gate of a few thousand weights learns from pairs of looks of the expert's training
-- episodes. All ways act in the same episodes with the same noise. Seconds are those of whole episodes of some arms
-- that are looked at together, replayed by all ways in turn: tower, choice, decoder and head with all of its steps. The
-- fixed ratio and the random choice use as much again as the learned one does in the mean, and the rule's threshold was
-- chosen to do so on training episodes. The cost of what is computed was chosen on episodes that are not counted.
--
-- The predictor always takes the largest but one of its ratios, so that a fixed ratio does the same, and tokens by how
-- little the tower changed are chosen as well. The head with its ten steps, which is not cached, leaves no more than
-- this speed. The cost in the loss was not tuned.
local ty = require "tycho"
local datasets, vlm, zoo = require "tycho.datasets", require "tycho.vlm", require "tycho.zoo"
local cache = vlm.token_cache

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "episodes", 200, "of each seed", quick = 2 },
    { "arms", 24, "of them whose episodes are timed", quick = 2 },
    { "steps", 120, "of training a gate", quick = 2 },
    { "batch", 16, "pairs of looks of a step", quick = 2 },
    { "pool", 400, "episodes that pairs come from", quick = 4 },
    { "cost", 0.02, "of computing everything again" },
    { "lr", 3e-3, "peak learning rate" },
    { "first", 0, "episode of the first seed" },
    { "tasks", { "push", "open", "place" }, "of the arm" },
  },
}
local args, arm = r.args, datasets.arm
local tasks = args.tasks
local model = r:place(function() return zoo.load "arm-policy" end)

local names = { "none", "learned", "fixed", "random", "similar" }
local seconds, success, lost, reused, faster, film = {}, {}, {}, {}, {}, { order = {} }
for _, name in ipairs(names) do
  seconds[name], success[name], lost[name], reused[name], faster[name] = {}, {}, {}, {}, {}
end

for i, seed in ipairs(r.seeds) do
  local pairs_of = zoo.arm.pairs(model, { episodes = args.pool, seed = 2 + seed, tasks = tasks, batch = args.batch })
  ty.manual_seed(seed)
  local gate = r:place(function() return cache.Gate(model) end)
  local report = cache.fit(model, gate, pairs_of, zoo.arm.imitation(model), { steps = args.steps, cost = args.cost,
    lr = args.lr })
  gate:eval()
  r:say("seed %d: loss %.5f, %.2f used again, %.0f ms a step", seed, report.loss, report.reused, 1e3 * report.seconds)
  local share
  local looks, functions = {}, {} -- what the first arms see, for the clock
  for _, name in ipairs(names) do
    local policy
    if name == "learned" then
      policy = cache.apply(model, { choose = gate:chooser() })
    elseif name == "similar" then
      policy = cache.apply(model, { choose = cache.chooser("similar", {
        above = zoo.arm.similar_above(model, pairs_of, share, r.quick and 1 or 8) }) })
    elseif name ~= "none" then
      policy = cache.apply(model, { choose = cache.chooser(name, { share = share, gate = gate }) })
    end
    local trace = {}
    local watch
    if name == "none" then
      watch = function(now)
        local rows, episodes = {}, {}
        for k, episode in ipairs(now.episodes) do
          if episode < args.first + (i - 1) * args.episodes + args.arms then
            rows[#rows + 1], episodes[#episodes + 1] = k - 1, episode
          end
        end
        if #rows == 0 then return end
        local look = zoo.arm.observation(model, now)
        for key, value in pairs(look) do
          look[key] = ty.keep(value:index_select(0, ty.tensor(rows, { dtype = "i64", device = value.device })))
        end
        look.episodes = episodes
        looks[#looks + 1] = look
      end
    end
    if name == "learned" and i == 1 then
      watch = function(now, plans, condition)
        trace[#trace + 1] = condition.reused:to("f32"):mean():item()
        zoo.arm.film(film, now, plans, 8, function(picture, row) -- what is used again is dark
          local fresh = 1 - condition.reused:select(0, row - 1):to "f32"
          return zoo.arm.shaded(picture, fresh:to { device = picture.device })
        end)
      end
    end
    ty.manual_seed(seed)
    local found = arm.trial(zoo.arm.acts(model, policy, { seed = seed, watch = watch }), zoo.arm.rules {
      tasks = tasks, episodes = args.episodes, first = args.first + (i - 1) * args.episodes,
      looks = r.quick and 2 or nil })
    success[name][i], reused[name][i] = found.success, policy and policy.reused or 0
    lost[name][i] = success.none[i] - found.success
    functions[name] = function()
      if policy then policy:reset() end
      for _, look in ipairs(looks) do zoo.arm.draw(model, policy, look) end
    end
    if name == "learned" then share = math.min(1, policy.reused * found.looks / math.max(1e-9, found.looks - 1)) end
    if #trace > 0 then r.metrics.reused_by_look = trace end
    r:say("seed %d, %s: success %.3f, %.3f used again, %.1f looks", seed, name, found.success, reused[name][i],
      found.looks)
  end
  local count = 0
  for _, look in ipairs(looks) do count = count + #look.episodes end
  for name, time in pairs(r:time(functions, { rounds = r.quick and 1 or 5 })) do seconds[name][i] = time / count end
  for _, name in ipairs(names) do
    faster[name][i] = seconds.none[i] / seconds[name][i]
    r:say("seed %d, %s: %.3f ms a look, %.2f times as fast", seed, name, 1e3 * seconds[name][i], faster[name][i])
  end
end
for _, name in ipairs(names) do
  r.metrics["success/" .. name], r.metrics["reused/" .. name] = success[name], reused[name]
  r.metrics["milliseconds/" .. name], r.metrics["faster/" .. name] = 1e3 * ty.stats.mean(seconds[name]), faster[name]
end
ty.plot.grid(zoo.arm.strips(film, 10), { columns = 10, gap = 2 }):save(r:picture "reused.png")

local rows = {
  { claim = "times as fast, with tower, choice and head", values = faster.learned, bar = 1.5 },
  { claim = "success lost, in share of episodes", values = lost.learned, baseline = success.none, bar = 0,
    below = true },
}
for k = 3, #names do
  rows[#rows + 1] = { claim = ("success lost with the %s choice"):format(names[k]), values = lost[names[k]],
    judged = false }
end
rows[#rows + 1] = { claim = "tokens used again", values = reused.learned, judged = false }
os.exit(r:finish(rows), true)
