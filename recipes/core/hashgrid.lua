-- Pictures and shapes in hash tables: encoding and network as one op
-- claim: hash grid and small network, fused, run three times as fast as op by op, and fit what networks of waves do not
-- system: ty.hash_grid and ty.hash_field, forward and backward, under models.HashField
-- paper: Mubarik et al. 2023, "Hardware Acceleration of Neural Graphics"; the encoding is Müller et al. 2022, "Instant
--   Neural Graphics Primitives with a Multiresolution Hash Encoding"
-- time: 6 minutes on one CPU core
--
-- The paper finds encoding and network to be most of what neural graphics cost, and builds hardware for the two; here
-- they are one op, which takes points through both while they are in the cache. Op by op (nn.unfused.hash_field) is
-- written as fast as our ops allow: all levels at once, integers of 32 bits, corner by corner. Fits are races: who has
-- had less processor time takes the next step. The other side are networks of Fourier features or of plain places,
-- whatever did best on a picture and a seed of their own; they get more tries than the tables, smaller batches among
-- them. Colours are judged at pixels, and distances at places, that nobody learnt from.
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local vision, nn = require "tycho.vision", ty.nn
local fields, trials = vision.fields, vision.field_trials

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "points", 65536, "points of the ops that are timed", quick = 512 },
    { "rounds", 7, "measurements of which the median counts", quick = 1 },
    { "side", 512, "of the pictures, in pixels", quick = 32 },
    { "seconds", 10.0, "of processor time of each fit", quick = 0.02 },
    { "tuning", 3.0, "seconds of each try", quick = 0.01 },
    { "batch", 8192, "points of a step", quick = 128 },
    { "near", 20000, "places at which distances are judged", quick = 200 },
  },
}
local args = r.args

-- ---- the op ----

