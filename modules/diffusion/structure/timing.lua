--- How long structure.sample takes on several devices, of what its parts take on one: for machines that have no second
-- device. Nothing is fitted; what is put in was measured.
local arguments = require "tycho.arguments"

local M = {}

local none = arguments.none

-- Seconds of the first stage, and what ranks waited for guides.
local function first_stage(o)
  local working = #o.has
  local ready, come, waited, link = {}, {}, 0.0, 0.0
  local transfer = working > 1 and (o.latency + (working - 1) * o.guide / o.bandwidth) or 0.0
  for r = 1, working do ready[r] = 0.0 end
  for step = 1, o.steps[1] do
    local ends, last = {}, 0.0
    for r = 1, working do
      ends[r] = ready[r] + o.has[r] * o.piece
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
      ready[r] = at + o.besides[r]
    end
  end
  return math.max(table.unpack(ready)), waited
end

--- Seconds of both stages on `ranks` devices. options:
--   ranks, pieces, tiles, steps ({ of the first stage, of the second }), lag (0)
--   piece, tile      seconds of the network on one
--   mix              seconds of a step besides, of each rank; by how many pieces it has, where that is a table
--   join             seconds of putting tiles together
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
      tile = "a finite number >= 0", mix = "a finite number >= 0 or a table", join = "a finite number >= 0",
      guide = "an integer >= 0", tile_bytes = "an integer >= 0", bandwidth = "a number > 0",
      latency = "a finite number >= 0" })
  for name, kind in pairs { ranks = "an integer >= 1", pieces = "an integer >= 1", tiles = "an integer >= 1",
    steps = "a pair of integers >= 0", piece = "a finite number >= 0", tile = "a finite number >= 0" } do
    arguments.expect(who, name, o[name], kind)
  end
  local working = math.min(o.ranks, o.pieces)
  o.has, o.besides = {}, {}
  for r = 1, working do
    local count = (o.pieces - r + working) // working
    local mix = type(o.mix) == "table" and o.mix[count]
    o.has[r] = count
    o.besides[r] = mix == false and o.mix or arguments.expect(who, ("mix[%d]"):format(count), mix,
      "a finite number >= 0")
  end
  local first, waited = first_stage(o)
  local carried = o.ranks > 1 and 2 * o.latency + o.tiles * o.tile_bytes / o.bandwidth or 0.0
  local second = o.steps[2] * ((o.tiles + o.ranks - 1) // o.ranks * o.tile + carried + o.join)
  return { seconds = first + second, first = first, second = second, waited = waited }
end

return M
