--- Keys and values of the tokens so far, so that decoding a token costs one token. In batches of different lengths the
-- shorter rows begin with tokens that are masked (padding on the left). A layer may be given fewer tokens than went
-- through the model, those that a method chose for it: see Cache:skip().
local ty = require "tycho"
local arguments = require "tycho.arguments"

local FIRST = 64 -- positions that there is room for at first; it doubles

---@class KVCache
---@field past integer  positions filled, padding included
local Cache = {}
Cache.__index = Cache

--- Caches of other kinds, by the option that asks for them: kinds.h2o(layers, options) for model:cache { h2o = true }.
-- The module of such a cache adds it here.
---@type table<string, fun(layers: integer, options: table): KVCache>
Cache.kinds = {}

--- A cache with room for `layers` layers, which grows as tokens come. options: room (positions to begin with, 64); with
-- tycho.llm loaded also paged (true: the cache of tycho.llm.cache.paged, whose options are page, room and pool), h2o
-- (true: that of tycho.llm.cache.h2o, whose options are heavy, recent and sinks) and quantized (true: that of
-- tycho.llm.cache.quantized, whose options are bits and window).
---@param layers integer
---@param options? table
---@return KVCache
function Cache.new(layers, options)
  for kind, new in pairs(Cache.kinds) do
    if type(options) == "table" and options[kind] then
      local rest = {}
      for key, value in pairs(options) do if key ~= kind then rest[key] = value end end
      return new(layers, rest)
    end
  end
  local o = arguments.read("Cache", options, { room = FIRST }, { room = "an integer >= 1" })
  arguments.expect("Cache", "layers", layers, "an integer in [0, 65536]")
  local self = setmetatable({ past = 0, room = o.room, layers = layers }, Cache)
  for i = 1, layers do self[i] = { skipped = 0 } end
  return self
end

local function grown(old, like, past, room)
  local shape = like.shape
  local new = ty.unscoped(ty.empty, { shape[1], shape[2], room, shape[4] },
    { dtype = like.dtype, device = like.device })
  if old then new:narrow(2, 0, past):copy_(old:narrow(2, 0, past)) end
  return new
end

--- Adds keys and values [b, hkv, t, d] of one layer (counted from 1) and returns all of that layer [b, hkv, held + t,
-- d].
function Cache:append(layer, k, v)
  local at, t = self[layer], k.shape[3]
  local past = self.past - at.skipped
  local total = past + t
  if not at.k or at.k.shape[3] < total then
    while self.room < total do self.room = 2 * self.room end
    at.k, at.v = grown(at.k, k, past, self.room), grown(at.v, v, past, self.room)
  end
  at.k:narrow(2, past, t):copy_(k)
  at.v:narrow(2, past, t):copy_(v)
  return at.k:narrow(2, 0, total), at.v:narrow(2, 0, total)
end

--- Takes the mask [b, t] (bool; nil: all seen) of the tokens that come next, and returns the mask [b, past + t] of all,
-- or nil when nothing is masked, and the position of each token: a tensor [b, t], or nil when they count from past.
function Cache:see(tokens, mask)
  local shape = tokens.shape
  local b, t = shape[1], shape[2]
  if not mask and not self.seen then return nil, nil end
  local full = { dtype = "bool", device = tokens.device }
  mask = mask and mask:to "bool" or ty.ones({ b, t }, full)
  local before = self.seen or ty.ones({ b, self.past }, full)
  self.seen = ty.unscoped(ty.concat, { before, mask }, 1)
  local positions = self.seen:to("i64"):cumsum(1):narrow(1, self.past, t) - 1
  return self.seen, positions:clamp(0)
end

--- Says that a layer is not given `count` of the tokens of this call, of which it appends the others.
---@param layer integer
---@param count integer
function Cache:skip(layer, count)
  if math.type(layer) ~= "integer" or layer < 1 or layer > self.layers then
    arguments.fail("Cache:skip: layer: expected an integer in [1, %d], got %s", self.layers, arguments.describe(layer))
  end
  self[layer].skips = arguments.expect("Cache:skip", "count", count, "an integer >= 0")
end

--- Counts t tokens more, once every layer has appended them.
function Cache:advance(t)
  self.past = self.past + t
  for i = 1, self.layers do
    local at = self[i]
    if at.skips then at.skipped, at.skips = at.skipped + at.skips, nil end
  end
end

--- How many tokens each layer holds.
---@return integer[]
function Cache:held()
  local list = {}
  for i = 1, self.layers do list[i] = self.past - self[i].skipped end
  return list
end

--- Bytes of what the layers hold: keys and values of the tokens so far, and whatever else a method keeps there.
---@return integer
function Cache:bytes()
  local sum, held = 0, self:held()
  for i = 1, self.layers do
    for name, t in pairs(self[i]) do
      if ty.is_tensor(t) then
        local room = (name == "k" or name == "v") and t.shape[3] or nil
        sum = sum + (room and t:nbytes() // room * held[i] or t:nbytes())
      end
    end
  end
  return sum
end

--- Forgets all but the first `past` positions, in a cache whose layers hold all of them.
function Cache:truncate(past)
  arguments.expect("Cache:truncate", "past", past, "an integer >= 0")
  if past > self.past then
    arguments.fail("Cache:truncate: past: expected at most the %d positions of the cache, got %d", self.past, past)
  end
  for i, held in ipairs(self:held()) do
    if held < self.past then
      arguments.fail("Cache:truncate: expected layers that hold all %d positions, got %d in layer %d", self.past, held,
        i)
    end
  end
  self.past = past
  if self.seen then self.seen = ty.unscoped(ty.narrow, self.seen, 1, 0, past) end
end

--- Keeps the rows `index` (i64 [n]) of the batch, for example those that are not finished.
function Cache:select(index)
  arguments.expect("Cache:select", "index", index, "a tensor")
  ty.no_grad(function()
    for i = 1, self.layers do
      local at = self[i]
      for name, t in pairs(at) do
        if ty.is_tensor(t) then at[name] = ty.unscoped(ty.index_select, t, 0, index) end
      end
    end
    if self.seen then self.seen = ty.unscoped(ty.index_select, self.seen, 0, index) end
  end)
end

return Cache
