-- The search of times and blocks: what a candidate means for a sampler, limits that hold, and that it finds what is
-- planted.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local search = diffusion.search

local function dit()
  ty.manual_seed(3)
  local model = diffusion.DiT { channels = 1, size = 4, patch = 2, width = 16, depth = 3, heads = 2, classes = 3 }
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.1) end
  end)
  return model:eval()
end

local function sampler(parts)
  return diffusion.Sampler { schedule = diffusion.schedule.flow(), predict = "flow", steps = 4, parts = parts }
end

check.test("equal steps and all blocks are the plain sampler, bit for bit", function()
  local model = dit()
  local plain = sampler {}
  local given = { condition = { labels = ty.tensor { 0, 2 } }, seeds = { 5, 6 } }
  local wanted = plain:sample(model, { 2, 1, 4, 4 }, given)
  local grid = plain.spacing(plain.schedule, 64)
  local candidate = search.uniform(4, 64)
  check.equal(candidate.times, { 1, 17, 33, 49 })
  local blocks = diffusion.blocks(model)
  given.points = search.points(candidate, grid)
  local found = sampler { search.part(candidate, blocks) }:sample(model, { 2, 1, 4, 4 }, given)
  check.equal(found:flatten():tolist(), wanted:flatten():tolist())
  -- A block left out in the second step alone: as by hand.
  candidate.skip[2] = { 2 }
  found = sampler { search.part(candidate, blocks) }:sample(model, { 2, 1, 4, 4 }, given)
  local by_hand = { predict = function(_, run, next, x, point)
    blocks:clear()
    if run.step == 2 then blocks:skip { 2 } end
    return next(x, point)
  end }
  local other = sampler { by_hand }:sample(model, { 2, 1, 4, 4 }, given)
  check.equal(found:flatten():tolist(), other:flatten():tolist())
  check.ok((found - wanted):abs():max():item() > 1e-4, "the block matters")
  blocks:remove()
end)

check.test("costs", function()
  local candidate = { times = { 1, 5, 6 }, skip = { {}, { 1, 3 }, { 2 } } }
  check.equal(search.cost(candidate, 4), 9)
  check.equal(search.cost(candidate, 4, 0.5), 10.5)
end)

