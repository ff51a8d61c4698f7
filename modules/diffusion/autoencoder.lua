--- Training the autoencoder that latent diffusion works in, and what it loses. Rombach et al. 2022, "High-Resolution
-- Image Synthesis with Latent Diffusion Models", section 3.1, without its adversarial part.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local measure = require "tycho.diffusion.measure"

local M = {}

local function check_model(who, model)
  arguments.expect(who, "model", model, "a module")
  if type(model.encode) ~= "function" or type(model.decode) ~= "function" then
    arguments.fail("%s: model: expected an autoencoder, got %s", who, arguments.describe(model))
  end
end

--- What an autoencoder is trained for: the mean squared error of pictures that are decoded from a draw of their
-- latents, and `kl` times the divergence of the latents from the standard normal distribution, per number of a picture.
---@param model AutoencoderKL
---@param pictures Tensor  [n, c, h, w], from -1 to 1
---@param options? {kl?: number}  kl (1e-3)
---@return Tensor loss
---@return {error: Tensor, kl: Tensor} parts  for a log
function M.loss(model, pictures, options)
  local who = "autoencoder.loss"
  check_model(who, model)
  arguments.expect(who, "pictures", pictures, "a tensor")
  local o = arguments.read(who, options, { kl = 1e-3 }, { kl = "a finite number >= 0" })
  local decoded, posterior = model(pictures, { sample = true })
  local error_ = ty.nn.mse_loss(decoded, pictures)
  local kl = posterior:kl():mean() * (pictures.shape[1] / pictures:numel())
  return error_ + kl * o.kl, { error = error_:detach(), kl = kl:detach() }
end

--- Trains an autoencoder. loader: batches with a field `image`, u8 or floats from -1 to 1. options: those of train.fit
-- but loss, and kl (as loss()'s).
---@param model AutoencoderKL
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return AutoencoderKL averaged
function M.fit(model, loader, options)
  local who = "autoencoder.fit"
  check_model(who, model)
  arguments.expect(who, "options", options, "a table")
  local rest, kl = { title = "autoencoder" }, nil
  for key, value in pairs(options) do
    if key == "kl" then kl = value else rest[key] = value end
  end
  rest.loss = function(m, batch) return M.loss(m, M.pictures(batch.image), { kl = kl }) end
  return ty.train.fit(model, loader, rest)
end

-- The objectives of fit_decoder. A hundredth of the logarithm has gradients as large as the square's where that is a
-- hundredth, 26 dB: rates and bounds of norms serve both. The 1e-5 beside it, 56 dB, keeps flat pictures from ruling.
local objectives = {
  mse = ty.nn.mse_loss,
  psnr = function(y, x) return ((y - x):square():mean { 1, 2, 3 } + 1e-5):log():mean() * 0.01 end,
}

--- Trains the decoder alone, as sd-vae-ft-mse was, for the pictures that it is to show: latents mean what they meant,
-- and networks that draw them stay as they are. loader: batches with a field `image`. options: those of train.fit but
-- loss, and objective ("mse"; or "psnr": the mean of the logarithms of the pictures' squared errors, which is what a
-- mean PSNR counts). Returns the losses, and the autoencoder with the averaged decoder. Stability AI 2022, "Improved
-- Autoencoders".
---@param model AutoencoderKL
---@param loader DataLoader
---@param options table
---@return number[] losses
---@return AutoencoderKL averaged
function M.fit_decoder(model, loader, options)
  local who = "autoencoder.fit_decoder"
  check_model(who, model)
  arguments.expect(who, "options", options, "a table")
  local rest, objective = { title = "decoder" }, options.objective or "mse"
  local loss = objectives[objective]
  if not loss then
    arguments.fail("%s: objective: expected \"mse\" or \"psnr\", got %s", who, arguments.describe(objective))
  end
  for key, value in pairs(options) do
    if key ~= "objective" then rest[key] = value end
  end
  rest.loss = function(m, batch)
    local pictures = M.pictures(batch.image)
    local latents = ty.no_grad(function() return m:encode(pictures):mode() end)
    return loss(m:decode(latents), pictures)
  end
  local asked = {}
  for name, p in model:named_parameters() do
    asked[p] = p.requires_grad
    p:requires_grad_(name:find "^decoder%." ~= nil or name:find "^post_quant_conv%." ~= nil)
  end
  local losses, averaged = ty.train.fit(model, loader, rest)
  for p, before in pairs(asked) do p:requires_grad_(before) end
  return losses, averaged
end

--- Pictures as networks take them: bytes become floats from -1 to 1, floats stay.
---@param image Tensor
---@return Tensor
function M.pictures(image)
  arguments.expect("autoencoder.pictures", "image", image, "a tensor")
  return image.dtype == "u8" and image:to "f32" / 127.5 - 1 or image
end

-- Calls fn with the pictures of each batch, in evaluation mode and without gradients.
local function each_batch(who, model, dataset, o, fn)
  local loader = ty.data.DataLoader(dataset, { batch_size = o.batch, device = o.device })
  local training = model.training
  model:eval()
  for _ = 1, math.min(#loader, (o.count + o.batch - 1) // o.batch) do
    ty.scope(function() ty.no_grad(function() fn(M.pictures(loader:next().image)) end) end)
  end
  model:train(training)
end

local limits = { batch = 50, count = 1000, device = "cpu" }
local limit_kinds = { batch = "an integer >= 1", count = "an integer >= 1", device = "a string" }

--- The mean peak signal-to-noise ratio in dB of pictures of a data set that went through the autoencoder (by the mean
-- of their latents). options: count (1000 pictures), batch (50), device.
---@param model AutoencoderKL
---@param dataset table  items with a field `image`
---@param options? table
---@return number
function M.psnr(model, dataset, options)
  local who = "autoencoder.psnr"
  check_model(who, model)
  local o = arguments.read(who, options, limits, limit_kinds)
  local sum, n = 0.0, 0
  each_batch(who, model, dataset, o, function(x)
    local ratios = measure.psnr(model(x):clamp(-1, 1), x, { range = 2 })
    sum, n = sum + ratios:sum():item(), n + ratios:numel()
  end)
  return sum / n
end

--- Sets the config's scaling_factor so that latents of a data set have unit variance after model:scale(), which is what
-- diffusion expects. options: those of psnr(). Returns the factor.
---@param model AutoencoderKL
---@param dataset table
---@param options? table
---@return number
function M.set_scale(model, dataset, options)
  local who = "autoencoder.set_scale"
  check_model(who, model)
  local o = arguments.read(who, options, limits, limit_kinds)
  local sum, squares, n = 0.0, 0.0, 0
  each_batch(who, model, dataset, o, function(x)
    local z = model:encode(x):sample(n):to "f64"
    sum, squares, n = sum + z:sum():item(), squares + z:square():sum():item(), n + z:numel()
  end)
  local mean = sum / n
  model.config.shift_factor = mean
  model.config.scaling_factor = 1 / math.sqrt(squares / n - mean * mean)
  return model.config.scaling_factor
end

return M
