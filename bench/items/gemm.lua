--- Products of matrices: squares, the shapes of a transformer, one row and eight rows with weights from memory.
local ty = require "tycho"

local items = {}

local function name_of(kind, m, n, k) return ("%s/%dx%dx%d"):format(kind, m, n, k) end

local squares = { 128, 512, 1024, 2048 }
local layers = { { 256, 2304, 768 }, { 256, 768, 768 }, { 256, 3072, 768 }, { 256, 768, 3072 }, { 64, 50257, 768 },
  { 1024, 2304, 768 }, { 1024, 3072, 768 } }

local function limit_bar(m, n, k) return math.min(m, n, k) >= 256 and 0.88 or nil end

-- f32 squares multiply as they are; the shapes of layers are a linear layer's: the weight is [n, k].
for _, n in ipairs(squares) do
  items[#items + 1] = { name = name_of("f32", n, n, n), work = { f32 = 2 * n ^ 3 },
    peer = { "matmul", { m = n, n = n, k = n } },
    bars = { peer = 1, limit = n >= 512 and 0.88 or nil }, setup = function()
      local x, y = ty.randn(n, n), ty.randn(n, n)
      return function() return x:matmul(y):free() end
    end }
end

local function linear(kind, m, n, k, bars)
  items[#items + 1] = { name = name_of(kind, m, n, k), work = { [kind] = 2 * m * n * k }, bars = bars,
    peer = { "linear", { m = m, n = n, k = k, dtype = kind } }, setup = function()
      local x, w = ty.randn(m, k):to(kind), ty.randn(n, k):to(kind)
      return function() return ty.linear(x, w):free() end
    end }
end

for _, s in ipairs(layers) do
  linear("f32", s[1], s[2], s[3], { peer = 1, limit = limit_bar(table.unpack(s)) })
end
for _, n in ipairs { 512, 1024, 2048 } do linear("bf16", n, n, n, { peer = 1 }) end
for _, s in ipairs(layers) do linear("bf16", s[1], s[2], s[3], { peer = 1 }) end

-- Weights that together are several times the last cache, one after the other: every product reads its own from memory.
for _, kind in ipairs { "f32", "bf16" } do
  for _, m in ipairs { 1, 8 } do
    local n, bytes = 4096, kind == "f32" and 4 or 2
    local count = (1280 << 20) // (n * n * bytes)
    items[#items + 1] = { name = name_of("memory/" .. kind, m, n, n), work = { read = n * n * bytes },
      bars = { peer = m == 1 and 2 or 1, limit = m == 1 and 0.88 or nil },
      peer = { "from_memory", { m = m, n = n, dtype = kind, count = count } }, setup = function()
        local x, weights, i = ty.randn(m, n):to(kind), {}, 0
        for j = 1, count do weights[j] = ty.randn(n, n):to(kind) end
        return function()
          i = i % count + 1
          ty.linear(x, weights[i]):free()
        end
      end }
  end
end

local function int8(m, n, k)
  items[#items + 1] = { name = name_of("int8", m, n, k), work = { int8 = 2 * m * n * k }, bars = { peer = 1 },
    peer = { "int8", { m = m, n = n, k = k } },
    skip = function() return not ty.matmul_int8 and "no ty.matmul_int8 yet" end,
    setup = function()
      local x = ty.randint(-127, 128, { m, k }):to "i8"
      local y = ty.randint(-127, 128, { k, n }):to "i8"
      return function() return ty.matmul_int8(x, y):free() end
    end }
end
for _, n in ipairs { 512, 1024, 2048 } do int8(n, n, n) end
int8(256, 3072, 768)
int8(256, 768, 3072)

return items
