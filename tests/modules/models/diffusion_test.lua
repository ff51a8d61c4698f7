-- The networks of diffusion: gradients and sizes.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

check.test("networks learn: every parameter gets a gradient", function()
  local x, t, c = ty.randn(3, 1, 8, 8), ty.tensor { 0.0, 500.0, 999.0 }, { labels = ty.tensor { 0, 9, 10 } }
  for name, model in pairs {
    unet = diffusion.UNet { levels = { 8, { channels = 16, attention = true } }, classes = 10 },
    plain = diffusion.UNet { levels = { { channels = 8, attention = true } }, scale_shift = false },
    dit = diffusion.DiT { width = 16, depth = 2, heads = 2 },
  } do
    ty.no_grad(function() -- leave the zeros of the start
      for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
    end)
    model(x, t, c):square():sum():backward()
    for parameter, p in model:named_parameters() do
      if p.requires_grad then check.ok(p.grad and p.grad:abs():sum():item() > 0, name .. " " .. parameter) end
    end
    check.equal(model(x, t, c).shape, { 3, 1, 8, 8 })
  end
  local conditional = diffusion.UNet { levels = { 8 }, classes = 2 }
  check.fails(function() conditional(x, t) end, "UNet: condition.labels: expected i64 [n]")
  check.fails(function() diffusion.DiT { size = 8, patch = 3 } end, "patch 3 must divide size 8")
end)

check.test("the U-Net of DDPM's size", function()
  local unet = diffusion.UNet { in_channels = 3, out_channels = 3, layers = 2,
    levels = { 64, { channels = 128, attention = true }, 128 }, scale_shift = false }
  check.equal(unet:count_parameters(), 6472195)
end)

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/diffusion.npz")

-- scale sin(0.37 i + offset), and a state filled with it by name, as the script has them.
local function wave(shape, offset, scale)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return ((ty.arange(n):to "f64" * 0.37 + offset):sin() * (scale or 0.3)):reshape(shape)
end

local function fill(module)
  for name, t in pairs(module:state_dict()) do
    local sum = 0
    for i = 1, #name do sum = sum + name:byte(i) end
    t:copy_(wave(t.shape, sum % 97))
  end
  return module
end

check.test("with a context: diffusers' names and results", function()
  local x, t = wave({ 2, 4, 16, 16 }, 7, 1):to "f32", ty.tensor { 10.0, 700.0 }
  local text = { embeddings = wave({ 2, 5, 12 }, 8, 1):to "f32" }
  local options = {
    conv = { levels = { 8, { channels = 16, layers = 2, attention = true }, { channels = 24, attention = true } } },
    linear = { levels = { 8, { channels = 16, layers = 2, attention = { heads = 2 } },
      { channels = 24, attention = { head_width = 6, depth = 2 } } }, linear_projection = true },
  }
  for name, o in pairs(options) do
    o.in_channels, o.out_channels, o.context, o.groups, o.heads, o.scale_shift = 4, 4, 12, 4, 2, false
    local model = fill(diffusion.UNet(o)):eval()
    local key = "text_unet_" .. name
    check.equal(model:count_parameters(), fixture[key .. "/parameters"]:item(), name)
    local function off(y, part)
      local want = fixture[key .. part]
      return (y - want):abs():max():item() / want:abs():max():item()
    end
    check.ok(off(model(x, t, { text = text }), "/out") < 1e-5, name)
    local mask = ty.tensor({ { 1, 1, 1, 1, 1 }, { 1, 1, 1, 0, 0 } }):to "bool"
    check.ok(off(model(x, t, { text = { embeddings = text.embeddings, mask = mask } }), "/masked") < 1e-5,
      name .. ", masked")
  end
end)

check.test("with a context: gradients, sizes that are not even, errors", function()
  local model = diffusion.UNet { levels = { 8, { channels = 8, attention = true }, 8 }, context = 6, middle = false }
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
  end)
  local x, t = ty.randn(2, 1, 9, 14), ty.tensor { 1.0, 500.0 }
  local c = { text = { embeddings = ty.randn(2, 3, 6) } }
  local y = model(x, t, c)
  check.equal(y.shape, { 2, 1, 9, 14 })
  y:square():sum():backward()
  for name, p in model:named_parameters() do check.ok(p.grad and p.grad:abs():sum():item() > 0, name) end
  check.fails(function() model(x, t, { text = { embeddings = ty.randn(2, 3, 5) } }) end,
    "UNet: condition.text.embeddings: expected [2, tokens, 6], got [2, 3, 5]")
  check.fails(function() diffusion.UNet { levels = { 8, { channels = 12 } } } end,
    "UNet: levels[2].channels: expected a multiple of the 8 groups, got 12")
  check.fails(function() diffusion.UNet { levels = { { channels = 8, attention = { heads = 3 } } } } end,
    "UNet: levels[1].attention: expected heads that divide 8 channels, got 3")
  check.fails(function() diffusion.UNet { levels = {} } end, "UNet: levels: expected a list")
  check.fails(function() diffusion.DiT { width = 16, heads = 3 } end, "must be a multiple of 4 and of heads 3")
  check.fails(function() diffusion.DiT()(ty.zeros(1, 1, 8, 8), ty.zeros(1)) end, "DiT: condition.labels: expected i64")
end)

check.finish()
