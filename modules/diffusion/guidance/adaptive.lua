--- Guidance that ends by itself: Castillo et al. 2023, "Adaptive Guidance: Training-free Acceleration of Conditional
-- Diffusion Models". While a picture is drawn, what is predicted with and without the condition becomes the same: the
-- cosine between the two predictions rises towards 1, and then guidance changes nothing but costs an evaluation.
-- Predictions are compared as the network makes them, which is noise in the paper, or as the clean samples that follow.
-- The latter suit a network of velocities: these go on differing to the end, by what no longer moves the picture, and
-- the noise that follows from them is the sample itself where there is no signal yet, so that its cosine begins at 1.
--
--     diffusion.Sampler { ..., guidance = diffusion.guidance.adaptive { scale = 4, threshold = 0.99 } }
--
-- LinearAG goes on where the two still differ: in some steps the null prediction is not asked for but made of earlier
-- predictions by a linear form that was fitted once on recorded runs.
--
--     local record = diffusion.guidance.recorder { scale = 4 }
--     sampler_with(record):sample(...)                       -- once, with other noise and prompts
--     local forms = record:fit { 3, 5, 7 }
--     diffusion.guidance.linear { scale = 4, forms = forms }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local predictions = require "tycho.diffusion.prediction"

local fail = arguments.fail
local M = {}

-- ---- AG ----

local Adaptive = {}
Adaptive.__index = Adaptive

--- Classifier-free guidance that ends for each sample at the first step in which the cosine of the predictions of
-- its two branches is at least `threshold`; the later steps take the conditional prediction alone (section 5 of the
-- paper). options: scale (1), threshold (0.991; above 1 guidance never ends), of ("output": the cosine of what the
-- network says; "sample": of the clean samples that follow).
---@param options? { scale?: number, threshold?: number, of?: string }
function M.adaptive(options)
  local self = ty.nn.options("guidance.adaptive", options, { scale = 1, threshold = 0.991, of = "output" },
    { of = '"output" or "sample"' })
  return setmetatable(self, Adaptive)
end

-- Cosine of each sample's two predictions, a list of numbers.
local function cosines(a, b)
  return ty.nn.cosine_similarity(a:flatten(1), b:flatten(1)):tolist()
end

