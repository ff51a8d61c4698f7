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
-- loss, and smooth (0: the mean squared error; else smooth L1 with that as its bend), and, for tokenizers that draw,
-- temperature: a list of what tokenizer.temperature is at the first step and at the last, evenly in between.
---@param tokenizer Module
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return Module tokenizer
function M.fit(tokenizer, loader, options)
  local who = "tokens.fit"
  check(who, tokenizer)
  arguments.expect(who, "options", options, "a table")
  local rest, smooth, between, step = { title = "tokenizer", weight_decay = 0.01 }, 0, nil, 0
  for key, value in pairs(options) do
    if key == "smooth" then smooth = value elseif key == "temperature" then between = value else rest[key] = value end
  end
  arguments.expect(who, "smooth", smooth, "a finite number >= 0")
  arguments.expect(who, "temperature", between, "a list of numbers or nil")
  rest.loss = function(model, batch)
    if between then
      model.temperature = between[1] + (between[2] - between[1]) * step / math.max(1, (rest.steps or 0) - 1)
      step = step + 1
    end
    local x = autoencoder.pictures(batch.image)
    local back, extra = model(x)
    local error_ = ty.nn.mse_loss(back, x)
    local loss = smooth > 0 and ty.nn.smooth_l1_loss(back, x, { beta = smooth }) or error_
    return extra and loss + extra or loss, { error = error_:detach() }
  end
  local losses, trained = ty.train.fit(tokenizer, loader, rest)
  return losses, trained:eval()
end

--- What a tokenizer leaves of pictures: psnr (dB) and ssim, means over them; frechet, of all to the pictures
-- themselves, where `features` (a function of pictures that gives [n, width]) says by which network; bits of a
-- picture's tokens; and the pictures as they come back, on the tokenizer's device. options: features, batch (50).
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
  local x = autoencoder.pictures(pictures:to { device = tokenizer:device() })
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
