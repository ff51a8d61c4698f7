--- What a report finds in a body: which findings there are, where, and the solids that show them.
local anatomy = require "tycho.datasets.volumes.anatomy"
local arguments = require "tycho.arguments"
local shapes = require "tycho.datasets.volumes.solids"

local M = {}

--- Kinds of findings, and the organs in which each is met. `held_out` organs are in the split held_out_findings only.
M.kinds = { "nodule", "cyst", "calcification", "effusion", "missing part" }
M.where = {
  nodule = { seen = { "right lung", "left lung", "spleen" }, held_out = { "liver" } },
  cyst = { seen = { "left lung", "liver", "spleen" }, held_out = { "right lung" } },
  calcification = { seen = { "right lung", "heart", "aorta", "liver" }, held_out = { "left lung" } },
  effusion = { seen = { "right lung", "left lung" }, held_out = { "heart" } },
  ["missing part"] = { seen = { "right lung", "liver" }, held_out = { "left lung" } },
}

--- The finding's number, from 1, stands in the label of its voxels above the organ's: label = 32 * number + organ.
M.step = 32

-- What takes an organ's place is drawn so many millimetres larger, which leaves no rim of it in voxels of both.
local rim = 1.5

local sizes = { nodule = { 8, 26 }, cyst = { 14, 36 }, calcification = { 8, 14 }, effusion = { 8, 28 },
  ["missing part"] = { 25, 60 } }

local function between(random, low, high) return low + (high - low) * random:number() end

-- A point of the ellipsoid, evenly, within `share` of its radii; and its place along the organ's own axes.
local function point_in(random, solid, share)
  local u, v, w
  repeat
    u, v, w = between(random, -1, 1), between(random, -1, 1), between(random, -1, 1)
  until u * u + v * v + w * w <= 1
  u, v, w = u * share, v * share, w * share
  local x, y, z = shapes.turn(solid.frame, u * solid.radii[1], v * solid.radii[2], w * solid.radii[3])
  return solid.x + x, solid.y + y, solid.z + z, w
end

local function third(w) return w < -0.22 and "upper" or w > 0.22 and "lower" or "middle" end

-- Whether a ball is in the organ and in the volume, off what covers the organ and off the findings before.
local function is_free(body, organ, x, y, z, radius, others)
  local edge = anatomy.field / 2 - radius - 4
  if math.abs(x) > edge or math.abs(y) > edge or math.abs(z) > edge then return false end
  for name, other in pairs(body.organs) do
    local covers = name == "heart" or (name == "liver" or name == "spleen") and organ:find "lung"
    if name ~= organ and covers and shapes.has(other, x, y, z, radius + 3) then return false end
  end
  for _, f in ipairs(others) do
    local dx, dy, dz, near = x - f.x, y - f.y, z - f.z, radius + f.size / 2 + 4
    if dx * dx + dy * dy + dz * dz < near * near then return false end
  end
  return true
end

local function add_ball(body, random, f, tissue, label)
  local r = f.size / 2
  local frame = shapes.rotation(between(random, -1.5, 1.5), between(random, -1.5, 1.5), between(random, -1.5, 1.5))
  local flat = f.size < 12 and 1 or f.kind == "cyst" and 0.92 or 0.78 -- small ones round: they fill a voxel by half
  body:add(label, tissue, shapes.ellipsoid(f.x, f.y, f.z, r, r * between(random, flat, 1), r * between(random, flat, 1),
    frame))
end

-- Each kind draws itself: given the finding with kind, organ and size, it sets x, y, z (and part) and adds its solids;
-- false where chance found no place.
local draw = {}

local function draw_ball(body, random, f, label, others)
  local organ = body.organs[f.organ]
  for _ = 1, 60 do
    local x, y, z, w = point_in(random, organ, 1)
    local inside = shapes.has(organ, x, y, z, -(f.size / 2 + 2))
    if inside and is_free(body, f.organ, x, y, z, f.size / 2, others) then
      f.x, f.y, f.z, f.part = x, y, z, third(w)
      add_ball(body, random, f, f.kind, label)
      return true
    end
  end
  return false
end

draw.nodule, draw.cyst = draw_ball, draw_ball

function draw.calcification(body, random, f, label, others)
  if f.organ ~= "aorta" and f.organ ~= "heart" then return draw_ball(body, random, f, label, others) end
  for _ = 1, 60 do
    local x, y, z
    if f.organ == "aorta" then -- in its wall
      local p, q, t = body.aorta[1], body.aorta[2], random:number()
      x, y, z = p[1] + (q[1] - p[1]) * t, p[2] + (q[2] - p[2]) * t, p[3] + (q[3] - p[3]) * t
      local side = random:integer(0, 1) * 2 - 1
      x = x + side * body.aorta_radius * 0.75
    else
      local organ = body.organs.heart
      x, y, z = point_in(random, organ, 0.8)
    end
    if is_free(body, f.organ, x, y, z, f.size / 2, others) then
      f.x, f.y, f.z = x, y, z
      add_ball(body, random, f, f.kind, label)
      return true
    end
  end
  return false
end

