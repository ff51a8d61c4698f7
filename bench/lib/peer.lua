--- A peer: one long-lived program that times the same work as we do, when it is told to. Commands go to its standard
-- input as lines of JSON, answers come back through a FIFO, so that rounds of both sides interleave within one run.
local ty = require "tycho"

local root = assert(arg[0]:match "^(.*)/bench/[^/]*$")
local Peer = {}
Peer.__index = Peer

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

-- An allocator that keeps what it was given, on huge pages: with the C library's, a training step of the peer spends a
-- third of its time in page faults.
local function allocator()
  for _, folder in ipairs { "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib" } do
    local jemalloc = folder .. "/libjemalloc.so.2"
    if exists(jemalloc) then
      return "jemalloc", jemalloc,
        "MALLOC_CONF=thp:always,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"
    end
    local tcmalloc = folder .. "/libtcmalloc_minimal.so.4"
    if exists(tcmalloc) then return "tcmalloc", tcmalloc, "" end
  end
  return "the C library's", nil, ""
end

local function needs_freeing()
  local file <close> = io.open "/proc/cpuinfo"
  return file and file:read("a"):find("AuthenticAMD", 1, true) ~= nil
end

-- A library that frees MKL from asking who made the CPU (free_mkl.c), made anew when its source is newer; nil where
-- that is not needed or there is no C compiler.
local function free_mkl()
  if not needs_freeing() then return nil end
  local folder, source = root .. "/build/bench", root .. "/bench/peer/free_mkl.c"
  local library = folder .. "/free_mkl.so"
  if os.execute(("test '%s' -nt '%s'"):format(library, source)) then return library end
  ty.io.mkdir(folder)
  local command = "cc -O1 -shared -fPIC -o '%s.new' '%s' 2>/dev/null && mv '%s.new' '%s'"
  return os.execute(command:format(library, source, library, library)) and library or nil
end

-- What the report says of the peer's MKL, and whether it is slower than it could be. asked: how often the loaded
-- library was.
local function mkl_of(about)
  if about.blas ~= "mkl" then return "none" end
  if not needs_freeing() then return "as it comes, at its best here" end
  if about.asked < 0 then return "NOT freed of its slower code for AMD: no C compiler", true end
  if about.asked == 0 then return "NOT freed of its slower code for AMD: it asks itself alone", true end
  return "freed of its slower code for AMD"
end

--- The Python of the peers' environment (TYCHO_PEER_PYTHON names another), or nil when there is none. For a GPU
-- ("cuda", or "any" as for start) also the system's, when it has a PyTorch that can.
function Peer.python(device)
  local path = os.getenv "TYCHO_PEER_PYTHON" or root .. "/build/peers/bin/python"
  if exists(path) then return path end
  if not device then return nil end
  local test = device == "cuda" and "assert torch.cuda.is_available()" or "pass"
  local command = "python3 -c 'import sys, torch; %s; print(sys.executable)' 2>/dev/null"
  local pipe <close> = assert(io.popen(command:format(test)))
  local found = pipe:read "l"
  return found and exists(found) and found or nil
end

--- Where what is compiled for a GPU is kept.
Peer.compiled = root .. "/build/bench/inductor-gpu"

--- What every peer is started with, without the traps that make it slow: a preset BLAS core type, AVX2 code paths,
-- MKL's slower code for AMD, the allocator (`plain`: the C library's all the same). On a GPU what is compiled is kept
-- for the next process.
function Peer.environment(plain, device)
  if device then
    return ("env TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCHINDUCTOR_AUTOGRAD_CACHE=1 "
      .. "TORCHINDUCTOR_CACHE_DIR='%s'"):format(Peer.compiled)
  end
  local _, library, settings = allocator()
  if plain then library, settings = nil, "" end
  local free = free_mkl()
  local libraries = table.concat({ free or library, free and library }, " ")
  local file <close> = io.open "/proc/cpuinfo"
  local capability = file and file:read("a"):find("avx512f", 1, true) and "avx512" or "avx2"
  return ("env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE -u OMP_NUM_THREADS -u MKL_NUM_THREADS ATEN_CPU_CAPABILITY=%s "
    .. "TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_CACHE_DIR='%s/build/bench/inductor' LD_PRELOAD='%s' %s")
    :format(capability, root, libraries, settings)
end

--- Starts bench/peer/serve.py with `threads` threads; nil when there is no environment or it does not start. device:
-- "cuda", or "any" for the CPU where PyTorch sees no GPU.
function Peer.start(threads, device)
  local python = Peer.python(device)
  if not python then return nil end
  local folder = root .. "/build/bench"
  ty.io.mkdir(folder)
  local fifo = os.tmpname()
  os.remove(fifo)
  if not os.execute(("mkfifo '%s'"):format(fifo)) then return nil end
  local command = ("exec %s '%s' '%s/bench/peer/serve.py' %d '%s' %s"):format(Peer.environment(nil, device), python,
    root, threads, fifo, device and device .. " 2>" .. folder .. "/peer.log" or "cpu")
  local self = setmetatable({ input = assert(io.popen(command, "w")), threads = threads }, Peer)
  self.output = assert(io.open(fifo)) -- waits for the peer to open its end
  os.remove(fifo)
  local hello = self:receive()
  if not hello then
    self:stop()
    return nil
  end
  self.pid, self.about = hello.pid, hello.about
  if not device then
    self.about.allocator = allocator()
    self.about.mkl, self.bound = mkl_of(self.about)
  end
  return self
end

function Peer:receive()
  local line = self.output:read "l"
  return line and ty.io.json_decode(line)
end

--- One command and its answer: a table; nil and a text when the peer failed.
function Peer:ask(command)
  if self.gone then return nil, "the peer is gone" end
  self.input:write(ty.io.json_encode(command), "\n")
  self.input:flush()
  local answer = self:receive()
  if not answer then
    self.gone = true
    return nil, "the peer has died"
  end
  if answer.error then return nil, answer.error end
  return answer
end

--- Waits until the peer's threads have stopped spinning.
function Peer:settle()
  local native = require "bench.lib.native"
  for _ = 1, 200 do
    local before = native.cpu(self.pid)
    ty.system.sleep(0.004)
    local after = native.cpu(self.pid)
    if not after or after - before < 0.0004 then return end
  end
end

function Peer:stop()
  self.input:close()
  self.output:close()
end

return Peer
