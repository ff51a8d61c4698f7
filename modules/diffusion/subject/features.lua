--- Features of things that a network learns without names, from two views of each: the views of one thing are to be
-- more alike than those of others. Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual
-- Representations" (NT-Xent). Where the paper takes DINO's, these are taken.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

--- A network's features of things, and how alike two things are by them.
---@class SubjectFeatures
---@field network Module   with maps(x): [n, width, rows, columns]
---@field encode fun(pictures: Tensor): Tensor   pictures u8 or 0 to 255 as the network takes them
---@field width integer
local Features = {}
Features.__index = Features

--- network: a module with maps(x); width: channels of its maps; encode: what it sees of pictures u8 [n, 3, h, w].
---@param network Module
---@param width integer
---@param encode fun(pictures: Tensor): Tensor
---@return SubjectFeatures
local function new(network, width, encode)
  local who = "subject.features"
  arguments.expect(who, "network", network, "a module")
  arguments.expect(who, "width", width, "an integer >= 1")
  arguments.expect(who, "encode", encode, "a function")
  return setmetatable({ network = network, width = width, encode = encode }, Features)
end

--- NT-Xent of views a and b [n, width]: the mean over all 2 n of -log softmax of their cosines / temperature at the
-- other view of the same thing.
---@param a Tensor
---@param b Tensor
---@param temperature? number  (0.2)
---@return Tensor
function Features.loss(a, b, temperature)
  local n = a.shape[1]
  local z = ty.concat({ a, b }, 0)
  z = z / z:square():sum({ 1 }, true):sqrt():clamp(1e-6)
  local alike = z:matmul(z:transpose(0, 1)) / (temperature or 0.2)
  alike = alike - ty.eye(2 * n, { device = a.device }) * 1e9 -- not itself
  local at = ty.arange(2 * n, { device = a.device })
  return nn.cross_entropy(alike, (at + n) % (2 * n))
end

-- What the network makes of pictures, where it is.
local function maps(self, network, pictures)
  return network:maps(self.encode(pictures:to { device = network:device() }))
end

-- Of a picture without its ground: grey where the mask is 0.
local function isolated(pictures, masks)
  masks = masks:to "f32"
  return pictures:to "f32" * masks + 127.5 * (1 - masks)
end

--- A view of things: the ground taken away, mirrored or not, moved by up to `most` pixels, a little brighter or darker.
---@param pictures Tensor
---@param masks Tensor
---@param most? integer  (2)
---@return Tensor
function Features.view(pictures, masks, most)
  most = most or 2
  local x = isolated(pictures, masks)
  local n, h, w = x.shape[1], x.shape[3], x.shape[4]
  local there = { device = x.device }
  x = ty.where(ty.rand({ n, 1, 1, 1 }, there):lt(0.5), x:flip { 3 }, x)
  local d = ty.randint(0, 2 * most + 1, { 2 }):tolist()
  x = ty.pad(x, { most, most, most, most }, "constant", 127.5):narrow(2, d[1], h):narrow(3, d[2], w)
  return ((x - 127.5) * (ty.rand({ n, 1, 1, 1 }, there) * 0.2 + 0.9) + 127.5):clamp(0, 255)
end

--- Learns from a loader of batches { image u8, mask }. options: steps (300), temperature (0.2), and those of train.fit.
-- Returns itself.
---@param loader DataLoader
---@param options? table
---@return SubjectFeatures
function Features:train(loader, options)
  local fit = { steps = 300, lr = 2e-3, weight_decay = 0.01, quiet = true, title = "features",
    loss = function(network, batch)
      local function seen() return maps(self, network, Features.view(batch.image, batch.mask)):mean { 2, 3 } end
      return Features.loss(seen(), seen(), (options or {}).temperature)
    end }
  for key, value in pairs(options or {}) do
    if key ~= "temperature" then fit[key] = value end
  end
  ty.train.fit(self.network, loader, fit)
  self.network:eval()
  return self
end

--- Features at each place of things, f32 [n, places, width], on the network's device.
---@param pictures Tensor  u8 [n, 3, h, w]
---@param masks Tensor     [n, 1, h, w]
---@return Tensor
function Features:tokens(pictures, masks)
  return ty.no_grad(function()
    return maps(self, self.network, isolated(pictures, masks)):flatten(2):transpose(1, 2):contiguous()
  end)
end

--- How alike the things of pictures are, by the cosine of their mean features, brought to [0, 1]: f32 [n].
---@param pictures Tensor
---@param masks Tensor
---@param others Tensor
---@param other_masks Tensor
---@return Tensor
function Features:alike(pictures, masks, others, other_masks)
  local function unit(x, m)
    local y = self:tokens(x, m):mean { 1 }
    return y / y:square():sum({ 1 }, true):sqrt():clamp(1e-6)
  end
  return ((unit(pictures, masks) * unit(others, other_masks)):sum { 1 } + 1) / 2
end

return new
