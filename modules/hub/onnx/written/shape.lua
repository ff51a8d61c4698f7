--- Ops that rearrange, cut, join and look up, as nodes of ONNX.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local axis = values.axis

local M = {}

local function to_shape(b, name, shape) return b:emit("Reshape", { name, b:constant(shape) }) end

for _, op in ipairs { "reshape", "flatten", "squeeze", "unsqueeze", "view_shape" } do
  M[op] = function(b, a, out)
    for _, size in ipairs(out[1].shape) do
      if size == 0 then return nil, "without elements" end
    end
    return to_shape(b, b:name(a.x), out[1].shape)
  end
end

function M.permute(b, a)
  local dims = {}
  for i, dim in ipairs(a.dims) do dims[i] = axis(dim, a.x.ndim) end
  return b:emit("Transpose", { b:name(a.x) }, { perm = dims })
end

function M.transpose(b, a)
  local dims = {}
  for i = 1, a.x.ndim do dims[i] = i - 1 end
  local p, q = axis(a.dim0, a.x.ndim) + 1, axis(a.dim1, a.x.ndim) + 1
  dims[p], dims[q] = dims[q], dims[p]
  return b:emit("Transpose", { b:name(a.x) }, { perm = dims })
end

function M.expand(b, a, out) return b:emit("Expand", { b:name(a.x), b:constant(out[1].shape) }) end

