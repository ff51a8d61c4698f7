--- Sparse matrices: those of few elements that are not zero, as values that hold ordinary tensors. Two layouts: `coo`,
-- the row and the column of every entry, and `csr`, where the entries of each row begin and the column of each. Entries
-- may repeat, and then add up; coalesce() joins them. The values may be of any float dtype and have gradients, which
-- reach through every function here; where entries are does not change.
--
--     local a = ty.sparse.coo(ty.tensor { { 0, 0, 2 }, { 1, 3, 2 } }, ty.tensor { 0.5, 2, 1 }, { 3, 4 })
--     local y = a:mm(x)                                 -- [3, d] for x [4, d]
--     local b = 2 * a + a:mul(row)                      -- where a tensor takes part the sparse matrix comes first
--     local graph = a:to_csr()
--     -- attention over the edges of a graph: a score for each, softmax over those of a node, a weighted sum
--     local out = ty.sparse.sddmm(graph, q, k):softmax():mm(v)
--
-- Products with dense matrices, sampled products and softmax are single ops (sparse_mm, sddmm, segment_softmax). What
-- they need of the structure, such as the transposed one for gradients, is made once for each and kept with it.
-- Products of two sparse matrices and more than two dimensions are left out.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local core = ty.core
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe

local sparse = {}

--- A sparse matrix, as sparse.coo, csr and from_dense make it. + - * / and the sign go where its methods do.
---@class Sparse
---@field layout "coo"|"csr"
---@field size integer[]   rows and columns
---@field values Tensor    [entries]
---@field indices? Tensor  of coo: [2, entries], i64, rows and columns
---@field offsets? Tensor  of csr: [rows + 1], i64, where the entries of each row begin and the last end
---@field columns? Tensor  of csr: [entries], i64
local Sparse = {}
Sparse.__index = Sparse
Sparse.__name = "Sparse"

--- Whether a value is a sparse matrix.
---@return boolean
function sparse.is_sparse(value) return getmetatable(value) == Sparse end

local LIMIT = math.maxinteger >> 32 -- of rows and columns: segments_of counts so far

local function check(who, value, name)
  if not sparse.is_sparse(value) then
    fail("%s: %s: expected a sparse matrix, got %s", who, name or "the matrix", describe(value))
  end
  return value
end

local function shape_text(t) return ("%s [%s]"):format(t.dtype, table.concat(t.shape, ", ")) end

local function check_positions(who, name, t, ndim, layout)
  expect(who, name, t, "a tensor")
  if t.ndim ~= ndim or t.dtype ~= "i64" and t.dtype ~= "i32" then
    fail("%s: %s: expected i64 %s, got %s", who, name, layout, shape_text(t))
  end
  return t:to "i64"
end

local function check_values(who, values, count)
  expect(who, "values", values, "a tensor")
  if values.ndim ~= 1 or values.shape[1] ~= count or not values:is_floating_point() then
    fail("%s: values: expected floats [%d], one for each entry, got %s", who, count, shape_text(values))
  end
  return values
end

local function check_size(who, size)
  expect(who, "size", size, "a pair of integers")
  for _, n in ipairs(size) do
    if n < 0 or n >= LIMIT then
      fail("%s: size: expected numbers of rows and columns in [0, %d), got %d", who, LIMIT, n)
    end
  end
  return { math.tointeger(size[1]), math.tointeger(size[2]) }
end

-- All of t [n] lie in [0, limit).
local function check_range(who, name, t, limit)
  if t:numel() == 0 or tostring(t.device) == "meta" then return end
  local low, high = ty.scope(function() return t:min():item(), t:max():item() end)
  if low < 0 or high >= limit then
    fail("%s: %s: expected positions in [0, %d), got %d", who, name, limit, low < 0 and low or high)
  end
end

-- ---- structures, which several matrices share ----

-- A value of `pattern` by `key`, made once, outside of scopes and graphs.
local function kept(pattern, key, make)
  if not pattern[key] then
    pattern[key] = ty.unscoped(function() return ty.no_grad(make) end)
  end
  return pattern[key]
