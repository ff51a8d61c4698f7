--- Distilling a data set by matching distributions of features: of each class, as networks see them, the features of a
-- few pictures are to be like those of the real ones. By their means, Zhao and Bilen 2023, "Dataset Condensation with
-- Distribution Matching" (a maximum mean discrepancy with a linear kernel); by their characteristic functions, see
-- tycho.curation.characteristic.
--
--     local small = matching.distil(model, networks, real, { image = ..., label = ... }, { by = "characteristic" })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local characteristic = require "tycho.curation.characteristic"
local labelled = require "tycho.curation.labelled"

local M = {}

--- The squared distance of the means of features [..., n, d] and [..., m, d], [...].
---@param real Tensor
---@param small Tensor
---@return Tensor
function M.means(real, small)
  local who = "curation.matching.means"
  arguments.expect(who, "real", real, "a tensor")
  arguments.expect(who, "small", small, "a tensor")
  if real.ndim < 2 or real.ndim ~= small.ndim or real.shape[real.ndim] ~= small.shape[small.ndim] then
    arguments.fail("%s: expected features [..., n, d] and [..., m, d], got %s and %s", who, arguments.describe(real),
      arguments.describe(small))
  end
  return (real:mean { -2 } - small:mean { -2 }):square():sum(-1)
end

-- Images of a set by class from 0, [n, ...] each.
local function classes_of(image, label)
  local places, most = {}, label:max():item()
  for class = 0, most do places[class + 1] = {} end
  for i, class in ipairs(label:tolist()) do table.insert(places[class + 1], i - 1) end
  local result = {}
  for class, list in ipairs(places) do
    if #list > 0 then
      result[class] = image:index_select(0, ty.tensor(list, { dtype = "i64" }):to { device = image.device })
    end
  end
  return result
end

--- Distils: makes the pictures of a set such that of each class their features are like those of real pictures. A
-- round draws a network and so many real pictures of each class, and the pictures take a step of Adam down. by:
-- "means", or "characteristic", whose frequencies a network draws that takes a step up meanwhile (learn: true) or that
-- are drawn from the normal distribution. Features are what model:embed(images) gives, for "characteristic" all of
-- one length. options: by ("characteristic"), rounds (400), real (64: pictures of a class in a round), image_lr (0.05),
-- frequencies (512), learn (true), sampler_lr (1e-3), length (1: of the features), amplitude (0.5), phase (0.5), watch
-- (a function of round and loss).
---@param model Module          with embed(images); its weights are overwritten
---@param networks Tensor[][]   weights to draw from, lists in the order of its parameters
---@param real { image: Tensor, label: Tensor }
---@param set { image: Tensor, label: Tensor }  to begin with; as many pictures of each class
---@param options? table
---@return { image: Tensor, label: Tensor } distilled
---@return number[] losses
function M.distil(model, networks, real, set, options)
  local who = "curation.matching.distil"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "model.embed", model.embed, "a function")
  arguments.expect(who, "networks", networks, "a list of tables")
  local pictures, truth = labelled(who, "real", real)
  local start, label, n = labelled(who, "set", set)
  local o = arguments.read(who, options, { by = "characteristic", rounds = 400, real = 64, image_lr = 0.05,
    frequencies = 512, learn = true, sampler_lr = 1e-3, length = 1, amplitude = 0.5, phase = 0.5,
    watch = arguments.none },
    { by = '"means" or "characteristic"', rounds = "an integer >= 0", real = "an integer >= 1",
      image_lr = "a number > 0", frequencies = "an integer >= 2", sampler_lr = "a number > 0", length = "a number > 0",
      amplitude = "a number >= 0", phase = "a number >= 0", watch = "a function" })
  if #networks == 0 then arguments.fail("%s: networks: expected at least one, got none", who) end
  local groups, parameters = classes_of(pictures, truth), model:parameters()
  local classes = #groups
  local each = n // classes
  local wanted = {}
  for class = 0, classes - 1 do
    for _ = 1, each do wanted[#wanted + 1] = class end
  end
  if #wanted ~= n or not ty.equal(label:to "cpu", ty.tensor(wanted, { dtype = "i64" })) then
    arguments.fail("%s: set: expected as many pictures of each of %d classes, in their order, got labels %s", who,
      classes, arguments.describe(label))
  end
  local image = start:detach():clone():requires_grad_()
  local adam = ty.optim.Adam({ image }, { lr = o.image_lr })
  local by_means = o.by == "means"
  local width = ty.no_grad(function() return model:embed(start:narrow(0, 0, 1)).shape[2] end)
  local learn = o.learn and not by_means
  local sampler = learn and ty.nn.with_defaults({ device = image.device }, function()
    return characteristic.Sampler(width)
  end) or nil
  local rises = learn and ty.optim.Adam(sampler:parameters(), { lr = o.sampler_lr }) or nil
  local losses = {}
  model:eval()
  for round = 1, o.rounds do
    ty.scope(function()
      local drawn = networks[ty.randint(0, #networks, { 1 }):item() + 1]
      ty.no_grad(function()
        for k, parameter in ipairs(parameters) do parameter:copy_(drawn[k]) end
      end)
      local t, at
      if not by_means then
        t = sampler and sampler(o.frequencies)
          or ty.randn({ o.frequencies, width }, { device = image.device, dtype = image.dtype })
        at = t:detach():requires_grad_()
      end
      local gradient, by_frequency = ty.zeros_like(image:detach()), at and ty.zeros_like(at:detach())
      local total = 0.0
      -- One class after the other, so that no more than its pictures are held.
      for class, group in ipairs(groups) do
        ty.scope(function()
          local some = ty.randint(0, group.shape[1], { o.real }):to { device = image.device }
          local sample = ty.no_grad(function() return model:embed(group:index_select(0, some)) end)
          local own = image:detach():narrow(0, (class - 1) * each, each):clone():requires_grad_()
          local features = model:embed(own)
          local loss
          if by_means then
            loss = M.means(sample, features)
          else
            loss = characteristic.discrepancy(ty.nn.normalize(sample) * o.length,
              ty.nn.normalize(features) * o.length, at, { amplitude = o.amplitude, phase = o.phase })
          end
          local grads = ty.grad(loss, sampler and { own, at } or { own })
          gradient:narrow(0, (class - 1) * each, each):copy_(grads[1])
          if sampler then by_frequency:add_(grads[2]) end
          total = total + loss:item()
        end)
      end
      image:set_grad(gradient)
      adam:step()
      if sampler then
        local grads = ty.grad(t, sampler:parameters(), { grad_outputs = -by_frequency })
        for k, parameter in ipairs(sampler:parameters()) do parameter:set_grad(grads[k]) end
        rises:step()
      end
      losses[round] = total
    end)
    if o.watch then o.watch(round, losses[round]) end
  end
  return { image = image:detach():clone(), label = label }, losses
end

return M
