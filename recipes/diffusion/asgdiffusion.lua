-- Large pictures by several devices that a small picture's structure leads
-- claim: nothing is repeated that the words ask for once, and four devices take a third of one's time
-- system: asynchronous structure guidance over pieces, then tiles
-- paper: Li et al. 2024, "ASGDiffusion: Parallel High-Resolution Generation with Asynchronous Structure Guidance"
-- time: 5 minutes on one CPU core
--
-- canvas-unet draws 32 x 32 pixels; here it draws 64 x 64. Whether a thing is repeated a judge says of squares of 32 x
-- 32 pixels, which show a part of a large picture; the small picture, enlarged, is what repeats nothing. Strength of
-- guidance and share of the steps in pieces are chosen on other prompts with other noise. Beside it stand the network
-- at 64 x 64 at once, tiles alone, pieces without guidance, guidance of the same step, guidance of noise, as the paper
-- has it, and the small picture enlarged, noised half of the way and drawn over in tiles, in as many steps.
-- Captions of canvases leave little open but which way a thing looks and how near it is, so pieces agree on most of a
-- picture without guidance; and tiles show parts of things, which the network never saw.
-- There is one device here: seconds on several are foretold from those of ranks that work one at a time, on one core,
-- and from bytes over two links, where ranks meet for each guide; ranks as threads draw the same bits.
-- Tried on 32 other prompts: the last of 12 steps in tiles shows 0.06 squares more than the small picture enlarged, of
-- 24 none more, but either costs a third of the kinds (0.97 without, 0.66 and 0.63 with). Of 12 steps, one picture was
-- foretold 2.8 times as fast on four devices, eight at once 3.3: one piece takes half as long again as each of four.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3, args = {
  { "steps", 24, "of the sampler", quick = 2 },
  { "count", 32, "prompts for each seed", quick = 2 },
  { "trial", 16, "prompts by which settings are chosen", quick = 2 },
  { "guidance", 2.0, "scale of classifier-free guidance" },
  { "overlap", 2, "places of 4 x 4 pixels that tiles share" },
} }
local args, structure = r.args, diffusion.structure
local painter, judge = zoo.canvas.load { device = r.device }, zoo.canvas.judge()
local process, network, null = painter.process, painter.network, painter:null ""
local SIDE, FOLD = 8, 4
local TILES = diffusion.tiles.part { height = SIDE, width = SIDE, overlap = args.overlap }

local function seeds_of(list, seed) return (ty.arange(1, list.count + 1) + seed * 100003):tolist() end

local function guided(list, seed, o)
  return structure.sample(process, network, { list.count, 48, 2 * SIDE, 2 * SIDE }, { fold = FOLD, lag = o.lag or 1,
    condition = list.condition, null = null, seeds = seeds_of(list, seed), steps = args.steps, guidance = args.guidance,
    overlap = args.overlap, words = o.mask ~= false and list.words or nil, weight = o.weight, first = o.first,
    of = o.of, ranks = o.ranks, apart = o.apart })
end

local function plain(list, seed, side, parts, o, other)
  o = o or {}
  o.condition, o.null, o.seeds = list.condition, null, seeds_of(list, seed)
  return (process:sampler { steps = args.steps, guidance = args.guidance, parts = parts }:sample(other or network,
    { list.count, 48, side, side }, o))
end

local function drawn_over(list, seed, small)
  local sampler = process:sampler { steps = 2 * args.steps }
  local points = table.move(sampler:points(), args.steps + 1, 2 * args.steps + 1, 1, {})
  local x0 = painter:encode(zoo.canvas.enlarged(small))
  return plain(list, seed, 2 * SIDE, { TILES }, { points = points, x = process.schedule:mix(x0,
    diffusion.seeds.noise(seeds_of(list, seed))(0, x0), points[1].alpha, points[1].sigma) })
end

-- ---- settings, on other prompts ----

local chosen
local trial = zoo.canvas.asked(painter, 1000, args.trial)
for _, weight in ipairs(r.quick and { 0.5 } or { 0.5, 1 }) do
  for _, first in ipairs(r.quick and { 0.5 } or { 0.75, 0.9, 0.96 }) do
    local o = { weight = weight, first = first }
    local s = judge:large(painter:decode((guided(trial, 900, o))), trial.labels)
    o.score = (s.kind + s.style + s.ground) / 3 - s.again / 4 -- what was asked for is there, once
    r:say("guided by %.1f in %.2f of the steps: kinds %.3f, squares like them %.2f", weight, first, s.kind, s.again)
    if not chosen or o.score > chosen.score then chosen = o end
  end
end
local function like(more)
  for key, value in pairs(chosen) do more[key] = more[key] == nil and value or more[key] end
  return more
end
-- ---- pictures, for each seed ----