end

local function of(pattern, values)
  return setmetatable({
    layout = pattern.layout, size = { pattern.rows, pattern.n }, values = values, indices = pattern.indices,
    offsets = pattern.offsets, columns = pattern.columns, _pattern = pattern,
  }, Sparse)
end

local function new_coo(indices, rows, n) return { layout = "coo", indices = indices, rows = rows, n = n } end
local function new_csr(offsets, columns, rows, n)
  return { layout = "csr", offsets = offsets, columns = columns, rows = rows, n = n }
end

-- The row and the column of each entry, as it stands.
local function row_of_each(p)
  if p.layout == "coo" then return p.indices:select(0, 0) end
  return kept(p, "_rows", function()
    local numbers = ty.arange(p.rows, { device = p.offsets.device })
    return core.segment_spread(numbers, p.offsets, nil, 0, p.columns:numel())
  end)
end
local function column_of_each(p) return p.layout == "coo" and p.indices:select(0, 1) or p.columns end

-- The structure in compressed rows, and that of the transposed matrix: { offsets, columns, order }, where the order of
-- csr itself is nil.
local function turned(p)
  return kept(p, "_turned", function()
    local order, offsets = core.segments_of(column_of_each(p), p.n)
    return { offsets = offsets, columns = row_of_each(p):index_select(0, order), order = order }
  end)
end
local function compressed(p)
  if p.layout == "csr" then return { offsets = p.offsets, columns = p.columns } end
  return kept(p, "_compressed", function()
    local by_column = turned(p)
    local order, offsets = core.segments_of(by_column.columns, p.rows)
    order = by_column.order:index_select(0, order)
    return { offsets = offsets, columns = column_of_each(p):index_select(0, order), order = order }
  end)
end

-- What sparse_mm and sddmm are told beside the structure; the transposed one where a gradient will ask for it.
local function told(p, other)
  local o = { order = compressed(p).order }
  if other.requires_grad then
    local t = turned(p)
    o.turned_offsets, o.turned_columns, o.turned_order = t.offsets, t.columns, t.order
  end
  return o
end

-- ---- making them ----

--- A matrix by the positions of its entries.
---@param indices Tensor  i64 [2, entries]: rows and columns
---@param values Tensor   floats [entries]
---@param size integer[]  rows and columns
---@return Sparse
function sparse.coo(indices, values, size)
  local who = "sparse.coo"
  indices = check_positions(who, "indices", indices, 2, "[2, entries]")
  if indices.shape[1] ~= 2 then
    fail("%s: indices: expected [2, entries], rows and columns, got %s", who, shape_text(indices))
  end
  check_values(who, values, indices.shape[2])
  size = check_size(who, size)
  check_range(who, "indices of rows", indices:select(0, 0), size[1])
  check_range(who, "indices of columns", indices:select(0, 1), size[2])
  return of(new_coo(indices, size[1], size[2]), values)
end

--- A matrix in compressed rows: the entries of row r are those from offsets[r] to offsets[r + 1].
---@param offsets Tensor  i64 [rows + 1], rising from 0 to the number of entries
---@param columns Tensor  i64 [entries]
---@param values Tensor   floats [entries]
---@param size integer[]  rows and columns
---@return Sparse
function sparse.csr(offsets, columns, values, size)
  local who = "sparse.csr"
  offsets = check_positions(who, "offsets", offsets, 1, "[rows + 1]")
  columns = check_positions(who, "columns", columns, 1, "[entries]")
  local count = columns.shape[1]
  check_values(who, values, count)
  size = check_size(who, size)
  if offsets.shape[1] ~= size[1] + 1 then
    fail("%s: offsets: expected [%d], one more than rows, got %s", who, size[1] + 1, shape_text(offsets))
  end
  if tostring(offsets.device) ~= "meta" then
    local first, last, rises = ty.scope(function()
      local steps = offsets:narrow(0, 1, size[1]):lt(offsets:narrow(0, 0, size[1]))
      return offsets:select(0, 0):item(), offsets:select(0, -1):item(), not steps:any():item()
    end)
    if first ~= 0 or last ~= count or not rises then
      fail("%s: offsets: expected numbers that rise from 0 to %d, got %s", who, count,
        rises and ("%d to %d"):format(first, last) or "some that fall")
    end
  end
  check_range(who, "columns", columns, size[2])
  return of(new_csr(offsets, columns, size[1], size[2]), values)
