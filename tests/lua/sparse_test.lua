-- Sparse matrices: conversions, products, sums and gradients against dense ones in float64, hostile positions, and two
-- networks over a graph.

local here = arg[0]:match(".*/") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local sparse, nn, optim = ty.sparse, ty.nn, ty.optim
local test, ok, equal, fails = check.test, check.ok, check.equal, check.fails

ty.manual_seed(5)

local f64 = { dtype = "f64" }

local function near(a, b, tol, what)
  equal(a.shape, b.shape, what)
  ok(a:numel() == 0 or (a:to "f64" - b:to "f64"):abs():max():item() <= tol, what)
end

-- A dense matrix with a share of zeros, and the entries of it in no order, some in two parts.
local function drawn(rows, columns, share)
  local mask = ty.rand(rows, columns):lt(share)
  local dense = ty.where(mask, ty.randn(rows, columns, f64), 0.0)
  local at = mask:nonzero():transpose(0, 1):contiguous()
  local values = dense:reshape(-1):index_select(0, at:select(0, 0) * columns + at:select(0, 1))
  local k = values:numel()
  local twice = k // 3
  local parts = ty.concat({ values:narrow(0, 0, twice) * 0.25, values:narrow(0, 0, twice) * 0.75,
    values:narrow(0, twice, k - twice) }, 0)
  local places = ty.concat({ at:narrow(1, 0, twice), at }, 1)
  local order = ty.randperm(parts:numel())
  return dense, places:index_select(1, order), parts:index_select(0, order)
end

local shapes = { { 7, 5, 0.4 }, { 40, 33, 0.1 }, { 3, 60, 0.2 }, { 50, 2, 0.5 }, { 6, 6, 0 }, { 1, 1, 1 } }

test("entries, compressed rows and dense matrices are one another's", function()
  for _, shape in ipairs(shapes) do
    local dense, at, values = drawn(table.unpack(shape))
    local size = { shape[1], shape[2] }
    local coo = sparse.coo(at, values, size)
    local csr = coo:to_csr()
    local what = ("%dx%d"):format(shape[1], shape[2])
    equal({ coo.layout, csr.layout, coo:nnz() }, { "coo", "csr", values:numel() }, what)
    for name, a in pairs { coo = coo, csr = csr, back = csr:to_coo(), joined = coo:coalesce(),
      csr_joined = csr:coalesce(), turned_twice = csr:transpose():transpose(),
      from_coo = sparse.from_dense(dense, "coo"),
      from_csr = sparse.from_dense(dense), again = sparse.csr(csr.offsets, csr.columns, csr.values, size) } do
      near(a:to_dense(), dense, 1e-14, what .. " " .. name)
      near(a:transpose():to_dense(), dense:transpose(0, 1), 1e-14, what .. " turned " .. name)
    end
    local count = dense:ne(0):sum():item()
    for _, a in ipairs { coo:coalesce(), csr:coalesce(), sparse.from_dense(dense) } do equal(a:nnz(), count, what) end
    local joined = coo:coalesce()
    if joined:nnz() > 1 then -- sorted by row, then column, each once
      local place = joined.indices:select(0, 0) * shape[2] + joined.indices:select(0, 1)
      ok(place:narrow(0, 1, count - 1):gt(place:narrow(0, 0, count - 1)):all():item(), what .. " sorted")
    end
  end
end)

