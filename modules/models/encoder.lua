--- What the encoders of pictures and of CLIP's texts share: their options, hidden states by layer, checks of pictures,
-- positions of a grid of patches that is larger or smaller than in training.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local defaults = { layer = arguments.none, norm = arguments.none, checkpoint = false, interpolate = false,
  mask = arguments.none, sizes = arguments.none }
local kinds = { layer = "an integer or a list of integers", norm = "a boolean", mask = "a tensor",
  sizes = "a tensor" }

--- Reads the options of a call:
--   layer        which hidden states are wanted: 0 those of the embeddings, i those after layer i; -1 after the last
--                layer, -2 after the one before, as transformers counts; a list gives a list (nil: after the last norm)
--   norm         whether they go through the last norm (true for layer = nil, else false)
--   checkpoint   true: the backward pass runs each layer again, whose results then need not be kept
--   interpolate  of pictures, true: these may have another size than in training; positions are interpolated
--   mask         of texts: bool or i64 [n, t], 0: padding
--   sizes        of pictures of every shape in patches: i64 [n, 2], rows and columns of each
---@param who string
---@param names string[]  those that the caller has
function M.options(who, options, names)
  local own = { layer = defaults.layer, norm = defaults.norm, checkpoint = false }
  for _, name in ipairs(names) do own[name] = defaults[name] end
  return arguments.read(who, options, own, kinds)
end

-- The wanted layers as a list of numbers from 0 to count.
local function wanted(who, layer, count)
  local list = {}
  for i, value in ipairs(type(layer) == "table" and layer or { layer }) do
    if value < -count - 1 or value > count then
      arguments.fail("%s: layer: expected an integer in [%d, %d], got %d", who, -count - 1, count, value)
    end
    list[i] = math.tointeger(value < 0 and count + 1 + value or value)
  end
  return list
end

--- Sends x through a list of layers, each called with x and `mask`. whole: to the end, though what o.layer asks for may
-- lie before it. norm(x): the last norm. Returns the hidden states that the options ask for, and what the last layer
-- gave where it was run.
---@param o table  of M.options
function M.through(who, list, x, mask, o, whole, norm)
  local count = #list
  local layers = o.layer and wanted(who, o.layer, count) or { count }
  local kept, deepest = {}, whole and count or 0
  for _, i in ipairs(layers) do deepest = math.max(deepest, i) end
  kept[0] = x
  for i = 1, deepest do
    if o.checkpoint then x = ty.checkpoint(list[i], x, mask) else x = list[i](x, mask) end
    kept[i] = x
  end
  local normed, states = o.norm, {}
  if normed == nil then normed = not o.layer end
  for i, layer in ipairs(layers) do states[i] = normed and norm(kept[layer]) or kept[layer] end
  return type(o.layer) == "table" and states or states[1], kept[count]
end

local function sides(size)
  if type(size) == "table" then return size[1], size[2] end
  return size, size
end

--- The height and the width of a config's picture, in patches.
function M.grid(config)
  local height, width = sides(config.image_size)
  local patch_height, patch_width = sides(config.patch_size)
  return height // patch_height, width // patch_width
end

--- An error where no patch fits into a config's picture.
function M.check_grid(who, config)
  local rows, columns = M.grid(config)
  if rows == 0 or columns == 0 then
    error(("%s: patch_size must be at most image_size"):format(who), 0)
  end
end

--- Pictures x, checked, in the dtype of the weights.
---@param weight Tensor  of the convolution that takes them
function M.pictures(who, x, config, weight, interpolate)
  local height, width = sides(config.image_size)
  local shape = ty.is_tensor(x) and x.shape or {}
  if #shape ~= 4 or shape[2] ~= config.num_channels then
    arguments.fail("%s: pictures: expected a tensor [n, %d, height, width], got %s", who, config.num_channels,
      arguments.describe(x))
  end
  local patch_height, patch_width = sides(config.patch_size)
  if interpolate and (shape[3] < patch_height or shape[4] < patch_width) then
    arguments.fail("%s: pictures: expected at least a patch of %d x %d, got %s", who, patch_height, patch_width,
      arguments.describe(x))
  elseif not interpolate and (shape[3] ~= height or shape[4] ~= width) then
    arguments.fail("%s: pictures: expected [n, %d, %d, %d] without the option interpolate, got %s", who,
      config.num_channels, height, width, arguments.describe(x))
  end
  return x:to(weight.dtype)
end

-- The matrix [to, from] that resizes a row of `from` values to `to`, by cubic convolution with a = -0.75 and the ends
-- repeated. Keys 1981, "Cubic Convolution Interpolation for Digital Image Processing".
local function cubic(from, to, like)
  local place = (ty.arange(to):to "f64" + 0.5) * (from / to) - 0.5
  local first = place:floor()
  local t = place - first
  local a = -0.75
  local function near(d) return ((a + 2) * d - (a + 3)) * d * d + 1 end
  local function far(d) return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a end
  local weights = ty.stack({ far(t + 1), near(t), near(1 - t), far(2 - t) }, 1)
  local places = ty.stack({ first - 1, first, first + 1, first + 2 }, 1):clamp(0, from - 1):to "i64"
  local matrix = ty.zeros({ to, from }, { dtype = "f64" }):scatter_add(1, places, weights)
  return matrix:to { dtype = like.dtype, device = like.device }
end

--- Learned positions [before + rows * columns, d], of `before` tokens (1: the class) and of a grid of patches, for a
-- grid of to_rows x to_columns: interpolated bicubically or, as families differ, with antialias, "cubic" or "linear",
-- whose filter is as wide as the step where the grid gets smaller (cubic: a = -0.5).
---@param positions Tensor
---@param before? integer
---@param antialias? string
function M.resized(positions, rows, columns, to_rows, to_columns, before, antialias)
  if rows == to_rows and columns == to_columns then return positions end
  before = before or 1
  local grid = positions:narrow(0, before, rows * columns):reshape(rows, columns, -1)
  if antialias then
    grid = ty.resample(grid, 0, to_rows, antialias, false, 0, true)
    grid = ty.resample(grid, 1, to_columns, antialias, false, 0, true)
  else
    grid = ty.einsum("ri,cj,ijd->rcd", cubic(rows, to_rows, grid), cubic(columns, to_columns, grid), grid)
  end
  grid = grid:flatten(0, 1)
  return before == 0 and grid or ty.concat({ positions:narrow(0, 0, before), grid }, 0)
end

return M
