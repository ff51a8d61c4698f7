--- Weights as two trit-planes: PTQTP. Xiao et al. 2025, "PTQTP: Post-Training Quantization to Trit-Planes for Large
-- Language Models": W is near diag(a1) T1 + diag(a2) T2 with T of -1, 0 and 1, in groups along a row. Scales and planes
-- are fitted in turn; no text and no gradient is needed, and a product is additions and one multiplication for each
-- group and plane.
--
--     local report = quant.trit.quantize(model, { group = 128 })
--     print(report.bits)                  -- as stored: five trits to a byte, scales in half precision
--     quant.trit.unpack(model)            -- ordinary layers with the values that the planes stand for
--
-- Two planes have nine values for a weight and take 3.2 bits of it, with the scales about 3.5.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

local trits = 5 -- of a byte: 3^5 = 243
local tall = 64 -- rows whose bytes lie beside each other

-- ---- fitting ----

-- Signs where |w| is above 3/4 of the row's mean: near the best for one plane (Li et al. 2016, "Ternary Weight
-- Networks").
local function ternary(w) return w:sign() * w:abs():gt(w:abs():mean(1, true) * 0.75):to(w.dtype) end

local function dot(a, b) return (a * b):sum(1, true) end

-- The scale of each plane, [rows, 1] each: least squares with a ridge, section 3.2. The ridge of a row is `ridge`, and
-- ten times as large again and again where S'S is worse conditioned than `worst`.
local function scales_of(w, planes, o)
  if #planes == 1 then
    local n = dot(planes[1], planes[1])
    return { dot(planes[1], w) / (n + o.ridge + n:eq(0):to(n.dtype)) }
  end
  local n1, n2 = dot(planes[1], planes[1]), dot(planes[2], planes[2])
  local c, b1, b2 = dot(planes[1], planes[2]), dot(planes[1], w), dot(planes[2], w)
  local ridge = ty.full_like(n1, o.ridge)
  for _ = 1, 13 do
    -- The eigenvalues of the 2 x 2 matrix, and so its condition.
    local middle, radius = (n1 + n2) / 2 + ridge, (((n1 - n2) / 2):square() + c:square()):sqrt()
    local bad = (middle + radius):gt((middle - radius) * o.worst)
    if not bad:any():item() then break end
    ridge = ty.where(bad, (ridge * 10):clamp(1e-12, 1), ridge)
  end
  local a1, a2 = n1 + ridge, n2 + ridge
  local det = a1 * a2 - c:square()
  det = ty.where(det:eq(0), ty.ones_like(det), det) -- both planes empty: b is 0 as well
  return { (a2 * b1 - c * b2) / det, (a1 * b2 - c * b1) / det }
end

local function value_of(scales, planes)
  local sum = scales[1] * planes[1]
  if planes[2] then sum = sum + scales[2] * planes[2] end
  return sum
end

-- The nearest of 3 or 9 values for each weight. For each trit of the first plane the best of the second is a rounding.
local function assign(w, scales, count)
  local function rounded(x, scale)
    local safe = ty.where(scale:eq(0), ty.ones_like(scale), scale)
    return ty.where(scale:eq(0), ty.zeros_like(x), (x / safe):round():clamp(-1, 1))
  end
  if count == 1 then return { rounded(w, scales[1]) } end
  local first, second, least
  for t = -1, 1 do
    local left = w - scales[1] * t
    local other = rounded(left, scales[2])
    local error = (left - scales[2] * other):square()
    if not least then
      first, second, least = ty.full_like(w, t), other, error
    else
      local better = error:lt(least)
      first = first:masked_fill(better, t)
      second, least = ty.where(better, other, second), ty.where(better, error, least)
    end
  end
  return { first, second }
end