test("products, sums, factors and softmax are those of the dense matrix", function()
  for _, shape in ipairs(shapes) do
    local rows, n = shape[1], shape[2]
    local dense, at, values = drawn(table.unpack(shape))
    local coo = sparse.coo(at, values, { rows, n })
    local x, v = ty.randn(n, 9, f64), ty.randn(n, f64)
    for _, a in ipairs { coo, coo:to_csr() } do
      near(a:mm(x), dense:matmul(x), 1e-12, "mm")
      near(a:mm(v), dense:matmul(v), 1e-12, "mm of a vector")
      near(a:transpose():mm(ty.ones(rows, f64)), dense:sum { 0 }, 1e-12, "mm of the transposed")
      near(a:sum(), dense:sum(), 1e-12, "sum")
      near(a:sum(1), dense:sum { 1 }, 1e-12, "sum of rows")
      near(a:sum(0), dense:sum { 0 }, 1e-12, "sum of columns")
      near((2 * a / 3 - a * 0.5):to_dense(), dense * (2 / 3 - 0.5), 1e-12, "factors")
      local row, column, all = ty.rand(n, f64) + 1, ty.rand(rows, 1, f64) + 1, ty.rand(rows, n, f64) + 1
      near((a * row / column * all):to_dense(), dense * row / column * all, 1e-12, "dense factors")
      near(a + all, dense + all, 1e-12, "plus a dense one")
      near(a - all, dense - all, 1e-12, "minus a dense one")
      local other, other_at, other_values = drawn(rows, n, 0.3)
      local both = a + sparse.coo(other_at, other_values, { rows, n })
      near(both:to_dense(), dense + other, 1e-12, "a sum")
      equal(both.layout, a.layout, "its layout")
      local p, q = ty.randn(rows, 4, f64), ty.randn(n, 4, f64)
      local once = a:coalesce()
      local mask = once:with_values(ty.ones(once:nnz(), f64)):to_dense()
      near(sparse.sddmm(once, p, q):to_dense(), p:matmul(q:transpose(0, 1)) * mask, 1e-12, "sddmm")
      local scores = ty.where(mask:eq(1), dense, -math.huge)
      for dim = 0, 1 do
        near(once:softmax(dim):to_dense(), scores:softmax(dim):nan_to_num(), 1e-12, "softmax " .. dim)
      end
    end
  end
end)

test("values and dense factors have their gradients, and second ones", function()
  local _, at, values = drawn(5, 4, 0.5)
  local x, p, q = ty.randn(4, 3, f64), ty.randn(5, 2, f64), ty.randn(4, 2, f64)
  for _, layout in ipairs { "coo", "csr" } do
    local a = sparse.coo(at, values, { 5, 4 })
    if layout == "csr" then a = a:to_csr() end
    local v = a.values:detach()
    ok(ty.gradcheck(function(w, y) return a:with_values(w):mm(y) end, { v, x }, { second = true }), layout .. " mm")
    ok(ty.gradcheck(function(w, y) return a:with_values(w):transpose():mm(y) end, { v, p }), layout .. " turned mm")
    ok(ty.gradcheck(function(b, c) return sparse.sddmm(a, b, c):softmax():mm(x) end, { p, q }, { second = true }),
      layout .. " sddmm, softmax")
    ok(ty.gradcheck(function(w) return a:with_values(w):coalesce():to_dense() end, { v }), layout .. " coalesce")
    local factors = p:matmul(q:transpose(0, 1))
    ok(ty.gradcheck(function(w) return (a:with_values(w) * factors):sum(0) end, { v }), layout .. " factors")
    ok(ty.gradcheck(function(w) return a:with_values(w):to_coo():to_csr():sum(1) end, { v }), layout .. " layouts")
  end
  ok(ty.gradcheck(function(y) return sparse.from_dense(y):mm(x) end, { (ty.randn(5, 4, f64)) }), "from_dense")
end)

test("what the structure gives is made once, and outlives the scope in which it was wanted", function()
  local _, at, values = drawn(30, 20, 0.2)
  local a = sparse.coo(at, values, { 30, 20 })
  local x = ty.randn(20, 3, f64):requires_grad_()
  local first, second
  ty.scope(function()
    local y = a:mm(x)
    first = a._pattern._compressed
    y:sum():backward()
  end)
  ty.scope(function()
    (a * 2):mm(x):sum():backward()
    second = a._pattern._compressed
  end)
  ok(first and first == second, "one structure")
  near(a:mm(x:detach()), a:to_dense():matmul(x:detach()), 1e-12, "still there")
  local returned = ty.scope(function() return sparse.from_dense(ty.eye(4)) end)
  near(returned:to_dense(), ty.eye(4), 0, "a matrix that a scope returns")
end)

test("other dtypes, and what prints", function()
  local dense, at, values = drawn(40, 33, 0.2)
  local x = ty.randn(33, 20)
  for dtype, tol in pairs { f32 = 1e-5, f16 = 0.03, bf16 = 0.2 } do
    local a = sparse.coo(at, values, { 40, 33 }):to(dtype)
    equal(a.values.dtype, dtype)
    near(a:mm(x:to(dtype)), dense:matmul(x:to "f64"), tol, dtype)
  end
  equal(tostring(sparse.from_dense(ty.eye(3))), "a sparse matrix [3, 3], csr of 3 entries, f32 cpu")
end)

