-- hub.save_onnx: what is written gives the model's numbers when it is read again; what cannot be written says so.
-- With TYCHO_ONNX_KEEP=FOLDER in the environment the files stay there, for tests/fixtures/check_onnx_written.py, which
-- runs them by onnxruntime.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub, models, llm = require "tycho.hub", require "tycho.models", require "tycho.llm"
local nn = ty.nn

if not pcall(ty.io.load_onnx, check.root .. "tests/fixtures/onnx/lstm.onnx") then
  print "no libprotobuf-c"
  check.finish()
  return
end

ty.manual_seed(3)
local path = scratch.file "model.onnx"

local keep = os.getenv "TYCHO_ONNX_KEEP"

local function keep_files(name, inputs, outputs)
  local arrays = {}
  for i, t in ipairs(inputs) do arrays["in" .. i - 1] = t:detach():contiguous() end
  for i, t in ipairs(outputs) do arrays["out" .. i - 1] = t:contiguous() end
  ty.io.save_npz(keep .. "/" .. name .. ".npz", arrays)
  scratch.run(("cp '%s' '%s/%s.onnx'"):format(path, keep, name))
end

-- Writes without the writer's own check, reads, compares for other inputs of the same shapes.
local function round_trip(name, model, inputs, others, options, limit)
  options = options or {}
  options.check = false
  hub.save_onnx(model, inputs, path, options)
  local read = hub.load(path)
  if type(model) == "table" then model:eval() end
  local function run(...)
    if options.call then return options.call(model, ...) end
    return model(...)
  end
  local want, got = { ty.no_grad(run, table.unpack(others)) }, { ty.no_grad(read, table.unpack(others)) }
  if keep then keep_files(name, others, want) end
  for i, w in ipairs(want) do
    check.equal(got[i].dtype, w.dtype, name)
    check.equal(got[i].shape, w.shape, name)
    check.close(got[i]:to("f64"):reshape(-1):tolist(), w:to("f64"):reshape(-1):tolist(), limit or 2e-5, name)
  end
  return read
end

check.test("networks", function()
  local mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
  local read = round_trip("mlp", mlp, ty.randn(3, 4), { ty.randn(3, 4) })
  for name, p in mlp:named_parameters() do
    check.equal(read:get(name):tolist(), p:tolist(), name)
  end
  round_trip("resnet", models.ResNet(), ty.randn(1, 3, 32, 32), { ty.randn(1, 3, 32, 32) }, nil, 1e-4)
  round_trip("vit", models.ViTForImageClassification { image_size = 32, patch_size = 8, hidden_size = 32,
    intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, num_labels = 10 }, ty.randn(2, 3, 32, 32),
    { ty.randn(2, 3, 32, 32) })
  for _, name in ipairs { "gpt2", "llama3", "bert", "gemma3", "falcon_new", "opt", "phi3", "modernbert", "t5" } do
    local model = llm.load(check.root .. "tests/fixtures/llm/" .. name, { dtype = "f32" })
    local call = name == "t5" and function(m, ids) return (m:encode(ids)) end or nil
    round_trip(name, model, ty.randint(3, 40, { 2, 9 }), { ty.randint(3, 40, { 2, 9 }) }, { call = call }, 1e-4)
  end
  round_trip("lstm", nn.LSTM(6, 8, { num_layers = 2, bidirectional = true }), ty.randn(5, 2, 6), { ty.randn(5, 2, 6) })
  round_trip("gru", nn.GRU(6, 8), ty.randn(5, 2, 6), { ty.randn(5, 2, 6) })
  round_trip("convolutions", nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1, stride = 2 }), nn.GroupNorm(4, 8),
    nn.SiLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, { stride = 2 }), nn.BatchNorm2d(4)),
    ty.randn(1, 3, 16, 16), { ty.randn(1, 3, 16, 16) })
end)

