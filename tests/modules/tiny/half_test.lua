-- tiny.primitives and tiny.step, convolutions in half precision, and models.DSCNN.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local tiny = require "tycho.tiny"

-- { x, weight, stride, padding, groups }: pointwise ones with rests of channels, results and positions; windows with
-- many results; what goes through f32.
local shapes = {
  { { 2, 8, 5, 7 }, { 8, 8, 1, 1 } }, { { 3, 9, 8, 8 }, { 13, 9, 1, 1 } }, { { 1, 64, 25, 5 }, { 64, 64, 1, 1 } },
  { { 2, 31, 3, 3 }, { 50, 31, 1, 1 } }, { { 2, 16, 6, 6 }, { 24, 8, 1, 1 }, 1, 0, 2 },
  { { 2, 2, 13, 9 }, { 64, 2, 10, 4 }, 2, { 4, 1 } }, { { 9, 8, 7, 9 }, { 128, 4, 3, 3 }, 2, 1, 2 },
  { { 2, 12, 8, 8 }, { 12, 1, 3, 3 }, 1, 1, 12 }, { { 2, 16, 9, 8 }, { 64, 16, 3, 3 }, 1, 1 },
}

check.test("products of bf16 and f16 with sums of f32, against f64", function()
  ty.manual_seed(1)
  for k, shape in ipairs(shapes) do
    local s, p, n = shape[3] or 1, shape[4] or 0, shape[5] or 1
    for dtype, tolerance in pairs { bf16 = 2 ^ -8, f16 = 2 ^ -11 } do
      local x, w = ty.randn(shape[1]):to(dtype), ty.randn(shape[2]):to(dtype)
      local b = ty.randn(shape[2][1]):to(dtype)
      local y = ty.conv2d(x, w, b, s, p, 1, n)
      local g = ty.randn(y.shape):to(dtype)
      check.equal(y.dtype, dtype)
      local function compare(got, fn, ...)
        local wide = { ... }
        for i, t in ipairs(wide) do wide[i] = t:to "f64" end
        local want = fn(table.unpack(wide))
        local worst = (got:to "f64" - want):abs():amax():item() / want:abs():amax():item()
        check.ok(worst <= tolerance, ("%s, shape %d: off by %.2g"):format(dtype, k, worst))
      end
      compare(y, function(a, c, d) return ty.conv2d(a, c, d, s, p, 1, n) end, x, w, b)
      compare(ty.conv2d_backward_input(g, w, x.shape, s, p, 1, n),
        function(a, c) return ty.conv2d_backward_input(a, c, x.shape, s, p, 1, n) end, g, w)
      compare(ty.conv2d_backward_weight(g, x, w.shape, s, p, 1, n),
        function(a, c) return ty.conv2d_backward_weight(a, c, w.shape, s, p, 1, n) end, g, x)
    end
  end
end)

check.test("the numbers do not depend on the threads", function()
  ty.manual_seed(2)
  local x, w = ty.randn(20, 16, 6, 6):to "bf16", ty.randn(64, 16, 1, 1):to "bf16"
  local threads = ty.threads()
  local seen = {}
  for _, count in ipairs { 1, 2 } do
    ty.threads(count)
    local y = ty.conv2d(x, w)
    seen[#seen + 1] = { y, ty.conv2d_backward_input(y, w, x.shape), ty.conv2d_backward_weight(y, x, w.shape) }
  end
  ty.threads(threads)
  for i = 1, 3 do check.equal(ty.all(seen[1][i]:eq(seen[2][i])):item(), true) end
end)

check.test("counts: one product for each output, channel and tap, alike for all three primitives", function()
  ty.manual_seed(3)
  local model = models.DSCNN { width = 8, blocks = 1, classes = 5 }
  local report = tiny.primitives(model, ty.randn(2, 1, 49, 10), { rounds = 1, clock = 1e9 })
  local seen = {}
  for _, row in ipairs(report.rows) do
    seen[row.form] = seen[row.form] or row.macs
    check.equal(row.macs, seen[row.form])
    check.ok(row.seconds.f32 > 0 and row.seconds.bf16 > 0)
  end
  local positions = 2 * 25 * 5 -- of [n, 25, 5]: 49 and 10 with a padding of 5 and 1, kernels of 10 x 4, stride 2
  check.equal(seen, { convolution = positions * 8 * 40, depthwise = positions * 8 * 9, pointwise = positions * 8 * 8,
    linear = 2 * 5 * 8 })
  check.equal(#report:sums(), 12)
  check.ok(tostring(report):find "pointwise, weight: 0.02 MMAC, bf16 ", tostring(report))
end)

check.test("a step in bf16: f32 weights, and nearly the step in f32", function()
  local function trained(dtype)
    ty.manual_seed(4)
    local model = models.DSCNN { width = 16, blocks = 1, classes = 5, dropout = 0 }
    model:eval()
    local x, y = ty.randn(8, 1, 49, 10), ty.randint(0, 5, { 8 })
    tiny.fold(model, x)
    local step = tiny.step(model, ty.optim.SGD(model, { lr = 0.05 }), function(m, a, b)
      return ty.cross_entropy(m(a), b)
    end, dtype)
    local losses = {}
    for i = 1, 12 do losses[i] = step(x, y):item() end
    for _, p in ipairs(model:parameters()) do check.equal(p.dtype, "f32") end
    return losses
  end
  local f32, bf16 = trained "f32", trained "bf16"
  check.ok(f32[12] < f32[1], "the loss falls")
  for i = 1, 12 do check.ok(math.abs(f32[i] - bf16[i]) < 0.02 * f32[i], "loss " .. i) end
end)

check.test("errors", function()
  local model = models.DSCNN { width = 8, blocks = 1 }
  check.fails(function() tiny.step(model, {}, function() end, "f64") end, "tiny.step: dtype: expected")
  check.fails(function() models.DSCNN { width = 0 } end, "DSCNN: width: expected an integer >= 1")
  check.fails(function() models.MobileNetV2 { settings = { { 1, 2, 3 } } } end, "settings%[1%]%[4%]")
end)

check.finish()
