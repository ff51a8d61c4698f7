-- eigh beyond what the op tests' reference can do: sizes around those at which the kernel changes its way, spectra with
-- equal eigenvalues, numbers near the ends of the type, batches, one thread and two. v must be orthogonal, x v = v
-- diag(w), w rise, and the largest element of each vector be positive.

local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

ty.manual_seed(3)

local function symmetric(n, dtype)
  local x = ty.randn(n, n, { dtype = dtype })
  return x + x:t()
end

-- With the given eigenvalues, and vectors drawn.
local function of_values(values, dtype)
  local w = ty.tensor(values, { dtype = "f64" })
  local q = ty.qr(ty.randn(#values, #values, { dtype = "f64" }))
  local x = (q * w):matmul(q:t())
  return ((x + x:t()) * 0.5):to(dtype)
end

local function repeated(n)
  local values = {}
  for i = 1, n do values[i] = (i % 3 - 1) * 2.0 end
  return values
end

local function largest(x) return x:abs():max():item() end

-- The errors are those of n roundings, relative to the largest element, or to the largest value where that is far
-- larger: a random matrix's is about the root of n of its elements.
local function holds(what, x, dtype)
  local n, eps = x.shape[1], dtype == "f64" and 2.3e-16 or 1.2e-7
  local w, v = ty.eigh(x)
  local scale, one = math.max(largest(x), 1e-305), ty.eye(n, { dtype = "f64" })
  local xs, ws, vs = x:to "f64" / scale, w:to "f64" / scale, v:to "f64"
  check.close({ largest(vs:t():matmul(vs) - one) }, { 0 }, 12 * n * eps, what .. ": vectors are orthogonal")
  local size = math.max(1, largest(ws) / n ^ 0.5)
  check.close({ largest(xs:matmul(vs) - vs * ws) }, { 0 }, 12 * n * eps * size, what .. ": x v = v w")
  check.ok(n == 1 or (w:narrow(0, 1, n - 1) - w:narrow(0, 0, n - 1)):min():item() >= 0, what .. ": values rise")
  check.ok((vs:max(0) + vs:min(0)):min():item() >= -1e-12, what .. ": the largest element is positive")
end

for _, dtype in ipairs { "f32", "f64" } do
  check.test(dtype .. ": random matrices", function()
    for _, n in ipairs { 1, 2, 3, 17, 32, 33, 48, 49, 50, 64, 65, 81, 97, 200, 257 } do
      holds(("%s %d"):format(dtype, n), symmetric(n, dtype), dtype)
    end
  end)

  check.test(dtype .. ": equal eigenvalues, and the ends of the type", function()
    for _, n in ipairs { 30, 88, 107 } do
      local x, star = symmetric(n, dtype), ty.zeros(n, n, { dtype = dtype })
      local whole = ty.randint(-2, 3, { n, n }):to(dtype)
      star:narrow(0, n == 88 and 9 or 8, 1):fill_(0.5) -- what is left beside two values are roundings of roundings
      for what, matrix in pairs {
        zeros = ty.zeros(n, n, { dtype = dtype }), one = ty.eye(n, { dtype = dtype }) * 3,
        ["rank 1"] = ty.ones(n, n, { dtype = dtype }), star = star + star:t(),
        integers = whole + whole:t(),
        ["equal values"] = of_values(repeated(n), dtype), tiny = x * (dtype == "f32" and 1e-36 or 1e-300),
        huge = x * (dtype == "f32" and 1e35 or 1e300),
      } do holds(("%s %s %d"):format(dtype, what, n), matrix, dtype) end
    end
  end)

  -- What is cut in two and joined again: values that nearly agree with those of the other half, and parts that vanish.
  check.test(dtype .. ": tridiagonal matrices", function()
    for _, n in ipairs { 17, 64, 200 } do
      local function made(diagonal, beside)
        local rows = {}
        for i = 1, n do
          rows[i] = {}
          for j = 1, n do
            rows[i][j] = i == j and diagonal(i) or math.abs(i - j) == 1 and beside(math.min(i, j)) or 0.0
          end
        end
        return ty.tensor(rows, { dtype = dtype })
      end
      for what, matrix in pairs {
        differences = made(function() return 2.0 end, function() return -1.0 end),
        Wilkinson = made(function(i) return math.abs(i - (n + 1) / 2) end, function() return 1.0 end),
        graded = made(function(i) return 10.0 ^ -(i % 12) end, function(i) return 10.0 ^ -(i % 12 + 1) end),
        ["nearly apart"] = made(function(i) return math.sin(i) end, function(i) return -1e-9 * i end),
        halves = made(function(i) return 1.0 * (i % 8) end, function(i) return i % 8 == 0 and 1e-5 or 0.5 end),
      } do holds(("%s %s %d"):format(dtype, what, n), matrix, dtype) end
      local w = ty.eigh(made(function() return 2.0 end, function() return -1.0 end))
      local known = (ty.arange(1, n + 1, { dtype = "f64" }) * (math.pi / (n + 1))):cos() * -2 + 2
      check.close({ largest(w:to "f64" - known) }, { 0 }, n * (dtype == "f64" and 4.6e-16 or 2.4e-7), "their values")
    end
  end)

  check.test(dtype .. ": known values", function()
    local values = {}
    for i = 1, 130 do values[i] = -7.0 + 0.11 * i end
    local w = ty.eigh(of_values(values, dtype))
    local off = largest(w:to "f64" - ty.tensor(values, { dtype = "f64" }))
    check.close({ off }, { 0 }, dtype == "f64" and 1e-12 or 3e-5)
  end)

  check.test(dtype .. ": a batch is its matrices, whatever the threads", function()
    local before = ty.threads()
    for _, n in ipairs { 70, 259 } do
      local batch = ty.stack({ symmetric(n, dtype), symmetric(n, dtype), symmetric(n, dtype) }, 0)
      local bw, bv = ty.eigh(batch)
      for threads = 1, 3 do
        ty.set_threads(threads)
        for i = 0, 2 do
          local w, v = ty.eigh(batch[i])
          check.ok(w:equal(bw[i]) and v:equal(bv[i]), ("matrix %d of %d, %d threads"):format(i, n, threads))
        end
      end
      ty.set_threads(before)
    end
  end)
end

-- OpenBLAS says on what it runs; of an Intel CPU that it does not know it thinks as little as of one of 2004.
check.test("LAPACK knows that this CPU has AVX2", function()
  if ty.cpu().isa == "baseline" or not arg[-1] then return end
  local code = "local ty = require [[tycho]] ty.inverse(ty.eye(3)) print(os.getenv [[OPENBLAS_CORETYPE]])"
  local pipe <close> = assert(io.popen(("env -u OPENBLAS_CORETYPE OPENBLAS_VERBOSE=2 '%s' -e '%s' 2>&1"):format(arg[-1],
    code)))
  local said = pipe:read "a"
  check.equal(said:find "Prescott", nil)
  check.equal(said:find "nil" ~= nil, true, said)
end)

check.finish()
