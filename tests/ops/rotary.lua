-- Rows of src/ops/rotary.c.

-- Which element of tensor t (shape broadcast to the leading sizes of x) belongs to vector v of x, all counted from 0.
local function row_of(t, x, v)
  local at, step = 0, 1
  for d = 1, #t.shape - 1 do step = step * t.shape[d] end
  local xd = #x.shape - 1
  local rest, stride = v, 1
  for d = #t.shape - 1, 1, -1 do
    local n = x.shape[xd]
    if t.shape[d] > 1 then at = at + rest % n * stride end
    stride, rest, xd = stride * t.shape[d], rest // n, xd - 1
  end
  return at
end

local function rotate(x, cos, sin, interleaved)
  local width, pairs = x.shape[#x.shape], cos.shape[#cos.shape]
  local y = { shape = x.shape }
  for i = 1, #x do y[i] = x[i] end
  if width == 0 then return y end
  for v = 0, #x // width - 1 do
    local row = row_of(cos, x, v) * pairs
    for i = 0, pairs - 1 do
      local a = v * width + (interleaved and 2 * i or i) + 1
      local b = v * width + (interleaved and 2 * i + 1 or pairs + i) + 1
      local c, s = cos[row + i + 1], sin[row + i + 1]
      y[a], y[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    end
  end
  return y
end

return function(row, T)
  row("rotary", {
    cases = {
      { T { 2, 3, 5, 8 }, T { 5, 4 }, T { 5, 4 } },
      { T { 2, 3, 5, 8 }, T { 5, 4 }, T { 5, 4 }, true },
      { T { 2, 3, 40 }, T { 2, 1, 17 }, T { 2, 1, 17 } },
      { T { 2, 3, 40 }, T { 2, 1, 17 }, T { 2, 1, 17 }, true },
      { T { 3, 7 }, T { 2 }, T { 2 } }, { T { 6 }, T { 3 }, T { 3 }, true }, { T { 4, 6 }, T { 4, 0 }, T { 4, 0 } },
      { T { 0, 6 }, T { 0, 3 }, T { 0, 3 } }, { T { 2, 0 }, T { 2, 0 }, T { 2, 0 } },
    },
    ref = rotate,
    errors = {
      { T {}, T { 2 }, T { 2 }, match = "x: expected at least one dimension" },
      { T { 4, 6 }, T { 4, 3 }, T { 3, 3 }, match = "sin: expected the shape of cos" },
      { T { 4, 6 }, T { 4, 4 }, T { 4, 4 }, match = "at most 3 pairs" },
      { T { 4, 6 }, T { 5, 3 }, T { 5, 3 }, match = "cos: expected [..., pairs]" },
      { T { 4, 6 }, T { 4, 3, dtype = "i64" }, T { 4, 3, dtype = "i64" }, match = "cos: expected a float tensor" },
    },
    big = function(ty)
      local x = ty.randn(2, 4, 300, 64)
      local angles = ty.randn(300, 32)
      return ty.rotary(x, angles:cos(), angles:sin()), ty.rotary(x, angles:cos(), angles:sin(), true)
    end,
  })
end
