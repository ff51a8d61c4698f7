--- The handwritten digits as recipes of distillation use them: a small trained model to begin with, a judge that reads
-- what is drawn, and how far drawn digits are from real ones by what the judge sees.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"
local vision = require "tycho.vision"

local expect, none, measure = arguments.expect, arguments.none, diffusion.measure
local M = {}

--- The digits: what is trained on, and what is held out.
---@return TensorDataset training
---@return TensorDataset held_out
function M.data() return ty.data.digits { split = { 0.8, 0.2 }, seed = 0 } end

local function seeded(seed, fn)
  return ty.data.with_seed(seed, fn)
end

--- A class-conditional flow of digits, trained with a seed, or read from the folder: its network, and the process it
-- was trained with (a tenth of the labels dropped, for guidance). options: network ("dit"; "mlp": the residual network
-- of flow-maps, models.TimeMLP, which takes a tenth of the time), steps (700), batch (64), lr (2e-3), width (64; mlp:
-- 192), depth (4; mlp: 3), seed (0), device ("cpu").
---@param folder string
---@param options? table
---@return DiT|TimeMLP model
---@return Process flow
function M.base(folder, options)
  local who = "distill.digits.base"
  expect(who, "folder", folder, "a string")
  local count = "an integer >= 1"
  local o = arguments.read(who, options, { network = "dit", steps = 700, batch = 64, lr = 2e-3, width = none,
    depth = none, seed = 0, device = "cpu" }, { network = '"dit" or "mlp"', steps = count, batch = count,
    width = count, depth = count, seed = "an integer" })
  local mlp = o.network == "mlp"
  o.width, o.depth = o.width or mlp and 192 or 64, o.depth or mlp and 3 or 4
  local flow = diffusion.Flow()
  local path = ("%s/digits-%s%d-%d-%d-%d.safetensors"):format(folder, mlp and "mlp-" or "", o.width, o.depth, o.steps,
    o.seed)
  return seeded(o.seed, function()
    local fresh = mlp and models.TimeMLP { features = 64, width = o.width, depth = o.depth, classes = 10 }
      or diffusion.DiT { width = o.width, depth = o.depth, classes = 10 }
    return ty.train.kept(path, fresh:to(o.device), function(model)
      local loader = ty.data.DataLoader(M.data(), { batch_size = o.batch, shuffle = true, seed = o.seed,
        drop_last = true, device = o.device })
      local _, averaged = ty.train.fit(model, loader, { steps = o.steps, lr = o.lr, beta2 = 0.99, final = 0.02,
        weight_decay = 0.01, average = 0.99, quiet = true,
        loss = function(m, batch) return flow:loss(m, batch.image, { labels = batch.label }) end })
      return averaged:requires_grad_()
    end)
  end), flow
end

--- A classifier of digits that judges pictures: its features, and what it takes them for.
---@class DigitJudge
---@field classifier ResNet
---@field accuracy number  share of the held-out digits that it reads
---@field real table       moments of the features of the held-out digits
local Judge = {}
Judge.__index = Judge
Judge.__name = "DigitJudge"

--- A classifier of digits that judges what is drawn, trained or read from the folder. options: steps (300), seed (1000:
-- none that a recipe's models have), device ("cpu").
---@param folder string
---@param options? { steps?: integer, seed?: integer, device?: string }
---@return DigitJudge
function M.judge(folder, options)
  local who = "distill.digits.judge"
  expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, { steps = 300, seed = 1000, device = "cpu" }, { steps = "an integer >= 1",
    seed = "an integer" })
  local training, held_out = M.data()
  local classifier = seeded(o.seed, function()
    local fresh = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 32, 64 },
      blocks = { 1, 1 }, dropout = 0.2 }
    local path = ("%s/judge-%d-%d.safetensors"):format(folder, o.steps, o.seed)
    return ty.train.kept(path, fresh:to(o.device), function(model)
      vision.fit(model, training, { steps = o.steps, seed = o.seed, quiet = true })
      return model
    end)
  end)
  local self = setmetatable({ classifier = classifier }, Judge)
  self.accuracy = vision.accuracy(classifier, held_out)
  local moments = measure.moments(self:features(held_out:batch(ty.arange(#held_out)).image):to { device = "cpu" })
  self.real = { mean = ty.keep(moments.mean), cov = ty.keep(moments.cov), count = moments.count }
  return self
end

--- What the classifier makes of digits before it decides, [n, 64], where the classifier is.
---@param images Tensor  [n, 1, 8, 8]
---@return Tensor
function Judge:features(images)
  expect("DigitJudge:features", "images", images, "a tensor")
  local there = { device = self.classifier:device() }
  return ty.no_grad(function() return self.classifier:features(images:to(there):clamp(-1, 1)) end)
end

--- The Fréchet distance of drawn digits to the held-out ones. It depends on the number drawn: compare equal ones.
---@param images Tensor
---@return number
function Judge:frechet(images) return measure.frechet(self:features(images):to { device = "cpu" }, self.real) end

--- The share of drawn digits that are read as what was asked for.
---@param images Tensor
---@param labels Tensor  i64 [n]
---@return number
function Judge:recognised(images, labels)
  expect("DigitJudge:recognised", "images", images, "a tensor")
  expect("DigitJudge:recognised", "labels", labels, "a tensor")
  local read = vision.predict(self.classifier, images:clamp(-1, 1))
  return read:eq(labels:to { device = read.device }):to("f64"):mean():item()
end

return M
