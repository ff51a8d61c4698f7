--- `tycho doctor`: this machine, what Tycho found on it, and the command that installs what is missing.

local program = require "tycho.program"

local doctor = {}

local function read(path)
  local file <close> = io.open(path)
  return file and file:read("a") or ""
end

local function say(topic, ...) print(("%-10s %s"):format(topic, (...):format(select(2, ...)))) end

local function describe_cpu()
  local info = read "/proc/cpuinfo"
  local model = info:match("model name%s*:%s*([^\n]+)") or "unknown model"
  local _, count = info:gsub("\nprocessor", "")
  local cpu = require("tycho.core").cpu()
  say("cpu", "%s, %d logical processors", model, count + 1)
  say("", "%s", #cpu.features > 0 and table.concat(cpu.features, " ") or "no vector extension that matters here")
  say("kernels", "%s, %d threads", cpu.isa, cpu.threads)
end

local function describe_memory()
  local info = read "/proc/meminfo"
  local function gigabytes(field) return (tonumber(info:match(field .. ":%s*(%d+)")) or 0) / 2 ^ 20 end
  say("memory", "%.1f GiB, %.1f GiB of it available", gigabytes "MemTotal", gigabytes "MemAvailable")
end

local function describe_devices()
  local cuda = require("tycho.core").cuda
  local count, why = cuda.count()
  say("devices", "cpu, meta%s", count > 0 and ", cuda" or "")
  for i = 0, count - 1 do say("cuda:" .. i, "%s", cuda.describe(i)) end
  for _, library in ipairs(cuda.libraries()) do
    if library.version then
      say(library.name, "%s%s", library.version, library.path and " (" .. library.path .. ")" or "")
    else
      say(library.name, "%s; %s", library.problem or "not found", library.without)
    end
  end
  local gpu = program.list "/proc/driver/nvidia/gpus"
  if count == 0 then say("cuda", "%s%s", why, gpu and ("; %d NVIDIA GPU in this machine"):format(#gpu) or "") end
end

-- What is good to have, why, and the package that brings it.
local wanted = {
  LAPACK = { "cholesky, solve, qr, svd and their like cannot be computed", "libopenblas0-pthread" },
  ["libprotobuf-c"] = { "ONNX files are not read by this build", "libprotobuf-c-dev protobuf-c-compiler" },
  libedit = { "the prompt has no line editing, history and completion", "libedit2" },
  libwebp = { "pictures in WebP cannot be read: built without it", "libwebp-dev" },
  libFLAC = { "sound in FLAC cannot be read: built without it", "libflac-dev" },
  libmicrohttpd = { "`tycho watch` cannot show runs, `tycho serve` serve models", "libmicrohttpd-dev" },
}

local function describe_libraries()
  local present, missing, packages = {}, {}, {}
  for _, library in ipairs(program.libraries()) do
    if library.version then
      present[#present + 1] = library.name .. (library.version ~= "" and " " .. library.version or "")
    else
      missing[#missing + 1] = library.name .. " (" .. wanted[library.name][1] .. ")"
      packages[#packages + 1] = wanted[library.name][2]
    end
  end
  say("libraries", "%s", table.concat(present, ", "))
  return missing, packages
end

local function describe_ranks()
  local mpi, why = require("tycho.core").comm_core.mpi()
  say("ranks", "threads%s", mpi and ", processes of " .. mpi or "; no MPI: " .. why:gsub("^ranks: ", ""))
end

local function describe_settings()
  local set = {}
  for _, name in ipairs { "OMP_NUM_THREADS", "TYCHO_ISA", "TYCHO_TILES", "TYCHO_BF16", "TYCHO_CUDA_LIBRARY",
    "TYCHO_CUDA_PATH", "LUA_INIT", "LUA_INIT_5_4" } do
    if os.getenv(name) then set[#set + 1] = name .. "=" .. os.getenv(name) end
  end
  if #set > 0 then say("settings", "%s", table.concat(set, " ")) end
end

local function describe_files()
  say("library", "%s", program.lua ~= "" and program.lua or "not found")
  local sets = {}
  for _, name in ipairs(program.list(program.home .. "/datasets") or {}) do
    if name:sub(-1) == "/" then sets[#sets + 1] = name:sub(1, -2) end
  end
  say("recipes", "%d in %s/recipes", #require("tycho.recipes").list(), program.home)
  say("data", "%s", #sets > 0 and table.concat(sets, ", ") or "none found in " .. program.home .. "/datasets")
end

--- Runs a few ops; nil when their results are right, else what went wrong.
local function self_test()
  local ok, result = pcall(function()
    local ty = require "tycho"
    local x = ty.ones(64, 64)
    return (x:matmul(x):sum():item() / 64 ^ 3)
  end)
  if not ok then return result end
  if result ~= 1 then return ("a matrix product gave %g where 1 is right"):format(result) end
end

function doctor.command()
  say("tycho", "%s, %s, %s%s", program.version, _VERSION, program.executable,
    program.source_tree and " (in the source tree)" or "")
  describe_cpu()
  describe_memory()
  describe_devices()
  local missing, packages = describe_libraries()
  describe_ranks()
  describe_settings()
  describe_files()
  local problem = self_test()
  if problem then
    say("self test", "FAILED: %s", problem)
    return 1
  end
  say("self test", "passed")
  if #missing == 0 then
    print("nothing is missing")
  else
    print("missing: " .. table.concat(missing, "; "))
    print("install: sudo apt-get install " .. table.concat(packages, " "))
  end
  return 0
end

return doctor
