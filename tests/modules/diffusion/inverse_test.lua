-- Volumes from few measurements: adjoints by inner products, conjugate gradients and ADMM against dense solutions,
-- filtered back-projection of a disc, the sampler's parts on priors known in closed form.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local closed_form = dofile(here .. "closed_form.lua")

local datasets = require "tycho.datasets"

local inverse = diffusion.inverse

local function dot(a, b) return (a * b):sum():item() end
local function views(n, arc) return ty.arange(n, { dtype = "f64" }) * ((arc or math.pi) / n) end
local function normal(...) return ty.randn({ ... }, { dtype = "f64" }) end

local function operators()
  return { radon = inverse.radon { angles = views(5), size = { 9, 8 } },
    limited = inverse.radon { angles = views(4, math.pi / 2), detectors = 11, size = { 9, 8 } },
    fourier = inverse.fourier(ty.rand({ 9, 8 }, { dtype = "f64" }):gt(0.5):to "f64") }
end

check.test("adjoints: <Ax, y> = <x, A'y>", function()
  ty.manual_seed(1)
  for name, A in pairs(operators()) do
    local x = normal(3, 1, 9, 8)
    local measured = A.forward(x)
    local y = ty.randn(measured.shape, { dtype = "f64" })
    local back = A.adjoint(y)
    check.equal(back.shape, x.shape)
    check.ok(math.abs(dot(measured, y)) > 0.1, name)
    check.close(dot(measured, y), dot(x, back), 1e-9, name)
  end
  for _, periodic in ipairs { true, false } do
    for dim = 0, 3 do
      local x, d = normal(4, 1, 3, 5), normal(4, 1, 3, 5)
      check.close(dot(inverse.difference(x, dim, periodic), d), dot(x, inverse.difference_adjoint(d, dim, periodic)),
        1e-12)
    end
  end
  check.equal(inverse.difference(ty.tensor { 1.0, 4.0, 2.0 }):tolist(), { 3, -2, -1 })
  check.equal(inverse.difference(ty.tensor { 1.0, 4.0, 2.0 }, 0, false):tolist(), { 3, -2, 0 })
end)

check.test("all of k-space gives the volume back, and the gradient of |Ax - y|^2 / 2 is A'(Ax - y)", function()
  ty.manual_seed(2)
  local x = normal(2, 1, 6, 6)
  local whole = inverse.fourier(ty.ones({ 6, 6 }, { dtype = "f64" }))
  check.close(whole.adjoint(whole.forward(x)):flatten():tolist(), x:flatten():tolist(), 1e-12)
  for _, A in pairs(operators()) do
    local free = normal(2, 1, 9, 8):requires_grad_()
    local y = A.forward(normal(2, 1, 9, 8))
    local g = ty.grad((A.forward(free) - y):square():sum() / 2, { free })[1]
    check.close(g:flatten():tolist(), A.adjoint(A.forward(free:detach()) - y):flatten():tolist(), 1e-9)
  end
end)

check.test("shrink", function()
  check.equal(inverse.shrink(ty.tensor { -3.0, -0.5, 0.0, 0.5, 3.0 }, 1):tolist(), { -2, 0, 0, 0, 2 })
end)

-- A as a matrix, [measurements, voxels] of one slice.
local function matrix(A, h, w)
  local rows = {}
  for i = 0, h * w - 1 do
    local e = ty.zeros({ 1, 1, h, w }, { dtype = "f64" })
    e:flatten():narrow(0, i, 1):fill_(1)
    rows[i + 1] = A.forward(e):flatten()
  end
  return ty.stack(rows, 1)
end

