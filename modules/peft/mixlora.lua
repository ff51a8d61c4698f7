--- MixLoRA: experts made of low-rank adapters behind a router, in the feed-forward networks of a frozen model. Li et
-- al. 2024, "MixLoRA: Enhancing Large Language Models Fine-Tuning with LoRA-based Mixture of Experts".
--
--     peft.mixlora.attach(model, { rank = 8, experts = 8, top_k = 2 })
--     local optimizer = optim.AdamW(peft.parameters(model), { lr = 1e-3 })
--     optimizer:step(peft.mixlora.loss(model, batch))              -- with the loss that keeps the experts busy
--
-- The frozen network is shared. Expert e is down_e(activation(gate_e(x)) * up_e(x)), where each of the three layers has
-- a LoRA of the expert's own. Each token goes to the top_k experts that a router prefers, whose shares add up to 1.
-- gate(x) and up(x) are computed once for all experts, and so is down(), which is linear: of the shares' sum. Layers of
-- attention carry plain LoRA.
local ty = require "tycho"
local adapter = require "tycho.peft.adapter"
local arguments = require "tycho.arguments"
local layers = require "tycho.peft.layers"

local nn = ty.nn
local surgery = nn.surgery
local parameter = require("tycho.nn.options").parameter
local M = {}

local projections = { "gate", "up", "down" }

