-- The timeline of the engine: what was computed and moved when.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, clock = arguments.expect, ty.core.system.clock
local longest = 100000 -- events: a timeline is for some steps

--- Gives a class of engines its methods.
---@param Engine table
return function(Engine)
  --- Something was computed, from a time until now.
  function Engine:log(name, kind, from)
    if #self.events < longest then
      self.events[#self.events + 1] = { name = name, kind = kind, row = "compute", from = from, to = clock() }
    end
  end

  --- Writes the timeline for chrome://tracing and Perfetto: computing, and each store's reads and writes, in rows.
  ---@param path string
  ---@return string path
  function Engine:trace(path)
    expect("OffloadEngine:trace", "path", path, "a string")
    local list, rows, count = ty.core.io.array {}, { compute = 0 }, 0
    list[1] = { name = "thread_name", ph = "M", pid = 0, tid = 0, args = { name = "compute" } }
    for _, e in ipairs(self.events) do
      if not rows[e.row] then
        count = count + 1
        rows[e.row] = count
        list[#list + 1] = { name = "thread_name", ph = "M", pid = 0, tid = count, args = { name = e.row } }
      end
      list[#list + 1] = { name = e.name, cat = e.kind, ph = "X", pid = 0, tid = rows[e.row], ts = e.from * 1e6,
        dur = (e.to - e.from) * 1e6 }
    end
    ty.core.io.save_json(path, { traceEvents = list, displayTimeUnit = "ms" })
    return path
  end
end
