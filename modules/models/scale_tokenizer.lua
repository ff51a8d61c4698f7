--- A tokenizer of pictures in scales: what is coded at one is what the coarser ones left over. Tian et al. 2024,
-- "Visual Autoregressive Modeling: Scalable Image Generation via Next-Scale Prediction", section 3.2, algorithms 1 and
-- 2, with an encoder and a decoder of a few convolutions.
--
--     local tokenizer = models.ScaleTokenizer { scales = { 1, 2, 4, 8 } }
--     local ids = tokenizer:encode(pictures)      -- a list: i64 [n, 1], [n, 4], [n, 16], [n, 64]
--     local pictures = tokenizer:decode(ids)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Codebook = require "tycho.models.codebook"

local nn = ty.nn
local WHO = "ScaleTokenizer"

local Block = nn.module "ScaleTokenizerBlock"

function Block:init(channels)
  self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, { padding = 1 }), nn.Conv2d(channels, channels, 1)
end

function Block:forward(x) return x + self.conv2(self.conv1(x:silu()):silu()) end

---@class ScaleTokenizer: Module
---@field scales integer[]  sides of the maps, from coarse to fine
---@field length integer    tokens of a picture
---@field bits number       of a picture's tokens
---@field codes integer
---@field width integer     numbers of a code
local ScaleTokenizer = nn.module(WHO)

