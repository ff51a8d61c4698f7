--- Large pictures in two stages, on one device or on several: pieces with structure guidance first, then tiles.
--
--     local x, report = diffusion.structure.sample(painter.process, painter.network, { 1, 4, 32, 32 }, {
--       scale = 2, condition = painter:condition { "a fox" }, null = painter:null "", seeds = { 1 }, guidance = 4 })
--
-- A device is a rank: here a thread with a Lua state of its own, that shares the network's memory. Ranks tell each
-- other nothing but what the method has to: a step's guide in the first stage, tiles in the second. With a lag of 1 a
-- rank is told the guide of the step before, which has long been there. What is drawn does not depend on how many
-- ranks there are: each calls the network on one piece or tile at a time, and the guide of a step is defined and not
-- raced for.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local cross = require "tycho.diffusion.attention.cross"
local noises = require "tycho.diffusion.seeds"
local parts = require "tycho.diffusion.structure.part"
local ranks = require "tycho.diffusion.structure.ranks"
local tiles = require "tycho.diffusion.tiles"

local fail, none = arguments.fail, arguments.none
local WHO = "structure.sample"

local defaults = { scale = 2, fold = 1, condition = none, null = none, seeds = none, steps = 20, guidance = 1,
  solver = none, first = 0.5, weight = 0.5, of = "sample", lag = 1, words = none, overlap = none, ranks = 0,
  apart = false }
local kinds = { scale = "an integer >= 1", fold = "an integer >= 1", condition = "a table", null = "a table",
  seeds = "a list of integers", steps = "an integer >= 1", guidance = "a finite number or a table", solver = "a table",
  first = "a number in [0, 1]", weight = "a number in [0, 1]", lag = "an integer >= 0", words = "a tensor",
  overlap = "an integer >= 0", ranks = "an integer >= 0", apart = "a boolean" }

-- A condition for all pieces, piece after piece; of one row (a null condition) the row itself.
local function repeated(condition, count, n)
  if not condition then return nil end
  local tensors, list = conditions.tensors(condition), {}
  if n > 1 and tensors[1] and tensors[1][2].shape[1] == 1 then return condition end
  for i = 1, count do list[i] = condition end
  return conditions.concat(list)
end

