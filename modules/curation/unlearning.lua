--- What forgetting is measured by, and ways to forget that train: what curation.dampening is compared with.
--
--     unlearning.finetune(model, retained, { steps = 100 })         -- goes on with what may be kept
--     unlearning.mislabel(model, retained, forget, { steps = 100 }) -- random labels for what is to be forgotten
--     unlearning.ascend(model, forget, { steps = 10 })              -- raises its loss
--     unlearning.membership(model, retained, held_out, forget)      -- the share of it that looks trained on
local ty = require "tycho"
local arguments = require "tycho.arguments"
local labelled = require "tycho.curation.labelled"

local M = {}

--- Splits a set in two: what is at positions (list or i64 tensor), and what is not.
---@param set { image: Tensor, label: Tensor }
---@param positions integer[]|Tensor  from 0
---@return { image: Tensor, label: Tensor } chosen
---@return { image: Tensor, label: Tensor } others
function M.part(set, positions)
  local who = "curation.unlearning.part"
  local image, label, n = labelled(who, "set", set)
  if ty.is_tensor(positions) then positions = positions:flatten():tolist() end
  arguments.expect(who, "positions", positions, "a list")
  local chosen, lists = {}, { {}, {} }
  for _, place in ipairs(positions) do
    if math.type(place) ~= "integer" or place < 0 or place >= n then
      arguments.fail("%s: positions: expected integers in [0, %d], got %s", who, n - 1, arguments.describe(place))
    end
    chosen[place] = true
  end
  for place = 0, n - 1 do table.insert(lists[chosen[place] and 1 or 2], place) end
  for k, list in ipairs(lists) do
    if #list == 0 then arguments.fail("%s: positions: expected some of the %d samples, got %d", who, n, n - #list) end
    local at = ty.tensor(list, { dtype = "i64" }):to { device = image.device }
    lists[k] = { image = image:index_select(0, at), label = label:index_select(0, at) }
  end
  return lists[1], lists[2]
end

--- Positions of the samples of a class, a list.
---@param set { image: Tensor, label: Tensor }
---@param class integer
---@return integer[]
function M.of_class(set, class)
  local _, label = labelled("curation.unlearning.of_class", "set", set)
  arguments.expect("curation.unlearning.of_class", "class", class, "an integer >= 0")
  local list = {}
  for i, c in ipairs(label:tolist()) do
    if c == class then list[#list + 1] = i - 1 end
  end
  return list
end

-- ---- ways that train ----

local defaults, kinds = { steps = 100, lr = 1e-3, batch_size = 64 },
  { steps = "an integer >= 0", lr = "a number > 0", batch_size = "an integer > 0" }

-- Steps of AdamW on sign times the cross entropy of batches of a set. The norms learn the statistics of batches where
-- `norms` says so; the model is left in the mode that it was in.
local function train(model, set, o, sign, norms)
  local data = ty.data.TensorDataset { image = set.image, label = set.label }
  local draw = ty.data.draws(data, math.min(o.batch_size, #data))
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = o.lr, weight_decay = 0 })
  local training = model.training
  model:train(norms)
  ty.train.minimize(optimizer, o.steps, function(step)
    local batch = draw(step)
    return ty.nn.cross_entropy(model(batch.image), batch.label) * sign
  end)
  model:train(training)
  return model
end

--- Goes on training on what may be kept. options: steps (100), lr (1e-3, of AdamW), batch_size (64).
---@param model Module
---@param retained { image: Tensor, label: Tensor }
---@param options? { steps?: integer, lr?: number, batch_size?: integer }
---@return Module model
function M.finetune(model, retained, options)
  local who = "curation.unlearning.finetune"
  arguments.expect(who, "model", model, "a module")
  labelled(who, "retained", retained)
  return train(model, retained, arguments.read(who, options, defaults, kinds), 1, true)
end

--- Trains on what may be kept and on what is to be forgotten, the latter under other labels, drawn at random: Graves et
-- al. 2021, "Amnesiac Machine Learning". options: those of finetune, and classes (one more than the largest label).
---@param model Module
---@param retained { image: Tensor, label: Tensor }
---@param forget { image: Tensor, label: Tensor }
---@param options? table
---@return Module model
function M.mislabel(model, retained, forget, options)
  local who = "curation.unlearning.mislabel"
  arguments.expect(who, "model", model, "a module")
  local image, label = labelled(who, "retained", retained)
  local other, old, n = labelled(who, "forget", forget)
  local all = ty.concat({ label, old }, 0)
  local o = arguments.read(who, options, { steps = 100, lr = 1e-3, batch_size = 64,
    classes = all:max():item() + 1 }, { steps = kinds.steps, lr = kinds.lr, batch_size = kinds.batch_size,
    classes = "an integer >= 2" })
  local new, shift = old:tolist(), ty.randint(1, o.classes, { n }):tolist()
  for i, c in ipairs(new) do new[i] = (c + shift[i]) % o.classes end
  local wrong = ty.tensor(new, { dtype = "i64" }):to { device = old.device }
  return train(model, { image = ty.concat({ image, other }, 0), label = ty.concat({ label, wrong }, 0) }, o, 1, true)
end

--- Raises the loss of what is to be forgotten, with the norms' statistics as they are. options: those of finetune.
---@param model Module
---@param forget { image: Tensor, label: Tensor }
---@param options? table
---@return Module model
function M.ascend(model, forget, options)
  local who = "curation.unlearning.ascend"
  arguments.expect(who, "model", model, "a module")
  labelled(who, "forget", forget)
  return train(model, forget, arguments.read(who, options, defaults, kinds), -1, false)
end

-- ---- what is measured ----

-- Logits of images in parts, f64.
local function logits_of(model, image)
  local training = model.training
  model:eval()
  local logits = ty.no_grad(ty.nn.in_parts, image, 256, function(x) return model(x):to "f64" end)
  model:train(training)
  return logits
end

--- The share of a set's samples whose label is predicted.
---@param model Module
---@param set { image: Tensor, label: Tensor }
---@return number
function M.accuracy(model, set)
  local who = "curation.unlearning.accuracy"
  arguments.expect(who, "model", model, "a module")
  local image, label = labelled(who, "set", set)
  return logits_of(model, image):argmax(1):eq(label):to("f64"):mean():item()
end

--- Entropies of what a model predicts, in nats, f64 [n].
---@param model Module
---@param image Tensor
---@return Tensor
function M.entropy(model, image)
  local who = "curation.unlearning.entropy"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "image", image, "a tensor")
  if image.ndim < 2 or image.shape[1] < 1 then
    arguments.fail("%s: image: expected [n, ...] with n > 0, got %s", who, arguments.describe(image))
  end
  local log = logits_of(model, image):log_softmax(-1)
  return -(log:exp() * log):sum { -1 }
