--- Products of matrices on a GPU: squares, and the linear layers of transformers at 8192 tokens (the weight is [n, k]).
local ty = require "tycho"

local items

local function add(on, kind, m, n, k, bar)
  local dtype = kind ~= "tf32" and kind or "f32"
  local name = ("%s/%dx%dx%d"):format(kind, m, n, k)
  m, n, k = on.size(m, 32), on.size(n, 48), on.size(k, 32)
  items[#items + 1] = { name = name, work = { [kind] = 2 * m * n * k }, bars = { peer = bar }, tf32 = kind == "tf32",
    peer = { "linear", { m = m, n = n, k = k, dtype = dtype } }, setup = function()
      local x, w = on.randn({ m, k }, dtype), on.randn({ n, k }, dtype)
      return function() return ty.linear(x, w):free() end
    end }
end

-- GPT-2 124M (with its head), a model of width 4096 and the two products of its feed-forward layer.
local layers = { { 8192, 2304, 768 }, { 8192, 768, 768 }, { 8192, 3072, 768 }, { 8192, 768, 3072 },
  { 8192, 50257, 768 }, { 8192, 12288, 4096 }, { 8192, 11008, 4096 }, { 8192, 4096, 11008 } }

return function(on)
  items = {}
  for _, n in ipairs { 8192, 4096, 2048, 1024 } do add(on, "bf16", n, n, n, 0.98) end
  for _, s in ipairs(layers) do add(on, "bf16", s[1], s[2], s[3], 0.98) end
  for _, kind in ipairs { "f16", "tf32", "f32" } do
    add(on, kind, 4096, 4096, 4096)
    add(on, kind, 8192, 3072, 768)
  end
  return items
end
