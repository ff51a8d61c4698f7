-- Attention as one op that never has the T x T matrix
-- claim: memory grows linearly in T, forward and backward; results equal a float64 reference
-- system: ty.scaled_dot_product_attention: causal, grouped queries, window, bias with gradient, packed sequences
-- paper: Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
-- time: 40 seconds on two CPU cores
--
-- Extra memory counts the results. Rates stand beside that of products of large matrices in the same run, and beside
-- the form with the T x T matrix, which is also the reference in f64. The bar of cuDNN-class rates is one for GPUs; on
-- the CPU it is not judged.
local ty = require "tycho"
local unfused = ty.nn.unfused.attention

local r = ty.recipe.declare {
  args = {
    { "heads", 4, "heads" },
    { "width", 64, "of a head" },
    { "longest", 16384, "tokens, from 1024 on in powers of two", quick = 1024 },
    { "unfused", 4096, "tokens up to which the form with the matrix runs, for comparison", quick = 512 },
    { "dtype", "", "f32, bf16 or f16 of the timings (none: f32 on the CPU, bf16 on a GPU)" },
    { "rounds", 3, "timings, of which the median counts", quick = 1 },
  },
}
local args = r.args
local on_gpu = r.device ~= "cpu"
local dtype = args.dtype ~= "" and args.dtype or on_gpu and "bf16" or "f32"
local heads, width = args.heads, args.width

local function fused(q, k, v, bias, o)
  return (ty.scaled_dot_product_attention(q, k, v, bias, { causal = o.causal, window = o.window, sinks = o.sinks,
    cu_seqlens = o.cu_seqlens }))
end

-- ---- equality ----

-- Results and gradients of both, of the same values; the largest difference relative to the largest element.
local function differences(feature, kind)
  local t, s, hk = feature.t or 300, feature.s or feature.t or 300, feature.key_heads or 4
  local function values(...) return ty.randn({ ... }, { device = r.device }):to(kind) end
  local inputs = { values(2, 4, t, width), values(2, hk, s, width), values(2, hk, s, width) }
  if feature.bias then inputs[4] = values(1, 4, t, s) end
  local g = values(2, 4, t, width)
  local mask = feature.mask and ty.rand(t, s, { device = r.device }):gt(0.3)
  if mask then mask = mask:logical_or(ty.eye(t, s, { dtype = "f32", device = r.device }):gt(0)) end
  local function of(form)
    return function(q, k, v, bias) return form(q, k, v, bias or mask, feature.options) end
  end
  return ty.recipe.from_reference(of(fused), of(unfused), inputs, g)
end

local features = {
  { name = "plain", options = {} },
  { name = "causal", options = { causal = true } },
  { name = "causal, more keys than queries", t = 130, s = 300, options = { causal = true } },
  { name = "grouped queries", key_heads = 2, options = { causal = true } },
  { name = "window", options = { causal = true, window = 40 } },
  { name = "window both ways, sinks", options = { window = 40, sinks = 4 } },
  { name = "bias, with its gradient", bias = true, options = {} },
  { name = "mask", mask = true, options = {} },
  { name = "packed sequences", options = { causal = true, cu_seqlens = { 0, 70, 71, 215, 300 } } },
}
local tolerance = { f32 = 5e-6, bf16 = 8e-3, f16 = 1e-3 }
local over = 0 -- largest difference, in units of the tolerance
r:say("%-32s %18s %18s %18s", "difference from f64", "f32", "bf16", "f16")
for _, feature in ipairs(features) do
  local list = feature.options.cu_seqlens
  if list then feature.options.cu_seqlens = ty.tensor(list, { dtype = "i64" }):to(r.device) end
  local cells = {}
  for i, kind in ipairs { "f32", "bf16", "f16" } do
    local forward, backward = differences(feature, kind)
    cells[i] = ("%.1e, %.1e"):format(forward, backward)
    over = math.max(over, forward / tolerance[kind], backward / tolerance[kind])
    r.metrics[("%s, %s"):format(feature.name, kind)] = math.max(forward, backward)
  end
  r:say("%-32s %18s %18s %18s", feature.name, table.unpack(cells))
