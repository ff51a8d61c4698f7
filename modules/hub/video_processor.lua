--- What clips go through before Qwen2-VL and Qwen2.5-VL see them, by the video_preprocessor_config.json of their files
-- (or what newer and older ones have in its place, processor_config.json and preprocessor_config.json): frames are
-- chosen, resized, normalised and cut into patches of two frames each, as transformers' Qwen2VLVideoProcessor does.
--
--     local process = hub.video_processor "path/of/a/folder"
--     local patches, grids, seconds = process({ { "1.png", "2.png", "3.png" }, item.video }, { fps = 2 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local pixels = require "tycho.hub.pixels"

local FPS = 24 -- of a clip that nobody says anything of, as in transformers
local MOST_FRAMES = 1 << 16

local defaults = { do_sample_frames = false, min_frames = 4, max_frames = 768, cap_pixels_per_frame = false,
  max_video_tokens = 128000 }

-- The settings of frames.
local function frame_settings(at, config)
  local o = { num_frames = config.num_frames, fps = config.fps }
  for key, value in pairs(defaults) do
    o[key] = config[key]
    if o[key] == nil then o[key] = value end
    if type(o[key]) ~= type(value) or type(value) == "number" and (math.type(o[key]) ~= "integer" or o[key] < 1) then
      arguments.fail("%s: %s: expected %s, got %s", at, key, type(value) == "number" and "an integer > 0"
        or "true or false", arguments.describe(o[key]))
    end
  end
  for _, key in ipairs { "num_frames", "fps" } do
    if o[key] ~= nil and not (type(o[key]) == "number" and o[key] > 0 and o[key] < math.huge) then
      arguments.fail("%s: %s: expected a number > 0, got %s", at, key, arguments.describe(o[key]))
    end
  end
  if o.do_sample_frames and o.num_frames and o.fps then
    arguments.fail("%s: expected num_frames or fps, got both", at)
  end
  return o
end

local function as_f32(x) return (string.unpack("f", string.pack("f", x))) end

-- The places of the frames that are taken of `count`, from 0, and how many a second these are: all of them, or as many
-- as the settings ask for, at even distances.
local function chosen(what, count, fps, o, deep)
  local wanted = count
  if o.do_sample_frames and o.num_frames then
    wanted = pixels.nearest(o.num_frames / deep) * deep
  elseif o.do_sample_frames and o.fps then
    if not fps then arguments.fail("processor: %s: fps: expected a number > 0, got nil", what) end
    local most = math.min(o.max_frames, count) // deep * deep
    wanted = math.min(math.max(count / fps * o.fps, o.min_frames), most, count) // deep * deep
  end
  wanted = math.tointeger(wanted)
  if wanted < 1 or wanted > count then
    arguments.fail("processor: %s: expected at least the %d frames that are taken of it, got %d", what,
      math.max(wanted, deep), count)
  end
  local places = {}
  -- Steps as torch.arange makes them.
  for i = 0, wanted - 1 do places[i + 1] = math.min(as_f32(i * (count / wanted)) // 1 | 0, count - 1) end
  return places, fps and wanted / count * fps or FPS
end

-- A clip's frames as a function of a list of places, f32 [frames, 3, h, w] of 0 to 255, and how many it has.
local function frames_of(clip, what)
  if ty.is_tensor(clip) then
    if clip.dtype ~= "u8" or clip.ndim ~= 4 or clip:numel() == 0 or clip.shape[2] ~= 1 and clip.shape[2] ~= 3
      and clip.shape[2] ~= 4 then
      arguments.fail("processor: %s: expected u8 [frames, channels, h, w] or a list of pictures, got %s", what,
        arguments.describe(clip))
    end
    return function(places)
      local x = clip:index_select(0, ty.tensor(places, { dtype = "i64" }))
      if x.shape[2] == 1 then x = x:expand(x.shape[1], 3, x.shape[3], x.shape[4]) end
      return x:narrow(1, 0, 3):to "f32"
    end, clip.shape[1]
  elseif type(clip) ~= "table" or #clip == 0 then
    arguments.fail("processor: %s: expected u8 [frames, channels, h, w] or a list of pictures, got %s", what,
      arguments.describe(clip))
  end
  return function(places)
    local list = {}
    for i, place in ipairs(places) do
      local x = pixels.read(clip[place + 1], ("%s, frame %d"):format(what, place + 1))
      if i > 1 and (x.shape[3] ~= list[1].shape[3] or x.shape[4] ~= list[1].shape[4]) then
        arguments.fail("processor: %s, frame %d: expected %d x %d pixels as the first has, got %d x %d", what,
          place + 1, list[1].shape[3], list[1].shape[4], x.shape[3], x.shape[4])
      end
      list[i] = x
    end
    return ty.concat(list, 0)
  end, #clip
end

--- The processor of clips of a folder (or of a file such as video_preprocessor_config.json, or of a table with its
-- keys): a function of a list of clips, each u8 [frames, channels, h, w] or a list of pictures (paths or u8 [channels,
-- h, w]) of one size, that gives f32 [all patches, values], those of one clip after another, i64 [n, 3], times (of two
-- frames), rows and columns of patches, and f64 [n], the seconds from one time to the next. Its options: fps, how many
-- frames a second a clip has, a number or a list of them (24). Where the config's do_sample_frames is true, num_frames
-- or fps of the config say how many frames are taken. A processor of another kind is an error.
---@param path string|table
---@return fun(clips: (Tensor|(string|Tensor)[])[], options?: {fps?: number|number[]}): Tensor, Tensor, Tensor process
---@return table config
return function(path)
  local config, at = pixels.config("hub.video_processor", path, "video_processor",
    { "video_preprocessor_config.json", "preprocessor_config.json" })
  local name = config.video_processor_type or config.image_processor_type
  if type(name) ~= "string" or not (name:find "^Qwen2VLVideoProcessor" or name:find "^Qwen2VLImageProcessor") then
    arguments.fail("%s: video_processor_type: expected that of Qwen2VL, got %s", at, arguments.describe(name))
  end
  local filter, normalise = pixels.filter(at, config, 3), pixels.normaliser(at, config)
  local o = pixels.patch_settings(at, config, 128 * 28 * 28, 28 * 28 * 768)
  local choice, deep = frame_settings(at, config), o.temporal_patch_size
  return function(clips, options)
    arguments.expect("processor", "clips", clips, "a list")
    local given = arguments.read("processor", options, { fps = arguments.none }, { fps = "a number or a table" })
    local list = type(given.fps) == "table" and given.fps
    if #clips == 0 then arguments.fail "processor: clips: expected at least one, got none" end
    local all, grids, seconds = {}, {}, {}
    for i, clip in ipairs(clips) do
      local what, fps = "clip " .. i, given.fps
      if list then fps = list[i] end
      if fps ~= nil and not (type(fps) == "number" and fps > 0 and fps < math.huge) then
        arguments.fail("processor: %s: fps: expected a number > 0, got %s", what, arguments.describe(fps))
      end
      local take, count = frames_of(clip, what)
      if count > MOST_FRAMES then
        arguments.fail("processor: %s: expected at most %d frames, got %d", what, MOST_FRAMES, count)
      end
      local places, rate = chosen(what, count, fps, choice, deep)
      local x, most = take(places), o.most
      if choice.cap_pixels_per_frame then -- an even share of what a whole clip may have
        local total = choice.max_video_tokens * o.unit * o.unit * 0.9 // 1
        most = math.tointeger(math.max(math.min(most, total * deep // #places), o.least * 1.05 // 1))
      end
      local h, w = pixels.patched_size(what, x.shape[3], x.shape[4], o, config.do_resize ~= false, most)
      all[i], grids[i] = pixels.patches(normalise(pixels.resized(x, h, w, filter)), o)
      seconds[i] = deep / rate
    end
    return ty.concat(all, 0), ty.tensor(grids, { dtype = "i64" }), ty.tensor(seconds, { dtype = "f64" })
  end, config
end
