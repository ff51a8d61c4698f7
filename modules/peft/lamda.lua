--- LaMDA: adapters of which a small square matrix is trained. Azizi et al. 2024, "LaMDA: Large Model Fine-Tuning via
-- Spectrally Decomposed Low-Dimensional Adaptation".
--
--     peft.lamda.attach(model, { rank = 16, targets = "all-linear" })
--     local optimizer = optim.AdamW(peft.lamda.groups(model, { lr = 2e-2 }))
--     peft.lamda.follow(model, optimizer, { steps = 0.3 * steps })     -- freezes B bit by bit
--     ...
--     peft.merge(model)                                                -- or peft.save: plain LoRA in PEFT's files
--
-- Of a layer's weight W = U Z V' the adapter takes the r largest directions: A = V_r' stays as it is, S [r, r] begins
-- as Z_r and is trained throughout, B begins as U_r and is frozen column after column, the least directions first. The
-- layer gives (W - U_r Z_r V_r') x + B S A x. Here the remainder is not written into W: the same sum is
-- W x + (B S - U_r Z_r) A x. So the adapter begins as exactly nothing, stands on weights of any format, and is plain
-- LoRA for merging and in files. A x is all that the backward pass keeps of x.
local ty = require "tycho"
local adapter = require "tycho.peft.adapter"
local arguments = require "tycho.arguments"
local layers = require "tycho.peft.layers"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

-- All of B [outputs, rank], trained columns first: they are those of the largest singular values.
local function whole(module)
  local trained, frozen = rawget(module, "lora_B"), rawget(module, "lora_B_frozen")
  return trained and frozen and ty.concat({ trained, frozen }, 1) or trained or frozen
end

-- B S less what it began with, [outputs, rank].
local function outer(module, dtype)
  local b, s, start = whole(module), module.lora_S, module.lora_start
  if dtype then b, s, start = b:to(dtype), s:to(dtype), start:to(dtype) end
  return ty.matmul(b, s) - start
end

-- A parameter that holds a tensor.
local function holding(tensor, trained)
  return ty.keep(nn.Parameter(tensor:detach():clone())):requires_grad_(trained)
end

-- Makes the plain adapter of a linear layer one of LaMDA; parts: u [outputs, r], s [r], v [r, inputs] of its weight.
local function convert(module, parts)
  local a, like = module._lora, module.lora_A.weight
  local function placed(t) return t:to { dtype = like.dtype, device = like.device } end
  local s = ty.diag(placed(parts.s))
  local b = placed(parts.u)
  surgery.remove(module, "lora_B")
  like:detach():copy_(parts.v)
  like:requires_grad_(false)
  module.lora_B, module.lora_S = holding(b, true), holding(s, true)
  module.lora_start = holding(ty.matmul(b, s), false)
  a.outer = outer
  a.fixed = { lora_A = true, lora_B_frozen = true, lora_start = true }
end

--- Ranks by the spectra of the layers' weights, for a mean of `rank`: a layer whose normalised singular values fall
-- slowly gets more. spectra: for each layer its singular values, falling. A layer's share is the mean of its singular
-- values over the largest one; what the trained squares have together is at most as much as with equal ranks.
---@param spectra number[][]
---@param rank integer
---@return integer[] ranks  at least 1 and at most as many as the layer has singular values
function M.allocate(spectra, rank)
  local who = "peft.lamda.allocate"
  arguments.expect(who, "spectra", spectra, "a list of tables")
  arguments.expect(who, "rank", rank, "an integer >= 1")
  local shares, most = {}, 0
  for i, values in ipairs(spectra) do
    local sum = 0
    for _, value in ipairs(values) do sum = sum + value end
    if #values == 0 or values[1] <= 0 then
      arguments.fail("%s: spectra: expected falling values from above 0, got none in list %d", who, i)
    end
    shares[i], most = sum / values[1] / #values, math.max(most, #values)
  end
  -- The largest factor whose ranks keep to the budget of squares, by halving.
  local function ranks_at(factor)
    local ranks, squares = {}, 0
    for i, share in ipairs(shares) do
      ranks[i] = math.max(1, math.min(#spectra[i], math.floor(factor * share + 0.5)))
      squares = squares + ranks[i] ^ 2
    end
    return ranks, squares
  end
  local low, high = 0, (most + 1) / math.min(1, table.unpack(shares))
  for _ = 1, 60 do
    local middle = (low + high) / 2
    local _, squares = ranks_at(middle)
    if squares <= #spectra * rank ^ 2 then low = middle else high = middle end
  end
  return (ranks_at(low))
end

local function attach(model, options)
  local who = "peft.lamda.attach"
  if type(options) == "table" and options.alpha == nil then -- the adapter counts once
    local given = { alpha = options.rank }
    for key, value in pairs(options) do given[key] = value end
    options = given
  end
  local _, o = adapter.prepare(who, model, options, { ranks = "uniform", targets = "all-linear" })
  if o.dora then error(who .. ": dora: expected false, got true: LaMDA does not decompose lengths", 0) end
  if o.ranks ~= "uniform" and o.ranks ~= "spectrum" then
    error(("%s: ranks: expected uniform or spectrum, got %s"):format(who, tostring(o.ranks)), 0)
  end
  local list, parts, spectra = adapter.targets(who, model, o.targets), {}, {}
  for i, layer in ipairs(list) do
    if layers.kind(layer.module) ~= "linear" then
      error(("%s: %s: expected a linear layer, got a %s"):format(who, layer.name, layers.kind(layer.module)), 0)
    end
    ty.no_grad(function()
      local u, s, v = ty.svd(surgery.rows(layer.module):to "f64")
      parts[i], spectra[i] = { u = u, s = s, v = v }, s:tolist()
    end)
  end
  if o.ranks == "spectrum" then
    o.rank_pattern, o.alpha_pattern = {}, {}
    for i, rank in ipairs(M.allocate(spectra, o.rank)) do
      local name = "^" .. (model.published_prefix or "") .. list[i].name
      o.rank_pattern[name], o.alpha_pattern[name] = rank, rank * o.alpha / o.rank
    end
  end
  o.ranks = nil
  local put = adapter.prepare(who, model, o, {})
  for i, layer in ipairs(list) do
    local rank = adapter.by_name(who, "rank_pattern", o.rank_pattern, (model.published_prefix or "") .. layer.name)
      or o.rank
    if rank > #spectra[i] then
      error(("%s: rank: expected at most %d, which %s has, got %d"):format(who, #spectra[i], layer.name, rank), 0)
    end
  end
  put()
  for i, layer in ipairs(list) do
    local rank = layer.module._lora.rank
    ty.no_grad(convert, layer.module, { u = parts[i].u:narrow(1, 0, rank), s = parts[i].s:narrow(0, 0, rank),
      v = parts[i].v:narrow(0, 0, rank) })
  end
  ty.core.program.renew()
  return model
end

--- Gives the linear layers of a model adapters of LaMDA, which change nothing until they are trained, and freezes all
-- else. options: those of peft.lora (targets "all-linear" by default; not dora), and ranks ("uniform"; "spectrum",
-- LaMDA++: by allocate()). alpha is the rank unless given, so that the adapter counts once. Returns the model; make
-- the optimizer afterwards, of peft.parameters. peft.merge, peft.remove, peft.save and peft.disable work as ever.
---@param model Module
---@param options? table
---@return Module model
function M.attach(model, options) return nn.for_caller(attach, model, options) end

local function of(who, model)
  local record = adapter.of(who, model)
  local list = {}
  for _, layer in ipairs(record.layers) do
    if layer.module._lora.outer == outer then list[#list + 1] = layer.module end
  end
  if #list == 0 then arguments.fail("%s: model: expected one of peft.lamda.attach, got another adapter", who) end
  return list
end

--- The parameters in two groups for an optimizer: the squares, and B at `share` of their rate. Columns of B are
-- orthonormal, their numbers as small as 1 / sqrt(outputs), whereas S has singular values: at one rate, steps of Adam
-- that are small for S turn B over. What else peft.parameters has is in the first group. options: lr (1e-2), share
-- (0.3). Make them before any of B is frozen.
---@param model Module
---@param options? {lr?: number, share?: number}
---@return table[] groups
function M.groups(model, options)
  local who = "peft.lamda.groups"
  local o = arguments.read(who, options, { lr = 1e-2, share = 0.3 }, { lr = "a finite number >= 0",
    share = "a finite number >= 0" })
  local is_outer, groups = {}, { { params = {}, lr = o.lr }, { params = {}, lr = o.lr * o.share } }
  for _, module in ipairs(of(who, model)) do
    local b = rawget(module, "lora_B")
    if b then is_outer[b] = true end
  end
  for _, p in ipairs(adapter.parameters(model)) do table.insert(groups[is_outer[p] and 2 or 1].params, p) end
  return groups
end

--- Freezes a share of the columns of every B, those of the least singular values first; what is frozen already stays
-- so. With an optimizer, it trains the rest from now on and releases the state of the others.
---@param model Module
---@param share number  0: nothing, 1: all of B
---@param optimizer? Optimizer
---@return integer columns  of all layers together that are trained still
function M.freeze(model, share, optimizer)
  local who = "peft.lamda.freeze"
  arguments.expect(who, "share", share, "a number in [0, 1]")
  local left = 0
  for _, module in ipairs(of(who, model)) do
    local b = rawget(module, "lora_B")
    local keep = math.ceil(module._lora.rank * (1 - share) - 1e-9)
    if b and keep < b.shape[2] then
      local gone = b.shape[2] - keep
      local frozen = b:detach():narrow(1, keep, gone)
      local before = rawget(module, "lora_B_frozen")
      if before then frozen = ty.concat({ frozen, before }, 1) end
      surgery.remove(module, "lora_B_frozen")
      module.lora_B_frozen = holding(frozen, false)
      surgery.remove(module, "lora_B")
      local rest
      if keep > 0 then
        rest = holding(b:detach():narrow(1, 0, keep), true)
        module.lora_B = rest
      end
      if optimizer then optimizer:exchange(b, rest, function(t) return t:narrow(1, 0, keep) end) end
    end
    b = rawget(module, "lora_B")
    left = left + (b and b.shape[2] or 0)
  end
  ty.core.program.renew()
  return left
end

--- Makes an optimizer freeze B as it goes: after each step as much as is due, linearly over `steps` steps. options:
-- steps (the paper's t_i), or schedule (a function of the steps done: the share that is frozen then). Returns the
-- optimizer.
---@param model Module
---@param optimizer Optimizer
---@param options {steps?: integer, schedule?: fun(step: integer): number}
---@return Optimizer optimizer
function M.follow(model, optimizer, options)
  local who = "peft.lamda.follow"
  of(who, model)
  if type(optimizer) ~= "table" or type(optimizer.exchange) ~= "function" then
    arguments.fail("%s: optimizer: expected one of ty.optim, got %s", who, arguments.describe(optimizer))
  end
  local o = arguments.read(who, options, { steps = arguments.none, schedule = arguments.none },
    { steps = "a number > 0", schedule = "a function" })
  if (o.steps == nil) == (o.schedule == nil) then
    arguments.fail("%s: expected one of the options steps and schedule, got %s", who, o.steps and "both" or "none")
  end
  local schedule = o.schedule or function(done) return math.min(1, done / o.steps) end
  local step = optimizer.step
  rawset(optimizer, "step", function(self, loss)
    local norm = step(self, loss)
    M.freeze(model, schedule(self.steps), self)
    return norm
  end)
  return optimizer
end

return M
