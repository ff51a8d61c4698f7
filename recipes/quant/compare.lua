-- Formats and methods of quantization side by side, on any language model
-- claim: calibrated methods are nearer to the original than rounding in the same bits; 8 bits change next to nothing
-- system: GGUF's blocks, with importance matrices too, GPTQ, AWQ, HQQ and trit-planes: bytes, divergence and speed
-- paper: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
-- time: 8 minutes on one CPU core for the model of the zoo
--
--     ./run recipes/quant/compare.lua --model path/of/a/folder --text book.txt
--
-- Perplexity and divergence from the original are measured on text that no method sees: chapters of the Bible that the
-- zoo's model was not trained on, or the last quarter of --text, whose beginning calibrates. Grids have groups of 32
-- columns, and rounding searches for no ranges; bytes are those of a file, with half precision for what is not
-- quantized. Grids that are no format of a file stay f32 in memory, so that speed and peak say nothing of them.
-- K-quants take rows of whole blocks of 256; where a layer has others, rounding leaves it as it is. "imatrix" is the
-- same format with codes chosen by llama.cpp's importance matrices, of the text that calibrates the other methods.
local ty = require "tycho"
local llm, quant, zoo = require "tycho.llm", require "tycho.quant", require "tycho.zoo"

local r = ty.recipe.declare {
  args = {
    { "model", "kjv-lm", "a language model of the zoo, or a Hugging Face folder or GGUF file with a path" },
    { "text", "", "a text file to calibrate and to measure with (none: the Bible, for the model of the zoo)" },
    { "ways", {}, "which ones (none: all)", quick = { "q8_0", "q4_0", "round 3", "HQQ 3" } },
    { "rows", 32, "rows of text to calibrate with", quick = 2 },
    { "measured", 16, "rows of text to measure with", quick = 1 },
    { "length", 256, "tokens of a row", quick = 32 },
    { "decode", 32, "tokens to time", quick = 2 },
  },
}
local args = r.args

local function in_zoo()
  for _, name in ipairs(zoo.names()) do if name == args.model then return true end end
  return false
end
local load, tokenizer = llm.load, llm.tokenizer
if in_zoo() then load, tokenizer = zoo.load, zoo.tokenizer end
local model = load(args.model, { dtype = "f32" }):to(r.device):eval()

-- ---- text: what methods may see, and what they may not ----

