-- Some steps, and what they took: by the clock, by the engine's count, by the allocator's and by the kernel's.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local outside = require "tycho.offload.outside"

local clock = ty.core.system.clock

local function disks()
  local now = outside()
  return now.read and now.written and now.read + now.written
end

--- Does steps, each in a scope of its own; step(i) does the i-th and returns its loss, a number. options:
--   engine    that the steps are done with, whose bytes are counted
--   budget    the most bytes of tensors on the CPU while it lasts; the allocator refuses more (none)
--   watch     watch(i, loss, seconds) is called after each step
-- Returned are, of all steps but the first, which makes moments and files: seconds (the mean) and, with an engine, step
-- (bytes that it moved between file and memory, the mean). Of all: losses, peak (bytes of tensors on the CPU at most),
-- resident (bytes of the process at most, since it began) and seen (bytes that the kernel moved for it), where the
-- kernel says these two; with an engine, moved (bytes that it counts) and waited (seconds of a step, the mean).
---@param steps integer  2 at least
---@param step fun(i: integer): number
---@param options? { engine?: OffloadEngine, budget?: integer, watch?: fun(i: integer, loss: number, seconds: number) }
---@return { losses: number[], seconds: number, peak: integer, resident?: integer, seen?: integer, step?: number,
---  moved?: integer, waited?: number }
return function(steps, step, options)
  local who = "offload.trial"
  arguments.expect(who, "steps", steps, "an integer >= 2")
  arguments.expect(who, "step", step, "a function")
  local o = arguments.read(who, options, { engine = arguments.none, budget = arguments.none, watch = arguments.none },
    { engine = "a table", budget = "an integer >= 1", watch = "a function" })
  if o.engine and type(o.engine.stats) ~= "function" then
    arguments.fail("%s: engine: expected one of offload.engine, got %s", who, arguments.describe(o.engine))
  end
  local function moved()
    local file = o.engine and o.engine:stats().file
    return file and file.moved or 0
  end
  local got, seconds, before, first, begun = { losses = {} }, {}, disks(), nil, moved()
  local waited = o.engine and o.engine:stats().waited
  if o.budget then ty.memory.set_budget("cpu", o.budget) end
  ty.memory.reset_peak()
  local fine, problem = pcall(function()
    for i = 1, steps do
      local since = clock()
      ty.scope(function() got.losses[i] = step(i) end)
      seconds[i] = clock() - since
      arguments.expect(who, "what step gives", got.losses[i], "a number")
      first = first or moved()
      if o.watch then o.watch(i, got.losses[i], seconds[i]) end
    end
  end)
  if o.budget then ty.memory.set_budget "cpu" end
  if not fine then error(problem, 0) end
  got.seconds = ty.stats.mean { table.unpack(seconds, 2) }
  got.peak, got.resident = ty.memory.stats().peak, outside().most
  got.seen = before and disks() - before
  if o.engine then
    local now = moved()
    got.moved, got.step = now - begun, (now - first) / (steps - 1)
    got.waited = (o.engine:stats().waited - waited) / steps
  end
  return got
end
