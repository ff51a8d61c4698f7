--- Networks for coloured shapes (distill.shapes): a painter that is trained in seconds, as a teacher of others, and a
-- classifier of one word of the captions, as a judge that is not the rule.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"
local shapes = require "tycho.distill.shapes"
local vision = require "tycho.vision"

local M = {}

local whole = "an integer >= 1"

--- A small Z-Image transformer that paints shapes from captions, and the process it was trained with. options: width
-- (48), steps (500), batch (64), lr (3e-3), misplaced (0: the share of training pictures whose place is drawn anew, so
-- that three quarters of these are not where their caption says), seed (0), device ("cpu").
---@param options? table
---@return Module painter
---@return Process flow
function M.painter(options)
  local o = arguments.read("distill.shapes.painter", options, { width = 48, steps = 500, batch = 64, lr = 3e-3,
    misplaced = 0, seed = 0, device = "cpu" }, { width = whole, steps = whole, batch = whole,
    lr = "a finite number > 0", misplaced = "a number in [0, 1]", seed = "an integer" })
  if o.width % 16 ~= 0 then
    arguments.fail("distill.shapes.painter: width: expected a multiple of 16, got %d", o.width)
  end
  local flow = diffusion.Flow { null = shapes.nothing(o.device) }
  local painter = ty.data.with_seed(o.seed, function()
    local model = models.ZImageTransformer2DModel { in_channels = 3, dim = o.width, n_layers = 2, n_refiner_layers = 1,
      n_heads = o.width // 16, cap_feat_dim = 16, axes_dims = { 4, 6, 6 }, axes_lens = { 64, 8, 8 }, pad_multiple = 4 }
    model:to(o.device)
    local loader, there = {}, { device = o.device }
    function loader.next()
      local labels = shapes.labels(o.batch, o.device)
      local place = ty.where(ty.rand({ o.batch }, there):lt(o.misplaced), ty.randint(0, 4, { o.batch }, there),
        labels:select(1, 2))
      return { image = (shapes.draw(ty.concat({ labels:narrow(1, 0, 2), place:unsqueeze(1) }, 1))),
        text = { embeddings = shapes.text(labels) } }
    end
    local _, averaged = ty.train.fit(model, loader, { steps = o.steps, lr = o.lr, final = 0.02, beta2 = 0.99,
      weight_decay = 0, average = 0.99, quiet = true,
      loss = function(m, batch) return flow:loss(m, batch.image, { text = batch.text }) end })
    return averaged
  end)
  return painter:requires_grad_(false):eval(), flow
end

local WORDS = { colour = 0, kind = 1, place = 2 }

--- A classifier of one word of captions ("colour", "kind" or "place") by pictures: a function that gives the
-- probability of each of its four, [n, 4]. options: steps (150), pictures (1000: to train on), seed (0), device
-- ("cpu").
---@param word string
---@param options? table
---@return fun(pictures: Tensor): Tensor
function M.classifier(word, options)
  local who = "distill.shapes.classifier"
  arguments.expect(who, "word", word, '"colour" or "kind" or "place"')
  local o = arguments.read(who, options, { steps = 150, pictures = 1000, seed = 0, device = "cpu" }, { steps = whole,
    pictures = whole, seed = "an integer" })
  local network = ty.data.with_seed(o.seed, function()
    local model = vision.ResNet { in_channels = 3, classes = 4, small = true, channels = { 16, 32 },
      blocks = { 1, 1 } }:to(o.device)
    local labels = shapes.labels(o.pictures)
    vision.fit(model, ty.data.TensorDataset { image = (shapes.draw(labels)),
      label = labels:select(1, WORDS[word]):contiguous() }, { steps = o.steps, seed = o.seed, quiet = true })
    return model:eval()
  end)
  return function(pictures) return vision.scores(network, pictures):softmax(-1) end
end

return M
