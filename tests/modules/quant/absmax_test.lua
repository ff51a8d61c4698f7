-- Absmax by rows: codes and values by the definition, packing, a model, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local absmax = require("tycho.quant").absmax
local nn = ty.nn

check.test("values by the definition", function()
  ty.manual_seed(1)
  for _, bits in ipairs { 4, 8 } do
    for _, columns in ipairs { 1, 7, 12 } do
      local w = ty.randn(5, columns)
      w:select(0, 2):zero_()
      local packed = absmax.encode(w, bits)
      check.equal(packed.codes.shape, { 5, bits == 8 and columns or (columns + 1) // 2 }, "codes")
      local want = {}
      for i, row in ipairs(w:tolist()) do
        local top = 0
        for _, v in ipairs(row) do top = math.max(top, math.abs(v)) end
        local scale = top / (2 ^ (bits - 1) - 1)
        want[i] = {}
        for j, v in ipairs(row) do want[i][j] = top == 0 and 0 or math.floor(v / scale + 0.5) * scale end
      end
      check.close(absmax.decode(packed):tolist(), want, 1e-6, ("%d bits"):format(bits))
    end
  end
  local w = ty.tensor { { -7.0, 3.4, 0.0, 6.6 } }
  check.equal(absmax.decode(absmax.encode(w)):tolist(), { { -7.0, 3.0, 0.0, 7.0 } }, "codes of a scale of 1")
  check.equal(absmax.encode(w).codes:tolist(), { { 1 + 16 * 11, 8 + 16 * 15 } }, "bytes")
end)

check.test("a model", function()
  ty.manual_seed(2)
  local model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
  local first, second = model[1].weight:detach():clone(), model[2].weight:detach():clone()
  local report = absmax.quantize(model, { skip = { "1" } })
  check.equal(report.layers, 1, "layers")
  check.equal(report.bytes, 16 * 32 // 2 + 2 * 32, "bytes")
  check.close(report.bits, 5, 1e-9, "bits of a weight")
  check.equal(model[1].weight:tolist(), absmax.decode(absmax.encode(first)):tolist(), "weights")
  check.close(report.error, ((model[1].weight - first):norm() / first:norm()):item(), 1e-6, "error")
  check.equal(model[2].weight:tolist(), second:tolist(), "left out")
end)

check.test("what is refused", function()
  check.fails(function() absmax.encode(ty.ones(2, 2), 3) end, "quant.absmax.encode: bits: expected 4 or 8, got 3")
  check.fails(function() absmax.encode(ty.ones(2)) end, "w: expected %[rows, columns%]")
  check.fails(function() absmax.decode {} end, "quant.absmax.decode: codes: expected a tensor")
  check.fails(function() absmax.quantize(nn.Linear(2, 2), { bits = 5 }) end, "quant.absmax.quantize: bits: expected 4")
end)

check.finish()