--- Low-rank updates of rows that are sorted by expert: B_e (A_e x) for the rows of expert e, which are next to each
-- other. Only these products are computed.
---@param x Tensor      [rows, inputs], the rows of expert 0 first
---@param a Tensor      [experts, rank, inputs]
---@param b Tensor      [experts, outputs, rank]
---@param counts integer[]  how many rows each expert has
---@return Tensor y     [rows, outputs]
function M.grouped(x, a, b, counts)
  local who = "peft.mixlora.grouped"
  for name, t in pairs { x = x, a = a, b = b } do arguments.expect(who, name, t, "a tensor") end
  arguments.expect(who, "counts", counts, "a list of integers")
  local total = 0
  for _, count in ipairs(counts) do total = total + count end
  if x.ndim ~= 2 or a.ndim ~= 3 or b.ndim ~= 3 or x.shape[2] ~= a.shape[3] or a.shape[2] ~= b.shape[3]
    or a.shape[1] ~= #counts or b.shape[1] ~= #counts or total ~= x.shape[1] then
    arguments.fail("%s: expected x [rows, inputs], a [experts, rank, inputs], b [experts, outputs, rank] and as many "
      .. "counts, whose sum is the rows, got [%s], [%s], [%s] and %d counts of %d rows", who,
      table.concat(x.shape, ", "), table.concat(a.shape, ", "), table.concat(b.shape, ", "), #counts, total)
  end
  local parts, first = {}, 0
  for e, count in ipairs(counts) do
    if count > 0 then
      local low = ty.linear(x:narrow(0, first, count), a:select(0, e - 1))
      parts[#parts + 1] = ty.linear(low, b:select(0, e - 1))
      first = first + count
    end
  end
  return #parts == 1 and parts[1] or ty.concat(parts, 0)
end

--- How unevenly tokens and probability are spread over experts: N sum_e f_e P_e, where f_e is the share of the choices
-- that fell on expert e and P_e its mean probability. 1 where both are even. Fedus et al. 2022, "Switch Transformers",
-- equation 4, of several choices of a token.
---@param probabilities Tensor [tokens, experts]
---@param counts integer[]     choices that fell on each expert
---@return Tensor balance      0-d
function M.balance(probabilities, counts)
  local who = "peft.mixlora.balance"
  arguments.expect(who, "probabilities", probabilities, "a tensor")
  arguments.expect(who, "counts", counts, "a list of numbers")
  if probabilities.ndim ~= 2 or probabilities.shape[2] ~= #counts then
    arguments.fail("%s: counts: expected one for each expert of [%s], got %d", who,
      table.concat(probabilities.shape, ", "), #counts)
  end
  local total = 0
  for _, count in ipairs(counts) do total = total + count end
  local shares = ty.tensor(counts, { dtype = probabilities.dtype, device = probabilities.device }) / total
  return (shares * probabilities:mean(0)):sum() * #counts
end

-- Sums of rows [rows, width] for each of n tokens.
local function gathered(rows, n, values)
  return ty.zeros({ n, values.shape[2] }, { dtype = values.dtype, device = values.device }):index_add(0, rows, values)
end

local function mixture(base)
  return function(self, x, ...)
    local s = self._mixlora
    if s.off then return base.forward(self, x, ...) end
    local flat = x:flatten(0, -2)
    local n = flat.shape[1]
    local probabilities = ty.linear(flat:to(self.mix_router.dtype), self.mix_router):softmax(-1)
    local weights, experts = probabilities:topk(s.top_k)
    weights = weights / weights:sum(-1, true)
    local order = ty.no_grad(function() return experts:flatten():argsort() end)
    local rows = order:floor_div(s.top_k)
    local counts = experts:flatten():one_hot(s.experts):sum(0):tolist()
    if s.counts then
      for e, count in ipairs(counts) do s.counts[e] = (s.counts[e] or 0) + count end
    end
    if self.training then s.balance = M.balance(probabilities, counts) end
    local sorted = flat:index_select(0, rows)
    local function expert(name, input)
      return M.grouped(input:to(self.mix_router.dtype), self["mix_" .. name .. "_A"], self["mix_" .. name .. "_B"],
        counts) * s.scale
    end
    local function of_rows(name)
      return self[name .. "_proj"](flat):index_select(0, rows) + expert(name, sorted):to(flat.dtype)
    end
    local inner = ty.glu(of_rows "up", of_rows "gate", self.activation)
    inner = inner * weights:flatten():index_select(0, order):unsqueeze(1):to(inner.dtype)
    local y = self.down_proj(gathered(rows, n, inner)) + gathered(rows, n, expert("down", inner)):to(flat.dtype)
    return y:reshape(x.shape)
  end
end

local fields = { "mix_router" }
for _, name in ipairs(projections) do
  for _, side in ipairs { "_A", "_B" } do fields[#fields + 1] = "mix_" .. name .. side end
end

local wrapper = surgery.wrapper { name = "MixLora", field = "_mixlora", fields = fields, forward = mixture,
  describe = function(s) return ("%d experts of rank %d, %d for each token"):format(s.experts, s.rank, s.top_k) end }

local function is_gated(module)
  for _, name in ipairs(projections) do
    local child = rawget(module, name .. "_proj")
    if not (nn.is_module(child) and layers.kind(child) == "linear" and not child.bias) then return false end
  end
  return type(module.activation) == "string"
end

local function put(module, o)
  wrapper:wrap(module, { experts = o.experts, top_k = o.top_k, rank = o.rank, scale = o.alpha / o.rank })
  nn.with_defaults({ dtype = o.dtype, device = module.gate_proj.weight.device }, function()
    local hidden, inner = surgery.sizes(module.gate_proj)
    module.mix_router = parameter({ o.experts, hidden }, function(t) nn.init.normal(t, 0, o.router_std) end)
    for _, name in ipairs(projections) do
      local inputs, outputs = hidden, inner
      if name == "down" then inputs, outputs = inner, hidden end
      local bound = 1 / math.sqrt(inputs) -- as nn.Linear draws LoRA's A
      module["mix_" .. name .. "_A"] = parameter({ o.experts, o.rank, inputs }, function(t)
        nn.init.uniform(t, -bound, bound)
      end)
      module["mix_" .. name .. "_B"] = parameter({ o.experts, outputs, o.rank }, nn.init.zeros)
    end
  end)
end

local function attach(model, options)
  local who = "peft.mixlora.attach"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { rank = 8, alpha = arguments.none, experts = 8, top_k = 2,
    router_std = 0.02, dtype = "f32", blocks = arguments.none, attention = arguments.none },
    { rank = "an integer >= 1", alpha = "a finite number", experts = "an integer >= 1", top_k = "an integer >= 1",
      router_std = "a finite number >= 0", blocks = "a string", attention = "a table" })
  adapter.check_dtype(who, o.dtype)
  o.alpha = o.alpha or o.rank
  if o.top_k > o.experts then
    error(("%s: top_k: expected at most experts, %d, got %d"):format(who, o.experts, o.top_k), 0)
  end
  local found = {}
  local names, modules = surgery.modules(model)
  for _, name in ipairs(names) do
    if is_gated(modules[name]) and (not o.blocks or name:find(o.blocks)) then found[#found + 1] = modules[name] end
  end
  if #found == 0 then
    error(who .. ": model: expected feed-forward networks with gate_proj, up_proj and down_proj without biases, "
      .. "got none" .. (o.blocks and " by the name " .. o.blocks or ""), 0)
  end
  local lora = { rank = o.rank, alpha = o.alpha, dtype = o.dtype,
    targets = function(name) return name:find "%.[qkvo]_proj$" ~= nil end }
  for key, value in pairs(o.attention or {}) do lora[key] = value end
  adapter.lora(model, lora)
  for _, module in ipairs(found) do
    if rawget(module.gate_proj, "_lora") or rawget(module.up_proj, "_lora") or rawget(module.down_proj, "_lora") then
      adapter.remove(model)
      error(who .. ": attention.targets: expected layers outside of the feed-forward networks", 0)
    end
  end
  for _, module in ipairs(found) do put(module, o) end
  local record = adapter.of(who, model)
  record.kind, record.added = "MixLoRA", {
    parameters = function()
      local list = {}
      for _, module in ipairs(found) do
        for _, field in ipairs(fields) do list[#list + 1] = module[field] end
      end
      return list
    end,
    switch = function(off) for _, module in ipairs(found) do module._mixlora.off = off end end,
    remove = function() for _, module in ipairs(found) do wrapper:unwrap(module) end end,
  }
  ty.core.program.renew()
  return model
end

--- Puts a mixture of LoRA experts into every gated feed-forward network of a model, and plain LoRA on the layers of
-- attention; freezes all else. It changes nothing until it is trained. options:
--   rank (8, of each expert), alpha (rank: the experts count alpha / rank), experts (8), top_k (2: of each token)
--   router_std (0.02: of the router's first weights), dtype ("f32"), blocks (a Lua pattern that is looked for in the
--   names of the networks; all without it)
--   attention (options of peft.lora for the layers of attention: rank, alpha, targets ...; by default q_proj, k_proj,
--   v_proj and o_proj with the same rank and alpha)
-- peft.parameters, peft.disable and peft.remove work as ever. A mixture cannot be merged into the weights, nor written
-- as a file of PEFT. Returns the model.
---@param model LanguageModel
---@param options? table
---@return LanguageModel model
function M.attach(model, options) return nn.for_caller(attach, model, options) end

local function mixtures(who, model)
  local list = wrapper:wrapped(who, model)
  if #list == 0 then arguments.fail("%s: model: expected one of peft.mixlora.attach, got another", who) end
  return list
end

--- The loss of a batch { tokens, targets, cu_seqlens, longest }, and in training the mean over the networks of what
-- balance() says of their routers, `weight` times.
---@param model LanguageModel
---@param batch table
---@param options? {weight?: number}  0.01
---@return Tensor loss
function M.loss(model, batch, options)
  local who = "peft.mixlora.loss"
  arguments.expect(who, "batch", batch, "a table")
  local o = arguments.read(who, options, { weight = 0.01 }, { weight = "a finite number >= 0" })
  local list = mixtures(who, model)
  local loss = model:loss(batch.tokens, batch.targets, { cu_seqlens = batch.cu_seqlens, longest = batch.longest })
  if not model.training then return loss end
  local sum = 0
  for _, layer in ipairs(list) do
    local s = layer.module._mixlora
    sum, s.balance = sum + s.balance, nil
  end
  return loss + sum * (o.weight / #list)
end

--- How many choices fell on each expert while fn(...) ran: a list for each network, of numbers by expert.
---@param model LanguageModel
---@param fn function
---@return integer[][] counts
function M.load(model, fn, ...)
  local who = "peft.mixlora.load"
  local list = mixtures(who, model)
  arguments.expect(who, "fn", fn, "a function")
  for _, layer in ipairs(list) do
    local s = layer.module._mixlora
    s.counts = {}
    for e = 1, s.experts do s.counts[e] = 0 end
  end
  local ok, problem = pcall(fn, ...)
  local counts = {}
  for i, layer in ipairs(list) do
    counts[i], layer.module._mixlora.counts = layer.module._mixlora.counts, nil
  end
  if not ok then error(problem, 0) end
  return counts
end

return M
