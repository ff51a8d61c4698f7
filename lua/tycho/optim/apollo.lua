--- APOLLO: gradient descent whose rates, one for each channel, are read off a low-rank Adam.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local function projected(make)
  return function(p, group) return make(lowrank.projected_like(p, group.rank)) end
end

local rules = { composed = true, eager = true }

rules.slots = {
  bits32 = adam.slots.bits32,
  low = {
    exp_avg = projected(adam.slots.bits32.exp_avg), exp_avg_sq = projected(adam.slots.bits32.exp_avg_sq),
    norm = function(p) return ty.zeros({}, { dtype = p.dtype == "f64" and "f64" or "f32", device = p.device }) end,
  },
}

function rules.kind(group, p) return lowrank.is_low(group, p) and "low" or "bits32" end

-- Normal random numbers of variance 1 / rank, which keep norms in the mean (Johnson and Lindenstrauss).
local function random_basis(p, group, step, position)
  local round, short = (step - 1) // group.refresh, (lowrank.short(p))
  local seed = lowrank.seed(group.seed, round, position)
  local options = { dtype = p.dtype == "f64" and "f64" or "f32", device = p.device }
  return lowrank.seeded(seed, ty.randn, { short, group.rank }, options):mul_(group.rank ^ -0.5):to(p.dtype)
end

-- The rates: how many times as long as the projected gradient Adam's direction is, of each channel (a row of a tall
-- matrix, a column of a wide one) or of the whole; and the norm of the gradient times them.
local function rates(group, g, low, direction)
  local dims, keep = nil, false
  if not group.mini then
    local _, tall = lowrank.short(g)
    dims, keep = { tall and 1 or 0 }, true
  end
  local rate = direction:norm(2, dims, keep) / (low:norm(2, dims, keep) + 1e-8)
  return rate, (g:to(rate.dtype):norm(2, dims, keep) * rate):norm()
end

function rules.step(kind, group, batch, lr, clip, self)
  if kind ~= "low" then return adam.step(kind, group, batch, lr, clip) end
  local low = {}
  for i, p in ipairs(batch.params) do
    low[i] = ty.scope(function()
      local basis = random_basis(p, group, batch.step, self.position[p])
      return lowrank.project(lowrank.cut(batch.grads[i], clip), basis):to(batch.norm[i].dtype)
    end)
  end
  local directions = lowrank.directions(adam, "bits32", group, batch, low, clip, 1)
  -- The limiter compares norms from before the correction of the bias, as the authors' program does.
  local biased = (1 - group.beta1 ^ batch.step) / math.sqrt(1 - group.beta2 ^ batch.step)
  for i in ipairs(batch.params) do
    ty.scope(function()
      local g, before = lowrank.cut(batch.grads[i], clip), batch.norm[i]
      local rate, norm = rates(group, g, low[i], directions[i])
      norm = norm * biased
      if group.growth < math.huge then
        local limiter = (norm / (before + 1e-8)):clamp(group.growth) / group.growth
        limiter = ty.where(before:gt(0), limiter, 1.0) -- after no update at all there is nothing to compare with
        rate, norm = rate / limiter, norm / limiter
      end
      before:copy_(norm)
      lowrank.descend(batch, i, g * (rate * group.scale), lr, group.weight_decay, clip)
    end)
  end
end

local make = Optimizer.define("APOLLO", { lr = 0.01, rank = 256, mini = false, refresh = 200, scale = 1,
  growth = 1.01, seed = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 }, rules)

--- Gradient descent with a rate for each channel, a row or column on the longer side of a matrix: by how much AdamW
-- would scale the gradient there, measured on a projection to `rank` random dimensions, the only place with moments.
-- [m, n], m >= n, takes 2 m rank + 1 numbers between steps in place of 2 m n: the projection is drawn again from its
-- seed at each step, another one every `refresh` steps. No update is more than `growth` times as long as the last one.
-- AdamW steps for vectors and for matrices whose shorter side is no longer than rank. Zhu et al. 2024.
--
--     local opt = optim.APOLLO({ { params = matrices }, { params = embeddings_and_norms, rank = 0 } }, { mini = true })
--
-- options: lr (0.01), rank (256; 0: AdamW), mini (false; true is APOLLO-Mini: one rate for a whole matrix, rank 1 and
-- scale sqrt(128) unless they are given), refresh (200), scale (1: of the updates of matrices; the square root of what
-- the authors' program calls so), growth (1.01; math.huge: no limit), seed (0), beta1 (0.9), beta2 (0.999), eps (1e-8),
-- weight_decay (0); clip_norm, clip_value, schedule, ema. Not inside ty.compile.
---@param parameters table
---@param options? table
---@return Optimizer
local function APOLLO(parameters, options)
  if type(options) == "table" and options.mini then
    local copy = { rank = 1, scale = math.sqrt(128) }
    for key, value in pairs(options) do copy[key] = value end
    options = copy
  end
  return make(parameters, options)
end

return APOLLO
