--- What the processors of pictures and of clips share: their files, sizes, resizing as PIL does it, scaling of values,
-- patches.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- PIL's numbers of filters.
local filters = { [0] = "nearest", [2] = "bilinear", [3] = "bicubic" }

--- Pixels of a side at most.
M.MOST = 16384
local MOST = M.MOST

-- A null of a file is as if the name were not there.
local function without_nulls(config)
  local result = {}
  for key, value in pairs(config) do
    if value ~= ty.io.null then result[key] = value end
  end
  return result
end

--- The settings of a processor: of a table, of a file, or of a folder, where they are in processor_config.json under
-- `part` or else in the first of `names` that is there; and what errors call them.
---@param who string
---@param path string|table
---@param part string
---@param names string[]
---@return table config
---@return string at
function M.config(who, path, part, names)
  arguments.expect(who, "path", path, "a string or a table")
  if type(path) == "table" then return without_nulls(path), who .. ": a table" end
  local config, info = nil, ty.io.stat(path)
  if info and info.kind == "directory" then
    local whole, folder = path .. "/processor_config.json", path
    config = ty.io.stat(whole) and ty.io.load_json(whole) or nil
    config = type(config) == "table" and config[part] or nil
    path = config ~= nil and whole or folder .. "/" .. names[1]
    for i = #names, 1, -1 do
      local file = folder .. "/" .. names[i]
      if config == nil and ty.io.stat(file) then path = file end
    end
  end
  if config == nil then
    if not ty.io.stat(path) then arguments.fail("%s: %s is not there", who, path) end
    config = ty.io.load_json(path)
    if type(config) == "table" and type(config[part]) == "table" then config = config[part] end
  end
  local at = ("%s: %s"):format(who, path)
  if type(config) ~= "table" then
    arguments.fail("%s: expected an object, got %s", at, arguments.describe(config))
  end
  return without_nulls(config), at
end

--- The name of the filter of a config, by its number `resample` or that which the kind of processor has by itself.
---@param at string
---@param config table
---@param default integer
---@return string
function M.filter(at, config, default)
  local filter = filters[config.resample == nil and default or config.resample]
  if config.do_resize ~= false and not filter then
    arguments.fail("%s: resample: expected 0, 2 or 3 (nearest, bilinear, bicubic), got %s", at,
      tostring(config.resample))
  end
  return filter
end

--- Height and width of a config's size: { height, width }, or a shortest edge with the picture's shape, or a number.
---@param at string
---@param key string
---@return integer height
---@return integer width
function M.target(at, key, size, h, w, square)
  if math.type(size) == "integer" then size = square and { height = size, width = size } or { shortest_edge = size } end
  local a, b = type(size) == "table" and size.height, type(size) == "table" and size.width
  local edge = type(size) == "table" and size.shortest_edge
  if math.type(edge) == "integer" and edge >= 1 then
    -- The longer side is cut off to whole pixels, as in torchvision.
    if h <= w then a, b = edge, edge * w // h else a, b = edge * h // w, edge end
  end
  if math.type(a) ~= "integer" or math.type(b) ~= "integer" or a < 1 or b < 1 or a > MOST or b > MOST then
    arguments.fail("%s: %s: expected { height, width } or { shortest_edge } of 1 to %d pixels, got %s", at, key, MOST,
      type(size) == "table" and ty.io.json_encode(size) or arguments.describe(size))
  end
  return a, b
end

local function triple(at, config, key)
  local list = config[key]
  local ok = type(list) == "table" and #list == 3
  for i = 1, 3 do ok = ok and type(list[i]) == "number" and (key ~= "image_std" or list[i] ~= 0) end
  if not ok then
    arguments.fail("%s: %s: expected a list of three numbers%s, got %s", at, key, key == "image_std" and " but 0" or "",
      type(list) == "table" and ty.io.json_encode(list) or arguments.describe(list))
  end
  return ty.tensor({ list[1], list[2], list[3] }, { dtype = "f32" }):reshape(1, 3, 1, 1)
end

--- A function of pictures f32 [n, 3, h, w] of 0 to 255 that scales and normalises them as a config says.
---@param at string
---@param config table
---@return fun(x: Tensor): Tensor
function M.normaliser(at, config)
  local mean, std
  if config.do_normalize ~= false then
    mean, std = triple(at, config, "image_mean"), triple(at, config, "image_std")
  end
  local factor = config.do_rescale ~= false and (config.rescale_factor or 1 / 255) or 1
  if type(factor) ~= "number" then
    arguments.fail("%s: rescale_factor: expected a number, got %s", at, arguments.describe(factor))
  end
  return function(x)
    x = x * factor
    if mean then x = (x - mean) / std end
    return x
  end
end

--- Pictures f32 [n, 3, h, w] of 0 to 255 at another size, by a filter's name.
function M.resized(x, h, w, filter)
  if x.shape[3] == h and x.shape[4] == w then return x end
  if filter == "nearest" then return ty.interpolate(x, { h, w }, 0, "nearest-exact") end
  -- As PIL does it: rows first, and bytes after either step.
  local mode = filter == "bicubic" and "cubic" or "linear"
  for step, size in ipairs { w, h } do
    local dim = 4 - step
    if x.shape[dim + 1] ~= size then
      x = (ty.resample(x, dim, size, mode, false, 0, true) + 0.5):floor():clamp(0, 255)
    end
  end
  return x
