-- What kernels make of weights and keep (ty.memory.keep_weights): results are the very same as without, whatever
-- happens to the weight in between, and the memory comes back.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal, fails = check.test, check.equal, check.fails

local function kept() return ty.memory.stats().kept end

local function same(x, y) return ty.eq(x, y):all():item() end

-- As it is without anything kept.
local function plainly(fn)
  ty.memory.keep_weights(0)
  local y = fn()
  ty.memory.keep_weights()
  return y
end

-- Whether fn's results are the plain one when it keeps something, and when it uses that.
local function uses(fn, what)
  local want, before = plainly(fn), kept()
  equal(same(fn(), want), true, what .. ": the call that keeps")
  equal(kept() > before, true, what .. ": something is kept")
  equal(same(fn(), want), true, what .. ": the call that uses what is kept")
end

local function bytes(low, high, ...) return ty.randint(low, high, { ... }) end

local products = {
  { "f32", function() return ty.randn(70, 300), ty.randn(90, 300) end },
  { "f32, one column over", function() return ty.randn(129, 513), ty.randn(97, 513) end },
  { "f64", function() return ty.randn(70, 300):to "f64", ty.randn(90, 300):to "f64" end },
  { "bf16", function() return ty.randn(70, 301):to "bf16", ty.randn(90, 301):to "bf16" end },
  { "f16", function() return ty.randn(140, 300):to "f16", ty.randn(90, 300):to "f16" end },
  { "f32 in a batch", function() return ty.randn(3, 50, 300), ty.randn(90, 300) end },
  { "a part of a storage", function() return ty.randn(70, 300), ty.randn(190, 300):narrow(0, 100, 90) end },
}

test("linear layers", function()
  ty.manual_seed(1)
  for _, p in ipairs(products) do
    local x, w = p[2]()
    local b = ty.randn(w.shape[1], { dtype = w.dtype == "f64" and "f64" or "f32" })
    uses(function() return ty.linear(x, w, b, nil, "gelu") end, p[1])
  end
end)

