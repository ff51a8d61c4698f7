--- Training and evaluating image classifiers on datasets of { image, label }.
local ty = require "tycho"

local nn, optim, data, train = ty.nn, ty.optim, ty.data, ty.train
local arguments = require "tycho.arguments"
local expect = arguments.expect
local M = {}

local fit_kinds = { steps = "an integer >= 1", batch_size = "an integer >= 1", lr = "a finite number >= 0",
  weight_decay = "a finite number >= 0", smoothing = "a number in [0, 1)", shift = "an integer >= 0",
  seed = "an integer" }

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

--- Trains a classifier with AdamW, a one-cycle rate and label smoothing; returns the losses as a list.
-- options: steps (600), batch_size (64), lr (3e-3), weight_decay (0.01), smoothing (0.05), shift (0: pixels of random
-- movement), fill (-1), seed (0), title, quiet.
---@param model Module
---@param dataset table  items { image = [c, h, w], label = integer }
---@return number[] losses
function M.fit(model, dataset, options)
  local o = nn.options("vision.fit", options, { steps = 600, batch_size = 64, lr = 3e-3, weight_decay = 0.01,
    smoothing = 0.05, shift = 0, fill = -1, seed = 0, title = "classifier", quiet = false },
    fit_kinds)
  expect("vision.fit", "model", model, "a module")
  check_dataset("vision.fit", dataset)
  local loader = data.DataLoader(dataset,
    { batch_size = math.min(o.batch_size, #dataset), shuffle = true, seed = o.seed, drop_last = true,
      device = model:device() })
  local opt = optim.AdamW(model:parameters(), { lr = o.lr, weight_decay = o.weight_decay,
    schedule = optim.one_cycle { steps = o.steps } })
  local losses = {}
  model:train()
  for step, batch, log in train.steps(loader, o.steps, { title = o.title, quiet = o.quiet }) do
    local images = o.shift > 0 and M.random_shift(batch.image, o.shift, o.fill) or batch.image
    local loss = nn.cross_entropy(model(images), batch.label, { label_smoothing = o.smoothing })
    opt:step(loss)
    losses[step] = loss:item()
    log { loss = losses[step] }
  end
  model:eval()
  return losses
end

--- Predicted labels i64 [n] of images [n, c, h, w], in batches and in evaluation mode, on the device of the images.
function M.predict(model, images)
  expect("vision.predict", "model", model, "a module")
  expect("vision.predict", "images", images, "a tensor")
  if images.ndim ~= 4 or images:size(0) == 0 then
    arguments.fail("vision.predict: images: expected [n, c, h, w] with n > 0, got %s", arguments.describe(images))
  end
  local training, device = model.training, model:device()
  model:eval()
  local parts = ty.no_grad(function()
    local list = {}
    for start = 0, images.shape[1] - 1, 256 do
      list[#list + 1] = ty.scope(function()
        return model(images:narrow(0, start, math.min(256, images.shape[1] - start)):to { device = device }):argmax(-1)
      end)
    end
    return list
  end)
  model:train(training)
  return ty.concat(parts, 0):to { device = images.device }
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
