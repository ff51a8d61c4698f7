-- A case of a row made concrete: its templates filled with values of one dtype, and calls made from that.

local template = require "template"
local layout = require "layout"

local case = {}
local Instance = {}
Instance.__index = Instance

local function is_tensor_list(v)
  if type(v) ~= "table" or template.is(v) then return false end
  for _, x in ipairs(v) do
    if template.is(x) then return true end
  end
  return false
end

local function positional_count(row_case)
  local n = 0
  for k in pairs(row_case) do
    if math.type(k) == "integer" and k > n then n = k end
  end
  return n
end

-- Seeds the values by op and case, so that a filtered run sees those of the whole run.
local function seed(text)
  local h = 5381
  for i = 1, #text do h = h * 33 + text:byte(i) & 0x7fffffff end
  math.randomseed(h)
end

--- The instance of a case in `dtype`, or nil when its values do not exist in that dtype. `info` is the op's entry of
--- the table.
function case.new(info, number, row_case, dtype)
  seed(info.name .. number .. dtype)
  local self = setmetatable({ info = info, dtype = dtype, args = {}, slots = {} }, Instance)
  self.n = positional_count(row_case)
  local follow_int = info.flags.INTS
  local missing = false

  local function slot(holder, key, spec, name)
    if follow_int and spec.int and dtype == "bool" then missing = true end
    local array = template.fill(spec, dtype, follow_int)
    if not array then
      missing = true
      return
    end
    holder[key] = array
    self.slots[#self.slots + 1] = { holder = holder, key = key, name = name, array = array }
  end

  local function fill(holder, key, value, name)
    if template.is(value) then
      slot(holder, key, value, name)
    elseif is_tensor_list(value) then
      holder[key] = {}
      for i, x in ipairs(value) do slot(holder[key], i, x, name .. "[" .. i - 1 .. "]") end
    else
      holder[key] = value
    end
  end

  for i = 1, self.n do fill(self.args, i, row_case[i], info.args[i] and info.args[i].name or "argument") end
  if row_case.opts then
    self.opts = {}
    local names = {}
    for name in pairs(row_case.opts) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do fill(self.opts, name, row_case.opts[name], name) end
  end
  if missing then return nil end
  return self
end

--- Whether any tensor has the case's dtype.
function Instance:follows()
  for _, s in ipairs(self.slots) do
    if not s.array.fixed then return true end
  end
  return false
end

-- Copies the structure of arguments with slot i's entry = values[i].
local function arrange(self, values)
  local args, opts, copies = { n = self.n }, nil, {}
  local function copy(v)
    if type(v) == "table" and copies[v] == nil then copies[v] = table.move(v, 1, #v, 1, {}) end
    return type(v) == "table" and copies[v] or v
  end
  local by_holder = {}
  for i, s in ipairs(self.slots) do
    by_holder[s.holder] = by_holder[s.holder] or {}
    by_holder[s.holder][s.key] = values[i]
  end
  local function put(holder, key)
    local direct = by_holder[holder] and by_holder[holder][key]
    if direct ~= nil then return direct end
    local v = holder[key]
    local inner = type(v) == "table" and by_holder[v]
    if inner then
      local list = {}
      for k, x in pairs(inner) do list[k] = x end
      return list
    end
    return copy(v)
  end
  for i = 1, self.n do args[i] = put(self.args, i) end
  if self.opts then
    opts = {}
    for name in pairs(self.opts) do opts[name] = put(self.opts, name) end
  end
  return args, opts
end

--- What the row's reference function says, with the arrays as they are: a table with n results.
function Instance:expected(ref)
  local arrays = {}
  for i, s in ipairs(self.slots) do arrays[i] = template.copy(s.array) end
  local args, opts = arrange(self, arrays)
  if opts then
    args.n = args.n + 1
    args[args.n] = opts
  end
  return table.pack(ref(table.unpack(args, 1, args.n))), arrays
end

--- The tensors of all slots in a layout, and those around them where they are windows (a table that may have holes).
function Instance:windows(name)
  local tensors, wholes = {}, {}
  for i, s in ipairs(self.slots) do tensors[i], wholes[i] = layout.tensor(s.array, name, s.dim) end
  return tensors, wholes
end

--- The tensors of all slots in a layout.
function Instance:tensors(name)
  local tensors = self:windows(name)
  return tensors
end

--- Calls fn with the case's arguments, tensors in place; a table with n results.
function Instance:call(fn, tensors, more)
  local args, opts = arrange(self, tensors)
  if more and next(more) ~= nil then
    opts = opts or {}
    for k, v in pairs(more) do opts[k] = v end
  end
  if opts then
    args.n = args.n + 1
    args[args.n] = opts
  end
  return table.pack(fn(table.unpack(args, 1, args.n)))
end

--- The same instance with other arrays (one per slot).
function Instance:with(arrays, dims)
  local other = setmetatable({ info = self.info, dtype = self.dtype, n = self.n, slots = {} }, Instance)
  other.args, other.opts = arrange(self, arrays)
  -- arrange() made new holders: find the slots again
  local at = {}
  for i, s in ipairs(self.slots) do
    if s.holder == self.args then at[i] = { other.args, s.key }
    elseif s.holder == self.opts then at[i] = { other.opts, s.key }
    else
      for k, v in pairs(self.args) do
        if v == s.holder then at[i] = { other.args[k], s.key } end
      end
      for k, v in pairs(self.opts or {}) do
        if v == s.holder then at[i] = { other.opts[k], s.key } end
      end
    end
  end
  for i, s in ipairs(self.slots) do
    other.slots[i] = { holder = at[i][1], key = at[i][2], name = s.name, array = arrays[i], dim = dims and dims[i] }
  end
  return other
end

--- The instance whose tensors repeat along a dimension; nil when none can.
function Instance:repeated()
  local arrays, dims, any = {}, {}, false
  for i, s in ipairs(self.slots) do
    local array, dim = template.repeated(s.array)
    arrays[i], dims[i] = array or s.array, dim
    any = any or dim
  end
  return any and self:with(arrays, dims) or nil
end

--- The instance with every value rounded to its dtype after `dtype` replaced the case's dtype.
function Instance:as(dtype, round)
  local arrays = {}
  for i, s in ipairs(self.slots) do
    local c = template.copy(s.array)
    if not c.fixed then
      c.dtype = dtype
      for k = 1, #c do c[k] = round(c[k]) end
    end
    arrays[i] = c
  end
  local other = self:with(arrays)
  other.dtype = dtype
  return other
end

--- "case 2 f32 strided"
function case.where(number, dtype, name)
  return "case " .. number .. (dtype and " " .. dtype or "") .. (name and " " .. name or "")
end

return case
