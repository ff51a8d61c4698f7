-- Images: PNG and JPEG files of other programs (tests/fixtures/io, made by make_io.py), round trips, hostile files.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local FIXTURES = check.root .. "tests/fixtures/io/"
local file, slurp = scratch.file, scratch.slurp

-- [channels][height][width] from a function of x, y, c (from 0)
local function picture(channels, height, width, value)
  local planes = {}
  for c = 0, channels - 1 do
    local rows = {}
    for y = 0, height - 1 do
      local row = {}
      for x = 0, width - 1 do row[x + 1] = value(x, y, c) end
      rows[y + 1] = row
    end
    planes[c + 1] = rows
  end
  return planes
end

local function pixels(x, y, c) return (x * 19 + y * 31 + c * 67) % 256 end
local function smooth(x, y, c) return ({ x * 8, y * 10 + 20, x * 4 + 40 })[c + 1] end

check.test("PNG: every kind", function()
  for name, channels in pairs { gray = 1, gray_alpha = 2, rgb = 3, rgba = 4, gray16 = 1, interlaced = 3 } do
    local t = ty.io.load_image(FIXTURES .. name .. ".png")
    check.equal(t.dtype, "u8", name)
    check.equal(t.shape, { channels, 7, 13 }, name)
    check.equal(t:tolist(), picture(channels, 7, 13, pixels), name)
  end
  check.equal(ty.io.load_image(FIXTURES .. "one_bit.png"):tolist(),
    picture(1, 7, 13, function(x, y) return pixels(x, y, 0) > 127 and 255 or 0 end), "one bit")
  local function colour(x, y, c)
    local i = (x + y) % 16
    return ({ i * 16, 255 - i * 16, i * 5, i == 3 and 0 or 255 })[c + 1]
  end
  check.equal(ty.io.load_image(FIXTURES .. "palette.png"):tolist(), picture(3, 7, 13, colour), "palette")
  check.equal(ty.io.load_image(FIXTURES .. "palette_alpha.png"):tolist(), picture(4, 7, 13, colour),
    "palette with alpha")
end)

check.test("PNG: round trips", function()
  for channels = 1, 4 do
    local t = ty.tensor(picture(channels, 5, 9, pixels), { dtype = "u8" })
    for _, level in ipairs { 0, 1, 9 } do
      ty.io.save_image(file "a.png", t, { level = level })
      check.equal(ty.io.load_image(file "a.png"):tolist(), t:tolist(), "channels " .. channels)
    end
    check.equal(ty.io.decode_image(ty.io.encode_png(t)):tolist(), t:tolist(), "in memory")
  end
  local t = ty.tensor(picture(1, 5, 9, pixels)[1], { dtype = "u8" })
  check.equal(ty.io.decode_image(ty.io.encode_png(t)):tolist()[1], t:tolist(), "[height, width] is gray")
  local turned = ty.tensor(picture(3, 5, 9, pixels), { dtype = "u8" }):transpose(1, 2)
  check.equal(ty.io.decode_image(ty.io.encode_png(turned)):tolist(), turned:tolist(), "a view")
  check.fails(function() ty.io.encode_png(ty.tensor { { 1.0, 2.0 } }) end, "a u8 image")
  check.fails(function() ty.io.encode_png(ty.tensor({ 1 }, { dtype = "u8" })) end, "a u8 image")
  check.fails(function() ty.io.encode_png(ty.tensor({ { {} } }, { dtype = "u8" })) end, "a u8 image")
  check.fails(function() ty.io.encode_png(ty.zeros({ 5, 1, 1 }, { dtype = "u8" })) end, "1 to 4 channels")
  check.fails(function() ty.io.encode_png(t, { level = 10 }) end, "option level")
end)

