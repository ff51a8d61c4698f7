--- What all optimizers share: groups of parameters, clipping, the step, the state.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local stepped = require("tycho.optim.watcher").stepped

local expect, fail, read = arguments.expect, arguments.fail, arguments.read
local program = ty.core.program
local clear_grads, gather_grads, drop_grads = ty.core.clear_grads, ty.core.gather_grads, ty.core.drop_grads

--- What all optimizers have: groups of parameters, a step, state that can be saved.
---@class Optimizer
---@field groups table[]  lists of parameters with their settings: group.lr and so on may be changed at any time
---@field steps integer   steps done
local Optimizer = {}
Optimizer.__index = Optimizer

-- Settings of the whole optimizer, not of a group.
local shared = { clip_norm = true, clip_value = true, schedule = true, ema = true }

--- The parameters that are meant: those of a module, a list of tensors, or one tensor; as a list.
---@param who string for errors
---@param given Module|Tensor[]|Tensor
---@return Tensor[]
function Optimizer.parameters_of(who, given)
  expect(who, "parameters", given, "a module or a tensor or a list of tensors")
  if ty.is_tensor(given) then return { given } end
  return arguments.is_module(given) and given:parameters() or given
end

-- The list of a group; raises when there is nothing in it that can be trained.
local function trainable(who, given)
  local list = Optimizer.parameters_of(who, given)
  if #list == 0 then
    fail("%s: parameters: expected at least one tensor, got %s", who, list == given and "an empty table"
      or arguments.describe(given) .. " without parameters")
  end
  for i, p in ipairs(list) do
    if not p.is_leaf then fail("%s: parameters: number %d was computed; only leaves can be trained", who, i) end
  end
  return list
end

-- What values the options may have that all optimizers take, and the settings that several have.
local kinds = {
  clip_norm = "a number >= 0", clip_value = "a number >= 0", schedule = "a function", ema = "a table",
  lr = "a finite number >= 0", weight_decay = "a finite number >= 0", eps = "a finite number >= 0",
  beta1 = "a number in [0, 1)", beta2 = "a number in [0, 1)", momentum = "a number in [0, 1]",
  dampening = "a finite number", bits = "8 or 32", scale = "a finite number >= 0", refresh = "an integer >= 1",
  rank = "an integer >= 0", seed = "an integer", density = "a number in [0, 1]", growth = "a number >= 1",
  free_rate = "a finite number >= 0", alpha = "a finite number >= 0", rho = "a number in [0, 1)",
  lr_decay = "a finite number >= 0", initial = "a finite number >= 0", momentum_decay = "a finite number >= 0",
  shrink = "a number in (0, 1]", grow = "a number >= 1", smallest = "a finite number >= 0",
  largest = "a number >= 0", decay = "a finite number >= 0", start = "a number >= 0", eps1 = "a finite number >= 0",
  eps2 = "a finite number >= 0", limit = "a number > 0", iterations = "an integer >= 0",
  first_distance = "a finite number > 0", coefficient = "a finite number > 0", beta3 = "a number in [0, 1)",
  power = "a finite number >= 0", warmup = "an integer >= 0", averaging = "a finite number >= 0",
  adam_rate = "a finite number >= 0", adjust = '"original" or "rms"',
  projection = '"blocks" or "columns" or "random" or "svd"',
}

-- What the constructor was given as groups: lists of parameters with settings, perhaps a schedule of their own.
local function groups_of(name, given)
  local is_list = type(given) == "table" and not arguments.is_module(given)
  if is_list and type(given[1]) == "table" and not arguments.is_module(given[1]) then
    for i, group in ipairs(given) do
      if type(group) ~= "table" then
        fail("%s: group %d: expected a table with params, got %s", name, i, arguments.describe(group))
      end
    end
    return given
  end
  return { { params = given } }
end

