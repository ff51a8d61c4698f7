--- A training step of a 6.47M-parameter U-Net of DDPM: 32x32x3, batch 16, AdamW.
local ty = require "tycho"
local steps = require "bench.lib.steps"
local winograd = require "bench.lib.winograd"

local forward, backward = winograd.saved(function() return steps.unet_of "6M" end, function(network)
  network(ty.zeros({ 16, 3, 32, 32 }, { device = "meta" }), ty.zeros({ 16 }, { device = "meta" }))
end)

return {
  { name = "step", target = 0.4, rounds = 5,
    work = { f32 = 50.80e9 + 102.90e9 - forward - backward, update = 28 * 6472195 },
    bars = { peer = 1.4, limit = 0.75 }, peer = { "step" }, setup = function() return steps.modes "unet" end },
}
