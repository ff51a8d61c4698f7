-- Ways compared: rates by the development part, as many tries for each; differences item by item.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local peft = require "tycho.peft"

local compare = peft.compare

check.test("each way keeps its best rate, and runs it with every seed", function()
  local calls, lines = {}, {}
  local function way(name, best)
    return { name = name, rates = { 1, 2, 3 }, run = function(rate, seed)
      calls[#calls + 1] = ("%s %g %d"):format(name, rate, seed)
      return { development = rate == 1 and name == "b" and 0 / 0 or (rate - best) ^ 2, rate = rate, seed = seed }
    end }
  end
  local found = compare.ways({ way("a", 2), way("b", 3) }, { 7, 8, 9 }, function(line) lines[#lines + 1] = line end)
  check.equal({ found.a.rate, found.b.rate }, { 2, 3 })
  check.equal({ #calls, #lines, #found.a.runs }, { 10, 10, 3 })
  check.equal({ found.b.runs[1].seed, found.b.runs[3].seed, found.b.runs[3].rate }, { 7, 9, 3 })
end)

check.test("a paired difference is that of the items' means", function()
  local d = compare.paired({ { 1, 2, 3, 4 }, { 3, 4, 5, 6 } }, { { 1, 1, 1, 1 } })
  check.close(d.mean, 2.5, 1e-12)
  local error = math.sqrt(5 / 3) / 2 -- the differences are 1, 2, 3, 4
  check.close(d.low, 2.5 - 1.96 * error, 1e-12)
  check.close(d.high, 2.5 + 1.96 * error, 1e-12)
  check.equal(d.items, 4)
end)

check.test("mistakes", function()
  local function way(rates) return { name = "a", rates = rates, run = function() return { development = 1 } end } end
  check.fails(function() compare.ways({ way { 1 } }, {}) end, "seeds: expected at least one")
  check.fails(function() compare.ways({ way { 1 }, { name = "b", rates = { 1, 2 }, run = print } }, { 1 }) end,
    "rates of 'b': expected as many as of the others, 1, got 2")
  check.fails(function() compare.ways({ way { 1 }, way { 1 } }, { 1 }) end, "two ways named 'a'")
  check.fails(function() compare.ways({ { name = "a", rates = { 1 }, run = function() return {} end } }, { 1 }) end,
    "development of 'a': expected a number")
  check.fails(function() compare.paired({ { 1, 2 } }, { { 1 } }) end, "equally many items")
  check.fails(function() compare.paired({}, { { 1, 2 } }) end, "a: expected a list for each seed")
end)

check.finish()
