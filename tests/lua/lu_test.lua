-- LU beyond what the op tests' reference can do: sizes around those at which the kernel changes its way, wide and tall
-- matrices, columns without a pivot, factors that overflow, one thread and three. p l u must be x, no factor be larger
-- than 1, and what is solved with it agree with float64.

local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

ty.manual_seed(5)

local function largest(x) return x:numel() == 0 and 0 or x:abs():max():item() end

local function holds(what, x, dtype)
  local eps = dtype == "f64" and 2.3e-16 or 1.2e-7
  local p, l, u = ty.lu(x)
  local k = math.min(x.shape[1], x.shape[2])
  local back = p:to "f64":matmul(l:to "f64"):matmul(u:to "f64")
  check.close({ largest(back - x:to "f64") / math.max(largest(x), 1e-300) }, { 0 }, 8 * k * eps, what .. ": p l u = x")
  check.ok(largest(l) <= 1 + eps, what .. ": no factor is larger than 1")
  check.ok(ty.triu(l, 1):abs():sum():item() == 0 and ty.tril(u, -1):abs():sum():item() == 0, what .. ": triangles")
end

for _, dtype in ipairs { "f32", "f64" } do
  check.test(dtype .. ": shapes", function()
    for _, shape in ipairs {
      { 1, 1 }, { 16, 16 }, { 24, 24 }, { 25, 25 }, { 31, 31 }, { 33, 33 }, { 48, 48 }, { 100, 100 }, { 257, 257 },
      { 300, 20 }, { 20, 300 }, { 200, 130 }, { 130, 200 }, { 65, 64 }, { 64, 65 }, { 1, 70 }, { 70, 1 },
    } do
      local m, n = shape[1], shape[2]
      holds(("%s %d x %d"):format(dtype, m, n), ty.randn(m, n, { dtype = dtype }), dtype)
    end
  end)

  check.test(dtype .. ": columns without a pivot", function()
    for _, n in ipairs { 30, 70, 150 } do
      local few = ty.randn(n, 3, { dtype = dtype })
      holds(("rank 3 of %d"):format(n), few:matmul(few:t()), dtype)
      local x = ty.randn(n, n, { dtype = dtype })
      x:narrow(1, n // 2, 2):zero_()
      holds(("two columns of zeros in %d"):format(n), x, dtype)
      check.fails(function() ty.solve(x, ty.ones(n, 20, { dtype = dtype })) end,
        ("matrix 0 is singular: pivot %d is zero"):format(n // 2))
      check.equal(ty.slogdet(x):item(), 0)
      holds(("zeros of %d"):format(n), ty.zeros(n, n, { dtype = dtype }), dtype)
    end
  end)

  check.test(dtype .. ": a pivot whose inverse is infinite", function()
    for _, n in ipairs { 20, 40 } do
      local x = ty.eye(n, { dtype = dtype })
      x:narrow(0, 0, 1):narrow(1, 0, 1):fill_(dtype == "f32" and 1e-39 or 1e-310) -- and its inverse is infinite
      local _, l, u = ty.lu(x)
      check.ok(largest(l - ty.eye(n, { dtype = dtype })) == 0 and largest(u - x) == 0, n)
    end
  end)

  check.test(dtype .. ": NaN is no singular matrix", function()
    for _, n in ipairs { 20, 100 } do
      local x = ty.eye(n, { dtype = dtype })
      x:narrow(0, 3, 1):fill_(0 / 0)
      local y, _, log = ty.inverse(x):sum():item(), ty.slogdet(x)
      check.ok(y ~= y and log:item() ~= log:item(), n)
    end
  end)

  check.test(dtype .. ": systems and determinants", function()
    local eps = dtype == "f64" and 2.3e-16 or 1.2e-7
    for _, case in ipairs { { 40, 20 }, { 130, 70 }, { 256, 256 }, { 200, 5 }, { 70, 900 } } do
      local n, m = case[1], case[2]
      local a = ty.randn(n, n, { dtype = dtype }) + ty.eye(n, { dtype = dtype }) * n ^ 0.5 * 2
      local b = ty.randn(n, m, { dtype = dtype })
      local x = ty.solve(a, b)
      local off = a:to "f64":matmul(x:to "f64") - b:to "f64"
      check.close({ largest(off) / (largest(a) * largest(x)) }, { 0 }, 4 * n * eps,
        ("%d unknowns, %d sides"):format(n, m))
      local values = ty.eigh(a:matmul(a:t()):to "f64")
      local _, log = ty.slogdet(a)
      check.close({ log:item() }, { values:log():sum():item() / 2 }, 1e3 * eps, ("determinant of %d"):format(n))
    end
  end)

  check.test(dtype .. ": the same whatever the threads", function()
    local before = ty.threads()
    local a, b = ty.randn(300, 300, { dtype = dtype }), ty.randn(300, 210, { dtype = dtype })
    local x, inverse
    for threads = 1, 3 do
      ty.set_threads(threads)
      local y, z = ty.solve(a, b), ty.inverse(a)
      check.ok(threads == 1 or (y:equal(x) and z:equal(inverse)), ("%d threads"):format(threads))
      x, inverse = y, z
    end
    ty.set_threads(before)
  end)
end

check.finish()