end

--- The elements of a dense matrix that are not zero. The gradient of its values reaches x.
---@param x Tensor  floats [rows, columns]
---@param layout? "coo"|"csr"  (csr)
---@return Sparse
function sparse.from_dense(x, layout)
  local who = "sparse.from_dense"
  expect(who, "x", x, "a tensor")
  expect(who, "layout", layout, '"coo" or "csr" or nil')
  if x.ndim ~= 2 or not x:is_floating_point() then
    fail("%s: x: expected floats [rows, columns], got %s", who, shape_text(x))
  end
  local rows, n = x.shape[1], x.shape[2]
  local at = ty.no_grad(function() return x:detach():nonzero():transpose(0, 1):contiguous() end)
  local values = x:reshape(-1):index_select(0, at:select(0, 0) * n + at:select(0, 1))
  if layout == "coo" then return of(new_coo(at, rows, n), values) end
  local _, offsets = core.segments_of(at:select(0, 0), rows)
  return of(new_csr(offsets, at:select(0, 1):contiguous(), rows, n), values)
end

-- ---- from one to another ----

--- How many entries there are.
---@return integer
function Sparse:nnz() return self.values:numel() end

--- The same entries with other values.
---@param values Tensor  floats [entries]
---@return Sparse
function Sparse:with_values(values)
  return of(check("Sparse:with_values", self)._pattern, check_values("Sparse:with_values", values, self:nnz()))
end

--- The same matrix without history.
---@return Sparse
function Sparse:detach() return of(check("Sparse:detach", self)._pattern, self.values:detach()) end

--- The matrix on another device, or its values in another dtype, as Tensor:to.
---@param where string|{dtype: Dtype, device: Device}
---@return Sparse
function Sparse:to(where)
  local p = check("Sparse:to", self)._pattern
  local values = self.values:to(where)
  if values.device == self.values.device then return of(p, values) end
  local function moved(t) return t and t:to { device = values.device } end
  return of({ layout = p.layout, indices = moved(p.indices), offsets = moved(p.offsets), columns = moved(p.columns),
    rows = p.rows, n = p.n }, values)
end

--- The dense matrix.
---@return Tensor  [rows, columns]
function Sparse:to_dense()
  local p = check("Sparse:to_dense", self)._pattern
  local at = row_of_each(p) * p.n + column_of_each(p)
  local zeros = ty.zeros({ p.rows * p.n }, { dtype = self.values.dtype, device = self.values.device })
  return zeros:index_add(0, at, self.values):reshape(p.rows, p.n)
end

--- The matrix as rows and columns of entries, in their order.
---@return Sparse
function Sparse:to_coo()
  local p = check("Sparse:to_coo", self)._pattern
  if p.layout == "coo" then return self end
  return of(new_coo(ty.stack({ row_of_each(p), p.columns }, 0), p.rows, p.n), self.values)
end

--- The matrix in compressed rows, those of coo sorted by columns.
---@return Sparse
function Sparse:to_csr()
  local p = check("Sparse:to_csr", self)._pattern
  if p.layout == "csr" then return self end
  local c = compressed(p)
  return of(new_csr(c.offsets, c.columns, p.rows, p.n), self.values:index_select(0, c.order))
end

--- The transposed matrix, in the same layout.
---@return Sparse
function Sparse:transpose()
  local p = check("Sparse:transpose", self)._pattern
  if p.layout == "coo" then return of(new_coo(p.indices:flip(0), p.n, p.rows), self.values) end
  local t = turned(p)
  return of(new_csr(t.offsets, t.columns, p.n, p.rows), self.values:index_select(0, t.order))
end
Sparse.t = Sparse.transpose

