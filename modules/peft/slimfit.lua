--- SlimFit: each step trains the layers that move, with what frozen layers and their activations would take of memory
-- left out. Ardakani et al. 2023, "SlimFit: Memory-Efficient Fine-Tuning of Transformer-based Models Using Training
-- Dynamics".
--
--     local slim = peft.slimfit.attach(model, { freeze = 0.9 })
--     local optimizer = optim.AdamW(model, { lr = 1e-4 })
--     for step, batch in train.steps(loader, 300) do
--       slim:step(optimizer, function() return model:loss(batch.image, batch.label) end)
--     end
--     slim:detach()
--
-- A layer here is a weight: of a linear layer, a convolution, an embedding or a norm. Each has a distance, |W_t -
-- W_t-1| over |W_t-1| (both summed over the elements) of the last step that trained it; every step freezes the share
-- `freeze` with the smallest ones. The frozen keep theirs, those that are trained slow down as they settle and as the
-- rate falls, so that all get their turn. Distances begin as large random numbers: each layer is trained before any
-- is twice. Biases and heads are always trained.
--
-- A frozen linear layer keeps no input. What the gradient needs that goes on through the layers is packed instead
-- (see peft.packed): of GELU and of gates in 4 bits, of attention, other activations and norms in 8. And so that a step
-- in which the wide layers have their turn does not make the peak, inputs of linear layers with more inputs than
-- outputs are packed to 8 bits as well, with inputs = "all" those of all linear layers. The paper's code has steps of
-- 0.5 for GELU ("fixed4" here), which blocks with a scale beat where inputs are small, a tenth of the inputs of frozen
-- norms in place of 8 bits ("prune"), and distances divided element by element, which a weight of zero spoils.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local packed = require "tycho.peft.packed"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- What packs which static activations, codecs by "op.argument".
M.kinds = { ["gelu.x"] = "q4_0", ["glu.x"] = "q4_0", ["glu.gate"] = "q4_0", ["silu.x"] = "q8_0",
  ["scaled_dot_product_attention.q"] = "q8_0", ["scaled_dot_product_attention.k"] = "q8_0",
  ["scaled_dot_product_attention.v"] = "q8_0", ["scaled_dot_product_attention.output"] = "q8_0",
  ["softmax.output"] = "q8_0", ["layer_norm.x"] = "q8_0", ["rms_norm.x"] = "q8_0", ["add_norm.output"] = "q8_0",
  ["rotary.x"] = "q4_0" } -- rotary needs x for gradients of its angles alone

--- What peft.slimfit.attach makes.
---@class SlimFit
---@field names string[]       of the weights that take turns
---@field active integer       how many are trained in a step
---@field history integer[][]  for each step the places in `names` that were trained
local SlimFit = {}
SlimFit.__index = SlimFit

-- What parts of the model make on the way is gone when they return, but for what the graph keeps.
local scoped = surgery.wrapper {
  name = "Scoped", field = "_slimfit",
  forward = function(base)
    return function(self, ...)
      if not ty.is_grad_enabled() then return base.forward(self, ...) end
      return ty.scope(base.forward, self, ...)
    end
  end,
}

local function is_container(module)
  local class = getmetatable(module)
  return class == nn.ModuleList or class == nn.ModuleDict or class == nn.ParameterList
end