-- How far a candidate is from times 3, 11, 20 and from leaving out block 2 of the second step alone.
local function distance(candidate)
  local sum, wanted = 0, { 3, 11, 20 }
  for i = 1, math.max(3, #candidate.times) do
    sum = sum + math.abs((candidate.times[i] or 60) - (wanted[i] or 60)) / 10
    local list = candidate.skip[i] or {}
    if i == 2 then
      if not (#list == 1 and list[1] == 2) then sum = sum + 0.5 end
    else
      sum = sum + #list
    end
  end
  return sum
end

local function options(more)
  local o = { grid = 32, steps = 3, layers = 4, limit = 11, most_steps = 4, fitness = distance, generations = { 6, 12 },
    population = 20, keep = 6, crossed = 5, moved = 7, seed = 1 }
  for key, value in pairs(more or {}) do o[key] = value end
  -- Three whole steps would cost 12: every candidate of the second stage loses a block.
  return o
end

check.test("it finds what is planted, the best never worsens, and nothing exceeds the limit", function()
  local seen, asked = {}, 0
  local o = options { fitness = function(candidate)
    asked = asked + 1
    local parts, before = {}, 0
    for i, t in ipairs(candidate.times) do
      check.ok(t > before and t <= 32)
      before = t
      parts[i] = t .. ":" .. table.concat(candidate.skip[i], ",")
    end
    local key = table.concat(parts, " ")
    check.ok(not seen[key], "asked once for each")
    seen[key] = true
    check.ok(search.cost(candidate, 4) <= 11)
    check.ok(#candidate.times <= 4)
    local value = distance(candidate)
    candidate.times[1] = 99 -- it is a copy
    return value
  end }
  local found = search.evolve(o)
  check.equal(found.evaluated, asked)
  for i = 2, #found.history do
    check.ok(found.history[i].best <= found.history[i - 1].best, "the best stays")
    check.ok(found.history[i].best <= found.history[i].mean)
  end
  check.equal(found.fitness, distance(found.best))
  check.equal(found.stages[2].best, found.best)
  check.ok(found.fitness <= found.stages[1].fitness)
  check.ok(found.fitness < 0.8, found.fitness)
  -- As many at random find less, over seeds.
  local worse = 0
  for seed = 1, 5 do
    local ours, theirs = search.evolve(options { seed = seed }), search.random(options { seed = seed })
    check.ok(math.abs(ours.evaluated - theirs.evaluated) <= 3, "as many candidates")
    if theirs.fitness > ours.fitness then worse = worse + 1 end
  end
  check.ok(worse >= 4, worse)
end)

check.test("the first stage leaves no block out, unless it has to", function()
  local o = options { generations = { 4 }, limit = 12, fitness = function(candidate)
    check.equal(#candidate.times, 3)
    check.equal(candidate.skip, { {}, {}, {} })
    return distance(candidate)
  end }
  check.equal(#search.evolve(o).history, 4)
end)

check.test("a seed gives the same search, and draws nothing of the library's numbers", function()
  ty.manual_seed(9)
  local before = ty.rand(1):item()
  ty.manual_seed(9)
  local a = search.evolve(options())
  check.equal(ty.rand(1):item(), before)
  local b = search.evolve(options())
  check.equal(a.best, b.best)
  check.equal(a.history, b.history)
  check.ok(search.random(options { seed = 2 }).history[1].mean ~= search.random(options { seed = 3 }).history[1].mean)
end)

check.test("what it begins with takes part", function()
  local planted = { times = { 3, 11, 20 }, skip = { {}, { 2 }, {} } }
  local told = {}
  local found = search.evolve(options { start = { planted }, generations = { 1 }, on_generation = function(entry, best)
    told[#told + 1] = { entry.best, best.times }
  end })
  check.equal(found.best, planted)
  check.equal(told, { { 0, { 3, 11, 20 } } })
  -- No number at all is the worst of all.
  found = search.evolve(options { start = { planted }, generations = { 2 }, fitness = function(candidate)
    return candidate.times[1] == 3 and 0 / 0 or 5
  end })
  check.equal(found.fitness, 5)
end)

check.test("a judge decides among the best few of both stages, and luck in the fitness does not", function()
  -- Every candidate's fitness has luck of its own, which is larger than what tells good ones apart.
  local function lucky(candidate)
    local sum = 0
    for i, t in ipairs(candidate.times) do sum = sum + t * 17 ^ i + #candidate.skip[i] * 5 end
    return distance(candidate) + sum * 0.618 % 1 * 3
  end
  local alone, judged = 0, 0
  for seed = 1, 8 do
    local asked, order = {}, {}
    local function judge(candidate)
      local value = distance(candidate)
      asked[#asked + 1] = value
      order[#order + 1] = table.concat(candidate.times, ",")
      candidate.times[1] = 99 -- it is a copy
      return value
    end
    local o = { fitness = lucky, generations = { 4, 4 }, seed = seed }
    alone = alone + distance(search.evolve(options(o)).best)
    o.judge, o.finalists = judge, 8
    local found = search.evolve(options(o))
    judged = judged + distance(found.best)
    check.equal(found.judged, #asked)
    check.ok(#asked >= 8 and #asked <= 16, #asked)
    check.equal(found.fitness, distance(found.best))
    check.equal(found.fitness, math.min(table.unpack(asked)))
    check.equal(found.stages[2].best, found.best)
    check.ok(found.stages[2].fitness <= found.stages[1].fitness, "the second stage does not lose what the first found")
    local random = search.random(options(o))
    check.equal(random.fitness, distance(random.best))
  end
  check.ok(judged < 0.8 * alone, judged .. " " .. alone)
end)

check.test("few places are searched to the end", function()
  local found = search.evolve { grid = 3, steps = 2, generations = { 4 }, population = 6, keep = 2, crossed = 1,
    moved = 2, fitness = function(candidate) return candidate.times[1] + candidate.times[2] end }
  check.equal(found.evaluated, 3)
  check.equal(found.best.times, { 1, 2 })
end)

check.test("wrong arguments", function()
  local function fails(more, message) check.fails(function() search.evolve(options(more)) end, message) end
  check.fails(function() search.evolve { grid = 4, steps = 2 } end, "evolve: fitness: expected a function, got nil")
  fails({ steps = 5 }, "expected steps <= most_steps <= grid, got 5, 4 and 32")
  fails({ keep = 20 }, "keep, crossed, moved: expected at most population, 20, together, got 32")
  fails({ generations = {} }, "generations: expected at least 1")
  fails({ fitness = function() return "good" end }, "fitness%(candidate%): expected a number")
  fails({ judge = function() return nil end }, "judge%(candidate%): expected a number")
  fails({ finalists = 0 }, "finalists: expected an integer >= 1")
  fails({ start = { search.uniform(3, 32) } }, "start%[1%]: expected a cost of at most 11, got 12")
  fails({ start = { { times = { 4, 4 }, skip = { {}, {} } } } }, "times%[2%]: expected an integer from 5 to 32, got 4")
  fails({ start = { { times = { 4 }, skip = { { 7 } } } } }, "expected numbers of blocks from 1 to 4, got 7")
  check.fails(function() search.uniform(9, 8) end, "steps: expected at most 8")
  local late = { times = { 9 }, skip = { {} } }
  check.fails(function() search.points(late, { {}, {} }) end, "expected an integer from 1 to 1")
  check.fails(function() search.part({ times = { 1 }, skip = { {} } }, {}) end, "blocks: expected diffusion.blocks")
end)

check.finish()
