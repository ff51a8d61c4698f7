--- Noise by seeds, one for each sample of a batch: a sample's noise depends on its own seed alone, so that it comes out
-- the same by itself and in any batch.
local ty = require "tycho"
local expect = require("tycho.arguments").expect

local M = {}

--- A function (draw, x) that gives standard noise like x [n, ...], n the number of seeds; the generator is left as it
-- was. Numbers are drawn on the CPU, in f32 or x's own wider dtype, so they are the same on every device. Draws follow
-- each other: `draw` only says which one begins anew (0).
---@param seeds integer[]
---@return fun(draw: integer, x: Tensor): Tensor
function M.noise(seeds)
  expect("seeds.noise", "seeds", seeds, "a list of integers")
  local states = {}
  return function(draw, x)
    local before, shape, rows = ty.rng_state(), x.shape, {}
    if shape[1] ~= #seeds then
      error(("seeds.noise: x: expected [%d, ...], one for each seed, got [%s]"):format(#seeds,
        table.concat(shape, ", ")), 0)
    end
    shape[1] = 1
    for i, seed in ipairs(seeds) do
      if draw == 0 or not states[i] then ty.manual_seed(seed) else ty.rng_state(states[i]) end
      if draw ~= 0 and not states[i] then ty.randn(shape) end -- the first noise came from elsewhere
      rows[i] = ty.randn(shape, { dtype = x.dtype == "f64" and "f64" or "f32" })
      states[i] = ty.rng_state()
    end
    ty.rng_state(before)
    return ty.concat(rows, 0):to { dtype = x.dtype, device = x.device }
  end
end

return M
