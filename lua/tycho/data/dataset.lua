--- Datasets. A dataset has `#dataset` and dataset:get(i) for positions 0 to #dataset - 1, which returns one item: a
-- tensor, a number, or a table of those by field. dataset:batch(positions) may give many at once (positions: i64
-- tensor).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local expect = arguments.expect

local M = {}

local Dataset = {}
Dataset.__index = Dataset

-- get(self, i), and a length: that of a list or by __len.
local function is_dataset(value)
  if type(value) ~= "table" or not pcall(function() return #value end) then return false end
  local ok, get = pcall(function() return value.get end)
  return ok and type(get) == "function"
end

--- `value`, or an error of the function `who` when it is no dataset.
function M.expect_dataset(who, what, value)
  if is_dataset(value) then return value end
  return arguments.fail("%s: %s: expected a dataset (get(i) and a length), got %s", who, what,
    arguments.describe(value))
end

local function check_position(self, i)
  local n = #self
  if not math.tointeger(i) or i < 0 or i >= n then
    arguments.fail("dataset: position %s is out of range for %d items", arguments.describe(i), n)
  end
end

-- What is printed of a dataset: its kind, how many items, and what describe() of its class adds.
local function text_of(self)
  local detail = self.describe and self:describe()
  return ("%s of %d items%s"):format(getmetatable(self).kind or "Dataset", #self, detail and " " .. detail or "")
end

local function define(kind)
  local class = { kind = kind, __tostring = text_of, __name = kind or "Dataset" }
  class.__index = class
  class.__len = function(self) return self.size end
  return setmetatable(class, { __index = Dataset })
end

--- A new class of datasets: give it get(self, i), and `size` as a field of its objects (or __len). describe(self), if
-- there is one, adds its text to what tostring() shows.
---@param kind? string how its objects are called in print(), "Dataset"
function M.class(kind)
  expect("data.class", "kind", kind, "a string or nil")
  return define(kind)
end

--- A dataset of `size` items made by get(i).
---@param size integer
---@param get fun(i: integer): any
function M.from_function(size, get)
  expect("data.from_function", "size", size, "an integer >= 0")
  expect("data.from_function", "get", get, "a function")
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

local TensorDataset = define "TensorDataset"

--- Tensors of equal first size by field, { image = [n, ...], label = [n] }; an item has the same fields without that
-- size.
---@param fields table<string, Tensor>
function M.TensorDataset(fields)
  expect("TensorDataset", "fields", fields, "a table")
  local size, first
  for name, tensor in pairs(fields) do
    expect("TensorDataset", "a field's name", name, "a string")
    if not ty.is_tensor(tensor) or tensor.ndim < 1 then
      arguments.fail("TensorDataset: field '%s': expected a tensor of at least one dimension, got %s", name,
        arguments.describe(tensor))
    end
    if size and tensor.shape[1] ~= size then
      arguments.fail("TensorDataset: '%s' has %d items, '%s' has %d", first, size, name, tensor.shape[1])
    end
    size, first = tensor.shape[1], name
    ty.keep(tensor)
  end
  if not size then arguments.fail "TensorDataset: fields: expected at least one, got an empty table" end
  return setmetatable({ fields = fields, size = size }, TensorDataset)
end

-- Fields with the shape of one item, by name.
function TensorDataset:describe()
  local parts = {}
  for name, tensor in pairs(self.fields) do
    local shape = table.move(tensor.shape, 2, tensor.ndim, 1, {})
    parts[#parts + 1] = ("%s %s [%s]"):format(name, tensor.dtype, table.concat(shape, ", "))
  end
  table.sort(parts)
  return "{ " .. table.concat(parts, ", ") .. " }"
end

function TensorDataset:get(i)
  check_position(self, i)
  local item = {}
  for name, tensor in pairs(self.fields) do item[name] = tensor:select(0, i) end
  return item
end

-- Positions of a batch as an i64 tensor: a user may write them as a list.
local function positions_of(positions)
  expect("batch", "positions", positions, "a list of integers or a tensor")
  return type(positions) == "table" and ty.tensor(positions, { dtype = "i64" }) or positions
end

--- The items at `positions`, with the fields of an item: tensors with one size more in front.
---@param positions integer[]|Tensor
---@return table<string, Tensor>
function TensorDataset:batch(positions)
  positions = positions_of(positions)
  local result = {}
  for name, tensor in pairs(self.fields) do -- each on the device where its tensor lies
    result[name] = tensor:index_select(0, positions:to { device = tensor.device })
  end
  return result
end

local Subset = define "Subset"

--- The items at `positions` (a list or an i64 tensor) of another dataset.
---@param positions integer[]|Tensor
function M.subset(dataset, positions)
  M.expect_dataset("data.subset", "dataset", dataset)
  expect("data.subset", "positions", positions, "a list of integers or a tensor")
  if type(positions) == "table" then positions = ty.tensor(positions, { dtype = "i64" }) end
  if positions.dtype ~= "i64" or positions.ndim ~= 1 then
    arguments.fail("data.subset: positions: expected i64 of one dimension, got %s [%s]", positions.dtype,
      table.concat(positions.shape, ", "))
  end
  local n = #dataset
  if positions:numel() > 0 and (positions:min():item() < 0 or positions:max():item() >= n) then
    arguments.fail("data.subset: positions: expected 0 to %d, got %d to %d", n - 1, positions:min():item(),
      positions:max():item())
  end
  ty.keep(positions)
  return setmetatable({ dataset = dataset, positions = positions, size = positions:numel() }, Subset)
end

function Subset:describe() return "from " .. tostring(self.dataset) end

function Subset:get(i)
  check_position(self, i)
  return self.dataset:get(self.positions:select(0, i):item())
end

function Subset:batch(positions)
  local inner = self.positions:index_select(0, positions_of(positions))
  if self.dataset.batch then return self.dataset:batch(inner) end
  return nil
end

--- Draws with its own seed and leaves the default generator as it was.
local function with_seed(seed, fn)
  expect("data.with_seed", "seed", seed, "an integer")
  expect("data.with_seed", "fn", fn, "a function")
  local before = ty.rng_state()
  ty.manual_seed(seed)
  local ok, result = pcall(fn)
  ty.rng_state(before)
  if not ok then error(result, 0) end
  return result
end
M.with_seed = with_seed

--- Cuts a dataset at random into parts of the given sizes (integers) or shares (floats from 0 to 1):
-- split(ds, { 0.8, 0.2 }, { seed = 0 }). Shares of everything leave the rounding to the last part.
---@param parts number[]
---@param options? {seed: integer}
---@return table ... one dataset per part
function M.split(dataset, parts, options)
  M.expect_dataset("data.split", "dataset", dataset)
  expect("data.split", "parts", parts, "a list of numbers >= 0")
  local o = arguments.read("data.split", options, { seed = 0 }, { seed = "an integer" })
  if #parts == 0 then arguments.fail "data.split: parts: expected at least one, got an empty table" end
  local n, sizes, used, whole = #dataset, {}, 0, 0.0
  for i, part in ipairs(parts) do
    local share = math.type(part) == "float" and part <= 1
    sizes[i] = share and math.floor(part * n) or math.tointeger(part)
    if not sizes[i] then
      arguments.fail("data.split: parts: expected sizes or shares up to 1.0, got %s as element %d", tostring(part), i)
    end
    used = used + sizes[i]
    whole = whole + (share and part or math.huge)
  end
  if math.abs(whole - 1) < 1e-9 then -- the rounding goes to the last part
    sizes[#sizes] = sizes[#sizes] + n - used
    used = n
  end
  if used > n then arguments.fail("data.split: the parts need %d items, the dataset has %d", used, n) end
  local order = with_seed(o.seed, function() return ty.keep(ty.randperm(n)) end)
  local result, start = {}, 0
  for i, size in ipairs(sizes) do
    result[i] = M.subset(dataset, order:narrow(0, start, size):clone())
    start = start + size
  end
  return table.unpack(result)
end

--- Deals a list like cards into so many hands: item 1 goes to hand 1, item 2 to hand 2 ..., by turns. What is held out
-- of a text this way stays so when more of it is read.
---@param list any[]
---@param hands integer
---@param aside? integer[]  hands that are left out of `rest`
---@return any[][] dealt
---@return any[] rest       the items of all other hands, in their order
function M.deal(list, hands, aside)
  expect("data.deal", "list", list, "a list")
  expect("data.deal", "hands", hands, "an integer in [1, 1000000]")
  expect("data.deal", "aside", aside, "a list of integers or nil")
  local dealt, rest, out = {}, {}, {}
  for k = 1, hands do dealt[k] = {} end
  for _, k in ipairs(aside or {}) do out[k] = true end
  for i, item in ipairs(list) do
    local hand = (i - 1) % hands + 1
    table.insert(dealt[hand], item)
    if not out[hand] then rest[#rest + 1] = item end
  end
  return dealt, rest
end

local Mapped = define "Mapped"

--- fn(item, i) on every item.
---@param fn fun(item: any, i: integer): any
function M.map(dataset, fn)
  M.expect_dataset("data.map", "dataset", dataset)
  expect("data.map", "fn", fn, "a function")
  return setmetatable({ dataset = dataset, fn = fn, size = #dataset }, Mapped)
end

function Mapped:describe() return "from " .. tostring(self.dataset) end

function Mapped:get(i)
  check_position(self, i)
  return self.fn(self.dataset:get(i), i)
end

local Transformed = define "Transformed"

--- The items and batches of a dataset through transforms, one after the other: functions of a batch, such as those of
-- data.transforms. A DataLoader runs them in its worker threads, on whole batches.
---@param dataset table
---@param ... fun(batch: table): table
function M.transform(dataset, ...)
  M.expect_dataset("data.transform", "dataset", dataset)
  local list = { ... }
  for i, fn in ipairs(list) do expect("data.transform", "transform " .. i, fn, "a function") end
  return setmetatable({ dataset = dataset, list = list, size = #dataset }, Transformed)
end

function Transformed:describe() return "from " .. tostring(self.dataset) end

function Transformed:_through(batch)
  for _, fn in ipairs(self.list) do batch = fn(batch) end
  return batch
end

function Transformed:get(i)
  check_position(self, i)
  return self:_through(self.dataset:get(i))
end

function Transformed:batch(positions)
  positions = positions_of(positions)
  local batch = self.dataset.batch and self.dataset:batch(positions)
  if not batch then
    local items = {}
    for i, position in ipairs(positions:tolist()) do items[i] = self.dataset:get(position) end
    batch = M.collate(items)
  end
  return self:_through(batch)
end

local Joined = define "Joined"

--- Datasets one after the other.
---@param list table[]
function M.concat(list)
  if is_dataset(list) then arguments.fail "data.concat: list: expected a list of datasets, got one dataset" end
  expect("data.concat", "list", list, "a list")
  if #list == 0 then arguments.fail "data.concat: list: expected at least one dataset, got an empty table" end
  local size, starts = 0, {}
  for i, dataset in ipairs(list) do
    M.expect_dataset("data.concat", "element " .. i, dataset)
    starts[i] = size
    size = size + #dataset
  end
  return setmetatable({ list = list, starts = starts, size = size }, Joined)
end

function Joined:describe()
  local parts = {}
  for i, dataset in ipairs(self.list) do parts[i] = tostring(dataset) end
  return "from " .. table.concat(parts, ", ")
end

function Joined:get(i)
  check_position(self, i)
  for k = #self.list, 1, -1 do
    if i >= self.starts[k] then return self.list[k]:get(i - self.starts[k]) end
  end
end

--- Makes one batch of a list of items: tensors are stacked, numbers and booleans become a tensor, tables go field by
-- field, strings stay a list.
---@param items any[]
function M.collate(items)
  expect("data.collate", "items", items, "a list")
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
        if type(item) ~= "table" or item[field] == nil then
          arguments.fail("data.collate: item %d of the batch lacks the field '%s'", i, tostring(field))
        end
        column[i] = item[field]
      end
      result[field] = M.collate(column)
    end
    return result
  elseif kind == "string" then
    return items
  end
  arguments.fail("data.collate: items: expected tensors, numbers, booleans, strings or tables of them, got %s",
    arguments.describe(first))
end

return M
