--- The op tests and the tests of whole models on a GPU, in processes of their own: a few ops in each, several at a
-- time. A fault in one kernel makes all that the process does afterwards fail, so the ops of a failed process are tried
-- one by one.
local ty = require "tycho"
local jobs = require "bench.lib.jobs"

local tests = {}

local together, share = 6, 6 -- processes at a time; ops in each

-- passed, failed and the lines of failures from the output of a test program.
local function counts(output)
  local passed, failed = 0, 0
  for p, f in output:gmatch "(%d+) passed, (%d+) failed" do
    passed, failed = passed + tonumber(p), failed + tonumber(f)
  end
  return passed, failed
end

-- The first lines that tell of failures; the last of all where there are none.
local function telling(output, most)
  local lines, failures = {}, {}
  for line in output:gmatch "[^\n]*%S[^\n]*" do
    if not line:match "^%d+ passed" then lines[#lines + 1] = line:sub(1, 240) end
    if line:match "^FAIL" then failures[#failures + 1] = line:sub(1, 240) end
  end
  if #failures > 0 then return table.move(failures, 1, math.min(most, #failures), 1, {}) end
  return table.move(lines, math.max(1, #lines - most + 1), #lines, 1, {})
end

--- root: of the tree; program: the tycho program; folder: for logs; seconds: after which the tests are stopped; names:
-- of ops (nil: all); models: a file of tests in the place of those of whole models. Returns { passed, failed, seconds,
-- finished, failures = { { name =, status =, lines = } } }.
function tests.run(root, program, folder, seconds, names, models)
  local began = ty.system.clock()
  if not names then
    names = {}
    for _, info in ipairs(ty.core.ops()) do names[#names + 1] = info.name end
  end
  local result = { passed = 0, failed = 0, failures = {}, finished = true }
  local function left() return seconds - (ty.system.clock() - began) end

  local function starts_of(groups)
    local starts = {}
    for i, group in ipairs(groups) do
      starts[i] = function()
        local command = group.file and ("exec '%s' '%s/%s'"):format(program, root, group.file)
          or ("exec '%s' '%s/tests/run_ops.lua' --device cuda --quick --op %s"):format(program, root,
            table.concat(group, " --op "))
        local log = ("%s/test-%s"):format(folder, group.file and "models" or group[1])
        return jobs.start(command, math.min(group.most or 90, math.max(1, left())), log)
      end
    end
    return starts
  end

  local function note(job, name)
    local passed, failed = counts(job:output())
    result.passed = result.passed + passed
    if job.status ~= 0 then
      result.failed = result.failed + math.max(1, failed)
      table.insert(result.failures, { name = name, status = job.status, lines = telling(job:output(), 6) })
    end
  end

  -- The longest first: the tests of whole models; then each process gets ops from all over the table.
  local groups, alone = { { file = models or "tests/lua/cuda_test.lua", most = 120 } }, {}
  local processes = (#names + share - 1) // share
  for i = 1, processes do
    local group = {}
    for j = i, #names, processes do group[#group + 1] = names[j] end
    groups[#groups + 1] = group
  end
  result.finished = jobs.all(starts_of(groups), together, left(), function(job, i)
    local group = groups[i]
    if job.status == 0 or group.file or #group == 1 then return note(job, group.file or group[1]) end
    for _, name in ipairs(group) do alone[#alone + 1] = { name, most = 40 } end
  end)
  if result.finished then
    result.finished = jobs.all(starts_of(alone), together, left(), function(job, i) note(job, alone[i][1]) end)
  end
  result.seconds = ty.system.clock() - began
  return result
end

function tests.report(result)
  print(("tests on the GPU: %d passed, %d failed, %.0f s%s"):format(result.passed, result.failed, result.seconds,
    result.finished and "" or "; stopped for want of time"))
  table.sort(result.failures, function(a, b) return a.name < b.name end)
  for _, failure in ipairs(result.failures) do
    local how = failure.status == 124 and "ran out of time" or failure.status > 128
      and "ended by signal " .. failure.status - 128 or "failed"
    print(("  %s: %s"):format(failure.name, how))
    for _, line in ipairs(failure.lines) do print("      " .. line) end
  end
  io.stdout:flush()
end

return tests
