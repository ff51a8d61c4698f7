-- A folder for the files of a test, and hostile variants of files.

local ty = require "tycho"

local scratch = {}

scratch.folder = os.tmpname()
os.remove(scratch.folder)
ty.io.mkdir(scratch.folder)

function scratch.file(name) return scratch.folder .. "/" .. name end

function scratch.slurp(path)
  local f = assert(io.open(path, "rb"))
  local text = f:read "a"
  f:close()
  return text
end

-- Writes a file of the folder; returns its path.
function scratch.spit(name, text)
  local path = scratch.file(name)
  os.remove(path) -- cutting the old file short would make the file system write the new one to disk at once
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
  return path
end

function scratch.list() return ty.io.listdir(scratch.folder) end

-- Calls fn with `count` copies of the text, each with one to four bytes changed; the same every time.
function scratch.flips(text, count, fn)
  local state = 12345
  local function random(n)
    state = (state * 6364136223846793005 + 1442695040888963407)
    return (state >> 33) % n
  end
  for _ = 1, count do
    local broken = text
    for _ = 0, random(4) do
      local at = random(#text)
      local value = random(3) == 0 and ({ 0, 255, 127, 128 })[random(4) + 1] or random(256)
      broken = broken:sub(1, at) .. string.char(value) .. broken:sub(at + 2)
    end
    fn(broken)
  end
end

-- The shell command that runs a Lua file with the interpreter that runs this one.
function scratch.program(path)
  local i = 0
  while arg[i - 1] do i = i - 1 end
  local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end
  local preset = ("LUA_PATH=%s LUA_CPATH=%s "):format(quoted(package.path), quoted(package.cpath))
  return preset .. quoted(arg[i]) .. " " .. quoted(path)
end

function scratch.run(command) return (os.execute(command)) end

local function remove(path)
  local s = ty.io.stat(path) -- nil for a link that leads nowhere
  if s and s.kind == "directory" then
    for _, name in ipairs(ty.io.listdir(path)) do remove(path .. "/" .. name) end
  end
  os.remove(path)
end

function scratch.clean() remove(scratch.folder) end

-- The folder goes at the end of the test, which closes its state, whether it says so or not.
scratch.at_end = setmetatable({}, { __gc = scratch.clean })

return scratch
