--- Causal attention in bf16 on a GPU: 16384 tokens in sequences of 1k to 16k, width 2048 in heads of 64 and of 128.
-- The limit is the causal half at the rate of a large product; backward computes the scores again, so it is 2.5 times
-- forward. Then how the peak of memory grows when the sequence becomes twice as long.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local function randn(on, count, shape)
  local list = {}
  for i = 1, count do list[i] = on.randn(shape, "bf16") end
  return list
end

local function attend(x) return (ty.scaled_dot_product_attention(x[1], x[2], x[3], nil, true)) end

return function(on)
  local items = {}
  for _, width in ipairs { 64, 128 } do
    for _, thousands in ipairs { 1, 2, 4, 8, 16 } do
      local t, total = on.size(thousands * 1024, 4 * thousands), on.size(16384, 64)
      local batch, heads = total // t, on.size(2048, 2 * width) // width
      local shape = { batch, heads, t, width }
      local forward = 2 * batch * heads * t * t * width
      local arguments = { t = t, batch = batch, heads = heads, width = width, dtype = "bf16" }
      local label = ("D%d/T%dk"):format(width, thousands)
      items[#items + 1] = { name = "fwd/" .. label, work = { bf16 = forward }, peer = { "forward", arguments },
        bars = { peer = 0.95 }, setup = function()
          local x = randn(on, 3, shape)
          return calls.forward(function() attend(x) end)
        end }
      items[#items + 1] = { name = "fwd+bwd/" .. label, work = { bf16 = 3.5 * forward }, peer = { "both", arguments },
        bars = { peer = 0.95 }, setup = function()
          local x = randn(on, 4, shape)
          local g = table.remove(x)
          return calls.both(x, g, function() return attend(x) end)
        end }
    end
  end

  local function peak(t)
    local x = randn(on, 4, { 1, on.size(16, 2), t, 64 })
    local g = table.remove(x)
    return on.peak_of(calls.both(x, g, function() return attend(x) end))
  end
  items[#items + 1] = { name = "peak memory, T16k / T8k", unit = "x", rounds = 1, bars = { most = 2.1 },
    sample = function() return peak(on.size(16384, 64)) / peak(on.size(8192, 32)) end, peer_sample = function() end }
  return items
end
