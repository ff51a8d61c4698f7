-- Results so large that the kernels write them past the caches: the same numbers as from pieces that are not.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, ok, equal = check.test, check.ok, check.equal

local rows, width = 4099, 2101 -- 34 MB of f32, neither a multiple of a vector

local function same(a, b, what)
  equal(table.concat(a.shape, "x"), table.concat(b.shape, "x"), what)
  -- all bits, so that NaN counts as itself
  ok(a:eq(b):logical_or(a:isnan():logical_and(b:isnan())):all():item(), what)
end

-- f of all rows against f of the first, some and the last rows; row(t, first, count) cuts its arguments.
local function by_rows(what, f, ...)
  local all = f(...)
  for _, first in ipairs { 0, 2051, rows - 7 } do
    local part = {}
    for i, x in ipairs { ... } do part[i] = x.shape[1] == rows and x:narrow(0, first, 7) or x end
    same(all:narrow(0, first, 7), f(table.unpack(part)), what .. " from row " .. first)
  end
end

ty.manual_seed(5)
local x, y = ty.randn(rows, width), ty.randn(rows, width)
local w, b = ty.randn(width), ty.randn(width)
local target = ty.randint(0, width, { rows })

-- The sums of a row are taken around the mean of a few of its elements: these are far from the rest here.
test("norms of rows with outliers", function()
  local outliers = ty.randn(6, 3072) + 1e3
  for at = 0, 3071, 256 do outliers:narrow(1, at, 16):mul_(at % 512 == 0 and 40 or -7) end
  local wide = outliers:to "f64"
  local function error_of(f)
    local want = f(wide)
    return ((f(outliers):to "f64" - want):abs():max() / want:abs():max()):item()
  end
  local worst = math.max(error_of(function(p) return (p:layer_norm({ 3072 })) end),
    error_of(function(p) return (p:reshape(2, 3, 64, 48):group_norm(1)) end))
  ok(worst < 3e-6, ("worst error %g"):format(worst))
end)

test("elementwise", function()
  by_rows("add", function(p, q) return p + q end, x, y)
  by_rows("add a row", function(p, q) return p + q end, x, w)
  by_rows("add a column", function(p, q) return p + q end, x, y:narrow(1, 0, 1))
  by_rows("exp", function(p) return p:exp() end, x)
  by_rows("where", function(p, q) return ty.where(p:gt(0), p, q) end, x, y)
  by_rows("f64", function(p) return p * 2 end, x:to "f64")
  by_rows("bf16", function(p) return p:cast("bf16"):exp():cast "f32" end, ty.concat({ x, x }, 1))
  by_rows("view", function(p, q) return p:narrow(1, 1, width - 1) * q:narrow(1, 0, width - 1) end, x, y)
  local z = x:clone()
  z:add_(y)
  same(z, x + y, "in place")
end)

test("copies", function()
  by_rows("clone", function(p) return p:clone() end, x)
  by_rows("narrower", function(p) return p:narrow(1, 3, width - 4):contiguous() end, ty.concat({ x, x }, 1))
  by_rows("f64", function(p) return p:cast "f64" end, x)
  by_rows("expanded", function(p) return p:expand(-1, width):contiguous() end, y:narrow(1, 0, 1))
  local t = x:transpose(0, 1):contiguous()
  same(t:transpose(0, 1):contiguous(), x, "transposed twice")
  for _, c in ipairs { 0, 1000, width - 1 } do same(t:select(0, c), x:select(1, c):contiguous(), "column " .. c) end
  ok(ty.full({ rows, width }, 3):eq(3):all():item(), "full")
end)

test("softmax, norms and cross entropy with their gradients", function()
  local function gradient(f)
    return function(p, g, ...)
      p = p:detach():requires_grad_()
      return ty.grad((f(p, ...) * g):sum(), { p })[1]
    end
  end
  for name, f in pairs {
    softmax = function(p) return p:softmax(-1) end,
    log_softmax = function(p) return p:log_softmax(-1) end,
    layer_norm = function(p) return p:layer_norm({ width }, w, b) end,
    rms_norm = function(p) return p:rms_norm({ width }, w) end,
  } do
    by_rows(name, f, x)
    by_rows(name .. " gradient", gradient(f), x, y)
    local p, g = ty.cat({ x, x }, 1):cast "bf16":reshape(rows, 2, width), ty.cat({ y, y }, 1):reshape(rows, 2, width)
    by_rows(name .. " of halves", f, p)
    by_rows(name .. " gradient of halves", gradient(f), p, g)
  end
  local loss = function(p, t) return ty.cross_entropy(p, t, { reduction = "none", label_smoothing = 0.1 }) end
  by_rows("cross entropy", loss, x, target)
  by_rows("cross entropy gradient", function(p, g, t)
    return gradient(function(q) return loss(q, t) end)(p, g)
  end, x, y:select(1, 0), target)
  for _, shape in ipairs { { 2, 5000000 }, { 600, 20000 } } do -- longer than what is kept of a row
    local long = ty.randn(shape)
    ok((long:softmax(-1):narrow(0, 1, 1) - long:narrow(0, 1, 1):softmax(-1)):abs():max():item() < 1e-9, "long rows")
  end
end)

test("group_norm", function()
  local images = ty.randn(9, 12, 317, 251)
  local f = function(p) return p:group_norm(3) end
  local g = ty.randn_like(images)
  local back = function(p, q)
    p = p:detach():requires_grad_()
    return ty.grad((f(p) * q):sum(), { p })[1]
  end
  for _, i in ipairs { 0, 8 } do
    same(f(images):narrow(0, i, 1), f(images:narrow(0, i, 1)), "image " .. i)
    same(back(images, g):narrow(0, i, 1), back(images:narrow(0, i, 1), g:narrow(0, i, 1)), "gradient of image " .. i)
  end
end)

-- Threads sort parts of a long line, which are merged: for any number of them the same as one thread.
test("long lines sorted by several threads", function()
  local n = 150001
  local lines = { close = ty.randint(0, 1000, { n }), f32 = ty.randn(n),
    far = ty.randint(math.mininteger // 2, math.maxinteger // 2, { n }),
    f64 = ty.randn({ 2, n }, { dtype = "f64" }), u8 = ty.randint(0, 255, { n }):to "u8" }
  lines.f32:masked_fill_(lines.f32:gt(2), 0 / 0)
  for name, line in pairs(lines) do
    for _, descending in ipairs { false, true } do
      local results = {}
      for i, threads in ipairs { 1, 2, 3, 5, 8 } do
        ty.set_threads(threads)
        local values, positions = line:sort(-1, descending)
        results[i] = { values, positions }
        equal(positions:eq(results[1][2]):all():item(), true, name .. " on " .. threads .. " threads")
        equal(line:gather(-1, positions):nan_to_num(1e9):eq(values:nan_to_num(1e9)):all():item(), true)
      end
      ty.set_threads(0)
      local most, at = line:topk(n // 2, -1, descending)
      equal(at:eq(results[1][2]:narrow(-1, 0, n // 2)):all():item(), true, name .. ": the first half")
      equal(most.shape[#most.shape], n // 2)
    end
  end
end)

check.finish()