test("by default they are a small part of what is live", function()
  ty.memory.empty_cache()
  local x, weights = ty.randn(64, 4096), {}
  for i = 1, 5 do weights[i] = ty.empty { 4096, 4096 }:fill_(1 / 4096) end -- 64 MiB each
  for _ = 1, 2 do
    for _, w in ipairs(weights) do ty.no_grad(ty.scope, function() ty.linear(x, w) end) end
  end
  local most = math.min(256 << 20, ty.memory.stats().budget // 32)
  equal(kept() > 0 and kept() <= most, true, ("%d of %d"):format(kept(), most))
  for _, w in ipairs(weights) do w:free() end
  equal(kept(), 0)
end)

test("of a large model they are less", function()
  local rest, w = ty.empty { 1 << 28 }, ty.randn(9000, 4096) -- more than 1 GiB, of which nothing writes the most
  local x, small = ty.randn(64, 4096), ty.randn(1024, 4096)
  local function twice(weight)
    for _ = 1, 2 do ty.no_grad(ty.scope, function() ty.linear(x, weight) end) end
    return kept()
  end
  equal(twice(w), 0, "more than 64 MiB")
  equal(twice(small) > 0, true)
  rest:free()
  equal(twice(w) > 128 << 20, true, "when there is less beside it")
  w:free()
  small:free()
end)

test("products, and not in a backward pass", function()
  local x, w = ty.randn(70, 300), ty.randn(300, 90)
  uses(function() return ty.matmul(x, w) end, "a matrix")
  uses(function() return ty.matmul(ty.stack({ x, x }), w) end, "a batch with one matrix")
  local before, y = kept(), x:requires_grad_():matmul(w):sum()
  for _ = 1, 3 do y:backward(nil, { keep_graph = true }) end
  equal(kept(), before, "the gradient's products")
end)

test("two parts of one storage are two weights", function()
  local x, w = ty.randn(70, 300), ty.randn(180, 300)
  for i = 0, 1 do
    uses(function() return ty.linear(x, w:narrow(0, 90 * i, 90)) end, "part " .. i)
  end
end)

test("bytes, signed and not", function()
  local cpu, by_instruction = require("tycho.core").cpu(), false
  for _, name in ipairs(cpu.features) do by_instruction = by_instruction or name == "avx512vnni" end
  by_instruction = by_instruction and cpu.isa == "avx512"
  local y = bytes(-127, 128, 300, 90):to "i8"
  for _, x in ipairs { bytes(-127, 128, 70, 300):to "i8", bytes(0, 256, 70, 300):to "u8" } do
    local want, before = plainly(function() return ty.matmul_int8(x, y) end), kept()
    for call = 1, 2 do equal(same(ty.matmul_int8(x, y), want), true, x.dtype .. ", call " .. call) end
    if by_instruction then equal(kept() > before, true, x.dtype .. ": something is kept") end
  end
end)

-- channels, size, out, kernel, stride, padding, dilation, groups
local layers = {
  { "1x1", 40, 20, 70, 1, 1, 0, 1, 1 },
  { "1x1, every second", 40, 20, 70, 1, 2, 0, 1, 1 },
  { "3x3 by Winograd", 40, 20, 70, 3, 1, 1, 1, 1 },
  { "3x3 by Winograd, many channels", 160, 8, 200, 3, 1, 1, 1, 1 },
  { "3x3, every second", 40, 20, 70, 3, 2, 1, 1, 1 },
  { "5x5", 20, 20, 33, 5, 1, 2, 1, 1 },
  { "3x3, apart", 24, 20, 40, 3, 1, 2, 2, 1 },
  { "3x3 in groups", 40, 20, 60, 3, 1, 1, 1, 2 },
}

test("convolutions", function()
  for _, l in ipairs(layers) do
    local name, c, size, out, k, stride, padding, dilation, groups = table.unpack(l)
    local x, w, b = ty.randn(2, c, size, size), ty.randn(out, c // groups, k, k), ty.randn(out)
    uses(function() return ty.conv2d(x, w, b, stride, padding, dilation, groups, nil, "relu") end, name)
  end
end)

test("a stride, a padding and a size of its own do not get another's weights", function()
  local w = ty.randn(40, 24, 3, 3)
  for _, c in ipairs { { 20, 1, 1, 1 }, { 20, 2, 1, 1 }, { 20, 1, 2, 2 }, { 9, 1, 0, 1 }, { 20, 2, 0, 1 } } do
    local x = ty.randn(2, 24, c[1], c[1])
    local function y() return ty.conv2d(x, w, nil, c[2], c[3], c[4]) end
    local want = plainly(y)
    for call = 1, 2 do equal(same(y(), want), true, ("%s, call %d"):format(table.concat(c, " "), call)) end
  end
end)

-- A weight of which something is kept, and its product.
local function layer()
  local x, w = ty.randn(70, 300), ty.randn(90, 300)
  local function y() return ty.linear(x, w) end
  local before = kept()
  y():free()
  equal(kept(), before, "the first use leaves a mark only")
  y():free()
  equal(kept() > before, true, "the second keeps")
  return w, y
end

-- Ways to write a weight, or a part of it.
local writes = {
  { "mul_", function(w) w:mul_(2) end },
  { "copy_", function(w) w:copy_(ty.randn(90, 300)) end },
  { "fill_ of a view", function(w) w:narrow(0, 3, 1):fill_(1) end },
  { "an index", function(w) w[5] = 1 end },
  { "a reshaped view", function(w) w:reshape(300, 90):select(1, 4):fill_(0) end },
  { "normal_", function(w) w:normal_(0, 2) end },
  { "an optimizer", function(w)
    w:requires_grad_()
    local optimizer = ty.optim.SGD({ w }, { lr = 1 })
    ty.linear(ty.ones(1, 300), w):sum():backward()
    optimizer:step()
    w:requires_grad_(false)
  end },
}

test("a weight that is written is made anew", function()
  for _, write in ipairs(writes) do
    local w, y = layer()
    local was, before = y(), kept()
    write[2](w)
    equal(kept() < before, true, write[1] .. ": what was kept is gone")
    local now = y()
    equal(same(now, was), false, write[1] .. ": the weight is another")
    uses(y, write[1])
    w:free()
  end
end)

test("memory comes back: with the weight, with the cache, within the bound", function()
  ty.memory.empty_cache()
  equal(kept(), 0, "nothing is left of other tests")
  local freed = layer()
  local one = kept()
  freed:free()
  equal(kept(), 0, "gone with its weight")
  local _, y = layer()
  ty.memory.empty_cache()
  equal(kept(), 0, "gone with the cache")
  uses(y, "after that")
  ty.memory.keep_weights(0)
  equal(kept(), 0, "nothing is to be kept")
  ty.memory.keep_weights(2 * one)
  ty.memory.empty_cache()
  local x, weights = ty.randn(70, 300), {}
  for i = 1, 4 do
    weights[i] = ty.randn(90, 300)
    for _ = 1, 2 do ty.linear(x, weights[i]):free() end
  end
  equal(kept(), 2 * one, "two of four")
  ty.memory.keep_weights()
  fails(function() ty.memory.keep_weights(-1) end, "expected bytes")
end)

test("parts of one storage without end leave a bounded number of marks", function()
  local data, x = ty.randn(3000, 300), ty.randn(70, 300)
  local function part(i) return ty.linear(x, data:narrow(0, i, 90)) end
  local before = kept()
  for i = 1, 2000 do part(i):free() end
  part(1):free()
  equal(kept(), before, "the mark of the first is gone")
  part(1):free()
  local one = kept() - before
  equal(one > 0, true, "that of a moment ago is there")
  for i = 1, 100 do for _ = 1, 2 do part(i):free() end end
  equal(kept() - before, 64 * one, "so many parts are kept")
  local want = plainly(function() return part(100) end)
  equal(same(part(100), want), true, "a part of which nothing is kept")
end)

test("when memory is short, what is kept goes first", function()
  ty.memory.empty_cache()
  local _, y = layer()
  local one, live = kept(), ty.memory.stats().live
  equal(one > 0, true, "kept")
  ty.memory.set_budget("cpu", live + one // 2 + (1 << 20))
  local x = ty.zeros(1 << 18)
  equal(kept(), 0, "it made room")
  ty.memory.set_budget("cpu")
  x:free()
  uses(y, "after that")
end)

test("while gradients are recorded for a weight, nothing is kept of it; of others it is", function()
  local x, w = ty.randn(70, 300), ty.randn(90, 300)
  w:requires_grad_()
  local before = kept()
  for _ = 1, 4 do
    ty.linear(x, w):sum():backward()
    ty.clear_grads { w }
  end
  equal(kept(), before, "a weight in training")
  local classes, labels = ty.randn(2100, 64):requires_grad_(), ty.randint(0, 2100, { 8192 })
  local features = ty.randn(8192, 64) -- in several parts
  ty.linear_cross_entropy(features, classes, labels):backward()
  equal(kept(), before, "a weight within an op that is recorded")
  local frozen, low = ty.randn(90, 300), ty.randn(70, 300):requires_grad_()
  for _ = 1, 4 do ty.linear(low, frozen):sum():backward() end
  equal(kept() > before, true, "a frozen one")
  ty.no_grad(function() for _ = 1, 3 do ty.linear(x, w) end end)
  local y = ty.no_grad(function() return ty.linear(x, w) end)
  equal(same(y, plainly(function() return ty.linear(x, w:detach()) end)), true, "the same in training and out of it")
end)

test("compiled functions follow their weights", function()
  local w = ty.randn(90, 300)
  local closed = ty.compile(function(x) return ty.linear(x, w) end)
  local given = ty.compile(function(x, v) return ty.linear(x, v) end)
  local x = ty.randn(70, 300)
  for round = 1, 8 do
    local want = plainly(function() return ty.linear(x, w) end)
    equal(same(closed(x), want), true, "closed over, round " .. round)
    equal(same(given(x, w), want), true, "given, round " .. round)
    if round % 4 == 0 then w:mul_(1.5) end
  end
  for round = 1, 3 do
    local other = ty.randn(90, 300)
    local want = plainly(function() return ty.linear(x, other) end)
    for _ = 1, 3 do equal(same(given(x, other), want), true, "another one, round " .. round) end
  end
end)

test("a compiled function that writes a weight multiplies with what it wrote", function()
  local w, x = ty.randn(90, 300), ty.randn(70, 300)
  local twin = w:clone()
  local step = ty.compile(function(y)
    local first = ty.linear(y, w)
    w:mul_(1.25)
    return first, ty.linear(y, w)
  end)
  for round = 1, 6 do
    local a, b = step(x)
    local want = plainly(function() return ty.linear(x, twin) end)
    equal(same(a, want), true, "before, round " .. round)
    twin:mul_(1.25)
    equal(same(b, plainly(function() return ty.linear(x, twin) end)), true, "after, round " .. round)
  end
end)

test("weights in a mapped file", function()
  local path = os.tmpname()
  ty.io.save_safetensors(path, { w = ty.randn(90, 300) })
  local w, x = ty.io.load_safetensors(path).w, ty.randn(70, 300)
  uses(function() return ty.linear(x, w) end, "mapped")
  os.remove(path)
end)

check.finish()
