--- Profiles in Chrome's trace event format: complete events ("ph": "X") with times in microseconds. Modules and kernels
-- are rows of one thread, so that a viewer stacks them.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

---@param self Profile
---@param path string
---@return string path
return function(self, path)
  arguments.expect("Profile:trace", "path", path, "a string")
  local list = core.io.array {}
  local function add(name, kind, begin, seconds, args)
    list[#list + 1] = { name = name, cat = kind, ph = "X", pid = 0, tid = 0, ts = begin * 1e6, dur = seconds * 1e6,
      args = args }
  end
  for _, call in ipairs(self.scopes) do add(call.name, "module", call.begin, call.seconds) end
  for _, e in ipairs(self.events) do
    add((e.fused and "fused " or "") .. e.op, e.backward and "backward" or "forward", e.begin, e.seconds,
      { shapes = e.shapes, bytes = e.bytes, flops = e.flops, module = e.module })
  end
  core.io.save_json(path, { traceEvents = list, displayTimeUnit = "ms" })
  return path
end