end

--- One picture as f32 [1, 3, h, w] of 0 to 255: a file, or u8 [channels, h, w].
---@param picture string|Tensor
---@param what string  for errors: "picture 1"
function M.read(picture, what)
  local x = picture
  if type(x) == "string" then
    local ok, result = pcall(ty.io.load_image, x, { channels = 3 })
    if not ok then arguments.fail("processor: %s: %s", what, result) end
    x = result
  end
  if not ty.is_tensor(x) or x.dtype ~= "u8" or x.ndim ~= 3 or x:numel() == 0 or x.shape[1] > 4 or x.shape[1] == 2 then
    arguments.fail("processor: %s: expected a path or u8 [channels, h, w], got %s", what, arguments.describe(x))
  end
  if x.shape[1] == 1 then x = x:expand(3, x.shape[2], x.shape[3]) end
  return x:narrow(0, 0, 3):to("f32"):unsqueeze(0)
end

-- ---- patches ----

--- The nearest integer, of halves the even one.
---@param x number
---@return integer
function M.nearest(x)
  local low = math.floor(x)
  if x - low == 0.5 then return low % 2 == 0 and low or low + 1 end
  return math.floor(x + 0.5)
end

--- Height and width in multiples of `unit`, of at least `least` and at most `most` pixels in all, nearest to the
-- picture's.
function M.fitted(h, w, unit, least, most)
  local rows, columns = M.nearest(h / unit) * unit, M.nearest(w / unit) * unit
  if rows * columns > most then
    local beta = math.sqrt(h * w / most)
    rows, columns = math.max(unit, h / beta // unit * unit), math.max(unit, w / beta // unit * unit)
  elseif rows * columns < least then
    local beta = math.sqrt(least / (h * w))
    rows, columns = math.ceil(h * beta / unit) * unit, math.ceil(w * beta / unit) * unit
  end
  return math.tointeger(rows), math.tointeger(columns)
end

--- The settings of a processor of patches: patch_size, temporal_patch_size, merge_size, unit (pixels that go into one
-- feature, of a side), and least and most pixels of a picture.
---@param at string
---@param config table
---@param least integer
---@param most integer
---@return table
function M.patch_settings(at, config, least, most)
  local size = type(config.size) == "table" and config.size or {}
  local o = { patch_size = config.patch_size or 14, temporal_patch_size = config.temporal_patch_size or 2,
    merge_size = config.merge_size or 2, least = config.min_pixels or size.shortest_edge or least,
    most = config.max_pixels or size.longest_edge or most }
  for key, value in pairs(o) do
    local limit = (key == "least" or key == "most") and MOST * MOST or 1024
    if math.type(value) ~= "integer" or value < 1 or value > limit then
      local name = key == "least" and "size.shortest_edge" or key == "most" and "size.longest_edge" or key
      arguments.fail("%s: %s: expected an integer of 1 to %d, got %s", at, name, limit, arguments.describe(value))
    end
  end
  if o.least > o.most then
    arguments.fail("%s: size: expected shortest_edge at most longest_edge, got %d and %d", at, o.least, o.most)
  end
  o.unit = o.patch_size * o.merge_size
  return o
end

--- Height and width of a picture of h x w pixels for patches; an error where it does not fit.
---@param what string  for errors: "picture 1"
---@param o table      of patch_settings
---@param resize boolean
---@param most? integer  pixels, in the place of o.most
---@return integer height
---@return integer width
function M.patched_size(what, h, w, o, resize, most)
  if math.max(h, w) > 200 * math.min(h, w) then
    arguments.fail("processor: %s: expected at most 200 times as long as wide, got %d x %d", what, h, w)
  end
  if resize then return M.fitted(h, w, o.unit, o.least, most or o.most) end
  if h % o.unit ~= 0 or w % o.unit ~= 0 then
    arguments.fail("processor: %s: expected multiples of %d pixels without do_resize, got %d x %d", what, o.unit, h, w)
  end
  return h, w
end

--- Patches of frames x f32 [frames, 3, h, w], those that are merged one after another, [times * rows * columns,
-- values], and how many times (of temporal_patch_size frames, the last one again where some are missing), rows and
-- columns.
---@param x Tensor
---@param o table  of patch_settings
---@return Tensor patches
---@return integer[] grid
function M.patches(x, o)
  local p, m, deep = o.patch_size, o.merge_size, o.temporal_patch_size
  local frames, missing = x.shape[1], -x.shape[1] % deep
  local rows, columns = x.shape[3] // p, x.shape[4] // p
  if missing > 0 then
    x = ty.concat({ x, x:narrow(0, frames - 1, 1):expand(missing, 3, x.shape[3], x.shape[4]) }, 0)
  end
  local times = (frames + missing) // deep
  x = x:reshape(times, deep, 3, rows * p, columns * p):permute(0, 2, 1, 3, 4)
    :reshape(times, 3 * deep, rows // m, m, p, columns // m, m, p):permute(0, 2, 5, 3, 6, 1, 4, 7)
  return x:reshape(times * rows * columns, 3 * deep * p * p), { times, rows, columns }
end

return M