--- Entries sorted by row and column, those of one place as their sum. How many are left depends on the positions.
---@return Sparse
function Sparse:coalesce()
  local p = check("Sparse:coalesce", self)._pattern
  if p.layout == "csr" then return self:to_coo():coalesce():to_csr() end
  local k = self:nnz()
  if k == 0 then return self end
  local c = compressed(p)
  local rows = row_of_each(p):index_select(0, c.order)
  local function differs(t) return t:narrow(0, 1, k - 1):ne(t:narrow(0, 0, k - 1)) end
  local first = ty.ones({ 1 }, { dtype = "bool", device = rows.device })
  local begins = ty.concat({ first, differs(rows):logical_or(differs(c.columns)) }, 0):nonzero():flatten()
  local ends = ty.full({ 1 }, k, { dtype = "i64", device = rows.device })
  local values = core.segment_reduce(self.values, "sum", { offsets = ty.concat({ begins, ends }, 0), order = c.order })
  local indices = ty.stack({ rows:index_select(0, begins), c.columns:index_select(0, begins) }, 0)
  return of(new_coo(indices, p.rows, p.n), values)
end

-- ---- products and sums ----

--- The product with a dense matrix, or a vector.
---@param x Tensor  floats [columns, d] or [columns]
---@return Tensor   [rows, d] or [rows]
function Sparse:mm(x)
  local who = "Sparse:mm"
  local p = check(who, self)._pattern
  expect(who, "x", x, "a tensor")
  if (x.ndim ~= 1 and x.ndim ~= 2) or x.shape[1] ~= p.n or not x:is_floating_point() then
    fail("%s: x: expected floats [%d, d] or [%d] for a matrix [%d, %d], got %s", who, p.n, p.n, p.rows, p.n,
      shape_text(x))
  end
  local c = compressed(p)
  local y = core.sparse_mm(self.values, x.ndim == 1 and x:unsqueeze(1) or x, c.offsets, c.columns, told(p, x))
  return x.ndim == 1 and y:squeeze { 1 } or y
end
Sparse.mv, Sparse.matmul = Sparse.mm, Sparse.mm

--- Dot products of rows of two dense matrices where a sparse one has entries: the one of row r and column c is
-- a[r] . b[c]. The values that it has do not count; multiply by it where they should.
---@param pattern Sparse
---@param a Tensor  floats [rows, d]
---@param b Tensor  floats [columns, d]
---@return Sparse
function sparse.sddmm(pattern, a, b)
  local who = "sparse.sddmm"
  local p = check(who, pattern, "pattern")._pattern
  for i, x in ipairs { expect(who, "a", a, "a tensor"), expect(who, "b", b, "a tensor") } do
    local rows = i == 1 and p.rows or p.n
    if x.ndim ~= 2 or x.shape[1] ~= rows or x.shape[2] ~= a.shape[2] or not x:is_floating_point() then
      fail("%s: %s: expected floats [%d, d] for a pattern [%d, %d], got %s", who, i == 1 and "a" or "b", rows, p.rows,
        p.n, shape_text(x))
    end
  end
  local c = compressed(p)
  return of(p, core.sddmm(a, b, c.offsets, c.columns, told(p, b)))
end

-- 1: segments of rows; 0: of columns.
local function segments(who, p, dim)
  expect(who, "dim", dim, "an integer in [-2, 1]")
  return dim % 2 == 1 and compressed(p) or turned(p)
end

--- The sum of all entries, or of those of each row (dim 1) or column (dim 0).
---@param dim? integer
---@return Tensor  a number, [rows] or [columns]
function Sparse:sum(dim)
  local p = check("Sparse:sum", self)._pattern
  if dim == nil then return self.values:sum() end
  local s = segments("Sparse:sum", p, dim)
  return core.segment_reduce(self.values, "sum", { offsets = s.offsets, order = s.order })
end

