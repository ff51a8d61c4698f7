--- Tracks of charged particles in a solenoid, all at once. fit() takes hits on layers in order of time. Three in a row
-- make a triplet: a helix goes through all three if it has a kink at the middle one, where the particle was scattered.
-- How large the kink is, in both angles, depends on the curvature; the fit takes the one that makes all kinks likely.
-- To first order around the circle through three hits that is a product of small matrices. Berger et al. 2017, "A New
-- Three-Dimensional Track Fit with Multiple Scattering" (kinks alone); Schöning 2024, "A General Track Fit based on
-- Triplets" (hits have errors as well). It is what Mu3e runs on every event.
--
-- Lengths are millimetres, momenta MeV / c, the field tesla, along z. Hits are [n, k, 3], k at least 3; from one to the
-- next it is less than half a circle. (Where it is about that, the kinks hardly depend on the radius, and first order
-- is not enough.)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- MeV / c of a particle of unit charge whose path bends at a radius of a millimetre in a tesla.
local MEV = 0.299792458
M.mev = MEV

--- A detector like Mu3e's: four layers of pixels, radii in mm; radiation lengths of one at a right angle; the error of
-- a hit; tesla.
M.detector = { radii = { 23.3, 29.8, 73.9, 86.3 }, thickness = 0.00115, pixel = 0.08 / math.sqrt(12), field = 1 }

local defaults = { thickness = M.detector.thickness, pixel = M.detector.pixel, field = M.detector.field,
  method = "general" }
local kinds = { thickness = "a finite number > 0", pixel = "a finite number >= 0", field = "a finite number > 0",
  method = '"general" or "scattering" or "helix"' }

--- The deviation of an angle, in each of two directions, that multiple scattering leaves: Highland's formula for
-- electrons. lengths: radiation lengths on the way.
---@param momentum Tensor
---@param lengths Tensor
---@return Tensor
function M.scattering(momentum, lengths)
  arguments.expect("tracks.scattering", "momentum", momentum, "a tensor")
  arguments.expect("tracks.scattering", "lengths", lengths, "a tensor")
  return lengths:sqrt() * (lengths:log() * 0.038 + 1) * 13.6 / momentum
end

local function check_hits(who, hits)
  arguments.expect(who, "hits", hits, "a tensor")
  if hits.ndim ~= 3 or hits.shape[2] < 3 or hits.shape[3] ~= 3 or hits.dtype ~= "f32" and hits.dtype ~= "f64" then
    arguments.fail("%s: hits: expected f32 or f64 [n, 3 or more, 3], got %s of %s", who, arguments.describe(hits),
      hits.dtype)
  end
end

-- Columns from `at` on of all hits: x, y, z, each [n, count].
local function columns(hits, at, count)
  local part = hits:narrow(1, at, count)
  return part:select(2, 0), part:select(2, 1), part:select(2, 2)
end

-- Of one arc of each triplet [n, k - 2]: how its bending angle and its polar angle change with the curvature in space,
-- in which they are much straighter than in the radius. d: chord across, z: along; radius: of the circle.
local function arc(d, z, radius)
  local half = (d / (radius * 2)):clamp(-1, 1):asin()
  local bend = half * 2
  local along = z / bend
  local space = (radius:square() + along:square()):sqrt()
  -- Both sides of space^2 = (d / (2 sin(bend / 2)))^2 + (z / bend)^2 by the curvature, 1 / space.
  local by = space:pow(3) * 2 / (radius:square() / half:tan() + along:square() * 2 / bend)
  local sin, cos = radius / space, along / space
  return { curvature = 1 / space, bend_by = by, polar = ty.atan2(radius * bend, z),
    polar_by = cos * (by / bend - space) / sin, sin = sin }
end

