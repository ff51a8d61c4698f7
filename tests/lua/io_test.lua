-- ty.io: JSON, CSV, text and lines, directories, atomic writing, TensorBoard events.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local scratch = dofile(check.root .. "tests/lua/scratch.lua")
local ty = require "tycho"

local file, slurp, spit = scratch.file, scratch.slurp, scratch.spit
local decode, encode, null = ty.io.json_decode, ty.io.json_encode, ty.io.null

-- ---- JSON ----

check.test("JSON: values", function()
  for text, value in pairs {
    ["1"] = 1, ["-7"] = -7, ["1.5"] = 1.5, ["1e3"] = 1000.0, ["0.1"] = 0.1, ["1.0"] = 1.0, ["-0"] = -0.0,
    ["1E-2"] = 0.01,
    ["9007199254740993"] = 9007199254740993, ["9223372036854775807"] = math.maxinteger,
    ["-9223372036854775808"] = math.mininteger,
    ["9223372036854775808"] = 9223372036854775808.0,
    ["123456789012345678901234567890"] = 123456789012345678901234567890.0,
    ["1.7976931348623157e308"] = 1.7976931348623157e308, ["5e-324"] = 5e-324,
    ["2.2250738585072011e-308"] = 2.2250738585072011e-308,
    ["true"] = true, ["false"] = false, ['""'] = "", ['"a\\u0000b"'] = "a\0b", ['"\\ud83d\\ude00"'] = "\u{1F600}",
    ['"\\u00e9"'] = "é",
    ['"\\"\\\\\\/\\b\\f\\n\\r\\t"'] = '"\\/\b\f\n\r\t', ['{"a":[1,{"b":2}],"c":""}'] = { a = { 1, { b = 2 } }, c = "" },
  } do
    local got = decode(text)
    check.equal(got, value, text)
    check.equal(math.type(got), math.type(value), text)
  end
  check.equal(next(decode " [ ] "), nil)
  check.equal(decode "null", null)
  check.equal(tostring(null), "null")
  check.equal(decode "[null,1]", { null, 1 })
end)

check.test("JSON: text", function()
  check.equal(encode { b = 1, a = { 1, 2.5, "x" }, c = { d = true, e = null } },
    '{"a":[1,2.5,"x"],"b":1,"c":{"d":true,"e":null}}')
  check.equal(encode { 1, { x = {} } }, '[1,{"x":{}}]')
  check.equal(encode(ty.io.array {}), "[]")
  check.equal(encode(ty.io.array()), "[]")
  check.equal(encode(decode '{"a":[],"b":{}}'), '{"a":[],"b":{}}')
  check.equal(encode { a = { 1, 2 }, b = {} }, '{"a":[1,2],"b":{}}')
  check.equal(encode({ a = { 1, 2 }, b = {} }, { indent = 2 }), '{\n  "a": [\n    1,\n    2\n  ],\n  "b": {}\n}')
  check.equal(encode(3.0), "3.0")
  check.equal(encode(1e100), "1e+100")
  check.equal(encode(math.mininteger), "-9223372036854775808")
  check.equal(encode 'a"\\\n\0\x7f é', '"a\\"\\\\\\n\\u0000\x7f é"')
  check.equal(encode(nil), "null")
  for _, x in ipairs { 0.1, 1 / 3, -2.5e-300, 5e-324, 1.7976931348623157e308, 123456.789, 2 ^ 53 + 2, 1e23, -0.0 } do
    local back = decode(encode(x))
    check.equal(back, x)
    check.equal(math.type(back), "float")
  end
end)

