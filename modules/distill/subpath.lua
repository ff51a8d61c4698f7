--- Consistency distillation, and its extension to straight lines between the points of the teacher's path. Xu et al.
-- 2024, "Accelerating Image Generation with Sub-path Linear Approximation Model" (SLAM), with details of the authors'
-- code; without the lines: Song et al. 2023, "Consistency Models", and Luo et al. 2023, "Latent Consistency Models".
--
--     local student = distill.SubpathStudent(model:clone():requires_grad_())
--     local loss = distill.subpath_loss(flow, { grid = 16, guidance = 1.5 })
--     distill.fit(student, loader, { teacher = model, loss = loss, average = 0.95, steps = 400 })
--     local solver = diffusion.solver.lcm { scaling = false }
--     local drawn = flow:sample(student, shape, { condition = condition, steps = 4, solver = solver })
--
-- The teacher's guided solver leads a noised sample from x_t to x_s, one part of the path further. A consistency model
-- is asked at x_t for what its average says at x_s. SLAM asks it on the line between the two,
--
--     x_gamma = (1 - gamma) (alpha_t / alpha_s) x_s + gamma x_t
--
-- which takes from x_t only noise: the nearer to gamma = 0, the less the error of the long jump. The student is told
-- gamma besides the time; gamma = 1, which says nothing, is how it is sampled, and the consistency model's loss.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local embedder_of = require "tycho.diffusion.embedder"
local predictions = require "tycho.diffusion.prediction"
local material = require "tycho.distill.material"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none

-- ---- a student that is told gamma ----

local told = nn.surgery.wrapper { name = "Subpath", field = "_subpath", forward = function(base)
  return function(self, ...)
    local y = base.forward(self, ...)
    local more = self._subpath.embedded
    return more and y + more:to(y.dtype) or y
  end
end }

-- What 1 - gamma adds to the embedded time. Sines without biases: nothing at gamma = 1, whatever the weights are.
local Gamma = nn.module "SubpathGamma"

function Gamma:init(waves, width, outputs)
  local steps = {}
  for i = 1, waves do steps[i] = 0.5 * 2 ^ (4 * (i - 1) / math.max(1, waves - 1)) end
  self:buffer("frequencies", ty.tensor(steps), { persistent = false })
  self.fc1, self.fc2 = nn.Linear(waves, width, { bias = false }), nn.Linear(width, outputs, { bias = false })
  nn.init.zeros(self.fc2.weight)
end

function Gamma:forward(gamma) return self.fc2(self.fc1(((1 - gamma):unsqueeze(1) * self.frequencies):sin()):silu()) end

---@class SubpathStudent: Module
---@field network Module
---@field null_label? integer
local SubpathStudent = nn.module "SubpathStudent"

