-- Fields of places: hash grids and waves. The ops themselves are tested in tests/ops/hash_grid.lua.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local HashField, FourierField = models.HashField, models.FourierField
local f64 = { dtype = "f64" }

local function far(a, b) return (a - b):abs():max():item() end

check.test("levels grow from the coarsest to the finest by one factor", function()
  check.equal(HashField.resolutions(4, 2, 16), { 2, 4, 8, 16 })
  check.equal(HashField.resolutions(1, 7, 9), { 7 })
  check.equal(HashField.resolutions(16, 16, 512)[16], 512)
  check.fails(function() HashField.resolutions(3, 8, 4) end, "finest: expected at least coarsest, 8, got 4")
end)

check.test("a field is its grid and its layers, in two dimensions and three, with and without hidden layers", function()
  for _, inputs in ipairs { 2, 3 } do
    for _, layers in ipairs { 0, 1, 2 } do
      local field = HashField { inputs = inputs, outputs = 2, levels = 5, coarsest = 2, finest = 12, entries = 64,
        width = 16, layers = layers }:to "f64"
      ty.no_grad(function() field.table:normal_() end)
      local x = ty.rand({ 4, 5, inputs }, f64)
      local y = field(x)
      check.equal(y.shape, { 4, 5, 2 })
      local h = ty.linear(field:encode(x), field.first):relu()
      for i = 0, layers - 1 do h = ty.linear(h, field.hidden:select(0, i)):relu() end
      check.ok(far(y, ty.linear(h, field.last)) < 1e-12)
      local unfused = ty.nn.unfused.hash_field(x:reshape(20, inputs), field.table, field.first, field.last,
        field.resolution, 64, field.hidden)
      check.ok(far(y:reshape(20, 2), unfused) < 1e-12)
    end
  end
end)

check.test("gradients of a field are those of its steps, also of gradients, and the same for any number of threads",
  function()
    local field = HashField { inputs = 3, outputs = 2, levels = 4, coarsest = 2, finest = 9, entries = 64, width = 12 }
      :to "f64"
    ty.no_grad(function() field.table:normal_() end)
    local x, weight = ty.rand({ 3000, 3 }, f64):requires_grad_(), ty.randn({ 3000, 2 }, f64)
    local leaves = { x, field.table, field.first, field.hidden, field.last }
    local function gradients(fn, graph)
      return ty.grad((fn() * weight):sum(), leaves, { create_graph = graph })
    end
    local function fused() return field(x) end
    local function steps()
      return ty.nn.unfused.hash_field(x, field.table, field.first, field.last, field.resolution, 64, field.hidden)
    end
    local want = gradients(steps)
    for i, got in ipairs(gradients(fused)) do check.ok(far(got, want[i]) < 1e-9, i) end
    -- of what surfaces are learnt with: how far the slope is from length 1
    local function slopes(fn)
      local slope = ty.grad(fn():sum(), { x }, { create_graph = true })[1]
      return ty.grad((slope:square():sum(1):sqrt() - 1):square():mean(), { field.table, field.first, field.last })
    end
    local wanted = slopes(steps)
    for i, got in ipairs(slopes(fused)) do check.ok(far(got, wanted[i]) < 1e-9, i) end

    local before, single = ty.threads(), nil
    for _, threads in ipairs { 1, 2, 3 } do
      ty.threads(threads)
      local now = gradients(fused)
      single = single or now
      for i in ipairs(now) do check.equal(far(now[i], single[i]), 0.0) end
    end
    ty.threads(before)
  end)

check.test("places outside count as the nearest inside, and do not move", function()
  local field = HashField { levels = 2, coarsest = 4, finest = 8, width = 8 }
  ty.no_grad(function() field.table:normal_() end)
  local x = ty.tensor { { -0.5, 0.3 }, { 2.0, 1.0 } }:requires_grad_()
  check.close(field(x):tolist(), field(x:detach():clamp(0, 1)):tolist(), 1e-7)
  local g = ty.grad(field(x):sum(), { x })[1]:tolist()
  check.equal({ g[1][1], g[2][1] }, { 0.0, 0.0 })
  check.ok(g[1][2] ~= 0)
end)

-- Mean square error of a field that learnt a step in a picture, which waves of low frequency cannot follow.
local function learnt(field)
  local optimizer = ty.optim.Adam(field:parameters(), { lr = 1e-2 })
  local function edge(x) return (x:select(1, 0) + 0.3 * x:select(1, 1)):gt(0.6):to "f32":unsqueeze(1) end
  for _ = 1, 60 do
    local x = ty.rand(512, 2)
    optimizer:step((field(x) - edge(x)):square():mean())
  end
  local x = ty.rand(4096, 2)
  return ty.no_grad(function() return (field(x) - edge(x)):square():mean():item() end)
end

check.test("fields learn", function()
  ty.manual_seed(0)
  local hash = learnt(HashField { outputs = 1, levels = 8, coarsest = 4, finest = 64, entries = 1024, width = 16 })
  local waves = learnt(FourierField { outputs = 1, waves = 16, scale = 2, width = 32, layers = 2 })
  check.ok(hash < 0.02, hash)
  check.ok(waves < 0.1, waves)
end)

check.test("waves see places as sines and cosines, or as they are", function()
  local field = FourierField { inputs = 3, outputs = 2, waves = 4, width = 8, layers = 1 }
  check.equal(field(ty.rand(5, 3)).shape, { 5, 2 })
  check.equal(field.layers[1].weight.shape, { 8, 8 })
  check.equal(FourierField { inputs = 3, scale = 0, width = 8 }.layers[1].weight.shape, { 8, 3 })
  check.equal(FourierField { inputs = 2, scale = 0 }(ty.rand(2, 4, 2)).shape, { 2, 4, 3 })
end)

check.test("mistakes", function()
  check.fails(function() HashField { inputs = 4 } end, "inputs: expected 2 or 3, got 4")
  check.fails(function() HashField {}(ty.rand(4, 3)) end, "HashField: x: expected %[%.%.%., 2%], got")
  check.fails(function() HashField {}(ty.rand(4, 2):to "i64") end, "x: expected")
  check.fails(function() HashField { entries = 100 }(ty.rand(4, 2)) end, "entries: expected a power of two")
  check.fails(function() FourierField {}(ty.rand(4, 3)) end, "FourierField: x: expected %[%.%.%., 2%], got")
  check.fails(function() ty.nn.unfused.hash_grid(ty.rand(4), ty.rand(4, 2), { 2 }, 4) end, "x: expected a tensor %[n")
  check.fails(function() ty.nn.unfused.hash_grid(ty.rand(4, 4), ty.rand(4, 2), { 2 }, 4) end, "%[n, 2 or 3%]")
end)

check.finish()
