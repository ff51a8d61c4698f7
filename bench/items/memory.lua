--- Peak memory (VmHWM) of three training steps in a fresh process, both sides at all threads. The limit is parameters,
-- gradients and moments alone. The peer's figure is the smaller of its fast allocator's and the C library's.
local ty = require "tycho"
local Peer = require "bench.lib.peer"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local tycho = (os.getenv "TYCHO_BUILD" or root .. "/build/release") .. "/tycho"

local function number(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  return tonumber(pipe:read "a":match "([%d.]+)%s*$" or "")
end

local function item(name, arguments, floats, bar)
  return { name = name, unit = "MB", threads = { ty.cpu().threads }, rounds = 1, bars = { peer = bar },
    least = floats * 4 / 2 ^ 20,
    sample = function() return number(("'%s' '%s/bench/lib/peak.lua' %s"):format(tycho, root, arguments)) end,
    peer_sample = function()
      local python = Peer.python()
      if not python then return nil end
      local least
      for _, plain in ipairs { false, true } do
        local peak = number(("%s '%s' '%s/bench/peer/peak.py' %d %s"):format(Peer.environment(plain), python, root,
          ty.cpu().threads, arguments))
        least = peak and math.min(least or peak, peak)
      end
      return least
    end }
end

return {
  item("gpt2/B4-T64", "gpt2 4 64", 4 * 124439808, 1 / 0.75),
  item("gpt2/B1-T256", "gpt2 1 256", 4 * 124439808, 1 / 0.75),
  item("gpt2/B1-T1024", "gpt2 1 1024", 4 * 124439808, 1 / 0.75),
  item("unet", "unet", 4 * 6472195, 1 / 0.6),
  item("resnet", "resnet", 3 * 11689512, nil),
}
