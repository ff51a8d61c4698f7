--- Deep networks whose layers are physical systems, trained without knowing them: the trainable numbers lie between the
-- systems, each layer has a loss of its own, and no gradient goes through a system. Momeni et al. 2023,
-- "Backpropagation-free Training of Deep Physical Neural Networks" (arXiv 2304.11042; Science 382, 2023).
--
-- A layer sends the length-normalized size of its input h through its system, s = f(|h| / ||h||), and joins what is
-- measured with h, which goes around the system: y = W [s, h] + b. Its goodness is the cosine of |y| and a direction
-- drawn at random. An input holds its label: of a right one and a wrong one, with goodness g+ and g-, the loss is
-- log(1 + exp(-4 (g+ - g-))), and W and b alone are trained by it. y is what the next layer gets. What is read is the
-- label whose goodness, added over layers, is largest.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn
local M = {}

--- A function of a tensor as a black box: what it does inside is not recorded, and where a gradient is asked of it,
-- that is an error. Returns the box and calls(), how many rows have gone through it.
---@param name string
---@param fn fun(x: Tensor): Tensor
---@return fun(x: Tensor): Tensor box
---@return fun(): integer calls
function M.black_box(name, fn)
  local who = "local.physical.black_box"
  arguments.expect(who, "name", name, "a string")
  arguments.expect(who, "fn", fn, "a function")
  local rows = 0
  local box = ty.custom_op { name = name,
    forward = function(_, x)
      rows = rows + (x.shape[1] or 1)
      return fn(x:detach())
    end,
    backward = function()
      error(("%s: a gradient was asked of a black box, which has none"):format(name), 0)
    end }
  return box, function() return rows end
end

-- Cosines of the size of each row with a direction [width].
local function goodness(y, direction)
  local size = y:abs()
  return size:matmul(direction) / (size:square():sum(-1) + 1e-12):sqrt()
end

local defaults = { classes = arguments.none, width = arguments.none, systems = arguments.none,
  outputs = arguments.none, hidden = 64, rate = 1e-3, sharpness = 4, strength = 1, around = true }
local kinds = { classes = "an integer >= 2", width = "an integer >= 1", systems = "a list",
  outputs = "a list of integers >= 0", hidden = "an integer >= 1", rate = "a number >= 0 or a function",
  sharpness = "a finite number > 0", strength = "a finite number" }

local function check(who, options, without)
  local own = {}
  for name, value in pairs(defaults) do
    if not without or without[name] == nil then own[name] = value end
  end
  local o = arguments.read(who, options, own, kinds)
  for _, name in ipairs { "classes", "width", "systems", "outputs" } do
    arguments.expect(who, name, o[name], kinds[name])
  end
  if #o.systems == 0 or #o.outputs ~= #o.systems then
    arguments.fail("%s: outputs: expected a number for each of the systems, at least one, got %d for %d", who,
      #o.outputs, #o.systems)
  end
  for i, run in ipairs(o.systems) do
    if run then arguments.expect(who, ("systems[%d]"):format(i), run, "a function") end
  end
  return o
end

-- What a layer's matrix gets: what is measured, and what goes around the system.
local function inputs_of(o, i)
  local width = i == 1 and o.width + o.classes or o.hidden
  if not o.systems[i] then return width end
  return o.outputs[i] + (o.around and width or 0)
end

local function through(run, around, layer, h)
  if not run then return layer(h) end
  local size = h:abs()
  local measured = run(size / (size:square():sum(-1, true):sqrt() + 1e-6))
  return layer(around and ty.concat({ measured, h }, 1) or measured)
end

--- A learner of layers around systems. options: classes; width (numbers that the input has); systems (a list of
-- functions of [n, width + classes] for the first and [n, hidden] for the others, each a black box; false: a layer
-- without one); outputs (how many numbers each system gives); hidden (64: numbers that a layer gives); rate (1e-3, or a
-- function that makes an optimizer of parameters); sharpness (4); strength (1: the number that stands for the label);
-- around (true; false: layers get what is measured alone, and h does not go around the systems).
---@param options table
---@return Learner
function M.new(options)
  local o = check("local.physical.new", options)
  local make, stages, model, directions = blocks.optimizer(o.rate), {}, nn.ModuleList(), {}
  for i, run in ipairs(o.systems) do
    local layer = nn.Linear(inputs_of(o, i), o.hidden)
    local direction = ty.randn_like(layer.bias):detach()
    layer:buffer("direction", direction / direction:square():sum():sqrt())
    model:append(layer)
    directions[i] = function(y) return goodness(y, layer.direction) end
    stages[i] = { optimizer = make(layer:parameters()),
      forward = function(h) return through(run, o.around, layer, h) end,
      loss = function(y) -- the first half of a batch is right, the second wrong
        local g = directions[i](y)
        local n = g.shape[1] // 2
        return ty.softplus((g:narrow(0, n, n) - g:narrow(0, 0, n)) * o.sharpness):mean()
      end }
  end
  local function with(x, label)
    return ty.concat({ ty.one_hot(label, o.classes):to(x.dtype) * o.strength, x:flatten(1) }, 1)
  end
  local function read(x)
    local scores = {}
    for class = 0, o.classes - 1 do
      local label = ty.full({ x.shape[1] }, class, { dtype = "i64", device = x.device })
      local sum = 0
      for i, y in ipairs(blocks.outputs(stages, with(x, label))) do sum = sum + directions[i](y) end
      scores[class + 1] = sum
    end
    return ty.stack(scores, 1)
  end
  return blocks.learner { model = model, stages = stages, prepare = blocks.paired(with, o.classes), read = read }
end

--- The other way: a network of the same form, without labels in its inputs and with scores of the classes as what the
-- last layer gives, trained from end to end through models of the systems, which gradients pass. learner.systems are
-- the functions that stand for systems: with black boxes in their place it reads through the systems themselves.
-- options: as for new, but sharpness and strength.
---@param options table
---@return Learner
function M.in_silico(options)
  local who = "local.physical.in_silico"
  local o = check(who, options, { sharpness = false, strength = false })
  local systems, layers = table.move(o.systems, 1, #o.systems, 1, {}), nn.ModuleList()
  for i in ipairs(systems) do
    layers:append(nn.Linear(inputs_of(o, i), i == #systems and o.classes or o.hidden))
  end
  local function forward(x)
    local h = x:flatten(1)
    h = ty.concat({ ty.zeros({ h.shape[1], o.classes }, { dtype = h.dtype, device = h.device }), h }, 1)
    for i, layer in ipairs(layers) do h = through(systems[i], o.around, layer, h) end
    return h
  end
  local learner = blocks.learner { model = layers, scores = function(outputs) return outputs[1] end, stages = { {
    forward = forward, loss = nn.cross_entropy, optimizer = blocks.optimizer(o.rate)(layers:parameters()) } } }
  learner.systems = systems
  return learner
end

return M
