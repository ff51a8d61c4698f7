-- Samplers, streams, lines of JSON, tar archives and sound (lua/tycho/data).

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"
local data = ty.data
local test, equal, fails = check.test, check.equal, check.fails

local folder = os.tmpname()
os.remove(folder)
ty.io.mkdir(folder)

local function write(name, bytes)
  local path = folder .. "/" .. name
  local file <close> = assert(io.open(path, "wb"))
  file:write(bytes)
  return path
end

local function positions(n) return data.from_function(n, function(i) return { id = i } end) end

local function ids(loader)
  local list = {}
  for batch in loader do
    for _, i in ipairs(batch.id:tolist()) do list[#list + 1] = math.tointeger(i) end
  end
  return list
end

test("weighted sampler: shares, without replacement, by the seed alone", function()
  local sampler = data.WeightedSampler({ 1, 0, 3 }, { count = 4000 })
  local counts = { [0] = 0, 0, 0 }
  for _, i in ipairs(sampler:order(3):tolist()) do counts[i] = counts[i] + 1 end
  equal(counts[1], 0)
  check.ok(math.abs(counts[2] / 4000 - 0.75) < 0.03, counts[2])
  equal(sampler:order(3):tolist(), sampler:order(3):tolist())
  check.ok(not ty.equal(sampler:order(3), sampler:order(4)))
  local each = data.WeightedSampler({ 1, 2, 0, 4 }, { count = 3, replacement = false })
  local firsts = { [0] = 0, 0, 0, 0 }
  for seed = 1, 700 do
    local order = each:order(seed):tolist()
    firsts[order[1]] = firsts[order[1]] + 1
    table.sort(order)
    equal(order, { 0, 1, 3 })
  end
  check.ok(math.abs(firsts[3] / 700 - 4 / 7) < 0.07 and math.abs(firsts[0] / 700 - 1 / 7) < 0.05)
  local loader = data.DataLoader(positions(3), { batch_size = 500, sampler = sampler })
  equal(#loader, 8)
  local first, second = ids(loader), ids(loader)
  equal(#first, 4000)
  check.ok(table.concat(first) ~= table.concat(second), "another order in each epoch")
  fails(function() data.WeightedSampler { 0, 0 } end, "WeightedSampler: weights: expected finite numbers >= 0")
  fails(function() data.WeightedSampler { -1 } end, "weights")
  fails(function() data.WeightedSampler({ 1, 0 }, { count = 2, replacement = false }) end, "at most the 1 positions")
  fails(function() data.DataLoader(positions(2), { sampler = sampler }):next() end, "expected positions from 0 to 1")
  fails(function() data.DataLoader(positions(3), { sampler = sampler, shuffle = true }) end, "shuffle: expected none")
  fails(function() data.DataLoader(positions(3), { sampler = 3 }) end, "sampler: expected one with order(seed)")
end)

test("distributed sampler: the ranks share an epoch", function()
  for _, n in ipairs { 10, 12 } do
    local seen = {}
    for rank = 0, 3 do
      local sampler = data.DistributedSampler(n, { rank = rank, ranks = 4 })
      equal(#sampler, 3)
      for _, i in ipairs(sampler:order(5):tolist()) do seen[i] = (seen[i] or 0) + 1 end
    end
    for i = 0, n - 1 do check.ok(seen[i] == 1 or (n == 10 and seen[i] == 2), i) end
  end
  equal(#data.DistributedSampler(10, { ranks = 4, drop_last = true }), 2)
  equal(data.DistributedSampler(4, { rank = 1, ranks = 2, shuffle = false }):order(0):tolist(), { 1, 3 })
  fails(function() data.DistributedSampler(4, { rank = 2, ranks = 2 }) end, "rank: expected one of the 2 ranks")
end)

local function counter(n)
  return data.stream(function()
    local i = 0
    return function()
      i = i + 1
      return i <= n and i or nil
    end
  end)
end

local function list_of(stream)
  local list = {}
  for item in stream do list[#list + 1] = item end
  return list
end

test("streams", function()
  local s = counter(10)
  equal(list_of(s), list_of(s))
  equal(list_of(s:map(function(i) return i * i end):filter(function(i) return i % 2 == 0 end):take(3)), { 4, 16, 36 })
  equal(list_of(s:skip(8)), { 9, 10 })
  local shuffled = s:shuffle(4, 1)
  local a, b = list_of(shuffled), list_of(shuffled)
  check.ok(table.concat(a, " ") ~= table.concat(b, " "), "another order in each loop")
  equal(list_of(s:shuffle(4, 1)), a)
  table.sort(a)
  equal(a, list_of(s))
  equal(#list_of(s:shuffle(4000)), 10)
  local sizes = {}
  for batch in s:map(function(i) return { x = ty.full({ 2 }, i), id = i } end):batch(4) do
    sizes[#sizes + 1] = batch.x:size(0)
    equal(batch.x:select(1, 0):to("i64"):tolist(), batch.id:tolist())
  end
  equal(sizes, { 4, 4, 2 })
  equal(#list_of(s:batch(4, { drop_last = true })), 2)
  fails(function() list_of(s:map(function() end)) end, "Stream:map: fn: expected a value for each item, got nil")
  fails(function() s:take(-1) end, "Stream:take: count")
  local tables = s:map(function(i) return { i } end)
  fails(function()
    for _ in tables do list_of(tables:take(1)) end -- of its own
    for _ in tables do
      for _ in tables do list_of(tables) end
    end
  end, "Stream: another loop has gone over this stream")
  fails(function() data.stream(3) end, "data.stream: make: expected a function, got 3")
end)

test("streams made ahead by a thread", function()
  local s = counter(10)
  local ahead = s:map(function(i) return { x = (require "tycho").full({ 3 }, i), id = i } end):batch(4):prefetch()
  for _ = 1, 2 do -- a second loop begins at the front
    local all = {}
    for batch in ahead do table.move(batch.id:tolist(), 1, batch.id:numel(), #all + 1, all) end
    equal(all, list_of(s))
  end
  equal(ahead()().x:sum(1):tolist(), { 3, 6, 9, 12 })
  equal(#list_of(ahead), 3, "after a loop that was left")
  -- Orders go on from loop to loop there as they do here.
  local here, there = s:shuffle(4, 1), s:shuffle(4, 1):prefetch(3)
  for _ = 1, 3 do equal(list_of(there), list_of(here)) end
  equal(list_of(s:take(0):prefetch()), {})
  equal(list_of(s:prefetch(100):filter(function(i) return i > 8 end)), { 9, 10 })
  local broken = s:map(function(i) return i < 3 and i or error "no third" end):prefetch()
  local seen = {}
  fails(function() for i in broken do seen[#seen + 1] = i end end, "no third")
  equal(seen, { 1, 2 })
  fails(function()
    local first = ahead()
    first()
    ahead()
    first()
  end, "Stream:prefetch: another loop has begun")
  fails(function() s:prefetch(0) end, "Stream:prefetch: count: expected an integer in [1, 65536], got 0")
end)

test("lines of JSON", function()
  local path = write("a.jsonl", '{"text": "one", "label": 1}\n\n{"text": "zwei\\n", "label": 2}\r\n'
    .. '{"text": "3", "label": 3}')
  local set = data.jsonl(path)
  equal(#set, 3)
  equal(set:get(1), { text = "zwei\n", label = 2 })
  equal(data.jsonl(path, { fields = { "label" } }):get(2), { label = 3 })
  for _, workers in ipairs { 0, 2 } do
    local loader <close> = data.DataLoader(set, { batch_size = 3, workers = workers })
    local batch = loader:next()
    equal({ batch.text, batch.label:tolist() }, { { "one", "zwei\n", "3" }, { 1, 2, 3 } })
  end
  set = data.jsonl(write("b.jsonl", '{"a": 1}\n{"a": \n'))
  equal(set:get(0).a, 1)
  fails(function() set:get(1) end, "b.jsonl: item 1: ")
  fails(function() data.jsonl(write("c.jsonl", "\n\n")) end, "has no lines")
  fails(function() data.jsonl(folder .. "/none") end, "data.jsonl: ")
  fails(function() set:get(2) end, "position: expected an integer in [0, 1]")
end)

-- A tar archive by the POSIX standard.
local function tar(files)
  local parts = {}
  local function entry(name, kind, bytes)
    local header = string.pack("c100c8c8c8c12c12c8c1c100c6c2c32c32c8c8c155c12", name, "0000644\0", "0000000\0",
      "0000000\0", ("%011o\0"):format(#bytes), "00000000000\0", "        ", kind, "", "ustar", "00", "", "",
      "0000000\0", "0000000\0", "", "")
    local sum = 0
    for i = 1, 512 do sum = sum + header:byte(i) end
    header = header:sub(1, 148) .. ("%06o\0 "):format(sum) .. header:sub(157)
    parts[#parts + 1] = header .. bytes .. ("\0"):rep(-#bytes % 512)
  end
  for _, file in ipairs(files) do
    if #file[1] > 100 then entry("long", "L", file[1] .. "\0") end
    entry(file[1]:sub(1, 100), "0", file[2])
  end
  return table.concat(parts) .. ("\0"):rep(1024)
end

local picture = ty.randint(0, 256, { 3, 12, 10 }):to "u8"

test("tar archives", function()
  local png = ty.io.encode_png(picture)
  local long = ("folder/"):rep(20) .. "c"
  local path = write("a.tar", tar {
    { "a.png", png }, { "a.json", '{"w": 10}' }, { "a.cls", "7\n" }, { "README", "no ending" },
    { "b.txt", "words" }, { "b.seg.png", png }, { long .. ".bin", "\0\1" },
  })
  local set = data.shards(path)
  equal(#set, 3)
  local a, b, c = set:get(0), set:get(1), set:get(2)
  check.ok(ty.equal(a.image, picture))
  equal({ a.key, a.json, a.label }, { "a", { w = 10 }, 7 })
  equal({ b.key, b.txt, b["seg.png"].shape }, { "b", "words", { 3, 12, 10 } })
  equal({ c.key, c.bin }, { long, "\0\1" })
  equal(data.shards(path, { decode = false }):get(0).cls, "7\n")
  equal(data.shards({ path, path }, { size = 6 }):get(3).image.shape, { 3, 6, 6 })
  local bad = data.shards(write("b.tar", tar { { "a.png", "no picture" }, { "b.cls", "seven" }, { "c.json", "{" } }))
  fails(function() bad:get(0) end, "b.tar: a.png: ")
  fails(function() bad:get(1) end, 'expected an integer, got "seven"')
  fails(function() bad:get(2) end, "b.tar: c.json: ")
  fails(function() data.shards(write("c.tar", "no archive" .. ("x"):rep(2000))) end, "no header of a tar archive")
  fails(function() data.shards(write("d.tar", tar {})) end, "has no files with endings")
  local bytes = tar { { "a.txt", ("x"):rep(2000) } }
  fails(function() data.shards(write("e.tar", bytes:sub(1, 1000))) end, "the file is cut short")
  math.randomseed(1)
  for _ = 1, 400 do
    local at = math.random(#bytes)
    local changed = bytes:sub(1, at - 1) .. string.char(math.random(0, 255)) .. bytes:sub(at + 1)
    local ok, message = pcall(function() data.shards(write("f.tar", changed)):get(0) end)
    check.ok(ok or tostring(message):find("data.shards:", 1, true), message)
  end
end)

test("WAV files: there and back, and broken ones", function()
  ty.manual_seed(2)
  local sound = ty.rand(2, 1001) * 2 - 1
  for _, bits in ipairs { 8, 16, 24, 32 } do
    local path = folder .. "/a.wav"
    data.save_wav(path, sound, 8000, { bits = bits })
    local back, rate = data.load_wav(path)
    equal({ rate, back.shape }, { 8000, { 2, 1001 } })
    local most = bits == 32 and 0 or 2.0 ^ (1 - bits)
    check.ok((back - sound):abs():max():item() <= most, bits)
  end
  data.save_wav(folder .. "/a.wav", ty.tensor { 2.0, -2, 0.5 }, 44100)
  check.close(data.load_wav(folder .. "/a.wav"):tolist(), { { 32767 / 32768, -1, 0.5 } }, 1e-9)
  local bytes = ty.io.read(folder .. "/a.wav")
  for n = 0, #bytes - 3 do
    fails(function() data.load_wav(write("b.wav", bytes:sub(1, n))) end, "data.load_wav: ")
  end
  math.randomseed(2)
  for _ = 1, 400 do
    local at = math.random(#bytes)
    local changed = bytes:sub(1, at - 1) .. string.char(math.random(0, 255)) .. bytes:sub(at + 1)
    local ok, message = pcall(data.load_wav, write("c.wav", changed))
    check.ok(ok or tostring(message):find("data.load_wav:", 1, true), message)
  end
  local whole = ty.ones({ 2 }, { dtype = "i64" })
  fails(function() data.save_wav(folder .. "/d.wav", whole, 8000) end, "sound: expected floats")
  fails(function() data.save_wav(folder .. "/d.wav", sound, 8000, { bits = 12 }) end, "bits: expected 8 or 16 or 24")
end)

test("another rate: a tone stays the tone, and the sum over a windowed sinc", function()
  local function tone(rate, n) return (ty.arange(n):to "f64" * (2 * math.pi * 440 / rate)):sin() end
  for _, rates in ipairs { { 16000, 22050 }, { 22050, 16000 }, { 8000, 48000 }, { 44100, 8000 } } do
    local old, new = rates[1], rates[2]
    local y = data.resample(tone(old, old // 4), old, new, { zeros = 32 })
    equal(y.shape[1], math.ceil((old // 4) * new / old))
    local n = y:numel()
    local middle = ("%d:%d"):format(n // 4, 3 * n // 4)
    check.ok((y[middle] - tone(new, n)[middle]):abs():max():item() < 2e-3, old .. " to " .. new)
  end
  -- One sample by the definition.
  local x = ty.randn({ 50 }, { dtype = "f64" })
  local y, zeros, base = data.resample(x, 3, 2), 6, 2 * 0.99
  local list, sum, j = x:tolist(), 0, 13
  for i = 0, 49 do
    local t = (i / 3 - j / 2) * base
    if math.abs(t) < zeros then
      local sinc = t == 0 and 1 or math.sin(math.pi * t) / (math.pi * t)
      sum = sum + list[i + 1] * sinc * math.cos(math.pi * t / zeros / 2) ^ 2 * base / 3
    end
  end
  check.close(y[j]:item(), sum, 1e-12)
  equal(data.resample(ty.zeros(2, 3, 10), 2, 3).shape, { 2, 3, 15 })
  equal(data.resample(ty.zeros(0, 10), 2, 3).shape, { 0, 15 })
  local w = ty.ones(20):requires_grad_()
  data.resample(w, 2, 1):sum():backward()
  check.ok(w.grad:isfinite():all():item())
  fails(function() data.resample(x, 44101, 48000) end, "a ratio of small numbers")
end)

for _, name in ipairs(ty.io.listdir(folder)) do os.remove(folder .. "/" .. name) end
os.remove(folder)
check.finish()
