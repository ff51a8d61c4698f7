--- Matrices of a transformer split over ranks: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter
-- Language Models Using Model Parallelism".
--
-- The matrices that attention and the feed-forward network begin with lose rows, by heads; those they end with lose
-- columns; embeddings and the head lose words. What lies between is done by each rank for itself, so that a block has
-- two sums over ranks forwards and two backwards.
--
--     dist.run(4, function(group)
--       local model = dist.workload.model(work, 1)
--       local parallel = dist.tensor_parallel(model, group)
--       local optimizer = ty.optim.AdamW(model:parameters(), { lr = 1e-3 })
--       model:loss(tokens, targets):backward() ...
--       local whole = parallel:state_dict()
--     end)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.dist.functional"
local Group = require "tycho.dist.group"
local vocabulary = require "tycho.dist.vocabulary"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe

-- ---- which parts of a model are split, and how ----

-- Modules are known by the names of their layers. first: rows are split, by the `by` of the module (nil: anyhow), each
-- layer `parts` of them behind one another; last: columns are.
local KINDS = {
  { first = { q_proj = "heads", k_proj = "kv_heads", v_proj = "kv_heads" }, last = "o_proj" },
  { first = { gate_proj = false, up_proj = false }, last = "down_proj" },
  { first = { c_attn = "heads" }, last = "c_proj", parts = 3 },
  { first = { c_fc = false }, last = "c_proj" },
}

local function kind_of(module)
  for _, kind in ipairs(KINDS) do
    local fits = nn.is_module(rawget(module, kind.last))
    for name in pairs(kind.first) do fits = fits and nn.is_module(rawget(module, name)) end
    if fits then return kind end
  end
  return nil
end

-- ---- what the ranks do in place of what was there ----

-- Numbers that are drawn between are the rank's own: heads differ in what is dropped, residuals do not.
local function enter(state)
  local common = ty.rng_state()
  state.common = common
  ty.rng_state { common[1] + 2718 * (state.group.rank + 1), common[2] }
end

local function leave(state)
  if not state.common then return end
  local now = ty.rng_state()
  ty.rng_state { state.common[1], now[2] }
  state.common = nil
end

-- Attention, or the feed-forward network. Its last layer has the same state.
local block = surgery.wrapper { name = "Parallel", field = "_parallel", forward = function(base)
  return function(self, x, ...)
    local state = self._parallel
    if self.training then enter(state) end
    return base.forward(self, functional.copied(state.group, x), ...)
  end
end }

local last = surgery.wrapper { name = "RowParallel", field = "_row_parallel", forward = function()
  return function(self, x, residual, activation)
    local state = self._row_parallel
    leave(state)
    local y = ty.linear(x, surgery.rows(self, self.weight))
    if state.defer then return state.defer(state.group, y, self.bias) end
    -- Nobody else has a result without a history: it need not be copied.
    if y.requires_grad then y = functional.summed(state.group, y) else state.group:all_reduce(y) end
    if self.bias then y = y + self.bias end
    return surgery.finish(y, residual, activation)
  end
end }

local embedding = surgery.wrapper { name = "VocabularyParallel", field = "_words", forward = function()
  return function(self, index)
    local state = self._words
    return vocabulary.embedding(state.group, self.weight, index, state.begin, state.padding)
  end
end }