-- Fluid takes the lung's place but for a smaller lung that touches it from within above and in front, which leaves a
-- crescent below and behind. Around the heart it is a shell.
function draw.effusion(body, random, f, label)
  local organ = body.organs[f.organ]
  local r = organ.radii
  f.x, f.y, f.z = organ.x, organ.y, organ.z
  if f.organ == "heart" then
    local grown = shapes.ellipsoid(organ.x, organ.y, organ.z, r[1] + f.size * 0.7, r[2] + f.size * 0.7,
      r[3] + f.size * 0.7, organ.frame)
    body:add(label, "fluid", grown, body.before.heart)
    return true
  end
  local by = f.size / (2 * r[2]) -- the crescent is as thick as the finding's size at the back
  local ux, uy, uz = between(random, -0.2, 0.2), -0.88, -0.45
  local x, y, z = shapes.turn(organ.frame, ux * by * r[1], uy * by * r[2], uz * by * r[3])
  body:add(label, "fluid", shapes.ellipsoid(organ.x, organ.y, organ.z, r[1] + rim, r[2] + rim, r[3] + rim,
    organ.frame), body.before.vessels)
  local left = shapes.ellipsoid(organ.x + x, organ.y + y, organ.z + z, r[1] * (1 - by), r[2] * (1 - by),
    r[3] * (1 - by), organ.frame)
  body:add(f.organ, "lung", left, body.before.vessels + 1)
  for _, name in ipairs { "vessels", "abdomen", "heart" } do body.before[name] = body.before[name] + 2 end
  return true
end

-- What was the upper or lower end of the organ is soft tissue.
draw["missing part"] = function(body, random, f, label)
  local organ = body.organs[f.organ]
  local r, frame = organ.radii, organ.frame
  local upper = random:integer(0, 1) == 0
  -- what a lung's lower end would be lies below the diaphragm, as a liver's is beyond the volume
  if f.organ ~= "liver" then upper = true end
  local direction, low = upper and -1 or 1, f.organ == "liver" and 0.55 or 0.75
  local top = r[3] * low + (upper and 0 or -r[3] * 0.25)
  local half = f.size / 2
  local middle = direction * (top - half) + direction * (r[3] - top)
  local nx, ny, nz = frame[1][3], frame[2][3], frame[3][3]
  f.x, f.y, f.z = organ.x + nx * middle, organ.y + ny * middle, organ.z + nz * middle
  local gap = shapes.ellipsoid(organ.x, organ.y, organ.z, r[1] + rim, r[2] + rim, r[3] + rim, frame)
  body:add(label, "void", shapes.cut(gap, f.x + direction * nx * rim / 2, f.y + direction * ny * rim / 2,
    f.z + direction * nz * rim / 2, nx, ny, nz, half + rim / 2),
    f.organ == "liver" and body.before.heart or body.before.abdomen)
  f.part = upper and "upper" or "lower"
  for _, name in ipairs { "abdomen", "heart" } do
    if f.organ ~= "liver" or name == "heart" then body.before[name] = body.before[name] + 1 end
  end
  return true
end

-- What a finding may be, as { kind, organ } pairs.
local function pairs_of(which)
  local list = {}
  for _, kind in ipairs(M.kinds) do
    for _, organ in ipairs(M.where[kind][which]) do list[#list + 1] = { kind, organ } end
  end
  return list
end
local seen, held_out = pairs_of "seen", pairs_of "held_out"

--- Whether findings of this kind in this organ are kept from training.
---@param kind string
---@param organ string
function M.is_held_out(kind, organ)
  for _, pair in ipairs(held_out) do if pair[1] == kind and pair[2] == organ then return true end end
  return false
end

--- Draws `count` findings into a body; returns them, each { kind, organ, side, part, size, centre }: size in
-- millimetres, centre { x, y, z } as shares of the volume's side. Where `new` is true the first is a held-out pair.
---@param body table
---@param random table
---@param count integer
---@param new boolean
function M.draw(body, random, count, new)
  arguments.expect("datasets.volumes.findings.draw", "count", count, "an integer in [0, 3]")
  arguments.expect("datasets.volumes.findings.draw", "body", body, "a table")
  arguments.expect("datasets.volumes.findings.draw", "random", random, "a table")
  local found = {}
  for _ = 1, 100 do
    if #found == count then break end
    local pair = random:choose(new and #found == 0 and held_out or seen)
    local kind, organ = pair[1], pair[2]
    local twice = false -- an effusion and a gap change the whole organ: no other finding is there
    for _, f in ipairs(found) do
      local whole = f.kind == "effusion" or f.kind == "missing part" or kind == "effusion" or kind == "missing part"
      twice = twice or f.organ == organ and (whole or f.kind == kind)
    end
    if not twice then
      local range = sizes[kind]
      local f = { kind = kind, organ = organ, size = random:integer(range[1], range[2]) }
      if organ == "heart" and kind == "effusion" then f.size = random:integer(8, 16) end
      if organ == "liver" and kind == "missing part" then f.size = random:integer(22, 40) end
      local whole = kind == "effusion" or kind == "missing part"
      local label = M.step * (#found + 1) + anatomy.label[whole and "mediastinum" or organ]
      if draw[kind](body, random, f, label, found) then
        f.side = organ:match "^(%a+) lung$"
        found[#found + 1] = f
      end
    end
  end
  for _, f in ipairs(found) do
    local field = anatomy.field
    f.centre = { f.x / field + 0.5, f.y / field + 0.5, f.z / field + 0.5 }
    f.x, f.y, f.z = nil, nil, nil
  end
  return found
end

return M
