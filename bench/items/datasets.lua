--- Data sets that are drawn on demand: at least 2,000 pictures of 64 x 64 a second on two cores. A clip counts as its
-- frames, a volume as its slices, four pictures of 32 x 32 as one.
local ty = require "tycho"
local datasets = require "tycho.datasets"

local RATE = 2000 -- pictures a second

-- count items of a set at once, which are so many pictures of 64 x 64; a function counts them in a batch.
local function item(name, options, count, pictures)
  local made = { name = name, threads = { 1, 2 }, bars = {} }
  function made.setup()
    local set, at = datasets.load(name:match "^%w+", options), 0
    local function batch()
      at = (at + count) % (#set - count + 1) -- others each time
      return set:batch(ty.arange(at, at + count))
    end
    if type(pictures) == "function" then
      local sum = 0
      for _ = 1, 10 do sum = sum + pictures(batch()) end
      made.bars.most = sum / 10 / RATE
    else
      made.bars.most = pictures / RATE
    end
    return function() ty.scope(batch) end
  end
  return made
end

local function steps(batch)
  local sum = 0
  for _, images in ipairs(batch.images) do sum = sum + images.shape[1] end
  return sum
end

return {
  item("scenes", { fields = { "image", "caption" } }, 200, 200),
  item("scenes with all that is known", { fields = { "image", "caption", "asked", "labels", "statements", "boxes",
    "masks", "questions" } }, 200, 200),
  item("clips", { size = 64, fields = { "video", "caption" } }, 12, 12 * 16),
  item("clips of 32 x 32", { fields = { "video", "caption", "law" } }, 25, 25 * 16 // 4),
  item("canvas", nil, 400, 100), -- of 32 x 32
  item("arm", { fields = { "images" } }, 8, steps),
  item("volumes", { fields = { "volume" } }, 2, 2 * 64),
  item("emoji", { size = 64, languages = { "en" } }, 200, 200),
}
