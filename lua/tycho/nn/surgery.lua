--- Changing the layers of a model that is there: nn.surgery. A technique (an adapter, a mask, quantization) finds
-- layers by name and kind, reads and writes their weights as rows, and gives them another behaviour that can be taken
-- off again. No file of a model knows of it.
--
--     local doubled = nn.surgery.wrapper { name = "Doubled", field = "_doubled",
--       forward = function(base) return function(self, x) return base.forward(self, x) * self._doubled.factor end end }
--     for _, layer in ipairs(nn.surgery.find("double", model, { kinds = { "linear" }, targets = "mlp" })) do
--       doubled:wrap(layer.module, { factor = 2 })
--     end
--     for _, layer in ipairs(doubled:wrapped("double", model)) do doubled:unwrap(layer.module) end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"
local layers = require "tycho.nn.layers"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

-- ---- what a layer is ----

local kinds = { [layers.Linear] = "linear", [layers.Embedding] = "embedding", [layers.Conv1d] = "conv",
  [layers.Conv2d] = "conv", [layers.ConvTranspose2d] = "conv_transpose" }

local function kind_of(class)
  while class do
    if kinds[class] then return kinds[class] end
    if rawget(class, "fan_in_fan_out") then return "linear" end -- GPT-2's Conv1D, which is no convolution
    class = rawget(class, "super")
  end
  return nil
end

--- What a module is: "linear" (nn.Linear, and classes with a field `fan_in_fan_out`, whose weight is [inputs,
-- outputs]), "conv", "conv_transpose" or "embedding", wrapped or not; nil for all others.
---@param module Module
---@return "linear"|"conv"|"conv_transpose"|"embedding"|nil
function M.kind(module) return kind_of(getmetatable(expect("surgery.kind", "module", module, "a module"))) end

local function kind_for(who, module)
  return base.is_module(module) and kind_of(getmetatable(module))
    or fail("%s: module: expected a layer (linear, conv, conv_transpose or embedding), got %s", who, describe(module))
end

-- A tensor with as many elements as the layer's weight has.
local function fitting(who, what, module, tensor)
  expect(who, what, tensor, "a tensor")
  if tensor:numel() ~= module.weight:numel() then
    fail("%s: %s: expected %d elements, got %s", who, what, module.weight:numel(), describe(tensor))
  end
  return tensor
end

-- Whether the weight is [inputs, outputs]. Block-quantized weights never are: their blocks lie along the inputs.
local function turned(module, weight)
  return module.fan_in_fan_out and (weight:is_floating_point() or ty.is_dtype(weight.dtype))
end

