-- Transforms of long signals and of awkward lengths, short-time spectra and back, filters on the mel scale.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, ok, equal, close = check.test, check.ok, check.equal, check.close

ty.manual_seed(17)

-- The largest difference, over the largest number of b.
local function error_of(a, b)
  return (a - b):abs():max():item() / math.max(b:abs():max():item(), 1e-300)
end

-- 2^20: cut evenly; 10^6, 3 * 5^6 * 7: other factors; 2^3 * 5003, 131071, 65537: large primes; odd and even.
local long = { 1 << 20, 1000000, 3 * 15625 * 7, 8 * 5003, 65537, 131071, 99999, 2 * 65537 }

test("long transforms have their inverses, and their energy", function()
  for _, dtype in ipairs { "f32", "f64" } do
    local limit = dtype == "f64" and 1e-14 or 2e-6
    for _, n in ipairs(long) do
      local x = ty.randn(n, 2, { dtype = dtype })
      local y = ty.fft(x, { norm = "ortho" })
      ok(error_of(ty.ifft(y, { norm = "ortho" }), x) < limit, ("ifft of fft, %d %s"):format(n, dtype))
      close(y:square():sum():item() / x:square():sum():item(), 1, 1e-5, "energy of fft, " .. n)
      local r = x:select(-1, 0):contiguous()
      local half = ty.rfft(r)
      ok(error_of(ty.irfft(half, { n = n }), r) < limit, ("irfft of rfft, %d %s"):format(n, dtype))
      local all = ty.fft(ty.complex(r))
      ok(error_of(half, all:slice(0, 0, n // 2 + 1)) < limit, ("rfft like fft, %d %s"):format(n, dtype))
      ok(error_of(ty.idct(ty.dct(r)), r) < 2 * limit, ("idct of dct, %d %s"):format(n, dtype))
    end
  end
end)

test("a wave is one frequency of a long transform", function()
  for _, n in ipairs(long) do
    local k = n // 3 + 1
    -- (k j) mod n, exactly, turned into an angle
    local angle = (ty.arange(n) * k % n):to("f64") * (2 * math.pi / n)
    local y = ty.fft(ty.polar(ty.ones(n, { dtype = "f64" }), angle), { norm = "forward" })
    close(y:select(-1, 0)[k]:item(), 1, 1e-12, "its frequency, " .. n)
    y:select(-1, 0):slice(0, k, k + 1):fill_(0)
    ok(y:abs():max():item() < 1e-12, "no other, " .. n)
  end
end)

test("lines across memory are like lines that lie together", function()
  for _, shape in ipairs { { 5000, 3 }, { 1031, 20 }, { 9000, 9 }, { 600, 17 } } do
    local x = ty.randn(shape[1], shape[2], 2)
    local y = ty.fft(x:transpose(0, 1):contiguous(), { dim = 1 }):transpose(0, 1)
    ok(error_of(ty.fft(x, { dim = 0 }), y) < 2e-6, "fft of " .. shape[1])
    local r = x:select(-1, 1)
    ok(error_of(ty.dct(r, { dim = 0 }), ty.dct(r:t()):t()) < 2e-6, "dct of " .. shape[1])
    ok(error_of(ty.rfft(r, { dim = 0 }), ty.rfft(r:t()):transpose(0, 1)) < 2e-6, "rfft of " .. shape[1])
  end
end)

test("results do not depend on the number of threads", function()
  local threads = ty.threads()
  for _, n in ipairs { 1 << 17, 100000, 65537 } do
    local x, list = ty.randn(2, n, 2), {}
    for i = 1, 2 do
      ty.set_threads(i)
      list[i] = ty.fft(x)
    end
    ok(list[1]:eq(list[2]):all():item(), "fft of " .. n)
  end
  ty.set_threads(threads)
end)

test("a convolution is a product of spectra", function()
  local n, m = 3000, 257
  local x, w = ty.randn(2, 3, n), ty.randn(m)
  local size = n + m - 1
  local y = ty.irfft(ty.complex_mul(ty.rfft(x, size), ty.rfft(w, size)), size)
  local sums = ty.zeros(2, 3, size)
  for k = 0, m - 1 do sums = sums + ty.pad(x * w[k]:item(), { k, m - 1 - k }) end
  ok(error_of(y, sums) < 5e-6, "all lags")
end)

test("istft gives back what stft was given", function()
  local x = ty.randn(2, 4001, { dtype = "f64" })
  local windows = { hann = ty.hann_window, hamming = ty.hamming_window, blackman = ty.blackman_window,
    bartlett = ty.bartlett_window, kaiser = ty.kaiser_window }
  for name, window in pairs(windows) do
    for _, s in ipairs { { 256, 64, 256 }, { 200, 50, 160 }, { 255, 32, 255 }, { 97, 20, 97 } } do
      local options = { hop_length = s[2], win_length = s[3], window = window(s[3], { dtype = "f64" }) }
      for _, more in ipairs { {}, { normalized = true }, { onesided = false } } do
        for k, v in pairs(more) do options[k] = v end
        local y = ty.stft(x, s[1], options)
        equal(y.shape[2], options.onesided == false and s[1] or s[1] // 2 + 1, "frequencies")
        options.length = 4001
        -- what the last piece does not reach is not given back
        local reach = (y.shape[3] - 1) * s[2]
        local back = ty.istft(y, s[1], options):slice(-1, 0, reach)
        options.length = nil
        ok(error_of(back, x:slice(-1, 0, reach)) < 1e-12, name .. " " .. s[1])
      end
    end
  end
end)

test("pieces that nothing is added to", function()
  local x = ty.randn(1000, { dtype = "f64" })
  local options = { hop_length = 25, window = ty.hamming_window(100, { dtype = "f64" }), center = false }
  local back = ty.istft(ty.stft(x, 100, options), 100, options)
  equal(back.shape[1], 1000, "length")
  ok(error_of(back, x) < 1e-12, "samples")
end)

test("the spectrum of a tone is at its frequency, and its filter hears it", function()
  local rate, n = 16000, 512
  local x = ty.sin(ty.arange(rate) * (2 * math.pi * 1000 / rate))
  local power = ty.complex_abs(ty.stft(x, n, { window = ty.hann_window(n) })):square()
  equal(power:mean(1):argmax():item(), 32, "1000 Hz of 31.25 Hz each")
  for _, scale in ipairs { "htk", "slaney" } do
    local bank = ty.mel_filter_bank(n // 2 + 1, 40, rate, { scale = scale, norm = "slaney" })
    local mel = bank:matmul(power):mean(1)
    local best = mel:argmax():item()
    ok(math.abs(bank[best]:argmax():item() - 32) <= 1, scale .. ": the filter around 1000 Hz")
    -- slaney: the area of each filter is 1, in Hz
    local area = bank:sum(1) * (rate / 2 / (n // 2))
    ok((area:slice(0, 10) - 1):abs():max():item() < 0.2, scale .. ": areas")
  end
end)

test("lines across memory, of several places, fill vectors or not", function()
  for _, dtype in ipairs { "f32", "f64" } do
    for _, width in ipairs { 3, 8, 9, 16, 17, 24, 33, 40 } do
      local x = ty.randn(5, 12, width, 2, { dtype = dtype })
      local want = ty.fft(x:transpose(1, 2):contiguous(), 12, 2):transpose(1, 2)
      ok(error_of(ty.fft(x, 12, 1), want) < 1e-6, ("fft of %d %s"):format(width, dtype))
      local real = x:select(-1, 0):contiguous()
      want = ty.rfft(real:transpose(1, 2):contiguous(), 12, 2):transpose(1, 2)
      ok(error_of(ty.rfft(real, 12, 1), want) < 1e-6, ("rfft of %d %s"):format(width, dtype))
    end
  end
end)

check.finish()
