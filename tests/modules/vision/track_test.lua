-- Boxes, and the tracker over a vision transformer: positions and types, heads, loss, following, success.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models, peft = require "tycho.models", require "tycho.peft"
local vision = require "tycho.vision"

local boxes, track = vision.boxes, vision.track

local function vit(layers)
  ty.manual_seed(1)
  return models.ViT({ image_size = 16, patch_size = 4, hidden_size = 24, intermediate_size = 32,
    num_hidden_layers = layers or 1, num_attention_heads = 2 }, false)
end

local function distance(a, b) return (a - b):abs():amax():item() end

check.test("overlap and its generalisation, by hand", function()
  local a = ty.tensor { { 0.0, 0, 2, 2 }, { 0, 0, 1, 1 }, { 0, 0, 2, 1 } }
  local b = ty.tensor { { 1.0, 1, 3, 3 }, { 2, 0, 3, 1 }, { 0, 0, 2, 1 } }
  check.close(boxes.iou(a, b):tolist(), { 1 / 7, 0, 1 }, 1e-6)
  check.close(boxes.giou(a, b):tolist(), { 1 / 7 - 2 / 9, -1 / 3, 1 }, 1e-6)
  local x = ty.tensor { { 0.1, 0.2, 0.7, 0.9 } }:to("f64"):requires_grad_()
  local y = ty.tensor({ { 0.3, 0.1, 0.9, 0.6 } }, { dtype = "f64" })
  check.ok(ty.gradcheck(function(t) return boxes.giou(t, y):sum() end, { x }))
end)

check.test("windows: a crop at the picture's own place is the picture; into and out of are inverse", function()
  ty.manual_seed(2)
  local picture = ty.rand(2, 3, 8, 8)
  local whole = ty.tensor { { 0.0, 0, 8, 8 }, { 0, 0, 8, 8 } }
  check.ok(distance(boxes.crop(picture, whole, 8), picture) < 1e-5)
  local part = boxes.crop(picture, ty.tensor { { 2.0, 4, 6, 8 }, { 0, 0, 4, 4 } }, 4)
  check.ok(distance(part:select(0, 0), picture:select(0, 0):narrow(1, 4, 4):narrow(2, 2, 4)) < 1e-5)
  local windows = boxes.around(ty.tensor { { 1.0, 2, 5, 3 }, { 0, 0, 2, 8 } }, 2)
  check.close(windows:tolist(), { { 1, 0.5, 5, 4.5 }, { -3, 0, 5, 8 } }, 1e-5)
  local some = ty.rand(2, 5, 4) * 8
  check.ok(distance(boxes.out_of(boxes.into(some, windows), windows), some) < 1e-5)
  check.close(boxes.into(windows, windows):tolist(), { { 0, 0, 1, 1 }, { 0, 0, 1, 1 } }, 1e-6)
end)

check.test("boxes and distances from the cells' centres are inverse", function()
  local truth = ty.tensor { { 0.1, 0.2, 0.6, 0.9 }, { 0.5, 0.5, 0.7, 0.6 } }
  local back = track.decode(track.encode(truth, 4), 4)
  check.equal(back.shape, { 2, 16, 4 })
  check.ok(distance(back, truth:unsqueeze(1)) < 1e-6)
  check.close(track.centres(2):tolist(), { { { 0.25, 0.25 }, { 0.75, 0.25 }, { 0.25, 0.75 }, { 0.75, 0.75 } } }, 0)
end)

