--- Which part of a parameter a rank has, and how wholes are made of parts: the language of universal checkpoints.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Which part of a parameter a rank has.
---@class UniversalPart
---@field kind "replicated"|"averaged"|"sharded"
---@field shape integer[]   of the whole parameter
---@field index integer     of the ranks that have parts, from 0
---@field count integer     of these
---@field dim? integer      sharded: along which
---@field parts? integer    that are each cut
---@field padded? boolean
---@field own integer[]     the shape of the part
local Part = {}
Part.__index = Part
Part.__name = "UniversalPart"

--- Patterns of names, and how parameters of these names are divided.
---@class UniversalLanguage
local Language = {}
Language.__index = Language
Language.__name = "UniversalLanguage"

local KINDS = '"replicated" or "averaged" or "sharded"'

--- Whether a value is the shape of a tensor.
function M.is_shape(value)
  if type(value) ~= "table" or #value > 8 then return false end
  local elements = 1.0
  for i = 1, #value do
    if math.type(value[i]) ~= "integer" or value[i] < 0 then return false end
    elements = elements * math.max(value[i], 1)
  end
  return elements < 2 ^ 48
end

--- A language: a list of rules { pattern, kind, dim, parts, padded }, of which the first whose Lua pattern finds a
-- parameter's name counts. Kinds: "replicated", the same on all ranks; "averaged", on each rank its own, whose mean is
-- the parameter; "sharded", cut along `dim` (0) in the order of ranks, where `parts` (1) lie behind one another that
-- are each cut, or with `padded` filled up to a multiple of the ranks.
---@param rules table[]
---@return UniversalLanguage  with part(name, shape, index, count)
function M.language(rules)
  local who = "dist.universal.language"
  expect(who, "rules", rules, "a list of tables")
  local self = setmetatable({ rules = {} }, Language)
  for i, rule in ipairs(rules) do
    expect(who, ("rule %d: pattern"):format(i), rule[1], "a string")
    expect(who, ("rule %d: kind"):format(i), rule[2], KINDS)
    local o = arguments.read(("%s: rule %d"):format(who, i), { dim = rule.dim, parts = rule.parts,
      padded = rule.padded }, { dim = 0, parts = 1, padded = false },
      { dim = "an integer >= 0", parts = "an integer >= 1", padded = "a boolean" })
    local ok, problem = pcall(string.find, "", rule[1])
    if not ok then fail("%s: rule %d: pattern: %s", who, i, problem) end
    if o.padded and o.parts > 1 then fail("%s: rule %d: expected parts or padded, got both", who, i) end
    self.rules[i] = { pattern = rule[1], kind = rule[2], dim = o.dim, parts = o.parts, padded = o.padded }
  end
  return self
end

