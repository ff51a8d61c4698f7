--- What --plan prints: the memory by kind, the work and the time of a training step, of the first two steps of the run,
-- after which it stops. The first step makes the moments, the second is measured. Before anything runs at all, a
-- program asks ty.profile.foresee, and tycho.offload's plan where things can be that do not fit.
local ty = require "tycho"

local M = {}

local function bytes_text(bytes)
  if bytes >= 1e9 then return ("%.2f GB"):format(bytes / 1e9) end
  return bytes >= 1e6 and ("%.2f MB"):format(bytes / 1e6) or ("%.2f kB"):format(bytes / 1e3)
end

-- Bytes and numbers of what an optimizer trains.
local function count(optimizer)
  local seen = { parameters = 0, numbers = 0, gradients = 0 }
  for _, group in ipairs(optimizer.groups or {}) do
    for _, p in ipairs(group.params) do
      seen.parameters, seen.numbers = seen.parameters + p:nbytes(), seen.numbers + p:numel()
      if p.requires_grad then seen.gradients = seen.gradients + p:nbytes() end
    end
  end
  seen.moments = optimizer.state_bytes and optimizer:state_bytes() or 0
  return seen
end

--- The text of a plan. seen: parameters, gradients, moments (bytes), numbers, live, peak (bytes on the device between
-- steps and at most), flops, traffic (bytes), kernels, seconds of a step.
---@param name string  of the optimizer
---@param device string
---@param seen table
---@return string
function M.text(name, device, seen)
  local states = seen.parameters + seen.moments
  local rows = {
    { "parameters", seen.parameters, ("%.3f million that %s trains"):format(seen.numbers / 1e6, name) },
    { "gradients", seen.gradients, "at most, in a step" },
    { "moments", seen.moments, "of " .. name },
    { "other things that stay", math.max(0, seen.live - states), "data, frozen weights, other models" },
    { "within a step", math.max(0, seen.peak - seen.live - seen.gradients),
      "what the backward pass wants kept, and what ops make on the way" },
    { "most at once", seen.peak, "on " .. device },
  }
  local lines = { "plan of a training step:" }
  for _, row in ipairs(rows) do lines[#lines + 1] = ("  %-24s %12s   %s"):format(row[1], bytes_text(row[2]), row[3]) end
  lines[#lines + 1] = ("  %-24s %12.4g   GFLOP in %d kernels, %s read and written"):format("work", seen.flops / 1e9,
    seen.kernels, bytes_text(seen.traffic))
  lines[#lines + 1] = ("  %-24s %12.4g   s, of the second step"):format("time", seen.seconds)
  return table.concat(lines, "\n")
end

--- Watches the optimizers of a run; done(text) is called when one has stepped twice.
---@param device string
---@param done fun(text: string)
function M.begin(device, done)
  local watcher, native, clock = require "tycho.optim.watcher", ty.core.profile_core, ty.system.clock
  local shared = require "tycho.profile.shared"
  local steps, first, since = {}, nil, nil
  local function wait() if device ~= "cpu" then ty.cuda.synchronize(device) end end
  -- A recipe that profiles itself comes first: the next two steps are measured then.
  shared.give_way = function()
    if first then native.stop() end
    first = nil
  end
  watcher.watch(function(optimizer)
    steps[optimizer] = (steps[optimizer] or 0) + 1
    if not first then
      wait()
      if not pcall(native.start, 10000000, 0) then return end
      first = optimizer
      ty.memory.reset_peak(device)
      since = clock()
    elseif optimizer == first then
      wait()
      local seconds = clock() - since
      watcher.watch(nil)
      shared.give_way = nil
      local events, lost = native.stop()
      events = events or {}
      collectgarbage()
      collectgarbage()
      local memory = ty.memory.stats(device)
      local seen = count(optimizer)
      seen.peak, seen.seconds, seen.kernels = memory.peak, seconds, #events + (lost or 0)
      seen.live = math.max(0, memory.live - (steps[optimizer] and seen.gradients or 0))
      seen.flops, seen.traffic = 0.0, 0
      for _, event in ipairs(events) do
        seen.flops, seen.traffic = seen.flops + event.flops, seen.traffic + event.bytes
      end
      done(M.text(optimizer.name or "the optimizer", device, seen))
    end
  end)
end

return M
