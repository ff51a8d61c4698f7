--- Preferences between samples: direct preference optimization with a denoising error as the likelihood. Rafailov et
-- al. 2023, "Direct Preference Optimization"; Wallace et al. 2024, "Diffusion Model Alignment Using Direct Preference
-- Optimization", equation 14: -log sigmoid(-beta [(L_w - L_w^ref) - (L_l - L_l^ref)]), the same noise for all four.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

--- The loss of pairs from the errors of the model and of the reference on what is preferred and on what is rejected,
-- [n] each.
---@param winner Tensor
---@param winner_before Tensor
---@param loser Tensor
---@param loser_before Tensor
---@param beta number
---@return Tensor [n]
function M.of_errors(winner, winner_before, loser, loser_before, beta)
  local who = "preference.of_errors"
  for name, x in pairs { winner = winner, winner_before = winner_before, loser = loser, loser_before = loser_before } do
    expect(who, name, x, "a tensor")
  end
  expect(who, "beta", beta, "a finite number")
  return -(((winner - winner_before:detach()) - (loser - loser_before:detach())) * -beta):log_sigmoid()
end

--- The loss of direct preference optimization, for any model whose errors on samples are known:
-- errors(model, samples, condition) gives [n], and draws its noise (masks, times) from the generator, which is set to
-- the same seed for each of the four calls.
-- pair: winner, loser (samples) and condition. options: beta (500), seed (drawn).
---@param model Module
---@param reference Module    not trained
---@param errors fun(model: Module, samples: Tensor, condition: table): Tensor
---@param pair { winner: Tensor, loser: Tensor, condition: table }
---@param options? {beta?: number, seed?: integer}
---@return Tensor loss
---@return { accuracy: Tensor, margin: Tensor } parts  how often, and by how much, the model prefers as it should
function M.dpo(model, reference, errors, pair, options)
  local who = "preference.dpo"
  expect(who, "errors", errors, "a function")
  expect(who, "pair", pair, "a table")
  expect(who, "pair.winner", pair.winner, "a tensor")
  expect(who, "pair.loser", pair.loser, "a tensor")
  local o = arguments.read(who, options, { beta = 500, seed = arguments.none }, { beta = "a finite number > 0",
    seed = "an integer" })
  local seed = o.seed or ty.randint(0, 1 << 30, { 1 }):item()
  local function of(m, samples)
    return ty.data.with_seed(seed, function() return errors(m, samples, pair.condition or {}) end)
  end
  local winner, loser = of(model, pair.winner), of(model, pair.loser)
  local winner_before, loser_before = ty.no_grad(function()
    return of(reference, pair.winner), of(reference, pair.loser)
  end)
  local margin = ((loser - loser_before) - (winner - winner_before)):detach()
  return M.of_errors(winner, winner_before, loser, loser_before, o.beta):mean(),
    { accuracy = margin:gt(0):to(margin.dtype):mean(), margin = margin:mean() }
end

--- Pairs from samples of several draws for each condition, by scores of a judge: of the draws for a condition the best
-- and the worst, where they differ by more than `least` (0).
---@param samples Tensor  [draws, n, ...]
---@param scores Tensor   [draws, n]
---@param least? number
---@return Tensor winners  [m, ...]
---@return Tensor losers
---@return Tensor which    i64 [m]: the conditions they are of
function M.pairs(samples, scores, least)
  local who = "preference.pairs"
  expect(who, "samples", samples, "a tensor")
  expect(who, "scores", scores, "a tensor")
  expect(who, "least", least, "a finite number or nil")
  if scores.ndim ~= 2 or samples.shape[1] ~= scores.shape[1] or samples.shape[2] ~= scores.shape[2] then
    arguments.fail("%s: scores: expected [draws, n] of samples %s, got %s", who, arguments.describe(samples),
      arguments.describe(scores))
  end
  local best, worst = scores:argmax(0), scores:argmin(0)
  local n = scores.shape[2]
  local which = (scores:amax(0) - scores:amin(0)):gt(least or 0):nonzero():squeeze(1)
  local flat = samples:flatten(0, 1)
  local each = ty.arange(n, nil, 1, { device = scores.device })
  local function of(draw) return flat:index_select(0, (draw * n + each):index_select(0, which)) end
  return of(best), of(worst), which
end

return M
