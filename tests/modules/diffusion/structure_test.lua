-- Large samples: tiles, pieces with structure guidance, and ranks: the plain sampler as a case of it, the same numbers
-- on any number of ranks, what is told, and how long it takes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"
local cross = require "tycho.diffusion.attention.cross"

local structure, tiles, solver = diffusion.structure, diffusion.tiles, diffusion.solver

local function equal(a, b, what) check.ok(a:eq(b):all():item(), what) end

-- A small painter whose words matter.
ty.manual_seed(3)
local painter = zoo.canvas.painter { widths = { 8, 16 }, text = 16 }
ty.no_grad(function()
  for _, p in painter.network:named_parameters() do p:add_(ty.randn_like(p) * 0.1) end
end)
local PROMPTS = { "a neon fish on a blue ground", "a frog on a pink ground" }
local condition, null = ty.keep(painter:condition(PROMPTS)), ty.keep(painter:null "")
-- What the thing is called: neither the ends nor "on a blue ground".
local words = ty.zeros({ 2, condition.text.embeddings.shape[2] }, { dtype = "bool" })
words["0, 3"], words["1, 2"] = true, true

local function draw(o, shape, process)
  local all = { condition = condition, null = null, seeds = { 4, 5 }, steps = 6, guidance = 2, fold = 4 }
  for key, value in pairs(o or {}) do all[key] = value end
  return structure.sample(process or painter.process, painter.network, shape or { 2, 48, 16, 16 }, all)
end

