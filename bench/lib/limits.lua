--- The physical limits of this machine, measured between the rounds of the items that are held against them.
--
-- An item names the least work that it can be done with: { f32 = operations, bf16 = operations, int8 = operations,
-- read = bytes, copy = bytes (both sides counted), update = bytes (read and written in place), bare = calls }.
-- Its limit is the sum of each part at the full rate.
local native = require "bench.lib.native"

local limits = {}

local part = 192 << 20 -- what one sample goes over
local function cache_bytes()
  local largest = 32 << 20
  for index = 0, 8 do
    local file <close> = io.open(("/sys/devices/system/cpu/cpu0/cache/index%d/size"):format(index))
    local size, unit = (file and file:read "a" or ""):match "^(%d+)(%a)"
    if size then largest = math.max(largest, tonumber(size) << (unit == "M" and 20 or 10)) end
  end
  return largest
end

local total -- several times the last cache, so that nothing of the last sample is still there

local last = -math.huge

local function stream(kind, threads)
  total = total or math.min(3 << 30, (4 * cache_bytes() // part + 1) * part)
  if native.wall() - last > 0.5 then -- the host of a virtual machine may take back memory that lies idle
    for _ = 1, 2 * total // part do native.limit("scale", threads, part, total) end
  end
  local rate = native.limit(kind, threads, part, total)
  last = native.wall()
  return rate
end

local function better(a, b) return (a and b) and math.max(a, b) or a or b end

-- Products on tiles of sums, of which `parts` make one that is counted; nil where the CPU has none.
local function tiles(kind, threads, parts)
  local rate = native.limit("tiles_" .. kind, threads)
  return rate and rate / parts
end

local a, b = native.bare(), native.bare()

-- Each returns a rate in 1e9 a second, or nil where this CPU cannot do it.
local measures = {
  -- A product of f32 is six of bf16 (kernels/cpu/matmul/gemm_tiles_real.h), where the CPU multiplies these on tiles.
  f32 = function(threads) return better(native.limit("f32", threads), tiles("bf16", threads, 6)) end,
  -- Some CPUs multiply bf16 no faster than f32: converted, it runs at that rate.
  bf16 = function(threads)
    return better(better(native.limit("bf16", threads), native.limit("f32", threads)), tiles("bf16", threads, 1))
  end,
  int8 = function(threads) return better(native.limit("int8", threads), tiles("int8", threads, 1)) end,
  read = function(threads) return stream("read", threads) end,
  copy = function(threads) return better(stream("copy", threads), stream("copy_nt", threads)) end,
  update = function(threads) return stream("scale", threads) end,
  bare = function()
    local n = 200000
    local start = native.wall()
    for _ = 1, n do local _ = a + b end
    return n / (native.wall() - start) * 1e-9
  end,
}

--- Rates of the kinds that `work` names, in 1e9 a second.
function limits.sample(work, threads)
  local rates = {}
  for kind in pairs(work) do rates[kind] = measures[kind](threads) end
  return rates
end

--- All rates, for the head of the report.
limits.kinds = { "f32", "bf16", "int8", "read", "copy", "update" }
function limits.all(threads)
  local rates = {}
  for _, kind in ipairs(limits.kinds) do
    local best
    for _ = 1, 5 do best = better(best, measures[kind](threads)) end
    rates[kind] = best
  end
  rates.triad = better(stream("triad", threads), stream("triad_nt", threads))
  rates.adam = stream("update", threads)
  return rates
end

return limits