-- A part whose fields are right, or nil and what is wrong.
local function make(kind, shape, index, count, dim, parts, padded)
  local own = table.move(shape, 1, #shape, 1, {})
  local self = { kind = kind, shape = shape, index = index, count = count, own = own }
  if kind == "sharded" then
    local n = shape[dim + 1]
    if not n then return nil, ("no dimension %d in [%s]"):format(dim, table.concat(shape, ", ")) end
    if padded then
      own[dim + 1] = (n + count - 1) // count
    elseif n % (parts * count) ~= 0 then
      return nil, ("%d along dimension %d is no multiple of %d"):format(n, dim, parts * count)
    else
      own[dim + 1] = n // count
    end
    self.dim, self.parts, self.padded = dim, parts, padded
  end
  return setmetatable(self, Part)
end

--- The part of a parameter that one of `count` ranks has.
---@param name string
---@param shape integer[]  of the whole
---@param index integer    from 0
---@param count integer
---@return UniversalPart
function Language:part(name, shape, index, count)
  local who = "UniversalLanguage:part"
  expect(who, "name", name, "a string")
  expect(who, "count", count, "an integer >= 1")
  expect(who, "index", index, "an integer >= 0")
  if not M.is_shape(shape) then fail("%s: shape: expected that of a tensor, got %s", who, arguments.describe(shape)) end
  if index >= count then fail("%s: index: expected one of %d, from 0, got %d", who, count, index) end
  for _, rule in ipairs(self.rules) do
    if name:find(rule.pattern) then
      local part, problem = make(rule.kind, table.move(shape, 1, #shape, 1, {}), index, count, rule.dim, rule.parts,
        rule.padded)
      if not part then fail("%s: %s: %s", who, name, problem) end
      return part
    end
  end
  fail("%s: name: expected one that a rule finds, got %s", who, name)
end

--- Raises unless a value is a part.
function M.check_part(who, part)
  if getmetatable(part) ~= Part then
    fail("%s: part: expected one of language:part(), got %s", who, arguments.describe(part))
  end
end

--- The shape of the whole.
function M.shape_of(part) return table.move(part.shape, 1, #part.shape, 1, {}) end

--- A part as JSON has it.
function M.plain(part)
  return { kind = part.kind, shape = ty.core.io.array(M.shape_of(part)), index = part.index, count = part.count,
    dim = part.dim, parts = part.parts, padded = part.padded }
end

--- A part as JSON had it, which may say anything: nil and what is wrong.
function M.read_part(value)
  if type(value) ~= "table" then return nil, "it is no table" end
  local function is(key, low, high)
    return math.type(value[key]) == "integer" and value[key] >= low and value[key] <= high
  end
  if not M.is_shape(value.shape) or not is("count", 1, 65536) or not is("index", 0, value.count - 1) then
    return nil, "shape, index or count"
  end
  if value.kind == "sharded" then
    if not is("dim", 0, 7) or not is("parts", 1, 65536) or type(value.padded) ~= "boolean"
      or value.padded and value.parts > 1 then
      return nil, "dim, parts or padded"
    end
  elseif value.kind ~= "replicated" and value.kind ~= "averaged" then
    return nil, "its kind"
  end
  return make(value.kind, value.shape, value.index, value.count, value.dim, value.parts, value.padded)
end

--- The elements of a shape.
function M.elements(shape)
  local n = 1
  for _, s in ipairs(shape) do n = n * s end
  return n
end
local elements = M.elements

--- Raises unless a piece { name, slot, tensor, part, begin } fits together. A part that is a plain table is read.
function M.check_piece(who, i, piece)
  local where = ("%s: piece %d"):format(who, i)
  expect(where, "name", piece.name, "a string")
  expect(where, "slot", piece.slot, "a string")
  expect(where, "tensor", piece.tensor, "a tensor")
  expect(where, "begin", piece.begin, "an integer >= 0 or nil")
  if getmetatable(piece.part) ~= Part then
    local part, problem = M.read_part(piece.part)
    if not part then fail("%s: part: expected one of language:part(), got another: %s", where, problem) end
    piece.part = part
  end
  local own, x = piece.part.own, piece.tensor
  local whole = table.concat(x.shape, ",") == table.concat(own, ",") and (piece.begin or 0) == 0
  if not whole and not (x.ndim == 1 and (piece.begin or 0) + x:numel() <= elements(own)) then
    fail("%s: tensor: expected [%s], or elements of it in one dimension, got %s from %d on", where,
      table.concat(own, ", "), arguments.describe(x), piece.begin or 0)
  end
end

-- ---- wholes ----

--- Of a whole the part of a rank: a view, or a new tensor.
function M.take(whole, part)
  if part.kind ~= "sharded" or part.count == 1 then return whole end
  local dim, n = part.dim, part.own[part.dim + 1]
  if part.padded then
    local size = part.shape[dim + 1]
    local begin = math.min(part.index * n, size)
    local mine = whole:narrow(dim, begin, math.min(n, size - begin))
    local shape = mine.shape
    shape[dim + 1] = n - shape[dim + 1]
    if shape[dim + 1] == 0 then return mine end
    return ty.concat({ mine, ty.zeros(shape, { dtype = whole.dtype }) }, dim)
  end
  local list, step = {}, part.shape[dim + 1] // part.parts
  n = n // part.parts
  for i = 1, part.parts do list[i] = whole:narrow(dim, (i - 1) * step + part.index * n, n) end
  return #list == 1 and list[1] or ty.concat(list, dim)
end

-- Puts a part into a whole.
local function put(whole, own, part)
  if part.kind ~= "sharded" then return whole:copy_(own) end
  local dim, n = part.dim, part.own[part.dim + 1]
  if part.padded then
    local size = part.shape[dim + 1]
    local begin = math.min(part.index * n, size)
    n = math.min(n, size - begin)
    whole:narrow(dim, begin, n):copy_(own:narrow(dim, 0, n))
    return
  end
  local step = part.shape[dim + 1] // part.parts
  n = n // part.parts
  for i = 1, part.parts do
    whole:narrow(dim, (i - 1) * step + part.index * n, n):copy_(own:narrow(dim, (i - 1) * n, n))
  end
end

-- The part of one index from its pieces, which may overlap where they say the same.
local function join(who, label, pieces)
  local part, dtype = pieces[1].part, pieces[1].tensor.dtype
  table.sort(pieces, function(a, b) return (a.begin or 0) < (b.begin or 0) end)
  local flat, reached = ty.zeros({ elements(part.own) }, { dtype = dtype }), 0
  for _, piece in ipairs(pieces) do
    local begin, x = piece.begin or 0, piece.tensor:reshape(-1)
    if begin > reached then
      fail("%s: %s lacks the elements from %d to %d of part %d", who, label, reached, begin - 1, part.index)
    end
    local old = math.min(reached - begin, x:numel())
    if old > 0 and not x:narrow(0, 0, old):equal(flat:narrow(0, begin, old)) then
      fail("%s: %s is not the same on the ranks that have part %d", who, label, part.index)
    end
    flat:narrow(0, begin, x:numel()):copy_(x)
    reached = math.max(reached, begin + x:numel())
  end
  if reached < flat:numel() then
    fail("%s: %s lacks the elements from %d to %d of part %d", who, label, reached, flat:numel() - 1, part.index)
  end
  return flat:view(part.own)
end

--- In what parts of one parameter differ that should not, or nil.
function M.differ(a, b)
  for _, key in ipairs { "kind", "count", "dim", "parts", "padded" } do
    if a[key] ~= b[key] then return key end
  end
  return table.concat(a.shape, ",") ~= table.concat(b.shape, ",") and "shape" or nil
end

local function same_kind(a, b)
  return M.differ(a.part, b.part) or a.tensor.dtype ~= b.tensor.dtype and "dtype" or nil
end

--- A whole from all pieces of a parameter's slot.
function M.whole(who, name, slot, pieces)
  local label = ("%s of %s"):format(slot, name)
  local first, by_index, order = pieces[1], {}, {}
  for _, piece in ipairs(pieces) do
    local differs = same_kind(first, piece)
    if differs then fail("%s: ranks differ about %s: %s", who, label, differs) end
    local index = piece.part.index
    if not by_index[index] then by_index[index], order[#order + 1] = {}, index end
    table.insert(by_index[index], piece)
  end
  table.sort(order)
  local part = first.part
  if part.kind == "sharded" then
    for index = 0, part.count - 1 do
      if not by_index[index] then fail("%s: %s lacks part %d of %d", who, label, index, part.count) end
    end
  end
  local whole = ty.zeros(part.shape, { dtype = first.tensor.dtype })
  for i, index in ipairs(order) do
    local own = join(who, label, by_index[index])
    if part.kind == "averaged" then
      whole:add_(own)
    elseif part.kind == "replicated" and i > 1 then
      if not own:equal(whole) then fail("%s: %s is not the same on all ranks", who, label) end
    else
      put(whole, own, by_index[index][1].part)
    end
  end
  if part.kind == "averaged" and #order > 1 then whole = whole / #order end
  return whole
end

return M