test("positions that do not fit and other mistakes are errors", function()
  local function i(list) return ty.tensor(list, { dtype = "i64" }) end
  local two = ty.ones(2)
  fails(function() sparse.coo(i { { 0, 3 }, { 0, 0 } }, two, { 3, 2 }) end,
    "indices of rows: expected positions in %[0, 3%), got 3")
  fails(function() sparse.coo(i { { 0, 1 }, { 0, -1 } }, two, { 3, 2 }) end, "indices of columns.*got %-1")
  fails(function() sparse.coo(i { { 0, 1 } }, two, { 3, 2 }) end, "indices: expected %[2, entries%]")
  fails(function() sparse.coo(ty.ones(2, 2), two, { 3, 2 }) end, "indices: expected i64")
  fails(function() sparse.coo(i { { 0, 1 }, { 0, 1 } }, ty.ones(3), { 3, 2 }) end, "values: expected floats %[2%]")
  fails(function() sparse.coo(i { { 0, 1 }, { 0, 1 } }, i { 1, 2 }, { 3, 2 }) end, "values: expected floats")
  fails(function() sparse.coo(i { { 0, 1 }, { 0, 1 } }, two, { 3 }) end, "size: expected a pair of integers")
  fails(function() sparse.coo(i { { 0, 1 }, { 0, 1 } }, two, { 3, 1 << 40 }) end, "size: expected numbers")
  fails(function() sparse.csr(i { 0, 1, 1 }, i { 0, 1 }, two, { 2, 2 }) end,
    "offsets: expected numbers that rise from 0 to 2")
  fails(function() sparse.csr(i { 0, 3, 2 }, i { 0, 1 }, two, { 2, 2 }) end, "offsets:.*some that fall")
  fails(function() sparse.csr(i { 0, 2 }, i { 0, 1 }, two, { 2, 2 }) end, "offsets: expected %[3%]")
  fails(function() sparse.csr(i { 0, 1, 2 }, i { 0, 2 }, two, { 2, 2 }) end,
    "columns: expected positions in %[0, 2%), got 2")
  local a = sparse.from_dense(ty.eye(3))
  fails(function() a:mm(ty.ones(2, 4)) end, "Sparse:mm: x: expected floats %[3, d%]")
  fails(function() a:mm "text" end, "Sparse:mm: x")
  fails(function() return a * "text" end, "other")
  fails(function() return a * ty.ones(2, 3) end, "Sparse:mul: other: expected a number or a tensor that broadcasts")
  fails(function() return a * sparse.from_dense(ty.ones(3, 3)) end, "the same entries")
  fails(function() return a + ty.ones(2, 3) end, "Sparse:add: other: expected %[3, 3%]")
  fails(function() return a + sparse.from_dense(ty.ones(2, 3)) end, "expected a matrix %[3, 3%], got %[2, 3%]")
  fails(function() return a - "text" end, "Sparse:sub: other: expected a sparse matrix, got \"text\"")
  fails(function() return a + 1 end, "Sparse:add: other: expected a sparse matrix, got 1")
  fails(function() a:sum(2) end, "dim")
  fails(function() sparse.sddmm(a, ty.ones(3, 2), ty.ones(3, 4)) end, "b: expected floats %[3, d%]")
  fails(function() sparse.from_dense(ty.ones(3)) end, "x: expected floats %[rows, columns%]")
  -- An index that is changed behind its matrix's back is found by the kernel.
  local at = i { { 0, 1 }, { 0, 1 } }
  local b = sparse.coo(at, two, { 2, 2 }):to_csr()
  b.columns:fill_(1 << 40)
  fails(function() b:mm(ty.ones(2, 5)) end, "out of range")
end)

-- ---- networks over a graph ----

-- Three groups of people who know each other; each says something about what he is, mostly noise.
local function society(n, groups)
  local group = ty.arange(n) % groups
  local same = group:unsqueeze(1):eq(group)
  local knows = ty.rand(n, n):lt(ty.where(same, 0.2, 0.01)):logical_and(ty.eye(n):eq(0))
  knows = knows:logical_or(knows:transpose(0, 1)):logical_or(ty.eye(n):eq(1)) -- both ways, and oneself
  local said = group:one_hot(groups):to "f32" * 0.7 + ty.randn(n, groups)
  return sparse.from_dense(knows:to "f32"), said, group
