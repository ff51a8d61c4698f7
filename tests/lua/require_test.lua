-- require "tycho" under another Lua than 5.4 says so, in place of what the dynamic loader makes of it.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")

local file = package.searchpath("tycho", package.path)

-- Runs the file as a Lua of another version would: with its _VERSION, and without the core.
local function under(version, jit)
  local environment = setmetatable({ _VERSION = version, jit = jit, require = function(name)
    error("the core was asked for: " .. name, 0)
  end }, { __index = _G })
  environment._G = environment
  local chunk = assert(loadfile(file, "t", environment))
  return select(2, pcall(chunk, "tycho"))
end

check.test("the version is looked at before anything is loaded", function()
  for _, version in ipairs { "Lua 5.1", "Lua 5.2", "Lua 5.3", "Lua 5.5" } do
    local message = under(version)
    check.ok(message:find("Tycho needs Lua 5.4, this is " .. version, 1, true), message)
  end
  local message = under("Lua 5.1", { version = "LuaJIT 2.1.0" })
  check.ok(message:find("Tycho needs Lua 5.4, this is LuaJIT 2.1.0", 1, true), message)
  check.equal(under "Lua 5.4", "the core was asked for: tycho.core")
end)

check.test("the file has no syntax that came after Lua 5.1", function()
  local text = scratch.slurp(file):gsub("%-%-[^\n]*", ""):gsub('"[^"\n]*"', '""')
  for _, newer in ipairs { "//", "&", "|", "<<", ">>", "~[^=]", "::", "<%s*close%s*>", "<%s*const%s*>", "goto%s" } do
    check.equal(text:find(newer), nil, newer)
  end
end)

-- Those that are installed, besides; the tests above hold without any.
for _, name in ipairs { "lua5.1", "lua5.2", "lua5.3", "luajit" } do
  if os.execute(name .. " -v >/dev/null 2>&1") then
    check.test(name, function()
      local script, output = scratch.spit("other.lua", 'local ok = 1\nrequire "tycho"\n'), scratch.file "said"
      local status = scratch.run(scratch.program(script):gsub("'[^']*' ('[^']*')$", name .. " %1") .. " 2>" .. output)
      local said = scratch.slurp(output)
      check.equal(status, nil)
      check.ok(said:find "other%.lua:2: Tycho needs Lua 5%.4, this is Lua", said)
    end)
  end
end

scratch.clean()
check.finish()