--- The tensor of a layer's weight (or one laid out like it, such as a mask), as rows: [outputs, inputs] of a linear
-- layer, [outputs, inputs / groups * kernel] of a convolution, [count, width] of an embedding.
---@param module Module
---@param weight? Tensor  the layer's own, detached, by default
---@return Tensor rows
function M.rows(module, weight)
  local kind = kind_for("surgery.rows", module)
  weight = weight and fitting("surgery.rows", "weight", module, weight) or module.weight:detach()
  if kind == "conv" then return weight:flatten(1) end
  if kind == "conv_transpose" then
    local shape = weight.shape
    return weight:reshape(module.groups, shape[1] // module.groups, shape[2], -1):transpose(1, 2)
      :reshape(module.groups * shape[2], -1)
  end
  return turned(module, weight) and weight:transpose(0, 1) or weight
end

--- Such rows as the layer keeps its weight: the inverse of rows().
---@param module Module
---@param rows Tensor
---@return Tensor weight
function M.laid_out(module, rows)
  local kind = kind_for("surgery.laid_out", module)
  fitting("surgery.laid_out", "rows", module, rows)
  if kind == "conv" then return rows:reshape(module.weight.shape) end
  if kind == "conv_transpose" then
    local shape = module.weight.shape
    return rows:reshape(module.groups, shape[2], shape[1] // module.groups, -1):transpose(1, 2):reshape(shape)
  end
  return turned(module, rows) and rows:transpose(0, 1):contiguous() or rows
end

--- The columns and the number of rows(): inputs and outputs of a linear layer. Of an embedding, the number of its rows
-- and their width.
---@param module Module
---@return integer inputs
---@return integer outputs
function M.sizes(module)
  local kind = kind_for("surgery.sizes", module)
  local shape = module.weight.shape
  if kind == "conv" or kind == "conv_transpose" then
    local outputs = kind == "conv" and shape[1] or shape[2] * module.groups
    return module.weight:numel() // outputs, outputs
  end
  if kind == "embedding" or turned(module, module.weight) then return shape[1], shape[2] end
  return shape[2], shape[1]
end

local activations = '"none" or "relu" or "gelu" or "gelu_tanh" or "silu" or "sigmoid" or "tanh"'

--- What nn.Linear does after its product: adds the residual, then applies the activation by its name.
---@param y Tensor
---@param residual? Tensor
---@param activation? string
---@return Tensor
function M.finish(y, residual, activation)
  expect("surgery.finish", "y", y, "a tensor")
  if residual then y = y + expect("surgery.finish", "residual", residual, "a tensor") end
  if not activation or activation == "none" then return y end
  if activation == "gelu_tanh" then return ty.gelu(y, "tanh") end
  return ty[expect("surgery.finish", "activation", activation, activations)](y)
end

-- ---- which layers ----

--- Whether `name` is `wanted` or ends in it after a dot: "q_proj", "layers.0.self_attn.q_proj"; "^name" is a whole one.
---@param name string
---@param wanted string
---@return boolean
function M.ends_in(name, wanted)
  if type(name) ~= "string" then expect("surgery.ends_in", "name", name, "a string") end
  if type(wanted) ~= "string" then expect("surgery.ends_in", "wanted", wanted, "a string") end
  if wanted:sub(1, 1) == "^" then return name == wanted:sub(2) end
  return name == wanted or name:sub(-#wanted - 1) == "." .. wanted
end

--- The modules of a model, each once, under its first name: the names in order, and the modules by name.
---@param model Module
---@return string[] names
---@return table<string, Module> modules
function M.modules(model)
  expect("surgery.modules", "model", model, "a module")
  local names, found, seen = {}, {}, {}
  for name, module in model:named_modules() do
    if not seen[module] then
      seen[module] = true
      names[#names + 1], found[name] = name, module
    end
  end
  return names, found
end

-- What a model has, for a user who asked for something else: the last parts of names; where there are only numbers,
-- the names with their classes.
local function inventory(names, modules)
  local list, known = {}, {}
  for _, name in ipairs(names) do
    local last = name:match "[^.]+$"
    if last and not last:find "^%d+$" and not known[last] then list[#list + 1], known[last] = last, true end
  end
  if #list == 0 then
    for _, name in ipairs(names) do
      if name ~= "" then
        list[#list + 1] = modules and ("%s (%s)"):format(name, getmetatable(modules[name]).__name) or name
      end
    end
  end
  local whole = modules and modules[""]
  if #list == 0 then return whole and "it is a single " .. getmetatable(whole).__name or "there are none" end
  return "there are " .. table.concat(list, ", ", 1, math.min(#list, 40))
end

--- The names that a list of names and ends of names stands for, as a set; nil and what is wrong with the list where
-- there is something. Every entry must stand for a name.
---@param list string[]
---@param names string[]  of modules(), or others
---@param modules? table<string, Module>
---@return table<string, true>?
---@return string? problem
function M.resolve(list, names, modules)
  expect("surgery.resolve", "names", names, "a list of strings")
  expect("surgery.resolve", "modules", modules, "a table or nil")
  for i = 1, modules and #names or 0 do
    expect("surgery.resolve", ("modules, for '%s'"):format(names[i]), modules[names[i]], "a module")
  end
  if type(list) ~= "table" then return nil, "expected a list of names, got " .. describe(list) end
  if #list == 0 then return nil, "expected a list of names, got an empty one" end
  local set = {}
  for _, wanted in ipairs(list) do
    if type(wanted) ~= "string" or wanted == "" then
      return nil, "expected a list of names, which holds " .. describe(wanted)
    end
    local count = 0
    for _, name in ipairs(names) do
      if name ~= "" and M.ends_in(name, wanted) then set[name], count = true, count + 1 end
    end
    if count == 0 then return nil, ("no module is named '%s'; %s"):format(wanted, inventory(names, modules)) end
  end
  return set
end

-- The modules that wrappers added to layers: they belong to the technique, not to the model.
local function added_modules(model)
  local added = {}
  for _, module in model:named_modules() do
    local class = getmetatable(module)
    while class do
      local wrapper = rawget(class, "_wrapper")
      for _, field in ipairs(wrapper and wrapper.fields or {}) do
        local value = rawget(module, field)
        if base.is_module(value) then
          for _, inner in value:named_modules() do added[inner] = true end
        end
      end
      class = rawget(class, "super")
    end
  end
  return added
end

-- The function of name and module that a user's choice of layers stands for: nil accepts all, a string is a Lua pattern
-- that is looked for in the name, a list has names and ends of names, a function decides itself.
local function acceptor(who, model, targets)
  local kind = type(targets)
  if targets == nil then return function() return true end end
  if kind == "function" then return targets end
  if kind == "string" then return function(name) return name:find(targets) ~= nil end end
  if kind == "table" then
    local set, problem = M.resolve(targets, M.modules(model))
    if not set then fail("%s: targets: %s", who, problem) end
    return function(name) return set[name] end
  end
  fail("%s: targets: expected a pattern, a list of names or a function, got %s", who, describe(targets))
end

--- The layers of a model: a list of { name, module, kind }, in order, each module once. What wrappers added is not
-- listed. options:
--   kinds    {"linear"}: see kind()
--   targets  a Lua pattern of names, a list of names and ends of names (each must stand for something), or a function
--            of name and module; all by default
--   skip     a list of names and ends of names to leave out
--   head     false leaves out the model's lm_head
---@param who string  in front of errors
---@param model Module
---@param options? {kinds?: string[], targets?: string|string[]|function, skip?: string[], head?: boolean}
---@return {name: string, module: Module, kind: string}[]
function M.find(who, model, options)
  if type(who) ~= "string" or who == "" then
    fail("surgery.find: who: expected the name of a function, got %s", describe(who))
  end
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { kinds = { "linear" }, targets = arguments.none, skip = {}, head = true },
    { kinds = "a list of strings", skip = "a list of strings" })
  local wanted = {}
  for _, kind in ipairs(o.kinds) do wanted[kind] = true end
  local accepts, added, head = acceptor(who, model, o.targets), added_modules(model), nil
  if not o.head then head = rawget(model, "lm_head") end
  local names, modules = M.modules(model)
  local list = {}
  for _, name in ipairs(names) do
    local module = modules[name]
    local kind = M.kind(module)
    local fits = wanted[kind] and not added[module] and module ~= head
    for _, ending in ipairs(o.skip) do fits = fits and not M.ends_in(name, ending) end
    if fits and accepts(name, module) then list[#list + 1] = { name = name, module = module, kind = kind } end
  end
  return list
end

-- ---- fields ----

--- Puts another tensor in the place of a parameter or buffer, whose name, order and registration stay. Returns the one
-- that was there.
---@param module Module
---@param name string
---@param tensor Tensor
---@return Tensor before
function M.exchange(module, name, tensor)
  local who = "surgery.exchange"
  expect(who, "module", module, "a module")
  expect(who, "tensor", tensor, "a tensor")
  local before = rawget(module, expect(who, "name", name, "a string"))
  if not ty.is_tensor(before) then
    fail("%s: name: expected one of a tensor of the module, got %s", who, describe(name))
  end
  rawset(module, name, ty.keep(tensor))
  return before
end

--- Takes a field out of a module, with its registration as parameter, buffer or submodule.
---@param module Module
---@param name string
function M.remove(module, name)
  expect("surgery.remove", "module", module, "a module")
  expect("surgery.remove", "name", name, "a string")
  if rawget(module, name) == nil then return end
  rawset(module, name, nil)
  module._known[name], module._parameters[name], module._buffers[name] = nil, nil, nil
  for i, key in ipairs(module._order) do
    if key == name then
      table.remove(module._order, i)
      break
    end
  end
  ty.core.program.renew()
end

-- ---- wrappers ----

--- A change of layers that can be put on and taken off again, of nn.surgery.wrapper.
---@class LayerWrapper
---@field fields string[]
local Wrapper = {}
Wrapper.__index = Wrapper

--- A behaviour that layers can be given and that can be taken off again. A wrapped layer stays the object that it was,
-- with its weights under their names; its class becomes one that inherits from the class it had. Several wrappers may
-- be on one layer, and each can be taken off whatever came after it. spec:
--   name      in front of the name of the class: "Lora" makes LoraLinear
--   field     of the layer, which holds the wrapper's state: "_lora"
--   fields    names of parameters and modules that the wrapper's user adds to the layer; unwrap() takes them away, and
--             find() does not list them
--   forward   forward(base, kind) returns the new forward(self, ...), where base is the class below
--   describe  describe(state) returns what is added to the layer's description; nil: nothing
---@param spec {name: string, field: string, fields?: string[], forward: function, describe?: function}
---@return LayerWrapper
function M.wrapper(spec)
  local who = "surgery.wrapper"
  expect(who, "spec", spec, "a table")
  for _, key in ipairs { "name", "field" } do expect(who, key, spec[key], "a string") end
  expect(who, "forward", spec.forward, "a function")
  expect(who, "fields", spec.fields, "a list of strings or nil")
  expect(who, "describe", spec.describe, "a function or nil")
  return setmetatable({ name = spec.name, field = spec.field, fields = spec.fields or {}, forward = spec.forward,
    describe = spec.describe, classes = setmetatable({}, { __mode = "k" }) }, Wrapper)
end

-- The class `below` with a wrapper on it.
local function class_on(wrapper, below)
  local class = wrapper.classes[below]
  if class then return class end
  class = base.define(wrapper.name .. below.__name, below)
  class._wrapper = wrapper
  class.forward = wrapper.forward(below, kind_of(below))
  if wrapper.describe then
    function class:describe()
      local text, more = below.describe(self), wrapper.describe(rawget(self, wrapper.field))
      return text ~= "" and text .. ", " .. more or more
    end
  end
  wrapper.classes[below] = class
  return class
end

--- Wraps a layer; `state` is what forward() finds under the wrapper's field.
---@param module Module
---@param state table
---@return Module module
function Wrapper:wrap(module, state)
  expect(self.name, "module", module, "a module")
  expect(self.name, "state", state, "a table")
  if rawget(module, self.field) ~= nil then
    fail("%s: the layer (%s) is wrapped already", self.name, getmetatable(module).__name)
  end
  rawset(module, self.field, state)
  setmetatable(module, class_on(self, getmetatable(module)))
  ty.core.program.renew()
  return module
end

--- The state of a layer's wrapper; nil for one without.
---@param module Module
---@return table?
function Wrapper:state(module) return rawget(expect(self.name, "module", module, "a module"), self.field) end

--- Makes the layer what it was; other wrappers stay on it.
---@param module Module
---@return Module module
function Wrapper:unwrap(module)
  if self:state(module) == nil then
    fail("%s: the layer (%s) is not wrapped", self.name, getmetatable(module).__name)
  end
  local above, class = {}, getmetatable(module)
  while rawget(class, "_wrapper") ~= self do
    above[#above + 1] = rawget(class, "_wrapper")
    class = rawget(class, "super")
  end
  class = rawget(class, "super")
  for i = #above, 1, -1 do class = class_on(above[i], class) end
  for _, name in ipairs(self.fields) do M.remove(module, name) end
  rawset(module, self.field, nil)
  setmetatable(module, class)
  ty.core.program.renew()
  return module
end

--- Makes the layer what it was, with a weight in the place of what the wrapper held: [outputs, inputs] of a linear
-- layer, which is turned where the layer keeps it the other way.
---@param module Module
---@param weight Tensor
---@return Module module
function Wrapper:restore(module, weight)
  expect(self.name, "weight", weight, "a tensor")
  if module.fan_in_fan_out then weight = weight:transpose(0, 1):contiguous() end
  self:unwrap(module)
  module:parameter("weight", weight)
  return module
end

--- The layers of a model that are wrapped: a list of { name, module }, each module once.
---@param who string  in front of errors
---@param model Module
---@return {name: string, module: Module}[]
function Wrapper:wrapped(who, model)
  expect(self.name, "who", who, "a string")
  expect(who, "model", model, "a module")
  local list = {}
  local names, modules = M.modules(model)
  for _, name in ipairs(names) do
    if rawget(modules[name], self.field) ~= nil then list[#list + 1] = { name = name, module = modules[name] } end
  end
  return list
end

return M