check.test("conjugate gradients solve the normal equations in as many steps as there are unknowns", function()
  ty.manual_seed(3)
  local A = inverse.radon { angles = views(6), size = 4 }
  local y = A.forward(normal(1, 1, 4, 4)) + normal(1, 6, 6) * 0.1
  local function apply(p) return A.adjoint(A.forward(p)) + p * 0.1 end
  local x = inverse.conjugate_gradients(apply, A.adjoint(y), normal(1, 1, 4, 4), { steps = 25, tolerance = 1e-13 })
  local a = matrix(A, 4, 4)
  local direct = ty.solve(a:transpose(0, 1):matmul(a) + ty.eye(16, { dtype = "f64" }) * 0.1,
    a:transpose(0, 1):matmul(y:flatten():unsqueeze(1)))
  check.close(x:flatten():tolist(), direct:flatten():tolist(), 1e-9)
  local same = inverse.conjugate_gradients(apply, A.adjoint(y), x, { steps = 0 })
  check.equal(same:flatten():tolist(), x:flatten():tolist())
end)

check.test("conjugate gradients stay where they have come to, though the operator is singular", function()
  ty.manual_seed(11)
  local A = inverse.fourier(ty.arange(8):lt(3):to "f32":unsqueeze(1):expand(8, 8))
  local x = ty.randn { 3, 1, 8, 8 }
  local back = A.adjoint(A.forward(x))
  local function apply(p) return A.adjoint(A.forward(p)) end
  for _, from in ipairs { ty.zeros_like(x), ty.randn(x.shape) * 10, x } do
    local few = inverse.conjugate_gradients(apply, back, from, { steps = 3 })
    local many = inverse.conjugate_gradients(apply, back, from, { steps = 60 })
    check.close(many:flatten():tolist(), few:flatten():tolist(), 1e-4)
  end
end)

check.test("scale: the largest eigenvalue of A'A; parts of it mean the same for an operator in other units", function()
  ty.manual_seed(12)
  local A = inverse.radon { angles = views(5), size = 4 }
  local a = matrix(A, 4, 4)
  local values = a:transpose(0, 1):matmul(a):eigh()
  local scale = inverse.scale(A, ty.zeros({ 2, 1, 4, 4 }, { dtype = "f64" }), { steps = 200 })
  check.close(scale, values:max():item(), 1e-6)
  local other = { forward = function(x) return A.forward(x) * 0.1 end,
    adjoint = function(y) return A.adjoint(y) * 0.1 end }
  check.close(inverse.scale(other, ty.zeros({ 2, 1, 4, 4 }, { dtype = "f64" }), { steps = 200 }), scale / 100, 1e-8)
  local y = A.forward(normal(3, 1, 4, 4))
  local one = inverse.tv(A, y, { lambda = 0.01 * scale, rho = 0.1 * scale })
  local two = inverse.tv(other, y * 0.1, { lambda = 0.01 * scale / 100, rho = 0.1 * scale / 100 })
  check.close(two:flatten():tolist(), one:flatten():tolist(), 1e-9)
  local nothing = { forward = function(x) return x * 0 end, adjoint = function(z) return z * 0 end }
  check.equal(inverse.scale(nothing, ty.zeros { 1, 1, 2, 2 }), 0)
  local ct, mri = inverse.ct { size = 8, views = 5 }, inverse.mri { size = 32 }
  check.close(ct.scale, inverse.scale(ct.operator, ty.zeros { 1, 1, 8, 8 }), 1e-3)
  check.close(mri.scale, inverse.scale(mri.operator, ty.zeros { 1, 1, 32, 32 }), 1e-3)
  check.fails(function() inverse.scale({}, y) end, "inverse.scale: operator: expected one with forward and adjoint")
  check.fails(function() inverse.scale(A, ty.zeros(3)) end, "inverse.scale: x: expected [slices, 1, h, w]")
end)

check.test("filtered back-projection of many views gives a disc back", function()
  local side = 48
  local at = ty.arange(side, { dtype = "f64" }) - (side - 1) / 2
  local disc = (at:square():unsqueeze(1) + at:square():unsqueeze(0)):le(14 ^ 2):to "f64":reshape(1, 1, side, side)
  local A = inverse.radon { angles = views(120), size = side }
  local found = inverse.fbp(A, A.forward(disc))
  local inside, outside = found:narrow(2, 18, 12):narrow(3, 18, 12), found:narrow(2, 0, 6)
  check.close(inside:mean():item(), 1, 0.01)
  check.ok((inside - 1):abs():max():item() < 0.06)
  check.ok(outside:abs():max():item() < 0.06)
  check.ok(inverse.psnr(found, disc) > 22)
end)

