--- Which elements of a parameter a run of elements of a part are, as boxes, and where two such runs meet. A run is what
-- one rank has of a part, laid flat; a box of it lies in one piece in the run, and is a box of the whole parameter.
local M = {}

---@class UniversalBox
---@field at integer       where it begins in the run
---@field size integer[]   of the box that lies in one piece in the run
---@field first integer[]  where in that box this one begins, which is a part of it
---@field low integer[]    where it begins in the whole
---@field high integer[]   where it ends there

local function product(list, from)
  local n = 1
  for i = from, #list do n = n * list[i] end
  return n
end

-- The elements from a to b of a tensor of a shape as boxes: rows that are begun, whole ones, and rows that end early.
-- out gets { at, low, size }, of the tensor.
local function boxes_of(shape, a, b)
  local out, origin, rank = {}, a, #shape
  local function add(prefix, k, from, to, base)
    local low, size = {}, {}
    for d = 1, rank do
      if d < k then low[d], size[d] = prefix[d], 1
      elseif d == k then low[d], size[d] = from, to - from
      else low[d], size[d] = 0, shape[d] end
    end
    out[#out + 1] = { at = base - origin, low = low, size = size }
  end
  local function walk(prefix, k, from, to, base)
    if from >= to then return end
    local inner = product(shape, k + 1)
    if k >= rank then return add(prefix, k, from, to, base + from) end
    local first, last = from // inner, to // inner
    local function row(i, x, y)
      local more = table.move(prefix, 1, k - 1, 1, {})
      more[k] = i
      walk(more, k + 1, x, y, base + i * inner)
    end
    if first == last then return row(first, from % inner, to % inner) end
    if from % inner > 0 then
      row(first, from % inner, inner)
      first = first + 1
    end
    if last > first then add(prefix, k, first, last, base + first * inner) end
    if to % inner > 0 then row(last, 0, to % inner) end
  end
  if rank == 0 then
    if b > a then out[1] = { at = 0, low = {}, size = {} } end
  else
    walk({}, 1, a, b, 0)
  end
  return out
end

-- Cuts a box of a part where it is not in one piece in the whole; what is only filled up is left out.
local function place(part, box, out)
  local dim = part.kind == "sharded" and part.dim + 1 or nil
  local function add(from, to, shift) -- along the dimension, in the part
    local first, low, high = {}, {}, {}
    for d = 1, #box.size do
      first[d], low[d] = 0, box.low[d]
      high[d] = low[d] + box.size[d]
    end
    if dim then first[dim], low[dim], high[dim] = from - box.low[dim], from + shift, to + shift end
    out[#out + 1] = { at = box.at, size = box.size, first = first, low = low, high = high }
  end
  if not dim then return add() end
  local n, whole = part.own[dim], part.shape[dim]
  local from, to = box.low[dim], box.low[dim] + box.size[dim]
  if part.padded then
    local shift = part.index * n
    to = math.min(to, whole - shift)
    if to > from then add(from, to, shift) end
    return
  end
  local each = n // part.parts
  while from < to do
    local number = from // each
    local till = math.min(to, (number + 1) * each)
    add(from, till, number * (whole // part.parts) + part.index * each - number * each)
    from = till
  end
end

--- The boxes of `count` elements of a part from `begin` on.
---@param part UniversalPart
---@param begin integer
---@param count integer
---@return UniversalBox[]
function M.boxes(part, begin, count)
  local out = {}
  for _, box in ipairs(boxes_of(part.own, begin, begin + count)) do place(part, box, out) end
  return out
end

--- The elements of boxes.
---@param boxes UniversalBox[]
---@return integer
function M.count(boxes)
  local n = 0
  for _, box in ipairs(boxes) do
    local elements = 1
    for d = 1, #box.low do elements = elements * (box.high[d] - box.low[d]) end
    n = n + elements
  end
  return n
end

--- Where boxes of one run and of another meet.
---@param mine UniversalBox[]
---@param other UniversalBox[]
---@return { [1]: UniversalBox, [2]: UniversalBox, low: integer[], size: integer[], count: integer }[]
function M.meet(mine, other)
  local out = {}
  for _, a in ipairs(mine) do
    for _, b in ipairs(other) do
      local low, size, count = {}, {}, 1
      for d = 1, #a.low do
        low[d] = math.max(a.low[d], b.low[d])
        size[d] = math.max(0, math.min(a.high[d], b.high[d]) - low[d])
        count = count * size[d]
      end
      if count > 0 then out[#out + 1] = { a, b, low = low, size = size, count = count } end
    end
  end
  return out
end

--- What a run has of a box where two meet: a view of its flat tensor.
---@param flat Tensor
---@param box UniversalBox
---@param low integer[]
---@param size integer[]
---@return Tensor
function M.view(flat, box, low, size)
  local x = flat:narrow(0, box.at, product(box.size, 1)):view(box.size)
  for d = 1, #size do x = x:narrow(d - 1, box.first[d] + low[d] - box.low[d], size[d]) end
  return x
end

return M
