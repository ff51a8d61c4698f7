-- NVIDIA's libraries: which are found, what is said of those that are not, and that the program goes on without them.
-- For the emulated device and its stand-ins, which TYCHO_CUDA_LIBRARY and TYCHO_CUDA_PATH name; nothing without.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local program = require "tycho.program"
local path, backend = os.getenv "TYCHO_CUDA_PATH", os.getenv "TYCHO_CUDA_LIBRARY"
local libraries, solver = (path or ""):match "^([^:]*):([^:]*)$"

if not libraries or not backend then
  check.finish()
  return
end

-- What another run of the program prints with these settings in its environment.
local function run(settings, arguments)
  local command = {}
  for name, value in pairs(settings) do command[#command + 1] = ("%s='%s'"):format(name, value) end
  local pipe <close> = assert(io.popen(("env %s '%s' %s 2>&1"):format(table.concat(command, " "), program.executable,
    arguments)))
  local text = pipe:read "a"
  local ok = pipe:close()
  check.equal(ok, true, "the exit status; it printed " .. text)
  return text
end

-- The line of `tycho doctor` about a library.
local function line(text, name) return text:match("\n" .. name .. " +([^\n]*)") end

-- Products with TF32 allowed, which the stand-ins round and our own kernels do not: 0 where a library was asked.
local script = os.tmpname()
do
  local file <close> = assert(io.open(script, "w"))
  file:write [[
    local ty = require "tycho"
    local function excess(y) return (y:to("cpu"):min():item() - 1) * 2 ^ 12 end
    local function number(...) return (ty.ones(...) * (1 + 2 ^ -12)):to "cuda" end
    ty.cuda.allow_tf32(true)
    local x, w = number(1, 1, 3, 3):requires_grad_(), ty.ones(1, 1, 1, 1):to("cuda"):requires_grad_()
    local y = ty.conv2d(x, w)
    local g = number(1, 1, 3, 3)
    print("matmul", excess(number(2, 1):matmul(ty.ones(1, 2):to "cuda")))
    print("conv", excess(y:detach()))
    print("input", excess(ty.grad(y, { x }, { grad_outputs = { g } })[1]))
  ]]
end

check.test("with all libraries", function()
  local text = run({}, "doctor")
  check.equal(line(text, "driver"), "CUDA 13.0")
  check.equal(line(text, "cuBLASLt"), ("13.0.0 (%s/libcublasLt.so.13)"):format(libraries))
  check.equal(line(text, "cuDNN"), ("9.19.0 (%s/libcudnn.so.9)"):format(libraries))
  check.equal(line(text, "cuSOLVER"), ("12.0.4 (%s/libcusolver.so.12)"):format(solver))
  check.equal(line(text, "NCCL"), ("2.27.3 (%s/libnccl.so.2)"):format(libraries))
  text = run({}, script)
  check.equal(text:match "matmul%s+(%S+)", "0.0")
  check.equal(text:match "conv%s+(%S+)", "0.0")
  check.equal(text:match "input%s+(%S+)", "0.0")
end)

local function goes_on_without(settings, which)
  local text = run(settings, script)
  check.equal(text:match "matmul%s+(%S+)", which.matmul and "1.0" or "0.0", "matmul")
  check.equal(text:match "conv%s+(%S+)", which.conv and "1.0" or "0.0", "conv2d")
  check.equal(text:match "input%s+(%S+)", which.conv and "1.0" or "0.0", "conv2d_backward_input")
end

check.test("without any", function()
  local text = run({ TYCHO_CUDA_PATH = "/nonexistent" }, "doctor")
  check.equal(line(text, "cuBLASLt"), "not found; our own kernels multiply matrices")
  check.equal(line(text, "cuDNN"), "not found; our own kernels compute convolutions and attention")
  goes_on_without({ TYCHO_CUDA_PATH = "" }, { matmul = true, conv = true })
end)

check.test("of another version", function()
  local text = run({ TYCHO_EMULATED_CUDNN = "8907", TYCHO_EMULATED_CUBLASLT = "110100" }, "doctor")
  check.equal(line(text, "cuDNN"), ("%s/libcudnn.so.9 is version 8.9.7, wanted is 9; our own kernels compute "
    .. "convolutions and attention"):format(libraries))
  check.equal(line(text, "cuBLASLt"), ("%s/libcublasLt.so.13 is version 11.1.0, wanted is 12 to 13; our own kernels "
    .. "multiply matrices"):format(libraries))
  goes_on_without({ TYCHO_EMULATED_CUDNN = "8907" }, { conv = true })
  goes_on_without({ TYCHO_EMULATED_CUDNN = "100000" }, { conv = true })
end)

check.test("a file that is no library", function()
  local folder = os.tmpname()
  os.remove(folder)
  check.equal(os.execute(("mkdir '%s' && echo garbage > '%s/libcudnn.so.9'"):format(folder, folder)), true)
  local found = line(run({ TYCHO_CUDA_PATH = folder }, "doctor"), "cuDNN")
  check.equal(found:find(folder .. "/libcudnn.so.9: ", 1, true), 1, found)
  check.equal(found:match "; (.*)", "our own kernels compute convolutions and attention", found)
  goes_on_without({ TYCHO_CUDA_PATH = folder .. ":" .. libraries }, {}) -- the next folder has a good one
  goes_on_without({ TYCHO_CUDA_PATH = folder }, { matmul = true, conv = true })
  os.execute(("rm -r '%s'"):format(folder))
end)

os.remove(script)
check.finish()
