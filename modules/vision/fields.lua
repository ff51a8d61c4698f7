--- Pictures and shapes as functions of a place: their samples, what a fitted function is worth, and fitting several for
-- the same time. Places are in [0, 1], along the width first.
--
--     local known = fields.pixels(image)                   -- u8 [3, h, w]: { places, colours, rest = { ... } }
--     local race = fields.race({ hash = fit_hash, waves = fit_waves }, 20)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- The pixels of a picture in two parts, of which one is held out: their centres and their colours in [0, 1].
---@param image Tensor  u8 [c, h, w]
---@param options? {held_out: number, seed: integer}  held_out: share (1 / 8); seed (0): of which
---@return {places: Tensor, colours: Tensor, rest: {places: Tensor, colours: Tensor}}
function M.pixels(image, options)
  local o = arguments.read("fields.pixels", options, { held_out = 1 / 8, seed = 0 },
    { held_out = "a number in [0, 1]", seed = "an integer" })
  arguments.expect("fields.pixels", "image", image, "a tensor")
  if image.ndim ~= 3 or image.dtype ~= "u8" then
    arguments.fail("fields.pixels: image: expected u8 [c, h, w], got %s", arguments.describe(image))
  end
  local c, h, w = table.unpack(image.shape)
  local places, colours = M.centres(h, w), (image:to "f32" / 255):reshape(c, h * w):transpose(0, 1)
  local order = ty.seeded_noise(ty.zeros(h * w), o.seed, "uniform"):argsort()
  local held = math.floor(h * w * o.held_out)
  local function part(from, count)
    local chosen = order:narrow(0, from, count)
    return { places = places:index_select(0, chosen), colours = colours:index_select(0, chosen) }
  end
  local known = part(held, h * w - held)
  known.rest = part(0, held)
  return known
end

--- Centres of h x w pixels, row by row: [h * w, 2].
---@param h integer
---@param w integer
---@return Tensor
function M.centres(h, w)
  arguments.expect("fields.centres", "h", h, "an integer >= 1")
  arguments.expect("fields.centres", "w", w, "an integer >= 1")
  local y, x = (ty.arange(h):to "f32" + 0.5) / h, (ty.arange(w):to "f32" + 0.5) / w
  return ty.stack({ x:unsqueeze(0):expand(h, w), y:unsqueeze(1):expand(h, w) }, 2):reshape(h * w, 2)
end