function M.tile(b, a, out)
  local times, n = a.times, out[1].ndim
  local x = b:name(a.x)
  if a.x.ndim < n then
    local shape = values.copies(1, n - a.x.ndim)
    x = to_shape(b, x, table.move(a.x.shape, 1, a.x.ndim, #shape + 1, shape))
  end
  local all = values.copies(1, n)
  for i = 1, #times do all[n - #times + i] = times[i] end
  return b:emit("Tile", { x, b:constant(all) })
end

function M.slice(b, a)
  local dim = axis(a.dim, a.x.ndim)
  return b:emit("Slice", { b:name(a.x), b:constant { a.start }, b:constant { a.stop }, b:constant { dim },
    b:constant { a.step } })
end

function M.select(b, a)
  local dim = axis(a.dim, a.x.ndim)
  local at = a.index < 0 and a.index + a.x.shape[dim + 1] or a.index
  return b:emit("Gather", { b:name(a.x), b:constant(at) }, { axis = dim })
end

function M.flip(b, a)
  local dims, starts, ends, steps = {}, {}, {}, {}
  for i, dim in ipairs(a.dims) do
    dims[i], starts[i], ends[i], steps[i] = axis(dim, a.x.ndim), -1, math.mininteger, -1
  end
  return b:emit("Slice", { b:name(a.x), b:constant(starts), b:constant(ends), b:constant(dims), b:constant(steps) })
end

function M.concat(b, a, out)
  local names = {}
  for i, t in ipairs(a.xs) do names[i] = b:operand(t, out[1].dtype) end
  return b:emit("Concat", names, { axis = axis(a.dim, out[1].ndim) })
end

local modes = { constant = "constant", reflect = "reflect", replicate = "edge", circular = "wrap" }

function M.pad(b, a, out)
  local n = a.x.ndim
  local pads = values.copies(0, 2 * n)
  for i = 1, #a.pads, 2 do
    local dim = n - (i - 1) // 2
    pads[dim], pads[n + dim] = a.pads[i], a.pads[i + 1]
  end
  if a.x.dtype == "bool" then return nil, "of bool" end
  local inputs = { b:name(a.x), b:constant(pads) }
  if a.mode == "constant" then inputs[3] = b:constant(a.value or 0, out[1].dtype) end
  return b:emit("Pad", inputs, { mode = modes[a.mode] })
end

for op, upper in pairs { tril = 0, triu = 1 } do
  M[op] = function(b, a) return b:emit("Trilu", { b:name(a.x), b:constant(a.diagonal) }, { upper = upper }) end
end

function M.cumsum(b, a, out)
  return b:emit("CumSum", { b:operand(a.x, out[1].dtype), b:constant(axis(a.dim, a.x.ndim)) },
    { reverse = a.reverse and 1 or 0 })
end

-- Channels and pixels: [.., c, f, f, h, w] and [.., c, h, f, w, f].
local function shuffled(b, name, outer, c, f, h, w, apart)
  local n = #outer
  local wide, dims = table.move(outer, 1, n, 1, {}), {}
  table.move(apart and { c, h, f, w, f } or { c, f, f, h, w }, 1, 5, n + 1, wide)
  for i = 1, n + 1 do dims[i] = i - 1 end
  for i, at in ipairs(apart and { 2, 4, 1, 3 } or { 3, 1, 4, 2 }) do dims[n + 1 + i] = n + at end
  return b:emit("Transpose", { b:emit("Reshape", { name, b:constant(wide) }) }, { perm = dims })
end

local function outer_of(t) return table.move(t.shape, 1, t.ndim - 3, 1, {}) end

function M.pixel_shuffle(b, a, out)
  local shape, f = a.x.shape, a.factor
  local n = #shape
  local y = shuffled(b, b:name(a.x), outer_of(a.x), shape[n - 2] // (f * f), f, shape[n - 1], shape[n])
  return to_shape(b, y, out[1].shape)
end

function M.pixel_unshuffle(b, a, out)
  local shape, f = a.x.shape, a.factor
  local n = #shape
  local y = shuffled(b, b:name(a.x), outer_of(a.x), shape[n - 2], f, shape[n - 1] // f, shape[n] // f, true)
  return to_shape(b, y, out[1].shape)
end

-- ---- positions that are data ----

function M.embedding(b, a) return b:emit("Gather", { b:name(a.weight), b:operand(a.index, "i64") }, { axis = 0 }) end

function M.index_select(b, a)
  return b:emit("Gather", { b:name(a.x), b:operand(a.index, "i64") }, { axis = axis(a.dim, a.x.ndim) })
end

-- One tensor of positions for one dimension.
function M.index(b, a)
  if #a.indices ~= 1 or a.indices[1].dtype == "bool" then return nil, "by several tensors or masks" end
  local dim = a.dims and #a.dims > 0 and axis(a.dims[1], a.x.ndim) or 0
  return b:emit("Gather", { b:name(a.x), b:operand(a.indices[1], "i64") }, { axis = dim })
end

-- ONNX wants the sizes of both to be the same beside `dim` only as an upper bound.
function M.gather(b, a)
  return b:emit("GatherElements", { b:name(a.x), b:operand(a.index, "i64") }, { axis = axis(a.dim, a.x.ndim) })
end

function M.scatter(b, a, out)
  local source = a.src
  local updates = ty.is_tensor(source) and b:operand(source, out[1].dtype)
    or b:emit("Expand", { b:constant(source, out[1].dtype), b:constant(a.index.shape) })
  return b:emit("ScatterElements", { b:name(a.x), b:operand(a.index, "i64"), updates },
    { axis = axis(a.dim, a.x.ndim) })
end

function M.scatter_add(b, a)
  return b:emit("ScatterElements", { b:name(a.x), b:operand(a.index, "i64"), b:name(a.src) },
    { axis = axis(a.dim, a.x.ndim), reduction = "add" })
end

function M.one_hot(b, a, out)
  local classes = out[1].shape[out[1].ndim]
  return b:emit("OneHot", { b:operand(a.x, "i64"), b:constant(classes), b:constant { 0, 1 } }, { axis = -1 })
end

-- ONNX adds up single elements: the positions are repeated for all of them.
function M.index_add(b, a, out)
  local dim, shape = axis(a.dim, a.x.ndim), values.copies(1, a.x.ndim)
  shape[dim + 1] = -1
  local index = b:emit("Expand", { b:emit("Reshape", { b:operand(a.index, "i64"), b:constant(shape) }),
    b:constant(a.src.shape) })
  return b:emit("ScatterElements", { b:name(a.x), index, b:operand(a.src, out[1].dtype) },
    { axis = dim, reduction = "add" })
end

-- What depends on a shape alone.
for op, value in pairs { zeros_like = 0, ones_like = 1, full_like = false } do
  M[op] = function(b, a, out)
    local one = b:constant(value or a.value, out[1].dtype)
    return b:emit("Expand", { one, b:constant(out[1].shape) })
  end
end

function M.topk(b, a)
  return b:emit("TopK", { b:name(a.x), b:constant { a.k } }, { axis = axis(a.dim, a.x.ndim),
    largest = a.largest and 1 or 0 }, 2)
end

function M.argsort(b, a)
  local _, positions = M.sort(b, a)
  return positions
end

function M.sort(b, a)
  local dim = axis(a.dim, a.x.ndim)
  return b:emit("TopK", { b:name(a.x), b:constant { a.x.shape[dim + 1] } }, { axis = dim,
    largest = a.descending and 1 or 0 }, 2)
end

return M
