--- Volumes from few measurements: linear forward models with their exact adjoints, classical reconstructions, and parts
-- of a sampler by which a prior of slices follows the measurements.
--
--     local A = inverse.radon { angles = angles, detectors = 46, size = 32 }
--     local part = inverse.mbir(A, y, { lambda = 0.5, rho = 10 })
--     local volume = process:sample(prior, { 32, 1, 32, 32 }, { solver = solver.predictor_corrector(), parts = { part }
-- })
--
-- A problem is what one reconstructs from: an operator, what it measures with noise, and what is usually made of that.
--
--     local scan = inverse.ct { size = 32, views = 4, dose = 1e6, unit = 0.2 }
--     local y = scan.measure(volume, 7)
--     local usual = scan.classical(y)
--     local better = inverse.tv(scan.operator, y, { lambda = 0.002 * scan.scale, rho = 0.04 * scan.scale })
--
-- Volumes are [slices, 1, h, w], which is how a sampler has them: the slices are the batch. An operator has
-- forward(x) and adjoint(y) with <forward(x), y> = <x, adjoint(y)>.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local predictions = require "tycho.diffusion.prediction"

local expect, fail, describe, none = arguments.expect, arguments.fail, arguments.describe, arguments.none
local M = {}

local function check_volume(who, name, x)
  expect(who, name, x, "a tensor")
  if x.ndim ~= 4 or x.shape[2] ~= 1 then fail("%s: %s: expected [slices, 1, h, w], got %s", who, name, describe(x)) end
end

local function check_operator(who, A)
  expect(who, "operator", A, "a table")
  if type(A.forward) ~= "function" or type(A.adjoint) ~= "function" then
    fail("%s: operator: expected one with forward and adjoint, such as inverse.radon { ... }", who)
  end
end

-- ---- forward models ----

-- Angles and masks go where volumes and measurements are.

--- Parallel-beam projections of each slice, in sides of a pixel: ty.radon and its exact adjoint ty.backproject; y
-- [slices, views, detectors]. options: angles (f64 [views], radians), detectors (0: as many as cover the diagonal),
-- size (of a slice: a number or { h, w }). Sparse views and limited angles are a matter of the angles.
---@param options {angles: Tensor, detectors?: integer, size: integer|integer[]}
---@return table operator
function M.radon(options)
  local o = arguments.read("inverse.radon", options, { angles = none, detectors = 0, size = none },
    { angles = "a tensor", detectors = "an integer >= 0", size = "an integer >= 1 or a pair of integers" })
  for _, name in ipairs { "angles", "size" } do
    if not o[name] then fail("inverse.radon: %s: expected one, got nil", name) end
  end
  local size = type(o.size) == "table" and o.size or { o.size, o.size }
  return { angles = o.angles, size = size,
    forward = function(x)
      check_volume("radon.forward", "x", x)
      return ty.radon(x:squeeze(1), o.angles:to { device = x.device }, o.detectors)
    end,
    adjoint = function(y) return ty.backproject(y, o.angles:to { device = y.device }, size):unsqueeze(1) end }
end

--- The unitary Fourier transform of each slice where a mask has ones, as MRI measures it; y [slices, h, w, 2], complex.
-- The adjoint gives the real part, since volumes are real. mask: [h, w] of 0 and 1, the frequency 0 at its first place.
---@param mask Tensor
---@return table operator
function M.fourier(mask)
  expect("inverse.fourier", "mask", mask, "a tensor")
  if mask.ndim ~= 2 then fail("inverse.fourier: mask: expected [h, w], got %s", describe(mask)) end
  local kept = ty.keep(mask:unsqueeze(-1):clone())
  local function like(x) return kept:to { dtype = x.dtype, device = x.device } end
  return {
    forward = function(x)
      check_volume("fourier.forward", "x", x)
      x = x:squeeze(1)
      return ty.fft2(ty.stack({ x, ty.zeros_like(x) }, 3), nil, nil, "ortho") * like(x)
    end,
    adjoint = function(y) return ty.ifft2(y * like(y), nil, nil, "ortho"):select(-1, 0):unsqueeze(1) end }
