--- Which times a sampler visits, and which blocks of the network run at each, found by evolution and without training
-- (Li et al. 2023, "AutoDiffusion: Training-Free Optimization of Time Steps and Architectures for Automated Diffusion
-- Model Acceleration"). A candidate is { times, skip }: places of a grid of points from noise to clean, from 1, which
-- rise, and for each the blocks that are left out there.
--
--     local grid = sampler.spacing(sampler.schedule, 64)
--     local found = diffusion.search.evolve { grid = 64, steps = 4, layers = 6,
--       fitness = function(candidate)
--         local x = sampler_of(diffusion.search.part(candidate, blocks)):sample(model, shape, {
--           points = diffusion.search.points(candidate, grid), ... })
--         return measure.frechet(features(x), real)
--       end }
--
-- Two stages: first the times alone, by the whole network; then times and blocks together, from the best of the first.
-- In a generation the best stay, and the others are made anew: of two of the best, whose times are put together and
-- drawn from; of one, by moving some of its times, by leaving a block out or taking it in again, and, where there may
-- be more steps, by a step more or less; and the rest at random. What costs too much loses blocks at random until it
-- fits.
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- A candidate: times at which the network is called, and what is left out of it there.
---@class SearchCandidate
---@field times integer[]   places of the grid, from 1 (the noisiest), rising
---@field skip integer[][]  for each of them the blocks that are left out, rising

-- ---- numbers ----

-- Random numbers of the search alone, so that what fitness draws changes nothing: splitmix64.
local function generator(seed)
  local state = seed
  local function next_word()
    state = state + 0x9e3779b97f4a7c15
    local z = state
    z = (z ~ (z >> 30)) * 0xbf58476d1ce4e5b9
    z = (z ~ (z >> 27)) * 0x94d049bb133111eb
    return z ~ (z >> 31)
  end
  local numbers = {}
  function numbers.unit() return (next_word() >> 11) * 2.0 ^ -53 end
  function numbers.integer(low, high) return low + math.floor(numbers.unit() * (high - low + 1)) end
  function numbers.some(list) return list[numbers.integer(1, #list)] end
  return numbers
end

-- ---- candidates ----

local function copy(candidate)
  local made = { times = table.move(candidate.times, 1, #candidate.times, 1, {}), skip = {} }
  for i, list in ipairs(candidate.skip) do made.skip[i] = table.move(list, 1, #list, 1, {}) end
  return made
end

local function key_of(candidate)
  local parts = {}
  for i, t in ipairs(candidate.times) do parts[i] = t .. ":" .. table.concat(candidate.skip[i], ",") end
  return table.concat(parts, " ")
end

-- A candidate of steps { time, skip }, in any order, no time twice.
local function from_steps(steps)
  table.sort(steps, function(a, b) return a.time < b.time end)
  local made = { times = {}, skip = {} }
  for i, step in ipairs(steps) do made.times[i], made.skip[i] = step.time, step.skip end
  return made
end

local function toggle(skip, layer)
  local list, found = {}, false
  for _, l in ipairs(skip) do
    if l == layer then found = true else list[#list + 1] = l end
  end
  if not found then list[#list + 1] = layer end
  table.sort(list)
  return list
end

local function check(who, what, candidate, grid, layers)
  expect(who, what, candidate, "a table")
  expect(who, what .. ".times", candidate.times, "a list of integers")
  expect(who, what .. ".skip", candidate.skip, "a list")
  local before = 0
  for i, t in ipairs(candidate.times) do
    if t <= before or (grid and t > grid) then
      fail("%s: %s.times[%d]: expected an integer from %d to %s, got %d", who, what, i, before + 1,
        grid or "the last place of the grid", t)
    end
    before = t
  end
  if #candidate.times == 0 or #candidate.skip ~= #candidate.times then
    fail("%s: %s: expected times, and as many lists in skip, got %d and %d", who, what, #candidate.times,
      #candidate.skip)
  end
  for i, list in ipairs(candidate.skip) do
    expect(who, ("%s.skip[%d]"):format(what, i), list, "a list of integers")
    for _, l in ipairs(list) do
      if l < 1 or (layers and l > layers) then
        fail("%s: %s.skip[%d]: expected numbers of blocks from 1 to %s, got %d", who, what, i,
          layers or "their count", l)
      end
    end
  end
  return candidate
end

--- The candidate of so many equal gaps that begins at the noisiest time, with all blocks: that of spacing.trailing,
-- where the steps divide the grid.
---@param steps integer
---@param grid integer  places
---@return SearchCandidate
function M.uniform(steps, grid)
  expect("search.uniform", "grid", grid, "an integer >= 1")
  expect("search.uniform", "steps", steps, "an integer >= 1")
  if steps > grid then fail("search.uniform: steps: expected at most %d, the grid's places, got %d", grid, steps) end
  local made = { times = {}, skip = {} }
  for i = 1, steps do made.times[i], made.skip[i] = 1 + math.floor((i - 1) * grid / steps + 0.5), {} end
  return made
end

--- How many blocks run in all steps of a candidate; `overhead` is added for each step, in blocks.
---@param candidate SearchCandidate
---@param layers integer
---@param overhead? number
---@return number
function M.cost(candidate, layers, overhead)
  local who = "search.cost"
  expect(who, "layers", layers, "an integer >= 0")
  check(who, "candidate", candidate, nil, layers)
  local sum = 0
  for _, list in ipairs(candidate.skip) do sum = sum + layers - #list + (overhead or 0) end
  return sum
end

--- The points that a candidate visits, for Sampler.sample's option points: those of its times, and the grid's last.
---@param candidate SearchCandidate
---@param grid Point[]  as a spacing makes them: one for each place, and the end
---@return Point[]
function M.points(candidate, grid)
  expect("search.points", "grid", grid, "a list of tables")
  check("search.points", "candidate", candidate, #grid - 1)
  local points = {}
  for i, t in ipairs(candidate.times) do points[i] = grid[t] end
  points[#points + 1] = grid[#grid]
  return points
end

--- A part of a sampler that leaves a candidate's blocks out in each of its steps.
---@param candidate SearchCandidate
---@param blocks Blocks  diffusion.blocks of the network
---@return table part
function M.part(candidate, blocks)
  local who = "search.part"
  expect(who, "blocks", blocks, "a table")
  if type(blocks.part) ~= "function" then
    fail("%s: blocks: expected diffusion.blocks of a network, got %s", who, arguments.describe(blocks))
  end
  check(who, "candidate", candidate, nil, #blocks.names)
  return blocks:part(function(call)
    local skip = candidate.skip[call.run.step]
    if skip and #skip > 0 then return { skip = skip } end
    return nil
  end)
end

-- ---- the search ----

local defaults = { grid = arguments.none, steps = arguments.none, most_steps = arguments.none, layers = 0, overhead = 0,
  limit = arguments.none, fitness = arguments.none, judge = arguments.none, finalists = 5, population = 16, keep = 5,
  crossed = 4, moved = 5, chance = 0.25, generations = { 5, 5 }, start = {}, seed = 0,
  on_generation = arguments.none }
local kinds = { grid = "an integer >= 1", steps = "an integer >= 1", most_steps = "an integer >= 1",
  layers = "an integer >= 0", overhead = "a finite number >= 0", limit = "a finite number > 0", fitness = "a function",
  judge = "a function", finalists = "an integer >= 1", population = "an integer >= 2", keep = "an integer >= 1",
  crossed = "an integer >= 0", moved = "an integer >= 0", chance = "a number in [0, 1]",
  generations = "a list of integers", start = "a list of tables", seed = "an integer", on_generation = "a function" }

local function read(who, options)
  local o = arguments.read(who, options, defaults, kinds)
  for _, name in ipairs { "grid", "steps", "fitness" } do
    if o[name] == nil then fail("%s: %s: expected %s, got nil", who, name, kinds[name]) end
  end
  o.most_steps = o.most_steps or o.steps
  if o.steps > o.most_steps or o.most_steps > o.grid then
    fail("%s: steps, most_steps: expected steps <= most_steps <= grid, got %d, %d and %d", who, o.steps, o.most_steps,
      o.grid)
  end
  o.limit = o.limit or o.steps * (o.layers + o.overhead)
  if o.keep + o.crossed + o.moved > o.population then
    fail("%s: keep, crossed, moved: expected at most population, %d, together, got %d", who, o.population,
      o.keep + o.crossed + o.moved)
  end
  if o.layers > 0 and o.most_steps * o.overhead > o.limit then
    fail("%s: limit: expected at least most_steps * overhead, %g, got %g", who, o.most_steps * o.overhead, o.limit)
  end
  for i, candidate in ipairs(o.start) do
    check(who, ("start[%d]"):format(i), candidate, o.grid, o.layers)
    local cost = M.cost(candidate, o.layers, o.overhead)
    if cost > o.limit then fail("%s: start[%d]: expected a cost of at most %g, got %g", who, i, o.limit, cost) end
  end
  if #o.generations > 2 then
    fail("%s: generations: expected those of one or two stages, got %d", who, #o.generations)
  end
  return o
end

-- Ways to make candidates, of one stage: `free` says whether blocks and the number of steps may change.
local function breeder(o, numbers, free)
  local B = {}

  -- Blocks are left out at random until the cost fits; a time twice or none is refused by nil.
  local function fit(candidate)
    if o.layers == 0 then return candidate end
    while M.cost(candidate, o.layers, o.overhead) > o.limit do
      local running = {}
      for i, list in ipairs(candidate.skip) do
        local out = {}
        for _, l in ipairs(list) do out[l] = true end
        for l = 1, o.layers do
          if not out[l] then running[#running + 1] = { i, l } end
        end
      end
      local one = numbers.some(running)
      candidate.skip[one[1]] = toggle(candidate.skip[one[1]], one[2])
    end
    return candidate
  end

  local function free_time(taken)
    local t
    repeat t = numbers.integer(1, o.grid) until not taken[t]
    taken[t] = true
    return t
  end

  local function taken_of(candidate)
    local taken = {}
    for _, t in ipairs(candidate.times) do taken[t] = true end
    return taken
  end

  function B.random()
    local steps, taken, count = {}, {}, free and numbers.integer(o.steps, o.most_steps) or o.steps
    for i = 1, count do steps[i] = { time = free_time(taken), skip = {} } end
    if free and o.layers > 0 then
      for _, step in ipairs(steps) do
        if numbers.unit() < 0.5 then step.skip = { numbers.integer(1, o.layers) } end
      end
    end
    return fit(from_steps(steps))
  end

  function B.moved(parent)
    local made, steps = copy(parent), {}
    local taken = taken_of(made)
    for i, t in ipairs(made.times) do
      local skip = made.skip[i]
      if numbers.unit() < o.chance and #made.times < o.grid then
        -- Half of the moves are to somewhere near.
        local near = math.max(1, math.min(o.grid, t + numbers.integer(-math.ceil(o.grid / 16), math.ceil(o.grid / 16))))
        taken[t] = nil
        if numbers.unit() < 0.5 and not taken[near] then
          taken[near], t = true, near
        else
          t = free_time(taken)
        end
      end
      if free and o.layers > 0 and numbers.unit() < o.chance then
        skip = toggle(skip, numbers.integer(1, o.layers))
      end
      steps[i] = { time = t, skip = skip }
    end
    if free and #steps < o.most_steps and numbers.unit() < o.chance then
      steps[#steps + 1] = { time = free_time(taken), skip = {} }
    elseif free and #steps > 1 and numbers.unit() < o.chance / 2 then
      table.remove(steps, numbers.integer(1, #steps))
    end
    return fit(from_steps(steps))
  end

  function B.crossed(a, b)
    local all, taken = {}, {}
    for _, parent in ipairs(numbers.unit() < 0.5 and { a, b } or { b, a }) do
      for i, t in ipairs(parent.times) do
        if not taken[t] then
          taken[t], all[#all + 1] = true, { time = t, skip = table.move(parent.skip[i], 1, #parent.skip[i], 1, {}) }
        end
      end
    end
    local count = #numbers.some({ a, b }).times
    while #all > count do table.remove(all, numbers.integer(1, #all)) end
    return fit(from_steps(all))
  end

  return B
end

local function run(who, options, evolves)
  local o = read(who, options)
  local numbers, known, finals, result = generator(o.seed), {}, {}, { evaluated = 0, judged = 0, history = {},
    stages = {} }

  local function asked(name, candidate)
    local value = expect(who, name .. "(candidate)", o[name](copy(candidate)), "a number")
    return value == value and value or math.huge
  end

  local function evaluate(candidate)
    local key = key_of(candidate)
    if not known[key] then
      result.evaluated = result.evaluated + 1
      known[key] = { candidate = candidate, fitness = asked("fitness", candidate), key = key }
    end
    return known[key]
  end

  -- Equal ones by name, so that the order is the same everywhere.
  local function order(list, by)
    table.sort(list, function(a, b)
      if a[by] ~= b[by] then return a[by] < b[by] end
      return a.key < b.key
    end)
    return list
  end

  -- The best few of a stage join those that were judged before; all of these, the best first.
  local function judge(met)
    for i = 1, math.min(o.finalists, #order(met, "fitness")) do
      local entry = met[i]
      if not entry.judged then
        result.judged = result.judged + 1
        entry.judged, finals[#finals + 1] = asked("judge", entry.candidate), entry
      end
    end
    return order(finals, "judged")
  end

  -- One that was not met before, if such a one comes within some tries.
  local function fresh(make, here)
    local candidate
    for _ = 1, 50 do
      candidate = make()
      local key = key_of(candidate)
      if not known[key] and not here[key] then
        here[key] = true
        return candidate
      end
    end
    return nil
  end

  local function stage(number, generations, start)
    local breed, best, met, seen = breeder(o, numbers, number == 2), {}, {}, {}
    for generation = 1, generations do
      local here, children = {}, {}
      local function add(count, make)
        for _ = 1, count do children[#children + 1] = fresh(make, here) end
      end
      if generation == 1 then
        for _, candidate in ipairs(start) do
          children[#children + 1] = candidate
          here[key_of(candidate)] = true
        end
        -- The second stage begins around what the first one found.
        if number == 2 and evolves then
          add((o.population - #children) // 2, function() return breed.moved(start[1]) end)
        end
      elseif evolves then
        local list = {}
        for i = 1, math.min(o.keep, #best) do list[i] = best[i].candidate end
        add(o.crossed, function() return breed.crossed(numbers.some(list), numbers.some(list)) end)
        add(o.moved, function() return breed.moved(numbers.some(list)) end)
      end
      local kept = generation == 1 and 0 or math.min(o.keep, #best)
      add(o.population - kept - #children, breed.random)
      local sum = 0
      for _, candidate in ipairs(children) do
        local entry = evaluate(candidate)
        sum, best[#best + 1] = sum + entry.fitness, entry
        if not seen[entry] then seen[entry], met[#met + 1] = true, entry end
      end
      order(best, "fitness")
      for i = #best, o.keep + 1, -1 do best[i] = nil end
      local entry = { stage = number, generation = generation, best = best[1].fitness,
        mean = #children > 0 and sum / #children or best[1].fitness, evaluated = result.evaluated }
      result.history[#result.history + 1] = entry
      if o.on_generation then o.on_generation(entry, best[1].candidate) end
    end
    if o.judge then best = table.move(judge(met), 1, math.min(o.keep, #finals), 1, {}) end
    local list = {}
    for i, entry in ipairs(best) do list[i] = entry.candidate end
    result.stages[number] = best[1] and { best = best[1].candidate, fitness = best[1].judged or best[1].fitness }
    return list
  end

  local start = {}
  for i, candidate in ipairs(o.start) do start[i] = copy(candidate) end
  local list = stage(1, o.generations[1] or 0, start)
  if (o.generations[2] or 0) > 0 then stage(2, o.generations[2], #list > 0 and list or start) end
  local last = result.stages[2] or result.stages[1]
  if not last then fail("%s: generations: expected at least 1, got none", who) end
  result.best, result.fitness = last.best, last.fitness
  return result
end

--- Evolution in two stages. options: grid (places of times), steps, fitness (a function of a candidate that gives a
-- number, less being better; it is asked once for each), judge (none: another such function, asked once for each of the
-- best `finalists`, 5, of a stage: what is best, and that one's fitness, are then by it), most_steps (steps: in the
-- second stage), layers (0: blocks that may be left out), overhead (0: what a step costs besides its blocks, in
-- blocks), limit (the cost that no candidate exceeds: that of `steps` steps with all blocks), population (16), keep (5:
-- the best, that stay), crossed (4) and moved (5) of each generation, chance (0.25: that a time moves, that a block is
-- changed), generations ({ 5, 5 }: of the two stages), start ({}: candidates to begin with), seed (0),
-- on_generation(entry, best).
---@param options table
---@return { best: SearchCandidate, fitness: number, evaluated: integer, judged: integer, history: table[],
--- stages: table[] }
function M.evolve(options) return run("search.evolve", options, true) end

--- The same number of candidates, drawn at random: what evolution is compared with.
---@param options table  as of search.evolve
---@return table
function M.random(options) return run("search.random", options, false) end

return M
