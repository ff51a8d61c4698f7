-- Files of tensors: safetensors, npy, npz, raw bytes. Round trips, files of the reference programs (tests/fixtures/io,
-- made by make_io.py), and hostile files: every one is one clear error.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local FIXTURES = check.root .. "tests/fixtures/io/"
local DTYPES = { "f64", "f32", "f16", "i64", "i32", "i16", "i8", "u8", "bool" }
local file, slurp, spit = scratch.file, scratch.slurp, scratch.spit

-- What make_io.py calls ramp(), nested like a tensor of that shape.
local function ramp(shape, dtype)
  local i = -1
  local function build(d)
    if d > #shape then
      i = i + 1
      local v = (i * 7 + 3) % 251
      if dtype == "bool" then return i % 3 == 0 end
      if dtype:sub(1, 1) == "i" then return v - 100 end
      if dtype:sub(1, 1) == "f" then return v / 8 end
      return v
    end
    local list = {}
    for k = 1, shape[d] do list[k] = build(d + 1) end
    return list
  end
  return build(1)
end

local function values(t) return #t.shape == 0 and t:item() or t:tolist() end

local function check_ramp(t, shape, dtype, what)
  check.equal(t.dtype, dtype, what .. " dtype")
  check.equal(t.shape, shape, what .. " shape")
  check.equal(values(t), ramp(shape, dtype), what)
end

local function tensors()
  local t = { scalar = ty.tensor(2.5), empty = ty.zeros { 3, 0, 2 }, ["a.b/c d é"] = ty.tensor { 1.5, -2 } }
  for _, dtype in ipairs(DTYPES) do t[dtype] = ty.tensor(ramp({ 2, 3, 4 }, dtype), { dtype = dtype }) end
  return t
end

local function check_same(got, want, what)
  for name, t in pairs(want) do
    if check.ok(got[name], what .. ": has " .. name) then
      check.equal(got[name].dtype, t.dtype, what .. " dtype of " .. name)
      check.equal(got[name].shape, t.shape, what .. " shape of " .. name)
      check.equal(values(got[name]), values(t), what .. " values of " .. name)
    end
  end
  for name in pairs(got) do check.ok(want[name], what .. ": nothing but what was saved, got " .. name) end
end

-- ---- safetensors ----

local function container(json, data) return string.pack("<s8", json) .. (data or "") end

local function load_bytes(bytes, options) return ty.io.load_safetensors(spit("hostile.safetensors", bytes), options) end

check.test("safetensors: a round trip of every dtype", function()
  local want = tensors()
  want.bf16 = ty.tensor({ 1.5, -2, 3e38 }, { dtype = "bf16" })
  local notes = { format = "pt", ["key\n\"x\""] = "välue\0end" }
  ty.io.save_safetensors(file "a.safetensors", want, notes)
  for _, mmap in ipairs { true, false } do
    local got, meta = ty.io.load_safetensors(file "a.safetensors", { mmap = mmap })
    check_same(got, want, "mmap " .. tostring(mmap))
    check.equal(meta, notes, "metadata")
  end
  check.equal(scratch.list(), { "a.safetensors" }, "no temporary file is left")
end)

check.test("safetensors: the file of the reference writer", function()
  local got, meta = ty.io.load_safetensors(FIXTURES .. "reference.safetensors")
  for _, dtype in ipairs(DTYPES) do check_ramp(got[dtype], { 2, 3, 4 }, dtype, dtype) end
  check_ramp(got.scalar, {}, "f32", "scalar")
  check_ramp(got.empty, { 0, 5 }, "f32", "empty")
  check_ramp(got["block.0.weight"], { 5, 3 }, "f32", "block.0.weight")
  check.equal(meta, { format = "np", note = 'é and "quotes"' }, "metadata")
end)

