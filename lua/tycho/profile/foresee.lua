--- What a function would take of memory and work, before it runs: on the meta device, which has shapes and no numbers.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local take = require "tycho.profile.take"

local count_meta = ty.core.profile_core.count_meta

local products = { matmul = true, matmul_int8 = true, scaled_dot_product_attention = true, attention_backward = true }
local convolutions = { conv2d = true, conv2d_backward_input = true, conv2d_backward_weight = true }

--- Runs fn("meta"), which makes its model and its data on the device that it is given and does a step or a few with
-- them, and says what that takes, without memory for tensors and without arithmetic. The allocator's rules are followed
-- allocation by allocation: sizes by class, blocks that are used again, and what frees when. So the peak is that of the
-- same function on the CPU with an empty cache. What kernels take for themselves while they run is not in it. Returned
-- are numbers, and then what fn returned:
--   peak      bytes at once, at most, beyond what there was on the meta device before
--   live      bytes that are left behind
--   flops     of products, convolutions and attention 2 for a multiplication and an addition, of all else 1 a number
--   products, convolutions   what of them each of these has
--   bytes     that kernels read and write, each operand once
--   kernels   how many run
---@param fn fun(device: string): ...
---@return { peak: integer, live: integer, flops: number, products: number, convolutions: number, bytes: integer,
---  kernels: integer }
---@return any ...
return function(fn)
  arguments.expect("profile.foresee", "fn", fn, "a function")
  collectgarbage()
  collectgarbage()
  ty.memory.empty_cache "meta"
  ty.memory.reset_peak "meta"
  local before = ty.memory.stats "meta".live
  -- What only waits for the collector counts as well, and it comes when it would for real tensors.
  count_meta(true)
  local result = table.pack(pcall(take, function() return fn "meta" end, { most = 10000000 }))
  count_meta(false)
  if not result[1] then error(result[2], 0) end
  local run, results = result[2], result[3]
  local stats = ty.memory.stats "meta"
  local seen = { peak = stats.peak - before, live = stats.live - before, flops = 0.0, products = 0.0,
    convolutions = 0.0, bytes = 0, kernels = #run.events + run.lost }
  for _, event in ipairs(run.events) do
    seen.flops, seen.bytes = seen.flops + event.flops, seen.bytes + event.bytes
    if products[event.op] then seen.products = seen.products + event.flops
    elseif convolutions[event.op] then seen.convolutions = seen.convolutions + event.flops end
  end
  return seen, table.unpack(results, 1, results.n)
end
