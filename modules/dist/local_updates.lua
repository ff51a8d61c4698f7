--- Replicas that train by themselves for some steps and only then exchange what these have changed: DiLoCo, where an
-- all-reduce means the changes of all replicas, and NoLoCo, where a replica exchanges messages with one other alone.
--
--     local outer = dist.NoLoCo(group, model:parameters())
--     for step = 1, 1000 do
--       inner:step(loss(step)) -- of the replica's own rows
--       if step % 50 == 0 then outer:step() end
--     end
--
-- Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models". Kolehmainen et al. 2025,
-- "NoLoCo: No-all-reduce Low Communication Training Method for Large Models".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local gradients = require "tycho.dist.gradients"
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail

local M = {}

-- ---- weights ----

--- Weights that a replica trains, in two states: `slow`, those of the last outer step, and `fast`, which steps of the
-- replica have changed since. All are flat tensors [count].
---@class SlowWeights
---@field group RankGroup
---@field slow Tensor
---@field momentum Tensor
---@field rounds integer  outer steps done
local SlowWeights = {}
SlowWeights.__index = SlowWeights

--- Fills a new object of an outer optimizer.
---@param who string  for errors
---@param class table  what it is
---@param group RankGroup
---@param parameters Tensor[]  of one dtype
function M.slow_weights(who, class, group, parameters)
  expect("dist.local_updates.slow_weights", "who", who, "a string")
  Group.expect(who, group)
  expect(who, "parameters", parameters, "a list of tensors")
  if #parameters == 0 then fail("%s: parameters: expected at least one, got none", who) end
  local flat = gradients.buckets(parameters, { bytes = math.maxinteger, order = "forward" })
  local self = setmetatable({ group = group, flat = flat, rounds = 0 }, class)
  self.slow = self:fast():clone()
  self.momentum = ty.zeros_like(self.slow)
  return self
end

--- The weights as they are now: a flat tensor that the next call fills again.
function SlowWeights:fast()
  local bucket = self.flat.buckets[1]
  self.flat:read(bucket)
  return bucket.flat
end

--- Training goes on from the slow weights.
function SlowWeights:restart()
  local bucket = self.flat.buckets[1]
  bucket.flat:copy_(self.slow)
  self.flat:write(bucket)
end

--- A class of outer optimizers.
---@param name string
---@return table class
function M.class(name)
  local class = setmetatable({ __name = name }, SlowWeights)
  class.__index = class
  return class
end

-- ---- DiLoCo ----

---@class DiLoCo: SlowWeights
local DiLoCo = M.class "DiLoCo"

--- The outer optimizer of DiLoCo: Nesterov's momentum on the mean, over all replicas, of what their own steps have
-- changed. With lr = 1 and momentum = 0 it means weights, which is local SGD (Stich 2019).
-- options: lr (0.7), momentum (0.9).
---@param group RankGroup
---@param parameters Tensor[]  the same on all ranks, of one dtype
---@param options? { lr?: number, momentum?: number }
---@return DiLoCo
function M.DiLoCo(group, parameters, options)
  local o = arguments.read("dist.DiLoCo", options, { lr = 0.7, momentum = 0.9 },
    { lr = "a finite number >= 0", momentum = "a number in [0, 1)" })
  local self = M.slow_weights("dist.DiLoCo", DiLoCo, group, parameters)
  self.lr, self.decay = o.lr, o.momentum
  return self
end

--- Ends a round: all replicas have the same weights again. Every rank of the group calls it.
function DiLoCo:step()
  ty.no_grad(function()
    local change = self.slow - self:fast() -- the outer gradient
    self.group:all_reduce(change, "mean")
    self.momentum:mul_(self.decay):add_(change)
    self.slow:sub_((self.momentum * self.decay + change) * self.lr)
  end)
  self.rounds = self.rounds + 1
  self:restart()
end

-- ---- NoLoCo ----

---@class NoLoCo: SlowWeights
local NoLoCo = M.class "NoLoCo"

