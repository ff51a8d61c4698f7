--- One step by low-rank adapters that are trained to give the high frequencies which one step lacks. Zhang and Hooi
-- 2023, "HiPA: Enabling One-Step Text-to-Image Diffusion Models via High-Frequency-Promoting Adaptation".
--
--     peft.lora(model, { rank = 4, targets = "all-linear" })
--     local loss = distill.hipa_loss(flow, { perceptual = distance, weight = 1 })
--     distill.fit(model, pairs_of_the_teacher:loader(), { loss = loss, steps = 500 })
--     local pictures = distill.one_step(model, flow, noise, condition)
--
-- The loss is a perceptual distance to the teacher's picture of the same noise, and a distance of the high Fourier
-- components and of the edges of the two. The abstract leaves the filter's radius, the operator of edges (here Sobel's)
-- and the weights open.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local reflow = require "tycho.distill.reflow"

local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local function pictures(who, what, x, like)
  expect(who, what, x, "a tensor")
  if x.ndim ~= 4 or x:numel() == 0 then
    fail("%s: %s: expected [n, c, h, w], got %s", who, what, arguments.describe(x))
  end
  if like and table.concat(like.shape, ",") ~= table.concat(x.shape, ",") then
    fail("%s: %s: expected [%s], got %s", who, what, table.concat(like.shape, ", "), arguments.describe(x))
  end
  return x
end

local function share(who, radius)
  return expect(who, "radius", radius, "a finite number > 0 or nil") or 0.5
end

