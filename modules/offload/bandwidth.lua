-- What the disk under a folder gives: measured the way the engine uses it, with asynchronous transfers past the page
-- cache, several of them under way.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local tier, clock = ty.core.tier_core, ty.core.system.clock
local piece, flying = 16 << 20, 4 -- bytes of a transfer, and how many of a kind are under way

-- Seconds of moving `count` pieces of each of the kinds, which take turns.
local function seconds_of(file, buffers, kinds, count)
  local tickets, since = {}, clock()
  for i = 0, count - 1 do
    for _, kind in ipairs(kinds) do
      local list = tickets[kind.what] or {}
      tickets[kind.what] = list
      if #list == flying then file:wait(table.remove(list, 1)) end
      local buffer = buffers[kind.what][i % flying + 1]
      list[#list + 1] = file[kind.what](file, buffer, (kind.at + i) * piece)
    end
  end
  for _, list in pairs(tickets) do for _, ticket in ipairs(list) do file:wait(ticket) end end
  return clock() - since
end

--- Bytes a second that the disk under a folder reads and writes, each alone and both at a time (together), the best of
-- three rounds. It writes twice `bytes` there, in a file that has no name and is gone at the end. options:
--   bytes     moved in each direction (512 MiB)
--   backend   "auto", "uring" or "threads" ("auto")
--   direct    false: through the page cache (true)
---@param folder string
---@param options? { bytes?: integer, backend?: string, direct?: boolean }
---@return { read: number, write: number, both: number, direct: boolean }
return function(folder, options)
  arguments.expect("offload.bandwidth", "folder", folder, "a string")
  local o = arguments.read("offload.bandwidth", options, { bytes = 512 << 20, backend = "auto", direct = true },
    { bytes = "an integer >= 1", backend = '"auto" or "uring" or "threads"', direct = "a boolean" })
  local file <close> = tier.open(folder, o.backend, o.direct)
  local count, best, buffers = math.max(1, o.bytes // piece), { read = 0.0, write = 0.0, both = 0.0 }, {}
  for _, what in ipairs { "read", "write" } do
    buffers[what] = {}
    for i = 1, flying do buffers[what][i] = ty.keep(ty.rand(piece // 4)) end -- a disk may be fast with zeros
  end
  local reads, writes = { what = "read", at = 0 }, { what = "write", at = count }
  local fine, problem = pcall(function()
    for _, at in ipairs { 0, count } do -- makes room in the file
      seconds_of(file, buffers, { { what = "write", at = at } }, count)
    end
    for _ = 1, 3 do
      for name, kinds in pairs { read = { reads }, write = { writes }, both = { reads, writes } } do
        local bytes = #kinds * count * piece
        best[name] = math.max(best[name], bytes / seconds_of(file, buffers, kinds, count))
      end
    end
  end)
  for _, list in pairs(buffers) do for _, buffer in ipairs(list) do buffer:free() end end
  if not fine then arguments.raise(problem, "offload.bandwidth: ") end
  best.direct = file:stats().direct
  return best
end
