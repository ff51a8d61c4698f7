--- Making small pictures large: training and figures of networks like models.ESPCN, on luminance, as is usual; colours
-- are enlarged by bicubic interpolation. Pictures are floats from 0 to 1.
--
--     local sr = vision.super_resolution
--     local losses = sr.fit(model, crops, { steps = 2000 })
--     print(sr.psnr(model, photos))                       -- dB, and that of bicubic interpolation
--     local large = sr.enlarge(model, picture)            -- u8 [3, h, w] to u8 [3, 3 h, 3 w]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- ITU-R BT.601 in full range, as JPEG files have it: rows for Y, Cb, Cr.
local to_y = { { 0.299, 0.587, 0.114 }, { -0.168736, -0.331264, 0.5 }, { 0.5, -0.418688, -0.081312 } }
local to_rgb = { { 1, 0, 1.402 }, { 1, -0.344136, -0.714136 }, { 1, 1.772, 0 } }

local function turned(x, matrix, device)
  local rows, h, w = ty.tensor(matrix, { device = device }), x.shape[3], x.shape[4]
  return rows:matmul(x:flatten(2)):reshape(x.shape[1], 3, h, w)
end

-- u8 or floats [n, 3, h, w] as floats.
local function floats(x) return x.dtype == "u8" and x:to "f32" / 255 or x end

local function check_pictures(who, name, x)
  arguments.expect(who, name, x, "a tensor")
  if x.ndim ~= 4 or x.shape[2] ~= 3 then
    arguments.fail("%s: %s: expected [n, 3, h, w], got %s", who, name, arguments.describe(x))
  end
end

--- The luminance [n, 1, h, w] of pictures [n, 3, h, w].
---@param x Tensor
---@return Tensor
function M.luminance(x)
  check_pictures("super_resolution.luminance", "x", x)
  return turned(floats(x), { to_y[1], to_y[1], to_y[1] }, x.device):narrow(1, 0, 1)
end

--- Pictures [n, c, h, w] a whole number of times smaller, each pixel made of all that it covers: bicubic, antialiased.
-- Rows and columns that are left over are cut off. Returns the small pictures and what they are made of.
---@param x Tensor
---@param scale integer
---@return Tensor small
---@return Tensor large
function M.reduce(x, scale)
  local who = "super_resolution.reduce"
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "scale", scale, "an integer >= 1")
  if x.ndim ~= 4 or x.shape[3] < scale or x.shape[4] < scale then
    arguments.fail("%s: x: expected [n, c, h, w] of at least %d pixels, got %s", who, scale, arguments.describe(x))
  end
  local h, w = x.shape[3] // scale, x.shape[4] // scale
  local large = x:narrow(2, 0, h * scale):narrow(3, 0, w * scale):contiguous()
  return ty.interpolate(large, { size = { h, w }, mode = "bicubic", antialias = true }):clamp(0, 1), large
end

--- By bicubic interpolation.
---@param small Tensor
---@param scale integer
---@return Tensor
function M.bicubic(small, scale) return ty.interpolate(small, { scale = scale, mode = "bicubic" }):clamp(0, 1) end

--- PSNR in dB of pictures whose values lie within 0 and 1, without a border of `border` pixels (0), [n].
---@param x Tensor
---@param want Tensor
---@param border? integer
---@return Tensor
function M.decibels(x, want, border)
  local who = "super_resolution.decibels"
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "want", want, "a tensor")
  local b = arguments.expect(who, "border", border or 0, "an integer >= 0")
  if x.ndim ~= 4 or want.ndim ~= 4 or x.shape[3] ~= want.shape[3] or x.shape[4] ~= want.shape[4]
    or x.shape[3] <= 2 * b or x.shape[4] <= 2 * b then
    arguments.fail("%s: expected two [n, c, h, w] of one size above %d pixels, got %s and %s", who, 2 * b,
      arguments.describe(x), arguments.describe(want))
  end
  local h, w = x.shape[3] - 2 * b, x.shape[4] - 2 * b
  local function inner(t) return t:narrow(2, b, h):narrow(3, b, w) end
  return (inner(x) - inner(want)):square():mean({ 1, 2, 3 }):clamp(1e-10, math.huge):log10() * -10
end