-- Of the components that rfft2 gives of h x w numbers: how far they are from the mean, where 1 is the finest that a row
-- or column can have, and how many components of the whole transform each stands for.
local function plane(x)
  local h, w = x.shape[3], x.shape[4]
  local where = { dtype = x.dtype, device = x.device }
  local rows, columns, counts = {}, {}, {}
  for i = 0, h - 1 do rows[i + 1] = math.min(i, h - i) / (h / 2) end
  for j = 0, w // 2 do
    columns[j + 1] = j / (w / 2)
    counts[j + 1] = (j == 0 or 2 * j == w) and 1 or 2
  end
  local row, column = ty.tensor(rows, where):unsqueeze(1), ty.tensor(columns, where):unsqueeze(0)
  return (row:square() + column:square()):sqrt(), ty.tensor(counts, where):unsqueeze(0):expand(h, w // 2 + 1)
end

--- A picture's low and high Fourier components as two pictures, whose sum it is. radius (0.5): where the high ones
-- begin; 1 is the finest waves along rows or columns, so that diagonal ones reach to 1.41.
---@param x Tensor  [n, c, h, w]
---@param radius? number
---@return Tensor low
---@return Tensor high
function M.bands(x, radius)
  local who = "distill.bands"
  pictures(who, "x", x)
  radius = share(who, radius)
  local far = plane(x)
  local kept = far:ge(radius):to(x.dtype):unsqueeze(2)
  local high = ty.irfft2(ty.rfft2(x) * kept, { x.shape[3], x.shape[4] })
  return x - high, high
end

--- The low components of one picture with the high ones of another: which of the two a picture's faults are in.
---@param low Tensor   [n, c, h, w]
---@param high Tensor  as low
---@param radius? number  (0.5)
---@return Tensor
function M.swap_bands(low, high, radius)
  local who = "distill.swap_bands"
  pictures(who, "low", low)
  pictures(who, "high", high, low)
  share(who, radius)
  local a, b = M.bands(low, radius), select(2, M.bands(high, radius))
  return a + b
end

--- Mean power of the Fourier components of pictures by their distance from the mean, f64 [bins] from 0 to 1.41. The
-- transform keeps the sum of squares ("ortho"): the power of white noise of variance 1 is 1 everywhere.
---@param x Tensor  [n, c, h, w]
---@param bins? integer  (8)
---@return Tensor
function M.spectrum(x, bins)
  local who = "distill.spectrum"
  pictures(who, "x", x)
  bins = expect(who, "bins", bins, "an integer >= 1 or nil") or 8
  local far, count = plane(x)
  local power = ty.rfft2(x:to "f64", {}, {}, "ortho"):square():sum(-1):mean { 0, 1 }
  local at = (far:to "f64" * (bins / math.sqrt(2) * (1 - 1e-9))):floor():to "i64":flatten()
  count = count:to "f64":flatten()
  local sum = ty.zeros({ bins }, { dtype = "f64", device = x.device }):scatter_add(0, at, power:flatten() * count)
  local all = ty.zeros({ bins }, { dtype = "f64", device = x.device }):scatter_add(0, at, count)
  return sum / all:clamp(1)
end

--- Edges of pictures: lengths of Sobel's gradients [n, c, h - 2, w - 2], of a ramp its slope.
---@param x Tensor  [n, c, h, w], sides of 3 at least
---@return Tensor
function M.edges(x)
  local who = "distill.edges"
  pictures(who, "x", x)
  local n, c, h, w = table.unpack(x.shape)
  if h < 3 or w < 3 then fail("%s: x: expected sides of at least 3, got %s", who, arguments.describe(x)) end
  local kernel = ty.tensor({ { { { -1, 0, 1 }, { -2, 0, 2 }, { -1, 0, 1 } } },
    { { { -1, -2, -1 }, { 0, 0, 0 }, { 1, 2, 1 } } } }, { dtype = x.dtype, device = x.device }) / 8
  local slopes = ty.conv2d(x:reshape(n * c, 1, h, w), kernel)
  -- The root has no derivative at 0, where pictures are flat.
  return ((slopes:square():sum(1) + 1e-12):sqrt() - 1e-6):reshape(n, c, h - 2, w - 2)
end

--- How far the high frequencies of pictures are from those of others: the mean length of the differences of their high
-- Fourier components (of the transform that keeps the sum of squares), and `edges` times the mean absolute difference
-- of their edges. 0 for pictures that differ by a constant. options: radius (0.5: where high ones begin), edges (1).
---@param a Tensor  [n, c, h, w]
---@param b Tensor  as a
---@param options? { radius?: number, edges?: number }
---@return Tensor
function M.high_distance(a, b, options)
  local who = "distill.high_distance"
  pictures(who, "a", a)
  pictures(who, "b", b, a)
  local o = arguments.read(who, options, { radius = 0.5, edges = 1 }, { radius = "a finite number > 0",
    edges = "a finite number >= 0" })
  local far, count = plane(a)
  count = count * far:ge(o.radius):to(a.dtype)
  local all = count:sum():item()
  if all == 0 then fail("%s: radius: expected some components beyond it, got %g", who, o.radius) end
  local d = ty.rfft2(a - b, {}, {}, "ortho"):square():sum(-1)
  local fourier = (((d + 1e-12):sqrt() - 1e-6) * count):sum() / (all * a.shape[1] * a.shape[2])
  if o.edges == 0 then return fourier end
  return fourier + o.edges * (M.edges(a) - M.edges(b)):abs():mean()
end

--- HiPA's loss for distill.fit on pairs of noise and the sample that the teacher's solver makes of it: the perceptual
-- distance of one step to the sample, and `weight` times the distance of their high frequencies, both of decoded
-- pictures. options: perceptual (a function of two pictures that returns a number for each, or one; the mean square),
-- weight (1), radius and edges (as of distill.high_distance), decode (a function, for samples that are latents).
---@param flow Process
---@param options? table
---@return fun(parts: DistillParts, batch: table): Tensor loss, table<string, Tensor> both
function M.loss(flow, options)
  local who = "distill.hipa_loss"
  local o = arguments.read(who, options, { perceptual = ty.mse_loss, weight = 1, radius = 0.5, edges = 1,
    decode = none }, { perceptual = "a function", weight = "a finite number >= 0", radius = "a finite number > 0",
    edges = "a finite number >= 0", decode = "a function" })
  local values = {}
  local step = reflow.one_step_loss(flow, function(drawn, wanted)
    if o.decode then drawn, wanted = o.decode(drawn), o.decode(wanted) end
    values = { perceptual = o.perceptual(drawn, wanted):mean():to(drawn.dtype) }
    if o.weight == 0 then return values.perceptual end
    values.high = M.high_distance(drawn, wanted, { radius = o.radius, edges = o.edges })
    return values.perceptual + o.weight * values.high
  end)
  return function(parts, batch)
    local loss = step(parts, batch)
    return loss, values
  end
end

return M