--- softmax over the entries of each row (dim 1) or column (dim 0); places without an entry have no weight.
---@param dim? integer  (1)
---@return Sparse
function Sparse:softmax(dim)
  local p = check("Sparse:softmax", self)._pattern
  local s = segments("Sparse:softmax", p, dim or 1)
  return of(p, core.segment_softmax(self.values, { offsets = s.offsets, order = s.order }))
end

-- What a dense factor is for each entry.
local function of_each(who, p, x)
  local m = x.ndim == 2 and x.shape[1] or 1
  local n = x.ndim > 0 and x.shape[x.ndim] or 1
  if x.ndim > 2 or (m ~= 1 and m ~= p.rows) or (n ~= 1 and n ~= p.n) then
    fail("%s: other: expected a number or a tensor that broadcasts to [%d, %d], got %s", who, p.rows, p.n,
      shape_text(x))
  end
  local flat = x:reshape(-1)
  if m == 1 and n == 1 then return flat end
  if m == 1 then return flat:index_select(0, column_of_each(p)) end
  if n == 1 then return flat:index_select(0, row_of_each(p)) end
  return flat:index_select(0, row_of_each(p) * p.n + column_of_each(p))
end

local function with_factor(who, a, other, op)
  local p = check(who, a)._pattern
  if type(other) == "number" then return of(p, op(a.values, other)) end
  if sparse.is_sparse(other) then
    if other._pattern ~= p then
      fail("%s: other: expected a number, a tensor, or a sparse matrix made with the same entries (with_values)", who)
    end
    return of(p, op(a.values, other.values))
  end
  expect(who, "other", other, "a number or a tensor")
  return of(p, op(a.values, of_each(who, p, other)))
end

--- Every entry times a number, or an element of a dense matrix, row [columns] or column [rows, 1] that broadcasts, or
-- of a sparse one with the same entries.
---@param other number|Tensor|Sparse
---@return Sparse
function Sparse:mul(other) return with_factor("Sparse:mul", self, other, core.mul) end

--- The same, divided.
---@param other number|Tensor|Sparse
---@return Sparse
function Sparse:div(other) return with_factor("Sparse:div", self, other, core.div) end

--- Every entry with the other sign.
---@return Sparse
function Sparse:neg() return of(check("Sparse:neg", self)._pattern, -self.values) end

--- The sum with a sparse matrix, whose entries are joined where they meet, in the layout of the first; or with a dense
-- one, dense.
---@param other Sparse|Tensor
---@return Sparse|Tensor
function Sparse:add(other)
  local who = "Sparse:add"
  local p = check(who, self)._pattern
  if ty.is_tensor(other) then
    if other.ndim ~= 2 or other.shape[1] ~= p.rows or other.shape[2] ~= p.n then
      fail("%s: other: expected [%d, %d], got %s", who, p.rows, p.n, shape_text(other))
    end
    return self:to_dense() + other
  end
  local q = check(who, other, "other")._pattern
  if q == p then return of(p, self.values + other.values) end
  if q.rows ~= p.rows or q.n ~= p.n then
    fail("%s: other: expected a matrix [%d, %d], got [%d, %d]", who, p.rows, p.n, q.rows, q.n)
  end
  local a, b = self:to_coo(), other:to_coo()
  local both = of(new_coo(ty.concat({ a.indices, b.indices }, 1), p.rows, p.n), ty.concat({ a.values, b.values }, 0))
  both = both:coalesce()
  return p.layout == "csr" and both:to_csr() or both
end

Sparse.__add, Sparse.__div, Sparse.__unm = Sparse.add, Sparse.div, Sparse.neg
function Sparse.__sub(a, b)
  check("Sparse:sub", a)
  return a:add(sparse.is_sparse(b) and b:neg() or -(ty.is_tensor(b) and b or check("Sparse:sub", b, "other")))
end
function Sparse.__mul(a, b)
  if sparse.is_sparse(a) then return a:mul(b) end
  return b:mul(a)
end

function Sparse:__tostring()
  return ("a sparse matrix [%d, %d], %s of %d entries, %s %s"):format(self.size[1], self.size[2], self.layout,
    self:nnz(), self.values.dtype, tostring(self.values.device))
end

return sparse