check.test("ADMM comes to the least of |Ax - y|^2 / 2 + lambda |Dx|_1: no direction leads lower", function()
  ty.manual_seed(4)
  local A = inverse.radon { angles = views(3), size = 4 }
  local truth = ty.zeros({ 4, 1, 4, 4 }, { dtype = "f64" })
  truth:narrow(2, 1, 2):fill_(1)
  local y = A.forward(truth) + ty.randn({ 4, 3, 6 }, { dtype = "f64" }) * 0.2
  local lambda, dims = 0.7, { 0, 2, 3 }
  local function cost(x)
    local sum = (A.forward(x) - y):square():sum():item() / 2
    for _, dim in ipairs(dims) do sum = sum + lambda * inverse.difference(x, dim, false):abs():sum():item() end
    return sum
  end
  local x = inverse.tv(A, y, { lambda = lambda, rho = 2, iterations = 400, cg = 30, dims = dims })
  local least = cost(x)
  for _ = 1, 200 do
    local step = ty.randn(x.shape, { dtype = "f64" }) * 10 ^ (-1 - 3 * ty.rand(1):item())
    check.ok(cost(x + step) >= least - 1e-6)
  end
  check.ok(cost(truth) > least)
  check.ok(cost(inverse.tv(A, y, { lambda = 0, rho = 2, iterations = 50, cg = 30 })) > least + 0.05)
end)

-- The part on a "prior" that leaves everything as it is: what remains is the ADMM.
local function without_prior(part, x, steps)
  local run = { state = {} }
  run.state[part] = part:start(run)
  for _ = 1, steps do x = part:advance(run, function() return x end) end
  return x
end

check.test("the part without a prior, with CG run out, is total variation along z; rho 0 is the data's least squares",
  function()
    ty.manual_seed(5)
    local A = inverse.radon { angles = views(7), size = 4 }
    local y = A.forward(normal(5, 1, 4, 4)) + ty.randn({ 5, 7, 6 }, { dtype = "f64" }) * 0.3
    local zero = ty.zeros({ 5, 1, 4, 4 }, { dtype = "f64" })
    local x = without_prior(inverse.mbir(A, y, { lambda = 0.8, rho = 3, cg = 60 }), zero, 300)
    local tv = inverse.tv(A, y, { lambda = 0.8, rho = 1.5, iterations = 500, cg = 60, dims = { 0 }, periodic = true })
    check.close(x:flatten():tolist(), tv:flatten():tolist(), 1e-5)
    local plain = without_prior(inverse.mbir(A, y, { lambda = 0, rho = 0, cg = 4 }), zero, 1)
    local direct = inverse.conjugate_gradients(function(p) return A.adjoint(A.forward(p)) end, A.adjoint(y), zero,
      { steps = 4 })
    check.close(plain:flatten():tolist(), direct:flatten():tolist(), 1e-12)
    check.ok((x - plain):abs():max():item() > 1e-2)
  end)

check.test("split and dual persist: steps of one iteration are iterations of one step", function()
  ty.manual_seed(6)
  local A = inverse.radon { angles = views(3), size = 4 }
  local y = A.forward(normal(3, 1, 4, 4))
  local zero = ty.zeros({ 3, 1, 4, 4 }, { dtype = "f64" })
  local warm = without_prior(inverse.mbir(A, y, { lambda = 0.3, rho = 2 }), zero, 12)
  local tv = inverse.tv(A, y, { lambda = 0.3, rho = 2, iterations = 12, cg = 1, dims = { 0 }, periodic = true })
  check.close(warm:flatten():tolist(), tv:flatten():tolist(), 1e-12)
end)

local schedule = diffusion.schedule.exploding { sigma_min = 0.01, sigma_max = 20 }

