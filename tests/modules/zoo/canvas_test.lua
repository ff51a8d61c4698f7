-- Painters and judges of canvases: words, the grid, things to be drawn again, what training and judging take and give.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

local canvas = zoo.canvas

ty.manual_seed(1)
local painter = canvas.painter { widths = { 8, 16 }, text = 16 }

check.test("words are tokens, and every caption fits", function()
  local t = canvas.tokenizer()
  local caption = "a hatched violet striped fish on a pink ground"
  check.equal(t:decode(t:encode(caption)), caption)
  check.equal(painter:tokens({ caption, "a plain car on a blue ground" }).shape, { 2, 12 })
  local row = painter:tokens({ caption }):tolist()[1]
  check.equal({ row[1], row[11], row[12] }, { 0, 1, 1 })
end)

check.test("the grid has each style and each known kind once", function()
  local grid = canvas.grid(1)
  check.equal({ #grid.prompts, grid.image.shape[1] }, { 96, 96 })
  local seen = {}
  for i = 0, 95 do
    local cell = grid.labels.style:select(0, i):item() * 12 + grid.labels.kind:select(0, i):item()
    check.equal(seen[cell], nil)
    seen[cell] = true
  end
  check.equal(grid.prompts[1], "a plain apple on a blue ground")
end)

check.test("things: the same kind, colour and marks on other grounds, and words for it", function()
  local thing = canvas.things(3, 2, "<toy>", { 0, 4 })[1]
  check.equal({ #thing.prompts, thing.picture.shape }, { 4, { 3, 32, 32 } })
  check.ok(datasets.canvas.held_out(thing.item))
  for k, item in ipairs(thing.items) do
    check.equal({ item.kind, item.hue, item.mark }, { thing.item.kind, thing.item.hue, thing.item.mark })
    check.ok(item.ground ~= thing.item.ground)
    check.ok(thing.prompts[k]:find("<toy>", 1, true) and not thing.reference[k]:find("<toy>", 1, true))
    check.equal(thing.named[k], datasets.canvas.caption(item))
    check.equal(thing.labels.ground:tolist()[k], item.ground)
  end
end)

check.test("what captions ask for, and where they name the thing", function()
  local made = canvas.painter { widths = { 8, 16 }, text = 16 }
  local asked = canvas.asked(made, 5, 3)
  local batch = datasets.load("canvas", { split = "validation", dyed = 0 }):batch { 5, 6, 7 }
  check.equal(asked.labels.kind:tolist(), batch.kind:tolist())
  check.equal(asked.words:to("i64"):sum(1):tolist(), { 1, 1, 1 })
  local tokens = made:tokens(batch.caption)
  for i, item in ipairs(batch.item) do
    check.equal(tokens:select(0, i - 1):masked_select(asked.words:select(0, i - 1)):tolist(),
      { made.tokenizer:id(datasets.canvas.kinds[item.kind + 1]) })
  end
end)

check.test("a picture of twice the size: what it shows, what it repeats, how rough it is", function()
  local judge = canvas.judge()
  local batch = datasets.load("canvas", { split = "validation", dyed = 0, styles = { "plain" } }):batch(ty.arange(12))
  local labels = canvas.labels(batch)
  local wanted = { kind = labels.kind, ground = labels.ground }
  local large = judge:large(batch.image:to("f32"):interpolate({ 64, 64 }):to "u8", wanted)
  check.ok(large.kind > 0.7 and large.ground > 0.9, tostring(large.kind))
  check.equal(large.rough, 0.0)
  local repeated = judge:large(batch.image:tile { 1, 1, 2, 2 }, wanted)
  check.ok(repeated.again > 2.5 and repeated.again > 2 * large.again,
    ("%g, of one thing %g"):format(repeated.again, large.again))
  check.ok(repeated.rough > 1)
end)

check.test("pictures are enlarged to twice their size: cubic, so that even slopes stay even", function()
  local slope = (ty.arange(16) * 10):to("u8"):expand(2, 3, 8, 16)
  local y = canvas.enlarged(slope)
  check.equal({ y.shape, y.dtype }, { { 2, 3, 16, 32 }, "u8" })
  for k = 4, 27 do -- centres are half a pixel from the edge of each
    check.ok(math.abs(y[("1, 2, 7, %d"):format(k)]:item() - 10 * ((k + 0.5) / 2 - 0.5)) <= 0.5, tostring(k))
  end
  check.fails(function() canvas.enlarged(ty.ones(3, 4, 4)) end, "expected [n, 3, h, w], got")
end)

check.test("a painter and a judge are trained; a painter without a word is told apart", function()
  local before = painter.network:state_dict()["conv_in.weight"]:clone()
  local _, losses = canvas.train(painter, { steps = 2, batch = 4, set = { without = { "hatched" } } })
  check.equal(#losses, 2)
  check.ok(not painter.network:state_dict()["conv_in.weight"]:eq(before):all():item())
  check.equal(painter:paint({ "a plain fish on a blue ground" }, { steps = 1 }).dtype, "u8")
  local network = canvas.train_judge(canvas.judge_network { 8, 8 }, { steps = 2, batch = 4 })
  local judge, batch = canvas.judge(network), datasets.load("canvas"):batch { 0, 1, 2 }
  local labels, seen = canvas.labels(batch), judge:see(batch.image)
  for name, values in pairs(labels) do check.equal(seen[name].shape, values.shape, name) end
  check.equal(judge:shares(batch.image, seen), { style = 1, kind = 1, ground = 1, colour = 1, mark = 1 })
  check.equal(judge:features(batch.image).shape[1], 3)
  local things = canvas.things(0, 2, "<toy>", { 0 })
  local found, drawn = judge:likeness(things, function(thing) return (datasets.canvas.draw(thing.items)) end)
  check.ok(#drawn == 2 and found.both == (found.identity + found.text) / 2)
end)

check.finish()
