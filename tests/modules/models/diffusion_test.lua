-- The networks of diffusion: gradients and sizes.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

check.test("networks learn: every parameter gets a gradient", function()
  local x, t, y = ty.randn(3, 1, 8, 8), ty.tensor { 0.0, 500.0, 999.0 }, ty.tensor { 0, 9, 10 }
  for name, model in pairs {
    unet = diffusion.UNet { channels = { 8, 16 }, classes = 10 },
    plain = diffusion.UNet { channels = { 8 }, attention = { true }, scale_shift = false },
    dit = diffusion.DiT { width = 16, depth = 2, heads = 2 },
  } do
    ty.no_grad(function() -- leave the zeros of the start
      for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
    end)
    model(x, t, y):square():sum():backward()
    for parameter, p in model:named_parameters() do
      if p.requires_grad then check.ok(p.grad and p.grad:abs():sum():item() > 0, name .. " " .. parameter) end
    end
    check.equal(model(x, t, y).shape, { 3, 1, 8, 8 })
  end
  local conditional = diffusion.UNet { channels = { 8 }, attention = { false }, classes = 2 }
  check.fails(function() conditional(x, t) end, "needs labels")
  check.fails(function() diffusion.DiT { size = 8, patch = 3 } end, "patch 3 must divide size 8")
end)

check.test("the U-Net of DDPM's size", function()
  local unet = diffusion.UNet { in_channels = 3, out_channels = 3, channels = { 64, 128, 128 }, layers = 2,
    attention = { false, true, false }, scale_shift = false }
  check.equal(unet:count_parameters(), 6472195)
end)

check.finish()
