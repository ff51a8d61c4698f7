-- Products with unstructured sparse weights that are faster than dense ones
-- claim: from 60 % zeros on, a matrix-vector product reads so much less that it beats the dense one in f16, exactly
-- system: bitmaps with packed f16 values and the paper's tiled CSL; random matrices larger than the last cache, and the
--   zoo's Llama pruned by SparseGPT
-- paper: Xia et al. 2023, "Flash-LLM: Enabling Cost-Effective and Highly-Efficient Large Generative Model Inference
--   with Unstructured Sparsity"
-- time: 2 minutes on one CPU core
--
-- Load as sparse, compute as dense: values are spread out in registers (bitmap) or in a tile that stays in the first
-- cache (CSL), and zeros are multiplied. The ceiling is the ratio of bytes. All kinds take turns in every round, so
-- that each finds the caches full of the others. Dense is this library's own product in f16, with q8_0 beside it. Tiled
-- CSL is made for GPUs, where a block of threads scatters its tile; here one core scatters. Exactness is on integers,
-- where sums have no order.
local ty = require "tycho"
local llm, prune, zoo = require "tycho.llm", require "tycho.prune", require "tycho.zoo"

local r = ty.recipe.declare {
  args = {
    { "rows", 4096, "of the matrix", quick = 130 },
    { "columns", 8192, "of it", quick = 256 },
    { "sparsity", { 0.5, 0.6, 0.7, 0.8 }, "shares of zeros", quick = { 0.6, 0.7, 0.8 } },
    { "rounds", 31, "of the timing, of which the median counts", quick = 2 },
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "held_out", 12, "chapters to measure on", quick = 1 },
    { "tokens", 32, "that are decoded in a round", quick = 2 },
  },
}
local args = r.args
ty.manual_seed(r.seed)

-- ---- products ----

local rows, columns = args.rows, args.columns
local dense = r:place(function() return ty.randn(rows, columns):to "f16" end)
local q8 = dense:to("f32"):to "q8_0"
local chances = ty.rand(rows, columns)
local curves = { bitmap = { label = "bitmap", x = {}, y = {} }, csl = { label = "tiled CSL", x = {}, y = {} },
  ceiling = { label = "ceiling of the bitmap, by bytes", x = {}, y = {} } }
local speeds, differs = {}, 0

local function timed(weights, n)
  local x = ty.randn(n, columns)
  local half, calls = x:to "f16", {}
  for name, weight in pairs(weights) do
    calls[name] = function()
      ty.no_grad(function()
        if ty.is_tensor(weight) then return ty.linear(weight.dtype == "f16" and half or x, weight) end
        return prune.product(x, weight)
      end)
    end
  end
  return r:time(calls, { rounds = args.rounds, warmup = 2 })
end

r:say("%d x %d, %.0f MB in f16; milliseconds of a product with one row", rows, columns, 2e-6 * rows * columns)
local at_seventy
for _, share in ipairs(args.sparsity) do
  local word = ("%g"):format(share)
  local mask = chances:ge(share)
  local weights = { dense = dense, q8_0 = q8 }
  ty.scope(function()
    local w = dense * mask:to "f16"
    weights.bitmap, weights.csl = prune.pack(w), prune.csl(w)
    for _, packed in pairs { weights.bitmap, weights.csl } do
      for _, t in pairs(packed) do
        if ty.is_tensor(t) then ty.keep(t) end
      end
    end
    -- Integers: the very same numbers as with the masked dense weight.
    local some = math.min(rows, 300)
    local whole = (w:narrow(0, 0, some):to "f32" * 4):round():clamp(-9, 9)
    local x = ty.randint(-8, 9, { 3, columns }):to "f32"
    for _, packed in ipairs { prune.pack(whole), prune.csl(whole) } do
      differs = math.max(differs, (prune.product(x, packed) - ty.linear(x, whole)):abs():max():item())
    end
  end)
  local times, bytes = timed(weights, 1), prune.packed_bytes(weights.bitmap)
  local ceiling = 2 * rows * columns / bytes
  speeds[word] = { bitmap = times.dense / times.bitmap, csl = times.dense / times.csl }
  r:say("%2.0f %%: dense %.2f, q8_0 %.2f, bitmap %.2f (x %.2f of at most %.2f), CSL %.2f (x %.2f)", 100 * share,
    1000 * times.dense, 1000 * times.q8_0, 1000 * times.bitmap, speeds[word].bitmap, ceiling, 1000 * times.csl,
    speeds[word].csl)
  for name, seconds in pairs(times) do r.metrics[("milliseconds/%s/%s"):format(name, word)] = 1000 * seconds end
  r.metrics["bytes/" .. word] = bytes
  for name, value in pairs { bitmap = speeds[word].bitmap, csl = speeds[word].csl, ceiling = ceiling } do
    table.insert(curves[name].x, 100 * share)
    table.insert(curves[name].y, value)
  end
  if word == "0.7" then at_seventy = weights end
