--- What recipes about pipelines measure: steps of a model that is divided over ranks, by their clocks.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"
local pipelines = require "tycho.dist.pipeline"
local ranks_of = require "tycho.dist.ranks"
local schedules = require "tycho.dist.schedule"
local workload = require "tycho.dist.workload"

local M = {}

-- ---- what is trained ----

-- Loss of logits [n, t, vocabulary] and targets i64 [n, t].
local function token_loss(logits, targets)
  return ty.nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
end

-- A workload's model: layers, loss, and a function that gives inputs and targets of a step.
local function of_workload(work, o)
  return pipelines.layers(workload.model(work, o.seed)), token_loss, function(step)
    local rows = workload.rows(work, o.seed, step, 0, o.micro_batches * o.rows)
    return rows:narrow(1, 0, work.length):contiguous(), rows:narrow(1, 1, work.length):contiguous()
  end
end

local Busy = ty.nn.module "Busy"

function Busy:init(group, width, seconds)
  self.linear = ty.nn.Linear(width, width)
  rawset(self, "pass", ty.custom_op { name = "dist.busy",
    forward = function(_, x)
      group:advance(seconds)
      return x:clone()
    end,
    backward = function(_, g)
      group:advance(2 * seconds)
      return g
    end })
end

function Busy:forward(x) return self.pass(self.linear(x)) end

--- Layers of which each keeps its rank busy for a time of its clock, and twice as long on the way back: as regular as
-- the formulas have it, where processors are not.
---@param group RankGroup
---@param count integer
---@param width integer
---@param seconds number
---@return Module[]
function M.busy_layers(group, count, width, seconds)
  local who = "dist.pipeline_trial.busy_layers"
  Group.expect(who, group)
  arguments.expect(who, "count", count, "an integer >= 1")
  arguments.expect(who, "width", width, "an integer >= 1")
  arguments.expect(who, "seconds", seconds, "a finite number >= 0")
  local list = {}
  for i = 1, count do list[i] = Busy(group, width, seconds) end
  return list
end

local function of_busy_layers(group, o)
  local layers = M.busy_layers(group, o.layers, 8, o.busy)
  return layers, ty.nn.mse_loss, function()
    return ty.randn(o.micro_batches * o.rows, 8), ty.randn(o.micro_batches * o.rows, 8)
  end
end

-- ---- steps ----

-- A rank's steps.
local function steps(group, work, o)
  local pipeline, batch
  do -- the rank keeps its own layers alone
    local layers, loss
    if o.busy > 0 then
      layers, loss, batch = of_busy_layers(group, o)
    else
      layers, loss, batch = of_workload(work, o)
    end
    pipeline = pipelines.new(group, layers, { loss = loss, costs = o.costs, recompute = o.recompute,
      schedule = schedules[o.schedule](group.size, o.micro_batches, o.chunks) })
  end
  local parameters = pipeline:parameters()
  local out = { steps = {}, parts = pipeline.parts, parameters = 0 }
  for _, p in ipairs(parameters) do
    out.parameters = out.parameters + p:nbytes()
    p:set_grad(p:detach():zeros_like())
  end
  for step = 0, o.steps do -- the first one is to warm up
    local inputs, targets = batch(step)
    for _, p in ipairs(parameters) do p.grad:zero_() end
    group:reset_memory()
    local before, sent = group:memory(), group:traffic().bytes
    group:barrier()
    local events = group:record()
    out.loss = pipeline:step(inputs, targets)
    group:barrier()
    if step > 0 then out.steps[step] = events end
    local _, peak = group:memory()
    out.peak, out.sent, out.in_flight = peak - before, group:traffic().bytes - sent, pipeline.in_flight
  end
  if o.gradients then
    out.gradients = {}
    for i, p in ipairs(parameters) do out.gradients[i] = p.grad:clone() end
  end
  return out
end

