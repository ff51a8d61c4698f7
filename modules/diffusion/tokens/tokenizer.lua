--- Training a tokenizer of pictures, and the table of what comes back.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local autoencoder = require "tycho.diffusion.autoencoder"
local measure = require "tycho.diffusion.measure"

local M = {}

local function check(who, tokenizer)
  arguments.expect(who, "tokenizer", tokenizer, "a module")
  if type(tokenizer.encode) ~= "function" or type(tokenizer.decode) ~= "function" then
    arguments.fail("%s: tokenizer: expected a module with encode() and decode(), got %s", who,
      arguments.describe(tokenizer))
  end
end

--- Trains a tokenizer: a module that is called with pictures and returns them as they come back and (nil) what is to be
-- added to the loss. loader: batches with a field `image`, u8 or floats from -1 to 1. options: those of train.fit but
-- loss, and
--   smooth       nil: the mean squared error; a number: smooth L1 with that as its bend
--   features     nil, or a function of pictures that gives a list of maps of a fixed network, as measure.perceptual has
--   perceptual   (0.1) the weight of their mean squared difference, each brought to length 1 at every place
---@param tokenizer Module
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return Module tokenizer
function M.fit(tokenizer, loader, options)
  local who = "tokens.fit"
  check(who, tokenizer)
  arguments.expect(who, "options", options, "a table")
  local rest, own = { title = "tokenizer", weight_decay = 0.01 }, { perceptual = 0.1 }
  for key, value in pairs(options) do
    local mine = key == "smooth" or key == "features" or key == "perceptual"
    if mine then own[key] = value else rest[key] = value end
  end
  arguments.expect(who, "smooth", own.smooth, "a finite number or nil")
  arguments.expect(who, "features", own.features, "a function or nil")
  arguments.expect(who, "perceptual", own.perceptual, "a finite number")
  rest.loss = function(model, batch)
    local x = autoencoder.pictures(batch.image)
    local back, extra = model(x)
    local loss = own.smooth and ty.nn.smooth_l1_loss(back, x, { beta = own.smooth }) or ty.nn.mse_loss(back, x)
    local parts = { error = ty.nn.mse_loss(back, x):detach() }
    if extra then loss = loss + extra end
    if own.features then loss = loss + measure.perceptual_loss(back, x, own.features) * own.perceptual end
    return loss, parts
  end
  local losses, trained = ty.train.fit(tokenizer, loader, rest)
  trained:eval()
  return losses, trained
end

--- What a tokenizer leaves of pictures: psnr (dB) and ssim, means over them; frechet, of all to the pictures
-- themselves, where `features` (a function of pictures that gives [n, width]) says by which network; bits of a picture's
-- tokens; and the pictures as they come back. options: features, batch (50).
---@param tokenizer Module
---@param pictures Tensor  [n, c, h, w], u8 or from -1 to 1
---@param options? {features?: function, batch?: integer}
---@return { psnr: number, ssim: number, frechet?: number, bits: number } table
---@return Tensor back
function M.reconstruction(tokenizer, pictures, options)
  local who = "tokens.reconstruction"
  check(who, tokenizer)
  arguments.expect(who, "pictures", pictures, "a tensor")
  local o = arguments.read(who, options, { features = arguments.none, batch = 50 }, { features = "a function",
    batch = "an integer >= 1" })
  local list, n = {}, pictures.shape[1]
  local x = autoencoder.pictures(pictures)
  ty.no_grad(function()
    for first = 0, n - 1, o.batch do
      list[#list + 1] = ty.scope(function()
        return tokenizer:decode(tokenizer:encode(x:narrow(0, first, math.min(o.batch, n - first)))):clamp(-1, 1)
      end)
    end
  end)
  local back = ty.concat(list, 0)
  local found = { psnr = measure.psnr(back, x, { range = 2 }):mean():item(),
    ssim = measure.ssim(back, x, { range = 2, window = math.min(11, x.shape[3]) }):mean():item(),
    bits = tokenizer.bits }
  if o.features then found.frechet = measure.frechet(o.features(back), o.features(x)) end
  return found, back
end

return M