check.test("one table of positions: a template that is the region's corner scores like it, but for its type", function()
  local tracker = track.Tracker(vit(1), { template = 8 })
  -- What goes into the first layer, with the type of the template's object made that of the search.
  ty.no_grad(function() tracker.types:narrow(0, 1, 1):copy_(tracker.types:narrow(0, 0, 1)) end)
  ty.manual_seed(3)
  local search = ty.randn(1, 3, 16, 16)
  local template = search:narrow(2, 0, 8):narrow(3, 0, 8):contiguous()
  local seen
  tracker.vit.encoder.layer[1]:register_forward_pre_hook(function(_, x) seen = ty.keep(x:detach():clone()) end)
  tracker(template, search, ty.tensor { { 0.0, 0, 1, 1 } })
  local z, x = seen:narrow(1, 0, 4), seen:narrow(1, 4, 16):reshape(1, 4, 4, 24)
  check.ok(distance(z:reshape(1, 2, 2, 24), x:narrow(1, 0, 2):narrow(2, 0, 2)) < 1e-6)
  -- And the surroundings have a type of their own.
  tracker(template, search, ty.tensor { { 0.0, 0, 0.5, 0.5 } })
  local types = tracker.types:detach()
  local moved = seen:narrow(1, 0, 4) - z
  check.ok(distance(moved:select(1, 0), ty.zeros(1, 24)) < 1e-6)
  check.ok(distance(moved:select(1, 3), types:narrow(0, 2, 1) - types:narrow(0, 1, 1)) < 1e-6)
end)

check.test("the loss is least for the right boxes, and counts what lies within", function()
  local truth = ty.tensor { { 0.25, 0.25, 0.75, 0.75 } }
  local right = track.decode(track.encode(truth, 4), 4)
  local logits = ty.full({ 1, 16 }, -20.0)
  for _, cell in ipairs { 5, 6, 9, 10 } do logits:narrow(1, cell, 1):fill_(20) end
  check.ok(track.loss(logits, right, truth):item() < 1e-4)
  check.ok(track.loss(logits, right * 0.8, truth):item() > 0.2)
  check.ok(track.loss(-logits, right, truth):item() > 20)
  local small = ty.tensor { { 0.3, 0.3, 0.32, 0.32 } } -- between the centres: the nearest cell is it
  local boxes_right = track.decode(track.encode(small, 4), 4)
  local one = ty.full({ 1, 16 }, -20.0)
  one:narrow(1, 5, 1):fill_(20)
  check.ok(track.loss(one, boxes_right, small):item() < 1e-3)
  -- The target is the overlap that the token's own box has, without a gradient of its own.
  local d = ty.full({ 1, 16, 4 }, 0.3):requires_grad_()
  local zero = ty.zeros(1, 16):requires_grad_()
  track.loss(zero, track.decode(d, 4), truth):backward()
  local iou = boxes.iou(track.decode(d:detach(), 4), truth:unsqueeze(1))
  check.close(zero.grad:select(1, 5):item(), (0.5 - iou:select(1, 5):item()) / 4, 1e-6)
  check.close(zero.grad:select(1, 0):item(), 0.5 / 4, 1e-6)
end)

