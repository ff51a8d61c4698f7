--- lib/native.c, compiled for the CPU at hand when it is newer than what is there.
local ty = require "tycho"

local root = assert(arg[0]:match "^(.*)/bench/[^/]*$", "run bench/run.lua by its path")
local folder = root .. "/build/bench"
local source, target = root .. "/bench/lib/native.c", folder .. "/native.so"

local function output(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  return pipe:read "a":gsub("%s+$", "")
end

local function newer(a, b)
  return os.execute(("test '%s' -nt '%s'"):format(a, b)) == true
end

if not newer(target, source) then
  ty.io.mkdir(folder)
  local flags = "-I/usr/include/lua5.4"
  for _, name in ipairs { "lua5.4", "lua-5.4", "lua54", "lua" } do
    local found = output("pkg-config --cflags " .. name)
    if found ~= "" then
      flags = found
      break
    end
  end
  local command = ("cc -std=gnu11 -O3 -march=native -mprefer-vector-width=512 -shared -fPIC -pthread %s -o '%s' '%s'")
    :format(flags, target, source)
  assert(os.execute(command), "the C compiler could not make bench/lib/native.c")
end

return assert(package.loadlib(target, "luaopen_bench_native"))()
