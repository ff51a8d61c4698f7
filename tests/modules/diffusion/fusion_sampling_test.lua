-- Fusion sampling and the words of pictures: what a fusion leaves as it was, plain guidance as a case of it, gradients.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, models, zoo = require "tycho.diffusion", require "tycho.models", require "tycho.zoo"

local fusion_sampling, picture_words = diffusion.fusion_sampling, diffusion.picture_words

-- A network that says the exact noise, or velocity, for a world with one picture.
local function point_mass(x0, schedule)
  return function(x, t)
    local flow = schedule.frame == "flow"
    local alpha, sigma = schedule:coefficients(flow and t / 1000 or t:to "i64")
    local shape = { x.shape[1], 1, 1, 1 }
    local noise = (x - x0 * alpha:reshape(shape)) / sigma:reshape(shape)
    return flow and noise - x0 or noise
  end
end

local schedules = { discrete = diffusion.schedule.discrete { betas = "cosine" }, flow = diffusion.schedule.flow() }

for name, schedule in pairs(schedules) do
  check.test(name .. ": with exact noise a fusion keeps mean and variance", function()
    ty.manual_seed(1)
    local x0 = ty.randn { 1, 1, 4, 4 }
    local inside, fresh = {}, {}
    local part = fusion_sampling.fusion { times = 1, scale = 1 }
    local probe = { predict = function(_, run, next, x, point)
      inside[#inside + 1] = { x = ty.keep(x:clone()), point = point, to = run.points[run.step + 1] }
      return next(x, point)
    end }
    local before = { predict = function(_, _, next, x, point)
      fresh[#fresh + 1] = { x = ty.keep(x:clone()) }
      return next(x, point)
    end }
    local sampler = diffusion.Sampler { schedule = schedule, steps = 5, parts = { before, part, probe },
      predict = schedule.frame == "flow" and "flow" or "epsilon" }
    local drawn = {}
    local condition = { a = ty.zeros(2) }
    sampler:sample(point_mass(x0, schedule), { 2, 1, 4, 4 }, { condition = condition, null = { a = 0 },
      branches = { fusion = condition }, fresh = function(_, like)
        drawn[#drawn + 1] = ty.keep(ty.randn_like(like))
        return drawn[#drawn]
      end })
    check.equal(#drawn, 5)
    for i = 2, #inside do
      local point, z = inside[i].point, drawn[i]
      local s = fusion_sampling.share(1, point, inside[i].to)
      check.ok(s > 0 and s <= 1)
      local old = (fresh[i].x - x0 * point.alpha) / point.sigma
      -- x0's part is as large as before, and of old and fresh noise there is as much as of the old alone.
      local wanted = x0 * point.alpha + (old * (1 - s) + z * (s * (2 - s)) ^ 0.5) * point.sigma
      check.ok((inside[i].x - wanted):abs():max():item() < 2e-5, ("step %d"):format(i))
      check.close((1 - s) ^ 2 + s * (2 - s), 1, 1e-12)
    end
  end)
end

check.test("the share is that of the paper, sigma_t^2 / (1 - abar of the next)", function()
  local schedule = schedules.discrete
  local from, to = schedule:point(700), schedule:point(600)
  local a, b = from.alpha ^ 2, to.alpha ^ 2
  local variance = (1 - b) / (1 - a) * (1 - a / b) -- DDIM's sigma^2 with eta = 1
  check.close(fusion_sampling.share(1, from, to), variance / (1 - b), 1e-6)
  check.close(fusion_sampling.share(0.5, from, to), 0.25 * variance / (1 - b), 1e-6)
  check.equal(fusion_sampling.share(0, from, to), 0)
end)

ty.manual_seed(3)
local painter = zoo.canvas.painter { widths = { 8, 16 }, text = 16 }
ty.no_grad(function()
  for _, p in painter.network:named_parameters() do p:add_(ty.randn_like(p) * 0.1) end
end)
local promptnet = models.PromptNet { in_channels = 48, channels = { 16, 16 }, width = 16 }
local told = picture_words.new(painter, promptnet, { token = "<toy>" })
local picture = ty.randint(0, 256, { 3, 32, 32 }):to "u8"
local prompts, plain = { "a neon <toy> on a blue ground", "a <toy>" }, { "a neon fish on a blue ground", "a fish" }

check.test("no fusion and no reference is classifier-free guidance", function()
  local x0 = told:paint(picture, prompts, { steps = 3, s1 = 2 })
  local other = told:paint(picture, prompts, { steps = 3, s1 = 2, reference = plain, times = 0, s2 = 0 })
  check.ok(x0:eq(other):all():item())
  local latents = painter:encode(picture:unsqueeze(0))
  local tokens, empty = painter:tokens(prompts), painter:tokens { "", "" }
  local function told_of(t)
    return { tokens = t, picture = latents:expand(2, 48, 8, 8), scale = ty.ones(2) }
  end
  local x = painter.process:sampler { steps = 3, guidance = 2 }:sample(told.network, { 2, 48, 8, 8 }, {
    condition = told_of(tokens), null = told_of(empty), seeds = { 0, 1 } })
  check.ok(painter:decode(x):eq(x0):all():item())
  check.ok(not told:paint(picture, prompts, { steps = 3, s1 = 2, times = 1 }):eq(x0):all():item(), "fusion acts")
  check.ok(not told:paint(picture, prompts, { steps = 3, s1 = 2, s2 = 1, reference = plain }):eq(x0):all():item())
end)

check.test("a prompt without the word is drawn as the painter draws it", function()
  local x, t = ty.randn(2, 48, 8, 8), ty.tensor { 300.0, 700.0 }
  local tokens = painter:tokens(plain)
  local y = told.network(x, t, { tokens = tokens, picture = ty.randn(2, 48, 8, 8), scale = ty.ones(2) })
  check.ok((y - painter.network(x, t, painter:condition(plain))):abs():max():item() < 1e-6)
end)

check.test("words begin about as long as those that the text encoder knows", function()
  local fresh = picture_words.new(painter, models.PromptNet { in_channels = 48, channels = { 16, 16 }, width = 16 },
    { token = "<toy>" })
  local tokens = painter:tokens { "plain neon fish on a blue ground" }
  local known = painter.text_encoder.text_model.embeddings.token_embedding(tokens):square():mean():sqrt():item()
  fresh.network(ty.randn(2, 48, 8, 8), ty.tensor { 300.0, 700.0 }, { tokens = painter:tokens(prompts),
    picture = ty.randn(2, 48, 8, 8), scale = ty.ones(2) })
  local said = fresh.network.words:square():mean():sqrt():item()
  check.ok(said > 0.2 * known and said < 2 * known, ("%g, known ones %g"):format(said, known))
end)

check.test("gradients reach PromptNet and nothing else; they are right", function()
  local x, t = ty.randn({ 2, 48, 8, 8 }), ty.tensor { 300.0, 700.0 }
  local condition = { tokens = painter:tokens(prompts), picture = ty.randn(2, 48, 8, 8), scale = ty.tensor { 1, 0.8 } }
  local function loss() return told.network(x, t, condition):square():mean() end
  loss():backward()
  for name, p in painter.network:named_parameters() do check.equal(p.grad, nil, name) end
  local weight = promptnet.word_proj.bias
  local grad, step, right = weight.grad:tolist(), 1e-2, 0
  for k = 0, 3 do
    local values = {}
    for i, sign in ipairs { 1, -1 } do
      ty.no_grad(function() weight:narrow(0, k, 1):add_(sign * step) end)
      values[i] = ty.no_grad(function() return loss():item() end)
      ty.no_grad(function() weight:narrow(0, k, 1):add_(-sign * step) end)
    end
    local numeric = (values[1] - values[2]) / (2 * step)
    right = right + (math.abs(numeric - grad[k + 1]) < 0.05 * math.abs(numeric) + 1e-5 and 1 or 0)
  end
  check.equal(right, 4)
  promptnet:zero_grad()
end)

check.test("training lowers the loss; a penalty makes words smaller; a tuned one is another", function()
  local pictures = ty.stack({ picture, picture:flip { 2 } }, 0)
  -- The loss at fixed times and noise, before and after.
  local objective, x0 = painter.process.objective, painter:encode(pictures)
  local given = { t = objective.schedule:from_unit(ty.tensor { 0.4, 0.7 }), noise = ty.randn_like(x0) }
  local asked = { tokens = painter:tokens { "a <toy>", "a <toy>" }, picture = x0, scale = ty.ones(2) }
  local function loss()
    local noisy = objective:noisy(x0, given.t, given.noise)
    return ty.no_grad(function()
      return (objective:output(told.network, noisy, asked) - x0):square():mean():item()
    end)
  end
  local before_training = loss()
  told:train(pictures, { steps = 60, batch = 8, lr = 1e-2 })
  check.equal(objective.predict, "sample")
  check.ok(loss() < before_training, ("from %g to %g"):format(before_training, loss()))
  local function length_with(penalty)
    local other = picture_words.new(painter, promptnet:clone(), { token = "<toy>" })
    other:train(pictures, { steps = 20, batch = 4, lr = 3e-3, penalty = penalty })
    local x = painter:encode(pictures)
    return other.network.promptnet(x, x, ty.tensor { 500.0, 500.0 }):square():mean():item()
  end
  check.ok(length_with(10) < length_with(0))
  local before = promptnet.word_proj.weight:detach():clone()
  local mine = told:tuned(picture, { steps = 2, batch = 2 })
  check.ok(promptnet.word_proj.weight:eq(before):all():item())
  check.ok(not mine.network.promptnet.word_proj.weight:eq(before):all():item())
end)

check.test("prompts of a batch, and pictures with noise alone", function()
  local seen, times = {}, {}
  local forward = told.network.forward
  local other = picture_words.new(painter, promptnet:clone(), { token = "<toy>" })
  rawset(other.network, "forward", function(self, x, t, condition)
    for _, value in ipairs(t:tolist()) do times[#times + 1] = value end
    seen[#seen + 1] = condition.tokens:tolist()
    return forward(self, x, t, condition)
  end)
  local set = ty.data.TensorDataset { image = ty.stack({ picture, picture:flip { 2 } }, 0), number = ty.arange(2) }
  other:train(ty.data.DataLoader(set, { batch_size = 2 }), { steps = 3, noise = 0.6, prompt = function(batch)
    return batch.number.shape[1] == 2 and { "a neon <toy> on a blue ground", "a <toy>" }
  end })
  check.equal(#seen, 3)
  check.equal(seen[1], painter:tokens({ "a neon <toy> on a blue ground", "a <toy>" }):tolist())
  for _, t in ipairs(times) do check.ok(t >= 599, ("%g"):format(t)) end
  check.fails(function()
    other:train(ty.data.DataLoader(set, { batch_size = 2 }), { steps = 1, prompt = function() return { "a" } end })
  end, "picture_words.train: prompt: expected 2, one for each picture, got 1")
  check.fails(function() other:train(picture:unsqueeze(0), { steps = 1, noise = 1 }) end,
    "picture_words.train: noise: expected a number in [0, 1), got 1")
end)

check.test("mistakes", function()
  check.fails(function() told:paint(picture, prompts, { s2 = 1 }) end,
    "picture_words.paint: reference: expected 2 prompts, one for each, got nil")
  check.fails(function() fusion_sampling.fusion { times = -1 } end, "fusion_sampling.fusion: times: expected an ")
  check.fails(function() fusion_sampling.guidance(1) end, "fusion_sampling.guidance: s2: expected a finite number, ")
end)

check.finish()
