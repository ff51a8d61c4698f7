--- How alike two pictures look: structural similarity, at one scale and at several, and distances in the features of a
-- network.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

local function pictures(who, a, b, least)
  expect(who, "a", a, "a tensor")
  expect(who, "b", b, "a tensor")
  for what, x in pairs { a = a, b = b } do
    if x.ndim ~= 4 or x.shape[3] < least or x.shape[4] < least then
      fail("%s: %s: expected [n, c, h, w] with sides of at least %d, got %s", who, what, least, describe(x))
    end
  end
  if table.concat(a.shape, ",") ~= table.concat(b.shape, ",") then
    fail("%s: b: expected the shape of a, [%s], got %s", who, table.concat(a.shape, ", "), describe(b))
  end
  return a:to "f64", b:to "f64"
end

-- The Gaussian window, summing to 1: a row; the column is the same.
local function gaussian(size, sigma)
  local x = ty.arange(size):to "f64" - (size - 1) / 2
  local w = (x:square() * (-0.5 / sigma ^ 2)):exp()
  return w / w:sum()
end

-- Means of maps [n, 1, h, w] under the window, where it lies within them.
local function blur(x, window)
  local size = window.shape[1]
  return x:conv2d(window:reshape(1, 1, 1, size)):conv2d(window:reshape(1, 1, size, 1))
end

-- Means over each picture [n] of likeness in all and in contrast and structure alone, equations 12 and 13 of Wang et
-- al. 2004 without and with the first factor.
local function similarity(x, y, o, window)
  local n = x.shape[1]
  local function flat(t) return t:reshape(-1, 1, t.shape[3], t.shape[4]) end
  x, y = flat(x), flat(y)
  local mean_x, mean_y = blur(x, window), blur(y, window)
  local xx, yy = blur(x * x, window) - mean_x:square(), blur(y * y, window) - mean_y:square()
  local xy = blur(x * y, window) - mean_x * mean_y
  local c1, c2 = (0.01 * o.range) ^ 2, (0.03 * o.range) ^ 2
  local structure = (xy * 2 + c2) / (xx + yy + c2)
  local luminance = (mean_x * mean_y * 2 + c1) / (mean_x:square() + mean_y:square() + c1)
  -- For each channel of each picture: [n, c].
  local function mean(t) return t:flatten(1):mean { 1 }:reshape(n, -1) end
  return mean(structure * luminance), mean(structure)
end

local defaults = { range = 1, window = 11, sigma = 1.5 }
local kinds = { range = "a finite number > 0", window = "an integer >= 1", sigma = "a finite number > 0" }

--- Structural similarity of each picture of a [n, c, h, w] to that of b, f64 [n]: 1 for equal ones. Channels are
-- measured each for itself and averaged; the border where the window does not fit is left out. Wang et al. 2004, "Image
-- Quality Assessment: From Error Visibility to Structural Similarity". options: range (1: between the smallest and the
-- largest value there can be; 2 for pictures from -1 to 1, 255 for bytes), window (11), sigma (1.5).
---@param a Tensor
---@param b Tensor
---@param options? {range?: number, window?: integer, sigma?: number}
---@return Tensor
function M.ssim(a, b, options)
  local who = "measure.ssim"
  local o = arguments.read(who, options, defaults, kinds)
  local x, y = pictures(who, a, b, o.window)
  return (similarity(x, y, o, gaussian(o.window, o.sigma):to { device = a.device })):mean { 1 }
end

local WEIGHTS = { 0.0448, 0.2856, 0.3001, 0.2363, 0.1333 }

