-- The generator of generated sets.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local random = require "tycho.datasets.random"

local function draw(rng, n, fn)
  local list = {}
  for i = 1, n do list[i] = fn(rng) end
  return list
end

local function bits(rng) return ("%016x"):format(rng:bits()) end

-- SplitMix64 and FNV-1a once more, in other words: on halves of 32 bits, as a machine without wrapping products would.
local function product(a, b)
  local low = (a & 0xffffffff) * (b & 0xffffffff)
  local cross = (a >> 32) * (b & 0xffffffff) + (a & 0xffffffff) * (b >> 32)
  return low + ((cross & 0xffffffff) << 32)
end
local function finish(z)
  z = product(z ~ (z >> 30), 0xbf58476d1ce4e5b9)
  z = product(z ~ (z >> 27), 0x94d049bb133111eb)
  return z ~ (z >> 31)
end
local golden = 0x9e3779b97f4a7c15

check.test("the numbers are those of SplitMix64, keyed by seed, stream and position", function()
  local stream = 0xcbf29ce484222325
  for _, byte in ipairs { ("training"):byte(1, -1) } do stream = product(stream ~ byte, 0x100000001b3) end
  for _, case in ipairs { { 0, "training", stream, 0 }, { -5, 17, 17, 1 << 40 }, { math.mininteger, -1, -1, 3 } } do
    local state = finish((finish((finish(case[1] + golden) ~ case[3]) + golden) ~ case[4]) + golden)
    local rng = random.new(case[1], case[2], case[4])
    for _ = 1, 5 do
      state = state + golden
      check.equal(rng:bits(), finish(state))
    end
  end
  check.equal(finish(golden), math.tointeger(0xe220a8397b1dcdaf)) -- the published first number of seed 0
end)

check.test("a generator depends on nothing but seed, stream and position", function()
  local first = draw(random.new(1, "training", 7), 8, bits)
  draw(random.new(2, "other", 9), 100, bits)
  check.equal(draw(random.new(1, "training", 7), 8, bits), first)
  local seen = {}
  for seed = 0, 4 do
    for _, stream in ipairs { "training", "held_out", 0, 1 } do
      for i = 0, 49 do seen[bits(random.new(seed, stream, i))] = true end
    end
  end
  local count = 0
  for _ in pairs(seen) do count = count + 1 end
  check.equal(count, 5 * 4 * 50)
end)

-- Chi square of counts that should be equal: its mean is the number of cells, its deviation sqrt(2 cells).
local function chi_square(counts, total)
  local sum, cells = 0, #counts
  for _, count in ipairs(counts) do sum = sum + (count - total / cells) ^ 2 / (total / cells) end
  return sum, cells
end

check.test("integers: both ends, each as likely, whatever their number", function()
  for _, range in ipairs { { 0, 6 }, { -3, 4 }, { 5, 5 }, { 0, 99 } } do
    local low, high = range[1], range[2]
    local counts = {}
    for k = 1, high - low + 1 do counts[k] = 0 end
    for i = 0, 19999 do
      local k = random.new(3, "integers", i):integer(low, high) - low + 1 -- one of each generator: they are independent
      counts[k] = counts[k] + 1
    end
    local sum, cells = chi_square(counts, 20000)
    check.ok(sum <= cells + 5 * math.sqrt(2 * cells), ("%d to %d: %g"):format(low, high, sum))
  end
  local rng, wide = random.new(0, "wide", 0), 0
  for _ = 1, 1000 do
    local value = rng:integer(-1 << 31, (1 << 31) - 1)
    check.ok(value >= -1 << 31 and value < 1 << 31)
    if value >= 0 then wide = wide + 1 end
  end
  check.ok(math.abs(wide - 500) < 80)
end)

check.test("numbers in [0, 1)", function()
  local rng, sum, squares = random.new(0, "numbers", 0), 0, 0
  for _ = 1, 20000 do
    local x = rng:number()
    check.ok(x >= 0 and x < 1)
    sum, squares = sum + x, squares + x * x
  end
  check.close(sum / 20000, 0.5, 0.011) -- five deviations of the mean
  check.close(squares / 20000, 1 / 3, 0.011)
end)

check.test("choose and shuffle: every element, every order", function()
  local orders, total = {}, 0
  for i = 0, 5999 do
    local rng = random.new(9, "orders", i)
    local order = table.concat(rng:shuffle { "a", "b", "c" })
    orders[order] = (orders[order] or 0) + 1
    if rng:choose { 1, 2, 3, 4 } == 2 then total = total + 1 end
  end
  local counts = {}
  for _, count in pairs(orders) do counts[#counts + 1] = count end
  check.equal(#counts, 6)
  check.ok(chi_square(counts, 6000) < 6 + 5 * math.sqrt(12))
  check.ok(math.abs(total - 1500) < 170)
  check.equal(random.new(0, 0, 0):shuffle {}, {})
end)

check.test("wrong arguments", function()
  check.fails(function() random.new(0.5, "a", 0) end, "datasets.random.new: seed: expected an integer, got 0.5")
  check.fails(function() random.new(0, {}, 0) end,
    "datasets.random.new: stream: expected an integer or a string, got an empty table")
  check.fails(function() random.new(0, "a") end, "datasets.random.new: i: expected an integer, got nil")
  local rng = random.new(0, "a", 0)
  check.fails(function() rng:integer(3, 2) end,
    "Random:integer: a, b: expected integers with a <= b < a + 2^32, got 3, 2")
  check.fails(function() rng:integer(0, 1 << 32) end, "expected integers with a <= b < a + 2^32, got 0, 4294967296")
  check.fails(function() rng:choose {} end, "Random:choose: list: expected a list with elements, got an empty table")
  check.fails(function() rng:shuffle(3) end, "Random:shuffle: list: expected a list, got 3")
end)

check.finish()
