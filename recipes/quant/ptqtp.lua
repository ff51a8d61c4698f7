-- A language model in two trit-planes
-- claim: a lower perplexity than GPTQ's at 2 bits, by a product without multiplications inside of a group
-- system: PTQTP on the zoo's kjv-lm, weights packed five trits to a byte
-- paper: Xiao et al. 2025, "PTQTP: Post-Training Quantization to Trit-Planes for Large Language Models"
-- time: 6 minutes on one CPU core
--
-- Each weight is a sum of two trits (-1, 0 or 1) times the scales of its group. Scales and planes are fitted in turn,
-- without any text. GPTQ and rounding have groups of the same size; whether ranges are searched for, and whether GPTQ
-- takes the columns by the size of their inputs, is chosen by chapters that nothing else is measured on, with the first
-- seed. Seeds are GPTQ's rows of calibration; PTQTP draws nothing. Two planes take more than 3 bits: GPTQ at 3 bits,
-- which is about as large, stands beside it, and so does a single plane. All sizes are those of what is stored.
local ty = require "tycho"
local quant, zoo = require "tycho.quant", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "group", 128, "columns that share a scale" },
    { "rows", 32, "rows of training text that GPTQ calibrates with", quick = 2 },
    { "chapters", 60, "chapters to measure on", quick = 1 },
    { "books", 66, "of the Bible", quick = 1 },
    { "size", 4096, "rows and columns of the matrix that is timed", quick = 512 },
  },
}
local args = r.args
local base = zoo.load("kjv-lm", { device = r.device })
local corpus, loss = zoo.language.unseen(r:path "corpus", { books = args.books, chapters = args.chapters,
  device = r.device })
local function perplexity(model) return math.exp(loss(model, "measured")) end
local function choice(model) return r.quick and 0 or loss(model, "choice") end

local curve = {}
local function note(name, kind, bits, whole, found)
  r.metrics[name] = found
  r:say("%-16s %.3f bits a weight, %.3f of all parameters: perplexity %.3f", name, bits, whole, found)
  if kind then
    curve[kind] = curve[kind] or { label = kind, x = {}, y = {} }
    table.insert(curve[kind].x, bits)
    table.insert(curve[kind].y, found)
  end
end

local whole = perplexity(base)
note("f16", nil, 16, 16, whole)

-- ---- trits ----

local found = {}
for planes = 1, 2 do
  local model = base:clone()
  local began = r:seconds()
  local report = quant.trit.quantize(model, { group = args.group, planes = planes, rounds = r.quick and 2 or 50 })
  local size = quant.stored.model(model, report)
  r:say("%d planes of %d layers in %.1f s", planes, #report, r:seconds() - began)
  found[planes] = perplexity(quant.trit.unpack(model))
  note(("trits, %d planes"):format(planes), "trit-planes", size.bits, size.whole, found[planes])
end

-- ---- on common grids ----

local ratios, larger, gptq = {}, {}, {}
local settled = r.quick and { { name = "gptq, 2 bits", how = { mse = false, act_order = false } } } or nil
for i, seed in ipairs(r.seeds) do
  local rows = quant.baselines.run(base, corpus.training, { bits = r.quick and { 2 } or { 2, 3 }, group = args.group,
    rows = args.rows, batch = r.quick and 2 or 8, seed = seed, device = r.device, measure = choice, settled = settled,
    methods = i == 1 and not r.quick and { "round", "gptq" } or { "gptq" } })
  settled = settled or rows
  for _, row in ipairs(rows) do
    local size = quant.stored.model(row.model, row.report)
    local got = perplexity(row.model)
    note(i == 1 and row.name or ("%s, seed %d"):format(row.name, seed), i == 1 and row.method, size.bits, size.whole,
      got)
    if row.method == "gptq" and row.bits == 2 then ratios[i], gptq[i] = found[2] / got, got end
    if row.method == "gptq" and row.bits == 3 then larger[i] = found[2] / got end
  end
end

-- ---- the product ----

-- Integers are exact in f32: not one sum may differ. And its time for one row, beside that of a matrix in f32.
local wrong, times
ty.no_grad(ty.scope, function()
  ty.manual_seed(r.seed)
  local n, g = args.size, args.group
  local planes = { ty.randint(-1, 2, { n, n }), ty.randint(-1, 2, { n, n }) }
  local codes = quant.trit.pack(planes, g):to { device = r.device }
  local scales = (ty.randint(-8, 9, { codes.shape[1], n, 2 }):to "f32" / 16):to { device = r.device }
  local x = ty.randint(-127, 128, { 4, n }):to "f32":to { device = r.device }
  local w = quant.trit.decode(codes, scales, n, g)
  wrong = ty.matmul_trit(x, codes, scales, g):ne(ty.linear(x, w)):to("f32"):sum():item()
  local one = x:narrow(0, 0, 1):contiguous()
  times = r:time({ trit = function() ty.matmul_trit(one, codes, scales, g) end,
    f32 = function() ty.linear(one, w) end }, { rounds = r.quick and 1 or 20 })
  r:say("one row times %d x %d: %.3f ms in trits, %.3f ms in f32", n, n, 1e3 * times.trit, 1e3 * times.f32)
end)

local series = {}
for _, kind in ipairs { "round", "gptq", "trit-planes" } do series[#series + 1] = curve[kind] end
ty.plot.line { title = "kjv-lm in few bits", series = series, x_label = "bits of a weight, as stored",
  y_label = "perplexity", height = 360 }:save(r:picture "ptqtp.png")

local rows = {
  { claim = "perplexity of two planes over that of GPTQ at 2 bits", values = ratios, baseline = gptq, bar = 1,
    below = true },
  { claim = "elements of the packed product that differ from the decoded one, on integers", measured = wrong, bar = 0,
    below = true },
  { claim = "perplexity of two planes over that of half precision", measured = found[2] / whole, judged = false },
  { claim = "speed of one row in trits over f32", measured = times.f32 / times.trit, judged = false },
}
if #larger > 0 then
  table.insert(rows, 2, { claim = "the same over GPTQ at 3 bits", values = larger, judged = false })
end
os.exit(r:finish(rows), true)
