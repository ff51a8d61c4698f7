--- What pictures go through before a model sees them, by the preprocessor_config.json of its files: resize, centre
-- crop, rescale and normalise, as the image processors of transformers' CLIP, SigLIP, ViT, DeiT and Bit (DINOv2) do,
-- and cutting into tiles, as that of LLaVA-NeXT does, or into patches of the picture's own size, as Qwen2-VL's.
--
--     local process = hub.processor "path/of/a/folder"
--     local pictures = process { "one.jpg", picture }      -- f32 [2, 3, height, width]
--     local tiles, sizes = process { "one.jpg", picture }  -- of LLaVA-NeXT: f32 [tiles, 3, side, side], i64 [2, 2]
--     local patches, grids = process { "one.jpg" }         -- of Qwen2-VL: f32 [patches, values], i64 [1, 3]
local ty = require "tycho"
local anyres = require "tycho.models.anyres"
local arguments = require "tycho.arguments"

-- PIL's numbers of filters.
local filters = { [0] = "nearest", [2] = "bilinear", [3] = "bicubic" }

-- What kinds of processors do by themselves: resample, do_center_crop and the size that is one number, which is a
-- square or the shortest edge.
local shortest = { resample = 3, crop = true, square = false }
local kinds = { CLIP = shortest, Bit = shortest, Siglip = { resample = 3, crop = false, square = true },
  ViT = { resample = 2, crop = false, square = true },
  DeiT = { resample = 3, crop = true, square = true }, LlavaNext = { resample = 3, crop = true, square = false,
    tiles = true }, Qwen2VL = { resample = 3, crop = false, square = false, patches = true } }

local function kind_of(name)
  if type(name) ~= "string" then return nil end
  return kinds[name:match "^(.-)ImageProcessor$" or name:match "^(.-)ImageProcessorFast$"
    or name:match "^(.-)ImageProcessorPil$" or name:match "^(.-)FeatureExtractor$"]
end

local MOST = 16384 -- pixels of a side

local function fail(path, text, ...) arguments.fail("hub.processor: %s: " .. text, path, ...) end

-- Height and width of a config's size: { height, width }, or a shortest edge with the picture's shape, or a number.
local function target(path, key, size, h, w, square)
  if math.type(size) == "integer" then size = square and { height = size, width = size } or { shortest_edge = size } end
  local a, b = type(size) == "table" and size.height, type(size) == "table" and size.width
  local edge = type(size) == "table" and size.shortest_edge
  if math.type(edge) == "integer" and edge >= 1 then
    -- The longer side is cut off to whole pixels, as in torchvision.
    if h <= w then a, b = edge, edge * w // h else a, b = edge * h // w, edge end
  end
  if math.type(a) ~= "integer" or math.type(b) ~= "integer" or a < 1 or b < 1 or a > MOST or b > MOST then
    fail(path, "%s: expected { height, width } or { shortest_edge } of 1 to %d pixels, got %s", key, MOST,
      type(size) == "table" and ty.io.json_encode(size) or arguments.describe(size))
  end
  return a, b
end

local function triple(path, config, key)
  local list = config[key]
  if type(list) ~= "table" or #list ~= 3 then
    fail(path, "%s: expected a list of three numbers, got %s", key, arguments.describe(list))
  end
  return ty.tensor({ list[1], list[2], list[3] }, { dtype = "f32" }):reshape(1, 3, 1, 1)
end

local function resized(x, h, w, filter)
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

