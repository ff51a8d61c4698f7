--- The losses as modules: nn.CrossEntropyLoss { label_smoothing = 0.1 }. Options are those of the function; a weight is
-- moved and saved with the module.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"
local functional = require "tycho.nn.functional"
local losses = require "tycho.nn.losses"

local M = {}
local none = options.none
local reduction = '"mean" or "sum" or "none"'
local kinds = { reduction = reduction, weight = "a tensor", pos_weight = "a tensor", distance = "a function",
  ignore_index = "an integer", label_smoothing = "a number in [0, 1]", delta = "a finite number > 0",
  blank = "an integer" }

local function define(name, fn, defaults, own)
  local class = base.define(name)
  defaults.reduction = "mean"
  local all = setmetatable(own or {}, { __index = kinds })

  function class:init(given)
    local o = options.read(name, given, defaults, all)
    self.options = {}
    for key in pairs(defaults) do
      if ty.is_tensor(o[key]) then self:buffer(key, o[key]) else self.options[key] = o[key] end
    end
  end

  function class:forward(...)
    local o = {}
    for key in pairs(defaults) do o[key] = self.options[key] end
    for key in pairs(self._buffers) do o[key] = self[key] end
    local inputs = table.pack(...)
    inputs[inputs.n + 1] = o
    return fn(table.unpack(inputs, 1, inputs.n + 1))
  end

  function class:describe()
    local names, parts = {}, {}
    for key, value in pairs(self.options) do
      if value ~= defaults[key] then names[#names + 1] = key end
    end
    table.sort(names)
    for i, key in ipairs(names) do parts[i] = ("%s = %s"):format(key, tostring(self.options[key])) end
    return table.concat(parts, ", ")
  end

  M[name] = class
end

--- ty.cross_entropy of logits. options: weight, ignore_index (-100), label_smoothing (0), reduction.
define("CrossEntropyLoss", ty.cross_entropy, { weight = none, ignore_index = -100, label_smoothing = 0 })
--- ty.nll_loss of log-probabilities. options: weight, ignore_index (-100), reduction.
define("NLLLoss", ty.nll_loss, { weight = none, ignore_index = -100 })
--- Squares of differences. options: reduction.
define("MSELoss", ty.mse_loss, {})
--- Magnitudes of differences. options: reduction.
define("L1Loss", ty.l1_loss, {})
--- ty.huber_loss. options: delta (1), reduction.
define("HuberLoss", ty.huber_loss, { delta = 1 })
--- nn.smooth_l1_loss. options: beta (1), reduction.
define("SmoothL1Loss", functional.smooth_l1_loss, { beta = 1 }, { beta = "a finite number > 0" })
--- ty.kl_div of log-probabilities. options: log_target (false), reduction, which may be "batchmean".
define("KLDivLoss", ty.kl_div, { log_target = false }, { reduction = reduction .. ' or "batchmean"' })
--- ty.bce_with_logits. options: weight, pos_weight, reduction.
define("BCEWithLogitsLoss", ty.bce_with_logits, { weight = none, pos_weight = none })
--- nn.binary_cross_entropy of probabilities. options: weight, reduction.
define("BCELoss", losses.binary_cross_entropy, { weight = none })
--- nn.poisson_nll_loss. options: log_input (true), full (false), eps (1e-8), reduction.
define("PoissonNLLLoss", losses.poisson_nll_loss, { log_input = true, full = false, eps = 1e-8 })
--- nn.gaussian_nll_loss. options: full (false), eps (1e-6), reduction.
define("GaussianNLLLoss", losses.gaussian_nll_loss, { full = false, eps = 1e-6 })
--- nn.triplet_margin_loss. options: margin (1), p (2), eps (1e-6), swap (false), distance (a function), reduction.
define("TripletMarginLoss", losses.triplet_margin_loss,
  { margin = 1, p = 2, eps = 1e-6, swap = false, distance = none })
--- nn.cosine_embedding_loss. options: margin (0), reduction.
define("CosineEmbeddingLoss", losses.cosine_embedding_loss, { margin = 0 })
--- nn.margin_ranking_loss. options: margin (0), reduction.
define("MarginRankingLoss", losses.margin_ranking_loss, { margin = 0 })
--- nn.hinge_embedding_loss. options: margin (1), reduction.
define("HingeEmbeddingLoss", losses.hinge_embedding_loss, { margin = 1 })
--- nn.soft_margin_loss. options: reduction.
define("SoftMarginLoss", losses.soft_margin_loss, {})
--- nn.multi_margin_loss. options: p (1), margin (1), weight, reduction.
define("MultiMarginLoss", losses.multi_margin_loss, { p = 1, margin = 1, weight = none })
--- nn.multilabel_margin_loss. options: reduction.
define("MultiLabelMarginLoss", losses.multilabel_margin_loss, {})
--- nn.multilabel_soft_margin_loss. options: weight, reduction.
define("MultiLabelSoftMarginLoss", losses.multilabel_soft_margin_loss, { weight = none })
--- ty.ctc_loss of log-probabilities [t, n, classes]: loss(log_probs, targets, input_lengths, target_lengths).
-- options: blank (0), zero_infinity (false), reduction.
define("CTCLoss", ty.ctc_loss, { blank = 0, zero_infinity = false })
--- ty.rnnt_loss of logits [n, t, u + 1, classes]: loss(logits, targets, input_lengths, target_lengths). options: blank
-- (-1: the last class), reduction.
define("RNNTLoss", ty.rnnt_loss, { blank = -1 })
--- nn.focal_loss. options: alpha (0.25), gamma (2), reduction.
define("FocalLoss", losses.focal_loss, { alpha = 0.25, gamma = 2 })
--- nn.dice_loss. options: smooth (1), squared (false), reduction.
define("DiceLoss", losses.dice_loss, { smooth = 1, squared = false })

return M
