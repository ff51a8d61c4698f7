--- Copies between the host and a GPU, 256 MB. The peer's best may come from pinned memory.
local ty = require "tycho"

return function(on)
  local n = on.size(1 << 26, 1 << 10)
  local function item(name, peer, copy)
    return { name = name, bars = {}, peer = { peer, { n = n } }, setup = function()
      local host, device = ty.randn(n), on.randn { n }
      return function() copy(host, device) end
    end }
  end
  return {
    item("host to device, 256 MB", "to_device", function(host, device) device:copy_(host) end),
    item("device to host, 256 MB", "to_host", function(host, device) host:copy_(device) end),
  }
end
