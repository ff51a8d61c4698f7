--- Training a network of bytes inside of so many bytes: what is trained, its gradients, activations and everything that
-- a step computes have places in one plan made before the first step, and a plan that does not fit is an error. Lin et
-- al. 2022, "On-Device Training Under 256KB Memory".
--
--     local network = tiny.int8(model, pictures)
--     local trainer = tiny.arena(network, { classes = 5, bytes = 256 * 1024, lr = 0.05, biases = 10,
--       weights = { [9] = 1, [12] = 0.5 } })
--     for i = 1, 1000 do trainer:step(codes, labels) end
--     print(trainer:report().bytes)
--
-- What counts: the plan's arena (activations i8, gradients f32, the sums of updates), and what stays between steps
-- because it is trained: codes and their fractions (f32) of weights, biases, the head, and the batch itself. Weights
-- that are not trained are only read, as from flash memory. Fractions are what rounding to codes would lose of updates.
--
-- Quantization-aware scaling: a weight's code is w / s, so its gradient is s times the float one and too small by s^2
-- beside the code that it is to change; each weight's gradient is multiplied by s^-2, a bias's by (s s_x)^-2, for every
-- output channel by its own. A step of rate lr on codes then is the float step of that rate. Section 3.1.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local check_network = require("tycho.tiny.int8").check

local expect, fail = arguments.expect, arguments.fail
local program = ty.core.program
local who = "tiny.arena"

--- What tiny.arena makes.
---@class ArenaTrainer
---@field network Int8Network
---@field head Module     nn.Linear of the features, f32
---@field held integer    bytes of what is trained
local Trainer = {}
Trainer.__index = Trainer

local defaults = { classes = arguments.none, bytes = 256 * 1024, lr = 0.01, schedule = function() return 1 end,
  weights = {}, biases = 0, scaled = true, seed = 0 }
local words = { bytes = "an integer >= 0", lr = "a finite number >= 0", schedule = "a function", weights = "a table",
  biases = "an integer >= 0", scaled = "a boolean", seed = "an integer" }