end

-- Kipf and Welling 2017, "Semi-Supervised Classification with Graph Convolutional Networks": neighbours' features, over
-- the square roots of both degrees.
local Convolution = nn.module()
function Convolution:init(from, to) self.linear = nn.Linear(from, to) end
function Convolution:forward(graph, x)
  local scale = graph:sum(1):rsqrt()
  return (graph * scale * scale:unsqueeze(1)):mm(self.linear(x))
end

-- Velickovic et al. 2018, "Graph Attention Networks": a score for each edge from both ends, softmax over the edges of a
-- node, and the weighted sum of neighbours. Each head is a matrix of edges.
local Attention = nn.module()
function Attention:init(from, to, heads)
  self.heads = heads
  self.linear = nn.Linear(from, to * heads)
  self.of_node = nn.Parameter(ty.randn(heads, to) * 0.3)
  self.of_neighbour = nn.Parameter(ty.randn(heads, to) * 0.3)
end
function Attention:forward(graph, x)
  local csr = graph:to_csr()
  local coo = graph:to_coo()
  local h = self.linear(x):reshape(x.shape[1], self.heads, -1) -- [nodes, heads, width]
  local left, right = (h * self.of_node):sum { 2 }, (h * self.of_neighbour):sum { 2 }
  local scores = left:index_select(0, coo.indices:select(0, 0)) + right:index_select(0, coo.indices:select(0, 1))
  local weights = scores:leaky_relu(0.2):segment_softmax { offsets = csr.offsets } -- [edges, heads]
  local out = {}
  for k = 0, self.heads - 1 do out[k + 1] = csr:with_values(weights:select(1, k):contiguous()):mm(h:select(1, k)) end
  return ty.concat(out, 1)
end

-- Two layers, which learn from a few who are told.
local function learned(layers)
  ty.manual_seed(3)
  local graph, said, group = society(120, 3)
  local told = ty.arange(12)
  local parameters = {}
  local first, second = layers()
  for _, layer in ipairs { first, second } do
    for _, p in ipairs(layer:parameters()) do parameters[#parameters + 1] = p end
  end
  local opt = optim.AdamW(parameters, { lr = 0.02, weight_decay = 5e-3 })
  local function logits() return second(graph, first(graph, said):relu()) end
  local start, loss
  for _ = 1, 60 do
    ty.scope(function()
      local l = nn.cross_entropy(logits():index_select(0, told), group:index_select(0, told))
      loss = l:item()
      start = start or loss
      opt:step(l)
    end)
  end
  local right = logits():argmax(1):eq(group):narrow(0, 12, 108):to("f32"):mean():item()
  return right, loss, start
end

test("a graph convolution and attention over edges learn who belongs together", function()
  local right, loss, start = learned(function() return Convolution(3, 16), Convolution(16, 3) end)
  ok(loss < 0.5 * start and right > 0.85, ("convolution: loss %.3f from %.3f, %.3f right"):format(loss, start, right))
  right, loss, start = learned(function() return Attention(3, 8, 2), Attention(16, 3, 1) end)
  ok(loss < 0.5 * start and right > 0.85, ("attention: loss %.3f from %.3f, %.3f right"):format(loss, start, right))
end)

test("attention over edges is attention with a mask, and so are its gradients", function()
  local graph, x = society(30, 3), ty.randn(30, 4, f64)
  graph = graph:to "f64"
  local q, k, v = ty.randn(30, 4, f64):requires_grad_(), ty.randn(30, 4, f64):requires_grad_(), x:requires_grad_()
  local function gradients(y) return ty.grad((y * ty.arange(120, f64):reshape(30, 4):cos()):sum(), { q, k, v }) end
  local y = (sparse.sddmm(graph, q, k) * 0.5):softmax():mm(v)
  local scores = ty.where(graph:to_dense():eq(1), q:matmul(k:transpose(0, 1)) * 0.5, -math.huge)
  local want = scores:softmax(1):matmul(v)
  near(y:detach(), want:detach(), 1e-12, "attention")
  local a, b = gradients(y), gradients(want)
  for n = 1, 3 do near(a[n], b[n], 1e-10, "gradient " .. n) end
end)

check.finish()
