--- Training a classifier that was changed (pruned, rounded, cut) until it does again what the model did that it was
-- made of: by the labels, by the teacher's softened logits and by its features, block for block. Hinton et al. 2015,
-- "Distilling the Knowledge in a Neural Network"; Romero et al. 2015, "FitNets: Hints for Thin Deep Nets".
--
--     local teacher, student = model, model:clone()
--     prune.magnitude(student, { pattern = "2:4" })
--     vision.distil(student, training, { teacher = teacher, steps = 300 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local BLOCKS = "%.layer%.%d+$" -- of the vision transformers of tycho.models

-- The modules whose name a pattern finds, in order.
local function blocks_of(who, model, pattern)
  local list = {}
  local names, modules = nn.surgery.modules(model)
  for _, name in ipairs(names) do
    if name:find(pattern) then list[#list + 1] = modules[name] end
  end
  if #list == 0 then
    fail("%s: blocks: expected a pattern that finds modules, got %s", who, arguments.describe(pattern))
  end
  return list
end

-- What a model makes of pictures, and what left its blocks.
local function seen(model, blocks, images)
  local features, removers = {}, {}
  for i, block in ipairs(blocks) do
    removers[i] = block:register_forward_hook(function(_, outputs) features[i] = outputs[1] end)
  end
  local ok, logits = pcall(model, images)
  for _, remove in ipairs(removers) do remove() end
  if not ok then error(logits, 0) end
  return logits, features
end

--- The cross entropy of a student's logits to a teacher's, both divided by the temperature, less the entropy of the
-- teacher's: its divergence, times the square of the temperature, by which gradients stay of one size.
---@param logits Tensor   [n, classes]
---@param teacher Tensor  [n, classes]
---@param temperature? number  (2)
---@return Tensor loss
function M.soft_loss(logits, teacher, temperature)
  local who = "vision.soft_loss"
  expect(who, "logits", logits, "a tensor")
  expect(who, "teacher", teacher, "a tensor")
  temperature = expect(who, "temperature", temperature, "a number > 0 or nil") or 2
  if logits.ndim ~= 2 or table.concat(logits.shape, " ") ~= table.concat(teacher.shape, " ") then
    fail("%s: expected logits [n, classes] of student and teacher, got %s and %s", who, arguments.describe(logits),
      arguments.describe(teacher))
  end
  local target = (teacher:detach() / temperature):log_softmax(-1)
  local off = target:exp() * (target - (logits / temperature):log_softmax(-1))
  return off:sum(-1):mean() * temperature ^ 2
end

-- The mean squared distance of features, of the teacher's mean square.
local function distance(student, teacher)
  teacher = teacher:detach()
  return (student - teacher):square():mean() / (teacher:square():mean() + 1e-12)
end

--- How far the features of each block are from the teacher's: the mean squared difference over the teacher's mean
-- square, one number for each block. blocks: a pattern of their names ("%.layer%.%d+$").
---@param model Module
---@param teacher Module
---@param images Tensor
---@param blocks? string
---@return number[] distances
function M.feature_distances(model, teacher, images, blocks)
  local who = "vision.feature_distances"
  expect(who, "model", model, "a module")
  expect(who, "teacher", teacher, "a module")
  expect(who, "images", images, "a tensor")
  blocks = expect(who, "blocks", blocks, "a string or nil") or BLOCKS
  local mine, theirs = blocks_of(who, model, blocks), blocks_of(who, teacher, blocks)
  if #mine ~= #theirs then fail("%s: teacher: expected %d blocks, got %d", who, #mine, #theirs) end
  local training = model.training
  model:eval()
  local list = ty.no_grad(ty.scope, function()
    local _, student = seen(model, mine, images)
    local _, whole = seen(teacher, theirs, images)
    local each = {}
    for i in ipairs(mine) do each[i] = distance(student[i], whole[i]):item() end
    return each
  end)
  model:train(training)
  return list
end

local own = { teacher = none, hard = 1.0, soft = 1.0, temperature = 2.0, features = 1.0, blocks = BLOCKS,
  weights = none, more = none, steps = 300, batch_size = 64, seed = 0, image = "image", label = "label",
  transform = none }
local own_kinds = { teacher = "a module", hard = "a finite number >= 0", soft = "a finite number >= 0",
  temperature = "a number > 0", features = "a finite number >= 0", weights = "a list of numbers", more = "a function",
  steps = "an integer >= 1", batch_size = "an integer >= 1", seed = "an integer", transform = "a function" }

--- The loss that distil() trains by, for one batch: hard * cross entropy + soft * soft_loss + features * the mean over
-- blocks of weight * distance, and these parts as numbers. options: as distil() has them.
---@param model Module
---@param images Tensor
---@param labels? Tensor  nil where hard is 0: without supervision
---@param options table
---@return Tensor loss
---@return table<string, Tensor> parts
function M.distil_loss(model, images, labels, options)
  local who = "vision.distil_loss"
  expect(who, "model", model, "a module")
  expect(who, "images", images, "a tensor")
  local o = arguments.read(who, options, own, own_kinds)
  if o.hard > 0 then expect(who, "labels", labels, "a tensor") end
  local uses = o.teacher ~= nil and (o.soft > 0 or o.features > 0)
  local wants = uses and o.features > 0
  local mine = wants and blocks_of(who, model, o.blocks) or {}
  local logits, student = seen(model, mine, images)
  local loss, parts = nil, {}
  local function add(name, weight, value)
    parts[name] = value:detach()
    loss = loss and loss + value * weight or value * weight
  end
  if o.hard > 0 then add("hard", o.hard, nn.cross_entropy(logits, labels)) end
  if uses then
    local theirs = wants and blocks_of(who, o.teacher, o.blocks) or {}
    if #theirs ~= #mine then fail("%s: teacher: expected %d blocks, got %d", who, #mine, #theirs) end
    if o.weights and #o.weights ~= #mine then
      fail("%s: weights: expected %d numbers, one for each block, got %d", who, #mine, #o.weights)
    end
    local target, whole = ty.no_grad(function() return seen(o.teacher, theirs, images) end)
    if o.soft > 0 then add("soft", o.soft, M.soft_loss(logits, target, o.temperature)) end
    if wants then
      local sum
      for i in ipairs(mine) do
        local part = distance(student[i], whole[i]) * (o.weights and o.weights[i] or 1)
        sum = sum and sum + part or part
      end
      add("features", o.features, sum / #mine)
    end
  end
  if not loss then fail("%s: expected one of hard, soft and features above 0, got none", who) end
  return loss, parts
end

--- Trains a classifier with a teacher. options: teacher (none: by labels alone), hard (1), soft (1), temperature (2),
-- features (1): the shares of the loss; blocks (a pattern of the names of the modules whose outputs are compared,
-- "%.layer%.%d+$"), weights (one for each block; ones), more (a function of the model and a batch that is called after
-- the forward pass: what it returns is added to the loss), steps (300), batch_size (64), seed (0), image and label
-- (fields of a batch), transform (of the images), and those of train.fit: lr (5e-4), warmup, final, optimizer, every,
-- evaluate, average, log ... Parameters that want no gradient stay as they are. Returns the losses of all steps and the
-- model, or with `average` its averaged copy, in evaluation mode.
---@param model Module
---@param dataset table  items { image = [c, h, w], label = integer }
---@param options? table
---@return number[] losses
---@return Module model
function M.distil(model, dataset, options)
  local who = "vision.distil"
  expect(who, "model", model, "a module")
  if type(dataset) ~= "table" or type(dataset.batch) ~= "function" then
    fail("%s: dataset: expected a data set of images and labels, got %s", who, arguments.describe(dataset))
  end
  expect(who, "options", options, "a table or nil")
  local given, rest = {}, { title = "distillation", lr = 5e-4, weight_decay = 0.01 }
  for key, value in pairs(options or {}) do
    if own[key] ~= nil then given[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, given, own, own_kinds)
  if o.teacher and rawequal(o.teacher, model) then
    fail("%s: teacher: expected another module than the student; a clone, say", who)
  end
  local loss_options = { teacher = o.teacher, hard = o.hard, soft = o.soft, temperature = o.temperature,
    features = o.features, blocks = o.blocks, weights = o.weights }
  rest.steps = o.steps
  function rest.loss(network, batch)
    local images = batch[o.image]
    if not ty.is_tensor(images) then fail("%s: dataset: expected a tensor in the field '%s'", who, o.image) end
    if o.transform then images = o.transform(images) end
    local loss, parts = M.distil_loss(network, images, batch[o.label], loss_options)
    if o.more then loss = loss + o.more(network, batch) end
    return loss, parts
  end
  if o.teacher then o.teacher:eval() end
  local loader = ty.data.DataLoader(dataset, { batch_size = math.min(o.batch_size, #dataset), shuffle = true,
    seed = o.seed, drop_last = true, device = model:device() })
  local losses, averaged = ty.train.fit(model, loader, rest)
  model:eval()
  return losses, averaged:eval()
end

return M
