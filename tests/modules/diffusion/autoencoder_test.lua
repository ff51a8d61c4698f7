-- Training the autoencoder of latent diffusion, and its measures.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, models = require "tycho.diffusion", require "tycho.models"
local autoencoder, measure = diffusion.autoencoder, diffusion.measure

local function model()
  ty.manual_seed(1)
  return models.AutoencoderKL { block_out_channels = { 8, 16 }, norm_num_groups = 4, latent_channels = 2,
    sample_size = 8, down_block_types = { "DownEncoderBlock2D", "DownEncoderBlock2D" },
    up_block_types = { "UpDecoderBlock2D", "UpDecoderBlock2D" } }
end

ty.manual_seed(2)
local images = ty.data.TensorDataset { image = ty.rand(12, 3, 1, 1):mul(255):to("u8"):expand(12, 3, 8, 8):contiguous() }

check.test("PSNR is that of its definition", function()
  local a, b = ty.tensor { { 0.0, 0.5 }, { 1.0, 1.0 } }, ty.tensor { { 0.1, 0.5 }, { 1.0, 1.0 } }
  local got = measure.psnr(a, b):tolist()
  check.close(got[1], 10 * math.log(1 / (0.1 ^ 2 / 2), 10), 1e-5)
  check.equal(got[2], math.huge)
  check.close(measure.psnr(a, b, { range = 2 }):tolist()[1] - got[1], 20 * math.log(2, 10), 1e-9)
  check.fails(function() measure.psnr(a, b:narrow(0, 0, 1)) end, "b: expected the shape of a, [2, 2], got [1, 2]")
end)

check.test("the loss is the error and a share of the divergence", function()
  local m, x = model():eval(), autoencoder.pictures(images.fields.image)
  ty.manual_seed(3)
  local loss, parts = autoencoder.loss(m, x, { kl = 0.5 })
  ty.manual_seed(3)
  local y, posterior = m(x, { sample = true })
  local mean, variance = posterior.mean, posterior.logvar:exp()
  local kl = ((mean:square() + variance - 1 - posterior.logvar) * 0.5):sum():item() / x:numel()
  check.close(parts.error:item(), (y - x):square():mean():item(), 1e-6)
  check.close(parts.kl:item(), kl, 1e-5)
  check.close(loss:item(), parts.error:item() + 0.5 * kl, 1e-5)
end)

check.test("training lowers the error; the scale gives latents of unit variance", function()
  local m = model()
  local loader = ty.data.DataLoader(images, { batch_size = 6, shuffle = true })
  local before = autoencoder.psnr(m, images, { count = 12, batch = 5 })
  local losses = autoencoder.fit(m, loader, { steps = 40, lr = 3e-3, quiet = true, kl = 1e-4 })
  check.equal(#losses, 40)
  local after = autoencoder.psnr(m, images, { count = 12, batch = 5 })
  check.ok(after > before + 3, ("%.1f to %.1f dB"):format(before, after))
  check.ok(m.training)
  autoencoder.set_scale(m, images, { count = 12, batch = 12 })
  local z = m:scale(m:encode(autoencoder.pictures(images.fields.image)):sample(0))
  check.close({ z:mean():item(), z:square():mean():item() }, { 0, 1 }, 1e-3)
  check.close(m:unscale(m:scale(z)):tolist(), z:tolist(), 1e-4)
end)

check.test("a decoder is tuned: better pictures of the same latents", function()
  local m = model()
  autoencoder.set_scale(m, images, { count = 12, batch = 12 })
  local x = autoencoder.pictures(images.fields.image)
  local before, psnr = m:encode(x):mode(), autoencoder.psnr(m, images, { count = 12 })
  local loader = ty.data.DataLoader(images, { batch_size = 6, shuffle = true })
  local _, tuned = autoencoder.fit_decoder(m, loader, { steps = 40, lr = 3e-3, quiet = true, average = 0.8 })
  check.close(tuned:encode(x):mode():tolist(), before:tolist(), 1e-6)
  check.close(m:encode(x):mode():tolist(), before:tolist(), 1e-6)
  local after = autoencoder.psnr(tuned, images, { count = 12 })
  check.ok(after > psnr + 0.5, ("%.1f to %.1f dB"):format(psnr, after))
  for name, p in m:named_parameters() do check.ok(p.requires_grad, name) end
  local function first_loss(objective)
    return autoencoder.fit_decoder(m, ty.data.DataLoader(images, { batch_size = 12 }),
      { steps = 1, lr = 0, quiet = true, objective = objective })[1]
  end
  local squares = ty.no_grad(function() return (m(x) - x):square():mean { 1, 2, 3 } end)
  check.close(first_loss "mse", squares:mean():item(), 1e-5)
  check.close(first_loss "psnr", 0.01 * (squares + 1e-5):log():mean():item(), 1e-5)
  local _, sharper = autoencoder.fit_decoder(m, loader, { steps = 40, lr = 3e-3, quiet = true, objective = "psnr" })
  check.ok(autoencoder.psnr(sharper, images, { count = 12 }) > psnr + 0.5)
  check.fails(function() autoencoder.fit_decoder(m, loader, { objective = "l1" }) end,
    'objective: expected "mse" or "psnr", got ')
end)

check.test("mistakes are errors", function()
  check.fails(function() autoencoder.loss(ty.nn.Linear(2, 2), ty.ones(1, 3, 8, 8)) end, "expected an autoencoder")
  check.fails(function() autoencoder.psnr(model(), 3) end, "expected a dataset")
  check.fails(function() autoencoder.fit(model(), images, {}) end, "loader: expected a DataLoader")
end)

check.finish()
