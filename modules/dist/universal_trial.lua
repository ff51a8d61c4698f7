--- What the recipe of universal checkpoints trains: a workload's model whose layers some ranks share, where those with
-- the same parameters each keep a part of the optimizer's state.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local grid_trial = require "tycho.dist.grid_trial"
local Group = require "tycho.dist.group"
local make_grid = require "tycho.dist.grid"
local universal = require "tycho.dist.universal"
local workload = require "tycho.dist.workload"

local M = {}

-- What of a Llama tensor parallel ranks share, and how: of the embedding and the norms all have the same.
local language = universal.language {
  { "%.[qkv]_proj%.weight$", "sharded", dim = 0 },
  { "%.o_proj%.weight$", "sharded", dim = 1 },
  { "%.gate_proj%.weight$", "sharded", dim = 0 }, { "%.up_proj%.weight$", "sharded", dim = 0 },
  { "%.down_proj%.weight$", "sharded", dim = 1 },
  { "", "replicated" },
}

--- A Llama trained on a grid of ranks, whose checkpoints others go on from.
---@class UniversalTrainer
local Trainer = {}
Trainer.__index = Trainer
Trainer.__name = "UniversalTrainer"

--- The rank's part of training on tensor * data ranks. AdamW is of one flat tensor, of which each rank that has the
-- same parameters has a part: Rajbhandari et al. 2020, "ZeRO". options: tensor, data (1 each), rows (8: of a step, of
-- all ranks), lr (3e-3), seed (0), dtype ("f32").
---@param group RankGroup
---@param work RankWorkload
---@param options? table
---@return UniversalTrainer
function M.new(group, work, options)
  local who = "dist.universal_trial.new"
  Group.expect(who, group)
  local o = arguments.read(who, options, { tensor = 1, data = 1, rows = 8, lr = 3e-3, seed = 0, dtype = "f32" },
    { tensor = "an integer >= 1", data = "an integer >= 1", rows = "an integer >= 1", lr = "a number > 0",
      seed = "an integer", dtype = '"f32" or "f64"' })
  local grid = make_grid(group, { tensor = o.tensor, data = o.data })
  if o.rows % o.data ~= 0 then
    arguments.fail("%s: rows: expected a multiple of the %d parts of the data, got %d", who, o.data, o.rows)
  end
  local model = workload.model(work, o.seed):to(o.dtype)
  local shapes = {}
  for name, p in model:named_parameters() do shapes[name] = p.shape end
  grid_trial.divide(model, grid.tensor)
  local self = setmetatable({ group = group, grid = grid, work = work, model = model, seed = o.seed, rows = o.rows,
    steps = 0, list = {} }, Trainer)
  local at = 0
  for name, p in model:named_parameters() do
    name = name:gsub("%.inner%.", ".") -- as it is where it is whole
    self.list[#self.list + 1] = { name = name, parameter = p, at = at,
      part = language:part(name, shapes[name], grid.tensor.rank, grid.tensor.size) }
    at = at + p:numel()
  end
  self.share = (at + o.data - 1) // o.data
  self.flat = ty.zeros({ self.share * o.data }, { dtype = o.dtype })
  self:fill(function(item) return item.parameter:detach() end)
  local own = self.flat:narrow(0, grid.data.rank * self.share, self.share):clone()
  self.own = own:requires_grad_()
  self.optimizer = ty.optim.AdamW({ self.own }, { lr = o.lr })
  return self
end

-- Copies what of(item) gives for each parameter into the flat tensor.
function Trainer:fill(of)
  ty.no_grad(function()
    for _, item in ipairs(self.list) do
      local p, x = item.parameter, of(item)
      local part = self.flat:narrow(0, item.at, p:numel()):view(p.shape)
      if x then part:copy_(x) else part:zero_() end
    end
  end)
end

-- All ranks with the same parameters put their parts together, and make them the parameters.
function Trainer:spread()
  ty.no_grad(function()
    local all = self.grid.data:all_gather(self.own:detach())
    for _, item in ipairs(self.list) do
      local p = item.parameter
      p:detach():copy_(all:narrow(0, item.at, p:numel()):view(p.shape))
    end
  end)
end

-- The rank's rows of a step.
function Trainer:batch(step)
  local share = self.rows // self.grid.data.size
  return workload.rows(self.work, self.seed, step, self.grid.at.data * share, share)
end

--- A step; returns the loss of all rows before it.
---@return number
function Trainer:step()
  self.steps = self.steps + 1
  local data = self.grid.data
  local loss = workload.loss(self.model, self:batch(self.steps))
  self.model:zero_grad()
  loss:backward()
  self:fill(function(item) return item.parameter.grad end)
  self.own:set_grad(data:reduce_scatter(self.flat, "mean"))
  self.optimizer:step()
  self:spread()
  return data:all_reduce(loss:detach():to "f64", "mean"):item()
end

--- Calls visit(item, from, begin, count) for the parameters of which this rank has a part in the optimizer: from which
-- element of its own flat tensor on, and of the parameter's part.
function Trainer:each(visit)
  local first = self.grid.data.rank * self.share
  for _, item in ipairs(self.list) do
    local from = math.max(item.at, first)
    local to = math.min(item.at + item.parameter:numel(), first + self.share)
    if from < to then visit(item, from - first, from - item.at, to - from) end
  end
end

--- Saves all: every rank what it has of the parameters in its optimizer, and its state.
---@param path string
function Trainer:save(path)
  arguments.expect("UniversalTrainer:save", "path", path, "a string")
  local pieces, state = {}, self.optimizer:state_dict().state["0"] or {}
  self:each(function(item, from, begin, count)
    local function add(slot, x)
      pieces[#pieces + 1] = { name = item.name, slot = slot, part = item.part, begin = begin,
        tensor = x:detach():narrow(0, from, count) }
    end
    add("weight", self.own)
    for slot, x in pairs(state) do
      if ty.is_tensor(x) and x.ndim == 1 and x:numel() == self.share then add(slot, x) end
    end
  end)
  universal.save(self.group, path, pieces, { steps = self.steps })
end

--- Goes on from what any number of ranks have saved.
---@param path string
function Trainer:load(path)
  arguments.expect("UniversalTrainer:load", "path", path, "a string")
  local checkpoint = universal.open(self.group, path)
  self.steps = math.tointeger(checkpoint.values.steps) or 0
  local slots = checkpoint:slots(self.list[1].name) or {}
  local state = { step = self.steps }
  ty.no_grad(function()
    for _, slot in ipairs(slots) do
      local flat = self.own:detach():zeros_like()
      self:each(function(item, from, begin, count)
        flat:narrow(0, from, count):copy_(checkpoint:take(item.name, slot, item.part, begin, count))
      end)
      if slot == "weight" then self.own:detach():copy_(flat) else state[slot] = flat end
    end
  end)
  local all = self.optimizer:state_dict()
  all.state["0"], all.steps = state, self.steps
  self.optimizer:load_state_dict(all)
  self:spread()
end

--- Forgets what the optimizer knows, and keeps the parameters.
function Trainer:forget()
  local all = self.optimizer:state_dict()
  all.state, all.steps = {}, 0
  self.optimizer:load_state_dict(all)
end

return M
