--- The ops of tensors of all ranks: for each the forms that its arguments may have along an axis of ranks and the form
-- that its result has then, the shape of the result, and how a rank computes its part. Yuan et al. 2021, "OneFlow".
--
-- What is linear in an argument takes it partial and gives what is partial.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function refuse(text, ...) error(text:format(...), 0) end

local function shape_text(x) return "[" .. table.concat(x.shape, ", ") .. "]" end

local function is_global(x) return type(x) == "table" and rawget(x, "sbp") ~= nil end

local function need(name, x)
  if not is_global(x) then refuse("%s: expected a tensor of all ranks, got %s", name, arguments.describe(x)) end
end

local function split(d) return ("S(%d)"):format(d) end

local function copy(list) return table.move(list, 1, #list, 1, {}) end

local function dim_of(x, dim)
  if math.type(dim) ~= "integer" or dim < -#x.shape or dim >= #x.shape then
    refuse("dim: expected one of the %d dimensions, got %s", #x.shape, arguments.describe(dim))
  end
  return dim < 0 and dim + #x.shape or dim
end

-- ---- one argument ----

-- fn of each part alone; forms: which dimensions may be split (all), and whether partial values may stay so.
local function each(x, fn, except, linear)
  local list = { { "B", "B" } }
  for d = 0, #x.shape - 1 do
    if d ~= except then list[#list + 1] = { split(d), split(d) } end
  end
  if linear then list[#list + 1] = { "P", "P" } end
  return { candidates = list, shape = copy(x.shape), compute = function(parts) return fn(parts[1]) end }
end

--- max(x, 0), of each element.
function M.relu(x) return each(x, function(t) return t:relu() end) end
--- x times its logistic function, of each element.
function M.silu(x) return each(x, function(t) return t:silu() end) end
--- x times the share of a normal distribution below it, of each element.
function M.gelu(x) return each(x, function(t) return t:gelu() end) end

--- The tensor times a number.
function M.scale(x, factor)
  if type(factor) ~= "number" then refuse("factor: expected a number, got %s", arguments.describe(factor)) end
  return each(x, function(t) return t * factor end, nil, true)
end

--- Softmax along a dimension (the last).
function M.softmax(x, dim)
  local d = dim_of(x, dim or -1)
  return each(x, function(t) return t:softmax(d) end, d)
end

--- Two dimensions change places.
function M.transpose(x, a, b)
  a, b = dim_of(x, a), dim_of(x, b)
  local shape, list = copy(x.shape), { { "B", "B" }, { "P", "P" } }
  shape[a + 1], shape[b + 1] = shape[b + 1], shape[a + 1]
  for d = 0, #shape - 1 do
    list[#list + 1] = { split(d), split(d == a and b or d == b and a or d) }
  end
  return { candidates = list, shape = shape, compute = function(parts) return parts[1]:transpose(a, b) end }
end

--- A dimension becomes two, the first of so many; a part of a split dimension has whole rows of the second.
function M.unflatten(x, dim, count)
  local d = dim_of(x, dim)
  local n = x.shape[d + 1]
  if math.type(count) ~= "integer" or count < 1 or n % count ~= 0 then
    refuse("count: expected a divisor of %d, got %s", n, arguments.describe(count))
  end
  local shape, list = copy(x.shape), { { "B", "B" }, { "P", "P" } }
  shape[d + 1] = count
  table.insert(shape, d + 2, n // count)
  for k = 0, #x.shape - 1 do list[#list + 1] = { split(k), split(k <= d and k or k + 1) } end
  return { candidates = list, shape = shape, compute = function(parts)
    return parts[1]:unflatten(d, { -1, n // count })
  end }
end

--- A dimension and the next become one.
function M.flatten(x, dim)
  local d = dim_of(x, dim)
  if d + 1 >= #x.shape then refuse("dim: expected one that is not the last of %s, got %d", shape_text(x), dim) end
  local shape, list = copy(x.shape), { { "B", "B" }, { "P", "P" } }
  shape[d + 1] = shape[d + 1] * table.remove(shape, d + 2)
  for k = 0, #x.shape - 1 do
    if k ~= d + 1 then list[#list + 1] = { split(k), split(k <= d and k or k - 1) } end
  end
  return { candidates = list, shape = shape, compute = function(parts) return parts[1]:flatten(d, d + 1) end }
end

--- The sum over a dimension, which goes.
function M.sum(x, dim)
  local d = dim_of(x, dim)
  local shape, list = copy(x.shape), { { "B", "B" }, { "P", "P" }, { split(d), "P" } }
  table.remove(shape, d + 1)
  for k = 0, #x.shape - 1 do
    if k ~= d then list[#list + 1] = { split(k), split(k < d and k or k - 1) } end
  end
  return { candidates = list, shape = shape, compute = function(parts) return parts[1]:sum(d) end }
end

--- Root mean square norm of the last dimension. weight: [n].
function M.rms_norm(x, weight, eps)
  need("weight", weight)
  local n = x.shape[#x.shape]
  if #weight.shape ~= 1 or weight.shape[1] ~= n then
    refuse("weight: expected [%d], got %s", n, shape_text(weight))
  end
  local list = { { "B", "B", "B" } }
  for d = 0, #x.shape - 2 do list[#list + 1] = { split(d), "B", split(d) } end
  return { candidates = list, shape = copy(x.shape), compute = function(parts)
    return parts[1]:rms_norm({ n }, parts[2], eps or 1e-6)
  end }
end

-- ---- two and more ----

-- Of each pair of elements; shapes are the same. linear: a sum of partial values is partial.
local function pairwise(x, y, fn, candidates)
  need("y", y)
  if table.concat(x.shape, ",") ~= table.concat(y.shape, ",") then
    refuse("y: expected %s, got %s", shape_text(x), shape_text(y))
  end
  local list = { { "B", "B", "B" } }
  for d = 0, #x.shape - 1 do list[#list + 1] = { split(d), split(d), split(d) } end
  for _, candidate in ipairs(candidates) do list[#list + 1] = candidate end
  return { candidates = list, shape = copy(x.shape), compute = function(parts) return fn(parts[1], parts[2]) end }
end

--- Sums of pairs of elements, of tensors of one shape.
function M.add(x, y) return pairwise(x, y, function(a, b) return a + b end, { { "P", "P", "P" } }) end
--- Products of pairs of elements, of tensors of one shape.
function M.mul(x, y)
  return pairwise(x, y, function(a, b) return a * b end, { { "P", "B", "P" }, { "B", "P", "P" } })
end

--- x [..., k] times the transpose of weight [n, k].
function M.linear(x, weight)
  need("weight", weight)
  local last = #x.shape - 1
  if last < 0 or #weight.shape ~= 2 or weight.shape[2] ~= x.shape[last + 1] then
    refuse("weight: expected [n, k] for x %s, got %s", shape_text(x), shape_text(weight))
  end
  local shape = copy(x.shape)
  shape[last + 1] = weight.shape[1]
  local list = { { "B", "B", "B" }, { "B", "S(0)", split(last) }, { split(last), "S(1)", "P" }, { "P", "B", "P" },
    { "B", "P", "P" } }
  for d = 0, last - 1 do list[#list + 1] = { split(d), "B", split(d) } end
  return { candidates = list, shape = shape, compute = function(parts) return ty.linear(parts[1], parts[2]) end }
end

--- Products of matrices, a [..., m, k] and b [..., k, n] with the same dimensions before.
function M.matmul(a, b)
  need("b", b)
  local nd = #a.shape
  local same = nd >= 2 and #b.shape == nd and a.shape[nd] == b.shape[nd - 1]
  for d = 1, nd - 2 do same = same and a.shape[d] == b.shape[d] end
  if not same then refuse("b: expected [..., k, n] for a %s, got %s", shape_text(a), shape_text(b)) end
  local shape = copy(a.shape)
  shape[nd] = b.shape[nd]
  local list = { { "B", "B", "B" }, { split(nd - 2), "B", split(nd - 2) }, { "B", split(nd - 1), split(nd - 1) },
    { split(nd - 1), split(nd - 2), "P" }, { "P", "B", "P" }, { "B", "P", "P" } }
  for d = 0, nd - 3 do list[#list + 1] = { split(d), split(d), split(d) } end
  return { candidates = list, shape = shape, compute = function(parts) return parts[1]:matmul(parts[2]) end }
end

--- Causal attention of q, k, v [batch, heads, t, d].
function M.attention(q, k, v)
  need("k", k)
  need("v", v)
  if #q.shape ~= 4 or table.concat(q.shape, ",") ~= table.concat(k.shape, ",")
    or table.concat(q.shape, ",") ~= table.concat(v.shape, ",") then
    refuse("q: expected q, k and v [batch, heads, t, d] of one shape, got %s, %s and %s", shape_text(q), shape_text(k),
      shape_text(v))
  end
  local list = { { "B", "B", "B", "B" }, { "S(0)", "S(0)", "S(0)", "S(0)" }, { "S(1)", "S(1)", "S(1)", "S(1)" },
    { "B", "B", "P", "P" } }
  return { candidates = list, shape = copy(q.shape), compute = function(parts)
    return ty.scaled_dot_product_attention(parts[1]:contiguous(), parts[2]:contiguous(), parts[3]:contiguous(), nil,
      true)
  end }
end

-- The rows of a table that a rank has, where the vocabulary is split: the others count as zeros.
local function own_rows(ids, weight, group)
  local n = weight.shape[1]
  local at = ids - group.rank * n
  local elsewhere = at:lt(0):logical_or(at:ge(n))
  return ty.embedding(weight, at:masked_fill(elsewhere, 0)):masked_fill(elsewhere:unsqueeze(-1), 0)
end

--- Rows of weight [vocabulary, n] by ids [...].
function M.embedding(ids, weight)
  need("weight", weight)
  if #weight.shape ~= 2 then refuse("weight: expected [vocabulary, n], got %s", shape_text(weight)) end
  local shape = copy(ids.shape)
  shape[#shape + 1] = weight.shape[2]
  local list = { { "B", "B", "B" }, { "B", "S(0)", "P" }, { "B", "S(1)", split(#ids.shape) }, { "B", "P", "P" } }
  for d = 0, #ids.shape - 1 do list[#list + 1] = { split(d), "B", split(d) } end
  return { candidates = list, shape = shape, compute = function(parts, axes, forms)
    for axis, form in ipairs(forms[2]) do
      if form == "S(0)" then return own_rows(parts[1], parts[2], axes.groups[axis]) end
    end
    return ty.embedding(parts[2], parts[1])
  end }
end

--- The mean cross entropy of logits [n, classes] and targets [n]: one number.
function M.cross_entropy(logits, targets)
  need("targets", targets)
  if #logits.shape ~= 2 or #targets.shape ~= 1 or targets.shape[1] ~= logits.shape[1] then
    refuse("targets: expected [n] for logits [n, classes], got %s for %s", shape_text(targets), shape_text(logits))
  end
  return { candidates = { { "B", "B", "B" }, { "S(0)", "S(0)", "P" } }, shape = {}, compute = function(parts)
    local share = parts[2].shape[1] / targets.shape[1]
    local loss = ty.nn.cross_entropy(parts[1], parts[2])
    return share == 1 and loss or loss * share
  end }
end

return M
