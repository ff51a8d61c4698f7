-- Volumes: bodies, findings, reports, masks, projections; and the angles they are made with.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local findings = require "tycho.datasets.volumes.findings"
local trigonometry = require "tycho.datasets.trigonometry"

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h, bytes = -0x340d631b7bdddcdb, ty.io.to_bytes(tensor)
  for i = 1, #bytes, 7 do h = (h ~ bytes:byte(i)) * 0x100000001b3 end
  return ("%016x"):format(h)
end

local all = { "volume", "image", "organs", "marks", "report", "findings", "denied" }

check.test("angles are those of the C library, to the last places", function()
  local worst = 0
  for k = -400, 400 do
    local x = k * 0.37 + 0.001 * k * k
    local s, c = trigonometry.sincos(x)
    worst = math.max(worst, math.abs(s - math.sin(x)), math.abs(c - math.cos(x)))
    local r = 1 + k % 7
    local angle = trigonometry.atan2(r * s, r * c)
    worst = math.max(worst, math.abs(angle - math.atan(r * s, r * c)))
  end
  check.ok(worst < 2e-15, worst)
  for _, p in ipairs { { 0, 1 }, { 0, -1 }, { 1, 0 }, { -1, 0 }, { 1, -1e-300 }, { -2, -2 } } do
    check.close(trigonometry.atan2(p[1], p[2]), math.atan(p[1], p[2]), 1e-15)
  end
  check.fails(function() trigonometry.sincos(1e9) end, "x: expected a number in")
end)

