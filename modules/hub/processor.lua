--- What pictures go through before a model sees them, by the preprocessor_config.json of its files: resize, centre
-- crop, rescale and normalise, as the image processors of transformers' CLIP, SigLIP, ViT, DeiT and Bit (DINOv2) do,
-- and cutting into tiles, as that of LLaVA-NeXT does, or into patches of the picture's own size, as Qwen2-VL's and
-- SigLIP 2's (NaFlex). Clips have tycho.hub.video_processor.
--
--     local process = hub.processor "path/of/a/folder"
--     local pictures = process { "one.jpg", picture }      -- f32 [2, 3, height, width]
--     local tiles, sizes = process { "one.jpg", picture }  -- of LLaVA-NeXT: f32 [tiles, 3, side, side], i64 [2, 2]
--     local patches, grids = process { "one.jpg" }         -- of Qwen2-VL: f32 [patches, values], i64 [1, 3]
--     local patches, sizes = process { "one.jpg" }         -- of SigLIP 2: f32 [1, most, values], i64 [1, 2]
local ty = require "tycho"
local anyres = require "tycho.models.anyres"
local arguments = require "tycho.arguments"
local pixels = require "tycho.hub.pixels"

-- What kinds of processors do by themselves: resample, do_center_crop and the size that is one number, which is a
-- square or the shortest edge.
local shortest = { resample = 3, crop = true, square = false }
local kinds = { CLIP = shortest, Bit = shortest, Siglip = { resample = 3, crop = false, square = true },
  ViT = { resample = 2, crop = false, square = true },
  DeiT = { resample = 3, crop = true, square = true }, LlavaNext = { resample = 3, crop = true, square = false,
    tiles = true }, Qwen2VL = { resample = 3, crop = false, square = false, patches = true },
  Siglip2 = { resample = 2, crop = false, square = true, shaped = true } }

local function kind_of(name)
  if type(name) ~= "string" then return nil end
  return kinds[name:match "^(.-)ImageProcessor$" or name:match "^(.-)ImageProcessorFast$"
    or name:match "^(.-)ImageProcessorPil$" or name:match "^(.-)FeatureExtractor$"]
end

local MOST = pixels.MOST
local resized, target = pixels.resized, pixels.target

local function fail(at, text, ...) arguments.fail("%s: " .. text, at, ...) end

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

-- ---- patches of a picture's own shape ----

-- Sides of a picture of h x w pixels in whole patches of p, at most `most` of them: the largest scale that leaves room,
-- by bisection in the steps of transformers, which rounding depends on.
local function shape_of(h, w, p, most)
  local function sides(scale)
    return math.max(1, math.ceil(h * scale / p)), math.max(1, math.ceil(w * scale / p))
  end
  local low, high = 1e-6, 100.0
  while high - low >= 1e-5 do
    local scale = (low + high) / 2
    local rows, columns = sides(scale)
    if rows * columns <= most then low = scale else high = scale end
  end
  local rows, columns = sides(low)
  return math.tointeger(rows), math.tointeger(columns)
end

-- SigLIP 2's: a function of pictures.
local function shaped(at, config, filter, normalise)
  local o = { patch_size = config.patch_size or 16, max_num_patches = config.max_num_patches or 256 }
  for key, value in pairs(o) do
    local most = key == "patch_size" and 1024 or 1 << 20
    if math.type(value) ~= "integer" or value < 1 or value > most then
      fail(at, "%s: expected an integer of 1 to %d, got %s", key, most, arguments.describe(value))
    end
  end
  local p, most = o.patch_size, o.max_num_patches
  return function(pictures)
    local all, sizes = {}, {}
    for i, picture in ipairs(pictures) do
      local x = pixels.read(picture, "picture " .. i)
      local h, w = x.shape[3], x.shape[4]
      local rows, columns = h // p, w // p
      if config.do_resize ~= false then
        rows, columns = shape_of(h, w, p, most)
        if rows * columns > most then
          arguments.fail("processor: picture %d: expected a shape that %d patches can have, got %d x %d", i, most, h, w)
        end
        x = resized(x, rows * p, columns * p, filter)
      elseif h ~= rows * p or w ~= columns * p or rows * columns > most then
        arguments.fail("processor: picture %d: expected multiples of %d pixels and at most %d patches without "
          .. "do_resize, got %d x %d", i, p, most, h, w)
      end
      x = normalise(x):reshape(3, rows, p, columns, p):permute(1, 3, 2, 4, 0):reshape(rows * columns, -1)
      if rows * columns < most then x = ty.concat({ x, ty.zeros(most - rows * columns, x.shape[2]) }, 0) end
      all[i], sizes[i] = x, { rows, columns }
    end
    return ty.stack(all, 0), ty.tensor(sizes, { dtype = "i64" })
  end
