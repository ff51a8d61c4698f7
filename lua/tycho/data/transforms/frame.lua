--- What all transforms share: the fields of a batch, draws for each picture, and the checks of arguments.
--
-- A transform is a function of a batch that gives another: a table with `image` [n, c, h, w], u8 or floats of 0 to 1,
-- and perhaps `mask` [n, h, w] or [n, k, h, w] of whole numbers, `boxes` [n, k, 4] (left, top, right, bottom in pixels)
-- and `label`. Other fields pass. An item, whose image is [c, h, w], is a batch of one. Draws come from the generator,
-- which a DataLoader seeds for each batch.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local expect, fail = arguments.expect, arguments.fail

local item_fields = { image = 3, mask = 2, boxes = 2 } -- dimensions of an item's; masks may have one more

local function copy(t)
  local y = {}
  for key, value in pairs(t) do y[key] = value end
  return y
end

local function batched(who, batch)
  if type(batch) ~= "table" then batch = { image = batch } end
  local image = batch.image
  if not ty.is_tensor(image) or image.ndim < 3 or image.ndim > 4 then
    fail("transforms.%s: batch: expected a table with `image` [n, c, h, w] or [c, h, w], got %s", who,
      ty.is_tensor(image) and ("image [%s]"):format(table.concat(image.shape, ", ")) or arguments.describe(image))
  end
  if image.dtype ~= "u8" and not image:is_floating_point() then
    fail("transforms.%s: batch: expected an image of u8 or floats, got %s", who, image.dtype)
  end
  batch = copy(batch)
  local single = image.ndim == 3
  if single then
    for name in pairs(item_fields) do
      if ty.is_tensor(batch[name]) then batch[name] = batch[name]:unsqueeze(0) end
    end
  end
  return batch, single
end

--- A transform of fn(batch), which may change the fields of its table; a tensor alone is an image.
---@param who string  its name in errors
---@param fn fun(batch: table)
---@return fun(batch: table|Tensor): table|Tensor
function M.transform(who, fn)
  return function(given)
    local batch, single = batched(who, given)
    batch = fn(batch) or batch
    if single then
      for name in pairs(item_fields) do
        if ty.is_tensor(batch[name]) then batch[name] = batch[name]:select(0, 0) end
      end
    end
    if type(given) ~= "table" then return batch.image end
    return batch
  end
end

--- n uniform draws from low to high, on the CPU.
---@return Tensor f32 [n]
function M.draws(n, low, high) return ty.rand(n) * ((high or 1) - (low or 0)) + (low or 0) end

--- Which of n pictures a transform of probability p is done to.
---@return Tensor bool [n]
function M.chosen(n, p) return ty.rand(n):lt(p) end

--- `changed` for the pictures that are chosen, and what they were for the others.
---@param chosen Tensor  bool [n]
---@param changed Tensor  [n, ...]
---@param x Tensor  [n, ...]
---@return Tensor
function M.where(chosen, changed, x)
  local shape = { chosen:numel() }
  for d = 2, x.ndim do shape[d] = 1 end
  return ty.where(chosen:to { device = x.device }:reshape(shape), changed, x)
end

--- Numbers of the pictures as floats [n, 1, 1, 1] beside their images.
function M.beside(values, image)
  local float = image:is_floating_point() and image.dtype or "f32"
  return values:to { dtype = float, device = image.device }:reshape(-1, 1, 1, 1)
end

--- fn of an image as floats of 0 to 1, its result as bytes again where it came as such.
---@param image Tensor
---@param fn fun(x: Tensor): Tensor
---@return Tensor
function M.as_floats(image, fn)
  if image.dtype ~= "u8" then return fn(image) end
  return (fn(image:to "f32" / 255) * 255):round():clamp(0, 255):to "u8"
end

--- { height, width } of a number or a list of two.
---@return integer[]
function M.size_of(who, size)
  who = "transforms." .. who
  expect(who, "size", size, "an integer in [1, 65535] or a list of integers in [1, 65535]")
  if type(size) == "number" then return { size, size } end
  if #size ~= 2 then fail("%s: size: expected { height, width }, got %d numbers", who, #size) end
  return { size[1], size[2] }
end

--- A range { low, high } of a list of two, or -x to x of a number.
function M.range_of(who, name, value, around)
  who = "transforms." .. who
  expect(who, name, value, "a finite number or a list of finite numbers")
  if type(value) == "number" then return { (around or 0) - value, (around or 0) + value } end
  if #value ~= 2 or value[1] > value[2] then
    fail("%s: %s: expected { low, high }, got {%s}", who, name, table.concat(value, ", "))
  end
  return { value[1], value[2] }
end

--- A probability.
function M.probability(who, p)
  return expect("transforms." .. who, "p", p == nil and 0.5 or p, "a number in [0, 1]")
end

--- Options of a transform, checked.
function M.options(who, given, defaults, kinds)
  return arguments.read("transforms." .. who, given, defaults, kinds)
end

return M
