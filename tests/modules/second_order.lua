-- What the tests of GPTQ and SparseGPT share: moments of inputs, and the inverse of a Hessian as the papers have it.
local ty = require "tycho"

local second_order = {}

--- Rows whose columns depend on each other, and their x' x.
function second_order.inputs(rows, columns, dtype)
  local mix = ty.randn(columns, columns, { dtype = dtype }) * 0.4 + ty.eye(columns, -1, dtype)
  local x = ty.matmul(ty.randn(rows, columns, { dtype = dtype }), mix)
  return x, ty.matmul(x:transpose(0, 1), x)
end

--- The inverse of a moment with `damp` times its mean diagonal on the diagonal. Tables from 1.
function second_order.inverse(moment, damp)
  local columns, mean, h = #moment, 0, {}
  for i = 1, columns do mean = mean + moment[i][i] / columns end
  for i = 1, columns do
    h[i] = { table.unpack(moment[i]) }
    h[i][i] = h[i][i] + damp * mean
  end
  return ty.tensor(h, { dtype = "f64" }):inverse():tolist()
end

--- Makes the inverse of a matrix that of what is left without row and column i, by elimination in place.
function second_order.eliminate(inverse, i)
  local row = { table.unpack(inverse[i]) }
  for a = 1, #inverse do
    local factor = inverse[a][i] / row[i]
    for b = 1, #inverse do inverse[a][b] = inverse[a][b] - factor * row[b] end
  end
end

return second_order