check.test("safetensors: what the writer promises", function()
  local t = { b = ty.zeros { 3 }, a = ty.ones { 2 }, z = ty.tensor({ 1 }, { dtype = "f64" }),
    c = ty.tensor({ 7 }, { dtype = "u8" }) }
  ty.io.save_safetensors(file "order.safetensors", t, { y = "1", x = "2" })
  local bytes = slurp(file "order.safetensors")
  local size = string.unpack("<I8", bytes)
  check.equal(size % 8, 0, "the header is padded")
  check.equal(#bytes, 8 + size + 8 + 8 + 12 + 1, "nothing after the tensors")
  local order = {}
  for name in bytes:sub(9, 8 + size):gmatch '"([^"]+)":{"dtype"' do order[#order + 1] = name end
  check.equal(order, { "z", "a", "b", "c" }, "wide first, then by name")
  check.ok(bytes:find('"__metadata__":{"x":"2","y":"1"}', 1, true), "metadata by key")
  ty.io.save_safetensors(file "again.safetensors", t, { x = "2", y = "1" })
  check.equal(slurp(file "again.safetensors"), bytes, "the same tensors give the same file")
  ty.io.save_safetensors(file "none.safetensors", {})
  check.equal(slurp(file "none.safetensors"), string.pack("<s8", "{}      "), "no tensors")
  check.equal(next((ty.io.load_safetensors(file "none.safetensors"))), nil, "no tensors read back")
end)

check.test("safetensors: views are written as they look, gradients do not matter", function()
  local x = ty.tensor({ { 1.0, 2.0, 3.0 }, { 4.0, 5.0, 6.0 } }):requires_grad_()
  ty.io.save_safetensors(file "view.safetensors", { t = x:transpose(0, 1), row = x[1] })
  local got = ty.io.load_safetensors(file "view.safetensors")
  check.equal(got.t:tolist(), { { 1.0, 4.0 }, { 2.0, 5.0 }, { 3.0, 6.0 } })
  check.equal(got.row:tolist(), { 4.0, 5.0, 6.0 })
end)

check.test("safetensors: loaded tensors may be written; a file may be replaced while it is loaded", function()
  local path = file "live.safetensors"
  ty.io.save_safetensors(path, { x = ty.ones { 1000 } })
  local x = ty.io.load_safetensors(path).x
  x:fill_(5)
  check.equal(ty.io.load_safetensors(path).x[3]:item(), 1.0, "the file is not touched")
  local y = ty.io.load_safetensors(path).x
  ty.io.save_safetensors(path, { x = ty.zeros { 10 } })
  check.equal(y[999]:item(), 1.0, "the old file lives on in memory")
  check.equal(ty.io.load_safetensors(path).x.shape, { 10 }, "the new one is there")
end)

check.test("safetensors: unaligned data, blanks before the header, unknown fields, strange bools", function()
  local data = string.pack("<ff", 1.5, -2)
  local x = load_bytes(container('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  ', data)).x
  check.equal(x:tolist(), { 1.5, -2.0 }, "aligned or not")
  for pad = 1, 7 do
    x = load_bytes(container((" "):rep(pad)
      .. '\n{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"new":[{"a":[1]}]}}', data)).x
    check.equal(x:tolist(), { 1.5, -2.0 }, "header of odd length")
  end
  local b = load_bytes(container('{"b":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}', "\0\1\2\255")).b
  check.equal(b:tolist(), { false, true, true, true }, "any byte but 0 is true")
end)

check.test("safetensors: hostile files", function()
  local function entry(...) return ('{"dtype":"%s","shape":%s,"data_offsets":%s}'):format(...) end
  local function one(...) return '{"x":' .. entry(...) .. "}" end
  local function two(a, b) return ('{"x":%s,"y":%s}'):format(entry("U8", "[2]", a), entry("U8", "[2]", b)) end
  local bad = {
    { "", "the file has 0 bytes" },
    { "abcdefg", "the file has 7 bytes" },
    { string.pack("<I8", 100000001) .. "{}", "claims 100000001 bytes, more than the 100000000 allowed" },
    { string.pack("<i8", -1) .. "{}", "claims 18446744073709551615 bytes" },
    { string.pack("<I8", 3) .. "{}", "claims 3 bytes, but only 2 follow" },
    { container "", "got the end of the text" },
    { container "[]", "expected '{'" },
    { container "{", "expected a string, got the end of the text" },
    { container "{}x", "the text goes on" },
    { container "{}\0", "the text goes on" },
    { container '{"\xff":1}', "not valid UTF-8" },
    { container '{"a\0b":1}', "a control character" },
    { container '{"x":1}', "expected '{', got" },
    { container '{"x":{}}', 'tensor "x" has no dtype' },
    { container '{"x":{"dtype":"U8","shape":[0]}}', 'tensor "x" has no data_offsets' },
    { container(one("F33", "[0]", "[0,0]")), 'tensor "x" has the unknown dtype "F33"' },
    { container(one("F8_E4M3", "[0]", "[0,0]")), 'tensor "x" has dtype F8_E4M3, which Tycho does not have' },
    { container(one("U16", "[0]", "[0,0]")), 'tensor "x" has dtype U16' },
    { container(one("U8", "[-1]", "[0,0]")), "shape: expected a count from 0 to 2^63-1, got -1" },
    { container(one("U8", "[1.5]", "[0,1]")), "shape: expected a count from 0 to 2^63-1, got 1.5" },
    { container(one("U8", "[9223372036854775808]", "[0,0]")), "a count from 0 to 2^63-1" },
    { container(one("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), "x"), "shape has more than 8 entries" },
    { container(one("F32", "[4611686018427387904,4]", "[0,0]")), "more than memory can hold" },
    { container(one("F64", "[4294967296,4294967296,0]", "[0,0]")), "more than memory can hold" },
    { container(one("F64", "[2305843009213693952]", "[0,0]")), "more than memory can hold" },
    { container(one("U8", "[1]", "[0]"), "x"), "data_offsets: expected 2 entries, got 1" },
    { container(one("U8", "[1]", "[0,1,2]"), "x"), "data_offsets has more than 2" },
    { container(one("U8", "[1]", "[1,0]"), "x"), "data_offsets [1, 0] run backwards" },
    { container(one("F32", "[2]", "[0,7]"), "1234567"), "data_offsets span 7 bytes, but [2] F32 needs 8" },
    { container(one("U8", "[1]", "[1,2]"), "xx"), "begins at byte 1 of the buffer, expected 0" },
    { container(two("[0,2]", "[3,5]"), "12345"), "begins at byte 3 of the buffer, expected 2" },
    { container(two("[0,2]", "[1,3]"), "123"), "begins at byte 1 of the buffer, expected 2" },
    { container(two("[0,2]", "[0,2]"), "12"), "begins at byte 0 of the buffer, expected 2" },
    { container(two("[0,2]", "[2,4]"), "12345"),
      "the tensors take 4 bytes, but 5 follow the header: the file is longer" },
    { container(two("[0,2]", "[2,4]"), "123"),
      "the tensors take 4 bytes, but 3 follow the header: the file is cut short" },
    { container("{}", "polyglot"), "the tensors take 0 bytes, but 8 follow" },
    { container('{"x":' .. entry("U8", "[0]", "[0,0]") .. ',"x":' .. entry("U8", "[0]", "[0,0]") .. "}"),
      'tensor "x" is there twice' },
    { container('{"x":' .. entry("U8", "[0]", "[0,0]") .. ',"\\u0078":' .. entry("U8", "[0]", "[0,0]") .. "}"),
      'tensor "x" is there twice' },
    { container '{"x":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 'tensor "x" has dtype twice' },
    { container '{"__metadata__":{"a":"1","a":"2"}}', '__metadata__ has "a" twice' },
    { container '{"__metadata__":{},"__metadata__":{}}', "__metadata__ is there twice" },
    { container '{"__metadata__":{"a":1}}', '__metadata__ entry "a" is not a string' },
    { container '{"__metadata__":[]}', "expected '{'" },
    { container('{"x":{"deep":' .. ("["):rep(1000)), "nested deeper than" },
    { container('{"x":' .. entry("U8", "[0]", "[0,0]") .. ",}"), "a comma before '}'" },
    { container '{"x":{"dtype":"\\ud800"}}', "half of a surrogate pair" },
  }
  for i, case in ipairs(bad) do
    local text = check.fails(function() load_bytes(case[1]) end, case[2], "hostile file " .. i)
    check.ok(text:find("hostile.safetensors", 1, true), "the error names the file: " .. text)
  end
  check.fails(function() ty.io.load_safetensors(file "missing.safetensors") end, "No such file")
  check.fails(function() ty.io.load_safetensors(scratch.folder) end, "directory")
end)

check.test("safetensors: cut at every byte, any byte changed", function()
  local bytes = slurp(FIXTURES .. "reference.safetensors")
  for n = 0, #bytes - 1 do
    if pcall(load_bytes, bytes:sub(1, n)) then check.ok(false, "cut to " .. n .. " bytes it loads") end
  end
  scratch.flips(bytes, 2000, function(broken)
    local ok, got = pcall(load_bytes, broken)
    if ok then
      for _, t in pairs(got) do values(t) end
    end
  end)
  check.ok(true, "nothing crashed")
end)

check.test("safetensors: what the writer refuses", function()
  local save, path = ty.io.save_safetensors, file "refused.safetensors"
  check.fails(function() save(path, { x = 1 }) end, '"x": expected a tensor, got a number')
  check.fails(function() save(path, { ty.ones { 1 } }) end, "expected strings as names")
  check.fails(function() save(path, { ["\xff"] = ty.ones { 1 } }) end, "not valid UTF-8")
  check.fails(function() save(path, { __metadata__ = ty.ones { 1 } }) end, "may not be named")
  check.fails(function() save(path, {}, { a = 1 }) end, "expected metadata { string = string }")
  check.fails(function() save(path, { x = ty.zeros({ 2 }, { device = "meta" }) }) end, "meta")
  check.fails(function() save(file "no/such/folder.safetensors", {}) end, "No such file or directory")
  check.fails(function() save(path .. "\0x", {}) end, "expected a path, with characters")
  check.fails(function() ty.io.load_safetensors(path, { mmmap = true }) end, "unknown option mmmap; options here: mmap")
  check.ok(not ty.io.exists(path), "nothing was written")
end)

check.test("safetensors: places and sums of what is written, at a rate", function()
  local path = file "placed.safetensors"
  local want = { a = ty.arange(700), b = ty.arange(6, { dtype = "f64" }), none = ty.zeros { 0 }, c = ty.ones(3, 5) }
  local crc, places = ty.io.save_safetensors(path, want, nil, { crc32 = true, places = true })
  check.equal(crc, ty.io.crc32(path), "of the file")
  local bytes = scratch.slurp(path)
  for name, x in pairs(want) do
    local at = places[name]
    check.equal(bytes:sub(at.at + 1, at.at + at.bytes), ty.io.to_bytes(x), name)
    check.equal(at.crc32, ty.io.crc32(x), name)
  end
  check.equal(ty.io.crc32(want.c:transpose(0, 1)), ty.io.crc32(want.c:transpose(0, 1):contiguous()))
  check.equal(select("#", ty.io.save_safetensors(path, want, nil, { places = true })), 1)
  local since = ty.core.system.clock()
  ty.io.save_safetensors(path, { x = ty.zeros { 500000 } }, nil, { rate = 10000000 })
  local took = ty.core.system.clock() - since
  check.ok(took >= 0.2, ("2 MB at 10 MB/s took %.3f s"):format(took))
  check.fails(function() ty.io.save_safetensors(path, want, nil, { rate = -1 }) end, "option rate: expected an integer")
end)

check.test("a full disk leaves the old file and no other", function()
  local path = file "full.safetensors"
  ty.io.save_safetensors(path, { x = ty.ones { 4 } })
  local script = spit("writer.lua", ([[
    local ty = require "tycho"
    local big = ty.zeros { 100000 }
    local ok, message = pcall(ty.io.save_safetensors, %q, { x = big })
    assert(not ok and message:find("File too large", 1, true), message)
    ok, message = pcall(ty.io.write_atomic, %q, ("x"):rep(1000000))
    assert(not ok and message:find("File too large", 1, true), message)
    ok, message = pcall(ty.io.save_npz, %q, { x = big })
    assert(not ok and message:find("File too large", 1, true), message)
  ]]):format(path, path, path))
  check.ok(scratch.run("trap '' XFSZ; ulimit -f 16; " .. scratch.program(script)), "the writers report the limit")
  os.remove(script)
  check.equal(ty.io.load_safetensors(path).x:tolist(), { 1.0, 1.0, 1.0, 1.0 }, "the old file")
  for _, name in ipairs(scratch.list()) do check.ok(not name:find "tmp", "no temporary file is left: " .. name) end
  if ty.io.exists "/dev/full" then
    check.fails(function() ty.io.save_npy("/dev/full", ty.zeros { 10 }) end, "No space left")
    check.ok(ty.io.stat("/dev/full").kind == "other", "a device is written, not replaced")
  end
end)

check.test("a writer that is killed leaves the old file or the new one", function()
  local path = file "killed.safetensors"
  ty.io.save_safetensors(path, { x = ty.zeros { 300000 } })
  local script = spit("loop.lua", ([[
    local ty = require "tycho"
    for i = 1, 1000 do ty.io.save_safetensors(%q, { x = ty.full({ 300000 }, i) }) end
  ]]):format(path))
  for i = 1, 6 do
    scratch.run(("%s & sleep 0.%d; kill -9 $!; wait $! 2>/dev/null"):format(scratch.program(script), i))
    local x = ty.io.load_safetensors(path).x
    check.equal(x[0]:item(), x[299999]:item(), "one file, not parts of two")
  end
end)

-- ---- npy ----

local function npy(header, data, version, length)
  local head = "\x93NUMPY" .. string.char(version or 1, 0)
  local size = length or #header
  return head .. (version and version > 1 and string.pack("<I4", size) or string.pack("<I2", size)) .. header
    .. (data or "")
end

local function load_npy(bytes) return ty.io.load_npy(spit("hostile.npy", bytes)) end

check.test("npy: files of NumPy", function()
  for _, dtype in ipairs(DTYPES) do
    for _, mmap in ipairs { true, false } do
      check_ramp(ty.io.load_npy(FIXTURES .. dtype .. ".npy", { mmap = mmap }), { 2, 3, 4 }, dtype, dtype)
    end
  end
  check_ramp(ty.io.load_npy(FIXTURES .. "fortran.npy"), { 2, 3, 4 }, "f32", "fortran order")
  check_ramp(ty.io.load_npy(FIXTURES .. "big_endian.npy"), { 2, 3, 4 }, "f64", "big endian f64")
  check_ramp(ty.io.load_npy(FIXTURES .. "big_endian_i2.npy"), { 2, 3, 4 }, "i16", "big endian i16")
  check_ramp(ty.io.load_npy(FIXTURES .. "scalar.npy"), {}, "f64", "scalar")
  check_ramp(ty.io.load_npy(FIXTURES .. "empty.npy"), { 3, 0, 2 }, "f32", "empty")
  check_ramp(ty.io.load_npy(FIXTURES .. "version2.npy"), { 2, 3, 4 }, "f32", "version 2")
  check_ramp(ty.io.load_npy(FIXTURES .. "version3.npy"), { 2, 3, 4 }, "f32", "version 3")
  local function scaled(name, factor, dtype)
    local t, want = ty.io.load_npy(FIXTURES .. name .. ".npy"), ramp({ 2, 3 }, "u8")
    for _, row in ipairs(want) do
      for i in ipairs(row) do row[i] = row[i] * factor end
    end
    check.equal(t.dtype, dtype, name)
    check.equal(t:tolist(), want, name)
  end
  scaled("u16", 257, "i32")
  scaled("u32", 16843009, "i64")
  scaled("u64", 1, "i64")
  check.fails(function() ty.io.load_npy(FIXTURES .. "u64_large.npy") end,
    "element 1 is 9223372036854775808, which does not fit i64")
  check.fails(function() ty.io.load_npy(FIXTURES .. "object.npy") end, "pickle")
  check.fails(function() ty.io.load_npy(FIXTURES .. "complex.npy") end, "complex")
  check.fails(function() ty.io.load_npy(FIXTURES .. "text.npy") end, "text arrays")
  check.fails(function() ty.io.load_npy(FIXTURES .. "fields.npy") end, "structured arrays")
end)

check.test("npy: the writer gives what NumPy gives", function()
  for _, dtype in ipairs(DTYPES) do
    ty.io.save_npy(file "w.npy", ty.tensor(ramp({ 2, 3, 4 }, dtype), { dtype = dtype }))
    local got, want = slurp(file "w.npy"), slurp(FIXTURES .. dtype .. ".npy")
    check.equal(got:sub(1, 10) .. got:match "{.-}", want:sub(1, 10) .. want:match "{.-}", dtype .. " header")
    check.equal(got:sub(129), want:sub(129), dtype .. " data")
    check.equal(#got, #want, dtype .. " size")
  end
  for _, shape in ipairs { {}, { 5 }, { 0 }, { 2, 3 } } do
    local t = ty.zeros(shape)
    ty.io.save_npy(file "w.npy", t)
    check.equal(ty.io.load_npy(file "w.npy").shape, shape)
  end
  ty.io.save_npy(file "w.npy", ty.tensor({ { 1, 2 }, { 3, 4 } }):transpose(0, 1))
  check.equal(ty.io.load_npy(file "w.npy"):tolist(), { { 1, 3 }, { 2, 4 } })
  check.fails(function() ty.io.save_npy(file "w.npy", ty.zeros({ 2 }, { dtype = "bf16" })) end,
    "no bf16; convert to f32 first, or save as safetensors")
end)

check.test("npy: hostile files", function()
  local good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
  local data = string.pack("<ff", 1, 2)
  check.equal(load_npy(npy(good, data)):tolist(), { 1.0, 2.0 }, "a header without padding")
  check.equal(load_npy(npy('{"shape": (1L, 2L), "fortran_order":False,"descr":"<f4"}\n', data)):tolist(),
    { { 1.0, 2.0 } }, "another order")
  local function header(...) return ("{'descr': %s, 'fortran_order': %s, 'shape': %s}"):format(...) end
  local bad = {
    { "", "0 bytes are too few" },
    { "\x93NUMPY\1\0", "too few" },
    { "\x93NUMPX\1\0\0\0", "does not begin as a npy file does" },
    { npy(good, data, 4), "version 4.0 is unknown" },
    { npy(good, data, 1, 60000), "claims 60000 bytes" },
    { npy(good, data, 2, 0xffffffff), "claims 4294967295 bytes" },
    { npy("", data), "expected a dictionary" },
    { npy("{", data), "the header is broken" },
    { npy("{'descr'", data), "expected ':'" },
    { npy("{'descr: '<f4'", data), "the header is broken" },
    { npy("{'descr': '<f4'}", data), "the header has no fortran_order" },
    { npy("{'descr': '<f4', 'descr': '<f4'}", data), 'key "descr" is unknown or there twice' },
    { npy("{'other': 1}", data), 'key "other" is unknown' },
    { npy(good .. "x", data), "goes on after the dictionary" },
    { npy(header("'<f4'", "Maybe", "(2,)"), data), "True or False" },
    { npy(header("'<f4'", "False", "[2]"), data), "shape must be a tuple" },
    { npy(header("'<f4'", "False", "(2"), data), "the shape is not closed" },
    { npy(header("'<f4'", "False", "(-2,)"), data), "something that is no size" },
    { npy(header("'<f4'", "False", "(9223372036854775808,)"), data), "something that is no size" },
    { npy(header("'<f4'", "False", "(4611686018427387904, 4)"), data), "more than memory can hold" },
    { npy(header("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 2)"), data), "more than 8 dimensions" },
    { npy(header("'<f4'", "False", "(3,)"), data), "needs 12 bytes, but 8 follow" },
    { npy(header("'<f4'", "False", "(1,)"), data), "needs 4 bytes, but 8 follow" },
    { npy(header("'<u2'", "False", "(3,)"), data), "needs 6 bytes, but 8 follow" },
    { npy(header("'<f4'", "False", "(1000000000000,)"), data), "needs 4000000000000 bytes, but 8 follow" },
    { npy(header("'?f4'", "False", "(2,)"), data), "not a type that Tycho has" },
    { npy(header("''", "False", "(2,)"), data), "not a type that Tycho has" },
    { npy(header("'|V2'", "False", "(4,)"), data), "use safetensors" },
    { npy(header("'<f16'", "False", "(1,)"), data), "not a type that Tycho has" },
    { npy(header("'\\x3cf4'", "False", "(2,)"), data), "the header is broken" },
  }
  for i, case in ipairs(bad) do
    local text = check.fails(function() load_npy(case[1]) end, case[2], "hostile file " .. i)
    check.ok(text:find("hostile.npy", 1, true), "the error names the file: " .. text)
  end
  local bytes = slurp(FIXTURES .. "big_endian.npy")
  for n = 0, #bytes - 1 do
    if pcall(load_npy, bytes:sub(1, n)) then check.ok(false, "cut to " .. n .. " bytes it loads") end
  end
  for _, name in ipairs { "fortran", "u32", "version3", "bool" } do
    scratch.flips(slurp(FIXTURES .. name .. ".npy"), 1000, function(broken)
      local ok, t = pcall(load_npy, broken)
      if ok then values(t) end
    end)
  end
end)

-- ---- npz ----

local function load_npz(bytes) return ty.io.load_npz(spit("hostile.npz", bytes)) end

check.test("npz: files of NumPy", function()
  for _, name in ipairs { "stored", "deflated", "zip64" } do
    for _, mmap in ipairs { true, false } do
      local got = ty.io.load_npz(FIXTURES .. name .. ".npz", { mmap = mmap })
      check_ramp(got.a, { 2, 3 }, "f32", name .. " a")
      check_ramp(got["b/c"], { 5 }, "i64", name .. " b/c")
      check_ramp(got.flag, { 4 }, "bool", name .. " flag")
      check_ramp(got.empty, { 0 }, "f64", name .. " empty")
      check_ramp(got.f, { 2, 3 }, "f64", name .. " f")
    end
  end
end)

check.test("npz: round trips", function()
  for _, compress in ipairs { false, true } do
    local want = tensors()
    ty.io.save_npz(file "a.npz", want, { compress = compress })
    check_same(ty.io.load_npz(file "a.npz"), want, "compress " .. tostring(compress))
    local bytes = slurp(file "a.npz")
    ty.io.save_npz(file "a.npz", want, { compress = compress })
    check.equal(slurp(file "a.npz") == bytes, true, "the same tensors give the same file")
  end
  ty.io.save_npz(file "zeros.npz", { x = ty.zeros { 100000 } }, { compress = true })
  check.ok(ty.io.stat(file "zeros.npz").size < 2000, "compressed")
  check.equal(ty.io.load_npz(file "zeros.npz").x.shape, { 100000 })
  ty.io.save_npz(file "none.npz", {})
  check.equal(next(ty.io.load_npz(file "none.npz")), nil, "no arrays")
  check.fails(function() ty.io.save_npz(file "x.npz", { x = ty.zeros({ 2 }, { dtype = "bf16" }) }) end, "no bf16")
  check.fails(function() ty.io.save_npz(file "x.npz", { ["\xff"] = ty.zeros { 2 } }) end, "not UTF-8")
  check.ok(not ty.io.exists(file "x.npz"), "nothing was written")
end)

check.test("npz: hostile files", function()
  local bytes = slurp(FIXTURES .. "deflated.npz")
  local stored = slurp(FIXTURES .. "stored.npz")
  local function changed(text, at, new) return text:sub(1, at) .. new .. text:sub(at + #new + 1) end
  local central = bytes:find("PK\1\2", 1, true) - 1
  local ending = bytes:find("PK\5\6", 1, true) - 1
  local data = stored:find("\x93NUMPY", 1, true) + 128
  local bad = {
    { "", "too few for a zip archive" },
    { ("x"):rep(100), "no directory at the end" },
    { bytes .. "x", "no directory at the end" },
    { "x" .. bytes, "does not lie where the file says" },
    { changed(bytes, ending + 4, "\1\0"), "several parts" },
    { changed(bytes, ending + 8, "\xff\0\xff\0"), "too small for 255 entries" },
    { changed(bytes, ending + 8, "\4\0\4\0"), "more bytes than entries" },
    { changed(bytes, ending + 16, "\0\0\0\0"), "does not lie where the file says" },
    { changed(bytes, central, "XX"), "broken at entry 0" },
    { changed(bytes, central + 8, "\1"), "encrypted" },
    { changed(bytes, central + 10, "\12\0"), "only stored and deflated" },
    { changed(bytes, central + 16, "\0\0"), "checksum is wrong" },
    { changed(bytes, central + 20, "\xff\xff\xff\x7f"), "does not fit the file" },
    { changed(bytes, central + 24, "\xff\xff\xff\x7f"), "more bytes than its data can inflate to" },
    { changed(bytes, central + 24, "\0\2\0\0"), "but 384 follow" },
    { changed(bytes, central + 28, "\xff\xff"), "broken at entry 0" },
    { changed(bytes, central + 42, "\xff\xff\xff\0"), "local header is not where" },
    { changed(bytes, central + 46, "X"), "says something else than the directory" },
    { changed(stored, data, "\xff"), "checksum is wrong" },
  }
  for i, case in ipairs(bad) do
    local text = check.fails(function() load_npz(case[1]) end, case[2], "hostile file " .. i)
    check.ok(text:find("hostile.npz", 1, true), "the error names the file: " .. text)
  end
  for n = 0, #bytes - 1 do
    if pcall(load_npz, bytes:sub(1, n)) then check.ok(false, "cut to " .. n .. " bytes it loads") end
  end
  for _, name in ipairs { "deflated", "stored", "zip64" } do
    scratch.flips(slurp(FIXTURES .. name .. ".npz"), 2000, function(broken)
      local ok, got = pcall(load_npz, broken)
      if ok then
        for _, t in pairs(got) do values(t) end
      end
    end)
  end
end)

-- ---- raw bytes; load and save by name ----

check.test("map, from_bytes, to_bytes", function()
  local path = spit("raw.bin", "head" .. string.pack("<i4i4i4i4", 1, -2, 3, 4))
  check.equal(ty.io.map(path, { dtype = "i32", offset = 4 }):tolist(), { 1, -2, 3, 4 })
  check.equal(ty.io.map(path, { dtype = "i32", offset = 4, shape = { 2, 2 } }):tolist(), { { 1, -2 }, { 3, 4 } })
  check.equal(ty.io.map(path, { dtype = "i16", offset = 5, shape = { 1 } }).shape, { 1 }, "unaligned")
  check.equal(ty.io.map(path).shape, { 20 }, "all bytes")
  check.equal(ty.io.map(spit("nothing", "")).shape, { 0 }, "an empty file")
  check.fails(function() ty.io.map(path, { offset = 21 }) end, "past its end")
  check.fails(function() ty.io.map(path, { dtype = "f64", shape = { 3 } }) end, "too few for [3] f64")
  check.fails(function() ty.io.map(path, { shape = { 1 << 62, 1 << 62 } }) end, "too few")
  check.fails(function() ty.io.map(path, { shape = { -1 } }) end, "expected a size from 0 up")
  check.fails(function() ty.io.map(path, { dtype = "f31" }) end, "unknown dtype")
  check.fails(function() ty.io.map(path, { offset = -1 }) end, "option offset")
  check.equal(ty.io.from_bytes(string.pack("<dd", 1.5, 2), "f64"):tolist(), { 1.5, 2.0 })
  check.equal(ty.io.from_bytes("\0\7", "bool", { 2, 1 }):tolist(), { { false }, { true } })
  check.equal(ty.io.from_bytes("", "f32", { 0, 3 }).shape, { 0, 3 })
  check.fails(function() ty.io.from_bytes("123", "f32") end, "3 bytes came")
  check.fails(function() ty.io.from_bytes("12345678", "f32", { 3 }) end, "8 bytes came, [3] f32 needs 12")
  check.equal(ty.io.to_bytes(ty.tensor({ { 1, 2 }, { 3, 4 } }, { dtype = "u8" }):transpose(0, 1)), "\1\3\2\4")
  check.equal(ty.io.to_bytes(ty.zeros { 0 }), "")
end)

check.test("load and save by content and name", function()
  local x = ty.tensor { 1.0, 2.0 }
  ty.io.save(file "x.safetensors", { x = x }, { a = "b" })
  ty.io.save(file "x.npz", { x = x })
  ty.io.save(file "x.npy", x)
  ty.io.save(file "x.json", { 1, 2 })
  ty.io.save(file "x.png", ty.zeros({ 3, 4, 5 }, { dtype = "u8" }))
  local t, meta = ty.io.load(file "x.safetensors")
  check.equal(t.x:tolist(), { 1.0, 2.0 })
  check.equal(meta, { a = "b" })
  check.equal(ty.io.load(file "x.npz").x:tolist(), { 1.0, 2.0 })
  check.equal(ty.io.load(file "x.npy"):tolist(), { 1.0, 2.0 })
  check.equal(ty.io.load(file "x.json"), { 1, 2 })
  check.equal(ty.io.load(file "x.png").shape, { 3, 4, 5 })
  os.rename(file "x.npy", file "x.unknown")
  check.equal(ty.io.load(file "x.unknown"):tolist(), { 1.0, 2.0 }, "by content")
  check.fails(function() ty.io.save(file "x.txt", x) end, "must end in")
  check.fails(function() ty.io.load(spit("x.gguf", "GGUF1234")) end, "GGUF")
end)

check.test("every allocation that fails is one error", function()
  local path = spit("fault.safetensors", slurp(FIXTURES .. "reference.safetensors"))
  local x = ty.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }, { dtype = "u8" }):transpose(0, 1)
  for name, fn in pairs {
    safetensors = function() return ty.io.load_safetensors(path).i64 end,
    copied = function() return ty.io.load_safetensors(path, { mmap = false }).i64 end,
    fortran = function() return ty.io.load_npy(FIXTURES .. "fortran.npy") end,
    widened = function() return ty.io.load_npy(FIXTURES .. "u16.npy") end,
    npz = function() return ty.io.load_npz(FIXTURES .. "deflated.npz").a end,
    image = function() return ty.io.load_image(FIXTURES .. "palette.png", { channels = 1 }) end,
    jpeg = function() return ty.io.load_image(FIXTURES .. "gray.jpg") end,
    csv = function() return ty.io.load_csv(spit("fault.csv", "1,2\n")) end,
    map = function() return ty.io.map(path) end,
    from_bytes = function() return ty.io.from_bytes("1234", "u8") end,
    to_bytes = function() return ty.io.to_bytes(x) end,
    save = function() return ty.io.save(file "fault.out.safetensors", { x = x }) or true end,
    save_npz = function() return ty.io.save(file "fault.out.npz", { x = x }) or true end,
    png = function() return ty.io.encode_png(x) end,
  } do
    local n, ok, result = 0
    repeat
      n = n + 1
      ty.memory.fail_at(n)
      ok, result = pcall(fn)
      ty.memory.fail_at(0)
      if not ok and not tostring(result):find "memory" then check.ok(false, name .. ": " .. tostring(result)) end
    until ok or n == 200
    check.ok(ok and result, name .. " works once nothing fails, after " .. n)
  end
end)

scratch.clean()
check.finish()