check.test("low-rank updates of all linear layers of the transformer: merged equals unmerged", function()
  local tracker = track.Tracker(vit(2))
  ty.manual_seed(5)
  local z, x, box = ty.randn(2, 3, 8, 8), ty.randn(2, 3, 16, 16), ty.tensor { { 0.2, 0.2, 0.8, 0.8 }, { 0, 0, 0.5, 1 } }
  local before = tracker(z, x, box)
  peft.lora(tracker, { rank = 3, alpha = 6, targets = { "query", "key", "value", "dense" },
    save = { "score", "distances" } })
  check.ok(distance(tracker(z, x, box), before) == 0)
  for _, p in ipairs(peft.parameters(tracker)) do
    ty.no_grad(function() p:copy_(p + ty.randn_like(p) * 0.1) end)
  end
  local with, boxes_with = tracker(z, x, box)
  peft.merge(tracker)
  local merged, boxes_merged = tracker(z, x, box)
  check.ok(distance(with, before) > 1e-2)
  check.ok(distance(with, merged) < 1e-4 and distance(boxes_with, boxes_merged) < 1e-5)
  check.equal(#peft.parameters(tracker), 2 * 6 * 2 + 2 * 6)
end)

check.test("success is the integral of the curve, which tends to the mean overlap", function()
  ty.manual_seed(6)
  local overlaps = ty.rand(50, 7)
  local area, curve = track.success(overlaps, 5)
  local list, want = overlaps:flatten():tolist(), {}
  for i = 0, 4 do
    local above = 0
    for _, v in ipairs(list) do if v > i / 4 then above = above + 1 end end
    want[i + 1] = above / #list
  end
  check.close(curve, want, 1e-12)
  check.close(area, (want[1] / 2 + want[2] + want[3] + want[4] + want[5] / 2) / 4, 1e-12)
  check.close(track.success(overlaps, 4001), overlaps:mean():item(), 1e-4)
  check.equal(track.success(ty.zeros(3)), 0)
end)

check.test("following: frame by frame around the last box, and it learns", function()
  ty.manual_seed(7)
  local n, frames = 6, 5
  -- A bright square of 6 pixels on dark noise that moves by two pixels a frame.
  local videos, truth = ty.rand(n, frames, 3, 24, 24) * 0.2 - 1, {}
  for i = 0, n - 1 do
    truth[i + 1] = {}
    for f = 0, frames - 1 do
      local x, y = 2 + i + 2 * f, 10 - i + f
      videos:select(0, i):select(0, f):narrow(1, y, 6):narrow(2, x, 6):fill_(1)
      truth[i + 1][f + 1] = { x, y, x + 6, y + 6 }
    end
  end
  truth = ty.tensor(truth, { dtype = "f32" })
  local tracker = track.Tracker(vit(1))
  local optimizer = ty.optim.AdamW(tracker, { lr = 3e-3 })
  local first, last
  for step = 1, 60 do
    ty.scope(function()
      local a, b = step % frames, (step * 3 + 1) % frames
      local guess = truth:select(1, b) + ty.randn(n, 1):mul(1.5)
      local loss = tracker:loss(track.pairs(tracker, videos:select(1, a), truth:select(1, a), videos:select(1, b),
        truth:select(1, b), guess))
      optimizer:step(loss)
      optimizer:zero_grad()
      first, last = first or loss:item(), loss:item()
    end)
  end
  check.ok(last < 0.6 * first, ("%g after %g"):format(last, first))
  -- A template out of the region itself scores highest within its own box.
  local own = track.pairs(tracker, videos:select(1, 2), truth:select(1, 2), videos:select(1, 2), truth:select(1, 2))
  local at = tracker(own.template, own.search, own.box):argmax(1):tolist()
  local centres, inside = track.centres(4):tolist()[1], 0
  for i, box in ipairs(own.truth:tolist()) do
    local c = centres[at[i] + 1]
    if c[1] > box[1] - 0.13 and c[1] < box[3] + 0.13 and c[2] > box[2] - 0.13 and c[2] < box[4] + 0.13 then
      inside = inside + 1
    end
  end
  check.ok(inside >= n - 1, inside)
  local found = tracker:follow(videos, truth:select(1, 0))
  check.equal(found.shape, { n, frames, 4 })
  check.ok(distance(found:select(1, 0), truth:select(1, 0)) == 0)
  check.ok(found:amin():item() >= 0 and found:amax():item() <= 24)
  check.ok(tracker.training, "the mode is as before")
end)

check.test("mistakes", function()
  local tracker = track.Tracker(vit(1), { head = "conv", positions = "own" })
  check.equal(tracker(ty.zeros(1, 3, 8, 8), ty.zeros(1, 3, 16, 16), ty.zeros(1, 4)).shape, { 1, 16 })
  check.fails(function() tracker(ty.zeros(1, 3, 8, 8), ty.zeros(1, 3, 8, 8), ty.zeros(1, 4)) end,
    "Tracker: expected template")
  check.fails(function() track.Tracker(vit(1), { template = 7 }) end, "template: expected a multiple of the patch, 4")
  check.fails(function() track.Tracker(ty.nn.Linear(2, 2)) end, "vit: expected a models.ViT")
  check.fails(function() track.decode(ty.zeros(1, 5, 4), 2) end, "distances: expected [n, 4, 4]")
  check.fails(function() boxes.iou(ty.ones(3), ty.ones(4)) end, "vision.boxes.iou: a: expected floats [..., 4]")
  check.fails(function() track.success(ty.zeros(0)) end, "overlaps: expected at least one")
end)

check.test("a tracker by colours finds what does not change", function()
  ty.manual_seed(3)
  local thing = ty.rand(3, 8, 8)
  local video = ty.full({ 3, 3, 32, 32 }, -1)
  for f = 0, 2 do
    video:select(0, f):narrow(1, 10, 8):narrow(2, 8 + 2 * f, 8):copy_(thing)
  end
  local found = track.by_colours(video, ty.tensor { 8.0, 10.0, 16.0, 18.0 })
  check.equal(found:tolist(), { { 8.0, 10.0, 16.0, 18.0 }, { 10.0, 10.0, 18.0, 18.0 }, { 12.0, 10.0, 20.0, 18.0 } })
  check.fails(function() track.by_colours(video, ty.ones(3)) end, "vision.track.by_colours: expected video [frames, 3")
end)

check.test("a box drawn into a picture", function()
  local drawn = boxes.drawn(ty.zeros(1, 5, 6), ty.tensor { 1.2, 1.0, 4.0, 99.0 }, { 1 })
  check.equal(drawn:squeeze(0):to("i64"):tolist(), { { 0, 0, 0, 0, 0, 0 }, { 0, 1, 1, 1, 1, 0 }, { 0, 1, 0, 0, 1, 0 },
    { 0, 1, 0, 0, 1, 0 }, { 0, 1, 1, 1, 1, 0 } })
  check.fails(function() boxes.drawn(ty.zeros(1, 5, 6), ty.ones(4), { 1, 1, 1 }) end, "expected picture [3, h, w]")
end)

check.test("pairs of frames, and the success of following a set of videos", function()
  ty.manual_seed(5)
  local video = ty.arange(3 * 4):reshape(3, 4, 1, 1, 1):expand(3, 4, 3, 8, 8):to "u8"
  local corner = ty.tensor({ 1.0, 2, 3, 5 })
  local set = { video = video, boxes = corner:reshape(1, 1, 4):expand(3, 4, 4)
    + ty.arange(12, { dtype = "f32" }):reshape(3, 4, 1) * 0.1 }
  local first, a, second, b, guess = track.draw(set, 40, { aside = 0.5 })
  check.equal({ first.shape, a.shape, second.dtype }, { { 40, 3, 8, 8 }, { 40, 4 }, "u8" })
  for i = 0, 39 do -- the value of a picture says which it is
    local from, to = first:select(0, i):max():item(), second:select(0, i):max():item()
    check.equal(from // 4, to // 4, "of one video")
    check.close(a:select(0, i):tolist(), (corner + 0.1 * from):tolist(), 1e-5)
    check.close(b:select(0, i):tolist(), (corner + 0.1 * to):tolist(), 1e-5)
  end
  check.equal(track.draw(set, 2, { picture = function(frame) return frame:to "f32" end }).dtype, "f32")
  local off = guess - b
  check.close(off:narrow(1, 0, 2):tolist(), off:narrow(1, 2, 2):tolist(), 1e-5, "moved, not changed")
  local side = math.sqrt(2 * 3) -- of the square of the box's area
  check.ok(off:abs():max():item() <= 0.5 * side + 1e-4 and off:abs():max():item() > 0.3 * side)
  local calls = 0
  local area = track.evaluate(function(videos, start)
    calls = calls + 1
    check.equal(start.shape, { videos.shape[1], 4 })
    return set.boxes:narrow(0, 0, 1):expand(videos.shape[1], 4, 4)
  end, { video = video, boxes = set.boxes:narrow(0, 0, 1):expand(3, 4, 4) }, 2)
  check.equal(calls, 2)
  check.ok(area > 0.9 and area <= 1)
  local shown = track.film(ty.zeros(2, 2, 3, 8, 8), set.boxes:narrow(0, 0, 2):narrow(1, 0, 2),
    set.boxes:narrow(0, 0, 2):narrow(1, 0, 2))
  check.equal(shown.shape, { 4, 3, 8, 8 })
  check.equal(shown:max():item(), 1.0)
  check.fails(function() track.draw({ video = video, boxes = ty.ones(3, 4) }, 2) end, "track.draw: set: expected")
  check.fails(function() track.evaluate(function() return 3 end, set) end, "what follow gives: expected a tensor")
end)

check.finish()