check.test("tiles: places, and what is cut is put together again", function()
  check.equal(tiles.places(8, 8, 4), { 0 })
  check.equal(tiles.places(16, 8, 0), { 0, 8 })
  check.equal(tiles.places(16, 8, 4), { 0, 4, 8 })
  check.equal(tiles.places(17, 8, 4), { 0, 3, 6, 9 })
  local x = ty.randn { 2, 3, 12, 17 }
  local tiling = tiles.tiling(12, 17, { height = 8, width = 8, overlap = 3 })
  local list = {}
  for i = 1, #tiling.list do list[i] = tiling:cut(x, i) end
  check.equal(#list, 2 * 3)
  check.ok((tiling:join(list) - x):abs():max():item() < 1e-6)
  -- Where tiles overlap a mean of what they say comes out, elsewhere what one says.
  local two = tiles.tiling(1, 6, { height = 1, width = 4, overlap = 2 })
  local joined = two:join { ty.zeros { 1, 1, 1, 4 }, ty.ones { 1, 1, 1, 4 } }
  check.close(joined:flatten():tolist(), { 0, 0, 1 / 3, 2 / 3, 1, 1 }, 1e-6)
end)

check.test("a network that sees one place at a time is the same in tiles", function()
  local schedule = diffusion.schedule.flow()
  local function network(x, t) return x * 0.3 + (t / 1000):reshape(-1, 1, 1, 1) end
  local function sampler(parts)
    return diffusion.Sampler { schedule = schedule, predict = "flow", solver = solver.euler(), steps = 5,
      parts = parts }
  end
  local part = tiles.part { height = 4, width = 4, overlap = 2 }
  local a, run = sampler { part }:sample(network, { 2, 1, 8, 8 }, { seeds = { 1, 2 } })
  local b = sampler {}:sample(network, { 2, 1, 8, 8 }, { seeds = { 1, 2 } })
  check.ok((a - b):abs():max():item() < 1e-5)
  check.equal(run.calls, 5 * 9)
  -- One tile is the plain sampler, to the last bit.
  equal(sampler { tiles.part { height = 8, width = 8 } }:sample(network, { 2, 1, 8, 8 }, { seeds = { 1, 2 } }), b)
end)

check.test("pieces show the whole and make it again", function()
  local x = ty.randn { 2, 3, 6, 8 }
  local pieces = structure.pieces(x, 2)
  check.equal(pieces.shape, { 8, 3, 3, 4 })
  equal(structure.whole(pieces, 2), x)
  equal(pieces["2:4"], x["0:2, :, 0:6:2, 1:8:2"]) -- piece 1: the first row, the second column
  local folded = ty.randn { 1, 48, 4, 4 }
  equal(structure.whole(structure.pieces(folded, 2, 4), 2, 4), folded)
  local picture = ty.pixel_shuffle(folded, 4)
  equal(ty.pixel_shuffle(structure.pieces(folded, 2, 4)["0:1"], 4), picture["0:1, :, 0:16:2, 0:16:2"])
end)

check.test("one piece and one tile are the plain sampler, to the last bit", function()
  for lag = 0, 1 do
    local x = draw({ scale = 1, lag = lag, words = words }, { 2, 48, 8, 8 })
    local plain = painter.process:sampler { steps = 6, guidance = 2 }:sample(painter.network, { 2, 48, 8, 8 },
      { condition = condition, null = null, seeds = { 4, 5 } })
    equal(x, plain, ("lag %d"):format(lag))
    equal(draw({ scale = 1, lag = lag, ranks = 1 }, { 2, 48, 8, 8 }), plain, "on a rank")
  end
end)

check.test("without weight, pieces are drawn as if each were alone", function()
  local x = draw { weight = 0, first = 1 }
  local noise = require("tycho.diffusion.seeds").noise { 4, 5 } (0, ty.empty { 2, 48, 16, 16 })
  local start = structure.pieces(noise, 2, 4)
  local pieces = structure.pieces(x, 2, 4)
  for i = 0, 3 do
    local alone = painter.process:sampler { steps = 6, guidance = 2 }:sample(painter.network, { 2, 48, 8, 8 },
      { condition = condition, null = null, noise = start:narrow(0, 2 * i, 2) })
    equal(pieces:narrow(0, 2 * i, 2), alone, ("piece %d"):format(i))
  end
end)

check.test("guidance as the paper's formula says, of the same step and of the step before", function()
  -- One step of DDIM by hand, of noise as predicted, with the mask of what attention is at.
  local process = diffusion.DDPM { predict = "epsilon", clip = false }
  local points = process:sampler { steps = 3 }:points()
  local function network(x, t) return x * 0.4 + (t / 1000):reshape(-1, 1, 1, 1) end
  local x = ty.randn { 4, 1, 2, 2 }
  local guides = {}
  for lag = 0, 1 do
    local part = structure.part { pieces = { 0, 1 }, steps = 4, weight = 0.6, of = "epsilon", lag = lag }
    local run, _ = process:sampler { steps = 3, parts = { part } }:begin(network, { 4, 1, 2, 2 }, { x = x })
    local now = x
    for step = 1, 2 do
      run.step = step
      local prediction = run:predict(now, points[step])
      guides[step] = prediction:as("epsilon"):narrow(0, 0, 2)
      check.close(part:weight_at(step), ({ 0.6, 0.3 * (1 + math.cos(math.pi / 4)) })[step], 1e-12)
      local own = network(now, ty.full({ 4 }, points[step].time))
      local guide, w = guides[math.max(1, step - lag)], part:weight_at(step)
      local noise = ty.concat({ own["0:2"], own["2:4"] + (guide - own["2:4"]) * w }, 0)
      local a, b = points[step], points[step + 1]
      local wanted = (now - noise * a.sigma) / a.alpha * b.alpha + noise * b.sigma
      now = run:advance(prediction, b)
      check.ok((now - wanted):abs():max():item() < 1e-5 * wanted:abs():max():item(),
        ("lag %d step %d"):format(lag, step))
    end
  end
  local full = structure.part { pieces = { 0, 1 }, steps = 4, weight = 1, of = "sample" }
  local run = process:sampler { steps = 3, parts = { full } }:begin(network, { 4, 1, 2, 2 }, { x = x })
  run.step = 1
  local prediction = run:predict(x, points[1])
  local told
  full:advance(run, function(moved) told = moved end, prediction, points[2])
  told = told:as "sample"
  check.ok((told["2:4"] - told["0:2"]):abs():max():item() < 1e-5 * told:abs():max():item(), "w = 1: one clean sample")
end)

check.test("the same on 1, 2, 3, 4 and 5 ranks as in this thread, to the last bit; a lag is another picture", function()
  local seen = {}
  for _, o in ipairs { { lag = 0 }, { lag = 1 }, { lag = 1, words = words },
    { lag = 1, solver = solver.ddim { eta = 1 }, of = "epsilon" } } do
    local here_ = draw(o)
    for count = 1, 5 do
      local options = { ranks = count }
      for key, value in pairs(o) do options[key] = value end
      local there, report = draw(options)
      equal(there, here_, ("lag %d on %d ranks"):format(o.lag, count))
      check.equal(report.steps, { 3, 3 })
      check.equal({ report.pieces, report.tiles, report.ranks }, { 4, 9, count })
    end
    seen[#seen + 1] = here_
  end
  for i = 2, #seen do check.ok(not seen[i]:eq(seen[i - 1]):all():item()) end
end)

check.test("what ranks tell each other is counted", function()
  local _, report = draw { ranks = 4, lag = 1 }
  local piece, tile = 2 * 48 * 8 * 8 * 4, 2 * 2 * 48 * 8 * 8 * 4
  check.equal(report.bytes.guides, 2 * 3 * piece) -- of the first two steps, to three others
  check.equal(report.bytes.pieces, 2 * 4 * piece)         -- there and back
  check.equal(report.bytes.tiles, 3 * 9 * 2 * tile)       -- two branches, there and back
  check.equal(report.messages, 6 + 8 + 3 * 9 * 2)
  check.equal({ #report.seconds.predict, #report.seconds.tile }, { 12, 27 })
  _, report = draw { ranks = 4, lag = 1, words = words }
  check.equal(report.bytes.guides, 2 * 3 * (piece + 2 * 8 * 8 * 4))
end)

check.test("the mask is where attention to the words is", function()
  local state = { seen = {} }
  cross.with(painter.network, state, function()
    state.positions = words
    painter.network(ty.randn { 2, 48, 8, 8 }, ty.tensor { 400.0, 400.0 }, condition)
  end)
  check.ok(#state.seen >= 2)
  local map = cross.map(state.seen, 8, 8)
  check.equal(map.shape, { 2, 1, 8, 8 })
  check.close({ map:amin { 1, 2, 3 }:tolist(), map:amax { 1, 2, 3 }:tolist() }, { { 0, 0 }, { 1, 1 } }, 1e-6)
  local peaked = ty.zeros { 1, 1, 4, 2 }
  peaked["0, 0, 3, 1"] = 1
  check.close(cross.map({ peaked }, 2, 2):flatten():tolist(), { 0, 0, 0, 1 }, 1e-6)
  -- The layers are themselves again.
  state.positions, state.seen = words, {}
  painter.network(ty.randn { 2, 48, 8, 8 }, ty.tensor { 400.0, 400.0 }, condition)
  check.equal(#state.seen, 0)
end)

check.test("seconds on several devices", function()
  local base = { pieces = 4, tiles = 9, steps = { 10, 5 }, piece = 0.1, tile = 0.2, mix = 0.01, join = 0.02 }
  local function of(o)
    for key, value in pairs(base) do if o[key] == nil then o[key] = value end end
    return structure.foretell(o)
  end
  local one = of { ranks = 1 }
  check.close(one.seconds, 10 * (0.4 + 0.01) + 5 * (1.8 + 0.02), 1e-12)
  check.equal(one.waited, 0.0)
  local four = of { ranks = 4 }
  check.close(four.seconds, 10 * 0.11 + 5 * (0.6 + 0.02), 1e-12)
  -- On a slow link: a guide's way is waited for at each step, or runs beside the next one.
  local slow = { ranks = 4, guide = 1000, bandwidth = 1e5, latency = 0.005 }
  local function with(lag)
    local o = { lag = lag }
    for key, value in pairs(slow) do o[key] = value end
    return of(o)
  end
  check.close(with(0).first, 10 * (0.1 + 0.03 + 0.005 + 0.01), 1e-9)
  check.close(with(1).first, 0.1 + 0.035 + 0.01 + 9 * 0.11, 1e-9)
  check.ok(with(1).waited < with(0).waited)
  -- Who sends and waits for nobody is late once, whatever the lag.
  slow.meet = false
  check.close({ with(0).first, with(1).first }, { 0.1 + 0.035 + 0.01 + 9 * 0.11, 0.1 + 0.035 + 0.01 + 9 * 0.11 }, 1e-9)
  check.close(of { ranks = 8 }.first, four.first, 1e-12)
end)

check.test("ranks that work one at a time draw the same bits; what each spent is noted", function()
  for _, o in ipairs { { lag = 0 }, { lag = 1, words = words } } do
    local here_ = draw(o)
    for _, count in ipairs { 1, 3, 4 } do
      local there, report = draw { lag = o.lag, words = o.words, ranks = count, apart = true }
      equal(there, here_, ("lag %d on %d ranks"):format(o.lag, count))
      check.equal({ #report.spent, #report.seconds.predict, #report.seconds.tile }, { count, 3 * count, 27 })
      local sum, all = 0, 0
      for _, spent in ipairs(report.spent) do sum = sum + spent.predict + spent.advance end
      for _, name in ipairs { "predict", "advance" } do
        for _, seconds in ipairs(report.seconds[name]) do all = all + seconds end
      end
      check.close(sum, all, 1e-9)
    end
  end
  -- A second rank's work is not in the first one's seconds, though there is one core: all together are no longer than
  -- one after the other.
  local began = ty.system.clock()
  local _, report = draw { ranks = 4, apart = true, first = 1 }
  local whole, sum = ty.system.clock() - began, 0
  for _, spent in ipairs(report.spent) do sum = sum + spent.predict + spent.advance end
  check.ok(sum <= whole, ("%g s spent in %g s"):format(sum, whole))
  local function spent(...)
    local list = {}
    for r, seconds in ipairs { ... } do list[r] = { predict = seconds, advance = seconds / 10 } end
    return list
  end
  local made = { { { spent = spent(10), steps = { 10, 1 }, seconds = { tile = { 3, 5, 4 } } },
    { spent = spent(20), steps = { 10, 1 }, seconds = { tile = { 6 } } } },
    [3] = { { spent = spent(10, 30, 20), steps = { 10, 0 }, seconds = {} },
      { spent = spent(10, 50, 60), steps = { 10, 0 }, seconds = {} } } }
  local seen = structure.measure(function(count) return table.remove(made[count]) end, { 1, 3 }, 2)
  check.close({ seen[1].predict, seen[1].advance, seen[1].tile }, { 1.5, 0.15, 5 }, 1e-12)
  check.close({ seen[3].predict, seen[3].advance }, { 4, 0.4 }, 1e-12)
  check.equal(seen[3].tile, nil)
  check.fails(function() structure.measure(function() return { spent = {} } end, { 1 }, 1) end,
    "structure.measure: what run returns: expected a report of ranks, got one of this thread")
end)

check.test("mistakes", function()
  local function fails(fn, message) check.fails(fn, message) end
  fails(function() draw({}, { 2, 48, 15, 16 }) end, "structure.sample: shape: expected { n, channels, height, width }")
  fails(function() draw { seeds = { 1 } } end, "structure.sample: seeds: expected 2, one for each sample, got 1")
  fails(function() draw { words = words["0:1"] } end, "structure.sample: words: expected [2, tokens], got", true)
  fails(function() draw { solver = solver.heun() } end, "solver: expected one that asks the network once a step")
  fails(function() draw { of = "v" } end, 'structure.part: of: expected "sample" or "epsilon"')
  fails(function() tiles.places(4, 8, 2) end, "tiles.places: size: expected at least a tile's, 8, got 4")
  fails(function() tiles.places(8, 4, 4) end, "tiles.places: overlap: expected less than a tile, 4, got 4")
  fails(function() structure.pieces(ty.zeros { 1, 2, 3, 4 }, 2) end, "structure.pieces: x: expected")
  fails(function() structure.foretell { ranks = 2 } end, "structure.foretell: ")
  fails(function() cross.watch(ty.nn.Linear(2, 2), { seen = {} }) end, "expected one with layers of the name attn2")
  -- What goes wrong on a rank is said by whoever asked, and no thread is left.
  fails(function() draw { ranks = 2, condition = { text = { embeddings = condition.text.embeddings["0:1"] } } } end, "")
end)

check.finish()
