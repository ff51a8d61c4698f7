--- A cache that holds a number of tokens that does not grow: the last ones, and of those before them the ones that
-- have got the most attention so far, chosen by each head (of grouped heads, by each group). Keys keep the positions at
-- which they were computed. Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
-- Language Models". With heavy = 0 it is a local window; with sinks besides (the first tokens, always kept) that of
-- Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", but for the positions.
--
--     local cache = model:cache { h2o = true, heavy = 64, recent = 64 }
--     model:generate(tokens, 1000, { cache = cache })
local ty = require "tycho"

---@class HeavyHitterCache
---@field past integer    positions that went through, padding included
---@field budget integer  tokens that stay
local HeavyHitterCache = {}
HeavyHitterCache.__index = HeavyHitterCache

local function count(name, value, least)
  if not math.tointeger(value) or value < least then
    error(("HeavyHitterCache: %s must be an integer of at least %d, got %s"):format(name, least, tostring(value)), 4)
  end
  return math.tointeger(value)
end

--- A cache with the interface of tycho.models.cache, for models whose attention asks it (decoders and GPT2). options:
-- heavy (how many tokens stay by their attention), recent (how many of the last ones), sinks (0: how many of the
-- first).
---@param layers integer
---@param options {heavy: integer, recent: integer, sinks?: integer}
---@return HeavyHitterCache
function HeavyHitterCache.new(layers, options)
  local none = ty.nn.none
  local o = ty.nn.options("HeavyHitterCache", options, { heavy = none, recent = none, sinks = 0 })
  local self = setmetatable({ past = 0, layers = layers, heavy = count("heavy", o.heavy, 0),
    recent = count("recent", o.recent, 1), sinks = count("sinks", o.sinks, 0) }, HeavyHitterCache)
  self.budget = self.heavy + self.recent + self.sinks
  for i = 1, layers do self[i] = { count = 0 } end
  return self
end

--- See tycho.models.cache. Which of the tokens are no padding is kept here: attend() gives it to the attention.
function HeavyHitterCache:see(tokens, mask)
  local shape = tokens.shape
  local b, t = shape[1], shape[2]
  self.mask = nil
  if not mask and not self.lengths then return nil, nil end
  local full = { dtype = "bool", device = tokens.device }
  self.mask = mask and mask:to "bool" or ty.ones({ b, t }, full)
  local before = self.lengths or ty.full({ b, 1 }, self.past, { dtype = "i64", device = tokens.device })
  local places = before + self.mask:to("i64"):cumsum(1)
  self.lengths = ty.unscoped(function() return places:narrow(1, t - 1, 1):clone() end)
  return nil, (places - 1):clamp(0)
end

-- The layer's tensors with room for one token more than the budget, so that a token can come before another goes.
local function allocate(self, k, v)
  local b, heads, room = k.shape[1], k.shape[2], self.budget + 1
  local function make(like)
    return ty.zeros({ b, heads, room, like.shape[4] }, { dtype = like.dtype, device = like.device })
  end
  local wide = k.dtype == "f64" and "f64" or "f32"
  return { k = make(k), v = make(v), score = ty.zeros({ b, heads, room }, { dtype = wide, device = k.device }),
    position = ty.zeros({ b, heads, room }, { dtype = "i64", device = k.device }) }
end

-- The rank by which tokens stay: the attention that they got so far; tokens that stay in any case rank above all.
local function priority(self, score, position, last)
  local forced = position:gt(last - self.recent)
  if self.sinks > 0 then forced = forced:logical_or(position:lt(self.sinks)) end
  return score:masked_fill(forced, math.huge)
end

