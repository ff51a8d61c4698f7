--- One run of a sampler: what solvers, guidance and parts see of it, and how a call passes through the parts.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"
local predictions = require "tycho.diffusion.prediction"

--- One sampling as a solver sees it: the point, the schedule and the network's predictions.
---@class Run
---@field model any
---@field schedule table
---@field kind string          what the network predicts
---@field points Point[]       from noise to clean; a part may put others in the place of those to come
---@field step integer         the step that runs, from 1
---@field condition table
---@field state table          by part (and for the solver): what each keeps over the steps of this run
---@field calls integer        calls of the network so far
---@field draws integer        how often fresh noise was drawn so far
---@field evaluations table<string, integer>  samples that went through the network so far, by branch
local Run = {}
Run.__index = Run

-- fn(...) with the parts' method of that name around it, the first part outermost: part:method(run, next, ...).
local function through(run, method, fn)
  for i = #run.parts, 1, -1 do
    local part, inner = run.parts[i], fn
    if part[method] then
      fn = function(...) return part[method](part, run, inner, ...) end
    end
  end
  return fn
end

-- The network itself, on a request.
local function call(run, request)
  local x, point = request.x, request.point
  local scale = predictions.input_scale(run.kind, point.alpha, point.sigma, run.data)
  local rows = x.shape[1]
  run.calls = run.calls + 1
  for _, name in ipairs(request.branches) do
    run.evaluations[name] = (run.evaluations[name] or 0) + rows // #request.branches
  end
  local t = ty.full({ rows }, point.time, { device = x.device })
  return run.model(scale and x * scale or x, t, request.condition)
end

--- options: model, schedule, kind, data, guidance, solver, clip (a function of the clean sample, or nil), points,
-- condition, branches, parts, fresh.
---@return Run
local function new(options)
  local run = setmetatable(options, Run)
  run.calls, run.evaluations, run.state, run.step, run.joined = 0, {}, {}, 0, {}
  run.draws = 0
  run.call_network = through(run, "call", function(request) return call(run, request) end)
  run.make_prediction = through(run, "predict", function(x, point)
    local output = run.guidance:guide(run, x, point)
    -- What some networks say of variances besides, in as many channels again, no solver here asks for.
    if x.ndim == 4 and output.shape[2] == 2 * x.shape[2] then output = output:narrow(1, 0, x.shape[2]) end
    local made = predictions.new(run.kind, x, output, point, run.data)
    return run.clip and made:with_sample(run.clip(made:as "sample", point)) or made
  end)
  run.make_step = through(run, "advance", function(prediction, to)
    return run.solver:step(prediction, to, run, run.state[run.solver])
  end)
  for _, part in ipairs(run.parts) do run.state[part] = part.start and part:start(run) or {} end
  run.state[run.solver] = run.solver.start and run.solver:start(run) or {}
  return run
end

--- Whether there is anything to guide by.
function Run:has_condition() return next(self.condition) ~= nil end

--- The condition of a branch: "condition", "null" or a name of the option `branches`.
---@param name string
---@return table
function Run:branch(name)
  local found = self.branches[name]
  if found then return found end
  local known = { "condition", "null" }
  for key in pairs(self.branches) do
    if key ~= "condition" and key ~= "null" then known[#known + 1] = key end
  end
  table.sort(known)
  error(("Sampler: branch '%s': expected one of %s"):format(tostring(name), table.concat(known, ", ")), 0)
end

-- The conditions of several branches as one batch, made once for each combination.
local function joined_condition(self, names)
  if #names == 1 then return self:branch(names[1]) end
  local key = table.concat(names, "\0")
  if not self.joined[key] then
    local list = {}
    for i, name in ipairs(names) do list[i] = self:branch(name) end
    self.joined[key] = ty.keep(conditions.concat(list))
  end
  return self.joined[key]
end

--- Asks the network for several branches in one call. Returns their outputs by name. samples: positions of samples of
-- the batch, from 0, that x is cut to by this (all of it).
---@param x Tensor
---@param point Point
---@param names string[]
---@param samples? integer[]
---@return table<string, Tensor>
function Run:evaluate(x, point, names, samples)
  if samples then
    local index = ty.tensor(samples, { dtype = "i64", device = x.device })
    if #names ~= 1 then error("Run:evaluate: names: expected one where samples are given, got " .. #names, 2) end
    return { [names[1]] = self.call_network { x = x:index_select(0, index), point = point, branches = names,
      condition = conditions.select(self:branch(names[1]), index), samples = samples } }
  end
  local n, copies = x.shape[1], {}
  for i = 1, #names do copies[i] = x end
  local request = { x = #names > 1 and ty.concat(copies, 0) or x, point = point, branches = names,
    condition = joined_condition(self, names) }
  local y = self.call_network(request)
  if #names == 1 then return { [names[1]] = y } end
  local outputs = {}
  for i, name in ipairs(names) do outputs[name] = y:narrow(0, (i - 1) * n, n) end
  return outputs
end

--- The guided prediction for x at a point, through all parts.
---@return Prediction
function Run:predict(x, point) return self.make_prediction(x, point) end

--- x at the next point, through all parts.
---@param prediction Prediction
---@param to Point
---@return Tensor
function Run:advance(prediction, to) return self.make_step(prediction, to) end

--- Fresh standard noise like x: of the generator, or of the sampler's option `fresh`.
---@return Tensor
function Run:noise(x)
  self.draws = self.draws + 1
  return self.fresh and self.fresh(self.draws, x) or ty.randn_like(x)
end

return new
