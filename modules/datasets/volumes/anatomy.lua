--- The body that a volume shows: a small chest, 256 millimetres of field, each part with its size, place, tilt and
-- texture drawn at random. It gives a list of solids from the outside in, and the organs by name.
local arguments = require "tycho.arguments"
local shapes = require "tycho.datasets.volumes.solids"
local tissues = require "tycho.datasets.volumes.tissues"
local trigonometry = require "tycho.datasets.trigonometry"

local M = {}

--- Millimetres of a side of the volume.
M.field = 256

--- Names of the labels of the organ map; the first is 1, 0 is outside of the body.
M.organs = { "fat", "muscle", "ribs", "mediastinum", "right lung", "left lung", "heart", "spine", "spinal canal",
  "aorta", "airways", "vessels", "liver", "spleen" }
--- The label of an organ.
M.label = {}
for i, name in ipairs(M.organs) do M.label[name] = i end

local Body = {}
Body.__index = Body

local function between(random, low, high) return low + (high - low) * random:number() end

--- Adds a solid of an organ (its name or a label), made of a tissue, at the end or before those from position `before`
-- on; returns it. The tissue's value was drawn once for this body.
function Body:add(organ, tissue, solid, before)
  arguments.expect("Body:add", "tissue", tissue, "a string")
  arguments.expect("Body:add", "solid", solid, "a table")
  local t = tissues[tissue] or arguments.fail("Body:add: tissue: there is no \"%s\"", tissue)
  solid.label = M.label[organ] or organ
  solid.value = self.values[tissue]
  solid.amplitude = t.texture * (self.contrast == "ct" and 1 or 0.6)
  solid.period, solid.seed = t.period, self.seed + solid.label
  table.insert(self.solids, before or #self.solids + 1, solid)
  return solid
end

-- Tubes along a list of points, with balls at the joints; the radius goes from `first` to `last`.
local function vessel(self, organ, tissue, points, first, last)
  for i = 1, #points - 1 do
    local p, q = points[i], points[i + 1]
    local r = first + (last - first) * (i - 1) / math.max(1, #points - 2)
    self:add(organ, tissue, shapes.tube(p[1], p[2], p[3], q[1], q[2], q[3], r))
    if i < #points - 1 then self:add(organ, tissue, shapes.ellipsoid(q[1], q[2], q[3], r, r, r)) end
  end
end

-- A branch of vessels in a lung: forks twice on its way out, and goes no further than the lung does.
local function branch(self, random, lung, x, y, z, dx, dy, dz, radius, depth)
  local length = between(random, 15, 21) * (depth == 1 and 1.15 or 1)
  local nx, ny, nz = x + dx * length, y + dy * length, z + dz * length
  if not shapes.has(lung, nx, ny, nz, -5) then return end
  self:add("vessels", "blood", shapes.tube(x, y, z, nx, ny, nz, radius))
  self:add("vessels", "blood", shapes.ellipsoid(nx, ny, nz, radius, radius, radius))
  if depth == 3 then return end
  for side = -1, 1, 2 do
    local ex = dx + side * between(random, -0.2, 0.5)
    local ey, ez = dy + side * between(random, 0.3, 0.7), dz + side * between(random, 0.2, 0.75)
    local size = math.sqrt(ex * ex + ey * ey + ez * ez)
    branch(self, random, lung, nx, ny, nz, ex / size, ey / size, ez / size, radius * 0.72, depth + 1)
  end
end

local function spine(self, random, x, y)
  local width, spacing, start = between(random, 15, 18), between(random, 23, 26), between(random, -10, 10)
  local disc = shapes.ellipsoid(x, y, 0, width * 0.85, width * 0.72, 400)
  self:add("spine", "disc", shapes.cut(disc, x, y, 0, 0, 0, 1, 128))
  for i = -6, 6 do
    local z = start + i * spacing
    if math.abs(z) < 150 then
      local half = spacing * 0.38
      local outer = shapes.ellipsoid(x, y, z, width, width * 0.82, 60)
      self:add("spine", "bone", shapes.cut(outer, x, y, z, 0, 0, 1, half))
      local inner = shapes.ellipsoid(x, y, z, width - 3.5, width * 0.82 - 3.5, 60)
      self:add("spine", "marrow", shapes.cut(inner, x, y, z, 0, 0, 1, half - 2.5))
      local back = y + width * 0.82
      for side = -1, 1, 2 do -- the arch, and what stands out of it
        self:add("spine", "bone", shapes.tube(x + side * 9, back - 3, z, x + side * 8, back + 9, z, 4))
        self:add("spine", "bone", shapes.tube(x + side * 8, back + 9, z, x + side * width * 1.75, back + 11, z - 3,
          3.5))
        self:add("spine", "bone", shapes.tube(x + side * 8, back + 9, z, x, back + 13, z + 2, 3.5))
      end
      self:add("spine", "bone", shapes.tube(x, back + 12, z + 2, x, back + 23, z + 9, 3.2))
    end
  end
  local canal = y + width * 0.82 + 5
  self:add("spinal canal", "cord", shapes.tube(x, canal, -140, x, canal, 140, 5.5))
end

--- A body, from a generator (datasets.random): { solids, organs (by name the ellipsoids that findings are put into),
-- before (positions in solids before which findings go that later parts cover), contrast, values }.
---@param random table
---@param contrast string "ct" or "mri"
function M.draw(random, contrast)
  arguments.expect("datasets.volumes.anatomy.draw", "contrast", contrast, '"ct" or "mri"')
  arguments.expect("datasets.volumes.anatomy.draw", "random", random, "a table")
  local self = setmetatable({ solids = {}, organs = {}, before = {}, contrast = contrast, values = {} }, Body)
  self.seed = random:integer(0, 1 << 30)
  local names = {}
  for name in pairs(tissues) do if name ~= "contrasts" then names[#names + 1] = name end end
  table.sort(names)
  for _, name in ipairs(names) do
    local t, away = tissues[name], between(random, -1, 1)
    self.values[name] = contrast == "ct" and t.ct + t.spread * away or t.mri * (1 + 0.12 * away)
  end
  local function real(low, high) return between(random, low, high) end

  local sx, sy, sz = real(0.9, 1.06), real(0.9, 1.08), real(0.92, 1.06)
  local cx, cy, cz = real(-5, 5), real(-5, 5), real(-8, 8)
  local frame = shapes.rotation(real(-0.07, 0.07), real(-0.05, 0.05), real(-0.1, 0.1))
  -- From the body's own directions, where its middle is 0, to the volume's.
  local function at(x, y, z)
    local tx, ty, tz = shapes.turn(frame, x * sx, y * sy, z * sz)
    return cx + tx, cy + ty, cz + tz
  end
  local function ellipsoid(x, y, z, rx, ry, rz, rotation)
    local px, py, pz = at(x, y, z)
    return shapes.ellipsoid(px, py, pz, rx * sx, ry * sy, rz * sz, rotation or frame)
  end
  local function turned(a, b, c)
    local r, f = shapes.rotation(a, b, c), {}
    for i = 1, 3 do
      f[i] = {}
      for j = 1, 3 do f[i][j] = frame[i][1] * r[1][j] + frame[i][2] * r[2][j] + frame[i][3] * r[3][j] end
    end
    return f
  end

  local fat = real(5, 11)
  self:add("fat", "fat", ellipsoid(0, 0, 20, 112, 80, 330))
  self:add("muscle", "muscle", ellipsoid(0, 0, 20, 112 - fat, 80 - fat, 326))

  -- ribs: bands of a shell of bone, that go down to the front
  local rx, ry, rz = 94, 64, 128
  local tilt, spacing, first = real(0.28, 0.42), real(23, 27), real(-118, -104)
  local ns, nc = trigonometry.sincos(tilt)
  local nx, ny, nz = shapes.turn(frame, 0, ns, nc)
  for i = 0, 9 do
    local shell = ellipsoid(0, 0, 10, rx, ry, rz)
    local px, py, pz = at(0, 0, first + i * spacing)
    self:add("ribs", "bone", shapes.cut(shell, px, py, pz, nx, ny, nz, 4.6))
    local marrow = ellipsoid(0, 0, 10, rx - 2.4, ry - 2.4, rz - 2.4)
    self:add("ribs", "marrow", shapes.cut(marrow, px, py, pz, nx, ny, nz, 2.2))
  end
  self:add("mediastinum", "mediastinum", ellipsoid(0, 0, 10, rx - 6.5, ry - 6.5, rz - 6.5))
  local bx, by, bz = at(0, -ry + 5, -45)
  local ex, ey, ez = at(0, -ry + 3, 35)
  local sternum = shapes.ellipsoid((bx + ex) / 2, (by + ey) / 2, (bz + ez) / 2, 14, 5.5, 52, frame)
  self:add("ribs", "bone", sternum)

  local lean = real(0.02, 0.1)
  local lungs = {
    ["right lung"] = ellipsoid(-46, 2, real(-12, -2), real(34, 37), real(47, 51), real(92, 100), turned(0, lean, 0)),
    ["left lung"] = ellipsoid(47, 4, real(-12, -2), real(32, 35), real(46, 50), real(92, 100), turned(0, -lean, 0)),
  }
  for _, name in ipairs { "right lung", "left lung" } do
    self.organs[name] = self:add(name, "lung", lungs[name])
  end
  self.before.vessels = #self.solids + 1
  for _, name in ipairs { "right lung", "left lung" } do
    local out = name == "right lung" and -1 or 1
    for i = 0, 3 do
      local x, y, z = at(out * 20, real(-6, 10), -22 + 13 * i)
      local dx, dy, dz = out * real(0.6, 0.9), real(-0.5, 0.5), (i - 1.3) * 0.42 + real(-0.15, 0.15)
      local size = math.sqrt(dx * dx + dy * dy + dz * dz)
      branch(self, random, lungs[name], x, y, z, dx / size, dy / size, dz / size, real(3.2, 4.2), 1)
    end
  end

  self.before.abdomen = #self.solids + 1

  -- below the diaphragm: the liver's dome at the right, the spleen at the left
  local low = real(78, 92)
  self:add("muscle", "muscle", ellipsoid(34, -4, low + 34, 54, 54, 52))
  self.organs.liver = self:add("liver", "liver", ellipsoid(-36, -2, low + 22, real(52, 58), real(50, 55), real(44, 50),
    turned(0, real(0.1, 0.25), 0)))
  self.organs.spleen = self:add("spleen", "spleen", ellipsoid(58, 22, low + 18, real(19, 23), real(24, 28),
    real(28, 34), turned(real(-0.2, 0.2), real(-0.3, 0), 0)))

  self.before.heart = #self.solids + 1
  local hx, hy, hz = real(8, 14), real(-24, -17), real(28, 38)
  local axis = turned(real(0.1, 0.3), real(-0.25, 0.05), real(0.45, 0.75))
  self.organs.heart = self:add("heart", "heart", ellipsoid(hx, hy, hz, real(40, 46), real(29, 33), real(34, 39), axis))
  for _, chamber in ipairs { { 14, 2, 4, 16, 11, 14 }, { -14, -6, 4, 14, 10, 14 }, { 8, 8, -18, 13, 9, 9 },
    { -16, 3, -15, 12, 9, 9 } } do
    self:add("heart", "blood", ellipsoid(hx + chamber[1], hy + chamber[2], hz + chamber[3], chamber[4], chamber[5],
      chamber[6], axis))
  end

  local px, py = at(0, 42, 0)
  spine(self, random, px, py)

  local function point(x, y, z) return { at(x, y, z) } end
  local wide = real(8.5, 11.5)
  local down = real(15, 19)
  vessel(self, "aorta", "blood", { point(2, -14, 8), point(-5, -12, -16), point(0, -5, -36), point(9, 9, -40),
    point(down, 22, -28), point(down, 25, 40), point(6, 23, 140) }, wide, wide * 0.82)
  self.aorta = { point(down, 22, -20), point(down, 25, 40) }
  self.aorta_radius = wide * 0.9
  vessel(self, "vessels", "blood", { point(-16, -12, 20), point(-17, -10, -40), point(-14, -8, -120) }, 7, 6)
  local throat, fork = real(6.5, 8), real(-22, -14)
  vessel(self, "airways", "air", { point(0, 2, -140), point(0, 5, fork) }, throat, throat)
  vessel(self, "airways", "air", { point(0, 5, fork), point(-17, 6, fork + 15), point(-30, 5, fork + 24) },
    throat * 0.8, throat * 0.55)
  vessel(self, "airways", "air", { point(0, 5, fork), point(18, 6, fork + 15), point(31, 5, fork + 22) }, throat * 0.75,
    throat * 0.5)
  return self
end

return M