end

-- ---- differences ----

--- The difference of neighbours along a dimension (0: between slices), the last's neighbour being the first, as the
-- paper's code has it; periodic false: the last has none and gives 0.
---@param x Tensor
---@param dim? integer  (0)
---@param periodic? boolean  (true)
---@return Tensor
function M.difference(x, dim, periodic)
  expect("inverse.difference", "x", x, "a tensor")
  dim = dim or 0
  expect("inverse.difference", "dim", dim, "an integer")
  local d = x:roll({ -1 }, { dim }) - x
  if periodic ~= false then return d end
  local n = x.shape[dim + 1]
  return ty.concat({ d:narrow(dim, 0, n - 1), ty.zeros_like(d:narrow(dim, 0, 1)) }, dim)
end

--- The adjoint of difference.
---@param d Tensor
---@param dim? integer
---@param periodic? boolean
---@return Tensor
function M.difference_adjoint(d, dim, periodic)
  expect("inverse.difference_adjoint", "d", d, "a tensor")
  dim = dim or 0
  expect("inverse.difference_adjoint", "dim", dim, "an integer")
  if periodic == false then
    local n = d.shape[dim + 1]
    d = ty.concat({ d:narrow(dim, 0, n - 1), ty.zeros_like(d:narrow(dim, 0, 1)) }, dim)
  end
  return d:roll({ 1 }, { dim }) - d
end

--- What is nearer to 0 by `by`, at most to 0: the proximal map of by * |x|.
---@param x Tensor
---@param by number
---@return Tensor
function M.shrink(x, by)
  expect("inverse.shrink", "x", x, "a tensor")
  expect("inverse.shrink", "by", by, "a number >= 0")
  return x - x:clamp(-by, by)
end

-- ---- classical reconstructions ----

--- x after steps of conjugate gradients on apply(x) = b, where apply is linear, symmetric and not negative (Hestenes
-- and Stiefel 1952). It ends where the residual is no more than rounding, too: steps along what is left then would be
-- lengths divided by nothing, where `apply` is singular. options: steps (10), tolerance (0: of the residual's norm,
-- below which it ends).
---@param apply fun(x: Tensor): Tensor
---@param b Tensor
---@param x Tensor  where it begins
---@param options? {steps?: integer, tolerance?: number}
---@return Tensor
function M.conjugate_gradients(apply, b, x, options)
  local who = "inverse.conjugate_gradients"
  expect(who, "apply", apply, "a function")
  expect(who, "b", b, "a tensor")
  expect(who, "x", x, "a tensor")
  local o = arguments.read(who, options, { steps = 10, tolerance = 0 }, { steps = "an integer >= 0",
    tolerance = "a number >= 0" })
  local r = b - apply(x)
  local p, before = r, (r * r):sum():item()
  local rounding = (b.dtype == "f64" and 2.0 ^ -50 or 2.0 ^ -21) ^ 2 * math.max(before, (b * b):sum():item())
  local least = math.max(o.tolerance ^ 2, rounding)
  for _ = 1, o.steps do
    if before <= least then break end
    local moved = apply(p)
    local curved = (p * moved):sum():item()
    if curved <= 0 then break end
    local along = before / curved
    x, r = x + p * along, r - moved * along
    local now = (r * r):sum():item()
    p, before = r + p * (now / before), now
  end
  return x
end

