-- AutoencoderKL against diffusers: the small models of tests/fixtures/diffusers (make_diffusers.py), loaded from the
-- folders that diffusers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local reference = dofile(here .. "../modules/models/reference.lua")(check)
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/diffusers/"
local compare = reference.compare

for _, name in ipairs { "autoencoder", "autoencoder_bare" } do
  check.test(name .. ": latents, pictures and gradients of diffusers", function()
    local model = hub.load(root .. name, { dtype = "f32" })
    local want = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
    local x = want.x:detach():requires_grad_()
    local posterior = model:encode(x)
    compare(posterior.mean, want.mean, "mean")
    compare(posterior.logvar, want.logvar, "logvar")
    compare(posterior:kl(), want.kl, "kl")
    local y = model:decode(posterior.mean + posterior:std() * want.noise)
    compare(y, want.y, "pictures")
    local kl = posterior:kl()
    local loss = (y * reference.wave(y):to "f32"):sum() + (kl * reference.wave(kl):to "f32"):sum()
    check.close(loss:item(), want.loss:item(), 1e-4 * math.abs(want.loss:item()), "loss")
    check.equal(reference.compare_gradients(model, loss, want), {}, "gradients left")
    compare(x.grad, want["input_grad.x"], "gradient for the pictures")
    ty.no_grad(function()
      compare(model:encode(want.large, { tile = true }).mean, want.large_mean, "encoded in tiles")
      compare(model:decode(want.large_z, { tile = true }), want.large_y, "decoded in tiles")
      compare(model:decode(want.large_z, { tile = 16, sliced = true }), want.large_y, "decoded in tiles, one by one")
    end)
  end)
end

check.test("the distribution of latents", function()
  local moments = ty.randn(3, 4, 2, 2)
  moments["0, 2, 0, 0"]:fill_(50)
  moments["0, 3, 0, 0"]:fill_(-50)
  local p = models.Gaussian.new(moments)
  check.equal(p.mean:tolist(), moments[":, 0:2"]:tolist())
  check.close({ p.logvar:max():item(), p.logvar:min():item() }, { 20, -30 }, 1e-6)
  check.equal(p:mode():tolist(), p.mean:tolist())
  p = models.Gaussian.new(ty.randn(3, 4, 2, 2))

  -- The same seed, the same draw, and the default generator goes on as if there had been none.
  ty.manual_seed(4)
  local next_number = ty.rand(1):item()
  ty.manual_seed(4)
  check.equal(p:sample(7):tolist(), p:sample(7):tolist())
  check.equal(ty.rand(1):item(), next_number)
  check.ok((p:sample(7) - p:sample(8)):abs():max():item() > 0)
  check.ok((p:sample() - p:sample()):abs():max():item() > 0)
  local draws = ty.stack((function()
    local list = {}
    for i = 1, 2000 do list[i] = p:sample(i) end
    return list
  end)(), 0)
  check.ok((draws:mean { 0 } - p.mean):abs():div(p:std()):max():item() < 0.1, "mean of the draws")
  check.ok((draws:std { 0 } / p:std() - 1):abs():max():item() < 0.1, "deviation of the draws")

  -- From the definition: the mean of log p - log q under p, by the draws.
  local q = models.Gaussian.new(ty.randn(3, 4, 2, 2))
  local function log_density(d, x)
    return ((x - d.mean):square() * (-d.logvar):exp() + d.logvar):flatten(2):sum { 2 } * -0.5
  end
  local estimate = (log_density(p, draws) - log_density(q, draws)):mean { 0 }
  check.ok((p:kl(q) - estimate):abs():div(p:kl(q) + 1):max():item() < 0.1, "divergence from another")
  check.close(p:kl(p):tolist(), { 0, 0, 0 }, 1e-5)
  local standard = models.Gaussian.new(ty.zeros(3, 4, 2, 2))
  check.close(p:kl():tolist(), p:kl(standard):tolist(), 1e-4)
  check.fails(function() models.Gaussian.new(ty.zeros(2, 3, 4, 4)) end,
    "Gaussian.new: moments: expected [n, 2 * channels, ...], got a tensor [2, 3, 4, 4]")
  check.fails(function() p:kl {} end, "Gaussian:kl: other: expected a Gaussian or nil, got an empty table")
end)

