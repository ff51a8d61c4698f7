--- What this machine can do, measured: floating-point operations and bytes from memory per second, on as many threads
-- as ops have now. Each kernel of a profile is held to them.
local core = require "tycho.core"

local clock = core.system.clock
local known = {} -- by the number of threads

-- The shortest time of fn in a tenth of a second.
local function shortest(fn)
  fn()
  local best, stop = math.huge, clock() + 0.1
  repeat
    local begin = clock()
    fn()
    best = math.min(best, clock() - begin)
  until clock() > stop
  return best
end

--- flops: of a product of f32 matrices; bandwidth: of reading a tensor that no cache holds.
---@return { flops: number, bandwidth: number }
return function()
  local threads = core.threads()
  if not known[threads] then
    local n, size = 640, 1 << 24
    local ty = require "tycho"
    known[threads] = ty.scope(function()
      return ty.no_grad(function()
        local x, y, long = ty.ones(n, n), ty.ones(n, n), ty.ones(size)
        return { flops = 2.0 * n ^ 3 / shortest(function() ty.scope(function() x:matmul(y) end) end),
          bandwidth = 4.0 * size / shortest(function() ty.scope(function() long:sum() end) end) }
      end)
    end)
  end
  return known[threads]
end
