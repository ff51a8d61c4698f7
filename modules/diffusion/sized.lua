--- A transformer of Stable Diffusion 3's shape that paints at several sizes with one set of weights. Its places are
-- sines over a grid that covers the same extent at every size: a picture twice as wide has places half as far apart,
-- so what was learnt of where things stand holds. Esser et al. 2024, section 5.3.2, move their places so for training
-- at higher resolutions.
--
--     local network = diffusion.sized(painter.network, { 16, 32 })
--     network(x, t, condition)     -- x [n, channels, 16, 16] or [n, channels, 32, 32]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"

local WHO = "diffusion.sized"

--- A transformer at several sizes.
---@class Sized: Module
---@field network SD3Transformer2DModel  the one whose weights all sizes have, at its own size
---@field config table  the network's
---@field sides table<integer, boolean>
local Sized = ty.nn.module "Sized"

-- By network and side: the same layers behind places for that side. Not fields, so that weights are counted, saved and
-- copied once, as the network's.
local twins = setmetatable({}, { __mode = "k" })

local function twin_of(network, side)
  local config = network:published_config()
  config.pos_embed_max_size = side // config.patch_size
  local proj = network.pos_embed.proj
  local twin = ty.nn.with_defaults({ device = network:device(), dtype = proj.weight.dtype }, function()
    return models.SD3Transformer2DModel(config)
  end)
  for name, layer in network:named_children() do
    if name ~= "pos_embed" then twin[name] = layer end
  end
  twin.pos_embed.proj = proj
  return twin
end

function Sized:init(network, sides)
  local config = type(network) == "table" and network.config
  if not config or not network.pos_embed or not config.pos_embed_max_size then
    arguments.fail("%s: network: expected a SD3Transformer2DModel, got %s", WHO, arguments.describe(network))
  end
  arguments.expect(WHO, "sides", sides, "a list of integers >= 1")
  self.network, self.config, self.sides = network, config, {}
  for i, side in ipairs(sides) do
    if side % config.patch_size ~= 0 then
      arguments.fail("%s: sides[%d]: expected a multiple of the patch size, %d, got %d", WHO, i, config.patch_size,
        side)
    end
    self.sides[side] = true
  end
end

--- x: [n, channels, side, side] with one of the sides.
function Sized:forward(x, t, condition)
  if not (ty.is_tensor(x) and x.ndim == 4 and x.shape[3] == x.shape[4] and self.sides[x.shape[3]]) then
    arguments.fail("%s: x: expected squares with one of the sides that it was made for, got %s", WHO,
      arguments.describe(x))
  end
  local network, side = self.network, x.shape[3]
  if side == network.config.pos_embed_max_size * network.config.patch_size then return network(x, t, condition) end
  twins[network] = twins[network] or {}
  twins[network][side] = twins[network][side] or twin_of(network, side)
  return twins[network][side](x, t, condition)
end

return Sized