check.test("items", function()
  for _, side in ipairs { 32, 64 } do
    local set = datasets.load("volumes", { size = side, fields = all, findings = { 2, 2 } })
    check.equal(#set, 20000)
    local item = set:get(3)
    check.equal(item.volume.shape, { 1, side, side, side })
    local dtypes = { item.volume.dtype, item.image.dtype, item.organs.dtype, item.marks.dtype }
    check.equal(dtypes, { "f32", "u8", "u8", "u8" })
    check.equal(item.organs.shape, { side, side, side })
    check.equal({ #item.findings, type(item.report), item.marks:max():item() }, { 2, "string", 2 })
  end
end)

check.test("the same bytes for every number of threads and whatever else is asked for", function()
  local before = ty.threads()
  for _, threads in ipairs { 1, 2 } do
    ty.set_threads(threads)
    local set = datasets.load("volumes", { size = 32, fields = all, seed = 5 })
    local batch = set:batch { 7, 0, 19999 }
    check.equal({ hash(batch.volume:select(0, 1)), hash(batch.organs), hash(batch.marks) },
      { "fe4fd8dd74d699cd", "b457b0669035991c", "b691456697c0285a" })
    local alone = datasets.load("volumes", { size = 32, seed = 5, fields = { "volume", "report" } }):get(7)
    check.ok(alone.volume:eq(batch.volume:select(0, 0)):all():item())
    check.equal(alone.report, batch.report[1])
  end
  ty.set_threads(before)
  local other = datasets.load("volumes", { size = 32, seed = 6 }):get(7)
  check.ok(not other.volume:eq(datasets.load("volumes", { size = 32, seed = 5 }):get(7).volume):all():item())
end)

check.test("organs have their attenuation", function()
  local item = datasets.load("volumes", { fields = { "volume", "organs" }, findings = { 0, 0 } }):get(11)
  local volume, organs = item.volume:squeeze(0), item.organs
  local range = { fat = { 0.8, 0.96 }, muscle = { 1, 1.1 }, ["right lung"] = { 0.1, 0.4 }, ["left lung"] =
    { 0.1, 0.4 }, heart = { 1, 1.1 }, liver = { 1, 1.1 }, spleen = { 1, 1.1 }, ribs = { 1.15, 2 }, spine = { 1.1, 2 },
    airways = { 0, 0.4 }, aorta = { 1, 1.1 } }
  for k, name in ipairs(datasets.volumes.organs) do
    local mask = organs:eq(k):to "f32"
    local count = mask:sum():item()
    check.ok(count > 20, name)
    local mean = (volume * mask):sum():item() / count
    if range[name] then check.ok(mean > range[name][1] and mean < range[name][2], name .. " " .. mean) end
  end
  check.close((volume * organs:eq(0):to "f32"):mean():item(), 0, 0.02)
  check.ok(organs:eq(0):to("f32"):mean():item() > 0.2)
end)

check.test("findings are where they are said to be", function()
  for _, split in ipairs { "training", "held_out_findings" } do
    local set = datasets.load("volumes", { split = split, findings = { 1, 3 }, fields = all })
    for i = 0, 11 do
      local item = set:get(i)
      for k, f in ipairs(item.findings) do
        local mask = item.marks:eq(k)
        local voxels = mask:to("f32"):sum():item()
        local mean = (item.volume:squeeze(0) * mask:to "f32"):sum():item() / voxels
        check.ok(voxels > 0, f.kind)
        if f.kind == "effusion" or f.kind == "missing part" then
          check.ok(voxels > 100, f.kind .. " " .. f.organ)
          check.ok(mean > 0.85 and mean < 1.1, f.kind .. " " .. mean)
        else
          local r = f.size / 2 / 4
          local share = voxels / (4 / 3 * math.pi * r ^ 3)
          check.ok(share > 0.4 and share < 1.4, ("%s of %d mm: %g"):format(f.kind, f.size, share))
          local c = f.centre
          local function at(t)
            for d = 3, 1, -1 do t = t:select(0, c[d] * 64 // 1 | 0) end
            return t:item()
          end
          check.equal(at(item.marks), k, f.kind)
          check.equal(datasets.volumes.organs[at(item.organs)], f.organ)
          if f.kind == "calcification" then check.ok(mean > 1.1, mean) end
        end
      end
    end
  end
end)

check.test("reports say what was found", function()
  local kinds = { nodule = "nodule", cyst = "cyst", calcification = "calcifi", effusion = "effusion",
    ["missing part"] = "" }
  local set = datasets.load("volumes", { fields = { "report", "findings", "denied" } })
  local texts, distinct = {}, 0
  for i = 0, 199 do
    local item = set:get(i)
    local text = item.report:lower()
    for _, f in ipairs(item.findings) do
      local word = f.kind == "effusion" and text:find "fluid" and "fluid" or kinds[f.kind]
      check.ok(text:find(word, 1, true), text)
      local organ = f.side and f.side or f.organ == "heart" and "" or f.organ
      check.ok(text:find(organ, 1, true), text)
      if f.kind == "nodule" or f.kind == "cyst" or f.kind == "calcification" then
        local mm, cm = ("%d mm"):format(f.size), ("%d cm"):format(f.size // 10)
        check.ok(text:find(mm, 1, true) or text:find(cm, 1, true), text)
      end
      for _, denied in ipairs(item.denied) do check.ok(denied ~= f.kind, text) end
    end
    if not texts[text] then distinct = distinct + 1 end
    texts[text] = true
  end
  check.ok(distinct > 140, distinct)
end)

check.test("held-out findings are in no other split, and all of both kinds are met", function()
  local met = {}
  for _, split in ipairs { "training", "validation", "held_out_findings" } do
    local set = datasets.load("volumes", { split = split, fields = { "findings" } })
    for i = 0, 249 do
      local any = false
      for _, f in ipairs(set:get(i).findings) do
        local held_out = findings.is_held_out(f.kind, f.organ)
        any = any or held_out
        met[f.kind .. " " .. f.organ] = true
        if split ~= "held_out_findings" then check.ok(not held_out, f.kind .. " " .. f.organ) end
      end
      if split == "held_out_findings" then check.ok(any, i) end
    end
  end
  for kind, where in pairs(findings.where) do
    for _, list in pairs(where) do
      for _, organ in ipairs(list) do check.ok(met[kind .. " " .. organ], kind .. " " .. organ) end
    end
  end
end)

check.test("contrast of magnetic resonance: other tissues are bright, noise is never below 0", function()
  local options = { size = 32, contrast = "mri", fields = { "volume", "organs" }, findings = { 0, 0 } }
  local noisy = datasets.load("volumes", options):get(1)
  options.noise, options.bias = 0, 0
  local clean = datasets.load("volumes", options):get(1)
  check.ok(noisy.volume:min():item() >= 0)
  local fat, muscle = clean.organs:eq(1):to "f32", clean.organs:eq(2):to "f32"
  local function mean(item, mask) return (item.volume:squeeze(0) * mask):sum():item() / mask:sum():item() end
  check.ok(mean(clean, fat) > 1.5 * mean(clean, muscle))
  check.ok(noisy.organs:eq(clean.organs):all():item())
  -- outside of the body: Rayleigh's distribution, whose mean is sqrt(pi/2) of the deviation; the corners see no body
  local air = noisy.volume:narrow(2, 0, 3):narrow(3, 0, 3)
  check.close(air:mean():item(), 0.02 * math.sqrt(math.pi / 2), 2e-3)
end)

-- ---- projections ----

check.test("radon and backproject are adjoint", function()
  ty.manual_seed(3)
  local angles = ty.linspace(0, 6, 23, { dtype = "f64" })
  for dtype, bound in pairs { f64 = 1e-13, f32 = 1e-6 } do
    for _, spacing in ipairs { 1, 0.7, 1.9 } do
      local x, y = ty.randn(3, 40, 33, { dtype = dtype }), ty.randn(3, 23, 50, { dtype = dtype })
      local left = (ty.radon(x, angles, 50, spacing) * y):to("f64")
      local right = (x * ty.backproject(y, angles, { 40, 33 }, spacing)):to("f64")
      local size = left:abs():sum():item()
      check.ok(math.abs(left:sum():item() - right:sum():item()) < bound * size, dtype)
    end
  end
end)

check.test("projections of an ellipsoid have its closed form", function()
  local side, a, b, angle = 96, 33, 19, 0.6
  local x0, y0 = 4.3, -7.8
  local c, s = math.cos(angle), math.sin(angle)
  local one = 1 << 20
  local row = { 1, 1000, 0, 65536, 0, 0, side, 0, side, 0, 4 }
  for _, f in ipairs { { c / a, s / a, x0, y0 }, { -s / b, c / b, x0, y0 } } do
    local d = -(f[1] * (side / 2 + x0) + f[2] * (side / 2 + y0))
    for _, v in ipairs { f[1], f[2], 0, d } do row[#row + 1] = math.floor(v * one + 0.5) end
  end
  for _ = 1, 8 do row[#row + 1] = 0 end
  local values = ty.draw_solids(ty.tensor(row, { dtype = "i32" }):reshape(1, 1, 27), 1, side, side)
  local picture = values:reshape(1, side, side):to "f64" / 1000
  check.close(picture:sum():item(), math.pi * a * b, 0.2) -- its area
  local views = {}
  for k = 0, 11 do views[k + 1] = k * math.pi / 12 end
  local got = ty.radon(picture, ty.tensor(views, { dtype = "f64" }), 101):tolist()[1]
  local worst, total = 0, 0
  for v, view in ipairs(views) do
    local across = math.sqrt((a * math.cos(view - angle)) ^ 2 + (b * math.sin(view - angle)) ^ 2)
    local middle = x0 * math.cos(view) + y0 * math.sin(view)
    for j = 0, 100 do
      local t = j - 50 - middle
      local want = math.abs(t) < across and 2 * a * b / across ^ 2 * math.sqrt(across ^ 2 - t * t) or 0
      local off = math.abs(got[v][j + 1] - want)
      total = total + off
      if math.abs(math.abs(t) - across) > 1.5 then worst = math.max(worst, off) end
    end
  end
  check.ok(worst < 0.8, worst) -- chords of up to 66
  check.ok(total / (101 * 12) < 0.12, total / (101 * 12))
end)

check.test("second derivatives of a squared misfit", function()
  ty.manual_seed(1)
  local angles = ty.tensor({ 0.1, 0.9, 2.2 }, { dtype = "f64" })
  local x = ty.randn(1, 6, 5, { dtype = "f64" }):requires_grad_(true)
  local v = ty.randn(1, 6, 5, { dtype = "f64" })
  local g = ty.grad(ty.radon(x, angles):square():sum(), { x }, { create_graph = true })[1]
  local got = ty.grad((g * v):sum(), { x })[1]
  local want = ty.backproject(ty.radon(v, angles), angles, { 6, 5 }) * 2
  check.ok((got - want):abs():max():item() < 1e-12)
end)

check.test("scans: shapes, units, few views, few photons", function()
  local item = datasets.load("volumes", { size = 32, findings = { 0, 0 } }):get(0)
  local clean = datasets.volumes.project(item.volume, { views = 12 })
  check.equal(clean.sinogram.shape, { 1, 32, 12, 46 })
  check.equal(clean.angles.shape, { 12 })
  check.close(clean.angles:select(0, 3):item(), math.pi / 4, 1e-12)
  -- all lines together see the mass of a slice: its sum times the area of a voxel, in every view
  local mass = item.volume:sum():item() * 0.2059 * 0.8 ^ 2
  check.close(clean.sinogram:sum():item() / 12 * 0.8, mass, mass * 0.01)
  check.ok(clean.sinogram:max():item() > 2 and clean.sinogram:max():item() < 8)
  local low = datasets.volumes.project(item.volume, { views = 12, dose = 2000 })
  local high = datasets.volumes.project(item.volume, { views = 12, dose = 1e6 })
  local function off(scan) return (scan.sinogram - clean.sinogram):square():mean():sqrt():item() end
  check.ok(off(low) > 10 * off(high), off(low) / off(high))
  local air = low.sinogram:narrow(3, 0, 1) -- outside of the body: counts of 2000 spread by their root
  check.close(air:std():item(), 1 / math.sqrt(2000), 0.003)
  local again = datasets.volumes.project(item.volume, { views = 12, dose = 2000 })
  check.ok(again.sinogram:eq(low.sinogram):all():item())
  local other = datasets.volumes.project(item.volume, { views = 12, dose = 2000, seed = 1 })
  check.ok(not other.sinogram:eq(low.sinogram):all():item())
  local x = item.volume:clone():requires_grad_(true)
  local g = ty.grad(datasets.volumes.project(x, { views = 12 }).sinogram:sum(), { x })[1]
  check.close((g * item.volume):sum():item(), clean.sinogram:sum():item(), 1e-3 * clean.sinogram:sum():item())
end)

check.test("a sheet", function()
  local path = os.tmpname() .. ".png"
  check.equal(datasets.show("volumes", { path = path, count = 2, columns = 1, size = 32 }), path)
  os.remove(path)
  local info = datasets.info "volumes"
  check.ok(info.licence and info.splits.training and info.splits.validation and info.splits.held_out_findings)
end)

check.test("errors", function()
  local function fails(options, text) check.fails(function() datasets.load("volumes", options) end, text) end
  fails({ split = "test" }, 'split: there is no "test"')
  fails({ size = 48 }, "size: expected 32 or 64 or 128, got 48")
  fails({ fields = { "volumes" } }, 'fields: there is no "volumes"')
  fails({ findings = { 2, 1 } }, "findings: expected { least, most } from 0 to 3, got { 2, 1 }")
  fails({ split = "held_out_findings", findings = { 0, 0 } }, "from 1 to 3, got { 0, 0 }")
  fails({ contrast = "pet" }, 'contrast: expected "ct" or "mri", got "pet"')
  check.fails(function() datasets.load("volumes", { length = 3 }):get(3) end, "Volumes:get: i: expected 0 to 2, got 3")
  check.fails(function() datasets.load("volumes"):batch {} end, "expected at least one, got none")
  check.fails(function() datasets.volumes.project(ty.zeros(3, 3)) end, "volume: expected [..., d, h, w]")
  check.fails(function() datasets.volumes.project(ty.zeros(3, 3, 3), { dose = 0 }) end, "dose")
end)

check.finish()
