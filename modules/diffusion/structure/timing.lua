--- How long structure.sample takes on several devices, of what its parts take on one: for machines that have no second
-- device. Nothing is fitted; what is put in was measured.
local arguments = require "tycho.arguments"
local stats = require "tycho.stats"

local M = {}

local none = arguments.none

-- Seconds of the first stage, and what ranks waited for guides.
local function first_stage(o)
  local working = math.min(o.ranks, o.pieces)
  local ready, come, waited, link = {}, {}, 0.0, 0.0
  local transfer = working > 1 and (o.latency + (working - 1) * o.guide / o.bandwidth) or 0.0
  for r = 1, working do ready[r] = 0.0 end
  for step = 1, o.steps[1] do
    local ends, last = {}, 0.0
    for r = 1, working do
      ends[r] = ready[r] + (o.pieces - r + working) // working * o.piece
      last = math.max(last, ends[r])
    end
    come[step] = {}
    if o.meet then
      link = math.max(link, last) + transfer
      for r = 1, working do come[step][r] = link end
    else
      link = math.max(link, ends[1])
      come[step][1] = ends[1]
      for r = 2, working do
        link = link + o.guide / o.bandwidth
        come[step][r] = link + o.latency
      end
    end
    for r = 1, working do
      local at = math.max(ends[r], come[math.max(1, step - o.lag)][r])
      waited = waited + at - ends[r]
      ready[r] = at + o.mix
    end
  end
  return math.max(table.unpack(ready)), waited
end

--- Seconds of both stages on `ranks` devices. options:
--   ranks, pieces, tiles, steps ({ of the first stage, of the second }), lag (0)
--   piece, tile      seconds of the network on one
--   mix, join        seconds of a step besides: a rank's, and putting tiles together
--   guide, tile_bytes  bytes of a guide, and of a tile to a rank and back
--   bandwidth (bytes a second of one link), latency (seconds of a message)
--   meet (true: ranks meet for a guide, as they do for a collective; false: it is sent to one after the other, and
--     who sends waits for nobody, as structure.sample does it)
-- In the second stage all wait for the tiles of a step.
---@param options table
---@return { seconds: number, first: number, second: number, waited: number }  waited: of all ranks, for guides
function M.foretell(options)
  local who = "structure.foretell"
  local o = arguments.read(who, options, { ranks = none, pieces = none, tiles = none, steps = none, lag = 0,
    piece = none, tile = none, mix = 0.0, join = 0.0, guide = 0, tile_bytes = 0, bandwidth = math.huge, latency = 0.0,
    meet = true },
    { ranks = "an integer >= 1", pieces = "an integer >= 1", tiles = "an integer >= 1",
      steps = "a pair of integers >= 0", lag = "an integer >= 0", piece = "a finite number >= 0",
      tile = "a finite number >= 0", mix = "a finite number >= 0", join = "a finite number >= 0",
      guide = "an integer >= 0", tile_bytes = "an integer >= 0", bandwidth = "a number > 0",
      latency = "a finite number >= 0" })
  for name, kind in pairs { ranks = "an integer >= 1", pieces = "an integer >= 1", tiles = "an integer >= 1",
    steps = "a pair of integers >= 0", piece = "a finite number >= 0", tile = "a finite number >= 0" } do
    arguments.expect(who, name, o[name], kind)
  end
  local first, waited = first_stage(o)
  local carried = o.ranks > 1 and 2 * o.latency + o.tiles * o.tile_bytes / o.bandwidth or 0.0
  local second = o.steps[2] * ((o.tiles + o.ranks - 1) // o.ranks * o.tile + carried + o.join)
  return { seconds = first + second, first = first, second = second, waited = waited }
end

-- What ranks that worked one at a time took, of several reports: the slowest of each rank's medians. A median of the
-- slowest would be longer the more ranks there are, by chance alone.
local function spent(reports)
  local slowest, tile = nil, {}
  for r in ipairs(reports[1].spent) do
    local predict, advance = {}, {}
    for i, report in ipairs(reports) do
      predict[i] = report.spent[r].predict / report.steps[1]
      advance[i] = report.spent[r].advance / report.steps[1]
    end
    local own = { predict = stats.median(predict), advance = stats.median(advance) }
    if not slowest or own.predict + own.advance > slowest.predict + slowest.advance then slowest = own end
  end
  for _, report in ipairs(reports) do
    if report.steps[2] > 0 then tile[#tile + 1] = stats.median(report.seconds.tile) end
  end
  slowest.tile = tile[1] and stats.median(tile)
  return slowest
end

--- What ranks take, as on devices of their own, by how many there are: of a step in pieces of the slowest rank, seconds
-- until it has predicted and those besides, and seconds of a tile; medians. run(count): a report of structure.sample
-- on so many ranks with `apart`.
---@param run fun(count: integer): StructureReport
---@param counts integer[]  of ranks, in turn
---@param rounds integer
---@return table<integer, { predict: number, advance: number, tile?: number }>  tile: nil where there were none
function M.measure(run, counts, rounds)
  local who = "structure.measure"
  arguments.expect(who, "run", run, "a function")
  arguments.expect(who, "counts", counts, "a list of integers >= 1")
  arguments.expect(who, "rounds", rounds, "an integer >= 1")
  local reports, found = {}, {}
  for round = 1, rounds do
    for _, count in ipairs(counts) do
      reports[count] = reports[count] or {}
      local report = arguments.expect(who, "what run returns", run(count), "a table")
      if #arguments.expect(who, "its spent", report.spent, "a list of tables") == 0 then
        arguments.fail("%s: what run returns: expected a report of ranks, got one of this thread", who)
      end
      reports[count][round] = report
    end
  end
  for count, list in pairs(reports) do found[count] = spent(list) end
  return found
end

return M