-- Triplets of hits: their kinks, in the plane and in the polar angle, as a + b * curvature, [n, k - 2] each, what
-- curvature to begin with, and chords.
local function triplets(hits)
  local k = hits.shape[2]
  local x, y, z = columns(hits, 0, k)
  local function steps(v) return v:narrow(1, 1, k - 1) - v:narrow(1, 0, k - 1) end
  local dx, dy, dz = steps(x), steps(y), steps(z)
  local chord = (dx:square() + dy:square()):sqrt()
  local function first(v) return v:narrow(1, 0, k - 2) end
  local function second(v) return v:narrow(1, 1, k - 2) end
  local cross = first(dx) * second(dy) - first(dy) * second(dx)
  local across = ((first(dx) + second(dx)):square() + (first(dy) + second(dy)):square()):sqrt()
  -- Hits in a line: a radius that is too large to matter, not one without end.
  local radius = first(chord) * second(chord) * across / (cross:abs() * 2):clamp(1e-9, math.huge)
  local one, two = arc(first(chord), first(dz), radius), arc(second(chord), second(dz), radius)
  local plane_by = (one.bend_by + two.bend_by) * -0.5
  local plane = (one.bend_by * one.curvature + two.bend_by * two.curvature) * 0.5
  local polar_by = two.polar_by - one.polar_by
  local polar = two.polar - one.polar - two.polar_by * two.curvature + one.polar_by * one.curvature
  return { plane = plane, plane_by = plane_by, polar = polar, polar_by = polar_by,
    curvature = (one.curvature + two.curvature) / 2, sin = (one.sin + two.sin) / 2, chord = chord, turn = cross:sign(),
    x = second(x), y = second(y), dx = dx, dy = dy, one = one, two = two }
end

-- The radiation lengths that a particle passes at the middle hit of each triplet, of cylinders around the z axis.
local function lengths_of(t, thickness)
  local k = t.chord.shape[2]
  -- The direction there: the mean of the chords', of length one.
  local ux, uy = t.dx / t.chord, t.dy / t.chord
  local mx = ux:narrow(1, 0, k - 1) + ux:narrow(1, 1, k - 1)
  local my = uy:narrow(1, 0, k - 1) + uy:narrow(1, 1, k - 1)
  local out = (mx * t.x + my * t.y):abs() / ((mx:square() + my:square()) * (t.x:square() + t.y:square())):sqrt()
  return thickness / (out * t.sin):clamp(0.05, 1)
end

-- A batch of products of the inverse of `matrix` [n, m, m], symmetric, with right sides [n, m] each: what two right
-- sides make of it, a' matrix^-1 b. Small matrices are solved by elimination on whole columns.
local function forms(matrix, a, b)
  local m = #a
  local rows = {}
  for i = 1, m do
    rows[i] = {}
    for j = 1, m do rows[i][j] = matrix[i][j] end
    rows[i][m + 1], rows[i][m + 2] = a[i], b[i]
  end
  local aa, ab, bb = 0, 0, 0
  for i = 1, m do -- L D L': each form is a sum over pivots
    local pivot = rows[i][i]
    aa = aa + rows[i][m + 1]:square() / pivot
    ab = ab + rows[i][m + 1] * rows[i][m + 2] / pivot
    bb = bb + rows[i][m + 2]:square() / pivot
    for r = i + 1, m do
      local f = rows[r][i] / pivot
      for j = i + 1, m + 2 do rows[r][j] = rows[r][j] - f * rows[i][j] end
    end
  end
  return aa, ab, bb
end

-- The covariance of kinks, as a table of columns [n]: variances of scattering, and what errors of hits do. inverse: one
-- over the lengths of the steps between hits, by which a shift of a hit turns them, [n, k - 1].
local function covariance(scattered, inverse, variance)
  local m, rows = scattered.shape[2], {}
  local step = {}
  for i = 1, m + 1 do step[i] = inverse:select(1, i - 1) end
  for i = 1, m do
    rows[i] = {}
    for j = 1, m do rows[i][j] = 0 end
  end
  for i = 1, m do
    rows[i][i] = scattered:select(1, i - 1)
    if variance > 0 then
      local a, b = step[i], step[i + 1]
      rows[i][i] = rows[i][i] + (a:square() + b:square() + (a + b):square()) * variance
      if i < m then rows[i][i + 1] = b * (a + b + b + step[i + 2]) * -variance end
      if i + 1 < m then rows[i][i + 2] = b * step[i + 2] * variance end
    end
  end
  for i = 1, m do
    for j = 1, i - 1 do rows[i][j] = rows[j][i] end
    for j = 1, m do
      if type(rows[i][j]) == "number" then rows[i][j] = ty.zeros_like(step[1]) end
    end
  end
  return rows
end

local function column_list(x)
  local list = {}
  for i = 0, x.shape[2] - 1 do list[i + 1] = x:select(1, i) end
  return list
end

