-- What the reference functions of rows are written with: arrays { shape = {..}, [1..n] = values in C order } and the
-- special functions that Lua lacks, to double precision. Row files get these as fields of T.

local reference = { inf = math.huge, nan = 0 / 0 }

function reference.count(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

--- An array of `shape` with f(index) at every position; index is a list of 0-based positions, valid during the call
--- only.
function reference.from(shape, f)
  local y, index = { shape = shape }, {}
  for d = 1, #shape do index[d] = 0 end
  for i = 1, reference.count(shape) do
    y[i] = f(index)
    for d = #shape, 1, -1 do
      index[d] = index[d] + 1
      if index[d] < shape[d] then break end
      index[d] = 0
    end
  end
  return y
end

--- The value at a list of 0-based positions. Positions that stand before the array's own dimensions are ignored and
--- dimensions of size 1 repeat, as in broadcasting.
function reference.at(x, index)
  if type(x) == "number" then return x end
  return x[reference.place(x, index)]
end

--- Where that value stands in the array.
function reference.place(x, index)
  local shape = x.shape
  local nd = #shape
  local at, skip = 0, #index - nd
  for d = 1, nd do
    local size = shape[d]
    at = at * size + (size == 1 and 0 or index[d + skip])
  end
  return at + 1
end

--- The shape that arrays and numbers broadcast to.
function reference.broadcast(...)
  local args = table.pack(...)
  local nd, shape = 0, {}
  for i = 1, args.n do
    if type(args[i]) == "table" then nd = math.max(nd, #args[i].shape) end
  end
  for d = 1, nd do shape[d] = 1 end
  for i = 1, args.n do
    if type(args[i]) == "table" then
      local skip = nd - #args[i].shape
      for d, size in ipairs(args[i].shape) do
        if size ~= 1 then shape[d + skip] = size end
      end
    end
  end
  return shape
end

--- f of every element.
function reference.map(x, f)
  local y = { shape = x.shape }
  for i = 1, reference.count(x.shape) do y[i] = f(x[i]) end
  return y
end

--- f of the elements of broadcast arrays and numbers.
function reference.zip(f, ...)
  local args, shape = table.pack(...), reference.broadcast(...)
  local at, values, whole, k = reference.at, {}, {}, 0
  for i = 1, args.n do
    local x = args[i]
    whole[i] = type(x) == "table" and table.concat(x.shape, " ") == table.concat(shape, " ")
  end
  return reference.from(shape, function(index)
    k = k + 1
    for i = 1, args.n do
      if whole[i] then values[i] = args[i][k] else values[i] = at(args[i], index) end
    end
    return f(table.unpack(values, 1, args.n))
  end)
end

--- dim (0-based, negative from the end) as a 1-based position.
function reference.dim(dim, nd) return (dim < 0 and dim + math.max(nd, 1) or dim) + 1 end

-- ---- special functions ----

function reference.log1p(x)
  local u = 1 + x
  if u == 1 or u == math.huge or u <= 0 or u ~= u then return u == 1 and x or math.log(u) end
  return math.log(u) * x / (u - 1) -- Kahan's correction of the rounding of 1 + x
end

function reference.expm1(x)
  if math.abs(x) > 0.5 then return math.exp(x) - 1 end
  local sum, term = 0.0, x
  for n = 2, 30 do
    sum = sum + term
    term = term * x / n
  end
  return sum
end

function reference.sinh(x)
  local e = reference.expm1(math.abs(x))
  if e == math.huge then return x end
  local y = (e + e / (e + 1)) / 2
  return x < 0 and -y or y
end

function reference.cosh(x) return (math.exp(x) + math.exp(-x)) / 2 end

function reference.tanh(x)
  if x ~= x then return x end
  if math.abs(x) > 20 then return x < 0 and -1.0 or 1.0 end
  local e = reference.expm1(2 * x)
  return e / (e + 2)
end

-- erf by its Taylor series near 0, erfc by Laplace's continued fraction elsewhere (Abramowitz and Stegun 7.1.5,
-- 7.1.14).
local function erf_series(x)
  local sum, term, n = 0.0, x, 0
  repeat
    sum = sum + term / (2 * n + 1)
    n = n + 1
    term = -term * x * x / n
  until math.abs(term) < 1e-20 or n > 200
  return 2 / math.sqrt(math.pi) * sum
end

local function erfc_fraction(x)
  local f = 0.0
  for n = 200, 1, -1 do f = n / 2 / (x + f) end
  return math.exp(-x * x) / math.sqrt(math.pi) / (x + f)
end

function reference.erf(x)
  if x ~= x then return x end
  if math.abs(x) < 2 then return erf_series(x) end
  return x > 0 and 1 - erfc_fraction(x) or erfc_fraction(-x) - 1
end

function reference.erfc(x)
  if x ~= x then return x end
  if math.abs(x) < 2 then return 1 - erf_series(x) end
  return x > 0 and erfc_fraction(x) or 2 - erfc_fraction(-x)
end

function reference.sigmoid(x) return x >= 0 and 1 / (1 + math.exp(-x)) or math.exp(x) / (1 + math.exp(x)) end
function reference.softplus(x) return math.max(x, 0) + reference.log1p(math.exp(-math.abs(x))) end

--- What ops take as `activation`, and the slopes: by central differences, to about 1e-10.
reference.activations = {
  none = function(x) return x end,
  relu = function(x) return x ~= x and x or math.max(x, 0) end,
  gelu = function(x) return 0.5 * x * reference.erfc(-x / math.sqrt(2)) end,
  gelu_tanh = function(x) return x * reference.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3)) end,
  silu = function(x) return x * reference.sigmoid(x) end,
  sigmoid = reference.sigmoid,
}
reference.slopes = {}
for name, f in pairs(reference.activations) do
  local h = 1e-4
  reference.slopes[name] = function(x) return (8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h) end
end
function reference.slopes.relu(x) return x > 0 and 1 or 0 end

--- Nearest integer, halves to even.
function reference.round(x)
  if x ~= x or math.abs(x) == math.huge then return x end
  local f = math.floor(x)
  local part = x - f
  if part > 0.5 or (part == 0.5 and f % 2 == 1) then f = f + 1 end
  return f
end

return reference