-- What is outside of the picture is black.
local function cropped(x, h, w)
  local height, width = x.shape[3], x.shape[4]
  local down, right = math.max(0, h - height), math.max(0, w - width)
  if down > 0 or right > 0 then
    -- The odd row or column more stands before the picture.
    x = x:pad { right - right // 2, right // 2, down - down // 2, down // 2 }
    height, width = x.shape[3], x.shape[4]
  end
  return x:narrow(2, (height - h) // 2, h):narrow(3, (width - w) // 2, w)
end

-- One picture as f32 [1, 3, h, w] of 0 to 255: a file, or u8 [channels, h, w].
local function read(picture, i)
  local x = picture
  if type(x) == "string" then x = ty.io.load_image(x, { channels = 3 }) end
  if not ty.is_tensor(x) or x.dtype ~= "u8" or x.ndim ~= 3 or x:numel() == 0 or x.shape[1] > 4 or x.shape[1] == 2 then
    arguments.fail("processor: picture %d: expected a path or u8 [channels, h, w], got %s", i, arguments.describe(x))
  end
  if x.shape[1] == 1 then x = x:expand(3, x.shape[2], x.shape[3]) end
  return x:narrow(0, 0, 3):to("f32"):unsqueeze(0)
end

-- ---- patches ----

-- The nearest integer, of halves the even one.
local function nearest(x)
  local low = math.floor(x)
  if x - low == 0.5 then return low % 2 == 0 and low or low + 1 end
  return math.floor(x + 0.5)
end

-- Height and width in multiples of `unit`, of at least `least` and at most `most` pixels in all, nearest to the
-- picture's.
local function fitted(h, w, unit, least, most)
  local rows, columns = nearest(h / unit) * unit, nearest(w / unit) * unit
  if rows * columns > most then
    local beta = math.sqrt(h * w / most)
    rows, columns = math.max(unit, h / beta // unit * unit), math.max(unit, w / beta // unit * unit)
  elseif rows * columns < least then
    local beta = math.sqrt(least / (h * w))
    rows, columns = math.ceil(h * beta / unit) * unit, math.ceil(w * beta / unit) * unit
  end
  return math.tointeger(rows), math.tointeger(columns)
end

-- The settings of a processor of patches.
local function patch_settings(path, config)
  local size = type(config.size) == "table" and config.size or {}
  local o = { patch_size = config.patch_size or 14, temporal_patch_size = config.temporal_patch_size or 2,
    merge_size = config.merge_size or 2, least = config.min_pixels or size.shortest_edge or 56 * 56,
    most = config.max_pixels or size.longest_edge or 28 * 28 * 1280 }
  for key, value in pairs(o) do
    local most = (key == "least" or key == "most") and MOST * MOST or 1024
    if math.type(value) ~= "integer" or value < 1 or value > most then
      fail(path, "%s: expected an integer of 1 to %d, got %s", key == "least" and "size.shortest_edge" or key == "most"
        and "size.longest_edge" or key, most, arguments.describe(value))
    end
  end
  if o.least > o.most then
    fail(path, "size: expected shortest_edge at most longest_edge, got %d and %d", o.least, o.most)
  end
  return o
end

-- Patches of a picture x f32 [1, 3, h, w], those that are merged one after another, [rows * columns, values], and rows
-- and columns. A picture is its own frame as often as a patch has frames.
local function patches_of(x, o)
  local p, m = o.patch_size, o.merge_size
  local rows, columns = x.shape[3] // p, x.shape[4] // p
  x = x:reshape(3, rows // m, m, p, columns // m, m, p):permute(1, 4, 2, 5, 0, 3, 6):unsqueeze(5)
  x = x:expand(rows // m, columns // m, m, m, 3, o.temporal_patch_size, p, p)
  return x:reshape(rows * columns, 3 * o.temporal_patch_size * p * p), rows, columns
end

-- ---- tiles ----

local function pinpoints(path, config)
  local list = config.image_grid_pinpoints
  local ok = type(list) == "table" and #list >= 1 and #list <= 1000
  for _, pair in ipairs(ok and list or {}) do
    for i = 1, 2 do
      local side = type(pair) == "table" and #pair == 2 and pair[i]
      ok = ok and math.type(side) == "integer" and side >= 1 and side <= MOST
    end
  end
  if not ok then
    fail(path, "image_grid_pinpoints: expected a list of pairs { height, width }, got %s", arguments.describe(list))
  end
  return list
end

-- Tiles of a picture x f32 [1, 3, h, w]: all of it at side x side, then, as large as fits into the best of the sizes
-- and on black, cut into squares, row by row.
local function tiles_of(x, side, tile, list, filter)
  local h, w = x.shape[3], x.shape[4]
  local height, width = anyres.best(h, w, list)
  local rows, columns = anyres.fitted(h, w, height, width)
  local large, top, left = resized(x, rows, columns, filter), (height - rows) // 2, (width - columns) // 2
  large = large:pad { left, width - columns - left, top, height - rows - top }
  local list_of = { resized(x, side, side, filter) }
  for i = 0, height - tile, tile do
    for j = 0, width - tile, tile do
      list_of[#list_of + 1] = large:narrow(2, i, tile):narrow(3, j, tile)
    end
  end
  return list_of
end

--- The processor of a folder (or of a file such as preprocessor_config.json, or of a table with its keys): a function
-- of a list of pictures, each a path or u8 [channels, h, w], that gives f32 [n, 3, height, width]; where pictures are
-- cut into tiles, f32 [all tiles, 3, side, side], those of one picture after another, and second i64 [n, 2], the
-- pictures' heights and widths; where they are cut into patches of the picture's own size, f32 [all patches, values]
-- and second i64 [n, 3], frames (1), rows and columns of patches. Pictures of grey have their one channel three times,
-- and an alpha channel is left out. A processor of another kind is an error.
---@param path string|table
---@return fun(pictures: (string|Tensor)[]): Tensor, Tensor? process
---@return table config
return function(path)
  arguments.expect("hub.processor", "path", path, "a string or a table")
  local config = path
  if type(path) == "table" then
    path = "a table"
  else
    local info = ty.io.stat(path)
    if info and info.kind == "directory" then path = path .. "/preprocessor_config.json" end
    if not ty.io.stat(path) then arguments.fail("hub.processor: %s is not there", path) end
    config = ty.io.load_json(path)
  end
  if type(config) ~= "table" then fail(path, "expected an object, got %s", arguments.describe(config)) end
  local name = config.image_processor_type or config.feature_extractor_type
  local kind = kind_of(name)
  if not kind then
    fail(path, "image_processor_type: expected that of CLIP, SigLIP, ViT, DeiT, Bit, LlavaNext or Qwen2VL, got %s",
      arguments.describe(name))
  end
  local filter = filters[config.resample == nil and kind.resample or config.resample]
  if config.do_resize ~= false and not filter then
    fail(path, "resample: expected 0, 2 or 3 (nearest, bilinear, bicubic), got %s", tostring(config.resample))
  end
  local mean, std
  if config.do_normalize ~= false then
    mean, std = triple(path, config, "image_mean"), triple(path, config, "image_std")
  end
  local factor = config.do_rescale ~= false and (config.rescale_factor or 1 / 255) or 1

  local crops = config.do_center_crop
  if crops == nil then crops = kind.crop and config.crop_size ~= nil end

  -- One picture or tile, f32 [1, 3, h, w] of 0 to 255.
  local function process(x)
    if config.do_resize ~= false then
      local h, w = target(path, "size", config.size, x.shape[3], x.shape[4], kind.square)
      x = resized(x, h, w, filter)
    end
    if crops == true then x = cropped(x, target(path, "crop_size", config.crop_size, 1, 1, true)) end
    x = x * factor
    if mean then x = (x - mean) / std end
    return x
  end

  if kind.patches then
    local o = patch_settings(path, config)
    local unit = o.patch_size * o.merge_size
    return function(pictures)
      arguments.expect("processor", "pictures", pictures, "a list")
      local all, grids = {}, {}
      for i, picture in ipairs(pictures) do
        local x = read(picture, i)
        local h, w = x.shape[3], x.shape[4]
        if math.max(h, w) > 200 * math.min(h, w) then
          arguments.fail("processor: picture %d: expected at most 200 times as long as wide, got %d x %d", i, h, w)
        end
        if config.do_resize ~= false then
          h, w = fitted(h, w, unit, o.least, o.most)
          x = resized(x, h, w, filter)
        elseif h % unit ~= 0 or w % unit ~= 0 then
          arguments.fail("processor: picture %d: expected multiples of %d pixels without do_resize, got %d x %d", i,
            unit, h, w)
        end
        x = x * factor
        if mean then x = (x - mean) / std end
        local patches, rows, columns = patches_of(x, o)
        all[i], grids[i] = patches, { 1, rows, columns }
      end
      if #all == 0 then arguments.fail "processor: pictures: expected at least one, got none" end
      return ty.concat(all, 0), ty.tensor(grids, { dtype = "i64" })
    end, config
  end

  if kind.tiles then
    local list = pinpoints(path, config)
    local side = math.min(target(path, "size", config.size, 1, 1, false))
    local tile = crops == true and target(path, "crop_size", config.crop_size, 1, 1, true) or side
    for _, size in ipairs(list) do
      if size[1] % tile ~= 0 or size[2] % tile ~= 0 then
        fail(path, "image_grid_pinpoints: expected multiples of the tile's side %d, got %d x %d", tile, size[1],
          size[2])
      end
    end
    return function(pictures)
      arguments.expect("processor", "pictures", pictures, "a list")
      local all, sizes = {}, {}
      for i, picture in ipairs(pictures) do
        local x = read(picture, i)
        sizes[i] = { x.shape[3], x.shape[4] }
        for _, part in ipairs(tiles_of(x, side, tile, list, filter)) do all[#all + 1] = process(part) end
      end
      if #all == 0 then arguments.fail "processor: pictures: expected at least one, got none" end
      return ty.concat(all, 0), ty.tensor(sizes, { dtype = "i64" })
    end, config
  end

  return function(pictures)
    arguments.expect("processor", "pictures", pictures, "a list")
    local list = {}
    for i, picture in ipairs(pictures) do
      list[i] = process(read(picture, i))
      for d = 3, 4 do
        if list[i].shape[d] ~= list[1].shape[d] then
          arguments.fail("processor: picture %d: expected %d x %d pixels as the first has, got %d x %d", i,
            list[1].shape[3], list[1].shape[4], list[i].shape[3], list[i].shape[4])
        end
      end
    end
    if #list == 0 then arguments.fail "processor: pictures: expected at least one, got none" end
    return ty.concat(list, 0)
  end, config
end
