--- Training on sequences of all lengths without padding, and with as much work for every rank. Zeng et al. 2022,
-- "Boosting Distributed Training Performance of the Unpadded BERT Model".
--
-- An item is a tensor i64 [k, length]: tokens and whatever belongs to each, labels say. Items of a rank are packed one
-- behind the other. Where some ranks have drawn longer items than others, items change ranks before the step: lengths
-- are gathered, all ranks divide them alike, and what moves is on its way while the step before computes.
--
--     local coming = unpadded.exchange(group, items(1), { width = 256 })
--     for step = 1, steps do
--       local mine = coming:wait()
--       coming = unpadded.exchange(group, items(step + 1), { width = 256 })
--       local batch = unpadded.pack(mine)
--       loss(batch.values, { cu_seqlens = batch.cu_seqlens, longest = batch.longest }) ...
--     end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local TAG = 2002 -- of messages with items

--- Items that are on their way.
---@class UnpaddedExchange
---@field moved integer  items that this rank has sent
local Exchange = {}
Exchange.__index = Exchange
Exchange.__name = "UnpaddedExchange"

local function check_items(who, items)
  expect(who, "items", items, "a list of tensors")
  for i, x in ipairs(items) do
    if x.ndim ~= 2 or x.dtype ~= "i64" or x.shape[1] ~= items[1].shape[1] then
      fail("%s: items[%d]: expected i64 [%s, length], got %s", who, i,
        items[1].ndim == 2 and items[1].shape[1] or "k", arguments.describe(x))
    end
  end
end

--- Items one behind the other: values [k, n], cu_seqlens i64 [items + 1] (where each begins, and the end), longest.
---@param items Tensor[]  i64 [k, length]
---@return { values: Tensor, cu_seqlens: Tensor, longest: integer }
function M.pack(items)
  local who = "dist.unpadded.pack"
  check_items(who, items)
  if #items == 0 then fail("%s: items: expected at least one, got none", who) end
  local cu, at, longest = { 0 }, 0, 0
  for i, x in ipairs(items) do
    at, longest = at + x.shape[2], math.max(longest, x.shape[2])
    cu[i + 1] = at
  end
  return { values = ty.concat(items, 1), cu_seqlens = ty.tensor(cu, { dtype = "i64" }), longest = longest }
end

--- What an item of a length costs in a transformer of a width: products for each token, and attention between all.
---@param length integer
---@param width integer
---@return number
function M.cost(length, width)
  expect("dist.unpadded.cost", "length", length, "an integer >= 0")
  expect("dist.unpadded.cost", "width", width, "an integer >= 1")
  return length * (6 * width + length)
end

--- Which rank computes which item: the costliest first, each to the rank that has the least until then; of ranks that
-- have as much to its own, so that as few as can be move.
---@param costs number[][]  of each rank's items
---@return integer[][] to    ranks from 0, in the place of the costs
---@return number[] loads    of each rank
function M.assign(costs)
  local who = "dist.unpadded.assign"
  expect(who, "costs", costs, "a list of tables")
  local list, loads, to = {}, {}, {}
  for rank, own in ipairs(costs) do
    loads[rank], to[rank] = 0, {}
    for i, cost in ipairs(own) do
      expect(who, ("costs[%d][%d]"):format(rank, i), cost, "a number >= 0")
      list[#list + 1] = { rank = rank, place = i, cost = cost }
    end
  end
  table.sort(list, function(a, b)
    if a.cost ~= b.cost then return a.cost > b.cost end
    if a.place ~= b.place then return a.place < b.place end
    return a.rank < b.rank
  end)
  for _, item in ipairs(list) do
    local best = item.rank
    for rank, load in ipairs(loads) do if load < loads[best] then best = rank end end
    to[item.rank][item.place] = best - 1
    loads[best] = loads[best] + item.cost
  end
  return to, loads
end

-- The lengths of all ranks' items, as many of each as the largest number of items is.
local function all_lengths(group, items)
  local most = group:all_reduce(ty.tensor({ #items }, { dtype = "i64" }), "max"):item()
  local mine = {}
  for i = 1, most do mine[i] = items[i] and items[i].shape[2] or -1 end
  local lists = {}
  for rank, row in ipairs(group:all_gather(ty.tensor({ mine }, { dtype = "i64" })):tolist()) do
    lists[rank] = {}
    for _, n in ipairs(row) do if n >= 0 then table.insert(lists[rank], n) end end
  end
  return lists
end

--- Begins to give every rank of a group as much work; all ranks call it. What leaves a rank is sent at once, and what
-- comes is taken by wait(). options: width (of the transformer, by which the cost of lengths is known: 768).
---@param group RankGroup
---@param items Tensor[]  this rank's
---@param options? { width?: integer }
---@return UnpaddedExchange
function M.exchange(group, items, options)
  local who = "dist.unpadded.exchange"
  Group.expect(who, group)
  check_items(who, items)
  local o = arguments.read(who, options, { width = 768 }, { width = "an integer >= 1" })
  local lengths, costs = all_lengths(group, items), {}
  for rank, list in ipairs(lengths) do
    costs[rank] = {}
    for i, n in ipairs(list) do costs[rank][i] = M.cost(n, o.width) end
  end
  local to = M.assign(costs)
  local stay, leave = {}, {}
  for i, x in ipairs(items) do
    local rank = to[group.rank + 1][i]
    if rank == group.rank then
      stay[#stay + 1] = x
    else
      leave[rank] = leave[rank] or {}
      table.insert(leave[rank], x)
    end
  end
  local moved = 0
  for rank = 0, group.size - 1 do
    if leave[rank] then
      group:send(ty.concat(leave[rank], 1), rank, TAG)
      moved = moved + #leave[rank]
    end
  end
  local come = {} -- by rank from 1: lengths of the items that it sends here, in their order
  for rank, list in ipairs(lengths) do
    for i, n in ipairs(list) do
      if to[rank][i] == group.rank and rank - 1 ~= group.rank then
        come[rank] = come[rank] or {}
        table.insert(come[rank], n)
      end
    end
  end
  return setmetatable({ group = group, items = stay, come = come, moved = moved, ranks = #lengths }, Exchange)
end

--- This rank's items from now on.
---@return Tensor[]
function Exchange:wait()
  for rank = 1, self.ranks do
    local lengths = self.come[rank]
    if lengths then
      local packed, at = self.group:receive(rank - 1, TAG), 0
      for _, n in ipairs(lengths) do
        self.items[#self.items + 1] = packed:narrow(1, at, n):contiguous()
        at = at + n
      end
      self.come[rank] = nil
    end
  end
  return self.items
end

return M
