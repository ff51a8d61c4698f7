--- The physical limits of a GPU as they show in practice, measured between the rounds: copying more than the caches
-- hold (both sides counted) and large products of matrices, by us or by the peer, whoever is faster. The least work of
-- an item is { copy = bytes, bf16 = operations, f16 =, tf32 =, f32 = }.
local ty = require "tycho"

local better = function(a, b) return (a and b) and math.max(a, b) or a or b end

return function(on)
  local limits = { kinds = { "copy", "bf16", "f16", "tf32", "f32" } }
  local tensors, held = {}, 0

  local function timed(fn, calls)
    fn()
    on.wait()
    local start = ty.system.clock()
    for _ = 1, calls do fn() end
    on.wait()
    return (ty.system.clock() - start) / calls
  end

  -- Two tensors of a kind, made once; products are written to a third that comes from the cache of freed memory.
  local function pair(kind, shape, dtype)
    if not tensors[kind] then
      local before = ty.memory.stats(on.device).live
      tensors[kind] = { ty.keep(on.randn(shape, dtype)), ty.keep(on.randn(shape, dtype)) }
      held = held + ty.memory.stats(on.device).live - before
    end
    return tensors[kind][1], tensors[kind][2]
  end

  local function size_of(kind)
    if kind == "copy" then return on.size(1 << 28, 1 << 10) end
    return on.size(8192, 32)
  end

  local function own(kind)
    local n = size_of(kind)
    if kind == "copy" then
      local x, y = pair(kind, { n })
      return 8 * n / timed(function() y:copy_(x) end, 6)
    end
    local x, y = pair(kind, { n, n }, kind ~= "tf32" and kind or nil)
    ty.cuda.allow_tf32(kind == "tf32")
    local time = timed(function() x:matmul(y):free() end, kind == "f32" and 1 or 6)
    ty.cuda.allow_tf32(on.tf32)
    return 2 * n ^ 3 / time
  end

  -- nil where neither side can do it: what is wrong with it then shows in the items.
  local function rate(kind, peer)
    local other = peer and peer:ask { ["do"] = "limit", kind = kind, size = size_of(kind) }
    local ok, mine = pcall(own, kind)
    local best = better(ok and mine or nil, other and other.rate)
    return best and best * 1e-9
  end

  --- Rates of the kinds that `work` names, in 1e9 a second.
  function limits.sample(work, _, peer)
    local rates = {}
    for kind in pairs(work) do rates[kind] = rate(kind, peer) end
    return rates
  end

  --- All rates, for the head of the report.
  function limits.all(peer)
    local rates = {}
    for _, kind in ipairs(limits.kinds) do
      for _ = 1, 3 do rates[kind] = better(rates[kind], rate(kind, peer)) end
    end
    return rates
  end

  --- What the tensors here take: not the items'.
  function limits.bytes() return held end

  return limits
end
