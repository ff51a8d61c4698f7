-- Canvases: what is drawn is what the words say, the same always; splits; items of one's own.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

local canvas = datasets.canvas

local function item(more)
  local made = { kind = 0, style = 0, ground = 1, hue = -1, mark = 0, near = 1, mirror = 0, x = 1, y = 1 }
  for key, value in pairs(more or {}) do made[key] = value end
  return made
end

check.test("an item depends on seed, split and position alone", function()
  local set = datasets.load "canvas"
  local some, one = set:batch { 5, 900, 17 }, set:get(900)
  check.ok(some.image:select(0, 1):eq(one.image):all():item() and some.mask:select(0, 1):eq(one.mask):all():item())
  check.equal({ some.caption[2], some.kind:tolist()[2] }, { one.caption, one.kind:item() })
  check.equal(some.image.shape, { 3, 3, 32, 32 })
  check.ok(not datasets.load("canvas", { seed = 1 }):get(900).image:eq(one.image):all():item())
end)

check.test("styles do to a picture what they are called", function()
  local image = canvas.draw { item(), item { style = 6 }, item { style = 4 }, item { style = 2 }, item { style = 3 } }
  image = image:to "f32"
  local plain = image:select(0, 0)
  check.ok((plain + image:select(0, 1)):eq(255):all():item(), "negative")
  local hatched = image:select(0, 2):reshape(3, 16, 2, 32)
  local rows = plain:reshape(3, 16, 2, 32)
  check.ok(hatched:select(2, 0):eq(rows:select(2, 0)):all():item(), "every other line is left alone")
  check.ok(hatched:select(2, 1):eq((rows:select(2, 1) * 80 / 256):floor()):all():item(), "the others are dark")
  local tiles = image:select(0, 3):reshape(3, 8, 4, 8, 4)
  check.equal((tiles:amax { 2, 4 } - tiles:amin { 2, 4 }):max():item(), 0)
  local sepia = image:select(0, 4)
  check.ok(sepia:select(0, 0):ge(sepia:select(0, 1)):all():item() and sepia:select(0, 1):ge(sepia:select(0, 2)):all()
    :item())
end)

check.test("a thing stays itself in other places: the same pixels, moved and mirrored", function()
  local image, mask = canvas.draw { item { hue = 200, mark = 1 }, item { hue = 200, mark = 1, x = 2, y = 0 },
    item { hue = 200, mark = 1, mirror = 1 } }
  local whole = image:to "f32" * mask:to "f32"
  local first, moved, turned = whole:select(0, 0), whole:select(0, 1), whole:select(0, 2)
  check.ok(first:narrow(1, 2, 28):narrow(2, 0, 30):eq(moved:narrow(1, 0, 28):narrow(2, 2, 30)):all():item())
  check.ok(first:flip({ 2 }):eq(turned):all():item())
  local red = image:select(0, 0)
  check.ok(red:narrow(1, 0, 1):eq(red:narrow(1, 31, 1)):all():item(), "the ground is even")
end)

check.test("captions say what is there", function()
  check.equal(canvas.caption(item { style = 4, hue = 290, mark = 1, kind = 2 }),
    "a hatched violet striped fish on a blue ground")
  check.equal(canvas.caption(item { hue = 331 }), "a plain red apple on a blue ground")
  check.equal(canvas.caption(item { mark = 2 }, "<toy>"), "a plain <toy> on a blue ground")
end)

check.test("splits: what is held out does not come in training", function()
  local seen = { training = 0, validation = 0, held_out = 0 }
  for split in pairs(seen) do
    local batch = datasets.load("canvas", { split = split }):batch(ty.arange(300))
    for _, one in ipairs(batch.item) do
      check.equal(canvas.held_out(one), split == "held_out", split)
      check.ok(one.kind < canvas.known)
      if one.hue >= 0 then seen[split] = seen[split] + 1 end
    end
  end
  check.equal(seen.held_out, 300)
  check.ok(seen.training > 100 and seen.training < 200)
  for _, one in ipairs(datasets.load("canvas", { split = "unknown_kinds" }):batch(ty.arange(50)).item) do
    check.ok(one.kind >= canvas.known and one.kind < #canvas.kinds)
  end
  local less = datasets.load("canvas", { without = { "hatched", "fish" }, dyed = 0 }):batch(ty.arange(200))
  for _, caption in ipairs(less.caption) do check.ok(not caption:find "hatched" and not caption:find "fish") end
  local two = datasets.load("canvas", { styles = { "neon", "plain" } }):batch(ty.arange(40))
  for _, one in ipairs(two.item) do check.ok(one.style == 0 or one.style == 7) end
end)

check.test("mistakes", function()
  local function fails(options, text) check.fails(function() datasets.load("canvas", options) end, text) end
  fails({ split = "trainig" }, 'datasets.canvas: split: there is no "trainig"; did you mean training?')
  fails({ styles = { "cubist" } }, 'datasets.canvas: styles: expected some of plain, outlined')
  fails({ without = { "sheep" } }, 'datasets.canvas: without: expected words of captions, got "sheep"')
  check.fails(function() canvas.draw { item { kind = 18 } } end,
    "datasets.canvas.draw: items[1].kind: expected an integer in [0, 17], got 18")
  check.fails(function() canvas.draw {} end, "datasets.canvas.draw: items: expected at least one, got none")
end)

check.finish()
