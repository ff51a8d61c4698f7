--- Sparse matrices and segments. The limit of products is their multiplications at the FMA rate, though what they read
-- lies where the columns say.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}

local function drawn(n, density)
  local count = math.floor(n * n * density)
  local at = ty.randint(0, n, { 2, count })
  return ty.sparse.coo(at, ty.randn(count), { n, n }):coalesce():to_csr()
end

for _, shape in ipairs { { 4096, 64 }, { 20000, 256 } } do
  local n, d = shape[1], shape[2]
  for _, density in ipairs { 0.001, 0.01 } do
    local label, flops = ("%dx%d/%g/d%d"):format(n, n, density, d), 2 * n * n * density * d
    local about = { n = n, density = density, d = d }
    items[#items + 1] = { name = "mm/" .. label, work = { f32 = flops }, peer = { "mm", about }, bars = { peer = 1 },
      setup = function()
        local a, x = drawn(n, density), ty.randn(n, d)
        return calls.forward(function() a:mm(x) end)
      end }
    items[#items + 1] = { name = "mm fwd+bwd/" .. label, work = { f32 = 3 * flops }, peer = { "mm_both", about },
      bars = { peer = 1 }, setup = function()
        local a, x = drawn(n, density), ty.randn(n, d)
        return calls.both({ a.values, x }, ty.randn(n, d), function() return a:mm(x) end)
      end }
  end
end

local n, density = 20000, 0.001
items[#items + 1] = { name = "mv/20000x20000/0.001", work = { f32 = 2 * n * n * density },
  peer = { "mv", { n = n, density = density } }, bars = { peer = 1 }, setup = function()
    local a, x = drawn(n, density), ty.randn(n)
    return calls.forward(function() a:mm(x) end)
  end }
items[#items + 1] = { name = "sddmm/20000x20000/0.001/d64", work = { f32 = 2 * n * n * density * 64 },
  peer = { "sddmm", { n = n, density = density, d = 64 } }, bars = { peer = 1 }, setup = function()
    local a, x, y = drawn(n, density), ty.randn(n, 64), ty.randn(n, 64)
    return calls.forward(function() ty.sparse.sddmm(a, x, y) end)
  end }

-- Edges of a graph, by the node that each belongs to.
local nodes, edges = 20000, 300000
for _, width in ipairs { 1, 8, 64 } do
  local function offsets() return select(2, ty.segments_of(ty.randint(0, nodes, { edges }), nodes)) end
  for _, reduce in ipairs { "sum", "max" } do
    items[#items + 1] = { name = ("segment_%s/%dx%d"):format(reduce, edges, width),
      work = { copy = (edges + nodes) * width * 4 }, bars = { peer = 1 },
      peer = { "segment_reduce", { reduce = reduce, nodes = nodes, edges = edges, width = width } }, setup = function()
        local o, x = offsets(), ty.randn(edges, width)
        return calls.forward(function() ty.segment_reduce(x, reduce, { offsets = o }) end)
      end }
  end
  items[#items + 1] = { name = ("segment_softmax fwd+bwd/%dx%d"):format(edges, width), bars = { peer = 1 },
    work = { copy = 5 * edges * width * 4 },
    peer = { "segment_softmax", { nodes = nodes, edges = edges, width = width } }, setup = function()
      local o, x = offsets(), ty.randn(edges, width)
      return calls.both({ x }, ty.randn(edges, width), function() return ty.segment_softmax(x, { offsets = o }) end)
    end }
end

return items
