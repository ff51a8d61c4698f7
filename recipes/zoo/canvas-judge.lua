-- A judge of canvases: a residual network
-- claim: of pictures that it never saw it says style, kind, ground, colour and marks, each right in nine of ten
-- system: a ResNet of 0.3 million parameters for 32 x 32 pictures
-- paper: He et al. 2016, "Deep Residual Learning for Image Recognition"
-- time: 2 minutes on one CPU core
--
-- It learns from all kinds of things, also from those that painters are not shown, and from pictures of another seed.
-- Style and ground are asked in all pictures, colour and marks in plain ones: in sepia or outlines nobody sees them.
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 2, recorded_seeds = 2, args = {
  { "steps", 900, "training steps", quick = 3 },
  { "batch", 64, "pictures of a step", quick = 4 },
  { "count", 1000, "pictures to measure with", quick = 8 },
  { "publish", false, "write the first seed's model to zoo/", place = true },
} }

local function measure(judge, split, styles)
  local batch = datasets.load("canvas", { split = split, styles = styles, moved = true }):batch(ty.arange(r.args.count))
  return judge:shares(batch.image, zoo.canvas.labels(batch))
end

local found, networks = {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local network = zoo.canvas.train_judge(r:place(function()
    return zoo.canvas.judge_network(r.quick and { 8, 8 } or nil)
  end), { steps = r.args.steps, batch = r.args.batch, seed = seed, average = r.quick and 0 or 0.99 })
  networks[i] = network
  local judge = zoo.canvas.judge(network)
  local all, plain = measure(judge, "validation"), measure(judge, "held_out", { "plain" })
  local unknown = measure(judge, "unknown_kinds")
  for name, value in pairs { style = all.style, kind = all.kind, ground = all.ground, colour = plain.colour,
    mark = plain.mark, unknown = unknown.kind } do
    found[name] = found[name] or {}
    found[name][i] = value
  end
  r:say("seed %d: style %.3f, kind %.3f, ground %.3f; of plain ones colour %.3f, marks %.3f; other kinds %.3f",
    seed, all.style, all.kind, all.ground, plain.colour, plain.mark, unknown.kind)
end
local rows = {
  { claim = "style right, share of pictures", values = found.style, bar = 0.9 },
  { claim = "kind right", values = found.kind, bar = 0.9 },
  { claim = "kind right, of kinds that painters are not shown", values = found.unknown, bar = 0.9 },
  { claim = "ground right", values = found.ground, bar = 0.9 },
  { claim = "colour right, of plain pictures of things dyed as none before", values = found.colour, bar = 0.9 },
  { claim = "marks right, of the same", values = found.mark, bar = 0.9 },
}
if r.args.publish then
  zoo.publish(r, rows, function(folder) networks[1]:to("f16"):save(folder) end)
end
os.exit(r:finish(rows), true)
