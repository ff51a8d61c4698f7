--- The GPU that items run on: where their tensors are made, how large (`tiny`: to try every item where there is no GPU,
-- on the emulated device), waiting, peaks of memory, and the limits it is held against.
local ty = require "tycho"

return function(tiny)
  local on = { device = "cuda", tiny = tiny, tf32 = false }
  on.limits = require "bench.lib.gpu_limits"(on)

  function on.wait() ty.cuda.synchronize(on.device) end

  --- What an item's size is: the first, or when everything is tried in small the second.
  function on.size(full, small) return tiny and small or full end

  function on.randn(shape, dtype) return ty.randn(shape, { device = on.device, dtype = dtype or "f32" }) end
  function on.zeros(shape, dtype) return ty.zeros(shape, { device = on.device, dtype = dtype or "f32" }) end
  function on.ones(shape, dtype) return ty.ones(shape, { device = on.device, dtype = dtype or "f32" }) end
  function on.randint(high, shape) return ty.randint(0, high, shape, { device = on.device }) end

  --- Before an item's tensors are made: what the last one left goes back, products get their precision.
  function on.begin(item)
    collectgarbage()
    collectgarbage()
    ty.memory.empty_cache(on.device)
    on.tf32 = item.tf32 or false
    ty.cuda.allow_tf32(on.tf32)
  end

  --- The most bytes that tensors took while fn() ran, without those of the limits.
  function on.peak_of(fn)
    collectgarbage()
    ty.memory.reset_peak(on.device)
    fn()
    return ty.memory.stats(on.device).peak - on.limits.bytes()
  end

  return on
end
