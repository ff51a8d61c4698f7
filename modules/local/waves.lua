--- Two systems of waves that compute: black boxes for tycho.local.physical, simulated forward only. Each is made of a
-- seed, takes rows of amplitudes >= 0 and gives what its detectors measure; drift(amount) changes what it is made of a
-- little, as temperature and handling do.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- Numbers of a seed; which: to have several by one seed.
local function draw(shape, seed, which, kind) return ty.seeded_noise(ty.zeros(shape), 16 * seed + which, kind) end

-- Positions in random order.
local function shuffled(count, seed, which) return draw({ count }, seed, which, "uniform"):argsort() end

--- A system of waves: one of fibre() or plate(). It has `parts`, the tensors that it is made of.
---@class WaveSystem
---@field inputs integer
---@field outputs integer
local WaveSystem = {}
WaveSystem.__index = WaveSystem
WaveSystem.__name = "WaveSystem"

--- What the detectors measure, [n, outputs], for amplitudes [n, inputs].
---@param x Tensor
---@return Tensor
function WaveSystem:measure(x)
  local who = "WaveSystem:measure"
  arguments.expect(who, "self", self, "a table")
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "self.run", self.run, "a function")
  if x.ndim ~= 2 or x.shape[2] ~= self.inputs or not x:is_floating_point() then
    arguments.fail("%s: x: expected floats [n, %d], got %s", who, self.inputs, arguments.describe(x))
  end
  return self.run(self, x)
end

--- Changes what the system is made of by a share of its spread, drawn with a seed.
---@param amount number
---@param seed integer
function WaveSystem:drift(amount, seed)
  local who = "WaveSystem:drift"
  arguments.expect(who, "self", self, "a table")
  arguments.expect(who, "amount", amount, "a finite number >= 0")
  arguments.expect(who, "seed", seed, "an integer")
  arguments.expect(who, "self.parts", self.parts, "a table")
  local names = {}
  for name in pairs(self.parts) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do
    local part = self.parts[name]
    self.parts[name] = part + draw(part.shape, seed, 8 + i):to(part.device) * (amount * part:std():item())
  end
end

local function system(who, o, parts, run)
  for name, part in pairs(parts) do parts[name] = part:to(o.device) end
  local self = setmetatable({ inputs = o.inputs, outputs = o.outputs, parts = parts, run = run, name = who },
    WaveSystem)
  return self
end

local sizes = { inputs = "an integer in [1, 4096]", outputs = "an integer in [1, 4096]", seed = "an integer" }

--- A multimode fibre: amplitudes turn phases of light that a disordered medium mixes, and a camera that saturates sees
-- intensity I / (1 + I), I = |T exp(i pi x s)|^2 of a random T and the scale s. options: inputs, outputs, seed (0),
-- scale (4), device ("cpu").
---@param options { inputs: integer, outputs: integer, seed?: integer, scale?: number, device?: string }
---@return WaveSystem
function M.fibre(options)
  local who = "local.waves.fibre"
  local o = arguments.read(who, options, { inputs = arguments.none, outputs = arguments.none, seed = 0, scale = 4,
    device = "cpu" }, { inputs = sizes.inputs, outputs = sizes.outputs, seed = sizes.seed, scale = "a finite number" })
  arguments.expect(who, "inputs", o.inputs, sizes.inputs)
  arguments.expect(who, "outputs", o.outputs, sizes.outputs)
  local function medium(which) return draw({ o.inputs, o.outputs }, o.seed, which) * (2 * o.inputs) ^ -0.5 end
  return system("fibre", o, { real = medium(0), imaginary = medium(1) }, function(self, x)
    local phase = x * (math.pi * o.scale)
    local c, s = phase:cos(), phase:sin()
    local re = c:matmul(self.parts.real) - s:matmul(self.parts.imaginary)
    local im = c:matmul(self.parts.imaginary) + s:matmul(self.parts.real)
    local intensity = re:square() + im:square()
    return intensity / (intensity + 1)
  end)
end

--- A plate with a disordered speed of sound and a medium that stiffens: u'' = c(x)^2 (lap u) - damping u' - stiffness
-- u^3, in steps of leapfrog on a grid that is held at its rim. Amplitudes are the heights of pushes at as many random
-- places, and microphones at others measure the root mean square pressure of the second half. options: inputs, outputs,
-- seed (0), side (12: points of the grid), steps (32), drive (4: height of a push of one), stiffness (0.1), damping
-- (0.02), device ("cpu").
---@param options table
---@return WaveSystem
function M.plate(options)
  local who = "local.waves.plate"
  local o = arguments.read(who, options, { inputs = arguments.none, outputs = arguments.none, seed = 0, side = 12,
    steps = 32, drive = 4, stiffness = 0.1, damping = 0.02, device = "cpu" }, { inputs = sizes.inputs,
    outputs = sizes.outputs, seed = sizes.seed, side = "an integer in [2, 32]", steps = "an integer in [2, 1000]",
    drive = "a finite number", stiffness = "a finite number", damping = "a finite number" })
  arguments.expect(who, "inputs", o.inputs, sizes.inputs)
  arguments.expect(who, "outputs", o.outputs, sizes.outputs)
  local points = o.side * o.side
  if o.inputs > points or o.outputs > points then
    arguments.fail("%s: inputs, outputs: expected at most the %d points of the grid, got %d and %d", who, points,
      o.inputs, o.outputs)
  end
  local sources = shuffled(points, o.seed, 2):narrow(0, 0, o.inputs):to(o.device)
  local microphones = shuffled(points, o.seed, 3):narrow(0, 0, o.outputs):to(o.device)
  local stencil = ty.tensor({ { { { 0, 1, 0 }, { 1, -4, 1 }, { 0, 1, 0 } } } }, { dtype = "f32" })
  local laplacian = ty.conv2d(ty.eye(points):reshape(points, 1, o.side, o.side), stencil, nil, { padding = 1 })
    :reshape(points, points):to(o.device)
  local speed = draw({ points }, o.seed, 4, "uniform") * 0.25 + 0.1 -- squared, of a point in a step
  local self = system("plate", o, { speed = speed }, function(self, x)
    local now = ty.zeros({ x.shape[1], points }, { dtype = x.dtype, device = x.device })
      :index_add(1, sources, x * o.drive)
    local before, heard = now, 0
    for step = 1, o.steps do
      local push = now:matmul(laplacian) * self.parts.speed - now:pow(3) * o.stiffness
      local after = now + (now - before) * (1 - o.damping) + push
      before, now = now, after:clamp(-8, 8)
      if step > o.steps // 2 then heard = heard + now:index_select(1, microphones):square() end
    end
    return (heard / (o.steps - o.steps // 2)):sqrt()
  end)
  self.sources, self.microphones = sources, microphones
  return self
end

return M