check.test("predictor and corrector draw from a Gaussian, and ask the network twice a step but for the last", function()
  ty.manual_seed(7)
  local model = closed_form.gaussian(schedule, "epsilon", 0.5, 0.3)
  local sampler = diffusion.Sampler { schedule = schedule, predict = "epsilon", steps = 60,
    spacing = diffusion.spacing.exponential(), solver = diffusion.solver.predictor_corrector { snr = 0.1 } }
  local x, run = sampler:sample(model, { 200, 50 })
  check.equal(run.calls, 2 * 60 - 1)
  check.close(x:mean():item(), 0.3, 0.03)
  check.close(x:std():item(), 0.5, 0.05)
  local flow = diffusion.Sampler { schedule = diffusion.schedule.flow(), predict = "flow", steps = 2,
    solver = diffusion.solver.predictor_corrector() }
  check.fails(function() flow:sample(function(z) return z end, { 1, 2 }) end, "whose signal stays")
end)

check.test("posterior sampling: of a Gaussian prior, the gradient is the one in closed form", function()
  ty.manual_seed(8)
  local model = closed_form.gaussian(schedule, "epsilon", 0.5, 0.3)
  local function net(x, t) return model(x:flatten(1), t):reshape(x.shape) end
  local A = inverse.radon { angles = views(3), size = 4 }
  local y = A.forward(ty.randn({ 2, 1, 4, 4 }))
  local part = inverse.dps(A, y, { scale = 0.7 })
  local point, to = schedule:point(2), schedule:point(1)
  local x = ty.randn({ 2, 1, 4, 4 }) * 2
  local sampler = diffusion.Sampler { schedule = schedule, predict = "epsilon", parts = { part } }
  local moved, asked = nil, 0
  sampler:sample(function(z, t) asked = asked + 1 return net(z, t) end, { 2, 1, 4, 4 }, { points = { point, to }, x = x,
    on_step = function(_, z) moved = z:clone() end })
  check.equal(asked, 1)
  -- x0 = m + c (x - m), c = s^2 / (s^2 + sigma^2); the step to sigma 1 by DDIM; then against A'(Ax0 - y) c / |Ax0 - y|.
  local c = 0.25 / (0.25 + 4)
  local x0 = (x - 0.3) * c + 0.3
  local off = A.forward(x0) - y
  local gradient = A.adjoint(off / off:flatten(1):square():sum({ 1 }):sqrt():reshape(2, 1, 1)) * c
  local expected = x0 + (x - x0) / 2 - gradient * 0.7
  check.close(moved:flatten():tolist(), expected:flatten():tolist(), 1e-4)
end)

check.test("problems: CT as the data set's scanner measures it, and filtered back-projection of it", function()
  ty.manual_seed(9)
  local x = ty.rand({ 3, 1, 8, 8 })
  local unit = datasets.volumes.water * datasets.volumes.field / 10 / 8
  local function scanner(options) return datasets.volumes.project(x:squeeze(1), options).sinogram end
  for _, arc in ipairs { 180, 90 } do
    local scan = inverse.ct { size = 8, views = 5, arc = arc, dose = 500, unit = unit }
    local y = scan.measure(x, 3)
    check.equal(y:tolist(), (scanner { views = 5, arc = arc, dose = 500, seed = 3 } / unit):tolist())
    check.ok(not y:eq(scan.measure(x, 4)):all():item(), "another seed")
    check.close(scan.classical(y):flatten():tolist(), (inverse.fbp(scan.operator, y) * (arc / 180)):flatten():tolist(),
      1e-12)
    local clear = inverse.ct { size = 8, views = 5, arc = arc }
    check.equal(clear.measure(x, 3):tolist(), clear.operator.forward(x):tolist(), "no dose, no noise")
    check.close(clear.measure(x, 3):flatten():tolist(),
      (scanner { views = 5, arc = arc } / unit):flatten():tolist(), 1e-5)
  end
  check.equal(inverse.ct { size = 4 }.operator.angles.shape, { 180 })
  check.fails(function() inverse.ct { views = 3 } end, "inverse.ct: size: expected pixels of a side, got nil")
  check.fails(function() inverse.ct { size = 4, dose = 0 } end, "inverse.ct: dose: expected a finite number >= 1")
  check.fails(function() inverse.ct { size = 4 }.measure(x) end, "ct.measure: seed: expected an integer, got nil")
end)

