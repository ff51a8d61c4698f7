-- What the kernel says of this process: what an engine counts can be held against it.
local function read(file, scale, names)
  local found = {}
  local lines <close> = io.open("/proc/self/" .. file)
  for line in lines and lines:lines() or function() end do
    local name, value = line:match "^([%w_]+):%s*(%d+)"
    if name and names[name] then found[names[name]] = scale * math.tointeger(tonumber(value)) end
  end
  return found
end

--- Bytes of this process as the kernel counts them: resident now and at its most (most), and what was read from disks
-- and written to them so far. What the kernel does not say is nil.
---@return { resident?: integer, most?: integer, read?: integer, written?: integer }
return function()
  local found = read("status", 1024, { VmRSS = "resident", VmHWM = "most" })
  for name, value in pairs(read("io", 1, { read_bytes = "read", write_bytes = "written" })) do found[name] = value end
  return found
end
