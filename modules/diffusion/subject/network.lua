--- A network that draws from words and from features of a thing that it is shown, and, for edits, from the picture
-- around a hole: a copy of a painter's network whose cross-attention sees the features' tokens behind the words', and
-- which gets the rest of the picture and the mask as further channels. These weigh nothing at first.
-- Zhou et al. 2024, "Toffee", section 3.3 (ToffeeNet: one network for generation and for editing); without a hole it is
-- the refiner and the view generator of section 3.2.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail

--- A network that draws from words and from features of a thing that it is shown.
---@class SubjectNetwork: Module
---@field network UNet
local SubjectNetwork = nn.module "SubjectNetwork"

-- The painter's network with further channels that weigh nothing.
local function widened(network, more)
  local config, state = network:published_config(), {}
  config.in_channels = network.config.in_channels + more
  local made = models.UNet2DConditionModel(config):to(network:device())
  for name, tensor in pairs(network:state_dict()) do state[name] = tensor end
  local weight = state["conv_in.weight"]
  local shape = weight.shape
  shape[2] = more
  local nothing = ty.zeros(shape, { device = weight.device })
  state["conv_in.weight"] = ty.concat({ weight:detach(), nothing }, 1)
  made:load_state_dict(state)
  return made
end

function SubjectNetwork:init(network, width, latents)
  local context = network.config.cross_attention_dim
  if type(context) == "table" then context = context[1] end
  self.network = widened(network, latents + latents // 3)
  self.proj = nn.Linear(width, context):to(network:device())
end

--- condition: text = { embeddings }, subject [n, places, width], and for edits around [n, c, h, w] (the picture with
-- the hole in it) and hole [n, c / 3, h, w]; zeros where nothing is given.
function SubjectNetwork:forward(x, t, condition)
  local text = condition.text.embeddings
  local context = ty.concat({ text, self.proj(condition.subject):to(text.dtype) }, 1)
  return self.network(ty.concat({ x, condition.around, condition.hole }, 1), t, { text = { embeddings = context } })
end

--- A painter that is shown things.
---@class SubjectPainter
---@field painter TextToImage   whose words, process and pixels it has
---@field network SubjectNetwork
local Subject = {}
Subject.__index = Subject

--- painter: one of pixels or with an autoencoder; width: of the features.
---@param painter TextToImage
---@param width integer
---@return SubjectPainter
local function new(painter, width)
  local who = "subject.network"
  expect(who, "painter", painter, "a table")
  expect(who, "width", width, "an integer >= 1")
  for _, part in ipairs { "network", "autoencoder", "process" } do
    expect(who, "painter." .. part, painter[part], "a table")
  end
  local latents = expect(who, "painter.autoencoder.config", painter.autoencoder.config, "a table").latent_channels
  if latents % 3 ~= 0 then
    fail("%s: painter: expected one of pixels, whose channels are a multiple of 3, got %d channels", who, latents)
  end
  return setmetatable({ painter = painter, network = SubjectNetwork(painter.network, width, latents) }, Subject)
end

-- What the network is told. masks: [n, 1, h, w], 1 in the hole; nil: no picture around.
function Subject:condition(prompts, tokens, pictures, masks)
  local painter = self.painter
  local n, channels = #prompts, painter.autoencoder.config.latent_channels
  local rows, columns = painter:default_size()
  local there = { device = painter:device() }
  local condition = { text = painter:condition(prompts).text, subject = tokens:to(there) }
  condition.text.pooled = nil
  if masks then
    masks = masks:to { dtype = "f32", device = there.device }
    condition.around = painter:encode(pictures:to "f32" / 127.5 - 1) * self:fold(1 - masks):repeat_interleave(3, 1)
    condition.hole = self:fold(masks)
  else
    condition.around = ty.zeros(n, channels, rows, columns, there)
    condition.hole = ty.zeros(n, channels // 3, rows, columns, there)
  end
  return condition
end

-- A mask [n, 1, h, w] as channels of the latents' places.
function Subject:fold(masks)
  local factor = self.painter:factor()
  return factor > 1 and ty.pixel_unshuffle(masks, factor) or masks
end

--- Trains on targets u8 [n, 3, h, w] with prompts and tokens of the things: next() gives { image, prompts, tokens, mask
-- (of edits; nil) }. options: steps (300), lr (2e-3), drop (0.1: of words and features), and those of train.fit.
-- Returns the losses.
---@param next fun(): table
---@param options? table
---@return number[]
function Subject:train(next, options)
  local o = { steps = 300, lr = 2e-3, drop = 0.1 }
  for key, value in pairs(options or {}) do o[key] = value end
  local objective = setmetatable({}, getmetatable(self.painter.process.objective))
  for key, value in pairs(self.painter.process.objective) do objective[key] = value end
  objective.drop = 0
  local fit = { warmup = 20, weight_decay = 0, final = 0.05, quiet = true, title = "subjects", loss = function(network)
    local batch = next()
    local prompts, kept = {}, {}
    for i, prompt in ipairs(batch.prompts) do
      local dropped = ty.rand({}):item() < o.drop
      prompts[i], kept[i] = dropped and "" or prompt, dropped and 0 or 1
    end
    local tokens = batch.tokens * ty.tensor(kept, { dtype = "f32", device = batch.tokens.device }):reshape(#kept, 1, 1)
    return objective:loss(network, self.painter:encode(batch.image), self:condition(prompts, tokens, batch.image,
      batch.mask))
  end }
  for key, value in pairs(o) do
    if key ~= "drop" then fit[key] = value end
  end
  local loader = ty.data.DataLoader(ty.data.TensorDataset { at = ty.arange(1) }, { batch_size = 1 })
  local losses = ty.train.fit(self.network, loader, fit)
  self.network:eval()
  return losses
end

--- Pictures u8 [n, 3, h, w] of prompts and things. options: steps (12), guidance (2), seed (0), image and strength
-- (0.6: a picture that is changed, as of TextToImage:paint), mask ([n, 1, h, w]: only there the image is changed; all
-- else stays, to the last bit).
---@param prompts string[]
---@param tokens Tensor  [n, places, width]
---@param options? table
---@return Tensor
function Subject:paint(prompts, tokens, options)
  local who = "subject.paint"
  local o = arguments.read(who, options, { steps = 12, guidance = 2.0, seed = 0, image = arguments.none, strength = 0.6,
    mask = arguments.none }, { steps = "an integer >= 1", seed = "an integer", image = "a tensor", mask = "a tensor",
    strength = "a number in (0, 1]" })
  if o.mask and not o.image then fail("%s: image: expected one beside mask, got nil", who) end
  local painter, n, empty, seeds = self.painter, #prompts, {}, {}
  for i = 1, n do empty[i], seeds[i] = "", o.seed + i - 1 end
  local condition = self:condition(prompts, tokens, o.image, o.mask)
  local null = self:condition(empty, tokens * 0, o.image, o.mask)
  local sampler = painter.process:sampler { steps = o.steps, guidance = o.guidance }
  local points, x = sampler:points(), nil
  local shape = { n, painter.autoencoder.config.latent_channels, painter:default_size() }
  if o.image and not o.mask then
    local left = math.max(1, math.floor(o.steps * o.strength + 0.5))
    points = table.move(points, o.steps - left + 1, #points, 1, {})
    local noise = ty.data.with_seed(o.seed, function() return ty.randn(shape, { device = painter:device() }) end)
    x = painter.process.schedule:mix(painter:encode(o.image), noise, points[1].alpha, points[1].sigma)
  end
  local drawn = painter:decode((sampler:sample(self.network, shape, { condition = condition, null = null, x = x,
    points = points, seeds = seeds })))
  if not o.mask then return drawn end
  local there = { device = drawn.device }
  return ty.where(o.mask:to(there):gt(0), drawn, o.image:to(there))
end

return new
