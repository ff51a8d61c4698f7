-- WebP and FLAC: files of other programs (tests/fixtures/io, made by make_media.py), round trips, hostile files, and
-- where datasets meet them.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"
local data = ty.data

local FIXTURES = check.root .. "tests/fixtures/io/"
local file, slurp, spit = scratch.file, scratch.slurp, scratch.spit

-- Whether the build has a format; where it has not, that the error says what to install.
local function build_has(what, package, fn)
  local ok, problem = pcall(fn)
  if not ok and tostring(problem):find("this build has no", 1, true) then
    check.test("without " .. what, function() check.ok(tostring(problem):find(package, 1, true), problem) end)
    print(("skipped: this build has no %s"):format(what))
    return false
  end
  return true
end

local function pixels(channels)
  local y, x = ty.arange(7):reshape(1, 7, 1), ty.arange(13):reshape(1, 1, 13)
  local c = ty.arange(channels):reshape(channels, 1, 1)
  return (x * 19 + y * 31 + c * 67):remainder(256):to "u8"
end

local function same(a, b, what)
  check.equal(a.shape, b.shape, what)
  check.ok(a:to("i32"):eq(b:to "i32"):all():item(), what)
end

-- Every beginning of a file and many with bytes changed: an error that names the format, or a picture or sound.
local function hostile(bytes, decode, prefix)
  for n = 0, #bytes - 1, math.max(1, #bytes // 200) do
    local ok, message = pcall(decode, bytes:sub(1, n))
    check.ok(not ok and tostring(message):find(n >= 12 and prefix or "", 1, true),
      ("%d of %d bytes: %s"):format(n, #bytes, tostring(message)))
  end
  local failed = 0
  scratch.flips(bytes, 300, function(broken)
    local ok, message = pcall(decode, broken)
    if not ok then
      failed = failed + 1
      check.ok(not tostring(message):find "attempt to", message)
    end
  end)
  check.ok(failed > 10, "some changes are noticed")
end

if build_has("WebP", "libwebp-dev", function() return ty.io.load_image(FIXTURES .. "rgb.webp") end) then
  check.test("WebP: lossless files are exact, lossy ones what Pillow says", function()
    for name, channels in pairs { rgb = 3, rgba = 4 } do
      local t = ty.io.load_image(FIXTURES .. name .. ".webp")
      check.equal(t.dtype, "u8")
      same(t, pixels(channels), name)
      check.equal({ ty.io.image_size(slurp(FIXTURES .. name .. ".webp")) }, { channels, 7, 13 })
    end
    for name, channels in pairs { lossy = 3, lossy_alpha = 4 } do
      local t = ty.io.load_image(FIXTURES .. name .. ".webp")
      check.equal(t.shape, { channels, 20, 30 })
      same(t, ty.io.load_image(FIXTURES .. name .. "_webp.png"), name)
    end
    same(ty.io.load(FIXTURES .. "rgb.webp"), pixels(3), "io.load")
    local copy = spit("misnamed.png", slurp(FIXTURES .. "rgb.webp"))
    same(ty.io.load_image(copy), pixels(3), "by what it holds")
  end)

  check.test("WebP: channels, crops and sizes as of PNG", function()
    local png, webp = FIXTURES .. "rgba.png", FIXTURES .. "rgba.webp"
    for _, options in ipairs { { channels = 1 }, { channels = 3 }, { channels = 4 }, { crop = { 1, 2, 4, 6 } },
      { size = { 5, 5 } }, { crop = { 0.5, 1.25, 3.5, 8 }, size = { 9, 4 }, channels = 3 } } do
      same(ty.io.load_image(webp, options), ty.io.load_image(png, options), "as the PNG")
    end
    check.fails(function() ty.io.load_image(webp, { crop = { 0, 0, 8, 8 } }) end, "crop: expected")
  end)

  check.test("WebP: an animation is an error that says so", function()
    check.fails(function() ty.io.load_image(FIXTURES .. "animated.webp") end, "animated.webp\": it is animated")
    check.fails(function() ty.io.image_size(slurp(FIXTURES .. "animated.webp")) end, "it is animated")
  end)

  check.test("WebP: round trips", function()
    ty.manual_seed(3)
    for channels = 1, 4 do
      local t = ty.randint(0, 256, { channels, 11, 17 }):to "u8"
      for _, level in ipairs { 0, 6, 9 } do
        local back = ty.io.decode_image(ty.io.encode_webp(t, { level = level }))
        local want = channels >= 3 and t or ty.cat({ t:narrow(0, 0, 1), t:narrow(0, 0, 1), t:narrow(0, 0, 1) }, 0)
        if channels == 2 then want = ty.cat({ want, t:narrow(0, 1, 1) }, 0) end
        same(back, channels == 4 and t or want, channels .. " channels")
      end
    end
    local t = pixels(3)
    ty.io.save_image(file "a.webp", t)
    check.equal(slurp(file "a.webp"):sub(9, 12), "WEBP")
    same(ty.io.load_image(file "a.webp"), t)
    ty.io.save(file "b.webp", t:select(0, 0))
    same(ty.io.load_image(file "b.webp", { channels = 1 }):select(0, 0), t:select(0, 0), "[height, width] is gray")
    same(ty.io.decode_image(ty.io.encode_webp(t:transpose(1, 2))), t:transpose(1, 2), "a view")
    local y, x = ty.arange(64):reshape(64, 1), ty.arange(96):reshape(1, 96)
    local smooth = ty.stack({ x * 2 + y * 0, x + y, y * 3 + x * 0 }, 0):to "u8"
    local sizes = {}
    for i, quality in ipairs { 10, 60, 100 } do
      local bytes = ty.io.encode_webp(smooth, { quality = quality })
      sizes[i] = #bytes
      local off = (ty.io.decode_image(bytes):to "f32" - smooth:to "f32"):abs():mean():item()
      check.ok(off > 0 and off < ({ 12, 6, 3 })[i], ("quality %d: off by %.2f"):format(quality, off))
    end
    check.ok(sizes[1] < sizes[2] and sizes[2] < sizes[3], "a higher quality takes more bytes")
    check.fails(function() ty.io.encode_webp(ty.ones(3, 4, 4)) end, "a u8 image")
    check.fails(function() ty.io.encode_webp(ty.zeros(1, 16384, { dtype = "u8" })) end, "at most 16383 pixels")
    check.fails(function() ty.io.encode_webp(t, { quality = 101 }) end, "quality: expected an integer in [0, 100]")
    check.fails(function() ty.io.save_image(file "a.png", t, { quality = 50 }) end,
      "unknown option quality; options here: level, text")
  end)

  check.test("WebP: hostile files", function()
    for _, name in ipairs { "rgb", "lossy_alpha" } do
      hostile(slurp(FIXTURES .. name .. ".webp"), ty.io.decode_image, "webp")
    end
    check.fails(function() ty.io.decode_image "RIFF\4\0\0\0WEBPVP8 " end, "webp")
    check.fails(function() ty.io.decode_image "RIFF\4\0\0\0WAVE" end, "neither PNG nor JPEG nor WebP")
  end)

  check.test("WebP: folders of pictures", function()
    local root = file "classes"
    for i, class in ipairs { "a", "b" } do
      ty.io.mkdir(root .. "/" .. class)
      ty.io.save_image(root .. "/" .. class .. "/1.webp", ty.full({ 3, 8, 8 }, 50 * i, { dtype = "u8" }))
    end
    local set = data.image_folder(root, { size = 4 })
    check.equal(#set, 2)
    same(set:get(1).image, ty.full({ 3, 4, 4 }, 100, { dtype = "u8" }), "a picture of the second class")
  end)
end

-- The triangles of make_media.py, [channels, samples], as numbers from -1 to 1.
local function triangles(count, channels, bits)
  local rows = {}
  for c = 0, channels - 1 do
    local period, row = 50 + 13 * c, {}
    for i = 0, count - 1 do
      local at = (i % period) * 2.0 / period
      local up = at < 1 and at or 2 - at
      row[i + 1] = (math.floor(up * ((1 << bits) - 1)) - (1 << bits - 1)) / (1 << bits - 1)
    end
    rows[c + 1] = row
  end
  return rows
end

if build_has("FLAC", "libflac-dev", function() return data.load_audio(FIXTURES .. "mono8.flac") end) then
  local kinds = { mono8 = { 700, 1, 8, 8000 }, stereo16 = { 1500, 2, 16, 44100 }, stereo24 = { 900, 2, 24, 96000 },
    six16 = { 300, 6, 16, 48000 }, verbatim = { 200, 1, 16, 22050 } }

  check.test("FLAC: files of the reference encoder, exactly", function()
    for name, kind in pairs(kinds) do
      local count, channels, bits, rate = table.unpack(kind)
      local sound, its_rate = data.load_audio(FIXTURES .. name .. ".flac")
      check.equal({ sound.dtype, its_rate }, { "f32", rate }, name)
      check.equal(sound:tolist(), triangles(count, channels, bits), name)
      check.equal({ select(2, ty.io.decode_flac(slurp(FIXTURES .. name .. ".flac"))) }, { rate, bits })
    end
  end)

  check.test("parts of FLAC and WAV", function()
    local whole = data.load_audio(FIXTURES .. "stereo16.flac")
    data.save_wav(file "whole.wav", whole, 44100)
    for _, path in ipairs { FIXTURES .. "stereo16.flac", file "whole.wav" } do
      for _, part in ipairs { { 0, 10 }, { 0, 1500 }, { 511, 2 }, { 512, 512 }, { 700, 600 }, { 1499, 1 },
        { 1400, 5000 }, { 37, nil } } do
        local from, count = part[1], part[2]
        local sound, rate = data.load_audio(path, { from = from, count = count })
        local n = math.min(count or 1500, 1500 - from)
        check.equal(rate, 44100)
        check.equal(sound:tolist(), whole:narrow(1, from, n):tolist(), ("%s: %d from %d"):format(path, n, from))
      end
      check.equal(data.load_audio(path, { from = 1500 }).shape, { 2, 0 })
      check.equal(data.load_audio(path, { from = 99999, count = 3 }).shape, { 2, 0 })
      check.equal(data.load_audio(path, { count = 0 }).shape, { 2, 0 })
    end
    check.fails(function() data.load_audio(file "whole.wav", { from = -1 }) end, "from: expected an integer >= 0")
  end)

  check.test("FLAC: round trips", function()
    ty.manual_seed(4)
    for _, bits in ipairs { 8, 16, 24 } do
      for channels = 1, 8, 7 do
        local most = 1 << bits - 1
        local sound = (ty.randint(-most, most, { channels, 5000 }):to "f64" / most):to "f32"
        for _, level in ipairs { 0, 8 } do
          data.save_flac(file "a.flac", sound, 44100, { bits = bits, level = level })
          local back, rate = data.load_audio(file "a.flac")
          check.equal(rate, 44100)
          check.ok(back:eq(sound):all():item(), ("%d bits, %d channels"):format(bits, channels))
        end
      end
    end
    data.save_flac(file "a.flac", ty.tensor { 2.0, -2, 0.5 }, 8000)
    check.equal(data.load_audio(file "a.flac"):tolist(), { { 32767 / 32768, -1, 0.5 } }, "beyond 1 they are cut")
    data.save_flac(file "a.flac", ty.zeros(2, 100000), 8000)
    check.ok(ty.io.stat(file "a.flac").size < 2000, "silence is small")
    data.save_flac(file "a.flac", ty.zeros(1, 0), 8000)
    check.equal(data.load_audio(file "a.flac").shape, { 1, 0 })
    check.fails(function() data.save_flac(file "a.flac", ty.zeros(9, 4), 8000) end, "expected 1 to 8 channels, got 9")
    check.fails(function() data.save_flac(file "a.flac", ty.zeros(4), 0) end, "rate: expected an integer in [1, 655")
    check.fails(function() data.save_flac(file "a.flac", ty.zeros(4):to "i64", 8000) end, "sound: expected floats")
    check.fails(function() data.save_flac(file "a.flac", ty.zeros(4), 8000, { bits = 32 }) end, "bits: expected 8 or")
    check.fails(function() ty.io.encode_flac(ty.tensor({ { 40000 } }, { dtype = "i32" }), 8000) end,
      "sample 40000 does not fit into 16 bits")
  end)

  check.test("FLAC: hostile files", function()
    local bytes = slurp(FIXTURES .. "stereo16.flac")
    hostile(bytes, ty.io.decode_flac, "flac")
    hostile(slurp(FIXTURES .. "verbatim.flac"), ty.io.decode_flac, "flac")
    local changed = bytes:sub(1, -200) .. string.char(bytes:byte(-199) ~ 1) .. bytes:sub(-198)
    check.fails(function() ty.io.decode_flac(changed) end, "damaged")
    local summed = bytes:sub(1, 30) .. "\0\1\2" .. bytes:sub(34)
    check.fails(function() ty.io.decode_flac(summed) end, "the sum of its sound is wrong")
    check.fails(function() ty.io.decode_flac(bytes:sub(1, #bytes // 2)) end, "flac \"in memory\": ")
    check.fails(function() ty.io.decode_flac(bytes, { max = 1000 }) end, "more than 1000 samples")
    check.fails(function() ty.io.decode_flac "fLaC" end, "the header is damaged")
    check.fails(function() data.load_audio(spit("no.flac", "no sound at all")) end,
      "data.load_audio: " .. file "no.flac" .. ": expected a WAV or FLAC file")
    check.fails(function() data.load_audio(spit("cut.flac", bytes:sub(1, 3000))) end, "data.load_audio: ")
    check.fails(function() data.load_wav(FIXTURES .. "mono8.flac") end, "no WAV file")
  end)

  check.test("FLAC and WAV in shards", function()
    local sound = ty.tensor { { 0.5, -0.25, 0 }, { 0, 0.125, -1 } }
    data.save_flac(file "s.flac", sound, 16000)
    data.save_wav(file "s.wav", sound, 8000)
    local function entry(name, bytes)
      local head = name .. ("\0"):rep(100 - #name) .. "0000644\0" .. "0000000\0" .. "0000000\0"
        .. ("%011o\0"):format(#bytes) .. "00000000000\0" .. (" "):rep(8) .. "0" .. ("\0"):rep(355)
      local sum = 0
      for i = 1, #head do sum = sum + head:byte(i) end
      head = head:sub(1, 148) .. ("%06o\0 "):format(sum) .. head:sub(157)
      return head .. bytes .. ("\0"):rep(-#bytes % 512)
    end
    spit("a.tar", entry("one.flac", slurp(file "s.flac")) .. entry("one.cls", "3") .. entry("two.wav",
      slurp(file "s.wav")) .. entry("two.left.flac", slurp(file "s.flac")) .. ("\0"):rep(1024))
    local set = data.shards(file "a.tar")
    local one, two = set:get(0), set:get(1)
    check.equal({ one.sound:tolist(), one.rate, one.label }, { sound:tolist(), 16000, 3 })
    check.equal(two.sound:tolist(), sound:tolist())
    check.equal(two["left.flac"]:tolist(), sound:tolist())
    check.equal(data.shards(file "a.tar", { decode = false }):get(0).flac, slurp(file "s.flac"))
    spit("b.tar", entry("one.flac", slurp(file "s.flac"):sub(1, 50)) .. ("\0"):rep(1024))
    check.fails(function() data.shards(file "b.tar"):get(0) end, "one.flac: ")
  end)
end

scratch.clean()
check.finish()
