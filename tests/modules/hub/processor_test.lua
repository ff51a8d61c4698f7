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
      if sizes then
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
  local tiles = cases[#cases].config
  fails({ image_processor_type = "DonutImageProcessor" },
    "expected that of CLIP, SigLIP, ViT, DeiT, Bit, LlavaNext or Qwen2VL, got \"DonutImageProcessor\"")
  fails({ resample = 7 }, "resample: expected 0, 2 or 3")
  fails({ size = { shortest_edge = 0 } }, "size: expected { height, width } or { shortest_edge } of 1 to 16384 pixels")
  fails({ image_mean = { 1 } }, "image_mean: expected a list of three numbers")
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
end)

os.remove(file)
check.finish()