end

-- Logistic regression of one number, both groups with the same weight: Newton's method from 0. Returns a function that
-- says of numbers which of them are of the first group.
local function logistic(yes, no)
  local all = ty.concat({ yes, no }, 0)
  local middle, scale = all:mean():item(), math.max(all:std():item(), 1e-12)
  local x = (all - middle) / scale
  local y = ty.concat({ ty.ones_like(yes), ty.zeros_like(no) }, 0)
  local weight = ty.concat({ ty.full_like(yes, 0.5 / yes.shape[1]), ty.full_like(no, 0.5 / no.shape[1]) }, 0)
  local slope, intercept = 0.0, 0.0
  for _ = 1, 25 do
    local p = (x * slope + intercept):sigmoid()
    local error, curve = weight * (p - y), weight * p * (1 - p)
    -- A little of the slope's square is added, so that groups that lie apart have a finite one.
    local ga, gb = (error * x):sum():item() + 1e-3 * slope, error:sum():item()
    local aa, ab, bb = (curve * x * x):sum():item() + 1e-3, (curve * x):sum():item(), curve:sum():item() + 1e-9
    local determinant = aa * bb - ab * ab
    slope, intercept = slope - (bb * ga - ab * gb) / determinant, intercept - (aa * gb - ab * ga) / determinant
  end
  return function(value) return ((value - middle) / scale * slope + intercept):gt(0) end
end

--- A membership inference: the share of samples that look as if the model had been trained on them, to a logistic
-- regression that tells members from others by the entropy of what is predicted. Chundawat et al. 2023, "Can Bad
-- Teaching Induce Forgetting?", whose score Foster et al. report. Members and others have the same weight.
---@param model Module
---@param members { image: Tensor, label: Tensor }  that it was trained on
---@param others { image: Tensor, label: Tensor }   that it was not
---@param asked { image: Tensor, label: Tensor }
---@return number
function M.membership(model, members, others, asked)
  local who = "curation.unlearning.membership"
  arguments.expect(who, "model", model, "a module")
  local seen, unseen, these = labelled(who, "members", members), labelled(who, "others", others),
    labelled(who, "asked", asked)
  return ty.scope(function()
    local judge = logistic(M.entropy(model, seen), M.entropy(model, unseen))
    return judge(M.entropy(model, these)):to("f64"):mean():item()
  end)
end

return M
