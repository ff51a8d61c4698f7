--- Distribution matching: a generator of few steps whose samples, with noise on them, get the scores of a teacher. The
-- scores of the generator's own samples are those of a second network, trained on them all the while.
--
--     local matching = distill.DistributionMatching(flow, teacher, { divergence = "huber", guidance = 1.5 })
--     distill.fit(student, prompts, { loss = distill.matching_loss(matching, { shape = { 1, 8, 8 },
--       reward = reward, reward_scale = 0.1 }), steps = 300, average = 0.95 })
--
-- The divergences, by the difference y of the fake network's clean sample and the teacher's at a noised sample:
--
--     kl       y^T x0, y without gradients: Wang et al. 2023 (VSD); Luo et al. 2023, "Diff-Instruct"; Yin et al. 2024,
--              "One-step Diffusion with Distribution Matching Distillation" (DMD), whose weight each sample has
--     squares  and huber, |y|^2 and sqrt(|y|^2 + a^2) - a: -d'(y)^T (fake's clean sample - x0), with gradients through
--              the noised sample to both networks, whose gradient is that of the expected distance. Luo et al. 2024,
--              "One-Step Diffusion Distillation through Score Implicit Matching"
--
-- With a reward of the samples beside it, huber is Diff-Instruct* (Luo et al. 2024, "Diff-Instruct*: Towards
-- Human-Preferred One-step Text-to-image Generative Models"), kl Diff-Instruct++. Differences are those of clean
-- samples: scores times sigma^2 / alpha, which makes these the divergences of that weight at each time.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local predictions = require "tycho.diffusion.prediction"
local material = require "tycho.distill.material"
local new_teacher = require "tycho.distill.teacher"

local expect, fail, none = arguments.expect, arguments.fail, arguments.none

-- A number for each sample [n] that broadcasts to x.
local function column(t, x)
  local shape = { t.shape[1] }
  for i = 2, x.ndim do shape[i] = 1 end
  return t:reshape(shape)
end

--- Distribution matching of a generator's samples: see tycho.distill.dmd.
---@class DistributionMatching
---@field process Process
---@field real Teacher         the teacher
---@field fake Module          the network of the generator's own samples
---@field fake_samples integer what it was trained on so far, samples
local Matching = {}
Matching.__index = Matching
Matching.__name = "DistributionMatching"

local WHO = "DistributionMatching"
local kinds = { divergence = '"kl" or "squares" or "huber"', guidance = "a finite number", null = "a table",
  keep = "a table", a = "a finite number > 0", lr = "a finite number >= 0", updates = "an integer >= 0",
  times = "a pair of numbers in [0, 1]", augmentation = "a pair of numbers in [0, 1] or a function", fake = "a module" }

--- options: divergence ("kl"), guidance (1: the teacher's scale), null and keep (as of Sampler.sample), a (0.1 of the
-- root of the number of values of a sample: the a of huber), updates (2: steps of the fake network for each of the
-- generator's), lr (1e-3: its rate), times ({ 0.02, 0.98 }: between which shares of the way to noise noise is drawn),
-- split (false; true, of kl alone: what guidance adds is a part of its own with noise of its own, "Decoupled DMD", Liu
-- et al. 2025, as for Z-Image-Turbo), augmentation (times; of that noise, also a function of the generator's own time
-- [n]: the largest one, as the authors say in issue 78 of Tongyi-MAI/Z-Image, whose times run from noise), fake (a
-- clone of the teacher's network).
---@param process Process
---@param real Module|Teacher
---@param options? table
---@return DistributionMatching
local function new(process, real, options)
  if type(process) ~= "table" or type(process.objective) ~= "table" or type(process.schedule) ~= "table" then
    fail("%s: process: expected a process such as diffusion.Flow(), got %s", WHO, arguments.describe(process))
  end
  local o = arguments.read(WHO, options, { divergence = "kl", guidance = 1, null = none, keep = none, a = none,
    updates = 2, lr = 1e-3, times = { 0.02, 0.98 }, split = false, augmentation = none, fake = none }, kinds)
  if o.split and o.divergence ~= "kl" then
    fail('%s: split: expected the divergence "kl" with it, got "%s"', WHO, o.divergence)
  end
  for _, times in ipairs { o.times, type(o.augmentation) == "table" and o.augmentation or nil } do
    if times[1] > times[2] then
      fail("%s: times: expected the smaller one first, got %g and %g", WHO, times[1], times[2])
    end
  end
  local teacher = new_teacher(real)
  local self = setmetatable({ process = process, real = teacher, options = o, fake_samples = 0 }, Matching)
  self.fake = (o.fake or teacher.model:clone()):requires_grad_():train()
  local parameters = {}
  for _, p in ipairs(self.fake:parameters()) do
    if p.requires_grad and p:is_floating_point() then parameters[#parameters + 1] = p end
  end
  self.optimizer = ty.optim.AdamW(parameters, { lr = o.lr, beta2 = 0.99, weight_decay = 0, clip_norm = 1 })
  return self
end

-- x0 with noise at the share u [n] of the way.
local function noised(self, x0, u, noise)
  local schedule = self.process.schedule
  local t = schedule:from_unit(u)
  local alpha, sigma = schedule:coefficients(t)
  local point = { t = t, alpha = column(alpha, x0), sigma = column(sigma, x0) }
  point.x = schedule:mix(x0, noise, point.alpha, point.sigma)
  return point
end

-- The clean sample that a network sees at a point.
local function clean(self, model, point, condition)
  local objective = self.process.objective
  return predictions.convert(objective.predict, "sample", point.x, objective:output(model, point, condition),
    point.alpha, point.sigma, objective.data)
end

-- What the teacher sees with its condition, and, where it is guided, without.
local function both(self, point, condition, wanted)
  local o = self.options
  local model = self.real.model -- with gradients by x, which a Teacher does not give
  self.real.evaluations = self.real.evaluations + point.x.shape[1] * (wanted and 2 or 1)
  if not wanted then return clean(self, model, point, condition) end
  local null = conditions.null(self.real, condition, o.null, o.keep)
  local function twice(x) return ty.concat({ x, x }, 0) end
  local double = { x = twice(point.x), t = twice(point.t), alpha = twice(point.alpha), sigma = twice(point.sigma) }
  return clean(self, model, double, conditions.concat { condition, null }):chunk(2, 0)
end

-- The guided one, and the one with the condition alone.
local function guided(self, point, condition)
  local scale = self.options.guidance
  local given, free = both(self, point, condition, scale ~= 1)
  return free and free + (given - free) * scale or given, given
end

local function draw(times, x0, most)
  local u = ty.rand({ x0.shape[1] }, { device = x0.device, dtype = x0.dtype })
  return times[1] + ((most or times[2]) - times[1]) * u
end

-- The mean over samples of the sum over a sample's values.
local function total(x) return x:flatten(1):sum(1):mean() end

--- Trains the fake network on a generator's samples, `updates` steps. Returns the mean loss, nil without steps.
---@param x0 Tensor  [n, ...]
---@param condition? table
---@return number? loss
function Matching:refit(x0, condition)
  local who = "DistributionMatching:refit"
  expect(who, "x0", x0, "a tensor")
  expect(who, "condition", condition, "a table or nil")
  x0 = x0:detach()
  local sum, updates = 0.0, self.options.updates
  for _ = 1, updates do
    local loss = ty.enable_grad(function()
      return self.process.objective:loss(self.fake, x0, condition or {}, { t = self.process.schedule:from_unit(
        draw(self.options.times, x0)) })
    end)
    loss:backward()
    self.optimizer:step()
    self.optimizer:zero_grad()
    sum, self.fake_samples = sum + loss:item(), self.fake_samples + x0.shape[1]
  end
  return updates > 0 and sum / updates or nil
end

--- The loss of a generator's samples: its gradient is that of the divergence of their distribution, with noise on
-- them, from the teacher's. Gradients reach x0 alone. given: u ([n], shares of the way), noise (as x0), of the part of
-- guidance u_augmentation and noise_augmentation, drawn otherwise; time ([n]: shares at which the generator was asked,
-- for `augmentation`). Also returns its parts where it is split: { matching, augmentation }.
---@param x0 Tensor  [n, ...]
---@param condition? table
---@param given? table
---@return Tensor loss
---@return table<string, Tensor>? parts
function Matching:loss(x0, condition, given)
  local who = "DistributionMatching:loss"
  expect(who, "x0", x0, "a tensor")
  if x0.ndim == 0 then arguments.fail("%s: x0: expected [n, ...], got %s", who, arguments.describe(x0)) end
  expect(who, "condition", condition, "a table or nil")
  expect(who, "given", given, "a table or nil")
  condition, given = condition or {}, given or {}
  local o = self.options
  local u, noise = given.u or draw(o.times, x0), given.noise or ty.randn_like(x0)
  self.fake:requires_grad_(false)
  local done = table.pack(pcall(function()
    if o.divergence == "kl" then
      -- The size of what the teacher would change sets the weight, so that all times and samples count alike (DMD).
      local function weighed(y, ref)
        local size = (x0:detach() - ref):abs():flatten(1):mean(1) + 1e-6
        return y / column(size, x0)
      end
      if o.split then
        local y, z = ty.no_grad(function()
          local point = noised(self, x0, u, noise)
          local ref = both(self, point, condition)
          local most = type(o.augmentation) == "function" and given.time and o.augmentation(given.time) or nil
          local times = type(o.augmentation) == "table" and o.augmentation or o.times
          local other = noised(self, x0, given.u_augmentation or draw(times, x0, most),
            given.noise_augmentation or ty.randn_like(x0))
          local with, free = both(self, other, condition, true)
          return weighed(clean(self, self.fake, point, condition) - ref, ref),
            weighed((free - with) * (o.guidance - 1), with)
        end)
        local parts = { matching = total(y * x0), augmentation = total(z * x0) }
        return parts.matching + parts.augmentation, parts
      end
      local y = ty.no_grad(function()
        local point = noised(self, x0, u, noise)
        local ref, given_alone = guided(self, point, condition)
        return weighed(clean(self, self.fake, point, condition) - ref, given_alone)
      end)
      return total(y * x0)
    end
    local point = noised(self, x0, u, noise)
    local own, ref = clean(self, self.fake, point, condition), (guided(self, point, condition))
    local y = own - ref
    -- The noise of a noised sample is no function of the generator: of (score - that of the noising), times sigma^2 /
    -- alpha, what depends on it is the clean sample as seen, less x0.
    local slope
    if o.divergence == "squares" then
      slope = 2 * y
    else
      local values = x0:numel() // x0.shape[1]
      local a = o.a or 0.1 * math.sqrt(values)
      slope = y / (column(y:square():flatten(1):sum(1), x0) + a * a):sqrt()
    end
    return -total(slope * (own - x0))
  end))
  self.fake:requires_grad_(true)
  if not done[1] then error(done[2], 0) end
  return done[2], done[3]
end

-- ---- generators ----

--- A generator of one step or several: a function of (model, noise, condition) that returns a clean sample, with
-- gradients of its last call of the model alone, and the share of the way to noise at which that call was, [n]. Of
-- several steps, which call is the last is drawn for each batch; before it the model's own samples get fresh noise, as
-- solver.lcm { scaling = false } draws. Yin et al. 2024, "Improved Distribution Matching Distillation" (DMD2), section
-- 4.5. options: steps (1).
---@param process Process
---@param options? { steps?: integer }
---@return fun(model: Module, noise: Tensor, condition: table): Tensor, Tensor
local function generator(process, options)
  local who = "distill.generator"
  if type(process) ~= "table" or type(process.objective) ~= "table" or type(process.schedule) ~= "table" then
    fail("%s: process: expected a process such as diffusion.Flow(), got %s", who, arguments.describe(process))
  end
  local o = arguments.read(who, options, { steps = 1 }, { steps = "an integer >= 1" })
  local self = { process = process }
  return function(model, noise, condition)
    local n, where = noise.shape[1], { device = noise.device, dtype = noise.dtype }
    local last = o.steps == 1 and 1 or ty.randint(1, o.steps + 1, { 1 }):item()
    local x = noise
    for i = 1, last do
      local u = ty.full({ n }, (o.steps - i + 1) / o.steps, where)
      local point = noised(self, x, u, i == 1 and noise or ty.randn_like(noise))
      -- The first point is noise alone, whatever a schedule leaves of the sample there.
      if i == 1 then point.x = noise end
      if i == last then return clean(self, model, point, condition or {}), u end
      x = ty.no_grad(clean, self, model, point, condition or {})
    end
  end
end

--- The loss of distribution matching for distill.fit, on batches { condition.*, noise (or it is drawn) }: the fake
-- network is trained on what the generator draws, then the generator by the divergence, less `reward_scale` times the
-- mean reward of its samples. options: shape (of a sample, where batches have no noise), generate (a
-- distill.generator; of one step), reward (a function of samples and condition that returns a number for each, [n], or
-- a mean), reward_scale (1), divergence (true; false: the reward alone).
---@param matching DistributionMatching
---@param options? table
---@return fun(parts: DistillParts, batch: table): Tensor loss, table<string, Tensor> values
local function loss(matching, options)
  local who = "distill.matching_loss"
  if getmetatable(matching) ~= Matching then
    fail("%s: matching: expected a DistributionMatching, got %s", who, arguments.describe(matching))
  end
  local o = arguments.read(who, options, { shape = none, generate = none, reward = none, reward_scale = 1,
    divergence = true }, { shape = "a list of integers >= 1", generate = "a function", reward = "a function",
    reward_scale = "a finite number" })
  if not (o.divergence or o.reward) then fail("%s: reward: expected a function without a divergence, got nil", who) end
  local generate = o.generate or generator(matching.process)
  return function(parts, batch)
    expect(who, "batch", batch, "a table")
    local condition, noise = material.condition(batch), batch.noise
    if not noise then
      if not o.shape then fail("%s: shape: expected that of a sample, where batches have no noise; got nil", who) end
      local entry = conditions.tensors(condition)[1]
      if not entry then fail("%s: batch: expected noise or a condition, got neither", who) end
      noise = ty.randn({ entry[2].shape[1], table.unpack(o.shape) }, { device = entry[2].device })
    end
    local x0, u = generate(parts.student, noise, condition)
    local value, values = nil, {}
    if o.divergence then
      values.fake = matching:refit(x0, condition)
      value = matching:loss(x0, condition, { time = u })
    end
    if o.reward and o.reward_scale ~= 0 then
      values.reward = o.reward(x0, condition):mean()
      local gain = values.reward * -o.reward_scale
      value = value and value + gain or gain
    end
    return value, values
  end
end

return { DistributionMatching = new, generator = generator, loss = loss, class = Matching }
