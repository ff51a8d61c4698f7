-- Integers: numbers that an op writes into or compares with elements keep all 64 bits, and meet what integers cannot be
-- with a float result or an error, as PyTorch does.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

-- No double holds these.
local odd = { (1 << 53) + 1, -(1 << 53) - 1, math.maxinteger, math.mininteger + 1, math.maxinteger - 511 }

local devices = { "cpu" }
if ty.cuda.count() > 0 then devices[2] = "cuda" end

for _, device in ipairs(devices) do
  local function zeros(n) return ty.zeros(n, { dtype = "i64", device = device }) end
  local mask = ty.tensor({ true, false, true }, { device = device })

  check.test("numbers reach i64 elements with all their bits, " .. device, function()
    for _, n in ipairs(odd) do
      local what = tostring(n)
      check.equal(ty.full({ 2 }, n, { dtype = "i64", device = device }):tolist(), { n, n }, what)
      check.equal(ty.full_like(zeros(1), n):tolist(), { n }, what)
      check.equal(zeros(2):fill_(n):tolist(), { n, n }, what)
      check.equal(zeros(3):masked_fill(mask, n):tolist(), { n, 0, n }, what)
      check.equal(zeros(3):masked_fill_(mask, n):tolist(), { n, 0, n }, what)
      check.equal(zeros(2):scatter(0, ty.tensor({ 1 }, { device = device }), n):tolist(), { 0, n }, what)
      check.equal(zeros(1):pad({ 1, 0 }, { value = n }):tolist(), { n, 0 }, what)
      local x = zeros(4)
      x[1] = n
      x["2:"] = n
      check.equal(x:tolist(), { 0, n, n, n }, what)
      x[x:eq(0)] = n
      check.equal(x:tolist(), { n, n, n, n }, what)
    end
  end)

  check.test("arange counts in integers, " .. device, function()
    local function range(...)
      local args = table.pack(...)
      args[args.n + 1] = { device = device }
      return ty.arange(table.unpack(args, 1, args.n + 1))
    end
    local n = (1 << 53) + 1
    check.equal(range(n, n + 3):tolist(), { n, n + 1, n + 2 })
    check.equal(range(n + 2, n - 1, -1):tolist(), { n + 2, n + 1, n })
    local huge = math.maxinteger
    check.equal(range(huge - 2, huge):tolist(), { huge - 2, huge - 1 })
    check.equal(range(math.mininteger, huge, huge):tolist(), { math.mininteger, -1, huge - 1 })
    check.equal(range(0, huge, huge - 1):tolist(), { 0, huge - 1 })
    check.equal(range(3, 3):tolist(), {})
    check.equal(range(4.0).dtype, "i64")
    check.equal(range(0, 1, 0.25):tolist(), { 0, 0.25, 0.5, 0.75 })
  end)

  check.test("clamp of integers, " .. device, function()
    local n = (1 << 53) + 1
    local x = ty.tensor({ n - 1, n, n + 1 }, { device = device })
    check.equal(x:clamp(n):tolist(), { n, n, n + 1 })
    check.equal(x:clamp(nil, n):tolist(), { n - 1, n, n })
    check.equal(x:clamp(n, n):tolist(), { n, n, n })
    for _, dtype in ipairs { "i64", "i32", "i16", "i8", "u8" } do
      local small = ty.tensor({ 1, 2, 3 }, { dtype = dtype, device = device })
      local low = small:clamp(1.5)
      check.equal({ low.dtype, low:tolist() }, { "f32", { 1.5, 2, 3 } }, dtype)
      check.equal(small:clamp(1, 2.5):tolist(), { 1, 2, 2.5 }, dtype)
      local whole = small:clamp(2)
      check.equal({ whole.dtype, whole:tolist() }, { dtype, { 2, 2, 3 } }, dtype)
      check.equal(small:clamp(math.mininteger, math.maxinteger):tolist(), { 1, 2, 3 }, dtype)
      check.fails(function() small:clone():clamp_(1.5) end, "does not fit into [3] " .. dtype, dtype)
    end
    local bytes = ty.tensor({ 0, 255 }, { dtype = "u8", device = device })
    check.equal(bytes:clamp(-5, 1000):tolist(), { 0, 255 })
    check.fails(function() bytes:clamp(256) end, "clamp: min: expected a number that x [2] u8")
    check.fails(function() bytes:clamp(nil, -1) end, "clamp: max: expected a number that x [2] u8")
  end)

  check.test("integers to a negative power are an error, " .. device, function()
    local x = ty.tensor({ 1, 2, 4 }, { device = device })
    check.fails(function() return x ^ -1 end, "pow: y: expected an exponent of at least 0")
    check.fails(function() return x:pow_(-2) end, "pow: y: expected an exponent of at least 0")
    check.equal((x ^ -1.0):tolist(), { 1, 0.5, 0.25 })
    check.equal((x:to "f32" ^ -1):tolist(), { 1, 0.5, 0.25 })
    check.equal((x ^ 2):tolist(), { 1, 4, 16 })
  end)
end

check.test("sizes and diagonals at the end of the range", function()
  check.fails(function() ty.ones(2):tile(math.maxinteger) end, "are too many")
  check.fails(function() ty.ones(2, 3):multinomial(math.maxinteger, true) end, "are too many")
  local x = ty.ones(2, 3)
  for _, far in ipairs { math.maxinteger, 4 } do
    check.equal({ x:tril(far):sum():item(), x:triu(far):sum():item() }, { 6.0, 0.0 })
    check.equal({ x:tril(-far):sum():item(), x:triu(-far):sum():item() }, { 0.0, 6.0 })
  end
end)

check.test("long lines of i64 are sorted exactly, close together or not", function()
  local n = 900
  for _, ends in ipairs { { 0, 1000 }, { math.mininteger, math.mininteger + 0xffffffff },
    { math.maxinteger - 0x100000000, math.maxinteger }, { math.mininteger, math.maxinteger }, { -7, -7 } } do
    local list = { ends[1], ends[2] }
    for i = 3, n do
      local width = ends[2] - ends[1]
      list[i] = ends[1] + (width == -1 and (i * 0x9e3779b97f4a7c15) or width <= 0 and 0 or i * 7919 % (width + 1))
    end
    for _, descending in ipairs { false, true } do
      local order = {}
      for i = 1, n do order[i] = i end
      table.sort(order, function(a, b)
        if list[a] ~= list[b] then return (list[a] < list[b]) ~= descending end
        return a < b
      end)
      local want, at = {}, {}
      for i, from in ipairs(order) do want[i], at[i] = list[from], from - 1 end
      local values, positions = ty.tensor(list):sort(0, descending)
      check.equal(values:tolist(), want)
      check.equal(positions:tolist(), at)
      -- Down the columns of a matrix.
      values, positions = ty.tensor(list):unsqueeze(1):expand(n, 2):contiguous():sort(0, descending)
      check.equal({ values:narrow(1, 1, 1):flatten():tolist(), positions:narrow(1, 0, 1):flatten():tolist() },
        { want, at })
    end
  end
end)

check.finish()