-- One more token in a full cache: it takes the place that is free, and the one with the least attention leaves.
local function replace(self, at, q, k, v, scale)
  local free, shape = at.free, k.shape -- [b, hkv, 1]
  local place = free:unsqueeze(3)
  at.k:scatter_(2, place:expand(shape), k)
  at.v:scatter_(2, place:expand(v.shape), v)
  at.position:scatter_(2, free, self.past)
  at.score:scatter_(2, free, 0)
  local seen
  if at.seen then
    local new = self.mask:unsqueeze(1):expand(shape[1], shape[2], 1)
    at.seen:scatter_(2, free, new)
    seen = at.seen:unsqueeze(2):unsqueeze(2)
      :expand(shape[1], shape[2], q.shape[2] // shape[2], 1, at.seen.shape[3]):flatten(1, 2)
  end
  local y = ty.scaled_dot_product_attention(q, at.k, at.v, seen, false, scale)
  at.score:add_(ty.attention_received(q, at.k, seen, false, scale))
  free:copy_(priority(self, at.score, at.position, self.past):argmin(2, true))
  return y
end

-- Gathers the places [b, hkv, n] of x [b, hkv, t] or [b, hkv, t, d].
local function gather_places(x, places)
  if x.ndim == 4 then
    local shape = places.shape
    places = places:unsqueeze(3):expand(shape[1], shape[2], shape[3], x.shape[4])
  end
  return x:gather(2, places)
end

-- Several tokens, or more room than tokens: they go behind those that are there, and the budget is kept afterwards.
local function extend(self, at, q, k, v, scale)
  local b, heads, t, device = k.shape[1], k.shape[2], k.shape[3], k.device
  local old = { k = at.k, v = at.v, score = at.score, position = at.position, seen = at.seen }
  if at.free then -- the places that are taken, which are all but one
    local taken = ty.ones(at.score.shape, { dtype = "i64", device = device }):scatter(2, at.free, 0)
    local _, places = taken:topk(self.budget, 2)
    for name, x in pairs(old) do old[name] = gather_places(x, places) end
  end
  local function all(name, new)
    return at.count > 0 and ty.concat({ old[name]:narrow(2, 0, at.count), new }, 2) or new
  end
  local keys, values = all("k", k), all("v", v)
  local total = at.count + t
  local here = ty.arange(self.past, self.past + t, { device = device }):expand(b, heads, t)
  local position = all("position", here)
  local seen
  if old.seen or self.mask then
    local new = self.mask or ty.ones({ b, t }, { dtype = "bool", device = device })
    new = new:unsqueeze(1):expand(b, heads, t)
    old.seen = old.seen or ty.ones({ b, heads, at.count }, { dtype = "bool", device = device })
    seen = all("seen", new)
  end
  local wide = seen and seen:unsqueeze(2):unsqueeze(2):expand(b, heads, q.shape[2] // heads, 1, total):flatten(1, 2)
  local y = ty.scaled_dot_product_attention(q, keys, values, wide, true, scale)
  local score = ty.attention_received(q, keys, wide, true, scale)
  if at.count > 0 then
    score = score + old.score:narrow(2, 0, at.count):pad { 0, t }
  end
  if seen then score = score:masked_fill(seen:logical_not(), -1) end
  local kept = math.min(total, self.budget)
  local now = { k = keys, v = values, score = score, position = position, seen = seen }
  if total > self.budget then
    local _, stay = priority(self, score, position, self.past + t - 1):topk(self.budget, 2)
    for name, x in pairs(now) do now[name] = gather_places(x, stay) end
  end
  ty.unscoped(function()
    if not at.k then
      for name, x in pairs(allocate(self, k, v)) do at[name] = x end
    end
    if seen and not at.seen then at.seen = ty.ones(at.score.shape, { dtype = "bool", device = device }) end
    for name, x in pairs(now) do at[name]:narrow(2, 0, kept):copy_(x) end
    at.count = kept
    if kept == self.budget then at.free = ty.full({ b, heads, 1 }, self.budget, { dtype = "i64", device = device }) end
  end)
  return y
end

--- Attention of the queries q [b, h, t, d] to what one layer (counted from 1) holds and to the keys and values k, v [b,
-- hkv, t, d] of the same tokens, which it then holds as well.
---@return Tensor y  [b, h, t, d]
function HeavyHitterCache:attend(layer, q, k, v, scale, window, softcap)
  if softcap then error("HeavyHitterCache: capped scores of attention do not go with a cache that forgets", 0) end
  if window and window >= 0 then error("HeavyHitterCache: attention with a sliding window forgets by itself", 0) end
  local at = self[layer]
  if at.free and k.shape[3] == 1 then return replace(self, at, q, k, v, scale or 0) end
  return extend(self, at, q, k, v, scale or 0)
end

--- Only models that ask the cache for their attention can use it.
function HeavyHitterCache.append()
  error("HeavyHitterCache: the attention of this model does not take a cache that forgets", 0)
end

--- See tycho.models.cache.
function HeavyHitterCache:advance(t) self.past = self.past + t end

--- Nothing that was forgotten comes back.
function HeavyHitterCache:truncate(past)
  if past ~= self.past then error("HeavyHitterCache: what was forgotten does not come back; it has no truncate", 2) end
end

--- Keeps the rows `index` (i64 [n]) of the batch.
function HeavyHitterCache:select(index)
  ty.no_grad(function()
    for i = 1, self.layers do
      for name, t in pairs(self[i]) do
        if ty.is_tensor(t) then self[i][name] = ty.unscoped(ty.index_select, t, 0, index) end
      end
    end
    if self.lengths then self.lengths = ty.unscoped(ty.index_select, self.lengths, 0, index) end
  end)
end

--- Bytes of the keys and values.
function HeavyHitterCache:bytes()
  local sum = 0
  for i = 1, self.layers do
    for _, name in ipairs { "k", "v" } do
      local t = self[i][name]
      if t then sum = sum + t:numel() * (t.dtype == "f64" and 8 or t.dtype == "f32" and 4 or 2) end
    end
  end
  return sum
end

return HeavyHitterCache
