--- Layers that a rank has no room for, in the memory of other ranks, from which they are brought while the layers
-- before them compute. Du et al. 2022, "EnergonAI: An Inference System for 10-100 Billion Parameter Transformer
-- Models".
--
-- What is away is spread evenly over a rank's layers, so that between two of them others compute. There is room for the
-- layer that is in use and for the one that comes.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail
local surgery = ty.nn.surgery
local M = {}

local ASK, GIVE = 2001, 2002 -- tags of messages

local function bytes_of(layer)
  local n = 0
  for _, p in ipairs(layer:parameters()) do n = n + p:nbytes() end
  return n
end

--- Which layers go away, so that what stays and two that are away have room: as few as can be, spread evenly, the last
-- of them at the end, so that others come before the first.
---@param sizes integer[]     bytes of each layer
---@param movable boolean[]   whether it may go
---@param room integer        bytes
---@return integer[] away     numbers of layers, ascending
function M.choose(sizes, movable, room)
  local who = "dist.peer_memory.choose"
  expect(who, "sizes", sizes, "a list of integers")
  expect(who, "movable", movable, "a list of booleans")
  expect(who, "room", room, "an integer >= 0")
  local can, all = {}, 0
  for i, size in ipairs(sizes) do
    all = all + size
    if movable[i] then can[#can + 1] = i end
  end
  for k = 0, #can do
    local away, stays, most = {}, all, 0
    for j = 1, k do
      local i = can[j * #can // k]
      away[j], stays, most = i, stays - sizes[i], math.max(most, sizes[i])
    end
    if stays + math.min(k, 2) * most <= room then return away end
  end
  fail("%s: room: %d bytes are too few for layers of %d bytes, however many are away", who, room, all)
end

-- ---- the rank that computes ----

--- A rank's layers, of which some are away.
---@class PeerMemory
---@field away integer[]   numbers of layers
---@field moved integer    bytes that came
local Memory = {}
Memory.__index = Memory
Memory.__name = "PeerMemory"

-- The tensors of a layer, and where each is.
local function places_of(layer)
  local list, seen = {}, {}
  for _, module in layer:named_modules() do
    for key in pairs(module._parameters) do
      local p = rawget(module, key)
      if p and not seen[p] then seen[p], list[#list + 1] = true, { module = module, key = key, tensor = p } end
    end
  end
  table.sort(list, function(a, b) -- in any order that stays
    if a.key ~= b.key then return a.key < b.key end
    return a.tensor:numel() < b.tensor:numel()
  end)
  return list
end

--- Sends away what there is no room for, to ranks that serve() it. All layers that go have one dtype.
---@param group RankGroup
---@param layers Module[]      this rank's
---@param movable boolean[]    which of them may go
---@param peers integer[]      ranks that keep them, in turn
---@param options { room: integer, prefetch?: boolean }  room: bytes of weights that may be here; prefetch (true):
-- a layer is asked for before it is needed
---@return PeerMemory
function M.new(group, layers, movable, peers, options)
  local who = "dist.peer_memory.new"
  Group.expect(who, group)
  expect(who, "layers", layers, "a list of modules")
  expect(who, "peers", peers, "a list of integers")
  local o = arguments.read(who, options, { room = arguments.none, prefetch = true },
    { room = "an integer >= 0", prefetch = "a boolean" })
  expect(who, "room", o.room, "an integer >= 0")
  local sizes = {}
  for i, layer in ipairs(layers) do sizes[i] = bytes_of(layer) end
  local self = setmetatable({ group = group, peers = peers, prefetch = o.prefetch, of = {}, moved = 0, number = 0,
    away = M.choose(sizes, movable, o.room) }, Memory)
  if #self.away > 0 and #peers == 0 then fail("%s: peers: expected ranks that keep %d layers, got none", who,
    #self.away) end
  local counts = {}
  for j, i in ipairs(self.away) do
    local places = places_of(layers[i])
    local peer = (j - 1) % #peers + 1
    counts[peer] = (counts[peer] or 0) + 1
    self.of[i] = { places = places, peer = peers[peer], slot = counts[peer], dtype = places[1].tensor.dtype }
  end
  for peer, rank in ipairs(peers) do -- how many come, then they
    group:send(ty.tensor({ counts[peer] or 0 }, { dtype = "i64" }), rank, GIVE)
  end
  for _, i in ipairs(self.away) do
    local of, flat = self.of[i], {}
    for k, place in ipairs(of.places) do
      flat[k] = place.tensor:detach():reshape(-1)
      place.shape = place.tensor.shape
    end
    group:send(ty.concat(flat, 0), of.peer, GIVE)
    for _, place in ipairs(of.places) do
      surgery.exchange(place.module, place.key, ty.empty({ 0 }, { dtype = of.dtype }))
      place.tensor = nil
    end
  end
  if self.prefetch and #self.away > 0 then self:ask(1) end
  return self
end

-- Asks for the nth layer that is away.
function Memory:ask(n)
  local of = self.of[self.away[n]]
  of.asked = true
  self.group:send(ty.tensor({ of.slot }, { dtype = "i64" }), of.peer, ASK)
end

--- A layer is there when it returns; the next one that is away is asked for.
---@param i integer  the number of a layer
function Memory:need(i)
  local of = self.of[i]
  if not of then return end
  local n = 1
  while self.away[n] ~= i do n = n + 1 end
  if not of.asked then self:ask(n) end
  local flat = self.group:receive(of.peer, GIVE)
  of.asked, of.flat, self.moved = false, ty.keep(flat), self.moved + flat:nbytes()
  ty.scope(function() -- views on the way hold the memory, too
    local at = 0
    for _, place in ipairs(of.places) do
      local count = 1
      for _, s in ipairs(place.shape) do count = count * s end
      surgery.exchange(place.module, place.key, flat:narrow(0, at, count):view(place.shape)):free()
      at = at + count
    end
  end)
  if self.prefetch then self:ask(n % #self.away + 1) end
end

--- A layer has computed: what came goes.
---@param i integer
function Memory:done(i)
  local of = self.of[i]
  if not of then return end
  for _, place in ipairs(of.places) do
    surgery.exchange(place.module, place.key, ty.empty({ 0 }, { dtype = of.dtype })):free()
  end
  of.flat:free()
  of.flat = nil
end

-- ---- the rank that keeps them ----

--- What a rank that keeps layers of another gives it: takes what comes in new(), and returns a function that answers as
-- many times as the other asks for one batch.
---@param group RankGroup
---@param owner integer
---@return fun() serve
---@return integer bytes  that it keeps
function M.keeper(group, owner)
  Group.expect("dist.peer_memory.keeper", group)
  expect("dist.peer_memory.keeper", "owner", owner, "an integer >= 0")
  local layers, bytes = {}, 0
  for i = 1, group:receive(owner, GIVE):item() do
    layers[i] = ty.keep(group:receive(owner, GIVE))
    bytes = bytes + layers[i]:nbytes()
  end
  return function()
    for _ = 1, #layers do group:send(layers[group:receive(owner, ASK):item()], owner, GIVE) end
  end, bytes
end

return M
