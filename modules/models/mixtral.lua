--- Mixtral: Mistral with a mixture of experts in place of the feed-forward network. Jiang et al. 2024, "Mixtral of
-- Experts"; the loss that keeps the experts busy is that of Fedus et al. 2022, "Switch Transformers".
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn

-- w2(activation(w1 x) * w3 x), by the names of the files.
local Expert = nn.module "Expert"

function Expert:init(hidden, inner, activation)
  self.w1, self.w2, self.w3 = layers.linear(hidden, inner), layers.linear(inner, hidden), layers.linear(hidden, inner)
  self.activation = activation
end

function Expert:forward(x) return self.w2(ty.glu(self.w3(x), self.w1(x), self.activation)) end

-- Each token goes to the `chosen` experts that its router prefers.
local Experts = nn.module "Experts"

function Experts:init(config)
  self.chosen, self.count = config.num_experts_per_tok, config.num_local_experts
  self.gate = layers.linear(config.hidden_size, self.count)
  self.experts = nn.ModuleList {}
  local activation = configs.activation("Mixtral", config.hidden_act, "hidden_act")
  for _ = 1, self.count do
    self.experts:append(Expert(config.hidden_size, config.intermediate_size, activation))
  end
end

--- Of rows [m, hidden] the chosen experts, i64 [m, chosen], their weights, whose sum is 1, and the shares of all
-- experts, f32 [m, count].
function Experts:route(x)
  local shares = self.gate(x):to("f32"):softmax(-1)
  local weights, experts = shares:topk(self.chosen)
  return weights / weights:sum(-1, true), experts, shares
end

--- What experts make of rows x [m, hidden], weighed and added up. kept (bool [m, chosen]): the pairs of a row and an
-- expert that are computed at all; nil: all of them. Returns also how many these are.
function Experts:mix(x, weights, experts, kept)
  -- The tokens in the order of their experts, each of which sees one block of rows. Pairs that are left out come last.
  local chosen = weights.shape[2]
  local keys = (kept and ty.where(kept, experts, self.count) or experts):flatten()
  local order = ty.no_grad(function() return keys:argsort() end)
  local counts = keys:one_hot(self.count + 1):sum(0):tolist()
  local total = keys.shape[1] - counts[self.count + 1]
  if total == 0 then return ty.zeros_like(x), 0 end
  order = order:narrow(0, 0, total)
  local rows = order:floor_div(chosen)
  local sorted, first, parts = x:index_select(0, rows), 0, {}
  for e, expert in ipairs(self.experts) do
    if counts[e] > 0 then
      parts[#parts + 1] = expert(sorted:narrow(0, first, counts[e]))
      first = first + counts[e]
    end
  end
  local y = ty.concat(parts, 0) * weights:flatten():index_select(0, order):unsqueeze(1):to(x.dtype)
  return ty.zeros_like(x):index_add(0, rows, y), total
end

function Experts:forward(x, at)
  local shape = x.shape
  x = x:flatten(0, 1)
  local weights, experts, shares = self:route(x)
  if at.record then table.insert(at.record, { shares = shares, experts = experts }) end
  return (self:mix(x, weights, experts)):reshape(shape)
end

local Mixtral = decoder.define {
  name = "Mixtral", model_type = "mixtral", architecture = "MixtralForCausalLM",
  fields = { sliding_window = { "count", configs.none }, num_local_experts = { "few" },
    num_experts_per_tok = { "count" }, output_router_logits = { "flag", false },
    router_aux_loss_coef = { "number", 0.001 }, router_jitter_noise = { "number", 0 } },
  check = function(config)
    if config.num_experts_per_tok > config.num_local_experts then
      error(("Mixtral: num_experts_per_tok %d is more than num_local_experts %d"):format(config.num_experts_per_tok,
        config.num_local_experts), 0)
    end
  end,
  layer = function(config)
    local attention = decoder.attention(config, { window = config.sliding_window })
    return layers.DecoderLayer(attention, config.rms_norm_eps, "block_sparse_moe",
      function() return Experts(config) end)
  end,
}

--- How unevenly tokens and probability are spread over the experts, 2 (the experts of a token) or more: from the
-- `record` that forward() filled. mask [n, t]: 0 for tokens that do not count.
function Mixtral:balance(record, mask)
  local counts, shares = 0, 0
  local weight = mask and mask:flatten():to("f32"):unsqueeze(1)
  for _, entry in ipairs(record) do
    local chosen = entry.experts:one_hot(self.config.num_local_experts):sum(1):to "f32"
    counts = counts + (weight and chosen * weight or chosen):sum(0)
    shares = shares + (weight and entry.shares * weight or entry.shares):sum(0)
  end
  local total = #record * (mask and weight:sum():item() or record[1].shares.shape[1])
  return (counts / total * (shares / total)):sum() * self.config.num_local_experts
end

--- As LanguageModel:loss(); where the config says output_router_logits, router_aux_loss_coef times balance() is added.
function Mixtral:loss(tokens, targets, options)
  local config = self.config
  if not config.output_router_logits then return Mixtral.super.loss(self, tokens, targets, options) end
  options = options or {}
  local t = tokens.shape[2]
  local record = {}
  local logits = self:forward(tokens, { mask = options.mask, record = record, cu_seqlens = options.cu_seqlens,
    longest = options.longest, checkpoint = options.checkpoint })
  if not targets then
    if options.cu_seqlens then error("loss: packed sequences need their targets", 2) end
    targets, logits = tokens:narrow(1, 1, t - 1), logits:narrow(1, 0, t - 1)
    if options.mask then
      targets = targets:masked_fill(options.mask:narrow(1, 1, t - 1):to("bool"):logical_not(), -100)
    end
  end
  local loss = nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
  return loss + self:balance(record, options.mask) * config.router_aux_loss_coef
end

return Mixtral
