--- Networks that have each learnt a part of the data and nothing of the others, and a router that says which of them to
-- believe. McAllister et al. 2025, "Decentralized Diffusion Models".
--
-- What a network should say of a noisy sample, a mean over all clean ones that it may come from, is the mean of what it
-- should say for each part of the data alone, weighted by how likely the sample comes from that part. So experts may be
-- trained apart, without a word between them; a small network learns the weights, as a classifier of noisy samples.
--
--     local model = diffusion.experts.mixture(networks, router)
--     local loss = diffusion.experts.router_loss(flow, router, pictures, parts)      -- parts: i64 [n]
--     local samples = flow:sample(model, { 16, 1, 8, 8 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Several networks as one.
---@class ExpertMixture
---@field experts function[]  networks
---@field router function     x, t, condition to logits [n, experts]
---@field top integer         how many are asked for each sample
---@field evaluated integer[] samples that each expert was asked for
local Mixture = {}
Mixture.__index = Mixture
Mixture.__name = "ExpertMixture"

--- A network of the experts' predictions, weighted by the router's probabilities; all predict the same kind. options:
-- top (all: of each sample only so many experts are asked, those most likely, whose weights are divided by their sum;
-- with 1 a sample costs what one network costs).
---@param experts function[]  networks, model(x, t, condition)
---@param router function     model(x, t, condition) to logits [n, experts]
---@param options? { top?: integer }
---@return ExpertMixture
function M.mixture(experts, router, options)
  local who = "diffusion.experts.mixture"
  expect(who, "experts", experts, "a list of functions")
  expect(who, "router", router, "a function")
  if #experts == 0 then fail("%s: experts: expected at least one, got none", who) end
  local o = arguments.read(who, options, { top = #experts }, { top = "an integer >= 1" })
  if o.top > #experts then fail("%s: top: expected at most the %d experts, got %d", who, #experts, o.top) end
  local self = setmetatable({ experts = experts, router = router, top = o.top, evaluated = {} }, Mixture)
  for k = 1, #experts do self.evaluated[k] = 0 end
  return self
end

--- Where the experts compute.
---@return string
function Mixture:device()
  local first = self.experts[1]
  return type(first) == "table" and first.device and first:device() or "cpu"
end

--- How much each expert counts for noisy samples: [n, experts], rows that sum to 1, 0 for those that are not asked.
---@param x Tensor
---@param t Tensor  [n]
---@param condition? table
---@return Tensor
function Mixture:weights(x, t, condition)
  local p = self.router(x, t, condition or {}):softmax(-1)
  if p.ndim ~= 2 or p.shape[1] ~= x.shape[1] or p.shape[2] ~= #self.experts then
    fail("ExpertMixture: router: expected logits [%d, %d], got %s", x.shape[1], #self.experts, arguments.describe(p))
  end
  if self.top == #self.experts then return p end
  local most, where = p:topk(self.top, 1)
  return ty.zeros_like(p):scatter(1, where, most / most:sum(1, true))
end

--- What the mixture predicts.
---@param x Tensor  [n, ...]
---@param t Tensor  [n], as networks have it
---@param condition? table
---@return Tensor
function Mixture:__call(x, t, condition)
  if getmetatable(self) ~= Mixture then
    fail("ExpertMixture: expected a mixture, got %s", arguments.describe(self))
  end
  expect("ExpertMixture", "x", x, "a tensor")
  expect("ExpertMixture", "t", t, "a tensor")
  condition = condition or {}
  local weights, n = self:weights(x, t, condition), x.shape[1]
  local shape, sum = { n }, nil
  for d = 2, x.ndim do shape[d] = 1 end
  for k, expert in ipairs(self.experts) do
    local w = weights:select(1, k - 1)
    if self.top == #self.experts then
      self.evaluated[k] = self.evaluated[k] + n
      local part = expert(x, t, condition) * w:reshape(shape)
      sum = sum and sum + part or part
    else
      local rows = w:gt(0):nonzero():squeeze(1)
      local count = rows:numel()
      self.evaluated[k] = self.evaluated[k] + count
      sum = sum or ty.zeros_like(x)
      if count > 0 then
        shape[1] = count
        local part = expert(x:index_select(0, rows), t:index_select(0, rows), conditions.select(condition, rows))
        sum = sum:index_add(0, rows, part * w:index_select(0, rows):reshape(shape))
      end
    end
  end
  return sum
end

--- What a router is trained for: to tell from which part of the data a noisy sample comes, at the times of the
-- process. The cross entropy, a tensor of no dimensions; probabilities of a router that has learnt it are the weights
-- of experts.
---@param process Process
---@param router function  model(x, t, condition) to logits [n, parts]
---@param x0 Tensor        clean samples [n, ...]
---@param parts Tensor     i64 [n]
---@param condition? table
---@param given? { t?: Tensor, noise?: Tensor }  instead of drawn ones
---@return Tensor loss
function M.router_loss(process, router, x0, parts, condition, given)
  local who = "diffusion.experts.router_loss"
  expect(who, "process", process, "a table")
  expect(who, "router", router, "a function")
  expect(who, "x0", x0, "a tensor")
  expect(who, "parts", parts, "a tensor")
  expect(who, "condition", condition, "a table or nil")
  expect(who, "given", given, "a table or nil")
  local objective = process.objective
  if type(objective) ~= "table" or not objective.noisy then
    fail("%s: process: expected one such as diffusion.Flow(), got %s", who, arguments.describe(process))
  end
  local noisy = objective:noisy(x0, given and given.t, given and given.noise)
  return ty.cross_entropy(objective:output(router, noisy, condition or {}), parts)
end

--- The samples of each of n parts, which experts learn from.
---@param x0 Tensor     [n, ...]
---@param parts Tensor  i64 [n], from 0
---@param count integer
---@return Tensor[]
function M.divide(x0, parts, count)
  local who = "diffusion.experts.divide"
  expect(who, "x0", x0, "a tensor")
  expect(who, "parts", parts, "a tensor")
  expect(who, "count", count, "an integer in [1, 65536]")
  if parts.ndim ~= 1 or x0.ndim == 0 or parts.shape[1] ~= x0.shape[1] then
    fail("%s: parts: expected one for each row of x0, %s, got %s", who, arguments.describe(x0),
      arguments.describe(parts))
  end
  local list = {}
  for k = 1, count do list[k] = x0:index_select(0, parts:eq(k - 1):nonzero():squeeze(1)) end
  return list
end

--- Trains a router on clean samples and the parts that they belong to. Returns the average of its weights, for use.
-- options: steps (750), batch (256), lr (2e-3).
---@param process Process
---@param router Module   x, t, condition to logits [n, parts]
---@param x0 Tensor       [n, ...]
---@param parts Tensor    i64 [n]
---@param options? { steps?: integer, batch?: integer, lr?: number }
---@return Module
function M.train_router(process, router, x0, parts, options)
  local who = "diffusion.experts.train_router"
  expect(who, "router", router, "a module")
  expect(who, "x0", x0, "a tensor")
  expect(who, "parts", parts, "a tensor")
  local o = arguments.read(who, options, { steps = 750, batch = 256, lr = 2e-3 },
    { steps = "an integer >= 1", batch = "an integer >= 1", lr = "a number > 0" })
  local set = ty.data.TensorDataset { sample = x0, part = parts }
  local _, averaged = ty.train.fit(router, ty.data.draws(set, o.batch, { backward = true }), { steps = o.steps,
    lr = o.lr, final = 0.02, beta2 = 0.99, weight_decay = 0.01, average = 0.99, quiet = true,
    loss = function(net, rows) return M.router_loss(process, net, rows.sample, rows.part) end })
  return averaged:eval():requires_grad_(false)
end

--- The loss of a network over clean samples, with noise that is the same each time, at times that are spread evenly.
---@param process Process
---@param network function
---@param x0 Tensor  [n, ...]
---@param options? { seed?: integer }  of the noise (7)
---@return number
function M.held_out_loss(process, network, x0, options)
  local who = "diffusion.experts.held_out_loss"
  expect(who, "process", process, "a table")
  expect(who, "network", network, "a function")
  expect(who, "x0", x0, "a tensor")
  local o = arguments.read(who, options, { seed = 7 }, { seed = "an integer" })
  if type(process.loss) ~= "function" then
    fail("%s: process: expected one such as diffusion.Flow(), got %s", who, arguments.describe(process))
  end
  local given = { t = (ty.arange(x0.shape[1]) % 50 + 0.5) / 50,
    noise = ty.seeded_noise(ty.empty_like(x0), o.seed) }
  return ty.no_grad(function() return process:loss(network, x0, {}, given):item() end)
end

return M
