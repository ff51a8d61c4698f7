-- Things that are shown: features without names, the network that begins as the painter's, edits, the factory of pairs.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, diffusion, zoo = require "tycho.datasets", require "tycho.diffusion", require "tycho.zoo"

local subject = diffusion.subject

ty.manual_seed(3)
local painter = zoo.canvas.painter { widths = { 8, 16 }, text = 16 }
ty.no_grad(function()
  for _, p in painter.network:named_parameters() do p:add_(ty.randn_like(p) * 0.1) end
end)
local batch = datasets.load("canvas", { styles = { "plain" } }):batch(ty.arange(6))
local function encode(x) return ty.pixel_unshuffle(x:to "f32" / 127.5 - 1, 4) end
local features = subject.features(zoo.canvas.judge_network { 8, 8 }, 8, encode)

check.test("a thing on an even ground is found", function()
  local mask = subject.segment(batch.image)
  local real = batch.mask:to "f32"
  local inside = (mask * real):sum():item() / real:sum():item()
  check.ok(inside > 0.9, ("%.3f of the thing"):format(inside))
  check.ok(mask:sum():item() < 2 * real:sum():item(), "and not much else")
  check.equal(subject.segment(ty.full({ 1, 3, 8, 8 }, 100)):sum():item(), 0, "nothing on nothing")
end)

check.test("NT-Xent: the loss by hand", function()
  local a = ty.tensor { { 1.0, 0.0 }, { 0.0, 2.0 } }
  local b = ty.tensor { { 1.0, 0.0 }, { 0.0, 1.0 } }
  -- Each has one that is its like (cosine 1) and two others (cosine 0).
  local e = math.exp(1 / 0.5)
  check.close(features.loss(a, b, 0.5):item(), -math.log(e / (e + 2)), 1e-5)
end)

check.test("features learn: views of a thing become more alike than things are", function()
  local set = datasets.load("canvas", { styles = { "plain" }, dyed = 1 })
  local loader = ty.data.DataLoader(set, { batch_size = 16, shuffle = true, seed = 1 })
  features:train(loader, { steps = 12 })
  local some = set:batch(ty.arange(1000, 1012))
  check.equal(features:tokens(some.image, some.mask).shape, { 12, 16, 8 })
  local same = features:alike(some.image, some.mask, some.image, some.mask)
  check.ok((same - 1):abs():max():item() < 1e-5)
  local other = features:alike(some.image, some.mask, some.image:flip { 0 }, some.mask:flip { 0 })
  check.ok(other:max():item() <= 1 + 1e-6 and other:mean():item() < 1)
end)

local generator = subject.network(painter, 8)
local prompts = {}
for i = 1, 6 do prompts[i] = "a plain fish on a pink ground" end
local tokens = features:tokens(batch.image, batch.mask)

check.test("further channels weigh nothing at first", function()
  local x, t = ty.randn(6, 48, 8, 8), ty.full({ 6 }, 500)
  local condition = generator:condition(prompts, tokens)
  local y = generator.network(x, t, condition)
  condition.around, condition.hole = ty.randn_like(condition.around), ty.randn_like(condition.hole)
  check.ok((generator.network(x, t, condition) - y):abs():max():item() < 1e-6)
  local text = ty.concat({ condition.text.embeddings, generator.network.proj(tokens) }, 1)
  check.ok((painter.network(x, t, { text = { embeddings = text } }) - y):abs():max():item() < 1e-5)
end)

check.test("edits leave what is outside of the mask, and all of it where the mask is empty", function()
  local o = { steps = 2, image = batch.image, mask = batch.mask }
  local drawn = generator:paint(prompts, tokens, o)
  local outside = batch.mask:eq(0):expand(drawn.shape)
  check.ok(drawn:eq(batch.image):logical_or(outside:logical_not()):all():item())
  check.ok(not drawn:eq(batch.image):all():item())
  o.mask = batch.mask * 0
  check.ok(generator:paint(prompts, tokens, o):eq(batch.image):all():item())
  check.fails(function() generator:paint(prompts, tokens, { mask = batch.mask }) end,
    "subject.paint: image: expected one beside mask, got nil")
end)

local things = {}
for i = 1, 6 do
  things[i] = { picture = batch.image:select(0, i - 1), mask = batch.mask:select(0, i - 1), rough = prompts[i],
    prompt = prompts[i], asked = i }
end

check.test("the factory: pairs with scores; thresholds of 0 keep all, and higher ones fewer", function()
  local factory = subject.factory { painter = painter, features = features, generator = generator, steps = 2,
    text = function(_, asked)
      local list = {}
      for i, value in ipairs(asked) do list[i] = value / 6 end
      return list
    end }
  local made, rough, refined = factory:make(things, 5)
  check.equal({ #made, rough.shape, refined.shape }, { 6, { 6, 3, 32, 32 }, { 6, 3, 32, 32 } })
  check.equal(#subject.factory.filter(made, 0, 0), 6)
  check.equal(#subject.factory.filter(made, 0, 0.5), 4)
  check.equal(#subject.factory.filter(made, 1.1, 0), 0)
  for _, pair in ipairs(made) do check.ok(pair.identity >= 0 and pair.identity <= 1 + 1e-6) end
  local again = factory:make(things, 5)
  check.ok(again[1].target:eq(made[1].target):all():item() and again[6].target:eq(made[6].target):all():item())
  local losses = generator:train(subject.factory.batches(features, made, 4, 0.5), { steps = 3 })
  check.equal(#losses, 3)
end)

check.finish()
