-- Image processors against transformers': pictures of five sizes, by tests/fixtures/vision/processors.safetensors
-- (make_processors.py), and files that say what cannot be.
local here = arg and arg[0]:match ".*/" or "tests/modules/hub/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local hub = require "tycho.hub"

local tensors, notes = ty.io.load_safetensors(check.root .. "tests/fixtures/vision/processors.safetensors")
local cases = ty.io.json_decode(notes.cases)
local file = os.tmpname()

for k, case in ipairs(cases) do
  local config = case.config
  check.test(("%d: %s"):format(k, config.image_processor_type), function()
    ty.io.save_json(file, config)
    local process = hub.processor(file)
    -- A step of a byte, as the model sees it.
    local step = config.do_rescale == false and 1 or 1 / 255
    local least = math.huge
    for _, value in ipairs(config.do_normalize ~= false and config.image_std or { 1 }) do
      least = math.min(least, value)
    end
    local differ, count = 0, 0
    for _, n in ipairs(case.pictures) do
      local want = tensors[("case.%d.%d"):format(k - 1, n)]
      local picture = tensors["picture." .. n]
      local got, sizes = process { picture }
      local shape = tensors[("shape.%d.%d"):format(k - 1, n)]
      if shape then -- in patches of its own shape, and nothing where it has none
        check.equal(sizes:tolist(), { shape:tolist() })
        local patches, most = want.shape[1], config.max_num_patches
        check.equal({ got.shape[1], got.shape[2] }, { 1, most })
        check.equal(got:narrow(1, patches, most - patches):count_nonzero():item(), 0)
        got, want = got:narrow(1, 0, patches), want:unsqueeze(0)
      elseif sizes then
        check.equal(sizes:tolist(), { { picture.shape[2], picture.shape[3] } })
      else
        want = want:unsqueeze(0)
      end
      check.equal(got.shape, want.shape, "picture " .. n)
      local off = (got - want):abs()
      check.ok(off:max():item() <= step / least + 1e-5,
        ("picture %d: off by %.3g bytes"):format(n, off:max():item() * least / step))
      differ, count = differ + off:gt(0.5 * step / least):to("i64"):sum():item(), count + off:numel()
    end
    -- Halves may be rounded the other way: PIL's weights are integers.
    check.ok(differ <= 0.015 * count, ("%d of %d values differ by a byte"):format(differ, count))
  end)
end

for k, case in ipairs(ty.io.json_decode(notes.videos)) do
  check.test(("clip %d"):format(k), function()
    local config = case.config
    local fps = case.fps ~= ty.io.null and case.fps or nil
    local got, grids, seconds = hub.video_processor(config)({ tensors["clip." .. case.clip] }, { fps = fps })
    local want = tensors["video." .. k - 1]
    check.equal(grids:tolist(), tensors["video_grid." .. k - 1]:tolist())
    check.close(seconds:tolist(), tensors["video_seconds." .. k - 1]:tolist(), 1e-12)
    check.equal(got.shape, want.shape)
    local least = math.huge
    for _, value in ipairs(config.do_normalize ~= false and config.image_std or { 1 }) do
      least = math.min(least, value)
    end
    local off = (got - want):abs() * 255 * least
    check.ok(off:max():item() <= 1 + 1e-3, ("off by %.3g bytes"):format(off:max():item()))
    check.ok(off:gt(0.5):to("f32"):mean():item() <= 0.015, "bytes that differ")
  end)
end

check.test("a null of a file is as if the name were not there", function()
  for _, index in ipairs { 1, 4 } do
    local config, nulls = {}, { rescale_factor = ty.io.null, do_rescale = ty.io.null, do_convert_rgb = ty.io.null,
      do_resize = ty.io.null, do_normalize = ty.io.null, do_center_crop = ty.io.null, resample = ty.io.null }
    for key, value in pairs(cases[index].config) do config[key] = nulls[key] or value end
    ty.io.save_json(file, config)
    for key in pairs(nulls) do config[key] = nil end
    local x = { tensors["picture.0"] }
    check.equal(hub.processor(file)(x):tolist(), hub.processor(config)(x):tolist())
  end
end)