end
r:say("of the largest element: the result, then the gradients\n")

-- ---- memory ----

local function inputs_of(t)
  local x = {}
  for i = 1, 4 do x[i] = ty.randn(1, heads, t, width, { device = r.device }):to(dtype) end
  return x[1], x[2], x[3], x[4]
end

local function forward_of(form, q, k, v) return function() form(q, k, v, nil, { causal = true }) end end
local function both_of(form, q, k, v, g)
  q, k, v = q:detach():requires_grad_(), k:detach():requires_grad_(), v:detach():requires_grad_()
  return function()
    form(q, k, v, nil, { causal = true }):backward(g)
    for _, x in ipairs { q, k, v } do x:set_grad() end
  end
end

-- ---- FLOP/s, of the causal half; the backward pass counts twice the forward pass ----

local function seconds_of(fn) return r:time({ fn }, { rounds = args.rounds })[1] end

-- What products of large matrices reach here, the practical limit.
local limit
do
  local n = r.quick and 512 or on_gpu and 8192 or 2048
  local a, b = ty.randn(n, n, { device = r.device }):to(dtype), ty.randn(n, n, { device = r.device }):to(dtype)
  limit = 2 * n ^ 3 / seconds_of(function() ty.matmul(a, b) end)
  r:say("products of %d x %d matrices, %s: %.0f GFLOP/s", n, n, dtype, limit / 1e9)
end

local points = { forward = {}, both = {} }
local rates = {}
r:say("\n%6s %22s %22s %10s %26s %26s", "", "extra memory, MB", "with the matrix, MB", "MB of it",
  "GFLOP/s (of products)", "with the matrix")
r:say("%6s %11s%11s %11s%11s %10s %13s%13s %13s%13s", "T", "forward", "both", "forward", "both", "", "forward", "both",
  "forward", "both")
local t = r.quick and 512 or 1024
while t <= args.longest do
  local q, k, v, g = inputs_of(t)
  local work = 2 * heads * t * t * width
  local row = { t = t }
  for _, name in ipairs { "fused", "unfused" } do
    local form = name == "fused" and fused or unfused
    if name == "fused" or t <= args.unfused then
      local forward, both = forward_of(form, q, k, v), both_of(form, q, k, v, g)
      row[name] = { memory = { r:memory(forward), r:memory(both) },
        rate = { work / seconds_of(forward), 3 * work / seconds_of(both) } }
    end
  end
  for i, name in ipairs { "forward", "both" } do
    local list = points[name]
    list[#list + 1] = { t, row.fused.memory[i] }
  end
  rates[#rates + 1] = row
  local function megabytes(x) return x and ("%.1f"):format(x / 2 ^ 20) or "-" end
  local function rate(x) return x and ("%.0f (%2.0f %%)"):format(x / 1e9, 100 * x / limit) or "-" end
  local other = row.unfused or { memory = {}, rate = {} }
  local bytes = dtype == "f32" and 4 or 2
  r:say("%6d %11s%11s %11s%11s %10s %13s%13s %13s%13s", t, megabytes(row.fused.memory[1]),
    megabytes(row.fused.memory[2]), megabytes(other.memory[1]), megabytes(other.memory[2]),
    megabytes(heads * t * t * bytes), rate(row.fused.rate[1]), rate(row.fused.rate[2]), rate(other.rate[1]),
    rate(other.rate[2]))
  t = 2 * t
end
r.metrics.rows, r.metrics.products = rates, limit

local last = rates[#rates].fused.rate
os.exit(r:finish {
  { claim = "power of T that extra memory grows with, forward", measured = ty.stats.slope(points.forward, true),
    bar = 1.05, below = true },
  { claim = "the same, forward and backward", measured = ty.stats.slope(points.both, true), bar = 1.05,
    below = true },
  { claim = "difference from float64, in tolerances (f32 5e-6, bf16 8e-3, f16 1e-3)", measured = over, bar = 1,
    below = true },
  { claim = "share of the rate of products, forward and backward (cuDNN class on a GPU)",
    measured = on_gpu and last[2] / limit or "not measured here: no GPU", bar = 0.5, judged = on_gpu },
})
