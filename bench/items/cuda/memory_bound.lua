--- What only moves memory, on a GPU and out of its caches: elementwise ops, norms, softmax, cross entropy, gates. The
-- limit is the traffic of a pass that touches each tensor as seldom as the formula allows, at the bandwidth of a copy.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local bytes = { f32 = 4, bf16 = 2 }

return function(on)
  local items = {}

  -- make() returns inputs, the gradient of the result and the function. count: bytes of a call.
  local function add(name, count, peer, make, how)
    items[#items + 1] = { name = name, work = { copy = count }, peer = peer, bars = { limit = 0.85 },
      setup = function()
        local inputs, g, forward = make()
        return how == "both" and calls.both(inputs, g, forward) or calls.forward(forward)
      end }
  end

  local n = on.size(1 << 27, 1 << 12)
  local elementwise = {
    { "add", 3, function(x, y) return x + y end },
    { "scale in place", 2, function(x) return x:mul_(1.0) end },
    { "add bias", 2, function(x, y) return x:reshape(-1, 1024) + y:narrow(0, 0, 1024) end },
    { "fill", 1, function(x) return x:fill_(1.0) end },
    { "transpose", 2, function(x) return x:reshape(-1, 1024):transpose(0, 1):contiguous() end },
  }
  for _, dtype in ipairs { "bf16", "f32" } do
    for _, op in ipairs(elementwise) do
      add(("%s/%s"):format(op[1], dtype), op[2] * n * bytes[dtype], { "elementwise", { op = op[1], n = n,
        dtype = dtype } }, function()
        local x, y = on.randn({ n }, dtype), on.randn({ n }, dtype)
        return {}, nil, function() return op[3](x, y) end
      end)
    end
  end
  add("to bf16/f32", 6 * n, { "elementwise", { op = "to bf16", n = n } }, function()
    local x = on.randn { n }
    return {}, nil, function() return x:to "bf16" end
  end)
  add("where/bf16", 7 * n, { "elementwise", { op = "where", n = n, dtype = "bf16" } }, function()
    local x, y = on.randn({ n }, "bf16"), on.randn({ n }, "bf16")
    local mask = x:gt(0)
    return {}, nil, function() return ty.where(mask, x, y) end
  end)

  local rows, width = on.size(65536, 16), on.size(1024, 64)
  for _, dtype in ipairs { "bf16", "f32" } do
    local size = rows * width * bytes[dtype]
    for _, op in ipairs { "softmax", "layer_norm", "rms_norm" } do
      local function make()
        local x, g = on.randn({ rows, width }, dtype), on.randn({ rows, width }, dtype)
        local w, b = on.ones({ width }, dtype), on.zeros({ width }, dtype)
        if op == "softmax" then return { x }, g, function() return x:softmax(-1) end end
        if op == "layer_norm" then
          return { x, w, b }, g, function() return (ty.layer_norm(x, width, w, b)) end
        end
        return { x, w }, g, function() return (ty.rms_norm(x, width, w)) end
      end
      local work = op == "softmax" and "softmax" or "row_norm"
      for _, how in ipairs { "fwd", "both" } do
        local grad = how == "both"
        add(("%s/%s/%s"):format(op, dtype, grad and "fwd+bwd" or how), (grad and 5 or 2) * size, { work, { op = op,
          rows = rows, width = width, grad = grad, dtype = dtype } }, make, how)
      end
    end
  end

  local images = { on.size(64, 2), on.size(256, 16), on.size(64, 8), on.size(64, 8) }
  local count = images[1] * images[2] * images[3] * images[4]
  local norms = {
    group_norm = function(x, w, b) return (ty.group_norm(x, 8, w, b)) end,
    batch_norm = function(x, w, b) return ty.batch_norm(x, nil, nil, w, b, true) end,
  }
  for _, op in ipairs { "group_norm", "batch_norm" } do
    -- The statistics need a pass of their own: x is read twice forward, x and the gradient twice backward.
    add(op .. "/bf16/fwd+bwd", 8 * count * 2, { op, { shape = images, groups = op == "group_norm" and 8 or nil,
      dtype = "bf16" } }, function()
      local x, g = on.randn(images, "bf16"), on.randn(images, "bf16")
      local w, b = on.ones({ images[2] }, "bf16"), on.zeros({ images[2] }, "bf16")
      return { x, w, b }, g, function() return norms[op](x, w, b) end
    end, "both")
  end

  local tokens, classes = on.size(8192, 8), on.size(50257, 101)
  for _, dtype in ipairs { "bf16", "f32" } do
    add(("cross_entropy/%s/fwd+bwd"):format(dtype), 3 * tokens * classes * bytes[dtype], { "cross_entropy",
      { rows = tokens, classes = classes, dtype = dtype } }, function()
      local x, target = on.randn({ tokens, classes }, dtype), on.randint(classes, { tokens })
      return { x }, nil, function() return ty.cross_entropy(x, target) end
    end, "both")
  end

  rows, width = on.size(32768, 8), on.size(3072, 64)
  local size, arguments = rows * width * 2, { rows = rows, width = width, dtype = "bf16" }
  add("gelu/bf16/fwd+bwd", 5 * size, { "gelu", arguments }, function()
    local x, g = on.randn({ rows, width }, "bf16"), on.randn({ rows, width }, "bf16")
    return { x }, g, function() return ty.gelu(x, "tanh") end
  end, "both")
  add("silu_gate/bf16/fwd+bwd", 8 * size, { "silu_gate", arguments }, function()
    local shape = { rows, width }
    local x, y, g = on.randn(shape, "bf16"), on.randn(shape, "bf16"), on.randn(shape, "bf16")
    return { x, y }, g, function() return ty.glu(y, x, "silu") end
  end, "both")
  return items
end
