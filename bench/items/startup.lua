--- Starting: the program, and require "tycho" in plain Lua, against `import torch`.
local native = require "bench.lib.native"
local Peer = require "bench.lib.peer"
local ty = require "tycho"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local build = os.getenv "TYCHO_BUILD" or root .. "/build/release"

local function timed(command, repeats)
  return function()
    local start = native.wall()
    for _ = 1, repeats do
      if not os.execute(command .. " >/dev/null 2>&1") then return nil end
    end
    return (native.wall() - start) / repeats
  end
end

local function import_torch()
  local python = Peer.python()
  if not python then return nil end
  return timed(("%s '%s' -c 'import torch; print(torch.ones(1) + 1)'"):format(Peer.environment(true), python), 1)()
end

local tycho = build .. "/tycho"
local code = "local ty = require 'tycho' print((ty.ones(1) + 1):item())"
local lua = ("LUA_PATH='%s/lua/?.lua;%s/lua/?/init.lua' LUA_CPATH='%s/lib/?.so' lua5.4 -e"):format(root, root, build)

local function item(name, command, bars)
  return { name = name, threads = { ty.cpu().threads }, bars = bars, rounds = 5, sample = timed(command, 10),
    peer_sample = import_torch }
end

return {
  item("program", ("'%s' -e 'print(1)'"):format(tycho), { peer = 50, most = 0.020 }),
  item("program and an op", ("'%s' -e \"%s\""):format(tycho, code), { peer = 50, most = 0.020 }),
  item("require in lua5.4", ("%s \"%s\""):format(lua, code), { peer = 50, most = 0.020 }),
}
