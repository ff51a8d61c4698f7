--- Training and evaluating image classifiers on datasets of { image, label }, of one label or of many.
local ty = require "tycho"

local nn, optim, data = ty.nn, ty.optim, ty.data
local arguments = require "tycho.arguments"
local expect, none = arguments.expect, arguments.none
local M = {}

local function check_dataset(who, dataset)
  if type(dataset) ~= "table" or type(dataset.batch) ~= "function" then
    arguments.fail("%s: dataset: expected a data set of images and labels, got %s", who, arguments.describe(dataset))
  end
end

--- Images moved by up to `most` pixels in each direction, the same for the whole batch, with `fill` at the borders.
function M.random_shift(images, most, fill)
  expect("vision.random_shift", "images", images, "a tensor")
  expect("vision.random_shift", "most", most, "an integer >= 0")
  expect("vision.random_shift", "fill", fill, "a number")
  local d = ty.randint(-most, most + 1, { 2 }):tolist()
  local shape = images.shape
  local padded = ty.pad(images, { most, most, most, most }, "constant", fill)
  return padded:narrow(2, most + d[1], shape[3]):narrow(3, most + d[2], shape[4])
end

local own = { steps = 600, batch_size = 64, smoothing = 0.05, shift = 0, fill = -1, seed = 0, image = "image",
  label = "label", transform = none, device = none }

local own_kinds = { steps = "an integer >= 1", batch_size = "an integer >= 1", smoothing = "a number in [0, 1)",
  shift = "an integer >= 0", seed = "an integer", transform = "a function", device = "a string" }

-- The options of fit(): those of its own, and those for train.fit.
local function split_options(options)
  expect("vision.fit", "options", options, "a table or nil")
  local given, rest = {}, { title = "classifier", lr = 3e-3, weight_decay = 0.01, clip_norm = 0 }
  for key, value in pairs(options or {}) do
    if own[key] ~= nil then given[key] = value else rest[key] = value end
  end
  local o = arguments.read("vision.fit", given, own, own_kinds)
  rest.steps = o.steps
  rest.schedule = rest.schedule or optim.one_cycle { steps = o.steps }
  local weight_decay = expect("vision.fit", "weight_decay", rest.weight_decay, "a finite number >= 0")
  rest.optimizer = rest.optimizer or function(model, with)
    with.weight_decay = weight_decay
    return optim.AdamW(model:parameters(), with)
  end
  return o, rest
end

