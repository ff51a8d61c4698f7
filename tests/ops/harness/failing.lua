-- Every allocation of a call fails in turn: each time a Lua error that speaks of memory, nothing left behind, and the
-- same call works afterwards.

local case = require "case"
local dtypes = require "dtypes"
local forward = require "forward"
local memory = require "memory"
local report = require "report"

local failing = {}
local ty

function failing.use(library) ty = library end

local MOST = 400 -- allocations of one call

local function fail_in_turn(row, where, run)
  local before = memory.live()
  for n = 1, MOST do
    ty.memory.fail_at(n)
    local ok, message = pcall(ty.scope, run) -- which lets go of what the call made, without a collection
    ty.memory.fail_at(0)
    message = not ok and tostring(message)
    local after = memory.live(before)
    local clean = report.check(after == before, row.name, where,
      "%d bytes live after allocation %d failed, %d before", after, n, before)
    if ok or not clean then return end
    local says = report.check(message:find("memory", 1, true), row.name, where,
      "allocation %d failed, the error does not say so: %s", n, message)
    if not says then return end
  end
  report.check(false, row.name, where, "still failing after %d allocations", MOST)
end

-- Ops that write to their inputs may have done so in part: they get fresh ones.
local function check_case(row, number, row_case, dtype)
  local instance = case.new(row.info, number, row_case, dtype)
  if not instance then return false end
  local where = case.where(number, dtype, "failing allocations")
  local writes = row.info.flags.WRITES or row.writes
  local form = row.strided == false and "contiguous" or "strided"
  local tensors = instance:tensors(form)
  fail_in_turn(row, where, function()
    forward.call(row, instance, writes and instance:tensors(form) or tensors)
  end)
  if not row.info.differentiable or writes or type(row.grad) == "string" then return true end
  local any = false
  for i, s in ipairs(instance.slots) do
    if dtypes.is_float(s.array.dtype) and not (row.constant and row.constant[s.name]) then
      tensors[i] = tensors[i]:detach():requires_grad_()
      any = true
    end
  end
  if not any then return true end
  fail_in_turn(row, where .. " with backward", function()
    local results = forward.call(row, instance, tensors)
    local ok, message = true, nil
    for i = 1, results.n do
      if ok and results[i].requires_grad then
        local loss = (results[i]:to "f32"):sum()
        ok, message = pcall(loss.backward, loss)
        break
      end
    end
    for _, t in ipairs(tensors) do t:set_grad() end
    if not ok then error(message, 0) end
  end)
  return true
end

--- The check of one op, with the first case that fits.
function failing.run(row)
  local done = false
  for number, row_case in ipairs(row.cases) do
    for _, dtype in ipairs(row_case.dtypes or row.dtypes or dtypes.of(row.info.flags)) do
      if not done and row_case.grad ~= false then
        local ok, result = xpcall(check_case, report.handler, row, number, row_case, dtype)
        if not ok then report.check(false, row.name, "failing allocations", "%s", result) end
        done = not ok or result
      end
    end
  end
end

return failing
