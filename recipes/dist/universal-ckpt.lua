-- Going on with fewer ranks than a checkpoint was saved by
-- claim: saved by 4 ranks, training goes on with any other number and arrangement of them, with the same next loss
-- system: a Llama on 2 x 2 ranks (shared layers x shared data and optimizer state), resumed on 1, 2 and 4
-- paper: Lian et al. 2024, "Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale Distributed
--   Training"
-- time: 1 minute on one CPU core
--
-- Every layout is compared with ranks that were never interrupted, which see the same rows. The control goes on from
-- the same weights without what the optimizer knew, as a file of weights alone would have it. Losses are of f32, which
-- other arrangements sum in another order; that the parameters and moments themselves are the same is compared bit for
-- bit, after they have been loaded by a layout and saved by it again.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "length", 32, "tokens of a row", quick = 8 }, { "width", 64, "hidden size of the Llama", quick = 32 },
    { "layers", 2, "layers of it", quick = 1 }, { "before", 60, "steps before it is saved", quick = 2 },
    { "after", 60, "steps after that", quick = 2 },
  },
}
local args = r.args
local work = dist.workload.open { length = args.length, width = args.width, heads = 4, layers = args.layers, rows = 8,
  chapters = r.quick and 12 or nil, vocabulary = r.quick and 260 or nil }
local folder = r:path "checkpoints"
ty.io.mkdir(folder)

-- Trains on a layout, from a checkpoint where one is given. Returns the losses, bytes that the rank saved, and the
-- seconds that saving and loading took.
local function train(group, layout, from, steps, to, forget)
  local d = require "tycho.dist"
  local trainer = d.universal_trial.new(group, work, { tensor = layout[1], data = layout[2] })
  local out = { losses = {} }
  if from then trainer:load(from) end
  if forget then trainer:forget() end
  for step = 1, steps do out.losses[step] = trainer:step() end
  if to then
    trainer:save(to)
    d.universal.consolidate(group, to)
    out.bytes = require("tycho").io.stat(("%s/rank-%04d.safetensors"):format(to, group.rank)).size
  end
  return out
end
local function run(layout, ...) return dist.run(layout[1] * layout[2], train, nil, layout, ...) end

local saved_by = { 2, 2 }
local first = folder .. "/first"
local begun = run(saved_by, nil, args.before, first)
local whole = run(saved_by, nil, args.before + args.after)[1].losses
local unbroken = table.move(whole, args.before + 1, #whole, 1, {})

local bytes, most = 0, 0
for _, name in ipairs(ty.io.listdir(first .. "/atoms")) do
  bytes = bytes + ty.io.stat(first .. "/atoms/" .. name).size
end
for _, of in ipairs(begun) do most = math.max(most, of.bytes) end

local layouts = r.quick and { { 2, 1 }, { 1, 1 } } or { { 2, 2 }, { 1, 2 }, { 2, 1 }, { 1, 1 }, { 4, 1 }, { 1, 4 } }
r:say("saved by 2 x 2 ranks after %d steps, resumed\n               next loss                 after %d steps\n"
  .. "layers x data    resumed   unbroken       resumed   unbroken   files that differ", args.before, args.after)
local next_apart, later_apart, files, series = 0, 0, 0, {}
local function apart(losses, step) return math.abs(losses[step] / unbroken[step] - 1) end
for i, layout in ipairs(layouts) do
  local again = ("%s/again%d"):format(folder, i)
  run(layout, first, 0, again)
  local differ = dist.universal_trial.differing(first, again)
  local losses = run(layout, first, args.after)[1].losses
  r:say("%6d x %d %14.7f %10.7f %13.7f %10.7f %19d", layout[1], layout[2], losses[1], unbroken[1], losses[args.after],
    unbroken[args.after], differ)
  next_apart, files = math.max(next_apart, apart(losses, 1), apart(losses, 2)), files + differ
  later_apart = math.max(later_apart, apart(losses, args.after))
  series[i] = { y = losses, label = ("%d x %d"):format(layout[1], layout[2]) }
end

-- Every layout from every other, the next two losses.
local pairs_apart, count = 0, 0
for i = 1, #layouts do
  for _, to in ipairs(layouts) do
    local losses = run(to, ("%s/again%d"):format(folder, i), 2)[1].losses
    pairs_apart, count = math.max(pairs_apart, apart(losses, 1), apart(losses, 2)), count + 1
  end
end
local forgot = run({ 1, 1 }, first, args.after, nil, true)[1].losses
local lost = 0
for step = 1, args.after do lost = math.max(lost, apart(forgot, step)) end
r:say("%d pairs of layouts: next losses at most %.1e apart; without moments up to %.1e", count, pairs_apart, lost)

local function steps_after(begin, n)
  local x = {}
  for i = 1, n do x[i] = begin + i end
  return x
end
local lines = { { x = steps_after(0, args.before), y = table.move(whole, 1, args.before, 1, {}),
  label = "2 x 2 ranks" } }
for _, s in ipairs(series) do
  lines[#lines + 1] = { x = steps_after(args.before, args.after), y = s.y, label = s.label }
end
lines[#lines + 1] = { x = steps_after(args.before, args.after), y = forgot, label = "without moments",
  color = { 0.85, 0.1, 0.1 } }
ty.plot.line { series = lines, title = "Saved by 2 x 2 ranks, resumed by others", x_label = "step", y_label = "loss",
  width = 900 }:save(r:picture "universal-ckpt.png")

os.exit(r:finish {
  { claim = "next two losses by other layouts: furthest from those never interrupted, of them", measured = next_apart,
    bar = 1e-6, below = true },
  { claim = ("the same, of %d pairs of layouts"):format(count), measured = pairs_apart, bar = 1e-6, below = true },
  { claim = ("loss after %d more steps: furthest"):format(args.after), measured = later_apart, bar = 1e-3,
    below = true },
  { claim = "files of parameters and moments that differ once loaded and saved by another layout", measured = files,
    bar = 0, below = true },
  { claim = "how far losses are without the moments, times as far", measured = lost / math.max(pairs_apart, 1e-9),
    bar = 1000 },
  { claim = "bytes that one of 4 ranks saves, of all", measured = most / bytes, bar = 0.5, below = true },
}, true)
