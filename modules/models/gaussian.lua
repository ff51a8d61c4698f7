--- The normal distribution of latents that an autoencoder's encoder gives for a picture, each number for itself.
-- Kingma and Welling 2014, "Auto-Encoding Variational Bayes".
local ty = require "tycho"
local arguments = require "tycho.arguments"

---@class Gaussian
---@field mean Tensor    [n, channels, h, w]
---@field logvar Tensor  the logarithm of the variance, within [-30, 20]
local Gaussian = {}
Gaussian.__index = Gaussian
Gaussian.__name = "Gaussian"

--- From moments [n, 2 * channels, ...]: means, then logarithms of variances.
---@param moments Tensor
---@return Gaussian
function Gaussian.new(moments)
  arguments.expect("Gaussian.new", "moments", moments, "a tensor")
  if moments.ndim < 2 or moments.shape[2] % 2 ~= 0 then
    arguments.fail("Gaussian.new: moments: expected [n, 2 * channels, ...], got %s", arguments.describe(moments))
  end
  local mean, logvar = moments:chunk(2, 1)
  return setmetatable({ mean = mean, logvar = logvar:clamp(-30, 20) }, Gaussian)
end

--- The standard deviation, shaped like the mean.
---@return Tensor
function Gaussian:std() return (self.logvar * 0.5):exp() end

--- A draw, through which gradients reach mean and variance; with a seed the same one every time.
---@param seed? integer
---@return Tensor
function Gaussian:sample(seed)
  arguments.expect("Gaussian:sample", "seed", seed, "an integer or nil")
  local function draw() return ty.randn_like(self.mean) end
  return self.mean + self:std() * (seed and ty.data.with_seed(seed, draw) or draw())
end

--- The likeliest latents: the mean.
---@return Tensor
function Gaussian:mode() return self.mean end

--- The Kullback-Leibler divergence from another such distribution (left out: from the standard normal one), in nats,
-- summed over all but the batch: [n].
---@param other? Gaussian
---@return Tensor
function Gaussian:kl(other)
  if other ~= nil and getmetatable(other) ~= Gaussian then
    arguments.fail("Gaussian:kl: other: expected a Gaussian or nil, got %s", arguments.describe(other))
  end
  local mean, logvar = self.mean, self.logvar
  local terms
  if other then
    terms = ((mean - other.mean):square() + logvar:exp()) * (-other.logvar):exp() - 1 - logvar + other.logvar
  else
    terms = mean:square() + logvar:exp() - 1 - logvar
  end
  return terms:flatten(1):sum { 1 } * 0.5
end

return Gaussian