end

-- ---- tiles ----

local function pinpoints(at, config)
  local list = config.image_grid_pinpoints
  local ok = type(list) == "table" and #list >= 1 and #list <= 1000
  for _, pair in ipairs(ok and list or {}) do
    for i = 1, 2 do
      local side = type(pair) == "table" and #pair == 2 and pair[i]
      ok = ok and math.type(side) == "integer" and side >= 1 and side <= MOST
    end
  end
  if not ok then
    fail(at, "image_grid_pinpoints: expected a list of pairs { height, width }, got %s", arguments.describe(list))
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
-- pictures' heights and widths; where they are cut into patches of the picture's own size, as Qwen2-VL has them, f32
-- [all patches, values] and second i64 [n, 3], frames (1), rows and columns of patches; as SigLIP 2 has them, f32 [n,
-- max_num_patches, values], the places that a picture does not need being 0, and second i64 [n, 2], rows and columns.
-- Pictures of grey have their one channel three times, and an alpha channel is left out. A processor of another kind is
-- an error. Files of transformers 5, processor_config.json with an image_processor in it, are read too.
---@param path string|table
---@return fun(pictures: (string|Tensor)[]): Tensor, Tensor? process
---@return table config
return function(path)
  local config, at = pixels.config("hub.processor", path, "image_processor", { "preprocessor_config.json" })
  local name = config.image_processor_type or config.feature_extractor_type
  local kind = kind_of(name)
  if not kind then
    fail(at, "image_processor_type: expected that of CLIP, SigLIP, ViT, DeiT, Bit, LlavaNext, Qwen2VL or Siglip2, "
      .. "got %s", arguments.describe(name))
  end
  local filter = pixels.filter(at, config, kind.resample)
  local normalise = pixels.normaliser(at, config)
  local crops = config.do_center_crop
  if crops == nil then crops = kind.crop and config.crop_size ~= nil end

  -- A processor's function of a list of pictures, checked.
  local function of(make)
    return function(pictures)
      arguments.expect("processor", "pictures", pictures, "a list")
      if #pictures == 0 then arguments.fail "processor: pictures: expected at least one, got none" end
      return make(pictures)
    end, config
  end

  -- One picture or tile, f32 [1, 3, h, w] of 0 to 255.
  local function process(x)
    if config.do_resize ~= false then
      local h, w = target(at, "size", config.size, x.shape[3], x.shape[4], kind.square)
      x = resized(x, h, w, filter)
    end
    if crops == true then x = cropped(x, target(at, "crop_size", config.crop_size, 1, 1, true)) end
    return normalise(x)
  end

  if kind.shaped then return of(shaped(at, config, filter, normalise)) end

  if kind.patches then
    local o = pixels.patch_settings(at, config, 56 * 56, 28 * 28 * 1280)
    return of(function(pictures)
      local all, grids = {}, {}
      for i, picture in ipairs(pictures) do
        local x = pixels.read(picture, "picture " .. i)
        local h, w = pixels.patched_size("picture " .. i, x.shape[3], x.shape[4], o, config.do_resize ~= false)
        all[i], grids[i] = pixels.patches(normalise(resized(x, h, w, filter)), o)
      end
      return ty.concat(all, 0), ty.tensor(grids, { dtype = "i64" })
    end)
  end

  if kind.tiles then
    local list = pinpoints(at, config)
    local side = math.min(target(at, "size", config.size, 1, 1, false))
    local tile = crops == true and target(at, "crop_size", config.crop_size, 1, 1, true) or side
    for _, size in ipairs(list) do
      if size[1] % tile ~= 0 or size[2] % tile ~= 0 then
        fail(at, "image_grid_pinpoints: expected multiples of the tile's side %d, got %d x %d", tile, size[1],
          size[2])
      end
    end
    return of(function(pictures)
      local all, sizes = {}, {}
      for i, picture in ipairs(pictures) do
        local x = pixels.read(picture, "picture " .. i)
        sizes[i] = { x.shape[3], x.shape[4] }
        for _, part in ipairs(tiles_of(x, side, tile, list, filter)) do all[#all + 1] = process(part) end
      end
      return ty.concat(all, 0), ty.tensor(sizes, { dtype = "i64" })
    end)
  end

  return of(function(pictures)
    local list = {}
    for i, picture in ipairs(pictures) do
      list[i] = process(pixels.read(picture, "picture " .. i))
      for d = 3, 4 do
        if list[i].shape[d] ~= list[1].shape[d] then
          arguments.fail("processor: picture %d: expected %d x %d pixels as the first has, got %d x %d", i,
            list[1].shape[3], list[1].shape[4], list[i].shape[3], list[i].shape[4])
        end
      end
    end
    return ty.concat(list, 0)
  end)
end