--- Planes and scales of rows w [rows, n], each row a group of its own. options: planes (2, or 1), rounds (50: at most),
-- tolerance (1e-4: no scale has moved further in the last round), ridge (1e-8) and worst (1e12: the condition of S'S
-- above which the ridge grows), start (the planes to begin with; by default the larger weights' signs, and then those
-- of what is left), trace (false: whether errors are wanted). In every half of a round the error of no row rises, but
-- for what the ridge does.
-- Returns scales, a list of [rows, 1], planes, a list of [rows, n] of -1, 0 and 1 in w's dtype, the rounds it took, and
-- the sums of squared errors after each half of a round.
---@param w Tensor
---@param options? table
---@return Tensor[] scales
---@return Tensor[] planes
---@return integer rounds
---@return number[] errors
function M.fit(w, options)
  local who = "quant.trit.fit"
  local o = arguments.read(who, options, { planes = 2, rounds = 50, tolerance = 1e-4, ridge = 1e-8, worst = 1e12,
    start = arguments.none, trace = false },
    { planes = "1 or 2", rounds = "an integer >= 1", tolerance = "a finite number >= 0", ridge = "a finite number >= 0",
      worst = "a number > 1", start = "a list of tensors", trace = "a boolean" })
  expect(who, "w", w, "a tensor")
  if w.ndim ~= 2 or not w:is_floating_point() then
    fail("%s: w: expected a float tensor [rows, n], got %s", who, arguments.describe(w))
  end
  if o.start and #o.start ~= o.planes then fail("%s: start: expected %d planes, got %d", who, o.planes, #o.start) end
  local scales, planes, errors, rounds = nil, {}, {}, 0
  local function note()
    if o.trace then errors[#errors + 1] = (w - value_of(scales, planes)):square():sum():item() end
  end
  ty.no_grad(ty.scope, function()
    planes[1] = o.start and o.start[1] or ternary(w)
    if o.planes == 2 then
      planes[2] = o.start and o.start[2] or ternary(w - scales_of(w, { planes[1] }, o)[1] * planes[1])
    end
    while rounds < o.rounds do
      rounds = rounds + 1
      local before = scales
      scales = scales_of(w, planes, o)
      note()
      local moved = math.huge
      if before then
        moved = 0
        for i, scale in ipairs(scales) do moved = math.max(moved, (scale - before[i]):abs():max():item()) end
      end
      if moved < o.tolerance then break end
      planes = assign(w, scales, o.planes)
      note()
    end
    for _, list in ipairs { scales, planes } do
      for i, t in ipairs(list) do list[i] = ty.keep(t) end
    end
  end)
  return scales, planes, rounds, errors
end

-- ---- storing ----

--- Trits, a list of planes [rows, columns], as bytes: u8 [groups, blocks of 64 rows, bytes of a group, planes, 64],
-- where a product finds the same byte of 64 rows at once. A byte is five trits, the first the lowest digit of a number
-- in base 3: its magnitude, and in the highest bit its sign. A group ends with zeros where it fills no whole byte, and
-- so do the rows where they fill no whole block.
---@param planes Tensor[]
---@param group integer
---@return Tensor codes
function M.pack(planes, group)
  local who = "quant.trit.pack"
  expect(who, "planes", planes, "a list of tensors")
  expect(who, "group", group, "an integer >= 1")
  if #planes == 0 then fail("%s: planes: expected at least one, got an empty table", who) end
  local all = {}
  for i, plane in ipairs(planes) do
    if plane.ndim ~= 2 or plane:numel() == 0 or plane:numel() ~= planes[1]:numel() then
      fail("%s: planes: expected tensors [rows, columns] of one size, got %s", who, arguments.describe(plane))
    end
    local rows, columns = plane.shape[1], plane.shape[2]
    local groups, bytes = (columns + group - 1) // group, (group + trits - 1) // trits
    local down = (rows + tall - 1) // tall
    local function padded(x, dim, to)
      if x.shape[dim + 1] == to then return x end
      local shape = { table.unpack(x.shape) }
      shape[dim + 1] = to - shape[dim + 1]
      return ty.concat({ x, ty.zeros(shape, { device = x.device }) }, dim)
    end
    local whole = padded(padded(plane:to "f32", 1, groups * group), 0, down * tall)
    whole = padded(whole:reshape(down * tall, groups, group), 2, bytes * trits)
    whole = whole:reshape(down, tall, groups, bytes, trits)
    local number = whole:select(4, 0)
    for j = 1, trits - 1 do number = number + whole:select(4, j) * 3 ^ j end
    local code = number:abs() + number:lt(0):to "f32" * 128
    all[i] = code:permute(2, 0, 3, 1):to "u8" -- [groups, blocks, bytes, 64]
  end
  return ty.stack(all, 3):contiguous()
end

-- The five trits of every byte, f32 [256, 5].
local trits_table
local function trits_of(device)
  if not trits_table then
    local rows, largest = {}, 3 ^ trits // 2
    for code = 0, 255 do
      local number, row = math.min(code % 128, largest) + largest, {}
      for j = 1, trits do row[j] = (number // 3 ^ (j - 1) % 3 - 1.0) * (code < 128 and 1 or -1) end
      rows[code + 1] = row
    end
    trits_table = ty.keep(ty.tensor(rows))
  end
  return trits_table:to { device = device }
end

--- The matrix that packed planes stand for, f32 [rows, columns]. codes: as pack() made them; scales: [groups, rows,
-- planes], of any float type.
---@param codes Tensor
---@param scales Tensor
---@param columns integer
---@param group integer
---@return Tensor
function M.decode(codes, scales, columns, group)
  local who = "quant.trit.decode"
  expect(who, "codes", codes, "a tensor")
  expect(who, "scales", scales, "a tensor")
  expect(who, "columns", columns, "an integer >= 1")
  expect(who, "group", group, "an integer >= 1")
  local groups, bytes = (columns + group - 1) // group, (group + trits - 1) // trits
  local shape, size = codes.shape, scales.shape
  if codes.dtype ~= "u8" or #shape ~= 5 or shape[1] ~= groups or shape[3] ~= bytes or shape[5] ~= tall then
    fail("%s: codes: expected u8 [%d, blocks, %d, planes, %d], got %s", who, groups, bytes, tall,
      arguments.describe(codes))
  end
  if not scales:is_floating_point() or #size ~= 3 or size[1] ~= groups or size[3] ~= shape[4]
    or (size[2] + tall - 1) // tall ~= shape[2] then
    fail("%s: scales: expected floats [%d, rows of %d blocks, %d], got %s", who, groups, shape[2], shape[4],
      arguments.describe(scales))
  end
  local planes = ty.embedding(trits_of(codes.device), codes:to "i64"):permute(0, 1, 4, 3, 2, 5)
  planes = planes:reshape(groups, shape[2] * tall, shape[4], bytes * trits):narrow(1, 0, size[2]):narrow(3, 0, group)
  local groups_first = (planes * scales:to("f32"):unsqueeze(3)):sum(2) -- [groups, rows, group]
  return groups_first:transpose(0, 1):reshape(size[2], groups * group):narrow(1, 0, columns):contiguous()
end

-- ---- layers ----

local packed = surgery.wrapper {
  name = "Trit", field = "_trit", fields = { "trits", "scales" },
  forward = function()
    return function(self, x, residual, activation)
      local state = self._trit
      local y = ty.matmul_trit(x, self.trits, self.scales, state.group)
      return surgery.finish(self.bias and y + self.bias or y, residual, activation)
    end
  end,
  describe = function(state) return ("%d trit-planes in groups of %d"):format(state.planes, state.group) end,
}

-- Rows of w [rows, columns] cut into groups: [rows * groups, group], the last group of a row filled with zeros.
local function grouped(w, group)
  local rows, columns = w.shape[1], w.shape[2]
  local groups = (columns + group - 1) // group
  if groups * group > columns then
    w = ty.concat({ w, ty.zeros({ rows, groups * group - columns }, { dtype = w.dtype, device = w.device }) }, 1)
  end
  return w:reshape(rows * groups, group), groups
end

-- Planes and scales of a layer; returns what is stored, the value it stands for, and the rounds.
local function encode(w, o)
  local rows, columns = w.shape[1], w.shape[2]
  local flat, groups = grouped(w, o.group)
  local scales, planes, rounds = M.fit(flat, { planes = o.planes, rounds = o.rounds, tolerance = o.tolerance,
    ridge = o.ridge, worst = o.worst })
  local whole, each = {}, {}
  for i = 1, o.planes do
    whole[i] = planes[i]:reshape(rows, groups * o.group):narrow(1, 0, columns)
    each[i] = scales[i]:reshape(rows, groups):transpose(0, 1)
  end
  local codes, stored = M.pack(whole, o.group), ty.stack(each, 2):to("f16"):contiguous()
  return codes, stored, rounds
end

local function quantize(model, options)
  local who = "quant.trit.quantize"
  local o = arguments.read(who, options, { planes = 2, group = 128, rounds = 50, tolerance = 1e-4, ridge = 1e-8,
    worst = 1e12, skip = {} },
    { planes = "1 or 2", group = "an integer >= 1", rounds = "an integer >= 1", tolerance = "a finite number >= 0",
      ridge = "a finite number >= 0", worst = "a number > 1", skip = "a list of strings" })
  expect(who, "model", model, "a module")
  local report, bits, all = {}, 0, 0
  local found = blocks.linears(who, model, o.skip)
  for _, layer in ipairs(found) do
    if packed:state(layer.module) then fail("%s: %s is in trits already", who, layer.name) end
    local w = layer.module.weight
    if not w:is_floating_point() then fail("%s: %s is quantized already (%s)", who, layer.name, w.dtype) end
    if not w:isfinite():all():item() then fail("%s: %s: a weight is not finite", who, layer.name) end
  end
  for _, layer in ipairs(found) do
    ty.no_grad(ty.scope, function()
      local module = layer.module
      local w = surgery.rows(module):to "f32":contiguous()
      local codes, scales, rounds = encode(w, o)
      local off = (M.decode(codes, scales, w.shape[2], o.group) - w):square():sum():item()
      local size = w:square():sum():item()
      local row = { name = layer.name, parameters = w:numel(), rounds = rounds,
        bits = 8 * (codes:nbytes() + scales:nbytes()) / w:numel(), error = size > 0 and off / size or 0 }
      report[#report + 1], bits, all = row, bits + row.bits * row.parameters, all + row.parameters
      packed:wrap(module, { columns = w.shape[2], group = o.group, planes = o.planes, dtype = module.weight.dtype })
      surgery.remove(module, "weight")
      module:buffer("trits", codes)
      module:buffer("scales", scales)
    end)
  end
  report.bits = bits / all
  return report
end

--- Puts the linear layers of a model's blocks into trit-planes, in place; embeddings, norms, biases and the head stay.
-- The weight of a layer is gone then: it holds `trits` u8 and `scales` f16, which state_dict() lists. options: planes
-- (2), group (128: columns with one scale for each plane; the last group of a row may have fewer), rounds, tolerance,
-- ridge and worst as in fit(), skip (names of layers to leave out, or their ends).
-- Returns a list of { name, parameters, bits (all that is stored), error (|W - Q|^2 / |W|^2), rounds }, and the mean of
-- bits in `bits`.
---@param model LanguageModel
---@param options? table
---@return table report
function M.quantize(model, options) return nn.for_caller(quantize, model, options) end

--- The layers in trits as ordinary ones, in place, with the values that the planes stand for.
---@param model Module
---@return Module model
function M.unpack(model)
  local who = "quant.trit.unpack"
  local found = packed:wrapped(who, expect(who, "model", model, "a module"))
  if #found == 0 then fail("%s: model: expected one with layers in trits, got %s", who, arguments.describe(model)) end
  for _, layer in ipairs(found) do
    local module, state = layer.module, layer.module._trit
    ty.no_grad(function()
      packed:restore(module, M.decode(module.trits, module.scales, state.columns, state.group):to(state.dtype))
    end)
  end
  return model
end

return M