-- Adds a group of parameters with settings of their own.
local function add_group(self, given)
  local name, position = self.name, self.position
  local params = trainable(name, given.params)
  local settings = {}
  for key, value in pairs(given) do if key ~= "params" then settings[key] = value end end
  local group = read(name, settings, self.defaults, kinds)
  group.params = params
  for i, p in ipairs(params) do
    if position[p] then fail("%s: parameters: number %d of group %d is given twice", name, i, #self.groups + 1) end
    self.count = self.count + 1
    position[p] = self.count
  end
  self.groups[#self.groups + 1] = group
end

--- Makes a class. `defaults`: settings of a group. `rules`:
--   kind(group, p, state)  how parameter p (with its state so far, or nil) is treated; one of the keys of
--   slots                  { kind = { name of a state tensor = function(p, group) that makes it } }
--   place(group, p, t)     a state tensor t of p, or a copy where it is to lie (may be absent)
--   setting(group)         the setting that kind() depends on: a change is noticed (may be absent)
--   before(self, group)    called before each step (may be absent)
--   composed               true: a step is made of ops besides native ones. It takes what changes from step to step
--                          from batch:number(), and calls batch:again() before each native step; clip.factor is what
--                          gradients are multiplied with: a number, while ty.compile records a tensor
--   eager                  true, of composed ones: a step looks at seeds or gradients in Lua, which cannot be recorded
--   together(self, parts, clip)  in place of step, of those that are composed and eager: all batches of all groups in
--                          one call, a list of { group =, batch =, lr = }. Numbers of the optimizer that are kept in
--                          self.groups[1] are saved with its settings
--   methods                of the class (may be absent)
--   step(kind, group, batch, lr, clip)  one native step; batch: lists params, grads, averages (which may be empty) and
--                          one per slot, and step, their count; clip: scale, limit and weight, that of new averages;
--                          those that are composed get the optimizer besides
function Optimizer.define(name, defaults, rules)
  local class = setmetatable({}, { __index = Optimizer })
  class.__index = class
  class.__tostring = Optimizer.__tostring
  for method, fn in pairs(rules.methods or {}) do class[method] = fn end
  local known = { clip_norm = 0, clip_value = 0, schedule = function() return 1 end, ema = arguments.none }
  for key, value in pairs(defaults) do known[key] = value end

  return function(parameters, options)
    local o = read(name, options, known, kinds)
    local self = { groups = {}, state = {}, plans = {}, position = {}, steps = 0, name = name, rules = rules }
    self.param_groups = self.groups -- PyTorch's name
    setmetatable(self, class)
    self.clip_norm, self.clip_value, self.schedule, self.ema = o.clip_norm, o.clip_value, o.schedule, o.ema
    if o.ema and not o.ema.averages_of_weights then
      fail("%s: ema: expected an optim.EMA, got %s", name, arguments.describe(o.ema))
    end
    for key in pairs(shared) do o[key] = nil end
    self.defaults, self.count = { schedule = arguments.none }, 0
    for key, value in pairs(o) do self.defaults[key] = value end
    for _, given in ipairs(groups_of(name, parameters)) do add_group(self, given) end
    return self
  end
end

-- The rate of a group now. Both factors may be changed between steps: by the program and by its schedule.
local function rate_of(self, group)
  local factor, lr = (group.schedule or self.schedule)(self.steps), group.lr
  if type(factor) ~= "number" or not (factor >= 0 and factor < math.huge) then
    expect(self.name, ("schedule(%d)"):format(self.steps), factor, kinds.lr)
  end
  if type(lr) ~= "number" or not (lr >= 0 and lr < math.huge) then expect(self.name, "lr", lr, kinds.lr) end
  return lr * factor
end

--- Adds parameters in the course of training, with settings of their own where they are given.
---@param group { params: Module|Tensor[]|Tensor, lr?: number }
function Optimizer:add_param_group(group)
  expect("add_param_group", "group", group, "a table")
  if arguments.is_module(group) or group.params == nil then
    fail("add_param_group: group: expected a table with params, got %s", arguments.describe(group))
  end
  add_group(self, group)
end

--- The kind and, for each group, how many parameters it has and its settings.
function Optimizer:__tostring()
  local lines = { self.name }
  for i, group in ipairs(self.groups) do
    local names, settings = {}, {}
    for name, value in pairs(group) do
      local kind = type(value)
      if kind == "number" or kind == "boolean" or kind == "string" then names[#names + 1] = name end
    end
    table.sort(names)
    for k, name in ipairs(names) do settings[k] = ("%s = %s"):format(name, tostring(group[name])) end
    lines[i + 1] = ("  group %d: %d parameters, %s"):format(i, #group.params, table.concat(settings, ", "))
  end
  return table.concat(lines, "\n")
end

--- Drops the gradients of all parameters.
function Optimizer:zero_grad()
  local groups = self.groups
  for i = 1, #groups do clear_grads(groups[i].params) end
end

-- All gradients there are.
local function gradients(self)
  local grads, n = {}, 0
  for _, group in ipairs(self.groups) do
    local params = group.params
    for i = 1, #params do
      local grad = params[i].grad
      if grad then
        n = n + 1
        grads[n] = grad
      end
    end
  end
  return grads
end

--- The norm of all gradients together, a number.
function Optimizer:grad_norm() return ty.norm_list(gradients(self), 2):item() end

-- What rules that are composed ask of a batch.
local Batch = {}
Batch.__index = Batch

--- The rate of the step.
function Batch:rate() return rate_of(self.of, self.group) end

--- What fn returns, a number that depends on the rate and the count of steps: itself, and while ty.compile records a
-- tensor beside p, which replays fill anew.
function Batch:number(p, fn)
  local value = fn()
  if not program.is_recording() then return value end
  local t = ty.empty({}, { dtype = p.dtype == "f64" and "f64" or "f32", device = p.device })
  program.number(fn, t, value)
  return t
end

--- Before a native step: replays give it fn()'s rate (the batch's own), the count of steps and the averages' weight.
function Batch:again(clip, fn)
  if not program.is_recording() then return end
  program.on_replay(function() return fn and fn() or self:rate(), self.step, clip.weight end)
end

--- After a native step on gradients that are not scaled yet.
function Batch:scaled(clip)
  if program.is_recording() and clip.norm then program.clip(clip.norm, self.of.clip_norm) end
end

--- Runs fn now and, by itself, at this place of replays: what is done every so many steps, to states alone.
function Batch:aside(fn)
  local function run() ty.no_grad(ty.scope, fn) end
  if not program.is_recording() then return run() end
  program.on_replay(run)
  program.aside(run)
end

-- The batches of a group: parameters with gradients that are treated alike and have taken part in equally many steps
-- share one native call. plan.params are the parameters it was made for and plan.grads the handles of their gradients,
-- false where there is none; the batches have the same handles. Between steps the handles are empty: what they hold
-- would live on after zero_grad.
local function plan_of(self, group, setting)
  local rules, averages = self.rules, self.ema and self.ema:averages_of_weights() or {}
  local plan = { params = {}, grads = {}, setting = setting }
  local by_key = {}
  for i, p in ipairs(group.params) do
    local state, grad = self.state[p], p.grad
    if grad then
      local kind = rules.kind(group, p, state)
      state = state or { step = 0 }
      self.state[p] = state
      local key = ("%s %d %s"):format(kind, state.step, averages[p] and "averaged" or "")
      local batch = by_key[key]
      if not batch then
        batch = setmetatable({ kind = kind, step = state.step, states = {}, params = {}, grads = {},
          averages = {} }, Batch)
        batch.of, batch.group = self, group
        for slot in pairs(rules.slots[kind]) do batch[slot] = {} end
        by_key[key], plan[#plan + 1] = batch, batch
      end
      local n = #batch.params + 1
      batch.params[n], batch.averages[n], batch.states[n], batch.grads[n] = p, averages[p], state, ty.keep(grad)
      for slot, make in pairs(rules.slots[kind]) do
        if not state[slot] then
          local made = make(p, group)
          state[slot] = ty.keep(rules.place and rules.place(group, p, made) or made)
        end
        batch[slot][n] = state[slot]
      end
    end
    plan.params[i], plan.grads[i] = p, grad or false
  end
  return plan
end

-- The plan of a group with this step's gradients; a new one when the last does not fit what is there.
local function prepare(self, group)
  local setting = self.rules.setting and self.rules.setting(group)
  local plan = self.plans[group]
  if plan and plan.setting == setting and gather_grads(group.params, plan.params, plan.grads) then return plan end
  if plan then drop_grads(plan.grads) end
  plan = plan_of(self, group, setting)
  self.plans[group], self.rest = plan, nil
  return plan
end

local function count(batch)
  local step, states = batch.step + 1, batch.states
  batch.step = step
  for i = 1, #states do states[i].step = step end
end

local function step_group(self, group, lr, clip)
  local rules, recording = self.rules, program.is_recording()
  if rules.before then rules.before(self, group) end
  local plan = prepare(self, group)
  for i = 1, #plan do
    local batch = plan[i]
    if recording then -- what a step does besides computing
      program.on_replay(function()
        count(batch)
        return rate_of(self, group), batch.step, clip.weight
      end)
    end
    count(batch)
    if rules.composed then ty.autocast(false, rules.step, batch.kind, group, batch, lr, clip, self)
    else rules.step(batch.kind, group, batch, lr, clip) end
    if recording and clip.norm and not clip.control and not rules.composed then
      program.clip(clip.norm, self.clip_norm)
    end
  end
  drop_grads(plan.grads)
end

local function step_together(self, clip)
  local parts = {}
  for _, group in ipairs(self.groups) do
    for _, batch in ipairs(prepare(self, group)) do
      count(batch)
      parts[#parts + 1] = { group = group, batch = batch, lr = rate_of(self, group) }
    end
  end
  ty.autocast(false, self.rules.together, self, parts, clip)
  for _, group in ipairs(self.groups) do drop_grads(self.plans[group].grads) end
end

-- The parameters that got their average in the pass.
local function averaged(self)
  local done = {}
  for _, group in ipairs(self.groups) do
    for _, batch in ipairs(self.plans[group]) do
      for i, p in ipairs(batch.params) do done[p] = batch.averages[i] ~= nil end
    end
  end
  return done
end

local function step(self, scaler)
  local rules = self.rules
  if rules.composed and scaler then
    fail("%s: does not work with a GradScaler; train in bf16 or f32", self.name)
  elseif rules.eager and program.is_compiling() then
    fail("%s: does not work inside ty.compile; compile the forward and the backward pass alone", self.name)
  end
  local clip = { scale = 1.0, limit = self.clip_value > 0 and self.clip_value or math.huge, weight = 0 }
  local ema = self.ema
  if scaler then
    clip.limit = scaler:limit(clip.limit)
    self.left_out = self.left_out or ty.keep(ty.zeros({}, { dtype = "f64", device = scaler.factor.device }))
    local grads = gradients(self)
    local norm = ty.norm_list(grads, 2, clip.limit)
    local largest = clip.limit < math.huge and ty.norm_list(grads, math.huge) or norm -- the limit hides infinities
    clip.control, clip.norm = scaler:control(norm, largest, self.clip_norm, self.left_out)
  elseif self.clip_norm > 0 then
    clip.norm = ty.norm_list(gradients(self), 2, clip.limit)
    clip.scale = math.min(1.0, self.clip_norm / (program.peek(clip.norm) + 1e-6))
  end
  clip.factor = clip.scale
  if rules.composed and clip.norm and program.is_recording() then
    clip.factor = (self.clip_norm / (clip.norm + 1e-6)):clamp { max = 1.0 }
  end
  if ema then
    program.on_replay(function() clip.weight = ema:advance() end)
    clip.weight = ema:advance()
  end
  if rules.together then
    step_together(self, clip)
  else
    for i = 1, #self.groups do step_group(self, self.groups[i], rate_of(self, self.groups[i]), clip) end
  end
  if ema then
    self.rest = self.rest or ema:others(averaged(self))
    if self.rest.weights[1] then program.on_replay(function() return clip.weight end) end
    ema:move(self.rest, clip.weight)
  end
  if program.is_recording() then program.on_replay(function()
    self.steps = self.steps + 1
    stepped(self)
  end) end
  self.steps = self.steps + 1
  if self.clip_norm == 0 then return nil end
  return clip.norm and not program.is_compiling() and clip.norm:item() or clip.norm
end

--- One step. With a loss: drops old gradients, runs backward, clips, steps and drops the gradients, which so live no
-- longer than they must. Without: clips and steps with the gradients that are there (they stay; call zero_grad).
-- Returns the norm of the gradients when clip_norm is set: a number, inside ty.compile a 0-d tensor.
---@param loss? Tensor
---@return number|Tensor|nil norm
function Optimizer:step(loss)
  if loss == nil then
    local norm = ty.no_grad(step, self)
    stepped(self)
    return norm
  end
  expect(self.name .. ":step", "loss", loss, "a tensor or nil")
  self:zero_grad()
  loss:backward()
  local norm = ty.no_grad(step, self)
  self:zero_grad()
  stepped(self)
  return norm
end

-- ---- a step in parts, for states that are not all in memory at once: tycho.offload ----

-- The groups with only those of their parameters that are in the list: they have the group's settings and plans of
-- their own. One list, the same table each time, is looked up once.
local function groups_within(self, list)
  self.parts = self.parts or setmetatable({}, { __mode = "k" })
  if self.parts[list] then return self.parts[list] end
  local wanted, found = {}, {}
  for _, p in ipairs(list) do wanted[p] = true end
  for _, group in ipairs(self.groups) do
    local params = {}
    for _, p in ipairs(group.params) do if wanted[p] then params[#params + 1] = p end end
    if params[1] then found[#found + 1] = setmetatable({ params = params }, { __index = group }) end
  end
  self.parts[list] = found
  return found
end

--- Begins a step in parts: all gradients are there when clip_norm is set, which scales by the norm of all. Each
-- parameter is then in one step_part(), and close_parts() ends the step. The numbers are those of step().
---@return table clip what step_part() and close_parts() take
function Optimizer:open_parts()
  if self.rules.before or self.ema then
    fail("%s: no step in parts %s", self.name, self.ema and "with ema" or "of an optimizer that chooses among all")
  end
  local clip = { scale = 1.0, limit = self.clip_value > 0 and self.clip_value or math.huge, weight = 0 }
  if self.clip_norm > 0 then
    ty.no_grad(function()
      clip.norm = ty.norm_list(gradients(self), 2, clip.limit):item()
      clip.scale = math.min(1.0, self.clip_norm / (clip.norm + 1e-6))
    end)
  end
  clip.factor = clip.scale
  return clip
end

--- The step of some parameters, those of the list that have gradients.
---@param clip table
---@param list Tensor[]
function Optimizer:step_part(clip, list)
  expect(self.name .. ":step_part", "clip", clip, "a table")
  expect(self.name .. ":step_part", "list", list, "a list of tensors")
  ty.no_grad(function()
    for _, group in ipairs(groups_within(self, list)) do step_group(self, group, rate_of(self, group), clip) end
  end)
end

--- The end of a step in parts. Returns the norm of the gradients when clip_norm is set.
---@param clip table
---@return number? norm
function Optimizer:close_parts(clip)
  expect(self.name .. ":close_parts", "clip", clip, "a table")
  self.steps = self.steps + 1
  stepped(self)
  return clip.norm
end

--- What GradScaler:step does with gradients of a scaled loss.
function Optimizer:step_scaled(scaler)
  local norm = ty.no_grad(step, self, scaler)
  stepped(self)
  return norm
end

--- The rate of the next step of the first group.
function Optimizer:rate() return rate_of(self, self.groups[1]) end

--- Trains another tensor in the place of a parameter: what is left of it once some of its rows or columns are trained
-- no more. change(t) gives its part of each state tensor, all of which must have the parameter's shape. Without
-- `tensor` the parameter is trained no more. The state of what is not trained any more is released.
---@param parameter Tensor
---@param tensor? Tensor
---@param change? fun(t: Tensor): Tensor  a state tensor of the parameter's shape to one of the tensor's
function Optimizer:exchange(parameter, tensor, change)
  local who = self.name .. ":exchange"
  expect(who, "parameter", parameter, "a tensor")
  expect(who, "tensor", tensor, "a tensor or nil")
  expect(who, "change", change, tensor and "a function" or "a function or nil")
  local position, state = self.position[parameter], self.state[parameter]
  if not position then fail("%s: parameter: expected one that the optimizer trains, got another", who) end
  if self.ema then fail("%s: expected an optimizer without ema, got one whose averages are of the whole", who) end
  if tensor and (self.position[tensor] or not tensor.is_leaf) then
    fail("%s: tensor: expected a leaf that the optimizer does not train yet, got another", who)
  end
  local new
  if tensor and state then
    new = {}
    for slot, value in pairs(state) do
      if ty.is_tensor(value) then
        if table.concat(value.shape, ",") ~= table.concat(parameter.shape, ",") then
          fail("%s: %s: expected a state of the parameter's shape, got [%s]", who, slot,
            table.concat(value.shape, ", "))
        end
        value = ty.keep(change(value):clone())
      end
      new[slot] = value
    end
  end
  for _, group in ipairs(self.groups) do
    for i, p in ipairs(group.params) do
      if rawequal(p, parameter) then
        local list = table.move(group.params, 1, #group.params, 1, {}) -- the list may be the caller's
        if tensor then list[i] = tensor else table.remove(list, i) end
        group.params = list
        if self.plans[group] then drop_grads(self.plans[group].grads) end
        self.plans[group] = nil
        break
      end
    end
  end
  self.position[parameter], self.state[parameter] = nil, nil
  if tensor then self.position[tensor], self.state[tensor] = position, new end
end

local width = { f64 = 8, f32 = 4, f16 = 2, bf16 = 2, i64 = 8, i32 = 4, u8 = 1 }

--- The bytes of the tensors that live between steps: moments, their scales, projections, chosen positions. Averages of
-- weights (`ema`) are not counted. What a parameter needs is there after the first step with its gradient.
---@return integer bytes
function Optimizer:state_bytes()
  local bytes = self.left_out and 8 or 0
  for _, state in pairs(self.state) do
    for _, value in pairs(state) do
      if ty.is_tensor(value) then bytes = bytes + value:numel() * width[value.dtype] end
    end
  end
  return bytes
end

--- Everything needed to go on bit for bit: settings that are numbers or booleans, and the moments by position.
function Optimizer:state_dict()
  local result = { steps = self.steps, groups = {}, state = {} }
  local left_out = self.left_out and math.tointeger(self.left_out:item()) or 0 -- by a GradScaler; the others count
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
        local copy = { step = math.max(0, state.step - left_out) }
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
  local who = self.name .. ":load_state_dict"
  expect(who, "state", state, "a table")
  expect(who, "state.groups", state.groups, "a list of tables")
  expect(who, "state.state", state.state, "a table")
  expect(who, "state.steps", state.steps, "an integer >= 0")
  if #state.groups ~= #self.groups then
    fail("%s: the state has %d groups, the optimizer %d", self.name, #state.groups, #self.groups)
  end
  local settings = {} -- those that were saved, and the group's where there are none
  for i, group in ipairs(self.groups) do
    if state.groups[i].count ~= #group.params then
      fail("%s: group %d of the state has %s parameters, the optimizer %d", self.name, i,
        tostring(state.groups[i].count), #group.params)
    end
    settings[i] = setmetatable({}, { __index = group })
    for key, value in pairs(state.groups[i]) do settings[i][key] = value end
  end
  local position, loaded, place = 0, {}, self.rules.place
  for i, group in ipairs(self.groups) do
    for _, p in ipairs(group.params) do
      local saved = state.state[tostring(position)]
      if saved then
        local new = { step = saved.step }
        for slot, make in pairs(self.rules.slots[self.rules.kind(settings[i], p, saved)]) do
          local value, wanted = saved[slot], make(p, settings[i])
          if value then
            if table.concat(value.shape, ",") ~= table.concat(wanted.shape, ",") then
              fail("%s: %s of parameter %d has shape [%s], expected [%s]", self.name, slot, position,
                table.concat(value.shape, ", "), table.concat(wanted.shape, ", "))
            end
            local dtype = wanted.dtype
            wanted:free() -- now: of a large model, those of all would be there at once
            value = value:to { device = p.device, dtype = dtype }:clone()
            new[slot] = ty.keep(place and place(group, p, value) or value)
          end
        end
        loaded[p] = new
      end
      position = position + 1
    end
  end
  self.state, self.plans, self.steps, self.left_out = loaded, {}, state.steps, nil
  program.renew()
  for i, group in ipairs(self.groups) do
    for key, value in pairs(state.groups[i]) do
      if key ~= "count" and key ~= "paged" then group[key] = value end -- where the moments lie is the program's choice
    end
  end
end

return Optimizer