local function check_set(who, name, set)
  arguments.expect(who, name, set, "a table")
  if #set == 0 then arguments.fail("%s: %s: expected a data set with pictures, got none", who, name) end
end

local fit_defaults = { steps = 2000, batch = 32, lr = 2e-3, weight_decay = 0, device = "cpu" }

--- Trains a network on crops whose sides its scale divides: each is made smaller and is to come back, turned and
-- mirrored at random. options: steps (2000), batch (32), lr (2e-3), weight_decay (0), device ("cpu"). Returns the
-- losses.
---@param model Module
---@param crops Dataset  of items with `image`, u8 [3, side, side]
---@param options? table
---@return number[]
function M.fit(model, crops, options)
  local who = "super_resolution.fit"
  arguments.expect(who, "model", model, "a function")
  local o = arguments.read(who, options, fit_defaults, { steps = "an integer >= 1", batch = "an integer >= 1",
    lr = "a finite number > 0", weight_decay = "a finite number >= 0", device = "a string" })
  check_set(who, "crops", crops)
  local scale, losses = model.config.scale, {}
  local function draw()
    local list = {}
    for i, at in ipairs(ty.randint(0, #crops, { o.batch }):tolist()) do list[i] = crops:get(at).image end
    return ty.stack(list, 0):to { device = o.device }
  end
  local optimizer = ty.optim.Adam(model:parameters(), { lr = o.lr, weight_decay = o.weight_decay,
    schedule = ty.optim.one_cycle { steps = o.steps } })
  model:train()
  ty.train.minimize(optimizer, o.steps, function(step)
    local large = M.luminance(draw())
    if ty.rand({}):item() < 0.5 then large = large:flip { 3 } end
    if ty.rand({}):item() < 0.5 then large = large:transpose(2, 3) end
    local small
    small, large = M.reduce(large, scale)
    local loss = ty.nn.mse_loss(model(small), large)
    losses[step] = loss:item()
    return loss
  end)
  model:eval()
  return losses
end

--- What a network makes of photographs of any size that were made smaller: the mean PSNR of luminance, that of bicubic
-- interpolation, and both of each. Borders as wide as the scale do not count.
---@param model Module    with config.scale
---@param photos Dataset  of items with `image`, u8 [3, h, w]
---@param count? integer  the first so many (all)
---@return number mean
---@return number bicubic
---@return number[] each
---@return number[] each_bicubic
function M.psnr(model, photos, count)
  arguments.expect("super_resolution.psnr", "model", model, "a function")
  arguments.expect("super_resolution.psnr", "count", count or 1, "an integer >= 1")
  check_set("super_resolution.psnr", "photos", photos)
  local scale, each, plain = model.config.scale, {}, {}
  ty.no_grad(function()
    for i = 0, math.min(count or #photos, #photos) - 1 do
      ty.scope(function()
        local small, large = M.reduce(M.luminance(photos:get(i).image:unsqueeze(0)), scale)
        each[i + 1] = M.decibels(model(small):clamp(0, 1), large, scale):item()
        plain[i + 1] = M.decibels(M.bicubic(small, scale), large, scale):item()
      end)
    end
  end)
  return ty.stats.mean(each), ty.stats.mean(plain), each, plain
end

--- A picture u8 [3, h, w], `scale` times as large: luminance by the network, colours by bicubic interpolation.
---@param model Module
---@param picture Tensor
---@return Tensor
function M.enlarge(model, picture)
  local who = "super_resolution.enlarge"
  arguments.expect(who, "model", model, "a function")
  arguments.expect(who, "picture", picture, "a tensor")
  if picture.ndim ~= 3 or picture.shape[1] ~= 3 then
    arguments.fail("%s: picture: expected [3, h, w], got %s", who, arguments.describe(picture))
  end
  return ty.no_grad(function()
    local yuv = turned(floats(picture:unsqueeze(0)), to_y, picture.device)
    local colours = ty.interpolate(yuv:narrow(1, 1, 2):contiguous(), { scale = model.config.scale, mode = "bicubic" })
    local large = ty.concat({ model(yuv:narrow(1, 0, 1):contiguous()), colours }, 1)
    return (turned(large, to_rgb, picture.device):clamp(0, 1) * 255):round():to("u8"):squeeze(0)
  end)
end

return M