-- The weights that take turns: matrices and what is called a weight, without the model's heads.
local function candidates(who, model, always)
  local names, list, seen = {}, {}, {}
  for name, p in model:named_parameters() do
    local fits = p.requires_grad and (p.ndim > 1 or name:find "weight$")
    for _, ending in ipairs(always) do
      fits = fits and not surgery.ends_in(name, ending) and not surgery.ends_in(name, ending .. ".weight")
    end
    if fits and not seen[p] then
      seen[p] = true
      names[#names + 1], list[#list + 1] = name, p
    end
  end
  if #list < 2 then arguments.fail("%s: model: expected at least two weights to train, got %d", who, #list) end
  return names, list
end

-- Widths of the inputs that only linear layers with fewer outputs have.
local function wide_inputs(model)
  local wide, narrow = {}, {}
  for _, layer in ipairs(surgery.find("slimfit", model)) do
    local inputs, outputs = surgery.sizes(layer.module)
    if inputs > outputs then wide[inputs] = true else narrow[inputs] = true end
  end
  for width in pairs(narrow) do wide[width] = nil end
  return wide
end

-- So many numbers from [0, 1), of the seed alone.
local function random(count, seed) return ty.seeded_noise(ty.zeros(count), seed, "uniform"):tolist() end

local defaults = { freeze = 0.9, by = "dynamics", kinds = arguments.none, pack = true, inputs = "wide",
  always = { "lm_head", "classifier", "head", "score" }, seed = 0 }
local words = { freeze = "a number in [0, 1)", by = '"dynamics" or "random" or "lower"', kinds = "a table",
  pack = "a boolean", inputs = '"wide" or "all"', always = "a list of strings", seed = "an integer" }

--- Takes a model in charge, whose forward passes stay what they are. options:
--   freeze  share of the weights that are frozen in each step (0.9)
--   by      "dynamics"; to compare with: "random" draws the trained ones anew each step, "lower" freezes the first ones
--           for good
--   pack    false keeps what ops need as it is
--   inputs  which inputs of trained linear layers are packed to 8 bits: "wide", of layers with fewer outputs; "all"
--   kinds   codecs by "op.argument" in place of peft.slimfit.kinds
--   always  names and ends of names of modules and parameters that are always trained (lm_head, classifier, head,
--           score)
--   seed    of the first distances, and of by = "random" (0)
---@param model Module
---@param options? table
---@return SlimFit
function M.attach(model, options)
  local who = "peft.slimfit.attach"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, defaults, words)
  local names, list = candidates(who, model, o.always)
  local self = setmetatable({ model = model, names = names, weights = list, by = o.by, pack = o.pack,
    kinds = o.kinds or M.kinds, wide = wide_inputs(model), inputs = o.inputs, history = {}, seed = o.seed }, SlimFit)
  self.active = #list - math.floor(o.freeze * #list)
  self.distances = random(#list, o.seed)
  for i, value in ipairs(self.distances) do self.distances[i] = (1 + value) * 1e7 end
  local all, modules = surgery.modules(model)
  for _, name in ipairs(all) do
    local module = modules[name]
    if name ~= "" and not is_container(module) and #module:parameters() > 0 and surgery.kind(module) == nil
      and not scoped:state(module) then
      scoped:wrap(module, {})
    end
  end
  return self
end

--- Says which weights the next step trains and freezes the others. Called by step().
---@return integer[] active  their places in `names`, rising
function SlimFit:begin()
  local n, order, value = #self.weights, {}, self.distances
  if self.by == "random" then value = random(n, self.seed + 1 + #self.history) end
  for i = 1, n do order[i] = i end
  if self.by == "lower" then
    table.sort(order, function(a, b) return a > b end)
  else
    table.sort(order, function(a, b) return value[a] > value[b] or value[a] == value[b] and a < b end)
  end
  local chosen, active = {}, {}
  for i = 1, self.active do chosen[order[i]] = true end
  for i, p in ipairs(self.weights) do
    p:requires_grad_(chosen[i] == true)
    if chosen[i] then active[#active + 1] = i end
  end
  self.history[#self.history + 1] = active
  return active
end

--- Runs fn(...), a forward pass of the model, so that what its ops keep is packed.
---@param fn function
---@return any ...
function SlimFit:run(fn, ...)
  arguments.expect("SlimFit:run", "fn", fn, "a function")
  if not self.pack then return fn(...) end
  local kinds, wide, all = self.kinds, self.wide, self.inputs == "all"
  return packed.run({ model = self.model, choose = function(t, op, what)
    local last = t.ndim > 0 and t.shape[t.ndim] or 1
    if op == "linear" and what == "x" then return (all or wide[last]) and "q8_0" or nil end
    if what == "output" and (last == 1 or t.ndim < 4 and op:find "attention") then return nil end -- statistics
    return kinds[op .. "." .. what]
  end }, fn, ...)
end

--- The optimizer's step for the gradients there are, after which they are gone, and the distances of what it trained.
---@param optimizer Optimizer
function SlimFit:update(optimizer)
  local who = "SlimFit:update"
  if type(optimizer) ~= "table" or not optimizer.step or not optimizer.zero_grad then
    arguments.fail("%s: optimizer: expected one of ty.optim, got %s", who, arguments.describe(optimizer))
  end
  local active = self.history[#self.history]
  if not active then arguments.fail("%s: expected begin() before it", who) end
  ty.scope(ty.no_grad, function()
    local before = {}
    for k, i in ipairs(active) do before[k] = self.weights[i]:detach():clone() end
    optimizer:step()
    optimizer:zero_grad()
    for k, i in ipairs(active) do
      local moved = ty.norm(self.weights[i]:detach() - before[k], 1):item()
      self.distances[i] = moved / math.max(ty.norm(before[k], 1):item(), 1e-30)
    end
  end)
end

--- One step: fn(...) gives the loss. Returns it as a number.
---@param optimizer Optimizer
---@param fn fun(...): Tensor
---@return number loss
function SlimFit:step(optimizer, fn, ...)
  arguments.expect("SlimFit:step", "optimizer", optimizer, "a table")
  arguments.expect("SlimFit:step", "fn", fn, "a function")
  self:begin()
  return ty.scope(function(...)
    local loss = self:run(fn, ...)
    if not ty.is_tensor(loss) then
      arguments.fail("SlimFit:step: fn: expected it to return the loss, got %s", arguments.describe(loss))
    end
    loss:backward()
    local value = loss:item()
    self:update(optimizer)
    return value
  end, ...)
end

--- Which weights were trained in which step, u8 [weights, steps]: 1 where one was.
---@return Tensor
function SlimFit:map()
  local map = {}
  for i = 1, #self.weights do
    map[i] = {}
    for step = 1, #self.history do map[i][step] = 0 end
  end
  for step, active in ipairs(self.history) do for _, i in ipairs(active) do map[i][step] = 1 end end
  if #self.history == 0 then return ty.zeros({ #self.weights, 0 }, { dtype = "u8" }) end
  return ty.tensor(map, { dtype = "u8" })
end

--- Leaves the model as it was: all its weights are trained again.
function SlimFit:detach()
  for _, p in ipairs(self.weights) do p:requires_grad_(true) end
  for _, layer in ipairs(scoped:wrapped("SlimFit:detach", self.model)) do scoped:unwrap(layer.module) end
end

return M
