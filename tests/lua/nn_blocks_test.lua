-- The blocks that families of models repeat: embeddings of times and places, patches, modulation.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

check.test("times: sines and cosines at geometric frequencies", function()
  local t, width = { 0.0, 1.0, 537.5, 1000.0 }, 8
  for _, o in ipairs { {}, { sines_first = true }, { shift = 1, period = 100 } } do
    local expected = {}
    for i, time in ipairs(t) do
      local row, half = {}, width // 2
      for k = 0, half - 1 do
        local angle = time * (o.period or 10000) ^ (-k / (half - (o.shift or 0)))
        row[k + 1 + (o.sines_first and half or 0)] = math.cos(angle)
        row[k + 1 + (o.sines_first and 0 or half)] = math.sin(angle)
      end
      expected[i] = row
    end
    check.close(nn.Sinusoidal(width, o)(ty.tensor(t)):tolist(), expected, 1e-4)
  end
  check.equal(next(nn.Sinusoidal(4):state_dict()), nil, "nothing is saved")
  check.fails(function() nn.Sinusoidal(5) end, "Sinusoidal: width: expected an even number, got 5")
  check.fails(function() nn.Sinusoidal(4, { shift = 2 }) end, "Sinusoidal: shift: expected less than 2")
end)

check.test("places on a grid", function()
  local table_of = nn.sinusoidal_2d(8, 2, 3)
  check.equal(table_of.shape, { 6, 8 })
  local function row(y, x)
    local slow = 10000 ^ -0.5
    return { math.sin(x), math.sin(slow * x), math.cos(x), math.cos(slow * x),
      math.sin(y), math.sin(slow * y), math.cos(y), math.cos(slow * y) }
  end
  check.close(table_of:tolist(), { row(0, 0), row(0, 1), row(0, 2), row(1, 0), row(1, 1), row(1, 2) }, 1e-6)
  check.fails(function() nn.sinusoidal_2d(6, 2) end, "sinusoidal_2d: width: expected a multiple of 4, got 6")
end)

check.test("patches and back", function()
  local x = ty.randn(2, 3, 4, 6)
  local patches = nn.patchify(x, 2)
  check.equal(patches.shape, { 2, 6, 12 })
  -- Patch 4 is row 1, column 1; in it, line 1, column 0, channel 2.
  check.equal(patches["1, 4"]:tolist()[(1 * 2 + 0) * 3 + 2 + 1], x["1, 2, 3, 2"]:item())
  check.equal(nn.unpatchify(patches, 2, 2, 3):tolist(), x:tolist())
  check.fails(function() nn.patchify(x, 4) end, "patchify: x: expected [n, channels, height, width] with sides")
  check.fails(function() nn.unpatchify(patches, 2, 2, 2) end, "unpatchify: x: expected [n, 4, channels * 4], got")
  -- The embedding is a linear layer on each patch.
  local embed = nn.PatchEmbed(3, 5, 2)
  local weight = embed.proj.weight:permute(0, 2, 3, 1):reshape(5, 12)
  local expected = ty.linear(patches, weight, embed.proj.bias)
  check.ok((embed(x) - expected):abs():max():item() < 1e-5, "PatchEmbed")
end)

check.test("modulation starts as the identity of a gated block", function()
  local m = nn.Modulation(4, 3, { outputs = 6 })
  local names = {}
  for name in pairs(m:state_dict()) do names[#names + 1] = name end
  table.sort(names)
  check.equal(names, { "1.bias", "1.weight" }, "the published names")
  local shift, scale, gate = m(ty.randn(2, 4))
  check.equal(shift.shape, { 2, 6 })
  local x = ty.randn(2, 5, 6)
  check.equal(nn.modulate(x, shift, scale):tolist(), x:tolist())
  check.equal((gate:unsqueeze(1) * x):abs():max():item(), 0.0)
  ty.no_grad(function() m[2].weight:add_(1) end)
  local c = ty.randn(2, 4)
  shift, scale = m(c)
  local sum = c:silu():sum(1):reshape(2, 1)
  check.close(shift:tolist(), sum:expand(2, 6):tolist(), 1e-5)
  local y = nn.modulate(x, shift, scale)
  check.close(y["1, 3"]:tolist(), (x["1, 3"] * (scale[1] + 1) + shift[1]):tolist(), 1e-6)
  local flat = ty.randn(2, 6)
  check.close(nn.modulate(flat, shift, scale):tolist(), (flat * (scale + 1) + shift):tolist(), 1e-6)
end)

check.test("sequences of different lengths", function()
  local a, b = ty.tensor({ 1, 2, 3 }, { dtype = "f32" }), ty.tensor({ 4 }, { dtype = "f32" }):requires_grad_()
  local padded, lengths = nn.pad_sequence({ a, b }, { padding_value = -1 })
  check.equal(padded:tolist(), { { 1.0, 2.0, 3.0 }, { 4.0, -1.0, -1.0 } })
  check.equal(lengths:tolist(), { 3, 1 })
  padded:square():sum():backward()
  check.equal(b.grad:tolist(), { 8.0 }, "gradients come through")
  local wide = nn.pad_sequence({ ty.ones(2, 3), ty.ones(1, 3) }, { batch_first = false })
  check.equal(wide:tolist(), { { { 1.0, 1.0, 1.0 }, { 1.0, 1.0, 1.0 } }, { { 1.0, 1.0, 1.0 }, { 0.0, 0.0, 0.0 } } })
  check.fails(function() nn.pad_sequence { ty.ones(2), ty.ones(2, 3) } end, "expected tensors %[t, ...%] that differ")
  check.fails(function() nn.pad_sequence {} end, "sequences: expected at least one")
end)

check.finish()
