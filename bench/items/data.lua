--- Pictures: decoding JPEG files, in pictures of the shipped photographs.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}

for _, name in ipairs { "astronaut", "coffee" } do
  local path = ty.data.shipped(("photos/%s.jpg"):format(name))
  items[#items + 1] = { name = "jpeg/" .. name, peer = { "jpeg", { path = path } }, bars = { peer = 1 },
    setup = function()
      local file <close> = assert(io.open(path, "rb"))
      local bytes = file:read "a"
      return calls.forward(function() ty.io.decode_image(bytes) end)
    end }
end

return items
