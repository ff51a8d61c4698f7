--- A vision transformer with a gate on every width: of the embedding, of the heads and of the feed-forward network of
-- each layer. Behind a gate that is 0 nothing is left, norms do not see it, and cut() takes it out of the weights.
-- Works on tycho.models.ViTForImageClassification.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- one gate ----

--- Gates of [rows, units] with a learnt score for each unit and a learnt weight for each share of them that may stay.
-- A gate is w * sigmoid(score) + (1 - w) * profile, the profile laid onto the units of a row by the order of their
-- scores: a unit's share is the weight of all candidates that would keep its place.
---@class VitGate
---@field score Tensor   [rows, units]
---@field alpha Tensor   [candidates]
---@field ratios number[]
---@field alive boolean[]
---@field w number
local Gate = {}
Gate.__index = Gate

--- A gate for a layer's units. scores [rows, units] to begin with; ratios: shares that may stay, in (0, 1].
---@param scores Tensor
---@param ratios number[]
---@return VitGate
function M.gate(scores, ratios)
  local who = "prune.vit_gates.gate"
  expect(who, "scores", scores, "a tensor")
  expect(who, "ratios", ratios, "a list of numbers")
  if scores.ndim ~= 2 or #ratios == 0 then
    fail("%s: expected scores [rows, units] and ratios, got %s and %d of them", who, arguments.describe(scores),
      #ratios)
  end
  local gate = setmetatable({ ratios = {}, alive = {}, counts = {}, w = 0.99, units = scores.shape[2] }, Gate)
  local steps = {}
  for i, ratio in ipairs(ratios) do
    expect(who, ("ratios[%d]"):format(i), ratio, "a number in (0, 1]")
    gate.ratios[i], gate.alive[i] = ratio, true
    gate.counts[i] = math.max(1, math.floor(ratio * gate.units + 0.5))
    steps[i] = ty.arange(gate.units):lt(gate.counts[i]):to(scores.dtype)
  end
  gate.steps = ty.keep(ty.stack(steps, 0):to { device = scores.device })
  gate.score = ty.keep(scores:detach():clone():requires_grad_())
  gate.alpha = ty.keep(ty.zeros({ #ratios }, { dtype = scores.dtype, device = scores.device }):requires_grad_())
  return gate
end

--- The weights of the candidates, softmax(alpha) over those that are left: [candidates], 0 for the others.
---@return Tensor
function Gate:weights()
  local off = {}
  for i, alive in ipairs(self.alive) do off[i] = alive and 0 or -1e30 end
  return (self.alpha + ty.tensor(off, { dtype = self.alpha.dtype }):to { device = self.alpha.device }):softmax(0)
end

--- How many candidates are left.
function Gate:left()
  local count = 0
  for _, alive in ipairs(self.alive) do count = count + (alive and 1 or 0) end
  return count
end

--- The place of each unit in its row by score, the best 0: i64 [rows, units].
function Gate:ranks() return ty.no_grad(function() return (-self.score):argsort(1):argsort(1) end) end

--- The gate as it is: [rows, units], and where it is open at all, 0 or 1.
---@return Tensor gate
---@return Tensor open
function Gate:value()
  local ranks = self:ranks()
  local profile = self:weights():unsqueeze(0):matmul(self.steps):squeeze(0)
  profile = profile:index_select(0, ranks:flatten()):reshape(ranks.shape)
  local open = ty.no_grad(function() return profile:gt(1e-20):to(profile.dtype) end)
  return (self.score:sigmoid() * self.w + profile * (1 - self.w)) * open, open
end

--- The units of a row that the candidates leave on average, a tensor: what FLOPs go by.
---@return Tensor
function Gate:width()
  return (self:weights() * ty.tensor(self.counts):to(self.alpha.dtype):to { device = self.alpha.device }):sum()
end

--- Drops the candidates whose weight is below threshold / how many are left. Returns whether any went.
---@param threshold number  (0.2)
---@return boolean
function Gate:drop(threshold)
  threshold = expect("VitGate:drop", "threshold", threshold, "a number in [0, 1]")
  local count, weights, went = self:left(), self:weights():tolist(), false
  if count == 1 then return false end
  for i, alive in ipairs(self.alive) do
    if alive and weights[i] <= threshold / count then self.alive[i], went = false, true end
  end
  return went
end

--- Leaves one candidate, the likeliest. Returns how many units of a row it keeps.
---@return integer
function Gate:decide()
  local best = self:weights():argmax(0):item() + 1
  for i in ipairs(self.alive) do self.alive[i] = i == best end
  return self.counts[best]
end

--- Leaves one candidate that keeps so many units of a row.
---@param count integer
function Gate:keep(count)
  expect("VitGate:keep", "count", count, ("an integer in [1, %d]"):format(self.units))
  self.ratios, self.alive, self.counts = { count / self.units }, { true }, { count }
  local open = ty.arange(self.units):lt(count):unsqueeze(0)
  self.steps = ty.keep(open:to { dtype = self.steps.dtype, device = self.steps.device })
  self.alpha = ty.keep(ty.zeros({ 1 }, { dtype = self.alpha.dtype, device = self.alpha.device }))
end

--- The loss that drives the weights to one candidate: their entropy + tan(pi / 2 - pi s), s their variance over that
-- of one alone; s is kept within [0.01, 0.99], where the tangent is finite.
---@return Tensor
function Gate:indecision()
  local count = self:left()
  if count == 1 then return ty.zeros({}, { dtype = self.alpha.dtype }) end
  local at = {}
  for i, alive in ipairs(self.alive) do if alive then at[#at + 1] = i - 1 end end
  local p = self:weights():index_select(0, ty.tensor(at, { dtype = "i64" }):to { device = self.alpha.device })
  local entropy = -(p * p:clamp(1e-12):log()):sum()
  local s = ((p - 1 / count):square():sum() / (1 - 1 / count)):clamp(0.01, 0.99)
  local angle = math.pi / 2 - s * math.pi
  return entropy + angle:sin() / angle:cos() / count
end

-- ---- the network ----

--- The parts of a vision transformer, or an error.
---@param who string
---@param model Module
---@return table parts  { vit, layers, heads }
function M.parts(who, model)
  expect("prune.vit_gates.parts", "who", who, "a string")
  expect(who, "model", model, "a module")
  local vit = rawget(model, "vit")
  if not vit or not rawget(vit, "embeddings") or not rawget(model, "classifier") then
    fail("%s: model: expected a ViTForImageClassification, got %s", who, arguments.describe(model))
  end
  return { vit = vit, layers = vit.encoder.layer, heads = vit.config.num_attention_heads }
end

--- The widths of a model: embedding, and of each layer heads (the width of one) and inner.
---@param model Module
---@return { embedding: integer, layers: { head: integer, inner: integer }[] }
function M.widths(model)
  local p = M.parts("prune.vit_gates.widths", model)
  local sizes = { embedding = p.vit.layernorm.weight:numel(), layers = {} }
  for i, layer in ipairs(p.layers) do
    sizes.layers[i] = { head = layer.attention.attention.value.weight.shape[1] // p.heads,
      inner = layer.intermediate.dense.weight.shape[1] }
  end
  return sizes
end

--- Multiplications of one picture with such widths, numbers or tensors: patches, products of layers, attention's two
-- products, the head.
---@param model Module
---@param sizes table  of widths()
---@return number|Tensor
function M.multiplications(model, sizes)
  local p = M.parts("prune.vit_gates.multiplications", model)
  local e, kernel = sizes.embedding, p.vit.embeddings.patch_embeddings.projection.weight
  local patches = p.vit.embeddings.rows * p.vit.embeddings.columns
  local n = patches + 1
  local sum = e * (patches * (kernel:numel() // kernel.shape[1])) + e * model.classifier.weight.shape[1]
  for _, layer in ipairs(sizes.layers) do
    local h = layer.head * p.heads
    sum = sum + e * h * (4 * n) + h * (2 * n * n) + e * layer.inner * (2 * n)
  end
  return sum
end

-- The norm of a layer where only some of the channels are there. x is 0 at the others.
local function masked_norm(norm, x, open)
  if not open then return norm(x) end
  local count = open:sum()
  local mean = x:sum(-1, true) / count
  local off = (x - mean) * open
  local variance = off:square():sum(-1, true) / count
  return (off / (variance + norm.eps):sqrt() * norm.weight + norm.bias) * open
end

local embeddings = surgery.wrapper { name = "Gated", field = "_gated_embeddings", forward = function()
  return function(self, x)
    local state = self._gated_embeddings
    local patches = self.patch_embeddings(x):flatten(2):transpose(1, 2)
    if state.hidden then patches = patches * (1 - state.hidden) + state.token * state.hidden end
    local n, _, width = table.unpack(patches.shape)
    x = ty.concat({ self.cls_token:expand(n, 1, width), patches }, 1) + self.position_embeddings
    return x * state.all.gate
  end
end }

local layers = surgery.wrapper { name = "Gated", field = "_gated_layer", forward = function()
  return function(self, x)
    local state = self._gated_layer
    local open, attention = state.all.open, self.attention.attention
    local y = masked_norm(self.layernorm_before, x, open)
    local g = state.head:value():flatten()
    y = nn.attention(attention.query(y) * g, attention.key(y) * g, attention.value(y) * g, { heads = attention.heads })
    y = self.attention.output(y)
    x = x + (open and y * open or y)
    y = self.output(self.intermediate(masked_norm(self.layernorm_after, x, open)) * state.inner:value():flatten())
    return x + (open and y * open or y)
  end
end }

local norms = surgery.wrapper { name = "Gated", field = "_gated_norm", forward = function(base)
  return function(self, x)
    local open = self._gated_norm.all.open
    if not open then return base.forward(self, x) end
    return masked_norm({ eps = self.eps, weight = self.weight, bias = self.bias }, x, open)
  end
end }

-- Scores to begin with: how large what a unit writes is, against the others of its row.
local function begin(size)
  local mean = size:mean(1, true)
  return 2 + 0.5 * (size - mean) / ((size - mean):square():mean(1, true):sqrt() + 1e-12)
end

--- The size of what each unit has in the weights: embedding [1, e], and of each layer head [heads, d], inner [1, m].
---@param model Module
---@return table
function M.magnitudes(model)
  local p = M.parts("prune.vit_gates.magnitudes", model)
  return ty.no_grad(function()
    local function norm(w, dim) return w:detach():square():sum(dim):sqrt() end
    local found = { layers = {}, embedding = norm(p.vit.embeddings.patch_embeddings.projection.weight:flatten(1), 1)
      :reshape(1, -1) }
    for i, layer in ipairs(p.layers) do
      local a = layer.attention.attention
      found.embedding = found.embedding + (norm(layer.attention.output.dense.weight, 1)
        + norm(layer.output.dense.weight, 1)):reshape(1, -1)
      found.layers[i] = { head = (norm(a.value.weight, 1) * norm(layer.attention.output.dense.weight, 0)
        + norm(a.query.weight, 1) * norm(a.key.weight, 1)):reshape(p.heads, -1),
        inner = (norm(layer.intermediate.dense.weight, 1) * norm(layer.output.dense.weight, 0)):reshape(1, -1) }
    end
    return found
  end)
end

--- Puts gates onto a model, in place. ratios: the shares of each width that may stay. Returns the gates, { embedding,
-- layers = { { head, inner } }, list }, the model and the state that they share: `all`, whose refresh() must be called
-- before each pass.
---@param model Module
---@param ratios number[]
---@return table gates
function M.attach(model, ratios)
  local who = "prune.vit_gates.attach"
  local p, sizes = M.parts(who, model), M.magnitudes(model)
  local gates = { embedding = M.gate(begin(sizes.embedding), ratios), layers = {}, list = {}, all = {}, model = model }
  gates.list[1] = gates.embedding
  gates.state = { all = gates.all }
  embeddings:wrap(p.vit.embeddings, gates.state)
  norms:wrap(p.vit.layernorm, { all = gates.all })
  for i, layer in ipairs(p.layers) do
    local head, inner = M.gate(begin(sizes.layers[i].head), ratios), M.gate(begin(sizes.layers[i].inner), ratios)
    gates.layers[i] = { head = head, inner = inner }
    gates.list[#gates.list + 1], gates.list[#gates.list + 2] = head, inner
    layers:wrap(layer, { all = gates.all, head = head, inner = inner })
  end
  M.refresh(gates)
  return gates
end

--- Computes the embedding's gate anew, for one pass.
---@param gates table  of attach()
function M.refresh(gates)
  if type(gates) ~= "table" or type(gates.all) ~= "table" or not gates.embedding then
    fail("prune.vit_gates.refresh: gates: expected those of prune.vit_gates.attach, got %s", arguments.describe(gates))
  end
  local gate, open = gates.embedding:value()
  gates.all.gate = gate:flatten()
  gates.all.open = open:min():item() < 1 and open:flatten() or nil
end

--- Takes gates off a model; weights stay as they are. Returns the model.
---@param model Module
---@return Module
function M.detach(model)
  local p = M.parts("prune.vit_gates.detach", model)
  if embeddings:state(p.vit.embeddings) == nil then
    fail("prune.vit_gates.detach: model: expected one with gates, got %s", arguments.describe(model))
  end
  embeddings:unwrap(p.vit.embeddings)
  norms:unwrap(p.vit.layernorm)
  for _, layer in ipairs(p.layers) do layers:unwrap(layer) end
  return model
end

-- ---- cutting ----

-- Another weight and bias for a layer.
local function put(layer, weight, bias)
  local function like(t, old)
    t = t:to { dtype = old.dtype, device = old.device }:contiguous():clone()
    return old.requires_grad and t:requires_grad_() or t
  end
  surgery.exchange(layer, "weight", like(weight, layer.weight))
  if bias then surgery.exchange(layer, "bias", like(bias, layer.bias)) end
  if weight.ndim == 2 then
    rawset(layer, "in_features", weight.shape[2])
    rawset(layer, "out_features", weight.shape[1])
  end
end

--- Keeps units of a model, in place, with factors in the weights: units = { embedding, layers = { { head, inner } } }
-- of { at, gate }: at i64 [rows, kept], the units of each row; gate [rows, kept], what their gates are (nil: 1). The
-- model computes what the gated one does with all other units at 0.
---@param model Module
---@param units table
---@return Module model
function M.cut(model, units)
  local who = "prune.vit_gates.cut"
  local p = M.parts(who, model)
  expect(who, "units", units, "a table")
  local old = M.widths(model)
  ty.no_grad(function()
    local e = units.embedding.at:flatten()
    local function ones(at) return ty.ones(at.shape) end
    local ge = (units.embedding.gate or ones(units.embedding.at)):flatten()
    local at = p.vit.embeddings
    local projection = at.patch_embeddings.projection
    put(projection, projection.weight:detach():index_select(0, e) * ge:reshape(-1, 1, 1, 1),
      projection.bias:detach():index_select(0, e) * ge)
    rawset(projection, "out_channels", e:numel())
    for _, name in ipairs { "cls_token", "position_embeddings" } do
      local t = at[name]:detach():index_select(2, e) * ge
      surgery.exchange(at, name, at[name].requires_grad and t:contiguous():requires_grad_() or t:contiguous())
    end
    local function norm(layer)
      put(layer, layer.weight:detach():index_select(0, e), layer.bias:detach():index_select(0, e))
      rawset(layer, "normalized_shape", { e:numel() })
    end
    for i, layer in ipairs(p.layers) do
      local a, width = layer.attention.attention, old.layers[i].head
      local head, inner = units.layers[i].head, units.layers[i].inner
      local rows = (head.at + (ty.arange(p.heads) * width):unsqueeze(1)):flatten()
      local g = (head.gate or ones(head.at)):flatten()
      norm(layer.layernorm_before)
      norm(layer.layernorm_after)
      local d = head.at.shape[2]
      for _, name in ipairs { "query", "key", "value" } do
        -- Scores stay divided by the root of the width that heads had.
        local f = name == "query" and g * math.sqrt(d / width) or g
        local l = a[name]
        put(l, l.weight:detach():index_select(0, rows):index_select(1, e) * f:unsqueeze(1),
          l.bias and l.bias:detach():index_select(0, rows) * f)
      end
      local o = layer.attention.output.dense
      put(o, o.weight:detach():index_select(0, e):index_select(1, rows), o.bias:detach():index_select(0, e))
      local m = inner.at:flatten()
      local up, down = layer.intermediate.dense, layer.output.dense
      put(up, up.weight:detach():index_select(0, m):index_select(1, e), up.bias:detach():index_select(0, m))
      put(down, down.weight:detach():index_select(0, e):index_select(1, m)
        * (inner.gate or ones(inner.at)):flatten():unsqueeze(0), down.bias:detach():index_select(0, e))
    end
    norm(p.vit.layernorm)
    put(model.classifier, model.classifier.weight:detach():index_select(1, e))
  end)
  ty.core.program.renew()
  return model
end

return M