check.test("several pictures and clips at once; files of transformers 5 and of before", function()
  local shaped, clip
  for _, case in ipairs(cases) do
    if case.config.image_processor_type == "Siglip2ImageProcessor" then shaped = shaped or case.config end
  end
  local process = hub.processor(shaped)
  local both, sizes = process { tensors["picture.0"], tensors["picture.3"] }
  local first, size = process { tensors["picture.0"] }
  check.equal({ both:narrow(0, 0, 1):tolist(), sizes:tolist()[1] }, { first:tolist(), size:tolist()[1] })
  clip = ty.io.json_decode(notes.videos)[1].config
  local folder = os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder)
  local function written(name, value) ty.io.save_json(folder .. "/" .. name, value) end
  local frames = { tensors["clip.0"], tensors["clip.3"] }
  local all, grids, seconds = hub.video_processor(clip)(frames, { fps = { 2, 4 } })
  check.equal(seconds:tolist(), { 1, 0.5 })
  check.equal(hub.video_processor(clip)({ frames[1] }):tolist(), all:narrow(0, 0,
    grids:narrow(0, 0, 1):prod():item()):tolist())
  -- The last one that is written counts.
  clip.image_processor_type, clip.video_processor_type = "Qwen2VLImageProcessor", nil
  for i, name in ipairs { "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json" } do
    clip.min_pixels, clip.max_pixels = 64 * i, 800 + 100 * i
    written(name, i < 3 and clip or { video_processor = clip, image_processor = shaped })
    local want = { hub.video_processor(clip)(frames) }
    local got = { hub.video_processor(folder)(frames) }
    check.equal({ got[2]:tolist(), got[1]:tolist() }, { want[2]:tolist(), want[1]:tolist() }, name)
  end
  check.equal(hub.processor(folder)({ tensors["picture.0"] }):tolist(), first:tolist())
  check.equal(hub.processor(folder .. "/processor_config.json")({ tensors["picture.0"] }):tolist(), first:tolist())
  os.remove(folder .. "/video_preprocessor_config.json")
  written("processor_config.json", { processor_class = "Qwen2VLProcessor" }) -- it says nothing of either
  clip.min_pixels, clip.max_pixels = 64, 900
  check.equal(hub.processor(folder)({ tensors["picture.0"] }):tolist(),
    hub.processor(clip)({ tensors["picture.0"] }):tolist())
  os.execute(("rm -rf '%s'"):format(folder))
end)

check.test("Qwen2-VL: patches of five sizes, and their grids", function()
  for _, name in ipairs { "qwen2_vl", "qwen2_5_vl" } do
    local want = ty.io.load_safetensors(("%stests/fixtures/vision/%s/expected.safetensors"):format(check.root, name))
    ty.io.save_json(file, { image_processor_type = "Qwen2VLImageProcessor", patch_size = 4, merge_size = 2,
      temporal_patch_size = 2, size = { shortest_edge = 64, longest_edge = 1200 },
      image_mean = ty.io.array { 0.48145466, 0.4578275, 0.40821073 },
      image_std = ty.io.array { 0.26862954, 0.26130258, 0.27577711 } })
    local list = {}
    for i = 0, 4 do list[i + 1] = want["picture." .. i] end
    local got, grids = hub.processor(file)(list)
    check.equal(grids:tolist(), want.sizes:tolist())
    check.equal(got.shape, want.x.shape)
    local off = (got - want.x):abs()
    check.ok(off:max():item() <= 1 / 255 / 0.26 + 1e-5, off:max():item())
    check.ok(off:gt(1e-3):to("f32"):mean():item() <= 0.015)
  end
end)

check.test("pictures of grey and with alpha", function()
  local config = cases[1].config
  ty.io.save_json(file, config)
  local process = hub.processor(file)
  local grey, colour = tensors["picture.4"], tensors["picture.0"]
  check.equal(process({ grey }):tolist(), process({ grey:expand(3, 40, 40):contiguous() }):tolist())
  local alpha = ty.concat({ colour, ty.full({ 1, 30, 45 }, 9, { dtype = "u8" }) }, 0)
  check.equal(process({ alpha }):tolist(), process({ colour }):tolist())
end)

