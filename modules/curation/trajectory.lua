--- Distilling a data set by matching trajectories: pictures by which some steps of SGD lead a network from where one
-- that saw real data was to where that one came. Cazenavette et al. 2022, "Dataset Distillation by Matching Training
-- Trajectories" (MTT); Cui et al. 2023, "Scaling Up Dataset Distillation to ImageNet-1K with Constant Memory" (TESLA,
-- arXiv 2211.10586) and its reference code.
--
-- From w_0 go T steps w_{i+1} = w_i - r g_i, with g_i the gradient of the loss of pictures x_i at w_i; the loss is L =
-- |w_T - w*|^2 / |w_0 - w*|^2. Written out, L is a sum of terms of single g_i, so that dL/dx_i = -r d(p . g_i)/dx_i,
-- for which the graph of step i alone is needed, where p is dL/dw_T. TESLA stops there: with w_i held fixed that is
-- exact, but w_i moves with the pictures of the steps before. What moves with it goes back step by step: p_i = p_{i+1}
-- - r d(p_{i+1} . g_i)/dw_i, and dL/dx_i = -r d(p_{i+1} . g_i)/dx_i is the gradient of the whole unrolled graph,
-- exactly, with the graph of one step at a time. Weights of the steps are found again from a few snapshots (Griewank
-- and Walther 2000, "Revolve"), so that memory does not grow with T.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local condensed = require "tycho.curation.condensed"
local labelled = require "tycho.curation.labelled"

local M = {}

-- ---- weights as lists ----

