--- Rows of a table by index, and their gradient (a dense tensor of the table's size, as in training).
local ty = require "tycho"
local calls = require "bench.lib.calls"

local rows, width = 50257, 768
local items = {}

for _, n in ipairs { 256, 8192 } do
  local arguments = { rows = rows, width = width, n = n }
  local function tensors() return ty.randn(rows, width), ty.randint(0, rows, { n }) end
  items[#items + 1] = { name = ("gather/%d"):format(n), work = { copy = 8 * n * width }, bars = { peer = 1 },
    peer = { "gather", arguments }, setup = function()
      local w, index = tensors()
      return function() ty.embedding(w, index):free() end
    end }
  items[#items + 1] = { name = ("fwd+bwd/%d"):format(n), bars = { peer = 1 },
    work = { copy = (4 * n + rows) * width * 4 }, peer = { "both", arguments }, setup = function()
      local w, index = tensors()
      return calls.both({ w }, ty.randn(n, width), function() return ty.embedding(w, index) end)
    end }
  items[#items + 1] = { name = ("index_add/%d"):format(n), bars = { peer = 1 }, peer = { "index_add", arguments },
    setup = function()
      local w, index = tensors()
      local source = ty.randn(n, width)
      return function() ty.index_add(w, 0, index, source):free() end
    end }
end

return items
