--- An exponential moving average of a module's weights.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local program = ty.core.program

---@class EMA
---@field model Module  a copy of the module with the averaged weights, in evaluation mode
local EMA = {}
EMA.__index = EMA

local function tensors(module)
  local list, names = {}, {}
  for name, tensor in module:named_parameters() do list[#list + 1], names[#names + 1] = tensor, name end
  local buffers = {}
  for _, tensor in module:named_buffers() do buffers[#buffers + 1] = tensor end
  return list, buffers
end

--- options: decay (0.999), warmup (true: the decay begins at 0.1 and grows as (1 + n) / (10 + n), so that the random
-- start is soon forgotten).
local function new(module, options)
  arguments.expect("EMA", "module", module, "a module")
  local o = arguments.read("EMA", options, { decay = 0.999, warmup = true }, { decay = "a number in [0, 1]" })
  local self = setmetatable({ source = module, decay = o.decay, warmup = o.warmup, updates = 0 }, EMA)
  self.model = module:clone():eval():requires_grad_(false)
  self.averages, self.average_buffers = tensors(self.model)
  return self
end

--- Counts an update; the weight of the new values in it. With averages_of_weights(), others() and move() what an
-- optimizer needs that was made with the option `ema`: it moves the averages in its own pass over the weights.
---@return number weight
function EMA:advance()
  local decay = self.warmup and math.min(self.decay, (1 + self.updates) / (10 + self.updates)) or self.decay
  self.updates = self.updates + 1
  return 1 - decay
end

--- The average of each weight of the module, by weight.
function EMA:averages_of_weights()
  local result = {}
  for i, weight in ipairs((tensors(self.source))) do result[weight] = self.averages[i] end
  return result
end

--- The averages, weights and buffers for move() without the weights that `done` marks.
function EMA:others(done)
  local weights, buffers = tensors(self.source)
  local result = { averages = {}, weights = {}, buffers = buffers }
  for i, weight in ipairs(weights) do
    if not done[weight] then
      table.insert(result.averages, self.averages[i])
      table.insert(result.weights, weight)
    end
  end
  return result
end

--- Moves the averages of others() and copies the buffers.
function EMA:move(others, weight)
  ty.no_grad(function()
    if others.weights[1] then ty.lerp_list_(others.averages, others.weights, weight) end
    for i, buffer in ipairs(others.buffers) do self.average_buffers[i]:copy_(buffer) end
  end)
end

--- Moves the averages towards the module's weights; call it after every optimizer step (of an optimizer that does not
-- do it itself: its option `ema`).
function EMA:update()
  program.on_replay(function() return self:advance() end)
  self:move(self:others {}, self:advance())
end

--- Copies the averages into another module of the same class (default: the module itself).
function EMA:copy_to(module)
  module = arguments.expect("EMA:copy_to", "module", module, "a module or nil") or self.source
  module:load_state_dict(self.model:state_dict())
end

function EMA:state_dict() return { updates = self.updates, model = self.model:state_dict() } end

function EMA:load_state_dict(state)
  arguments.expect("EMA:load_state_dict", "state", state, "a table")
  self.updates = arguments.expect("EMA:load_state_dict", "state.updates", state.updates, "an integer >= 0")
  self.model:load_state_dict(state.model)
end

return new
