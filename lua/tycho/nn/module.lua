--- The class of all modules: what `nn.module()` makes.
--
-- A module is a table. Fields keep the order in which they were first assigned, and that is the order of
-- parameters(), state_dict() and printing. What a field is follows from what is assigned to it:
--
--   * a tensor that requires a gradient is a parameter (and stays one when it is frozen later);
--   * a module is a submodule; lists of modules need nn.ModuleList, nn.ModuleDict or nn.Sequential;
--   * self:buffer(name, tensor) makes a tensor part of the saved state without being trained;
--   * everything else is a plain field.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local placed = require("tycho.nn.options").placed

local expect = arguments.expect

--- What all modules can do. `local Block = nn.module()` makes a class of them.
---@class Module
---@field training boolean
local Module = {}
Module.__index = Module
Module.__name = "Module"
Module._is_module = true
Module._hooks = false -- a module's own, when it gets some

local is_tensor = ty.is_tensor

--- Whether a value is a module: an instance, not a class.
local function is_module(value)
  local class = type(value) == "table" and getmetatable(value)
  return class and rawget(class, "__index") == class and class._is_module == true or false
end

local function check_plain_list(self, key, value)
  if getmetatable(value) ~= nil then return end
  local _, first = next(value)
  if is_module(first) or (is_tensor(first) and first.requires_grad) then
    arguments.fail("%s: field '%s' is a plain table of %s, which parameters() would not see: use nn.ModuleList, "
      .. "nn.ModuleDict or nn.ParameterList", getmetatable(self).__name, tostring(key),
      is_module(first) and "modules" or "parameters")
  end
end

