--- Small pictures as their largest principal components, for diffusion with few numbers: an autoencoder without a
-- network.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- What pictures are made of.
---@class PrincipalComponents
---@field basis Tensor  [components, numbers of a picture]
---@field mean Tensor   [1, numbers of a picture]
---@field scale number  standard deviation of the components, on average
---@field kept number   share of the variance that they have
local Components = {}
Components.__index = Components
Components.__name = "PrincipalComponents"

--- Pictures [n, ...] as latents [n, components], whose variances are 1 on average.
---@param pictures Tensor
---@return Tensor
function Components:encode(pictures)
  arguments.expect("PrincipalComponents:encode", "pictures", pictures, "a tensor")
  return (pictures:flatten(1) - self.mean):matmul(self.basis:transpose(0, 1)) / self.scale
end

--- Latents [n, components] as pictures.
---@param latents Tensor
---@return Tensor
function Components:decode(latents)
  arguments.expect("PrincipalComponents:decode", "latents", latents, "a tensor")
  return ((latents * self.scale):matmul(self.basis) + self.mean):reshape(-1, table.unpack(self.shape))
end

--- The largest principal components of pictures [n, ...].
---@param pictures Tensor
---@param count integer
---@return PrincipalComponents
return function(pictures, count)
  local who = "diffusion.principal"
  arguments.expect(who, "pictures", pictures, "a tensor")
  arguments.expect(who, "count", count, "an integer >= 1")
  if pictures.ndim < 2 or pictures:numel() == 0 or pictures:numel() // pictures.shape[1] < count then
    arguments.fail("%s: pictures: expected [n, ...] of at least %d numbers each, got %s", who, count,
      arguments.describe(pictures))
  end
  local flat = pictures:flatten(1)
  local mean = flat:mean({ 0 }, true)
  local _, values, vectors = ty.svd((flat - mean):transpose(0, 1):matmul(flat - mean) / flat.shape[1])
  local first = values:narrow(0, 0, count)
  return setmetatable({ mean = mean, basis = vectors:narrow(0, 0, count), scale = math.sqrt(first:mean():item()),
    kept = first:sum():item() / values:sum():item(), shape = table.move(pictures.shape, 2, pictures.ndim, 1, {}) },
    Components)
end