--- A fitted picture, u8 [c, h, w], drawn in parts.
---@param field fun(places: Tensor): Tensor
---@param h integer
---@param w integer
---@param device? string
---@return Tensor
function M.draw(field, h, w, device)
  arguments.expect("fields.draw", "field", field, "a function")
  local places = M.centres(h, w):to(device or "cpu")
  return ty.no_grad(function()
    local parts = {}
    for at = 0, h * w - 1, 65536 do
      parts[#parts + 1] = field(places:narrow(0, at, math.min(65536, h * w - at)))
    end
    local y = ty.cat(parts, 0)
    return (y:clamp(0, 1) * 255):round():to "u8":transpose(0, 1):reshape(y.shape[2], h, w)
  end)
end

--- Decibels of the peak over the mean square error, of colours in [0, 1].
---@param got Tensor
---@param wanted Tensor
---@return number
function M.psnr(got, wanted)
  arguments.expect("fields.psnr", "got", got, "a tensor")
  arguments.expect("fields.psnr", "wanted", wanted, "a tensor")
  return -10 * math.log(math.max(1e-12, (got - wanted):square():mean():item()), 10)
end

-- ---- shapes whose distance is known ----

local kinds = {}

local function from_centre(p, solid)
  return p - ty.tensor(solid.at, { dtype = p.dtype, device = p.device })
end

-- Of vectors in the last dimension, and of pairs.
local function length(v) return (v:square():sum(-1) + 1e-18):sqrt() end
local function hypot(a, b) return (a:square() + b:square() + 1e-18):sqrt() end

function kinds.sphere(p, solid) return length(from_centre(p, solid)) - solid.radius end

function kinds.box(p, solid)
  local q = from_centre(p, solid):abs() - ty.tensor(solid.half, { dtype = p.dtype, device = p.device })
  return length(q:clamp(0)) + q:amax({ -1 }):clamp(nil, 0)
end

-- Around the second axis.
function kinds.torus(p, solid)
  local d = from_centre(p, solid)
  local around = hypot(d:select(-1, 0), d:select(-1, 2)) - solid.radius
  return hypot(around, d:select(-1, 1)) - solid.thickness
end

--- A ring around a ball, on a plate with a pillar: what signed_distance() takes.
M.still_life = {
  { kind = "torus", at = { 0.5, 0.5, 0.5 }, radius = 0.27, thickness = 0.06 },
  { kind = "sphere", at = { 0.5, 0.52, 0.5 }, radius = 0.14 },
  { kind = "box", at = { 0.5, 0.2, 0.5 }, half = { 0.36, 0.03, 0.3 } },
  { kind = "box", at = { 0.25, 0.36, 0.6 }, half = { 0.04, 0.16, 0.04 } },
}

--- Signed distances of places from a union of solids, exact outside: kind "sphere" (at, radius), "box" (at, half, its
-- half sides) or "torus" (at, radius, thickness). Quilez, "Distance functions".
---@param places Tensor  [..., 3]
---@param solids? table[]  (fields.still_life)
---@return Tensor  [...]
function M.signed_distance(places, solids)
  local who = "fields.signed_distance"
  arguments.expect(who, "places", places, "a tensor")
  if places.ndim < 1 or places.shape[places.ndim] ~= 3 then
    arguments.fail("%s: places: expected [..., 3], got %s", who, arguments.describe(places))
  end
  if solids ~= nil then arguments.expect(who, "solids", solids, "a list") end
  local least
  for i, solid in ipairs(solids or M.still_life) do
    local kind = type(solid) == "table" and kinds[solid.kind]
    if not kind then
      arguments.fail('%s: solids[%d]: expected { kind = "sphere", "box" or "torus", ... }, got %s', who, i,
        arguments.describe(type(solid) == "table" and solid.kind or solid))
    end
    local d = kind(places, solid)
    least = least and ty.minimum(least, d) or d
  end
  if not least then arguments.fail("%s: solids: expected at least one", who) end
  return least
end

--- Directions in which a function of places rises: [n, 3], of length 1.
---@param fn fun(places: Tensor): Tensor
---@param places Tensor  [n, 3]
---@return Tensor
function M.normals(fn, places)
  arguments.expect("fields.normals", "fn", fn, "a function")
  arguments.expect("fields.normals", "places", places, "a tensor")
  places = places:detach():requires_grad_()
  local slope = ty.grad(fn(places):sum(), { places })[1]
  return slope / length(slope):unsqueeze(1)
end

--- Places to learn a shape from, n: half anywhere, half near its surface, within `near` (0.01) standard deviations of
-- it, moved there along the slope.
---@param n integer
---@param options? {solids: table[], near: number, device: string}
---@return Tensor places, Tensor distances  [n, 3], [n]
function M.shape_samples(n, options)
  arguments.expect("fields.shape_samples", "n", n, "an integer >= 2")
  local o = arguments.read("fields.shape_samples", options, { solids = M.still_life, near = 0.01, device = "cpu" },
    { solids = "a list", near = "a finite number >= 0", device = "a string" })
  local places = ty.rand({ n, 3 }, { device = o.device })
  local near = places:narrow(0, 0, n // 2)
  for _ = 1, 3 do
    local d = ty.no_grad(function() return M.signed_distance(near, o.solids) end)
    near = near - M.normals(function(p) return M.signed_distance(p, o.solids) end, near) * d:unsqueeze(1)
  end
  near = (near + ty.randn({ n // 2, 3 }, { device = o.device }) * o.near):clamp(0, 1)
  places = ty.cat({ near, places:narrow(0, n // 2, n - n // 2) }, 0):detach()
  return places, ty.no_grad(function() return M.signed_distance(places, o.solids) end)
end

--- A picture of distances [h, w], u8 [3, h, w]: a line every `step` (0.02), warm outside and cold inside, and the
-- surface white.
---@param distances Tensor
---@param step? number
---@return Tensor
function M.contours(distances, step)
  arguments.expect("fields.contours", "distances", distances, "a tensor")
  if step ~= nil then arguments.expect("fields.contours", "step", step, "a finite number > 0") end
  local d = distances:to "f32"
  local shade = 0.75 + 0.25 * (d * (2 * math.pi / (step or 0.02))):cos()
  shade = shade * (1 - (d:abs() * -6):exp() * 0.4)
  local inside, planes = d:lt(0), {}
  for c, pair in ipairs { { 0.9, 0.4 }, { 0.65, 0.65 }, { 0.35, 0.95 } } do
    local plane = shade * ty.where(inside, ty.full_like(d, pair[2]), ty.full_like(d, pair[1]))
    planes[c] = ty.where(d:abs():lt(0.004), ty.ones_like(d), plane)
  end
  return (ty.stack(planes, 0):clamp(0, 1) * 255):round():to "u8"
end

--- Lets several ways work for the same time: who has had least of it takes the next step, so that what else the machine
-- does meets all alike. Each is { step = fn(number of the step), score = fn() }; scores are asked `points` times on the
-- way and do not count. Returns for each { steps, seconds, curve = { { seconds =, score = } ... } }.
---@param ways table<string, {step: function, score: function}>
---@param seconds number  of each
---@param options? {points: integer, clock: function}
---@return table
function M.race(ways, seconds, options)
  local o = arguments.read("fields.race", options, { points = 10, clock = os.clock },
    { points = "an integer >= 1", clock = "a function" })
  arguments.expect("fields.race", "ways", ways, "a table")
  arguments.expect("fields.race", "seconds", seconds, "a finite number > 0")
  local names, result = {}, {}
  for name, way in pairs(ways) do
    if type(way) ~= "table" or not way.step or not way.score then
      arguments.fail("fields.race: ways.%s: expected { step =, score = }, got %s", tostring(name),
        arguments.describe(way))
    end
    names[#names + 1], result[name] = name, { steps = 0, seconds = 0, curve = {} }
  end
  table.sort(names)
  local function next_way()
    local least
    for _, name in ipairs(names) do
      if result[name].seconds < seconds and (not least or result[name].seconds < result[least].seconds) then
        least = name
      end
    end
    return least
  end
  local name = next_way()
  while name do
    local r, began = result[name], o.clock()
    r.steps = r.steps + 1
    ways[name].step(r.steps)
    r.seconds = r.seconds + o.clock() - began
    if r.seconds >= seconds * (#r.curve + 1) / o.points then
      r.curve[#r.curve + 1] = { seconds = r.seconds, score = ways[name].score() }
    end
    name = next_way()
  end
  return result
end

return M