check.test("problems: MRI measures rows of k-space, the lowest and others, with noise on these alone", function()
  ty.manual_seed(10)
  local x = ty.rand({ 2, 1, 32, 32 })
  -- The rows that an operator measures, as 1 and 0.
  local function rows_of(scan) return scan.operator.forward(x):square():sum { 0, 2, 3 }:gt(0):to "i64":tolist() end
  local scan = inverse.mri { size = 32 }
  local rows = rows_of(scan)
  check.equal(ty.tensor(rows):sum():item(), 8)
  for _, i in ipairs { 0, 1, 2, 30, 31 } do check.equal(rows[i + 1], 1) end
  check.equal(rows_of(inverse.mri { size = 32 }), rows)
  local other = rows_of(inverse.mri { size = 32, seed = 2 })
  check.ok(table.concat(other) ~= table.concat(rows), "other rows")
  local lowest = rows_of(inverse.mri { size = 32, share = 5 / 32 })
  check.equal(table.concat(lowest), "111" .. ("0"):rep(27) .. "11")
  check.equal(ty.tensor(rows_of(inverse.mri { size = 32, share = 1 })):sum():item(), 32)
  local clear, y = scan.operator.forward(x), scan.measure(x, 5)
  local noise = y - clear
  check.equal(noise:square():sum { 0, 2, 3 }:gt(0):to "i64":tolist(), rows, "noise where it measures")
  check.close(noise:square():sum():item(), 1e-4 * 2 * 8 * 32 * 2, 1e-4 * 2 * 8 * 32 * 2 * 0.15)
  check.equal(scan.measure(x, 5):tolist(), y:tolist())
  check.ok(not scan.measure(x, 6):eq(y):all():item(), "another seed")
  check.equal(inverse.mri { size = 32, noise = 0 }.measure(x, 5):tolist(), clear:tolist())
  check.equal(scan.classical(y):tolist(), scan.operator.adjoint(y):tolist())
  check.fails(function() inverse.mri {} end, "inverse.mri: size: expected pixels of a side, got nil")
  check.fails(function() inverse.mri { size = 32, share = 0.125 } end,
    "inverse.mri: middle: expected less than the share, 0.125 of 32 rows, got 0.125")
  check.fails(function() scan.measure(x) end, "mri.measure: seed: expected an integer, got nil")
end)

check.test("psnr and what is refused", function()
  local one = ty.ones({ 1, 1, 4, 4 })
  check.close(inverse.psnr(one * 0.9, one), 20, 1e-4)
  check.close(inverse.psnr(one * 0.9, one, 10), 40, 1e-4)
  check.fails(function() inverse.radon { size = 4 } end, "inverse.radon: angles: expected one")
  check.fails(function() inverse.radon { angles = views(3), size = "a" } end, "inverse.radon: size")
  check.fails(function() inverse.fourier(ty.ones(3)) end, "inverse.fourier: mask: expected [h, w]")
  local A = inverse.radon { angles = views(3), size = 4 }
  check.fails(function() A.forward(ty.ones(2, 4, 4)) end, "expected [slices, 1, h, w]")
  check.fails(function() inverse.mbir({}, ty.ones(1)) end, "operator: expected one with forward and adjoint")
  check.fails(function() inverse.mbir(A, ty.ones({ 1, 3, 6 }), { lambda = -1 }) end, "lambda: expected a number >= 0")
  check.fails(function() inverse.tv(A, ty.ones({ 1, 3, 6 }), { cg = 0 }) end, "cg: expected an integer >= 1")
  check.fails(function() inverse.fbp(A, ty.ones(3)) end, "inverse.fbp: y: expected")
  check.fails(function() inverse.shrink(one, -1) end, "inverse.shrink: by")
end)

check.finish()
