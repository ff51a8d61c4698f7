--- Peak memory of a model's training step: tycho bench/lib/peak.lua NAME [ARGUMENTS] prints megabytes.
local root = arg[0]:match "^(.*)/bench/lib/[^/]*$"
package.path = root .. "/?.lua;" .. package.path

local ty = require "tycho"
local steps = require "bench.lib.steps"

local arguments = {}
for i = 2, #arg do arguments[i - 1] = math.tointeger(tonumber(arg[i])) end
ty.manual_seed(0)
local step = steps.compiled(arg[1], table.unpack(arguments))
for _ = 1, 3 do step() end

for line in io.lines "/proc/self/status" do
  local kilobytes = line:match "^VmHWM:%s*(%d+)"
  if kilobytes then print(tonumber(kilobytes) / 1024) end
end
