--- What more data is worth: networks that learn from growing sets of noisy labels, each carried over to a task with
-- few labels, and the law that its accuracy follows. Sun et al. 2017, "Revisiting Unreasonable Effectiveness of Data in
-- Deep Learning Era" (arXiv 1707.02968): performance grows with the logarithm of the data.
--
--     local network = scaling.pretrain(models.ResNet { ... }, noisy, { steps = 500 })
--     accuracy[k] = scaling.transfer(network, few, test)
--     print(scaling.log_law(sizes, accuracy).r2)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local labelled = require "tycho.curation.labelled"

local nn = ty.nn
local M = {}

--- The line through values against the logarithm of sizes by least squares, and how much of what varies it explains.
-- per_tenfold: what ten times the data adds; at_one: the value at a size of 1; r2: the coefficient of determination;
-- at: the value that the law gives for a size.
---@param sizes number[]  > 0
---@param values number[]
---@return { per_tenfold: number, at_one: number, r2: number, at: fun(size: number): number }
function M.log_law(sizes, values)
  local who = "curation.scaling.log_law"
  arguments.expect(who, "sizes", sizes, "a list of finite numbers > 0")
  arguments.expect(who, "values", values, "a list of finite numbers")
  if #sizes ~= #values or #sizes < 3 then
    arguments.fail("%s: expected as many values as sizes, three at least, got %d and %d", who, #values, #sizes)
  end
  local points = {}
  for i, size in ipairs(sizes) do points[i] = { math.log(size, 10), values[i] } end
  local slope = ty.stats.slope(points)
  if slope ~= slope then arguments.fail("%s: sizes: expected some that differ, got %s alone", who, sizes[1]) end
  local middle, x = ty.stats.mean(values), 0.0
  for _, point in ipairs(points) do x = x + point[1] / #points end
  local law = { per_tenfold = slope, at_one = middle - slope * x }
  function law.at(size)
    return law.at_one + slope * math.log(arguments.expect("law.at", "size", size, "a number > 0"), 10)
  end
  local left, all = 0.0, 0.0
  for i, value in ipairs(values) do left, all = left + (value - law.at(sizes[i])) ^ 2, all + (value - middle) ^ 2 end
  law.r2 = all > 0 and 1 - left / all or 1.0
  return law
end

--- A set with wrong labels: each sample keeps its own or, with a chance of `share`, has one of the other classes'.
---@param set { image: Tensor, label: Tensor }
---@param share number
---@param classes integer
---@return { image: Tensor, label: Tensor }
function M.mislabelled(set, share, classes)
  local who = "curation.scaling.mislabelled"
  local image, label, n = labelled(who, "set", set)
  arguments.expect(who, "share", share, "a number in [0, 1]")
  arguments.expect(who, "classes", classes, "an integer >= 2")
  local wrong = (label + ty.randint(1, classes, { n }):to { device = label.device }) % classes
  return { image = image, label = ty.where(ty.rand(n):to({ device = label.device }):lt(share), wrong, label) }
end

--- The first samples of a set.
---@param set { image: Tensor, label: Tensor }
---@param count integer
---@return { image: Tensor, label: Tensor }
function M.first(set, count)
  local who = "curation.scaling.first"
  local image, label, n = labelled(who, "set", set)
  arguments.expect(who, "count", count, ("an integer in [1, %d]"):format(n))
  return { image = image:narrow(0, 0, count), label = label:narrow(0, 0, count) }
end

-- Steps of AdamW with a one-cycle rate on the cross entropy of batches of a set.
local function fit(model, image, label, o, weight_decay)
  local data = ty.data.TensorDataset { image = image, label = label }
  local draw = ty.data.draws(data, math.min(o.batch_size, #data))
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = o.lr, weight_decay = weight_decay,
    schedule = ty.optim.one_cycle { steps = math.max(1, o.steps) } })
  model:train()
  ty.train.minimize(optimizer, o.steps, function()
    local batch = draw()
    local x = batch.image
    if o.prepare then x = o.prepare(x) end
    return nn.cross_entropy(model(x), batch.label)
  end)
  return model:eval()
end

local kinds = { steps = "an integer >= 0", lr = "a number > 0", batch_size = "an integer > 0", prepare = "a function" }

--- Trains a classifier on a set whose labels may be wrong. Batches are drawn by ty.manual_seed's numbers, each sample
-- once before any comes again. options: steps (500), lr (3e-3), batch_size (64), prepare (a function of a batch's
-- images: to floats, augmented).
---@param model Module
---@param set { image: Tensor, label: Tensor }
---@param options? { steps?: integer, lr?: number, batch_size?: integer, prepare?: fun(x: Tensor): Tensor }
---@return Module model
function M.pretrain(model, set, options)
  local who = "curation.scaling.pretrain"
  arguments.expect(who, "model", model, "a module")
  local image, label = labelled(who, "set", set)
  local o = arguments.read(who, options, { steps = 500, lr = 3e-3, batch_size = 64, prepare = arguments.none }, kinds)
  return fit(model, image, label, o, 0.01)
end

--- Carries a network over to another task: a copy with a new head learns from few samples, all of it (tune: true) or
-- the head alone. Returns the share of the test's samples whose label it predicts, and the copy. options: head ("fc",
-- the name of the layer that is replaced), classes (one more than the largest label), steps (100), lr (1e-3),
-- batch_size (64), tune (true), prepare (of images).
---@param model Module
---@param few { image: Tensor, label: Tensor }
---@param test { image: Tensor, label: Tensor }
---@param options? table
---@return number accuracy
---@return Module copy
function M.transfer(model, few, test, options)
  local who = "curation.scaling.transfer"
  arguments.expect(who, "model", model, "a module")
  local image, label = labelled(who, "few", few)
  local held_out, truth, n = labelled(who, "test", test)
  local o = arguments.read(who, options, { head = "fc", classes = label:max():item() + 1, steps = 100, lr = 1e-3,
    batch_size = 64, tune = true, prepare = arguments.none }, { head = "a string", classes = "an integer >= 2",
    steps = kinds.steps, lr = kinds.lr, batch_size = kinds.batch_size, prepare = kinds.prepare })
  local copy = model:clone()
  local head = copy:get(o.head)
  if not arguments.is_module(head) or not ty.is_tensor(head.weight) or head.weight.ndim ~= 2 then
    arguments.fail('%s: head: expected the name of a linear layer, got "%s"', who, o.head)
  end
  copy:requires_grad_(o.tune)
  local weight = head.weight
  copy:set(o.head, nn.with_defaults({ device = weight.device, dtype = weight.dtype }, function()
    return nn.Linear(weight.shape[2], o.classes)
  end))
  if o.tune then
    fit(copy, image, label, o, 0.01)
  else
    -- What is before the head is computed once.
    local function features(x)
      local seen
      local hook = copy:get(o.head):register_forward_pre_hook(function(_, inputs) seen = inputs end)
      local all = ty.no_grad(nn.in_parts, x, 256, function(part)
        copy(o.prepare and o.prepare(part) or part)
        return ty.is_tensor(seen) and seen or seen[1]
      end)
      hook:remove()
      return all
    end
    copy:eval()
    local own = {}
    for key, value in pairs(o) do own[key] = value end
    own.prepare = nil
    fit(copy:get(o.head), features(image), label, own, 0.01)
  end
  local right = 0
  ty.no_grad(function()
    for start = 0, n - 1, 256 do
      ty.scope(function()
        local count = math.min(256, n - start)
        local part = held_out:narrow(0, start, count)
        local guess = copy(o.prepare and o.prepare(part) or part):argmax(1)
        right = right + guess:eq(truth:narrow(0, start, count)):to("f64"):sum():item()
      end)
    end
  end)
  return right / n, copy
end

return M