--- Steps forwards and backwards of a workload's model on so many ranks, and what they took. options: schedule ("gpipe",
-- "one_f_one_b" or "interleaved"), micro_batches (8), chunks (1), rows (1: of a micro-batch), recompute (true), steps
-- (3, after one that does not count), seed (0), costs (of the layers, see dist.pipeline.costs), latency (2e-5 s),
-- bandwidth (1e10 bytes/s), gradients (false: those of the last step, by rank), busy (0; seconds: instead of the
-- model, busy_layers() of that time, of which there are `layers`, 8).
--
-- Returned are, of the step that was over first, which was disturbed least: share, of_ideal and seconds (as
-- dist.schedule.bubble has them) and rows, the events by rank. By rank: peak (bytes at once beyond parameters and
-- gradients), in_flight, parameters (bytes) and gradients; most: the largest of peak; sent: bytes of a step by all
-- ranks; loss: of the last step; parts: layers by stage.
---@param work? RankWorkload
---@param ranks integer
---@param options? table
---@return { share: number, of_ideal: number, seconds: number, rows: table[][], peak: integer[], most: integer,
---  sent: integer, in_flight: integer[], loss: number, parts: integer[][], parameters: integer[], gradients: table }
function M.run(work, ranks, options)
  local who = "dist.pipeline_trial.run"
  arguments.expect(who, "work", work, "a table or nil")
  local o = arguments.read(who, options, { schedule = "gpipe", micro_batches = 8, chunks = 1, rows = 1,
    recompute = true, steps = 3, seed = 0, costs = arguments.none, latency = 2e-5, bandwidth = 1e10,
    gradients = false, busy = 0.0, layers = 8 },
    { schedule = '"gpipe" or "one_f_one_b" or "interleaved"', micro_batches = "an integer >= 1",
      chunks = "an integer >= 1", rows = "an integer >= 1", recompute = "a boolean", steps = "an integer >= 1",
      seed = "an integer", costs = "a list of numbers", latency = "a finite number >= 0", bandwidth = "a number > 0",
      gradients = "a boolean", busy = "a finite number >= 0", layers = "an integer >= 1" })
  if not work and o.busy == 0 then arguments.fail("%s: work: expected a workload, or busy layers, got nil", who) end
  local got = ranks_of.run(ranks, steps, { latency = o.latency, bandwidth = o.bandwidth, seed = o.seed }, work, o)
  local out
  for step = 1, o.steps do
    local rows = {}
    for rank = 1, ranks do rows[rank] = got[rank].steps[step] end
    local share, of_ideal, seconds = schedules.bubble(rows)
    if not out or seconds < out.seconds then
      out = { share = share, of_ideal = of_ideal, seconds = seconds, rows = rows }
    end
  end
  out.peak, out.in_flight, out.parameters, out.gradients, out.sent = {}, {}, {}, {}, 0
  for rank, r in ipairs(got) do
    out.peak[rank], out.in_flight[rank] = r.peak, r.in_flight
    out.parameters[rank], out.gradients[rank] = r.parameters, r.gradients
    out.sent = out.sent + r.sent
  end
  out.most, out.loss, out.parts = math.max(table.unpack(out.peak)), got[1].loss, got[1].parts
  return out
end

--- The largest difference between gradients by ranks, as run() gives them of schedules with a chunk, and those of one
-- rank, of the largest number of each gradient. An embedding that is also the head is the last one of the last rank,
-- too.
---@param many Tensor[][]
---@param one Tensor[]
---@return number
function M.apart(many, one)
  local who = "dist.pipeline_trial.apart"
  arguments.expect(who, "many", many, "a list of tables")
  arguments.expect(who, "one", one, "a list of tensors")
  local all = {}
  for _, list in ipairs(many) do table.move(list, 1, #list, #all + 1, all) end
  local wanted = table.move(one, 1, #one, 1, {})
  if #all == #wanted + 1 then wanted[#all] = one[1] end
  if #all ~= #wanted then
    arguments.fail("%s: many: expected %d gradients, got %d", who, #wanted, #all)
  end
  local worst = 0
  for i, g in ipairs(all) do
    local w = wanted[i]:to "f64"
    worst = math.max(worst, (g:to "f64" - w):abs():max():item() / math.max(w:abs():max():item(), 1e-30))
  end
  return worst
end

return M
