--- CE-SSL: low-rank updates that take turns at random, with ranks from one look at their gradients, and unlabelled
-- signals that do no more than steady the norms. Zhou et al. 2024, "CE-SSL: Computation-Efficient Semi-Supervised
-- Learning for ECG-based Cardiovascular Diseases Detection".
--
--     local updates = peft.ce_ssl.attach(model, { rank = 8, save = { "classifier" }, look = function()
--       return nn.bce_with_logits(model(signals), labels)        -- the loss of a first batch
--     end })
--     local optimizer = optim.AdamW(peft.parameters(model), { lr = 3e-3 })
--     for step, batch in train.steps(loader, 300) do
--       updates:draw()                                           -- which of them are off in this step
--       local logits = peft.ce_ssl.forward(model, batch.signal, unlabelled:next().signal)
--       optimizer:step(nn.bce_with_logits(logits, batch.labels))
--       optimizer:zero_grad()
--     end
--     updates:finish()                                           -- a plain adapter of LoRA: peft.merge, peft.save
--
-- Random deactivation: in each step every update B A is off with probability p, and then costs nothing: neither product
-- nor gradient, and the optimizer leaves it and its moments alone. At inference each counts (1 - p) times, what it did
-- in the mean. One-shot rank allocation: with equal ranks the gradient of B at the start, times A, is a sketch of the
-- weight's; the share `low` of the layers with the smallest mean square of it gets half the rank. (The form with
-- the weight as a factor is importance = "taylor".) Unlabelled signals go through the network beside the labelled ones,
-- so that batch norms see both; the loss sees the labelled ones alone.
local ty = require "tycho"
local adapter = require "tycho.peft.adapter"
local arguments = require "tycho.arguments"
local layers = require "tycho.peft.layers"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- What peft.ce_ssl.attach makes.
---@class Deactivation
---@field ranks integer[]    of the layers, in the model's order
---@field scores number[]    that they come from
---@field share number       the probability to be off
---@field active integer     how many updates the step has that was drawn last
local Deactivation = {}
Deactivation.__index = Deactivation

