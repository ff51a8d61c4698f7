--- Running peers: programs in the environment that bench/peers.sh makes.
local peer = {}

local root = arg[0]:match "^(.*)/bench/[^/]*$" or "."

--- The Python of the peers' environment (TYCHO_PEER_PYTHON names another), or nil when there is none.
function peer.python()
  local path = os.getenv "TYCHO_PEER_PYTHON" or root .. "/build/peers/bin/python"
  local file = io.open(path)
  if not file then return nil end
  file:close()
  return path
end

--- The "name number" lines that bench/peer/NAME.py prints; empty when there is no peer.
function peer.run(name, arguments)
  local figures, python = {}, peer.python()
  if not python then return figures end
  -- The traps that make the peer slow: preset BLAS kernels, AVX2 code paths, spinning threads.
  local settings = "env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE ATEN_CPU_CAPABILITY=avx512"
  local command = ("%s '%s' '%s/bench/peer/%s.py' %s"):format(settings, python, root, name, arguments or "")
  local pipe <close> = assert(io.popen(command))
  for line in pipe:lines() do
    local key, value = line:match "^(%S+)%s+(%S+)$"
    if key then figures[key] = tonumber(value) end
  end
  return figures
end

--- Median of a list of numbers.
function peer.median(list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local n = #sorted
  if n == 0 then return nil end
  return n % 2 == 1 and sorted[n // 2 + 1] or (sorted[n // 2] + sorted[n // 2 + 1]) / 2
end

--- A file name from the CPU's model.
function peer.cpu_name()
  local name = "cpu"
  local file <close> = io.open "/proc/cpuinfo"
  for line in file and file:lines() or function() end do
    name = line:match "^model name%s*:%s*(.*)" or name
    if name ~= "cpu" then break end
  end
  return (name:gsub("%(.-%)", ""):gsub("[^%w]+", "-"):gsub("^-+", ""):gsub("-+$", ""):lower())
end

peer.root = root
return peer