--- Registers a field at its first assignment; later ones go straight to the table.
function Module.__newindex(self, key, value)
  if value == nil then return end
  local known = rawget(self, "_known")
  if not known then
    arguments.fail("%s: assign fields in init(), on a module made by calling its class", getmetatable(self).__name)
  end
  if type(value) == "table" and not is_module(value) then
    check_plain_list(self, key, value)
  elseif is_tensor(value) and value.requires_grad then
    self._parameters[key] = true
    ty.keep(value)
  end
  if not known[key] then
    known[key] = true
    self._order[#self._order + 1] = key
  end
  rawset(self, key, value)
end

--- Calls forward(), with the hooks around it.
function Module.__call(self, ...)
  local hooks = self._hooks
  if not hooks then return self:forward(...) end
  local input = table.pack(...)
  for _, hook in ipairs(hooks.before) do
    local changed = table.pack(hook(self, table.unpack(input, 1, input.n)))
    if changed.n > 0 then input = changed end
  end
  local backward = hooks.watches and require("tycho.nn.backward_hooks").begin(self, hooks, input)
  local output = table.pack(self:forward(table.unpack(input, 1, input.n)))
  for _, hook in ipairs(hooks.after) do
    local changed = table.pack(hook(self, output, table.unpack(input, 1, input.n)))
    if changed.n > 0 then output = changed end
  end
  if backward then backward(output) end
  return table.unpack(output, 1, output.n)
end

--- Every class says what it computes.
function Module:forward()
  arguments.fail("%s has no forward()", getmetatable(self).__name)
end

local function construct(class, ...)
  local self = setmetatable({}, class)
  for key, value in pairs { _order = {}, _known = {}, _parameters = {}, _buffers = {}, _hooks = false,
    training = true } do rawset(self, key, value) end
  self:init(...)
  return self
end

--- Nothing to prepare by default.
function Module:init() end

--- A new class of modules. Give it init(self, ...) and forward(self, ...); call it to make a module.
---@param name? string|table  shown when printed; or the parent class
---@param parent? table       class to inherit from
---@return table class
local function define(name, parent)
  if type(name) == "table" then name, parent = nil, name end
  expect("nn.module", "name", name, "a string or nil")
  parent = parent or Module
  if type(parent) ~= "table" or not parent._is_module or rawget(parent, "__index") ~= parent then
    arguments.fail("nn.module: parent: expected a class of modules, got %s", arguments.describe(parent))
  end
  local class = {}
  for key, value in pairs(parent) do
    if type(key) == "string" and key:sub(1, 2) == "__" then class[key] = value end
  end
  class.__index = class
  class.__name = name or (parent ~= Module and parent.__name) or "Module"
  class.super = parent
  return setmetatable(class, { __index = parent, __call = construct })
end

--- The name a field has in state_dict(): positions of lists count from 0, as in the public checkpoints.
local function field_name(key)
  if math.type(key) == "integer" then return tostring(key - 1) end
  return tostring(key)
end

--- Calls visit(module, prefix) for a module and everything below it, parents first. A shared module is visited under
-- each name.
local function walk(self, prefix, visit)
  visit(self, prefix)
  for _, key in ipairs(self._order) do
    local value = rawget(self, key)
    if is_module(value) then walk(value, prefix .. field_name(key) .. ".", visit) end
  end
end

-- visit(kind, name, tensor, owner, key) for parameters and buffers, in order.
local function walk_state(self, visit)
  walk(self, "", function(module, prefix)
    for _, key in ipairs(module._order) do
      local value = rawget(module, key)
      if is_tensor(value) then
        if module._buffers[key] ~= nil then
          visit("buffer", prefix .. field_name(key), value, module, key)
        elseif module._parameters[key] or value.requires_grad then
          visit("parameter", prefix .. field_name(key), value, module, key)
        end
      end
    end
  end)
end

-- The first of parameters(), without a look at the others: asked for with every token by who decodes.
local function first_parameter(self)
  for _, key in ipairs(self._order) do
    local value = rawget(self, key)
    if is_tensor(value) and self._buffers[key] == nil and (self._parameters[key] or value.requires_grad) then
      return value
    end
  end
  for _, key in ipairs(self._order) do
    local value = rawget(self, key)
    local found = is_module(value) and first_parameter(value)
    if found then return found end
  end
end

--- Makes `tensor` part of the module's state without training it: moved by to(), saved with the parameters.
---@param name string
---@param tensor Tensor
---@param options? {persistent: boolean}  persistent = false leaves it out of state_dict()
function Module:buffer(name, tensor, options)
  expect("Module:buffer", "name", name, "a string")
  expect("Module:buffer", name, tensor, "a tensor")
  options = arguments.read("Module:buffer", options, { persistent = true })
  self._buffers[name] = options.persistent
  tensor = ty.keep(placed(tensor))
  self[name] = tensor
  return tensor
end

--- Registers a parameter that may start out frozen (an assigned tensor that requires a gradient is registered by
-- itself).
function Module:parameter(name, tensor)
  expect("Module:parameter", "name", name, "a string")
  expect("Module:parameter", name, tensor, "a tensor")
  self._parameters[name] = true
  tensor = ty.keep(placed(tensor))
  self[name] = tensor
  return tensor
end

--- Module:buffer, by PyTorch's name.
---@param name string
---@param tensor Tensor
---@param options? {persistent: boolean}
function Module:register_buffer(name, tensor, options) return self:buffer(name, tensor, options) end

--- Module:parameter, by PyTorch's name.
---@param name string
---@param tensor Tensor
function Module:register_parameter(name, tensor) return self:parameter(name, tensor) end

--- All parameters as a list, in the order of assignment, each once even when shared.
---@return Tensor[]
function Module:parameters()
  local list, seen = {}, {}
  walk_state(self, function(kind, _, tensor)
    if kind == "parameter" and not seen[tensor] then
      seen[tensor] = true
      list[#list + 1] = tensor
    end
  end)
  return list
end

local function pairs_of(names, values)
  local i = 0
  return function()
    i = i + 1
    return names[i], values[i]
  end
end

local function named(self, wanted)
  local names, tensors, seen = {}, {}, {}
  walk_state(self, function(kind, name, tensor)
    if kind == wanted and not seen[tensor] then
      seen[tensor] = true
      names[#names + 1], tensors[#tensors + 1] = name, tensor
    end
  end)
  return pairs_of(names, tensors)
end

--- Iterates name, tensor over the parameters: `for name, p in model:named_parameters() do`.
function Module:named_parameters() return named(self, "parameter") end

--- Iterates name, tensor over the buffers.
function Module:named_buffers() return named(self, "buffer") end

--- Iterates name, module over this module (named "") and all below it; over those whose names a Lua pattern finds:
-- `for name, block in model:named_modules "^blocks%.%d+$" do`.
---@param pattern? string
function Module:named_modules(pattern)
  expect("Module:named_modules", "pattern", pattern, "a string or nil")
  local ok, problem = pcall(string.find, "", pattern or "")
  if not ok then arguments.fail("Module:named_modules: pattern: %s", problem) end
  local names, modules = {}, {}
  walk(self, "", function(module, prefix)
    local name = prefix:gsub("%.$", "")
    if not pattern or name:find(pattern) then names[#names + 1], modules[#modules + 1] = name, module end
  end)
  return pairs_of(names, modules)
end

--- Iterates name, module over the direct submodules.
function Module:named_children()
  local names, modules = {}, {}
  for _, key in ipairs(self._order) do
    local value = rawget(self, key)
    if is_module(value) then names[#names + 1], modules[#modules + 1] = field_name(key), value end
  end
  return pairs_of(names, modules)
end

-- The key of a child by its name in state_dict().
local function child_key(module, name)
  if rawget(module, name) ~= nil then return name end
  local number = math.tointeger(tonumber(name))
  return number and rawget(module, number + 1) ~= nil and number + 1 or nil
end

--- The module or tensor with a dotted name as in state_dict(), or nil: model:get "blocks.0.attn".
function Module:get(path)
  expect("Module:get", "path", path, "a string")
  local at = self
  for name in path:gmatch "[^.]+" do
    if not is_module(at) then return nil end
    local key = child_key(at, name)
    if key == nil then return nil end
    at = rawget(at, key)
  end
  return at
end

--- Replaces the module or tensor with a dotted name: model:set("head", nn.Linear(64, 3)).
function Module:set(path, value)
  expect("Module:set", "path", path, "a string")
  expect("Module:set", "value", value, "a module or a tensor")
  local parent_path, name = path:match "^(.*)%.([^.]+)$"
  local parent = parent_path and self:get(parent_path) or (not parent_path and self) or nil
  local key = is_module(parent) and child_key(parent, name or path)
  if not key then arguments.fail("Module:set: path: the module has no '%s'", path) end
  if is_tensor(value) and value.requires_grad then parent._parameters[key] = true end
  parent[key] = value
  ty.core.program.renew()
end

--- Number of elements of all parameters (shared ones once); trained: of those alone that want gradients.
---@param trained? boolean  (false)
---@return integer
function Module:count_parameters(trained)
  expect("Module:count_parameters", "trained", trained, "a boolean or nil")
  local count = 0
  for _, p in ipairs(self:parameters()) do
    if not trained or p.requires_grad then count = count + p:numel() end
  end
  return count
end

--- Calls fn(module) on every module below and at last on this one; returns self.
function Module:apply(fn)
  expect("Module:apply", "fn", fn, "a function")
  for _, child in self:named_children() do child:apply(fn) end
  fn(self)
  return self
end

--- Training mode on or off, for dropout and batch statistics; returns self.
function Module:train(on)
  local changed = false
  walk(self, "", function(module)
    changed = changed or module.training ~= (on ~= false)
    rawset(module, "training", on ~= false)
  end)
  if changed then ty.core.program.renew() end -- what ty.compile recorded was the other mode
  return self
end

--- Training mode off; returns self.
function Module:eval() return self:train(false) end

--- Lets all parameters want gradients, or none; returns self.
function Module:requires_grad_(on)
  for _, p in ipairs(self:parameters()) do p:requires_grad_(on ~= false) end
  ty.core.program.renew()
  return self
end

--- Drops all gradients; returns self.
function Module:zero_grad()
  for _, p in ipairs(self:parameters()) do p:set_grad() end
  return self
end

--- Where its parameters are: the device of the first one ("cpu" for a module without any).
---@return Device
function Module:device()
  local first = first_parameter(self)
  return first and first.device or "cpu"
end

-- After so many bytes that were moved or converted, those that nobody holds go back to the system: else a large model
-- would be in memory twice, and what comes of it in blocks of twice its size.
local AT_ONCE = 256 << 20

local function give_back()
  collectgarbage()
  ty.memory.empty_cache()
end

--- Moves or converts parameters and buffers: to "cuda", to "bf16", to { device = , dtype = }. Integer buffers keep
-- their dtype. The module gets new tensors: make the optimizer afterwards. Returns self.
function Module:to(target)
  local device, dtype
  expect("Module:to", "target", target, "a string or a table")
  if type(target) == "table" then
    local o = arguments.read("Module:to", target, { device = arguments.none, dtype = arguments.none },
      { device = "a string", dtype = "a string" })
    device, dtype = o.device, o.dtype
  elseif ty.is_dtype(target) then
    dtype = target
  else
    device = target
  end
  local moved, bytes, large = setmetatable({}, { __mode = "k" }), 0, false
  walk_state(self, function(_, _, tensor, owner, key)
    local new = moved[tensor]
    if not new then
      new = tensor:detach()
      if dtype and new:is_floating_point() then new = new:to(dtype) end
      if device then new = new:to { device = device } end
      if new.dtype ~= tensor.dtype or new.device ~= tensor.device then bytes = bytes + tensor:nbytes() end
      new = tensor.requires_grad and new:requires_grad_() or new
      moved[tensor] = ty.keep(new)
    end
    rawset(owner, key, new)
    if bytes > AT_ONCE then
      give_back()
      bytes, large = 0, true
    end
  end)
  if large then give_back() end
  ty.core.program.renew()
  return self
end

-- Modules with hooks.
local hooked = setmetatable({}, { __mode = "k" })

local function copy_value(value, copies)
  if is_tensor(value) then
    if not copies[value] then
      local copy = value:detach():clone()
      copies[value] = ty.keep(value.requires_grad and copy:requires_grad_() or copy)
    end
    return copies[value]
  elseif type(value) == "table" then
    if copies[value] then return copies[value] end
    local copy = {}
    copies[value] = copy
    for k, v in next, value do copy[k] = copy_value(v, copies) end
    if hooked[value] then hooked[copy] = true end
    return setmetatable(copy, getmetatable(value))
  end
  return value
end

--- A deep copy with its own parameters; what was shared inside stays shared.
function Module:clone() return copy_value(self, {}) end

local kinds_of_hooks = { before = "register_forward_pre_hook", after = "register_forward_hook",
  before_backward = "register_full_backward_pre_hook", after_backward = "register_full_backward_hook" }

-- Takes a hook off.
local function remove_hook(self, where, fn)
  local hooks = rawget(self, "_hooks")
  if not hooks then return end
  for i, other in ipairs(hooks[where]) do
    if other == fn then table.remove(hooks[where], i) break end
  end
  hooks.watches = #hooks.before_backward + #hooks.after_backward > 0
  if not hooks.watches and #hooks.before + #hooks.after == 0 then
    rawset(self, "_hooks", false)
    hooked[self] = nil
  end
end

-- What takes a hook off: handle:remove(), or the handle called.
local handle = { __call = function(self) self.remove() end }

local function add_hook(self, where, fn)
  expect(kinds_of_hooks[where], "fn", fn, "a function")
  local hooks = rawget(self, "_hooks")
  if not hooks then
    hooks = { watches = false }
    for kind in pairs(kinds_of_hooks) do hooks[kind] = {} end
    rawset(self, "_hooks", hooks)
    hooked[self] = true
  end
  table.insert(hooks[where], fn)
  hooks.watches = #hooks.before_backward + #hooks.after_backward > 0
  return setmetatable({ remove = function() remove_hook(self, where, fn) end }, handle)
end

--- Adds fn(module, ...inputs) before forward(); what it returns replaces the inputs. Returns a handle: handle:remove(),
-- or the handle called, takes the hook off.
function Module:register_forward_pre_hook(fn) return add_hook(self, "before", fn) end

--- Adds fn(module, outputs, ...inputs) after forward(); what it returns replaces the outputs. Returns a handle, as
-- register_forward_pre_hook.
function Module:register_forward_hook(fn) return add_hook(self, "after", fn) end

--- Adds fn(module, grad_inputs, grad_outputs), called in a backward pass when the gradients of the inputs of a call are
-- there: lists by the positions of inputs and outputs, nil for what wants no gradient (of a first layer none is there).
-- A tensor or list that it returns replaces the gradients of the inputs. Returns a handle.
function Module:register_full_backward_hook(fn) return add_hook(self, "after_backward", fn) end

--- Adds fn(module, grad_outputs), called in a backward pass before it goes through the module; what it returns replaces
-- the gradients of the outputs. Returns a handle.
function Module:register_full_backward_pre_hook(fn) return add_hook(self, "before_backward", fn) end

--- Shapes, parameters and work by module, seen in one forward pass on zeros of a shape: print(model:summary { 8, 3, 64,
--- 64 }). See ty.profile.summary for other inputs and options.
function Module:summary(inputs, options) return ty.profile.summary(self, inputs, options) end

--- What stands between the parentheses when printed.
function Module:describe() return "" end

local function group_thousands(n)
  local text = tostring(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

local function draw(self, indent, rows, label)
  local count, text = self:count_parameters(), self:describe()
  if text ~= "" then text = "(" .. text .. ")" end
  rows[#rows + 1] = { indent .. label .. getmetatable(self).__name .. text, count }
  for name, child in self:named_children() do draw(child, indent .. "  ", rows, name .. ": ") end
end

--- The tree of modules with the number of parameters of each.
function Module.__tostring(self)
  local rows, width, lines = {}, 0, {}
  draw(self, "", rows, "")
  for _, row in ipairs(rows) do width = math.max(width, row[2] > 0 and #row[1] or 0) end
  for i, row in ipairs(rows) do
    local count = row[2] > 0 and group_thousands(row[2]) or ""
    lines[i] = ((row[1] .. (" "):rep(width - #row[1] + 2)) .. count):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

--- Whether any module has hooks: they may keep what passes between modules, which is then not to be released early.
---@return boolean
local function has_hooks() return next(hooked) ~= nil end

return { Module = Module, define = define, is_module = is_module, walk_state = walk_state, remove_hook = remove_hook,
  has_hooks = has_hooks }
