-- Samples of four modalities: what is seen of them, what is asked, what was left out.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"
local examiner = zoo.examiner

local network = zoo.load "scene-resnet"

check.test("samples of each kind, the same but for what was left out", function()
  local set = examiner.samples(network, "training", 3, { slices_threshold = 0.15 })
  for _, kind in ipairs(examiner.kinds) do
    check.equal(#set[kind], #set.whole[kind], kind)
    for i, sample in ipairs(set[kind]) do
      local whole = set.whole[kind][i]
      check.equal({ sample.kind, sample.question, sample.answer }, { kind, whole.question, whole.answer })
      if kind == "text" then
        check.equal(sample.seen, nil)
        check.ok(sample.question:find "\n ", "a report before the question")
      else
        check.equal(whole.seen.positions.shape[1], whole.seen.length)
        check.ok(sample.seen.positions.shape[1] <= sample.seen.length)
      end
    end
  end
  check.equal(#set.video, 3)
  -- A projection is one frame of 8 x 8 places, ten slices and eight frames are pooled to 4 x 4.
  check.equal({ set.picture[1].seen.length, set.volume[1].seen.length, set.video[1].seen.length }, { 64, 160, 128 })
  local kept, all = examiner.tokens(set.volume)
  check.equal(all, 160 * #set.volume)
  check.ok(kept < all)
  check.equal({ examiner.tokens(set.whole.volume) }, { all, all })
  check.equal(#examiner.joined(set), #set.text + #set.picture + #set.volume + #set.video)
end)

check.test("slices are means from front to back, with air beside them", function()
  local scans = datasets.volumes.studies { split = "training", count = 1 }
  local volume = scans.volumes:select(0, 0)
  local x = examiner.slices(volume, 2)
  check.equal(x.shape, { 10, 1, 32, 32 })
  local mean = (volume:select(2, 4) + volume:select(2, 5)) / 2
  check.ok((x:select(0, 2):narrow(2, 2, 28) - mean):abs():max():item() < 1e-6)
  check.equal(x:narrow(3, 0, 2):eq(-1):all():item(), true)
end)

check.test("features are the same some at a time, and pictures are dark where nothing was kept", function()
  ty.manual_seed(1)
  local frames = ty.rand(40, 1, 32, 32)
  local all = examiner.encode(network, frames)
  check.equal({ all.shape[1], all.shape[2], all.shape[3] }, { 40, 8, 8 })
  check.ok((all:narrow(0, 35, 1) - examiner.encode(network, frames:narrow(0, 35, 1))):abs():max():item() < 1e-4)
  local kept = ty.tensor({ { { 1, 0 }, { 0, 1 } } }):to "bool"
  local shaded = examiner.shaded(ty.ones(1, 1, 4, 4), kept)
  check.equal(shaded:select(1, 0):squeeze(0):tolist()[1], { 1, 1, 0.25, 0.25 })
end)

check.test("wrong arguments", function()
  check.fails(function() examiner.encode(network, ty.ones(1, 2, 32, 32)) end, "frames: expected [f, 1 or 3, 32, 32]")
  check.fails(function() examiner.slices(ty.ones(1, 16, 20, 28)) end, "volume: expected [1, 32, at least 2, at most")
  check.fails(function() examiner.samples(network, "training", 0) end, "count: expected an integer >= 1, got 0")
  check.fails(function() examiner.shaded(ty.ones(2, 1, 4, 4), ty.ones(1, 2, 2):to "bool") end,
    "expected frames [f, c, h, w] and kept")
end)

check.finish()
