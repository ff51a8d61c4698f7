--- Causal attention, 12 heads of 64, f32 and bf16. The limit is the causal half at the full rate of products; backward
-- counts twice forward.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local heads, width = 12, 64
local items = {}

for _, t in ipairs { 256, 512, 1024, 2048, 4096, 8192 } do
  local flops = 2 * heads * t * t * width
  local named = t == 1024
  items[#items + 1] = { name = ("fwd/T%d"):format(t), work = { f32 = flops }, peer = { "forward", { t = t } },
    bars = { peer = named and 1.3 or 1, limit = named and 0.55 or nil }, setup = function()
      local q, k, v = ty.randn(1, heads, t, width), ty.randn(1, heads, t, width), ty.randn(1, heads, t, width)
      return calls.forward(function() ty.scaled_dot_product_attention(q, k, v, nil, true) end)
    end }
  items[#items + 1] = { name = ("fwd+bwd/T%d"):format(t), work = { f32 = 3 * flops }, peer = { "both", { t = t } },
    bars = { peer = named and 1.3 or 1, limit = named and 0.45 or nil }, setup = function()
      local x = {}
      for i = 1, 3 do x[i] = ty.randn(1, heads, t, width) end
      return calls.both(x, ty.randn(1, heads, t, width), function()
        return (ty.scaled_dot_product_attention(x[1], x[2], x[3], nil, true))
      end)
    end }
end

for _, t in ipairs { 1024, 2048 } do
  local flops = 2 * heads * t * t * width
  local function tensors(list)
    for i = 1, 4 do list[i] = ty.randn(1, heads, t, width):to "bf16" end
    return list
  end
  items[#items + 1] = { name = ("bf16/fwd/T%d"):format(t), work = { bf16 = flops }, bars = { peer = 1 },
    peer = { "forward", { t = t, dtype = "bf16" } }, setup = function()
      local x = tensors {}
      return calls.forward(function() ty.scaled_dot_product_attention(x[1], x[2], x[3], nil, true) end)
    end }
  items[#items + 1] = { name = ("bf16/fwd+bwd/T%d"):format(t), work = { bf16 = 3 * flops }, bars = { peer = 1 },
    peer = { "both", { t = t, dtype = "bf16" } }, setup = function()
      local x = tensors {}
      local g = table.remove(x)
      return calls.both(x, g, function() return (ty.scaled_dot_product_attention(x[1], x[2], x[3], nil, true)) end)
    end }
end

do -- heads of 80, which no power of two divides
  local t, wide = 1024, 80
  local flops = 3 * 2 * heads * t * t * wide
  items[#items + 1] = { name = "fwd+bwd/T1024/heads of 80", work = { f32 = flops }, bars = { peer = 1.3, limit = 0.45 },
    peer = { "both", { t = t, width = wide } }, setup = function()
      local x = {}
      for i = 1, 3 do x[i] = ty.randn(1, heads, t, wide) end
      return calls.both(x, ty.randn(1, heads, t, wide), function()
        return (ty.scaled_dot_product_attention(x[1], x[2], x[3], nil, true))
      end)
    end }
end

-- Lists of blocks of keys: a tenth of them for each block of queries, its own among them.
local t, block = 8192, 64
local blocks = t // block
local kept = blocks // 10
local flops = 4 * heads * t * kept * block * width
local function listed()
  local lists = {}
  for i = 0, blocks - 1 do
    local others = ty.randperm(blocks - 1):narrow(0, 0, kept - 1)
    lists[i + 1] = ty.concat({ ty.full({ 1 }, i, { dtype = "i64" }), (others + i + 1) % blocks }, 0)
  end
  return ty.stack(lists, 0):reshape(1, 1, blocks, kept)
end
items[#items + 1] = { name = ("blocks fwd/T%d"):format(t), work = { f32 = flops }, bars = { peer = 1 },
  peer = { "blocks_forward", { t = t, block = block, kept = kept } }, setup = function()
    local q, k, v = ty.randn(1, heads, t, width), ty.randn(1, heads, t, width), ty.randn(1, heads, t, width)
    local lists = listed()
    return calls.forward(function() ty.block_sparse_attention(q, k, v, lists, block, block) end)
  end }
items[#items + 1] = { name = ("blocks fwd+bwd/T%d"):format(t), work = { f32 = 3.5 * flops }, bars = { peer = 1 },
  peer = { "blocks_both", { t = t, block = block, kept = kept } }, setup = function()
    local x, lists = {}, listed()
    for i = 1, 3 do x[i] = ty.randn(1, heads, t, width) end
    return calls.both(x, ty.randn(1, heads, t, width), function()
      return (ty.block_sparse_attention(x[1], x[2], x[3], lists, block, block))
    end)
  end }

return items
