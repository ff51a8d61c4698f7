--- A cache in 8 or 4 bits: keys and values of all but the last tokens are blocks of 32 numbers with one scale, keys by
-- channel over tokens and values by token over channels, since keys have channels that are far larger than others. Liu
-- et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"; blocks here are symmetric (q8_0, q4_0).
--
--     local cache = model:cache { quantized = true, bits = 4 }
--     model:generate(tokens, 1000, { cache = cache })
--     print(cache:nbytes())
--
-- The tokens of a call attend to each other as they are; they are rounded when `window` and a group more have come
-- after the last ones that were. A step decodes a layer's keys and values for its attention and lets them go again.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Cache = require "tycho.models.cache"

--- A cache of keys and values in 8 or 4 bits.
---@class QuantizedCache: KVCache
---@field past integer    positions filled, padding included
---@field rounded integer positions that are in blocks, the first ones
local QuantizedCache = setmetatable({}, { __index = Cache })
QuantizedCache.__index = QuantizedCache

local GROUP = 32 -- tokens that are rounded together: a block of one channel's keys
local dtypes = { [8] = "q8_0", [4] = "q4_0" }

--- A cache with the interface of tycho.models.cache. options: bits (8; or 4), window (64: how many of the last tokens
-- stay as they are, at least). The width of a head has to be a multiple of 32.
---@param layers integer
---@param options? { bits?: integer, window?: integer }
---@return QuantizedCache
function QuantizedCache.new(layers, options)
  local o = arguments.read("QuantizedCache", options, { bits = 8, window = 64 }, { window = "an integer >= 0" })
  if not dtypes[o.bits] then
    arguments.fail("QuantizedCache: bits: expected 8 or 4, got %s", arguments.describe(o.bits))
  end
  arguments.expect("QuantizedCache", "layers", layers, "an integer in [0, 65536]")
  local self = setmetatable({ past = 0, rounded = 0, layers = layers, dtype = dtypes[o.bits], window = o.window },
    QuantizedCache)
  for i = 1, layers do self[i] = { k = {}, v = {}, skipped = 0 } end -- lists of blocks; tail_k, tail_v
  return self
end

-- Blocks of some tokens x [b, h, t, d], a row for each of the batch; `turned`: along the tokens.
local function encode(self, x, turned)
  if turned then x = x:transpose(2, 3) end
  return ty.unscoped(function() return x:reshape(x.shape[1], -1):to("f32"):contiguous():to(self.dtype) end)
end

-- What stands for `count` tokens again, [b, h, count, d].
local function decode(q, like, count, turned)
  local shape = like.shape
  local x = q:to("f32"):to(like.dtype)
  if turned then return x:reshape(q.shape[1], shape[2], shape[4], count):transpose(2, 3) end
  return x:reshape(q.shape[1], shape[2], count, shape[4])
end

local function all_of(blocks, tail, turned)
  local list = {}
  for i, q in ipairs(blocks) do list[i] = decode(q, tail, GROUP, turned) end
  list[#list + 1] = tail
  return #list == 1 and tail or ty.concat(list, 2)
end

--- See tycho.models.cache.
function QuantizedCache:append(layer, k, v)
  if k.shape[4] % 32 ~= 0 or v.shape[4] % 32 ~= 0 then
    arguments.fail("QuantizedCache: expected heads of a multiple of 32 numbers, got %d", k.shape[4])
  end
  local at = self[layer]
  local tail_k = at.tail_k and ty.concat({ at.tail_k, k }, 2) or k
  local tail_v = at.tail_v and ty.concat({ at.tail_v, v }, 2) or v
  local keys, values = all_of(at.k, tail_k, true), all_of(at.v, tail_v)
  local first, length = 0, tail_k.shape[3]
  while length - first >= self.window + GROUP do
    at.k[#at.k + 1] = encode(self, tail_k:narrow(2, first, GROUP), true)
    at.v[#at.v + 1] = encode(self, tail_v:narrow(2, first, GROUP))
    first = first + GROUP
  end
  ty.unscoped(function()
    at.tail_k = tail_k:narrow(2, first, length - first):clone()
    at.tail_v = tail_v:narrow(2, first, length - first):clone()
  end)
  return keys, values
end

--- Counts t tokens more, once every layer has appended them.
function QuantizedCache:advance(t)
  Cache.advance(self, t)
  self.rounded = self.layers > 0 and GROUP * #self[1].k or 0
end

--- Forgets all but the first `past` positions. What is in blocks and stays in a block that is cut open stays rounded.
function QuantizedCache:truncate(past)
  Cache.truncate(self, past)
  if self.layers == 0 or not self[1].tail_k then return end
  local whole = math.min(#self[1].k, past // GROUP)
  for i = 1, self.layers do
    local at = self[i]
    ty.no_grad(function()
      ty.unscoped(function()
        for name, turned in pairs { k = true, v = false } do
          local tail, blocks = at["tail_" .. name], at[name]
          local opened = {}
          for j = whole + 1, #blocks do
            opened[#opened + 1] = decode(blocks[j], tail, GROUP, turned)
            blocks[j] = nil
          end
          opened[#opened + 1] = tail
          local rest = #opened == 1 and tail or ty.concat(opened, 2)
          at["tail_" .. name] = rest:narrow(2, 0, past - whole * GROUP):clone()
        end
      end)
    end)
  end
  self.rounded = whole * GROUP
end

-- Rows of a matrix in blocks.
local function select_rows(q, index)
  local bytes, rows = ty.io.to_bytes(q), q.shape[1]
  local chosen = ty.io.from_bytes(bytes, "u8", { rows, #bytes // rows }):index_select(0, index:to "cpu")
  local new = ty.io.from_bytes(ty.io.to_bytes(chosen), q.dtype, { chosen.shape[1], q.shape[2] })
  return q.device == "cpu" and new or new:to { device = q.device }
end

--- Keeps the rows `index` (i64 [n]) of the batch, for example those that are not finished.
function QuantizedCache:select(index)
  arguments.expect("QuantizedCache:select", "index", index, "a tensor")
  ty.no_grad(function()
    ty.unscoped(function()
      for i = 1, self.layers do
        local at = self[i]
        for _, name in ipairs { "k", "v" } do
          for j, q in ipairs(at[name]) do at[name][j] = select_rows(q, index) end
          local tail = at["tail_" .. name]
          at["tail_" .. name] = tail and tail:index_select(0, index:to { device = tail.device })
        end
      end
      if self.seen then self.seen = self.seen:index_select(0, index) end
    end)
  end)
end

--- Bytes that keys and values take.
---@return integer
function QuantizedCache:nbytes()
  local sum = 0
  for i = 1, self.layers do
    local at = self[i]
    for _, name in ipairs { "k", "v" } do
      for _, q in ipairs(at[name]) do sum = sum + q:nbytes() end
      if at["tail_" .. name] then sum = sum + at["tail_" .. name]:nbytes() end
    end
  end
  return sum
end

return QuantizedCache
