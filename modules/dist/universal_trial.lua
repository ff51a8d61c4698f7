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
-- all ranks), lr (3e-3), seed (0), dtype ("f32"), replicas (false: true, and ranks with the same parameters all keep
-- all of the optimizer's state).
---@param group RankGroup
---@param work RankWorkload
---@param options? table
---@return UniversalTrainer
function M.new(group, work, options)
  local who = "dist.universal_trial.new"
  Group.expect(who, group)
  local o = arguments.read(who, options, { tensor = 1, data = 1, rows = 8, lr = 3e-3, seed = 0, dtype = "f32",
    replicas = false },
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
  self.shared = not o.replicas
  self.share = self.shared and (at + o.data - 1) // o.data or at
  self.first = self.shared and grid.data.rank * self.share or 0
  self.flat = ty.zeros({ self.shared and self.share * o.data or at }, { dtype = o.dtype })
  self:fill(function(item) return item.parameter:detach() end)
  local own = self.flat:narrow(0, self.first, self.share):clone()
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
    local all = self.own:detach()
    if self.shared then all = self.grid.data:all_gather(all) end
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
  self.own:set_grad(self.shared and data:reduce_scatter(self.flat, "mean") or data:all_reduce(self.flat, "mean"))
  self.optimizer:step()
  self:spread()
  return data:all_reduce(loss:detach():to "f64", "mean"):item()
end

--- Calls visit(item, from, begin, count) for the parameters of which this rank has a part in the optimizer: from which
-- element of its own flat tensor on, and of the parameter's part.
function Trainer:each(visit)
  local first = self.first
  for _, item in ipairs(self.list) do
    local from = math.max(item.at, first)
    local to = math.min(item.at + item.parameter:numel(), first + self.share)
    if from < to then visit(item, from - first, from - item.at, to - from) end
  end
end

--- What this rank has of the parameters in its optimizer, and its state: what dist.universal.save() takes, and values.
---@return table[] pieces
---@return table values
function Trainer:pieces()
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
  table.sort(pieces, function(a, b) -- in one order each time
    if a.name ~= b.name then return a.name < b.name end
    if a.slot ~= b.slot then return a.slot < b.slot end
    return a.begin < b.begin
  end)
  return pieces, { steps = self.steps }
end

--- Saves all: every rank what it has. saver: of dist.universal.saver, which does so while training goes on.
---@param path string
---@param saver? UniversalSaver
function Trainer:save(path, saver)
  arguments.expect("UniversalTrainer:save", "path", path, "a string")
  arguments.expect("UniversalTrainer:save", "saver", saver, "a table or nil")
  if saver then return saver:save(path, self:pieces()) end
  universal.save(self.group, path, self:pieces())
end

-- Of each slot what the rank wants of it, put together: from atoms, or straight from what ranks have saved.
local function read(self, path, directly)
  local out = {}
  local function put(slot, x, from, count)
    out[slot] = out[slot] or self.own:detach():zeros_like()
    out[slot]:narrow(0, from, count):copy_(x)
  end
  if not directly then
    local checkpoint = universal.open(self.group, path)
    for _, slot in ipairs(checkpoint:slots(self.list[1].name) or {}) do
      self:each(function(item, from, begin, count)
        put(slot, checkpoint:take(item.name, slot, item.part, begin, count), from, count)
      end)
    end
    return out, checkpoint
  end
  local reader, wanted, places = universal.load(self.group, path), {}, {}
  for _, slot in ipairs(reader:slots(self.list[1].name) or {}) do
    self:each(function(item, from, begin, count)
      wanted[#wanted + 1] = { name = item.name, slot = slot, part = item.part, begin = begin, count = count }
      places[#wanted] = from
    end)
  end
  for i, x in ipairs(reader:read(wanted)) do put(wanted[i].slot, x, places[i], wanted[i].count) end
  return out, reader
end

--- Goes on from what any number of ranks have saved.
---@param path string
---@param directly? boolean  by dist.universal.load: nothing is put together before, each byte is read once
---@return UniversalCheckpoint|UniversalReader
function Trainer:load(path, directly)
  arguments.expect("UniversalTrainer:load", "path", path, "a string")
  arguments.expect("UniversalTrainer:load", "directly", directly, "a boolean or nil")
  local source
  ty.no_grad(function()
    local state
    state, source = read(self, path, directly)
    self.steps = math.tointeger(source.values.steps) or 0
    if state.weight then self.own:detach():copy_(state.weight) end
    state.weight, state.step = nil, self.steps
    local all = self.optimizer:state_dict()
    all.state["0"], all.steps = state, self.steps
    self.optimizer:load_state_dict(all)
  end)
  self:spread()
  return source
end

--- Files of atoms of one checkpoint that another does not have byte for byte.
---@param a string  where the first is
---@param b string
---@return integer
function M.differing(a, b)
  arguments.expect("dist.universal_trial.differing", "a", a, "a string")
  arguments.expect("dist.universal_trial.differing", "b", b, "a string")
  local count = 0
  for _, name in ipairs(ty.io.listdir(a .. "/atoms")) do
    local one, other = a .. "/atoms/" .. name, b .. "/atoms/" .. name
    if not ty.io.exists(other) or ty.io.read(one) ~= ty.io.read(other) then count = count + 1 end
  end
  return count
end

--- Bytes of files that this process has asked the system for; nil where the system does not say.
---@return integer?
function M.asked()
  local file = io.open "/proc/self/io"
  if not file then return nil end
  local text = file:read "a"
  file:close()
  return math.tointeger(tonumber(text:match "rchar: (%d+)"))
end

--- Forgets what the optimizer knows, and keeps the parameters.
function Trainer:forget()
  local all = self.optimizer:state_dict()
  all.state, all.steps = {}, 0
  self.optimizer:load_state_dict(all)
end

return M
