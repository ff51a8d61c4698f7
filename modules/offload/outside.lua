-- What the kernel says of this process and of its machine: what an engine counts can be held against it.
local function read(file, scale, names)
  local found = {}
  local lines <close> = io.open("/proc/" .. file)
  for line in lines and lines:lines() or function() end do
    local name, value = line:match "^([%w_]+):%s*(%d+)"
    if name and names[name] then found[names[name]] = scale * math.tointeger(tonumber(value)) end
  end
  return found
end

--- Bytes of this process as the kernel counts them: resident now and at its most (most), and what was read from disks
-- and written to them so far; and what the machine has left for programs without swapping (available). What the kernel
-- does not say is nil.
---@return { resident?: integer, most?: integer, read?: integer, written?: integer, available?: integer }
return function()
  local found = read("self/status", 1024, { VmRSS = "resident", VmHWM = "most" })
  local moved = read("self/io", 1, { read_bytes = "read", write_bytes = "written" })
  found.read, found.written = moved.read, moved.written
  found.available = read("meminfo", 1024, { MemAvailable = "available" }).available
  return found
end
