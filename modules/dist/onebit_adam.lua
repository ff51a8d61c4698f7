--- Adam whose ranks exchange one bit for each parameter. Tang et al. 2021, "1-bit Adam: Communication Efficient
-- Large-Scale Training with Adam's Convergence Speed".
--
-- After a warm-up as plain Adam the variance has become steady and is frozen. From then on a step is one of SGD with
-- momentum, divided by the root of what is frozen: linear in the gradients, so that what compression loses can be made
-- up for later. Ranks exchange their momenta by dist.sign_mean.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"
local buckets = require("tycho.dist.gradients").buckets
local sign_mean = require "tycho.dist.sign_mean"

local expect = arguments.expect
local M = {}

--- What dist.onebit_adam makes.
---@class OnebitAdam
---@field steps integer        steps done
---@field frozen integer|nil   the step after which the variance was frozen
---@field exp_avg Tensor       [n], the momentum, the same on all ranks
---@field exp_avg_sq Tensor    [n]
local Adam = {}
Adam.__index = Adam
Adam.__name = "OnebitAdam"

local defaults = { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, schedule = arguments.none,
  warmup = arguments.none, threshold = 0.96, block = 128, compressed = true }
local kinds = { lr = "a finite number >= 0", beta1 = "a number in [0, 1)", beta2 = "a number in [0, 1)",
  eps = "a finite number >= 0", weight_decay = "a finite number >= 0", schedule = "a function",
  warmup = "an integer >= 1", threshold = "a number in [0, 1]", block = "an integer >= 8" }

--- Makes one for parameters that are the same on all ranks. options:
--   lr, beta1, beta2, eps, weight_decay (0: taken from the weights themselves), schedule  as those of ty.optim.AdamW
--   warmup      steps as plain Adam; by default as many as the variance takes to become steady: until its sum (without
--               the bias of its beginning) is `threshold` (0.96) or more of what it was 1 / (1 - beta2) steps before
--   block       elements that share a scale (128)
--   compressed  false: the momenta's mean as it is, to see what compression does
---@param group RankGroup
---@param parameters Module|Tensor[]
---@param options? table
---@return OnebitAdam
function M.new(group, parameters, options)
  local who = "dist.onebit_adam"
  Group.expect(who, group)
  expect(who, "parameters", parameters, "a module or a list of tensors")
  local o = arguments.read(who, options, defaults, kinds)
  local list = arguments.is_module(parameters) and parameters:parameters() or parameters
  local self = setmetatable(o, Adam)
  self.group, self.steps, self.sums = group, 0, {}
  self.buckets = buckets(list, { bytes = math.maxinteger, order = "forward" })
  self.bucket = self.buckets.buckets[1]
  local n = self.bucket.count
  self.mean = sign_mean.new(group, n, { block = o.block, dtype = list[1].dtype })
  self.exp_avg = ty.keep(self.bucket.flat:zeros_like())
  self.exp_avg_sq = ty.keep(self.bucket.flat:zeros_like())
  return self
end

-- Whether the variance has become steady.
local function is_steady(self)
  local t, back = self.steps, math.max(1, math.floor(1 / (1 - self.beta2) + 0.5))
  if self.warmup then return t >= self.warmup end
  self.sums[t] = self.exp_avg_sq:sum():item() / (1 - self.beta2 ^ t)
  local before = self.sums[t - back]
  return before ~= nil and self.sums[t] >= self.threshold * before
end

-- What the momentum is divided by from now on. Where there never was a gradient the signs would be all there is: such
-- parameters stay.
local function freeze(self)
  self.frozen = self.steps
  local v = self.exp_avg_sq
  local root = (v / (1 - self.beta2 ^ self.steps)):sqrt():add_(self.eps)
  self.divisor = ty.keep(ty.where(v:eq(0), math.huge, root))
end

local function step(self)
  local flat, m, v = self.bucket.flat, self.exp_avg, self.exp_avg_sq
  self.steps = self.steps + 1
  self.buckets:read_gradients(self.bucket)
  if not self.frozen then self.group:all_reduce(flat, "mean") end
  m:mul_(self.beta1):add_(flat * (1 - self.beta1))
  local divisor = self.divisor
  if not self.frozen then
    v:mul_(self.beta2):add_(flat:square() * (1 - self.beta2))
    divisor = (v / (1 - self.beta2 ^ self.steps)):sqrt():add_(self.eps)
    if is_steady(self) then freeze(self) end
  elseif self.compressed then
    self.mean:mean(m)
  else
    self.group:all_reduce(m, "mean")
  end
  local rate = self.lr * (self.schedule and self.schedule(self.steps - 1) or 1)
  self.buckets:read(self.bucket)
  flat:mul_(1 - rate * self.weight_decay):sub_(m / divisor * (rate / (1 - self.beta1 ^ self.steps)))
  self.buckets:write(self.bucket)
end

--- A step with the gradients of this rank's share of the batch, which all ranks do. Without a loss the gradients are
-- there and stay.
---@param loss? Tensor
function Adam:step(loss)
  expect("OnebitAdam:step", "loss", loss, "a tensor or nil")
  if loss then
    self:zero_grad()
    loss:backward()
  end
  ty.no_grad(ty.scope, step, self)
  if loss then self:zero_grad() end
end

--- Drops the gradients.
function Adam:zero_grad()
  for _, p in ipairs(self.bucket.parameters) do p:set_grad() end
end

return M
