--- Ways of adapting a model compared at equal budget: each gets as many tries to find its rate on a development part,
-- and differences are judged item by item.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Runs each way with each of its rates and the first seed, keeps the rate with the least `development`, and runs that
-- with the other seeds. ways: a list of { name, rates, run }, where run(rate, seed) returns a table with the field
-- `development` (a loss on data that neither trains nor tests) and whatever the caller needs. say: called with a line
-- after each run.
---@param ways {name: string, rates: number[], run: fun(rate: number, seed: integer): table}[]
---@param seeds integer[]
---@param say? fun(line: string)
---@return table<string, {rate: number, runs: table[]}> by_name  runs in the order of the seeds
function M.ways(ways, seeds, say)
  local who = "peft.compare.ways"
  arguments.expect(who, "ways", ways, "a list of tables")
  arguments.expect(who, "seeds", seeds, "a list of integers")
  arguments.expect(who, "say", say, "a function or nil")
  if #seeds == 0 then arguments.fail("%s: seeds: expected at least one, got none", who) end
  local found = {}
  for i, way in ipairs(ways) do
    local name = arguments.expect(who, ("name of way %d"):format(i), way.name, "a string")
    arguments.expect(who, ("rates of '%s'"):format(name), way.rates, "a list of numbers")
    arguments.expect(who, ("run of '%s'"):format(name), way.run, "a function")
    if #way.rates ~= #ways[1].rates or #way.rates == 0 then
      arguments.fail("%s: rates of '%s': expected as many as of the others, %d, got %d", who, name,
        math.max(1, #ways[1].rates), #way.rates)
    end
    if found[name] then arguments.fail("%s: there are two ways named '%s'", who, name) end
    local function run(rate, seed)
      local result = way.run(rate, seed)
      local loss = arguments.expect(who, ("development of '%s'"):format(name), result.development, "a number")
      if say then say(("%s, seed %d, rate %g: development loss %.4f"):format(name, seed, rate, loss)) end
      return result
    end
    local best, least
    for _, rate in ipairs(way.rates) do
      local result = run(rate, seeds[1])
      local loss = result.development == result.development and result.development or math.huge
      if not best or loss < least then best, least, found[name] = rate, loss, { rate = rate, runs = { result } } end
    end
    for k = 2, #seeds do found[name].runs[k] = run(best, seeds[k]) end
  end
  return found
end

--- The mean of a - b over items, with its interval of 95 % (the normal one, of the items' scatter). a and b: for each
-- seed a list of numbers, one for each item; an item's are averaged over the seeds first.
---@param a number[][]
---@param b number[][]
---@return {mean: number, low: number, high: number, items: integer}
function M.paired(a, b)
  local who = "peft.compare.paired"
  for _, pair in ipairs { { "a", a }, { "b", b } } do
    local name, lists = pair[1], arguments.expect(who, pair[1], pair[2], "a list of tables")
    if #lists == 0 then arguments.fail("%s: %s: expected a list for each seed, got none", who, name) end
  end
  local differences, items = {}, #a[1]
  for sign, lists in pairs { [1] = a, [-1] = b } do
    for _, list in ipairs(lists) do
      if #list ~= items or items < 2 then
        arguments.fail("%s: expected lists of equally many items, at least 2, got %d and %d", who, items, #list)
      end
      for i, value in ipairs(list) do differences[i] = (differences[i] or 0) + sign * value / #lists end
    end
  end
  local mean, error = ty.stats.mean(differences), ty.stats.spread(differences) / math.sqrt(items)
  return { mean = mean, low = mean - 1.96 * error, high = mean + 1.96 * error, items = items }
end

return M
