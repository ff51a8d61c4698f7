--- How much a model's parameters matter to samples: the diagonal of the Fisher information, the mean over samples of
-- the squared gradient of each sample's own log-likelihood (Kirkpatrick et al. 2017, "Overcoming catastrophic
-- forgetting in neural networks"). Gradients of single samples are exact: ty.vmap maps one backward pass over them. The
-- square of a batch's mean gradient, which common code takes for it, is another number.
--
--     local importance = fisher.diagonal(model, { image = pictures, label = labels })   -- by name, as the parameters
local ty = require "tycho"
local arguments = require "tycho.arguments"
local labelled = require "tycho.curation.labelled"

local M = {}

local function cross_entropy(model, image, label) return ty.nn.cross_entropy(model(image), label) end

-- Names and parameters of a model that are trained.
local function parameters_of(who, model)
  local names, list = {}, {}
  for name, parameter in model:named_parameters() do
    if parameter.requires_grad then names[#names + 1], list[#list + 1] = name, parameter end
  end
  if #list == 0 then arguments.fail("%s: model: expected one with parameters that are trained, got none", who) end
  return names, list
end

-- Sums over samples of squared gradients, one for each of `list`; a sample is a batch of one.
local function squares(model, list, image, label, loss)
  local function one(x, y)
    local grads = ty.grad(loss(model, x:unsqueeze(0), y:unsqueeze(0)), list, { allow_unused = true })
    for k, parameter in ipairs(list) do
      grads[k] = grads[k] and grads[k]:square() or ty.zeros_like(parameter:detach())
    end
    return table.unpack(grads, 1, #list)
  end
  local rows = table.pack(pcall(ty.vmap(one), image, label))
  if rows[1] then
    for k = 1, #list do rows[k] = rows[k + 1]:sum { 0 } end
    return rows
  end
  if not tostring(rows[2]):find("vmap", 1, true) then error(rows[2], 0) end
  local sums -- an op without a rule for ty.vmap: one sample after the other
  for i = 0, label.shape[1] - 1 do
    local own = { one(image:select(0, i), label:select(0, i)) }
    for k, square in ipairs(own) do own[k] = sums and sums[k] + square or square end
    sums = own
  end
  return sums
end

--- The diagonal of the Fisher information of samples: by names of parameters, shaped as they are, the mean over samples
-- of the squared gradient of a sample's loss. The model is in evaluation mode meanwhile, so that norms do not mix
-- samples. options: part (64: samples at a time), loss (a function of model, inputs and labels of a batch of one: cross
-- entropy).
---@param model Module
---@param set { image: Tensor, label: Tensor }  label i64 [n]
---@param options? { part?: integer, loss?: fun(model: Module, image: Tensor, label: Tensor): Tensor }
---@return table<string, Tensor>
function M.diagonal(model, set, options)
  local who = "curation.fisher.diagonal"
  arguments.expect(who, "model", model, "a module")
  local image, label, n = labelled(who, "set", set)
  local o = arguments.read(who, options, { part = 64, loss = cross_entropy },
    { part = "an integer > 0", loss = "a function" })
  local names, list = parameters_of(who, model)
  local training, result, totals = model.training, {}, {}
  for k, parameter in ipairs(list) do totals[k] = ty.zeros_like(parameter:detach()) end
  model:eval()
  local ok, problem = pcall(function()
    for start = 0, n - 1, o.part do
      ty.scope(function()
        local count = math.min(o.part, n - start)
        local sums = squares(model, list, image:narrow(0, start, count), label:narrow(0, start, count), o.loss)
        for k, total in ipairs(totals) do total:add_(sums[k]) end
      end)
    end
  end)
  model:train(training)
  if not ok then arguments.raise(problem) end
  for k, name in ipairs(names) do result[name] = totals[k] / n end
  return result
end

return M
