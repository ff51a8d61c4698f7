--- Retraining a pruned model by few parameters: biases, norms, the head, and low-rank matrices that keep to the masks
-- and can be merged. Zimmer et al. 2023, "PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs".
local ty = require "tycho"
local base = require "tycho.nn.module"
local masks = require "tycho.prune.masks"

local nn = ty.nn
local surgery = nn.surgery
local parameter = require("tycho.nn.options").parameter
local M = {}

local function low_rank(module) return ty.matmul(module.perp_B, module.perp_A) * module._pruned.scale end

-- Each gives the weight of a layer. `mask`: (W + BA) M. `scale`: W BA elementwise, where BA begins as ones. `prune`:
-- W + BA, whose mask comes at merging.
local variants = {
  mask = function(module, mask) return module.weight + low_rank(module) * mask end,
  scale = function(module) return module.weight * ty.matmul(module.perp_B, module.perp_A) end,
  prune = function(module) return module.weight + low_rank(module) end,
}

-- Two factors for the weight of a layer, in whatever way round that is.
local function attach(module, rank, alpha, variant)
  local shape, p = module.weight.shape, module._pruned
  p.variant, p.scale = variant, alpha / rank
  nn.with_defaults({ dtype = module.weight.dtype, device = module.weight.device }, function()
    if variant == "scale" then -- a first pair of ones, and pairs that give nothing yet
      module.perp_B = parameter({ shape[1], rank }, function(t)
        nn.init.zeros(t)
        t:narrow(1, 0, 1):fill_(1)
      end)
      module.perp_A = parameter({ rank, shape[2] }, function(t)
        nn.init.uniform(t, -1 / math.sqrt(shape[2]), 1 / math.sqrt(shape[2]))
        t:narrow(0, 0, 1):fill_(1)
      end)
    else
      module.perp_B = parameter({ shape[1], rank }, nn.init.zeros)
      module.perp_A = parameter({ rank, shape[2] }, function(t)
        nn.init.uniform(t, -1 / math.sqrt(shape[2]), 1 / math.sqrt(shape[2]))
      end)
    end
  end)
  p.adapter = variants[variant]
end

local function detach(module)
  for _, name in ipairs { "perp_A", "perp_B" } do surgery.remove(module, name) end
  module._pruned.adapter = nil
end

-- What a config.json calls the biases that were not there; the files of Llama and its relatives have room for them.
local function note_biases(model)
  local config = rawget(model, "config")
  if not config then return end
  for _, key in ipairs { "attention_bias", "mlp_bias" } do
    if config[key] == false then config[key] = true end
  end
end

-- Calls visit(name, owner, key) for parameters that are wanted whole.
local function each_wanted(model, o, visit)
  local head = rawget(model, "lm_head")
  base.walk_state(model, function(kind, name, tensor, owner, key)
    if kind ~= "parameter" or not tensor:is_floating_point() then return end
    local class = getmetatable(owner).__name
    local norm = class:find "Norm" ~= nil
    if o.norms and norm or o.biases and key == "bias" and not norm or o.head and owner == head then
      visit(name, owner, key)
    end
  end)
end

local function perp(model, options)
  local who = "prune.perp"
  local o = nn.options(who, options, { biases = true, norms = true, head = false, add_biases = false, rank = 0,
    alpha = nn.none, variant = "mask", targets = nn.none })
  if not variants[o.variant] then
    error(("%s: variant must be mask, scale or prune, got %s"):format(who, tostring(o.variant)), 0)
  end
  if not math.tointeger(o.rank) or o.rank < 0 then
    error(("%s: rank must be an integer of at least 0, got %s"):format(who, tostring(o.rank)), 0)
  end
  local alpha = o.alpha or o.rank
  if type(alpha) ~= "number" or alpha ~= alpha or math.abs(alpha) == math.huge then
    error(("%s: alpha must be a number, got %s"):format(who, tostring(alpha)), 0)
  end
  local list = masks.masked(who, model)
  if o.head and not rawget(model, "lm_head") then error(who .. ": head: the model has no head of its own", 0) end
  if #list == 0 then error(who .. ": the model has no masks; prune.magnitude or prune.zeros gives it some", 0) end
  for _, layer in ipairs(list) do
    if layer.module._pruned.adapter then error(who .. ": the model is retrained already; prune.merge ends that", 0) end
  end
  local chosen = {}
  if o.rank > 0 then
    local accepted = {}
    for _, layer in ipairs(masks.layers(who, model, o.targets)) do accepted[layer.module] = true end
    for _, layer in ipairs(list) do
      if accepted[layer.module] then chosen[#chosen + 1] = layer.module end
    end
  end
  local total = model:count_parameters()
  model:requires_grad_(false)
  if o.biases and o.add_biases then
    for _, layer in ipairs(list) do
      local module = layer.module
      if not module.bias then
        local _, outputs = surgery.sizes(module)
        nn.with_defaults({ dtype = module.weight.dtype, device = module.weight.device }, function()
          module.bias = parameter({ outputs }, nn.init.zeros)
        end)
      end
    end
    note_biases(model)
  end
  local trained, count = {}, 0
  local function add(t)
    trained[#trained + 1] = t:requires_grad_()
    count = count + t:numel()
  end
  each_wanted(model, o, function(_, owner, key) add(rawget(owner, key)) end)
  for _, module in ipairs(chosen) do
    attach(module, math.tointeger(o.rank), alpha, o.variant)
    add(module.perp_A)
    add(module.perp_B)
  end
  if #trained == 0 then error(who .. ": nothing is left to train: biases, norms, head or rank", 0) end
  ty.core.program.renew()
  return trained, count / total
end

--- Freezes a pruned model but for few parameters. options: biases (true), add_biases (false: linear layers without a
-- bias get one), norms (true), head (false), rank (0: no low-rank matrices), alpha (rank: B A counts alpha / rank),
-- variant ("mask": (W + B A) M; "scale": W times B A, elementwise; "prune": W + B A, cut at merging, which loses some),
-- targets (which of the masked layers get the matrices, as prune.magnitude has them). Returns what is to be trained,
-- for an optimizer, and its share of the model's parameters.
---@param model Module
---@param options? table
---@return Tensor[] parameters
---@return number share
function M.perp(model, options)
  return nn.for_caller(perp, model, options)
end

--- Puts the low-rank matrices into the weights and ends the retraining: every parameter can be trained again, and the
-- masks stand. Zeros stay zeros, exactly. Returns the model.
---@param model Module
---@return Module model
function M.merge(model)
  ty.no_grad(function()
    for _, layer in ipairs(masks.masked("prune.merge", model)) do
      local module = layer.module
      if module._pruned.adapter then
        local mask = module._pruned.mask
        module.weight:copy_(ty.where(mask, masks.effective(module), 0))
        detach(module)
      end
    end
  end)
  for _, p in ipairs(model:parameters()) do
    if p:is_floating_point() then p:requires_grad_() end
  end
  ty.core.program.renew()
  return model
end

return M
