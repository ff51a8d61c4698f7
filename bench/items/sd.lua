--- Stable Diffusion 1.5 with random weights: a step of the U-Net (860 million parameters, 64 x 64 latents, two of them
-- for guidance), and the autoencoder's way back to 512 x 512 pixels; seconds, and peak memory of the same processes.
-- In f32 beside diffusers, with weights in f16 and (of linear layers) q8_0 beside stable-diffusion.cpp. Each side runs
-- in a process of its own, one call to warm up and one that counts.
local ty = require "tycho"
local Peer = require "bench.lib.peer"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local tycho = (os.getenv "TYCHO_BUILD" or root .. "/build/release") .. "/tycho"
local threads = ty.cpu().threads

-- The numbers that such a program prints last.
local function numbers(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  local last
  for line in pipe:lines() do last = line:find "^[%d.]+[%d.%s]*$" and line or last end
  local list = {}
  for word in (last or ""):gmatch "[%d.]+" do list[#list + 1] = tonumber(word) end
  return list
end

-- What a run for the seconds showed besides, for the items that come after.
local seen = {}

local function ours(name, dtype)
  local found = numbers(("'%s' '%s/bench/lib/drawn.lua' %s %s"):format(tycho, root, name, dtype or "f32"))
  if not dtype then seen[name] = found[2] end
  return found[1]
end

local function least(a, b) return a and b and math.min(a, b) or a or b end

-- The least of the modes that may be fastest, and the least memory of any.
local function theirs(name)
  local python = Peer.python()
  if not python then return nil end
  local seconds, megabytes
  for _, mode in ipairs { "plain", "channels_last" } do
    local found = numbers(("%s '%s' '%s/bench/peer/drawn.py' %d %s %s"):format(Peer.environment(), python, root,
      threads, name, mode))
    seconds, megabytes = least(seconds, found[1]), least(megabytes, found[2])
  end
  seen[name .. " peer"] = megabytes
  return seconds
end

-- stable-diffusion.cpp's step and decoding come from one process; the first that asks starts it.
local function drawn_cpp(name, dtype)
  local python = Peer.python()
  if not python then return nil end
  if not seen[dtype] then
    seen[dtype] = {}
    for _, mode in ipairs { "plain", "flash", "direct" } do
      local found = numbers(("'%s' '%s/bench/peer/drawn_cpp.py' '%s/build/bench/sd15' %d %s %s"):format(python, root,
        root, threads, dtype, mode))
      seen[dtype].unet, seen[dtype].decode = least(seen[dtype].unet, found[1]), least(seen[dtype].decode, found[2])
    end
  end
  return seen[dtype][name]
end

local list = {}

local function add(name, item)
  item.name, item.threads, item.rounds, item.unit = name, { threads }, 1, item.unit or "s"
  list[#list + 1] = item
end

for _, part in ipairs { { "unet", 859520964, { "f16", "q8_0" } }, { "decode", 49490179, { "f16" } } } do
  local name, parameters, dtypes = table.unpack(part)
  add(name .. "/seconds", { bars = { peer = 1.3 }, sample = function() return ours(name) end,
    peer_sample = function() return theirs(name) end })
  add(name .. "/memory", { unit = "MB", bars = { peer = 1 / 0.8 }, least = parameters * 4 / 2 ^ 20,
    sample = function() return seen[name] or ours(name) and seen[name] end,
    peer_sample = function()
      if not seen[name .. " peer"] then theirs(name) end
      return seen[name .. " peer"]
    end })
  for _, dtype in ipairs(dtypes) do
    add(("%s/%s"):format(name, dtype), { bars = { peer = 1.5 }, sample = function() return ours(name, dtype) end,
      peer_sample = function() return drawn_cpp(name, dtype) end })
  end
end

return list
