--- Stable Diffusion 1.5 with random weights beside diffusers: a step of the U-Net (860 million parameters, 64 x 64
-- latents, two of them for guidance), and the autoencoder's way back to 512 x 512 pixels; seconds, and peak memory of
-- the same processes. Each side runs in a process of its own, one call to warm up and one that counts.
local ty = require "tycho"
local Peer = require "bench.lib.peer"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local tycho = (os.getenv "TYCHO_BUILD" or root .. "/build/release") .. "/tycho"
local threads = ty.cpu().threads

-- Seconds and megabytes, which such a program prints one after the other.
local function both(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  local text = pipe:read "a"
  local seconds, megabytes = text:match "([%d.]+)%s+([%d.]+)%s*$"
  return tonumber(seconds), tonumber(megabytes)
end

-- What a run for the seconds showed of memory, for the item that comes after.
local seen = {}

local function ours(name)
  local seconds, megabytes = both(("'%s' '%s/bench/lib/drawn.lua' %s"):format(tycho, root, name))
  seen[name] = megabytes
  return seconds
end

-- The least of the modes that may be fastest, and the least memory of any.
local function theirs(name)
  local python = Peer.python()
  if not python then return nil end
  local least, memory
  for _, mode in ipairs { "plain", "channels_last" } do
    local seconds, megabytes = both(("%s '%s' '%s/bench/peer/drawn.py' %d %s %s"):format(Peer.environment(), python,
      root, threads, name, mode))
    least = seconds and math.min(least or seconds, seconds) or least
    memory = megabytes and math.min(memory or megabytes, megabytes) or memory
  end
  seen[name .. " peer"] = memory
  return least
end

local function items(name, parameters)
  return { name = name .. "/seconds", unit = "s", threads = { threads }, rounds = 1, bars = { peer = 1.3 },
    sample = function() return ours(name) end, peer_sample = function() return theirs(name) end },
    { name = name .. "/memory", unit = "MB", threads = { threads }, rounds = 1, bars = { peer = 1 / 0.8 },
      least = parameters * 4 / 2 ^ 20,
      sample = function() return seen[name] or ours(name) and seen[name] end,
      peer_sample = function()
        if not seen[name .. " peer"] then theirs(name) end
        return seen[name .. " peer"]
      end }
end

local list = { items("unet", 859520964) }
table.move({ items("decode", 49490179) }, 1, 2, 3, list)
return list
