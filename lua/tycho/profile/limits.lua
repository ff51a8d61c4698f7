--- What this machine can do, measured: floating-point operations and bytes from memory per second, on as many threads
-- as ops have now. Each kernel of a profile is held to them.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local known = {} -- by the number of threads and what is measured

-- The shortest time of fn in a tenth of a second.
local function shortest(clock, fn)
  fn()
  local best, stop = math.huge, clock() + 0.1
  repeat
    local begin = clock()
    fn()
    best = math.min(best, clock() - begin)
  until clock() > stop
  return best
end

--- flops: of a product of f32 matrices; bandwidth: of reading a tensor that no cache holds. They are measured once.
-- options: processor (false; true: by processor seconds, those of all threads together, in which waiting for other
-- programs does not count), copy (false; true: the bandwidth is that of a copy, of bytes read and written).
---@param options? { processor?: boolean, copy?: boolean }
---@return { flops: number, bandwidth: number }
return function(options)
  local o = arguments.read("profile.limits", options, { processor = false, copy = false })
  local threads = core.threads()
  local key = ("%d %s %s"):format(threads, o.processor, o.copy)
  if not known[key] then
    local n, size = 640, 1 << 24
    local ty, clock = require "tycho", o.processor and os.clock or core.system.clock
    known[key] = ty.scope(function()
      return ty.no_grad(function()
        local x, y, long = ty.ones(n, n), ty.ones(n, n), ty.ones(size)
        local target = o.copy and ty.zeros(size)
        local function move() return o.copy and target:copy_(long) or long:sum() end
        return { flops = 2.0 * n ^ 3 / shortest(clock, function() ty.scope(function() x:matmul(y) end) end),
          bandwidth = (o.copy and 8.0 or 4.0) * size / shortest(clock, function() ty.scope(function() move() end) end) }
      end)
    end)
  end
  return known[key]
end
