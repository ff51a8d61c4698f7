--- Items that are made once: data.cache reads a dataset through and holds what it gave, in memory that worker threads
-- share, or in a file for the next run.
--
-- Every field is one tensor of all items: of tensors that are all of one shape [n, ...], of others their elements one
-- after the other, with the shape of each. Strings are bytes in such a row.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.data.dataset"

local M = {}

local ALONE = "" -- the field of items that are no tables
local FORMAT = "tycho cache 1"

local function fail(text, ...) arguments.fail("data.cache: " .. text, ...) end

-- ---- columns of values ----

local function kind_of(value)
  if ty.is_tensor(value) then return "tensor" end
  local kind = type(value) == "number" and math.type(value) or type(value)
  return (kind == "integer" or kind == "float" or kind == "boolean" or kind == "string") and kind or nil
end

local function same_shape(list)
  local first = table.concat(list[1].shape, ",")
  for _, t in ipairs(list) do
    if table.concat(t.shape, ",") ~= first then return false end
  end
  return true
end

-- Tensors of several shapes in a row: elements, where those of each begin and the last end, shapes [n, dimensions].
local function ragged(list)
  local flat, offsets, shapes = {}, { 0 }, {}
  for i, t in ipairs(list) do
    flat[i], shapes[i] = t:reshape(-1), t.shape
    offsets[i + 1] = offsets[i] + t:numel()
  end
  return { values = ty.concat(flat, 0), offsets = ty.tensor(offsets, { dtype = "i64" }),
    shapes = ty.tensor(shapes, { dtype = "i64" }) }
end