local function rows_of(ids, from, count)
  local list, most = {}, (ids.shape[1] - from) // args.length
  for i = 0, math.min(count, most) - 1 do list[#list + 1] = ids:narrow(0, from + i * args.length, args.length) end
  if #list == 0 then error(("compare: --text: expected at least %d tokens more"):format(args.length), 0) end
  return ty.stack(list, 0):to { device = r.device }
end
local calibration, held_out
if args.text ~= "" then
  local ids = (tokenizer(args.model) or error("compare: there is no tokenizer in " .. args.model, 0))
    :encode(ty.io.read(args.text))
  calibration, held_out = rows_of(ids, 0, args.rows), rows_of(ids, ids.shape[1] * 3 // 4, args.measured)
elseif args.model == "kjv-lm" then
  local corpus = zoo.language.unseen(r:path "corpus", { books = r.quick and 1 or 66 })
  local function all(part, count)
    local ids = ty.concat(corpus.ids[part], 0)
    return rows_of(ids, 0, math.min(count, ids.shape[1] // args.length))
  end
  calibration, held_out = all("training", args.rows), all("measured", args.measured)
else
  error("compare: expected --text FILE for " .. args.model, 0)
end
local data = {}
for i = 0, calibration.shape[1] - 1, 4 do
  data[#data + 1] = { tokens = calibration:narrow(0, i, math.min(4, calibration.shape[1] - i)) }
end

-- ---- ways ----

local ways, chosen = {}, {}
for _, name in ipairs(args.ways) do chosen[name] = true end
local function add(name, apply)
  if #args.ways == 0 or chosen[name] then ways[#ways + 1] = { name = name, apply = apply } end
  chosen[name] = nil
end
for _, dtype in ipairs { "q8_0", "q6_k", "q4_k", "q4_0", "nf4", "mxfp4", "nvfp4", "q3_k", "q2_k" } do
  add(dtype, function(copy) return quant.quantize(copy, { dtype = dtype }) end)
end
local important
for _, dtype in ipairs { "q4_k", "q4_0", "q3_k", "q2_k" } do
  add("imatrix " .. dtype, function(copy)
    important = important or quant.imatrix.collect(model, data)
    return quant.quantize(copy, { dtype = dtype, importance = important })
  end)
end
add("GPTQ q4_0", function(copy) return quant.gptq.quantize(copy, data, { format = "q4_0" }) end)
for _, bits in ipairs { 4, 3, 2 } do
  local grid = { bits = bits, group = 32 }
  local function with(more)
    local o = more or {}
    for key, value in pairs(grid) do o[key] = value end
    return o
  end
  add("round " .. bits, function(copy) return quant.round(copy, with()) end)
  add("HQQ " .. bits, function(copy) return quant.hqq(copy, with()) end)
  add("AWQ " .. bits, function(copy) return quant.awq(copy, data, with()) end)
  add("GPTQ " .. bits, function(copy) return quant.gptq.quantize(copy, data, with { act_order = true }) end)
end
add("trit-planes", function(copy) return quant.trit.quantize(copy, { group = 32 }) end)
if next(chosen) then error("compare: --ways: there is none named " .. next(chosen), 0) end

local found = quant.compare(model, ways, { tokens = held_out, decode = args.decode, prompt = args.length // 2,
  say = function(line) r:say(line) end })
r:say("\n%s", tostring(found))

-- ---- the picture, and what is claimed ----

local families, series = { { "rounding, files' blocks", "^q", "^nf4", "^mxfp4", "^nvfp4" },
  { "importance, files' blocks", "^imatrix" }, { "rounding, grids", "^round" },
  { "HQQ", "^HQQ" }, { "AWQ", "^AWQ" }, { "GPTQ", "^GPTQ %d" }, { "trit-planes", "^trit" } }, {}
for _, row in ipairs(found.list) do
  r.metrics["divergence/" .. row.name], r.metrics["megabytes/" .. row.name] = row.divergence, row.bytes / 1e6
  r.metrics["faster/" .. row.name] = row.faster
end
for _, family in ipairs(families) do
  local points = {}
  for _, row in ipairs(found.list) do
    for k = 2, #family do if row.name:find(family[k]) then points[#points + 1] = row end end
  end
  table.sort(points, function(a, b) return a.bytes < b.bytes end)
  local x, y = {}, {}
  for i, row in ipairs(points) do x[i], y[i] = row.bytes / 1e6, row.divergence end
  if #x > 0 then series[#series + 1] = { x = x, y = y, label = family[1] } end
end
ty.plot.line { title = "Bytes against what they cost", x_label = "MB of the file", y_label = "divergence, nats",
  log_y = true, series = series }:save(r:picture "compare.png")

local rows = {}
local function ratio(claim, one, other, bar)
  local a, b = found:row(one), found:row(other)
  if a and b then
    rows[#rows + 1] = { claim = claim, measured = a.divergence / b.divergence, bar = bar, below = true,
      judged = bar ~= nil }
  end
end
local eight = found:row "q8_0"
if eight then
  rows[#rows + 1] = { claim = "divergence of q8_0, nats", measured = eight.divergence, bar = 1e-3, below = true }
end
for _, bits in ipairs { 4, 3, 2 } do
  for _, method in ipairs { "HQQ", "AWQ", "GPTQ" } do
    ratio(("divergence of %s in %d bits, of rounding's"):format(method, bits), ("%s %d"):format(method, bits),
      "round " .. bits, 1)
  end
end
for _, dtype in ipairs { "q4_k", "q4_0", "q3_k", "q2_k" } do
  ratio(("divergence of %s by importance, of that without"):format(dtype), "imatrix " .. dtype, dtype, 1)
end
ratio("divergence of GPTQ in q4_0, of rounding's", "GPTQ q4_0", "q4_0", 1)
ratio("divergence of trit-planes, of GPTQ's in 3 bits", "trit-planes", "GPTQ 3")
os.exit(r:finish(rows), true)
