--- Cost of one op on a tensor of one element, from Lua and back, against PyTorch from Python. Interleaved rounds,
-- medians. Bars: at most half of PyTorch's, without a gradient and with one recorded.
local here = arg[0]:match "^(.*)/[^/]*$" or "."
local ty = require "tycho"
local peer = dofile(here .. "/peer.lua")
local rounds = tonumber(arg[1]) or 5

ty.set_threads(1)
local a, b = ty.ones(1), ty.ones(1)
local w = ty.ones(1):requires_grad_()
local m = ty.ones(16, 16)

local cases = {
  { "add", "1-element add, no gradient", function() return a + b end, bar = 0.5 },
  { "add_recorded", "1-element add, recorded", function() return w + b end, bar = 0.5 },
  { "inplace", "in-place multiply", function() return a:mul_(1.0) end },
  { "view", "a view", function() return a:unsqueeze(0) end },
  { "matmul16", "matmul 16x16", function() return m:matmul(m) end },
  { "backward", "add + backward", function() (w + b):backward() end, count = 10000 },
}

local function nanoseconds(case)
  local fn, n, best = case[3], case.count or 100000, math.huge
  for _ = 1, 4 do -- the first is the warm-up
    local start = os.clock() -- one thread: CPU time, so that other programs do not count
    for _ = 1, n do fn() end
    best = math.min(best, (os.clock() - start) / n)
  end
  return best * 1e9
end

local ours, theirs = {}, {}
for _ = 1, rounds do
  for _, case in ipairs(cases) do
    ours[case[1]] = ours[case[1]] or {}
    table.insert(ours[case[1]], nanoseconds(case))
  end
  for name, value in pairs(peer.run "overhead") do
    theirs[name] = theirs[name] or {}
    table.insert(theirs[name], value)
  end
end

local results, missed = {}, false
print(("%-30s %10s %10s %8s %6s"):format("one op, ns", "tycho", "pytorch", "ratio", "bar"))
for _, case in ipairs(cases) do
  local t, p = peer.median(ours[case[1]]), theirs[case[1]] and peer.median(theirs[case[1]])
  local ratio = p and t / p
  if ratio and case.bar and ratio > case.bar then missed = true end
  print(("%-30s %10.0f %10s %8s %6s"):format(case[2], t, p and ("%.0f"):format(p) or "-",
    ratio and ("%.2f"):format(ratio) or "-", case.bar or ""))
  results[case[1]] = { tycho_ns = t, pytorch_ns = p, ratio = ratio, bar = case.bar }
end
if not peer.python() then print "no peer: bench/peers.sh makes its environment" end

ty.io.mkdir(peer.root .. "/bench/results")
local path = ("%s/bench/results/overhead-%s.json"):format(peer.root, peer.cpu_name())
ty.io.write_atomic(path, ty.io.json_encode(results) .. "\n")
print("written: " .. path)
os.exit(not missed, true)
