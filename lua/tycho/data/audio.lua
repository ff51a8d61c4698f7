--- Sound: WAV and FLAC files, and other rates.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

local MOST_BYTES = 1 << 31

-- The part of `count` samples (nil: all) from `from` on that n samples have.
local function part_of(n, from, count)
  from = math.min(from, n)
  return from, math.min(count or n, n - from)
end

-- Samples of so many bits as floats from -1 to 1, [n].
local function samples_of(fail, bytes, code, bits)
  local function raw(dtype, size) return ty.io.from_bytes(bytes, dtype, { #bytes // size }) end
  if code == 3 and bits == 32 then return raw("f32", 4):to "f32" end
  if code == 3 and bits == 64 then return raw("f64", 8):to "f32" end
  if code == 1 and bits == 8 then return (raw("u8", 1):to "f32" - 128) / 128 end
  if code == 1 and bits == 16 then return raw("i16", 2):to "f32" / 32768 end
  if code == 1 and bits == 32 then return (raw("i32", 4):to "f64" / 2.0 ^ 31):to "f32" end
  if code == 1 and bits == 24 then
    local b = ty.io.from_bytes(bytes, "u8", { #bytes // 3, 3 }):to "f32"
    local high = b:select(1, 2)
    high = ty.where(high:ge(128), high - 256, high)
    return (b:select(1, 0) + b:select(1, 1) * 256 + high * 65536) / 2.0 ^ 23
  end
  return fail("expected PCM of 8, 16, 24 or 32 bits or floats, got format %d of %d bits", code, bits)
end

local function decode_wav(bytes, who, path, from, count)
  local function fail(text, ...) arguments.fail("%s: %s: " .. text, who, path, ...) end
  if #bytes > MOST_BYTES then fail("%d bytes; at most 2^31 are read", #bytes) end
  if #bytes < 12 or bytes:sub(1, 4) ~= "RIFF" or bytes:sub(9, 12) ~= "WAVE" then fail "no WAV file" end
  local at, code, channels, rate, bits = 13, nil, nil, nil, nil
  while at + 8 <= #bytes + 1 do
    local id, size = bytes:sub(at, at + 3), string.unpack("<I4", bytes, at + 4)
    local first = at + 8
    if id == "fmt " then
      if size < 16 or first + size - 1 > #bytes then fail "the format is cut short" end
      code, channels, rate = string.unpack("<I2I2I4", bytes, first)
      bits = string.unpack("<I2", bytes, first + 14)
      if code == 0xfffe and size >= 26 then code = string.unpack("<I2", bytes, first + 24) end -- "extensible"
      if channels < 1 or rate < 1 then fail("%d channels at %d samples a second", channels, rate) end
    elseif id == "data" then
      if not code then fail "samples before their format" end
      -- A file that was being written while its header stood has 0 or -1 here: all that is left.
      local left = #bytes - first + 1
      if size == 0 or size == 0xffffffff then size = left end
      if size > left then fail("the file is cut short: %d of %d bytes of sound", left, size) end
      local frame = channels * (bits // 8)
      if frame == 0 then fail("samples of %d bits", bits) end
      from, count = part_of(size // frame, from, count)
      first = first + from * frame
      local sound = samples_of(fail, bytes:sub(first, first + count * frame - 1), code, bits)
      return sound:reshape(count, channels):t():contiguous(), rate
    end
    at = first + size + size % 2
  end
  return fail "no samples"
end

local function decode_flac(bytes, who, path, from, count)
  local ok, sound, rate = pcall(ty.io.decode_flac, bytes, { from = from, count = count, name = path })
  if not ok then arguments.raise(sound, who .. ": ") end
  return sound, rate
end

--- The sound of a file's bytes, by what they begin with: tensor, rate. who and path: for errors.
---@param bytes string
---@param who string
---@param path string
---@param from? integer
---@param count? integer
---@return Tensor sound
---@return integer rate
function M.decode_audio(bytes, who, path, from, count)
  expect("data.decode_audio", "bytes", bytes, "a string")
  expect("data.decode_audio", "who", who, "a string")
  expect("data.decode_audio", "path", path, "a string")
  from = from or 0
  local start = bytes:sub(1, 4)
  if start == "fLaC" then return decode_flac(bytes, who, path, from, count) end
  if start == "RIFF" then return decode_wav(bytes, who, path, from, count) end
  return arguments.fail("%s: %s: expected a WAV or FLAC file, got %d bytes that begin with %q", who, path, #bytes,
    bytes:sub(1, 8))
end

--- The sound of a WAV file: f32 [channels, samples] from -1 to 1, and its rate in samples a second. PCM of 8, 16, 24
-- and 32 bits, floats of 32 and 64.
---@param path string
---@return Tensor sound
---@return integer rate
function M.load_wav(path)
  expect("data.load_wav", "path", path, "a string")
  return decode_wav(ty.io.read(path), "data.load_wav", path, 0)
end

--- The sound of a WAV or FLAC file, told apart by what they hold: f32 [channels, samples] from -1 to 1, and its rate in
-- samples a second. FLAC takes a build with libFLAC. options: from (0) and count (all that is there): a part, in
-- samples, which of FLAC is found without decoding what stands before.
---@param path string
---@param options? {from: integer, count: integer}
---@return Tensor sound
---@return integer rate
function M.load_audio(path, options)
  expect("data.load_audio", "path", path, "a string")
  local o = arguments.read("data.load_audio", options, { from = 0, count = arguments.none },
    { from = "an integer >= 0", count = "an integer >= 0" })
  return M.decode_audio(ty.io.read(path), "data.load_audio", path, o.from, o.count)
end

-- What both writers take: f64 [samples, channels] on the CPU.
local function sound_of(who, sound, most_channels)
  if not sound:is_floating_point() or sound.ndim < 1 or sound.ndim > 2 then
    arguments.fail("%s: sound: expected floats [channels, samples] or [samples], got %s [%s]", who, sound.dtype,
      table.concat(sound.shape, ", "))
  end
  local x = (sound.ndim == 1 and sound:unsqueeze(0) or sound):detach():to { dtype = "f64", device = "cpu" }
  local channels = x:size(0)
  if channels < 1 or channels > most_channels then
    arguments.fail("%s: sound: expected 1 to %d channels, got %d", who, most_channels, channels)
  end
  return x:t():contiguous(), channels
end

-- Whole numbers of so many bits.
local function quantized(x, bits)
  local most = 2.0 ^ (bits - 1)
  return (x * most):round():clamp(-most, most - 1):to "i64"
end

--- Writes a sound as a WAV file. sound: floats [channels, samples] or [samples] from -1 to 1, beyond which they are
-- cut. options: bits (16; 8, 24, or 32 for floats).
---@param path string
---@param sound Tensor
---@param rate integer
---@param options? {bits: integer}
function M.save_wav(path, sound, rate, options)
  expect("data.save_wav", "path", path, "a string")
  expect("data.save_wav", "sound", sound, "a tensor")
  expect("data.save_wav", "rate", rate, "an integer in [1, 4294967295]")
  local o = arguments.read("data.save_wav", options, { bits = 16 }, { bits = "8 or 16 or 24 or 32" })
  local x, channels = sound_of("data.save_wav", sound, 65535)
  local bytes
  if o.bits == 32 then bytes = ty.io.to_bytes(x:to "f32")
  else
    local n = quantized(x, o.bits)
    if o.bits == 8 then bytes = ty.io.to_bytes((n + 128):to "u8")
    elseif o.bits == 16 then bytes = ty.io.to_bytes(n:to "i16")
    else
      n = n:remainder(1 << 24):flatten()
      bytes = ty.io.to_bytes(ty.stack({ n:remainder(256), n:floor_div(256):remainder(256), n:floor_div(65536) }, 1)
        :to "u8")
    end
  end
  local frame = channels * o.bits // 8
  local header = string.pack("<c4I4c4c4I4I2I2I4I4I2I2c4I4", "RIFF", 36 + #bytes + #bytes % 2, "WAVE", "fmt ", 16,
    o.bits == 32 and 3 or 1, channels, rate, rate * frame & 0xffffffff, frame, o.bits, "data", #bytes)
  ty.io.write_atomic(path, header .. bytes .. ("\0"):rep(#bytes % 2))
end

--- Writes a sound as a FLAC file, which takes a build with libFLAC. sound: floats [channels, samples] or [samples], at
-- most 8 channels, from -1 to 1, beyond which they are cut. options: bits (16; 8 or 24), level (5; 0 is fast, 8 small).
---@param path string
---@param sound Tensor
---@param rate integer
---@param options? {bits: integer, level: integer}
function M.save_flac(path, sound, rate, options)
  expect("data.save_flac", "path", path, "a string")
  expect("data.save_flac", "sound", sound, "a tensor")
  expect("data.save_flac", "rate", rate, "an integer in [1, 655350]")
  local o = arguments.read("data.save_flac", options, { bits = 16, level = 5 },
    { bits = "8 or 16 or 24", level = "an integer in [0, 8]" })
  local samples = quantized(sound_of("data.save_flac", sound, 8), o.bits):to "i32"
  local ok, bytes = pcall(ty.io.encode_flac, samples, rate, { bits = o.bits, level = o.level })
  if not ok then arguments.raise(bytes, "data.save_flac: ") end
  ty.io.write_atomic(path, bytes)
end

local function gcd(a, b)
  while b ~= 0 do a, b = b, a % b end
  return a
end

--- A sound at another rate, by a sinc that a Hann window cuts off after `zeros` of its zeros on each side (Smith 1984):
-- floats [..., samples] to [..., ceil(samples * new / old)]. Differentiable. options: zeros (6), rolloff (0.99; the
-- frequency where it cuts off, as a share of the lower rate's half).
---@param sound Tensor
---@param old integer
---@param new integer
---@param options? {zeros: integer, rolloff: number}
---@return Tensor
function M.resample(sound, old, new, options)
  expect("data.resample", "sound", sound, "a tensor")
  expect("data.resample", "old", old, "an integer in [1, 4294967295]")
  expect("data.resample", "new", new, "an integer in [1, 4294967295]")
  local o = arguments.read("data.resample", options, { zeros = 6, rolloff = 0.99 },
    { zeros = "an integer in [1, 1000]", rolloff = "a number in (0, 1]" })
  if not sound:is_floating_point() or sound.ndim < 1 then
    arguments.fail("data.resample: sound: expected floats [..., samples], got %s [%s]", sound.dtype,
      table.concat(sound.shape, ", "))
  end
  local divisor = gcd(old, new)
  local from, to = old // divisor, new // divisor
  if from == to then return sound end
  if from * to > 1 << 24 then
    arguments.fail("data.resample: new: expected a ratio of small numbers to %d, got %d", old, new)
  end
  -- Sample j of `to` in a row lies j * from / to after the first of `from` samples: a filter for each j.
  local base = math.min(from, to) * o.rolloff
  local reach = math.ceil(o.zeros * from / base)
  local at = ty.arange(-reach, reach + from):to "f64":reshape(1, -1) / from
  local t = (at - (ty.arange(to):to "f64" / to):reshape(-1, 1)) * base
  t = t:clamp(-o.zeros, o.zeros)
  local window = (t * (math.pi / o.zeros / 2)):cos():square()
  local phase = t * math.pi
  local sinc = ty.where(phase:eq(0), 1.0, phase:sin() / ty.where(phase:eq(0), 1.0, phase))
  local kernel = (sinc * window * (base / from)):unsqueeze(1):to { dtype = sound.dtype, device = sound.device }
  local shape, n = sound.shape, sound:size(-1)
  local lines = 1
  for d = 1, #shape - 1 do lines = lines * shape[d] end
  local rows = sound:reshape(lines, 1, n)
  local padded = ty.pad(rows, { reach, reach + from })
  local y = ty.conv1d(padded, kernel, nil, from) -- [rows, to, steps]
  local count = (n * to + from - 1) // from
  shape[#shape] = count
  return y:transpose(1, 2):reshape(rows:size(0), y:size(1) * y:size(2)):narrow(1, 0, count):reshape(shape)
end

return M
