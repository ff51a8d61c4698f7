--- Operators of ONNX that read and write elements at positions which are data.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local axis, positions, product = values.axis, values.positions, values.product

local M = {}

local function joined(...)
  local all = {}
  for i = 1, select("#", ...) do
    for _, size in ipairs((select(i, ...))) do all[#all + 1] = size end
  end
  return all
end

local function part(list, i, j) return table.move(list, i, j, 1, {}) end

function M.Gather(x, a)
  local t, index = x[1], x[2]
  local shape = t.shape
  local dim = axis(a.axis or 0, t.ndim)
  if index.ndim == 0 and index.device == "cpu" then
    return t:select(dim, index:item())
  end
  index = positions(index, shape[dim + 1])
  local y = t:index_select(dim, index:reshape(-1))
  return y:reshape(joined(part(shape, 1, dim), index.shape, part(shape, dim + 2, #shape)))
end

function M.GatherElements(x, a)
  local dim = axis(a.axis or 0, x[1].ndim)
  return x[1]:gather(dim, positions(x[2], x[1].shape[dim + 1]))
end

-- Rows of positions [..., q] in dimensions of these sizes as positions in all of them together, [rows].
local function linear(index, sizes)
  local rows = index:reshape(-1, #sizes)
  local flat
  for i, size in ipairs(sizes) do
    local column = positions(rows:select(1, i - 1), size)
    flat = flat and flat * size + column or column
  end
  return flat
end

function M.GatherND(x, a)
  local t, index, b = x[1], x[2], a.batch_dims or 0
  local shape, ishape = t.shape, index.shape
  local q = ishape[#ishape]
  local batches = product(shape, 1, b)
  local inner = part(shape, b + 1, b + q)
  local flat = linear(index, inner):reshape(batches, -1)
  if batches > 1 then
    local offset = ty.arange(batches, { device = t.device }):unsqueeze(1) * product(inner)
    flat = flat + offset
  end
  local rest = part(shape, b + q + 1, #shape)
  local y = t:reshape(batches * product(inner), product(rest)):index_select(0, flat:reshape(-1))
  return y:reshape(joined(part(ishape, 1, #ishape - 1), rest))
end

local reductions = { add = "sum", mul = "prod", max = "amax", min = "amin" }

function M.ScatterElements(x, a)
  local dim = axis(a.axis or 0, x[1].ndim)
  local index = positions(x[2], x[1].shape[dim + 1])
  local how = a.reduction or "none"
  if how == "none" then return x[1]:scatter(dim, index, x[3]) end
  return x[1]:scatter_reduce(dim, index, x[3], reductions[how])
end
M.Scatter = M.ScatterElements

function M.ScatterND(x, a)
  local t, index, updates = x[1], x[2], x[3]
  local shape = t.shape
  local q = index.shape[index.ndim]
  local sizes, rest = part(shape, 1, q), part(shape, q + 1, #shape)
  local flat = linear(index, sizes)
  local width = product(rest)
  local rows, new = t:reshape(product(sizes), width), updates:reshape(flat:numel(), width)
  local how = a.reduction or "none"
  local y
  if how == "none" then
    y = rows:index_copy(0, flat, new)
  elseif how == "add" then
    y = rows:index_add(0, flat, new)
  else
    y = rows:scatter_reduce(0, flat:unsqueeze(1):expand(flat:numel(), width):contiguous(), new, reductions[how])
  end
  return y:reshape(shape)
end

function M.Compress(x, a)
  local t = x[1]
  local dim = a.axis and axis(a.axis, t.ndim) or 0
  if not a.axis then t = t:reshape(-1) end
  local where = x[2]:nonzero():reshape(-1)
  return t:index_select(dim, where)
end

function M.OneHot(x, a)
  local index, depth, pair = x[1], values.scalar(x[2]) // 1 | 0, x[3]
  local dim = axis(a.axis or -1, index.ndim + 1)
  local count = ty.arange(depth, { device = index.device })
  local shape = values.copies(1, index.ndim + 1)
  shape[dim + 1] = depth
  local at = positions(index:to "i64", depth):unsqueeze(dim)
  return ty.where(at:eq(count:reshape(shape)), pair:select(0, 1), pair:select(0, 0))
end

-- ---- boxes ----

local function overlap(p, q)
  local height = math.min(p[3], q[3]) - math.max(p[1], q[1])
  local width = math.min(p[4], q[4]) - math.max(p[2], q[2])
  if height <= 0 or width <= 0 then return 0 end
  local both = height * width
  return both / ((p[3] - p[1]) * (p[4] - p[2]) + (q[3] - q[1]) * (q[4] - q[2]) - both)
end

-- Corners in rising order, from corners in any or from centre and size.
local function corners(box, centred)
  local a, b, c, d = table.unpack(box)
  if centred then return { b - d / 2, a - c / 2, b + d / 2, a + c / 2 } end
  return { math.min(a, c), math.min(b, d), math.max(a, c), math.max(b, d) }
end

function M.NonMaxSuppression(x, a)
  local boxes, scores = x[1]:tolist(), x[2]:tolist()
  local most = x[3] and values.scalar(x[3]) or 0
  local limit, floor = x[4] and values.scalar(x[4]) or 0, x[5] and values.scalar(x[5])
  local found = {}
  for b, classes in ipairs(scores) do
    local box = {}
    for i, one in ipairs(boxes[b]) do box[i] = corners(one, a.center_point_box == 1) end
    for c, score in ipairs(classes) do
      local order, kept = {}, {}
      for i, s in ipairs(score) do
        if not floor or s > floor then order[#order + 1] = i end
      end
      table.sort(order, function(i, j) return score[i] > score[j] or score[i] == score[j] and i < j end)
      for _, i in ipairs(order) do
        if #kept >= most then break end
        local free = true
        for _, j in ipairs(kept) do free = free and overlap(box[i], box[j]) <= limit end
        if free then
          kept[#kept + 1] = i
          found[#found + 1] = { b - 1, c - 1, i - 1 }
        end
      end
    end
  end
  return #found > 0 and values.i64(found) or ty.zeros({ 0, 3 }, { dtype = "i64" })
end

return M
