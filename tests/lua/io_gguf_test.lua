-- GGUF files: that of the reference writer (tests/fixtures/make_quant.py), round trips, and hostile files: every one is
-- one clear error.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local FIXTURES = check.root .. "tests/fixtures/"
local file, slurp, spit = scratch.file, scratch.slurp, scratch.spit
local reference = FIXTURES .. "io/reference.gguf"
local bytes_of = ty.io.to_bytes

local function load_bytes(bytes, options) return ty.io.load_gguf(spit("hostile.gguf", bytes), options) end

check.test("the file of the reference writer", function()
  local quant = ty.io.load(FIXTURES .. "quant.npz")
  for _, mmap in ipairs { true, false } do
    local t, meta, info = ty.io.load_gguf(reference, { mmap = mmap })
    check.equal(info.version, 3)
    check.equal(info.alignment, 32)
    check.equal(meta["general.architecture"], "test")
    local want = {
      u8 = 200, i8 = -100, u16 = 60000, i16 = -30000, u32 = 4000000000, i32 = -2000000000, f32 = 0.5, bool = true,
      string = "Grüße", u64 = 1 << 62, i64 = -(1 << 62), f64 = 0.1,
    }
    for name, value in pairs(want) do
      check.equal(meta["test." .. name], value, name)
      check.equal(info.types["test." .. name], name, "type of " .. name)
    end
    check.equal(meta["test.strings"], { "a", "", "ccc" })
    check.equal(info.types["test.strings"], "string[]")
    check.equal(meta["test.ints"], { 1, -2, 3 })
    check.equal(meta["test.floats"], { 0.25, 0.5 })
    check.equal(meta["test.bools"], { true, false })
    local x = quant.x
    check.equal(t.f32:tolist(), x["0:2, 0:6"]:tolist())
    check.equal(t.f16:tolist(), x["0:2, 0:6"]:to("f16"):tolist())
    check.equal(t.f64:tolist(), x["0:3, 0:5"]:to("f64"):tolist())
    for _, dtype in ipairs { "i8", "i16" } do check.equal(t[dtype]:tolist(), ty.arange(-3, 4):tolist(), dtype) end
    check.equal(t.i32:tolist(), ty.arange(24):reshape(2, 3, 4):tolist())
    check.equal(t.i64:tolist(), { 0, 1, 2 })
    for _, dtype in ipairs { "q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q6_k" } do
      check.equal(t[dtype].dtype, dtype)
      check.equal(t[dtype].shape, { 6, 512 }, dtype)
      check.ok(bytes_of(t[dtype]) == bytes_of(quant[dtype .. "_blocks"]), dtype)
    end
    check.equal(t.none, nil)
    check.fails(function() return t.q5_0 end, 'tensor "q5_0" is Q5_0, which Tycho does not have')
    check.equal(#info.tensors, 14)
    check.equal(info.tensors[10].format, "Q5_0")
    check.equal(info.tensors[10].shape, { 6, 512 })
    check.equal(info.tensors[10].bytes, 6 * 512 // 32 * 22)
  end
end)

check.test("version 2 is read, others are not", function()
  local bytes = slurp(reference)
  local t = load_bytes("GGUF\2" .. bytes:sub(6))
  check.equal(t.i64:tolist(), { 0, 1, 2 })
  check.fails(function() load_bytes("GGUF\1" .. bytes:sub(6)) end, "version is 1, Tycho reads 2 and 3")
  check.fails(function() load_bytes("GGUF\0\0\0\3" .. bytes:sub(9)) end, "big-endian")
end)

check.test("a round trip gives the same file", function()
  local t, meta, info = ty.io.load(reference)
  local all = {}
  for name, x in pairs(t) do all[name] = x end
  ty.save(file "a.gguf", all, meta, { types = info.types })
  local t2, meta2, info2 = ty.load(file "a.gguf")
  check.equal(meta2, meta)
  check.equal(info2.types, info.types)
  for name, x in pairs(all) do
    check.equal(t2[name].shape, x.shape, name)
    check.ok(bytes_of(t2[name]) == bytes_of(x), name)
  end
  ty.save(file "b.gguf", t2, meta2, { types = info2.types })
  check.ok(slurp(file "a.gguf") == slurp(file "b.gguf"), "the same tensors give the same file")
  check.equal(scratch.list(), { "a.gguf", "b.gguf", "hostile.gguf" }, "no temporary file is left")
end)

check.test("what the writer makes of Lua values, alignment, empty and 0-d tensors", function()
  local tensors = { e = ty.zeros(0, 3), s = ty.tensor(2.5), v = ty.arange(5), q = ty.full({ 2, 64 }, 127):to "q8_0" }
  local meta = {
    small = 7, negative = -7, large = 1 << 40, half = 0.5, yes = true, text = "a\0b", none = {}, ints = { 1, 1 << 33 },
    mixed = { 1, 0.5 },
  }
  ty.io.save_gguf(file "c.gguf", tensors, meta, { alignment = 4096, types = { small = "u8", mixed = "f64[]" } })
  local t, m, info = ty.io.load_gguf(file "c.gguf")
  check.equal(info.alignment, 4096)
  check.equal(m["general.alignment"], 4096)
  m["general.alignment"] = nil
  check.equal(m, meta)
  check.equal(info.types.small, "u8")
  check.equal(info.types.negative, "i32")
  check.equal(info.types.large, "i64")
  check.equal(info.types.ints, "i64[]")
  check.equal(info.types.mixed, "f64[]")
  for _, item in ipairs(info.tensors) do check.equal(item.offset % 4096, 0, item.name) end
  check.equal(t.e.shape, { 0, 3 })
  check.equal(t.s:item(), 2.5)
  check.equal(t.v:tolist(), { 0, 1, 2, 3, 4 })
  check.equal(t.q:to("f32"):tolist(), ty.full({ 2, 64 }, 127):to("f32"):tolist())
  ty.io.save_gguf(file "d.gguf", {})
  check.equal(next((ty.io.load_gguf(file "d.gguf"))), nil)
end)

check.test("what the writer refuses", function()
  local save, path, x = ty.io.save_gguf, file "refused.gguf", ty.ones(2)
  check.fails(function() save(path, { x = x:to "u8" }) end, "has no u8")
  check.fails(function() save(path, { x = ty.ones(1, 64):to "nf4" }) end, "has no nf4")
  check.fails(function() save(path, { x = ty.ones(1, 1, 1, 1, 1) }) end, "at most 4")
  check.fails(function() save(path, { [("x"):rep(64)] = x }) end, "at most 63 bytes")
  check.fails(function() save(path, { ["a\0b"] = x }) end, "without NUL")
  check.fails(function() save(path, {}, { a = {} }, { types = { a = "u99" } }) end, "one of u8 i8")
  check.fails(function() save(path, {}, { a = 300 }, { types = { a = "u8" } }) end, "300 does not fit the type u8")
  check.fails(function() save(path, {}, { a = 1.5 }, { types = { a = "i32" } }) end, "1.5 does not fit the type i32")
  check.fails(function() save(path, {}, { a = 1 }, { types = { a = "i32[]" } }) end, "is no list")
  check.fails(function() save(path, {}, { a = { 1, "x" } }) end, "element 2 differs")
  check.fails(function() save(path, {}, { a = { {} } }) end, "lists in lists")
  check.fails(function() save(path, {}, { a = print }) end, "got a function")
  check.fails(function() save(path, {}, { [1] = 1 }) end, "keys must be strings")
  check.fails(function() save(path, {}, {}, { alignment = 24 }) end, "power of two")
  check.fails(function() save(path, {}, {}, { align = 32 }) end, "unknown option align")
  check.ok(not io.open(path), "nothing was written")
end)

-- ---- hostile files ----

local function text(s) return string.pack("<s8", s) end
local function entry(key, type, value) return text(key) .. string.pack("<I4", type) .. value end
local function tensor(name, type, offset, ...)
  local n = select("#", ...)
  return text(name) .. string.pack("<I4", n) .. string.pack("<" .. ("i8"):rep(n), ...) ..
    string.pack("<I4I8", type, offset)
end

check.test("hostile files", function()
  local function container(entries, tensors, data)
    local head = "GGUF" .. string.pack("<I4I8I8", 3, #tensors, #entries)
    head = head .. table.concat(entries) .. table.concat(tensors)
    return head .. ("\0"):rep(-#head % 32) .. (data or "")
  end
  local function meta(...) return container({ ... }, {}) end
  local u32 = function(n) return string.pack("<I4", n) end
  local function array(of, n) return string.pack("<I4I8", of, n) end
  local bad = {
    { "", "cut short or no GGUF file" }, { "GGUF", "cut short" }, { ("x"):rep(64), "does not begin with GGUF" },
    { "GGUF" .. string.pack("<I4i8i8", 3, -1, 0) .. ("\0"):rep(64), "18446744073709551615 tensors, more than its" },
    { "GGUF" .. string.pack("<I4i8i8", 3, 0, 1 << 40) .. ("\0"):rep(64), "claims 1099511627776 metadata entries" },
    { meta(string.pack("<i8", -1) .. ("x"):rep(40)), "ends in a key of the metadata" },
    { meta(entry("a\0b", 0, "x")), "a key of the metadata is" }, { meta(entry("\xff", 0, "x")), "which is no text" },
    { meta(entry("a", 13, "xxxxxxxx")), 'metadata "a" has the unknown type 13' },
    { meta(entry("a", 8, string.pack("<i8", -1))), "ends in a metadata value" },
    { meta(entry("a", 9, array(13, 0))), "no known type" },
    { meta(entry("a", 9, array(0, 1 << 62))), "ends in a metadata value" },
    { meta(entry("a", 9, array(10, (1 << 61) + 1))), "ends in a metadata value" },
    { meta(entry("a", 9, array(8, 3) .. text "x")), "ends in a metadata value" },
    { meta(entry("a", 9, array(9, 1):rep(5) .. array(0, 0))), "more than 4 deep" },
    { meta(entry("a", 0, "x"), entry("a", 0, "y")), 'metadata "a" is there twice' },
    { meta(entry("general.alignment", 4, u32(0))), "power of two" },
    { meta(entry("general.alignment", 4, u32(48))), "power of two" },
    { meta(entry("general.alignment", 4, u32(1 << 31))), "power of two" },
    { meta(entry("general.alignment", 10, string.pack("<I8", 32))), "must be a u32" },
    { container({}, { tensor("x", 24, 0, 1, 1, 1, 1, 1) }, "x"), "has 5 dimensions" },
    { container({}, { tensor("x", 24, 0, -1) }, "x"), "size 18446744073709551615 is too large" },
    { container({}, { tensor("x", 0, 0, 1 << 62, 4) }), "more than memory can hold" },
    { container({}, { tensor("x", 0, 0, 1 << 32, 1 << 32, 0) }), "more than memory can hold" },
    { container({}, { tensor("x", 0, 0, 1 << 60) }), "more than memory can hold" },
    { container({}, { tensor("x", 4, 0, 1) }), "unknown type 4" },
    { container({}, { tensor("x", 0xffffffff, 0, 1) }), "unknown type 4294967295" },
    { container({}, { tensor("x", 8, 0, 33) }), "[33] is not made of rows of Q8_0, blocks of 32" },
    { container({}, { tensor("x", 8, 0) }), "[] is not made of rows of Q8_0" },
    { container({}, { tensor("a\0b", 24, 0, 1) }, "x"), "which is no text" },
    { container({}, { tensor("x", 24, 0, 1), tensor("x", 24, 32, 1) }, ("x"):rep(64)), 'tensor "x" is there twice' },
    { container({}, { tensor("x", 24, 32, 1) }, ("x"):rep(64)), "begins at byte 32 of the data, expected 0" },
    { container({}, { tensor("x", 24, 0, 1), tensor("y", 24, 1, 1) }, ("x"):rep(64)),
      "byte 1 of the data, expected 32" },
    { container({}, { tensor("x", 24, 0, 64), tensor("y", 24, 32, 1) }, ("x"):rep(96)), "byte 32 of the data" },
    { container({}, { tensor("x", 24, 0, 1), tensor("y", 24, 64, 1) }, ("x"):rep(96)),
      "byte 64 of the data, expected 32" },
    { container({}, { tensor("x", 24, 0, 65) }, ("x"):rep(64)), "needs 65 bytes, but the file ends" },
    { container({}, { tensor("x", 24, 0, (1 << 58) - 1) }, ("x"):rep(64)), "but the file ends" },
    { container({}, { tensor("x", 24, 0, 1) }, ("x"):rep(33)), "longer than it says" },
    { container({}, {}, "x"), "longer than it says" },
  }
  for i, case in ipairs(bad) do
    local message = check.fails(function() load_bytes(case[1]) end, case[2], "hostile file " .. i)
    check.ok(message and message:find("hostile.gguf", 1, true), "the error names the file: " .. tostring(message))
  end
  local t = load_bytes(container({ entry("a", 9, array(9, 2) .. array(0, 2) .. "xy" .. array(8, 0)) }, {
    tensor("x", 24, 0, 2, 1), tensor("y", 24, 32, 1),
  }, "ab" .. ("\0"):rep(30) .. "c"))
  check.equal(t.x:tolist(), { { 97, 98 } }, "a good one")
  check.fails(function() ty.io.load_gguf(file "missing.gguf") end, "No such file")
end)

check.test("cut at every byte, any byte changed", function()
  local bytes = slurp(reference)
  for n = 0, #bytes - 32, 3 do
    if pcall(load_bytes, bytes:sub(1, n)) then check.ok(false, "cut to " .. n .. " bytes it loads") end
  end
  scratch.flips(bytes, 2000, function(broken)
    local ok, got = pcall(load_bytes, broken)
    if ok then
      for _, t in pairs(got) do t:tolist() end
    end
  end)
  check.ok(true, "nothing crashed")
end)

scratch.clean()
check.finish()
