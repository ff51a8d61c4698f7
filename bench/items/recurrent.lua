--- nn.LSTM and nn.GRU, forward and backward, f32: the product with the inputs, all steps, and all gradients.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}
local gates = { LSTM = 4, GRU = 3 }

for _, shape in ipairs { { "LSTM", 16, 128, 64 }, { "LSTM", 32, 64, 256 }, { "GRU", 16, 128, 64 } } do
  local kind, batch, time, width = table.unpack(shape)
  items[#items + 1] = {
    name = ("%s/B%dxT%dxH%d"):format(kind:lower(), batch, time, width),
    work = { f32 = 3 * 2 * 2 * gates[kind] * width * width * batch * time },
    peer = { "both", { kind = kind, batch = batch, time = time, width = width } }, bars = { peer = 1 },
    setup = function()
      local layer = ty.nn[kind](width, width, { batch_first = false })
      local x, g = ty.randn(time, batch, width), ty.randn(time, batch, width)
      return calls.both({ x, table.unpack(layer:parameters()) }, g, function() return (layer(x)) end)
    end,
  }
end

return items