local small = { block_out_channels = { 8, 8, 8 }, norm_num_groups = 4, sample_size = 16 }

local function with(changes)
  local config = {}
  for key, value in pairs(small) do config[key] = value end
  for key, value in pairs(changes) do config[key] = value end
  return config
end

check.test("forward, slices, tiles, scales", function()
  local model = models.AutoencoderKL(small)
  local x = ty.randn(3, 3, 24, 16)
  local y, posterior = model(x)
  check.equal(y.shape, x.shape)
  check.equal(posterior.mean.shape, { 3, 4, 6, 4 })
  check.equal(y:tolist(), model:decode(posterior:mode()):tolist())
  check.equal(model(x, { sample = true, seed = 3 }):tolist(), model:decode(posterior:sample(3)):tolist())

  -- What is no larger than a tile is the whole; slices are the same samples.
  local z = posterior:mode()
  local whole = model:decode(z)
  compare(model:decode(z, { sliced = true }), whole, "sliced")
  compare(model:encode(x, { sliced = true }).mean, z, "sliced")
  check.equal(model:decode(z, { tile = 24 }):tolist(), whole:tolist())
  -- Tiles without anything in common are the tiles alone.
  local parts = model:decode(z, { tile = 8, overlap = 0 })
  check.equal(parts.shape, whole.shape)
  compare(parts["1:2, :, 8:16, 8:16"], model:decode(z["1:2, :, 2:4, 2:4"]), "a tile")
  -- Where all tiles say the same, so does the whole, whatever the overlap.
  for _, overlap in ipairs { 0, 0.25, 0.3, 0.5, 0.7 } do
    for _, shape in ipairs { { 1, 4, 9, 5 }, { 1, 4, 16, 3 } } do
      local got = require("tycho.models.tiles").map(ty.ones(shape), function(tile)
        return ty.full({ 1, 2, 4 * tile.shape[3], 4 * tile.shape[4] }, 3)
      end, 4, 1, 4, overlap)
      check.equal(got.shape, { 1, 2, 4 * shape[3], 4 * shape[4] })
      check.close({ got:min():item(), got:max():item() }, { 3, 3 }, 1e-6)
    end
  end

  local scaled = models.AutoencoderKL(with { scaling_factor = 0.5, shift_factor = 2 })
  check.close(scaled:scale(ty.ones(1, 4, 1, 1) * 4):flatten():tolist(), { 1, 1, 1, 1 }, 1e-6)
  local standard = models.AutoencoderKL(with { scaling_factor = 0.5, latents_mean = { 0, 1, 2, 3 },
    latents_std = { 1, 2, 4, 8 } })
  check.close(standard:scale(ty.ones(1, 4, 1, 1) * 4):flatten():tolist(), { 2, 0.75, 0.25, 0.0625 }, 1e-6)
  for _, m in ipairs { scaled, standard, model } do compare(m:unscale(m:scale(z)), z, "there and back") end
end)

check.test("compiled, it computes the same", function()
  local model = models.AutoencoderKL(small):eval()
  local decode, encode = ty.compile(function(z) return model:decode(z) end), ty.compile(function(x)
    return model:encode(x).mean
  end)
  for _ = 1, 3 do
    local x, z = ty.randn(2, 3, 16, 16), ty.randn(2, 4, 4, 4)
    ty.no_grad(function()
      check.equal(decode(z):tolist(), model:decode(z):tolist())
      check.equal(encode(x):tolist(), model:encode(x).mean:tolist())
    end)
  end
end)

