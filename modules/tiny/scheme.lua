--- Sparse schemes: which weights, biases and input channels of a model are trained, and which stay. Zhu et al. 2023,
-- "PockEngine: Sparse and Efficient Fine-tuning in a Pocket", section 2.1; Lin et al. 2022, section 3.2.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local channels = require "tycho.tiny.channels"

local expect, fail = arguments.expect, arguments.fail
local surgery = ty.nn.surgery
local who = "tiny.scheme"

--- What tiny.scheme makes.
---@class SparseScheme
---@field parameters Tensor[]  what is trained, for an optimizer
---@field names string[]       theirs; of channels that of the weight
---@field frozen Tensor[]      the model's other parameters
---@field elements integer     of all that is trained
---@field before table<Tensor, boolean>  which parameters were trained before
local Scheme = {}
Scheme.__index = Scheme

-- Whether a layer is one of the modules or within one; "" is the whole model.
local function within(list, layer)
  for _, name in ipairs(list) do
    if name == "" or layer == name or layer:sub(1, #name + 1) == name .. "." then return true end
  end
  return false
end

local function check_names(what, list, known)
  for i, name in ipairs(expect(who, what, list, "a list of strings")) do
    if not known[name] then
      fail("%s: %s[%d]: the model has no module \"%s\"%s", who, what, i, name, ty.core.nearest(name, known))
    end
  end
end

--- Freezes a model but for what the scheme names. spec:
--   weights   names of modules all of whose weights below are trained, those of norms too; "" is the model
--   biases    names of modules all of whose biases below are trained
--   channels  by the name of a layer (linear, or a convolution in one group) the share of its input channels that are
--             trained, (0, 1]; the layer then keeps no more of its input
---@param model Module
---@param spec {weights?: string[], biases?: string[], channels?: table<string, number>}
---@return SparseScheme
local function scheme(model, spec)
  expect(who, "model", model, "a module")
  expect(who, "spec", spec, "a table")
  local o = arguments.read(who, spec, { weights = {}, biases = {}, channels = {} },
    { weights = "a list of strings", biases = "a list of strings", channels = "a table" })
  local _, modules = surgery.modules(model)
  check_names("weights", o.weights, modules)
  check_names("biases", o.biases, modules)
  for name, share in pairs(o.channels) do
    local what = ("channels[\"%s\"]"):format(tostring(name))
    if not modules[name] or not channels.fits(modules[name]) then
      fail("%s: %s: expected the name of a linear layer or a convolution in one group", who, what)
    end
    expect(who, what, share, "a number in (0, 1]")
  end
  local self = setmetatable({ model = model, parameters = {}, names = {}, frozen = {}, elements = 0, before = {} },
    Scheme)
  local function train(name, p)
    self.parameters[#self.parameters + 1], self.names[#self.names + 1] = p, name
    self.elements = self.elements + p:numel()
  end
  for name, p in model:named_parameters() do
    if self.before[p] == nil then -- tied ones once
      self.before[p] = p.requires_grad
      local layer, field = name:match "^(.*)%.([^.]*)$"
      layer, field = layer or "", field or name
      local trained = p:is_floating_point() and within(field:find "^bias" and o.biases or o.weights, layer)
        and not (field == "weight" and o.channels[layer])
      p:requires_grad_(trained)
      if trained then train(name, p) else self.frozen[#self.frozen + 1] = p end
    end
  end
  for name, module in pairs(modules) do
    if o.channels[name] then
      local inputs = module.weight.shape[2]
      train(name .. ".weight", channels.attach(module, math.max(1, math.floor(o.channels[name] * inputs + 0.5))))
    end
  end
  if #self.parameters == 0 then fail("%s: spec: expected some tensor to train, got none", who) end
  ty.core.program.renew()
  return self
end

--- Leaves the model with its weights as they are now, and trains what was trained before.
function Scheme:remove()
  for _, layer in ipairs(channels.wrapper:wrapped("SparseScheme:remove", self.model)) do
    channels.wrapper:unwrap(layer.module)
  end
  for p, trained in pairs(self.before) do p:requires_grad_(trained) end
  ty.core.program.renew()
end

function Scheme:__tostring()
  return ("%d tensors of %d are trained, %d elements"):format(#self.parameters, #self.parameters + #self.frozen,
    self.elements)
end

return scheme
