--- Running sums, sorting, selection.
local ty = require "tycho"

local items = {}

local function add(name, work, peer, make)
  items[#items + 1] = { name = name, work = work, peer = peer, bars = { peer = 1 }, setup = function()
    local x, fn = make()
    return function() ty.scope(fn, x) end
  end }
end

for _, dim in ipairs { 0, 1 } do
  for _, n in ipairs { 512, 8192 } do
    add(("cumsum/%dx%d/dim%d"):format(n, n, dim), { copy = 8 * n * n }, { "cumsum", { n = n, dim = dim } }, function()
      return ty.randn(n, n), function(x) return x:cumsum(dim) end
    end)
  end
end
for _, shape in ipairs { { 1000000 }, { 1024, 1024 }, { 65536, 16 } } do
  add("sort/" .. table.concat(shape, "x"), nil, { "sort", { shape = shape } }, function()
    return ty.randn(shape), function(x) return (x:sort(-1)) end
  end)
end
add("topk50/256x50257", { read = 256 * 50257 * 4 }, { "topk", { rows = 256, n = 50257, k = 50 } }, function()
  return ty.randn(256, 50257), function(x) return (x:topk(50)) end
end)
add("argmax/256x50257", { read = 256 * 50257 * 4 }, { "argmax", { rows = 256, n = 50257 } }, function()
  return ty.randn(256, 50257), function(x) return x:argmax(-1) end
end)

return items
