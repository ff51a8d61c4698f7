--- A job for dist.monitor.supervise: data-parallel training of dist.workload that goes on from its checkpoints bit for
-- bit, and faults of machines, to see whether they are found.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local gradients = require "tycho.dist.gradients"
local Group = require "tycho.dist.group"
local workload = require "tycho.dist.workload"

local M = {}

---@class MachineFault
---@field kind string      "slow": each step takes `seconds` more; "dead": an error; "stopped": it ends without a word;
--   "hung": it comes to nothing for an hour; "link": a message to `other` takes `seconds` more
---@field machine any
---@field other? any
---@field step integer     from which on, or at which
---@field seconds? number

-- What a fault does at a step; true where the machine stops.
local function suffer(fault, group, watch, machine, step)
  if fault.kind == "link" then
    if machine ~= fault.other or step ~= fault.step and group.receive ~= Group.receive then return end
    if step >= fault.step then
      group.receive = function(self, from, tag)
        local x = Group.receive(self, from, tag)
        if watch.machines[from + 1] == fault.machine then self:advance(fault.seconds) end
        return x
      end
    end
  elseif machine == fault.machine then
    if fault.kind == "slow" and step >= fault.step then group:advance(fault.seconds) end
    if step ~= fault.step then return end
    if fault.kind == "hung" then group:advance(3600) end
    if fault.kind == "dead" then error(("machine %s is gone"):format(tostring(machine)), 0) end
    return fault.kind == "stopped"
  end
end

--- Trains dist.workload.model; the rows of a step are shared among the ranks. Every `every` steps the first rank saves
-- a checkpoint, and the monitor looks. options: folder (of the checkpoint), steps (40), every (10), batch (8: rows of a
-- step, a multiple of the ranks), rate (3e-3), seed (0), step_seconds (0: by which the clock goes on in a step besides
-- what it takes), jitter (0: of the logarithm of these, its standard deviation), faults (a list of MachineFault),
-- losses (a tensor [steps] that gets those of the first rank), runs (one that counts how often each step was done).
---@param group RankGroup
---@param watch MonitorWatch
---@param machine any
---@param work RankWorkload
---@param options table
---@return Tensor|nil weights  of the first rank, flat
function M.train(group, watch, machine, work, options)
  local who = "dist.monitored_training"
  Group.expect(who, group)
  arguments.expect(who, "watch", watch, "a table")
  local none = arguments.none
  local o = arguments.read(who, options, { folder = none, steps = 40, every = 10, batch = 8, rate = 3e-3, seed = 0,
    step_seconds = 0, jitter = 0, faults = {}, losses = none, runs = none },
    { folder = "a string", steps = "an integer >= 1", every = "an integer >= 1", batch = "an integer >= 1",
      rate = "a finite number >= 0", seed = "an integer", step_seconds = "a finite number >= 0",
      jitter = "a finite number >= 0", faults = "a list of tables", losses = "a tensor", runs = "a tensor" })
  arguments.expect(who, "folder", o.folder, "a string")
  if o.batch % group.size ~= 0 then
    arguments.fail("%s: batch: expected a multiple of the %d ranks, got %d", who, group.size, o.batch)
  end
  local model = workload.model(work, o.seed)
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = o.rate, clip_norm = 1 })
  local buckets, first = gradients.buckets(model:parameters()), 0
  if ty.train.has_checkpoint(o.folder) then
    first = ty.train.load_checkpoint(o.folder, { model = model, optimizer = optimizer }).step
  end
  local share = o.batch // group.size
  for step = first + 1, o.steps do
    for _, fault in ipairs(o.faults) do
      if suffer(fault, group, watch, machine, step) then return nil end
    end
    local draws = ty.seeded_noise(ty.empty(group.size), o.seed * 1000003 + step)
    group:advance(o.step_seconds * math.exp(o.jitter * draws[group.rank]:item()))
    ty.scope(function()
      local loss = workload.loss(model, workload.rows(work, o.seed, step, share * group.rank, share))
      optimizer:zero_grad()
      loss:backward()
      buckets:mean_gradients(group)
      optimizer:step()
      if group.rank == 0 then
        if o.losses then o.losses:narrow(0, step - 1, 1):copy_(loss:detach():reshape(1)) end
        if o.runs then o.runs:narrow(0, step - 1, 1):add_(1) end
      end
    end)
    if step % o.every == 0 then
      if group.rank == 0 then
        ty.train.save_checkpoint(o.folder, { model = model, optimizer = optimizer, step = step })
      end
      watch:check()
    end
  end
  if group.rank ~= 0 then return nil end
  local list = {}
  for i, p in ipairs(model:parameters()) do list[i] = p:detach():reshape(-1) end
  return ty.concat(list, 0)
end

return M
