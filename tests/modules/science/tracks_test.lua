-- Fits of tracks: exact helices, kinks that are minimized exactly, residuals and chi squared of simulated tracks, the
-- simulation against a walk in small steps, mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local science = require "tycho.science"
local tracks, simulation = science.tracks, science.track_simulation

local function draw(n, o)
  local options = { seed = 3 }
  for key, value in pairs(o or {}) do options[key] = value end
  return simulation.draw(n, options)
end

check.test("without scattering and errors every method finds the momentum, and triplets no kinks", function()
  local truth = draw(200, { thickness = 0, pixel = 0 })
  for _, method in ipairs { "general", "scattering", "helix" } do
    local fitted = tracks.fit(truth.hits, { method = method })
    check.ok(((fitted.momentum - truth.momentum) / truth.momentum):abs():max():item() < 1e-8, method)
    check.ok(fitted.charge:equal(truth.charge), method)
    if fitted.chi2 then check.ok(fitted.chi2:max():item() < 1e-12, method) end
  end
end)

check.test("hits are where a walk in small steps passes the layers", function()
  local truth = draw(3, { thickness = 0, pixel = 0, radii = { 20, 40, 60 } })
  local fitted, rows = tracks.fit(truth.hits), truth.hits:tolist()
  for i, hits in ipairs(rows) do
    local momentum, charge = fitted.momentum:tolist()[i], truth.charge:tolist()[i]
    -- From the second hit on, in the direction of the chord to the third, turned by half of what bends between them.
    local a, b = hits[2], hits[3]
    local chord = math.sqrt((b[1] - a[1]) ^ 2 + (b[2] - a[2]) ^ 2)
    -- The momentum across follows from the slope along the arc, which follows from it: a few rounds.
    local across = momentum
    for _ = 1, 60 do
      local radius = across / tracks.mev
      local arc = 2 * radius * math.asin(math.min(1, chord / (2 * radius)))
      across = momentum * arc / math.sqrt(arc ^ 2 + (b[3] - a[3]) ^ 2)
    end
    local radius = across / tracks.mev
    local half = math.asin(chord / (2 * radius))
    local phi = math.atan(b[2] - a[2], b[1] - a[1]) + charge * half
    local x, y, z, steps = a[1], a[2], a[3], 20000
    local step = 2 * radius * half / steps
    for _ = 1, steps do -- a positive charge turns clockwise around the field
      local middle = phi - charge * step / radius / 2
      x, y, z = x + step * math.cos(middle), y + step * math.sin(middle), z + (b[3] - a[3]) / steps
      phi = phi - charge * step / radius
    end
    check.close({ x, y, z }, b, 1e-4)
    check.close(math.sqrt(x * x + y * y), 60, 1e-4)
  end
end)

-- The kinks of a triplet at a curvature, exactly: arcs are found by bisection.
local function kinks(hits, curvature)
  local function arc(a, b)
    local d, z = math.sqrt((b[1] - a[1]) ^ 2 + (b[2] - a[2]) ^ 2), b[3] - a[3]
    local low, high = 1e-9, math.pi - 1e-9
    for _ = 1, 80 do
      local bend = (low + high) / 2
      local square = (d / (2 * math.sin(bend / 2))) ^ 2 + (z / bend) ^ 2
      if square > 1 / curvature ^ 2 then low = bend else high = bend end
    end
    local bend = (low + high) / 2
    return bend, math.acos(z * curvature / bend)
  end
  local function chord(a, b) return math.atan(b[2] - a[2], b[1] - a[1]) end
  local bend1, polar1 = arc(hits[1], hits[2])
  local bend2, polar2 = arc(hits[2], hits[3])
  local turn = math.abs((chord(hits[2], hits[3]) - chord(hits[1], hits[2]) + math.pi) % (2 * math.pi) - math.pi)
  return turn - (bend1 + bend2) / 2, polar2 - polar1, math.sin((polar1 + polar2) / 2)
end

check.test("kinks of first order are those of exact arcs", function()
  local truth = draw(50, { radii = { 29.8, 73.9, 86.3 } })
  local t = tracks.triplets(truth.hits)
  local plane, plane_by, polar, polar_by = t.plane:tolist(), t.plane_by:tolist(), t.polar:tolist(), t.polar_by:tolist()
  for i, hits in ipairs(truth.hits:tolist()) do
    local curvature = t.curvature:tolist()[i][1]
    local a, b = kinks(hits, curvature)
    check.close({ plane[i][1] + plane_by[i][1] * curvature, polar[i][1] + polar_by[i][1] * curvature }, { a, b }, 2e-4)
    local h = curvature * 1e-4
    local a1, b1 = kinks(hits, curvature + h)
    local a0, b0 = kinks(hits, curvature - h)
    check.close(plane_by[i][1] / ((a1 - a0) / (2 * h)), 1, 0.02)
    check.ok(math.abs(polar_by[i][1] - (b1 - b0) / (2 * h)) < 0.02 * math.abs(plane_by[i][1]))
  end
end)

