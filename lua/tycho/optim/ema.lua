--- An exponential moving average of a module's weights.
local ty = require "tycho"
local read = require("tycho.nn.options").read
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
  local o = read("EMA", options, { decay = 0.999, warmup = true })
  local self = setmetatable({ source = module, decay = o.decay, warmup = o.warmup, updates = 0 }, EMA)
  self.model = module:clone():eval():requires_grad_(false)
  self.averages, self.average_buffers = tensors(self.model)
  return self
end

-- The weight of the next update.
local function next_weight(self)
  local decay = self.warmup and math.min(self.decay, (1 + self.updates) / (10 + self.updates)) or self.decay
  self.updates = self.updates + 1
  return 1 - decay
end

--- Moves the averages towards the module's weights; call it after every optimizer step.
function EMA:update()
  local weights, buffers = tensors(self.source)
  ty.no_grad(function()
    program.on_replay(function() return next_weight(self) end)
    ty.lerp_list_(self.averages, weights, next_weight(self))
    for i, buffer in ipairs(buffers) do self.average_buffers[i]:copy_(buffer) end
  end)
end

--- Copies the averages into another module of the same class (default: the module itself).
function EMA:copy_to(module)
  (module or self.source):load_state_dict(self.model:state_dict())
end

function EMA:state_dict() return { updates = self.updates, model = self.model:state_dict() } end

function EMA:load_state_dict(state)
  self.updates = state.updates
  self.model:load_state_dict(state.model)
end

return new
