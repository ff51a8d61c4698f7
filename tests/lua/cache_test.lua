-- data.cache: items that are read once, in memory and in files, for worker threads, hostile files.
local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"
local data = ty.data
local test, equal, fails = check.test, check.equal, check.fails

local folder = os.tmpname()
os.remove(folder)
ty.io.mkdir(folder)

-- A dataset whose items are counted as they are made.
local function counted(n, make)
  local calls = { 0 }
  return data.from_function(n, function(i)
    calls[1] = calls[1] + 1
    return make(i)
  end), calls
end

local function item(i)
  local local_ty = require "tycho"
  return { image = local_ty.full({ 3, 2 }, i, { dtype = "u8" }), label = i, weight = i / 4, odd = i % 2 == 1,
    name = ("n%d\0"):format(i) .. ("x"):rep(i) }
end

test("every item is read once, and is what it was", function()
  local set, calls = counted(21, item)
  local cached = data.cache(set)
  equal(calls[1], 21)
  for i = 0, 20 do
    local got, want = cached:get(i), item(i)
    check.ok(ty.equal(got.image, want.image))
    equal({ got.label, got.weight, got.name, got.odd }, { want.label, want.weight, want.name, want.odd })
    equal({ math.type(got.label), math.type(got.weight) }, { "integer", "float" })
  end
  for _, workers in ipairs { 0, 2 } do
    local a <close> = data.DataLoader(cached, { batch_size = 4, shuffle = true, workers = workers })
    local b <close> = data.DataLoader(set, { batch_size = 4, shuffle = true })
    for _ = 1, 6 do
      local x, y = a:next(), b:next()
      for name, value in pairs(y) do
        if ty.is_tensor(value) then
          equal({ x[name].dtype, x[name]:tolist() }, { value.dtype, value:tolist() }, name)
        else
          equal(x[name], value)
        end
      end
    end
  end
  check.ok(tostring(cached):find "21 items", tostring(cached))
  local threaded = data.cache(data.from_function(21, item), { workers = 2 })
  check.ok(ty.equal(threaded:get(13).image, item(13).image))
end)

test("tensors of several shapes, and items that are no tables", function()
  local function ragged(i) return { x = (require "tycho").arange(i * 2):reshape(2, i), y = i } end
  local cached = data.cache(data.from_function(5, ragged))
  for i = 0, 4 do equal(cached:get(i).x:tolist(), ragged(i).x:tolist()) end
  equal(cached:batch { 0, 1 }, nil, "they do not fit into one tensor")
  local loader <close> = data.DataLoader(cached,
    { batch_size = 5, collate = function(items) return { n = #items } end })
  equal(loader:next().n, 5)
  local alone = data.cache(data.from_function(3, function(i) return (require "tycho").full({ 2 }, i) end))
  equal(alone:get(2):tolist(), { 2, 2 })
  equal(alone:batch({ 2, 0 }):tolist(), { { 2, 2 }, { 0, 0 } })
  equal(data.cache(data.from_function(3, function(i) return i == 1 and 0.5 or i end)):get(2), 2.0)
end)

test("files", function()
  local path = folder .. "/a.safetensors"
  local set, calls = counted(7, function(i)
    local it = item(i)
    it.ragged = (require "tycho").arange(i)
    return it
  end)
  data.cache(set, { path = path, version = "size 32" })
  equal(calls[1], 7)
  local again = data.cache(set, { path = path, version = "size 32" })
  equal(calls[1], 7, "read from the file")
  for i = 0, 6 do
    local got = again:get(i)
    equal({ got.name, got.label, got.odd, got.ragged:numel(), got.image:tolist() },
      { item(i).name, i, i % 2 == 1, i, item(i).image:tolist() })
  end
  fails(function() data.cache(set, { path = path, version = "size 64" }) end, 'is of version "size 32", not "size 64"')
  fails(function() data.cache(counted(8, item), { path = path, version = "size 32" }) end, "has 7 items, the dataset 8")
  ty.io.save_safetensors(folder .. "/b.safetensors", { x = ty.ones(2) })
  fails(function() data.cache(set, { path = folder .. "/b.safetensors" }) end, "is there and no cache")
  -- Every byte of the header, and some of the rest, changed: an error, or items that can be read.
  local bytes = ty.io.read(path)
  local rng = 12345
  for k = 1, 400 do
    rng = (rng * 1103515245 + 12345) & 0x7fffffff
    local at = 1 + (k <= 200 and rng % 600 or rng % #bytes)
    local changed = bytes:sub(1, at - 1) .. string.char(rng >> 8 & 255) .. bytes:sub(at + 1)
    ty.io.write_atomic(folder .. "/c.safetensors", changed)
    local ok, message = pcall(function()
      local hostile = data.cache(set, { path = folder .. "/c.safetensors", version = "size 32" })
      for i = 0, 6 do hostile:get(i) end
    end)
    check.ok(ok or tostring(message):find "cache" or tostring(message):find "c%.safetensors", message)
  end
end)

test("wrong use", function()
  fails(function() data.cache(3) end, "data.cache: dataset: expected a dataset")
  fails(function() data.cache(data.from_function(0, item)) end, "expected at least one item, got none")
  fails(function() data.cache(data.from_function(3, function(i) return { x = i == 2 and "text" or i } end)) end,
    "field 'x': expected integer as of the first item, got \"text\" of item 2")
  fails(function() data.cache(data.from_function(3, function(i) return { x = i, y = i < 2 and 1 or nil } end)) end,
    "item 2 lacks the field 'y'")
  fails(function() data.cache(data.from_function(3, function(i) return { x = i, y = i > 1 and 1 or nil } end)) end,
    "item 2 has a field 'y', an earlier one none")
  fails(function() data.cache(data.from_function(3, function() return { x = { 1 } } end)) end,
    "expected tensors, numbers, booleans and strings as fields, got a table in the field 'x'")
  fails(function()
    data.cache(data.from_function(2, function(i) return { x = i == 0 and ty.ones(2) or ty.ones(2, 2) } end))
  end, "expected f32 of 1 dimensions as of the first item, got f32 of 2 of item 1")
  fails(function() data.cache(data.from_function(2, item)):get(2) end,
    "data.cache: position: expected an integer in [0, 1], got 2")
end)

for _, name in ipairs(ty.io.listdir(folder)) do os.remove(folder .. "/" .. name) end
os.remove(folder)
check.finish()
