--- FRUGAL: AdamW in a part of the space that changes from time to time, signSGD in the rest.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local full = adam.slots.bits32

-- How many of the positions of the shorter side keep a state.
local function rank_of(group, p) return math.max(1, math.floor(group.density * lowrank.short(p))) end

local function projected(make)
  return function(p, group) return make(lowrank.projected_like(p, rank_of(group, p))) end
end

local function basis(p, group)
  return ty.zeros({ (lowrank.short(p)), rank_of(group, p) }, { dtype = p.dtype, device = p.device })
end

local low = { exp_avg = projected(full.exp_avg), exp_avg_sq = projected(full.exp_avg_sq) }

local rules = { composed = true, eager = true }

rules.slots = {
  full = full, free = {},
  columns = {
    exp_avg = low.exp_avg, exp_avg_sq = low.exp_avg_sq,
    chosen = function(p, group) return ty.zeros({ rank_of(group, p) }, { dtype = "i64", device = p.device }) end,
  },
  subspace = { exp_avg = low.exp_avg, exp_avg_sq = low.exp_avg_sq, projection = basis },
}

local projections = { blocks = true, columns = "columns", random = "subspace", svd = "subspace" }

local function is_split(group, p) return p.ndim == 2 and group.density < 1 end

function rules.kind(group, p, state)
  if not is_split(group, p) then return "full" end
  if group.projection ~= "blocks" then return group.density > 0 and projections[group.projection] or "free" end
  return state and state.exp_avg and "full" or "free"
end

-- As many matrices of those with a gradient, in random order, as do not take more than the group's share of elements.
local function choose_blocks(self, group)
  local able, total = {}, 0
  for _, p in ipairs(group.params) do
    if is_split(group, p) then
      total = total + p:numel()
      if p.grad then able[#able + 1] = p end
    end
  end
  if #able == 0 then return end
  local seed = lowrank.seed(group.seed, self.steps // group.refresh, self.position[able[1]])
  local left = math.floor(group.density * total)
  for _, i in ipairs(lowrank.seeded(seed, ty.randperm, #able):tolist()) do
    local p = able[i + 1]
    if p:numel() <= left then
      left = left - p:numel()
      local state = { step = 0 }
      for slot, make in pairs(full) do state[slot] = ty.keep(make(p)) end
      self.state[p] = state
    end
  end
end

-- Every `refresh` steps the moments of the parts begin anew with the parts.
function rules.before(self, group)
  if self.steps % group.refresh ~= 0 then return end
  for _, p in ipairs(group.params) do
    if is_split(group, p) then self.state[p] = nil end
  end
  if group.projection == "blocks" then choose_blocks(self, group) end
  self.plans[group] = nil
end

local function choose_basis(self, group, p, g)
  if group.projection == "svd" then return lowrank.top(g, rank_of(group, p)) end
  local seed = lowrank.seed(group.seed, self.steps // group.refresh, self.position[p])
  local options = { dtype = p.dtype == "f64" and "f64" or "f32", device = p.device }
  return (ty.qr(lowrank.seeded(seed, ty.randn, { (lowrank.short(p)), rank_of(group, p) }, options)))
end

-- The side of the columns is the shorter one of p or of its transpose.
local function side(p) return select(2, lowrank.short(p)) and 1 or 0 end

local function choose_columns(self, group, p)
  local seed = lowrank.seed(group.seed, self.steps // group.refresh, self.position[p])
  return lowrank.seeded(seed, ty.randperm, (lowrank.short(p))):narrow(0, 0, rank_of(group, p))
end

-- The two ways to split: select(state, g), and complete(state, g, low, direction, factor), which is the direction where
-- there is a state and factor times the sign of the gradient elsewhere.
local splits = {
  columns = {
    slot = "chosen", choose = choose_columns,
    select = function(chosen, g) return g:index_select(side(g), chosen) end,
    complete = function(chosen, g, part, direction, factor)
      local rest = g:index_add(side(g), chosen, -part):sign() -- the sign of nothing is 0
      return (rest:to(direction.dtype) * factor):index_add(side(g), chosen, direction)
    end,
  },
  subspace = {
    slot = "projection", choose = choose_basis,
    select = function(projection, g) return lowrank.project(g, projection) end,
    complete = function(projection, g, part, direction, factor)
      local rest = g - lowrank.expand(g, projection, part)
      return lowrank.expand(g, projection, direction):add_(rest:sign():to(direction.dtype):mul_(factor))
    end,
  },
}

local function descend_free(group, batch, lr, clip)
  for i, g in ipairs(batch.grads) do
    ty.scope(function()
      local sign = g:sign()
      if group.free_rate ~= 1 then sign = sign:mul_(group.free_rate) end
      lowrank.descend(batch, i, sign, lr, group.weight_decay, clip)
    end)
  end
end

function rules.step(kind, group, batch, lr, clip, self)
  if kind == "full" then return adam.step("bits32", group, batch, lr, clip) end
  if kind == "free" then return descend_free(group, batch, lr, clip) end
  local split, parts = splits[kind], {}
  for i, p in ipairs(batch.params) do
    parts[i] = ty.scope(function()
      local g, where = lowrank.cut(batch.grads[i], clip), batch[split.slot][i]
      if batch.step == 1 then where:copy_(split.choose(self, group, p, g)) end
      return split.select(where, g)
    end)
  end
  local directions = lowrank.directions(adam, "bits32", group, batch, parts, clip, 1)
  for i in ipairs(batch.params) do
    ty.scope(function()
      local g = lowrank.cut(batch.grads[i], clip)
      local update = split.complete(batch[split.slot][i], g, parts[i], directions[i], group.free_rate)
      lowrank.descend(batch, i, update, lr, group.weight_decay, clip)
    end)
  end
end

--- AdamW in a part of the space of matrices, which is chosen anew every `refresh` steps and then begins without
-- moments, and signSGD, which needs no state, in the rest: the share `density` of AdamW's memory, and every weight
-- moves at every step. What is no matrix is AdamW's, and so is a group of density 1. Zmushko et al. 2024.
--
--     local opt = optim.FRUGAL({ { params = matrices }, { params = embeddings, density = 1 } }, { lr = 1e-3 })
--
-- projection: "blocks", which the paper recommends for pretraining: whole matrices, in random order as many as take no
-- more than the share; "columns": positions of the shorter side of each matrix; "svd" and "random": a subspace of the
-- shorter side, as optim.GaLore has it or random, whose basis takes memory as well.
--
-- options: lr (1e-3), density (0.25), refresh (200), projection ("blocks"), free_rate (1: the rate of signSGD as a
-- multiple of lr; 0.1 for finetuning), seed (0), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay (0); clip_norm,
-- clip_value, schedule, ema. Not inside ty.compile.
---@type fun(parameters: table, options?: table): Optimizer
local FRUGAL = Optimizer.define("FRUGAL", { lr = 1e-3, density = 0.25, refresh = 200, projection = "blocks",
  free_rate = 1, seed = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 }, rules)

return FRUGAL
