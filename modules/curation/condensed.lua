--- Small sets that stand for a large one: how good one is, by networks that are trained from their beginning on it
-- alone, and those that cost nothing, samples drawn at random and samples chosen by herding. What methods that distil
-- data sets (trajectory, characteristic) share.
--
--     local accuracy = condensed.accuracy(function() return models.ConvNet { ... } end, small, test, { networks = 3 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local labelled = require "tycho.curation.labelled"

local M = {}

--- The mean cross entropy of logits and labels: of classes i64 [n], or shares of each class [n, classes].
---@param logits Tensor
---@param label Tensor
---@return Tensor
function M.loss(logits, label)
  local who = "curation.condensed.loss"
  arguments.expect(who, "logits", logits, "a tensor")
  arguments.expect(who, "label", label, "a tensor")
  if label.dtype == "i64" then return ty.nn.cross_entropy(logits, label) end
  if logits.ndim ~= 2 or label.ndim ~= 2 or label.shape[2] ~= logits.shape[2] then
    arguments.fail("%s: label: expected classes i64 [n] or shares like the logits, got %s beside %s", who,
      arguments.describe(label), arguments.describe(logits))
  end
  return -(label * logits:log_softmax(-1)):sum(-1):mean()
end

--- Trains a network with SGD, Nesterov's momentum of 0.9 and a rate that falls as a cosine. options: steps (200), lr
-- (0.05), batch_size (256), weight_decay (5e-4).
---@param model Module
---@param set { image: Tensor, label: Tensor }  labels as loss() takes them
---@param options? { steps?: integer, lr?: number, batch_size?: integer, weight_decay?: number }
---@return Module model  in evaluation mode
function M.train(model, set, options)
  local who = "curation.condensed.train"
  arguments.expect(who, "model", model, "a module")
  local image, label, n = labelled(who, "set", set, true)
  local o = arguments.read(who, options, { steps = 200, lr = 0.05, batch_size = 256, weight_decay = 5e-4 },
    { steps = "an integer >= 0", lr = "a number > 0", batch_size = "an integer > 0", weight_decay = "a number >= 0" })
  local draw = n > o.batch_size
    and ty.data.draws(ty.data.TensorDataset { image = image, label = label }, o.batch_size) or nil
  local optimizer = ty.optim.SGD(model:parameters(), { lr = o.lr, momentum = 0.9, nesterov = true,
    weight_decay = o.weight_decay, schedule = ty.optim.cosine { steps = math.max(1, o.steps) } })
  model:train()
  ty.train.minimize(optimizer, o.steps, function()
    local batch = draw and draw() or set
    return M.loss(model(batch.image), batch.label)
  end)
  return model:eval()
end

-- The share of a set that a model says right.
local function share(model, image, label)
  return ty.no_grad(function()
    local right, n = 0, label.shape[1]
    for start = 0, n - 1, 512 do
      ty.scope(function()
        local count = math.min(512, n - start)
        right = right + model(image:narrow(0, start, count)):argmax(1):eq(label:narrow(0, start, count)):to("f64")
          :sum():item()
      end)
    end
    return right / n
  end)
end

--- How good a set is to learn from: the mean over networks, each made anew and trained on it alone, of the share of a
-- test that it says right; and the shares. options: networks (3), rates ({ 0.05 }: of train(), the best of which on
-- `choose`, a set as test is, counts; where there are several), choose, and those of train() but lr.
---@param make fun(): Module
---@param set { image: Tensor, label: Tensor }
---@param test { image: Tensor, label: Tensor }
---@param options? table
---@return number mean
---@return number[] shares
function M.accuracy(make, set, test, options)
  local who = "curation.condensed.accuracy"
  arguments.expect(who, "make", make, "a function")
  labelled(who, "set", set, true)
  local image, label = labelled(who, "test", test)
  local o = arguments.read(who, options, { networks = 3, rates = { 0.05 }, choose = arguments.none, steps = 200,
    batch_size = 256, weight_decay = 5e-4 }, { networks = "an integer >= 1", rates = "a list of numbers > 0",
    choose = "a table", steps = "an integer >= 0", batch_size = "an integer > 0", weight_decay = "a number >= 0" })
  local function fit(rate)
    local model = make()
    arguments.expect(who, "what make gives", model, "a module")
    return M.train(model, set, { steps = o.steps, lr = rate, batch_size = o.batch_size,
      weight_decay = o.weight_decay })
  end
  local rate = o.rates[1]
  if #o.rates ~= 1 then
    if #o.rates == 0 or not o.choose then
      arguments.fail("%s: rates: expected one, or several and a set `choose`, got %d", who, #o.rates)
    end
    local seen, truth = labelled(who, "choose", o.choose)
    rate = select(3, ty.stats.best(o.rates, function(one) return one, share(fit(one), seen, truth) end))
  end
  local shares = {}
  for i = 1, o.networks do shares[i] = share(fit(rate), image, label) end
  return ty.stats.mean(shares), shares
end

-- Positions of the samples of each class, by class from 0.
local function by_class(label)
  local lists, most = {}, -1
  for i, class in ipairs(label:tolist()) do
    lists[class] = lists[class] or {}
    table.insert(lists[class], i - 1)
    most = math.max(most, class)
  end
  return lists, most
end

local function taken(image, label, positions)
  local at = ty.tensor(positions, { dtype = "i64" }):to { device = image.device }
  return { image = image:index_select(0, at), label = label:index_select(0, at) }
end

-- A set with pick(positions of a class, class) of each class, which returns a list of positions.
local function of_each(who, image, label, count, pick)
  local lists, most = by_class(label)
  local positions = {}
  for class = 0, most do
    local list = lists[class] or {}
    if #list < count then
      arguments.fail("%s: count: expected at most the %d samples of class %d, got %d", who, #list, class, count)
    end
    for _, place in ipairs(pick(list, class)) do positions[#positions + 1] = place end
  end
  return taken(image, label, positions)
end

--- A set with so many samples of each class, drawn at random; classes follow each other.
---@param set { image: Tensor, label: Tensor }
---@param count integer
---@return { image: Tensor, label: Tensor }
function M.random(set, count)
  local who = "curation.condensed.random"
  local image, label = labelled(who, "set", set)
  arguments.expect(who, "count", count, "an integer >= 1")
  return of_each(who, image, label, count, function(list)
    local order, picked = ty.randperm(#list):tolist(), {}
    for k = 1, count do picked[k] = list[order[k] + 1] end
    return picked
  end)
end

--- A set with so many samples of each class, chosen one by one so that the mean of their features comes as near as it
-- can to that of all of the class. Welling 2009, "Herding Dynamical Weights to Learn".
---@param set { image: Tensor, label: Tensor }
---@param features Tensor  [n, d]
---@param count integer
---@return { image: Tensor, label: Tensor }
function M.herding(set, features, count)
  local who = "curation.condensed.herding"
  local image, label, n = labelled(who, "set", set)
  arguments.expect(who, "features", features, "a tensor")
  arguments.expect(who, "count", count, "an integer >= 1")
  if features.ndim ~= 2 or features.shape[1] ~= n or not features:is_floating_point() then
    arguments.fail("%s: features: expected floats [%d, d], got %s", who, n, arguments.describe(features))
  end
  return of_each(who, image, label, count, function(list)
    return ty.no_grad(function()
      local x = features:index_select(0, ty.tensor(list, { dtype = "i64" }):to { device = features.device }):to "f64"
      local mean, sum, picked, used = x:mean { 0 }, ty.zeros_like(x:select(0, 0)), {}, {}
      for k = 1, count do
        local far = ((sum + x) / k - mean):square():sum({ 1 }):tolist()
        local best
        for i, distance in ipairs(far) do
          if not used[i] and (not best or distance < far[best]) then best = i end
        end
        used[best], picked[k] = true, list[best]
        sum = sum + x:select(0, best - 1)
      end
      return picked
    end)
  end)
end

return M
