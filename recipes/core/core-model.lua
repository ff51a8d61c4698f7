-- How long a kernel takes, from what its instructions cost
-- claim: a model of the core, fitted to no kernel, foretells the time of our kernels within a fifth
-- system: instruction latency and issue microbenchmarks and an analytical model of a processor's core
-- paper: "Analyzing Modern NVIDIA GPU cores", 2025, arXiv:2503.20481
-- time: 1 minute on one CPU core, which must have nothing else to do
--
-- The paper's cores are GPUs'; here it is the processor at hand, an x86-64 under Linux with binutils. Loops assembled
-- for it measure the latency and the rate of each kind of instruction, which kinds wait for each other, how many enter
-- in a cycle, and the bytes a second of each level of memory. A kernel's instructions are those that it runs for two
-- small inputs, told one by one by the trap flag and by objdump. The model's time is the difference of the two, drawn
-- out to a large input, or that of its bytes. Nothing is fitted; the model's form was chosen looking at the first three
-- kernels, which are not judged. Baselines are rooflines of the same measured peaks, with the rate of main memory and,
-- the better one, with that of the level which holds a kernel's bytes. Kernels whose loads miss the caches in
-- no order (rows, transposed copies) or whose branches are guessed wrong (sort) are what it does not know. The same
-- loops for GPUs are kernels/lab/instructions.cu, which compiles and was not run: no machine here has one.
local ty = require "tycho"
local estimate = require "tycho.estimate"
local pipeline, stats = estimate.pipeline, ty.stats

local r = ty.recipe.declare { args = {
  { "rounds", 40, "times each kernel is timed, of which the shortest counts", quick = 2 },
  { "kernels", 100, "kernels at most, from the list's beginning", quick = 4 },
} }
ty.set_threads(1)

local function unary(name, ...)
  local rest = table.pack(...)
  return function(n)
    local x = ty.rand(n) + 0.5
    return function() return ty[name](x, table.unpack(rest, 1, rest.n)) end
  end
end
local function binary(name, dtype)
  return function(n)
    local x, y = ty.rand(n):to(dtype), ty.rand(n):to(dtype) + 1
    return function() return ty[name](x, y) end
  end
end
local function given(make, fn)
  return function(n)
    local x = make(n)
    return function() return fn(x, n) end
  end
end
local function rows(fn, width) return given(function(n) return ty.randn(n, width or 512) end, fn) end
local function product(dtype, inner, columns)
  return function(n)
    local x, y = ty.randn(n, inner):to(dtype), ty.randn(inner, columns):to(dtype)
    return function() return x:matmul(y) end
  end
end

-- Name, kernel, sizes that are traced, size that is foretold.
local list = {
  { "add", binary("add", "f32"), 1024, 2048, 1 << 16 }, { "exp", unary "exp", 1024, 2048, 1 << 16 },
  { "sum", unary "sum", 2048, 4096, 1 << 18 }, -- so far the kernels that the model was made with
  { "square root", unary "sqrt", 1024, 2048, 1 << 16 }, { "gelu", unary "gelu", 1024, 2048, 1 << 16 },
  { "add, 12 MB", binary("add", "f32"), 1024, 2048, 1 << 20 }, { "add f64", binary("add", "f64"), 1024, 2048, 1 << 16 },
  { "multiply f64", binary("mul", "f64"), 1024, 2048, 1 << 15 },
  { "divide", binary("div", "f32"), 1024, 2048, 1 << 16 },
  { "maximum", binary("maximum", "f32"), 1024, 2048, 1 << 16 }, { "relu", unary "relu", 1024, 2048, 1 << 16 },
  { "log", unary "log", 1024, 2048, 1 << 16 }, { "tanh", unary "tanh", 1024, 2048, 1 << 16 },
  { "sigmoid", unary "sigmoid", 1024, 2048, 1 << 16 }, { "silu", unary "silu", 1024, 2048, 1 << 16 },
  { "sine", unary "sin", 1024, 2048, 1 << 16 }, { "error function", unary "erf", 1024, 2048, 1 << 16 },
  { "power", unary("pow", 2.5), 1024, 2048, 1 << 15 }, { "clamp", unary("clamp", 0.6, 0.9), 1024, 2048, 1 << 16 },
  { "to bf16", given(ty.randn, function(x) return x:to "bf16" end), 1024, 2048, 1 << 16 },
  { "softmax", rows(function(x) return x:softmax(-1) end), 4, 8, 512 },
  { "log softmax", rows(function(x) return x:log_softmax(-1) end), 4, 8, 512 },
  { "layer norm", rows(function(x) return ty.layer_norm(x, { 512 }) end), 4, 8, 512 },
  { "root mean square norm", rows(function(x) return ty.rms_norm(x, { 512 }) end), 4, 8, 512 },
  { "sums of rows", rows(function(x) return x:sum(1) end), 8, 16, 1024 },
  { "largest of rows", rows(function(x) return x:argmax(1) end), 8, 16, 512 },
  { "running sums", rows(function(x) return x:cumsum(1) end), 4, 8, 512 },
  { "sort", rows(function(x) return (x:sort(1)) end, 64), 4, 8, 512 },
  { "transposed copy", rows(function(x) return x:transpose(0, 1):contiguous() end, 128), 32, 64, 1024 },
  { "rows by index", function(n)
    local x, i = ty.randn(1000, 64), ty.randint(0, 1000, { n })
    return function() return x:index_select(0, i) end
  end, 32, 64, 4096 },
  { "product f32", product("f32", 256, 128), 24, 48, 512 }, { "product f64", product("f64", 128, 64), 24, 48, 512 },
  { "product bf16", product("bf16", 256, 128), 24, 48, 512 },
  { "cross entropy", function(n)
    local x, y = ty.randn(n, 128), ty.randint(0, 128, { n })
    return function() return ty.cross_entropy(x, y) end
  end, 8, 16, 1024 },
  { "convolution", function(n)
    local x, w = ty.randn(n, 8, 16, 16), ty.randn(8, 8, 3, 3)
    return function() return ty.conv2d(x, w, nil, 1, 1) end
  end, 2, 4, 64 },
  { "random normals", given(function() end, function(_, n) return ty.randn(n) end), 4096, 8192, 1 << 15 },
}
local development = 3

