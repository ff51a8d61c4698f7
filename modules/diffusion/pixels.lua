--- What stands in an autoencoder's place where a pipeline has none, because its network draws pixels: k x k pixels of
-- three colours are folded into 3 k^2 channels and back, and nothing is lost.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- Pixels folded into channels, in the place of an autoencoder.
---@class Pixels
---@field factor integer  pixels of a side that become one place
---@field config table    what a pipeline asks an autoencoder's config for
local Pixels = {}
Pixels.__index = Pixels
Pixels.__name = "Pixels"

--- The fold of a network with so many channels; nil where they are no 3 k^2 with k a power of two.
---@param channels? integer
---@return Pixels?
local function new(channels)
  arguments.expect("diffusion.pixels", "channels", channels, "an integer >= 1 or nil")
  local factor, widths = 1, { 3 }
  while channels and 3 * factor * factor < channels do
    factor = factor * 2
    widths[#widths + 1] = 3 * factor * factor
  end
  if channels ~= 3 * factor * factor then return nil end
  return setmetatable({ factor = factor, config = { latent_channels = channels, block_out_channels = widths } }, Pixels)
end

local Folded = {}
Folded.__index = Folded

function Folded:mode() return self.x end

--- Pictures [n, 3, h, w] as an autoencoder's distribution: its mode is the pictures folded.
---@param pictures Tensor
---@return { mode: fun(self): Tensor }
function Pixels:encode(pictures)
  return setmetatable({ x = self.factor > 1 and ty.pixel_unshuffle(pictures, self.factor) or pictures }, Folded)
end

--- Pictures of what was folded.
---@param x Tensor
---@return Tensor
function Pixels:decode(x) return self.factor > 1 and ty.pixel_shuffle(x, self.factor) or x end

function Pixels.scale(_, x) return x end
function Pixels.unscale(_, x) return x end

--- There is nothing to move. Returns itself.
function Pixels:to() return self end

return new
