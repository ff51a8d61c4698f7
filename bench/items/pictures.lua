--- A folder of JPEG files to training batches: decoded, a random part resized to 224 x 224, flipped, normalised, 32 at
-- a time, by as many workers as threads. Milliseconds for each picture, the better of two epochs of 272 files, the
-- photographs of datasets/photos eight times; each sample is a process of its own, which reads every file once before.
-- The peer's figure is that of its best way (bench/peer/pictures.py) with the better of two allocators.
local ty = require "tycho"
local Peer = require "bench.lib.peer"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local tycho = (os.getenv "TYCHO_BUILD" or root .. "/build/release") .. "/tycho"
local folder = root .. "/build/bench/photos"

-- Two classes, so that it is a folder of classes.
local function prepare()
  local from = root .. "/datasets/photos/"
  ty.io.mkdir(root .. "/build/bench")
  ty.io.mkdir(folder)
  for class = 0, 1 do ty.io.mkdir(("%s/%d"):format(folder, class)) end
  for _, name in ipairs(ty.io.listdir(from)) do
    local stem = name:match "^(.*)%.jpg$"
    for copy = 0, stem and 7 or -1 do
      local path = ("%s/%d/%s-%d.jpg"):format(folder, copy % 2, stem, copy)
      if not ty.io.exists(path) then ty.io.write_atomic(path, ty.io.read(from .. name)) end
    end
  end
end

local function number(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  return tonumber(pipe:read "a":match "([%d.]+)%s*$" or "")
end

local threads = ty.cpu().threads

return { {
  name = "jpeg/224", unit = "ms", threads = { threads }, rounds = 3, bars = { peer = 1.5 },
  sample = function()
    prepare()
    return number(("'%s' '%s/bench/lib/pictures.lua' '%s' %d"):format(tycho, root, folder, threads))
  end,
  peer_sample = function()
    local python, least = Peer.python(), nil
    if not python then return nil end
    for _, plain in ipairs { false, true } do
      local ms = number(("%s '%s' '%s/bench/peer/pictures.py' '%s' %d"):format(Peer.environment(plain), python, root,
        folder, threads))
      least = ms and math.min(least or ms, ms)
    end
    return least
  end,
} }
