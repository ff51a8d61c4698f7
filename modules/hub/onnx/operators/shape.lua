--- Operators of ONNX that make tensors and rearrange them.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local ints, scalar, axis = values.ints, values.scalar, values.axis

local M = {}

-- ---- making ----

function M.Constant(_, a)
  if a.value then return a.value end
  if a.value_float then return ty.tensor(a.value_float, { dtype = "f32" }) end
  if a.value_int then return ty.tensor(a.value_int, { dtype = "i64" }) end
  if a.value_floats then return ty.tensor(a.value_floats, { dtype = "f32" }) end
  if a.value_ints then return ty.tensor(a.value_ints, { dtype = "i64" }) end
  error("its value is of a kind that is not read", 0)
end

function M.ConstantOfShape(x, a)
  local shape = x[1]:numel() == 0 and {} or ints(x[1])
  if not a.value then return ty.zeros(shape, { dtype = "f32" }) end
  return a.value:reshape(values.copies(1, #shape)):expand(shape):contiguous()
end

function M.Range(x)
  local start, limit, step = scalar(x[1]), scalar(x[2]), scalar(x[3])
  local count = math.max(0, math.ceil((limit - start) / step))
  local y = ty.arange(count, { dtype = x[1].dtype })
  return y * step + start
end

function M.EyeLike(x, a)
  local dtype = a.dtype and values.dtype(a.dtype) or x[1].dtype
  local rows, columns = x[1].shape[1], x[1].shape[2]
  local k = a.k or 0
  local i, j = ty.arange(rows):unsqueeze(1), ty.arange(columns):unsqueeze(0)
  return (i + k):eq(j):to { dtype = dtype, device = x[1].device }
end

local function random(fn, like)
  return function(x, a)
    local dtype = a.dtype and values.dtype(a.dtype) or like and x[1]:is_floating_point() and x[1].dtype or "f32"
    local shape = like and x[1].shape or a.shape
    local y = ty.empty(shape, { dtype = dtype, device = like and x[1].device or "cpu" })
    return fn(y, a)
  end
end
local function uniform(y, a) return y:uniform_(a.low or 0, a.high or 1) end
local function normal(y, a) return y:normal_(a.mean or 0, a.scale or 1) end
M.RandomUniform, M.RandomUniformLike = random(uniform), random(uniform, true)
M.RandomNormal, M.RandomNormalLike = random(normal), random(normal, true)

function M.Bernoulli(x, a) return x[1]:bernoulli():to(a.dtype and values.dtype(a.dtype) or x[1].dtype) end

-- ---- shapes ----

function M.Shape(x, a)
  local shape = x[1].shape
  local function bound(at) return math.max(0, math.min(#shape, at < 0 and at + #shape or at)) end
  return values.i64(table.move(shape, bound(a.start or 0) + 1, bound(a["end"] or #shape), 1, {}))
end

function M.Size(x) return ty.tensor(x[1]:numel(), { dtype = "i64" }) end

function M.Reshape(x, a)
  local shape = x[2]:numel() == 0 and {} or ints(x[2])
  if a.allowzero ~= 1 then
    for i, size in ipairs(shape) do
      if size == 0 then shape[i] = x[1].shape[i] or error("size 0 is of a dimension that the input lacks", 0) end
    end
  end
  return x[1]:reshape(shape)
end

function M.Flatten(x, a)
  local shape, dim = x[1].shape, a.axis or 1
  if dim < 0 then dim = dim + #shape end
  return x[1]:reshape(values.product(shape, 1, dim), values.product(shape, dim + 1))
end

function M.Transpose(x, a)
  local dims = a.perm
  if not dims then
    dims = {}
    for i = 1, x[1].ndim do dims[i] = x[1].ndim - i end
  end
  return x[1]:permute(dims)
end

function M.Squeeze(x, a, c)
  local axes = a.axes
  if c.opset >= 13 then axes = x[2] and ints(x[2]) end
  if not axes then
    return x[1]:squeeze()
  end
  if #axes == 0 then return x[1] end
  local shape = x[1].shape
  for _, dim in ipairs(axes) do
    if shape[axis(dim, #shape) + 1] ~= 1 then
      error(("axis %d has %d elements, 1 is left out"):format(dim, shape[axis(dim, #shape) + 1]), 0)
    end
  end
  return x[1]:squeeze(axes)
end

function M.Unsqueeze(x, a, c)
  local axes = c.opset >= 13 and ints(x[2]) or a.axes
  axes = values.axes(#axes > 0 and axes or error("axes: expected some", 0), x[1].ndim + #axes)
  local y = x[1]
  for _, dim in ipairs(axes) do y = y:unsqueeze(dim) end
  return y
end

function M.Expand(x)
  local want, have = x[2]:numel() == 0 and {} or ints(x[2]), x[1].shape
  local n = math.max(#want, #have)
  local shape = {}
  for i = 1, n do
    local at, from = i - n + #want, i - n + #have
    local w, h = at > 0 and want[at] or 1, from > 0 and have[from] or 1
    shape[i] = w == 1 and h or w
  end
  return x[1]:expand(shape)
end

function M.Tile(x)
  if x[1].ndim == 0 then return x[1] end
  return x[1]:tile(ints(x[2]))
end

function M.Concat(x, a)
  if x.n == 1 then return x[1] end
  return ty.concat({ table.unpack(x, 1, x.n) }, axis(a.axis, x[1].ndim))
end

-- Pieces of these sizes.
local function pieces(t, dim, sizes)
  local out, at = {}, 0
  for i, size in ipairs(sizes) do
    out[i] = t:narrow(dim, at, size)
    at = at + size
  end
  if at ~= t.shape[dim + 1] then
    error(("the pieces have %d positions together, dimension %d of the input has %d"):format(at, dim,
      t.shape[dim + 1]), 0)
  end
  return out
end

local function even_sizes(total, size)
  local sizes = {}
  while total > 0 do
    sizes[#sizes + 1] = math.min(size, total)
    total = total - size
  end
  return sizes
end

function M.Split(x, a, c)
  local dim = axis(a.axis or 0, x[1].ndim)
  local sizes = a.split
  if c.opset >= 13 then sizes = x[2] and ints(x[2]) end
  if not sizes then
    local n, total = a.num_outputs or c.outputs, x[1].shape[dim + 1]
    sizes = even_sizes(total, (total + n - 1) // n)
    while #sizes < n do sizes[#sizes + 1] = 0 end
  end
  return table.unpack(pieces(x[1], dim, sizes))
end

local function slice_dim(t, dim, start, stop, step)
  local n = t.shape[dim + 1]
  if step == 0 then error("steps: expected other numbers than 0", 0) end
  if step > 0 then
    start = math.max(0, math.min(n, start < 0 and start + n or start))
    stop = math.max(start, math.min(n, stop < 0 and stop + n or stop))
    if start == 0 and stop == n and step == 1 then return t end
    return t:slice(dim, start, stop, step)
  end
  if start < 0 then start = math.max(-1, start + n) end
  start = math.min(n - 1, start)
  if stop < 0 then stop = math.max(-1, stop + n) end
  if n == 0 or stop >= start then return t:slice(dim, 0, 0) end
  local low = start - (start - stop - 1) // -step * -step -- the last position that is taken
  local up = t:slice(dim, low, start + 1, -step)
  return up:flip(dim)
end

function M.Slice(x, a, c)
  local starts, ends, axes, steps = a.starts, a.ends, a.axes, nil
  if c.opset >= 10 then
    starts, ends = ints(x[2]), ints(x[3])
    axes, steps = x[4] and ints(x[4]), x[5] and ints(x[5])
  end
  local y = x[1]
  for i, start in ipairs(starts) do
    y = slice_dim(y, axis(axes and axes[i] or i - 1, y.ndim), start, ends[i], steps and steps[i] or 1)
  end
  return y
end

-- ---- padding ----

local modes = { constant = "constant", reflect = "reflect", edge = "replicate", wrap = "circular" }

-- One dimension by positions, where padding reaches beyond what Tycho's pad takes.
local function pad_by_index(t, dim, before, after, mode)
  local n, index = t.shape[dim + 1], {}
  for i = -before, n + after - 1 do
    local at
    if mode == "edge" then
      at = math.max(0, math.min(n - 1, i))
    elseif mode == "wrap" then
      at = i % n
    else
      local period = math.max(1, 2 * (n - 1))
      at = i % period
      if at > n - 1 then at = period - at end
    end
    index[#index + 1] = at
  end
  return t:index_select(dim, values.i64(index):to { device = t.device })
end

function M.Pad(x, a, c)
  local pads, value = a.pads, a.value or 0
  local t, mode = x[1], a.mode or "constant"
  local axes
  if c.opset >= 11 then
    pads = ints(x[2])
    value = x[3] and x[3]:numel() > 0 and scalar(x[3]) or t.dtype == "bool" and false or 0
    axes = x[4] and ints(x[4])
  end
  if not modes[mode] then error(("mode %s is not known"):format(mode), 0) end
  local count = #pads // 2
  local before, after = values.copies(0, t.ndim), values.copies(0, t.ndim)
  for i = 1, count do
    local dim = axis(axes and axes[i] or i - 1, t.ndim) + 1
    before[dim], after[dim] = pads[i], pads[count + i]
  end
  for dim = 1, t.ndim do -- what is cut off
    local cut, cut_after = math.max(0, -before[dim]), math.max(0, -after[dim])
    if cut > 0 or cut_after > 0 then
      t = t:slice(dim - 1, cut, t.shape[dim] - cut_after)
      before[dim], after[dim] = math.max(0, before[dim]), math.max(0, after[dim])
    end
  end
  if mode ~= "constant" then
    for dim = 1, t.ndim do
      if before[dim] > 0 or after[dim] > 0 then t = pad_by_index(t, dim - 1, before[dim], after[dim], mode) end
    end
    return t
  end
  local list = {}
  for dim = t.ndim, 1, -1 do
    list[#list + 1], list[#list + 2] = before[dim], after[dim]
  end
  if t.dtype == "bool" then return t:to("u8"):pad(list, "constant", value and 1 or 0):to "bool" end
  if not t:is_floating_point() then value = math.tointeger(value) or 0 end
  return t:pad(list, "constant", value)
end

function M.CenterCropPad(x, a)
  local t, sizes = x[1], ints(x[2])
  local axes = values.axes(nil, t.ndim)
  if a.axes then
    axes = {}
    for i, dim in ipairs(a.axes) do axes[i] = axis(dim, t.ndim) end
  end
  for i, dim in ipairs(axes) do
    local have, want = t.shape[dim + 1], sizes[i]
    if have > want then
      t = t:narrow(dim, (have - want) // 2, want)
    elseif have < want then
      local list = values.copies(0, 2 * t.ndim)
      local at = 2 * (t.ndim - 1 - dim)
      list[at + 1] = (want - have) // 2
      list[at + 2] = want - have - (want - have) // 2
      t = t:pad(list)
    end
  end
  return t
end

-- ---- triangles, blocks, orders ----

function M.Trilu(x, a)
  local k = x[2] and scalar(x[2]) or 0
  if x[1]:numel() == 0 then return x[1] end
  if x[1].dtype == "bool" then return (a.upper == 0 and ty.tril or ty.triu)(x[1]:to "u8", k):to "bool" end
  return (a.upper == 0 and ty.tril or ty.triu)(x[1], k)
end

function M.DepthToSpace(x, a)
  local b, n, c, h, w = a.blocksize, table.unpack(x[1].shape)
  if a.mode == "CRD" then
    return x[1]:reshape(n, c // (b * b), b, b, h, w):permute(0, 1, 4, 2, 5, 3):reshape(n, c // (b * b), h * b, w * b)
  end
  return x[1]:reshape(n, b, b, c // (b * b), h, w):permute(0, 3, 4, 1, 5, 2):reshape(n, c // (b * b), h * b, w * b)
end

function M.SpaceToDepth(x, a)
  local b, n, c, h, w = a.blocksize, table.unpack(x[1].shape)
  return x[1]:reshape(n, c, h // b, b, w // b, b):permute(0, 3, 5, 1, 2, 4):reshape(n, c * b * b, h // b, w // b)
end

-- Sequences that are turned around one by one up to their lengths.
function M.ReverseSequence(x, a)
  local t, lengths = x[1], ints(x[2])
  local batch, time = a.batch_axis or 1, a.time_axis or 0
  local steps = t.shape[time + 1]
  local rows = {}
  for i, length in ipairs(lengths) do
    rows[i] = {}
    for j = 1, steps do rows[i][j] = j <= length and length - j or j - 1 end
  end
  local index = values.i64(rows):to { device = t.device }
  if time < batch then index = index:transpose(0, 1) end
  local shape = values.copies(1, t.ndim)
  shape[batch + 1], shape[time + 1] = t.shape[batch + 1], steps
  return t:gather(time, index:reshape(shape):expand(t.shape):contiguous())
end

-- ---- lists of tensors ----

-- An optional value is the value itself, or nothing.
function M.Optional(x) return x[1] end

function M.OptionalHasElement(x) return ty.tensor(x[1] ~= nil) end

function M.OptionalGetElement(x)
  return x[1] or error("there is no element in the optional value", 0)
end

function M.SequenceEmpty() return { sequence = true } end

function M.SequenceConstruct(x)
  local list = { sequence = true }
  for i = 1, x.n do list[i] = x[i] end
  return list
end

local function place(list, index, extra)
  local at = scalar(index)
  if at < 0 then at = at + #list + extra end
  if at < 0 or at >= #list + extra then error(("position %d is not in a sequence of %d"):format(at, #list), 0) end
  return at + 1
end

function M.SequenceAt(x) return x[1][place(x[1], x[2], 0)] end

function M.SequenceLength(x) return ty.tensor(#x[1], { dtype = "i64" }) end

local function copied(list) return table.move(list, 1, #list, 1, { sequence = true }) end

function M.SequenceInsert(x)
  local list = copied(x[1])
  table.insert(list, x[3] and place(list, x[3], 1) or #list + 1, x[2])
  return list
end

function M.SequenceErase(x)
  local list = copied(x[1])
  table.remove(list, x[2] and place(list, x[2], 0) or #list)
  return list
end

function M.SplitToSequence(x, a)
  local dim = axis(a.axis or 0, x[1].ndim)
  local sizes
  local total = x[1].shape[dim + 1]
  if not x[2] then
    sizes = values.copies(1, total)
  elseif x[2].ndim == 0 then
    sizes = even_sizes(total, scalar(x[2]))
  else
    sizes = ints(x[2])
  end
  local list = pieces(x[1], dim, sizes)
  if not x[2] and a.keepdims == 0 then
    for i, t in ipairs(list) do list[i] = t:squeeze(dim) end
  end
  list.sequence = true
  return list
end

function M.ConcatFromSequence(x, a)
  if a.new_axis == 1 then return ty.stack(copied(x[1]), a.axis) end
  return ty.concat(copied(x[1]), axis(a.axis, x[1][1].ndim))
end

return M
