--- What pictures go through before a model sees them, by the preprocessor_config.json of its files: resize, centre
-- crop, rescale and normalise, as the image processors of transformers' CLIP, SigLIP, ViT and DeiT do.
--
--     local process = hub.processor "path/of/a/folder"
--     local pictures = process { "one.jpg", picture }      -- f32 [2, 3, height, width]
local ty = require "tycho"
local arguments = require "tycho.arguments"

-- PIL's numbers of filters.
local filters = { [0] = "nearest", [2] = "bilinear", [3] = "bicubic" }

local known = { CLIPImageProcessor = true, CLIPFeatureExtractor = true, SiglipImageProcessor = true,
  ViTImageProcessor = true, ViTFeatureExtractor = true, DeiTImageProcessor = true, DeiTFeatureExtractor = true,
  CLIPImageProcessorFast = true, SiglipImageProcessorFast = true, ViTImageProcessorFast = true }

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
  -- Pixels are bytes again afterwards, as with PIL.
  return ty.interpolate(x, { h, w }, 0, filter, false, true):round():clamp(0, 255)
end

-- What is outside of the picture is black.
local function cropped(x, h, w)
  local height, width = x.shape[3], x.shape[4]
  local down, right = math.max(0, h - height), math.max(0, w - width)
  if down > 0 or right > 0 then
    x = x:pad { right // 2, right - right // 2, down // 2, down - down // 2 }
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

--- The processor of a folder (or of a file such as preprocessor_config.json): a function of a list of pictures, each a
-- path or u8 [channels, h, w], that gives f32 [n, 3, height, width]. Pictures of grey have their one channel three
-- times, and an alpha channel is left out. A processor of another kind is an error.
---@param path string
---@return fun(pictures: (string|Tensor)[]): Tensor process
---@return table config
return function(path)
  arguments.expect("hub.processor", "path", path, "a string")
  local info = ty.io.stat(path)
  if info and info.kind == "directory" then path = path .. "/preprocessor_config.json" end
  if not ty.io.stat(path) then arguments.fail("hub.processor: %s is not there", path) end
  local config = ty.io.load_json(path)
  if type(config) ~= "table" then fail(path, "expected an object, got %s", arguments.describe(config)) end
  local kind = config.image_processor_type or config.feature_extractor_type
  if not known[kind] then
    fail(path, "image_processor_type: expected that of CLIP, SigLIP, ViT or DeiT, got %s", arguments.describe(kind))
  end
  local square = not kind:find "^CLIP" -- of a size that is one number
  local filter = filters[config.resample == nil and (kind:find "^CLIP" and 3 or 2) or config.resample]
  if config.do_resize ~= false and not filter then
    fail(path, "resample: expected 0, 2 or 3 (nearest, bilinear, bicubic), got %s", tostring(config.resample))
  end
  local mean, std
  if config.do_normalize ~= false then
    mean, std = triple(path, config, "image_mean"), triple(path, config, "image_std")
  end
  local factor = config.do_rescale ~= false and (config.rescale_factor or 1 / 255) or 1

  local function process(picture, i)
    local x = read(picture, i)
    if config.do_resize ~= false then
      local h, w = target(path, "size", config.size, x.shape[3], x.shape[4], square)
      x = resized(x, h, w, filter)
    end
    if config.do_center_crop == true then x = cropped(x, target(path, "crop_size", config.crop_size, 1, 1, true)) end
    x = x * factor
    if mean then x = (x - mean) / std end
    return x
  end

  return function(pictures)
    arguments.expect("processor", "pictures", pictures, "a list")
    local list = {}
    for i, picture in ipairs(pictures) do
      list[i] = process(picture, i)
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