--- Ranks by scores: the share `low` of the layers with the smallest ones gets half of `rank` (at least 1), the others
-- all of it.
---@param scores number[]
---@param rank integer
---@param low number  in [0, 1]
---@return integer[]
function M.allocate(scores, rank, low)
  local who = "peft.ce_ssl.allocate"
  arguments.expect(who, "scores", scores, "a list of numbers")
  arguments.expect(who, "rank", rank, "an integer >= 1")
  arguments.expect(who, "low", low, "a number in [0, 1]")
  local order, ranks = {}, {}
  for i = 1, #scores do order[i] = i end
  table.sort(order, function(a, b) return scores[a] < scores[b] or scores[a] == scores[b] and a < b end)
  for place, i in ipairs(order) do
    ranks[i] = place <= math.floor(low * #scores) and math.max(1, rank // 2) or rank
  end
  return ranks
end

-- The score of a layer from the gradients of its adapter, whose B is zero.
local function score_of(module, how)
  local grad = module.lora_B.weight.grad
  if not grad then return 0 end
  local b, a = grad, module.lora_A.weight:detach()
  if a.ndim >= 3 then b, a = b:flatten(1), a:flatten(1) end
  local sketch = b:matmul(a)
  if how == "taylor" then sketch = sketch * surgery.rows(module):to(sketch.dtype) end
  return sketch:square():mean():item()
end

local defaults = { deactivation = 0.2, low = 0.5, importance = "fisher", look = arguments.none, looks = 1 }
local words = { deactivation = "a number in [0, 1)", low = "a number in [0, 1]", importance = '"fisher" or "taylor"',
  look = "a function", looks = "an integer >= 1" }

-- Ours, and the options of peft.lora.
local function split(who, options)
  arguments.expect(who, "options", options, "a table")
  local own, rest = {}, {}
  for key, value in pairs(options) do
    if defaults[key] ~= nil then own[key] = value else rest[key] = value end
  end
  rest.alpha = rest.alpha or rest.rank or 8
  rest.rank = rest.rank or 8
  rest.targets = rest.targets or function(_, module)
    local kind = layers.kind(module)
    return kind == "linear" or kind == "conv"
  end
  return arguments.read(who, own, defaults, words), rest
end

local function normal_inner(model)
  for _, layer in ipairs(rawget(model, "_adapter").layers) do
    if rawget(layer.module, "lora_A") then nn.init.normal(layer.module.lora_A.weight, 0, 0.02) end
  end
end

--- Gives a model low-rank updates and freezes the rest. options: those of peft.lora (rank 8, alpha as the rank,
-- targets: all linear layers and convolutions by default, save, bias), and
--   deactivation  probability that an update is off in a step (0.2)
--   low           share of the layers that get half the rank (0.5); it takes
--   look          a function that returns the loss of a first batch; without it all ranks are equal
--   looks         how many times it is called for the scores, which are means (1)
--   importance    "fisher": mean square of the gradient; "taylor": of the gradient times the weight
---@param model Module
---@param options table
---@return Deactivation
function M.attach(model, options)
  local who = "peft.ce_ssl.attach"
  arguments.expect(who, "model", model, "a module")
  local o, rest = split(who, options)
  local self = setmetatable({ model = model, share = o.deactivation, scores = {}, ranks = {} }, Deactivation)
  local put = adapter.prepare(who, model, rest, {})
  if o.look and o.low > 0 then
    put()
    normal_inner(model)
    local list = rawget(model, "_adapter").layers
    for i = 1, #list do self.scores[i] = 0 end
    local ok, problem = pcall(function()
      for _ = 1, o.looks do
        ty.scope(function()
          local loss = o.look()
          if not ty.is_tensor(loss) or not loss.requires_grad then
            arguments.fail("%s: look: expected it to return a loss of the model, got %s", who, arguments.describe(loss))
          end
          loss:backward()
          for i, layer in ipairs(list) do
            if rawget(layer.module, "lora_B") then
              self.scores[i] = self.scores[i] + score_of(layer.module, o.importance) / o.looks
            end
          end
        end)
        model:zero_grad()
      end
    end)
    local names = {}
    for i, layer in ipairs(list) do names[i] = layer.name end
    adapter.remove(model)
    if not ok then error(problem, 0) end
    rest.rank_pattern, rest.alpha_pattern = {}, {}
    for i, rank in ipairs(M.allocate(self.scores, rest.rank, o.low)) do
      local name = "^" .. (model.published_prefix or "") .. names[i]
      rest.rank_pattern[name], rest.alpha_pattern[name] = rank, rest.alpha * rank / rest.rank
    end
    put = adapter.prepare(who, model, rest, {})
  end
  put()
  normal_inner(model)
  self.record = rawget(model, "_adapter")
  for i, layer in ipairs(self.record.layers) do
    self.ranks[i] = layer.module._lora.rank
    layer.module._lora.full_scale = layer.module._lora.scale
  end
  self.active = #self.ranks
  return self
end

local function check(self, who)
  if not self.record or rawget(self.model, "_adapter") ~= self.record then
    arguments.fail("%s: expected the adapter that it was made with, which the model has no more", who)
  end
  return self.record.layers
end

--- Draws which updates are on in the step that follows, by the generator of ty.manual_seed.
---@return integer active  how many are
function Deactivation:draw()
  local list = check(self, "Deactivation:draw")
  local drawn = ty.rand(#list):tolist()
  self.active = 0
  for i, layer in ipairs(list) do
    local a = layer.module._lora
    local off = drawn[i] < self.share
    a.scale, a.off = a.full_scale, off or nil
    if not off then self.active = self.active + 1 end
  end
  return self.active
end

--- For inference: every update is on and counts (1 - deactivation) times.
function Deactivation:expected()
  for _, layer in ipairs(check(self, "Deactivation:expected")) do
    local a = layer.module._lora
    a.off, a.scale = nil, a.full_scale * (1 - self.share)
  end
  self.active = #self.ranks
end

--- The end of training: what expected() counts goes into B, and what stays is a plain adapter of LoRA.
function Deactivation:finish()
  for _, layer in ipairs(check(self, "Deactivation:finish")) do
    local a = layer.module._lora
    a.off, a.scale, a.full_scale = nil, a.full_scale, nil
    local b = rawget(layer.module, "lora_B")
    ty.no_grad(function() b.weight:detach():mul_(1 - self.share) end)
  end
  self.record = nil
end

--- What the model says of labelled signals while its norms see unlabelled ones as well: both go through it in one
-- batch, and the rows of the labelled ones come back. Of models with features(x) and head(features) the unlabelled ones
-- go through the features alone.
---@param model Module
---@param labelled Tensor  [n, ...]
---@param unlabelled? Tensor  [m, ...]; nil: none
---@return Tensor rows  of the labelled ones
function M.forward(model, labelled, unlabelled)
  local who = "peft.ce_ssl.forward"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "labelled", labelled, "a tensor")
  arguments.expect(who, "unlabelled", unlabelled, "a tensor or nil")
  if not unlabelled then return model(labelled) end
  if labelled.ndim == 0 or table.concat(labelled.shape, " ", 2) ~= table.concat(unlabelled.shape, " ", 2) then
    arguments.fail("%s: unlabelled: expected items like the labelled %s, got %s", who, arguments.describe(labelled),
      arguments.describe(unlabelled))
  end
  local n, both = labelled.shape[1], ty.concat({ labelled, unlabelled }, 0)
  if type(model.features) == "function" and type(model.head) == "function" then
    return model:head(model:features(both):narrow(0, 0, n))
  end
  return model(both):narrow(0, 0, n)
end

return M
