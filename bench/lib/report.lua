--- The table that a benchmark prints and the file that it writes.
local ty = require "tycho"

local report = {}

local function duration(s)
  if s < 1e-5 then return ("%.0f ns"):format(s * 1e9) end
  if s < 1e-3 then return ("%.1f us"):format(s * 1e6) end
  if s < 1 then return ("%.2f ms"):format(s * 1e3) end
  return ("%.2f s"):format(s)
end

local function amount(item, value)
  if item.unit == "MB" then return ("%.0f MB"):format(value) end
  if item.unit then return ("%.2f %s"):format(value, item.unit) end
  return duration(value)
end

local function spread(item, s)
  if not s then return "-", "" end
  return amount(item, s.median), ("%+.0f%%"):format((s.max - s.min) / s.median * 100):gsub("+", "±", 1)
end

local row = "%-38s %3s %10s %5s %10s %5s %-16s %7s %5s %6s %5s %s"

function report.head()
  print(row:format("item", "thr", "tycho", "", "peer", "", "its best mode", "times", "bar", "limit", "bar", ""))
end

-- The verdict counts where the bar was set: at all threads, or at the only number that the item runs with. Nothing
-- passes on rounds that other programs disturbed, nor on a limit whose probe collapsed.
function report.judge(item, result, judged)
  local bars, failed = item.bars or {}, {}
  if judged then
    if bars.peer and result.ratio and result.ratio < bars.peer then failed[#failed + 1] = "peer" end
    if bars.limit and result.share and result.share < bars.limit then failed[#failed + 1] = "limit" end
    if bars.most and result.ours.median > bars.most then failed[#failed + 1] = "most" end
    if next(bars) and result.kept then failed[#failed + 1] = "disturbed" end
    if bars.limit and result.collapsed then failed[#failed + 1] = "probe" end
  end
  result.bars, result.failed, result.judged, result.unit = bars, failed, judged, item.unit
  return #failed == 0
end

-- How far a result is below its bars: 1.5 is half as much again as wanted.
local function distance(result)
  local bars, worst, parts = result.bars, 1, {}
  for _, what in ipairs(result.failed) do
    local factor, text
    if what == "peer" then
      factor, text = bars.peer / result.ratio, ("%.2fx the peer, wanted %.3g"):format(result.ratio, bars.peer)
    elseif what == "disturbed" then
      factor, text = 1, ("%d rounds were disturbed and count"):format(result.kept)
    elseif what == "probe" then
      factor, text = 1, "the limit's probe collapsed: " .. table.concat(result.collapsed, ", ")
    elseif what == "limit" then
      factor = bars.limit / result.share
      text = ("%.0f%% of the limit, wanted %.0f%%"):format(result.share * 100, bars.limit * 100)
    else
      factor = result.ours.median / bars.most
      text = ("%s, wanted %s"):format(amount(result, result.ours.median), amount(result, bars.most))
    end
    worst = math.max(worst, factor)
    parts[#parts + 1] = text
  end
  return worst, table.concat(parts, "; ")
end

--- What is below its bars, the farthest first. missed: a list of { name =, result = }.
function report.missed(missed)
  if #missed == 0 then return end
  for _, entry in ipairs(missed) do entry.distance, entry.text = distance(entry.result) end
  table.sort(missed, function(a, b)
    if a.distance ~= b.distance then return a.distance > b.distance end
    return a.name < b.name
  end)
  print(("%d items below their bars, the farthest first:"):format(#missed))
  for _, entry in ipairs(missed) do
    print(("  %.2f  %-38s %s"):format(entry.distance, entry.name, entry.text))
  end
end

function report.line(item, result)
  local bars = result.bars
  local mine, my_spread = spread(item, result.ours)
  local theirs, their_spread = spread(item, result.peer)
  local mode = result.peer and (result.peer.bound and "MKL not freed: " or "") .. (result.peer.mode or "")
    or result.peer_error and "error" or item.peer and "no peer" or ""
  local verdict = #result.failed > 0 and "FAIL " .. table.concat(result.failed, ", ")
    or (next(bars) and result.judged and (result.ratio or result.share or bars.most) and "pass" or "")
  if result.ours.mode and result.ours.mode ~= "eager" then verdict = verdict .. " (" .. result.ours.mode .. ")" end
  if result.peak then
    verdict = ("%s %.0f%s MB"):format(verdict, result.peak / 2 ^ 20, result.peer_peak and (":%.0f"):format(
      result.peer_peak / 2 ^ 20) or "")
  end
  if result.processor then verdict = verdict .. " [processor time]" end
  if result.disturbed then verdict = ("%s [%d rounds disturbed]"):format(verdict, result.disturbed) end
  print((row:format(item.name, result.threads, mine, my_spread, theirs, their_spread, mode,
    result.ratio and ("%.2fx"):format(result.ratio) or "-", bars.peer and ("%.3g"):format(bars.peer) or "",
    result.share and ("%.0f%%"):format(result.share * 100) or "-",
    bars.limit and ("%.0f%%"):format(bars.limit * 100) or "", verdict):gsub("%s+$", "")))
  if result.peer_error then print("    peer: " .. result.peer_error:sub(1, 160)) end
  for way, value in pairs(result.modes or {}) do
    if type(value) == "string" then print(("    %s: %s"):format(way, value:sub(1, 160))) end
  end
  io.stdout:flush()
end

function report.limits(rates, threads)
  local parts = {}
  for _, kind in ipairs { "f32", "bf16", "int8" } do
    if rates[kind] then parts[#parts + 1] = ("%s %.0f"):format(kind, rates[kind]) end
  end
  print(("limits, %d threads: %s GFLOP/s (GOP/s); read %.1f, copy %.1f, triad %.1f, in-place update %.1f, "
    .. "Adam's traffic %.1f GB/s"):format(threads, table.concat(parts, ", "), rates.read, rates.copy, rates.triad,
    rates.update, rates.adam))
end

function report.gpu_limits(rates, peer)
  local parts = {}
  for _, kind in ipairs { "bf16", "f16", "tf32", "f32" } do
    parts[#parts + 1] = rates[kind] and ("%s %.1f"):format(kind, rates[kind] / 1e3)
  end
  print(("limits: copy %.0f GB/s (both sides), %s TFLOP/s; %s"):format(rates.copy or 0, table.concat(parts, ", "),
    peer and "PyTorch " .. peer.about.torch .. ", " .. (peer.about.device or "on the CPU") or "no peer"))
end

--- What the peer is, once for all rows: its version, and whether MKL was freed of its slower code for AMD.
function report.peer(about)
  print(("peer: PyTorch %s (%s), MKL %s, allocator: %s"):format(about.torch, about.capability, about.mkl,
    about.allocator))
end

--- Geometric means of the ratios of groups of results: groups = { name = { ratios } }, bars = { name = bar }.
function report.means(groups, bars)
  local missed, names = false, {}
  for name in pairs(groups) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local list, sum = groups[name], 0
    for _, ratio in ipairs(list) do sum = sum + math.log(ratio) end
    local mean = math.exp(sum / #list)
    local bar = bars[name]
    local ok = mean >= bar
    print(("%s: geometric mean of %d ratios %.2fx, bar %.3g: %s"):format(name, #list, mean, bar,
      ok and "pass" or "FAIL"))
    missed = missed or not ok
  end
  return missed
end

--- What results belong to: { kind = "cpu" or "gpu", name =, path = of the file }. file: of another machine's results.
function report.this_cpu(root, file)
  local cpu = file and { name = file, file = file } or require("tycho.machine").cpu()
  return { kind = "cpu", name = cpu.name, path = ("%s/bench/results/%s.json"):format(root, cpu.file) }
end

--- What was saved for a machine: { limits, peers, items }, empty tables where there is nothing.
function report.load(machine)
  local saved = ty.io.exists(machine.path) and ty.io.load_json(machine.path) or {}
  for _, part in ipairs { "limits", "peers", "items" } do saved[part] = saved[part] or {} end
  return saved
end

--- Merges `run` = { limits, peers, items } into the machine's file; run.tests and run.errors (texts by items' names)
-- take the place of what was there.
function report.save(machine, run)
  ty.io.mkdir(machine.path:match "^(.*)/")
  local saved = report.load(machine)
  saved[machine.kind], saved.threads, saved.tests = machine.name, ty.cpu().threads, run.tests or saved.tests
  saved.errors = run.errors or saved.errors
  for _, part in ipairs { "limits", "peers", "items" } do
    for key, value in pairs(run[part] or {}) do
      if part == "items" and saved.items[key] then -- other numbers of threads stay
        for threads, result in pairs(value) do saved.items[key][threads] = result end
      else
        saved[part][key] = value
      end
    end
  end
  ty.io.save_json(machine.path, saved)
end

return report
