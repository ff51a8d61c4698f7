-- Layers that are black boxes: that no gradient goes through them, what is learnt around them, and the systems of
-- waves.
local here = arg and arg[0]:match ".*/" or "tests/modules/local/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local learning = require "tycho.local"
local physical, waves = learning.physical, learning.waves

check.test("a black box refuses a gradient", function()
  local box, calls = physical.black_box("pond", function(x) return x:sin() end)
  local x = ty.ones(3, 2):requires_grad_()
  check.close(box(x):tolist(), ty.ones(3, 2):sin():tolist(), 0)
  check.equal(calls(), 3)
  check.fails(function() box(x):sum():backward() end, "pond: a gradient was asked of a black box, which has none")
  local fibre = waves.fibre { inputs = 2, outputs = 4 }
  local light = physical.black_box("fibre", function(input) return fibre:measure(input) end)
  check.fails(function() ty.grad(light(x):sum(), { x }) end, "fibre: a gradient was asked of a black box")
end)

local f64 = { dtype = "f64" }
local function learner(box)
  return ty.nn.with_defaults(f64, physical.new, { classes = 3, width = 4, systems = { box, box }, outputs = { 7, 5 },
    hidden = 5, rate = 0.01 })
end

check.test("goodness, loss and gradient of a layer by hand, though the box has no gradient", function()
  ty.manual_seed(1)
  local seen = {}
  local box = physical.black_box("box", function(s)
    seen[#seen + 1] = s
    return s:narrow(1, 0, 1):tile { 1, 7 } * 2
  end)
  local l = ty.nn.with_defaults(f64, physical.new, { classes = 3, width = 4, systems = { box }, outputs = { 7 },
    hidden = 5, rate = 0.01 })
  local x, label = ty.randn({ 4, 4 }, f64), ty.randint(0, 3, { 4 })
  local both, target = l.prepare(x, label)
  check.equal(both.shape, { 8, 7 })
  local list = both:tolist()
  for row = 1, 4 do
    check.equal(list[row][label:tolist()[row] + 1], 1.0)
    check.equal(list[row + 4][label:tolist()[row] + 1], 0.0)
    check.equal({ table.unpack(list[row], 4) }, { table.unpack(list[row + 4], 4) })
  end
  local stage, layer = l.stages[1], l.model[1]
  local function loss() return stage.loss(stage.forward(both), target) end
  local value = loss()
  check.close(seen[1]:square():sum(1):tolist(), { 1, 1, 1, 1, 1, 1, 1, 1 }, 1e-5)
  check.close(seen[1]:tolist(), (both:abs() / (both:square():sum(1, true):sqrt() + 1e-6)):tolist(), 1e-12)
  local w, b, p = layer.weight:tolist(), layer.bias:tolist(), layer.direction:tolist()
  local sent, g = seen[1]:tolist(), {}
  for row = 1, 8 do
    local input, along, square = {}, 0, 0
    for k = 1, 7 do input[k], input[k + 7] = sent[row][1] * 2, list[row][k] end
    for out = 1, 5 do
      local y = b[out]
      for k, v in ipairs(input) do y = y + w[out][k] * v end
      along, square = along + math.abs(y) * p[out], square + y * y
    end
    g[row] = along / math.sqrt(square)
  end
  local sum = 0
  for row = 1, 4 do sum = sum + math.log(1 + math.exp(-4 * (g[row] - g[row + 4]))) end
  check.close(value:item(), sum / 4, 1e-10)
  layer.weight:set_grad(ty.grad(value, { layer.weight })[1])
  check.gradient(loss, layer.weight, { 1, 6, 30, 70 }, 1e-6)
end)

check.test("two layers learn around boxes that no gradient passes", function()
  ty.manual_seed(2)
  local box = physical.black_box("box", function(s) return (s * 5):sin():matmul(ty.ones({ s.shape[2], 5 }, f64)) end)
  local first = physical.black_box("box", function(s) return (s * 5):cos() end)
  local l = ty.nn.with_defaults(f64, physical.new, { classes = 3, width = 4, systems = { first, box },
    outputs = { 7, 5 }, hidden = 5, rate = 0.01 })
  local label = ty.randint(0, 3, { 32 })
  local x = ty.one_hot(label, 4):to "f64" + ty.randn({ 32, 4 }, f64) * 0.1
  local began = l:step(x, label)
  for _ = 1, 80 do l:step(x, label) end
  local ended = l:step(x, label)
  check.ok(ended[1] < 0.8 * began[1] and ended[2] < 0.9 * began[2], table.concat(ended, " "))
  check.ok(l:accuracy { x = x, label = label } > 0.9, "read")
end)

check.test("a network through models learns from end to end, and reads through the boxes in their place", function()
  ty.manual_seed(3)
  local fibre = waves.fibre { inputs = 7, outputs = 6, scale = 1 }
  local l = physical.in_silico { classes = 3, width = 4, systems = { function(x) return fibre:measure(x) end, false },
    outputs = { 6, 0 }, hidden = 5, around = false }
  local x, label = ty.rand(6, 4), ty.randint(0, 3, { 6 })
  local loss = l.stages[1].loss(l.stages[1].forward(x), label)
  for _, g in ipairs(ty.grad(loss, l.model:parameters())) do check.ok(g:abs():max():item() > 0, "a gradient") end
  local through = l:scores(x):tolist()
  l.systems[1] = physical.black_box("fibre", function(input) return fibre:measure(input) end)
  check.close(l:scores(x):tolist(), through, 1e-6)
  l.systems[1] = physical.black_box("fibre", function(input) return fibre:measure(input) * 0 end)
  check.ok(math.abs(l:scores(x):tolist()[1][1] - through[1][1]) > 1e-4, "another system")
  l.systems[1] = physical.black_box("pond", function(input) return fibre:measure(input) end)
  check.fails(function() l.stages[1].loss(l.stages[1].forward(x:clone():requires_grad_()), label):backward() end,
    "pond: a gradient was asked")
end)

check.test("systems of waves: of a seed, of what they are made of, and a fibre by hand", function()
  local x = ty.rand(3, 6)
  for _, name in ipairs { "fibre", "plate" } do
    local one, same, other = waves[name] { inputs = 6, outputs = 9, seed = 4 },
      waves[name] { inputs = 6, outputs = 9, seed = 4 }, waves[name] { inputs = 6, outputs = 9, seed = 5 }
    local y = one:measure(x)
    check.equal(y.shape, { 3, 9 })
    check.equal(y:tolist(), same:measure(x):tolist())
    check.ok((y - other:measure(x)):abs():max():item() > 1e-3, "another seed")
    -- Not linear.
    check.ok((one:measure(x * 2) - y * 2):abs():max():item() > 1e-3, "not linear")
    one:drift(0.1, 1)
    check.ok((y - one:measure(x)):abs():max():item() > 1e-4, "drift")
  end
  local fibre = waves.fibre { inputs = 6, outputs = 2, scale = 3 }
  local re, im, list = fibre.parts.real:tolist(), fibre.parts.imaginary:tolist(), x:tolist()
  for row = 1, 3 do
    for out = 1, 2 do
      local a, b = 0, 0
      for k = 1, 6 do
        local phase = list[row][k] * math.pi * 3
        a = a + math.cos(phase) * re[k][out] - math.sin(phase) * im[k][out]
        b = b + math.cos(phase) * im[k][out] + math.sin(phase) * re[k][out]
      end
      local intensity = a * a + b * b
      check.close(fibre:measure(x):tolist()[row][out], intensity / (1 + intensity), 1e-5)
    end
  end
end)

check.test("a plate is the leapfrog of its wave equation, grid point by grid point", function()
  local side, steps = 4, 6
  local plate = waves.plate { inputs = 16, outputs = 16, side = side, steps = steps, drive = 1, stiffness = 0.2,
    damping = 0.1 }
  local speed = plate.parts.speed:tolist()
  local x = ty.rand(1, 16)
  local places, microphones = plate.sources:tolist(), plate.microphones:tolist()
  local now, before, heard = {}, {}, {}
  for k, place in ipairs(places) do now[place] = x:tolist()[1][k] end
  for place = 0, 15 do before[place], heard[place] = now[place], 0 end
  for step = 1, steps do
    local after = {}
    for place = 0, 15 do
      local i, j = place // side, place % side
      local around = -4 * now[place]
      for _, d in ipairs { { 1, 0 }, { -1, 0 }, { 0, 1 }, { 0, -1 } } do
        local a, b = i + d[1], j + d[2]
        if a >= 0 and a < side and b >= 0 and b < side then around = around + now[a * side + b] end
      end
      after[place] = now[place] + (now[place] - before[place]) * 0.9 + around * speed[place + 1]
        - 0.2 * now[place] ^ 3
    end
    before, now = now, after
    for place = 0, 15 do
      if step > steps // 2 then heard[place] = heard[place] + now[place] ^ 2 end
    end
  end
  local want = {}
  for k, place in ipairs(microphones) do want[k] = math.sqrt(heard[place] / 3) end
  check.close(plate:measure(x):tolist()[1], want, 1e-5)
end)

check.test("wrong arguments are one clear error", function()
  check.fails(function() waves.fibre { inputs = 3 } end, "local.waves.fibre: outputs: expected an integer in")
  check.fails(function() waves.plate { inputs = 300, outputs = 2 } end, "expected at most the 144 points of the grid")
  check.fails(function() waves.fibre({ inputs = 3, outputs = 2 }):measure(ty.ones(2, 4)) end,
    "WaveSystem:measure: x: expected floats [n, 3], got a tensor [2, 4]")
  check.fails(function() physical.new { classes = 2, width = 3, systems = {}, outputs = {} } end,
    "outputs: expected a number for each of the systems")
  check.ok(learner, "made")
end)

check.finish()