--- Filtered back-projection: sinograms [slices, views, detectors] of evenly spread views over 180 degrees, filtered
-- with the ramp of Ram and Lak (its samples in space, padded by zeros; Kak and Slaney 1988, equation 61), and back.
---@param operator table  of inverse.radon
---@param y Tensor
---@return Tensor [slices, 1, h, w]
function M.fbp(operator, y)
  check_operator("inverse.fbp", operator)
  expect("inverse.fbp", "y", y, "a tensor")
  if y.ndim ~= 3 then fail("inverse.fbp: y: expected [slices, views, detectors], got %s", describe(y)) end
  local views, n = y.shape[2], y.shape[3]
  local length, ramp = 1, {}
  while length < 2 * n do length = 2 * length end
  for i = 0, length - 1 do
    local k = math.min(i, length - i)
    ramp[i + 1] = k == 0 and 0.25 or k % 2 == 1 and -1 / (math.pi * k) ^ 2 or 0
  end
  local gain = ty.rfft(ty.tensor(ramp, { dtype = y.dtype, device = y.device })):narrow(-1, 0, 1)
  local spectrum = ty.rfft(ty.pad(y, { 0, length - n })) * gain
  local filtered = ty.irfft(spectrum, length):narrow(-1, 0, n)
  return operator.adjoint(filtered) * (math.pi / views)
end

-- One iteration of ADMM on |Ax - y|^2 / 2 + lambda |Dx|_1 with differences along `dims`: x by CG steps, then the split
-- d = Dx and its scaled dual w, both kept in `state`. Equations 13 to 15 of Chung et al. 2023.
local function admm(A, back, x, state, o)
  local function normal(p)
    local sum = A.adjoint(A.forward(p))
    for _, dim in ipairs(o.dims) do
      sum = sum + M.difference_adjoint(M.difference(p, dim, o.periodic), dim, o.periodic) * o.rho
    end
    return sum
  end
  local b = back
  for i, dim in ipairs(o.dims) do
    if state[i] then b = b + M.difference_adjoint(state[i].d - state[i].w, dim, o.periodic) * o.rho end
  end
  x = M.conjugate_gradients(normal, b, x, { steps = o.cg })
  for i, dim in ipairs(o.dims) do
    local moved = M.difference(x, dim, o.periodic)
    local old = state[i]
    local sum = old and moved + old.w or moved
    local d = o.rho > 0 and M.shrink(sum, o.lambda / o.rho) or sum
    state[i] = { d = ty.keep(d), w = ty.keep(sum - d) }
  end
  return x
end

--- The volume with the least |Ax - y|^2 / 2 + lambda |Dx|_1, D the differences along `dims`: ADMM (Boyd et al. 2011).
-- options: lambda (1), rho (10), iterations (50), cg (5: steps of conjugate gradients in each), dims ({ 0, 2, 3 }:
-- total variation in 3-D, each direction for itself), periodic (false), start (zeros).
---@param operator table
---@param y Tensor
---@param options? table
---@return Tensor
function M.tv(operator, y, options)
  check_operator("inverse.tv", operator)
  expect("inverse.tv", "y", y, "a tensor")
  local o = arguments.read("inverse.tv", options, { lambda = 1, rho = 10, iterations = 50, cg = 5, dims = { 0, 2, 3 },
    periodic = false, start = none }, { lambda = "a number >= 0", rho = "a number >= 0", iterations = "an integer >= 1",
    cg = "an integer >= 1", dims = "a list of integers", start = "a tensor" })
  local back = operator.adjoint(y)
  local x, state = o.start or ty.zeros_like(back), {}
  for _ = 1, o.iterations do
    x = ty.scope(function() return admm(operator, back, x, state, o) end)
  end
  return x
end

--- The largest eigenvalue of A'A, by power iteration from noise of a seed of its own. Total variation and ADMM weigh
-- |Ax - y|^2 against |Dx|_1 and |Dx - d|^2, so that `lambda` and `rho` mean the same for two operators in parts of it:
-- of a unitary transform it is 1, of projections as many times more as rays cross pixels. x: a volume of the shape,
-- dtype and device that the operator takes.
---@param operator table
---@param x Tensor
---@param options? {steps?: integer}
---@return number
function M.scale(operator, x, options)
  check_operator("inverse.scale", operator)
  check_volume("inverse.scale", "x", x)
  local o = arguments.read("inverse.scale", options, { steps = 30 }, { steps = "an integer >= 1" })
  local found = 0.0
  x = ty.data.with_seed(0, function() return ty.randn_like(x) end)
  for _ = 1, o.steps do
    local size = x:square():sum():sqrt():item()
    if size == 0 then return 0.0 end
    x = ty.scope(function() return operator.adjoint(operator.forward(x / size)) end)
    found = x:square():sum():sqrt():item()
  end
  return found
