--- Reductions, running sums, sorting and selection on a GPU. The limit is their traffic at the bandwidth of a copy.
local calls = require "bench.lib.calls"

return function(on)
  local items = {}
  local function add(name, work, peer, dtype, shape, fn)
    items[#items + 1] = { name = name, work = work, peer = peer, bars = {}, setup = function()
      local x = on.randn(shape, dtype)
      return calls.forward(function() return fn(x) end)
    end }
  end

  local n = on.size(1 << 14, 64)
  for _, dtype in ipairs { "bf16", "f32" } do
    local bytes = n * n * (dtype == "f32" and 4 or 2)
    for _, dim in ipairs { -1, 0, 1 } do
      local label = dim < 0 and "all" or "dim" .. dim
      add(("sum/%s/%s"):format(dtype, label), { copy = bytes }, { "reduce", { op = "sum", shape = { n, n },
        dim = dim >= 0 and dim or nil, dtype = dtype } }, dtype, { n, n }, function(x)
        if dim < 0 then return x:sum() end
        return x:sum(dim)
      end)
    end
  end
  local function values(x) return (x:max(1)) end
  add("amax/f32/dim1", { copy = 4 * n * n }, { "reduce", { op = "amax", shape = { n, n }, dim = 1 } }, "f32", { n, n },
    values)
  n = on.size(8192, 64)
  for _, dim in ipairs { 0, 1 } do
    add(("cumsum/dim%d"):format(dim), { copy = 8 * n * n }, { "cumsum", { n = n, dim = dim } }, "f32", { n, n },
      function(x) return x:cumsum(dim) end)
  end
  for _, shape in ipairs { on.size({ 1 << 24 }, { 4096 }), on.size({ 4096, 4096 }, { 4, 64 }),
    on.size({ 1 << 20, 16 }, { 64, 16 }) } do
    add("sort/" .. table.concat(shape, "x"), nil, { "sort", { shape = shape } }, "f32", shape,
      function(x) return (x:sort(-1)) end)
  end
  local rows, wide = on.size(256, 4), on.size(50257, 301)
  add("topk50/256x50257", { copy = rows * wide * 4 }, { "topk", { rows = rows, n = wide, k = 50 } }, "f32",
    { rows, wide }, function(x) return (x:topk(50)) end)
  rows = on.size(8192, 8)
  add("argmax/8192x50257", { copy = rows * wide * 4 }, { "argmax", { rows = rows, n = wide } }, "f32",
    { rows, wide }, function(x) return x:argmax(-1) end)
  return items
end
