--- A training step of ResNet-18: 224x224, batch 8, SGD with momentum.
local ty = require "tycho"
local steps = require "bench.lib.steps"
local winograd = require "bench.lib.winograd"

-- The stem has no gradient for the image: a third of its work falls away.
local stem = 2 * 8 * 64 * 112 * 112 * 3 * 49

local forward, backward = winograd.saved(function() return require("tycho.vision").ResNet {} end,
  function(network) network(ty.zeros({ 8, 3, 224, 224 }, { device = "meta" })) end)

return {
  { name = "step", target = 0.4, rounds = 5,
    work = { f32 = 3 * 8 * 3.627e9 - stem - forward - backward, update = 20 * 11689512 },
    bars = { peer = 1.4 }, peer = { "step" }, setup = function() return steps.modes "resnet" end },
}
