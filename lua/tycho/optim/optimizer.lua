--- What all optimizers share: groups of parameters, clipping, the step, the state.
local ty = require "tycho"
local read = require("tycho.nn.options").read
local program = ty.core.program

---@class Optimizer
---@field groups table[]  lists of parameters with their settings: group.lr and so on may be changed at any time
---@field steps integer   steps done
local Optimizer = {}
Optimizer.__index = Optimizer

-- Settings of the whole optimizer, not of a group.
local shared = { clip_norm = true, clip_value = true, schedule = true }

local function check_list(who, list)
  if type(list) ~= "table" or #list == 0 then error(who .. ": no parameters given", 4) end
  for i, p in ipairs(list) do
    if not ty.is_tensor(p) then
      error(("%s: parameter %d must be a tensor, got %s"):format(who, i, type(p)), 4)
    end
    if not p.is_leaf then error(("%s: parameter %d was computed; only leaves can be trained"):format(who, i), 4) end
  end
end

--- Makes a class. `defaults`: settings of a group; update(self, group, lists, scale): one native step.
function Optimizer.define(name, defaults, slots, update)
  local class = setmetatable({}, { __index = Optimizer })
  class.__index = class
  local known = { clip_norm = 0, clip_value = 0, schedule = function() return 1 end }
  for key, value in pairs(defaults) do known[key] = value end

  return function(parameters, options)
    local o = read(name, options, known)
    local self = { groups = {}, state = {}, steps = 0, name = name, slots = slots, update = update }
    setmetatable(self, class)
    self.clip_norm, self.clip_value, self.schedule = o.clip_norm, o.clip_value, o.schedule
    for key in pairs(shared) do o[key] = nil end
    local groups = parameters
    if type(parameters) ~= "table" or ty.is_tensor(parameters[1]) or not parameters[1] then
      groups = { { params = parameters } }
    end
    local seen = {}
    for _, given in ipairs(groups) do
      check_list(name, given.params)
      local settings = {}
      for key, value in pairs(given) do if key ~= "params" then settings[key] = value end end
      local group = read(name, settings, o)
      group.params = given.params
      for _, p in ipairs(group.params) do
        if seen[p] then error(name .. ": a parameter is given twice", 2) end
        seen[p] = true
      end
      self.groups[#self.groups + 1] = group
    end
    return self
  end
end

--- Drops the gradients of all parameters.
function Optimizer:zero_grad()
  for _, group in ipairs(self.groups) do
    for _, p in ipairs(group.params) do p:set_grad() end
  end
end

--- Calls visit(group, parameter, gradient) for every parameter that has a gradient.
function Optimizer:_each(visit)
  for _, group in ipairs(self.groups) do
    for _, p in ipairs(group.params) do
      local grad = p.grad
      if grad then visit(group, p, grad) end
    end
  end
end

-- The norm of all gradients together, a 0-d f64 tensor.
function Optimizer:_grad_norm()
  local grads = {}
  self:_each(function(_, _, grad) grads[#grads + 1] = grad end)
  return ty.norm_list(grads, 2)
end

--- The norm of all gradients together, a number.
function Optimizer:grad_norm() return self:_grad_norm():item() end

-- Parameters may have taken part in different numbers of steps; those with equal counts share one native call.
local function lists_of(self, group)
  local by_step, order = {}, {}
  for _, p in ipairs(group.params) do
    local grad = p.grad
    if grad then
      local state = self.state[p]
      if not state then
        state = { step = 0 }
        for _, slot in ipairs(self.slots(group)) do state[slot] = ty.keep(ty.zeros_like(p)) end
        self.state[p] = state
      end
      state.step = state.step + 1
      local lists = by_step[state.step]
      if not lists then
        lists = { params = {}, grads = {}, step = state.step }
        for _, slot in ipairs(self.slots(group)) do lists[slot] = {} end
        by_step[state.step] = lists
        order[#order + 1] = lists
      end
      table.insert(lists.params, p)
      table.insert(lists.grads, grad)
      for _, slot in ipairs(self.slots(group)) do table.insert(lists[slot], state[slot]) end
    end
  end
  return order
end

-- What a step does besides computing, for replays of ty.compile: counts, and the rate and number of the next launch.
local function on_replay(self, group, lists)
  program.on_replay(function()
    for _, p in ipairs(lists.params) do
      local state = self.state[p]
      state.step = state.step + 1
      lists.step = state.step
    end
    return group.lr * self.schedule(self.steps), lists.step
  end)
end

local function step(self)
  local scale, norm, recording = 1.0, nil, program.is_recording()
  if self.clip_value > 0 then
    self:_each(function(_, _, grad) grad:clamp_(-self.clip_value, self.clip_value) end)
  end
  if self.clip_norm > 0 then
    norm = self:_grad_norm()
    scale = math.min(1.0, self.clip_norm / (program.peek(norm) + 1e-6))
  end
  local factor = self.schedule(self.steps)
  for _, group in ipairs(self.groups) do
    for _, lists in ipairs(lists_of(self, group)) do
      if recording then on_replay(self, group, lists) end
      self.update(group, lists, group.lr * factor, scale)
      if recording and norm then program.clip(norm, self.clip_norm) end
    end
  end
  self.steps = self.steps + 1
  if recording then program.on_replay(function() self.steps = self.steps + 1 end) end
  return norm and not program.is_compiling() and norm:item() or norm
end

--- One step. With a loss: drops old gradients, runs backward, clips and steps. Without: clips and steps with the
-- gradients that are there (they stay; call zero_grad). Returns the norm of the gradients when clip_norm is set: a
-- number, inside ty.compile a 0-d tensor.
---@param loss? Tensor
---@return number|Tensor|nil norm
function Optimizer:step(loss)
  if loss then
    self:zero_grad()
    loss:backward()
  end
  return ty.no_grad(step, self)
end

--- The rate of the next step of the first group.
function Optimizer:rate() return self.groups[1].lr * self.schedule(self.steps) end

--- Everything needed to go on bit for bit: settings that are numbers or booleans, and the moments by position.
function Optimizer:state_dict()
  local result = { steps = self.steps, groups = {}, state = {} }
  local position = 0
  for i, group in ipairs(self.groups) do
    local settings = {}
    for key, value in pairs(group) do
      if type(value) == "number" or type(value) == "boolean" then settings[key] = value end
    end
    settings.count = #group.params
    result.groups[i] = settings
    for _, p in ipairs(group.params) do
      position = position + 1
      local state = self.state[p]
      if state then
        local copy = { step = state.step }
        for key, value in pairs(state) do
          if key ~= "step" then copy[key] = value end
        end
        result.state[tostring(position - 1)] = copy
      end
    end
  end
  return result
end

--- Takes over a state_dict() of an optimizer with the same parameters in the same order.
function Optimizer:load_state_dict(state)
  if #state.groups ~= #self.groups then
    error(("%s: the state has %d groups, the optimizer %d"):format(self.name, #state.groups, #self.groups), 2)
  end
  for i, group in ipairs(self.groups) do
    if state.groups[i].count ~= #group.params then
      error(("%s: group %d of the state has %d parameters, the optimizer %d")
        :format(self.name, i, state.groups[i].count, #group.params), 2)
    end
  end
  local position, loaded = 0, {}
  for _, group in ipairs(self.groups) do
    for _, p in ipairs(group.params) do
      local saved = state.state[tostring(position)]
      position = position + 1
      if saved then
        local new = { step = saved.step }
        for key, value in pairs(saved) do
          if ty.is_tensor(value) then
            if table.concat(value.shape, ",") ~= table.concat(p.shape, ",") then
              error(("%s: %s of parameter %d has shape [%s], the parameter [%s]"):format(self.name, key, position - 1,
                table.concat(value.shape, ", "), table.concat(p.shape, ", ")), 2)
            end
            new[key] = ty.keep(value:to { device = p.device, dtype = p.dtype }:clone())
          end
        end
        loaded[p] = new
      end
    end
  end
  self.state, self.steps = loaded, state.steps
  program.renew()
  for i, group in ipairs(self.groups) do
    for key, value in pairs(state.groups[i]) do
      if key ~= "count" then group[key] = value end
    end
  end
end

return Optimizer
