--- Models with fewer weights, and products with fewer inputs: require "tycho.prune".
--
--     local prune = require "tycho.prune"
--     prune.magnitude(model, { sparsity = 0.5 })     -- masks, which stay through training
--     prune.sparsegpt(model, dataset, { pattern = "2:4" })     -- with calibration
--     prune.wanda(model, dataset, { sparsity = 0.5 })          -- likewise, in a pass
--     local parameters = prune.perp(model, { biases = true, norms = true, rank = 1 })
--     ...                                            -- train these
--     prune.merge(model)                             -- into the weights, whose zeros stay
--     prune.release(model)                           -- a plain model again
--
--     prune.wina(model, { sparsity = 0.5 })          -- decoding reads half of the weights
--
--     prune.modegpt(model, dataset, { ratio = 0.25 })          -- a smaller model, without training
--     prune.rocket(model, dataset, { keep = 0.7 })             -- layers as a dictionary and sparse coefficients
--     prune.gpusq.compress(vit, training, { bits = 8, images = pictures })      -- 2:4 and integers, with a teacher
--     prune.gpusq.deploy(vit)
--
--     local sparse = prune.moefy(model, { experts = 16, chosen = 8 })      -- a mixture of experts, to be trained on
--     prune.modes.apply(sparse); prune.modes.calibrate(sparse, logits, { share = 0.8 })   -- which skips most of them
--
--     model:save "small"; local again = prune.load "small"
--
-- Works on every module with Linear layers or GPT-2's Conv1D: the families of tycho.llm.
local experts = require "tycho.prune.experts"
local gpusq = require "tycho.prune.gpusq"
local masks = require "tycho.prune.masks"
local modegpt = require "tycho.prune.modegpt"
local modes = require "tycho.prune.modes"
local ofb = require "tycho.prune.ofb"
local perp = require "tycho.prune.perp"
local rocket = require "tycho.prune.rocket"
local shiftadd = require "tycho.prune.shiftadd"
local shrink = require "tycho.prune.shrink"
local slice = require "tycho.prune.slice"
local sparse = require "tycho.prune.sparse"
local sparsegpt = require "tycho.prune.sparsegpt"
local structured = require "tycho.prune.structured"
local two_four = require "tycho.prune.two_four"
local vit_gates = require "tycho.prune.vit_gates"
local wanda = require "tycho.prune.wanda"
local wina = require "tycho.prune.wina"

return require "tycho.lazy" ({
  magnitude = masks.magnitude,
  sparsegpt = sparsegpt.sparsegpt,
  wanda = wanda.wanda,
  zeros = masks.zeros,
  sparsity = masks.sparsity,
  release = masks.release,
  perp = perp.perp,
  merge = perp.merge,
  modes = modes,
  moefy = experts.moefy,
  moefy_groups = experts.groups,
  modegpt = modegpt.compress,
  modegpt_statistics = modegpt.statistics,
  rocket = rocket.compress,
  rocket_moments = rocket.moments,
  slice = slice.slice,
  structured = structured.structured,
  compact = sparse.compact,
  expand = sparse.expand,
  pack = sparse.pack,
  csl = sparse.csl,
  product = sparse.product,
  packed_bytes = sparse.bytes,
  save = sparse.save,
  unpack = sparse.unpack,
  load = shrink.load,
  gpusq = gpusq,
  ofb = ofb,
  shiftadd = shiftadd,
  vit_gates = vit_gates,
  two_four = two_four,
  wina = wina.apply,
  calibrate = wina.calibrate,
  output_errors = wina.output_errors,
  unwina = wina.remove,
}, {}, "tycho.prune")
