--- Learning from which of two answers is better, without a model of reward. Rafailov et al. 2023, "Direct Preference
-- Optimization: Your Language Model is Secretly a Reward Model"; Azar et al. 2024, "A General Theoretical Paradigm to
-- Understand Learning from Human Preferences" (IPO). For language models, and for those that see: what the model's
-- forward() takes besides the tokens comes with each side of a pair.
--
--     local pairs = { { chosen = { tokens = ids, targets = answer }, rejected = { tokens = ids, targets = other } } }
--     llm.preference.fit(model, pairs, { steps = 100, beta = 0.1 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

--- The logarithm of the probability of each row's targets, f32 [n]: the sum over targets i64 [n, t] that are not -100,
-- of tokens i64 [n, t], whose logits at a place are for the target there. options: those of the model's forward(), such
-- as mask and pictures.
---@param model LanguageModel
---@param tokens Tensor
---@param targets Tensor
---@param options? table
---@return Tensor
function M.likelihoods(model, tokens, targets, options)
  local who = "llm.preference.likelihoods"
  expect(who, "model", model, "a module")
  expect(who, "tokens", tokens, "a tensor")
  expect(who, "targets", targets, "a tensor")
  if tokens.ndim ~= 2 or targets.ndim ~= 2 or targets.dtype ~= "i64" or tokens.shape[1] ~= targets.shape[1]
    or tokens.shape[2] ~= targets.shape[2] then
    arguments.fail("%s: expected tokens and targets i64 [n, t], got %s and %s", who, arguments.describe(tokens),
      arguments.describe(targets))
  end
  local logits = model(tokens, options)
  local counted = targets:ne(-100)
  local own = logits:to("f32"):log_softmax(-1):gather(-1, targets:masked_fill(counted:logical_not(), 0):unsqueeze(-1))
  return ty.where(counted, own:squeeze(-1), 0):sum { 1 }
end

--- The mean loss of pairs, by the log-likelihoods [n] of the chosen and the rejected answers under the model that
-- learns and under the reference. options: beta (0.1: how strongly the reference holds), kind ("sigmoid": DPO; "ipo":
-- squared, which does not push without end), smoothing (0: the share of pairs that are the wrong way round). Second the
-- share of pairs whose chosen answer the model prefers more than the reference does.
---@param chosen Tensor
---@param rejected Tensor
---@param reference_chosen Tensor
---@param reference_rejected Tensor
---@param options? { beta?: number, kind?: string, smoothing?: number }
---@return Tensor loss
---@return Tensor preferred
function M.loss(chosen, rejected, reference_chosen, reference_rejected, options)
  local who = "llm.preference.loss"
  local given = { chosen = chosen, rejected = rejected, reference_chosen = reference_chosen,
    reference_rejected = reference_rejected }
  for _, name in ipairs { "chosen", "rejected", "reference_chosen", "reference_rejected" } do
    local x = given[name]
    expect(who, name, x, "a tensor")
    if x.ndim ~= 1 or not x:is_floating_point() or x.shape[1] ~= chosen.shape[1] or x.shape[1] == 0 then
      arguments.fail("%s: %s: expected log-likelihoods [n] of as many pairs, got %s", who, name, arguments.describe(x))
    end
  end
  local o = arguments.read(who, options, { beta = 0.1, kind = "sigmoid", smoothing = 0 }, { beta = "a number > 0",
    kind = '"sigmoid" or "ipo"', smoothing = "a number in [0, 1)" })
  local margin = (chosen - reference_chosen) - (rejected - reference_rejected)
  local preferred = margin:detach():gt(0):to("f32"):mean()
  if o.kind == "ipo" then return (margin - 1 / (2 * o.beta)):square():mean(), preferred end
  local scaled = margin * o.beta
  local loss = -scaled:log_sigmoid() * (1 - o.smoothing) - (-scaled):log_sigmoid() * o.smoothing
  return loss:mean(), preferred
end

local function check_pairs(who, list)
  expect(who, "pairs", list, "a list of tables")
  if #list == 0 then arguments.fail("%s: pairs: expected at least one, got none", who) end
  for i, pair in ipairs(list) do
    for _, side in ipairs { "chosen", "rejected" } do
      local one = pair[side]
      if type(one) ~= "table" or not ty.is_tensor(one.tokens) or not ty.is_tensor(one.targets) then
        arguments.fail("%s: pairs: expected { chosen, rejected }, each { tokens, targets, options }, got %s as %s of "
          .. "number %d", who, arguments.describe(one), side, i)
      end
    end
  end
end

--- Tunes a model on pairs of batches, each { chosen, rejected } with { tokens i64 [n, t], targets i64 [n, t] (-100: not
-- counted), options (of the model's forward(), or nil) }. What the reference says is computed before the first step:
-- the reference is the model as it was. options: steps (100; pairs come in a new order each round), lr (1e-5), beta,
-- kind and smoothing (of loss()), parameters (those that learn, all by default), seed, watch(step, loss, preferred).
-- Returns the mean loss of the last tenth of the steps.
---@param model LanguageModel
---@param list table[]
---@param options? table
---@return number
function M.fit(model, list, options)
  local who = "llm.preference.fit"
  expect(who, "model", model, "a module")
  check_pairs(who, list)
  local o = arguments.read(who, options, { steps = 100, lr = 1e-5, beta = 0.1, kind = "sigmoid", smoothing = 0,
    parameters = arguments.none, seed = 0, watch = arguments.none }, { steps = "an integer >= 1", lr = "a number > 0",
    seed = "an integer", parameters = "a list of tensors", watch = "a function" })
  local rules = { beta = o.beta, kind = o.kind, smoothing = o.smoothing }
  local function likelihoods(one) return M.likelihoods(model, one.tokens, one.targets, one.options) end
  local training, reference = model.training, {}
  model:eval()
  for i, pair in ipairs(list) do
    reference[i] = {}
    for _, side in ipairs { "chosen", "rejected" } do
      reference[i][side] = ty.no_grad(ty.scope, function() return likelihoods(pair[side]) end)
    end
  end
  model:train(training)
  ty.manual_seed(o.seed)
  local next_of, preferred = ty.data.rounds(#list, 1), nil
  local opt = ty.optim.AdamW(o.parameters or model:parameters(), { lr = o.lr, weight_decay = 0, clip_norm = 1 })
  return ty.train.minimize(opt, o.steps, function()
    local k = next_of()[1] + 1
    local loss, share = M.loss(likelihoods(list[k].chosen), likelihoods(list[k].rejected), reference[k].chosen,
      reference[k].rejected, rules)
    preferred = share:item()
    return loss
  end, o.watch and function(step, value) o.watch(step, value, preferred) end)
end

return M
