-- Counts of checks and the text of those that failed.

local report = {
  passed = 0, failed = 0, limit = 6, failing = {}, without_gradient = {}, no_kernel = {}, no_kernel_inside = {},
}

--- Notes one check. `where` and `detail` make the line that is printed when it failed; the first few of an op are.
function report.check(ok, op, where, detail, ...)
  if ok then
    report.passed = report.passed + 1
    return true
  end
  local text = select("#", ...) > 0 and string.format(detail, ...) or detail or ""
  if report.partial and text:find("no kernel for cuda", 1, true) then
    report.no_kernel_inside[op] = true
    return false
  end
  report.failed = report.failed + 1
  local n = (report.failing[op] or 0) + 1
  report.failing[op] = n
  if n <= report.limit then
    print(string.format("FAIL %s %s: %s", op, where, text))
  elseif n == report.limit + 1 then
    print(string.format("FAIL %s: further failures of this op are counted only (--all shows them)", op))
  end
  return false
end

--- For xpcall: the error alone, or with a traceback when one was asked for.
function report.handler(message) return report.trace and debug.traceback(message, 2) or tostring(message) end

--- Notes why an op has no gradient test.
function report.no_gradient(op, reason)
  report.without_gradient[#report.without_gradient + 1] = { op, reason }
end

--- Notes an op that the device has no kernel for.
function report.without_kernel(op) report.no_kernel[#report.no_kernel + 1] = op end

--- The table of ops without gradient test and the closing line; returns the exit status.
function report.finish()
  table.sort(report.without_gradient, function(a, b) return a[1] < b[1] end)
  print("\nops without gradient test:")
  for _, entry in ipairs(report.without_gradient) do print(string.format("  %-28s %s", entry[1], entry[2])) end
  if #report.no_kernel > 0 then
    print(("\n%d ops without kernel here: %s"):format(#report.no_kernel, table.concat(report.no_kernel, ", ")))
  end
  local inside = {}
  for op in pairs(report.no_kernel_inside) do inside[#inside + 1] = op end
  if #inside > 0 then print(("%d ops made of such: %s"):format(#inside, table.concat(inside, ", "))) end
  local names = {}
  for op, n in pairs(report.failing) do names[#names + 1] = string.format("%s (%d)", op, n) end
  if #names > 0 then
    table.sort(names)
    print("\nfailing: " .. table.concat(names, ", "))
  end
  print(string.format("\n%d passed, %d failed", report.passed, report.failed))
  return report.failed == 0 and 0 or 1
end

return report
