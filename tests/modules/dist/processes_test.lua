-- Ranks that are processes of MPI: the script processes.lua as several of them, and the ends of runs that go wrong.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

check.test("alone, a process is the only rank", function()
  local group = dist.world()
  check.equal({ group.rank, group.size, rawequal(dist.world(), group) }, { 0, 1, true })
  check.equal(group:all_reduce(ty.tensor { 3.0 }, "mean"):tolist(), { 3 })
  group:send(ty.tensor { 4 }, 0)
  check.equal(group:receive(0):tolist(), { 4 })
  check.fails(function() group:receive(0) end, "no rank can go on")
end)

-- What a shell prints for a command, and its status.
local function output(command)
  local pipe = io.popen(command .. " 2>&1; echo status $?")
  local text = pipe:read "a"
  pipe:close()
  return text, tonumber(text:match "status (%d+)%s*$")
end

local program = arg and arg[-1] or "tycho"
local built = ty.io.exists((program:match "^(.*/)" or "./") .. "libtycho_mpi.so")
local _, found = output "command -v mpirun"
if not built or found ~= 0 then
  print "MPI is not here: ranks that are processes were not tried"
  check.finish()
  return
end

local _, ours = output "mpirun --version | grep -q 'Open MPI'"
local options = ours == 0 and "--oversubscribe --allow-run-as-root" or ""

local function mpirun(ranks, words)
  return output(("OMP_NUM_THREADS=1 timeout 60 mpirun -n %d %s %s %sprocesses.lua %s"):format(ranks, options, program,
    here, words or ""))
end

for _, ranks in ipairs { 1, 3 } do
  check.test(ranks .. " processes", function()
    local text, status = mpirun(ranks)
    check.equal(status, 0, text)
    check.equal(text:find("fine: " .. ranks .. " ranks", 1, true) ~= nil, true, text)
  end)
end

check.test("an error of one ends all", function()
  local text, status = mpirun(2, "fails")
  check.equal(status ~= 0 and status ~= 124, true, text)
  check.equal(text:find("this rank has had enough", 1, true) ~= nil, true, text)
  text, status = mpirun(2, "exits")
  check.equal(status ~= 0 and status ~= 124, true, text)
end)

check.finish()