check.test("JSON: what the encoder refuses", function()
  check.fails(function() encode { loss = { 1, 0 / 0 } } end, "the value at loss[2] is nan")
  check.fails(function() encode { a = { b = { 1 / 0 } } } end, "the value at a.b[1] is infinite")
  check.fails(function() encode(print) end, "the value is a function")
  check.fails(function() encode { x = ty.tensor { 1 } } end, "the value at x is a tensor")
  check.fails(function() encode { 1, 2, nil, 4, x = 1 } end, "neither a list")
  check.fails(function() encode { 1, 2, nil, 4 } end, "neither a list")
  check.fails(function() encode { 1, 2, x = 3 } end, "neither a list")
  check.fails(function() encode { [1.5] = 1 } end, "neither a list")
  check.fails(function() encode { [3] = 1 } end, "neither a list")
  check.fails(function() encode(ty.io.array { x = 1 }) end, "io.array with holes")
  check.fails(function() encode "\xff" end, "not UTF-8")
  check.fails(function() encode { ["\xff"] = 1 } end, "not valid UTF-8")
  local loop = {}
  loop.loop = loop
  check.fails(function() encode(loop) end, "nested too deep, or contains itself")
  check.fails(function() encode({}, { indnt = 1 }) end, "unknown option indnt")
end)