-- The column of a field's values, one of each item.
local function column_of(name, list)
  local kind = kind_of(list[1])
  if not kind then
    fail("dataset: expected tensors, numbers, booleans and strings as fields, got %s in the field '%s'",
      arguments.describe(list[1]), name)
  end
  for i, value in ipairs(list) do
    local other = kind_of(value)
    if kind == "integer" and other == "float" then kind, other = "float", "float" end
    if other ~= kind and not (kind == "float" and other == "integer") then
      fail("dataset: field '%s': expected %s as of the first item, got %s of item %d", name, kind,
        arguments.describe(value), i - 1)
    end
    if kind == "tensor" and (value.dtype ~= list[1].dtype or value.ndim ~= list[1].ndim) then
      fail("dataset: field '%s': expected %s of %d dimensions as of the first item, got %s of %d of item %d", name,
        list[1].dtype, list[1].ndim, value.dtype, value.ndim, i - 1)
    end
  end
  if kind == "tensor" then
    for i, t in ipairs(list) do list[i] = t:detach():to { device = "cpu" } end
    if same_shape(list) then return { kind = kind, values = ty.stack(list, 0) } end
    local column = ragged(list)
    column.kind = kind
    return column
  elseif kind == "string" then
    for i, text in ipairs(list) do list[i] = ty.io.from_bytes(text, "u8", { #text }) end
    local column = ragged(list)
    column.kind, column.shapes = kind, nil
    return column
  end
  local dtypes = { integer = "i64", float = "f64", boolean = "bool" }
  return { kind = kind, values = ty.tensor(list, { dtype = dtypes[kind] }) }
end

local function value_at(column, i)
  local t = column.values
  if not column.offsets then
    t = t:select(0, i)
    if column.kind == "tensor" then return t end
    local value = t:item()
    if column.kind == "boolean" then return value == true or value == 1 end
    return value
  end
  local from = column.offsets[i]:item()
  t = t:narrow(0, from, column.offsets[i + 1]:item() - from)
  if column.kind == "string" then return ty.io.to_bytes(t) end
  return t:reshape(column.shapes[i]:tolist())
end

-- ---- the dataset ----

local Cached = datasets.class "Cached"

local function new(columns, size)
  local whole = true
  for _, column in pairs(columns) do
    for _, part in ipairs { "values", "offsets", "shapes" } do
      if column[part] then ty.keep(column[part]) end
    end
    whole = whole and (column.kind == "string" or not column.offsets)
  end
  return setmetatable({ columns = columns, size = size, whole = whole }, Cached)
end

function Cached:describe()
  local bytes = 0
  for _, column in pairs(self.columns) do bytes = bytes + column.values:nbytes() end
  return ("in %.1f MB"):format(bytes / 1e6)
end

--- An item, whose tensors lie in the memory of the cache.
function Cached:get(i)
  arguments.expect("data.cache", "position", i, ("an integer in [0, %d]"):format(self.size - 1))
  local alone = self.columns[ALONE]
  if alone then return value_at(alone, i) end
  local item = {}
  for name, column in pairs(self.columns) do item[name] = value_at(column, i) end
  return item
end

--- The items at `positions` as data.collate puts them together; nil where tensors of several shapes are to be.
function Cached:batch(positions)
  if not self.whole then return nil end
  local list = ty.is_tensor(positions) and positions:tolist() or positions
  local at = ty.is_tensor(positions) and positions or ty.tensor(positions, { dtype = "i64" })
  local batch = {}
  for name, column in pairs(self.columns) do
    if column.kind == "string" then
      batch[name] = {}
      for k, i in ipairs(list) do batch[name][k] = value_at(column, i) end
    else
      local values = column.values:index_select(0, at)
      batch[name] = column.kind == "float" and values:to "f32" or values
    end
  end
  return self.columns[ALONE] and batch[ALONE] or batch
end

-- ---- files ----

local function write(path, columns, size, version)
  local tensors, kinds = {}, {}
  for name, column in pairs(columns) do
    kinds[name] = column.kind
    for _, part in ipairs { "values", "offsets", "shapes" } do
      if column[part] then tensors[part .. "." .. name] = column[part] end
    end
  end
  ty.io.save_safetensors(path, tensors, { format = FORMAT, size = tostring(size), version = version,
    kinds = ty.io.json_encode(kinds) })
end

-- The columns of a file, checked, so that none of its numbers leads elsewhere.
local function read(path, size, version)
  local tensors, notes = ty.io.load_safetensors(path)
  if not notes or notes.format ~= FORMAT then fail("%s: is there and no cache", path) end
  if notes.version ~= version then
    fail("%s: is of version \"%s\", not \"%s\": remove it to make it anew", path, notes.version, version)
  elseif notes.size ~= tostring(size) then
    fail("%s: has %s items, the dataset %d: remove it to make it anew", path, notes.size, size)
  end
  local columns = {}
  local function broken(name) fail("%s: field '%s' does not fit its header", path, name) end
  local ok, kinds = pcall(ty.io.json_decode, notes.kinds)
  if not ok or type(kinds) ~= "table" or next(kinds) == nil then fail("%s: the header names no fields", path) end
  for name, kind in pairs(kinds) do
    local column = { kind = kind }
    for _, part in ipairs { "values", "offsets", "shapes" } do column[part] = tensors[part .. "." .. name] end
    local values, offsets, shapes = column.values, column.offsets, column.shapes
    if not values or values.ndim < 1 or (kind ~= "tensor" and values.ndim ~= 1) then broken(name) end
    if not offsets then
      if values:size(0) ~= size or kind == "string" then broken(name) end
    else
      if offsets.dtype ~= "i64" or offsets.ndim ~= 1 or offsets:size(0) ~= size + 1 or values.ndim ~= 1 then
        broken(name)
      end
      local lengths = offsets:narrow(0, 1, size) - offsets:narrow(0, 0, size)
      if offsets[0]:item() ~= 0 or offsets[-1]:item() ~= values:size(0) or not lengths:ge(0):all():item() then
        broken(name)
      end
      if kind == "tensor" then
        if not shapes or shapes.dtype ~= "i64" or shapes.ndim ~= 2 or shapes:size(0) ~= size
          or not shapes:prod(1):eq(lengths):all():item() or not shapes:ge(0):all():item() then broken(name) end
      elseif kind ~= "string" or values.dtype ~= "u8" then broken(name) end
    end
    columns[name] = column
  end
  return columns
end

local function as_they_are(items) return { items = items } end

--- A dataset that holds the items of another, each read once, now: for what takes long to read or decode, and for no
-- draws, which are the same in all epochs. Fields are tensors (of one dtype and number of dimensions), numbers,
-- booleans and strings. options: workers (0; threads that read), path (a .safetensors file: read where it is there,
-- made otherwise), version (""; a text that a file must have been made with, for the settings that went into its
-- items).
---@param dataset table
---@param options? {workers: integer, path: string, version: string}
---@return table dataset
function M.cache(dataset, options)
  datasets.expect_dataset("data.cache", "dataset", dataset)
  local o = arguments.read("data.cache", options, { workers = 0, path = arguments.none, version = "" },
    { workers = "an integer in [0, 1024]", path = "a string" })
  local size = #dataset
  if size == 0 then fail "dataset: expected at least one item, got none" end
  if o.path and ty.io.exists(o.path) then return new(read(o.path, size, o.version), size) end
  local loader <close> = require("tycho.data.loader").new(dataset,
    { batch_size = math.min(size, 16), workers = o.workers, collate = as_they_are })
  local lists, n = {}, 0
  for _ = 1, #loader do
    for _, item in ipairs(loader:next().items) do
      if type(item) ~= "table" then item = { [ALONE] = item } end
      n = n + 1
      for name, value in pairs(item) do
        if type(name) ~= "string" then fail("dataset: expected fields with names, got %s", arguments.describe(name)) end
        local list = lists[name] or {}
        lists[name] = list
        if #list ~= n - 1 then fail("dataset: item %d has a field '%s', an earlier one none", n - 1, name) end
        list[n] = ty.is_tensor(value) and ty.keep(value) or value
      end
    end
  end
  local columns = {}
  for name, list in pairs(lists) do
    if #list ~= size then fail("dataset: item %d lacks the field '%s'", #list, name) end
    columns[name] = column_of(name, list)
    lists[name] = false -- so that the values can go
  end
  if o.path then write(o.path, columns, size, o.version) end
  return new(columns, size)
end

return M
