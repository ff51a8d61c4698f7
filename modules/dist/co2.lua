--- Rounds of local steps whose all-reduce has the whole next round to arrive: nobody waits for the network as long as
-- it takes no longer than the steps of a round.
--
--     local outer = dist.CO2(group, model:parameters())
--     for step = 1, 1000 do
--       inner:step(loss(step)) -- of the replica's own rows
--       if step % 12 == 0 then outer:step() end
--     end
--     outer:finish()
--
-- Sun et al. 2024, "CO2: Efficient Distributed Training with Full Communication-Computation Overlap".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local updates = require "tycho.dist.local_updates"

---@class CO2: SlowWeights
---@field gap number|nil  the staleness gap of the last round
local CO2 = updates.class "CO2"

local M = {}

--- The outer optimizer of CO2. A round t begins everywhere at the slow weights x[t]; at its end what its steps have
-- changed, d[t] = x[t] - mean over ranks of the weights then, is begun to be reduced, and what is used is that of the
-- round before:
--
--     m = momentum * m + d[t - 1] / gap[t],   x[t + 1] = x[t] - lr * clip(m, -clip, clip)
--
-- d[t - 1] was found at x[t - 1] and is used at x[t]. The gap says how far these are apart, after Barkai et al. 2020,
-- "Gap-Aware Mitigation of Gradient Staleness", in largest moves of a round so far, plus one:
--
--     gap[t] = 1 + |x[t] - x[t - 1]| / max over s <= t of |x[s] - x[s - 1]|
--
-- so that it is 2 where the weights move as fast as ever, and goes to 1 as they come to rest. The authors' code divides
-- by a constant, which `penalty` may be as well; with 1 there is no penalty. m is clipped element by element.
-- options: lr (1), momentum (0.2), penalty ("gap", or a number >= 1), clip (math.huge).
---@param group RankGroup
---@param parameters Tensor[]  the same on all ranks, of one dtype
---@param options? { lr?: number, momentum?: number, penalty?: number|string, clip?: number }
---@return CO2
function M.CO2(group, parameters, options)
  local o = arguments.read("dist.CO2", options, { lr = 1, momentum = 0.2, penalty = "gap", clip = math.huge },
    { lr = "a finite number >= 0", momentum = "a number in [0, 1)", penalty = '"gap" or a finite number >= 1',
      clip = "a number > 0" })
  local self = updates.slow_weights("dist.CO2", CO2, group, parameters)
  self.lr, self.decay, self.penalty, self.clip, self.largest = o.lr, o.momentum, o.penalty, o.clip, 0
  return self
end

-- How stale the change is that has arrived.
local function gap_of(self)
  if self.penalty ~= "gap" then return self.penalty end
  local moved = self.moved and self.moved:square():sum():sqrt():item() or 0
  self.largest = math.max(self.largest, moved)
  return moved > 0 and 1 + moved / self.largest or 1
end

-- The step with a change that is on its way.
local function apply(self, work)
  local change = work:wait()
  self.gap = gap_of(self)
  self.momentum:mul_(self.decay):add_(change, 1 / self.gap)
  local move = (self.clip < math.huge and self.momentum:clamp(-self.clip, self.clip) or self.momentum) * -self.lr
  self.slow:add_(move)
  self.moved = move
end

--- Ends a round: begins to reduce what it has changed and goes on with what the round before has. The first round's
-- end changes nothing: the second begins where the first began. Every rank of the group calls it.
function CO2:step()
  ty.no_grad(function()
    local change = self.slow - self:fast() -- before the slow weights move
    if self.work then apply(self, self.work) end -- first, as the next one needs the links
    self.work = self.group:all_reduce(change, "mean", { async = true })
  end)
  self.rounds = self.rounds + 1
  self:restart()
end

--- Takes what is still on its way, at the end of training: after step(), as what was trained since is given up.
function CO2:finish()
  if not self.work then return end
  ty.no_grad(apply, self, self.work)
  self.work = nil
  self:restart()
end

return M