--- A network that is told gamma besides its time, by what is added to its embedded time: 0 at the start, and always
-- where gamma = 1. It is called as the network is, with condition.gamma [n] where it is not 1. options: embedder (the
-- name of the module that embeds the time; known for the networks of tycho.models), waves (16), width (64: of the added
-- part's hidden layer).
---@param network Module
---@param options? { embedder?: string, waves?: integer, width?: integer }
function SubpathStudent:init(network, options)
  local who = "SubpathStudent"
  expect(who, "network", network, "a module")
  local o = arguments.read(who, options, { embedder = none, waves = 16, width = 64 }, { embedder = "a string",
    waves = "an integer >= 1", width = "an integer >= 1" })
  local embedder, outputs = embedder_of(who, network, o.embedder)
  self.network, self.null_label = network, network.null_label
  self.gamma = Gamma(o.waves, o.width, outputs):to(network:device())
  self.state = told:state(told:wrap(embedder, {}))
end

--- What the network says at x, t [n] and condition.gamma [n] (1 where there is none).
---@param x Tensor
---@param t Tensor
---@param condition? table
---@return Tensor
function SubpathStudent:forward(x, t, condition)
  expect("SubpathStudent", "x", x, "a tensor")
  expect("SubpathStudent", "condition", condition, "a table or nil")
  local rest = {}
  for key, value in pairs(condition or {}) do
    if key ~= "gamma" then rest[key] = value end
  end
  local gamma = condition and condition.gamma
  if gamma == nil then return self.network(x, t, rest) end
  self.state.embedded = self.gamma(expect("SubpathStudent", "condition.gamma", gamma, "a tensor"):to(x.dtype))
  local result = table.pack(pcall(self.network, x, t, rest))
  self.state.embedded = nil
  if not result[1] then error(result[2], 0) end
  return result[2]
end

--- Takes gamma away again; the network is a plain one, and draws as the student did.
---@return Module network
function SubpathStudent:unwrap()
  for _, layer in ipairs(told:wrapped("SubpathStudent:unwrap", self.network)) do told:unwrap(layer.module) end
  return self.network
end

-- ---- the loss ----

-- A number for each sample [n] that broadcasts to x.
local function column(t, x)
  local shape = { t.shape[1] }
  for i = 2, x.ndim do shape[i] = 1 end
  return t:reshape(shape)
end

--- The pseudo-Huber distance sqrt(d^2 + c^2) - c of each number, and the mean over all: squares near 0, absolute
-- values far from it.
---@param a Tensor
---@param b Tensor
---@param c? number  (1e-3)
---@return Tensor
local function huber(a, b, c)
  expect("distill.huber", "a", a, "a tensor")
  expect("distill.huber", "b", b, "a tensor")
  c = expect("distill.huber", "c", c, "a finite number > 0 or nil") or 1e-3
  return (((a - b):square() + c * c):sqrt() - c):mean()
end

--- A point between two of a path, at gamma [n, 1 ...] or a number: the line (1 - gamma) (alpha_t / alpha_s) x_s + gamma
-- x_t, and the noise in it. from, to: { x, alpha, sigma } of x_t and of x_s, which is cleaner. noise: "path": both have
-- the same noise, as the two ends of a step of a solver, (1 - gamma) (alpha_t / alpha_s) sigma_s + gamma sigma_t;
-- "variance": what x_t has more is noise of its own, as the authors' code has it.
---@param from table
---@param to table
---@param gamma number|Tensor
---@param noise? string  ("variance")
---@return Tensor x
---@return Tensor|number sigma
local function subpath(from, to, gamma, noise)
  local who = "distill.subpath"
  expect(who, "from", from, "a table")
  expect(who, "from.x", from.x, "a tensor")
  expect(who, "to", to, "a table")
  expect(who, "to.x", to.x, "a tensor")
  expect(who, "gamma", gamma, "a number or a tensor")
  noise = expect(who, "noise", noise, '"path" or "variance" or nil') or "variance"
  for _, name in ipairs { "alpha", "sigma" } do
    expect(who, "from." .. name, from[name], "a number or a tensor")
    expect(who, "to." .. name, to[name], "a number or a tensor")
  end
  local ratio = from.alpha / to.alpha
  local x = (1 - gamma) * ratio * to.x + gamma * from.x
  if noise == "path" then return x, (1 - gamma) * ratio * to.sigma + gamma * from.sigma end
  local kept, all = (ratio * to.sigma) ^ 2, from.sigma ^ 2
  local power = kept + gamma ^ 2 * (all - kept)
  return x, ty.is_tensor(power) and power:sqrt() or math.sqrt(power)
end

local kinds = { grid = "an integer >= 1", inner = "an integer >= 1", guidance = "a finite number", null = "a table",
  keep = "a table", lines = "a boolean", noise = '"path" or "variance"', distance = "a function",
  gamma = "a number in [0, 1] or a tensor", index = "a tensor" }

--- The loss of SLAM for distill.fit, with a teacher and an average, on batches of clean samples, { sample [n, ...],
-- condition.* }: the distance of what the student says on the line between x_t and x_s to what its average says at x_s.
-- options: grid (16: parts of the path; its points are the t), inner (1: steps of the teacher's solver, DDIM's, in a
-- part), guidance (1: scale of the teacher's), null and keep (as of Sampler.sample), lines (true; false: gamma = 1
-- always, which is consistency distillation), noise ("variance"; "path": see distill.subpath), distance (a function of
-- two tensors; distill.huber). Not drawn where given, for tests: gamma, index (the t, i64 [n] from 1 to grid), and
-- batch.noise.
---@param process Process
---@param options? table
---@return fun(parts: DistillParts, batch: table): Tensor
local function loss(process, options)
  local who = "distill.subpath_loss"
  if type(process) ~= "table" or type(process.objective) ~= "table" or type(process.schedule) ~= "table" then
    fail("%s: process: expected a process such as diffusion.Flow(), got %s", who, arguments.describe(process))
  end
  local o = arguments.read(who, options, { grid = 16, inner = 1, guidance = 1, null = none, keep = none, lines = true,
    noise = "variance", distance = huber, gamma = none, index = none }, kinds)
  local objective, schedule = process.objective, process.schedule

  -- The clean sample that a network sees at a point { x, t, alpha, sigma }, and what it said itself.
  local function clean(model, point, condition)
    local y = objective:output(model, point, condition)
    return predictions.convert(objective.predict, "sample", point.x, y, point.alpha, point.sigma, objective.data)
  end

  local function place(x, t)
    local alpha, sigma = schedule:coefficients(t)
    return { x = x, t = t, alpha = column(alpha, x), sigma = column(sigma, x) }
  end

  local function guided(teacher, point, condition)
    if o.guidance == 1 then return clean(teacher, point, condition) end
    local null = conditions.null(teacher, condition, o.null, o.keep)
    local function twice(x) return ty.concat({ x, x }, 0) end
    local both = { x = twice(point.x), t = twice(point.t), alpha = twice(point.alpha), sigma = twice(point.sigma) }
    local given, free = clean(teacher, both, conditions.concat { condition, null }):chunk(2, 0)
    return free + (given - free) * o.guidance
  end

  return function(parts, batch)
    expect(who, "batch", batch, "a table")
    local x0 = expect(who, "batch.sample", batch.sample, "a tensor")
    if not parts.teacher then fail("%s: teacher: expected the option teacher of distill.fit, got none", who) end
    if not parts.average then fail("%s: average: expected the option average of distill.fit, got none", who) end
    local condition, n = material.condition(batch), x0.shape[1]
    local index = o.index or ty.randint(1, o.grid + 1, { n }, { device = x0.device })
    local u = index:to(x0.dtype) / o.grid
    local from = place(x0, schedule:from_unit(u))
    from.x = schedule:mix(x0, batch.noise or ty.randn_like(x0), from.alpha, from.sigma)

    local to, target = ty.no_grad(function()
      local point = from
      for i = 1, o.inner do
        local x = guided(parts.teacher, point, condition)
        local e = (point.x - x * point.alpha) / point.sigma
        local next_point = place(point.x, schedule:from_unit(u - i / (o.inner * o.grid)))
        next_point.x = schedule:mix(x, e, next_point.alpha, next_point.sigma)
        point = next_point
      end
      return point, clean(parts.average, point, condition)
    end)

    local gamma = o.lines and (o.gamma or 1 - ty.rand({ n }, { device = x0.device })) or 1
    if gamma == 1 then return o.distance(clean(parts.student, from, condition), target) end
    if not ty.is_tensor(gamma) then gamma = ty.full({ n }, gamma, { device = x0.device, dtype = x0.dtype }) end
    local line = { t = from.t, alpha = from.alpha }
    line.x, line.sigma = subpath(from, to, column(gamma, x0), o.noise)
    if objective.predict == "flow" then
      -- Points of a flow have signal and noise that sum to 1: the line becomes the straight one from x_s to x_t, which
      -- has an end also where x_t is noise alone.
      local size = line.alpha + line.sigma
      line.x, line.alpha, line.sigma = line.x / size, line.alpha / size, line.sigma / size
    end
    local given = {}
    for key, value in pairs(condition) do given[key] = value end
    given.gamma = gamma
    return o.distance(clean(parts.student, line, given), target)
  end
end

return { SubpathStudent = SubpathStudent, subpath = subpath, huber = huber, loss = loss }
