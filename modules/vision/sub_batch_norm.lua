--- Batch norm by the statistics of parts of a batch: in training, the clips of a large batch are normalised in groups
-- of their own, so that what a layer learns from the noise of small batches does not change when batches grow.
-- Wu et al. 2020, "A Multigrid Method for Efficiently Training Video Models", section 3.4.
--
--     local norms = sub_batch_norm.wrap(model)
--     sub_batch_norm.groups(model, 4)      -- a batch of 32 is four groups of 8
--     train()
--     sub_batch_norm.unwrap(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

local classes = { [nn.BatchNorm1d] = true, [nn.BatchNorm2d] = true, [nn.BatchNorm3d] = true }

local function is_batch_norm(module)
  local class = getmetatable(module)
  while class do
    if classes[class] then return true end
    class = rawget(class, "super")
  end
  return false
end

-- ---- running statistics: those of each group, and what they come to ----

-- Each group goes on from what all of them had.
local function begin(module, state)
  state.mean = ty.keep(module.running_mean:tile { state.groups })
  state.var = ty.keep(module.running_var:tile { state.groups })
  state.of = state.groups
end

-- Mean and variance of a mixture of the groups, as if they were as many clips each.
local function aggregate(module, state)
  local means, vars = state.mean:reshape(state.groups, -1), state.var:reshape(state.groups, -1)
  local mean = means:mean(0)
  module.running_mean:copy_(mean)
  module.running_var:copy_(vars:mean(0) + (means - mean):square():mean(0))
end

local function groups_of(module, x, groups)
  if x.shape[1] % groups ~= 0 then
    arguments.fail("sub_batch_norm: x: expected a batch that %d groups share, got %s", groups, arguments.describe(x))
  end
  local size = x.shape
  size[1], size[2] = size[1] // groups, size[2] * groups
  return x:reshape(size), module.weight and module.weight:tile { groups }, module.bias and module.bias:tile { groups }
end

local wrapper = nn.surgery.wrapper {
  name = "SubBatch", field = "_sub_batch",
  forward = function(base)
    return function(self, x)
      local state = self._sub_batch
      if state.groups == 1 or not self.training then return base.forward(self, x) end
      arguments.expect("sub_batch_norm", "x", x, "a tensor")
      -- Neighbours are in different groups: [n / groups, groups * c, ...].
      local split, weight, bias = groups_of(self, x, state.groups)
      if not self.running_mean then
        return ty.batch_norm(split, nil, nil, weight, bias, true, self.momentum, self.eps):reshape(x.shape)
      end
      if state.of ~= state.groups then ty.no_grad(begin, self, state) end
      self.num_batches_tracked:add_(1)
      local y = ty.batch_norm(split, state.mean, state.var, weight, bias, true, self.momentum, self.eps)
      ty.no_grad(aggregate, self, state)
      return y:reshape(x.shape)
    end
  end,
  describe = function(state) return ("%d groups"):format(state.groups) end,
}

--- Gives all batch norms of a model groups, one at first: they do what they did. Running statistics stay those of all
-- groups together; after a checkpoint, each group goes on from these.
---@param model Module
---@return Module[] norms  those that were found; an error where there is none
function M.wrap(model)
  arguments.expect("sub_batch_norm.wrap", "model", model, "a module")
  local list = {}
  local names, modules = nn.surgery.modules(model)
  for _, name in ipairs(names) do
    if is_batch_norm(modules[name]) then list[#list + 1] = wrapper:wrap(modules[name], { groups = 1 }) end
  end
  if #list == 0 then arguments.fail("sub_batch_norm.wrap: model: expected one with batch norms, got none") end
  return list
end

--- In how many groups of equal size batches are normalised from now on.
---@param model Module
---@param groups integer
function M.groups(model, groups)
  local who = "sub_batch_norm.groups"
  arguments.expect(who, "groups", groups, "an integer >= 1")
  local list = wrapper:wrapped(who, model)
  if #list == 0 then arguments.fail("%s: model: expected one that sub_batch_norm.wrap has seen, got none", who) end
  for _, layer in ipairs(list) do
    local state = wrapper:state(layer.module)
    if state.groups ~= groups then state.groups, state.of, state.mean, state.var = groups, nil, nil, nil end
  end
end

--- Makes the batch norms what they were.
---@param model Module
function M.unwrap(model)
  for _, layer in ipairs(wrapper:wrapped("sub_batch_norm.unwrap", model)) do wrapper:unwrap(layer.module) end
end

return M
