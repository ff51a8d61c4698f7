--- Which layers are trained where not all fit: what each alone is worth is measured, the worth of several is taken to
-- be the sum, and an evolutionary search looks for the scheme worth most among those that fit. Lin et al. 2022,
-- "On-Device Training Under 256KB Memory", section 3.2 (contribution analysis).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local arena = require "tycho.tiny.arena"
local check_network = require("tycho.tiny.int8").check

local expect = arguments.expect
local M = {}

-- ---- what a layer is worth ----

--- What training some layers alone, with the head, gains against the head alone: the difference of their losses on data
-- apart, after the same steps on the same batches. options: classes, train and development ({ codes, labels }), steps,
-- batch (4), lr, schedule, seed (0), shares (of input channels of convolutions in one group, { 0.5, 1 }; others are
-- whole), first (1: the first convolution, in order, whose weights are tried), biases (numbers of last convolutions
-- whose biases are tried), say (a function that is told each).
---@param network Int8Network
---@param options table
---@return { head: number, weights: table<integer, table<number, number>>, biases: table<integer, number> } gains
function M.contributions(network, options)
  local who, none = "tiny.contributions", arguments.none
  check_network(who, network)
  local o = arguments.read(who, expect(who, "options", options, "a table"), { classes = none, train = none,
    development = none, steps = none, batch = 4, lr = 0.1, schedule = none, seed = 0, shares = { 0.5, 1 }, first = 1,
    biases = {}, say = none }, { train = "a list of tensors", development = "a list of tensors", classes =
    "an integer >= 2", steps = "an integer >= 1", batch = "an integer >= 1", lr = "a finite number >= 0",
    schedule = "a function", seed = "an integer", shares = "a list of numbers", first = "an integer >= 1",
    biases = "a list of integers", say = "a function" })
  local function loss_of(weights, biases)
    local trainer = arena(network:clone(), { classes = o.classes, bytes = 1 << 40, lr = o.lr, schedule = o.schedule,
      weights = weights, biases = biases })
    trainer:fit(o.train[1], o.train[2], { steps = o.steps, batch = o.batch, seed = o.seed })
    return (trainer:judge(o.development[1], o.development[2]))
  end
  local base = loss_of({}, 0)
  local gains, order = { head = base, weights = {}, biases = {} }, 0
  for place, node in ipairs(network.nodes) do
    if node.kind == "conv" then
      order = order + 1
      for _, share in ipairs(node.groups > 1 and { 1 } or o.shares) do
        if order >= o.first then
          gains.weights[place] = gains.weights[place] or {}
          gains.weights[place][share] = base - loss_of({ [place] = share }, 0)
          if o.say then o.say(("%s, share %g: %.4f"):format(node.name, share, gains.weights[place][share])) end
        end
      end
    end
  end
  for _, count in ipairs(o.biases) do
    gains.biases[count] = base - loss_of({}, count)
    if o.say then o.say(("the last %d biases: %.4f"):format(count, gains.biases[count])) end
  end
  return gains
end

-- ---- the search ----

