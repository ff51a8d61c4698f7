-- The pipeline of digits by name: its parts fit together, training lowers its loss, what is drawn has the right shape.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, vision, zoo = require "tycho.diffusion", require "tycho.vision", require "tycho.zoo"

local digits = zoo.digit_painter

check.test("captions", function()
  check.equal({ digits.caption(0), digits.caption(9) }, { "a zero", "a nine" })
  check.fails(function() digits.caption(10) end, "caption: label: expected an integer in [0, 9], got 10")
end)

check.test("it is trained by names, and draws what a classifier can look at", function()
  ty.manual_seed(3)
  local painter = diffusion.TextToImage(digits.pipeline())
  local before = painter.network:clone()
  local training = ty.data.digits()
  digits.train(painter, training, { steps = 3, batch = 8, seed = 2 })
  check.equal(painter.network.training, false)
  check.ok(ty.recipe.apart(painter.network, before) > 0, "it has learnt")
  local pictures = digits.draw(painter, { 3, 9 }, { steps = 2, seed = 5 })
  check.equal({ pictures.shape, pictures.dtype }, { { 2, 3, 8, 8 }, "u8" })
  check.equal(digits.draw(painter, { 3, 9 }, { steps = 2, seed = 5 }):tolist(), pictures:tolist(), "by the seed alone")
  local classifier = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 8 }, blocks = { 1 } }
  local share, x = digits.recognised(painter, classifier, { 3, 9 }, { steps = 2, seed = 5 })
  local read = vision.predict(classifier, x):tolist()
  check.equal(share, ((read[1] == 3 and 1 or 0) + (read[2] == 9 and 1 or 0)) / 2)
  check.close(x:select(0, 0):flatten():tolist(), (pictures:select(0, 0):narrow(0, 0, 1):to "f32" / 127.5 - 1):flatten()
    :tolist(), 1e-6)
  check.fails(function() digits.draw(painter, 3) end, "zoo.digit_painter.draw: labels: expected a list of integers")
  check.fails(function() digits.train(3) end, "zoo.digit_painter.train: painter: expected a table, got 3")
end)

check.finish()