check.test("the momentum of a triplet is where exact kinks are most likely, well within its error", function()
  local truth = draw(60, { radii = { 29.8, 73.9, 86.3 } })
  local fitted = tracks.fit(truth.hits, { method = "scattering" })
  local worst = 0
  for i, hits in ipairs(truth.hits:tolist()) do
    local function unlikely(momentum)
      local plane, polar, sin = kinks(hits, tracks.mev / momentum)
      return (plane * sin) ^ 2 + polar ^ 2
    end
    local momentum, error = fitted.momentum:tolist()[i], fitted.error:tolist()[i]
    local low, high = momentum - 2 * error, momentum + 2 * error
    for _ = 1, 60 do -- thirds
      local a, b = low + (high - low) / 3, high - (high - low) / 3
      if unlikely(a) < unlikely(b) then high = b else low = a end
    end
    worst = math.max(worst, math.abs((low + high) / 2 - momentum) / error)
  end
  check.ok(worst < 0.1, worst)
end)

check.test("residuals are as large as the fit says, and chi squared is as its degrees of freedom want", function()
  for _, o in ipairs { {}, { radii = { 20, 30, 40, 50, 60, 70, 80, 90 } }, { momentum = { 40, 53 } } } do
    local truth = draw(20000, o)
    local fitted = tracks.fit(truth.hits)
    local pull = ((fitted.momentum - truth.momentum) / fitted.error):square():mean():sqrt():item()
    local freedom = 2 * truth.hits.shape[2] - 5
    check.close({ pull, fitted.chi2:mean():item() / freedom }, { 1, 1 }, 0.04)
  end
  -- Hits with large errors: kinks alone do not know of them.
  local truth = draw(5000, { pixel = 0.2 })
  local own, alone = tracks.fit(truth.hits, { pixel = 0.2 }), tracks.fit(truth.hits, { method = "scattering" })
  check.close(own.chi2:mean():item(), 3, 0.2)
  check.ok(alone.chi2:mean():item() > 20)
end)

check.test("single precision and other fields give the same", function()
  local truth = draw(2000, { field = 2, momentum = { 24, 106 } })
  local wide, narrow = tracks.fit(truth.hits, { field = 2 }), tracks.fit(truth.hits:to "f32", { field = 2 })
  check.ok(((narrow.momentum:to "f64" - wide.momentum) / wide.error):abs():max():item() < 0.01)
  check.close(wide.momentum:mean():item(), 65, 2)
end)

check.test("a track whose hits coincide spoils no other", function()
  local hits = draw(4).hits
  local want = tracks.fit(hits).momentum:tolist()
  hits:select(0, 2):fill_(1)
  local found = tracks.fit(hits).momentum:tolist()
  check.equal({ found[1], found[2], found[4] }, { want[1], want[2], want[4] })
  check.ok(found[3] ~= found[3])
end)

check.test("draws depend on the seed alone, and the generator is left as it was", function()
  check.equal({ draw(5).hits:equal(draw(5).hits), draw(5).hits:equal(draw(5, { seed = 4 }).hits) }, { true, false })
  ty.manual_seed(9)
  local want = ty.randn(3):tolist()
  ty.manual_seed(9)
  draw(5)
  check.equal(ty.randn(3):tolist(), want)
end)

check.test("mistakes", function()
  check.fails(function() tracks.fit(ty.zeros(4, 2, 3)) end, "tracks.fit: hits: expected f32 or f64 %[n, 3 or more")
  check.fails(function() tracks.fit(ty.zeros({ 4, 3, 3 }, { dtype = "i64" })) end, "f32 or f64 .* of i64")
  check.fails(function() tracks.fit(ty.zeros(4, 3, 3), { method = "kalman" }) end, 'method: expected "general"')
  check.fails(function() draw(5, { radii = { 10, 20 } }) end, "radii: expected at least 3 layers, got 2")
  check.fails(function() draw(5, { radii = { 10, 30, 20 } }) end, "expected rising radii above 0, got 20 at place 3")
  check.fails(function() draw(5, { momentum = { 5, 2 } }) end, "momentum: expected { low, high } above 0")
  check.fails(function() draw(5, { momentum = { 2, 3 } }) end, "of 100 particles only 0 pass all layers")
  check.equal(tracks.fit(ty.zeros(0, 4, 3)).momentum.shape, { 0 })
end)

check.finish()
