--- EasyCache (Zhou et al. 2025, "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive
-- Caching"): the network's output less its input changes slowly from step to step, so it is kept from the last call and
-- added to the input as long as the error that adds up stays small. With x the input, v the output and k = |v - v'| /
-- |x - x'| over the last two calls, taken as constant until the next, a step's error is estimated as
--
--     k |x - x_last| / |v'|      with x_last the input of the step before and v' the output of the last call
--
-- (means of absolute values; equations 5 to 8). The errors of the steps since the last call are added, and where the
-- sum is less than the threshold, x + (v' - x') is what the step goes on with. The first branch of guidance decides;
-- every branch keeps a difference of its own; every sample decides for itself.
local ty = require "tycho"
local samples = require "tycho.diffusion.cache.samples"

local Easy = {}
Easy.__index = Easy

--- A part of a sampler. options: threshold (0.1; 0: the network is called in every step), warmup (10: first steps with
-- a call; the last step has one too), reuse ("difference": x + (v' - x'); "output": v' itself), every (a call in every
-- so many steps, whatever the estimate says). The last two are what the method is compared with.
---@param options? { threshold?: number, warmup?: integer, reuse?: "difference"|"output", every?: integer }
---@return table part
local function new(options)
  local self = ty.nn.options("cache.easy", options, { threshold = 0.1, warmup = 10, reuse = "difference",
    every = ty.nn.none }, { threshold = "a number >= 0", warmup = "an integer >= 1", reuse = '"difference" or "output"',
      every = "an integer >= 1" })
  return setmetatable(self, Easy)
end

function Easy.start() return { kept = {}, noted = {} } end

local function size(list)
  return ty.concat(list, 0):flatten(1):abs():mean(1):tolist()
end

local function differences(a, b)
  local list = {}
  for i, row in ipairs(a) do list[i] = row - b[i] end
  return list
end

-- Which samples need a call in this step, by what their first branch looks like now.
local function decide(self, run, state, ids, rows)
  local forced = run.step <= self.warmup or run.step == #run.points - 1
    or self.every and (run.step - self.warmup) % self.every == 0
  local last, outputs = {}, {}
  for i, id in ipairs(ids) do
    local kept = state.kept[id]
    last[i], outputs[i] = kept and kept.last or rows[i], kept and kept.output or rows[i]
  end
  local moved, level = size(differences(rows, last)), size(outputs)
  for i, id in ipairs(ids) do
    local kept = state.kept[id] or { error = 0.0, difference = {}, calls = 0 }
    state.kept[id] = kept
    kept.error = kept.k and kept.error + kept.k * moved[i] / level[i] or math.huge
    kept.skips = not forced and (self.every ~= nil or kept.error < self.threshold)
    kept.last = ty.keep(rows[i]:clone())
    state.noted[id + 1] = state.noted[id + 1] or {}
    state.noted[id + 1][run.step] = { error = kept.error, called = not kept.skips }
  end
end

-- What a call of the network says of the first branch: k, and where the next is measured from.
local function learn(kept, x, v)
  if kept.output then
    local moved = (x - kept.input):abs():mean():item()
    if moved > 0 then kept.k = (v - kept.output):abs():mean():item() / moved end
  end
  kept.input, kept.output, kept.error = ty.keep(x:clone()), ty.keep(v:clone()), 0.0
end

function Easy:call(run, next, request)
  local state = run.state[self]
  local ids, first = samples.of(request), request.branches[1]
  state.deciding = state.deciding or first
  local x = samples.split(request, request.x)
  if first == state.deciding then decide(self, run, state, ids, x[first]) end
  local called, outputs = {}, {}
  for i, id in ipairs(ids) do
    local kept = state.kept[id]
    local skips = kept.skips
    for _, name in ipairs(request.branches) do skips = skips and kept.difference[name] ~= nil end
    if not skips then called[#called + 1] = i end
  end
  for _, name in ipairs(request.branches) do
    outputs[name] = {}
    for i, id in ipairs(ids) do
      local difference = state.kept[id].difference[name]
      if difference then outputs[name][i] = self.reuse == "output" and difference or x[name][i] + difference end
    end
  end
  if #called == 0 then return samples.join(request, outputs) end
  local part = samples.narrow(request, called)
  local y = next(part)
  local made = samples.split(part, y)
  for place, i in ipairs(called) do
    local kept = state.kept[ids[i]]
    for _, name in ipairs(request.branches) do
      local v = made[name][place]
      outputs[name][i] = v
      kept.difference[name] = ty.keep(self.reuse == "output" and v:clone() or v - x[name][i])
      if name == state.deciding then learn(kept, x[name][i], v) end
    end
  end
  return #called == #ids and y or samples.join(request, outputs)
end

--- What a run of a sampler with this part noted, for each sample by step: { error, called }.
---@param run Run
---@return { error: number, called: boolean }[][]
function Easy:notes(run)
  local state = type(run) == "table" and type(run.state) == "table" and run.state[self]
  if not state then error("cache.easy: notes: run: expected a run of a sampler with this part, got another", 2) end
  return state.noted
end

return new