-- fn(function of the op's form) for a network of the paper's size over `entries` rows a level.
local function setting(inputs, entries, dtype)
  return r:place(function()
    local field = models.HashField { inputs = inputs, entries = entries, finest = 2048 }
    ty.no_grad(function() field.table:normal_(0, 0.1) end)
    local x, g = ty.rand(args.points, inputs):to(dtype), ty.randn(args.points, 3):to(dtype)
    field = field:to(dtype)
    local leaves = { field.table, field.first, field.last, field.hidden }
    return function(op)
      local y = op(x, field.table, field.first, field.last, field.resolution, entries, field.hidden)
      return y, table.unpack(ty.grad((y * g):sum(), leaves))
    end
  end)
end
local apart, ahead = 0, {}
for _, inputs in ipairs { 2, 3 } do
  ty.manual_seed(inputs)
  local run = setting(inputs, 1 << 12, "f64")
  local ours, steps = { run(ty.hash_field) }, { run(nn.unfused.hash_field) }
  for i, y in ipairs(ours) do
    apart = math.max(apart, (y - steps[i]):abs():max():item() / steps[i]:square():mean():sqrt():item())
  end
end
r:say("forward and backward of %d points, milliseconds\nplaces   entries     fused  unfused  grid alone", args.points)
for _, inputs in ipairs { 2, 3 } do
  for _, log in ipairs { 14, 19 } do
    local run = setting(inputs, 1 << log, "f32")
    local function grid_alone(x, rows, first, last, resolution, entries, hidden)
      local h = ty.linear(ty.hash_grid(x, rows, resolution, entries), first):relu()
      return ty.linear(ty.linear(h, hidden:select(0, 0)):relu(), last)
    end
    local at = r:time({ fused = function() run(ty.hash_field) end, unfused = function() run(nn.unfused.hash_field) end,
      alone = function() run(grid_alone) end }, { rounds = args.rounds })
    r:say("%d-D  %10d  %8.1f %8.1f  %10.1f", inputs, 1 << log, 1e3 * at.fused, 1e3 * at.unfused, 1e3 * at.alone)
    r:note(("milliseconds_%dd_%d"):format(inputs, 1 << log), at)
    ahead[#ahead + 1] = at.unfused / at.fused
  end
end

-- ---- fits ----

-- What each side may choose from: models and rates.
local function hash(o, rate) return { side = "hash grid", rate = rate, make = models.HashField, o = o } end
local function waves(o, rate, part)
  return { side = "waves", rate = rate, make = models.FourierField, o = o, batch = part and args.batch // part }
end
local tries = {
  picture = { hash({ finest = 256 }, 1e-2), hash({ finest = 512 }, 1e-2), waves({ scale = 0 }, 1e-3),
    waves({ scale = 10 }, 1e-3), waves({ scale = 20 }, 1e-3), waves({ scale = 10 }, 3e-3),
    waves({ scale = 20, width = 64 }, 3e-3), waves({ scale = 10 }, 1e-3, 8), waves({ scale = 10 }, 1e-3, 32),
    waves({ scale = 0 }, 1e-3, 8) },
  shape = { hash({ finest = 128 }, 1e-2), hash({ finest = 64 }, 3e-3), waves({ scale = 0 }, 1e-3),
    waves({ scale = 1 }, 1e-3), waves({ scale = 2 }, 1e-3), waves({ scale = 1 }, 3e-3),
    waves({ scale = 1, width = 64 }, 3e-3), waves({ scale = 1 }, 1e-3, 8), waves({ scale = 1 }, 1e-3, 32),
    waves({ scale = 0 }, 1e-3, 8) },
}

local function picture(seed, i)
  local image = datasets.load("photos", { crop = args.side, length = 100 }):get(i).image
  return trials.picture(image, { batch = args.batch, seed = seed, device = r.device })
end
local function shape(seed)
  return trials.shape { batch = args.batch, places = args.near, seed = 1000 + seed, device = r.device }
end

local results, shown = {}, {}
for _, task_of in ipairs { { "picture", picture }, { "shape", shape } } do
  local name, make = table.unpack(task_of)
  local best = {}
  for _, w in ipairs(trials.race(make(50, 50), tries[name], args.tuning, { seed = 50, device = r.device })) do
    local c = w.candidate
    if not best[c.side] or w.score > best[c.side].score then best[c.side] = w end
    r:say("%s, tried: %-9s %4d, rate %g, batch %d: %.4f in %d steps", name, c.side, c.o.finest or c.o.scale, c.rate,
      c.batch or args.batch, w.score, w.steps)
  end
  local both = { best["hash grid"].candidate, best.waves.candidate }
  for i, seed in ipairs(r.seeds) do
    local task = make(seed, i - 1)
    for _, w in ipairs(trials.race(task, both, args.seconds, { seed = seed, device = r.device })) do
      local side = w.candidate.side
      r:say("%s, seed %d: %-9s %.4f in %d steps", name, seed, side, w.score, w.steps)
      ty.stats.put(results, name .. side, i, name == "shape" and -1000 * w.score or w.score)
      if name == "shape" then ty.stats.put(results, "angle" .. side, i, trials.angle(w.field, task.places)) end
      if i == 1 then shown[name .. side], shown[name] = w, task end
    end
  end
end

local sheet, side = { shown.picture.image }, args.side
local slice = ty.cat({ fields.centres(side, side), ty.full({ side * side, 1 }, 0.5) }, 1)
slice[":, 1"] = 1 - slice[":, 1"]
for _, of in ipairs { "hash grid", "waves" } do
  sheet[#sheet + 1] = fields.draw(shown["picture" .. of].field, side, side, r.device)
end
sheet[4] = fields.contours(fields.signed_distance(slice):reshape(side, side))
for _, of in ipairs { "hash grid", "waves" } do
  local distances = ty.no_grad(function() return shown["shape" .. of].field(slice:to(r.device)) end)
  sheet[#sheet + 1] = fields.contours(distances:cpu():reshape(side, side))
end
ty.plot.grid(ty.stack(sheet, 0), { columns = 3, labels = { "a picture", "by a hash grid", "by waves",
  "a slice of distances", "by a hash grid", "by waves" } }):save(r:picture "hashgrid.png")

local grid, other = results["picturehash grid"], results.picturewaves
local off, far = results["shapehash grid"], results.shapewaves
os.exit(r:finish {
  { claim = "f64 from op by op, result and gradients, of a typical value", measured = apart, bar = 1e-9, below = true },
  { claim = "times as fast as op by op, forward and backward, at least", measured = math.min(table.unpack(ahead)),
    bar = 3 },
  { claim = "dB at pixels that nobody learnt from", values = grid, baseline = other, bar = 25 },
  { claim = "as many more than a network of waves after the same time", values = ty.stats.differences(grid, other),
    bar = 1 },
  { claim = "error of distances, in thousandths of the side", values = off, baseline = far, bar = 1, below = true },
  { claim = "of the network of waves' after the same time", values = ty.stats.ratios(off, far), bar = 0.9,
    below = true },
  { claim = "degrees between its normals and the true ones", values = results["anglehash grid"], judged = false },
  { claim = "the same of the network of waves", values = results.anglewaves, judged = false },
}, true)
