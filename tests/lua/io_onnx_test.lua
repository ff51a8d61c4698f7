-- ONNX files as tables: round trips, every element type, weights in other files, and hostile files: every one is one
-- clear error.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local file, slurp, spit = scratch.file, scratch.slurp, scratch.spit
local io_ = ty.io

do -- a build without libprotobuf-c says so, and that is all
  local ok, problem = pcall(io_.load_onnx, file "none.onnx")
  if not ok and tostring(problem):find "no libprotobuf%-c" then
    check.test("without libprotobuf-c", function()
      check.fails(function() io_.save_onnx(file "x.onnx", {}) end, "protobuf-c-compiler")
    end)
    scratch.clean()
    check.finish()
    return
  end
end

-- ---- the wire format, by hand ----

local function varint(n)
  local bytes = {}
  repeat
    local low = n & 127
    n = n >> 7
    bytes[#bytes + 1] = string.char(n ~= 0 and low | 128 or low)
  until n == 0
  return table.concat(bytes)
end
local function int(field, n) return varint(field << 3) .. varint(n) end
local function bytes(field, text) return varint(field << 3 | 2) .. varint(#text) .. text end

local function tensor(dims, kind, data, name)
  local text = ""
  for _, size in ipairs(dims) do text = text .. int(1, size) end
  return text .. int(2, kind) .. (data or "") .. bytes(8, name or "w")
end
local function raw(text) return bytes(9, text) end
-- A model with one initializer, or with a graph of these bytes.
local function graph_model(graph) return int(1, 8) .. bytes(7, graph) .. bytes(8, bytes(1, "") .. int(2, 17)) end
local function model_with(t) return graph_model(bytes(5, t)) end
local function load(text) return io_.load_onnx(spit("hostile.onnx", text)) end
local function read(t) return load(model_with(t)).graph.initializers[1].tensor end

check.test("every element type, as bytes and as numbers", function()
  local cases = {
    { 1, "f32", string.pack("<ff", 1.5, -2), { 1.5, -2 } },
    { 2, "u8", "\1\255", { 1, 255 } },
    { 3, "i8", "\1\255", { 1, -1 } },
    { 4, "i32", "\1\0\255\255", { 1, 65535 } },
    { 5, "i16", "\1\0\255\255", { 1, -1 } },
    { 6, "i32", string.pack("<i4i4", 7, -7), { 7, -7 } },
    { 7, "i64", string.pack("<i8i8", 1 << 40, -7), { 1 << 40, -7 } },
    { 9, "bool", "\0\7", { false, true } },
    { 10, "f16", "\0\x3c\0\xc0", { 1, -2 } },
    { 11, "f64", string.pack("<dd", 0.1, -2), { 0.1, -2 } },
    { 12, "i64", "\255\255\255\255\1\0\0\0", { 4294967295, 1 } },
    { 13, "i64", string.pack("<i8i8", 1 << 62, 3), { 1 << 62, 3 } },
    { 16, "bf16", "\x80\x3f\0\xc0", { 1, -2 } },
    { 21, "u8", "\xf1", { 1, 15 } },
    { 22, "i8", "\xf1", { 1, -1 } },
  }
  for _, case in ipairs(cases) do
    local t = read(tensor({ 2 }, case[1], raw(case[3])))
    check.equal(t.dtype, case[2])
    check.equal(t:tolist(), case[4], "raw " .. case[1])
  end
  local function packed(field, ...)
    local text = ""
    for _, n in ipairs { ... } do text = text .. varint(n) end
    return bytes(field, text)
  end
  check.equal(read(tensor({ 2 }, 7, packed(7, 5, -5))):tolist(), { 5, -5 })
  check.equal(read(tensor({ 2 }, 6, packed(5, 5, -5))):tolist(), { 5, -5 })
  check.equal(read(tensor({ 3 }, 2, packed(5, 5, 0, 255))):tolist(), { 5, 0, 255 })
  check.equal(read(tensor({ 2 }, 10, packed(5, 0x3c00, 0xc000))):tolist(), { 1, -2 })
  check.equal(read(tensor({ 2 }, 12, packed(11, 5, 4294967295))):tolist(), { 5, 4294967295 })
  check.equal(read(tensor({ 2 }, 9, packed(5, 1, 0))):tolist(), { true, false })
  check.equal(read(tensor({ 3 }, 22, packed(5, 0x8f, 0x07))):tolist(), { -1, -8, 7 })
  check.equal(read(tensor({ 2 }, 1, bytes(4, string.pack("<ff", 1, 2)))):tolist(), { 1, 2 })
  check.equal(read(tensor({ 1 }, 11, bytes(10, string.pack("<d", 0.25)))):tolist(), { 0.25 })
  check.equal(read(tensor({}, 1, raw(string.pack("<f", 3)))):item(), 3)
  check.equal(read(tensor({ 0, 4 }, 1)).shape, { 0, 4 })
end)

local function sample()
  return {
    ir_version = 9, producer_name = "test", opset = { [""] = 20 }, metadata = { key = "value" },
    graph = {
      name = "g",
      inputs = { { name = "x", dtype = "f32", shape = { "batch", 3, false } }, { name = "y", dtype = "i64" } },
      outputs = { { name = "z", dtype = "f16", shape = {} } },
      initializers = { { name = "w", tensor = ty.randn(40, 50) }, { name = "i", tensor = ty.arange(3) },
        { name = "b", tensor = ty.tensor { 1, 0 }:ne(0) }, { name = "e", tensor = ty.zeros(0, 2) } },
      nodes = {
        { op = "Add", name = "first", domain = "somewhere", inputs = { "x", "", "w" }, outputs = { "t" }, attributes = {
          int = -3, float = 0.5, text = "a\0b", ints = { 1, 1 << 40 }, floats = { 0.5, 1 }, texts = { "p", "" },
            none = {}, tensor = ty.tensor { { 1, 2 }, { 3, 4 } } } },
        { op = "If", inputs = { "t" }, outputs = { "z" }, attributes = { then_branch = { name = "inner", inputs = {},
          outputs = { { name = "o" } }, initializers = {}, nodes = { { op = "Identity", inputs = { "t" },
          outputs = { "o" } } } } } },
      },
    },
  }
end

local function same(a, b, where)
  if ty.is_tensor(a) then
    check.equal(a.dtype, b.dtype, where)
    check.equal(a.shape, b.shape, where)
    check.ok(io_.to_bytes(a) == io_.to_bytes(b), where)
  elseif type(a) == "table" then
    for key, value in pairs(a) do same(value, b[key], where .. "." .. tostring(key)) end
  else
    check.equal(b, a, where)
  end
end

check.test("a table becomes a file and the same table again", function()
  local want = sample()
  io_.save_onnx(file "a.onnx", want)
  local got = io_.load_onnx(file "a.onnx")
  same(want, got, "model")
  check.equal(math.type(got.graph.nodes[1].attributes.floats[2]), "float")
  io_.save_onnx(file "b.onnx", got)
  check.ok(slurp(file "a.onnx") == slurp(file "b.onnx"), "the same table gives the same file")
end)

check.test("weights in a file beside", function()
  local want = sample()
  io_.save_onnx(file "c.onnx", want, { external = true })
  check.equal(io_.stat(file "c.onnx.data").size, 8000)
  same(want, io_.load_onnx(file "c.onnx"), "model")
  local text = slurp(file "c.onnx")
  local function with(location, extra)
    return model_with(tensor({ 4 }, 1, int(14, 1) .. bytes(13, bytes(1, "location") .. bytes(2, location))
      .. (extra or "")))
  end
  local function number(key, value) return bytes(13, bytes(1, key) .. bytes(2, value)) end
  spit("weights", string.pack("<ffffff", 9, 8, 1, 2, 3, 4))
  check.equal(load(with("weights", number("offset", "8"))).graph.initializers[1].tensor:tolist(), { 1, 2, 3, 4 })
  io_.mkdir(file "deep")
  spit("deep/weights", string.pack("<ffff", 1, 2, 3, 4))
  check.equal(load(with "deep/weights").graph.initializers[1].tensor:tolist(), { 1, 2, 3, 4 })
  for _, name in ipairs { "../weights", "/etc/passwd", "deep/../../weights", "..", "deep/..", "a\\b" } do
    check.fails(function() load(with(name)) end, "which is not in the model's folder")
  end
  check.fails(function() load(with "nowhere") end, "cannot open")
  check.fails(function() load(with("weights", number("offset", "12"))) end, "needs 16 bytes; the model says 16 from 12")
  check.fails(function() load(with("weights", number("offset", "-4"))) end, "offset: expected a count of bytes")
  check.fails(function() load(with("weights", number("offset", "99999999999999999999"))) end, "a count of bytes")
  check.fails(function() load(with("weights", number("length", "8"))) end, "the model says 8 from 0")
  check.fails(function() load(model_with(tensor({ 4 }, 1, int(14, 1)))) end, "in another file, which is not named")
  check.fails(function() load(model_with(tensor({ 4 }, 1, int(14, 7)))) end, "data_location 7")
  os.remove(file "c.onnx.data")
  check.fails(function() io_.load_onnx(spit("c2.onnx", text)) end, "cannot open")
end)

check.test("hostile files", function()
  local function refuse(t, text) check.fails(function() read(t) end, text) end
  refuse(tensor({ 2 }, 1, raw "1234567"), "which takes 8 bytes, but there are 7")
  refuse(tensor({ 2 }, 1), "which takes 2 numbers, but there are 0")
  refuse(tensor({ 2 }, 7, bytes(7, "\1")), "which takes 2 numbers, but there are 1")
  refuse(tensor({ -1 }, 1), "cannot be")
  refuse(tensor({ 1 << 40, 1 << 40 }, 1), "cannot be")
  refuse(tensor({ 1 << 62 }, 1), "cannot be")
  refuse(tensor({ 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 1, raw "1234"), "9 dimensions")
  refuse(tensor({ 1 }, 8, bytes(6, "text")), "of string, which Tycho does not have")
  refuse(tensor({ 1 }, 14, raw "12345678"), "of complex64, which Tycho does not have")
  refuse(tensor({ 1 }, 17, raw "1"), "of f8e4m3fn, which Tycho does not have")
  refuse(tensor({ 1 }, 99, raw "1"), "of the unknown type 99")
  refuse(tensor({ 1 }, 13, raw(("\255"):rep(8))), "above 2^63")
  refuse(bytes(3, "\8\0") .. tensor({ 1 }, 1, raw "1234"), "a segment")
  check.fails(function() load "" end, "it is empty")
  check.fails(function() load "this is no such file" end, "it is cut short, or no ONNX file")
  check.fails(function() load(int(1, 8)) end, "there is no graph in it")
  check.fails(function() load(graph_model "" .. bytes(25, "")) end, "functions, which are not read")
  check.fails(function() load(graph_model(bytes(15, ""))) end, "sparse initializers")
  check.fails(function() load(graph_model(bytes(1, bytes(1, "x")))) end, "has no operator")
  check.fails(function() load(graph_model(bytes(11, ""))) end, "an input has no name")
  check.fails(function() load(model_with(tensor({}, 1, raw "1234", ""))) end, "an initializer has no name")
  check.fails(function() io_.load_onnx(file "nowhere.onnx") end, "cannot open")
  check.fails(function() load(graph_model(bytes(1, bytes(4, "Add") .. bytes(5, bytes(1, "a") .. int(20, 13))))) end,
    'attribute "a" of a Add has the type 13, which is not read')
  local nested = bytes(1, bytes(4, "If"))
  for _ = 1, 40 do nested = bytes(1, bytes(4, "If") .. bytes(5, bytes(1, "b") .. bytes(6, nested) .. int(20, 5))) end
  check.fails(function() load(graph_model(nested)) end, "graphs in graphs")
  local whole = slurp(file "a.onnx")
  for size = 0, #whole - 1, 97 do
    local ok, problem = pcall(load, whole:sub(1, size))
    check.ok(ok or tostring(problem):find "onnx", "cut at " .. size)
  end
  scratch.flips(whole:sub(-1500), 500, function(tail)
    local ok, problem = pcall(load, whole:sub(1, -1501) .. tail)
    check.ok(ok or type(problem) == "string")
  end)
end)

check.test("what cannot be written", function()
  local function with(change)
    local model = sample()
    change(model, model.graph)
    return function() io_.save_onnx(file "wrong.onnx", model) end
  end
  check.fails(with(function(m) m.ir_version = nil end), "ir_version: expected an integer")
  check.fails(with(function(m) m.graph = nil end), "graph: expected a table")
  check.fails(with(function(_, g) g.nodes[1].op = 3 end), "op: expected a string")
  check.fails(with(function(_, g) g.nodes[1].inputs = { 1 } end), "inputs: expected a list of strings")
  check.fails(with(function(_, g) g.nodes[1].attributes.int = print end), "int: expected a number")
  check.fails(with(function(_, g) g.nodes[1].attributes.int = { 1, "a" } end), "int: expected a list of numbers")
  check.fails(with(function(_, g) g.initializers[1].tensor = 3 end), "w: expected a tensor")
  check.fails(with(function(_, g) g.initializers[1].tensor = ty.randn(2, 64):to "q8_0" end), "block%-quantized")
  check.fails(with(function(_, g) g.inputs[1].dtype = "q8_0" end), "dtype: expected one that ONNX has")
  check.fails(with(function(_, g) g.inputs[1].shape = { print } end), "shape: expected sizes")
  check.fails(with(function(_, g) g.nodes[2].attributes.then_branch = g end), "more than 16 deep")
  check.ok(not io_.exists(file "wrong.onnx"))
end)

scratch.clean()
check.finish()
