--- Ranks for structure.sample: threads that each denoise their pieces of a large sample, and later tiles of it. Whoever
-- has the threads carries what they tell each other, and counts it. A rank takes requests in the order in which they
-- came, so that with a lag of 1 all of them go on to the next step while its guide is still on its way.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- Runs in the rank: a function that answers requests.
local function serve(process, model, how)
  local library = require "tycho"
  local structure = require "tycho.diffusion.structure.part"
  local attention = require "tycho.diffusion.attention.cross"
  local clock, run, x, part, prediction = library.system.clock, nil, nil, nil, nil
  local answers = {}

  function answers.begin(stage)
    local seen = { seen = {} }
    if stage.words and stage.pieces[1] == 0 then attention.watch(model, seen) end
    part = structure.part { pieces = stage.pieces, steps = stage.steps, weight = stage.weight, of = stage.of,
      lag = stage.lag, words = stage.words, seen = stage.words and seen or nil }
    run, x = process:sampler { guidance = how.guidance, solver = how.solver, parts = { part } }:begin(model,
      stage.x.shape, { condition = stage.condition, null = stage.null, x = stage.x, points = stage.points,
        fresh = structure.fresh(stage.seeds, stage.shape, stage.scale, stage.fold, stage.pieces) })
  end

  function answers.predict()
    run.step = run.step + 1
    prediction = run:predict(x, run.points[run.step])
    return part:guide(run, run.step)
  end

  function answers.advance(guide)
    if guide then part:give(run, part:guided_by(run.step), guide) end
    x, prediction = run:advance(prediction, run.points[run.step + 1]), nil
  end

  function answers.finish() return x end

  function answers.tile(samples, t, condition) return model(samples, t, condition) end

  return function(name, ...)
    local began, arguments_ = clock(), table.pack(...)
    local result = library.no_grad(function() return answers[name](table.unpack(arguments_, 1, arguments_.n)) end)
    return result, clock() - began
  end
end

local function bytes_of(value)
  if ty.is_tensor(value) then return value:nbytes() end
  local sum = 0
  for _, inner in pairs(type(value) == "table" and value or {}) do sum = sum + bytes_of(inner) end
  return sum
end

--- Ranks, their requests that are not answered yet, and what was told.
---@class Ranks
---@field count integer
---@field apart boolean  one rank works at a time, so that seconds are those of ranks on devices of their own
local Ranks = {}
Ranks.__index = Ranks

--- So many ranks for a network. how: guidance and solver of their samplers.
---@param count integer
---@param process Process
---@param model Module
---@param how { guidance?: number|table, solver?: table, apart?: boolean }
---@return Ranks
function M.new(count, process, model, how)
  local who = "structure.ranks"
  arguments.expect(who, "count", count, "an integer >= 1")
  arguments.expect(who, "process", process, "a table")
  arguments.expect(who, "model", model, "a module")
  local self = setmetatable({ count = count, threads = {}, names = {}, bytes = { guides = 0, pieces = 0, tiles = 0 },
    messages = 0, seconds = { predict = {}, advance = {}, tile = {} }, spent = {},
    apart = how and how.apart or false }, Ranks)
  for r = 1, count do
    self.threads[r], self.names[r], self.spent[r] = ty.thread.new(serve, process, model, how or {}), {},
      { predict = 0.0, advance = 0.0 }
  end
  return self
end

local function send(self, r, name, ...)
  table.insert(self.names[r], name)
  self.threads[r]:send(name, ...)
end

-- The answer to the oldest request of a rank, whose seconds are noted, and what was asked for.
local function receive(self, r)
  local name = table.remove(self.names[r], 1)
  local result, seconds = self.threads[r]:receive()
  local list = self.seconds[name]
  if list then list[#list + 1] = seconds end
  if self.spent[r][name] then self.spent[r][name] = self.spent[r][name] + seconds end
  return result, name
end

local function told(self, what, value, times)
  self.bytes[what] = self.bytes[what] + bytes_of(value) * (times or 1)
  self.messages = self.messages + (times or 1)
end

--- All steps of the first stage: stages by rank, as structure.sample makes them. Returns all pieces, in order.
---@param stages table[]
---@param count integer
---@param n integer
---@return Tensor
function Ranks:pieces(stages, count, n)
  arguments.expect("Ranks:pieces", "stages", stages, "a list of tables")
  local working, first = #stages, stages[1]
  for r, stage in ipairs(stages) do
    send(self, r, "begin", stage)
    told(self, "pieces", stage.x)
  end
  local guides, asked, sent = {}, 0, 0
  -- The oldest answer of a rank; what rank 1 predicts is a guide.
  local function take(r)
    local result, name = receive(self, r)
    if r > 1 or name ~= "predict" then return end
    asked = asked + 1
    guides[asked] = result
  end
  -- What a rank needs for a step besides its own prediction: ranks other than the first, a guide.
  local function guide_for(r, step)
    if r == 1 then return nil end
    local from = math.max(1, step - first.lag)
    while asked < from do take(1) end
    if from > sent then
      told(self, "guides", guides[from], working - 1)
      sent = from
    end
    return guides[from]
  end
  if self.apart then -- nothing goes from other ranks to the first, so it may be done before they begin
    for r = 1, working do
      for step = 1, first.steps do
        send(self, r, "predict")
        send(self, r, "advance", guide_for(r, step))
        while #self.names[r] > 0 do take(r) end
      end
    end
  else
    for step = 1, first.steps do
      for r = 1, working do send(self, r, "predict") end
      for r = 1, working do send(self, r, "advance", guide_for(r, step)) end
      guides[step - first.lag - 1] = nil
    end
  end
  local pieces = {}
  for r, stage in ipairs(stages) do
    send(self, r, "finish")
    local x
    while #self.names[r] > 1 do take(r) end
    x = receive(self, r)
    told(self, "pieces", x)
    for i, piece in ipairs(stage.pieces) do pieces[piece + 1] = x:narrow(0, (i - 1) * n, n) end
  end
  if #pieces ~= count then
    arguments.fail("Ranks:pieces: stages: expected ones of %d pieces, got %d", count, #pieces)
  end
  return ty.concat(pieces, 0)
end

--- What the network says of tiles, the next one to whichever rank has its turn. requests: as parts of a sampler see
-- them.
---@param requests table[]
---@return Tensor[]
function Ranks:tiles(requests)
  arguments.expect("Ranks:tiles", "requests", requests, "a list of tables")
  local outputs = {}
  local function take(i)
    outputs[i] = receive(self, (i - 1) % self.count + 1)
    told(self, "tiles", outputs[i])
  end
  for i, request in ipairs(requests) do
    local t = ty.full({ request.x.shape[1] }, request.point.time, { device = request.x.device })
    send(self, (i - 1) % self.count + 1, "tile", request.x, t, request.condition)
    told(self, "tiles", request.x)
    if self.apart then take(i) end
  end
  for i = #outputs + 1, #requests do take(i) end
  return outputs
end

--- Ends the threads. Returns what was told: bytes by what they were, messages, seconds of each request by its name, and
-- seconds that each rank spent on its pieces.
---@return { bytes: table<string, integer>, messages: integer, seconds: table<string, number[]>, spent: table[] }
function Ranks:close()
  for _, thread in ipairs(self.threads) do thread:close() end
  self.threads = {}
  return { bytes = self.bytes, messages = self.messages, seconds = self.seconds, spent = self.spent }
end

return M