local machine = pipeline.machine { quick = r.quick }
local costs, main = machine.costs, 0 -- main memory: what is past all caches
for _, row in ipairs(machine.memory) do if row.bytes >= 1 << 25 or r.quick then main = math.max(main, row.read) end end
local peak = costs.width / 32 * 2 / costs.kinds["fma " .. costs.width].rate * costs.ghz * 1e9
local names = {}
for name in pairs(costs.kinds) do names[#names + 1] = name end
table.sort(names)
r:say("%.2f GHz, %.1f instructions in a cycle, a call %.0f ns\n%-22s latency     rate", costs.ghz,
  1 / costs.front, 1e9 * machine.call, "cycles")
for _, name in ipairs(names) do
  local kind = costs.kinds[name]
  r:say("%-22s %7s %8.2f", name, kind.latency and ("%.2f"):format(kind.latency) or "", kind.rate)
end
for _, row in ipairs(machine.memory) do
  r:say("over %9.3g bytes: read %6.1f GB/s, written %6.1f GB/s", row.bytes, row.read / 1e9, row.write / 1e9)
end

-- Seconds of one call: of rounds the shortest; results are released at once.
local function seconds_of(fn)
  local function call() fn() end
  local once, best = r:clock(call, 3), math.huge
  local calls = math.max(1, math.min(1000, math.ceil(0.0005 / once)))
  for _ = 1, r.args.rounds do best = math.min(best, r:clock(call, calls)) end
  return best
end

local within, errors, roofline, main_roofline, series = 0, {}, {}, {}, { foretold = {}, measured = {}, roof = {} }
r:say("\n%-22s %11s %11s %8s %9s  %s", "kernel", "measured", "foretold", "off", "roofline", "bound by")
for k, row in ipairs(list) do
  if k > r.args.kernels then break end
  local guess = pipeline.foretell(machine, row[2], { small = row[3], large = row[4], size = row[5] })
  local seconds = seconds_of(row[2](row[5]))
  local plain, roof = math.max(guess.flops / peak, guess.bytes / main), math.max(guess.flops / peak, guess.memory)
  local off, roof_off = 100 * (guess.seconds / seconds - 1), 100 * (roof / seconds - 1)
  if k > development then
    errors[#errors + 1], roofline[#roofline + 1] = math.abs(off), math.abs(roof_off)
    within = within + (math.abs(off) <= 20 and 1 or 0)
    main_roofline[#errors] = math.abs(100 * (plain / seconds - 1))
    series.foretold[#errors], series.measured[#errors], series.roof[#errors] = guess.seconds, seconds, roof
  end
  r:say("%-22s %8.2f us %8.2f us %+6.0f %% %+7.0f %%  %s, %.2f instructions a cycle", row[1], 1e6 * seconds,
    1e6 * guess.seconds, off, roof_off, guess.bound, guess.instructions / (guess.core * costs.ghz * 1e9))
  r.metrics[row[1]] = { seconds = seconds, foretold = guess.seconds, roofline = roof }
end

-- From the shortest kernel to the longest.
local order = {}
for i in ipairs(errors) do order[i] = i end
table.sort(order, function(x, y) return series.measured[x] < series.measured[y] end)
local lines = {}
for _, pair in ipairs { { "measured", "measured" }, { "foretold", "model" }, { "roof", "roofline" } } do
  local y = {}
  for place, i in ipairs(order) do y[place] = 1e6 * series[pair[1]][i] end
  lines[#lines + 1] = { y = y, label = pair[2] }
end
ty.plot.line { series = lines, log_y = true, title = "Kernels that the model was not made with", x_label = "kernel",
  y_label = "microseconds" }:save(r:picture "kernels.png")

os.exit(r:finish {
  { claim = "error of the time of kernels not fitted to, %: median", measured = stats.median(errors),
    baseline = stats.median(roofline), bar = 20, below = true },
  { claim = "of the roofline's with the level's rate", measured = stats.median(errors) / stats.median(roofline),
    baseline = stats.median(roofline), bar = 0.5, below = true },
  { claim = "of the roofline's with main memory's rate", measured = stats.median(errors) / stats.median(main_roofline),
    baseline = stats.median(main_roofline), bar = 0.5, below = true },
  { claim = "kernels whose time is foretold within 20 %, of all", measured = within / #errors, judged = false },
}, true)
