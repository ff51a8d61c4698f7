--- What recipes that distil data sets share: a real set of which a part is for choices, experts that learnt it, and
-- how a small set is judged, by networks that learn from it alone at the best of a few rates.
--
--     local trial = condensing.new(real, test, make, { experts = 4 })
--     print(trial:judge(condensed.random(trial.real, 1)))
local ty = require "tycho"
local arguments = require "tycho.arguments"
local condensed = require "tycho.curation.condensed"
local labelled = require "tycho.curation.labelled"
local trajectory = require "tycho.curation.trajectory"
local unlearning = require "tycho.curation.unlearning"

local M = {}

--- Arguments of recipes for what new() takes.
M.arguments = {
  { "width", 32, "channels of the network", quick = 4 },
  { "experts", 4, "networks that learn the real set", quick = 1 },
  { "epochs", 12, "that they learn for", quick = 2 },
  { "networks", 3, "that learn from a small set to judge it", quick = 1 },
  { "learn", 150, "steps of these", quick = 2 },
}

--- A real set to distil, with experts that learnt it, and what judges small sets: what condensing.new returns.
---@class CondensingTrial
---@field real { image: Tensor, label: Tensor }  to distil
---@field choose { image: Tensor, label: Tensor } for choices
---@field test { image: Tensor, label: Tensor }
---@field experts Tensor[][][]
---@field make fun(): Module
local Trial = {}
Trial.__index = Trial

--- A trial, from the numbers that ty.manual_seed began. options: choose (0.2: share of the samples for choices),
-- experts (4), epochs (12), lr (0.05), batch_size (64): of trajectory.expert; networks (3), learn (150), rates ({ 0.01,
-- 0.03, 0.1 }): of condensed.accuracy.
---@param training { image: Tensor, label: Tensor }
---@param test { image: Tensor, label: Tensor }
---@param make fun(): Module
---@param options? table
---@return CondensingTrial
function M.new(training, test, make, options)
  local who = "curation.condensing.new"
  local _, _, n = labelled(who, "training", training)
  labelled(who, "test", test)
  arguments.expect(who, "make", make, "a function")
  local o = arguments.read(who, options, { choose = 0.2, experts = 4, epochs = 12, lr = 0.05, batch_size = 64,
    networks = 3, learn = 150, rates = { 0.01, 0.03, 0.1 } }, { choose = "a number in (0, 1)",
    experts = "an integer >= 1", epochs = "an integer >= 1", lr = "a number > 0", batch_size = "an integer > 0",
    networks = "an integer >= 1", learn = "an integer >= 0", rates = "a list of numbers > 0" })
  local self = setmetatable({ options = o, test = test, make = make, experts = {} }, Trial)
  local count = math.max(1, math.min(n - 1, math.floor(o.choose * n + 0.5)))
  self.choose, self.real = unlearning.part(training, ty.randperm(n):narrow(0, 0, count))
  for i = 1, o.experts do
    self.experts[i] = trajectory.expert(make(), self.real, { epochs = o.epochs, lr = o.lr,
      batch_size = o.batch_size })
  end
  return self
end

--- The weights of all epochs of all experts, in one list.
---@return Tensor[][]
function Trial:weights()
  local list = {}
  for _, path in ipairs(self.experts) do table.move(path, 1, #path, #list + 1, list) end
  return list
end

--- A network with the weights that the first expert had in the end.
---@return Module
function Trial:teacher()
  local model, path = self.make(), self.experts[1]
  ty.no_grad(function()
    for k, parameter in ipairs(model:parameters()) do parameter:copy_(path[#path][k]) end
  end)
  return model:eval()
end

--- The mean share of the test that networks say right which learnt from a set alone.
---@param set { image: Tensor, label: Tensor }
---@param on? { image: Tensor, label: Tensor }  in place of the test: self.choose, where something is chosen
---@return number
function Trial:judge(set, on)
  local o = self.options
  return (condensed.accuracy(self.make, set, on or self.test, { networks = o.networks, steps = o.learn, rates = o.rates,
    choose = self.choose }))
end

--- A sheet of small sets, one below the other, each with its name.
---@param sets { image: Tensor, label: Tensor }[]  as many pictures each, from -1 (paper) to 1 (ink)
---@param names string[]
---@param scale? integer  pixels of a pixel (6)
---@return ImageGrid
function M.sheet(sets, names, scale)
  local who = "curation.condensing.sheet"
  arguments.expect(who, "sets", sets, "a list of tables")
  arguments.expect(who, "names", names, "a list of strings")
  arguments.expect(who, "scale", scale, "an integer >= 1 or nil")
  if #sets == 0 then arguments.fail("%s: sets: expected at least one, got none", who) end
  local images, labels, columns = {}, {}, nil
  for i, set in ipairs(sets) do
    local image, _, n = labelled(who, ("sets[%d]"):format(i), set, true)
    images[i], columns = image:detach():to "cpu", columns or n
    if n ~= columns then
      arguments.fail("%s: sets: expected %d pictures of each, got %d of number %d", who, columns, n, i)
    end
    for k = 1, n do labels[(i - 1) * n + k] = k == 1 and names[i] or "" end
  end
  return ty.plot.grid(ty.concat(images, 0), { columns = columns, scale = scale or 6, range = { 1, -1 },
    labels = labels })
end

return M