check.test("JSON: what the decoder refuses", function()
  for text, message in pairs {
    [""] = "the end of the text", ["  "] = "line 1, column 3", ["{"] = "expected a string",
    ["[1,]"] = "a comma before ']'",
    ["[1 2]"] = "expected ',' or ']'", ['{"a" 1}'] = "expected ':'", ['{"a":1,}'] = "a comma before '}'",
    ["{a:1}"] = "expected a string",
    ["01"] = "may not begin with 0", ["1."] = "expected a digit", [".5"] = "expected a JSON value",
    ["+1"] = "expected a JSON value",
    ["1e"] = "expected a digit", ["-"] = "expected a digit", ["nul"] = "null, true or false",
    ["NaN"] = "expected a JSON value",
    ["1e999"] = "too large for a double", ["'a'"] = "expected a JSON value", ['"a'] = "ends inside a string",
    ['"\\x"'] = "no JSON escape",
    ['"\\u12g4"'] = "hexadecimal", ['"\\ud800"'] = "surrogate", ['"\\ud800\\u0041"'] = "surrogate",
    ['"\\udc00"'] = "surrogate",
    ['"\n"'] = "control character", ['"\xff"'] = "UTF-8", ['"\xc0\x80"'] = "UTF-8", ['"\xed\xa0\x80"'] = "UTF-8",
    ["1 2"] = "goes on",
    ['{"a":1,"a":2}'] = 'the key "a" is there twice', ["[1,\n2,\n  x]"] = "line 3, column 3", ["[1]\0"] = "goes on",
    [("["):rep(200)] = "nested deeper than 128", [("1"):rep(5000)] = "too many digits",
  } do
    check.fails(function() decode(text) end, message, text:sub(1, 30))
  end
  check.equal(#decode(("["):rep(128) .. ("]"):rep(128)), 1, "128 brackets are fine")
  local text = '{"a":[1,2.5e3,-0,true,null,"x\\u00e9\\ud83d\\ude00\\n"],"b":{"c":[[]]}}'
  for n = 0, #text - 1 do
    if pcall(decode, text:sub(1, n)) then check.ok(false, "cut to " .. n .. " it decodes") end
  end
  scratch.flips(text, 5000, function(broken) pcall(decode, broken) end)
end)

check.test("JSON: files", function()
  ty.io.save_json(file "m.json", { loss = 0.5, steps = 10 })
  check.equal(slurp(file "m.json"), '{\n  "loss": 0.5,\n  "steps": 10\n}\n')
  check.equal(ty.io.load_json(file "m.json"), { loss = 0.5, steps = 10 })
  check.fails(function() ty.io.load_json(spit("bad.json", "{\n]")) end, 'bad.json": line 2, column 1')
  check.fails(function() ty.io.load_json(file "missing.json") end, "No such file")
  check.fails(function() ty.io.save_json(file "m.json", { 0 / 0 }) end, "nan")
  check.equal(ty.io.load_json(file "m.json").steps, 10, "the old file")
end)

-- ---- CSV ----

local function csv(text, options) return ty.io.load_csv(spit("t.csv", text), options) end

check.test("CSV: tables", function()
  local t, names = csv "a,\"b \"\"q\"\", x\", c \n1,2.5,-3e4\r\n\n 4 ,+5.,.5\n"
  check.equal(names, { "a", 'b "q", x', "c" })
  check.equal(t.dtype, "f32")
  check.equal(t:tolist(), { { 1.0, 2.5, -30000.0 }, { 4.0, 5.0, 0.5 } })
  t, names = csv("1,2\n3,4", { dtype = "f64" })
  check.equal({ t:tolist(), t.dtype, names == nil }, { { { 1.0, 2.0 }, { 3.0, 4.0 } }, "f64", true })
  t, names = csv("1,2\n3,4", { header = true })
  check.equal({ t:tolist(), names }, { { { 3.0, 4.0 } }, { "1", "2" } })
  check.equal(csv("0.1,123456789.123456789,1e-320\n", { dtype = "f64" }):tolist(),
    { { 0.1, 123456789.123456789, 1e-320 } }, "exact")
  check.equal(csv("1;2\n", { delimiter = ";" }):tolist(), { { 1.0, 2.0 } })
  check.equal(csv("1\t 2\n", { delimiter = "\t" }):tolist(), { { 1.0, 2.0 } })
  check.equal(csv("  1   2  \n3 4", { delimiter = " " }):tolist(), { { 1.0, 2.0 }, { 3.0, 4.0 } })
  check.equal(csv("# about\n1,2\n", { skip = 1 }):tolist(), { { 1.0, 2.0 } })
  check.equal(csv('\xef\xbb\xbf"1","2"\n'):tolist(), { { 1.0, 2.0 } }, "a mark and quotes")
  local odd = csv("1,,nan,-inf\n", { missing = "nan" }):tolist()[1]
  check.ok(odd[2] ~= odd[2] and odd[3] ~= odd[3] and odd[4] == -math.huge, "missing, nan, inf")
  check.equal(csv("").shape, { 0, 0 })
  check.equal(csv("a,b,c\n").shape, { 0, 3 })
end)

check.test("CSV: errors say where", function()
  check.fails(function() csv "a,b\n1,2\n3,x4\n" end, 'line 3, column 2: "x4" is not a number')
  check.fails(function() csv "1,2\n3\n" end, "line 2, column 1: the row has 1 cells, the rows before have 2")
  check.fails(function() csv "a,b\n1,2,3\n" end, "line 2, column 3: the row has 3 cells")
  check.fails(function() csv "1,2\n3,\n" end, "line 2, column 2: the cell is empty")
  check.fails(function() csv '1,"2\n' end, "line 1, column 2: a quote is not closed")
  check.fails(function() csv '1,"2"3\n' end, "text after the closing quote")
  check.fails(function() csv("a,b\n1,2\n", { header = false }) end, 'line 1, column 1: "a" is not a number')
  check.fails(function() csv("1,2\n3 4,5\n") end, '"3 4" is not a number')
  check.fails(function() csv("1", { delimiter = ",," }) end, "option delimiter")
  check.fails(function() csv("1", { header = 3 }) end, "option header")
  check.fails(function() csv("1", { missing = "zero" }) end, "option missing")
  check.fails(function() csv("1", { dtype = "i64" }) end, "expected f32 or f64")
  check.fails(function() csv("1,2\n3,4\n", { max = 5 }) end, "more than the 5 bytes allowed")
  check.fails(function() ty.io.load_csv(file "missing.csv") end, "No such file")
end)

-- ---- text ----

local GZIP = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff" -- a gzip header; stored blocks follow

local function gzip(text)
  local crc = 0xffffffff
  for i = 1, #text do
    crc = crc ~ text:byte(i)
    for _ = 1, 8 do crc = crc >> 1 ~ (crc & 1 == 1 and 0xedb88320 or 0) end
  end
  return GZIP .. "\1" .. string.pack("<I2I2", #text, ~#text & 0xffff) .. text
    .. string.pack("<I4I4", ~crc & 0xffffffff, #text)
end

local function lines(path)
  local list = {}
  for line in ty.io.lines(path) do list[#list + 1] = line end
  return list
end

check.test("text: read, lines, gzip", function()
  local text = "one\r\ntwo\n\nthree"
  local members = gzip(text:sub(1, 7)) .. gzip(text:sub(8))
  for name, content in pairs { ["t.txt"] = text, ["t.gz"] = gzip(text), ["two.gz"] = members } do
    check.equal(ty.io.read(spit(name, content)), text, name)
    check.equal(lines(file(name)), { "one", "two", "", "three" }, name)
  end
  check.equal(ty.io.read(spit("empty", "")), "")
  check.equal(lines(file "empty"), {})
  check.equal(lines(spit("end.txt", "a\n")), { "a" })
  local long = ("x"):rep(200000)
  check.equal(lines(spit("long.txt", long .. "\n" .. long .. "y")), { long, long .. "y" })
  check.equal(ty.io.load_csv(spit("t.csv.gz", gzip "1,2\n")):tolist(), { { 1.0, 2.0 } })
  check.equal(ty.io.load_json(spit("t.json.gz", gzip "[1]")), { 1 })
  check.fails(function() ty.io.read(file "t.txt", { max = 5 }) end, "more than the 5 bytes allowed")
  check.fails(function() ty.io.read(spit("cut.gz", gzip(text):sub(1, -9))) end, "cut short")
  check.fails(function() ty.io.read(spit("bad.gz", (gzip(text):gsub("three", "throw")))) end, "data check")
  check.fails(function() lines(file "bad.gz") end, "data check")
  check.fails(function() ty.io.read(file "missing") end, "No such file")
  check.fails(function() ty.io.read(scratch.folder) end, "directory")
  check.fails(function()
    for _ in ty.io.lines(file "t.txt") do error "stop" end
  end, "stop")
  scratch.flips(gzip(text), 1000, function(broken)
    spit("broken.gz", broken)
    pcall(ty.io.read, file "broken.gz")
    pcall(lines, file "broken.gz")
  end)
end)

check.test("write_atomic", function()
  local path = file "atomic.txt"
  ty.io.write_atomic(path, "old")
  ty.io.write_atomic(path, "new\0text")
  check.equal(slurp(path), "new\0text")
  ty.io.write_atomic(path, "")
  check.equal(slurp(path), "")
  scratch.run("chmod 640 '" .. path .. "' && ln -s atomic.txt '" .. file "link" .. "'")
  ty.io.write_atomic(file "link", "through the link")
  check.equal(slurp(path), "through the link")
  check.ok(scratch.run("test -L '" .. file "link" .. "'"), "the link stays")
  check.ok(scratch.run("test $(stat -c %a '" .. path .. "') = 640"), "the mode stays")
  check.fails(function() ty.io.write_atomic(scratch.folder, "x") end, "it is a directory")
  check.fails(function() ty.io.write_atomic(file "none/x", "x") end, "No such file")
  for _, name in ipairs(scratch.list()) do check.ok(not name:find "%.tmp$", "no temporary file is left") end
end)

check.test("directories", function()
  local d = file "d"
  ty.io.mkdir(d .. "/e/f/")
  ty.io.mkdir(d .. "/e/f")
  for _, name in ipairs { "b", "a", "B", "é" } do spit("d/" .. name, name) end
  check.equal(ty.io.listdir(d), { "B", "a", "b", "e", "é" })
  local s = ty.io.stat(d .. "/é")
  check.equal({ s.kind, s.size }, { "file", 2 })
  check.ok(math.abs(s.mtime - os.time()) < 100, "mtime")
  check.equal(ty.io.stat(d).kind, "directory")
  check.equal(ty.io.stat(d .. "/none"), nil)
  check.equal(ty.io.stat(d .. "/a/none"), nil)
  check.equal({ ty.io.exists(d), ty.io.exists(d .. "/none") }, { true, false })
  check.fails(function() ty.io.mkdir(d .. "/a/x") end, "File exists")
  check.fails(function() ty.io.mkdir(d .. "/a") end, "File exists")
  check.fails(function() ty.io.mkdir "" end, "expected a path, with characters")
  check.fails(function() ty.io.remove(d) end, "not empty")
  check.fails(function() ty.io.remove(d .. "/none") end, "No such file")
  check.fails(function() ty.io.listdir(d .. "/none") end, "No such file")
  ty.io.remove(d .. "/a")
  ty.io.remove(d .. "/e/f")
  check.equal(ty.io.listdir(d), { "B", "b", "e", "é" })
end)

-- ---- TensorBoard ----

local function crc32c(text)
  local crc = 0xffffffff
  for i = 1, #text do
    crc = crc ~ text:byte(i)
    for _ = 1, 8 do crc = crc >> 1 ~ (crc & 1 == 1 and 0x82f63b78 or 0) end
  end
  crc = ~crc & 0xffffffff
  return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff
end

-- The fields of a protobuf message: { number, value } each
local function fields(text)
  local list, at = {}, 1
  local function varint()
    local n, shift = 0, 0
    while true do
      local b = text:byte(at)
      at = at + 1
      n = n | (b & 127) << shift
      shift = shift + 7
      if b < 128 then return n end
    end
  end
  while at <= #text do
    local tag = varint()
    local kind, value = tag & 7
    if kind == 0 then value = varint()
    elseif kind == 1 then value, at = string.unpack("<d", text, at)
    elseif kind == 5 then value, at = string.unpack("<f", text, at)
    else
      local size = varint()
      value, at = text:sub(at, at + size - 1), at + size
    end
    list[#list + 1] = { tag >> 3, value }
  end
  return list
end

check.test("TensorBoard events", function()
  local writer, path = ty.io.event_writer(file "runs/one")
  check.ok(path:find "/runs/one/events%.out%.tfevents%.%d+%.", "the name that TensorBoard looks for: " .. path)
  check.equal(writer:scalar("loss", 0.5, 0, 1000.25), writer)
  writer:scalar("acc/é", -3, 1 << 40, 2000)
  writer:scalar("loss", 1e30, -1)
  writer:flush()
  local bytes, at, records = slurp(path), 1, {}
  while at <= #bytes do
    local size, crc = string.unpack("<I8I4", bytes, at)
    check.equal(crc, crc32c(bytes:sub(at, at + 7)), "checksum of the length")
    local data = bytes:sub(at + 12, at + 11 + size)
    check.equal(string.unpack("<I4", bytes, at + 12 + size), crc32c(data), "checksum of the data")
    records[#records + 1] = fields(data)
    at = at + 16 + size
  end
  check.equal(records[1][2], { 3, "brain.Event:2" })
  check.equal({ records[2][1], records[2][2] }, { { 1, 1000.25 }, { 2, 0 } })
  local function summary(record) return fields(fields(record[3][2])[1][2]) end
  check.equal(summary(records[2]), { { 1, "loss" }, { 2, 0.5 } })
  check.equal({ records[3][2], summary(records[3]) }, { { 2, 1 << 40 }, { { 1, "acc/é" }, { 2, -3.0 } } })
  check.equal(records[4][2], { 2, -1 })
  check.equal(#records, 4)
  local _, other = ty.io.event_writer(file "runs/one")
  check.ok(other ~= path, "another writer has another file")
  writer:close()
  writer:close()
  check.fails(function() writer:scalar("loss", 1, 1) end, "it is closed")
  do
    local w <close>, p = ty.io.event_writer(file "runs/two")
    w:scalar("x", 1, 1)
    path = p
  end
  check.ok(#slurp(path) > 60, "closed at the end of the block")
  check.fails(function() ty.io.event_writer(file "runs/two"):scalar("\xff", 1, 1) end, "UTF-8")
  check.fails(function() ty.io.event_writer(file "runs/two"):scalar("x", "y", 1) end,
    'scalar: argument 3: expected a number, got "y"')
  check.fails(function() ty.io.event_writer(file "atomic.txt") end, "File exists")
  check.fails(function() writer.scalar({}, "x", 1, 1) end, "event writer expected")
end)

check.test("JSON has a budget of values, which the option values raises", function()
  local allowed = "more than the %s values allowed; the option values allows more"
  check.fails(function() decode("[1, {}, []]", { values = 3 }) end, "column 9: " .. allowed:format(3))
  check.equal(#decode("[1, {}, []]", { values = 4 }), 3)
  check.equal(decode('{"a": {"b": 1}}', { values = 3 }), { a = { b = 1 } })
  check.fails(function() decode('{"a": {"b": 1}}', { values = 2 }) end, allowed:format(2))
  local path = spit("many.json", "[" .. ("[],"):rep(4 << 20) .. "0]")
  collectgarbage()
  local before = collectgarbage "count"
  check.fails(function() ty.io.load_json(path) end, 'many.json": line 1, .*' .. allowed:format(4194304))
  check.ok(collectgarbage "count" - before < 500 * 1024, "KiB")
  check.equal(ty.io.load_json(spit("few.json", "[1, 2]"), { values = 3 }), { 1, 2 })
  check.fails(function() ty.io.load_json(path, { values = -1 }) end, "option values")
end)

check.test("compressed files inflate to a limit, which the option max raises", function()
  -- A file of `megabytes` of the text, gzipped: about a thousandth of it.
  local function bomb(name, text, megabytes)
    local path = file(name)
    assert(os.execute(("yes '%s' | tr -d '\\n' | head -c %d | gzip -1 > '%s'"):format(text, megabytes << 20, path)))
    return path
  end
  local allowed = "bytes allowed; the option max allows more"
  local numbers, json = bomb("bomb.csv.gz", "1,", 258), bomb("bomb.json.gz", "[],", 65)
  check.fails(function() ty.io.load_csv(numbers) end, allowed)
  check.fails(function() ty.io.read(numbers) end, "has more than the 268435456 " .. allowed)
  check.fails(function() for _ in ty.io.lines(numbers) do check.ok(false, "no line") end end, "a line of more than the")
  check.fails(function() ty.io.load_json(json) end, "has more than the 67108864 " .. allowed)
  local small = bomb("small.txt.gz", "ab", 2)
  check.equal(#ty.io.read(small), 2 << 20)
  check.fails(function() ty.io.read(small, { max = 1000 }) end, "more than the 1000 " .. allowed)
  check.equal(#ty.io.read(json, { max = 1 << 29 }), 65 << 20)
  check.fails(function() ty.io.lines(small, { max = 100 })() end, "has a line of more than the 100 " .. allowed)
  check.fails(function() ty.io.load_json(json, { max = -1 }) end, "option max")
  local npz = file "zeros.npz"
  ty.io.save_npz(npz, { a = ty.zeros(1 << 20), b = ty.zeros(1 << 20) }, { compress = true })
  check.equal(ty.io.load_npz(npz).a:numel(), 1 << 20)
  check.fails(function() ty.io.load_npz(npz, { max = 5 << 20 }) end, "more than the 5242880 allowed; the option max")
  check.fails(function() ty.data.npz(npz, { max = 5 << 20 }) end, "the option max")
end)

check.test("a number longer than numbers are is an error, not a name", function()
  local path = file "long.csv"
  for _, text in ipairs { ("1"):rep(5000), "a,b\n1," .. ("0"):rep(2000) .. "1\n",
    "\"" .. ("x"):rep(3000) .. "\"\n1\n" } do
    ty.io.write_atomic(path, text)
    check.fails(function() ty.io.load_csv(path) end, "a cell of %d+ characters; 1023 are the most")
  end
  ty.io.write_atomic(path, ("0"):rep(1000) .. "7,1\n")
  check.equal(ty.io.load_csv(path):tolist(), { { 7, 1 } })
end)

scratch.clean()
check.finish()
