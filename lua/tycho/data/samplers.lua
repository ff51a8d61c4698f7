--- Orders in which a DataLoader goes through a dataset, in place of all positions or a shuffle of them:
-- DataLoader(dataset, { sampler = data.WeightedSampler(weights) }). A sampler has `#sampler` positions an epoch and
-- sampler:order(seed), an i64 tensor of them that depends on the seed alone.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.data.dataset"

local expect = arguments.expect
local M = {}

local function class(name)
  local methods = { __name = name, __len = function(self) return self.count end }
  methods.__index = methods
  methods.__tostring = function(self) return ("%s of %d positions"):format(name, self.count) end
  return methods
end

--- Whether a value is a sampler: order(self, seed) and a length.
function M.is_sampler(value)
  if type(value) ~= "table" then return false end
  local ok, order = pcall(function() return #value and value.order end)
  return ok and type(order) == "function"
end

--- A function that gives the next positions of `count`, `batch` at a time and from 0, each once before any comes again,
-- in orders by the random numbers that ty.manual_seed began: for loops without a DataLoader. options: drop_last (false;
-- true: no batch goes over from one order to the next, what is left of one is dropped), backward (false; true: each
-- order is gone through from its end).
---@param count integer
---@param batch integer
---@param options? { drop_last?: boolean, backward?: boolean }
---@return fun(): integer[]
function M.rounds(count, batch, options)
  local who = "data.rounds"
  expect(who, "count", count, "an integer >= 1")
  expect(who, "batch", batch, "an integer >= 1")
  local o = arguments.read(who, options, { drop_last = false, backward = false })
  if o.drop_last and batch > count then
    arguments.fail("%s: batch: expected at most the %d positions that there are, got %d", who, count, batch)
  end
  local order, at = {}, 0
  return function()
    local list = {}
    if o.drop_last and at + batch > #order then at = #order end
    for k = 1, batch do
      if at >= #order then order, at = ty.randperm(count):tolist(), 0 end
      at = at + 1
      list[k] = order[o.backward and #order + 1 - at or at]
    end
    return list
  end
end

--- A function that gives the next batch of a dataset, without end, of the positions that rounds() gives; options are
-- those of rounds(). What ty.train.fit and ty.train.minimize draw from where no DataLoader is wanted.
---@param dataset table  with batch(positions)
---@param batch integer
---@param options? { drop_last?: boolean, backward?: boolean }
---@return fun(): table<string, Tensor>
function M.draws(dataset, batch, options)
  datasets.expect_dataset("data.draws", "dataset", dataset)
  if not dataset.batch then
    arguments.fail("data.draws: dataset: expected one with batch(positions), got %s", arguments.describe(dataset))
  end
  local next_positions = M.rounds(#dataset, batch, options)
  return function() return dataset:batch(ty.tensor(next_positions(), { dtype = "i64" })) end
end

--- All batches of a dataset in a list that is kept, for what looks at them again and again. options: those of a
-- DataLoader (batch_size, device ...).
---@param dataset table
---@param options? table
---@return table[]
function M.batches(dataset, options)
  datasets.expect_dataset("data.batches", "dataset", dataset)
  local list = {}
  for batch in ty.data.DataLoader(dataset, options)() do
    for _, t in pairs(batch) do
      if ty.is_tensor(t) then ty.keep(t) end
    end
    list[#list + 1] = batch
  end
  return list
end

local Weighted = class "WeightedSampler"

--- Positions drawn with the probabilities that `weights` have to each other: for classes of unequal size. options:
-- count (as many as there are weights), replacement (true; false: each at most once).
---@param weights Tensor|number[]  [n], at least 0
---@param options? {count: integer, replacement: boolean}
---@return Sampler
function M.WeightedSampler(weights, options)
  expect("WeightedSampler", "weights", weights, "a tensor or a list of numbers >= 0")
  if type(weights) == "table" then weights = ty.tensor(weights, { dtype = "f64" }) end
  weights = weights:to { dtype = "f64", device = "cpu" }
  if weights.ndim ~= 1 or weights:numel() == 0 or not weights:ge(0):all():item() or not weights:isfinite():all():item()
    or weights:sum():item() <= 0 then
    arguments.fail("WeightedSampler: weights: expected finite numbers >= 0 [n], one above 0, got [%s]",
      table.concat(weights.shape, ", "))
  end
  local o = arguments.read("WeightedSampler", options, { count = weights:numel(), replacement = true },
    { count = "an integer > 0" })
  local possible = weights:gt(0):sum():item()
  if not o.replacement and o.count > possible then
    arguments.fail("WeightedSampler: count: expected at most the %d positions with a weight above 0, got %d", possible,
      o.count)
  end
  return setmetatable({ weights = ty.keep(weights), count = o.count, size = weights:numel(),
    replacement = o.replacement }, Weighted)
end

function Weighted:order(seed)
  return datasets.with_seed(seed, function()
    if not self.replacement then -- the largest of weights to the power of draws (Efraimidis and Spirakis 2006)
      local keys = self.weights:log() - (-(1 - ty.rand({ self.size }, { dtype = "f64" })):log()):log()
      return keys:argsort(0, true):narrow(0, 0, self.count):clone()
    end
    local sums = self.weights:cumsum(0)
    local draws = ty.rand({ self.count }, { dtype = "f64" }) * sums[-1]
    -- Where each falls among the sums: found by sorting both together.
    local order = ty.concat({ sums, draws }, 0):argsort(0)
    local of_sums = order:lt(self.size)
    local passed = of_sums:to("i64"):cumsum(0)
    local position = ty.zeros({ self.size + self.count }, { dtype = "i64" }):scatter(0, order, passed)
    local last = self.weights:gt(0):nonzero():max():item()
    return position:narrow(0, self.size, self.count):clamp(0, last)
  end)
end

local Distributed = class "DistributedSampler"

--- What one of several processes takes of an epoch: every `ranks`-th position from `rank` on, of the same order in all
-- of them; all take equally many, the first ones again where the size does not divide. options: rank (0), ranks (1),
-- shuffle (true), drop_last (false: cut instead).
---@param size integer  of the dataset
---@param options? {rank: integer, ranks: integer, shuffle: boolean, drop_last: boolean}
---@return Sampler
function M.DistributedSampler(size, options)
  expect("DistributedSampler", "size", size, "an integer >= 1")
  local o = arguments.read("DistributedSampler", options, { rank = 0, ranks = 1, shuffle = true, drop_last = false },
    { rank = "an integer >= 0", ranks = "an integer >= 1" })
  if o.rank >= o.ranks then
    arguments.fail("DistributedSampler: rank: expected one of the %d ranks from 0, got %d", o.ranks, o.rank)
  end
  local count = o.drop_last and size // o.ranks or (size + o.ranks - 1) // o.ranks
  if count == 0 then
    arguments.fail("DistributedSampler: size: expected at least one position for each of %d ranks, got %d", o.ranks,
      size)
  end
  return setmetatable({ count = count, size = size, rank = o.rank, ranks = o.ranks, shuffle = o.shuffle }, Distributed)
end

function Distributed:order(seed)
  local all = self.shuffle and datasets.with_seed(seed, function() return ty.randperm(self.size) end)
    or ty.arange(self.size)
  local positions = (ty.arange(self.count) * self.ranks + self.rank):remainder(self.size)
  return all:index_select(0, positions)
end

return M
