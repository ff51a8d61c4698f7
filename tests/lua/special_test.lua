-- Special functions at awkward arguments, against values that mpmath computed: tests/fixtures/special.lua, made by
-- make_special.py. And the slopes of the Bessel functions where those of finite differences are too coarse.

local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local fixtures = dofile(check.root .. "tests/fixtures/special.lua")

-- Of the value, or of 1 where it crosses zero.
local bound = { log_bessel_i = 1e-12, log_bessel_k = 1e-12, ndtr = 3e-13, gammainc = 3e-13, gammaincc = 3e-13 }

for name, rows in pairs(fixtures) do
  check.test(name .. ": as mpmath", function()
    local columns = {}
    for i = 1, #rows[1] do
      columns[i] = {}
      for k, r in ipairs(rows) do columns[i][k] = r[i] end
    end
    local want = table.remove(columns)
    local got = {}
    if name == "polygamma" then
      for k, r in ipairs(rows) do
        got[k] = ty.polygamma(math.tointeger(r[1]), ty.tensor({ r[2] }, { dtype = "f64" })):item()
      end
    else
      local args = {}
      for i, c in ipairs(columns) do args[i] = ty.tensor(c, { dtype = "f64" }) end
      got = ty[name](table.unpack(args)):tolist()
    end
    for k = 1, #want do
      local error = math.abs(got[k] - want[k])
      local scale = name:find "log" and math.max(1, math.abs(want[k])) or math.abs(want[k])
      check.ok(error <= (bound[name] or 1e-13) * scale,
        ("%s(%s): %.17g, expected %.17g"):format(name, table.concat(rows[k], ", ", 1, #rows[k] - 1), got[k], want[k]))
    end
  end)
end

-- Forms of their own in f32: within 5 ulp. Below 0 f64 is rounded.
for name, low in pairs { lgamma = 1e-30, digamma = 1e-30, i0 = -90, i1 = -90, i0e = -1e4, i1e = -1e4 } do
  check.test(name .. ": in f32 as in f64", function()
    local x = low > 0 and ty.exp(ty.arange(20000):to "f64" * (140 / 20000) - 69)
      or ty.arange(20001):to "f64" * (-2 * low / 20000) + low
    x = ty.cat({ x, ty.rand(20000, { dtype = "f64" }) * 4 }, 0):to "f32"
    local function apart(at)
      local want = ty[name](at:to "f64")
      return ((ty[name](at):to "f64" - want):abs() / (want:abs() + 1e-300)):max():item() -- 0 is 0
    end
    check.ok(apart(x) <= 5 * 2 ^ -23, ("%g of itself"):format(apart(x)))
    if low < 0 then return end
    local below = ty.arange(20000) * -0.000437 - 1e-3 -- no whole numbers
    check.ok(apart(below) <= 2 ^ -23, ("%g below 0"):format(apart(below)))
  end)
end

check.test("erfinv: in f32 as in f64, in blocks with and without numbers near 1", function()
  local x = ty.cat({ ty.linspace(-1, 1, 20001):narrow(0, 1, 19999), ty.linspace(-0.99, 0.99, 5000) }, 0)
  local want = ty.erfinv(x:to "f64")
  local off = ((ty.erfinv(x):to "f64" - want):abs() / (want:abs() + 1e-300)):max():item()
  check.ok(off <= 3 * 2 ^ -23, ("%g of itself"):format(off))
end)

check.test("log_bessel: the Wronskian of both slopes is 1/x", function()
  -- (log I)' - (log K)' = 1 / (x I K)
  for _, v in ipairs { 0, 0.3, 5, 29.5, 40, 1e3, 1e6 } do
    for _, x in ipairs { 0.01, 1, 30, 900, 2e3, 1e6 } do
      local function slope(f)
        local t = ty.tensor({ x }, { dtype = "f64" }):requires_grad_()
        local y = f(v, t)
        y:sum():backward()
        return t.grad:item(), y:item()
      end
      local di, i = slope(ty.log_bessel_i)
      local dk, k = slope(ty.log_bessel_k)
      local want = math.exp(-i - k) / x
      check.ok(math.abs(di - dk - want) <= 1e-9 * want,
        ("v = %g, x = %g: %.17g, expected %.17g"):format(v, x, di - dk, want))
    end
  end
end)

check.finish()