--- options: channels (3), hidden (32: of the first convolutions, twice as many further in), width (16: numbers of a
-- code), codes (128), scales ({ 1, 2, 3, 4, 5, 6, 8 }), factor (4; 1 or 2: pixels of a side of a place of the last
-- scale), commitment (0.25: weight of the distance of features to their codes).
---@param options? table
function ScaleTokenizer:init(options)
  local o = arguments.read(WHO, options, { channels = 3, hidden = 32, width = 16, codes = 128,
    scales = { 1, 2, 3, 4, 5, 6, 8 }, factor = 4, commitment = 0.25 }, { channels = "an integer >= 1",
    hidden = "an integer >= 1",
    width = "an integer >= 1", codes = "an integer >= 2", scales = "a list of integers", factor = "1 or 2 or 4",
    commitment = "a finite number >= 0" })
  self.length = 0
  for i, side in ipairs(o.scales) do
    if side < 1 or i > 1 and side <= o.scales[i - 1] then
      arguments.fail("%s: scales: expected rising sides of maps from 1 on, got %d at place %d", WHO, side, i)
    end
    self.length = self.length + side * side
  end
  if #o.scales == 0 then arguments.fail("%s: scales: expected at least one, got none", WHO) end
  self.scales, self.codes, self.width, self.commitment = o.scales, o.codes, o.width, o.commitment
  self.side, self.channels, self.factor = o.scales[#o.scales], o.channels, o.factor
  self.bits = self.length * math.log(o.codes, 2)
  local h = o.hidden
  -- Two steps at the border to pixels, of which `factor` says how many halve or double the size.
  local function conv(inputs, outputs, halved)
    return nn.Conv2d(inputs, outputs, halved and 4 or 3, { padding = 1, stride = halved and 2 or 1 })
  end
  self.encoder = nn.Sequential(conv(o.channels, h, o.factor > 1), nn.SiLU(), conv(h, 2 * h, o.factor > 2),
    Block(2 * h), Block(2 * h), nn.SiLU(), conv(2 * h, o.width))
  local inner, outer = o.factor > 2 and 2 or 1, o.factor > 1 and 2 or 1
  self.decoder = nn.Sequential(conv(o.width, 2 * h), Block(2 * h), Block(2 * h), nn.SiLU(),
    conv(2 * h, inner * inner * h), nn.PixelShuffle(inner), nn.SiLU(), conv(h, outer * outer * o.channels),
    nn.PixelShuffle(outer))
  self.codebook = Codebook(o.codes, o.width)
  -- What smooths a map that was made larger; each scale has its own.
  self.smooth = nn.ModuleList {}
  for _ = 1, #o.scales do self.smooth:append(conv(o.width, o.width)) end
end

-- A map of a scale [n, width, s, s] as it is added to the sum: brought to the full size, and half of it smoothed.
function ScaleTokenizer:raised(map, scale)
  if map.shape[3] ~= self.side then
    map = map:interpolate({ self.side, self.side }, { mode = "bicubic" })
  end
  return map * 0.5 + self.smooth[scale](map) * 0.5
end

-- Tokens [n, s * s, width] of a scale as a map, and back.
local function as_map(tokens, side) return tokens:transpose(1, 2):reshape(tokens.shape[1], -1, side, side) end
local function as_tokens(map) return map:flatten(2):transpose(1, 2) end

--- What the next scale is predicted from: the sum of the scales so far, [n, width, side, side], brought to the size of
-- a scale, as tokens [n, s * s, width].
---@param sum Tensor
---@param scale integer
---@return Tensor
function ScaleTokenizer:input(sum, scale)
  local side = self.scales[scale]
  return as_tokens(side == self.side and sum or sum:adaptive_avg_pool2d { side, side })
end

--- The sum (nil: nothing so far) with the tokens i64 [n, s * s] of a scale added.
---@param sum? Tensor
---@param ids Tensor
---@param scale integer
---@return Tensor
function ScaleTokenizer:add(sum, ids, scale)
  arguments.expect(WHO .. ":add", "ids", ids, "a tensor")
  local side = self.scales[arguments.expect(WHO .. ":add", "scale", scale, ("an integer in [1, %d]"):format(
    #self.scales))]
  if ids.ndim ~= 2 or ids.shape[2] ~= side * side then
    arguments.fail("%s:add: ids: expected [n, %d] at scale %d, got %s", WHO, side * side, scale,
      arguments.describe(ids))
  end
  local map = self:raised(as_map(self.codebook:embed(ids), side), scale)
  return sum and sum + map or map
end

--- Features of pictures, [n, width, side, side].
---@param pictures Tensor  [n, channels, factor * side, factor * side]
---@return Tensor
function ScaleTokenizer:features(pictures)
  arguments.expect(WHO, "pictures", pictures, "a tensor")
  local size = self.factor * self.side
  if pictures.ndim ~= 4 or table.concat(pictures.shape, ",", 2) ~= ("%d,%d,%d"):format(self.channels, size, size) then
    arguments.fail("%s: pictures: expected [n, %d, %d, %d], got %s", WHO, self.channels, size, size,
      arguments.describe(pictures))
  end
  return self.encoder(pictures)
end

-- Tokens of features, scale by scale, the sum of all, and the mean over scales of the distances of features to sums.
local function quantize(self, features)
  local rest, sum, list, chosen, commitment = features:detach(), nil, {}, {}, nil
  for l, side in ipairs(self.scales) do
    local x = as_tokens(side == self.side and rest or rest:adaptive_avg_pool2d { side, side })
    local ids = self.codebook:nearest(x)
    list[l], chosen[l] = ids, x:reshape(-1, self.width)
    sum = self:add(sum, ids, l)
    rest = features:detach() - sum:detach()
    if self.training then
      -- The first is that of the features, the second that of what smooths.
      local error_ = nn.mse_loss(sum:detach(), features) * self.commitment + nn.mse_loss(sum, features:detach())
      commitment = commitment and commitment + error_ or error_
    end
  end
  if self.training then
    local flat = {}
    for l, ids in ipairs(list) do flat[l] = ids:flatten() end
    self.codebook:follow(ty.concat(chosen, 0), ty.concat(flat, 0))
  end
  return list, sum, commitment and commitment / #self.scales
end

--- Tokens of pictures from -1 to 1: a list with i64 [n, s * s] for each scale.
---@param pictures Tensor
---@return Tensor[]
function ScaleTokenizer:encode(pictures)
  return ty.no_grad(function() return (quantize(self, self:features(pictures))) end)
end

--- What a scale is predicted from, for all scales but the first, of tokens: a list of [n, s * s, width], without
-- gradients.
---@param ids Tensor[]
---@return Tensor[]
function ScaleTokenizer:inputs(ids)
  arguments.expect(WHO .. ":inputs", "ids", ids, "a list of tensors")
  return ty.no_grad(function()
    local sum, list = nil, {}
    for l = 1, #self.scales - 1 do
      sum = self:add(sum, ids[l], l)
      list[l] = self:input(sum, l + 1)
    end
    return list
  end)
end

--- Pictures of the sum of all scales, or of the first few.
---@param sum Tensor  [n, width, side, side]
---@return Tensor
function ScaleTokenizer:pictures(sum) return self.decoder(sum) end

--- Pictures of tokens, of all scales or (a shorter list) of the first few.
---@param ids Tensor[]
---@return Tensor
function ScaleTokenizer:decode(ids)
  arguments.expect(WHO .. ":decode", "ids", ids, "a list of tensors")
  local sum
  for l, of_scale in ipairs(ids) do sum = self:add(sum, of_scale, l) end
  return self.decoder(sum)
end

--- Pictures as they come back, with the gradient of what is decoded handed on to the features (straight-through), and
-- in training what is to be added to the loss.
---@param pictures Tensor
---@return Tensor pictures
---@return Tensor? extra
function ScaleTokenizer:forward(pictures)
  local features = self:features(pictures)
  local _, sum, commitment = quantize(self, features)
  -- The value of the sum, the gradients of both.
  return self.decoder(sum + features - features:detach()), commitment
end

return ScaleTokenizer