function Adaptive:guide(run, x, point)
  if self.scale == 1 or not run:has_condition() then return run:evaluate(x, point, { "condition" }).condition end
  local n = x.shape[1]
  local state = run.state[self]
  if not state then
    state = { guided = {}, cosines = {}, ended = {} }
    for i = 1, n do state.guided[i] = i - 1 end
    run.state[self] = state
  end
  local guided, outputs = state.guided
  if #guided == 0 then return run:evaluate(x, point, { "condition" }).condition end
  local index
  if #guided == n then
    outputs = run:evaluate(x, point, { "condition", "null" })
  else
    outputs = run:evaluate(x, point, { "condition" })
    outputs.null = run:evaluate(x, point, { "null" }, guided).null
    index = ty.tensor(guided, { dtype = "i64", device = x.device })
  end
  local condition = index and outputs.condition:index_select(0, index) or outputs.condition
  local function seen(output)
    if self.of == "output" then return output end
    local state_of = index and x:index_select(0, index) or x
    return predictions.convert(run.kind, "sample", state_of, output, point.alpha, point.sigma, run.data)
  end
  local likeness = cosines(seen(condition), seen(outputs.null))
  local going_on = {}
  for i, sample in ipairs(guided) do
    state.cosines[sample + 1] = state.cosines[sample + 1] or {}
    table.insert(state.cosines[sample + 1], likeness[i])
    -- Guidance is still applied in the step in which its end is found: both were asked for.
    if likeness[i] < self.threshold then
      going_on[#going_on + 1] = sample
    else
      state.ended[sample + 1] = run.step
    end
  end
  state.guided = going_on
  local y = outputs.null + (condition - outputs.null) * self.scale
  return index and outputs.condition:index_copy(0, index, y) or y
end

--- What a run with a guidance of this kind noted: for each sample the cosines of its guided steps, and the last of
-- these (nil where guidance never ended).
---@param guidance table
---@param run Run
---@return number[][] cosines
---@return integer[] ended
function M.trace(guidance, run)
  local state = type(run) == "table" and type(run.state) == "table" and run.state[guidance]
  if not state or not state.cosines then
    fail("guidance.trace: run: expected a run of a sampler with this guidance, got another")
  end
  return state.cosines, state.ended
end

-- ---- LinearAG ----

local Recorder = {}
Recorder.__index = Recorder

--- Classifier-free guidance that keeps the predictions of both branches, for LinearAG's fit. options: scale (1).
---@param options? { scale?: number }
function M.recorder(options)
  local self = ty.nn.options("guidance.recorder", options, { scale = 1 })
  self.runs = {}
  return setmetatable(self, Recorder)
end

function Recorder:guide(run, x, point)
  local outputs = run:evaluate(x, point, { "condition", "null" })
  local state = run.state[self]
  if not state then
    state = { condition = {}, null = {} }
    run.state[self] = state
    table.insert(self.runs, state)
  end
  state.condition[run.step] = ty.keep(outputs.condition:clone())
  state.null[run.step] = ty.keep(outputs.null:clone())
  return outputs.null + (outputs.condition - outputs.null) * self.scale
end

-- One number for each column: least squares in f64, with a ridge of 1e-9 of the mean square, for columns of near
-- steps are almost the same.
local function least_squares(columns, target)
  local x = ty.stack(columns, 1)
  local gram = x:t():matmul(x)
  local ridge = gram:diagonal():mean():item() * 1e-9
  gram = gram + ty.eye(#columns, { dtype = "f64" }) * ridge
  return gram:solve(x:t():matmul(target)):tolist()
end

--- Linear forms for the steps in `replaced`, in which LinearAG does not ask for the null prediction: of the conditional
-- ones so far and of the null ones before, each with a number (section 6 of the paper). A null prediction that was
-- replaced stands in the later forms as it was estimated.
---@param replaced integer[]  steps, from 1; not the first
---@return table<integer, { condition: table<integer, number>, null: table<integer, number> }> forms
function Recorder:fit(replaced)
  local who = "guidance.recorder: fit"
  arguments.expect(who, "replaced", replaced, "a list of integers")
  if #self.runs == 0 then fail("%s: expected a sampler to have run with this guidance, got no run", who) end
  local steps = #self.runs[1].condition
  local forms = {}
  local order = table.move(replaced, 1, #replaced, 1, {})
  table.sort(order)
  local function flat(branch, step)
    local list = {}
    for r, state in ipairs(self.runs) do list[r] = state[branch][step]:flatten():to "f64" end
    return #list == 1 and list[1] or ty.concat(list, 0)
  end
  local condition, null = {}, {}
  for step = 1, steps do
    condition[step] = flat("condition", step)
    null[step] = flat("null", step)
  end
  for _, step in ipairs(order) do
    if math.type(step) ~= "integer" or step < 2 or step > steps then
      fail("%s: replaced: expected steps from 2 to %d, got %s", who, steps, tostring(step))
    end
    local columns, names = {}, {}
    for i = 1, step do
      columns[#columns + 1], names[#names + 1] = condition[i], { "condition", i }
      if i < step then columns[#columns + 1], names[#names + 1] = null[i], { "null", i } end
    end
    local weights, form = least_squares(columns, null[step]), { condition = {}, null = {} }
    local estimate = ty.zeros_like(null[step])
    for i, name in ipairs(names) do
      form[name[1]][name[2]] = weights[i]
      estimate = estimate + columns[i] * weights[i]
    end
    forms[step], null[step] = form, estimate
  end
  return forms
end

local Linear = {}
Linear.__index = Linear

--- Classifier-free guidance in which the null predictions of some steps are estimated: LinearAG. The sampler's steps
-- must be those of the recorded runs. options: scale (1), forms (what a recorder's fit() gives), threshold (2: none;
-- below 1 guidance ends as that of adaptive() does, but for the whole batch: by the least of its cosines).
---@param options { scale?: number, forms: table, threshold?: number }
function M.linear(options)
  local self = ty.nn.options("guidance.linear", options, { scale = 1, forms = ty.nn.none, threshold = 2 },
    { forms = "a table" })
  if not self.forms then error("guidance.linear: forms: expected what a recorder's fit() gives, got nil", 2) end
  return setmetatable(self, Linear)
end

function Linear:guide(run, x, point)
  if self.scale == 1 or not run:has_condition() then return run:evaluate(x, point, { "condition" }).condition end
  local state = run.state[self] or { condition = {}, null = {} }
  run.state[self] = state
  if state.ended then return run:evaluate(x, point, { "condition" }).condition end
  local step = run.step
  local form, outputs = self.forms[step]
  if form then
    outputs = run:evaluate(x, point, { "condition" })
    state.condition[step] = ty.keep(outputs.condition:clone())
    local estimate
    for _, branch in ipairs { "condition", "null" } do
      for i, weight in pairs(form[branch]) do
        local term = state[branch][i] * weight
        estimate = estimate and estimate + term or term
      end
    end
    state.null[step] = ty.keep(estimate)
    outputs.null = estimate
  else
    outputs = run:evaluate(x, point, { "condition", "null" })
    state.condition[step] = ty.keep(outputs.condition:clone())
    state.null[step] = ty.keep(outputs.null:clone())
    if self.threshold < 1 then
      local least = math.min(table.unpack(cosines(state.condition[step], state.null[step])))
      state.ended = least >= self.threshold
    end
  end
  return outputs.null + (outputs.condition - outputs.null) * self.scale
end

return M