-- A field of a batch, or an error that names those that there are.
local function field(batch, name)
  if type(batch) == "table" and ty.is_tensor(batch[name]) then return batch[name] end
  local names = {}
  for key in pairs(type(batch) == "table" and batch or {}) do names[#names + 1] = tostring(key) end
  table.sort(names)
  return arguments.fail("vision.fit: dataset: expected a tensor in the field '%s' of a batch, which has %s", name,
    #names > 0 and table.concat(names, ", ") or "none")
end

--- The loss of a classifier's logits [n, classes]: of labels i64 [n] the mean cross entropy with label smoothing; of
-- labels [n, classes], 1 for every class that is there and else 0, the mean binary cross entropy.
---@param logits Tensor
---@param labels Tensor
---@param smoothing? number  (0)
---@return Tensor loss
function M.classifier_loss(logits, labels, smoothing)
  expect("vision.classifier_loss", "logits", logits, "a tensor")
  expect("vision.classifier_loss", "labels", labels, "a tensor")
  smoothing = expect("vision.classifier_loss", "smoothing", smoothing, "a number in [0, 1) or nil") or 0
  if labels.ndim == 2 then return nn.bce_with_logits(logits, labels:to(logits.dtype)) end
  return nn.cross_entropy(logits, labels, { label_smoothing = smoothing })
end

--- Trains a classifier with AdamW and a one-cycle rate; returns the losses as a list, and the model with the averaged
-- weights, where an average was asked for. What labels are says the loss: one of the classes, i64, with label
-- smoothing; or a 0 or 1 for each class, which then are there or not one by one. options: steps (600), batch_size (64),
-- lr (3e-3), weight_decay (0.01), smoothing (0.05), shift (0: pixels of random movement), fill (-1), seed (0), image
-- and label (the fields' names), transform (a function of the images, before the shift), device (the model's), title,
-- quiet, and those of train.fit: average, every, evaluate, folder, resume, log ...
---@param model Module
---@param dataset table  items { image = [c, h, w], label = integer or [classes] }, or a DataLoader of them
---@return number[] losses
---@return Module averaged
function M.fit(model, dataset, options)
  local o, rest = split_options(options)
  expect("vision.fit", "model", model, "a module")
  local loader = dataset
  if type(dataset) ~= "table" or type(dataset.next) ~= "function" then
    check_dataset("vision.fit", dataset)
    loader = data.DataLoader(dataset, { batch_size = math.min(o.batch_size, #dataset), shuffle = true, seed = o.seed,
      drop_last = true, device = o.device or model:device() })
  end
  function rest.loss(network, batch)
    local images, labels = field(batch, o.image), field(batch, o.label)
    if o.transform then images = o.transform(images) end
    if o.shift > 0 then images = M.random_shift(images, o.shift, o.fill) end
    return M.classifier_loss(network(images), labels, o.smoothing)
  end
  local losses, averaged = ty.train.fit(model, loader, rest)
  model:eval()
  averaged:eval()
  return losses, averaged
end

-- What fn makes of the logits of images, in batches and in evaluation mode, on the device of the images.
local function in_batches(who, model, images, fn)
  expect(who, "model", model, "a module")
  expect(who, "images", images, "a tensor")
  if images.ndim < 3 or images.ndim > 5 or images:size(0) == 0 then
    arguments.fail("%s: images: expected [n, c, t], [n, c, h, w] or [n, c, t, h, w] with n > 0, got %s", who,
      arguments.describe(images))
  end
  local training, device = model.training, model:device()
  model:eval()
  local ok, parts = pcall(ty.no_grad, function()
    local list = {}
    for start = 0, images.shape[1] - 1, 256 do
      list[#list + 1] = ty.scope(function()
        return fn(model(images:narrow(0, start, math.min(256, images.shape[1] - start)):to { device = device }))
      end)
    end
    return list
  end)
  model:train(training)
  if not ok then error(parts, 0) end
  return ty.concat(parts, 0):to { device = images.device }
end

--- Predicted labels i64 [n] of images [n, c, h, w], clips [n, c, t, h, w] or signals [n, c, t], in batches and in
-- evaluation mode, on their device.
---@param model Module
---@param images Tensor
---@return Tensor labels
function M.predict(model, images)
  return in_batches("vision.predict", model, images, function(logits) return logits:argmax(-1) end)
end

--- Logits [n, classes] of images [n, c, h, w], clips or signals (as in predict), in batches and in evaluation mode, on
-- their device.
---@param model Module
---@param images Tensor
---@return Tensor logits
function M.scores(model, images)
  return in_batches("vision.scores", model, images, function(logits) return logits end)
end

--- How well a model reads images that are there: the share that is right, and the mean cross entropy.
---@param model Module
---@param set { image: Tensor, label: Tensor }  label i64 [n]
---@return { accuracy: number, loss: number }
function M.measure(model, set)
  local who = "vision.measure"
  expect(who, "model", model, "a module")
  expect(who, "set", set, "a table")
  expect(who, "set.image", set.image, "a tensor")
  expect(who, "set.label", set.label, "a tensor")
  local logits = M.scores(model, set.image)
  return ty.no_grad(function()
    return { accuracy = logits:argmax(1):eq(set.label):to("f64"):mean():item(),
      loss = nn.cross_entropy(logits:to "f64", set.label):item() }
  end)
end

--- Share of a dataset's items whose label is predicted.
---@return number accuracy  in [0, 1]
function M.accuracy(model, dataset)
  expect("vision.accuracy", "model", model, "a module")
  check_dataset("vision.accuracy", dataset)
  local all = dataset:batch(ty.arange(#dataset))
  return M.predict(model, all.image):eq(all.label):to("f64"):mean():item()
end

return M