--- With whom a rank exchanges in a round: pairs are drawn anew for each, from the seed and the round alone, so that all
-- ranks know them. Of an odd number of ranks one is left over, another each round.
---@param size integer  of the group
---@param rank integer
---@param seed integer
---@param round integer
---@return integer|nil partner
function M.partner(size, rank, seed, round)
  local who = "dist.local_updates.partner"
  expect(who, "size", size, "an integer >= 1")
  expect(who, "rank", rank, "an integer >= 0")
  expect(who, "seed", seed, "an integer")
  expect(who, "round", round, "an integer")
  if rank >= size then fail("%s: rank: expected a rank of 0 to %d, got %d", who, size - 1, rank) end
  local order = ty.seeded_noise(ty.empty(size), seed * 1000003 + round, "uniform"):argsort():tolist()
  for i, other in ipairs(order) do
    if other == rank then return order[i % 2 == 1 and i + 1 or i - 1] end
  end
end

--- The outer optimizer of NoLoCo. With phi a replica's slow weights, Delta what its steps have changed since and means
-- over it and its partner of the round, eq. 2 and 3 of the paper are
--
--     delta = momentum * delta + lr * mean(Delta) - pull * (phi - mean(phi)),   phi = phi + delta
--
-- (the paper has the second sign the other way round; its proof and its code have it so). Without pull, replicas that
-- differ never come together. By the paper's proof, which takes replicas to be independent, their variance stays
-- bounded for momentum < pull < sqrt(2 + momentum^2); dist.DiLoCo's Nesterov look-ahead is not in it. Slow weights are
-- sent as soon as they are there, and are on their way while the replica trains: only Delta is waited for.
-- options: lr (0.7), momentum (0.5), pull (0.7, in the range above; any number >= 0 is taken), seed (0: of the pairs).
---@param group RankGroup
---@param parameters Tensor[]  of one dtype; replicas may begin with different ones
---@param options? { lr?: number, momentum?: number, pull?: number, seed?: integer }
---@return NoLoCo
function M.NoLoCo(group, parameters, options)
  local o = arguments.read("dist.NoLoCo", options, { lr = 0.7, momentum = 0.5, pull = 0.7, seed = 0 },
    { lr = "a finite number >= 0", momentum = "a number in [0, 1)", pull = "a finite number >= 0",
      seed = "an integer" })
  local self = M.slow_weights("dist.NoLoCo", NoLoCo, group, parameters)
  self.lr, self.decay, self.pull, self.seed = o.lr, o.momentum, o.pull, o.seed
  self:announce()
  return self
end

local SLOW, CHANGE = 1, 2 -- tags of messages

-- The slow weights go to the partner of the next round.
function NoLoCo:announce()
  self.partner = M.partner(self.group.size, self.group.rank, self.seed, self.rounds + 1)
  if self.partner then self.group:send(self.slow, self.partner, SLOW) end
end

--- Ends a round: messages with one other rank, which calls it too; nobody else is waited for.
function NoLoCo:step()
  ty.no_grad(function()
    local partner, change = self.partner, self:fast() - self.slow
    self.momentum:mul_(self.decay)
    if partner then
      self.group:send(change, partner, CHANGE)
      local others = self.group:receive(partner, SLOW):to(self.slow.device)
      change = (change + self.group:receive(partner, CHANGE):to(change.device)) * 0.5
      self.momentum:add_((others - self.slow) * (0.5 * self.pull)) -- mean(phi) - phi
    end
    self.momentum:add_(change, self.lr)
    self.slow:add_(self.momentum)
  end)
  self.rounds = self.rounds + 1
  self:restart()
  self:announce()
end

--- How far replicas are apart: the root of the mean, over weights, of their variance over the replicas.
---@param replicas Tensor[]  of one shape
---@return number
function M.spread(replicas)
  local who = "dist.local_updates.spread"
  expect(who, "replicas", replicas, "a list of tensors")
  if #replicas == 0 then fail("%s: replicas: expected at least one, got none", who) end
  for _, x in ipairs(replicas) do
    if table.concat(x.shape, " ") ~= table.concat(replicas[1].shape, " ") then
      fail("%s: replicas: expected tensors of one shape, got %s and %s", who, arguments.describe(replicas[1]),
        arguments.describe(x))
    end
  end
  local all = ty.stack(replicas, 0):to "f64"
  return (all - all:mean(0, true)):square():mean():sqrt():item()
end

return M
