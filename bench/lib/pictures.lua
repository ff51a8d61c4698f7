--- Of bench/items/pictures.lua: the milliseconds that a picture takes from a folder of JPEG files into training batches.
--
--   tycho bench/lib/pictures.lua FOLDER WORKERS
--
-- An epoch begins without workers and without batches made ahead, and what it costs to start them counts.
local ty = require "tycho"

local folder, workers = arg[1], math.tointeger(tonumber(arg[2]))
local t = ty.data.transforms
local set = ty.data.transform(ty.data.image_folder(folder, { size = 224, crop = "random", channels = 3 }),
  t.horizontal_flip(), t.normalize())

local function epoch(seed)
  local loader <close> = ty.data.DataLoader(set, { batch_size = 32, shuffle = true, seed = seed, workers = workers })
  local pictures = 0
  for batch in loader() do
    assert(batch.image.dtype == "f32" and batch.image:size(2) == 224)
    pictures = pictures + batch.image:size(0)
  end
  assert(pictures == #set)
end

epoch(0)
local best = math.huge
for seed = 1, 2 do
  local start = ty.system.clock()
  epoch(seed)
  best = math.min(best, ty.system.clock() - start)
end
print(("%.4f"):format(best / #set * 1e3))