--- The best of schemes that are lists of choices, one for each gene. Begins with one choice after the other added to
-- nothing at random while they fit, and goes on with children of the better half: each gene of one of two parents, some
-- changed. What does not fit is left out. options:
--   genes        a list: how many choices each gene has; choice 1 is the one that takes least
--   gain         function(scheme) of a list of choices: a number, the larger the better
--   fits         function(scheme): whether it may be taken; asked once for a scheme
--   population   (16), generations (12), mutation (0.15, the share of genes that change), seed (0)
---@param options table
---@return integer[] scheme
---@return number gain
---@return number[] history  the best gain after each generation
function M.evolve(options)
  local who = "tiny.evolve"
  local o = arguments.read(who, expect(who, "options", options, "a table"), { genes = arguments.none,
    gain = arguments.none, fits = arguments.none, population = 16, generations = 12, mutation = 0.15, seed = 0 },
    { genes = "a list of integers >= 1", gain = "a function", fits = "a function", population = "an integer >= 2",
      generations = "an integer >= 0", mutation = "a number in [0, 1]", seed = "an integer" })
  expect(who, "genes", o.genes, "a table")
  expect(who, "gain", o.gain, "a function")
  expect(who, "fits", o.fits, "a function")
  local n, asked = #o.genes, {}
  local generator = ty.seeded_noise(ty.zeros(1 << 16), o.seed, "uniform"):tolist()
  local drawn = 0
  local function random(count) -- 1 .. count
    drawn = drawn % #generator + 1
    return math.min(count, 1 + math.floor(generator[drawn] * count))
  end
  local function allowed(scheme)
    local key = table.concat(scheme, " ")
    if asked[key] == nil then asked[key] = o.fits(scheme) and true or false end
    return asked[key]
  end
  local function fresh()
    local scheme = {}
    for i = 1, n do scheme[i] = 1 end
    for _ = 1, n do
      local i = random(n)
      local before = scheme[i]
      scheme[i] = random(o.genes[i])
      if scheme[i] ~= before and not allowed(scheme) then scheme[i] = before end
    end
    return scheme
  end
  local function child(a, b)
    local scheme = {}
    for i = 1, n do
      scheme[i] = (random(2) == 1 and a or b)[i]
      if random(1000) <= o.mutation * 1000 then scheme[i] = random(o.genes[i]) end
    end
    return scheme
  end
  local pool, history = {}, {}
  local function add(scheme) pool[#pool + 1] = { scheme = scheme, gain = o.gain(scheme) } end
  local function sort() table.sort(pool, function(a, b) return a.gain > b.gain end) end
  for _ = 1, o.population do add(fresh()) end
  sort()
  for generation = 1, o.generations do
    local half = (o.population + 1) // 2
    for i = #pool, half + 1, -1 do pool[i] = nil end
    for _ = 1, 4 * o.population do
      if #pool == o.population then break end
      local scheme = child(pool[random(half)].scheme, pool[random(half)].scheme)
      if allowed(scheme) then add(scheme) end
    end
    sort()
    history[generation] = pool[1].gain
  end
  return pool[1].scheme, pool[1].gain, history
end

--- The scheme for tiny.arena that is worth most and fits into some bytes, by what the plan of a recorded step says.
-- options: those of tiny.arena, batch ({ codes, labels } of a step), and population, generations, seed of tiny.evolve.
---@param network Int8Network
---@param gains table  of tiny.contributions
---@param options table
---@return { weights: table<integer, number>, biases: integer, gain: number, bytes: integer, tried: integer }
function M.scheme(network, gains, options)
  local who = "tiny.search"
  check_network(who, network)
  expect(who, "gains", gains, "a table")
  local o = arguments.read(who, expect(who, "options", options, "a table"), { classes = arguments.none,
    bytes = 256 * 1024, batch = arguments.none, population = 16, generations = 12, seed = 0 }, { bytes =
    "an integer >= 0", batch = "a list of tensors", population = "an integer >= 2", generations = "an integer >= 0",
    seed = "an integer" })
  local genes, choices, bytes, tried = {}, {}, {}, 0
  local function gene(list)
    genes[#genes + 1], choices[#choices + 1] = #list, list
  end
  local counts = { { 0, 0 } }
  for count, gain in pairs(gains.biases) do counts[#counts + 1] = { count, gain } end
  table.sort(counts, function(a, b) return a[1] < b[1] end)
  gene(counts)
  local places = {}
  for place in pairs(gains.weights) do places[#places + 1] = place end
  table.sort(places)
  for _, place in ipairs(places) do
    local list = { { 0, 0 } }
    for share, gain in pairs(gains.weights[place]) do list[#list + 1] = { share, gain } end
    table.sort(list, function(a, b) return a[1] < b[1] end)
    gene(list)
  end
  local function options_of(scheme)
    local weights = {}
    for k, place in ipairs(places) do
      local share = choices[k + 1][scheme[k + 1]][1]
      if share > 0 then weights[place] = share end
    end
    return { classes = o.classes, bytes = 1 << 40, weights = weights, biases = choices[1][scheme[1]][1] }
  end
  local function fits(scheme)
    local trainer = arena(network:clone(), options_of(scheme))
    ty.scope(function() trainer:step(o.batch[1], o.batch[2]) end)
    tried = tried + 1
    local key = table.concat(scheme, " ")
    bytes[key] = trainer:report().bytes
    return bytes[key] <= o.bytes
  end
  local function gain(scheme)
    local sum = 0
    for i, choice in ipairs(scheme) do sum = sum + choices[i][choice][2] end
    return sum
  end
  local best, worth = M.evolve { genes = genes, gain = gain, fits = fits, population = o.population,
    generations = o.generations, seed = o.seed }
  local found = options_of(best)
  if not bytes[table.concat(best, " ")] then fits(best) end
  return { weights = found.weights, biases = found.biases, gain = worth, bytes = bytes[table.concat(best, " ")],
    tried = tried }
end

return M