check.test("it learns", function()
  ty.manual_seed(1)
  local model = models.AutoencoderKL { block_out_channels = { 8, 16 }, norm_num_groups = 4 }
  local opt = ty.optim.AdamW(model:parameters(), { lr = 3e-3 })
  local x = ty.randn(4, 3, 8, 8):sign()
  local first, last
  for step = 1, 60 do
    local y, posterior = model(x, { sample = true })
    local loss = (y - x):square():mean() + posterior:kl():mean() * 1e-6
    opt:step(loss)
    last = loss:item()
    first = first or last
  end
  check.ok(last < 0.5 * first, ("from %.3f to %.3f"):format(first, last))
end)

check.test("in f16 what would overflow is computed in f32, where the config says so", function()
  local function decoded(upcast)
    ty.manual_seed(3)
    local model = models.AutoencoderKL(with { force_upcast = upcast }):eval()
    return ty.no_grad(function()
      model.decoder.conv_in.weight:mul_(2e5)
      model:to "f16"
      local weight = model.decoder.conv_in.weight
      local z = ty.randn(2, 4, 4, 4):to "f16"
      local y = model:decode(z, { sliced = true })
      check.equal({ y.dtype, rawequal(weight, model.decoder.conv_in.weight), weight.dtype }, { "f16", true, "f16" })
      local whole = models.AutoencoderKL(with { force_upcast = upcast }):eval()
      hub.assign(whole, model:state_dict(), { dtype = "f32" })
      return y, whole:decode(z:to "f32")
    end)
  end
  local y, want = decoded(true)
  check.ok((y:to "f32" - want):abs():max():item() <= 2e-3 * want:abs():max():item(), "f16, upcast")
  check.ok(not decoded(false):isfinite():all():item(), "without it the test would not overflow")
end)

check.test("configs and inputs that cannot be are one clear error", function()
  local function fails(changes, text) check.fails(function() models.AutoencoderKL(with(changes)) end, text) end
  fails({ norm_num_groups = 3 }, "AutoencoderKL: norm_num_groups 3 must divide block_out_channels[1], which is 8")
  fails({ act_fn = "mish" },
    "AutoencoderKL: config key 'act_fn': expected silu or swish, got mish, which is not supported")
  fails({ down_block_types = { "DownEncoderBlock2D" } },
    "config key 'down_block_types': expected as many as block_out_channels, 3, got 1")
  fails({ up_block_types = { "UpDecoderBlock2D", "UpBlock2D", "UpDecoderBlock2D" } },
    "config key 'up_block_types': expected UpDecoderBlock2D or AttnUpDecoderBlock2D, got UpBlock2D")
  fails({ block_out_channels = { 8, "8" } },
    "AutoencoderKL: config key 'block_out_channels' must be a list of positive integers, got a table")
  fails({ layers_per_block = 9000 }, "at most 16 levels and layers_per_block of at most 100, got 3 and 9000")
  local many = {}
  for i = 1, 70 do many[i] = 8 end
  fails({ block_out_channels = many }, "at most 16 levels and layers_per_block of at most 100, got 70 and 1")
  fails({ latents_std = { 1 } }, "'latents_std': expected one for each of the 4 latent_channels, got 1")
  fails({ latent_chanels = 4 }, "AutoencoderKL: no config key 'latent_chanels'")
  local model = models.AutoencoderKL(small)
  check.fails(function() model:encode(ty.zeros(1, 3, 16, 18)) end,
    "AutoencoderKL:encode: x: expected a height and a width that 4 divides, got a tensor [1, 3, 16, 18]")
  check.fails(function() model:decode(ty.zeros(4, 4, 4)) end,
    "AutoencoderKL:decode: z: expected a tensor of 4 dimensions, got a tensor [4, 4, 4]")
  check.fails(function() model:decode(ty.zeros(1, 4, 4, 4), { tile = 3 }) end,
    "AutoencoderKL:decode: tile: expected at least the 4 pixels of a latent, got 3")
  check.fails(function() model:decode(ty.zeros(1, 4, 4, 4), { tiles = 3 }) end, "no option 'tiles'")
end)

check.finish()
