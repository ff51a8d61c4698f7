-- Datasets, loaders, readers, worker threads.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local data = ty.data

local function numbers(n) return data.TensorDataset { x = ty.arange(n):to "f32" * 2, id = ty.arange(n) } end

-- The ids of the next `count` batches.
local function ids(loader, count)
  local result = {}
  for i = 1, count do result[i] = loader:next().id:tolist() end
  return result
end

check.test("tensor datasets", function()
  local ds = numbers(10)
  check.equal(#ds, 10)
  check.equal(ds:get(3).x:item(), 6)
  check.equal(ds:batch(ty.tensor { 1, 4 }).id:tolist(), { 1, 4 })
  check.equal(ds:batch({ 1, 4 }).id:tolist(), { 1, 4 })
  check.equal(data.subset(ds, { 2, 3 }):batch({ 1 }).id:tolist(), { 3 })
  check.fails(function() ds:batch(3) end, "batch: positions: expected a list of integers or a tensor, got 3")
  check.fails(function() ds:get(10) end, "position 10 is out of range for 10")
  check.fails(function() data.TensorDataset { a = ty.zeros(2), b = ty.zeros(3) } end, "items")
  check.fails(function() data.TensorDataset { a = 3 } end, "expected a tensor of at least one dimension, got 3")
end)

check.test("subsets, maps, joins, functions", function()
  local ds = data.subset(numbers(10), { 7, 8, 9 })
  check.equal(#ds, 3)
  check.equal(ds:get(1).id:item(), 8)
  local mapped = data.map(ds, function(item, i) return { y = item.id:item() + 100 * i } end)
  check.equal(mapped:get(2).y, 209)
  local joined = data.concat { ds, numbers(2) }
  check.equal(#joined, 5)
  check.equal(joined:get(4).id:item(), 1)
  local squares = data.from_function(4, function(i) return i * i end)
  local seen = {}
  for i, item in squares:each() do seen[i + 1] = item end
  check.equal(seen, { 0, 1, 4, 9 })
end)

check.test("lists are dealt by turns, and documents end at empty lines", function()
  local hands, rest = data.deal({ "a", "b", "c", "d", "e", "f", "g" }, 3, { 3 })
  check.equal(hands, { { "a", "d", "g" }, { "b", "e" }, { "c", "f" } })
  check.equal(rest, { "a", "b", "d", "e", "g" })
  check.equal(data.deal({}, 2), { {}, {} })
  check.fails(function() data.deal({}, 0) end, "data.deal: hands: expected an integer in [1, 1000000], got 0")
  check.equal(data.documents "one\ntwo\n\n\nthree", { "one\ntwo\n", "three\n" })
end)

check.test("splits are disjoint, complete and seeded", function()
  local a, b = data.split(numbers(101), { 0.8, 0.2 }, { seed = 3 })
  check.equal({ #a, #b }, { 80, 21 })
  local count = {}
  for _, part in ipairs { a, b } do
    for _, item in part:each() do count[item.id:item()] = (count[item.id:item()] or 0) + 1 end
  end
  for i = 0, 100 do check.equal(count[i], 1) end
  local again = data.split(numbers(101), { 0.8, 0.2 }, { seed = 3 })
  check.equal(again.positions:tolist(), a.positions:tolist())
  check.equal(data.split(numbers(101), { 0.8, 0.2 }, { seed = 4 }).positions:tolist()[1] ~= nil, true)
  local c, d = data.split(numbers(10), { 3, 4 })
  check.equal({ #c, #d }, { 3, 4 })
  check.fails(function() data.split(numbers(10), { 8, 4 }) end, "need 12 items")
end)

check.test("collation goes by field", function()
  local batch = data.collate {
    { x = ty.ones(2), y = 1, name = "a", ok = true }, { x = ty.zeros(2), y = 2, name = "b", ok = false },
  }
  check.equal(batch.x:tolist(), { { 1, 1 }, { 0, 0 } })
  check.equal(batch.y:tolist(), { 1, 2 })
  check.equal(batch.y.dtype, "i64")
  check.equal(batch.name, { "a", "b" })
  check.equal(batch.ok:tolist(), { true, false })
  check.fails(function() data.collate { { x = 1 }, { y = 1 } } end, "lacks the field 'x'")
  check.fails(function() data.collate { print } end,
    "expected tensors, numbers, booleans, strings or tables of them, got a function")
end)

check.test("loaders: order, remainder, seeds", function()
  local loader = data.DataLoader(numbers(7), { batch_size = 3 })
  check.equal(#loader, 3)
  check.equal(ids(loader, 4), { { 0, 1, 2 }, { 3, 4, 5 }, { 6 }, { 0, 1, 2 } })
  local dropping = data.DataLoader(numbers(7), { batch_size = 3, drop_last = true })
  check.equal(ids(dropping, 3), { { 0, 1, 2 }, { 3, 4, 5 }, { 0, 1, 2 } })
  ty.manual_seed(1)
  local rng = ty.rng_state()
  local a = data.DataLoader(numbers(8), { batch_size = 4, shuffle = true, seed = 5 })
  local first, second = ids(a, 2), ids(a, 2)
  check.equal(ty.rng_state(), rng, "the default generator is left alone")
  local sorted = { table.unpack(first[1]) }
  for _, v in ipairs(first[2]) do sorted[#sorted + 1] = v end
  table.sort(sorted)
  check.equal(sorted, { 0, 1, 2, 3, 4, 5, 6, 7 })
  check.equal(table.concat(first[1], ",") ~= table.concat(second[1], ","), true, "epochs differ")
  check.equal(ids(data.DataLoader(numbers(8), { batch_size = 4, shuffle = true, seed = 5 }), 2), first)
  local count = 0
  for batch in data.DataLoader(numbers(7), { batch_size = 2 })() do count = count + batch.id:numel() end
  check.equal(count, 7)
  check.fails(function() data.DataLoader(numbers(2), { batch_size = 3, drop_last = true }) end, "make no batch")
  check.fails(function() data.DataLoader(numbers(2), { batch = 3 }) end, "no option 'batch'")
end)

check.test("for batch in loader: one epoch, with and without workers", function()
  local function threads()
    local count = 0
    for _ in ipairs(ty.io.listdir "/proc/self/task") do count = count + 1 end
    return count
  end
  local before = threads()
  for workers = 0, 2, 2 do
    local loader = data.DataLoader(numbers(7), { batch_size = 3, workers = workers })
    for _ = 1, 2 do
      local seen = {}
      for batch in loader do seen[#seen + 1] = batch.id:tolist() end
      check.equal(seen, { { 0, 1, 2 }, { 3, 4, 5 }, { 6 } })
    end
    check.equal(loader.epoch, 2)
    loader:next()
    local rest = 0
    for batch in loader do rest = rest + batch.id:numel() end
    check.equal(rest, 4, "what is left of an epoch")
    local first, second = {}, nil
    for batch in loader do
      first[#first + 1] = batch.id:tolist()
      second = second or loader:next().id:tolist()
    end
    check.equal({ first, second }, { { { 0, 1, 2 }, { 6 } }, { 3, 4, 5 } }, "next() within a loop")
    -- Left early, with the loader alive: the collector ends the threads.
    for batch in loader do if batch then break end end
    collectgarbage()
    collectgarbage()
    check.equal(threads(), before, "threads after a loop that was left")
    local seen = {}
    for batch in loader do seen[#seen + 1] = batch.id:tolist() end
    check.equal(seen, { { 0, 1, 2 }, { 3, 4, 5 }, { 6 } }, "the next loop begins at the front")
    for batch in loader() do if batch then break end end
    check.equal(threads(), before, "loader() ends them at once")
    check.equal({ loader.epoch, loader.position }, { 7, 0 })
    check.fails(function()
      for _ in loader do for b in loader do if b then break end end end
    end, "need a loader each")
    check.fails(function()
      for _ in loader() do for b in loader() do if b then break end end end
    end, "need a loader each")
    loader:close()
  end
  local plain = data.DataLoader(data.from_function(4, function(i) return i end), { batch_size = 2, workers = 1,
    collate = function(items) return items[1] .. "-" .. items[2] end })
  local seen = {}
  for batch in plain do seen[#seen + 1] = batch end
  check.equal(seen, { "0-1", "2-3" }, "batches of any kind")
  plain:close()
  check.equal(threads(), before)
end)

check.test("what is printed", function()
  local ds = data.TensorDataset { image = ty.zeros(10, 1, 8, 8), label = ty.arange(10) }
  local text = "TensorDataset of 10 items { image f32 [1, 8, 8], label i64 [] }"
  check.equal(tostring(ds), text)
  check.equal(tostring(data.subset(ds, { 1, 2 })), "Subset of 2 items from " .. text)
  check.equal(tostring(data.map(ds, print)), "Mapped of 10 items from " .. text)
  check.equal(tostring(data.concat { ds, ds }), ("Joined of 20 items from %s, %s"):format(text, text))
  check.equal(tostring(data.from_function(3, print)), "Dataset of 3 items")
  local class = data.class "Pairs"
  check.equal(tostring(setmetatable({ size = 4 }, class)), "Pairs of 4 items")
  local loader = data.DataLoader(ds, { batch_size = 4, shuffle = true, workers = 2 })
  check.equal(tostring(loader),
    "DataLoader of 3 batches of 4 from " .. text .. ", shuffled, 2 workers, at epoch 0, batch 0")
  loader:next()
  check.ok(tostring(loader):find("at epoch 0, batch 1", 1, true))
  loader:close()
end)

check.test("loaders resume in the middle of an epoch", function()
  local options = { batch_size = 3, shuffle = true, seed = 2 }
  local a = data.DataLoader(numbers(20), options)
  ids(a, 10)
  local state = a:state_dict()
  local b = data.DataLoader(numbers(20), options)
  b:load_state_dict(state)
  check.equal(ids(b, 9), ids(a, 9))
end)

check.test("random numbers in a dataset depend on the batch alone", function()
  local noisy = data.from_function(6, function(i) return { id = i, r = require "tycho".rand(1):item() } end)
  local function draw(workers)
    local loader = data.DataLoader(noisy, { batch_size = 2, seed = 9, workers = workers })
    local result = {}
    for i = 1, 6 do result[i] = loader:next().r:tolist() end
    loader:close()
    return result
  end
  local alone = draw(0)
  check.equal(draw(0), alone)
  check.equal(draw(1), alone)
  check.equal(draw(2), alone)
  check.equal(table.concat(alone[1], ",") ~= table.concat(alone[4], ","), true, "epochs differ")
end)

check.test("worker threads give the same batches", function()
  local offset = 100
  local mapped = data.map(numbers(23), function(item) return { id = item.id:item(), y = item.x + offset } end)
  local plain = data.DataLoader(mapped, { batch_size = 4, shuffle = true, seed = 1 })
  local threaded = data.DataLoader(mapped, { batch_size = 4, shuffle = true, seed = 1, workers = 2 })
  for _ = 1, 14 do
    local a, b = plain:next(), threaded:next()
    check.equal(b.id:tolist(), a.id:tolist())
    check.equal(b.y:tolist(), a.y:tolist())
  end
  local state = threaded:state_dict()
  check.equal(state, plain:state_dict())
  threaded:load_state_dict(state)
  check.equal(threaded:next().id:tolist(), plain:next().id:tolist())
  threaded:close()
  threaded:close()
end)

check.test("an error in a worker arrives here", function()
  local bad = data.from_function(4, function(i)
    if i == 2 then error "item two is broken" end
    return { id = i }
  end)
  local loader <close> = data.DataLoader(bad, { batch_size = 1, workers = 2 })
  loader:next()
  loader:next()
  check.fails(function() loader:next() end, "item two is broken")
end)

check.test("threads: values travel whole", function()
  local shared = { 1, 2 }
  local counter = 0
  local function setup(prefix)
    return function(...)
      counter = counter + 1
      return prefix, counter, ...
    end
  end
  local thread <close> = ty.thread.new(setup, "p")
  local cyclic = { name = "c", list = { shared, shared } }
  cyclic.self = cyclic
  local class = { __index = { get = function(self) return self.value end } }
  thread:send(nil, true, 3, 2.5, "text\0zero", cyclic, ty.arange(4), setmetatable({ value = 7 }, class), math.sqrt,
    ty.relu, math.mininteger, -0.0)
  local p, n, none, yes, three, half, text, copy, tensor, object, sqrt, relu, least, zero = thread:receive()
  check.equal({ p, n, none, yes, three, half, text }, { "p", 1, nil, true, 3, 2.5, "text\0zero" })
  check.equal(math.type(three), "integer")
  check.equal(rawequal(copy.self, copy), true)
  check.equal(rawequal(copy.list[1], copy.list[2]), true)
  check.equal(tensor:tolist(), { 0, 1, 2, 3 })
  check.equal(object:get(), 7)
  check.equal(sqrt == math.sqrt, true)
  check.equal(relu(ty.tensor { -1.0 }):item(), 0)
  check.equal({ least, 1 / zero }, { math.mininteger, -math.huge })
  local t = ty.zeros(3)
  thread:send(t)
  local _, count, back = thread:receive()
  check.equal(count, 2)
  back:fill_(4)
  check.equal(t:tolist(), { 4, 4, 4 }, "the memory is shared")
  check.fails(function() thread:send(coroutine.create(print)) end, "a thread cannot be sent")
  check.fails(function() thread:send(io.stdout) end, "cannot be sent")
  check.fails(function() thread:receive() end, "without a send")
end)

check.test("threads: functions keep what they share", function()
  local function setup()
    return function(up, get) up() up() return get() end
  end
  local value = 5
  local function up() value = value + 1 end
  local function get() return value end
  local thread <close> = ty.thread.new(setup)
  thread:send(up, get)
  check.equal(thread:receive(), 7, "both see one variable")
  check.equal(value, 5, "which is a copy of ours")
  local odd = io.stdout
  check.fails(function() thread:send(function() return odd end) end, "upvalue 'odd'")
end)

check.test("threads: failures", function()
  local broken <close> = ty.thread.new(function() error "no start" end)
  broken:send(1)
  check.fails(function() broken:receive() end, "no start")
  local wrong <close> = ty.thread.new(function() return 3 end)
  wrong:send(1)
  check.fails(function() wrong:receive() end, "must return a function")
  local busy = ty.thread.new(function() return function() while true do end end end)
  busy:send()
  busy:close() -- ends the loop
  check.fails(function() busy:send() end, "it was closed")
  local core <close> = ty.thread.new(function()
    return function() return require("tycho").zeros(2):matmul(require("tycho").zeros(3)) end
  end)
  core:send()
  check.fails(function() core:receive() end, "matmul")
  core:send()
  check.fails(function() core:receive() end, "matmul", "the thread goes on after an error")
  for _ = 1, 20 do
    local thread = ty.thread.new(function() return function(x) return x end end)
    thread:send(ty.zeros(10))
    if math.random() < 0.5 then thread:receive() end
    thread:close()
  end
end)

check.test("readers: csv", function()
  local path = os.tmpname()
  ty.io.write_atomic(path, "a,b,label\n1,2,0\n3,4,1\n")
  local ds, names = data.csv(path, { label = "label" })
  check.equal(names, { "a", "b", "label" })
  check.equal(ds:get(1).x:tolist(), { 3, 4 })
  check.equal(ds:get(1).label:item(), 1)
  check.equal(ds:get(1).label.dtype, "i64")
  check.equal(data.csv(path, { label = -1 }):get(1).label:item(), 1)
  check.equal(data.csv(path, { label = 2, label_dtype = "f32" }):get(1).label.dtype, "f32")
  check.fails(function() data.csv(path, { label = "x" }) end, "no column 'x'")
  check.fails(function() data.csv(path, { label = 3 }) end, "data.csv: label: expected a column from 0 to 2, got 3")
  -- What the reader below finds is said of the line here.
  local line = "data_test.lua:" .. debug.getinfo(1, "l").currentline + 1 .. ": "
  local ok, problem = pcall(function() data.csv(path, { max = 4 }) end)
  check.ok(not ok and problem:find(line, 1, true) and not problem:find("readers.lua", 1, true), problem)
  ty.io.write_atomic(path, "a,y\n1,0.25\n2,-1.5\n3,16777217\n") -- the target of a regression
  local regression = data.csv(path, { label = "y" })
  check.equal(regression.fields.label.dtype, "f32")
  check.equal(regression.fields.label:tolist(), { 0.25, -1.5, 16777216 })
  check.equal(data.csv(path, { label = "y", dtype = "f64" }).fields.label:tolist(), { 0.25, -1.5, 16777217 })
  check.fails(function() data.csv(path, { label = "y", label_dtype = "i64" }) end,
    'label_dtype: expected a float dtype for a column with fractions, got "i64"')
  ty.io.write_atomic(path, "a,y\n0.5,16777217\n1,3\n") -- exact above what f32 holds
  local identifiers = data.csv(path, { label = "y" }).fields
  check.equal({ identifiers.label.dtype, identifiers.label:tolist() }, { "i64", { 16777217, 3 } })
  check.equal(identifiers.x.dtype, "f32")
  ty.io.write_atomic(path, "a,y\n1,inf\n2,1\n")
  check.equal(data.csv(path, { label = "y" }).fields.label.dtype, "f32")
  ty.io.write_atomic(path, "a,y\n")
  check.equal(#data.csv(path, { label = "y" }), 0)
  ty.io.write_atomic(path, "a;y\n1;2\n")
  check.equal(data.csv(path, { label = "y", delimiter = ";" }):get(0).label:item(), 2)
  os.remove(path)
end)

check.test("readers: npz, npy, folders of images", function()
  local root = os.tmpname()
  os.remove(root)
  ty.io.mkdir(root .. "/images/cat")
  ty.io.mkdir(root .. "/images/dog")
  ty.io.save_npz(root .. "/a.npz", { x = ty.arange(6):reshape(3, 2), y = ty.arange(3) })
  check.equal(data.npz(root .. "/a.npz"):get(2).x:tolist(), { 4, 5 })
  ty.io.save_npy(root .. "/a.npy", ty.arange(3))
  check.equal(data.npy(root .. "/a.npy"):get(1).x:item(), 1)
  ty.io.save_image(root .. "/images/cat/1.png", ty.full({ 1, 2, 2 }, 9, { dtype = "u8" }))
  ty.io.save_image(root .. "/images/dog/1.PNG.png", ty.full({ 1, 2, 2 }, 8, { dtype = "u8" }))
  local ds, classes = data.image_folder(root .. "/images", { transform = function(x) return x:to "f32" / 2 end })
  check.equal(classes, { "cat", "dog" })
  check.equal(#ds, 2)
  check.equal(ds:get(1).label, 1)
  check.equal(ds:get(0).image:max():item(), 4.5)
  local loader <close> = data.DataLoader(ds, { batch_size = 2, workers = 1 })
  check.equal(loader:next().image.shape, { 2, 1, 2, 2 })
  check.fails(function() data.image_folder(root) end, "no folders with PNG")
  for _, path in ipairs { "/images/cat/1.png", "/images/dog/1.PNG.png", "/images/cat", "/images/dog", "/images",
    "/a.npz", "/a.npy", "" } do
    ty.io.remove(root .. path)
  end
end)

check.test("the King James Version", function()
  local three, all = data.kjv(), data.kjv { books = 66 }
  check.equal({ #three, three:sub(1, 10) }, { 494446, "Genesis 1\n" })
  check.equal({ #all, select(2, all:gsub("\n\n", "")) + 1 }, { 4151868, 1189 })
  check.equal(all:sub(1, #three), three)
  check.equal(all:sub(#three + 1, #three + 11), "\nNumbers 1\n")
  check.equal(data.kjv { books = 65 } .. "\n", all:sub(1, all:find("Revelation 1\n", 1, true) - 1))
  check.fails(function() data.kjv { books = 67 } end, "books: expected an integer in [1, 66], got 67")
end)

check.test("the digits", function()
  local all = data.digits()
  check.equal(#all, 1797)
  local item = all:get(0)
  check.equal(item.image.shape, { 1, 8, 8 })
  check.equal(item.label:item(), 0)
  check.close(item.image:select(0, 0):select(0, 0):tolist(), { -1, -1, -0.375, 0.625, 0.125, -0.875, -1, -1 }, 1e-6)
  check.equal(all.fields.image:min():item(), -1)
  check.equal(all.fields.image:max():item(), 1)
  check.equal(all.fields.label:eq(3):sum():item(), 183)
  local training, held_out = data.digits { split = { 0.8, 0.2 }, seed = 0 }
  check.equal({ #training, #held_out }, { 1437, 360 })
end)

check.test("wrong arguments of data and train are errors that say what was expected", function()
  local ds = numbers(4)
  local loader = data.DataLoader(ds)
  local values = { 5, -1, 1.5, "/proc/nothing/x", true, {}, print, ty.zeros(2), ds, { 1, 2 }, { "a" }, { a = 1 }, 0 / 0,
    loader }
  local functions, state = {}, 1
  for _, module in ipairs { "data", "train" } do
    for name, fn in pairs(ty[module]) do functions[module .. "." .. name] = fn end
  end
  for _, name in ipairs { "get", "each", "batch" } do
    functions["dataset:" .. name] = function(...) return ds[name](ds, ...) end
  end
  functions["loader:load_state_dict"] = function(...) return data.DataLoader(ds):load_state_dict(...) end
  local names = {}
  for name in pairs(functions) do names[#names + 1] = name end
  table.sort(names)
  local function any() -- nil among them
    state = (state * 1103515245 + 12345) & 0x7fffffff
    return values[(state >> 12) % (#values + 1) + 1]
  end
  for _, name in ipairs(names) do
    for i = 1, 60 do
      local ok, problem = pcall(functions[name], table.unpack({ any(), any(), any() }, 1, i % 4))
      local text = tostring(problem)
      local raw = not ok and (text:find "attempt to" or text:find "bad argument")
      if raw then check.ok(false, name .. ": " .. text) end
    end
  end
  check.fails(function() data.DataLoader(5) end, "DataLoader: dataset: expected a dataset (get(i) and a length), got 5")
  check.fails(function() data.split(ds) end, "data.split: parts: expected a list of numbers >= 0, got nil")
  check.fails(function() data.split(ds, {}) end, "data.split: parts: expected at least one")
  check.fails(function() data.map(ds) end, "data.map: fn: expected a function, got nil")
  check.fails(function() data.concat(ds) end, "data.concat: list: expected a list of datasets, got one dataset")
  check.fails(function() data.concat { ds, 3 } end, "data.concat: element 2: expected a dataset")
  check.fails(function() data.subset(ds, { 4 }) end, "data.subset: positions: expected 0 to 3, got 4 to 4")
  check.fails(function() ty.train.steps(5, 10) end,
    "train.steps: loader: expected a DataLoader, a function or nil, got 5")
end)

check.finish()