-- The places of convolutions, in order.
local function convolutions(network)
  local list = {}
  for i, node in ipairs(network.nodes) do if node.kind == "conv" then list[#list + 1] = i end end
  return list
end

-- By place what is wanted of backward(): shares, 0 for the bias alone.
local function wanted_of(network, o)
  local wanted, list = {}, convolutions(network)
  if o.biases > #list then fail("%s: biases: expected at most %d, got %d", who, #list, o.biases) end
  for k = #list - o.biases + 1, #list do wanted[list[k]] = 0 end
  for place, share in pairs(o.weights) do
    local node = network.nodes[place]
    if not node or node.kind ~= "conv" then
      fail("%s: weights: expected places of convolutions, got %s", who, arguments.describe(place))
    end
    expect(who, ("weights[%d]"):format(place), share, "a number in (0, 1]")
    if node.groups > 1 and share < 1 then
      fail("%s: weights[%d]: expected 1 for a convolution in groups, got %g", who, place, share)
    end
    wanted[place] = share
  end
  return wanted
end

-- What is trained of one convolution: codes with their fractions, and the scales of their gradients.
local function parts_of(network, place, share, scaled)
  local node = network.nodes[place]
  local part = { node = node }
  if share > 0 then
    local count = network:channels(place, share)
    part.codes = count < node.weight.shape[2] and node.weight:narrow(1, 0, count) or node.weight
    part.weight = ty.keep(part.codes:to("f32"):contiguous())
    part.up = ty.keep(scaled and (1 / node.weight_scale:square()):reshape(-1, 1, 1, 1) or ty.ones(1))
  end
  part.bias = node.bias
  part.bias_up = ty.keep(scaled and 1 / (node.weight_scale * node.x_scale):square() or ty.ones(1))
  return part
end

-- The network as one op: features of codes x, with gradients for the leaves (part.at says where a part's begin).
local function features_of(self)
  local network, parts, wanted, count = self.network, self.parts, self.wanted, #self.leaves
  return ty.custom_op {
    name = "int8_network",
    forward = function(ctx, x)
      ctx.y = network:forward(x)
      return network:features(ctx.y)
    end,
    backward = function(ctx, g)
      local grads = {}
      ty.no_grad(function()
        network:backward(ctx.y, g, wanted, function(place, dw, db)
          local part = parts[place]
          grads[part.at] = db * part.bias_up
          if part.weight then grads[part.at + 1] = dw * part.up end
        end)
      end)
      return nil, table.unpack(grads, 1, count)
    end,
  }
end

local function step_of(self)
  local features, leaves, head, parts, optimizer = features_of(self), self.leaves, self.head, self.parts, self.optimizer
  return function(x, labels)
    local loss = ty.cross_entropy(head(features(x, table.unpack(leaves))), labels)
    optimizer:step(loss)
    ty.no_grad(function()
      for _, part in pairs(parts) do
        if part.weight then part.codes:copy_(part.weight:round():clamp(-127, 127):to "i8") end
      end
    end)
    return loss
  end
end

--- A trainer of a network of bytes, which it changes; its head, of floats, begins anew. options:
--   classes   of the head
--   weights   by the place of a convolution in network.nodes the share of its input channels whose weights are trained
--   biases    of so many last convolutions are trained (0)
--   bytes     for everything that changes (256 KiB); a step that needs more is an error
--   lr, schedule  of plain SGD (0.01; 1)
--   scaled    quantization-aware scaling (true)
--   seed      of the head (0)
---@param network Int8Network
---@param options table
---@return ArenaTrainer
local function arena(network, options)
  check_network(who, network)
  local o = arguments.read(who, expect(who, "options", options, "a table"), defaults, words)
  expect(who, "classes", o.classes, "an integer >= 2")
  local self = setmetatable({ network = network, wanted = wanted_of(network, o), parts = {}, most = o.bytes,
    leaves = {} }, Trainer)
  for place, share in pairs(self.wanted) do self.parts[place] = parts_of(network, place, share, o.scaled) end
  local rng = ty.rng_state()
  ty.manual_seed(o.seed)
  self.head = ty.nn.Linear(network.width, o.classes)
  ty.rng_state(rng)
  ty.no_grad(function() self.head.weight:mul_(0) self.head.bias:mul_(0) end)
  self.held = 4 * (self.head.weight:numel() + self.head.bias:numel())
  local leaves = self.leaves
  for place = 1, #network.nodes do
    local part = self.parts[place]
    if part then
      part.at = #leaves + 1
      leaves[part.at] = part.bias:requires_grad_()
      self.held = self.held + 4 * part.bias:numel()
      if part.weight then
        leaves[part.at + 1] = part.weight:requires_grad_()
        self.held = self.held + 5 * part.weight:numel()
      end
    end
  end
  local trained = self.head:parameters()
  for _, leaf in ipairs(leaves) do trained[#trained + 1] = leaf end
  self.optimizer = ty.optim.SGD(trained, { lr = o.lr, schedule = o.schedule })
  return self
end

--- One step on codes of pictures. The first records it and makes its plan; raises where that needs more bytes than
-- there are.
---@param x Tensor       codes i8 [n, c, h, w] of network:codes()
---@param labels Tensor  i64 [n]
---@return Tensor loss
function Trainer:step(x, labels)
  expect("ArenaTrainer:step", "x", x, "a tensor")
  expect("ArenaTrainer:step", "labels", labels, "a tensor")
  if not self.run then
    local own = self.held + x:nbytes() + labels:nbytes()
    local left = self.most - own
    if left <= 0 then
      fail("%s: bytes: what is trained and the batch take %d bytes, of %d that there are", who, own, self.most)
    end
    self.own = own
    self.run = program.new(step_of(self), 1, false, false, true, left)
  end
  return self.run(x, labels)
end

--- Where the plan of the recorded step puts each temporary: { offset, bytes, first, last }, in bytes and steps.
---@return table[]
function Trainer:places()
  return program.places(self.run or fail("ArenaTrainer:places: expected a step before it"))
end

--- What the recorded step takes: bytes (all of it), arena, held (what is trained), batch, and what ty.compile says.
---@return table
function Trainer:report()
  local stats = self.run and program.stats(self.run)[1] or fail("ArenaTrainer:report: expected a step before it")
  stats.held, stats.batch = self.held, self.own - self.held
  stats.bytes = stats.arena + self.own
  return stats
end

--- Steps on batches drawn at random. options: steps, batch (4), seed (0).
---@param x Tensor       codes of all pictures
---@param labels Tensor  i64
---@param options {steps: integer, batch?: integer, seed?: integer}
---@return number loss  the mean over the last tenth of the steps
function Trainer:fit(x, labels, options)
  local o = arguments.read("ArenaTrainer:fit", options, { steps = arguments.none, batch = 4, seed = 0 },
    { steps = "an integer >= 1", batch = "an integer >= 1", seed = "an integer" })
  expect("ArenaTrainer:fit", "steps", o.steps, "an integer >= 1")
  local rng, sum, tail = ty.rng_state(), 0, (o.steps + 9) // 10
  ty.manual_seed(o.seed)
  for i = 1, o.steps do
    ty.scope(function()
      local at = ty.randint(0, labels.shape[1], { o.batch })
      local loss = self:step(x:index_select(0, at), labels:index_select(0, at))
      if i > o.steps - tail then sum = sum + loss:item() / tail end
    end)
  end
  ty.rng_state(rng)
  return sum
end

--- What the network says of pictures: the mean cross entropy and the share of labels that it finds.
---@param x Tensor       codes
---@param labels Tensor  i64
---@return number loss
---@return number right
function Trainer:judge(x, labels)
  local loss, right, n = 0, 0, labels.shape[1]
  for at = 0, n - 1, 64 do
    ty.scope(ty.no_grad, function()
      local count = math.min(64, n - at)
      local logits = self.head(self.network:features(self.network:forward(x:narrow(0, at, count))))
      local label = labels:narrow(0, at, count)
      loss = loss + ty.cross_entropy(logits, label, { reduction = "sum" }):item()
      right = right + logits:argmax(1):eq(label):sum():item()
    end)
  end
  return loss / n, right / n
end

return arena
