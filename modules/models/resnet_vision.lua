--- A residual network as the tower of a model that sees: the maps of its last stage as a sequence, one feature for each
-- place, with an embedding of the place, and the mean of all before them, where vision transformers have their class.
-- What deep layers were taught to leave out, such as colours of backgrounds, comes from the first stage: its means over
-- each place are added through a layer that begins at zero.
-- After Ge et al. 2024, "ConvLLaVA: Hierarchical Backbones as Visual Encoder for Large Multimodal Models". Networks of
-- this kind that learnt what is in each place tell it there, which the patches of a small CLIP do not.
--
--     local tower = models.ResNetVisionModel.around(zoo.load "scene-resnet", 64)
--     local features = tower:hidden(pictures)               -- [n, 1 + rows * columns, width]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"
local ResNet = require "tycho.models.resnet"

local nn = ty.nn

---@class ResNetVisionModel: Pretrained
---@field resnet ResNet
local ResNetVisionModel = nn.module("ResNetVisionModel", Pretrained)
ResNetVisionModel.model_type, ResNetVisionModel.architecture = "resnet_vision_model", "ResNetVisionModel"

--- config: image_size (64), resnet_config (the config of a ResNet), layer_norm_eps (1e-5). The network's head is left
-- out. num_hidden_layers is 1, and hidden_size and patch_size, the pixels of a place, follow from the network.
---@param given table
function ResNetVisionModel:init(given)
  local config = configs.read("ResNetVisionModel", given, { image_size = { "count", 64 }, resnet_config = { "table" },
    layer_norm_eps = { "epsilon", 1e-5 }, num_hidden_layers = { "count", 1 }, hidden_size = { "count", configs.none },
    patch_size = { "count", configs.none }, num_channels = { "count", configs.none } })
  configs.only("ResNetVisionModel", config, { num_hidden_layers = 1 })
  self.config = config
  self.resnet = ResNet:from_config(config.resnet_config)
  nn.surgery.remove(self.resnet, "fc")
  local inner = self.resnet.config
  local down = 2 ^ (#inner.hidden_sizes - 1) * (inner.small and 1 or 4)
  config.num_channels = inner.num_channels
  config.hidden_size, config.patch_size = inner.hidden_sizes[#inner.hidden_sizes], math.tointeger(down)
  self.rows = -(-config.image_size // config.patch_size)
  self.shallow = layers.linear(inner.hidden_sizes[1], config.hidden_size)
  if self.shallow.weight.device ~= "meta" then nn.init.zeros(self.shallow.weight) end
  self.layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.position_embedding = layers.embedding(self.rows * self.rows, config.hidden_size, 1.0)
end

--- A tower around a network that is there, whose weights are copied.
---@param resnet ResNet
---@param image_size integer  pixels of a picture's side
---@return ResNetVisionModel
function ResNetVisionModel.around(resnet, image_size)
  local who = "ResNetVisionModel.around"
  arguments.expect(who, "resnet", resnet, "a module")
  arguments.expect(who, "image_size", image_size, "an integer >= 1")
  if not resnet.maps then
    arguments.fail("%s: resnet: expected a ResNet, got %s", who, arguments.describe(resnet))
  end
  local tower = ResNetVisionModel { image_size = image_size, resnet_config = resnet:published_config() }
  local state, own = resnet:state_dict(), {}
  for name in pairs(tower.resnet:state_dict()) do own[name] = state[name] end
  tower.resnet:load_state_dict(own)
  return tower
end

--- Whether the norms of the network go by the batch in training, and learn its statistics, as a network that is trained
-- from its beginning needs it (false: they keep the statistics that it came with).
---@param learn boolean
---@return ResNetVisionModel self
function ResNetVisionModel:learn_norms(learn)
  arguments.expect("ResNetVisionModel:learn_norms", "learn", learn, "a boolean")
  self.learns_norms = learn
  return self
end

--- Features [n, 1 + places, width] of pictures [n, channels, height, width]. The network's norms keep the statistics
-- that it came with, in training as well, unless learn_norms() says otherwise. options: as of
-- CLIPVisionModel:hidden(); layer is -1 or 1 (or nil), and pictures have the size of the config.
---@param pictures Tensor
---@param options? table
---@return Tensor
function ResNetVisionModel:hidden(pictures, options)
  local who, c = "ResNetVisionModel", self.config
  local o = arguments.read(who, options, { layer = -1, interpolate = false, checkpoint = false })
  if o.layer ~= -1 and o.layer ~= 1 then
    arguments.fail("%s: layer: expected -1 or 1, got %s", who, arguments.describe(o.layer))
  end
  local shape = ty.is_tensor(pictures) and pictures.shape or {}
  if #shape ~= 4 or shape[2] ~= c.num_channels or shape[3] ~= c.image_size or shape[4] ~= c.image_size then
    arguments.fail("%s: pictures: expected [n, %d, %d, %d], got %s", who, c.num_channels, c.image_size, c.image_size,
      arguments.describe(pictures))
  end
  if self.resnet.training and not self.learns_norms then self.resnet:eval() end
  local maps = self.resnet:pyramid(pictures:to(self.layernorm.weight.dtype))
  local first = ty.adaptive_avg_pool2d(maps[1], { self.rows, self.rows }):flatten(2):transpose(1, 2)
  local x = self.layernorm(maps[#maps]:flatten(2):transpose(1, 2)) + self.shallow(first)
  return ty.concat({ x:mean({ 1 }, true), x + self.position_embedding.weight }, 1)
end

--- Features, and their mean [n, width].
---@param pictures Tensor
---@param options? table
---@return Tensor hidden
---@return Tensor pooled
function ResNetVisionModel:forward(pictures, options)
  local hidden = self:hidden(pictures, options)
  return hidden, hidden:select(1, 0)
end

return ResNetVisionModel