-- By kinks: momentum, its error, chi squared.
local function by_triplets(hits, o)
  local t = triplets(hits)
  local m = hits.shape[2] - 2
  local curvature = t.curvature:mean { 1 }
  local pixel = o.method == "general" and o.pixel ^ 2 or 0
  local lengths = lengths_of(t, o.thickness)
  local sigma, aa, ab, bb
  -- Weights depend on the momentum: once with that of the circles, once with what comes of it.
  for _ = 1, 2 do
    sigma = M.scattering((MEV * o.field / curvature):unsqueeze(1), lengths)
    local inverse = 1 / t.chord
    local sin = ty.concat({ t.one.sin, t.two.sin:narrow(1, m - 1, 1) }, 1)
    local plane = covariance((sigma / t.sin):square(), inverse, pixel)
    local polar = covariance(sigma:square(), inverse * sin:square(), pixel) -- a shift along z turns by sin^2 / chord
    local a1, b1, c1 = forms(plane, column_list(t.plane), column_list(t.plane_by))
    local a2, b2, c2 = forms(polar, column_list(t.polar), column_list(t.polar_by))
    aa, ab, bb = a1 + a2, b1 + b2, c1 + c2
    curvature = (-ab / bb):clamp(1e-9, math.huge)
  end
  local radius = 1 / curvature
  return { radius = radius, error = bb:rsqrt() * radius:square(), chi2 = (aa - ab:square() / bb):clamp(0, math.huge),
    charge = -t.turn:sum({ 1 }):sign() }
end

-- One helix through all hits alike: a circle (Kasa 1976) and a straight line along it.
local function by_helix(hits)
  local k = hits.shape[2]
  local x, y, z = columns(hits, 0, k)
  local function mean(v) return v:mean({ 1 }, true) end
  local mx, my = mean(x), mean(y)
  local u, v = x - mx, y - my
  local w = u:square() + v:square()
  local function sum(a) return a:sum { 1 } end
  local suu, svv, suv = sum(u:square()), sum(v:square()), sum(u * v)
  local su, sv = sum(u * w), sum(v * w)
  local det = (suu * svv - suv:square()) * 2
  local cu, cv = (su * svv - sv * suv) / det, (sv * suu - su * suv) / det
  local radius = (cu:square() + cv:square() + mean(w):squeeze(1)):sqrt()
  -- Along the circle: the angles at its centre from hit to hit, in the sense in which the first three lie.
  local px, py = u - cu:unsqueeze(1), v - cv:unsqueeze(1)
  local ax, ay, bx, by = px:narrow(1, 0, k - 1), py:narrow(1, 0, k - 1), px:narrow(1, 1, k - 1), py:narrow(1, 1, k - 1)
  local function at(a, i) return a:narrow(1, i, 1) end
  local sense = ((at(x, 1) - at(x, 0)) * (at(y, 2) - at(y, 1)) - (at(y, 1) - at(y, 0)) * (at(x, 2) - at(x, 1))):sign()
  local steps = ty.remainder(ty.atan2(ax * by - ay * bx, ax * bx + ay * by) * sense, 2 * math.pi)
  local s = ty.pad(steps:cumsum(1), { 1, 0 }) * radius:unsqueeze(1)
  local ds, dz = s - mean(s), z - mean(z)
  local slope = sum(ds * dz) / sum(ds:square())
  return { radius = radius * (slope:square() + 1):sqrt(), charge = -sense:squeeze(1) }
end

--- Fits tracks, each by itself: one whose hits coincide is nan, and the others are as without it. Returns, each [n]:
-- momentum (MeV / c), error (of it; nil for a helix), chi2 (of 2 k - 5 degrees of freedom; nil for a helix), charge (1
-- or -1). options: method ("general": kinks and errors of hits; "scattering": kinks alone; "helix": hits alone, the
-- circle and line of least squares), field (tesla), thickness (radiation lengths of a layer at a right angle), pixel
-- (mm: the error of a hit in each direction).
---@param hits Tensor  [n, k, 3], f32 or f64
---@param options? { method?: string, field?: number, thickness?: number, pixel?: number }
---@return { momentum: Tensor, error: Tensor?, chi2: Tensor?, charge: Tensor }
function M.fit(hits, options)
  check_hits("tracks.fit", hits)
  local o = arguments.read("tracks.fit", options, defaults, kinds)
  local found = o.method == "helix" and by_helix(hits) or by_triplets(hits, o)
  local factor = MEV * o.field
  return { momentum = found.radius * factor, error = found.error and found.error * factor, chi2 = found.chi2,
    charge = found.charge }
end

--- The kinks of hits [n, k, 3] three by three, in first order: plane + plane_by * curvature and polar + polar_by *
-- curvature, [n, k - 2] each, around curvature (one over the radius in space, 1 / mm), and what they were made of.
---@param hits Tensor
---@return table<string, Tensor>
function M.triplets(hits)
  check_hits("tracks.triplets", hits)
  return triplets(hits)
end

return M
