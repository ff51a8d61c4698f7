-- Importance matrices: means of squares, the codes against those of llama.cpp, files of both forms, hostile ones.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local imatrix = quant.imatrix
local fixtures = check.root .. "tests/fixtures/"

local function llama(width)
  ty.manual_seed(3)
  return llm.Llama { vocab_size = 40, hidden_size = width or 32, intermediate_size = 2 * (width or 32),
    num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
end
ty.manual_seed(1)
local data = { { tokens = ty.randint(0, 40, { 3, 10 }) }, { tokens = ty.randint(0, 40, { 2, 10 }) } }

-- The sum of squared errors as they count, a block each: by importance, and larger elements more.
local function lost(codes, x, importance, columns)
  local squares = x:square():reshape(-1, columns)
  local weights = (squares + squares:mean(1, true)):sqrt():reshape(x.shape) * importance
  return ((codes:dequantize() - x):square() * weights):to("f64"):reshape(-1, columns):sum(1)
end

check.test("codes: no block loses more than without, nor their mean more than with llama.cpp's", function()
  local f = ty.io.load_npz(fixtures .. "imatrix.npz")
  for format, columns in pairs { q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256 } do
    local with = lost(f.x:quantize(format, f.importance), f.x, f.importance, columns)
    local without = lost(f.x:quantize(format), f.x, f.importance, columns)
    local theirs = lost(ty.io.from_bytes(ty.io.to_bytes(f[format .. "_blocks"]), format, f.x.shape), f.x, f.importance,
      columns)
    check.ok((with - without * (1 + 1e-6)):max():item() <= 0, format .. ": a block loses more than without")
    check.ok(with:sum():item() < 0.95 * without:sum():item() or format == "q4_0", format .. " gains")
    local of_theirs = (with / theirs):mean():item()
    check.ok(of_theirs <= 1, ("%s: a block loses %g of what it does with llama.cpp's"):format(format, of_theirs))
  end
end)

check.test("codes: importance of nothing, of one column, of numbers that are none; the order of rows", function()
  ty.manual_seed(2)
  local x = ty.randn(3, 256)
  for _, format in ipairs { "q4_0", "q2_k", "q3_k", "q4_k", "q6_k", "mxfp4", "nvfp4" } do
    local plain = ty.io.to_bytes(x:quantize(format))
    for _, value in ipairs { 0, 0 / 0, -1, math.huge } do
      check.equal(ty.io.to_bytes(x:quantize(format, ty.full({ 256 }, value))), plain, format .. " with no importance")
    end
    local one = ty.zeros(256)
    one:narrow(0, 77, 1):fill_(1)
    local off = (x:quantize(format, one):dequantize() - x):select(1, 77):abs():max():item()
    check.ok(off <= (x:quantize(format):dequantize() - x):select(1, 77):abs():max():item() + 1e-7)
    local w = ty.rand(256) + 0.1
    local turned = x:flip(0):quantize(format, w):dequantize():flip(0)
    check.equal(turned:tolist(), x:quantize(format, w):dequantize():tolist())
    local broken = x:clone()
    broken:select(0, 1):narrow(0, 5, 1):fill_(0 / 0)
    check.equal(ty.io.to_bytes(broken:quantize(format, w)):sub(1, 17), ty.io.to_bytes(x:quantize(format, w)):sub(1, 17))
  end
  check.equal(ty.io.to_bytes(x:quantize("q8_0", ty.rand(256))), ty.io.to_bytes(x:quantize "q8_0"))
end)

check.test("collected: the mean square of each column, names of files, layers that share an input", function()
  local model = llama()
  local found = imatrix.collect(model, data, { datasets = { "text" } })
  local q, down = model:get "model.layers.1.self_attn.q_proj", model:get "model.layers.1.mlp.down_proj"
  local seen = { {}, {} }
  local removes = { q:register_forward_pre_hook(function(_, x) table.insert(seen[1], x:reshape(-1, 32)) end),
    down:register_forward_pre_hook(function(_, x) table.insert(seen[2], x:reshape(-1, 64)) end) }
  for _, batch in ipairs(data) do ty.no_grad(model.forward, model, batch.tokens) end
  for _, remove in ipairs(removes) do remove() end
  local function mean(list) return ty.concat(list, 0):to("f64"):square():mean(0) end
  check.close(found.means["blk.1.attn_q.weight"]:tolist(), mean(seen[1]):tolist(), 1e-5)
  check.close(found.means["blk.1.ffn_down.weight"]:tolist(), mean(seen[2]):tolist(), 1e-5)
  check.equal(found.means["blk.1.attn_v.weight"]:tolist(), found.means["blk.1.attn_q.weight"]:tolist())
  check.equal({ found.counts["blk.1.attn_q.weight"], found.chunks, found.chunk }, { 50, 5, 10 })
  check.equal(found.means["output.weight"], nil)
  check.ok(imatrix.collect(model, data, { head = true }).means["output.weight"])
  check.ok(tostring(found):find "14 weights, by 5 texts of 10 tokens")
  -- Any model, run as the user says.
  local net = ty.nn.Sequential(ty.nn.Linear(8, 4), ty.nn.Linear(4, 2))
  local x = ty.randn(6, 8)
  local of_net = imatrix.collect(net, { { x = x } }, { run = function(m, batch) return m(batch.x) end })
  check.close(of_net.means["0.weight"]:tolist(), x:square():mean(0):tolist(), 1e-5)
end)

check.test("a model encoded by importance is nearer to the original, and GGUF takes it", function()
  local model = llama(256)
  ty.no_grad(function() -- some channels carry more than others
    for _, layer in ipairs(model.model.layers) do
      layer.input_layernorm.weight:copy_((ty.randn(256) * 1.2):exp())
      layer.post_attention_layernorm.weight:copy_((ty.randn(256) * 1.2):exp())
    end
  end)
  local found = imatrix.collect(model, data)
  local tokens = ty.randint(0, 40, { 4, 12 })
  local function hidden(m) return ty.no_grad(function() return m:hidden(tokens) end) end
  local right = hidden(model)
  for _, dtype in ipairs { "q2_k", "q3_k", "q4_k" } do
    local with, without = model:clone(), model:clone()
    local report = quant.quantize(with, { dtype = dtype, importance = found })
    check.equal(report.weighed, 14)
    quant.quantize(without, { dtype = dtype })
    local a, b = (hidden(with) - right):square():mean():item(), (hidden(without) - right):square():mean():item()
    check.ok(a < b, ("%s: %g with, %g without"):format(dtype, a, b))
    local path, weight = scratch.file(dtype .. ".gguf"), with:get "model.layers.0.mlp.up_proj.weight"
    report = quant.save(model, path, { dtype = dtype, importance = found })
    local tensors, metadata = ty.io.load_gguf(path)
    check.equal(ty.io.to_bytes(tensors["blk.0.ffn_up.weight"]), ty.io.to_bytes(weight))
    check.equal({ report.weighed, metadata["quantize.imatrix.entries_count"] }, { 14, 14 })
  end
  check.fails(function() quant.quantize(model, { dtype = "nf4", importance = found }) end,
    "quant.quantize: importance: nf4 has fixed levels and takes none")
  check.fails(function() quant.quantize(llama(512), { dtype = "q2_k", importance = found }) end,
    "blk.0.attn_q.weight: expected the importance of its 512 columns, got %[256%]: it is of another model")
  check.fails(function() quant.quantize(ty.nn.Sequential(ty.nn.Linear(256, 4)), { dtype = "q2_k", importance = found })
    end, "quant.quantize: importance: expected one of this model, got names that it does not have")
  check.fails(function() quant.quantize(model, { dtype = "q2_k", importance = {} }) end,
    "quant.quantize: importance: expected one of quant.imatrix, got an empty table")
  check.fails(function() quant.save(model, scratch.file "x.gguf", { importance = {} }) end,
    "quant.save: importance: expected one of quant.imatrix, got an empty table")
  check.fails(function() quant.save(model, scratch.file "x.gguf", { importance = found }) end,
    "quant.save: importance: expected one of weights that are encoded, got none of them")
end)

local function same(a, b)
  for name, mean in pairs(a.means) do
    check.ok(b.means[name], name)
    check.close(b.means[name]:tolist(), mean:tolist(), 1e-6, name)
  end
  for name in pairs(b.means) do check.ok(a.means[name], name) end
end

check.test("files of llama.cpp, and back", function()
  local new, old = imatrix.load(fixtures .. "io/imatrix.gguf"), imatrix.load(fixtures .. "io/imatrix.dat")
  check.close(new.means["blk.0.attn_q.weight"]:tolist(), { 1 / 24, 2 / 24, 3 / 24, 4 / 24, 5 / 24, 6 / 24 }, 1e-6)
  check.close(old.means["blk.0.attn_q.weight"]:tolist(), new.means["blk.0.attn_q.weight"]:tolist(), 1e-6)
  check.equal({ new.chunks, new.chunk, new.datasets, old.chunks, old.datasets },
    { 3, 8, { "a.txt", "b.txt" }, 3, { "b.txt" } })
  check.equal(new.counts["blk.0.attn_q.weight"], 24)
  check.close(new.means["blk.1.ffn_up_exps.weight"]:select(1, 0):tolist(), { 0.05, 0.25, 1 }, 1e-6)
  check.fails(function() new:get("blk.1.ffn_up_exps.weight", 5) end, "its 5 columns, got %[3, 5%]")
  local found = imatrix.collect(llama(), data, { datasets = { "text" } })
  for _, ending in ipairs { "gguf", "dat" } do
    local path = scratch.file("made." .. ending)
    local again = imatrix.load(found:save(path) and path)
    same(found, again)
    check.equal({ again.chunks, again.datasets }, { 5, { "text" } })
    imatrix.collect(llama(), data):save(path) -- of texts without a name
    check.equal(#imatrix.load(path).datasets, ending == "gguf" and 0 or 1)
  end
  local tensors, metadata = ty.io.load_gguf(scratch.file "made.gguf")
  check.equal({ metadata["general.type"], metadata["imatrix.chunk_size"] }, { "imatrix", 10 })
  check.equal({ tensors["blk.0.attn_q.weight.in_sum2"].shape, tensors["blk.0.attn_q.weight.counts"]:tolist() },
    { { 1, 32 }, { { 50 } } })
end)

check.test("hostile files are one error each", function()
  local function fails(text, words)
    check.fails(function() imatrix.load(scratch.spit("bad", text)) end, "quant.imatrix.load: .*" .. words)
  end
  local function entry(name, calls, values)
    return ("<s4i4i4"):pack(name, calls, #values) .. ("<" .. ("f"):rep(#values)):pack(table.unpack(values))
  end
  fails("", "ends inside of its head")
  fails(("<i4"):pack(-1), "says that it has %-1 entries")
  fails(("<i4"):pack(1 << 30) .. ("x"):rep(64), "says that it has 1073741824 entries")
  local one = entry("a", 1, { 1, 2 })
  fails(("<i4"):pack(1) .. ("<i4"):pack(1 << 30) .. ("x"):rep(20), "entry 1 of 1: a length of 1073741824")
  fails(("<i4"):pack(2) .. one .. one, "a: is there twice")
  fails(("<i4"):pack(1) .. entry("a", -3, { 1 }), "a: says that it was read %-3 times")
  fails(("<i4"):pack(1) .. entry("", 1, { 1 }), "entry 1 of 1: has no name")
  fails(("<i4"):pack(1) .. entry("a", 1, { -1, 2 }), "a: a mean of squares is negative or not finite")
  fails(("<i4"):pack(1) .. entry("a", 1, { 0 / 0 }), "negative or not finite")
  fails(("<i4"):pack(1) .. ("<s4i4i4"):pack("a", 1, 1 << 30) .. "1234", "a: says that it has 1073741824 values")
  fails(("<i4"):pack(1) .. one .. "ab", "ends inside of the count of texts")
  fails(("<i4"):pack(1) .. one .. ("<i4s4"):pack(1, "t") .. "more", "4 bytes follow its end")
  local function gguf(tensors, kind)
    local path = scratch.file "bad.gguf"
    ty.io.save_gguf(path, tensors, { ["general.type"] = kind or "imatrix" })
    return scratch.slurp(path)
  end
  local sums, counts = ty.ones(1, 4), ty.ones(1, 1)
  fails(gguf({ ["a.in_sum2"] = sums, ["a.counts"] = counts }, "model"), 'general.type is "model"')
  fails(gguf { ["a.in_sum2"] = sums }, "a: expected .in_sum2 and .counts, got only one")
  fails(gguf { ["a.counts"] = counts }, "got only one")
  fails(gguf { a = sums }, "a: expected names that end in")
  fails(gguf { ["a.in_sum2"] = sums, ["a.counts"] = ty.ones(3, 1) }, "a: expected f32 %[matrices, columns%]")
  fails(gguf { ["a.in_sum2"] = -sums, ["a.counts"] = counts }, "negative or not finite")
  fails(gguf { ["a.in_sum2"] = sums, ["a.counts"] = -counts }, "a: a count is negative")
  for _, name in ipairs { "imatrix.dat", "imatrix.gguf" } do
    scratch.flips(scratch.slurp(fixtures .. "io/" .. name), 300, function(text)
      local ok, problem = pcall(imatrix.load, scratch.spit("flipped", text))
      check.ok(ok or problem:find("quant.imatrix.load", 1, true) and not problem:find "attempt to", tostring(problem))
    end)
  end
end)

check.test("wrong arguments", function()
  local model = llama()
  check.fails(function() imatrix.collect(3, data) end, "quant.imatrix.collect: model: expected a module, got 3")
  check.fails(function() imatrix.collect(model, 3) end, "quant.imatrix.collect: data: expected a dataset")
  check.fails(function() imatrix.collect(model, data, { rows = 0 }) end, "rows: expected a positive integer, got 0")
  check.fails(function() imatrix.collect(model, data, { run = 3 }) end, "run: expected a function, got 3")
  check.fails(function() imatrix.collect(ty.nn.ReLU(), data) end, "expected one with linear layers, got none")
  check.fails(function() imatrix.load(scratch.file "nowhere") end, "quant.imatrix.load: .*nowhere")
  check.fails(function() imatrix.load(3) end, "quant.imatrix.load: path: expected a string, got 3")
end)

scratch.clean()
check.finish()
