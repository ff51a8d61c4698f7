--- Re-ttention (Chen et al. 2025, "Re-ttention: Ultra Sparse Visual Generation via Attention Statistical Reshape"): a
-- few percent of the keys in most steps of sampling. A softmax over a subset S of the keys divides by Z_S in the place
-- of Z, so that what is kept weighs too much. The share rho = Z_S / Z of each query and head changes slowly from step
-- to step; dense steps note it, with what is then still missing, and sparse ones use both:
--
--     dense     y = softmax(q k') v,   rho = exp(lse_S - lse),   R = y - rho y_S
--     sparse    y = (rho + growth n) y_S + R       n: sparse steps since the dense one before this one
--
-- The first steps are dense, and every so many after that: 5 and 5 of 20, growth 0.04, in the authors' code, where R
-- is kept after the projection, which is the same. S is static: the nearest cells of the map, and a text that attends
-- with them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.diffusion.attention.layers"
local make_cells = require("tycho.diffusion.attention.cells").cells

local expect, fail = arguments.expect, arguments.fail
local WHO = "attention.rettention"

--- A part of a sampler, which computes the network's attention while it samples.
---@class Rettention
---@field share number  of the keys that a query sees in sparse steps
local Rettention = {}
Rettention.__index = Rettention
Rettention.__name = "Rettention"

--- What a dense step notes: the output y, rho [b, h, t, 1] and R, of the dense output and that of the listed keys.
---@param y Tensor         [b, h, t, d]
---@param lse Tensor       [b, h, t]
---@param sparse Tensor    [b, h, t, d]
---@param sparse_lse Tensor
---@return Tensor rho
---@return Tensor residual
local function statistics(y, lse, sparse, sparse_lse)
  for name, x in pairs { y = y or false, lse = lse or false, sparse = sparse or false,
    sparse_lse = sparse_lse or false } do
    expect("attention.statistics", name, x, "a tensor")
  end
  local rho = (sparse_lse - lse):exp():unsqueeze(-1)
  return rho, y - sparse * rho
end

function Rettention:_compute(site, q, k, v, text)
  local now, cells = self.now, self.cells
  if not now or now.mode == "dense" and not now.noting then
    if not text then return ty.scaled_dot_product_attention(q, k, v) end
    return (layers.join { layers.part(layers.dense(q, k, v)), text })
  end
  q, k, v = cells:gather(q), cells:gather(k), cells:gather(v)
  if text then -- in the order of the cells
    local order = cells.order:to { device = q.device }
    text = { y = text.y:index_select(2, order), lse = text.lse:index_select(2, order) }
  end
  local blocks = self.blocks:to { device = q.device }
  local part, part_lse = layers.join { layers.part(ty.block_sparse_attention(q, k, v, blocks, cells.size, cells.size)),
    text }
  local key = site.index .. " " .. now.branches
  if now.mode == "dense" then
    local y, lse = layers.join { layers.part(layers.dense(q, k, v)), text }
    local rho, residual = statistics(y, lse, part, part_lse)
    if not self.ratio then residual = y - part end
    now.state.kept[key] = { rho = ty.keep(rho:clone()), residual = ty.keep(residual:clone()), sparse = 0 }
    now.state.noted[#now.state.noted + 1] = { step = now.step, layer = site.index, rho = rho:mean():item() }
    return cells:restore(y)
  end
  local kept = now.state.kept[key]
  if not kept then fail("%s: expected a dense step before a sparse one of the same branches, got none", WHO) end
  if self.ratio then part = part * (kept.rho + self.growth * kept.sparse) end
  if self.residual then part = part + kept.residual end
  kept.sparse = kept.sparse + 1
  return cells:restore(part)
end

--- The part's state of a run.
function Rettention:start(run)
  expect("Rettention:start", "run", run, "a table")
  if run.model ~= self.model then
    fail("%s: expected the sampler's network to be the one whose attention this is, got %s", WHO,
      arguments.describe(run.model))
  end
  return { kept = {}, noted = {} }
end

--- A call of the network in this step: dense or sparse.
function Rettention:call(run, next, request)
  expect("Rettention:call", "run", run, "a table")
  expect("Rettention:call", "run.step", run.step, "an integer >= 1")
  expect("Rettention:call", "next", next, "a function")
  expect("Rettention:call", "request", request, "a table")
  if request.samples then
    fail("%s: expected calls of the network for all samples, got one for %d of them", WHO, #request.samples)
  end
  local at = run.step - 1
  local full = at < self.warmup or at % self.every == 0
  -- Only the last dense step before a sparse one has to note anything.
  local following = at + 1 < self.warmup or (at + 1) % self.every == 0
  self.now = { mode = full and "dense" or "sparse", noting = full and not following, step = run.step,
    branches = table.concat(request.branches, " "), state = run.state[self] }
  local ok, y = pcall(next, request)
  self.now = nil
  if not ok then error(y, 0) end
  return y
end

--- What dense steps noted: { step, layer, rho (the mean over queries and heads) }.
---@param run Run
---@return { step: integer, layer: integer, rho: number }[]
function Rettention:notes(run)
  local state = type(run) == "table" and type(run.state) == "table" and run.state[self]
  if not state then error("Rettention:notes: run: expected a run of a sampler with this part, got another", 2) end
  return state.noted
end

--- The network as it was.
function Rettention:remove()
  if self.replaced then self.replaced:remove() end
  self.replaced = nil
end

local kinds = { rows = "an integer >= 1", columns = "an integer >= 1", frames = "an integer >= 1",
  cell = "a pair of integers", kept = "an integer >= 1", warmup = "an integer >= 1", every = "an integer >= 1",
  growth = "a finite number" }

--- A part of a sampler for a network with self-attention over a grid of tokens. options: rows, columns, frames (1),
-- cell ({ 4, 4 }: tokens that see the same keys, { height, width }), kept (1: the nearest cells that they see, their
-- own among them), warmup (5: first steps, which are dense), every (5: so many steps from one dense step to the next),
-- growth (0.04: of rho with each sparse step), ratio and residual (true; false leaves that out, both: plain sparse
-- attention). Until remove() the network's attention is this part's; outside of its sampler it is dense.
---@param model Module
---@param options table
---@return Rettention
local function new(model, options)
  expect(WHO, "model", model, "a module")
  local none = arguments.none
  local o = arguments.read(WHO, options, { rows = none, columns = none, frames = 1, cell = { 4, 4 }, kept = 1,
    warmup = 5, every = 5, growth = 0.04, ratio = true, residual = true }, kinds)
  local self = setmetatable({ model = model, kept = o.kept, warmup = o.warmup, every = o.every, growth = o.growth,
    ratio = o.ratio, residual = o.residual }, Rettention)
  self.cells = make_cells { rows = o.rows, columns = o.columns, frames = o.frames, cell = o.cell }
  self.blocks = ty.keep(self.cells:nearest(o.kept))
  self.share = o.kept / self.cells.count
  self.replaced = layers.replace(model, function(...) return self:_compute(...) end)
  return self
end

return { new = new, statistics = statistics }