--- Structural similarity over scales, f64 [n]: contrast and structure at each, all at the coarsest, weighted and
-- multiplied; between scales, means of 2 x 2. Wang et al. 2003, "Multi-scale Structural Similarity for Image Quality
-- Assessment". Sides of at least 16 times the window less 15 for five scales. options: those of ssim, and weights (the
-- five of the paper; fewer, for smaller pictures).
---@param a Tensor
---@param b Tensor
---@param options? table
---@return Tensor
function M.ms_ssim(a, b, options)
  local who = "measure.ms_ssim"
  local given = { weights = WEIGHTS }
  for key, value in pairs(defaults) do given[key] = value end
  local o = arguments.read(who, options, given, { range = kinds.range, window = kinds.window, sigma = kinds.sigma,
    weights = "a list of numbers > 0" })
  local levels = #o.weights
  if levels == 0 then fail("%s: weights: expected at least one, got none", who) end
  local x, y = pictures(who, a, b, ((o.window - 1) << (levels - 1)) + 1)
  local window, product = gaussian(o.window, o.sigma):to { device = a.device }, nil
  for level, weight in ipairs(o.weights) do
    local all, structure = similarity(x, y, o, window)
    -- What is less than nothing alike counts as nothing: a power of it would be no number.
    local part = (level == levels and all or structure):clamp(0) ^ weight
    product = product and product * part or part
    if level < levels then
      local pads = { x.shape[3] % 2, x.shape[4] % 2 }
      x, y = x:avg_pool2d({ 2, 2 }, { 2, 2 }, pads), y:avg_pool2d({ 2, 2 }, { 2, 2 }, pads)
    end
  end
  return product:mean { 1 }
end

--- A function that gives what modules of a network put out when it is called: features(...) returns the first outputs
-- of the modules of these names, a list in their order. Runs without gradients and in evaluation mode.
---@param model Module
---@param names string[]
---@return fun(...): Tensor[]
function M.features(model, names)
  local who = "measure.features"
  expect(who, "model", model, "a module")
  expect(who, "names", names, "a list of strings")
  if #names == 0 then fail("%s: names: expected at least one, got none", who) end
  local _, modules = ty.nn.surgery.modules(model)
  for i, name in ipairs(names) do
    if not modules[name] then
      fail("%s: names[%d]: expected the name of a module of the network, got %s", who, i, name)
    end
  end
  return function(...)
    local found, undo, training = {}, {}, model.training
    for i, name in ipairs(names) do
      undo[i] = modules[name]:register_forward_hook(function(_, output)
        found[i] = type(output) == "table" and output[1] or output
      end)
    end
    model:eval()
    local results = table.pack(pcall(ty.no_grad, function(...) model(...) end, ...))
    for _, fn in ipairs(undo) do fn() end
    if training then model:train() end
    if not results[1] then error(results[2], 0) end
    for i, name in ipairs(names) do
      if not ty.is_tensor(found[i]) then fail("%s: names: expected modules that are called, got %s", who, name) end
    end
    return found
  end
end

--- Distance of each picture of a to that of b in the features of a network, f64 [n]: features(x) gives a list of maps
-- [n, c, h, w] (or tokens [n, t, c]); at each place these are brought to length 1, and what is summed over channels,
-- averaged over places and summed over the list is their squared difference. That is Zhang et al. 2018, "The
-- Unreasonable Effectiveness of Deep Features as a Perceptual Metric", without the weights learnt from people's
-- judgements: numbers of one network compare with each other, not with published LPIPS.
---@param a Tensor
---@param b Tensor
---@param features fun(x: Tensor): Tensor[]
---@return Tensor
function M.perceptual(a, b, features)
  local who = "measure.perceptual"
  expect(who, "a", a, "a tensor")
  expect(who, "b", b, "a tensor")
  expect(who, "features", features, "a function")
  local of_a, of_b, sum = features(a), features(b), nil
  expect(who, "features(a)", of_a, "a list")
  for i, x in ipairs(of_a) do
    if x.ndim ~= 3 and x.ndim ~= 4 then
      fail("%s: features(a)[%d]: expected [n, c, h, w] or [n, tokens, c], got %s", who, i, describe(x))
    end
    local channels = x.ndim == 4 and 1 or 2
    local function unit(y)
      y = y:to "f64"
      return y / (y:square():sum(channels, true):sqrt() + 1e-10)
    end
    local d = (unit(x) - unit(of_b[i])):square():sum(channels):flatten(1):mean { 1 }
    sum = sum and sum + d or d
  end
  return sum
end

return M
