--- Rows of a table by index on a GPU and their gradient (a dense tensor of the table's size), gather and scatter_add
-- along rows. The limit is the traffic at the bandwidth of a copy.
local ty = require "tycho"
local calls = require "bench.lib.calls"

return function(on)
  local rows, width, n = on.size(50257, 101), on.size(768, 64), on.size(1 << 16, 64)
  local items = {}
  for _, dtype in ipairs { "bf16", "f32" } do
    local bytes = dtype == "f32" and 4 or 2
    local arguments = { rows = rows, width = width, n = n, dtype = dtype }
    local function tensors() return on.randn({ rows, width }, dtype), on.randint(rows, { n }) end
    items[#items + 1] = { name = ("embedding/%s/fwd"):format(dtype), work = { copy = 2 * bytes * n * width },
      peer = { "gather", arguments }, bars = {}, setup = function()
        local w, index = tensors()
        return function() ty.embedding(w, index):free() end
      end }
    items[#items + 1] = { name = ("embedding/%s/fwd+bwd"):format(dtype), bars = {},
      work = { copy = (4 * n + rows) * width * bytes }, peer = { "both", arguments }, setup = function()
        local w, index = tensors()
        return calls.both({ w }, on.randn({ n, width }, dtype), function() return ty.embedding(w, index) end)
      end }
  end
  items[#items + 1] = { name = "index_add/f32", work = { copy = (2 * rows + n) * width * 4 }, bars = {},
    peer = { "index_add", { rows = rows, width = width, n = n } }, setup = function()
      local w, index, source = on.randn { rows, width }, on.randint(rows, { n }), on.randn { n, width }
      return function() ty.index_add(w, 0, index, source):free() end
    end }

  local lines, wide, taken = on.size(4096, 8), on.size(16384, 64), on.size(8192, 32)
  for _, op in ipairs { "gather", "scatter_add" } do
    local moved = op == "gather" and 16 * lines * taken or 8 * lines * wide + 12 * lines * taken
    items[#items + 1] = { name = op .. "/rows", work = { copy = moved }, bars = {},
      peer = { "along_rows", { op = op, rows = lines, width = wide, n = taken } }, setup = function()
        local x, index, source = on.randn { lines, wide }, on.randint(wide, { lines, taken }), on.randn { lines, taken }
        if op == "gather" then return function() ty.gather(x, 1, index):free() end end
        return function() ty.scatter_add(x, 1, index, source):free() end
      end }
  end
  return items
end