end

-- ---- problems ----

--- A scan that was simulated: see inverse.ct and inverse.mri.
---@class InverseProblem
---@field operator table
---@field measure fun(x: Tensor, seed: integer): Tensor  what is measured of a volume [slices, 1, h, w], with its noise
---@field classical fun(y: Tensor): Tensor               the volume that is usually made of that
---@field scale number                                   the operator's: what lambda and rho are parts of

--- Computed tomography by parallel beams: views that are spread evenly over an arc, photons that are counted (at least
-- one each), filtered back-projection. Measurements are line integrals in sides of a pixel, as the operator has them.
-- options: size (pixels of a side of a slice), views (180), arc (180 degrees), dose (none: no noise; photons for each
-- detector in air), unit (1: the attenuation of a pixel of 1 along its side, which says what part of the dose arrives).
---@param options {size: integer, views?: integer, arc?: number, dose?: number, unit?: number}
---@return InverseProblem
function M.ct(options)
  local who = "inverse.ct"
  local o = arguments.read(who, options, { size = none, views = 180, arc = 180, dose = none, unit = 1 },
    { size = "an integer >= 1", views = "an integer >= 1", arc = "a number in (0, 360]", dose = "a finite number >= 1",
      unit = "a finite number > 0" })
  if not o.size then fail("%s: size: expected pixels of a side, got nil", who) end
  local A = M.radon { angles = ty.arange(o.views, { dtype = "f64" }) * (o.arc / o.views) * (math.pi / 180),
    size = o.size }
  return { operator = A, scale = M.scale(A, ty.zeros { 1, 1, o.size, o.size }),
    measure = function(x, seed)
      expect("ct.measure", "seed", seed, "an integer")
      local y = A.forward(x)
      if not o.dose then return y end
      local counts = ty.seeded_noise((y * -o.unit):exp() * o.dose, seed, "poisson")
      return (math.log(o.dose) - counts:clamp(1):log()) / o.unit
    end,
    classical = function(y) return M.fbp(A, y) * (o.arc / 180) end }
end

--- Magnetic resonance by rows of k-space, the same for all slices: those of the lowest frequencies, and others by
-- chance; noise on what is measured; the adjoint, which takes the others as 0. options: size (pixels of a side of a
-- slice), share (1/4: of the rows), middle (1/8: of the rows, the lowest ones, one more so that there is a first), seed
-- (1: of the others), noise (0.01: deviation).
---@param options {size: integer, share?: number, middle?: number, seed?: integer, noise?: number}
---@return InverseProblem
function M.mri(options)
  local who = "inverse.mri"
  local o = arguments.read(who, options, { size = none, share = 1 / 4, middle = 1 / 8, seed = 1, noise = 0.01 },
    { size = "an integer >= 1", share = "a number in (0, 1]", middle = "a number in [0, 1]", seed = "an integer",
      noise = "a finite number >= 0" })
  if not o.size then fail("%s: size: expected pixels of a side, got nil", who) end
  local kept, half = {}, math.floor(o.size * o.middle / 2)
  local left = math.floor(o.size * o.share) - (2 * half + 1)
  if left < 0 then
    fail("%s: middle: expected less than the share, %g of %d rows, got %g", who, o.share, o.size, o.middle)
  end
  for i = 0, o.size - 1 do kept[i + 1] = math.min(i, o.size - i) <= half and 1 or 0 end
  for _, i in ipairs(ty.data.with_seed(o.seed, function() return ty.randperm(o.size) end):tolist()) do
    if left > 0 and kept[i + 1] == 0 then kept[i + 1], left = 1, left - 1 end
  end
  local mask = ty.keep(ty.tensor(kept, { dtype = "f32" }):unsqueeze(1):expand(o.size, o.size))
  local A = M.fourier(mask)
  return { operator = A, scale = 1, -- unitary, and the frequency 0 is measured
    measure = function(x, seed)
      expect("mri.measure", "seed", seed, "an integer")
      local y = A.forward(x)
      local noise = ty.data.with_seed(seed, function() return ty.randn_like(y) end)
      return y + noise * o.noise * mask:unsqueeze(-1):to { device = y.device }
    end,
    classical = A.adjoint }
