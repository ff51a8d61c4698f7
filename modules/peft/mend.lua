--- MEND: networks that turn the gradient of one example into an edit of a model. Mitchell et al. 2022, "Fast Model
-- Editing at Scale".
--
--     local editor = peft.mend.editor(model, { layers = { "layers.5.mlp.up_proj", "layers.5.mlp.down_proj" } })
--     -- training: an edit, the same said otherwise, and what must not change
--     local loss = editor:objective { edit = said, check = otherwise, keep = unrelated }
--     optimizer:step(loss)
--     -- editing
--     editor:edit(function() return answer_loss(model, "The city of Baldor was", " Hebron") end)
--     editor:undo()                                   -- the bytes of before
--
-- The gradient of a linear layer's weight over the rows of a batch is the sum of delta x', of the row's input x and the
-- gradient delta of its output. An editor network maps each pair to another, (x, delta) -> (x~, delta~), by low-rank
-- layers that begin as the identity, on numbers normalised over what training has seen. One network serves all layers
-- whose weights have the same shape; each layer scales and shifts within it. The edited weight is
-- W - alpha sum delta~ x~', alpha a trained number of each layer.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn, surgery = ty.nn, ty.nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- factors of gradients ----

--- The factors of linear layers' gradients: what fn computes is differentiated once, and every layer called on the way
-- gives the rows of its inputs and of its outputs' gradients. Their product, deltas' x, is the gradient of the weight
-- (of a layer with weights [outputs, inputs]). No gradient of a weight is computed for that; rows that the loss does
-- not depend on are left out.
---@param layers Module[]  linear layers
---@param fn fun(): Tensor a loss
---@return {inputs: Tensor, deltas: Tensor}[] factors  for each layer [rows, inputs] and [rows, outputs]
---@return number loss
function M.factors(layers, fn)
  local who = "peft.mend.factors"
  expect(who, "layers", layers, "a list")
  expect(who, "fn", fn, "a function")
  for i, layer in ipairs(layers) do
    if not arguments.is_module(layer) or surgery.kind(layer) ~= "linear" then
      fail("%s: layers: expected linear layers, got %s at %d", who, arguments.describe(layer), i)
    end
  end
  local calls, remove = {}, {}
  local ok, problem = pcall(function()
    for i, layer in ipairs(layers) do
      calls[i] = {}
      remove[#remove + 1] = layer:register_forward_hook(function(_, outputs, input)
        local output = outputs[1]
        -- A leaf beside the output: its gradient is the output's, and nothing else needs one.
        local probe = ty.zeros_like(output:detach()):requires_grad_()
        table.insert(calls[i], { input = input:detach(), probe = probe })
        return output + probe
      end)
    end
    return expect(who, "fn()", ty.enable_grad(fn), "a tensor")
  end)
  for _, off in ipairs(remove) do off() end
  if not ok then error(problem, 0) end
  local probes = {}
  for _, list in ipairs(calls) do for _, call in ipairs(list) do probes[#probes + 1] = call.probe end end
  local grads = #probes > 0 and ty.grad(problem, probes, { allow_unused = true }) or {}
  local at, found = 0, {}
  ty.no_grad(function()
    for i, list in ipairs(calls) do
      local inputs, deltas = {}, {}
      for _, call in ipairs(list) do
        at = at + 1
        if grads[at] then
          local x, d = call.input:flatten(0, -2), grads[at]:flatten(0, -2)
          local rows = (d:abs():max(-1):gt(0)):nonzero():reshape(-1)
          inputs[#inputs + 1], deltas[#deltas + 1] = x:index_select(0, rows), d:index_select(0, rows)
        end
      end
      if not inputs[1] then
        fail("%s: layers: the loss does not depend on number %d", who, i)
      end
      found[i] = { inputs = ty.concat(inputs, 0), deltas = ty.concat(deltas, 0) }
    end
  end)
  return found, problem:item()
end

-- ---- the networks ----

-- A layer x + act(scale (U V x + b) + shift), the identity at its start, with scale and shift of one of `count` layers.
local Step = nn.module "MendStep"

function Step:init(width, rank, count, rectified)
  self.u = nn.Parameter(ty.zeros(width, rank))
  self.v = nn.Parameter(ty.randn(rank, width) * width ^ -0.5)
  self.bias = nn.Parameter(ty.zeros(width))
  self.scale = nn.Parameter(ty.ones(count, width))
  self.shift = nn.Parameter(ty.zeros(count, width))
  self.rectified = rectified
end

function Step:forward(x, which)
  local inner = ty.linear(ty.linear(x, self.v), self.u, self.bias)
  inner = inner * self.scale:select(0, which) + self.shift:select(0, which)
  if self.rectified then inner = inner:relu() end
  return x + inner
end

-- The network of a shape: of rows [x, delta], normalised by what training has seen.
local Network = nn.module "MendNetwork"

function Network:init(inputs, outputs, count, o)
  self.steps = nn.ModuleList {}
  for i = 1, o.hidden + 1 do
    self.steps[i] = Step(inputs + outputs, math.min(o.rank, inputs + outputs), count, i <= o.hidden)
  end
  self.inputs, self.outputs, self.normalise = inputs, outputs, o.normalise
  -- By layer: rows seen, sums and sums of squares of their numbers.
  self:buffer("seen", ty.zeros({ count }, { dtype = "f64" }))
  self:buffer("sum", ty.zeros({ count, inputs + outputs }, { dtype = "f64" }))
  self:buffer("squares", ty.zeros({ count, inputs + outputs }, { dtype = "f64" }))
end

function Network:forward(x, delta, which)
  local both = ty.concat({ x, delta }, -1)
  if self.normalise then
    ty.no_grad(function()
      if self.training then
        self.seen:select(0, which):add_(both.shape[1])
        self.sum:select(0, which):add_(both:to("f64"):sum(0))
        self.squares:select(0, which):add_(both:to("f64"):square():sum(0))
      end
      local rows = self.seen:select(0, which):item()
      if rows > 1 then
        local mean = self.sum:select(0, which) / rows
        local variance = (self.squares:select(0, which) / rows - mean:square()) * (rows / (rows - 1))
        both = (both - mean:to(both.dtype)) / (variance:clamp(0):sqrt():to(both.dtype) + 1e-7)
      end
    end)
  end
  for _, step in ipairs(self.steps) do both = step(both, which) end
  return both:narrow(-1, 0, self.inputs), both:narrow(-1, self.inputs, self.outputs)
end

--- Editor networks of a model, as a module of their own, which is saved and moved as others. The model's parameters
-- are not among its own.
---@class MendEditor: Module
local Editor = nn.module "MendEditor"

function Editor:init(model, options)
  local who = "peft.mend.editor"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { layers = arguments.none, rank = 128, hidden = 1, rate = 1e-4,
    normalise = true }, { rank = "an integer >= 1", hidden = "an integer >= 0", rate = "a finite number" })
  if o.layers == nil then fail("%s: layers: expected a pattern, a list of names or a function, got nil", who) end
  local list = surgery.find(who, model, { targets = o.layers })
  if #list == 0 then fail("peft.mend.editor: layers: expected at least one linear layer, got none") end
  rawset(self, "_model", { model })
  rawset(self, "_layers", list)
  rawset(self, "_edits", {})
  local shapes, order = {}, {}
  for _, layer in ipairs(list) do
    local inputs, outputs = surgery.sizes(layer.module)
    if layer.module.fan_in_fan_out then
      fail("peft.mend.editor: layers: expected weights [outputs, inputs], got %s with [inputs, outputs]", layer.name)
    end
    local key = ("%dx%d"):format(outputs, inputs)
    if not shapes[key] then
      shapes[key] = { inputs = inputs, outputs = outputs, count = 0 }
      order[#order + 1] = key
    end
    layer.shape, layer.which = key, shapes[key].count
    shapes[key].count = shapes[key].count + 1
  end
  self.networks = nn.ModuleDict {}
  for _, key in ipairs(order) do
    local shape = shapes[key]
    self.networks[key] = Network(shape.inputs, shape.outputs, shape.count, o)
  end
  self.rates = nn.Parameter(ty.full({ #list }, o.rate))
end

--- The changes of the layers' weights for an edit: fn computes the loss of what is to be, with the model's own weights.
-- Derivatives go to the editor's parameters, not through the factors.
---@param fn fun(): Tensor
---@return table<string, Tensor> changes  by the names of the weights, shaped like them: W~ = W + change
---@return number loss
function Editor:changes(fn)
  local layers = {}
  for i, layer in ipairs(self._layers) do layers[i] = layer.module end
  local factors, loss = M.factors(layers, fn)
  local changes = {}
  for i, layer in ipairs(self._layers) do
    local x, delta = self.networks[layer.shape](factors[i].inputs, factors[i].deltas, layer.which)
    changes[layer.name .. ".weight"] = delta:transpose(0, 1):matmul(x) * -self.rates:select(0, i - 1)
  end
  return changes, loss
end

--- fn(...) with the model's weights changed for as long as it runs; derivatives go through the changes.
---@param changes table<string, Tensor>  as changes() returns them
---@param fn function
---@return any ...
function Editor:with(changes, fn, ...)
  expect("MendEditor:with", "changes", changes, "a table")
  expect("MendEditor:with", "fn", fn, "a function")
  local places = {}
  for _, layer in ipairs(self._layers) do
    local change = changes[layer.name .. ".weight"]
    if change then
      local own = rawget(layer.module, "weight")
      places[#places + 1] = { layer.module, own }
      rawset(layer.module, "weight", own:detach() + change)
    end
  end
  local result = table.pack(pcall(fn, ...))
  for _, place in ipairs(places) do rawset(place[1], "weight", place[2]) end
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

--- The loss that an editor is trained by: share times the loss of the edit said otherwise, plus by how much the model's
-- distributions on unrelated text change, KL(before, after), nats a row. Functions that run the model:
--   edit   the loss of the edit
--   check  the loss of the same said otherwise (edit again, unless given)
--   keep   logits [.., classes] on what must not change
--   share  0.1
---@param options {edit: fun(): Tensor, check?: fun(): Tensor, keep: fun(): Tensor, share?: number}
---@return Tensor loss
---@return {edit: number, check: number, change: number} parts
function Editor:objective(options)
  local who = "MendEditor:objective"
  local o = arguments.read(who, options, { edit = arguments.none, check = arguments.none, keep = arguments.none,
    share = 0.1 }, { edit = "a function", check = "a function", keep = "a function", share = "a finite number >= 0" })
  expect(who, "edit", o.edit, "a function")
  expect(who, "keep", o.keep, "a function")
  local before = ty.no_grad(function()
    return expect(who, "keep()", o.keep(), "a tensor"):detach():flatten(0, -2):log_softmax(-1)
  end)
  local changes, said = self:changes(o.edit)
  local loss, change = self:with(changes, function()
    local check = expect(who, "check()", (o.check or o.edit)(), "a tensor")
    local after = o.keep():flatten(0, -2):log_softmax(-1)
    return check, (before:exp() * (before - after)):sum(-1):mean()
  end)
  return loss * o.share + change, { edit = said, check = loss:item(), change = change:item() }
end

--- Edits the model: its weights are changed from here on. Edits may follow one another.
---@param fn fun(): Tensor  the loss of the edit
---@return number loss  before the edit
function Editor:edit(fn)
  expect("MendEditor:edit", "fn", fn, "a function")
  local was_training = self.training
  self:eval()
  local ok, changes, loss = pcall(function()
    local list, value = self:changes(fn)
    return list, value
  end)
  self:train(was_training)
  if not ok then error(changes, 0) end
  local saved = {}
  ty.no_grad(function()
    for i, layer in ipairs(self._layers) do
      local weight = layer.module.weight:detach()
      saved[i] = ty.keep(weight:clone())
      weight:add_(changes[layer.name .. ".weight"]:detach())
    end
  end)
  table.insert(self._edits, saved)
  ty.core.program.renew()
  return loss
end

--- Takes the last edit back: the weights are those of before it, to the last bit.
---@return integer left  edits that are still there
function Editor:undo()
  local saved = table.remove(self._edits)
  if not saved then fail "MendEditor:undo: there is no edit to take back" end
  ty.no_grad(function()
    for i, layer in ipairs(self._layers) do
      layer.module.weight:detach():copy_(saved[i])
      saved[i]:free()
    end
  end)
  ty.core.program.renew()
  return #self._edits
end

--- The editor's parameters in two groups for an optimizer, as the alphas want a rate of their own, about as large as
-- they are.
---@param rate number         of the alphas
---@return table[] groups
function Editor:groups(rate)
  expect("MendEditor:groups", "rate", rate, "a finite number >= 0")
  return { { params = self.networks:parameters() }, { params = { self.rates }, lr = rate } }
end

--- Makes an editor for linear layers of a model, whose own parameters it does not train. options: layers (a pattern of
-- names, a list of names and ends of names, or a function, as nn.surgery.find has them), rank (128: of the networks'
-- layers), hidden (1: layers of a network before its last), rate (1e-4: alpha at the start), normalise (true). With
-- normalise false a new editor is one step of SGD at that rate.
---@param model Module
---@param options table
---@return MendEditor
function M.editor(model, options) return Editor(model, options) end

return M