-- A model's head, of which each rank has some words, and its loss. The class is made for each that is split.
local function class_on(base)
  local class = nn.module("TensorParallel" .. base.__name, base)

  -- Logits of the rank's own words.
  function class:own_logits(hidden)
    local state, layer = self._tensor_parallel, self.lm_head or self:tied()
    return ty.linear(functional.copied(state.group, hidden), layer.weight, self.lm_head and layer.bias)
  end

  --- Logits of all words, which all ranks get.
  function class:head(hidden)
    local state = self._tensor_parallel
    local group, n = state.group, state.words
    local mine = self:own_logits(hidden)
    local most = (n + group.size - 1) // group.size
    if n % group.size ~= 0 then mine = ty.pad(mine, { 0, most - mine.shape[mine.ndim] }) end
    local all = functional.gathered(group, mine, mine.ndim - 1)
    if n % group.size == 0 then return all end
    local list = {}
    for rank = 0, group.size - 1 do
      list[rank + 1] = all:narrow(-1, rank * most, (select(2, vocabulary.part(n, group.size, rank))))
    end
    return ty.concat(list, -1)
  end

  --- As LanguageModel:loss(), of logits that no rank has whole.
  function class:loss(tokens, targets, options)
    expect("loss", "tokens", tokens, "a tensor")
    expect("loss", "options", options, "a table or nil")
    local with = {}
    for key, value in pairs(options or {}) do with[key] = value end
    if not targets then
      if with.cu_seqlens or with.mask then
        fail("loss: targets: expected some with cu_seqlens or a mask, got nil")
      end
      local t = tokens.shape[2]
      tokens, targets = tokens:narrow(1, 0, t - 1), tokens:narrow(1, 1, t - 1)
    end
    local state = self._tensor_parallel
    local logits = self:own_logits(self:hidden(tokens, with))
    return vocabulary.cross_entropy(state.group, logits:flatten(0, -2), targets:flatten(), state.begin)
  end

  return class
end

-- ---- cutting and putting together ----

--- A model that is split over the ranks of a group.
---@class TensorParallel
---@field group RankGroup
---@field model LanguageModel
local Parallel = {}
Parallel.__index = Parallel
Parallel.__name = "TensorParallel"

-- A cut: along which dimension a tensor is split, in so many parts behind one another, of so many units each that stay
-- together.
local function own_part(group, x, cut)
  local n = x.shape[cut.dim + 1] // cut.parts
  local wide = n // cut.units
  local begin, count = vocabulary.part(cut.units, group.size, group.rank)
  local parts = {}
  for i = 1, cut.parts do parts[i] = x:narrow(cut.dim, (i - 1) * n + begin * wide, count * wide) end
  return (cut.parts == 1 and parts[1]:clone() or ty.concat(parts, cut.dim)):contiguous()
end

