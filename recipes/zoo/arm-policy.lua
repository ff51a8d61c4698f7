-- A policy of the toy arm that sees, reads and draws its actions by diffusion
-- claim: in scenes that it never saw it does eight of ten tasks in words: push, open, place
-- system: an ActionModel of 1.1 million parameters: 64 places of a picture, words and joints in a decoder of six
--   layers, a diffusion transformer over the next four waypoints, ten steps of DDIM
-- paper: Li et al. 2024, "CogACT: A Foundational Vision-Language-Action Model for Synergizing Cognition and Action in
--   Robotic Manipulation"
-- time: 14 minutes on one CPU core
--
-- It learns from episodes of the expert, whose joints are pushed off the way at times, and says which waypoints come
-- next; the arm is moved to the first of them by inverse kinematics, eight steps at most, before it looks again. In
-- training alone the simulator also tells the tower where the named things are. Layers of the decoder are left out at
-- random while it learns, as deep models bear it; many of them at the end, after which the weights are the mean of
-- those before and behind that part. Alone, that part cost success.
--
-- Reaching is learnt too, and stands beside the others: signs are small, and what the query knows of their place is
-- not exact enough after these minutes. That it does not count was decided on other episodes. Stacking is left out.
local ty = require "tycho"
local datasets, models, zoo = require "tycho.datasets", require "tycho.models", require "tycho.zoo"

local r = ty.recipe.declare { base = true, args = {
  { "first", 500, "steps of the tower alone", quick = 2 },
  { "steps", 2600, "training steps", quick = 2 },
  { "settle", 320, "steps more with many layers left out", quick = 1 },
  { "batch", 32, "looks of a step", quick = 4 },
  { "lr", 1e-3, "peak learning rate" },
  { "layers", 6, "of the decoder", quick = 2 },
  { "episodes", 400, "to measure with", quick = 4 },
  { "every", 650, "steps between looks at how it does" },
  { "tasks", { "reach", "push", "open", "place" }, "of the arm, that it learns" },
  { "counted", { "push", "open", "place" }, "of these, that it is measured by" },
  { "publish", false, "write the model to zoo/", place = true },
} }
local args = r.args
local tasks, counted = args.tasks, args.counted

ty.manual_seed(r.seed)
local model = r:place(function()
  return models.ActionModel { words = zoo.arm.vocabulary(r.quick and 50 or 3000), text_config = {
    hidden_size = 96, intermediate_size = 256, num_hidden_layers = args.layers, num_attention_heads = 4,
    max_position_embeddings = 128 } }
end)
r:say("%d parameters, %d words", model:count_parameters(), #model.config.words)

local function judge(options)
  local rules = { tasks = tasks }
  for key, value in pairs(options) do rules[key] = value end
  if r.quick then rules.looks = 2 end
  return datasets.arm.trial(zoo.arm.acts(model), zoo.arm.rules(rules))
end

local kept = ("%s/%d-%d-%d.safetensors"):format(r:base "arm-policy", args.steps, args.settle, r.seed)
if ty.io.exists(kept) then
  model:load(kept)
  model:eval()
else
  local report = zoo.arm.train(model, { first = args.first, steps = args.steps, batch = args.batch, lr = args.lr,
    tasks = tasks, seed = r.seed, pool = r.quick and 4 or 1500, every = args.every, evaluate = function(step)
      local found = judge { first = 1000, episodes = 48 } -- episodes that are not counted
      local kinds = {}
      for _, kind in ipairs(tasks) do kinds[#kinds + 1] = ("%s %.2f"):format(kind, found.by_kind[kind]) end
      r:say("step %d: success %.2f, %s; %.1f looks", step, found.success, table.concat(kinds, ", "), found.looks)
    end })
  r:say("loss %.5f, of places %.3f, %.0f ms a step", report.loss, report.finder, 1e3 * report.seconds)
  report = zoo.arm.settle(model, { first = 0, finder = 0, steps = args.settle, batch = args.batch, lr = 0.4 * args.lr,
    drop = 0.35, tasks = tasks, seed = r.seed + 1, pool = r.quick and 4 or 1500 })
  r:say("settled: loss %.5f", report.loss)
  ty.io.mkdir(r:base "arm-policy")
  model:save(kept)
end

local marked = { order = {} }
local found = datasets.arm.trial(zoo.arm.acts(model, nil, { watch = function(seen, plans)
  zoo.arm.film(marked, seen, plans, 8)
end }), zoo.arm.rules { tasks = counted, episodes = args.episodes, looks = r.quick and 2 or nil })
local other = judge { split = "held_out", episodes = args.episodes // 2, tasks = counted }
local reach = judge { episodes = args.episodes // 4, tasks = { "reach" } }
ty.plot.grid(zoo.arm.strips(marked, 12), { columns = 12, gap = 2 }):save(r:picture "episodes.png")

local rows = { { claim = "episodes done, of scenes never seen", measured = found.success, bar = 0.8 } }
for _, kind in ipairs(counted) do
  rows[#rows + 1] = { claim = "the same, of " .. kind, measured = found.by_kind[kind] or 0, judged = false }
end
rows[#rows + 1] = { claim = "episodes of reach done", measured = reach.success, judged = false }
rows[#rows + 1] = { claim = "episodes done, of pairs of things and of phrases never seen", measured = other.success,
  judged = false }
rows[#rows + 1] = { claim = "looks of an episode", measured = found.looks, judged = false }
if args.publish then zoo.publish(r, rows, function(folder) model:to("f16"):save(folder) end) end
os.exit(r:finish(rows), true)
