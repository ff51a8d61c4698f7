--- Latents of an autoencoder without a distribution, in the form of one: what asks a Gaussian for its mean or a draw
-- gets the latents themselves.
local ty = require "tycho"
local arguments = require "tycho.arguments"

---@class Fixed
---@field mean Tensor  the latents
local Fixed = {}
Fixed.__index = Fixed
Fixed.__name = "Fixed"

--- From latents [n, channels, ...].
---@param latents Tensor
---@return Fixed
function Fixed.new(latents)
  return setmetatable({ mean = arguments.expect("Fixed.new", "latents", latents, "a tensor") }, Fixed)
end

--- The standard deviation: 0.
---@return Tensor
function Fixed:std() return ty.zeros_like(self.mean) end

--- The latents: nothing is drawn.
---@return Tensor
function Fixed:sample() return self.mean end

--- The latents.
---@return Tensor
function Fixed:mode() return self.mean end

return Fixed