-- What each rank is told to begin with: its pieces and all that a sampler needs.
local function stage_of(o, x, shape, points, pieces, count)
  local n, rows = shape[1], {}
  for i, piece in ipairs(pieces) do rows[i] = x:narrow(0, piece * n, n) end
  local own = ty.concat(rows, 0)
  return { x = own, pieces = pieces, points = points, steps = #points - 1, weight = o.weight, of = o.of,
    lag = o.lag, words = o.words, condition = repeated(o.condition, #pieces, n), scale = o.scale, fold = o.fold,
    null = repeated(o.null, #pieces, n), seeds = o.seeds, shape = shape, count = count }
end

-- Stage one in this thread alone: the sampler's own loop.
local function alone(process, model, o, stage)
  local seen = { seen = {} }
  local part = parts.part { pieces = stage.pieces, steps = stage.steps, weight = stage.weight, of = stage.of,
    lag = stage.lag, words = stage.words, seen = stage.words and seen or nil }
  local function run()
    return (process:sampler { guidance = o.guidance, solver = o.solver, parts = { part } }:sample(model,
      stage.x.shape, { condition = stage.condition, null = stage.null, x = stage.x, points = stage.points,
        fresh = parts.fresh(stage.seeds, stage.shape, stage.scale, stage.fold, stage.pieces) }))
  end
  return stage.words and cross.with(model, seen, run) or run()
end

--- What was done, and what ranks told each other.
---@class StructureReport
---@field ranks integer
---@field steps integer[]                   in pieces, and in tiles
---@field pieces integer
---@field tiles integer
---@field bytes table<string, integer>      by what they were: guides, pieces, tiles
---@field messages integer
---@field seconds table<string, number[]>   of ranks' answers: predict, advance, tile
---@field spent { predict: number, advance: number }[]  seconds of each rank, on its pieces

--- Samples of `shape` [n, c, s h, s w] by a network made for [n, c, h, w]. options:
--   scale (2: s), fold (1: pixels of a place's side, where channels are pixels), condition, null, seeds (one for each
--   sample), steps (20), guidance (1), solver (the process's; one that asks once a step), first (0.5: the share of the
--   steps that are taken in pieces), overlap (half of a tile: of tiles, in places), ranks (0: this thread alone)
--   apart (false; true: one rank works at a time, so that seconds are those of ranks on devices of their own)
--   weight (0.5), of ("sample"), lag (1), words: see structure.part
-- Of the shape [n, c, h, w] with scale 1 it is the plain sampler.
---@param process Process
---@param model Module
---@param shape integer[]
---@param options? table
---@return Tensor samples
---@return StructureReport report
return function(process, model, shape, options)
  local o = arguments.read(WHO, options, defaults, kinds)
  arguments.expect(WHO, "process", process, "a table")
  arguments.expect(WHO, "shape", shape, "a list of integers >= 1")
  local n, s = shape[1], o.scale
  if #shape ~= 4 or shape[3] % s ~= 0 or shape[4] % s ~= 0 then
    fail("%s: shape: expected { n, channels, height, width } with sides that are multiples of %d, got { %s }", WHO, s,
      table.concat(shape, ", "))
  end
  o.condition = o.condition or {}
  if not o.seeds then
    o.seeds = {}
    for i = 1, n do o.seeds[i] = ty.randint(0, 1 << 31, { 1 }):item() end
  end
  if #o.seeds ~= n then fail("%s: seeds: expected %d, one for each sample, got %d", WHO, n, #o.seeds) end
  if o.words and (o.words.ndim ~= 2 or o.words.shape[1] ~= n) then
    fail("%s: words: expected [%d, tokens], got %s", WHO, n, arguments.describe(o.words))
  end
  local height, width = shape[3] // s, shape[4] // s
  o.overlap = o.overlap or math.min(height, width) // 2
  return ty.no_grad(function()
    local sampler = process:sampler { steps = o.steps, guidance = o.guidance, solver = o.solver }
    local points, device = sampler:points(), type(model) == "table" and model.device and model:device() or "cpu"
    local steps = #points - 1
    local first = math.floor(steps * o.first + 0.5)
    local x = noises.noise(o.seeds)(0, ty.empty(shape, { device = device })) * process.schedule:noise_scale(points[1])
    local count = s * s
    local crew = o.ranks > 0 and ranks.new(o.ranks, process, model, { guidance = o.guidance, solver = o.solver,
      apart = o.apart }) or nil
    local ok, result = pcall(function()
      if first > 0 then
        local pieces = parts.pieces(x, s, o.fold)
        local own = table.move(points, 1, first + 1, 1, {})
        if crew then
          local stages = {}
          for r = 1, crew.count do
            local numbers = {}
            for piece = r - 1, count - 1, crew.count do numbers[#numbers + 1] = piece end
            stages[r] = #numbers > 0 and stage_of(o, pieces, shape, own, numbers, count) or nil
          end
          pieces = crew:pieces(stages, count, n)
        else
          local numbers = {}
          for piece = 0, count - 1 do numbers[piece + 1] = piece end
          pieces = alone(process, model, o, stage_of(o, pieces, shape, own, numbers, count))
        end
        x = parts.whole(pieces, s, o.fold)
      end
      if first == steps then return x end
      local later = {}
      for i, seed in ipairs(o.seeds) do later[i] = seed ~ 0x2545F491 end
      local part = tiles.part { height = height, width = width, overlap = o.overlap,
        each = crew and function(requests) return crew:tiles(requests) end or nil }
      return (process:sampler { guidance = o.guidance, solver = o.solver, parts = { part } }:sample(model, shape, {
        condition = o.condition, null = o.null, x = x, points = table.move(points, first + 1, #points, 1, {}),
        seeds = later }))
    end)
    local told = crew and crew:close() or { bytes = {}, messages = 0, seconds = {}, spent = {} }
    if not ok then error(result, 0) end
    return result, { ranks = o.ranks, steps = { first, steps - first }, pieces = count, bytes = told.bytes,
      tiles = #tiles.tiling(shape[3], shape[4], { height = height, width = width, overlap = o.overlap }).list,
      messages = told.messages, seconds = told.seconds, spent = told.spent }
  end)
end
