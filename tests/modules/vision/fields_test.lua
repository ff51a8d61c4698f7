-- Pictures and shapes as functions of a place.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local fields = require("tycho.vision").fields

check.test("pixels fall into two parts that do not meet, with their colours at their centres", function()
  local image = ty.arange(3 * 6 * 8):to "u8":reshape(3, 6, 8)
  local known = fields.pixels(image, { held_out = 0.25, seed = 3 })
  check.equal(known.places.shape, { 36, 2 })
  check.equal(known.rest.colours.shape, { 12, 3 })
  local seen = {}
  for _, part in ipairs { known, known.rest } do
    local places, colours = part.places:tolist(), part.colours:tolist()
    for i, p in ipairs(places) do
      local x, y = math.floor(p[1] * 8), math.floor(p[2] * 6)
      check.close(p, { (x + 0.5) / 8, (y + 0.5) / 6 }, 1e-6)
      check.ok(not seen[y * 8 + x])
      seen[y * 8 + x] = true
      for c = 1, 3 do check.close(colours[i][c], ((c - 1) * 48 + y * 8 + x) / 255, 1e-6) end
    end
  end
  check.equal(fields.pixels(image, { seed = 3, held_out = 0.25 }).places:tolist(), known.places:tolist())
end)

check.test("a picture is drawn as it was read", function()
  local image = ty.randint(0, 256, { 3, 5, 7 }):to "u8"
  local function field(places)
    local x, y = (places:select(1, 0) * 7):floor():to "i64", (places:select(1, 1) * 5):floor():to "i64"
    return (image:to "f32" / 255):reshape(3, 35):transpose(0, 1):index_select(0, y * 7 + x)
  end
  check.equal(fields.draw(field, 5, 7):tolist(), image:tolist())
  check.close(fields.psnr(ty.zeros(4), ty.full({ 4 }, 0.1)), 20, 1e-4)
end)

check.test("distances from solids are those of geometry", function()
  local function at(solid, ...)
    return fields.signed_distance(ty.tensor({ { ... } }, { dtype = "f64" }), { solid }):item()
  end
  local ball = { kind = "sphere", at = { 0.5, 0.5, 0.5 }, radius = 0.2 }
  check.close(at(ball, 0.5, 0.5, 0.9), 0.2, 1e-8)
  check.close(at(ball, 0.5, 0.5, 0.5), -0.2, 1e-8)
  local box = { kind = "box", at = { 0.5, 0.5, 0.5 }, half = { 0.1, 0.2, 0.3 } }
  check.close(at(box, 0.7, 0.8, 0.5), math.sqrt(0.01 + 0.01), 1e-8)
  check.close(at(box, 0.55, 0.5, 0.5), -0.05, 1e-8)
  local ring = { kind = "torus", at = { 0.5, 0.5, 0.5 }, radius = 0.3, thickness = 0.1 }
  check.close(at(ring, 0.8, 0.5, 0.5), -0.1, 1e-8)
  check.close(at(ring, 0.5, 0.5, 0.5), 0.2, 1e-8)
  check.close(at(ring, 0.8, 0.75, 0.5), 0.15, 1e-8)
end)

check.test("a union's distance is the least, and rises by one per unit where it is smooth", function()
  local p = ty.rand({ 500, 3 }, { dtype = "f64" })
  local d = fields.signed_distance(p)
  local least
  for _, solid in ipairs(fields.still_life) do
    local one = fields.signed_distance(p, { solid })
    least = least and ty.minimum(least, one) or one
  end
  check.equal(d:tolist(), least:tolist())
  local slope = ty.grad(fields.signed_distance(p:requires_grad_()):sum(), { p })[1]
  check.close(slope:square():sum(1):sqrt():median():item(), 1, 1e-6)
  check.close(fields.normals(fields.signed_distance, p):square():sum(1):tolist()[1], 1, 1e-6)
end)

check.test("half of the samples lie near the surface", function()
  ty.manual_seed(1)
  local places, distances = fields.shape_samples(2000, { near = 0.01 })
  check.equal(places.shape, { 2000, 3 })
  check.equal(distances:tolist(), fields.signed_distance(places):tolist())
  local near = distances:narrow(0, 0, 1000):abs():lt(0.04):to "f32":mean():item()
  check.ok(near > 0.9, near)
  check.ok(distances:narrow(0, 1000, 1000):abs():lt(0.04):to "f32":mean():item() < 0.5)
end)

check.test("contours are white at the surface, cold inside and warm outside", function()
  local x = fields.contours(ty.tensor { { -0.05, 0, 0.05 } }):tolist()
  check.equal({ x[1][1][2], x[2][1][2], x[3][1][2] }, { 255, 255, 255 })
  check.ok(x[3][1][1] > x[1][1][1] and x[1][1][3] > x[3][1][3])
end)

check.test("a race gives all ways the same time", function()
  local now, done = 0, { fast = 0, slow = 0 }
  local function way(name, cost)
    return {
      step = function(i)
        now, done[name] = now + cost, done[name] + 1
        check.equal(i, done[name])
      end,
      score = function()
        now = now + 100 -- does not count
        return done[name]
      end,
    }
  end
  local r = fields.race({ fast = way("fast", 1), slow = way("slow", 3) }, 30,
    { points = 3, clock = function() return now end })
  check.equal({ r.fast.steps, r.slow.steps, r.fast.seconds, r.slow.seconds }, { 30, 10, 30, 30 })
  for i, point in ipairs(r.fast.curve) do check.equal({ point.seconds, point.score }, { 10 * i, 10 * i }) end
end)

check.test("mistakes", function()
  check.fails(function() fields.pixels(ty.rand(3, 4, 4)) end, "fields%.pixels: image: expected u8 %[c, h, w%], got")
  check.fails(function() fields.signed_distance(ty.rand(4, 2)) end, "places: expected %[%.%.%., 3%], got")
  check.fails(function() fields.signed_distance(ty.rand(4, 3), { { kind = "cone" } }) end, 'solids%[1%]: expected {')
  check.fails(function() fields.signed_distance(ty.rand(4, 3), {}) end, "solids: expected at least one")
  check.fails(function() fields.race({ a = {} }, 1) end, "ways%.a: expected { step =, score = }")
end)

check.finish()
