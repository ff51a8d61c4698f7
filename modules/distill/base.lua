--- What a recipe of distillation begins with, under one name: a flow that draws, what it is told, and how its samples
-- are judged. "digits" and "checkerboard" are trained in half a minute where there are none; others are painters of the
-- zoo, such as "scene-dit".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local diffusion = require "tycho.diffusion"
local digits = require "tycho.distill.digits"
local points = require "tycho.distill.points"

local expect, fail = arguments.expect, arguments.fail
local WHO = "distill.base"

--- What is asked of a base, with the noise to begin with.
---@class DistillPrompts
---@field split string
---@field condition table
---@field noise Tensor  [n, ...]

---@class DistillBase
---@field name string
---@field model Module
---@field flow Process
---@field shape integer[]    of a sample
---@field null? table        the condition for nothing, where the model does not say so
---@field guidance number    scale that it draws with
---@field decode? fun(x: Tensor): Tensor  pictures of samples, where they are any
---@field device string      where the model, prompts and samples are
---@field prompts fun(split: string, first: integer, count: integer, seed: integer): DistillPrompts
---@field samples? fun(count: integer): Tensor, table  of the digits: some to train on, by chance, and their conditions
---@field distance fun(x: Tensor, prompts: DistillPrompts): number  Fréchet, to held-out pictures of the split (of
---  points the share that would have to move)
---@field asked? fun(x: Tensor, prompts: DistillPrompts): number    share in which is found what was asked for

local function noise_of(shape, count, seed, device)
  return ty.data.with_seed(seed, function() return ty.randn({ count, table.unpack(shape) }, { device = device }) end)
end

-- Labels in turn; of the held-out digits there is only one split.
local function of_digits(folder, o)
  local model, flow = digits.base(folder, { network = o.network, seed = o.seed, steps = o.steps, width = o.width,
    device = o.device })
  local judge, shape = digits.judge(folder, { steps = o.judge_steps }), { 1, 8, 8 }
  local there = { device = o.device }
  return { model = model, flow = flow, shape = shape, guidance = 1.5, device = o.device,
    decode = function(x) return x:clamp(-1, 1) end,
    prompts = function(split, first, count, seed)
      return { split = split, condition = { labels = ty.arange(first, first + count, 1, there) % 10 },
        noise = noise_of(shape, count, seed, o.device) }
    end,
    samples = function(count)
      local training = digits.data()
      expect("DistillBase.samples", "count", count, ("an integer in [1, %d]"):format(#training))
      local batch = training:batch(ty.randperm(#training):narrow(0, 0, count))
      return batch.image:to(there), { labels = batch.label:to(there) }
    end,
    distance = function(x) return judge:frechet(x) end,
    asked = function(x, prompts) return judge:recognised(x, prompts.condition.labels) end }
end

-- Points of a board; there is nothing to ask for, and every split is drawn anew.
local function of_points(folder, o)
  local model, flow = points.base(folder, { seed = o.seed, steps = o.steps, width = o.width,
    device = o.device })
  return { model = model, flow = flow, shape = { 2 }, guidance = 1, device = o.device,
    distance = points.off_board,
    prompts = function(split, _, count, seed)
      return { split = split, condition = {}, noise = noise_of({ 2 }, count, seed, o.device) }
    end }
end

local function of_painter(painter, device)
  local yardstick = require "tycho.zoo.yardstick" { model = painter, device = device }
  painter = yardstick.painter
  if painter.process.objective.predict ~= "flow" then
    fail("%s: name: expected a painter that predicts velocities, got one that predicts %s", WHO,
      painter.process.objective.predict)
  end
  local rows, columns = painter:default_size()
  local shape = { painter.network.config.in_channels, rows, columns }
  return { model = painter.network, flow = painter.process, shape = shape, guidance = 4, null = yardstick.null,
    device = painter:device(),
    decode = function(x) return yardstick:decode(x) end,
    prompts = function(split, first, count, seed)
      local prompts = yardstick:prompts(split, first, count, seed)
      prompts.noise = noise_of(shape, count, seed, painter:device())
      return prompts
    end,
    distance = function(x, prompts) return yardstick:frechet(yardstick:decode(x), prompts.split) end,
    asked = function(x, prompts) return yardstick:asked(yardstick:decode(x), prompts).object end }
end

--- A base by name: "digits", "checkerboard", or a painter of the zoo (or a TextToImage) that predicts velocities.
-- folder: where models and judge of the first two are kept. Their options: seed (0), steps (700), width (the network's
-- own); network ("dit" or "mlp") and judge_steps (300) of the digits. device ("cpu"; of a TextToImage its own).
---@param name string|TextToImage
---@param folder string
---@param options? { network?: string, seed?: integer, steps?: integer, width?: integer, judge_steps?: integer,
---  device?: string }
---@return DistillBase
local function base(name, folder, options)
  expect(WHO, "name", name, "a string or a table")
  expect(WHO, "folder", folder, "a string")
  local o = arguments.read(WHO, options, { network = "dit", seed = 0, steps = 700, width = arguments.none,
    judge_steps = 300, device = "cpu" }, { network = '"dit" or "mlp"', seed = "an integer", steps = "an integer >= 1",
    width = "an integer >= 1", judge_steps = "an integer >= 1" })
  local made = name == "digits" and of_digits(folder, o) or name == "checkerboard" and of_points(folder, o)
    or of_painter(name, o.device)
  made.name = type(name) == "string" and name or "painter"
  return made
end

--- The sampler of a base's process with classifier-free guidance of a scale (its own), Heun's in so many steps.
---@param made DistillBase
---@param steps integer
---@param guidance? number
---@param solver? table
---@return Sampler
local function sampler(made, steps, guidance, solver)
  expect("distill.sampler", "base", made, "a table")
  expect("distill.sampler", "base.flow", made.flow, "a table")
  expect("distill.sampler", "steps", steps, "an integer >= 1")
  expect("distill.sampler", "guidance", guidance, "a finite number or nil")
  return made.flow:sampler { steps = steps, guidance = guidance or made.guidance,
    solver = solver or diffusion.solver.heun() }
end

--- A base's velocity under classifier-free guidance of a scale (its own) as a network: to measure the paths that its
-- sampler follows.
---@param made DistillBase
---@param scale? number
---@return fun(x: Tensor, t: Tensor, condition: table): Tensor
local function guided(made, scale)
  expect("distill.guided", "base", made, "a table")
  expect("distill.guided", "base.model", made.model, "a module")
  scale = expect("distill.guided", "scale", scale, "a finite number or nil") or made.guidance
  if scale == 1 then return made.model end
  return function(x, t, condition)
    local free = made.model(x, t, diffusion.condition.null(made.model, condition, made.null))
    return free + (made.model(x, t, condition) - free) * scale
  end
end

return { base = base, sampler = sampler, guided = guided }
