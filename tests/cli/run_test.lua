-- ./run and the decisions of the build that it starts, with programs in place of cmake, ninja and ctest that write down
-- how they were called; and what CMake takes for a GPU. Nothing is built.

local check = require "tests.lua.check"

local folder = os.tmpname()
os.remove(folder)

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- What a command wrote to both outputs, and its exit status.
local function shell(command)
  local pipe = assert(io.popen("exec 2>&1; cd " .. folder .. "; " .. command))
  local text = pipe:read("a")
  local _, _, status = pipe:close()
  return text, status
end

local function write(name, text)
  local file <close> = assert(io.open(folder .. "/" .. name, "w"))
  file:write(text)
end

local function read(name)
  local file <close> = io.open(folder .. "/" .. name)
  return file and file:read("a") or ""
end

assert(os.execute(("mkdir -p %s/bin %s/cmake %s/build/release/Testing/Temporary"):format(folder, folder, folder)))

local function has(program) return os.execute("command -v " .. program .. " >/dev/null") end

-- False in a bundle, which has no build.
local function copy(name)
  return os.execute(("cp %s %s/%s 2>/dev/null"):format(quote(check.root .. name), folder, name)) == true
end

if copy "run" and has "awk" and has "fold" then
  for _, name in ipairs { "cmake", "ninja" } do
    write("bin/" .. name, ('#!/bin/sh\necho "%s $*" >>%s/calls\n[ "$FAIL" != %s ]\n'):format(name, folder, name))
  end
  -- Two tests, ops and lua_nn; -N lists, -R chooses.
  write("bin/ctest", ([[#!/bin/sh
echo "ctest $*" >>%s/calls
list=0 pattern=.
while [ $# -gt 0 ]; do
  case $1 in -N) list=1 ;; -R) pattern=$2; shift ;; esac
  shift
done
names=$(printf 'ops\nlua_nn\n' | grep -E "$pattern")
count=$(printf '%%s' "$names" | grep -c .)
[ $list = 1 ] && printf '%%s\n' "$names" | sed 's/^/  Test  #1: /' && echo "Total Tests: $count" && exit 0
echo "ran $count"
exit "${STATUS-0}"
]]):format(folder))
  os.execute(("chmod +x %s/bin/* %s/run"):format(folder, folder))
  write("build/release/build.ninja", "")
  write("build/release/Testing/Temporary/LastTest.log", [[
3 passed, 0 failed
"ops" time elapsed: 00:01:15
4 passed, 1 failed
"lua_nn" time elapsed: 00:00:02
]])

  local function run(arguments, settings)
    write("calls", "")
    local text, status = shell(("PATH=%s/bin:$PATH %s ./run %s"):format(folder, settings or "", arguments))
    return text, status, read "calls"
  end

  check.test("./run test", function()
    local text, status, calls = run "test"
    check.equal({ text, status }, { "ran 2\nchecks: 7 passed, 1 failed\nslowest: ops 75 s, lua_nn 2 s\n", 0 })
    check.ok(calls:find("^ninja %-C [^\n]*build/release\nctest %-%-preset release\n$"), calls)
    text, status = run "test ops"
    check.equal({ text, status }, { "ran 1\nchecks: 7 passed, 1 failed\nslowest: ops 75 s, lua_nn 2 s\n", 0 })
    text, status = run("test", "STATUS=8")
    check.equal({ text, status }, { "ran 2\nchecks: 7 passed, 1 failed\nslowest: ops 75 s, lua_nn 2 s\n", 8 },
      "failed tests are a failed run")
  end)

  check.test("./run test with a name that no test has", function()
    local text, status = run "test nosuchtest"
    check.equal(status, 1)
    check.ok(text:find("no test's name matches 'nosuchtest'", 1, true) and text:find("ops lua_nn", 1, true), text)
    check.ok(not text:find("checks:", 1, true), "nothing was counted")
  end)

  check.test("./run build", function()
    local text, status, calls = run "build"
    check.equal({ text, status }, { "", 0 })
    check.ok(calls:find("^ninja %-C [^\n]*\n$"), calls)
    text, status, calls = run "build --cuda"
    check.equal({ text, status }, { "", 0 })
    check.ok(calls:find("^cmake %-%-preset release %-DTYCHO_CUDA=ON\nninja "), calls)
    text, status, calls = run "build --cud"
    check.equal({ status, calls }, { 1, "" })
    check.ok(text:find("build takes --cuda or nothing, not: --cud", 1, true), text)
    text, status = run("build", "FAIL=ninja")
    check.equal(status, 1)
    check.ok(text:find("the build failed", 1, true), text)
  end)
end

if copy "cmake/gpu.cmake" and has "cmake" then
  write("gpus.cmake", [[
include(cmake/gpu.cmake)
set(NVIDIA_SMI ${SMI})
find_gpus(gpus ${ROOT})
gpu_architectures(architectures "${gpus}")
message("<${gpus}> <${architectures}>")
]])
  -- The GPUs found under a folder with these files, where nvidia-smi prints this (nil: it fails).
  local function find(files, capabilities)
    shell "rm -rf root && mkdir root"
    for _, file in ipairs(files) do shell(("mkdir -p root/$(dirname %s) && touch root/%s"):format(file, file)) end
    write("smi", capabilities and ("#!/bin/sh\nprintf '%s'\n"):format(capabilities) or "#!/bin/sh\nexit 9\n")
    shell "chmod +x smi"
    local text = shell(("cmake -DROOT=%s/root -DSMI=%s/smi -P gpus.cmake"):format(folder, folder))
    return (text:gsub("\n$", ""))
  end

  check.test("what is a GPU", function()
    check.equal(find({}, "9.0\\n"), "<> <>", "no device: a program that answers is not one")
    check.equal(find({ "usr/lib/x86_64-linux-gnu/libcuda.so.1", "dev/nvidiactl" }, "9.0\\n"), "<> <>")
    check.equal(find({ "dev/nvidia0" }, "9.0\\n"), "<90> <90a-real>")
    check.equal(find({ "proc/driver/nvidia/gpus/0000:01:00.0/information" }, "8.6\\n"), "<86> <86-real>")
    check.equal(find({ "dev/nvidia0", "dev/nvidia1", "dev/nvidia2" }, "8.0\\n9.0\\n8.0\\n"),
      "<80;90> <80-real;90a-real>")
    check.equal(find({ "dev/nvidia0" }, nil), "<unknown> <>", "for all GPUs, then")
    check.equal(find({ "dev/nvidia0" }, "7.5\\n"), "<75> <>", "older than the kernels")
    check.equal(find({ "dev/dxg" }, "12.0\\n"), "<120> <120-real>", "Windows' own Linux")
    check.equal(find({ "dev/dxg" }, nil), "<> <>", "there with a GPU of another make")
  end)
end

os.execute("rm -rf " .. quote(folder))
check.finish()