check.test("ops one by one", function()
  local function f(name, fn, ...)
    local inputs, others = { ... }, {}
    for i, t in ipairs(inputs) do others[i] = t:flip(t.ndim - 1) end
    local ok, problem = pcall(round_trip, name, fn, inputs, others)
    check.ok(ok, name .. ": " .. tostring(problem))
  end
  local x, y = ty.randn(2, 3, 4), ty.randn(2, 3, 4)
  local positive = x:abs() + 0.5
  for _, op in ipairs { "neg", "abs", "sign", "square", "exp", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh",
    "asinh", "tanh", "erf", "erfc", "sigmoid", "log_sigmoid", "relu", "leaky_relu", "elu", "gelu", "silu", "mish",
    "softplus", "hardtanh", "floor", "ceil", "round", "trunc", "isnan", "isinf", "isfinite", "logical_not", "exp2" } do
    f(op, function(t) return ty[op](t) end, x * 3)
  end
  for _, op in ipairs { "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "acosh" } do
    f(op, function(t) return ty[op](t) end, positive + 0.5)
  end
  for _, op in ipairs { "add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge",
    "logaddexp", "logical_and", "logical_or", "logical_xor", "remainder", "fmod", "floor_div" } do
    f(op, function(a, b) return ty[op](a, b) end, x, y)
    f(op .. " of a number", function(a) return ty[op](a, 2) end, x)
    if not op:find "log" then
      f(op .. " of integers", function(a, b) return ty[op](a, b) end, ty.randint(-9, 9, { 12 }), ty.arange(1, 13))
    end
  end
  f("a number first", function(a) return 1 - a, 2 / a, 2 ^ a end, positive)
  f("other dtypes", function(a, i) return a + i, i / 2, i * 0.5, a:gt(i) end, x, ty.randint(0, 5, { 2, 3, 4 }))
  f("pow", function(a) return a ^ 2.5, a ^ a end, positive)
  f("where", function(a, b)
    return ty.where(a:gt(b), a, 0), a:masked_fill(b:lt(0), -1), a:clamp(-0.5),
      a:clamp(0, 1)
  end, x, y)
  f("casts", function(a) return a:to "i64", a:to "bool", a:to "f16", a:to "f64" end, x * 5)
  f("reductions", function(a)
    return a:sum(), a:sum { 1 }, a:mean({ 0, 2 }, true), a:max { -1 }, a:min(), a:prod { 1 }, a:logsumexp { 2 },
      a:norm(), a:norm(1, { 1 }), a:var { 1 }, a:std({ 0, 1 }, 0), a:argmax { 1 }, a:argmin(), a:gt(0):any { 1 },
      a:gt(0):all()
  end, x)
  f("shapes", function(a)
    return a:reshape(6, 4), a:transpose(0, 2), a:permute(1, 2, 0), a:unsqueeze(1):expand(2, 5, 3, 4), a:flatten(1),
      a:slice(2, 1, 4, 2), a:select(1, -1), a:narrow(0, 1, 1), a["0:1, :, -2:"], a:flip { 0, 2 }, a:roll({ 1 }, { 2 }),
      a:tile(2, 1, 2), ty.concat({ a, a * 2 }, 1), ty.stack({ a, a * 2 }, 0), a:pad { 1, 2 },
      a:rearrange "a b c -> c (a b)",
      a:pad({ 1, 2 }, "reflect"), a:pad({ 1, 2, 1, 1 }, "replicate"), a:pad({ 3, 3 }, "circular"), a:tril(), a:triu(1),
      a:cumsum(1), a:cumsum(2, true), a:softmax(1), a:log_softmax(2)
  end, x)
  f("positions", function(a, i)
    return a:index_select(1, i), a:gather(1, i:reshape(1, 3, 1):expand(2, 3, 4)), ty.embedding(a:select(0, 0), i),
      a:scatter(1, i:reshape(1, 3, 1):expand(2, 3, 4), 7), ty.one_hot(i, 4), a:topk(2, 2), a:sort(1), a:argsort(2),
      a:index_add(1, i, a), a:scatter_add(1, i:reshape(1, 3, 1):expand(2, 3, 4):contiguous(), a)
  end, x, ty.tensor({ 2, 0, 1 }, { dtype = "i64" }))
  f("products", function(a, b)
    return ty.matmul(a, b:transpose(1, 2)), ty.einsum("bij,bkj->bik", { a, b }), ty.linear(a, b:select(0, 0)),
      ty.glu(a), ty.glu(a, b, "gelu")
  end, x, y)
  local image = ty.randn(2, 4, 6, 6)
  f("windows", function(a)
    return ty.max_pool2d(a, 2), ty.max_pool2d(a, 3, 2, 1), ty.avg_pool2d(a, 3, 2, 1), ty.avg_pool2d(a, 3, 1, 1, false),
      ty.adaptive_avg_pool2d(a, { 3, 2 }), ty.adaptive_avg_pool2d(a, { 1, 1 }), ty.adaptive_max_pool2d(a, { 2, 2 }),
      ty.interpolate(a, { 12, 12 }), ty.interpolate(a, { 9, 4 }, 0, "bilinear"),
      ty.interpolate(a, { 9, 12 }, 0, "bilinear", true), ty.interpolate(a, { 12, 8 }, 0, "bicubic"),
      ty.max_pool1d(a:select(3, 0), 2), ty.avg_pool1d(a:select(3, 0), 2), ty.pixel_shuffle(a, 2),
      ty.pixel_unshuffle(a, 3), ty.pixel_shuffle(a:select(0, 0), 2), ty.fold(a:reshape(2, 24, 6), { 6, 4 }, { 2, 2 },
        { stride = 2 }), ty.fold(a:reshape(2, 24, 6), { 3, 4 }, { 2, 2 })
  end, image)
  f("normalisations", function(a)
    return ty.layer_norm(a, { 6 }), ty.rms_norm(a, { 6 }), ty.group_norm(a, 2), ty.group_norm(a, 4, nil, nil, 1e-5,
      "silu")
  end, image)
  local q, k = ty.randn(2, 4, 3, 8), ty.randn(2, 2, 5, 8)
  f("attention", function(a, b)
    local mask = ty.tensor { { 1, 1, 0, 1, 1 }, { 1, 0, 1, 1, 1 }, { 1, 1, 1, 1, 0 } }
    return ty.scaled_dot_product_attention(a, b, b * 2), ty.scaled_dot_product_attention(a, b, b, { causal = true }),
      ty.scaled_dot_product_attention(a, b, b, { causal = true, corner = "upper_left", scale = 0.3 }),
      ty.scaled_dot_product_attention(a, b, b, { window = 1, causal = true, sinks = 1 }),
      ty.scaled_dot_product_attention(a, b, b, { window = 1 }),
      ty.scaled_dot_product_attention(a, b, b, { mask = mask:ne(0), softcap = 5 }),
      ty.scaled_dot_product_attention(a, b, b, { mask = mask:to "f32" })
  end, q, k)
  local angles = ty.randn(3, 3)
  f("rotary", function(a)
    return ty.rotary(a, angles:cos(), angles:sin()), ty.rotary(a, angles:cos(), angles:sin(), true)
  end, q)
  f("in place", function(a)
    local t = a * 2
    t:add_(1):mul_(a)
    return t
  end, x)
  f("a constant", function(a) return a + ty.arange(4):to "f32", ty.zeros_like(a) end, x)
end)

check.test("names, several inputs and outputs, external weights, modes", function()
  local model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Dropout(0.5))
  model:train()
  hub.save_onnx(model, ty.randn(3, 40), path, { input_names = { "left" }, output_names = { "right" }, external = true })
  check.equal(model.training, true)
  check.equal(ty.io.stat(path .. ".data").size >= 6400, true)
  local read = hub.load(path)
  check.equal(read.inputs, { { name = "left", dtype = "f32", shape = { 3, 40 } } })
  check.equal(read.outputs, { { name = "right", dtype = "f32", shape = { 3, 40 } } })
  check.equal(read:get("0.weight"):tolist(), model:get("0.weight"):tolist())
  hub.save_onnx(function(a, b) return a + b, 3, a - b end, { ty.randn(2), ty.randn(2) }, path)
  check.equal(#hub.load(path).inputs, 2)
  check.equal(#hub.load(path).outputs, 2)
end)

check.test("what cannot be written", function()
  local x = ty.randn(4, 4)
  local function refuse(text, fn, inputs, options)
    check.fails(function() hub.save_onnx(fn, inputs or x, scratch.file "no.onnx", options) end, text)
    check.ok(not ty.io.exists(scratch.file "no.onnx"), "no file is left")
  end
  refuse("ops that cannot be written: erfinv %(2%), slogdet %(1%)", function(t)
    return ty.slogdet(t) + t:erfinv() + (t * 2):erfinv()
  end)
  refuse("add in place", function(t)
    local y = t * 2
    y:select(0, 0):add_(1)
    return y
  end)
  refuse("interpolate %(area%)", function(t) return ty.interpolate(t, { 2, 2 }, 0, "area") end, ty.randn(1, 1, 4, 4))
  refuse("for other inputs, result 1 differs", function(t)
    return t.shape and t:select(0, 0):select(0, 0):item() > 0 and t + 1 or t - 1
  end, ty.tensor { { 1, -1 } })
  refuse("result 1 of the model: expected a tensor, got a table", function(t) return { t } end)
  refuse("results that are tensors, got none", function() return 3 end)
  refuse("model: expected a module or a function, got 3", 3)
  refuse("inputs: expected a tensor or a list of tensors, got 3 as element 1", function(t) return t end, { 3 })
  refuse("inputs: expected at least one", function(t) return t end, {})
  refuse("input_names: expected a list of 1 names", function(t) return t end, x, { input_names = { "a", "b" } })
  refuse("output_names: expected a list of 1 names", function(t) return t end, x, { output_names = "a" })
  refuse("no option .colour.", function(t) return t end, x, { colour = 3 })
  refuse("hub.save_onnx: .*no such", function() error "no such" end)
end)

scratch.clean()
check.finish()
