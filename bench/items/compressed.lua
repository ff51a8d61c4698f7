--- Compressed weights that have products of their own, in shapes of a Llama model of 1.1 billion parameters, one row
--- with weights from memory: trit-planes and entries of a codebook against what their bytes take to be read; weights
--- with zeros, stored without them, and 2:4, over this library's own product in f16, in turns in one process (the time,
--- of that in f16). Formats of like size of llama.cpp are in quantized.lua and, as whole models beside it, in llm.lua.
local ty = require "tycho"
local prune, quant = require "tycho.prune", require "tycho.quant"

local ROOM, ROUNDS = 128 << 20, 21 -- bytes: more than any cache has
local items = {}
local shapes = { { 2048, 2048 }, { 5632, 2048 }, { 2048, 5632 } } -- out, in

-- Calls fn(copy) with copies of a weight in turn, so many that they come from memory.
local function in_turn(copies, fn)
  local i = 0
  return function()
    i = i % #copies + 1
    fn(copies[i])
  end
end
local function copies_of(bytes, make)
  local list = {}
  for j = 1, math.max(2, math.ceil(ROOM / bytes)) do list[j] = make() end
  return list
end

for _, s in ipairs(shapes) do
  local n, k = s[1], s[2]
  local label = ("1x%dx%d"):format(n, k)
  local groups, bytes_of = k // 128, 26 -- of 128 trits
  local trits = n * groups * 2 * (bytes_of + 2)
  items[#items + 1] = { name = "decode/trit-planes/" .. label, work = { read = trits },
    bars = { limit = 0.85 }, setup = function()
      local x, w = ty.randn(1, k), ty.randn(n, groups * 128) * 0.05
      local planes = { w:sign() * w:abs():gt(0.03):to "f32", w:sign() * w:abs():lt(0.02):to "f32" }
      local codes, scales = quant.trit.pack(planes, 128), ty.rand(groups, n, 2):to "f16"
      return in_turn(copies_of(trits, function() return { codes:clone(), scales:clone() } end), function(c)
        ty.matmul_trit(x, c[1], c[2], 128):free()
      end)
    end }
  for _, d in ipairs { 4, 8 } do
    local codes = n * k // d
    items[#items + 1] = { name = ("decode/codebook of %d/%s"):format(d, label), work = { read = codes + 1024 * d },
      bars = {}, setup = function()
        local x, book = ty.randn(1, k), ty.randn(256, d)
        local one = ty.randint(0, 256, { n, k // d }):to "u8"
        return in_turn(copies_of(codes, function() return one:clone() end), function(c)
          ty.linear_codebook(x, c, book):free()
        end)
      end }
  end
end

-- The time of the packed product, of that in dense f16.
local function over_dense(n, k, w)
  local x, dense = ty.randn(1, k), w:to "f16"
  local half = x:to "f16"
  local packed = prune.pack(w)
  local plain = in_turn(copies_of(2 * n * k, function() return dense:clone() end), function(c)
    ty.linear(half, c):free()
  end)
  local sparse = in_turn(copies_of(prune.packed_bytes(packed), function()
    return { packed.values:clone(), packed.bitmap:clone(), packed.starts:clone() }
  end), function(c) ty.linear_bitmap(x, c[1], c[2], c[3]):free() end)
  local function time(fn)
    local began = ty.system.clock()
    for _ = 1, 10 do fn() end
    return ty.system.clock() - began
  end
  local ratios = {}
  time(plain)
  time(sparse)
  for i = 1, ROUNDS do ratios[i] = time(sparse) / time(plain) end
  return ty.stats.median(ratios)
end

for _, s in ipairs(shapes) do
  local n, k = s[1], s[2]
  for _, case in ipairs { { "2:4", 1.5 }, { 0.6, 1.2 }, { 0.7, 1.6 }, { 0.8, 2.2 } } do
    local kind, bar = case[1], case[2]
    local label = kind == "2:4" and kind or ("%g %% zeros"):format(100 * kind)
    items[#items + 1] = { name = ("decode/%s/1x%dx%d"):format(label, n, k), unit = "x", rounds = 1,
      bars = { most = 1 / bar }, peer_sample = function() end, sample = function()
        ty.manual_seed(1)
        local w = ty.randn(n, k)
        local mask
        if kind == "2:4" then
          local _, at = w:reshape(-1, 4):abs():topk(2, 1)
          mask = ty.zeros(n * k // 4, 4):scatter(1, at, 1):reshape(n, k)
        else
          mask = ty.rand(n, k):ge(kind):to "f32"
        end
        return over_dense(n, k, w * mask)
      end }
  end
end

return items
