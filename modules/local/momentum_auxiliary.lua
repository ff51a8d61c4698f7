--- Momentum auxiliary networks: a block without a gradient from behind it sees what comes next through a moving average
-- of the next block's first layer. Su et al. 2024, "Momentum Auxiliary Network for Supervised Local Learning" (arXiv
-- 2407.05623). The loss of a block that gives y is the cross entropy of head(average(y) + bias(y)): average is the next
-- block's first unit with weights a <- m a + (1 - m) w, moved after each of the block's steps and not trained; bias, a
-- unit of the same form, is trained with the block and makes up for what differs between the two. The head is that of
-- InfoPro (Wang et al. 2021), a convolution of stride 2 and two linear layers. InfoPro's further loss, of pictures
-- drawn again, is left out. The last block has the network's own loss, and only units are used to read pictures.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn

-- Maps or features to scores of the classes.
local function new_head(size, classes, hidden)
  local channels = size[1]
  if #size == 1 then return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, classes)) end
  return nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, { stride = 2, padding = 1, bias = false }),
    nn.BatchNorm2d(2 * channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, hidden),
    nn.ReLU(), nn.Linear(hidden, classes))
end

-- A unit of the same form with weights of its own.
local function drawn_anew(unit)
  local copy = unit:clone()
  for _, p in ipairs(copy:parameters()) do
    if p.ndim > 1 then nn.init.kaiming_normal(p, { mode = "fan_out", nonlinearity = "relu" }) end
  end
  return copy
end

local function moves(average, unit, momentum)
  local averages, weights = average:parameters(), unit:parameters()
  return function()
    ty.no_grad(function() ty.lerp_list_(averages, weights, 1 - momentum) end)
  end
end

local function check_cuts(who, cuts, count)
  local before = 0
  for i, cut in ipairs(cuts) do
    if cut <= before or cut > count - 2 then
      arguments.fail("%s: cuts[%d]: expected an integer in [%d, %d], got %d", who, i, before + 1, count - 2, cut)
    end
    before = cut
  end
end

--- A learner of units one after the other, the last of which gives scores [n, classes]. options: cuts (the number of
-- the last unit of each block but the last block; an empty list: one block, training from end to end), classes, example
-- (an input [n, ...], by which sizes are known), auxiliary ("momentum": average and bias; "average" or "bias": one of
-- the two; "none": the head alone), momentum (0.995), hidden (128: numbers between the two linear layers of a head),
-- rate (1e-3, or a function that makes an optimizer of parameters). The learner's averages are those of blocks 1 to n -
-- 1.
---@param units Module[]
---@param options { cuts: integer[], classes: integer, example: Tensor, auxiliary?: string, momentum?: number,
---  hidden?: integer, rate?: number|function }
---@return Learner
return function(units, options)
  local who = "local.momentum_auxiliary"
  arguments.expect(who, "units", units, "a list")
  local o = arguments.read(who, options, { cuts = arguments.none, classes = arguments.none, example = arguments.none,
    auxiliary = "momentum", momentum = 0.995, hidden = 128, rate = 1e-3 }, { cuts = "a list of integers >= 1",
    classes = "an integer >= 1", example = "a tensor", auxiliary = '"momentum" or "average" or "bias" or "none"',
    momentum = "a number in [0, 1]", hidden = "an integer >= 1", rate = "a number >= 0 or a function" })
  arguments.expect(who, "cuts", o.cuts, "a list of integers >= 1")
  arguments.expect(who, "classes", o.classes, "an integer >= 1")
  arguments.expect(who, "example", o.example, "a tensor")
  check_cuts(who, o.cuts, #units)
  local sizes = blocks.sizes(units, o.example)
  local make, stages, auxiliaries, averages = blocks.optimizer(o.rate), {}, nn.ModuleList(), {}
  for j = 1, #o.cuts + 1 do
    local first, last = (o.cuts[j - 1] or 0) + 1, o.cuts[j] or #units
    local block = nn.Sequential(table.move(units, first, last, 1, {}))
    if j > #o.cuts then
      stages[j] = { forward = function(x) return block(x) end, loss = nn.cross_entropy,
        optimizer = make(block:parameters()) }
      break
    end
    local parts, following = {}, units[last + 1]
    if o.auxiliary == "momentum" or o.auxiliary == "average" then
      parts.average = following:clone():requires_grad_(false)
      averages[j] = parts.average
    end
    if o.auxiliary == "momentum" or o.auxiliary == "bias" then parts.bias = drawn_anew(following) end
    parts.head = new_head(sizes[o.auxiliary == "none" and last or last + 1], o.classes, o.hidden)
    local trained = nn.ModuleList { block, parts.head, parts.bias }
    auxiliaries:append(nn.ModuleDict(parts))
    stages[j] = { forward = function(x) return block(x) end, optimizer = make(trained:parameters()),
      after = parts.average and moves(parts.average, following, o.momentum),
      loss = function(y, label)
        if parts.average and parts.bias then y = parts.average(y) + parts.bias(y)
        elseif parts.average or parts.bias then y = (parts.average or parts.bias)(y) end
        return nn.cross_entropy(parts.head(y), label)
      end }
  end
  local learner = blocks.learner { stages = stages, scores = function(outputs) return outputs[#outputs] end,
    model = nn.ModuleDict { units = nn.ModuleList(units), auxiliaries = auxiliaries } }
  learner.averages = averages
  return learner
end
