--- Policies: transforms that are drawn for each batch, of fixed lists.
local ty = require "tycho"
local colour = require "tycho.data.transforms.colour"
local frame = require "tycho.data.transforms.frame"
local geometry = require "tycho.data.transforms.geometry"

local M = {}

local transform = frame.transform

-- The transforms of Cubuk et al. 2020 by name: at a strength of 0 to 1, with either sign where that has a meaning.
local function factor(change)
  return function(strength, sign)
    return function(batch)
      local n = batch.image:size(0)
      local factors = ty.full({ n }, math.max(0, 1 + sign * 0.9 * strength))
      batch.image = frame.as_floats(batch.image, function(x) return change(x, factors) end)
      return batch
    end
  end
end

local function affine(option)
  return function(strength, sign, fill)
    local given = option(strength * sign)
    given.fill = fill
    return geometry.affine(given)
  end
end

local function shifted(down, right)
  return function(strength, sign, fill)
    return transform("shift", function(batch)
      local n, _, h, w = table.unpack(batch.image.shape)
      local by = 150 / 331 * strength * sign
      local matrix = ty.eye(3, { dtype = "f64" }):expand(n, 3, 3):clone()
      matrix[":, 0, 2"], matrix[":, 1, 2"] = -math.floor(by * right * w + 0.5), -math.floor(by * down * h + 0.5)
      geometry.map(batch, matrix, { h, w }, fill)
    end)
  end
end

local moves = {
  identity = function() return function(batch) return batch end end,
  rotate = affine(function(s) return { degrees = { 30 * s, 30 * s } } end),
  shear_x = affine(function(s)
    local degrees = math.deg(math.atan(0.3 * s))
    return { shear = { degrees, degrees } }
  end),
  shift_x = shifted(0, 1), shift_y = shifted(1, 0),
  brightness = factor(colour.brighten), contrast = factor(colour.contrast), color = factor(colour.saturate),
  sharpness = function(strength, sign) return colour.sharpness(math.max(0, 1 + sign * 0.9 * strength), 1) end,
  posterize = function(strength) return colour.posterize(8 - math.floor(4 * strength + 0.5), 1) end,
  solarize = function(strength) return colour.solarize(1 - strength, 1) end,
  autocontrast = function() return colour.autocontrast(1) end,
  equalize = function() return colour.equalize(1) end,
}
local names = {}
for name in pairs(moves) do names[#names + 1] = name end
table.sort(names)

-- Runs each picture of a batch through transforms of its own: those that drew the same ones go together.
local function by_picture(batch, draw)
  local n, groups, order = batch.image:size(0), {}, {}
  for i = 0, n - 1 do
    local key, make = draw()
    if not groups[key] then
      groups[key] = { make = make, pictures = {} }
      order[#order + 1] = key
    end
    table.insert(groups[key].pictures, i)
  end
  local parts, positions = {}, {}
  for _, key in ipairs(order) do
    local group = groups[key]
    local at = ty.tensor(group.pictures)
    local part = {}
    for _, name in ipairs { "image", "mask", "boxes" } do
      if batch[name] then part[name] = batch[name]:index_select(0, at:to { device = batch[name].device }) end
    end
    part = group.make()(part)
    for name, value in pairs(part) do
      parts[name] = parts[name] or {}
      table.insert(parts[name], value)
    end
    table.move(group.pictures, 1, #group.pictures, #positions + 1, positions)
  end
  local back = ty.tensor(positions):argsort(0)
  for name, list in pairs(parts) do
    batch[name] = ty.concat(list, 0):index_select(0, back:to { device = list[1].device })
  end
end

--- For each picture `count` transforms drawn of 13 (rotate, shear, shift, light, colour ...), all at the strength
-- `magnitude` of 0 to 1 with a drawn sign (RandAugment, Cubuk et al. 2020). options: count (2), magnitude (0.3), fill
-- (0).
---@param given? {count: integer, magnitude: number, fill: number}
function M.rand_augment(given)
  local o = frame.options("rand_augment", given, { count = 2, magnitude = 0.3, fill = 0 },
    { count = "an integer in [0, 16]", magnitude = "a number in [0, 1]", fill = "a finite number" })
  return transform("rand_augment", function(batch)
    for _ = 1, o.count do
      by_picture(batch, function()
        local u = ty.rand(2):tolist()
        local name = names[math.min(#names, 1 + math.floor(u[1] * #names))]
        local sign = u[2] < 0.5 and -1 or 1
        return name .. sign, function() return moves[name](o.magnitude, sign, o.fill) end
      end)
    end
  end)
end

--- For each picture one transform of 13 at a strength that is drawn too (TrivialAugment, Mueller and Hutter 2021).
-- options: fill (0).
---@param given? {fill: number}
function M.trivial_augment(given)
  local o = frame.options("trivial_augment", given, { fill = 0 }, { fill = "a finite number" })
  return transform("trivial_augment", function(batch)
    by_picture(batch, function()
      local u = ty.rand(3):tolist()
      local name = names[math.min(#names, 1 + math.floor(u[1] * #names))]
      local sign, strength = u[2] < 0.5 and -1 or 1, math.floor(u[3] * 31) / 30
      return name .. sign .. strength, function() return moves[name](strength, sign, o.fill) end
    end)
  end)
end

return M
