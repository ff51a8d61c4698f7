-- Transforms of sound (lua/tycho/data/transforms/sound.lua): beside torchaudio's, masks, rates, worker threads.
local here = arg[0]:match ".*/" or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local t = ty.data.transforms
local test, equal, fails = check.test, check.equal, check.fails

test("mel spectrograms are torchaudio's", function()
  local want = ty.io.load_npz(here .. "../fixtures/sound.npz")
  local function near(name, got)
    equal(got.shape, want[name].shape, name)
    local scale = want[name]:abs():max():item()
    local far = (got:to "f64" - want[name]:to "f64"):abs():max():item() / scale
    check.ok(far < 1e-5, ("%s: off by %.3g of the largest"):format(name, far))
  end
  local x = want.sound
  near("default", t.mel_spectrogram { rate = 16000 }(x))
  near("speech", t.mel_spectrogram { rate = 16000, n_fft = 512, window = 400, hop = 160, n_mels = 40, f_min = 20,
    f_max = 7600, power = 1, scale = "slaney", norm = "slaney" }(x))
  local batch = t.mel_spectrogram { n_mels = 20, log = true } { sound = x:unsqueeze(0), rate = ty.tensor { 8000 },
    label = 3 }
  near("low", batch.mel:exp():select(0, 0))
  equal({ batch.label, batch.sound.shape }, { 3, { 1, 2, 4000 } })
  near("resampled", t.resample(11025, { rate = 16000 })(x))
end)

test("another rate changes the rate that a batch says", function()
  local sound = ty.rand(2, 1, 800)
  local batch = t.resample(4000) { sound = sound, rate = ty.tensor { 8000, 8000 } }
  equal({ batch.rate:tolist(), batch.sound.shape }, { { 4000, 4000 }, { 2, 1, 400 } })
  equal(t.resample(4000) { sound = sound, rate = 8000 }.rate, 4000)
  fails(function() t.resample(4000) { sound = sound, rate = ty.tensor { 8000, 4000 } } end,
    "expected sounds of one rate")
  fails(function() t.resample(4000)(sound) end,
    "transforms.resample: rate: expected an integer >= 1, here or as a field")
end)

test("masks cover whole bands and frames, no more than they may, elsewhere in each spectrogram", function()
  ty.manual_seed(1)
  local n, bands, frames = 200, 24, 50
  local x = ty.rand(n, 2, bands, frames) + 1
  local widest, most, places = 0, 0, {}
  local y = t.spec_augment { frequency = 6, frequency_masks = 1, time = 10, time_masks = 2 } { mel = x }.mel
  local gone = y:eq(0)
  check.ok(ty.equal(ty.where(gone, x, y), x), "the rest stays")
  check.ok(ty.equal(gone:select(1, 0), gone:select(1, 1)), "the same in all channels")
  local by_band, by_frame = gone:select(1, 0):all(2), gone:select(1, 0):all(1)
  check.ok(ty.equal(by_band:unsqueeze(2):logical_or(by_frame:unsqueeze(1)), gone:select(1, 0)), "rows and columns")
  for i = 0, n - 1 do
    local covered = by_band[i]:sum():item()
    widest, most = math.max(widest, covered), math.max(most, by_frame[i]:sum():item())
    if covered > 0 and covered < bands then
      local at = by_band[i]:nonzero()
      equal(at[-1]:item() - at[0]:item() + 1, math.tointeger(covered), "in one piece")
      places[at[0]:item()] = true
    end
  end
  equal(widest, 6)
  check.ok(most > 10 and most <= 20, "two masks of at most ten frames")
  local count = 0
  for _ in pairs(places) do count = count + 1 end
  check.ok(count > 10, "at many places")
  local short = t.spec_augment { frequency = 0, time = 100, share = 0.1, time_masks = 1 }(x)
  check.ok(short:eq(0):select(1, 0):all(1):sum(1):max():item() <= 5, "a share of the frames")
  local mean = t.spec_augment { frequency = 24, value = "mean" }(x)
  check.ok(mean:min():item() >= 1 and mean:ne(x):any():item())
  equal(t.spec_augment()(ty.ones(24, 50)).shape, { 24, 50 })
  equal(t.spec_augment { frequency_masks = 0, time_masks = 0 }(x):tolist()[1], x:tolist()[1])
end)

test("through a DataLoader's threads", function()
  local data = ty.data.from_function(8, function(i)
    local step = (require "tycho").arange(1600):to "f32"
    return { sound = (step * (0.01 * (i + 1))):sin():unsqueeze(0), rate = 8000, label = i }
  end)
  local set = ty.data.transform(data, t.mel_spectrogram { n_fft = 256, n_mels = 16, log = true },
    t.spec_augment { time = 4 })
  local all = {}
  for _, workers in ipairs { 0, 2 } do
    local loader <close> = ty.data.DataLoader(set, { batch_size = 4, workers = workers, seed = 5 })
    all[#all + 1] = loader:next().mel
  end
  equal(all[1].shape, { 4, 1, 16, 13 })
  check.ok(ty.equal(all[1], all[2]), "the draws are those of the seed")
end)

test("wrong use", function()
  fails(function() t.mel_spectrogram { rate = 8000 } { image = 3 } end, "expected a field `sound` of floats")
  fails(function() t.mel_spectrogram { rate = 8000 }(ty.zeros({ 900 }, { dtype = "i64" })) end, "got i64 [900]")
  fails(function() t.mel_spectrogram { rate = 8000 }(ty.zeros(100)) end,
    "expected more than the 200 samples of half n_fft, got 100")
  fails(function() t.mel_spectrogram { n_fft = 100, window = 200 } end, "window: expected at most the 100 samples")
  fails(function() t.mel_spectrogram { scale = "bark" } end, "transforms.mel_spectrogram: scale: expected")
  fails(function() t.spec_augment { time = -1 } end, "transforms.spec_augment: time: expected an integer >= 0, got -1")
  fails(function() t.spec_augment()(ty.zeros(4)) end, "with at least 2 dimensions")
  fails(function() t.resample(0) end, "transforms.resample: new: expected an integer >= 1, got 0")
end)

check.finish()