local function names_of(model)
  local names = {}
  for name in model:named_parameters() do names[#names + 1] = name end
  return names
end

local function copies(list)
  local result = {}
  for k, w in ipairs(list) do result[k] = w:detach():clone() end
  return result
end

local function squares(a, b)
  local sum = 0
  for k, w in ipairs(a) do sum = sum + (w - b[k]):square():sum() end
  return sum
end

local function call(model, names, weights, image)
  local named = {}
  for k, name in ipairs(names) do named[name] = weights[k] end
  return ty.functional_call(model, named, image)
end

local function check_weights(who, what, model, list)
  arguments.expect(who, what, list, "a list")
  local k = 0
  for name, parameter in model:named_parameters() do
    k = k + 1
    local w = list[k]
    if not ty.is_tensor(w) or table.concat(w.shape, ",") ~= table.concat(parameter.shape, ",") then
      arguments.fail("%s: %s: expected a tensor [%s] for %s, got %s", who, what, table.concat(parameter.shape, ", "),
        name, arguments.describe(w))
    end
  end
end

--- A trajectory: the weights of a model that is trained on a set by plain SGD, lists of tensors in the order of its
-- parameters, at first and after each epoch. options: epochs (20), lr (0.05), batch_size (128).
---@param model Module
---@param set { image: Tensor, label: Tensor }
---@param options? { epochs?: integer, lr?: number, batch_size?: integer }
---@return Tensor[][]
function M.expert(model, set, options)
  local who = "curation.trajectory.expert"
  arguments.expect(who, "model", model, "a module")
  local image, label, n = labelled(who, "set", set)
  local o = arguments.read(who, options, { epochs = 20, lr = 0.05, batch_size = 128 },
    { epochs = "an integer >= 1", lr = "a number > 0", batch_size = "an integer > 0" })
  local size = math.min(o.batch_size, n)
  local draw = ty.data.draws(ty.data.TensorDataset { image = image, label = label }, size, { drop_last = true })
  local optimizer = ty.optim.SGD(model:parameters(), { lr = o.lr })
  local path = { copies(model:parameters()) }
  model:train()
  for epoch = 1, o.epochs do
    ty.train.minimize(optimizer, n // size, function()
      local batch = draw()
      return condensed.loss(model(batch.image), batch.label)
    end)
    path[epoch + 1] = copies(model:parameters())
  end
  model:eval()
  return path
end

-- ---- gradients ----

-- What a step sees: pictures and labels at order[i], all without an order.
local function reader(who, model, set, order, steps)
  local image, label, n = labelled(who, "set", set, true)
  arguments.expect(who, "steps", steps, "an integer >= 1")
  arguments.expect(who, "order", order, "a list or nil")
  for i = 1, order and steps or 0 do
    local at = order[i]
    if not ty.is_tensor(at) or at.ndim ~= 1 or at.dtype ~= "i64" then
      arguments.fail("%s: order: expected positions i64 [k] for each of %d steps, got %s", who, steps,
        arguments.describe(at))
    end
  end
  local names = names_of(model)
  return image, function(weights, x, i)
    local at = order and order[i]
    return condensed.loss(call(model, names, weights, at and x:index_select(0, at) or x),
      at and label:index_select(0, at) or label)
  end, n
end

local function leaves(list)
  local result = {}
  for k, w in ipairs(list) do result[k] = w:detach():requires_grad_() end
  return result
end

local function dot(a, b)
  local sum
  for k, x in ipairs(a) do
    local one = (x * b[k]):sum()
    sum = sum and sum + one or one
  end
  return sum
end

-- One step of SGD, without a graph that stays.
local function step(loss, weights, image, rate, i)
  return ty.scope(function()
    local at = leaves(weights)
    local grads, result = ty.grad(loss(at, image, i), at), {}
    ty.no_grad(function()
      for k, w in ipairs(weights) do result[k] = w - grads[k] * rate end
    end)
    return result
  end)
end

local kinds = { lr = "a number > 0", steps = "an integer >= 1", snapshots = "an integer >= 1" }

local function begin(who, model, from, to, set, options, more)
  arguments.expect(who, "model", model, "a module")
  check_weights(who, "from", model, from)
  check_weights(who, "to", model, to)
  local defaults = { lr = 0.05, steps = 10, order = arguments.none }
  for key, value in pairs(more) do defaults[key] = value end
  local o = arguments.read(who, options, defaults, kinds)
  local image, loss = reader(who, model, set, o.order, o.steps)
  local scale = squares(from, to):item()
  if scale == 0 then arguments.fail("%s: to: expected weights that differ from those at first, got the same", who) end
  return o, image:detach(), loss, scale
end

--- The matching loss and its gradient by the pictures and by the rate, from the graph of all steps at once, whose
-- memory grows with them: MTT. options: lr (0.05), steps (10), order (a list of positions i64 for each step; all
-- pictures).
---@param model Module
---@param from Tensor[]  weights at first
---@param to Tensor[]    those that are to be reached
---@param set { image: Tensor, label: Tensor }  labels i64 [n] or shares [n, classes]
---@param options? { lr?: number, steps?: integer, order?: Tensor[] }
---@return number loss
---@return Tensor gradient  like the pictures
---@return number by_rate
function M.unrolled(model, from, to, set, options)
  local o, image, loss, scale = begin("curation.trajectory.unrolled", model, from, to, set, options, {})
  local by_rate, value
  local gradient = ty.scope(function()
    local x = image:clone():requires_grad_()
    local rate = ty.tensor(o.lr, { dtype = image.dtype, device = image.device }):requires_grad_()
    local weights = leaves(from)
    for i = 1, o.steps do
      local grads, after = ty.grad(loss(weights, x, i), weights, { create_graph = true }), {}
      for k, w in ipairs(weights) do after[k] = w - grads[k] * rate end
      weights = after
    end
    local total = squares(weights, to) / scale
    local grads = ty.grad(total, { x, rate })
    value, by_rate = total:item(), grads[2]:item()
    return grads[1]
  end)
  return value, gradient, by_rate
end

-- Steps that are walked again when l of them are gone through backwards with so many snapshots at a time, and where the
-- next snapshot is best made: by trying all places.
local known = {}
local function plan(l, free)
  if l <= 1 then return 0, nil end
  if free == 0 then return l * (l - 1) // 2, nil end
  local key = l * 1024 + free
  if not known[key] then
    local best, at
    for k = 1, l - 1 do
      local cost = k + (plan(l - k, free - 1)) + (plan(k, free))
      if not best or cost < best then best, at = cost, k end
    end
    known[key] = { best, at }
  end
  return known[key][1], known[key][2]
end

--- How many steps trajectory.constant walks again to go back through `steps` of them with so many snapshots.
---@param steps integer
---@param snapshots integer
---@return integer
function M.walked_again(steps, snapshots)
  local who = "curation.trajectory.walked_again"
  arguments.expect(who, "steps", steps, "an integer in [1, 500]")
  arguments.expect(who, "snapshots", snapshots, "an integer in [0, 1000]")
  return (plan(steps, snapshots))
end

--- The same as unrolled(), with the graph of one step at a time and `snapshots` (4) lists of weights, whatever the
-- number of steps. exact (true): the gradient of the whole unrolled graph; false: that of TESLA, in which the weights
-- of each step are held fixed.
---@param model Module
---@param from Tensor[]
---@param to Tensor[]
---@param set { image: Tensor, label: Tensor }
---@param options? { lr?: number, steps?: integer, order?: Tensor[], snapshots?: integer, exact?: boolean }
---@return number loss
---@return Tensor gradient
---@return number by_rate
function M.constant(model, from, to, set, options)
  local who = "curation.trajectory.constant"
  local o, image, loss, scale = begin(who, model, from, to, set, options, { snapshots = 4, exact = true })
  local rate, gradient, by_rate = o.lr, ty.zeros_like(image), 0.0
  local adjoint = {} -- dL by the weights after the step that comes next backwards

  -- From weights before step `first` to those before step `last`.
  local function walk(weights, first, last)
    for i = first, last - 1 do weights = step(loss, weights, image, rate, i) end
    return weights
  end

  local function back(weights, i)
    ty.scope(function()
      local at, x = leaves(weights), image:clone():requires_grad_()
      local inputs = o.exact and leaves {} or {}
      inputs[1] = x
      if o.exact then table.move(at, 1, #at, 2, inputs) end
      local product = dot(ty.grad(loss(at, x, i), at, { create_graph = true }), adjoint)
      local grads = ty.grad(product, inputs)
      ty.no_grad(function()
        gradient:sub_(grads[1] * rate)
        by_rate = by_rate - product:item()
        for k = 2, #inputs do adjoint[k - 1]:sub_(grads[k] * rate) end
      end)
    end)
  end

  -- Steps first to last - 1 backwards; weights are those before `first`.
  local function reverse(weights, first, last, free)
    local l = last - first
    if l == 1 then return back(weights, first) end
    local _, k = plan(l, free)
    if not k then
      for i = last - 1, first, -1 do ty.scope(function() back(walk(weights, first, i), i) end) end
      return
    end
    ty.scope(function() reverse(walk(weights, first, first + k), first + k, last, free - 1) end)
    reverse(weights, first, first + k, free)
  end

  local value
  adjoint = ty.scope(function()
    local reached, result = walk(copies(from), 1, o.steps + 1), {}
    value = squares(reached, to):item() / scale
    for k, w in ipairs(reached) do result[k] = (w - to[k]) * (2 / scale) end
    return result
  end)
  if o.exact then
    reverse(from, 1, o.steps + 1, o.snapshots)
  else
    ty.scope(function()
      local weights = copies(from)
      for i = 1, o.steps do
        back(weights, i)
        if i < o.steps then weights = step(loss, weights, image, rate, i) end
      end
    end)
  end
  return value, gradient, by_rate
end

-- ---- distillation ----

--- Shares of each class that a network with other weights sees in pictures, [n, classes]: TESLA's soft labels.
---@param model Module
---@param weights Tensor[]
---@param image Tensor
---@return Tensor
function M.soften(model, weights, image)
  local who = "curation.trajectory.soften"
  arguments.expect(who, "model", model, "a module")
  check_weights(who, "weights", model, weights)
  arguments.expect(who, "image", image, "a tensor")
  return ty.no_grad(function() return call(model, names_of(model), weights, image):softmax(-1) end)
end

--- Distils: makes the pictures of a set such that steps on them lead where experts went. Returns the set, with the
-- soft labels of the last expert where soft is set, the rate that was learnt beside it, and the losses. options: rounds
-- (200), steps (10, of a round), epochs (2: how far the expert went meanwhile), latest (8: the last epoch that a round
-- may begin at), batch_size (100: pictures of a step), lr (0.05: of the steps, at first), rate_lr (0: of the logarithm
-- of that rate; 0: it is left), image_lr (0.1, of Adam), soft (false: labels by the expert at the end of each round),
-- exact (true), snapshots (4), watch (a function of round and loss).
---@param model Module  gives the network; its weights are not used
---@param experts Tensor[][][]  of expert()
---@param set { image: Tensor, label: Tensor }  to begin with; labels i64 [n], or shares [n, classes]
---@param options? table
---@return { image: Tensor, label: Tensor } distilled
---@return number rate
---@return number[] losses
function M.distil(model, experts, set, options)
  local who = "curation.trajectory.distil"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "experts", experts, "a list of tables")
  local start, label, n = labelled(who, "set", set, true)
  local o = arguments.read(who, options, { rounds = 200, steps = 10, epochs = 2, latest = 8, batch_size = 100,
    lr = 0.05, rate_lr = 0, image_lr = 0.1, soft = false, exact = true, snapshots = 4, watch = arguments.none },
    { rounds = "an integer >= 0", steps = "an integer >= 1", epochs = "an integer >= 1", latest = "an integer >= 0",
      batch_size = "an integer >= 1", lr = "a number > 0", rate_lr = "a number >= 0", image_lr = "a number > 0",
      snapshots = "an integer >= 1", watch = "a function" })
  for i, path in ipairs(experts) do
    if #path < o.epochs + 1 then
      arguments.fail("%s: experts: expected %d epochs at least, got %d of number %d", who, o.epochs, #path - 1, i)
    end
  end
  if #experts == 0 then arguments.fail("%s: experts: expected at least one, got none", who) end
  local image = start:detach():clone():requires_grad_()
  local log_rate = ty.tensor(math.log(o.lr), { device = image.device }):requires_grad_()
  local adam = ty.optim.Adam({ image }, { lr = o.image_lr })
  local of_rate = o.rate_lr > 0 and ty.optim.Adam({ log_rate }, { lr = o.rate_lr })
  local next_positions = ty.data.rounds(n, math.min(o.batch_size, n))
  local losses, labels = {}, label
  for round = 1, o.rounds do
    local path = experts[ty.randint(1, #experts + 1, { 1 }):item()]
    local first = ty.randint(1, math.min(o.latest, #path - 1 - o.epochs) + 2, { 1 }):item()
    local from, to = path[first], path[first + o.epochs]
    if o.soft then labels = M.soften(model, to, image:detach()) end
    local order
    if o.batch_size < n then
      order = {}
      for i = 1, o.steps do order[i] = ty.tensor(next_positions(), { dtype = "i64" }):to { device = image.device } end
    end
    ty.scope(function()
      local rate = math.exp(log_rate:item())
      local loss, gradient, by_rate = M.constant(model, from, to, { image = image, label = labels },
        { lr = rate, steps = o.steps, order = order, exact = o.exact, snapshots = o.snapshots })
      adam:zero_grad()
      image:set_grad(gradient)
      adam:step()
      if of_rate then
        log_rate:set_grad(ty.full_like(log_rate:detach(), by_rate * rate))
        of_rate:step()
      end
      losses[round] = loss
    end)
    if o.watch then o.watch(round, losses[round]) end
  end
  return { image = image:detach():clone(), label = labels }, math.exp(log_rate:item()), losses
end

return M
