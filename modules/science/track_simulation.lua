--- Electrons and positrons on their way through a pixel detector in a solenoid, all at once: helices from layer to
-- layer, scattered in each, and hits with errors. What fits of tracks are tried on.
--
--     local truth = science.track_simulation.draw(100000, { seed = 1 })   -- hits [n, 4, 3], momentum [n], charge [n]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local tracks = require "tycho.science.tracks"

local M = {}

local defaults = { seed = 0, momentum = { 12, 53 }, radii = tracks.detector.radii, field = tracks.detector.field,
  thickness = tracks.detector.thickness, pixel = tracks.detector.pixel, steepness = 0.8, dtype = "f64" }
local kinds = { seed = "an integer", momentum = "a pair of numbers", radii = "a list of numbers",
  field = "a finite number > 0", thickness = "a finite number >= 0", pixel = "a finite number >= 0",
  steepness = "a number in [0, 1)", dtype = "a string" }

-- The state on the cylinder of radius r around z: where the circle of the path, which turns in the sense of `sense`,
-- leaves it. Adds to `misses` where it never does.
local function advance(s, r)
  local cx, cy = s.x - s.sense * s.circle * s.phi:sin(), s.y + s.sense * s.circle * s.phi:cos()
  local px, py = s.x - cx, s.y - cy
  -- Angles at the centre of the path, from the point that is nearest to the axis on, in the sense of flight.
  local from = s.sense * ty.atan2(cx * py * -1 + cy * px, cx * px * -1 - cy * py)
  local apart = cx:square() + cy:square()
  local cos = (apart + s.circle:square() - r * r) / (apart:sqrt() * s.circle * 2)
  s.misses = s.misses:logical_or(cos:abs():ge(1))
  local turn = cos:clamp(-1, 1):acos() - from
  local sin, c = (s.sense * turn):sin(), turn:cos()
  s.x, s.y = cx + px * c - py * sin, cy + px * sin + py * c
  s.z = s.z + s.circle * turn / s.polar:tan()
  s.phi = s.phi + s.sense * turn
end

--- Particles of a uniform momentum that start near the axis in all directions: `n` of those that pass all layers.
-- options: seed (0), momentum ({ 12, 53 } MeV / c), steepness (0.8: the largest cosine of the angle to the axis),
-- radii, field, thickness, pixel (those of tracks.detector), dtype ("f64"). The generator is left as it was.
---@param n integer
---@param options? table
---@return { hits: Tensor, momentum: Tensor, charge: Tensor }
function M.draw(n, options)
  local who = "track_simulation.draw"
  arguments.expect(who, "n", n, "an integer >= 1")
  local o = arguments.read(who, options, defaults, kinds)
  if #o.radii < 3 then arguments.fail("%s: radii: expected at least 3 layers, got %d", who, #o.radii) end
  for i, r in ipairs(o.radii) do
    local below = o.radii[i - 1] or 0
    if r <= below or r ~= r then
      arguments.fail("%s: radii: expected rising radii above 0, got %s at place %d", who, tostring(r), i)
    end
  end
  local least, most = o.momentum[1], o.momentum[2]
  if least <= 0 or most < least or least ~= least or most ~= most then
    arguments.fail("%s: momentum: expected { low, high } above 0, got { %s, %s }", who, tostring(least),
      tostring(most))
  end
  local rng = ty.rng_state()
  ty.manual_seed(o.seed)
  local kept, have = { hits = {}, momentum = {}, charge = {} }, 0
  for _ = 1, 20 do
    local function uniform(low, high) return ty.rand({ n }, { dtype = o.dtype }) * (high - low) + low end
    local function normal() return ty.randn({ n }, { dtype = o.dtype }) end
    local momentum, sense = uniform(o.momentum[1], o.momentum[2]), (uniform(-1, 1)):sign()
    local polar = uniform(-o.steepness, o.steepness):acos()
    local space = momentum / (tracks.mev * o.field)
    local s = { x = normal() * 5, y = normal() * 5, z = normal() * 20, phi = uniform(-math.pi, math.pi), polar = polar,
      sense = sense, circle = space * polar:sin(), misses = momentum:lt(0) }
    local hits = {}
    for i, r in ipairs(o.radii) do
      advance(s, r)
      -- A hit is off along the layer: around the axis and along it.
      local off = o.pixel / r
      local around = normal() * off
      hits[i] = ty.stack({ s.x - s.y * around, s.y + s.x * around, s.z + normal() * o.pixel }, 1)
      if o.thickness > 0 then
        local out = (s.phi:cos() * s.x + s.phi:sin() * s.y) / r * s.polar:sin()
        local sigma = tracks.scattering(momentum, o.thickness / out:abs():clamp(0.05, 1))
        local sin = s.polar:sin()
        s.phi, s.polar = s.phi + normal() * sigma / sin, (s.polar + normal() * sigma):clamp(0.05, math.pi - 0.05)
        s.circle = space * s.polar:sin()
      end
    end
    local good = s.misses:logical_not():nonzero():squeeze(1)
    table.insert(kept.hits, ty.stack(hits, 1):index_select(0, good))
    table.insert(kept.momentum, momentum:index_select(0, good))
    table.insert(kept.charge, (-sense):index_select(0, good))
    have = have + good.shape[1]
    if have >= n then break end
  end
  ty.rng_state(rng)
  if have < n then
    arguments.fail("%s: momentum: of %d particles only %d pass all layers; expected larger ones", who, 20 * n, have)
  end
  local result = {}
  for name, list in pairs(kept) do result[name] = ty.concat(list, 0):narrow(0, 0, n) end
  return result
end

return M
