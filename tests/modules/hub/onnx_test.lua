-- ONNX files as models: networks that PyTorch has exported give its numbers and train; wrong files and wrong inputs.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"

local root = check.root .. "tests/fixtures/onnx/"

if not pcall(ty.io.load_onnx, root .. "lstm.onnx") then
  check.test("without libprotobuf-c", function()
    check.fails(function() hub.load(root .. "lstm.onnx") end, "no libprotobuf%-c")
  end)
  check.finish()
  return
end

local function inputs_of(data)
  local list = {}
  while data["in" .. #list] do list[#list + 1] = data["in" .. #list] end
  return list
end

local function far(a, b) return (a:to "f32" - b:to "f32"):abs():max():item() / b:abs():max():item() end

-- A file with one graph.
local function written(graph, opset)
  graph.initializers = graph.initializers or {}
  ty.io.save_onnx(scratch.file "model.onnx", { ir_version = 8, opset = { [""] = opset or 17 }, graph = graph })
  return scratch.file "model.onnx"
end

local function node(op, inputs, outputs, attributes)
  return { op = op, inputs = inputs, outputs = outputs, attributes = attributes }
end

local x23 = { name = "x", dtype = "f32", shape = { 2, 3 } }

check.test("PyTorch's numbers, and gradients for all parameters", function()
  for name, count in pairs { convnet = 8, gpt2 = 28, lstm = 3 } do
    local model, data = hub.load(root .. name .. ".onnx"), ty.io.load(root .. name .. ".npz")
    local inputs = inputs_of(data)
    check.equal(model.training, false)
    check.ok(far(model(table.unpack(inputs)), data.out0) < 1e-5, name)
    local by_name = {}
    for i, input in ipairs(model.inputs) do by_name[input.name] = inputs[i] end
    check.ok(far(model(by_name), data.out0) < 1e-5, name .. " by name")
    model(table.unpack(inputs)):square():sum():backward()
    local n = 0
    for parameter, p in model:named_parameters() do
      n = n + 1
      check.ok(p.grad and p.grad:isfinite():all():item(), name .. " " .. parameter)
    end
    check.ok(n >= count, ("%s has %d parameters"):format(name, n))
  end
end)

check.test("names, shapes, state, conversion, copies, compile", function()
  local model, data = hub.load(root .. "convnet.onnx"), ty.io.load(root .. "convnet.npz")
  check.equal(model.inputs, { { name = "input", dtype = "f32", shape = { "batch", 3, 16, 16 } } })
  check.equal(model.outputs[1].name, "output")
  check.equal(model.opset, 13)
  check.equal(model:get("head.weight").shape, { 5, 8 })
  check.equal(model:state_dict()["stem.bias"].shape, { 8 })
  local want = model(data.in0)
  local copy = model:clone()
  model:get("head.weight"):detach():fill_(0)
  check.ok(far(model(data.in0), want) > 0.01, "the weights are the module's own")
  check.ok(far(copy(data.in0), want) < 1e-6, "a copy has its own")
  model:load_state_dict(copy:state_dict())
  check.ok(far(model(data.in0), want) < 1e-6, "loaded again")
  check.equal(model(data.in0["0:1"]).shape, { 1, 5 })
  check.ok(far(copy:to "bf16"(data.in0:to "bf16"), want) < 0.05, "bf16")
  check.ok(far(hub.load(root .. "convnet.onnx", { dtype = "f64" })(data.in0:to "f64"):to "f32", want) < 1e-5, "f64")
  local compiled = ty.compile(function(x) return model(x) end)
  for _ = 1, 3 do check.ok(far(ty.no_grad(compiled, data.in0), want) < 1e-6, "compiled") end
  check.ok(tostring(model):find "opset 13", "printed")
  ty.scope(function() check.ok(far(model(data.in0), want) < 1e-6, "in a scope") end)
  check.ok(far(model(data.in0), want) < 1e-6, "after it")
end)

check.test("it trains", function()
  local model, data = hub.load(root .. "convnet.onnx"), ty.io.load(root .. "convnet.npz")
  local opt, target = ty.optim.Adam(model:parameters(), { lr = 0.01 }), ty.tensor { 1, 4 }
  local first, last
  for _ = 1, 40 do
    local loss = -(model(data.in0) + 1e-6):log():gather(1, target:unsqueeze(1)):mean()
    first, last = first or loss:item(), loss:item()
    opt:step(loss)
  end
  check.ok(last < 0.2 * first, ("loss %g to %g"):format(first, last))
end)

check.test("batch normalisation and dropout know training mode", function()
  local path = written { inputs = { { name = "x", dtype = "f32", shape = { 4, 2, 3 } } }, outputs = { { name = "y" } },
    initializers = { { name = "scale", tensor = ty.ones(2) }, { name = "bias", tensor = ty.zeros(2) },
      { name = "mean", tensor = ty.zeros(2) }, { name = "var", tensor = ty.ones(2) },
      { name = "p", tensor = ty.tensor(0.5) } },
    nodes = { node("BatchNormalization", { "x", "scale", "bias", "mean", "var" }, { "n" }),
      node("Dropout", { "n", "p" }, { "y" }) } }
  local model = hub.load(path)
  local names = {}
  for name in model:named_parameters() do names[#names + 1] = name end
  check.equal(names, { "scale", "bias" }, "statistics and numbers are buffers")
  local x = ty.randn(4, 2, 3) + 5
  check.ok(far(model(x), x) < 1e-4, "as it says")
  model:train()
  local y = model(x)
  check.ok(y:eq(0):any():item(), "dropped")
  check.ok(model:get("mean"):mean():item() > 0.3, "running statistics move")
end)

check.test("control flow, what is constant, names that come twice", function()
  local body = { inputs = { { name = "i" }, { name = "c" }, { name = "sum" } }, outputs = { { name = "c2" },
    { name = "next" }, { name = "next" } }, initializers = {}, nodes = { node("Identity", { "c" }, { "c2" }),
    node("Add", { "sum", "x" }, { "next" }) } }
  local path = written { inputs = { x23, { name = "n", dtype = "i64", shape = {} } }, outputs = { { name = "last" },
    { name = "all" } }, initializers = { { name = "zero", tensor = ty.zeros(2, 3) } },
    nodes = { node("Loop", { "n", "", "zero" }, { "last", "all" }, { body = body }) } }
  local model = hub.load(path)
  local x = ty.randn(2, 3):requires_grad_()
  local last, all = model(x, ty.tensor(3, { dtype = "i64" }))
  check.ok(far(last, x * 3) < 1e-6)
  check.equal(all.shape, { 3, 2, 3 })
  last:sum():backward()
  check.equal(x.grad:tolist(), { { 3, 3, 3 }, { 3, 3, 3 } })

  local branch = function(op) return { inputs = {}, outputs = { { name = "r" } }, initializers = {},
    nodes = { node(op, { "h" }, { "r" }) } } end
  model = hub.load(written { inputs = { x23, { name = "flag", dtype = "bool", shape = {} } },
    outputs = { { name = "y" } },
    nodes = { node("Neg", { "x" }, { "h" }), node("If", { "flag" }, { "y" }, { then_branch = branch "Relu",
      else_branch = branch "Identity" }) } })
  x = ty.randn(2, 3)
  check.ok(far(model(x, ty.tensor(1):ne(0)), (-x):relu()) < 1e-6)
  check.ok(far(model(x, ty.tensor(0):ne(0)), -x) < 1e-6)

  model = hub.load(written { inputs = { x23 }, outputs = { { name = "y" } }, initializers = { { name = "k",
    tensor = ty.tensor { 3, 2 } } }, nodes = { node("Mul", { "k", "k" }, { "kk" }), node("Div", { "kk", "k" }, { "s" }),
    node("Reshape", { "x", "s" }, { "y" }) } })
  check.equal(#model.plan.steps, 1, "the shape is computed once")
  check.equal(model(x).shape, { 3, 2 })
  check.equal(next(model:state_dict()), nil)
end)

check.test("intermediates go when they have been used last", function()
  local nodes = {}
  for i = 1, 30 do
    nodes[#nodes + 1] = node("Neg", { i == 1 and "x" or "t" .. i - 1 }, { "n" .. i })
    nodes[#nodes + 1] = node("Reshape", { "n" .. i, "s" }, { "r" .. i })
    nodes[#nodes + 1] = node("Identity", { "r" .. i }, { "t" .. i })
  end
  local model = hub.load(written { inputs = { { name = "x", dtype = "f32", shape = { 512, 512 } } },
    outputs = { { name = "t30" }, { name = "t29" } }, nodes = nodes,
    initializers = { { name = "s", tensor = ty.tensor { 512, 512 } } } })
  local x = ty.randn(512, 512)
  for _ = 1, 2 do
    collectgarbage()
    ty.memory.reset_peak()
    local before = ty.memory.stats().live
    local last, one = ty.no_grad(model, x)
    check.ok(ty.memory.stats().peak - before < 5 * 2 ^ 20, ("%d bytes at most"):format(ty.memory.stats().peak - before))
    check.ok(far(last, x) < 1e-6 and far(one, -x) < 1e-6)
  end
end)

check.test("names of parameters that modules cannot have", function()
  local names = { "forward", "a.b", "a", "_parameters", "inputs", "x.to.y", "0.weight", "..", "p q/r:s" }
  local graph = { inputs = { x23 }, outputs = { { name = "y" } }, initializers = {}, nodes = {} }
  local at = "x"
  for i, name in ipairs(names) do
    graph.initializers[i] = { name = name, tensor = ty.full({ 2, 3 }, i + 0.0) }
    graph.nodes[i] = node("Add", { at, name }, { i == #names and "y" or "t" .. i })
    at = "t" .. i
  end
  local model = hub.load(written(graph))
  local y = model(ty.zeros(2, 3))
  check.equal(y:tolist()[1][1], 45)
  local n, seen = 0, {}
  for name in pairs(model:state_dict()) do
    n = n + 1
    seen[name] = true
  end
  check.equal(n, 9)
  check.ok(seen["0.weight"] and seen["a.b"] and seen["p q/r:s"])
  y:sum():backward()
  model:train():eval():zero_grad()
end)

check.test("wrong files", function()
  local function graph(nodes, more)
    local g = { inputs = { x23 }, outputs = { { name = "y" } }, nodes = nodes }
    for key, value in pairs(more or {}) do g[key] = value end
    return g
  end
  local function refuse(text, g, opset)
    local path = written(g, opset)
    check.fails(function() hub.load(path) end, text)
  end
  check.fails(function() hub.load(scratch.file "nowhere.onnx") end, "nowhere.onnx is not there")
  check.fails(function() hub.load(scratch.spit("no.onnx", "not a protocol buffer")) end, "no ONNX file")
  local whole = scratch.slurp(root .. "gpt2.onnx")
  check.fails(function() hub.load(scratch.spit("cut.onnx", whole:sub(1, 9000))) end, "cut short")
  refuse("operators that are not read: Frobnicate %(2%), com.microsoft.Gelu %(1%)", graph {
    node("Frobnicate", { "x" }, { "a" }), node("Frobnicate", { "a" }, { "b" }),
    { op = "Gelu", domain = "com.microsoft", inputs = { "b" }, outputs = { "y" } } })
  refuse("node 1 %(Add%): its input b is computed after it", graph { node("Add", { "x", "b" }, { "a" }),
    node("Add", { "a", "x" }, { "b" }), node("Add", { "a", "b" }, { "y" }) })
  refuse("node 1 %(Add%): its input q is computed nowhere", graph { node("Add", { "x", "q" }, { "y" }) })
  refuse("y is computed twice", graph { node("Relu", { "x" }, { "y" }), node("Relu", { "x" }, { "y" }) })
  refuse("the output y is computed nowhere", graph { node("Relu", { "x" }, { "z" }) })
  refuse("two initializers w", graph({ node("Relu", { "w" }, { "y" }) }, { initializers = {
    { name = "w", tensor = ty.ones(2) }, { name = "w", tensor = ty.ones(2) } } }))
  refuse("it is of opset 6, 7 to 25 are read", graph { node("Relu", { "x" }, { "y" }) }, 6)
  refuse("it is of opset 99", graph { node("Relu", { "x" }, { "y" }) }, 99)
  ty.io.save_onnx(scratch.file "none.onnx", { ir_version = 8, graph = graph { node("Relu", { "x" }, { "y" }) } })
  check.fails(function() hub.load(scratch.file "none.onnx") end, "which opset it is of")
  check.fails(function() hub.load(root .. "lstm.onnx", { device = "mars" }) end, "mars")
end)

check.test("operators that lack inputs or attributes", function()
  local function fails(text, op, inputs, attributes, initializers)
    local ok, model = pcall(hub.load, written { inputs = { x23 }, outputs = { { name = "y" } },
      initializers = initializers, nodes = { node(op, inputs, { "y" }, attributes) } })
    local _, problem = pcall(ok and model or error, ok and ty.ones(2, 3) or model)
    check.ok(tostring(problem):find(text) and not tostring(problem):find "attempt to", op .. ": " .. tostring(problem))
  end
  fails("node 1 %(Add%): add: y", "Add", { "x" })
  fails("node 1 %(Reshape%): its inputs or attributes are not what", "Reshape", { "x" })
  fails("node 1 %(Cast%): element type nil", "Cast", { "x" })
  fails("node 1 %(Concat%): its inputs or attributes", "Concat", { "x", "x" })
  fails("node 1 %(Softmax%): axis 7 is not one of 2 dimensions", "Softmax", { "x" }, { axis = 7 })
  fails("node 1 %(Split%): its inputs or attributes", "Split", { "x" }, { num_outputs = 0 })
  fails("node 1 %(Transpose%): permute", "Transpose", { "x" }, { perm = { 0, 0 } })
  fails("node 1 %(Conv%)", "Conv", { "x", "x" })
  fails("node 1 %(If%)", "If", { "x" })
  fails("node 1 %(ConstantOfShape%): .*memory", "ConstantOfShape", { "s" }, nil,
    { { name = "s", tensor = ty.tensor { 1 << 30, 1 << 14 } } })
end)

check.test("wrong inputs", function()
  local model = hub.load(written { inputs = { { name = "a", dtype = "f32", shape = { "n", 3 } },
    { name = "b", dtype = "f32", shape = { "n", 3 } } }, outputs = { { name = "y" } },
    nodes = { node("Add", { "a", "b" }, { "y" }) } })
  local x = ty.randn(2, 3)
  check.fails(function() model(x) end, "input b: expected .n, 3. f32, got nil")
  check.fails(function() model(x, x, x) end, "expected 2 inputs %(a, b%), got 3")
  check.fails(function() model(x, ty.randn(2, 4)) end, "input b: expected .n, 3. f32, got .2, 4. f32")
  check.fails(function() model(x, ty.randn(2, 3, 1)) end, "input b: expected .n, 3. f32, got .2, 3, 1. f32")
  check.fails(function() model(x, ty.randn(5, 3)) end, "with n = 2 as in another input")
  check.fails(function() model(x, x:to "i64") end, "input b: expected .n, 3. f32, got .2, 3. i64")
  check.fails(function() model(x, 3) end, "input b: expected a tensor, got 3")
  check.fails(function() model { a = x, b = x, c = x } end, "there is no input c; the inputs are a, b")
  check.fails(function() model { a = x } end, "input b: expected")
  check.equal(model { a = x, b = x }.shape, { 2, 3 })
  model = hub.load(written { inputs = { { name = "x", dtype = "f32" }, { name = "s", dtype = "i64" } }, outputs = {
    { name = "y" } }, nodes = { { op = "Reshape", name = "r", inputs = { "x", "s" }, outputs = { "y" } } } })
  check.fails(function() model(x, ty.tensor { 4, 4 }) end, "node r %(Reshape%): .*4, 4")
end)

scratch.clean()
check.finish()
