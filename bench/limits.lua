--- Where the time of training steps and of attention goes, op by op, beside what this machine could do.
--
--     ./run bench/limits.lua               the tables
--     ./run bench/limits.lua --write       the same into bench/LIMITS.md, which says what follows from them
--     ./run bench/limits.lua gpt2 ...      the cases whose names begin so; --threads N
--
-- An op's limit is the longer of its operations at the FMA rate and of its operands' bytes at the bandwidth of a copy:
-- what it would take if it were alone and nothing of its operands were in a cache. Small ops may so go beyond 100 %.
local root = arg[0]:match "^(.*)/bench/[^/]*$" or "."
_G.arg = { [0] = root .. "/bench/limits.lua", table.unpack(arg) } -- what lib/ finds its files by
package.path = root .. "/?.lua;" .. package.path

local ty = require "tycho"
local calls = require "bench.lib.calls"
local command_line = require "bench.lib.command_line"
local limits = require "bench.lib.limits"
local report = require "bench.lib.report"
local steps = require "bench.lib.steps"

local stop, wanted = command_line.stop, command_line.wanted
local names, write, threads = {}, false, ty.threads()
local i = 1
while arg[i] do
  if arg[i] == "--write" then write = true
  elseif arg[i] == "--threads" then
    i = i + 1
    threads = math.tointeger(tonumber(arg[i])) or stop("--threads: expected a number, got %s", arg[i] or "none")
  elseif arg[i]:sub(1, 1) == "-" then stop("unknown option %s", arg[i])
  else names[#names + 1] = arg[i] end
  i = i + 1
end

-- ---- the cases ----

local function attention(t)
  local q, k, v, g = ty.randn(1, 12, t, 64), ty.randn(1, 12, t, 64), ty.randn(1, 12, t, 64), ty.randn(1, 12, t, 64)
  return calls.both({ q, k, v }, g, function() return (ty.scaled_dot_product_attention(q, k, v, nil, true)) end)
end

local cases = {
  { "gpt2 4x64", "GPT-2 124M, a step of 4 x 64 tokens, AdamW", function() return steps.eager("gpt2", 4, 64) end },
  { "gpt2 1x1024", "GPT-2 124M, a step of 1,024 tokens, AdamW", function() return steps.eager("gpt2", 1, 1024) end,
    causal = true },
  { "vit S", "ViT-S/16, a step of 8 pictures, AdamW", function() return steps.eager("vit", 8, "S") end },
  { "vit B", "ViT-B/16, a step of 4 pictures, AdamW", function() return steps.eager("vit", 4, "B") end },
  { "attention 1024", "Causal attention forward and backward, 12 heads of 64, 1,024 tokens",
    function() return attention(1024) end, causal = true },
  { "attention 4096", "Causal attention forward and backward, 12 heads of 64, 4,096 tokens",
    function() return attention(4096) end, causal = true },
}

-- ---- the tables ----

local ROWS = 9

-- The fastest of a few steps: three, or as many as begin within five seconds.
local function profiled(case)
  local step, clock = case[3](), ty.system.clock
  step() -- makes what is kept: the optimizer's state, packed weights
  local best, latest, count = nil, clock() + 5, 0
  repeat
    local p = ty.profile(step, { limits = { flops = 1, bandwidth = 1 } })
    if not best or p.seconds < best.seconds then best = p end
    count = count + 1
  until count == 3 or clock() > latest
  return best
end

local function add(sum, event, rates, causal)
  local flops = event.flops
  if causal and event.op:find "attention" then flops = flops / 2 end -- of pairs that are seen
  sum.calls, sum.seconds = sum.calls + 1, sum.seconds + event.seconds
  sum.flops, sum.bytes = sum.flops + flops, sum.bytes + event.bytes
  sum.limit = sum.limit + math.max(flops / rates.f32, event.bytes / rates.copy) / 1e9
end

local function fresh(name) return { name = name, calls = 0, seconds = 0.0, flops = 0.0, bytes = 0, limit = 0.0 } end

local function line(sum)
  return ("| %s | %d | %.1f | %.2f | %.0f | %.1f | %.0f %% |"):format(sum.name, sum.calls, sum.seconds * 1e3,
    sum.flops / 1e9, sum.bytes / 1e6, sum.limit * 1e3, 100 * sum.limit / sum.seconds)
end

local function table_of(case, rates)
  local p = profiled(case)
  local list, known, all = {}, {}, fresh "all kernels"
  for _, event in ipairs(p.events) do
    local name = event.op .. (event.backward and not event.op:find "backward" and ", in backward" or "")
    if not known[name] then
      known[name] = fresh(name)
      list[#list + 1] = known[name]
    end
    add(known[name], event, rates, case.causal)
    add(all, event, rates, case.causal)
  end
  table.sort(list, function(a, b) return a.seconds > b.seconds end)
  local rest = fresh "the others"
  local out = { "### " .. case[2], "", "| op | calls | ms | GFLOP | MB | ms at the limit | share |",
    "|---|---|---|---|---|---|---|" }
  for at, sum in ipairs(list) do
    if at <= ROWS then
      out[#out + 1] = line(sum)
    else
      for key, value in pairs(sum) do if key ~= "name" then rest[key] = rest[key] + value end end
    end
  end
  if rest.calls > 0 then out[#out + 1] = line(rest) end
  out[#out + 1] = line(all)
  out[#out + 1] = ("\n%.0f ms in all, %.0f %% of it between kernels."):format(p.seconds * 1e3,
    100 * (1 - all.seconds / p.seconds))
  return table.concat(out, "\n")
end

ty.set_threads(threads)
local rates = limits.all(threads)
local parts = { ("%s, %d thread%s: %.0f GFLOP/s of f32, %.1f GB/s of a copy."):format(report.this_cpu(root).name,
  threads, threads == 1 and "" or "s", rates.f32, rates.copy) }
for _, case in ipairs(cases) do
  if wanted(names, case[1]) then
    parts[#parts + 1] = table_of(case, rates)
    collectgarbage()
  end
end
local text = table.concat(parts, "\n\n") .. "\n"
if not write then
  io.write(text)
  return
end
local path = root .. "/bench/LIMITS.md"
local file = assert(io.open(path))
local head = file:read "a":match "^(.-\n## Tables\n)" or error(path .. ": expected a line ## Tables", 0)
file:close()
file = assert(io.open(path, "w"))
file:write(head, "\n", text)
file:close()
print("written: " .. path)