local OURS, SAME, ALONE, TILED = "asynchronous", "of the same step", "pieces, no guidance", "tiles alone"
local names = { OURS, SAME, "no mask", "of noise", ALONE, TILED, "at once", "drawn over", "enlarged" }
local found, sheet, few = {}, {}, math.min(8, args.count)
for i, seed in ipairs(r.seeds) do
  local list = zoo.canvas.asked(painter, (i - 1) * args.count, args.count)
  local small = painter:decode(plain(list, seed, SIDE))
  local made = { enlarged = zoo.canvas.enlarged(small) }
  for name, more in pairs { [OURS] = {}, [SAME] = { lag = 0 }, ["no mask"] = { mask = false },
    ["of noise"] = { of = "epsilon" }, [ALONE] = { weight = 0 } } do
    made[name] = painter:decode((guided(list, seed, like(more))))
  end
  made[TILED] = painter:decode(plain(list, seed, 2 * SIDE, { TILES }))
  made["at once"] = painter:decode(plain(list, seed, 2 * SIDE))
  made["drawn over"] = painter:decode(drawn_over(list, seed, small))
  for _, name in ipairs(names) do
    found[name] = found[name] or {}
    for key, value in pairs(judge:large(made[name], list.labels)) do
      found[name][key] = found[name][key] or {}
      found[name][key][i] = value
    end
    if i == 1 then sheet[#sheet + 1] = made[name]:narrow(0, 0, few) end
  end
  r:say("seed %d, squares like the thing %.2f, in tiles %.2f", seed, found[OURS].again[i], found[TILED].again[i])
end
ty.plot.grid(ty.concat(sheet, 0):to "f32" / 127.5 - 1, { columns = few }):save(r:picture "asgdiffusion.png")

-- ---- seconds, on several devices ----

local one, same = zoo.canvas.asked(painter, 0, 1), true
local here, told = guided(one, 1, chosen)
for _, ranks in ipairs { 1, 2, 4 } do
  local there, report = guided(one, 1, like { ranks = ranks })
  same, told = same and there:eq(here):all():item(), report
end
r.metrics.found, r.metrics.chosen, r.metrics.told, r.metrics.seconds = found, chosen, told.bytes, {}
-- Foretells seconds of so many pictures at once. What tiles take besides the network is what they take with one that
-- gives back what it gets.
local function measured(count)
  local list, piece, rounds = zoo.canvas.asked(painter, 0, count), count * 48 * SIDE * SIDE * 4, r.quick and 1 or 5
  local own = structure.measure(function(ranks)
    return select(2, guided(list, 1, like { ranks = ranks, apart = true }))
  end, { 1, 4 }, rounds)
  local function tiled() plain(list, 1, 2 * SIDE, { TILES }, nil, function(x) return x end) end
  local join = r:time({ tiled = tiled }, { rounds = rounds }).tiled / args.steps
  table.insert(r.metrics.seconds, { count = count, one = own[1], four = own[4], join = join })
  return function(ranks, bandwidth, latency, lag)
    return structure.foretell { ranks = ranks, pieces = told.pieces, tiles = told.tiles, steps = told.steps, lag = lag,
      piece = own[ranks].predict * ranks / told.pieces, mix = own[ranks].advance, tile = own[1].tile, join = join,
      guide = piece + count * SIDE * SIDE * 4, tile_bytes = 4 * piece, bandwidth = bandwidth, latency = latency }
  end
end

local rows = {}
for key, what in pairs { again = "squares of four that show the thing itself", kind = "kinds found",
  rough = "grey levels from the mean of 2 x 2" } do
  for _, name in ipairs(names) do
    rows[#rows + 1] = { claim = ("%s: %s"):format(what, name), values = found[name][key], judged = false }
  end
end
table.sort(rows, function(a, b) return a.claim < b.claim end)
local less, ratio = function(a, b) return a - b end, function(a, b) return a / math.max(b, 1e-9) end
local function beside(claim, key, name, fn, o)
  o.claim, o.values = claim, {}
  for i in ipairs(r.seeds) do o.values[i] = fn(found[OURS][key][i], found[name][key][i]) end
  rows[#rows + 1] = o
end
beside("squares that show the thing, of those in tiles alone", "again", TILED, ratio, { bar = 0.5, below = true })
beside("the same, less those of the small picture enlarged", "again", "enlarged", less, { bar = 0.1, below = true })
beside("kinds found, less those of the network at once", "kind", "at once", less, { bar = 0 })
beside("kinds found, less those of guidance of the same step", "kind", SAME, less, { bar = -0.03 })
beside("how rough, of pieces without guidance", "rough", ALONE, ratio, { bar = 1, below = true })
rows[#rows + 1] = { claim = "1, 2 and 4 ranks draw the same bits", measured = same and 1 or 0, bar = 1 }
for _, count in ipairs { 1, 8 } do
  local on = measured(r.quick and 1 or count)
  for name, link in pairs { ["10 GB/s"] = { 1e10, 1e-5 }, ["100 MB/s"] = { 1e8, 2e-4 } } do
    local four, judged = on(4, link[1], link[2], 1), name == "10 GB/s" and count == 1
    rows[#rows + 1] = { claim = ("times as fast on 4 devices, foretold, links of %s, %d at once"):format(name, count),
      measured = on(1, link[1], link[2], 1).seconds / four.seconds, bar = judged and 3 or nil, judged = judged }
    rows[#rows + 1] = { claim = ("pieces on 4 devices, of the time without lag, %s, %d at once"):format(name, count),
      measured = four.first / on(4, link[1], link[2], 0).first, judged = false }
  end
end
os.exit(r:finish(rows), true)
