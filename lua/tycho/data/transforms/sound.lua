--- Sound: other rates, mel spectrograms, and their masks. A batch has `sound` [n, channels, samples], floats from -1 to
-- 1, with `rate` in samples a second; mel_spectrogram gives it `mel` [n, channels, mels, frames]. A tensor alone is the
-- sound, or of spec_augment the spectrogram.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local audio = require "tycho.data.audio"
local frame = require "tycho.data.transforms.frame"

local M = {}

local expect, fail, none = arguments.expect, arguments.fail, arguments.none

-- A transform of fn(batch, x), x the field `field`, which gives the batch the field `made`.
local function transform(who, field, made, least, fn)
  return function(given)
    local batch = {}
    if type(given) == "table" then
      for key, value in pairs(given) do batch[key] = value end
    else
      batch[field] = given
    end
    local x = batch[field]
    if not ty.is_tensor(x) or not x:is_floating_point() or x.ndim < least then
      fail("transforms.%s: batch: expected a field `%s` of floats with at least %d dimensions, got %s", who, field,
        least, ty.is_tensor(x) and ("%s [%s]"):format(x.dtype, table.concat(x.shape, ", ")) or arguments.describe(x))
    end
    batch[made] = fn(batch, x)
    return type(given) == "table" and batch or batch[made]
  end
end

-- The one rate of a batch's sounds.
local function rate_of(who, batch, given)
  local rate = given or batch.rate
  if ty.is_tensor(rate) and rate:numel() > 0 then
    local low, high = rate:min():item(), rate:max():item()
    if low ~= high then fail("transforms.%s: batch: expected sounds of one rate, got %g to %g", who, low, high) end
    rate = low
  end
  rate = type(rate) == "number" and math.tointeger(rate)
  if not rate or rate < 1 then
    fail("transforms.%s: rate: expected an integer >= 1, here or as a field of the batch, got %s", who,
      arguments.describe(given or batch.rate))
  end
  return rate
end

--- Sounds at another rate, see data.resample. options: rate (what they have; the field `rate` of the batch).
---@param new integer  samples a second
---@param given? {rate: integer}
function M.resample(new, given)
  expect("transforms.resample", "new", new, "an integer >= 1")
  local o = frame.options("resample", given, { rate = none }, { rate = "an integer >= 1" })
  return transform("resample", "sound", "sound", 1, function(batch, x)
    local rate = rate_of("resample", batch, o.rate)
    if ty.is_tensor(batch.rate) then batch.rate = ty.full_like(batch.rate, new)
    elseif batch.rate then batch.rate = new end
    return audio.resample(x, rate, new)
  end)
end

--- Spectrograms of `n_mels` bands evenly spaced in mel, in the field `mel`: |STFT|^power times ty.mel_filter_bank.
-- options: rate (the field `rate` of the batch), n_fft (400), window (n_fft; samples of the Hann window), hop (half the
-- window), n_mels (128), f_min (0), f_max (0: half the rate), power (2), scale ("htk" or "slaney"), norm ("none" or
-- "slaney"), log (false; true: the logarithm, of `floor` at least), floor (1e-10). The defaults are torchaudio's.
---@param given? table
function M.mel_spectrogram(given)
  local o = frame.options("mel_spectrogram", given, { rate = none, n_fft = 400, window = none, hop = none, n_mels = 128,
    f_min = 0, f_max = 0, power = 2, scale = "htk", norm = "none", log = false, floor = 1e-10 },
    { rate = "an integer >= 1", n_fft = "an integer >= 2", window = "an integer >= 1", hop = "an integer >= 1",
      n_mels = "an integer >= 1", f_min = "a finite number >= 0", f_max = "a finite number >= 0",
      power = "a finite number > 0", scale = '"htk" or "slaney"', norm = '"none" or "slaney"',
      floor = "a finite number > 0" })
  local window = o.window or o.n_fft
  if window > o.n_fft then
    fail("transforms.mel_spectrogram: window: expected at most the %d samples of n_fft, got %d", o.n_fft, window)
  end
  local hop = o.hop or math.max(1, window // 2)
  return transform("mel_spectrogram", "sound", "mel", 1, function(batch, x)
    local rate = rate_of("mel_spectrogram", batch, o.rate)
    local like = { dtype = x.dtype, device = x.device }
    if x:size(-1) <= o.n_fft // 2 then
      fail("transforms.mel_spectrogram: batch: expected more than the %d samples of half n_fft, got %d", o.n_fft // 2,
        x:size(-1))
    end
    local spectra = ty.stft(x, o.n_fft, hop, window, ty.hann_window(window, like))
    local energy = spectra:square():sum { -1 }
    if o.power ~= 2 then energy = energy:pow(o.power / 2) end
    local bank = ty.mel_filter_bank(o.n_fft // 2 + 1, o.n_mels, rate, { f_min = o.f_min, f_max = o.f_max,
      scale = o.scale, norm = o.norm, dtype = x.dtype, device = x.device })
    local mel = ty.matmul(bank, energy)
    return o.log and mel:clamp(o.floor):log() or mel
  end)
end

-- Of each of n spectrograms which of `size` places `count` masks cover, of a width up to `most`: bool [n, size].
local function masked(n, size, most, count)
  most = math.min(most, size)
  if count == 0 or most == 0 then return ty.zeros({ n, size }, { dtype = "bool" }) end
  local width = (ty.rand(n, count) * (most + 1)):floor():clamp(0, most)
  local start = (ty.rand(n, count) * (size - width + 1)):floor()
  local at = ty.arange(size):reshape(1, 1, size)
  return at:ge(start:unsqueeze(-1)):logical_and(at:lt((start + width):unsqueeze(-1))):any(1)
end

--- Masks of bands and of frames of the field `mel` [n, channels, mels, frames], drawn for each spectrogram
-- (SpecAugment, Park et al. 2019). options: frequency (27; bands, the most of a mask), frequency_masks (2), time (100;
-- frames, the most of a mask), time_masks (2), share (1; of the frames, the most that a mask covers), value (0, or
-- "mean" of the spectrogram).
---@param given? table
function M.spec_augment(given)
  local o = frame.options("spec_augment", given, { frequency = 27, frequency_masks = 2, time = 100, time_masks = 2,
    share = 1, value = 0 },
    { frequency = "an integer >= 0", frequency_masks = "an integer in [0, 1000]", time = "an integer >= 0",
      time_masks = "an integer in [0, 1000]", share = "a number in [0, 1]", value = 'a finite number or "mean"' })
  return transform("spec_augment", "mel", "mel", 2, function(_, x)
    local n, bands, frames = x.ndim > 3 and x:size(0) or 1, x:size(-2), x:size(-1)
    local longest = math.min(o.time, math.floor(o.share * frames))
    local gone = masked(n, bands, o.frequency, o.frequency_masks):unsqueeze(-1)
      :logical_or(masked(n, frames, longest, o.time_masks):unsqueeze(-2))
    local shape = { n }
    for d = 2, x.ndim - 2 do shape[d] = 1 end
    if x.ndim == 2 then shape = {} end
    shape[#shape + 1], shape[#shape + 2] = bands, frames
    local value = o.value
    if value == "mean" then
      local over = {}
      for d = x.ndim > 3 and 1 or 0, x.ndim - 1 do over[#over + 1] = d end
      value = x:mean(over, true)
    end
    return ty.where(gone:reshape(shape):to { device = x.device }, value, x)
  end)
end

return M
