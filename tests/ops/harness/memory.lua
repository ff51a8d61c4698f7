-- The bytes that are live on the tests' device and the CPU. A full collection takes milliseconds among all the rows, so
-- there is none where the bytes are as expected without: a collection can only lessen them.

local layout = require "layout"

local memory = {}
local ty

function memory.use(library) ty = library end

--- As they are, with what waits to be collected.
function memory.held()
  return ty.memory.stats("cpu").live + (layout.device ~= "cpu" and ty.memory.stats(layout.device).live or 0)
end

--- Without what can be collected. expected: what they should be, where that is known.
function memory.live(expected)
  for _ = 1, 2 do -- a second time for what finalizers let go
    if memory.held() == expected then return expected end
    collectgarbage()
  end
  return memory.held()
end

--- The bytes that are live before fn(...) and after it, and what pcall of it returns. Called again where they differ,
-- after a collection.
function memory.around(fn, ...)
  collectgarbage "stop"
  local before = memory.held()
  local results = table.pack(pcall(fn, ...))
  local after = memory.held()
  collectgarbage "restart"
  if before == after then return before, after, table.unpack(results, 1, results.n) end
  before = memory.live()
  results = table.pack(pcall(fn, ...))
  return before, memory.live(before), table.unpack(results, 1, results.n)
end

return memory