check.test("what a file cannot say is one clear error", function()
  local function fails(changes, words, base)
    local config = {}
    for key, value in pairs(base or cases[1].config) do config[key] = value end
    for key, value in pairs(changes) do config[key] = value end
    ty.io.save_json(file, config)
    check.fails(function() hub.processor(file) { tensors["picture.0"] } end, words)
  end
  local tiles, shaped
  for _, case in ipairs(cases) do
    if case.config.image_grid_pinpoints then tiles = case.config end
    if case.config.max_num_patches then shaped = case.config end
  end
  fails({ image_processor_type = "DonutImageProcessor" },
    "expected that of CLIP, SigLIP, ViT, DeiT, Bit, LlavaNext, Qwen2VL or Siglip2, got \"DonutImageProcessor\"")
  fails({ resample = 7 }, "resample: expected 0, 2 or 3")
  fails({ size = { shortest_edge = 0 } }, "size: expected { height, width } or { shortest_edge } of 1 to 16384 pixels")
  fails({ image_mean = { 1 } }, "image_mean: expected a list of three numbers")
  fails({ image_std = { 1, 0, 1 } }, "image_std: expected a list of three numbers but 0, got [1,0,1]")
  fails({ rescale_factor = "a" }, "rescale_factor: expected a number, got ")
  fails({ max_num_patches = 0 }, "max_num_patches: expected an integer of 1 to 1048576, got 0", shaped)
  fails({ patch_size = 2.5 }, "patch_size: expected an integer of 1 to 1024, got 2.5", shaped)
  fails({ do_resize = false }, "picture 1: expected multiples of 8 pixels and at most 7 patches without do_resize, got "
    .. "30 x 45", shaped)
  fails({ image_grid_pinpoints = { { 8 } } }, "image_grid_pinpoints: expected a list of pairs", tiles)
  fails({ image_grid_pinpoints = { { 8, 12 } } }, "expected multiples of the tile's side 8, got 8 x 12", tiles)
  local patches = { image_processor_type = "Qwen2VLImageProcessor", image_mean = cases[1].config.image_mean,
    image_std = cases[1].config.image_std }
  fails({ patch_size = 0 }, "patch_size: expected an integer of 1 to 1024, got 0", patches)
  fails({ min_pixels = 9, max_pixels = 4 }, "size: expected shortest_edge at most longest_edge, got 9 and 4", patches)
  ty.io.save_json(file, patches)
  check.fails(function() hub.processor(file) { ty.zeros({ 3, 1, 300 }, { dtype = "u8" }) } end,
    "picture 1: expected at most 200 times as long as wide, got 1 x 300")
  check.fails(function() hub.processor "nowhere.json" end, "nowhere.json is not there")
  local function clip_fails(changes, words, given)
    local config = {}
    for key, value in pairs(patches) do config[key] = value end
    for key, value in pairs(changes) do config[key] = value end
    check.fails(function() hub.video_processor(config)({ tensors["clip.0"] }, given) end, words)
  end
  clip_fails({ image_processor_type = "CLIPImageProcessor" }, "video_processor_type: expected that of Qwen2VL, got "
    .. "\"CLIPImageProcessor\"")
  clip_fails({ do_sample_frames = 1 }, "do_sample_frames: expected true or false, got 1")
  clip_fails({ max_frames = 0 }, "max_frames: expected an integer > 0, got 0")
  clip_fails({ fps = -1 }, "fps: expected a number > 0, got -1")
  clip_fails({ do_sample_frames = true, fps = 2, num_frames = 2 }, "expected num_frames or fps, got both")
  clip_fails({ do_sample_frames = true, fps = 2 }, "clip 1: fps: expected a number > 0, got nil")
  clip_fails({ do_sample_frames = true, num_frames = 8 }, "clip 1: expected at least the 8 frames that are taken of "
    .. "it, got 4")
  clip_fails({}, "clip 1: fps: expected a number > 0, got 0", { fps = { 0 } })
  clip_fails({ temporal_patch_size = 0 }, "temporal_patch_size: expected an integer of 1 to 1024, got 0")
  check.fails(function() hub.video_processor(patches) { tensors["picture.0"] } end,
    "clip 1: expected u8 [frames, channels, h, w] or a list of pictures, got a tensor")
  check.fails(function() hub.video_processor(patches) {} end, "clips: expected at least one, got none")
end)

os.remove(file)
check.finish()