end

-- ---- parts of a sampler ----

--- DiffusionMBIR: after each step of a prior of slices, one iteration of ADMM on |Ax - y|^2 / 2 + lambda |D_z x|_1,
-- with the differences between slices alone. Its split and dual persist over the steps, so that one iteration with one
-- step of conjugate gradients is enough (fast variant). Chung et al. 2023, "Solving 3D Inverse Problems using
-- Pre-trained 2D Diffusion Models", algorithm 2. options: lambda (0.04), rho (10), cg (1), periodic (true, as the
-- paper's code). With lambda = 0 and rho = 0 it is the data's consistency alone, slice by slice. The defaults are the
-- paper's code's for its projections; for k-space it has lambda 0.005 and rho 0.01. What counts is their part of
-- inverse.scale: steps of conjugate gradients serve the largest eigenvalues first, so that with rho beside the scale or
-- above it they smooth along z what the prior drew, before they come to the measurements.
---@param operator table
---@param y Tensor
---@param options? {lambda?: number, rho?: number, cg?: integer, periodic?: boolean}
---@return table part
function M.mbir(operator, y, options)
  check_operator("inverse.mbir", operator)
  expect("inverse.mbir", "y", y, "a tensor")
  local o = arguments.read("inverse.mbir", options, { lambda = 0.04, rho = 10, cg = 1, periodic = true },
    { lambda = "a number >= 0", rho = "a number >= 0", cg = "an integer >= 1" })
  o.dims = o.rho > 0 and { 0 } or {}
  local back = ty.keep(operator.adjoint(y))
  return { start = function() return {} end,
    advance = function(self, run, next, prediction, to)
      return admm(operator, back, next(prediction, to), run.state[self], o)
    end }
end

--- Diffusion posterior sampling, slice by slice: after each step x moves against the gradient, through the network, of
-- |y - A x0(x)|, each slice's own norm. Chung et al. 2023, "Diffusion Posterior Sampling for General Noisy Inverse
-- Problems", algorithm 1 with the step of its section 3.2. options: scale (1).
---@param operator table
---@param y Tensor
---@param options? {scale?: number}
---@return table part
function M.dps(operator, y, options)
  check_operator("inverse.dps", operator)
  expect("inverse.dps", "y", y, "a tensor")
  local o = arguments.read("inverse.dps", options, { scale = 1 }, { scale = "a number >= 0" })
  return { start = function() return {} end,
    predict = function(self, run, next, x, point)
      local free = x:detach():clone():requires_grad_()
      return ty.enable_grad(function()
        local made = next(free, point)
        local off = (y - operator.forward(made:as "sample")):flatten(1):square():sum({ 1 }):sqrt():sum()
        run.state[self].gradient = ty.grad(off, { free })[1]
        return predictions.new("sample", x, made:as("sample"):detach(), point, run.data)
      end)
    end,
    advance = function(self, run, next, prediction, to)
      local gradient = run.state[self].gradient
      return next(prediction, to) - gradient * o.scale
    end }
end

--- The signal-to-noise ratio of a volume to the true one in decibels: 10 log10(peak^2 / mean square error). peak: none,
-- then the largest value of the true one.
---@param x Tensor
---@param truth Tensor
---@param peak? number
---@return number
function M.psnr(x, truth, peak)
  expect("inverse.psnr", "x", x, "a tensor")
  expect("inverse.psnr", "truth", truth, "a tensor")
  peak = peak or truth:max():item()
  expect("inverse.psnr", "peak", peak, "a number > 0")
  return 10 * math.log(peak ^ 2 / (x - truth):to("f64"):square():mean():item(), 10)
end

return M
