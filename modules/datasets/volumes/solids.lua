--- Rows of draw_solids from shapes in millimetres. The middle of the volume is (0, 0, 0); x runs to the patient's left
-- (the right of the picture), y to the back, z to the feet.
local arguments = require "tycho.arguments"
local trigonometry = require "tycho.datasets.trigonometry"

local M = {}

M.fields = 27

local one = 1 << 20
local floor = math.floor

--- A rotation about x, then y, then z, in radians: a list of three rows.
---@param a number
---@param b number
---@param c number
---@return number[][]
function M.rotation(a, b, c)
  local sa, ca = trigonometry.sincos(a)
  local sb, cb = trigonometry.sincos(b)
  local sc, cc = trigonometry.sincos(c)
  return {
    { cc * cb, cc * sb * sa - sc * ca, cc * sb * ca + sc * sa },
    { sc * cb, sc * sb * sa + cc * ca, sc * sb * ca - cc * sa },
    { -sb, cb * sa, cb * ca },
  }
end

--- A direction turned by a rotation.
---@param r number[][]
---@param x number
---@param y number
---@param z number
function M.turn(r, x, y, z)
  arguments.expect("datasets.volumes.turn", "r", r, "a list")
  return r[1][1] * x + r[1][2] * y + r[1][3] * z, r[2][1] * x + r[2][2] * y + r[2][3] * z,
    r[3][1] * x + r[3][2] * y + r[3][3] * z
end

-- An axis-aligned frame.
local upright = { { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } }

--- An ellipsoid: centre, half axes, rotation (nil: none).
function M.ellipsoid(x, y, z, rx, ry, rz, rotation)
  return { kind = "ellipsoid", x = x, y = y, z = z, radii = { rx, ry, rz }, frame = rotation or upright }
end

--- What lies of a solid between two planes: those across direction (nx, ny, nz), a unit vector, through the point
-- (x, y, z), each `half` away from it.
function M.cut(solid, x, y, z, nx, ny, nz, half)
  solid.cut = { x = x, y = y, z = z, n = { nx, ny, nz }, half = half }
  return solid
end

--- A tube from one point to another.
function M.tube(x0, y0, z0, x1, y1, z1, radius)
  local dx, dy, dz = x1 - x0, y1 - y0, z1 - z0
  local length = math.sqrt(dx * dx + dy * dy + dz * dz)
  dx, dy, dz = dx / length, dy / length, dz / length
  -- two directions across it
  local ux, uy, uz
  if math.abs(dx) < 0.6 then ux, uy, uz = 0, dz, -dy else ux, uy, uz = -dz, 0, dx end
  local size = math.sqrt(ux * ux + uy * uy + uz * uz)
  ux, uy, uz = ux / size, uy / size, uz / size
  local vx, vy, vz = dy * uz - dz * uy, dz * ux - dx * uz, dx * uy - dy * ux
  return { kind = "tube", x = (x0 + x1) / 2, y = (y0 + y1) / 2, z = (z0 + z1) / 2,
    radii = { radius, radius, length / 2 }, frame = { { ux, vx, dx }, { uy, vy, dy }, { uz, vz, dz } } }
end

--- Whether a point is inside the ellipsoid grown by `margin` millimetres.
---@param solid table
---@param x number
---@param y number
---@param z number
---@param margin number
function M.has(solid, x, y, z, margin)
  arguments.expect("datasets.volumes.has", "solid", solid, "a table")
  local f, sum = solid.frame, 0
  local dx, dy, dz = x - solid.x, y - solid.y, z - solid.z
  for i = 1, 3 do
    local p = (f[1][i] * dx + f[2][i] * dy + f[3][i] * dz) / (solid.radii[i] + margin)
    sum = sum + p * p
  end
  return sum <= 1
end

local function put(list, at, a, b, c, d)
  list[at], list[at + 1], list[at + 2], list[at + 3] = floor(a * one + 0.5), floor(b * one + 0.5), floor(c * one + 0.5),
    floor(d * one + 0.5)
end

-- The half of the box around a solid along axis i of the volume.
local function reach(solid, i)
  local f, r = solid.frame[i], solid.radii
  if solid.kind == "tube" then -- two discs
    local along = math.abs(f[3])
    return along * r[3] + math.sqrt(math.max(0, 1 - along * along)) * r[1]
  end
  return math.sqrt(f[1] * f[1] * r[1] * r[1] + f[2] * f[2] * r[2] * r[2] + f[3] * f[3] * r[3] * r[3])
end

local axes = { "x", "y", "z" }

--- Writes a solid's row behind the first `at` numbers of a list; returns how many there are then. voxel: millimetres of
-- a voxel; side: voxels of a side. A radius below half a voxel counts as that.
---@param list integer[]
---@param at integer
---@param solid table
---@param voxel number
---@param side integer
---@return integer
function M.row(list, at, solid, voxel, side)
  arguments.expect("datasets.volumes.row", "list", list, "a list")
  arguments.expect("datasets.volumes.row", "solid", solid, "a table")
  list[at + 1], list[at + 2], list[at + 3] = solid.label, floor(solid.value + 0.5), floor((solid.amplitude or 0) + 0.5)
  list[at + 4], list[at + 5] = floor((solid.period or 40) / voxel * 65536 + 0.5), solid.seed or 0
  for i = 1, 3 do
    local middle, half = solid[axes[i]] / voxel + side / 2, reach(solid, i) / voxel + 1
    list[at + 4 + 2 * i] = math.max(0, floor(math.min(middle - half, side)))
    list[at + 5 + 2 * i] = math.min(side, floor(math.max(middle + half, 0)) + 1)
  end
  local f, from = solid.frame, at + 12
  for i = 1, 3 do
    if solid.kind == "tube" and i == 3 then
      put(list, from, 0, 0, 0, 0)
    else
      local r = math.max(solid.radii[i] / voxel, 0.5)
      local a, b, c = f[1][i] / r, f[2][i] / r, f[3][i] / r
      put(list, from, a, b, c, -(a * (solid.x / voxel + side / 2) + b * (solid.y / voxel + side / 2)
        + c * (solid.z / voxel + side / 2)))
    end
    from = from + 4
  end
  local cut = solid.cut
  local a, b, c, x, y, z, half = 0, 0, 0, 0, 0, 0, 1
  if solid.kind == "tube" then
    a, b, c, x, y, z, half = f[1][3], f[2][3], f[3][3], solid.x, solid.y, solid.z, solid.radii[3]
  elseif cut then
    a, b, c, x, y, z, half = cut.n[1], cut.n[2], cut.n[3], cut.x, cut.y, cut.z, cut.half
  end
  half = math.max(half / voxel, 0.5)
  a, b, c = a / half, b / half, c / half
  put(list, from, a, b, c, -(a * (x / voxel + side / 2) + b * (y / voxel + side / 2) + c * (z / voxel + side / 2)))
  return at + M.fields
end

return M