end
for _, n in ipairs(r.quick and { 4 } or { 2, 4, 8, 16, 32 }) do
  local times = timed({ dense = dense, bitmap = at_seventy.bitmap, csl = at_seventy.csl }, n)
  r:say("70 %%, %d rows: dense %.2f ms, bitmap %.2f (x %.2f), CSL %.2f (x %.2f)", n, 1000 * times.dense,
    1000 * times.bitmap, times.dense / times.bitmap, 1000 * times.csl, times.dense / times.csl)
  for name, seconds in pairs(times) do r.metrics[("milliseconds/%s/rows%d"):format(name, n)] = 1000 * seconds end
end

-- ---- a model ----

local text = zoo.chapters { model = args.model, folder = r:path "text", training = r.quick and 1 or 24,
  validation = 1, held_out = args.held_out, length = r.quick and 64 or 256 }
local model = zoo.load(args.model):to(r.device)
local function perplexity(of) return llm.train.evaluate(of, text.held_out, { device = r.device }).perplexity end
local before = perplexity(model)
prune.sparsegpt(model, text.training, { sparsity = 0.6, rows = r.quick and 2 or 32 })
prune.release(model)
model:to("f16"):to "f32" -- as it is stored
local packed = model:clone()
local bytes, bytes_dense = 0, 0
for _, layer in ipairs(prune.compact(packed)) do bytes, bytes_dense = bytes + layer.bytes, bytes_dense + layer.dense end
local masked, after = perplexity(model), perplexity(packed)
local prompt = ty.randint(0, 4096, { 1, 8 }, { device = r.device })
local function writes(of)
  return function() of:generate(prompt, args.tokens, { temperature = 0, stop_tokens = false }) end
end
local times = r:time({ dense = writes(model), packed = writes(packed) }, { rounds = r.quick and 1 or 5, warmup = 1 })
r:say("%s at 60 %%: perplexity %.3f, dense before %.3f, packed %.3f; blocks of %d bytes, %d in f16; %d tokens in "
  .. "%.1f ms, masked in f32 %.1f", args.model, masked, before, after, bytes, bytes_dense, args.tokens,
  1000 * times.packed, 1000 * times.dense)
r.metrics.perplexity_before, r.metrics.perplexity_masked, r.metrics.perplexity_packed = before, masked, after
r.metrics.model_bytes, r.metrics.model_bytes_dense = bytes, bytes_dense

ty.plot.line { title = "Matrix-vector product, over dense f16", series = { curves.bitmap, curves.csl, curves.ceiling },
  x_label = "% of zeros", y_label = "times as fast" }:save(r:picture "flash-llm.png")

local table_rows = {}
for _, word in ipairs { "0.6", "0.7", "0.8" } do
  table_rows[#table_rows + 1] = { claim = ("speed of the bitmap's matrix-vector product over dense f16, %g %% zeros")
    :format(100 * tonumber(word)), measured = speeds[word].bitmap, bar = 1 }
end
for _, word in ipairs { "0.6", "0.8" } do
  table_rows[#table_rows + 1] = { claim = ("speed of tiled CSL's on this CPU, %g %% zeros"):format(
    100 * tonumber(word)), measured = speeds[word].csl, bar = 1 }
end
table_rows[#table_rows + 1] = { claim = "largest difference to the masked dense product, on integers",
  measured = differs, bar = 0, below = true }
table_rows[#table_rows + 1] = { claim = "perplexity of the packed model less that of the masked one",
  measured = math.abs(after - masked), bar = 1e-3, below = true }
table_rows[#table_rows + 1] = { claim = "bytes of the packed model's blocks, of those in f16",
  measured = bytes / bytes_dense, bar = 0.5, below = true }
os.exit(r:finish(table_rows), true)