check.test("text beside the pixels of a PNG", function()
  local t = ty.randint(0, 256, { 3, 4, 5 }):to "u8"
  local texts = { parameters = "a fox\nSteps: 20", prompt = "Füchse, 狐", empty = "", ["a b"] = ("x"):rep(100000) }
  local png = ty.io.encode_png(t, { text = texts })
  check.equal(ty.io.png_text(png), texts)
  check.equal(ty.io.decode_image(png):tolist(), t:tolist())
  check.equal(ty.io.encode_png(t, { text = texts }), png, "the same bytes whatever the order of the table")
  check.equal(png:find("tEXtparameters\0a fox", 1, true) ~= nil and png:find("iTXtprompt\0", 1, true) ~= nil, true)
  check.equal(ty.io.png_text(ty.io.encode_png(t)), {})
  ty.io.save_image(file "text.png", t, { text = { seed = "7" } })
  check.equal(ty.io.png_text(ty.io.read(file "text.png")), { seed = "7" })
  -- Latin-1, as other programs write it: a byte in the middle of a tEXt, with its checksum.
  local python = "\x89PNG\x0d\x0a\x1a\x0a\x00\x00\x00\x0dIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00"
    .. "\x00\x00:~\x9bU\x00\x00\x00\x04tEXtk\x00\xe4b\xc2\x0d\x90\xd6\x00\x00\x00\x0aIDATx\xdac`"
    .. "\x00\x00\x00\x02\x00\x01\xe5'\xde\xfc\x00\x00\x00\x00IEND\xaeB`\x82"
  check.equal(ty.io.png_text(python), { k = "äb" })
  check.fails(function() ty.io.encode_png(t, { text = { [""] = "x" } }) end, "png: text: expected keys of 1 to 79")
  check.fails(function() ty.io.encode_png(t, { text = { ["ä"] = "x" } }) end, "png: text: expected keys of 1 to 79")
  check.fails(function() ty.io.encode_png(t, { text = { a = 3 } }) end, "png: text: expected a table of strings")
  check.fails(function() ty.io.encode_png(t, { text = { a = "x\0" } }) end, "strings without NUL")
  check.fails(function() ty.io.encode_png(t, { text = "x" }) end,
    "png: text: expected a table of strings, got a string")
  check.fails(function() ty.io.png_text "no picture" end, "expected a PNG, got something else")
  for cut = 1, #png - 1, 97 do pcall(ty.io.png_text, png:sub(1, cut)) end
end)

check.test("channels", function()
  local function load(name, channels) return ty.io.load_image(FIXTURES .. name, { channels = channels }):tolist() end
  local function luma(x, y)
    return (pixels(x, y, 0) * 19595 + pixels(x, y, 1) * 38470 + pixels(x, y, 2) * 7471 + 32768) >> 16
  end
  local function gray(x, y) return pixels(x, y, 0) end
  check.equal(load("rgb.png", 1), picture(1, 7, 13, luma), "rgb to gray")
  check.equal(load("rgba.png", 1), picture(1, 7, 13, luma), "rgba to gray")
  check.equal(load("rgba.png", 3), picture(3, 7, 13, pixels), "rgba to rgb")
  check.equal(load("gray.png", 3), picture(3, 7, 13, gray), "gray to rgb")
  check.equal(load("gray_alpha.png", 1), picture(1, 7, 13, gray), "gray and alpha to gray")
  check.equal(load("rgb.png", 4), picture(4, 7, 13, function(x, y, c) return c == 3 and 255 or pixels(x, y, c) end),
    "rgb to rgba")
  check.equal(load("gray_alpha.png", 4), picture(4, 7, 13,
    function(x, y, c) return pixels(x, y, c == 3 and 1 or 0) end), "gray and alpha to rgba")
  check.fails(function() load("rgb.png", 2) end, "channels: expected 1, 3 or 4, or 0 for those of the file, got 2")
  check.fails(function() load("rgb.png", 5) end, "option channels")
end)