local function whole_of(group, x, cut)
  local n, size = x.shape[cut.dim + 1] // cut.parts, group.size
  local _, units = vocabulary.part(cut.units, size, group.rank)
  local _, most = vocabulary.part(cut.units, size, 0)
  local wide = n // math.max(units, 1)
  local list = {}
  for i = 1, cut.parts do
    local mine = x:narrow(cut.dim, (i - 1) * n, n)
    if units < most then
      local shape = mine.shape
      shape[cut.dim + 1] = (most - units) * wide
      mine = ty.concat({ mine, ty.zeros(shape, { dtype = x.dtype, device = x.device }) }, cut.dim)
    end
    local all = group:all_gather(mine:contiguous(), { dim = cut.dim })
    for rank = 0, size - 1 do
      local _, count = vocabulary.part(cut.units, size, rank)
      list[#list + 1] = all:narrow(cut.dim, rank * most * wide, count * wide)
    end
  end
  return ty.concat(list, cut.dim)
end

-- Puts the rank's part in the place of a tensor of a module.
local function cut(self, name, module, key, dim, units, parts)
  local whole = module[key]
  if not whole then return end
  local how = { dim = dim, units = units or whole.shape[dim + 1], parts = parts or 1 }
  if how.units < self.group.size then
    fail("dist.tensor_parallel: model: expected %s to have at least one part for each of %d ranks, got %s",
      name .. "." .. key, self.group.size, describe(whole))
  end
  local mine = ty.no_grad(own_part, self.group, whole:detach(), how):detach()
  surgery.exchange(module, key, mine:requires_grad_(whole.requires_grad))
  self.cuts[name .. "." .. key] = how
end

local function outputs_dim(layer) return layer.fan_in_fan_out and 1 or 0 end

-- Before anything is cut.
local function check_block(self, name, module, kind)
  local size, who = self.group.size, "dist.tensor_parallel"
  for _, bad in ipairs { "q_norm", "k_norm" } do
    if rawget(module, bad) then
      fail("%s: model: expected attention without norms of heads, got %s.%s", who, name, bad)
    end
  end
  for layer, by in pairs(kind.first) do
    if by and module[by] % size ~= 0 then
      fail("%s: model: expected a multiple of %d for %s of %s, a share for each rank, got %d", who, size, by, name,
        module[by])
    end
    self.covered[module[layer]] = true
  end
  self.covered[module[kind.last]] = true
end

local function split_block(self, name, module, kind)
  local size, state, counts = self.group.size, { group = self.group }, {}
  local heads = module.heads
  for layer, by in pairs(kind.first) do
    if by then counts[by] = module[by] // size end
    local at, units = module[layer], by and module[by]
    for _, key in ipairs { "weight", "bias" } do
      cut(self, name .. "." .. layer, at, key, key == "weight" and outputs_dim(at) or 0, units, kind.parts)
    end
  end
  local ending = module[kind.last]
  cut(self, name .. "." .. kind.last, ending, "weight", 1 - outputs_dim(ending), heads)
  for by, count in pairs(counts) do
    self.undo[#self.undo + 1] = { module = module, key = by, value = module[by] }
    module[by] = count
  end
  last:wrap(ending, state)
  block:wrap(module, state)
end

local classes = setmetatable({}, { __mode = "k" })

local function split_words(self, names, modules)
  local model, group = self.model, self.group
  local words
  for _, name in ipairs(names) do
    local module = modules[name]
    local ends = surgery.ends_in(name, "embed_tokens") or surgery.ends_in(name, "wte")
    if surgery.kind(module) == "embedding" and ends then
      words = module.weight.shape[1]
      local begin, count = vocabulary.part(words, group.size, group.rank)
      local padding = (module.padding_index or -1) - begin
      cut(self, name, module, "weight", 0)
      embedding:wrap(module, { group = group, begin = begin,
        padding = padding >= 0 and padding < count and padding or nil })
    end
  end
  if not words then fail("dist.tensor_parallel: model: expected embeddings embed_tokens or wte, got none") end
  if model.lm_head then
    for _, key in ipairs { "weight", "bias" } do cut(self, "lm_head", model.lm_head, key, 0) end
  end
  local base = getmetatable(model)
  classes[base] = classes[base] or class_on(base)
  rawset(model, "_tensor_parallel", { group = group, words = words,
    begin = (vocabulary.part(words, group.size, group.rank)) })
  setmetatable(model, classes[base])
  self.base = base
end

-- Visits what the model has, in one order on all ranks: a name, a tensor and its cut, or nil for what is not split.
local function each(self, visit)
  for name, x in self.model:named_parameters() do visit(name, x, self.cuts[name]) end
  for name, x in self.model:named_buffers() do visit(name, x, nil) end
end

local function gathered(self, x, how)
  return how and whole_of(self.group, x:detach(), how) or x:detach():clone()
end

--- The whole tensors of the model by their names, on all ranks, all of which call this.
---@return table<string, Tensor>
function Parallel:state_dict()
  local state = {}
  ty.no_grad(function()
    each(self, function(name, x, how) state[name] = gathered(self, x, how) end)
  end)
  return state
end

--- The whole gradients of the parameters that have one, by their names, on all ranks, all of which call this.
---@return table<string, Tensor>
function Parallel:gradients()
  local state = {}
  ty.no_grad(function()
    each(self, function(name, x, how)
      if x.grad then state[name] = gathered(self, x.grad, how) end
    end)
  end)
  return state
end

--- Takes the ranks' parts of whole tensors, such as state_dict() gives; each of the model must be among them.
---@param state table<string, Tensor>
function Parallel:load_state_dict(state)
  local who = "TensorParallel:load_state_dict"
  expect(who, "state", state, "a table")
  ty.no_grad(function()
    each(self, function(name, x, how)
      local whole = state[name]
      expect(who, "state." .. name, whole, "a tensor")
      local mine = whole
      if how and whole.ndim == x.ndim then mine = own_part(self.group, whole:detach(), how) end
      if table.concat(mine.shape, ", ") ~= table.concat(x.shape, ", ") then
        fail("%s: state.%s: expected the whole of what is [%s] on rank %d, got %s", who, name,
          table.concat(x.shape, ", "), self.group.rank, describe(whole))
      end
      x:detach():copy_(mine:detach())
    end)
  end)
end

--- Brings the gradients to a norm of at most `most`, that of all ranks together, as one rank would have it.
---@param most number
---@return number norm  before
function Parallel:clip_grad_norm(most)
  expect("TensorParallel:clip_grad_norm", "most", most, "a number > 0")
  local norm
  ty.no_grad(function()
    local split, common = ty.zeros({}, { dtype = "f64" }), 0.0
    each(self, function(_, x, how)
      if not x.grad then return end
      local square = x.grad:to("f64"):square():sum()
      if how then split = split + square:to "cpu" else common = common + square:item() end
    end)
    norm = math.sqrt(self.group:all_reduce(split):item() + common)
    if norm > most then each(self, function(_, x) if x.grad then x.grad:mul_(most / norm) end end) end
  end)
  return norm
end

--- Bytes of the parameters that this rank has.
---@return integer
function Parallel:bytes()
  local sum = 0
  for _, p in ipairs(self.model:parameters()) do sum = sum + p:nbytes() end
  return sum
end

--- Makes the model of every rank whole again, with the weights that it has now; all ranks call this.
---@return LanguageModel model
function Parallel:remove()
  local model = self.model
  if not rawget(model, "_tensor_parallel") then fail("TensorParallel:remove: expected a model that is split") end
  local names, modules = surgery.modules(model)
  ty.no_grad(function()
    for _, name in ipairs(names) do
      for _, key in ipairs { "weight", "bias" } do
        local how = self.cuts[name .. "." .. key]
        if how then
          local x = modules[name][key]
          local whole = whole_of(self.group, x:detach(), how):detach()
          surgery.exchange(modules[name], key, whole:requires_grad_(x.requires_grad))
        end
      end
    end
  end)
  for _, wrapper in ipairs { block, last, embedding } do
    for _, layer in ipairs(wrapper:wrapped("TensorParallel:remove", model)) do wrapper:unwrap(layer.module) end
  end
  for _, field in ipairs(self.undo) do rawset(field.module, field.key, field.value) end
  rawset(model, "_tensor_parallel", nil)
  setmetatable(model, self.base)
  return model
end

--- Splits a language model over the ranks of a group, in place: every rank has the whole model before, the same one,
-- and its part afterwards. Attention with q_proj, k_proj, v_proj and o_proj or c_attn and c_proj, feed-forward networks
-- with gate_proj, up_proj and down_proj or c_fc and c_proj (Llama and its like; GPT-2). The numbers of heads, of those
-- of keys too, must be multiples of the ranks. model:loss() never has the logits of all words on a rank;
-- model:forward(), generation and what else needs them gathers them.
---@param model LanguageModel
---@param group RankGroup
---@return TensorParallel
return function(model, group)
  local who = "dist.tensor_parallel"
  expect(who, "model", model, "a module")
  Group.expect(who, group)
  if rawget(model, "_tensor_parallel") then fail("%s: model: expected one that is not split yet", who) end
  if type(model.tied) ~= "function" or type(model.head) ~= "function" then
    fail("%s: model: expected a language model, got %s", who, describe(model))
  end
  local self = setmetatable({ model = model, group = group, cuts = {}, covered = {}, undo = {}, blocks = {} }, Parallel)
  local names, modules = surgery.modules(model)
  local found = {}
  for _, name in ipairs(names) do
    local kind = kind_of(modules[name])
    if kind then found[#found + 1] = { name, modules[name], kind } end
  end
  if #found == 0 then
    fail("%s: model: expected attention with q_proj, k_proj, v_proj and o_proj or the like, got %s", who,
      describe(model))
  end
  for _, at in ipairs(found) do check_block(self, table.unpack(at)) end
  for _, layer in ipairs(surgery.find(who, model, { head = false })) do
    if not self.covered[layer.module] then
      fail("%s: model: expected linear layers of attention and of gated or plain feed-forward networks, got %s", who,
        layer.name)
    end
  end
  for _, at in ipairs(found) do split_block(self, table.unpack(at)) end
  split_words(self, names, modules)
  ty.core.program.renew()
  return self
end
