--- Datasets. A dataset has `#dataset` and dataset:get(i) for positions 0 to #dataset - 1, which returns one item: a
-- tensor, a number, or a table of those by field. dataset:batch(positions) may give many at once (positions: i64
-- tensor).
local ty = require "tycho"

local M = {}

local Dataset = {}
Dataset.__index = Dataset

local function check_position(self, i)
  local n = #self
  if not math.tointeger(i) or i < 0 or i >= n then
    error(("dataset: position %s is out of range for %d items"):format(tostring(i), n), 3)
  end
end

local function define(parent)
  local class = {}
  class.__index = class
  class.__len = function(self) return self.size end
  return setmetatable(class, { __index = parent or Dataset })
end

--- A new class of datasets: give it get(self, i), and `size` as a field of its objects (or __len).
function M.class() return define() end

--- A dataset of `size` items made by get(i).
function M.from_function(size, get)
  local class = define()
  function class.get(_, i) return get(i) end
  return setmetatable({ size = size }, class)
end

--- Iterates position, item.
function Dataset:each()
  local i = -1
  return function()
    i = i + 1
    if i < #self then return i, self:get(i) end
  end
end

local TensorDataset = define()

--- Tensors of equal first size by field, { image = [n, ...], label = [n] }; an item has the same fields without that
-- size.
---@param fields table<string, Tensor>
function M.TensorDataset(fields)
  local size, first
  for name, tensor in pairs(fields) do
    if not ty.is_tensor(tensor) or tensor.ndim < 1 then
      error(("TensorDataset: field '%s' must be a tensor of at least one dimension"):format(tostring(name)), 2)
    end
    if size and tensor.shape[1] ~= size then
      error(("TensorDataset: '%s' has %d items, '%s' has %d")
        :format(tostring(first), size, tostring(name), tensor.shape[1]), 2)
    end
    size, first = tensor.shape[1], name
    ty.keep(tensor)
  end
  if not size then error("TensorDataset: no fields given", 2) end
  return setmetatable({ fields = fields, size = size }, TensorDataset)
end

function TensorDataset:get(i)
  check_position(self, i)
  local item = {}
  for name, tensor in pairs(self.fields) do item[name] = tensor:select(0, i) end
  return item
end

function TensorDataset:batch(positions)
  local result = {}
  for name, tensor in pairs(self.fields) do result[name] = tensor:index_select(0, positions) end
  return result
end

local Subset = define()

--- The items at `positions` (a list or an i64 tensor) of another dataset.
function M.subset(dataset, positions)
  if type(positions) == "table" then positions = ty.tensor(positions, { dtype = "i64" }) end
  ty.keep(positions)
  return setmetatable({ dataset = dataset, positions = positions, size = positions:numel() }, Subset)
end

function Subset:get(i)
  check_position(self, i)
  return self.dataset:get(self.positions:select(0, i):item())
end

function Subset:batch(positions)
  local inner = self.positions:index_select(0, positions)
  if self.dataset.batch then return self.dataset:batch(inner) end
  return nil
end

--- Draws with its own seed and leaves the default generator as it was.
local function with_seed(seed, fn)
  local before = ty.rng_state()
  ty.manual_seed(seed)
  local ok, result = pcall(fn)
  ty.rng_state(before)
  if not ok then error(result, 0) end
  return result
end
M.with_seed = with_seed

--- Cuts a dataset at random into parts of the given sizes or shares: split(ds, { 0.8, 0.2 }, { seed = 0 }).
---@return table ... one dataset per part
function M.split(dataset, parts, options)
  local n, sizes, used = #dataset, {}, 0
  for i, part in ipairs(parts) do
    sizes[i] = part <= 1 and math.type(part) == "float" and math.floor(part * n) or math.tointeger(part)
    if not sizes[i] or sizes[i] < 0 then error("split: parts are sizes or shares, got " .. tostring(part), 2) end
    used = used + sizes[i]
  end
  local whole = 0.0
  for _, part in ipairs(parts) do whole = whole + (math.type(part) == "float" and part or math.huge) end
  if math.abs(whole - 1) < 1e-9 then -- shares of everything: the rounding goes to the last part
    sizes[#sizes] = sizes[#sizes] + n - used
    used = n
  end
  if used > n then error(("split: the parts need %d items, the dataset has %d"):format(used, n), 2) end
  local order = with_seed(options and options.seed or 0, function() return ty.keep(ty.randperm(n)) end)
  local result, start = {}, 0
  for i, size in ipairs(sizes) do
    result[i] = M.subset(dataset, order:narrow(0, start, size):clone())
    start = start + size
  end
  return table.unpack(result)
end

local Mapped = define()

--- fn(item, i) on every item.
function M.map(dataset, fn)
  return setmetatable({ dataset = dataset, fn = fn, size = #dataset }, Mapped)
end

function Mapped:get(i)
  check_position(self, i)
  return self.fn(self.dataset:get(i), i)
end

local Joined = define()

--- Datasets one after the other.
function M.concat(list)
  local size, starts = 0, {}
  for i, dataset in ipairs(list) do
    starts[i] = size
    size = size + #dataset
  end
  return setmetatable({ list = list, starts = starts, size = size }, Joined)
end

function Joined:get(i)
  check_position(self, i)
  for k = #self.list, 1, -1 do
    if i >= self.starts[k] then return self.list[k]:get(i - self.starts[k]) end
  end
end

--- Makes one batch of a list of items: tensors are stacked, numbers and booleans become a tensor, tables go field by
-- field, strings stay a list.
function M.collate(items)
  local first = items[1]
  local kind = type(first)
  if ty.is_tensor(first) then
    return ty.stack(items, 0)
  elseif kind == "number" then
    return ty.tensor(items)
  elseif kind == "boolean" then
    return ty.tensor(items, { dtype = "bool" })
  elseif kind == "table" then
    local result = {}
    for field in pairs(first) do
      local column = {}
      for i, item in ipairs(items) do
        if item[field] == nil then error(("collate: item %d of the batch lacks the field '%s'"):format(i, field), 0) end
        column[i] = item[field]
      end
      result[field] = M.collate(column)
    end
    return result
  elseif kind == "string" then
    return items
  end
  error("collate: cannot batch a " .. kind, 0)
end

return M