check.test("JPEG", function()
  local function near(name, want, tolerance)
    local got = ty.io.load_image(FIXTURES .. name):tolist()
    local worst = 0
    for c, plane in ipairs(want) do
      for y, row in ipairs(plane) do
        for x, v in ipairs(row) do worst = math.max(worst, math.abs(v - got[c][y][x])) end
      end
    end
    check.equal(#got, #want, name .. " channels")
    check.ok(worst <= tolerance, name .. " is off by " .. worst)
  end
  near("baseline.jpg", picture(3, 16, 24, smooth), 6)
  near("progressive.jpg", picture(3, 16, 24, smooth), 6)
  near("subsampled.jpg", picture(3, 16, 24, smooth), 16)
  near("gray.jpg", picture(1, 16, 24, smooth), 4)
  near("cmyk.jpg", picture(3, 16, 24, smooth), 12)
end)

check.test("turned as Exif's orientation says", function()
  local want = ty.io.load_npz(FIXTURES .. "turned.npz") -- [height, width, channels], by Pillow
  local function upright(n) return want[tostring(n)]:permute(2, 0, 1):tolist() end
  local stored = picture(3, 7, 13, pixels)
  for _, name in ipairs { "turned.png", "turned.webp" } do
    local bytes = slurp(FIXTURES .. name)
    local ok, t = pcall(ty.io.decode_image, bytes)
    if ok or name ~= "turned.webp" then -- some builds have no WebP
      check.equal(t:tolist(), upright(5), name)
      check.equal(ty.io.decode_image(bytes, { exif = false }):tolist(), stored, name .. " as it stands")
      check.equal({ ty.io.image_size(bytes) }, { 3, 13, 7 })
      check.equal({ ty.io.image_size(bytes, { exif = false }) }, { 3, 7, 13 })
    end
  end
  check.equal(ty.io.load_image(FIXTURES .. "turned.png", { channels = 1 }).shape, { 1, 13, 7 })
  -- All eight, in both orders of bytes.
  local function chunk(kind, data)
    local crc = 0xffffffff
    for i = 1, 4 + #data do
      crc = crc ~ (kind .. data):byte(i)
      for _ = 1, 8 do crc = crc >> 1 ~ (crc & 1 == 1 and 0xedb88320 or 0) end
    end
    return string.pack(">I4", #data) .. kind .. data .. string.pack(">I4", ~crc & 0xffffffff)
  end
  local plain = slurp(FIXTURES .. "rgb.png")
  local function with(exif) return plain:sub(1, 33) .. chunk("eXIf", exif) .. plain:sub(34) end
  local function exif(n, order, kind)
    local form = order .. (kind == 4 and "I2I2I4I4" or "I2I2I4I2I2")
    return (order == ">" and "MM\0*" or "II*\0") .. string.pack(order .. "I4I2", 8, 1)
      .. string.pack(form, 0x0112, kind or 3, 1, n, 0):sub(1, 12) .. "\0\0\0\0"
  end
  for n = 1, 8 do
    for _, order in ipairs { "<", ">" } do
      local bytes = with(exif(n, order))
      local t = ty.io.decode_image(bytes)
      check.equal(t:tolist(), upright(n), order .. n)
      check.equal(ty.io.decode_image(with(exif(n, order, 4))):tolist(), upright(n), "four bytes")
      check.equal(ty.io.decode_image(with("Exif\0\0" .. exif(n, order))):tolist(), upright(n), "with its mark")
      -- A box is one of what comes.
      local _, h, w = table.unpack(t.shape)
      local box = ty.io.decode_image(bytes, { crop = { 1, 2, h - 3, w - 4 } })
      check.equal(box:tolist(), t[(":, 1:%d, 2:%d"):format(h - 2, w - 2)]:tolist(), "a box")
      check.equal(ty.io.decode_image(bytes, { size = { 3, 9 } }).shape, { 3, 3, 9 })
      local half = ty.io.decode_image(bytes, { crop = { 0, 1, h - 1, w - 1 }, size = { 4, 5 } }):to "f32"
      local own = ty.crop_resize(t:unsqueeze(0), ty.tensor { { 0, 1, h - 1, w - 1 } }, { 4, 5 })[0]:to "f32"
      check.ok((half - own):abs():max():item() <= 1, "a box at a size")
      check.fails(function() ty.io.decode_image(bytes, { crop = { 0, 0, h + 1, w } }) end,
        ("inside of %d x %d pixels"):format(h, w))
    end
  end
  -- What is damaged turns nothing.
  for _, bad in ipairs { "", "II*\0", exif(9, "<"), exif(0, ">"), exif(6, "<", 2), "XX" .. exif(6, "<"):sub(3),
    "II*\0\255\255\255\255" .. ("x"):rep(20), "MM\0*\0\0\0\8\255\255" .. ("\0"):rep(30) } do
    check.equal(ty.io.decode_image(with(bad)):tolist(), stored)
  end
  -- JPEG, decoded smaller too.
  local bytes = slurp(FIXTURES .. "turned.jpg")
  local whole, flat = ty.io.decode_image(bytes), ty.io.decode_image(bytes, { exif = false })
  check.equal({ whole.shape, flat.shape, { ty.io.image_size(bytes) } }, { { 3, 24, 16 }, { 3, 16, 24 }, { 3, 24, 16 } })
  check.equal(whole:tolist(), flat:transpose(1, 2):flip { 2 }:tolist()) -- a quarter turn to the right
  local small = ty.io.decode_image(bytes, { size = { 12, 8 } }):to "f32"
  local filtered = ty.crop_resize(whole:unsqueeze(0), ty.tensor { { 0, 0, 24, 16 } }, { 12, 8 })[0]:to "f32"
  check.ok((small - filtered):abs():mean():item() < 12, "smaller")
  for at = 3, 60 do -- any of the bytes before the pixels may be wrong
    for _, byte in ipairs { 0, 255, 6 } do
      pcall(ty.io.decode_image, bytes:sub(1, at - 1) .. string.char(byte) .. bytes:sub(at + 1))
    end
  end
  check.fails(function() ty.io.decode_image(bytes, { exif = 1 }) end, "exif")
end)

check.test("hostile images", function()
  local function decode(bytes) return ty.io.decode_image(bytes) end
  local function chunk(kind, data)
    local crc = 0xffffffff
    for i = 1, 4 + #data do
      crc = crc ~ (kind .. data):byte(i)
      for _ = 1, 8 do crc = crc >> 1 ~ (crc & 1 == 1 and 0xedb88320 or 0) end
    end
    return string.pack(">I4", #data) .. kind .. data .. string.pack(">I4", ~crc & 0xffffffff)
  end
  local function png(width, height, rest)
    return "\x89PNG\r\n\x1a\n" .. chunk("IHDR", string.pack(">I4I4BBBBB", width, height, 8, 6, 0, 0, 0))
      .. (rest or chunk("IDAT", "x\x9c"))
  end
  check.fails(function() decode "" end, "neither PNG nor JPEG nor WebP (0 bytes")
  check.fails(function() decode "GIF89a..." end, 'neither PNG nor JPEG nor WebP (9 bytes, beginning with "GIF89a.."')
  check.fails(function() ty.io.load_image(file "missing.png") end, "No such file")
  check.fails(function() decode(png(65535, 65535)) end, "claims 65535 x 65535 pixels; at most")
  check.fails(function() decode(png(1 << 20, 1)) end, "claims 1048576 x 1 pixels")
  check.fails(function() decode(png(8000, 8000)) end, "the file is cut short")
  check.fails(function() decode(png(0, 5)) end, "png")
  check.fails(function() decode(png(5, 5, chunk("IEND", ""))) end, "png")
  local jpeg = slurp(FIXTURES .. "baseline.jpg")
  local frame = jpeg:find("\xff\xc0", 1, true)
  local function sized(height, width)
    return jpeg:sub(1, frame + 4) .. string.pack(">I2I2", height, width) .. jpeg:sub(frame + 9)
  end
  check.fails(function() decode(sized(65535, 65535)) end, "Maximum supported image dimension")
  check.fails(function() decode(sized(65500, 65500)) end, "claims 65500 x 65500 pixels; at most")
  check.fails(function() decode(sized(5000, 5000)) end, "the file is cut short")
end)

check.test("a part of a picture, at a size", function()
  for _, name in ipairs { "rgb.png", "palette_alpha.png", "baseline.jpg", "progressive.jpg", "subsampled.jpg",
    "cmyk.jpg" } do
    local bytes = slurp(FIXTURES .. name)
    local all = ty.io.decode_image(bytes)
    local c, h, w = table.unpack(all.shape)
    local claimed = { ty.io.image_size(bytes) }
    check.equal({ claimed[2], claimed[3] }, { h, w }, name)
    local top, left, height, width = h // 4, w // 3, h // 2, w // 2
    local part = ty.io.decode_image(bytes, { crop = { top, left, height, width } })
    local want = all[(":, %d:%d, %d:%d"):format(top, top + height, left, left + width)]
    check.equal(part.shape, { c, height, width }, name)
    check.ok((part:to "f32" - want:to "f32"):abs():max():item() <= 3, name .. ": a crop")
    local large = ty.io.decode_image(bytes, { size = { 2 * h, 3 * w + 1 }, channels = 3 })
    check.ok(ty.equal(large, ty.crop_resize(ty.io.decode_image(bytes, { channels = 3 }):unsqueeze(0),
      ty.tensor { { 0, 0, h, w } }, { 2 * h, 3 * w + 1 })[0]), name .. ": larger")
    local small = ty.io.decode_image(bytes, { size = { h // 3, w // 3 } }):to "f32"
    local filtered = ty.crop_resize(all:unsqueeze(0), ty.tensor { { 0, 0, h, w } }, { h // 3, w // 3 })[0]:to "f32"
    check.ok((small - filtered):abs():mean():item() < 12, name .. ": smaller, by libjpeg's own reduction")
    for _, box in ipairs { { 0, 0, h + 1, w }, { -1, 0, 2, 2 }, { 0, w - 1, 2, 2 } } do
      check.fails(function() ty.io.decode_image(bytes, { crop = box }) end, "crop: expected { top, left")
    end
  end
  local bytes = slurp(FIXTURES .. "rgb.png")
  check.fails(function() ty.io.decode_image(bytes, { crop = { 0, 0, 2 } }) end, "crop: expected a list of 4 numbers")
  check.fails(function() ty.io.decode_image(bytes, { crop = { 0, 0, 0, 2 } }) end, "a height and width above 0")
  check.fails(function() ty.io.decode_image(bytes, { size = { 3, 1.5 } }) end, "size: expected { height, width }")
  check.fails(function() ty.io.decode_image(bytes, { size = 3 }) end, "size: expected a list of 2 numbers")
  check.fails(function() ty.io.image_size "not a picture" end, "neither PNG nor JPEG")
  check.fails(function() ty.io.image_size(bytes:sub(1, 20)) end, "the file has no header")
end)

check.test("cut at every byte, any byte changed", function()
  local function survive(bytes)
    local ok, t = pcall(ty.io.decode_image, bytes)
    if ok then t:tolist() end
    pcall(ty.io.decode_image, bytes, { crop = { 1, 1, 5, 4.5 }, size = { 2, 7 } })
    pcall(ty.io.image_size, bytes)
    return ok
  end
  for _, name in ipairs { "rgb.png", "interlaced.png", "palette_alpha.png", "gray16.png",
    "turned.png" } do
    local bytes = slurp(FIXTURES .. name)
    for n = 0, #bytes - 13 do
      if survive(bytes:sub(1, n)) then check.ok(false, name .. " cut to " .. n .. " bytes loads") end
    end
    scratch.flips(bytes, 1000, survive)
  end
  for _, name in ipairs { "baseline.jpg", "progressive.jpg", "subsampled.jpg", "gray.jpg", "cmyk.jpg",
    "turned.jpg" } do
    local bytes = slurp(FIXTURES .. name)
    for n = 0, #bytes - 20 do
      if survive(bytes:sub(1, n)) then check.ok(false, name .. " cut to " .. n .. " bytes loads") end
    end
    scratch.flips(bytes, 2000, survive)
  end
  check.ok(true, "nothing crashed")
end)

scratch.clean()
check.finish()
